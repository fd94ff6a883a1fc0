/* 05-int4.c - llm lesson int4: 4-bit weights, first one group, then all types compared. Described
 * in 05-int4.md. */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "lesson.h"
#include "../tests/bench.h"
#include "../models/quantize.h"
#include "../models/tools.h"

#include <unistd.h>

enum { INT4_GROUP = 32, INT4_BYTES = 18 }; /* q4_0: values and bytes of a block */

typedef struct int4 {
    const char *tensor_name; /* --tensor, or default_name */
    char default_name[48];
    int group; /* index of the group of 32 weights */
    int bytes_of_text;
    const llm_tensor *tensor;
    float *values; /* (n) values of the tensor */
    int64_t n;
} int4;

static bool int4_find(const lesson *l, int4 *x) {
    snprintf(x->default_name, sizeof x->default_name, "blk.%d.ffn_up.weight",
             given_or(-1, 3, 0, llm_model_config(l->loaded)->n_layers - 1));
    if (!x->tensor_name) x->tensor_name = x->default_name;
    x->tensor = llm_file_find_tensor(llm_model_file(l->loaded), x->tensor_name);
    if (!x->tensor)
        return !fail("%s has no tensor %s (llm info --tensors lists them)", l->path,
                     x->tensor_name);
    const llm_type_info *type = llm_type_find(x->tensor->type);
    if (type->block_values > 1)
        return !fail("%s: the weights are %s already; start from a model in f16, bf16 or f32",
                     l->path, type->name);
    x->n = 1;
    for (int i = 0; i < 4; i++) x->n *= (int64_t)x->tensor->dims[i];
    x->group = given_or(x->group, 100, 0, (int)fmin(100, (double)x->n / INT4_GROUP - 1));
    if (x->n % INT4_GROUP || (int64_t)x->group >= x->n / INT4_GROUP)
        return !fail("%s has %.0f groups of 32, numbered from 0", x->tensor_name,
                     floor((double)x->n / INT4_GROUP));
    x->values = resize(NULL, (size_t)x->n * sizeof *x->values);
    type->unpack(x->tensor->data, x->values, x->n);
    return true;
}

/* Show one group of q4_0: a scale and 32 4-bit numbers. Value i is in the low half of byte i, value
 * i + 16 in the high half. */
static void int4_group(lesson *l, const int4 *x) {
    static const column columns[] = {{"byte", "byte", "%.0f"},
                                     {"low", "value i", "%.5f"},
                                     {"low_q", "q", "%.0f"},
                                     {"low_back", "scale x (q - 8)", "%.5f"},
                                     {"high", "value i + 16", "%.5f"},
                                     {"high_q", "q", "%.0f"},
                                     {"high_back", "scale x (q - 8)", "%.5f"}};
    const llm_type_info *type = llm_type_find(LLM_Q4_0);
    const float *w = x->values + (int64_t)x->group * INT4_GROUP;
    uint8_t block[INT4_BYTES];
    float back[INT4_GROUP];
    llm_pack(type->type, w, block, INT4_GROUP);
    type->unpack(block, back, INT4_GROUP);
    float scale_;
    llm_type_find(LLM_F16)->unpack(block, &scale_, 1);
    double scale = scale_, worst = 0;
    table t = new_table(columns, COUNT(columns));
    for (int i = 0; i < INT4_GROUP / 2; i++)
        add_row(&t, (double)i, (double)w[i], (double)(block[2 + i] & 15), (double)back[i],
                (double)w[i + 16], (double)(block[2 + i] >> 4), (double)back[i + 16]);
    for (int i = 0; i < INT4_GROUP; i++) worst = larger(worst, fabs((double)w[i] - back[i]));
    say(l,
        "Group %d of %s: 32 weights become 18 bytes: the scale %.6f in f16, and 16 bytes with two "
        "4-bit numbers each.\n\n",
        x->group, x->tensor_name, scale);
    show_table(l, &t, "group");
    say(l, "\nThe largest error is %.5f, %.2f of the scale.\n", worst, worst / fabs(scale));
    fact(l, "scale", scale);
    fact(l, "worst", worst);
}

