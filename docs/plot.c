/* plot.c - implements plot.h */
#include "plot.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) /* third-party code */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wsign-compare"
#pragma GCC diagnostic ignored "-Wunused-but-set-variable"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wmissing-braces"
#endif
#define STB_IMAGE_WRITE_STATIC
#define STB_IMAGE_WRITE_IMPLEMENTATION
#include "stb/stb_easy_font.h"
#include "stb/stb_image_write.h"
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

double larger(double a, double b) { return a > b ? a : b; }

plot plot_new(plot_kind kind, const char *title, const char *x_label, const char *y_label) {
    plot p;
    memset(&p, 0, sizeof p);
    p.kind = kind;
    snprintf(p.title, sizeof p.title, "%s", title);
    snprintf(p.x_label, sizeof p.x_label, "%s", x_label);
    snprintf(p.y_label, sizeof p.y_label, "%s", y_label);
    return p;
}

void plot_free(plot *p) {
    for (int i = 0; i < p->n_series; i++) {
        free(p->series[i].x);
        free(p->series[i].y);
    }
    free(p->series);
    free(p->categories);
    free(p->cells);
    memset(p, 0, sizeof *p);
}

/* Make room for n items. False: out of memory, and p->failed is set. */
static bool plot_grow(plot *p, void *items, size_t n, size_t size) {
    void *old, *grown;
    memcpy(&old, items, sizeof old);
    grown = realloc(old, n * size);
    if (grown) memcpy(items, &grown, sizeof grown);
    else p->failed = true;
    return grown != NULL;
}

int plot_series_add(plot *p, const char *name) {
    static const char marks[] = "ox+*#@%&abcdefghijklmn";
    if (!plot_grow(p, &p->series, (size_t)p->n_series + 1, sizeof *p->series)) return -1;
    plot_series *s = &p->series[p->n_series];
    memset(s, 0, sizeof *s);
    snprintf(s->name, sizeof s->name, "%s", name);
    s->mark = marks[p->n_series % 22];
    s->colour = p->n_series % PLOT_COLOURS;
    return p->n_series++;
}

void plot_point(plot *p, int series, double x, double y) {
    if (series < 0 || series >= p->n_series) return;
    plot_series *s = &p->series[series];
    if (s->n == s->capacity) {
        int wanted = s->capacity ? 2 * s->capacity : 16;
        if (!plot_grow(p, &s->x, (size_t)wanted, sizeof(double)) ||
            !plot_grow(p, &s->y, (size_t)wanted, sizeof(double)))
            return;
        s->capacity = wanted;
    }
    s->x[s->n] = x;
    s->y[s->n++] = y;
}

void plot_category(plot *p, const char *name) {
    if (!plot_grow(p, &p->categories, (size_t)p->n_categories + 1, sizeof *p->categories)) return;
    snprintf(p->categories[p->n_categories++], sizeof *p->categories, "%s", name);
}

void plot_bar(plot *p, int series, double value) {
    plot_point(p, series, p->n_categories - 1, value);
}

void plot_cell(plot *p, int row, int column, int series) {
    size_t rows = (size_t)p->n_categories;
    if (row < 0 || row >= p->n_categories || column < 0) return;
    if (column >= p->columns) {
        if (!plot_grow(p, &p->cells, ((size_t)column + 1) * rows, 1)) return;
        memset(p->cells + (size_t)p->columns * rows, 0, (size_t)(column + 1 - p->columns) * rows);
        p->columns = column + 1;
    }
    p->cells[(size_t)column * rows + (size_t)row] = (uint8_t)(series + 1);
}

/* ---- Numbers and axes -------------------------------------------------------------------- */

/* Write a number in a few characters: 1.5, 20k, 3.2M. */
static const char *plot_number(double x, char *out, size_t size) {
    double a = fabs(x);
    if (a >= 1e9 && a < 1e15) snprintf(out, size, "%.4gG", x / 1e9);
    else if (a >= 1e6 && a < 1e9) snprintf(out, size, "%.4gM", x / 1e6);
    else if (a >= 1e4 && a < 1e6) snprintf(out, size, "%.4gk", x / 1e3);
    else snprintf(out, size, a >= 100 ? "%.0f" : "%.3g", x);
    return out;
}
#define PLOT_NUMBER(x) plot_number(x, (char[32]){0}, 32)

typedef struct plot_axis {
    double low, high;
    bool logarithmic;
    double ticks[24];
    int n_ticks, decimals; /* decimals of the labels */
} plot_axis;

static const char *plot_label(const plot_axis *a, double x, char *out, size_t size) {
    if (a->logarithmic || fabs(x) >= 1e4 || a->decimals == 0) return plot_number(x, out, size);
    snprintf(out, size, "%.*f", a->decimals, x);
    return out;
}
#define PLOT_LABEL(axis, x) plot_label(axis, x, (char[32]){0}, 32)

