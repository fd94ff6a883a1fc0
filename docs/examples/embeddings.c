/* embeddings.c - how alike are texts? Each becomes a vector, the mean of the model's hidden states,
 * and two vectors are alike if the cosine of their angle is near 1. All texts share the same steps.
 *     cc -O2 -fopenmp -I. docs/examples/embeddings.c -o embeddings -lm
 *     ./embeddings models/tales-q4_0.gguf "The dog ran" "The dog was running" "A king" */
#define LLM_IMPLEMENTATION
#include "llm.h"
#include <stdio.h>
#include <stdlib.h>

static float cosine(const float *a, const float *b, int n) {
    float ab = 0, aa = 0, bb = 0;
    for (int i = 0; i < n; i++) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
    return ab / sqrtf(aa * bb);
}

int main(int argc, char **argv) {
    static const char *const some[] = {"The little dog ran home.", "A small dog was running home.",
                                       "The king counted his gold."};
    llm_error err;
    llm_event event;
    llm_model *model = llm_model_load(argc > 1 ? argv[1] : "models/tales-q4_0.gguf", &err);
    llm_engine *engine = model ? llm_engine_create(model, NULL, &err) : NULL;
    int n = argc > 2 ? argc - 2 : 3, dim = model ? llm_model_config(model)->dim : 0;
    float *vectors = (float *)calloc((size_t)n * (size_t)dim + 1, sizeof *vectors);
    bool good = engine && vectors;
    for (int i = 0; good && i < n; i++) {
        llm_request request = llm_request_defaults();
        request.embedding = true;
        request.user = vectors + i * dim;
        good = llm_submit_text(engine, argc > 2 ? argv[2 + i] : some[i], &request, NULL, &err);
    }
    while (good && llm_step(engine, &err) > 0)
        while (llm_next_event(engine, &event)) {
            good = good && event.mean_hidden;
            if (event.mean_hidden)
                memcpy(event.user, event.mean_hidden, (size_t)dim * sizeof *vectors);
        }
    for (int i = 0; good && i < n; i++) {
        for (int j = 0; j < n; j++)
            printf("%6.3f", (double)cosine(vectors + i * dim, vectors + j * dim, dim));
        printf("  %s\n", argc > 2 ? argv[2 + i] : some[i]);
    }
    if (err.status != LLM_OK) fprintf(stderr, "%s\n", err.message);
    free(vectors);
    llm_engine_free(engine);
    llm_model_free(model);
    return good && err.status == LLM_OK ? 0 : 1;
}
