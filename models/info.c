/* info.c - the contents of a model file as text and as JSON, for llm info */
#include "info.h"

static const char *value_type_name(llm_value_type type) {
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    return (unsigned)type < (unsigned)COUNT(names) ? names[type] : "?";
}

static void put_element(const llm_value *v, uint64_t index, size_t *cursor) {
    llm_value_type type = v->type == LLM_VALUE_ARRAY ? v->element_type : v->type;
    llm_string s = {"", 0};
    double x = 0;
    int64_t i = 0;
    uint64_t u = 0;
    bool b = false;
    if (type == LLM_VALUE_STRING) {
        llm_value_string(v, cursor, &s);
        put_json(s.data, s.length);
    } else if (type == LLM_VALUE_BOOL) {
        llm_value_bool(v, index, &b);
        put_text(b ? "true" : "false");
    } else if (llm_value_u64(v, index, &u) && type != LLM_VALUE_F32 && type != LLM_VALUE_F64) {
        put("%llu", (unsigned long long)u);
    } else if (llm_value_i64(v, index, &i) && type != LLM_VALUE_F32 && type != LLM_VALUE_F64) {
        put("%lld", (long long)i);
    } else {
        llm_value_f64(v, index, &x);
        put_number(x);
    }
}

/* Print the first elements of a value as a JSON array without its brackets. */
static void put_elements(const llm_value *v, uint64_t count) {
    size_t cursor = 0;
    for (uint64_t i = 0; i < count && i < v->count; i++) {
        if (i) put_text(", ");
        put_element(v, i, &cursor);
    }
}

/* Number of tokens whose keys and values fit into in->memory beside the weights. */
static uint64_t cache_tokens(const info *in) {
    uint64_t weights = sum_type(in->file, NULL).bytes;
    if (in->memory <= weights) return 0;
    return (in->memory - weights) / llm_model_cache_bytes_per_token(in->loaded, in->cache_type);
}

static void info_print_shape(const info *in) {
    const llm_config *c = llm_model_config(in->loaded);
    uint64_t token = llm_model_cache_bytes_per_token(in->loaded, in->cache_type),
             fits = cache_tokens(in);
    put("\nShape\n");
    put("  %d layers of width %d, feed-forward %d\n", c->n_layers, c->dim, c->hidden_dim);
    if (c->n_experts)
        put("  %d experts of width %d, %d per token\n", c->n_experts, c->expert_dim,
            c->n_experts_used);
    if (c->shared_dim) put("  and one of width %d for every token\n", c->shared_dim);
    put("  %d query heads and %d key/value heads of %d; ", c->n_heads, c->n_kv_heads, c->head_dim);
    put("RoPE on %d, base %g, %s\n", c->rope_dim, (double)c->rope_base,
        c->rope_pairing == LLM_ROPE_HALVES ? "in halves" : "in adjacent pairs");
    if (c->rope_scaling != LLM_ROPE_UNSCALED)
        put("  RoPE scaled %g times, %s\n", (double)c->rope_factor,
            c->rope_scaling == LLM_ROPE_YARN ? "YaRN" : "linear");
    if (llm_file_find_tensor(in->file, "rope_freqs.weight"))
        put("  RoPE with divisors of its own (rope_freqs.weight)\n");
    if (c->window) put("  a sliding window of %d tokens\n", c->window);
    put("  vocabulary %d, context %d, ", c->vocab_size, c->context_length);
    put("%s output matrix\n", c->tied_output ? "tied" : "separate");
    if (*llm_model_context_note(in->loaded))
        put("  context: %s\n", llm_model_context_note(in->loaded));
    put("\nCache of keys and values, %s\n", llm_type_find(in->cache_type)->name);
    put("  a token                %s\n", HUMAN(token));
    put("  a sequence of %-8d %s\n", in->context, HUMAN(token * (uint64_t)in->context));
    put("\nIn %s of memory\n", HUMAN(in->memory));
    if (fits == 0) put("  the weights do not fit, or leave no room for the cache\n");
    else
        put("  beside the weights, %llu tokens of cache fit: %llu whole sequences of %d\n",
            (unsigned long long)fits, (unsigned long long)(fits / (uint64_t)in->context),
            in->context);
    put("\nA decode step reads %s of weights, and all of its sequences' cache\n",
        HUMAN(llm_model_step_bytes(in->loaded)));
}

static void put_name(llm_string name) {
    put_text("  ");
    put_foreign(name.data, name.length);
    put("%*s", name.length < 40 ? 41 - (int)name.length : 1, "");
}

