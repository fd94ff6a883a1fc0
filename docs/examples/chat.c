/* chat.c - turn by turn: each line of standard input is added to the text so far, and answered.
 *     cc -O2 -fopenmp -I. docs/examples/chat.c -o chat -lm
 *     echo "There was a fox" | ./chat models/tales-q4_0.gguf
 * The whole conversation is submitted again each time; the prefix cache finds the blocks of the
 * earlier turns, so only new tokens are computed. (Models trained to converse need their own marks
 * around each turn: llm chat writes these.) */
#define LLM_IMPLEMENTATION
#include "llm.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct text {
    char *data;
    size_t length;
} text;

static bool append(text *t, const char *data, size_t n) {
    char *grown = realloc(t->data, t->length + n + 1);
    if (!grown) return false;
    memcpy(grown + t->length, data, n);
    t->data = grown;
    t->data[t->length += n] = 0;
    return true;
}

/* Continue the text to the end of a paragraph, and append this answer to the text. */
static bool answer(llm_engine *engine, text *t, llm_error *err) {
    static const char *const stop[] = {"\n\n"};
    llm_event event;
    llm_request request = llm_request_defaults();
    request.max_tokens = 60;
    request.stop = stop;
    request.n_stop = 1;
    request.sampling.temperature = 0.8f;
    int status = llm_submit_text(engine, t->data, &request, NULL, err) ? 1 : -1;
    while (status > 0 && (status = llm_step(engine, err)) > 0)
        while (llm_next_event(engine, &event)) {
            fwrite(event.text, 1, event.text_length, stdout);
            if (!append(t, event.text, event.text_length)) status = -1;
        }
    return status == 0;
}

int main(int argc, char **argv) {
    llm_error err;
    char line[1000];
    text t = {0};
    llm_model *model = llm_model_load(argc > 1 ? argv[1] : "models/tales-q4_0.gguf", &err);
    llm_engine *engine = model ? llm_engine_create(model, NULL, &err) : NULL;
    bool good = engine != NULL;
    while (good && fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        good = append(&t, line, strlen(line)) && answer(engine, &t, &err) && append(&t, "\n\n", 2);
        printf("\n");
        if (good) fprintf(stderr, "[%llu prompt tokens so far were found in the cache]\n",
                          (unsigned long long)llm_engine_statistics(engine).prefix_hits);
    }
    if (err.status != LLM_OK) fprintf(stderr, "%s\n", err.message);
    free(t.data);
    llm_engine_free(engine);
    llm_model_free(model);
    return good ? 0 : 1;
}
