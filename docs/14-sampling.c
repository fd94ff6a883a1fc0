/* 14-sampling.c - llm lesson sampling: from logits to a token. See 14-sampling.md.
 *
 * The engine computes the logits after a prompt (a logits hook receives them). The distributions
 * and the draws come from the engine's own functions: llm__distribution and llm__sample, chapter
 * [3]. */
#include "lesson.h"

/* A logits hook: copy the logits to user + 1; user[0] is their number. */
static void sampling_keep(void *user, uint64_t request, int sample, int position, float *logits) {
    (void)request, (void)sample, (void)position;
    float *kept = user;
    memcpy(kept + 1, logits, (size_t)kept[0] * sizeof *logits);
}

static double sampling_entropy(const float *probabilities, int n) {
    double bits = 0;
    for (int i = 0; i < n; i++)
        if (probabilities[i] > 0) bits -= probabilities[i] * log2(probabilities[i]);
    return bits;
}

static const float *sampling_order_by; /* for the comparison below */
static int sampling_likelier(const void *a, const void *b) {
    float x = sampling_order_by[*(const int32_t *)a], y = sampling_order_by[*(const int32_t *)b];
    return x < y ? 1 : x > y ? -1 : 0;
}

/* Draw `draws` times. Returns the largest difference between a token's share of the draws and its
 * probability. */
static double sampling_draws(llm__sampler *s, const llm_sampling *p, const float *logits,
                             const float *probabilities, int draws, int32_t *counts) {
    double worst = 0;
    memset(counts, 0, (size_t)s->vocab_size * sizeof *counts);
    for (int i = 0; i < draws; i++)
        counts[llm__sample(s, p, logits, (llm__past){0}, 0, (uint64_t)i)]++;
    for (int i = 0; i < s->vocab_size; i++)
        worst = larger(worst, fabs((double)counts[i] / draws - probabilities[i]));
    return worst;
}

