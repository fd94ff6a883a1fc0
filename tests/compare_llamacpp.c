/* Runs the same tokens through this engine and through llama.cpp on the same model file, and
 * compares the next-token distributions and the greedy texts. compare_llamacpp.sh builds and runs
 * it.
 *
 *     compare_llamacpp MODEL TEXTFILE
 *         prints: mean KL divergence | largest | agreement on the likeliest token | ...
 *     compare_llamacpp --quantize FTYPE IN OUT
 *         quantizes with llama.cpp's own quantizer; FTYPE is llama.cpp's number of the type */
#define _GNU_SOURCE
#define LLM_IMPLEMENTATION
#include "../llm.h"
#include <dlfcn.h>
#include <llama.h>
#include <sys/syscall.h>

enum { MAX_WINDOW = 256, WINDOWS = 8, MAX_PROMPT = 32, MAX_GREEDY = 64 };

typedef struct peer {
    struct llama_model *model;
    struct llama_context *context;
    int vocab;
} peer;

static void quiet(enum ggml_log_level level, const char *text, void *user) {
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static void die(const char *what) {
    fprintf(stderr, "compare_llamacpp: %s\n", what);
    exit(1);
}

static void *get_memory(size_t bytes) {
    void *p = malloc(bytes);
    if (!p) die("out of memory");
    return p;
}

/* Replaces libc's syscall, by which llama.cpp asks Linux for matrix tiles, and refuses them, since
 * llama.cpp's kernels for tiles gave wrong results (see docs/types.md). Without tiles it uses other
 * kernels. */
long syscall(long number, ...) {
    enum { REQUEST_STATE = 0x1023 }; /* ARCH_REQ_XCOMP_PERM */
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && a[0] == REQUEST_STATE) return -1;
    long (*libc)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return libc(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* Logits (n, vocab) of n tokens that begin at `position`. */
static void peer_logits(peer *p, const int32_t *tokens, int n, int position, float *logits) {
    struct llama_batch batch = llama_batch_init(n, 0, 1);
    if (position == 0) llama_kv_cache_clear(p->context);
    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = position + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    if (llama_decode(p->context, batch)) die("llama_decode failed");
    for (int i = 0; i < n; i++)
        memcpy(logits + (size_t)i * (size_t)p->vocab, llama_get_logits_ith(p->context, i),
               (size_t)p->vocab * sizeof *logits);
    llama_batch_free(batch);
}

static int likeliest(const float *logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

typedef struct collected {
    float *logits; /* (window, vocab) */
    int window, vocab;
} collected;

static void collect(void *user, uint64_t request, int sample, int position, float *logits) {
    collected *c = (collected *)user;
    (void)request, (void)sample;
    if (position < c->window)
        memcpy(c->logits + (size_t)position * (size_t)c->vocab, logits,
               (size_t)c->vocab * sizeof *logits);
}

/* Generate max_tokens tokens greedily into `out`; or, with max_tokens 0, copy the logits of the
 * prompt into `c`. */
static void our_run(llm_engine *engine, const int32_t *prompt, int n, int max_tokens, collected *c,
                    int32_t *out) {
    llm_error err;
    llm_event event;
    llm_request request = llm_request_defaults();
    request.prompt = prompt;
    request.n_prompt = n;
    request.max_tokens = max_tokens;
    request.ignore_end = true;
    if (c) {
        request.logits_hook = collect;
        request.user = c;
    }
    if (!llm_submit(engine, &request, NULL, &err)) die(err.message);
    int status, k = 0;
    while ((status = llm_step(engine, &err)) > 0)
        while (llm_next_event(engine, &event))
            if (event.token >= 0 && k < max_tokens) out[k++] = event.token;
    if (status < 0) die(err.message);
}

/* KL(theirs || ours) in nats. */
static double divergence(const float *theirs, const float *ours, int n) {
    double a_max = theirs[likeliest(theirs, n)], b_max = ours[likeliest(ours, n)];
    double a_sum = 0, b_sum = 0, sum = 0;
    for (int i = 0; i < n; i++) {
        a_sum += exp(theirs[i] - a_max);
        b_sum += exp(ours[i] - b_max);
    }
    for (int i = 0; i < n; i++) {
        double a = theirs[i] - a_max - log(a_sum), b = ours[i] - b_max - log(b_sum);
        sum += exp(a) * (a - b);
    }
    return sum;
}

static char *read_text(const char *path, size_t *n) {
    FILE *f = fopen(path, "rb");
    char *text = get_memory(1 << 20);
    if (!f) die("the text cannot be read");
    *n = fread(text, 1, 1 << 20, f);
    fclose(f);
    return text;
}

static int quantize(char **argv) {
    llama_model_quantize_params params = llama_model_quantize_default_params();
    params.ftype = (enum llama_ftype)atoi(argv[2]);
    params.nthread = 1;
    return llama_model_quantize(argv[3], argv[4], &params) != 0;
}

int main(int argc, char **argv) {
    llm_error err;
    size_t length;
    llama_log_set(quiet, NULL);
    llama_backend_init();
    if (argc == 5 && !strcmp(argv[1], "--quantize")) return quantize(argv);
    if (argc != 3) die("usage: MODEL TEXTFILE, or --quantize FTYPE IN OUT");
    llm_model *model = llm_model_load(argv[1], &err);
    llm_engine_options options = llm_engine_defaults();
    options.max_sequences = 1;
    options.n_threads = 1;
    options.cache_type = LLM_F32; /* so that only the weights differ */
    llm_engine *engine = model ? llm_engine_create(model, &options, &err) : NULL;
    if (!engine) die(err.message);

    /* at most the model's context */
    int context = llm_model_config(model)->context_length;
    int window = context < MAX_WINDOW ? context : MAX_WINDOW;
    int prompt = context / 4 < MAX_PROMPT ? context / 4 : MAX_PROMPT;
    int greedy = context - prompt < MAX_GREEDY ? context - prompt : MAX_GREEDY;
    struct llama_model_params model_params = llama_model_default_params();
    struct llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = context_params.n_batch = context_params.n_ubatch =
        MAX_WINDOW + MAX_GREEDY;
    context_params.type_k = context_params.type_v = GGML_TYPE_F32;
    context_params.n_threads = context_params.n_threads_batch = 1;
    peer p = {llama_model_load_from_file(argv[1], model_params), NULL, 0};
    p.context = p.model ? llama_init_from_model(p.model, context_params) : NULL;
    if (!p.context) die("llama.cpp cannot load the model");
    p.vocab = llama_vocab_n_tokens(llama_model_get_vocab(p.model));
    if (p.vocab != llm_model_config(model)->vocab_size)
        die("the vocabularies have different sizes");

    char *text = read_text(argv[2], &length);
    int32_t *ids = get_memory((length + 1) * sizeof *ids);
    int64_t n =
        llm_tokenize(llm_model_tokenizer(model), text, length, 0, ids, (int64_t)length + 1, &err);
    if (n < window * WINDOWS) die("the text is too short");
    size_t row = (size_t)p.vocab;
    collected ours = {get_memory((size_t)window * row * sizeof(float)), window, p.vocab};
    float *theirs = get_memory((size_t)window * row * sizeof(float));

    double sum = 0, largest = 0;
    int agree = 0, same_texts = 0, same_tokens = 0;
    for (int w = 0; w < WINDOWS; w++) {
        const int32_t *part = ids + (n / WINDOWS) * w;
        our_run(engine, part, window, 0, &ours, NULL);
        peer_logits(&p, part, window, 0, theirs);
        for (int i = 0; i < window; i++) {
            const float *a = theirs + (size_t)i * row, *b = ours.logits + (size_t)i * row;
            double kl = divergence(a, b, p.vocab);
            sum += kl;
            if (kl > largest) largest = kl;
            agree += likeliest(a, p.vocab) == likeliest(b, p.vocab);
        }
        int32_t our_tokens[MAX_GREEDY], their_tokens[MAX_GREEDY];
        our_run(engine, part, prompt, greedy, NULL, our_tokens);
        peer_logits(&p, part, prompt, 0, theirs);
        int32_t next = likeliest(theirs + (size_t)(prompt - 1) * row, p.vocab);
        int alike = 0;
        for (int i = 0; i < greedy; i++) {
            their_tokens[i] = next;
            if (alike == i) alike += their_tokens[i] == our_tokens[i];
            peer_logits(&p, &next, 1, prompt + i, theirs);
            next = likeliest(theirs, p.vocab);
        }
        same_texts += alike == greedy;
        same_tokens += alike;
    }
    printf("%.2e | %.2e | %.2f %% | %d of %d | %.1f of %d\n", sum / (window * WINDOWS), largest,
           100.0 * agree / (window * WINDOWS), same_texts, WINDOWS, (double)same_tokens / WINDOWS,
           greedy);
    llm_engine_free(engine);
    llm_model_free(model);
    llama_free(p.context);
    llama_model_free(p.model);
    return 0;
}
