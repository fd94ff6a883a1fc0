/* libFuzzer: any bytes as a GGUF file. Whatever opens is read through to its last byte; if it holds a tokenizer it
 * tokenizes; if it is a whole model it says a few words. Seeds: tests/data/fuzz_file, made by make_seeds.c. */
#define LLM_IMPLEMENTATION
#include "../llm.h"

static volatile uint64_t sink;

static void read_all(const void *data, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) sink += ((const uint8_t *)data)[i];
}

static void walk(const llm_file *file) {
    for (int64_t i = 0; i < llm_file_n_values(file); i++) {
        const llm_value *value = llm_file_value(file, i);
        read_all(value->key.data, value->key.length);
        read_all(value->data, value->bytes);
        for (uint64_t k = 0; k < value->count && k < 64; k++) {
            uint64_t u;
            int64_t s;
            double d;
            bool flag;
            if (llm_value_u64(value, k, &u)) sink += u;
            if (llm_value_i64(value, k, &s)) sink += (uint64_t)s;
            if (llm_value_f64(value, k, &d)) sink += d > 0;
            if (llm_value_bool(value, k, &flag)) sink += flag;
        }
        size_t cursor = 0;
        llm_string s;
        uint64_t n = 0;
        for (; llm_value_string(value, &cursor, &s); n++) read_all(s.data, s.length);
        if (value->element_type == LLM_VALUE_STRING && (n != value->count || cursor != value->bytes)) abort();
    }
    for (int64_t i = 0; i < llm_file_n_tensors(file); i++) {
        const llm_tensor *tensor = llm_file_tensor(file, i);
        read_all(tensor->name.data, tensor->name.length);
        read_all(tensor->data, tensor->bytes);
    }
}

static void speak(const llm_tokenizer *t) {
    static const char text[] = "Once </s> ab aaaa\xE6\x97\xA5\xFF 12<tool>";
    int32_t ids[100];
    llm_error err;
    int64_t n = llm_tokenize(t, text, sizeof text - 1, LLM_TOKENIZE_BOS | LLM_TOKENIZE_SPECIAL, ids, 100, &err);
    char *out = (char *)malloc(llm_stream_capacity(t));
    llm_stream stream;
    memset(&stream, 0, sizeof stream);
    for (int64_t i = 0; i <= n && i < 100; i++) read_all(out, llm_stream_decode(t, &stream, i < n ? ids[i] : -1, out));
    free(out);
}

static void run(const llm_model *model) {
    llm_engine_options options = llm_engine_defaults();
    options.n_threads = 1;
    options.context_length = 16;
    options.max_sequences = 1;
    options.max_batch_tokens = 4;
    llm_error err;
    llm_engine *engine = llm_engine_create(model, &options, &err);
    llm_request request = llm_request_defaults();
    llm_event event;
    int32_t prompt[3] = {0, 1, 0};
    request.prompt = prompt;
    request.n_prompt = 3;
    request.max_tokens = 4;
    request.ignore_end = true;
    if (engine && llm_submit(engine, &request, NULL, &err))
        while (llm_step(engine, &err) > 0)
            while (llm_next_event(engine, &event)) read_all(event.text, event.text_length);
    llm_engine_free(engine);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    llm_error err;
    llm_file *file = llm_file_from_memory(data, size, "fuzz", &err);
    if (!file && (err.status == LLM_OK || !err.message[0])) abort();
    if (!file) return 0;
    walk(file);
    llm_tokenizer *t = llm_tokenizer_create(file, &err);
    if (!t && (err.status == LLM_OK || !err.message[0])) abort();
    if (t) speak(t);
    llm_tokenizer_free(t);
    llm_file_close(file);
    llm_model *model = llm_model_from_memory(data, size, "fuzz", &err);
    if (!model && (err.status == LLM_OK || !err.message[0])) abort();
    if (model) run(model);
    llm_model_free(model);
    return 0;
}