void info_print(const info *in) {
    put_text(llm_file_path(in->file));
    if (llm_file_version(in->file)) put("\nGGUF version %d", llm_file_version(in->file));
    else put_text("\nHugging Face, as GGUF would have it");
    put(", %s, %lld tensors", HUMAN(llm_file_size(in->file)),
        (long long)llm_file_n_tensors(in->file));
    if (llm_file_n_parts(in->file) > 1)
        put(", in %lld files", (long long)llm_file_n_parts(in->file));
    put_text("\n\nMetadata\n");
    for (int64_t i = 0; i < llm_file_n_values(in->file); i++) {
        const llm_value *v = llm_file_value(in->file, i);
        bool array = v->type == LLM_VALUE_ARRAY;
        put_name(v->key);
        if (array)
            put("%llu x %s: ", (unsigned long long)v->count, value_type_name(v->element_type));
        put_elements(v, array ? 4 : 1);
        put_text(array && v->count > 4 ? ", ...\n" : "\n");
    }
    put("\nWeights\n");
    for (int i = 0; llm_type_at(i); i++) {
        type_sum sum = sum_type(in->file, llm_type_at(i));
        if (sum.tensors) put_type_sum(llm_type_at(i)->name, sum);
    }
    type_sum int4 =
        sum_type(in->file, llm_type_find(LLM_Q4_Z)); /* AWQ and GPTQ weights with zero points */
    if (int4.tensors) put_type_sum(llm_type_find(LLM_Q4_Z)->name, int4);
    put_type_sum("all", sum_type(in->file, NULL));
    for (int64_t i = 0; in->tensors && i < llm_file_n_tensors(in->file); i++) {
        const llm_tensor *t = llm_file_tensor(in->file, i);
        if (i == 0) put_text("\nTensors\n");
        put_name(t->name);
        put("%-5s", llm_type_find(t->type) ? llm_type_find(t->type)->name : "?");
        for (int d = 0; d < t->n_dims; d++)
            put(d ? " x %llu" : " %llu", (unsigned long long)t->dims[d]);
        put(", %s, %.4g bits each\n", HUMAN(t->bytes), bits_per_value(t->bytes, tensor_values(t)));
    }
    if (in->loaded) info_print_shape(in);
    else put("\nThis engine cannot run it: %s\n", in->why.message);
}

static void info_print_json_model(const info *in) {
    const llm_config *c = llm_model_config(in->loaded);
    uint64_t token = llm_model_cache_bytes_per_token(in->loaded, in->cache_type),
             fits = cache_tokens(in);
    const struct { const char *name; int value; } shape[] = {
        {"vocab_size", c->vocab_size}, {"context_length", c->context_length},
        {"layers", c->n_layers}, {"dim", c->dim}, {"hidden_dim", c->hidden_dim},
        {"experts", c->n_experts}, {"experts_used", c->n_experts_used},
        {"expert_dim", c->expert_dim}, {"shared_dim", c->shared_dim},
        {"heads", c->n_heads}, {"kv_heads", c->n_kv_heads}, {"head_dim", c->head_dim},
        {"rope_dim", c->rope_dim}};
    put(",\n \"shape\": {\"architecture\": ");
    put_json_text(c->architecture);
    for (int i = 0; i < COUNT(shape); i++) put(", \"%s\": %d", shape[i].name, shape[i].value);
    put_text(", \"rope_base\": ");
    put_number(c->rope_base);
    put(", \"tied_output\": %s", c->tied_output ? "true" : "false");
    if (*llm_model_context_note(in->loaded)) {
        put_text(", \"context_note\": ");
        put_json_text(llm_model_context_note(in->loaded));
    }
    put_text("}");
    put(",\n \"step_bytes\": %llu", (unsigned long long)llm_model_step_bytes(in->loaded));
    put(",\n \"cache\": {\"type\": \"%s\", \"bytes_per_token\": %llu, \"context\": %d, "
        "\"bytes_per_sequence\": %llu}",
        llm_type_find(in->cache_type)->name, (unsigned long long)token, in->context,
        (unsigned long long)(token * (uint64_t)in->context));
    put(",\n \"fits\": {\"memory\": %llu, \"tokens\": %llu, \"sequences\": %llu}",
        (unsigned long long)in->memory, (unsigned long long)fits,
        (unsigned long long)(fits / (uint64_t)in->context));
}