/* Position along the axis, 0 to 1. */
static double plot_place(const plot_axis *a, double x) {
    if (a->logarithmic) return x > 0 ? (log(x) - log(a->low)) / (log(a->high) - log(a->low)) : 0;
    return (x - a->low) / (a->high - a->low);
}

static void plot_tick(plot_axis *a, double x) {
    double slack = 1e-9 * (a->high - a->low);
    if (x >= a->low - slack && x <= a->high + slack &&
        a->n_ticks < (int)(sizeof a->ticks / sizeof *a->ticks))
        a->ticks[a->n_ticks++] = x;
}

/* An axis with round ends, and ticks in steps of 1, 2 or 5 times a power of ten. */
static plot_axis plot_axis_of(double low, double high, bool logarithmic) {
    plot_axis a = {low, high, logarithmic, {0}, 0, 0};
    if (logarithmic) {
        if (!(a.low > 0)) a.low = a.high > 0 ? a.high / 1e3 : 1;
        if (!(a.high > a.low)) a.high = a.low * 10;
        double first = pow(10, floor(log10(a.low) + 1e-9));
        static const double parts[] = {1, 2, 5, 10};
        for (int i = 0; i < 3; i++)
            if (first * parts[i + 1] > a.low * (1 + 1e-9)) {
                a.low = first * parts[i];
                break;
            }
        double last = pow(10, floor(log10(a.high) - 1e-9));
        for (int i = 1; i < 4; i++)
            if (last * parts[i] >= a.high * (1 - 1e-9)) {
                a.high = last * parts[i];
                break;
            }
        bool fine = a.high / a.low <= 2000;
        for (double decade = first; decade <= a.high * 1.001; decade *= 10)
            for (int i = 0; i < (fine ? 3 : 1); i++) plot_tick(&a, decade * parts[i]);
        return a;
    }
    if (a.low > 0 && a.low < 0.5 * a.high) a.low = 0;
    if (!(a.high > a.low)) a.high = a.low + 1;
    double raw = (a.high - a.low) / 6, power = pow(10, floor(log10(raw))), step = power;
    if (raw > 5 * power) step = 10 * power;
    else if (raw > 2 * power) step = 5 * power;
    else if (raw > power) step = 2 * power;
    if (step < 1) a.decimals = (int)ceil(-log10(step) - 1e-9);
    a.low = floor(a.low / step + 1e-9) * step;
    if (a.low != 0 && a.low > low - 0.05 * step) a.low -= step; /* keep points off the axis */
    a.high = ceil(a.high / step - 1e-9) * step;
    for (double x = a.low; x <= a.high + step / 2; x += step)
        plot_tick(&a, fabs(x) < step / 1e6 ? 0 : x);
    return a;
}

static plot_axis plot_axis_over(const plot *p, bool vertical) {
    double low = INFINITY, high = -INFINITY;
    bool logarithmic = vertical ? p->log_y : p->log_x;
    for (int s = 0; s < p->n_series; s++)
        for (int i = 0; i < p->series[s].n; i++) {
            double v = vertical ? p->series[s].y[i] : p->series[s].x[i];
            if (!isfinite(v) || (logarithmic && v <= 0)) continue;
            low = fmin(low, v);
            high = larger(high, v);
        }
    if (!(low <= high)) low = 0, high = 1;
    if (p->named_dots && vertical && !logarithmic)
        low -= 0.05 * (high - low); /* keep names off the axis */
    return plot_axis_of(low, high, logarithmic);
}

/* The axis for the lengths of bars. */
static plot_axis plot_axis_of_bars(const plot *p) {
    double low = INFINITY, high = 0;
    for (int k = 0; k < p->n_categories; k++) {
        double sum = 0;
        for (int s = 0; s < p->n_series; s++) {
            double v = k < p->series[s].n && isfinite(p->series[s].y[k]) ? p->series[s].y[k] : 0;
            sum = p->stacked ? sum + v : v;
            high = larger(high, sum);
            if (v > 0) low = fmin(low, v);
        }
    }
    if (!(low <= high)) low = 0;
    return plot_axis_of(p->log_x ? low * 0.8 : 0, high, p->log_x);
}

static double plot_clamp(double x) { return x < 0 ? 0 : x > 1 ? 1 : x; }

/* ---- As text ----------------------------------------------------------------------------- */

/* Colours for a terminal with 256: blue, orange, sky, brick, pale, grey, purple, light grey. */
static const int plot_terminal_colours[] = {27, 214, 38, 166, 153, 245, 134, 252};
enum { PLOT_NAMES = 22, PLOT_ROWS = 12 };

typedef struct plot_out {
    plot_sink sink;
    bool colour;
} plot_out;

static void plot_say(const plot_out *o, const char *text) { o->sink(text, strlen(text)); }

