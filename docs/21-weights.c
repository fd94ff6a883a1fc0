/* 21-weights.c - llm lesson weights: what the weights of a layer look like: their size, their
 * distribution, their outliers, and why small groups need fewer bits. See 21-weights.md. */
#include "lesson.h"
#include "program.h"

enum { WEIGHTS_GROUPS = 7, WEIGHTS_BINS = 49 }; /* bins of a quarter sigma, from -6 to 6 sigma */

typedef struct weights {
    lesson *l;
    int layer;
    plot histogram, errors;
} weights;

typedef struct values { /* one tensor, as floats */
    const char *name;
    float *data;      /* (n) */
    int64_t n, row;   /* row: values per row */
    double rms;
} values;

/* Read the values of a tensor. data NULL: there is no such tensor, or memory ran out. */
static values weights_read(const lesson *l, const char *name) {
    values v = {.name = name};
    llm_error err;
    const llm_tensor *t = llm_file_find_tensor(llm_model_file(l->loaded), name);
    if (!t) return v;
    const llm_type_info *type = llm_type_find(t->type);
    v.row = (int64_t)t->dims[0];
    v.n = v.row * (int64_t)(t->dims[1] * t->dims[2] * t->dims[3]);
    v.data = resize(NULL, (size_t)v.n * sizeof *v.data);
    size_t bytes = row_bytes(t->type, t->dims[0]);
    char *packed = resize(NULL, bytes);
    double sum = 0;
    for (int64_t r = 0; r < v.n / v.row; r++) {
        if (!llm_tensor_rows(t, (uint64_t)r, 1, packed, &err)) {
            fail_with(&err);
            free(v.data);
            v.data = NULL;
            break;
        }
        type->unpack(packed, v.data + r * v.row, v.row);
    }
    free(packed);
    for (int64_t i = 0; v.data && i < v.n; i++) sum += (double)v.data[i] * v.data[i];
    v.rms = sqrt(sum / (double)v.n);
    return v;
}

/* The error of rounding to 4 bits with one scale for each `group` values: the largest becomes 7.
 * Root mean square, relative to that of the weights. */
static double weights_error(const values *v, int64_t group) {
    double lost = 0;
    for (int64_t first = 0; first < v->n; first += group) {
        int64_t end = first + group < v->n ? first + group : v->n;
        double largest = 0;
        for (int64_t i = first; i < end; i++) largest = larger(largest, fabs(v->data[i]));
        double scale = largest / 7;
        for (int64_t i = first; i < end && scale > 0; i++) {
            double error = v->data[i] - scale * nearbyint(v->data[i] / scale);
            lost += error * error;
        }
    }
    return sqrt(lost / (double)v->n) / v->rms;
}

/* Add a tensor's row to the tables, and for some products also a line to the plots. */
static void weights_add(weights *x, const values *v, table *shape, table *errors) {
    double largest = 0, fourth = 0, far = 0, bins[WEIGHTS_BINS] = {0};
    int64_t groups[WEIGHTS_GROUPS] = {8, 16, 32, 64, 256, v->row, v->n};
    double e[WEIGHTS_GROUPS];
    const char *dot = strchr(v->name + 4, '.'); /* "blk.3.attn_q.weight" */
    char name[48];
    snprintf(name, sizeof name, "%.*s", (int)strcspn(dot + 1, "."), dot + 1);
    for (int64_t i = 0; i < v->n; i++) {
        double z = v->data[i] / v->rms;
        largest = larger(largest, fabs(z));
        fourth += z * z * z * z;
        far += fabs(z) > 3;
        if (fabs(z) < 6) bins[(int)floor(4 * z + 0.5) + WEIGHTS_BINS / 2]++;
    }
    double n = (double)v->n;
    add_row(shape, name, n, v->rms, largest, 100 * far / n, fourth / n);
    if (v->n == v->row) return; /* a norm */
    for (int i = 0; i < WEIGHTS_GROUPS; i++) e[i] = 100 * weights_error(v, groups[i]);
    add_row(errors, name, e[0], e[1], e[2], e[3], e[4], e[5], e[6]);
    if (strcmp(name, "attn_q") && strcmp(name, "ffn_up") && strcmp(name, "ffn_down")) return;
    int line = plot_series_add(&x->histogram, name), error = plot_series_add(&x->errors, name);
    for (int i = 0; i < WEIGHTS_BINS; i++)
        if (bins[i] > 0)
            plot_point(&x->histogram, line, (i - WEIGHTS_BINS / 2) / 4.0, 4 * bins[i] / n);
    for (int i = 0; i < WEIGHTS_GROUPS; i++)
        if (i != WEIGHTS_GROUPS - 2) plot_point(&x->errors, error, (double)groups[i], e[i]);
}

