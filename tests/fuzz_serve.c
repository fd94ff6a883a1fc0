/* libFuzzer: any bytes as the body of a request to the server. It is refused with an error in
 * OpenAI's form, or becomes a request that the engine accepts or refuses in turn. The first byte
 * selects the endpoint. Seeds: tests/data/fuzz_serve. */
#define LLM_WITH_MICROHTTPD
#include "../docs/examples/serve.c"

static void check(bool fine) {
    if (!fine) abort();
}

/* Parse a body as the server does, and check the result. */
static void parse(server *s, endpoint kind, const char *data, size_t size) {
    call *c = (call *)calloc(1, sizeof *c);
    llm_json json;
    check(c != NULL);
    c->server = s;
    c->endpoint = kind;
    add_bytes(&c->body, data, size);
    bool good = parse_body(c, &json);
    if (good) {
        buffer b = {0};
        if (kind == OTHER)
            good = size % 2 ? tokenize_body(c, json.nodes, &b) : detokenize_body(c, json.nodes, &b);
        else good = read_request(c, json.nodes);
        buffer_free(&b);
        llm_json_free(&json);
    }
    check(good == (c->status == 0));
    if (!good) {
        llm_json error;
        check(c->status >= 400);
        check(llm_json_parse(&error, c->out.data, c->out.length, NULL, NULL));
        check(llm_json_has_kind(
            llm_json_member(llm_json_member(error.nodes, "error"), "message"), LLM_JSON_STRING));
        llm_json_free(&error);
    }
    for (int i = 0; good && kind != OTHER && i < c->n_prompts; i++) {
        llm_request r = c->request;
        uint64_t id;
        llm_error err;
        r.prompt = c->prompts[i].ids;
        r.n_prompt = (int)c->prompts[i].n;
        bool submitted = llm_submit(s->engine, &r, &id, &err);
        if (submitted) llm_cancel(s->engine, id, NULL);
        else check(err.status == LLM_ERROR_CAPACITY); /* nothing else is left to refuse */
        llm_event event;
        while (llm_next_event(s->engine, &event)) continue;
        check(llm_step(s->engine, NULL) == 0);
    }
    call_free(c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static server s;
    static serve_options options;
    if (!s.engine) {
        llm_engine_options o = llm_engine_defaults();
        o.n_threads = 1;
        o.pack_weights = false;
        options = serve_defaults();
        options.model_name = "tiny";
        s.options = &options;
        s.model = llm_model_load("models/tales-draft.gguf", NULL);
        check(s.model != NULL);
        s.tokenizer = llm_model_tokenizer(s.model);
        s.engine = llm_engine_create(s.model, &o, NULL);
        pthread_mutex_init(&s.lock, NULL);
        check(s.engine != NULL);
        s.settings = *llm_engine_settings(s.engine);
    }
    if (size == 0) return 0;
    parse(&s, (endpoint)(data[0] % 3), (const char *)data + 1, size - 1);
    return 0;
}