static void plot_pad(const plot_out *o, const char *text, int width, bool right) {
    int n = (int)strlen(text);
    if (right)
        for (int i = n; i < width; i++) plot_say(o, " ");
    o->sink(text, (size_t)(n < width || !width ? n : width));
    if (!right)
        for (int i = n; i < width; i++) plot_say(o, " ");
}

static void plot_colour(const plot_out *o, int colour, bool background) {
    char code[32];
    snprintf(code, sizeof code, "\033[%d;5;%dm", background ? 48 : 38,
             plot_terminal_colours[colour % PLOT_COLOURS]);
    if (o->colour) plot_say(o, background ? "\033[30m" : "");
    if (o->colour) plot_say(o, code);
}

static void plot_plain(const plot_out *o) {
    if (o->colour) plot_say(o, "\033[0m");
}

static const char *const plot_shades[] = {"█", "▒", "░", "▓", "▚", "▤", "▞", "▨"};

/* Print the legend of marks or shades, wrapped to the width. */
static void plot_text_legend(const plot *p, const plot_out *o, int width) {
    int at = 2;
    if (p->n_series < 2 && p->kind != PLOT_MAP) return;
    for (int s = 0; s < p->n_series; s++) {
        int n = (int)strlen(p->series[s].name) + 5;
        if (!p->series[s].name[0]) continue;
        bool wrap = at > 2 && at + n > width;
        plot_say(o, wrap ? "\n  " : at > 2 ? "   " : "  ");
        if (wrap) at = 2;
        plot_colour(o, p->series[s].colour, p->kind == PLOT_MAP);
        if (p->kind == PLOT_BARS) plot_say(o, plot_shades[s % PLOT_COLOURS]);
        else o->sink(&p->series[s].mark, 1);
        plot_plain(o);
        plot_say(o, " ");
        plot_say(o, p->series[s].name);
        at += n;
    }
    plot_say(o, p->series[0].name[0] ? "\n" : "");
}

static void plot_text_x_axis(const plot *p, const plot_out *o, const plot_axis *x, int left,
                             int width) {
    char line[256];
    memset(line, ' ', sizeof line);
    int end = 0;
    for (int i = 0; i < x->n_ticks; i++) {
        const char *label = PLOT_LABEL(x, x->ticks[i]);
        int n = (int)strlen(label),
            at = left + (int)(plot_place(x, x->ticks[i]) * (width - 1) + 0.5) - n / 2;
        if (at + n > left + width) at = left + width - n;
        if (at <= end || at + n > (int)sizeof line) continue;
        memcpy(line + at, label, (size_t)n);
        end = at + n;
    }
    o->sink(line, (size_t)end);
    plot_say(o, "\n");
    int n = (int)strlen(p->x_label);
    if (!n) return;
    plot_pad(o, "", left + (width > n ? (width - n) / 2 : 0), false);
    plot_say(o, p->x_label);
    plot_say(o, "\n");
}

static void plot_text_lines(const plot *p, const plot_out *o, int width) {
    enum { LEFT = 9, MOST = 120 };
    plot_axis x = plot_axis_over(p, false), y = plot_axis_over(p, true);
    int columns = width - LEFT - 1 < MOST ? width - LEFT - 1 : MOST;
    uint8_t canvas[PLOT_ROWS][MOST];
    memset(canvas, 0, sizeof canvas);
    for (int s = 0; s < p->n_series; s++)
        for (int i = 0; i < p->series[s].n; i++) {
            const plot_series *one = &p->series[s];
            if (!isfinite(one->x[i]) || !isfinite(one->y[i])) continue;
            int column = (int)(plot_clamp(plot_place(&x, one->x[i])) * (columns - 1) + 0.5);
            int row = PLOT_ROWS - 1 -
                      (int)(plot_clamp(plot_place(&y, one->y[i])) * (PLOT_ROWS - 1) + 0.5);
            canvas[row][column] = (uint8_t)(s + 1);
        }
    if (p->y_label[0]) {
        plot_say(o, "  ");
        plot_say(o, p->y_label);
        plot_say(o, "\n");
    }
    for (int row = 0; row < PLOT_ROWS; row++) {
        char label[32] = "";
        for (int i = 0; i < y.n_ticks; i++)
            if (PLOT_ROWS - 1 - (int)(plot_place(&y, y.ticks[i]) * (PLOT_ROWS - 1) + 0.5) == row)
                plot_label(&y, y.ticks[i], label, sizeof label);
        plot_pad(o, label, LEFT - 1, true);
        plot_say(o, *label ? "┤" : "│");
        int end = columns;
        while (end > 0 && !canvas[row][end - 1]) end--;
        for (int column = 0; column < end; column++) {
            int s = canvas[row][column] - 1;
            if (s < 0) {
                plot_say(o, " ");
                continue;
            }
            plot_colour(o, p->series[s].colour, false);
            o->sink(&p->series[s].mark, 1);
            plot_plain(o);
        }
        plot_say(o, "\n");
    }
    plot_pad(o, "", LEFT - 1, false);
    plot_say(o, "└");
    for (int i = 0; i < columns; i++) plot_say(o, "─");
    plot_say(o, "\n");
    plot_text_x_axis(p, o, &x, LEFT, columns);
}

