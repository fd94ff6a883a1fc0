/* embed.c - the smallest program: continues a text, and prints it as it is generated.
 *     cc -O2 -fopenmp -I. docs/examples/embed.c -o embed -lm
 *     ./embed models/tales-q4_0.gguf "Once upon a time" */
#define LLM_IMPLEMENTATION
#include "llm.h"
#include <stdio.h>

int main(int argc, char **argv) {
    llm_error err;
    llm_event event;
    llm_model *model = llm_model_load(argc > 1 ? argv[1] : "models/tales-q4_0.gguf", &err);
    llm_engine *engine = model ? llm_engine_create(model, NULL, &err) : NULL;
    llm_request request = llm_request_defaults();
    request.max_tokens = 50;
    const char *prompt = argc > 2 ? argv[2] : "Once upon a time";
    if (engine && llm_submit_text(engine, prompt, &request, NULL, &err))
        while (llm_step(engine, &err) > 0)
            while (llm_next_event(engine, &event)) fwrite(event.text, 1, event.text_length, stdout);
    if (err.status != LLM_OK) fprintf(stderr, "%s\n", err.message);
    llm_engine_free(engine);
    llm_model_free(model);
    return err.status != LLM_OK;
}