/* Show how often each of the 16 numbers occurs in the whole tensor. */
static void int4_histogram(lesson *l, const int4 *x) {
    const llm_type_info *type = llm_type_find(LLM_Q4_0);
    double counts[16] = {0};
    for (int64_t i = 0; i < x->n; i += INT4_GROUP) {
        uint8_t block[INT4_BYTES];
        llm_pack(type->type, x->values + i, block, INT4_GROUP);
        for (int k = 0; k < INT4_GROUP / 2; k++)
            counts[block[2 + k] & 15]++, counts[block[2 + k] >> 4]++;
    }
    static const column columns[] = {{"q", "", "%.0f"}, {"count", "", "%.0f"}};
    table t = new_table(columns, COUNT(columns));
    char title[96];
    snprintf(title, sizeof title, "How often each q occurs in %s", x->tensor_name);
    plot p = plot_new(PLOT_BARS, title, "% of the weights", "");
    int line = plot_series_add(&p, "share");
    plot_note(&p, "Level 8 is zero, and most weights are near it. The weight of largest "
                  "magnitude in each group of 32 becomes level 0: hence the step at the top.");
    for (int q = 0; q < 16; q++) {
        char name[16];
        snprintf(name, sizeof name, "q = %d", q);
        plot_category(&p, name);
        plot_bar(&p, line, 100 * counts[q] / (double)x->n);
        add_row(&t, (double)q, counts[q]);
    }
    if (l->json) show_table(l, &t, "histogram");
    else free(t.cells), free(t.numbers);
    show_plot(l, &p);
}

/* The root mean square error of a type, relative to the root mean square of the weights. NAN: the
 * rows of this tensor are not whole blocks of the type. */
static double int4_error(const int4 *x, const llm_type_info *type) {
    int64_t row = (int64_t)x->tensor->dims[0];
    if (row % type->block_values) return NAN;
    void *blocks = resize(NULL, row_bytes(type->type, (uint64_t)row));
    float *back = resize(NULL, (size_t)row * sizeof *back);
    double lost = 0, all = 0;
    for (int64_t i = 0; i < x->n; i += row) {
        llm_pack(type->type, x->values + i, blocks, row);
        type->unpack(blocks, back, row);
        for (int64_t k = 0; k < row; k++) {
            double w = x->values[i + k];
            lost += (w - back[k]) * (w - back[k]);
            all += w * w;
        }
    }
    free(blocks);
    free(back);
    return sqrt(lost / all);
}

llm_engine *perplexity_engine(const lesson *l, const llm_model *model) {
    llm_engine_options options = l->engine;
    int longest = llm_model_config(model)->context_length;
    options.context_length = longest < 1024 ? longest : 1024;
    options.max_sequences = 1;
    options.draft = NULL;
    options.cache_bytes = 0;
    return lesson_engine(model, &options);
}

bool measure_perplexity(const llm_model *model, llm_engine *engine, int bytes_of_text, double *bits,
                        double *perplexity_) {
    char *path = bundled_path("models/eval.txt");
    text words = {0};
    perplexity p = {.loaded = (llm_model *)model, .engine = engine,
                    .context = llm_engine_settings(engine)->context_length};
    bool good = path && read_all(path, &words);
    size_t end =
        good && (size_t)bytes_of_text < words.length ? (size_t)bytes_of_text : words.length;
    while (good && end < words.length && ((unsigned char)words.data[end] & 0xC0) == 0x80)
        end++; /* do not split a character */
    const char *at = words.data, *document;
    size_t length;
    while (good && !stop_requested && next_document(&at, words.data + end, &document, &length))
        if (length > 0) good = perplexity_document(&p, document, length, end);
    show_progress("", -1, "");
    *bits = p.bytes ? p.nats / log(2) / (double)p.bytes : NAN;
    *perplexity_ = p.predicted ? exp(p.nats / (double)p.predicted) : NAN;
    free(words.data);
    free(path);
    return good && !stop_requested;
}

bool lesson_perplexity(lesson *l, const llm_model *model, int bytes_of_text, double *bits,
                       double *perplexity_) {
    llm_engine *engine = perplexity_engine(l, model);
    bool good = engine && measure_perplexity(model, engine, bytes_of_text, bits, perplexity_);
    free_engine(engine);
    return good;
}

llm_model *quantized_model(const char *path, llm_type type) {
    char name[4096];
    llm_error err;
    if (!temporary_file(name, sizeof name)) return NULL;
    llm_model *model =
        llm_quantize(path, name, type, false, NULL, NULL, &err) ? llm_model_load(name, &err) : NULL;
    if (!model) fail_with(&err);
    unlink(name); /* the mapping remains valid */
    return model;
}