static bool weights_teach(weights *x) {
    static const char *const names[] = {"attn_norm", "attn_q",   "attn_k", "attn_v",  "attn_output",
                                        "ffn_norm",  "ffn_gate", "ffn_up", "ffn_down"};
    static const column shapes[] = {{"tensor", "tensor", "%s"},  {"values", "values", "%.0f"},
                                    {"rms", "rms", "%.4f"},      {"largest", "largest/rms", "%.1f"},
                                    {"far", "% over 3", "%.2f"}, {"kurtosis", "kurtosis", "%.1f"}};
    static const column rounding[] = {
        {"tensor", "tensor", "%s"}, {"g8", "8", "%.1f"},      {"g16", "16", "%.1f"},
        {"g32", "32", "%.1f"},      {"g64", "64", "%.1f"},    {"g256", "256", "%.1f"},
        {"row", "a row", "%.1f"},   {"all", "all", "%.1f"}};
    table shape = new_table(shapes, COUNT(shapes)), errors = new_table(rounding, COUNT(rounding));
    bool good = true;
    x->histogram = plot_new(PLOT_LINES, "How often a weight has a size",
                            "size / rms", "density");
    x->errors = plot_new(PLOT_LINES, "The error of 4 bits",
                         "weights that share a scale; last: the whole matrix", "% of the rms");
    plot_note(&x->histogram, "Most weights follow a bell curve; those far out are more frequent "
                             "than it predicts.");
    plot_note(&x->errors, "The more weights share a scale, the larger is the largest of them, "
                          "which sets the step of the grid for all.");
    x->histogram.log_y = x->errors.log_x = true;
    int normal = plot_series_add(&x->histogram, "bell curve");
    for (int i = -20; i <= 20; i++)
        plot_point(&x->histogram, normal, i / 4.0, exp(-i * i / 32.0) / sqrt(2 * 3.14159265358979));
    plot_series_add(&x->errors, ""); /* the same colours in both plots */
    for (int i = 0; i < COUNT(names) && good && !stop_requested; i++) {
        char name[48];
        snprintf(name, sizeof name, "blk.%d.%s.weight", x->layer, names[i]);
        values v = weights_read(x->l, name);
        if (v.data) weights_add(x, &v, &shape, &errors);
        free(v.data);
    }
    good = shape.n_cells > 0 || !fail("%s: layer %d has none of the usual tensors", x->l->path,
                                      x->layer);
    say(x->l, "Layer %d. rms: root mean square; \"%% over 3\": weights larger than 3 x rms (of a "
              "bell curve: 0.27); kurtosis: mean of (w / rms)^4 (of a bell curve: 3).\n\n",
        x->layer);
    show_table(x->l, &shape, "tensors");
    say(x->l, "\nThe error of 4 bits, in %% of the rms, if so many weights share a scale:\n\n");
    show_table(x->l, &errors, "errors");
    if (good) show_plot(x->l, &x->histogram);
    else plot_free(&x->histogram);
    if (good) keep_plot(x->l, x->errors);
    else plot_free(&x->errors);
    return good && !stop_requested;
}

static int lesson_weights(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    weights x = {.l = &l, .layer = -1};
    const option options[] = {
        LESSON_OPTIONS(l),
        {0, "layer", "N", WHOLE, &x.layer, 0, 1 << 20, "the layer, from 0 (default 3)"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, "models/tales.gguf");
    if (status != PARSED) return status;
    int last = llm_model_config(l.loaded)->n_layers - 1;
    x.layer = given_or(x.layer, 3, 0, last);
    bool good = x.layer <= last || !fail("layer %d: this model has layers 0 to %d", x.layer, last);
    return lesson_end(&l, good && weights_teach(&x));
}

static const char weights_notes[] =
    "Shows how large the weights of a layer are and how they are distributed, and what that means\n"
    "for 4-bit weights: the more weights share a scale, the larger the error.\n"
    "\n"
    "Examples:\n"
    "  llm lesson weights\n"
    "  llm lesson weights --layer 0 --svg weights.svg\n"
    "  llm lesson weights -m some.gguf --layer 12\n";

const command weights_lesson = {
    "lesson weights", "What the weights of a layer look like, and which need many bits.",
    "[options]", lesson_weights, weights_notes};
