/* libFuzzer: a Hugging Face folder. Input: config.json, a zero byte, model.safetensors;
 * tokenizer.json is always the same. If the folder opens, every byte of it is read and the model
 * generates a few tokens. Seeds: tests/data/fuzz_folder, made from tests/data/models. */
#include "../llm.h"
#include "walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char folder[200];

static void write_file(const char *name, const void *data, size_t n) {
    char path[300];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f)) abort();
}

static void remove_folder(void) {
    static const char *const names[] = {"config.json", "model.safetensors", "tokenizer.json"};
    char path[300];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[i]);
        unlink(path);
    }
    rmdir(folder);
}

/* Create the folder, with a tokenizer.json of 96 tokens: newline, space, 93 printable ASCII
 * characters and an end token. */
static void make_folder(void) {
    char text[4000];
    const char *tmp = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/llm-fuzz-XXXXXX",
             tmp                        ? tmp
             : access("/dev/shm", W_OK) ? "/tmp"
                                        : "/dev/shm");
    if (!mkdtemp(folder)) abort();
    atexit(remove_folder);
    int n = snprintf(
        text, sizeof text,
        "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{\"\\u010a\":0,\"\\u0120\":1");
    for (int i = 0; i < 93; i++)
        n += snprintf(text + n, sizeof text - (size_t)n, ",\"\\u%04x\":%d", 33 + i, i + 2);
    n += snprintf(
        text + n, sizeof text - (size_t)n,
        "}},\"added_tokens\":[{\"id\":95,\"content\":\"<|end|>\",\"special\":true}],"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
        "\"use_regex\":true},\"decoder\":{\"type\":\"ByteLevel\"}}");
    write_file("tokenizer.json", text, (size_t)n);
}

static void check(const llm_model *model) {
    const llm_config *config = llm_model_config(model);
    walk(llm_model_file(model));
    if (config->n_heads <= 64 && config->dim <= 4096) say_words(model, 8, 2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const uint8_t *zero = (const uint8_t *)memchr(data, 0, size);
    llm_error err;
    if (!folder[0]) make_folder();
    if (!zero) return 0;
    write_file("config.json", data, (size_t)(zero - data));
    write_file("model.safetensors", zero + 1, size - (size_t)(zero + 1 - data));
    memset(&err, 0, sizeof err);
    llm_model *model = llm_model_load(folder, &err);
    if (!model && (err.status == LLM_OK || !err.message[0])) abort();
    if (model) check(model);
    llm_model_free(model);
    return 0;
}
