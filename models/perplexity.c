/* perplexity.c - llm perplexity: how well a model predicts a text */
#include "tools.h"

#include <float.h>

/* The logits after a position give the probability of the token that follows. */
static void perplexity_hook(void *user, uint64_t request, int sample_index, int position,
                            float *logits) {
    perplexity *p = user;
    (void)request, (void)sample_index;
    int64_t next = p->start + position + 1;
    if (next != p->done || next >= p->n_ids) return; /* an earlier window predicted it */
    p->document_nats -=
        (double)llm_logprob(logits, llm_model_config(p->loaded)->vocab_size, p->ids[next]);
    p->done++;
}

static bool perplexity_window(perplexity *p, uint64_t bytes_before, uint64_t document_bytes,
                              uint64_t all_bytes) {
    llm_error err;
    llm_request request = llm_request_defaults();
    int64_t rest = p->n_ids - 1 - p->start;
    uint64_t id;
    request.prompt = p->ids + p->start;
    request.n_prompt = (int)(rest < p->context ? rest : p->context);
    request.max_tokens = 0;
    request.logits_hook = perplexity_hook;
    request.user = p;
    if (!llm_submit(p->engine, &request, &id, &err)) return !fail_with(&err);
    int status;
    while ((status = llm_step(p->engine, &err)) > 0 && !stop_requested) {
        char note[64];
        double share = (double)(p->done - 1) / (double)(p->n_ids - 1);
        double nats = p->nats + p->document_nats,
               bytes = (double)bytes_before + share * (double)document_bytes;
        snprintf(note, sizeof note, "%.3f bits per byte", bytes > 0 ? nats / log(2) / bytes : 0.0);
        show_progress("perplexity", bytes / (double)all_bytes, note);
    }
    p->computed += (uint64_t)request.n_prompt;
    if (status < 0) return !fail_with(&err);
    if (stop_requested) llm_cancel(p->engine, id, &err);
    return true;
}

bool perplexity_document(perplexity *p, const char *data, size_t length, uint64_t all_bytes) {
    const llm_tokenizer *t = llm_model_tokenizer(p->loaded);
    int32_t *words, bos = llm_tokenizer_bos(t), eos = llm_tokenizer_eos(t);
    llm_error err;
    int64_t n = llm_tokenize_new(t, data, length, 0, &words, &err);
    if (n < 0) return !fail_with(&err);
    p->ids = resize(NULL, (size_t)(n + 2) * sizeof *p->ids);
    p->n_ids = 0;
    if (bos >= 0) p->ids[p->n_ids++] = bos;
    memcpy(p->ids + p->n_ids, words, (size_t)n * sizeof *words);
    p->n_ids += n;
    if (eos >= 0) p->ids[p->n_ids++] = eos;
    llm_free(words);

    bool good = true;
    uint64_t before = p->bytes;
    p->document_nats = 0;
    p->done = 1;
    int stride = p->context > 1 ? p->context / 2 : 1;
    for (p->start = 0; good && p->done < p->n_ids && !stop_requested; p->start += stride)
        good = perplexity_window(p, before, length, all_bytes);
    int64_t covered =
        p->done < p->n_ids ? llm_detokenize(t, p->ids, p->done, NULL, 0, NULL) : (int64_t)length;
    p->documents += p->done == p->n_ids;
    p->bytes += p->done > 1 && covered > 0 ? (uint64_t)covered : 0;
    p->predicted += (uint64_t)(p->done - 1);
    p->nats += p->document_nats;
    free(p->ids);
    return good;
}

bool next_document(const char **p, const char *end, const char **document, size_t *length) {
    static const char mark[] = "<|endoftext|>";
    const char *start = *p, *stop = end, *line = start;
    if (start == end) return false;
    for (*p = end; line < end;) {
        const char *newline = memchr(line, '\n', (size_t)(end - line)),
                   *after = newline ? newline + 1 : end;
        size_t n = (size_t)((newline ? newline : end) - line);
        if (n && line[n - 1] == '\r') n--;
        if (n == sizeof mark - 1 && !memcmp(line, mark, n)) {
            stop = line;
            *p = after;
            break;
        }
        line = after;
    }
    while (start < stop && (*start == '\n' || *start == '\r')) start++;
    while (stop > start && (stop[-1] == '\n' || stop[-1] == '\r')) stop--;
    *document = start;
    *length = (size_t)(stop - start);
    return true;
}

