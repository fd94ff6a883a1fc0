/* 06-prefill.c - llm lesson prefill: time to the first token and time per token, for prompts of
 * several lengths. Described in 06-prefill.md. */
#include "lesson.h"

/* Operations of one token: a multiplication and an addition per weight of a matrix; in attention,
 * two products of head_dim (score, weighted value) per position, query head and layer. */
static double token_operations(const llm_model *model, double positions, bool logits) {
    const llm_config *c = llm_model_config(model);
    double q = (double)c->n_heads * c->head_dim, kv = (double)c->n_kv_heads * c->head_dim;
    double layer = (double)c->dim * (2 * q + 2 * kv + 3.0 * c->hidden_dim) + 2 * q * positions;
    return 2 * (c->n_layers * layer + (logits ? (double)c->vocab_size * c->dim : 0));
}

/* Operations of a prompt. A token attends to half of the prompt on average; only the last token has
 * logits. */
static double prompt_operations(const llm_model *model, double n) {
    const llm_config *c = llm_model_config(model);
    return n * token_operations(model, n / 2, false) + 2.0 * c->vocab_size * c->dim;
}

bool prefill_measure(lesson *l, llm_engine *engine, int n_prompt, int n, int runs,
                     prefill_row *row) {
    double ttft[32], tpot[32];
    bool good = true;
    for (int run = 0; run < runs && good; run++) {
        int32_t *prompt = lesson_tokens(l, run * 97, n_prompt);
        task t = new_task(prompt, n_prompt, n + 1);
        good = prompt && run_tasks(engine, &t, 1) && t.n == n + 1;
        if (good) {
            ttft[run] = t.seconds[0];
            tpot[run] = (t.seconds[n] - t.seconds[0]) / n;
        }
        free_task(&t);
        free(prompt);
    }
    if (good) *row = (prefill_row){n_prompt, median(ttft, runs), median(tpot, runs)};
    return good;
}

static void prefill_show(lesson *l, const prefill_row *rows, int n_rows, int n) {
    static const column columns[] = {{"prompt", "prompt", "%.0f"},
                                     {"ttft_ms", "TTFT ms", "%.1f"},
                                     {"prefill_tokens_per_second", "tok/s", "%.0f"},
                                     {"prefill_gflops", "GFLOP/s", "%.1f"},
                                     {"prefill_intensity", "FLOP/B", "%.1f"},
                                     {"tpot_ms", "TPOT ms", "%.2f"},
                                     {"decode_tokens_per_second", "tok/s", "%.0f"},
                                     {"decode_gbytes", "GB/s", "%.2f"},
                                     {"decode_intensity", "FLOP/B", "%.1f"}};
    double weights = (double)llm_model_step_bytes(l->loaded);
    double token = (double)llm_model_cache_bytes_per_token(l->loaded, l->engine.cache_type);
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_LINES, "TTFT and TPOT by the length of the prompt", "tokens of prompt",
                      "milliseconds");
    plot_note(&p, "A longer prompt delays the first token (TTFT); each token after it takes "
                  "about as long as ever (TPOT).");
    int first = plot_series_add(&p, "TTFT: the whole prompt"),
        each = plot_series_add(&p, "TPOT: one token");
    p.log_x = p.log_y = true;
    for (int i = 0; i < n_rows; i++) {
        const prefill_row *r = &rows[i];
        double steps = ceil(r->prompt / l->engine.max_batch_tokens), after = r->prompt + n / 2.0;
        double prefill = prompt_operations(l->loaded, r->prompt),
               decode = token_operations(l->loaded, after, true);
        double read = steps * weights + r->prompt * token, decode_read = weights + after * token;
        add_row(&t, r->prompt, 1e3 * r->ttft, r->prompt / r->ttft, 1e-9 * prefill / r->ttft,
                prefill / read, 1e3 * r->tpot, 1 / r->tpot, 1e-9 * decode_read / r->tpot,
                decode / decode_read);
        plot_point(&p, first, r->prompt, 1e3 * r->ttft);
        plot_point(&p, each, r->prompt, 1e3 * r->tpot);
    }
    show_table(l, &t, "prompts");
    say(l,
        "\nA step reads the weights (%s) once, for any number of tokens. For a long prompt that "
        "makes hundreds of operations per byte: arithmetic is the limit. A decode step has one "
        "token, so about %.1f operations per byte: bytes are the limit. (llm lesson roofline "
        "measures both limits.)\n",
        HUMAN(weights), token_operations(l->loaded, 0, true) / weights);
    show_plot(l, &p);
}

static int lesson_prefill(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    int n = 16, runs = 3;
    int_list prompts = {0};
    const option options[] = {
        LESSON_OPTIONS(l),
        {'p', "prompt", "LIST", LIST, &prompts, 1, 1 << 20,
         "lengths of the prompt (default 1,4,16,64,256,960, if they fit)"},
        {'n', "max-tokens", "N", WHOLE, &n, 1, 1 << 20,
         "tokens to generate after each prompt (default 16)"},
        {'r', "runs", "R", WHOLE, &runs, 1, 32,
         "times to run each length; the result is the median (default 3)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return free(prompts.values), status;
    l.engine.max_sequences = 1;
    l.engine.prefix_cache = false;
    if (!prompts.count) {
        int limit = llm_model_config(l.loaded)->context_length - n - 1;
        prompts.values = resize(NULL, 6 * sizeof(int));
        for (int i = 0, length = 1; i < 6; i++, length *= 4) {
            int wanted = i == 5 ? 960 : length;
            if (wanted <= limit) prompts.values[prompts.count++] = wanted;
        }
    }
    for (int i = 0; i < prompts.count; i++)
        if (!fits_context(&l, prompts.values[i], n + 1))
            return free(prompts.values), lesson_end(&l, false);
    llm_engine *engine = lesson_engine(l.loaded, &l.engine);
    prefill_row *rows = resize(NULL, (size_t)prompts.count * sizeof *rows), warm;
    bool good =
        engine && prompts.count > 0 && prefill_measure(&l, engine, prompts.values[0], n, 1, &warm);
    for (int i = 0; i < prompts.count && good; i++)
        good = prefill_measure(&l, engine, prompts.values[i], n, runs, &rows[i]);
    if (good && !stop_requested) prefill_show(&l, rows, prompts.count, n);
    free_engine(engine);
    free(rows);
    free(prompts.values);
    return lesson_end(&l, good);
}

static const char prefill_notes[] =
    "Prefill computes a prompt in few steps of many tokens; decode computes the answer in many\n"
    "steps of one token. FLOP: two operations per weight, and the products of attention. Bytes:\n"
    "the weights, once per step, and the cached keys and values.\n"
    "\n"
    "Examples:\n"
    "  llm lesson prefill\n"
    "  llm lesson prefill -t 1 --prompt 16,128,512 --svg prefill.svg\n";

const command prefill_lesson = {
    "lesson prefill", "TTFT and TPOT by the length of the prompt.", "[options]",
    lesson_prefill, prefill_notes};