static bool sampling_show(lesson *l, const float *logits, int n, int draws, const char *prompt) {
    static const column columns[] = {
        {"setting", "setting", "%s"}, {"kept", "tokens", "%.0f"},
        {"entropy", "bits", "%.2f"},  {"first", "p(first)", "%.3f"},
        {"sum", "sum", "%.4f"},       {"distance", "error", "%.3f"},
        {"chance", "chance", "%.3f"}};
    static const column token_columns[] = {
        {"token", "token", "%s"},  {"logit", "logit", "%.2f"}, {"half", "T 0.5", "%.3f"},
        {"one", "T 1", "%.3f"},    {"hot", "T 1.5", "%.3f"},   {"top_p", "top-p 0.9", "%.3f"},
        {"drawn", "drawn", "%.3f"}};
    enum { ROWS = 7 };
    static const struct {
        const char *name;
        float temperature;
        int top_k;
        float top_p, min_p;
    } rows[ROWS] = {{"greedy (T 0)", 0, 0, 1, 0},
                    {"T 0.5", 0.5f, 0, 1, 0},
                    {"T 1", 1, 0, 1, 0},
                    {"T 1.5", 1.5f, 0, 1, 0},
                    {"T 1, top-k 5", 1, 5, 1, 0},
                    {"T 1, top-p 0.9", 1, 0, 0.9f, 0},
                    {"T 1, min-p 0.1", 1, 0, 1, 0.1f}};
    llm_error err;
    llm__sampler sampler = {0};
    if (!llm__sampler_init(&sampler, n, 1, &err)) return !fail_with(&err);
    float *all = resize(NULL, (size_t)ROWS * (size_t)n * sizeof *all); /* (ROWS, n) probabilities */
    int32_t *counts = resize(NULL, (size_t)n * sizeof *counts),
            *order = resize(NULL, (size_t)n * sizeof *order);
    double *drawn = resize(NULL, (size_t)n * sizeof *drawn);
    table t = new_table(columns, COUNT(columns)),
          tokens = new_table(token_columns, COUNT(token_columns));
    for (int i = 0; i < ROWS; i++) {
        float *p = all + (size_t)i * (size_t)n;
        llm_sampling setting = llm_sampling_defaults();
        setting.temperature = rows[i].temperature, setting.top_k = rows[i].top_k,
        setting.top_p = rows[i].top_p, setting.min_p = rows[i].min_p;
        setting.seed = 7;
        llm__distribution(&sampler, &setting, logits, (llm__past){0}, p);
        double kept = 0, sum = 0, first = 0;
        double distance = sampling_draws(&sampler, &setting, logits, p, draws, counts);
        for (int k = 0; k < n; k++) kept += p[k] > 0, sum += p[k], first = larger(first, p[k]);
        /* chance: four standard deviations of the likeliest token's share */
        add_row(&t, rows[i].name, kept, sampling_entropy(p, n), first, sum, distance,
                4 * sqrt(first * (1 - first) / draws) + 4.0 / draws);
        for (int k = 0; k < n && i == 2; k++) drawn[k] = (double)counts[k] / draws; /* T 1 */
    }
    for (int i = 0; i < n; i++) order[i] = i;
    sampling_order_by = logits;
    qsort(order, (size_t)n, sizeof *order, sampling_likelier);
    plot p = plot_new(PLOT_LINES, "Probability by rank: temperature bends the curve", "rank",
                      "probability");
    plot_note(&p, "A low temperature gives nearly all probability to the first few tokens, a "
                  "high one moves it to the many unlikely ones.");
    p.log_x = p.log_y = true;
    int lines[3] = {plot_series_add(&p, "T 0.5"), plot_series_add(&p, "T 1"),
                    plot_series_add(&p, "T 1.5")};
    for (int i = 0; i < n; i++) {
        char name[64];
        const float *at = all + order[i];
        if (i < 8)
            add_row(&tokens,
                    token_text(llm_model_tokenizer(l->loaded), order[i], name, sizeof name),
                    (double)logits[order[i]], (double)at[(size_t)n], (double)at[2 * (size_t)n],
                    (double)at[3 * (size_t)n], (double)at[5 * (size_t)n], drawn[order[i]]);
        bool shown = i < 16 || i % (i / 8) == 0; /* about evenly, on a logarithmic axis */
        for (int k = 0; k < 3 && shown; k++)
            if (at[(size_t)(k + 1) * (size_t)n] > 1e-7f)
                plot_point(&p, lines[k], i + 1, at[(size_t)(k + 1) * (size_t)n]);
    }
    for (int k = 0; k < 3; k++)
        if (lines[k] >= 0) p.series[lines[k]].named_at = p.series[lines[k]].n / 2;
    say(l,
        "After \"%s\": the likeliest of %d tokens, with their probabilities at three temperatures "
        "and with top-p, and their shares of %d draws at T 1.\n\n",
        prompt, n, draws);
    show_table(l, &tokens, "tokens");
    say(l,
        "\nWhat each setting leaves of the distribution. Bits: its entropy; error: the largest "
        "difference between a token's probability and its share of %d draws; chance: the "
        "difference that chance can explain.\n\n",
        draws);
    show_table(l, &t, "settings");
    show_plot(l, &p);
    llm__sampler_free(&sampler);
    free(all), free(counts), free(order), free(drawn);
    return true;
}

static int lesson_sampling(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    const char *prompt = "Once upon a time there was a";
    int draws = 5000;
    const option options[] = {
        LESSON_OPTIONS(l),
        {'p', "prompt", "TEXT", TEXT, &prompt, 0, 0,
         "the text before the next token (default \"Once upon a time there was a\")"},
        {0, "draws", "N", WHOLE, &draws, 100, 1000000, "draws for each setting (default 5000)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    llm_error err;
    int n = llm_model_config(l.loaded)->vocab_size;
    float *kept = resize(NULL, ((size_t)n + 1) * sizeof *kept); /* (1 + n) n, then n logits */
    kept[0] = (float)n;
    l.engine.max_sequences = 1;
    llm_engine *engine = lesson_engine(l.loaded, &l.engine);
    llm_request request = llm_request_defaults();
    request.max_tokens = 0;
    request.logits_hook = sampling_keep;
    request.user = kept;
    bool good = engine && (llm_submit_text(engine, prompt, &request, NULL, &err) ||
                           !fail_with(&err));
    for (int going = 1; good && going > 0;)
        good = (going = llm_step(engine, &err)) >= 0 || !fail_with(&err);
    good = good && sampling_show(&l, kept + 1, n, draws, prompt);
    free(kept);
    free_engine(engine);
    return lesson_end(&l, good);
}

static const char sampling_notes[] =
    "The model computes a logit for each token. Temperature, top-k, top-p and min-p decide\n"
    "which tokens can be drawn, and with which probabilities.\n"
    "\n"
    "Examples:\n"
    "  llm lesson sampling\n"
    "  llm lesson sampling --prompt \"The king said\" --draws 100000\n";

const command sampling_lesson = {
    "lesson sampling", "From logits to a token: temperature, top-k, top-p, draws.", "[options]",
    lesson_sampling, sampling_notes};