/* A bar: in eighths of a character if there is one series, else in whole shaded characters. */
static void plot_text_bar(const plot_out *o, double length, int series, bool alone) {
    static const char *const eighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
    int n = (int)(length * 8 + 0.5);
    if (!alone) n = (n + 4) / 8 * 8;
    plot_colour(o, series, false);
    for (; n >= 8; n -= 8) plot_say(o, plot_shades[alone ? 0 : series % PLOT_COLOURS]);
    plot_say(o, eighths[n > 0 ? n : 0]);
    plot_plain(o);
}

static void plot_text_bars(const plot *p, const plot_out *o, int width) {
    plot_axis x = plot_axis_of_bars(p);
    int names = 0;
    for (int k = 0; k < p->n_categories; k++) {
        int n = (int)strlen(p->categories[k]);
        if (n > names) names = n;
    }
    if (names > PLOT_NAMES) names = PLOT_NAMES;
    int room = width - names - 12;
    for (int k = 0; k < p->n_categories; k++) {
        double sum = 0;
        for (int s = 0; s < p->n_series; s++) {
            double v = k < p->series[s].n && isfinite(p->series[s].y[k]) ? p->series[s].y[k] : 0;
            bool first = s == 0, last = s == p->n_series - 1;
            if (first || !p->stacked) {
                plot_pad(o, first ? p->categories[k] : "", names, false);
                plot_say(o, " │");
            }
            double from = sum > 0 ? plot_clamp(plot_place(&x, sum)) : 0;
            sum = p->stacked ? sum + v : v;
            double to = plot_clamp(plot_place(&x, sum));
            plot_text_bar(o, (to - (p->stacked ? from : 0)) * room, s, p->n_series == 1);
            if (last || !p->stacked) {
                plot_say(o, " ");
                plot_say(o, PLOT_NUMBER(sum));
                plot_say(o, "\n");
            }
            if (!p->stacked) sum = 0;
        }
    }
    if (p->x_label[0]) {
        plot_pad(o, "", names + 2, false);
        plot_say(o, p->x_label);
        plot_say(o, "\n");
    }
}

static void plot_text_map(const plot *p, const plot_out *o, int width) {
    int names = 0;
    for (int k = 0; k < p->n_categories; k++) {
        int n = (int)strlen(p->categories[k]);
        if (n > names) names = n;
    }
    if (names > PLOT_NAMES) names = PLOT_NAMES;
    int room = width - names - 2, every = (p->columns + room - 1) / (room > 0 ? room : 1);
    if (every < 1) every = 1;
    for (int row = 0; row < p->n_categories; row++) {
        plot_pad(o, p->categories[row], names, true);
        plot_say(o, " ");
        for (int column = 0; column < p->columns; column += every) {
            int s = p->cells[(size_t)column * (size_t)p->n_categories + (size_t)row] - 1;
            if (s < 0 || s >= p->n_series) {
                plot_say(o, "·");
                continue;
            }
            plot_colour(o, p->series[s].colour, true);
            o->sink(&p->series[s].mark, 1);
            plot_plain(o);
        }
        plot_say(o, "\n");
    }
    char label[128] = "";
    if (every > 1) snprintf(label, sizeof label, "%s (one column in %d)", p->x_label, every);
    else snprintf(label, sizeof label, "%s", p->x_label);
    plot_pad(o, "", names + 1, false);
    plot_say(o, label);
    plot_say(o, "\n");
}

void plot_text(const plot *p, plot_sink sink, int width, bool colour) {
    plot_out o = {sink, colour};
    plot_say(&o, "  ");
    plot_say(&o, p->title);
    plot_say(&o, "\n");
    plot_text_legend(p, &o, width);
    if (p->kind == PLOT_LINES) plot_text_lines(p, &o, width);
    else if (p->kind == PLOT_BARS) plot_text_bars(p, &o, width);
    else plot_text_map(p, &o, width);
}

/* ---- As a picture ---------------------------------------------------------------------------
 * Drawn at twice the size and halved at the end, which smooths the edges. All lengths are in
 * pixels of the result. */
typedef struct plot_rgb { uint8_t r, g, b; } plot_rgb;

/* Navy, orange, blue, brick, pale blue, grey, purple, light grey. In grey they are 12, 63, 41,
 * 29, 84, 52, 21 and 73 % of white: all different, with large steps between neighbours. */
