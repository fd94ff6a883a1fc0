/* The helper of compare_splits.py. "rules": print the rules of llm.h, one per line: the names, then
 * the steps, with tabs between them. "split STEP...": for each text on standard input (its length
 * in 4 bytes, then the text), write the number of words and the length of each, in 4 bytes. */
#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "../llm.h"

enum { LONGEST = 240 };

/* A tokenizer whose every word of up to LONGEST bytes becomes one token: its length minus one. */
static llm_tokenizer *lengths_of(bytes *steps, uint64_t n_steps, bytes *file) {
    vocabulary v;
    gguf g;
    llm_error err;
    char text[LONGEST + 1], pair[LONGEST + 2];
    memset(&v, 0, sizeof v);
    memset(&g, 0, sizeof g);
    memset(text, 'a', sizeof text);
    for (int n = 1; n <= LONGEST; n++) {
        text[n] = 0;
        add_token(&v, text, 0, 1);
        text[n] = 'a';
        for (int k = 1; k < n; k++) {
            memset(pair, 'a', sizeof pair);
            pair[k] = ' ';
            pair[n + 1] = 0;
            add_merge(&v, pair);
        }
    }
    gguf_vocabulary(&g, &v, "gpt2");
    gguf_array(&g, "tokenizer.llm.steps", T_STRING, n_steps, steps->data, steps->length);
    *file = gguf_finish(&g);
    llm_tokenizer *t = llm_tokenizer_create(
        llm_file_from_memory(file->data, file->length, "compare", &err), &err);
    if (!t) fprintf(stderr, "%s\n", err.message), exit(1);
    for (int b = 0; b < 256; b++) t->bytes[b] = 0;
    return t;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "rules")) {
        for (size_t i = 0; i < sizeof llm__rules / sizeof *llm__rules; i++) {
            printf("%s", llm__rules[i].names);
            for (int k = 0; k < 6 && llm__rules[i].steps[k]; k++)
                printf("\t%s", llm__rules[i].steps[k]);
            printf("\n");
        }
        return 0;
    }
    static char text[1 << 20];
    static int32_t ids[1 << 20];
    bytes steps = {0}, file;
    uint32_t n;
    llm_error err;
    for (int i = 2; i < argc; i++) put_string(&steps, argv[i]);
    llm_tokenizer *t = lengths_of(&steps, (uint64_t)(argc - 2), &file);
    while (fread(&n, 4, 1, stdin) == 1 && n <= sizeof text && fread(text, 1, n, stdin) == n) {
        int64_t count = llm_tokenize(t, text, n, 0, ids, 1 << 20, &err);
        uint32_t words = (uint32_t)count;
        if (count < 0) fprintf(stderr, "%s\n", err.message);
        fwrite(&words, 4, 1, stdout);
        for (int64_t i = 0; i < count; i++) ids[i]++;
        if (count > 0) fwrite(ids, 4, (size_t)count, stdout);
    }
    return 0;
}
