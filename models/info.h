/* info.h - the contents of a model file as text and as JSON, for llm info */
#ifndef INFO_H
#define INFO_H
#include "../docs/program.h"

typedef struct info {
    const char *model;
    bool tensors, json;
    bool check;   /* --check: check the weights instead */
    bool program; /* --program: show the program instead */
    program_view view;
    llm_engine_options engine;
    uint64_t memory; /* bytes of memory; the output says what fits into them */
    int context;
    llm_type cache_type;
    llm_file *file;
    llm_model *loaded; /* NULL: the engine cannot run it */
    llm_error why;     /* why `loaded` is NULL */
} info;

void info_print(const info *in);
void info_print_json(const info *in);
/* Read all weights. Returns the exit status: FAILED if a value is not finite, or if the engine
 * cannot run the model. */
int info_check(const info *in);
#endif