static void perplexity_print(const perplexity *p, const char *path) {
    double bits = p->nats / log(2) / (double)p->bytes,
           per_token = exp(p->nats / (double)p->predicted);
    double rate = p->seconds > 0 ? (double)p->computed / p->seconds : 0;
    if (!p->json) {
        put("%.4f bits per byte, perplexity %.3f per token", bits, per_token);
        put(" (%llu documents, %llu bytes, ", (unsigned long long)p->documents,
            (unsigned long long)p->bytes);
        put("%llu tokens predicted; context %d; ", (unsigned long long)p->predicted, p->context);
        put("%.1f tokens/s)%s\n", rate, stop_requested ? " - stopped" : "");
        return;
    }
    put_text("{\"model\": ");
    put_json_text(llm_file_path(llm_model_file(p->loaded)));
    put_text(", \"file\": ");
    put_json_text(path);
    put(", \"complete\": %s", stop_requested ? "false" : "true");
    const struct { const char *name; double value; } values[] = {
        {"context", p->context}, {"documents", (double)p->documents}, {"bytes", (double)p->bytes},
        {"tokens_predicted", (double)p->predicted}, {"tokens_computed", (double)p->computed},
        {"nats", p->nats},
        {"bits_per_byte", bits}, {"perplexity", per_token}, {"seconds", p->seconds},
        {"tokens_per_second", rate}};
    for (int i = 0; i < COUNT(values); i++) {
        put(", \"%s\": ", values[i].name);
        put_number(values[i].value);
    }
    put_text("}\n");
}

static int perplexity_file(perplexity *p, const char *path, const text *words) {
    llm_error err;
    llm_engine_options options = llm_engine_defaults();
    int longest = llm_model_config(p->loaded)->context_length;
    if (p->context == 0) p->context = longest < 2048 ? longest : 2048;
    options.context_length = p->context;
    options.max_sequences = 1;
    options.n_threads = p->threads;
    p->engine = create_engine(p->loaded, &options, &err);
    if (!p->engine) return fail_with(&err);

    const char *at = words->data, *document;
    size_t length;
    bool good = true;
    double began = llm_seconds();
    while (good && !stop_requested &&
           next_document(&at, words->data + words->length, &document, &length))
        if (length > 0) good = perplexity_document(p, document, length, words->length);
    p->seconds = llm_seconds() - began;
    show_progress("", -1, "");
    if (good && !(p->nats <= DBL_MAX))
        good = !fail("the model's logits are not finite: its file may be damaged");
    if (good && p->predicted > 0) perplexity_print(p, path);
    else if (good && stop_requested) fail("interrupted before the first figures");
    else if (good) good = !fail("%s holds no text to predict", path);
    free_engine(p->engine);
    return good && !stop_requested ? 0 : FAILED;
}

static int command_perplexity(const command *self, int argc, char **argv) {
    perplexity p = {0};
    const option options[] = {
        MODEL_OPTION(p.model),
        {'c', "context", "N", WHOLE, &p.context, 1, INT_MAX,
         "tokens in a window (default: the model's context, at most 2048)"},
        THREADS_OPTION(p.threads),
        JSON_OPTION(p.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status != PARSED) return status;
    if (argc == 0) return misuse(self, "a text file is missing");
    llm_error err;
    text words = {0};
    char *path = model_path(p.model);
    if (!path || !read_all(argv[0], &words)) status = FAILED;
    else if (!(p.loaded = llm_model_load(path, &err))) status = fail_with(&err);
    else status = perplexity_file(&p, argv[0], &words);
    llm_model_free(p.loaded);
    free(words.data);
    free(path);
    return status;
}

static const char perplexity_notes[] =
    "How well a model predicts a text: the fewer bits it needs for each byte, the better.\n"
    "\n"
    "A line with only <|endoftext|> ends a document; newlines around a document do not count.\n"
    "Each document is predicted by itself: BOS (if the model has one), its text, and EOS (if the\n"
    "model has one), which is predicted too. A document longer than the context is read in\n"
    "windows that advance by half a context. Each token is predicted once, in the first window\n"
    "that has it; so from the second window on, at least half a context comes before it.\n"
    "Bits per byte: the sum of -log2(probability) over all tokens, divided by the bytes of text.\n"
    "\n"
    "Examples:\n"
    "  llm perplexity models/eval.txt\n"
    "  llm perplexity -m some.gguf --context 512 --json book.txt\n";

const command perplexity_command = {
    "perplexity", "Measure how well a model predicts a text.",
    "[-m FILE] [options] TEXTFILE", command_perplexity, perplexity_notes};
