/* For tests and fuzzers: read every byte of an opened file, for the sanitizers to check, and
 * generate a few tokens. Include it after llm.h. */
#ifndef WALK_H
#define WALK_H

#include <stdlib.h>

static volatile uint64_t sink; /* keeps the compiler from removing the reads */

static void read_all(const void *data, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) sink += ((const uint8_t *)data)[i];
}

static void walk_value(const llm_value *value) {
    bool strings = value->element_type == LLM_VALUE_STRING;
    read_all(value->key.data, value->key.length);
    read_all(value->data, value->bytes);
    for (uint64_t k = 0; k < value->count && k < 100; k++) {
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
    if (n != (strings ? value->count : 0) || cursor != (strings ? value->bytes : 0)) abort();
}

static void walk(const llm_file *file) {
    for (int64_t i = 0; i < llm_file_n_values(file); i++) walk_value(llm_file_value(file, i));
    for (int64_t i = 0; i < llm_file_n_tensors(file); i++) {
        const llm_tensor *tensor = llm_file_tensor(file, i);
        read_all(tensor->name.data, tensor->name.length);
        uint64_t rows = tensor->dims[1] * tensor->dims[2] * tensor->dims[3];
        uint8_t *row = (uint8_t *)malloc(tensor->bytes / rows);
        if (!row || (tensor->data != NULL) == (tensor->int4 != NULL)) abort();
        if (tensor->data) read_all(tensor->data, tensor->bytes);
        /* one row at a time, through the unpacking of int4 words */
        for (uint64_t k = 0; tensor->int4 && k < rows; k++) {
            if (!llm_tensor_rows(tensor, k, 1, row, NULL)) abort();
            read_all(row, tensor->bytes / rows);
        }
        free(row);
        for (uint64_t k = 0; tensor->columns && k < tensor->dims[0]; k++)
            if (tensor->columns[k] < 0 || (uint64_t)tensor->columns[k] >= tensor->dims[0]) abort();
    }
    if (llm_file_value(file, -1) || llm_file_value(file, llm_file_n_values(file)) ||
        llm_file_tensor(file, llm_file_n_tensors(file)))
        abort();
}

/* Generate a few tokens. The engine may also refuse the model. */
static inline void say_words(const llm_model *model, int context, int tokens) {
    llm_engine_options options = llm_engine_defaults();
    options.n_threads = 1;
    options.context_length = context;
    options.max_sequences = 1;
    options.max_batch_tokens = 4;
    llm_error err;
    llm_engine *engine = llm_engine_create(model, &options, &err);
    llm_request request = llm_request_defaults();
    llm_event event;
    int32_t prompt[3] = {0, 1, 0};
    request.prompt = prompt;
    request.n_prompt = 3;
    request.max_tokens = tokens;
    request.ignore_end = true;
    if (engine && llm_submit(engine, &request, NULL, &err))
        while (llm_step(engine, &err) > 0)
            while (llm_next_event(engine, &event)) read_all(event.text, event.text_length);
    llm_engine_free(engine);
}

#endif