static const plot_rgb plot_palette[] = {{0x0e, 0x1e, 0x60}, {0xe6, 0x9f, 0x00}, {0x22, 0x7d, 0xb4},
                                        {0x9c, 0x2f, 0x00}, {0xb4, 0xe0, 0xf6}, {0x85, 0x85, 0x85},
                                        {0x5c, 0x18, 0x6e}, {0xbb, 0xbb, 0xbb}};
static const plot_rgb plot_ink = {0x22, 0x22, 0x22}, plot_faint = {0xdd, 0xdd, 0xdd},
                      plot_white = {0xff, 0xff, 0xff};

/* The colour of letters on a background: white on a dark one. */
static plot_rgb plot_ink_on(int colour) {
    plot_rgb c = plot_palette[colour % PLOT_COLOURS];
    return 299 * c.r + 587 * c.g + 114 * c.b < 115000 ? plot_white : plot_ink;
}

enum { PLOT_WIDTH = 940, PLOT_SCALE = 2 };

typedef struct plot_canvas {
    int width, height; /* in drawn pixels, two per pixel of the result */
    uint8_t *pixels;   /* (height, width, 3) */
} plot_canvas;

static void plot_fill(plot_canvas *c, double x0, double y0, double x1, double y1, plot_rgb colour) {
    int left = (int)(x0 * PLOT_SCALE + 0.5), top = (int)(y0 * PLOT_SCALE + 0.5);
    int right = (int)(x1 * PLOT_SCALE + 0.5), bottom = (int)(y1 * PLOT_SCALE + 0.5);
    for (int y = top < 0 ? 0 : top; y < bottom && y < c->height; y++)
        for (int x = left < 0 ? 0 : left; x < right && x < c->width; x++)
            memcpy(c->pixels + ((size_t)y * (size_t)c->width + (size_t)x) * 3, &colour, 3);
}

/* The dot of a series. shape 0 to 4: circle, square, diamond, x, +. */
static void plot_dot(plot_canvas *c, double x, double y, double size, int shape, plot_rgb colour) {
    for (double dy = -size; dy <= size; dy += 0.5)
        for (double dx = -size; dx <= size; dx += 0.5) {
            double a = fabs(dx), b = fabs(dy);
            bool inside = shape == 0   ? a * a + b * b <= size * size
                          : shape == 1 ? true
                          : shape == 2 ? a + b <= size * 1.2
                          : shape == 3 ? fabs(a - b) <= 1.2
                                       : a <= 1.2 || b <= 1.2;
            if (inside) plot_fill(c, x + dx, y + dy, x + dx + 0.5, y + dy + 0.5, colour);
        }
}

static void plot_line(plot_canvas *c, double x0, double y0, double x1, double y1, double width,
                      plot_rgb colour) {
    double length = hypot(x1 - x0, y1 - y0);
    int steps = (int)(length * PLOT_SCALE) + 1;
    for (int i = 0; i <= steps; i++) {
        double t = (double)i / steps, x = x0 + t * (x1 - x0), y = y0 + t * (y1 - y0);
        plot_fill(c, x - width / 2, y - width / 2, x + width / 2, y + width / 2, colour);
    }
}

/* stb_easy_font has only ASCII: replace other characters by `?`. */
static void plot_ascii(const char *text, char *out, size_t size) {
    size_t n = 0;
    for (; *text && n + 1 < size; text++)
        if ((*text & 0xC0) != 0x80 || !(*text & 0x80))
            out[n++] = *text >= ' ' && *text <= '~' ? *text : '?';
    out[n] = 0;
}

enum { PLOT_LETTER = 2, PLOT_LETTER_HEIGHT = 7 * PLOT_LETTER };

static double plot_width_of(const char *text, double scale) {
    char ascii[160];
    plot_ascii(text, ascii, sizeof ascii);
    return stb_easy_font_width(ascii) * scale;
}

/* align: x is the left end (0), the centre (0.5) or the right end (1) of the text. */
static void plot_letters(plot_canvas *c, double x, double y, const char *text, double scale,
                         double align, bool upright, plot_rgb colour) {
    static float quads[20000][4][4]; /* x, y, z and the colour: see stb_easy_font.h */
    char ascii[160];
    plot_ascii(text, ascii, sizeof ascii);
    double start = -align * stb_easy_font_width(ascii) * scale;
    int n = stb_easy_font_print(0, 0, ascii, NULL, quads, (int)sizeof quads);
    for (int i = 0; i < n; i++) {
        double x0 = start + quads[i][0][0] * scale, y0 = quads[i][0][1] * scale;
        double x1 = start + quads[i][2][0] * scale, y1 = quads[i][2][1] * scale;
        if (upright) plot_fill(c, x + y0, y - x1, x + y1, y - x0, colour); /* bottom to top */
        else plot_fill(c, x + x0, y + y0, x + x1, y + y1, colour);
    }
}

