/* info.h - what a model file holds, as text and as JSON, for llm info */
#ifndef INFO_H
#define INFO_H
#include "../docs/program.h"

typedef struct info {
    const char *model;
    bool tensors, json;
    bool check;   /* check the weights instead */
    bool program; /* show the program instead */
    program_view view;
    llm_engine_options engine;
    uint64_t memory; /* bytes of memory in which to say what fits */
    int context;
    llm_type cache_type;
    llm_file *file;
    llm_model *loaded; /* NULL: the engine cannot run it */
    llm_error why;     /* ... because of this */
} info;

void info_print(const info *in);
void info_print_json(const info *in);
/* Read all weights. Returns the exit status: FAILED if a value is not finite, or if the engine
 * cannot run the model. */
int info_check(const info *in);
#endif
