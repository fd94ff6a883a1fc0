/* batch.c - several requests at once: they share the steps of one engine, and each event
 * names its request.
 *     cc -O2 -fopenmp -I. docs/examples/batch.c -o batch -lm
 *     ./batch models/tales-q4_0.gguf "A king" "A fox" "A mill" */
#define LLM_IMPLEMENTATION
#include "llm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct answer {
    char text[4000];
    size_t length;
} answer;

int main(int argc, char **argv) {
    static const char *const some[] = {"There was a king who", "There was a fox who",
                                       "There was a mill that"};
    int n = argc > 2 ? argc - 2 : 3, status = 1;
    llm_error err;
    llm_event event;
    llm_model *model = llm_model_load(argc > 1 ? argv[1] : "models/tales-q4_0.gguf", &err);
    llm_engine *engine = model ? llm_engine_create(model, NULL, &err) : NULL;
    answer *answers = calloc((size_t)n, sizeof *answers);
    bool good = engine && answers;
    for (int i = 0; good && i < n; i++) {
        llm_request request = llm_request_defaults();
        request.max_tokens = 20 + 10 * (i % 3); /* they end at different times */
        request.user = &answers[i];
        good = llm_submit_text(engine, argc > 2 ? argv[2 + i] : some[i], &request, NULL, &err);
    }
    while (good && (status = llm_step(engine, &err)) > 0)
        while (llm_next_event(engine, &event)) {
            answer *a = event.user;
            size_t room = sizeof a->text - a->length,
                   length = event.text_length < room ? event.text_length : room;
            memcpy(a->text + a->length, event.text, length);
            a->length += length;
        }
    for (int i = 0; good && i < n; i++)
        printf("[%d] %s%.*s\n", i + 1, argc > 2 ? argv[2 + i] : some[i],
               (int)answers[i].length, answers[i].text);
    if (good) {
        llm_statistics s = llm_engine_statistics(engine);
        printf("%llu tokens in %llu steps\n", (unsigned long long)s.generated_tokens,
               (unsigned long long)s.steps);
    }
    if (err.status != LLM_OK) fprintf(stderr, "%s\n", err.message);
    free(answers);
    llm_engine_free(engine);
    llm_model_free(model);
    return good && status == 0 ? 0 : 1;
}