/* The height of the legend; 0: the plot has none. */
static double plot_legend_height(const plot *p) {
    double at = 0, lines = 1;
    if ((p->n_series < 2 && p->kind != PLOT_MAP) || !p->n_series || !p->series[0].name[0] ||
        p->named_dots)
        return 0;
    for (int s = 0; s < p->n_series; s++) {
        double n = plot_width_of(p->series[s].name, PLOT_LETTER) + 50;
        if (at + n > PLOT_WIDTH - 40 && at > 0) at = 0, lines++;
        at += n;
    }
    return lines * 24;
}

enum { PLOT_CELL = 19, PLOT_BAR = 18 };

static int plot_height(const plot *p) {
    double head = 52 + plot_legend_height(p), body = 330;
    if (p->kind == PLOT_MAP) body = p->n_categories * PLOT_CELL;
    if (p->kind == PLOT_BARS)
        body = p->n_categories * ((p->stacked ? 1 : p->n_series) * PLOT_BAR + 10);
    return (int)(head + body + 66);
}

/* Does each point of the series have a dot? Long lines have none. */
static bool plot_has_dots(const plot_series *s) { return s->dots || s->n <= 40; }

static void plot_draw_legend(plot_canvas *c, const plot *p, double y) {
    double at = 20;
    if (plot_legend_height(p) == 0) return;
    for (int s = 0; s < p->n_series; s++) {
        plot_rgb colour = plot_palette[p->series[s].colour % PLOT_COLOURS];
        double n = plot_width_of(p->series[s].name, PLOT_LETTER) + 50;
        if (at + n > PLOT_WIDTH - 20 && at > 20) at = 20, y += 24;
        if (p->kind == PLOT_LINES) {
            if (!p->series[s].dots) plot_line(c, at, y + 7, at + 22, y + 7, 2.5, colour);
            if (plot_has_dots(&p->series[s])) plot_dot(c, at + 11, y + 7, 5, s % 5, colour);
        } else {
            plot_fill(c, at + 4, y - 1, at + 20, y + 15, colour);
            char mark[2] = {p->series[s].mark, 0};
            if (p->kind == PLOT_MAP)
                plot_letters(c, at + 12, y + 2, mark, 1.5, 0.5, false,
                             plot_ink_on(p->series[s].colour));
        }
        plot_letters(c, at + 30, y, p->series[s].name, PLOT_LETTER, 0, false, plot_ink);
        at += n;
    }
}

typedef struct plot_box { double left, top, right, bottom; } plot_box;

static void plot_draw_x_axis(plot_canvas *c, const plot *p, const plot_axis *x, plot_box b) {
    double end = -1e9;
    for (int i = 0; i < x->n_ticks; i++) {
        const char *label = PLOT_LABEL(x, x->ticks[i]);
        double at = b.left + plot_place(x, x->ticks[i]) * (b.right - b.left),
               half = plot_width_of(label, PLOT_LETTER) / 2;
        plot_line(c, at, b.top, at, b.bottom, 0.5, plot_faint);
        plot_line(c, at, b.bottom, at, b.bottom + 5, 1, plot_ink);
        if (at - half < end + 8) continue;
        plot_letters(c, at, b.bottom + 9, label, PLOT_LETTER, 0.5, false, plot_ink);
        end = at + half;
    }
    plot_line(c, b.left, b.bottom, b.right, b.bottom, 1.5, plot_ink);
    plot_letters(c, (b.left + b.right) / 2, b.bottom + 33, p->x_label, PLOT_LETTER, 0.5, false,
                 plot_ink);
}

typedef struct plot_rectangle { double left, top, right, bottom; } plot_rectangle;

/* Write the name of each series next to its last point: to the right, or else where it covers no
 * other name or point. */
static void plot_draw_names(plot_canvas *c, const plot *p, const plot_axis *x, const plot_axis *y,
                            plot_box b) {
    plot_rectangle *taken =
        calloc(2 * (size_t)p->n_series + 1, sizeof *taken); /* the points, then the names */
    for (int s = 0; taken && s < p->n_series; s++) {
        const plot_series *one = &p->series[s];
        if (!one->n) continue;
        double px = b.left + plot_clamp(plot_place(x, one->x[one->n - 1])) * (b.right - b.left);
        double py = b.bottom - plot_clamp(plot_place(y, one->y[one->n - 1])) * (b.bottom - b.top);
        taken[s] = (plot_rectangle){px - 6, py - 6, px + 6, py + 6};
    }
    for (int s = 0; taken && s < p->n_series; s++) {
        const plot_rectangle *dot = &taken[s];
        double width = plot_width_of(p->series[s].name, PLOT_LETTER),
               px = (dot->left + dot->right) / 2, py = (dot->top + dot->bottom) / 2;
        const double places[4][2] = {{px + 9, py - 7},
                                     {px - 9 - width, py - 7},
                                     {px - width / 2, py - 25},
                                     {px - width / 2, py + 11}};
        int place = 0;
        for (bool free_place = false; place < 4 && !free_place; place += !free_place) {
            plot_rectangle *name = &taken[p->n_series + s];
            *name = (plot_rectangle){places[place][0], places[place][1], places[place][0] + width,
                                     places[place][1] + 15};
            free_place = name->right < b.right + 60 && name->left > b.left;
            for (int k = 0; k < p->n_series + s && free_place; k++)
                free_place = k == s || name->right < taken[k].left || name->left > taken[k].right ||
                             name->bottom < taken[k].top || name->top > taken[k].bottom;
        }
        plot_letters(c, places[place % 4][0], places[place % 4][1], p->series[s].name, PLOT_LETTER,
                     0, false, plot_ink);
    }
    free(taken);
}