void info_print_json(const info *in) {
    put_text("{\"path\": ");
    put_json_text(llm_file_path(in->file));
    put(", \"version\": %d, \"parts\": %lld, \"bytes\": %llu,\n \"metadata\": {",
        llm_file_version(in->file), (long long)llm_file_n_parts(in->file),
        (unsigned long long)llm_file_size(in->file));
    for (int64_t i = 0; i < llm_file_n_values(in->file); i++) {
        const llm_value *v = llm_file_value(in->file, i);
        put_text(i ? ",\n  " : "\n  ");
        put_json(v->key.data, v->key.length);
        put_text(": ");
        bool array = v->type == LLM_VALUE_ARRAY, whole = v->count <= 64;
        if (array && !whole)
            put("{\"count\": %llu, \"type\": \"%s\", \"first\": ", (unsigned long long)v->count,
                value_type_name(v->element_type));
        if (array) put_text("[");
        put_elements(v, array && !whole ? 4 : v->count);
        if (array) put_text(whole ? "]" : "]}");
    }
    put_text("},\n \"weights\": {");
    type_sum all = sum_type(in->file, NULL);
    for (int i = 0; llm_type_at(i); i++) {
        type_sum sum = sum_type(in->file, llm_type_at(i));
        if (sum.tensors)
            put("\"%s\": {\"tensors\": %llu, \"values\": %llu, \"bytes\": %llu}, ",
                llm_type_at(i)->name, (unsigned long long)sum.tensors,
                (unsigned long long)sum.values, (unsigned long long)sum.bytes);
    }
    put("\"all\": {\"tensors\": %llu, \"values\": %llu, \"bytes\": %llu}}",
        (unsigned long long)all.tensors, (unsigned long long)all.values,
        (unsigned long long)all.bytes);
    if (in->tensors) put_text(",\n \"tensors\": [");
    for (int64_t i = 0; in->tensors && i < llm_file_n_tensors(in->file); i++) {
        const llm_tensor *t = llm_file_tensor(in->file, i);
        put_text(i ? ",\n  {\"name\": " : "\n  {\"name\": ");
        put_json(t->name.data, t->name.length);
        put(", \"type\": \"%s\", \"dims\": [",
            llm_type_find(t->type) ? llm_type_find(t->type)->name : "?");
        for (int d = 0; d < t->n_dims; d++)
            put(d ? ", %llu" : "%llu", (unsigned long long)t->dims[d]);
        put("], \"bytes\": %llu, \"bits\": %.6g}", (unsigned long long)t->bytes,
            bits_per_value(t->bytes, tensor_values(t)));
    }
    if (in->tensors) put_text("]");
    put(",\n \"runs\": %s", in->loaded ? "true" : "false");
    if (in->loaded) info_print_json_model(in);
    else put_text(",\n \"why\": "), put_json_text(in->why.message);
    put_text("}\n");
}

/* Print what is wrong with a tensor, as a line of text or as a JSON object. */
static void put_faults(const info *in, const llm_tensor *t, const llm_faults *faults, bool first) {
    uint64_t values = tensor_values(t);
    bool scale = llm_type_find(t->type)->block_values > 1;
    if (in->json) {
        put_text(first ? "\n  {\"tensor\": " : ",\n  {\"tensor\": ");
        put_json(t->source.data, t->source.length);
        put(", \"count\": %llu, \"values\": %llu, \"first\": %llu}",
            (unsigned long long)faults->count, (unsigned long long)values,
            (unsigned long long)faults->first);
    } else {
        put_foreign(t->source.data, t->source.length);
        put(": %llu of %llu values are not finite%s, the first is %g at index %llu (row %llu)\n",
            (unsigned long long)faults->count, (unsigned long long)values,
            scale ? ", by a scale that is not" : "", (double)faults->value,
            (unsigned long long)faults->first, (unsigned long long)(faults->first / t->dims[0]));
    }
}

int info_check(const info *in) {
    type_sum all = sum_type(in->file, NULL);
    int64_t n = llm_file_n_tensors(in->file), bad = 0, i = 0;
    char what[] = "check";
    uint64_t done = 0;
    llm_error err = {.status = LLM_OK};
    if (in->json) {
        put_text("{\"path\": ");
        put_json_text(llm_file_path(in->file));
        put(", \"tensors\": %lld, \"bytes\": %llu, \"runs\": %s,\n \"faults\": [", (long long)n,
            (unsigned long long)all.bytes, in->loaded ? "true" : "false");
    }
    for (; i < n && !stop_requested && err.status == LLM_OK; i++) {
        const llm_tensor *t = llm_file_tensor(in->file, i);
        llm_faults faults;
        show_progress(what, (double)done / (double)all.bytes, "");
        if (llm_tensor_check(t, &faults, &err) && faults.count)
            put_faults(in, t, &faults, bad++ == 0);
        done += t->bytes;
    }
    show_progress(what, -1, "");
    if (in->json) put_text("]}\n");
    if (err.status != LLM_OK) return fail_with(&err);
    if (i < n)
        return fail("interrupted: %lld of %lld tensors were read", (long long)i, (long long)n);
    if (bad)
        return fail("%s: %lld of %lld tensors have values that are not finite: fetch the file "
                    "again, or convert it again",
                    llm_file_path(in->file), (long long)bad, (long long)n);
    if (!in->json)
        put("%s: %lld tensors, %s: all values and scales are finite\n", llm_file_path(in->file),
            (long long)n, HUMAN(all.bytes));
    return in->loaded ? 0 : fail_with(&in->why);
}
