/* libFuzzer: any bytes as JSON. A text that parses is written again from its nodes. The new text
 * must parse to the same nodes. */
#define LLM_IMPLEMENTATION
#include "../llm.h"

static volatile uint64_t sink;

static void put(llm__bytes *b, const void *data, size_t n) {
    if (!llm__append(b, data, n, NULL)) abort();
}

static void put_string(llm__bytes *b, const llm_json_node *node) {
    put(b, "\"", 1);
    for (uint32_t i = 0; i < node->length; i++) {
        char escaped[8];
        uint8_t c = (uint8_t)node->text[i];
        if (c < ' ' || c == '"' || c == '\\')
            put(b, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", c));
        else put(b, &c, 1);
    }
    put(b, "\"", 1);
}

/* Append a value to the text. Also checks that the span of a container covers exactly its
 * members. */
static void write_value(llm__bytes *b, const llm_json_node *node) {
    static const char *const words[] = {"null", "false", "true"};
    bool object = node->kind == LLM_JSON_OBJECT;
    double d;
    int64_t i;
    uint32_t n = 0;
    const llm_json_node *end = node + 1;
    if (node->kind <= LLM_JSON_TRUE) put(b, words[node->kind], strlen(words[node->kind]));
    else if (node->kind == LLM_JSON_STRING) put_string(b, node);
    else if (node->kind == LLM_JSON_NUMBER) {
        if (llm_json_f64(node, &d)) sink += d > 0;
        if (llm_json_i64(node, &i)) sink += (uint64_t)i;
        put(b, node->text, node->length);
    } else {
        put(b, object ? "{" : "[", 1);
        for (const llm_json_node *v = llm_json_first(node); v; v = llm_json_next(node, v), n++) {
            if (n) put(b, ",", 1);
            if (object) put_string(b, v - 1), put(b, ":", 1);
            write_value(b, v);
            end = v + v->span;
        }
        put(b, object ? "}" : "]", 1);
        if (n != node->length) abort();
    }
    if (end != node + node->span) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    llm_error err;
    llm_json json, again;
    memset(&err, 0, sizeof err);
    if (!llm_json_parse(&json, (const char *)data, size, "fuzz", &err)) {
        if (err.status == LLM_OK || !err.message[0]) abort();
        return 0;
    }
    llm__bytes b = {NULL, 0, 0};
    write_value(&b, json.nodes);
    if (!llm_json_parse(&again, (const char *)b.data, b.length, "again", &err) ||
        again.n_nodes != json.n_nodes)
        abort();
    for (int64_t i = 0; i < json.n_nodes; i++) {
        const llm_json_node *x = json.nodes + i, *y = again.nodes + i;
        if (x->kind != y->kind || x->span != y->span || x->length != y->length) abort();
        if ((x->kind == LLM_JSON_STRING || x->kind == LLM_JSON_NUMBER) &&
            memcmp(x->text, y->text, x->length))
            abort();
    }
    LLM_FREE(b.data);
    llm_json_free(&json);
    llm_json_free(&again);
    return 0;
}