static void plot_draw_lines(plot_canvas *c, const plot *p, plot_box b) {
    plot_axis x = plot_axis_over(p, false), y = plot_axis_over(p, true);
    b.left = 122;
    plot_draw_x_axis(c, p, &x, b);
    double end = 1e9;
    for (int i = 0; i < y.n_ticks; i++) {
        double at = b.bottom - plot_place(&y, y.ticks[i]) * (b.bottom - b.top);
        plot_line(c, b.left, at, b.right, at, 0.5, plot_faint);
        plot_line(c, b.left - 5, at, b.left, at, 1, plot_ink);
        if (at > end - 18) continue;
        plot_letters(c, b.left - 10, at - 7, PLOT_LABEL(&y, y.ticks[i]), PLOT_LETTER, 1, false,
                     plot_ink);
        end = at;
    }
    plot_line(c, b.left, b.top, b.left, b.bottom, 1.5, plot_ink);
    plot_letters(c, 14, (b.top + b.bottom) / 2 + plot_width_of(p->y_label, PLOT_LETTER) / 2,
                 p->y_label, PLOT_LETTER, 0, true, plot_ink);
    for (int s = 0; s < p->n_series; s++) {
        const plot_series *one = &p->series[s];
        plot_rgb colour = plot_palette[p->series[s].colour % PLOT_COLOURS];
        double before_x = 0, before_y = 0;
        bool before = false;
        for (int i = 0; i < one->n; i++) {
            bool there = isfinite(one->x[i]) && isfinite(one->y[i]);
            double px = b.left + plot_clamp(plot_place(&x, one->x[i])) * (b.right - b.left);
            double py = b.bottom - plot_clamp(plot_place(&y, one->y[i])) * (b.bottom - b.top);
            if (there && before && !one->dots)
                plot_line(c, before_x, before_y, px, py, 2.5, colour);
            if (there && plot_has_dots(one)) plot_dot(c, px, py, 5, s % 5, colour);
            before = there;
            before_x = px;
            before_y = py;
        }
    }
    if (p->named_dots) plot_draw_names(c, p, &x, &y, b);
}

static double plot_widest_category(const plot *p) {
    double widest = 0;
    for (int k = 0; k < p->n_categories; k++)
        widest = larger(widest, plot_width_of(p->categories[k], PLOT_LETTER));
    return widest;
}

static void plot_draw_bars(plot_canvas *c, const plot *p, plot_box b) {
    plot_axis x = plot_axis_of_bars(p);
    b.left = 30 + plot_widest_category(p);
    b.right -= 60; /* room for the numbers */
    plot_draw_x_axis(c, p, &x, b);
    double at = b.top + 5;
    for (int k = 0; k < p->n_categories; k++) {
        double height = (p->stacked ? 1 : p->n_series) * PLOT_BAR, sum = 0, from = b.left;
        plot_letters(c, b.left - 10, at + height / 2 - 7, p->categories[k], PLOT_LETTER, 1, false,
                     plot_ink);
        for (int s = 0; s < p->n_series; s++) {
            double v = k < p->series[s].n && isfinite(p->series[s].y[k]) ? p->series[s].y[k] : 0;
            sum = p->stacked ? sum + v : v;
            double to = b.left + plot_clamp(sum > 0 || !p->log_x ? plot_place(&x, sum) : 0) *
                                     (b.right - b.left);
            double y = at + (p->stacked ? 0 : s * PLOT_BAR);
            plot_fill(c, p->stacked ? from : b.left, y + 1, to, y + PLOT_BAR - 1,
                      plot_palette[p->series[s].colour % PLOT_COLOURS]);
            from = to;
            if (!p->stacked || s == p->n_series - 1)
                plot_letters(c, to + 6, y + 2, PLOT_NUMBER(sum), PLOT_LETTER, 0, false, plot_ink);
        }
        at += height + 10;
    }
    plot_line(c, b.left, b.top, b.left, b.bottom, 1.5, plot_ink);
}