static bool int4_decode_rate(lesson *l, const llm_model *model, double *rate) {
    if (chosen.device == DEVICE_EMULATED) return true; /* the emulated device has no speed */
    llm_engine_options options = l->engine;
    options.max_sequences = 1;
    options.prefix_cache = false;
    llm_engine *engine = lesson_engine(model, &options);
    double rates[3];
    bool good = engine != NULL;
    for (int run = 0; run < 3 && good; run++) {
        double prefill, decode;
        good = bench_once(engine, 16, 48, NULL, &prefill, &decode);
        rates[run] = 48 / decode;
    }
    if (good) *rate = median(rates, 3);
    free_engine(engine);
    return good;
}

static bool int4_types(lesson *l, const int4 *x) {
    static const column columns[] = {{"type", "type", "%s"},
                                     {"bits_per_weight", "bits/weight", "%.2f"},
                                     {"step_mib", "MiB/step", "%.2f"},
                                     {"error_percent", "error %", "%.2f"},
                                     {"bits_per_byte", "bits per byte", "%.4f"},
                                     {"perplexity", "perplexity", "%.3f"},
                                     {"tokens_per_second", "tok/s", "%.0f"}};
    table t = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_LINES, "Quality and bytes per step of each type", "MiB per step",
                      "bits per byte (lower is better)");
    plot_note(&p, "To the left: fewer bytes to read per token. Lower: a model that predicts "
                  "better.");
    bool good = true;
    for (int i = 0; llm_type_at(i) && good && !stop_requested; i++) {
        const llm_type_info *type = llm_type_at(i);
        if (type->type == LLM_F32) continue;
        llm_model *model =
            type->type == x->tensor->type ? l->loaded : quantized_model(l->path, type->type);
        double bits = NAN, per_token = NAN, rate = NAN;
        good = model && lesson_perplexity(l, model, x->bytes_of_text, &bits, &per_token) &&
               int4_decode_rate(l, model, &rate);
        if (good) {
            double mib = (double)llm_model_step_bytes(model) / 1048576;
            add_row(&t, type->name, 8.0 * type->block_bytes / type->block_values, mib,
                    100 * int4_error(x, type), bits, per_token, rate);
            /* bf16 would hide f16: both have the same point */
            int one = type->type == LLM_BF16 ? -1 : plot_series_add(&p, type->name);
            if (one >= 0) p.series[one].dots = true, p.series[one].colour = 0; /* labelled */
            plot_point(&p, one, mib, bits);
        }
        if (model != l->loaded) llm_model_free(model);
    }
    say(l,
        "\nThe whole model in each type, as llm quantize writes it (in 4- and 5-bit types, the "
        "token table has 8 bits, or 6 with q4_K and q5_K). error: root mean square of %s, relative "
        "to its weights. bits per byte: of %d bytes of models/eval.txt. tok/s: one request.\n\n",
        x->tensor_name, x->bytes_of_text);
    show_table(l, &t, "types");
    if (good) show_plot(l, &p);
    else plot_free(&p);
    return good;
}

static int lesson_int4(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    int4 x = {.group = -1, .bytes_of_text = 12000};
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "tensor", "NAME", TEXT, &x.tensor_name, 0, 0,
         "the tensor (default blk.3.ffn_up.weight, or that of the last layer)"},
        {0, "group", "N", WHOLE, &x.group, 0, INT_MAX,
         "which 32 of its weights, from 0 (default 100)"},
        {0, "text", "BYTES", WHOLE, &x.bytes_of_text, 100, INT_MAX,
         "of models/eval.txt to measure on (default 12000 of its 82706)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, "models/tales.gguf");
    if (status != PARSED) return status;
    bool good = int4_find(&l, &x);
    if (good) {
        int4_group(&l, &x);
        int4_histogram(&l, &x);
        good = int4_types(&l, &x);
    }
    free(x.values);
    return lesson_end(&l, good);
}

static const char int4_notes[] =
    "Shows one group of 32 weights in q4_0, then measures the error, the quality and the speed of\n"
    "each type. Starts from a model in f16, bf16 or f32 (default: the bundled models/tales.gguf)\n"
    "and writes a temporary file in TMPDIR for each type.\n"
    "\n"
    "Examples:\n"
    "  llm lesson int4\n"
    "  llm lesson int4 --text 1000000 --tensor blk.0.attn_q.weight --svg int4.svg\n";

const command int4_lesson = {
    "lesson int4", "4-bit weights: one group, then all types compared.", "[options]",
    lesson_int4, int4_notes};