static void plot_draw_map(plot_canvas *c, const plot *p, plot_box b) {
    int columns = p->columns ? p->columns : 1;
    b.left = 30 + plot_widest_category(p);
    double wide = (b.right - b.left) / columns;
    if (wide > 1.2 * PLOT_CELL) wide = 1.2 * PLOT_CELL;
    b.right = b.left + wide * columns;
    plot_axis x = {0, columns, false, {0}, 0, 0};
    double step = columns > 200 ? 50 : columns > 80 ? 20 : columns > 30 ? 10 : 5;
    for (double t = 0; t <= columns; t += step) plot_tick(&x, t);
    b.bottom = b.top + p->n_categories * PLOT_CELL + 2;
    plot_draw_x_axis(c, p, &x, b);
    for (int row = 0; row < p->n_categories; row++) {
        double y = b.top + row * PLOT_CELL;
        plot_letters(c, b.left - 10, y + 3, p->categories[row], PLOT_LETTER, 1, false, plot_ink);
        for (int column = 0, run; column < p->columns; column += run) {
            int s = p->cells[(size_t)column * (size_t)p->n_categories + (size_t)row] - 1;
            for (run = 1; column + run < p->columns; run++) /* cells of the same series */
                if (p->cells[(size_t)(column + run) * (size_t)p->n_categories + (size_t)row] !=
                    s + 1)
                    break;
            bool empty = s < 0 || s >= p->n_series;
            double x = b.left + column * wide;
            plot_rgb colour = empty ? (plot_rgb){0xf2, 0xf2, 0xf2}
                                    : plot_palette[p->series[s].colour % PLOT_COLOURS];
            plot_fill(c, x + 0.5, y + 0.5, x + wide * run - 0.5, y + PLOT_CELL - 0.5, colour);
            if (empty || run * wide < 9) continue;
            char mark[2] = {p->series[s].mark, 0}; /* only in the first cell of a run */
            plot_letters(c, x + (wide < 12 ? 3 : wide / 2), y + 4, mark, 1.5, wide < 12 ? 0 : 0.5,
                         false, plot_ink_on(p->series[s].colour));
        }
    }
    plot_letters(c, 20, b.bottom + 33, p->y_label, PLOT_LETTER, 0, false, plot_ink);
}

static void plot_draw(plot_canvas *c, const plot *p, double top) {
    plot_box b = {110, top + 52 + plot_legend_height(p), PLOT_WIDTH - 30,
                  top + plot_height(p) - 66};
    plot_letters(c, 20, top + 14, p->title, PLOT_LETTER, 0, false, plot_ink);
    plot_letters(c, 20.5, top + 14, p->title, PLOT_LETTER, 0, false, plot_ink); /* bold */
    plot_draw_legend(c, p, top + 42);
    if (p->kind == PLOT_LINES) plot_draw_lines(c, p, b);
    else if (p->kind == PLOT_BARS) plot_draw_bars(c, p, b);
    else plot_draw_map(c, p, b);
}

/* Halve the size: each pixel becomes the mean of four. */
static void plot_halve(plot_canvas *c) {
    for (int y = 0; y < c->height / 2; y++)
        for (int x = 0; x < c->width / 2; x++)
            for (int k = 0; k < 3; k++) {
                const uint8_t *p =
                    c->pixels + ((size_t)(2 * y) * (size_t)c->width + (size_t)(2 * x)) * 3 + k;
                const uint8_t *q = p + (size_t)c->width * 3;
                c->pixels[((size_t)y * (size_t)(c->width / 2) + (size_t)x) * 3 + (size_t)k] =
                    (uint8_t)((p[0] + p[3] + q[0] + q[3] + 2) / 4);
            }
    c->width /= 2;
    c->height /= 2;
}

bool plot_png(const char *path, const plot *plots, int n) {
    int height = 0;
    bool good = true;
    for (int i = 0; i < n; i++) {
        height += plot_height(&plots[i]);
        good = good && !plots[i].failed;
    }
    plot_canvas c = {PLOT_WIDTH * PLOT_SCALE, height * PLOT_SCALE, NULL};
    size_t bytes = (size_t)c.width * (size_t)c.height * 3;
    c.pixels = good && n > 0 ? malloc(bytes) : NULL;
    if (!c.pixels) return false;
    memset(c.pixels, 0xff, bytes);
    double top = 0;
    for (int i = 0; i < n; top += plot_height(&plots[i++])) plot_draw(&c, &plots[i], top);
    plot_halve(&c);
    stbi_write_png_compression_level = 64;
    good = stbi_write_png(path, c.width, c.height, 3, c.pixels, c.width * 3) != 0;
    free(c.pixels);
    return good;
}
