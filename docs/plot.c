/* plot.c - implements plot.h */
#include "plot.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

void plot_note(plot *p, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(p->note, sizeof p->note, format, arguments);
    va_end(arguments);
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
    s->named_at = -1;
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
    if (vertical && !logarithmic && p->n_series && p->series[0].dots)
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
    bool any = false;
    if (p->n_series < 2 && p->kind != PLOT_MAP) return;
    for (int s = 0; s < p->n_series; s++) {
        int n = (int)strlen(p->series[s].name) + 5;
        if (!p->series[s].name[0]) continue;
        any = true;
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
    plot_say(o, any ? "\n" : "");
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

/* ---- As a picture ------------------------------------------------------------------------ */

enum { PLOT_MARGIN = 28, PLOT_LETTER = 14, PLOT_LINE = 20, PLOT_BAR = 17 };
typedef struct plot_box { double left, top, right, bottom; } plot_box;

static double plot_width_of(const char *text) {
    return scene_text_width(text, PLOT_LETTER, false);
}

static void plot_words(scene *s, int colour, double x, double y, double align, const char *text) {
    scene_text(s, colour, PLOT_LETTER, x, y, align, false, text);
}

/* Write a sentence in lines that fit. Returns the base line after them. */
static double plot_paragraph(scene *s, double y, const char *text) {
    char line[160];
    while (*text) {
        int n = 0, end = 0; /* end: after the last word that fits */
        while (text[n] && n < (int)sizeof line - 1) {
            n += 1 + (int)strcspn(text + n + 1, " ");
            snprintf(line, sizeof line, "%.*s", n, text);
            if (end && plot_width_of(line) > SCENE_WIDTH - 2 * PLOT_MARGIN) break;
            end = n;
        }
        snprintf(line, sizeof line, "%.*s", end, text);
        plot_words(s, SCENE_MUTED, PLOT_MARGIN, y, 0, line);
        text += end + (text[end] == ' ');
        y += PLOT_LINE;
    }
    return y;
}

/* Draw the dot of a series: circle, square, diamond, x or +; for a series with many points, a small
 * circle. */
static void plot_dot(scene *s, double x, double y, int shape, int colour) {
    double r = shape < 0 ? 2.5 : 4.5;
    if (shape <= 0) scene_line(s, colour, 2 * r, x, y, x, y);
    if (shape == 1) scene_rectangle(s, colour, x - 4, y - 4, x + 4, y + 4);
    if (shape == 2)
        scene_polygon(s, colour, (double[]){x, x + 6, x, x - 6}, (double[]){y - 6, y, y + 6, y}, 4);
    if (shape == 3) scene_line(s, colour, 2.5, x - r, y - r, x + r, y + r);
    if (shape == 3) scene_line(s, colour, 2.5, x - r, y + r, x + r, y - r);
    if (shape == 4) scene_line(s, colour, 2.5, x - 6, y, x + 6, y);
    if (shape == 4) scene_line(s, colour, 2.5, x, y - 6, x, y + 6);
}

/* Draw the legend of bars or of a map. Returns the base line after it. */
static double plot_draw_legend(scene *s, const plot *p, double y) {
    double at = PLOT_MARGIN;
    bool any = false;
    for (int i = 0; i < p->n_series && (p->n_series > 1 || p->kind == PLOT_MAP); i++) {
        const plot_series *one = &p->series[i];
        double width = plot_width_of(one->name) + 48;
        if (!one->name[0]) continue;
        if (any && at + width > SCENE_WIDTH - PLOT_MARGIN) at = PLOT_MARGIN, y += PLOT_LINE + 4;
        any = true;
        scene_rectangle(s, one->colour, at, y - 13, at + 17, y + 4);
        char mark[2] = {one->mark, 0};
        if (p->kind == PLOT_MAP)
            scene_text(s, SCENE_ON + one->colour, 12, at + 8.5, y, 0.5, false, mark);
        plot_words(s, SCENE_INK, at + 24, y, 0, one->name);
        at += width;
    }
    return any ? y + PLOT_LINE + 6 : y;
}

static void plot_draw_x_axis(scene *s, const plot *p, const plot_axis *x, plot_box b) {
    double end = -1e9;
    for (int i = 0; i < x->n_ticks; i++) {
        double at = b.left + plot_place(x, x->ticks[i]) * (b.right - b.left);
        scene_line(s, SCENE_GRID, 1, at, b.top, at, b.bottom);
    }
    for (int i = 0; i < x->n_ticks; i++) {
        const char *label = PLOT_LABEL(x, x->ticks[i]);
        double at = b.left + plot_place(x, x->ticks[i]) * (b.right - b.left),
               half = plot_width_of(label) / 2;
        if (at - half < end + 10) continue;
        plot_words(s, SCENE_MUTED, at, b.bottom + PLOT_LINE, 0.5, label);
        end = at + half;
    }
    plot_words(s, SCENE_INK, (b.left + b.right) / 2, b.bottom + 2.1 * PLOT_LINE, 0.5, p->x_label);
}

static void plot_point_of(const plot_series *one, int i, const plot_axis *x, const plot_axis *y,
                          plot_box b, double *px, double *py) {
    *px = b.left + plot_clamp(plot_place(x, one->x[i])) * (b.right - b.left);
    *py = b.bottom - plot_clamp(plot_place(y, one->y[i])) * (b.bottom - b.top);
}

/* The point of a series next to which its name is written; -1: it has no name. */
static int plot_named_point(const plot *p, const plot_series *one) {
    int i = one->named_at >= 0 && one->named_at < one->n ? one->named_at : one->n - 1;
    while (i >= 0 && !(isfinite(one->x[i]) && isfinite(one->y[i]))) i--;
    return one->name[0] && p->n_series > 1 ? i : -1;
}

/* Is the name of a series to the right of the axes? True for a line that ends there. */
static bool plot_ends_right(const plot *p, const plot_series *one, const plot_axis *x) {
    int i = plot_named_point(p, one);
    return i >= 0 && !one->dots && plot_place(x, one->x[i]) > 0.9;
}

/* Does each point of the series have a dot? Long lines have none. */
static bool plot_has_dots(const plot_series *s) { return s->dots || s->n <= 40; }

/* Count the points of lines, and the names written before, that the name of a series would cover.
 * It must not be near a dot of another series either: it would look like that one's name. */
static int plot_covered(const plot *p, const plot_series *named, const plot_axis *x,
                        const plot_axis *y, plot_box b, plot_box name, const plot_box *names) {
    int covered = 0;
    for (int s = 0; s < p->n_series; s++) {
        const plot_series *one = &p->series[s];
        double x0 = 0, y0 = 0, x1, y1, around = one == named || !plot_has_dots(one) ? 5 : 14;
        for (int i = 0; i < one->n; i++, x0 = x1, y0 = y1) {
            plot_point_of(one, i, x, y, b, &x1, &y1);
            for (int k = i && !one->dots ? 0 : 15; k < 16; k++) {
                double px = x1 + (x0 - x1) * (15 - k) / 16, py = y1 + (y0 - y1) * (15 - k) / 16,
                       apart = k == 15 ? around : 5;
                covered += px > name.left - apart && px < name.right + apart &&
                           py > name.top + 2 - apart && py < name.bottom - 2 + apart;
            }
        }
        if (name.right > names[s].left && name.left < names[s].right &&
            name.bottom > names[s].top && name.top < names[s].bottom)
            covered += 100;
    }
    return covered + (name.left < b.left || name.right > SCENE_WIDTH - 8 || name.top < b.top - 8 ||
                      name.bottom > b.bottom ? 1000 : 0);
}

/* Write each name next to its point or the first one, where it covers least. */
static void plot_draw_names(scene *s, const plot *p, const plot_axis *x, const plot_axis *y,
                            plot_box b) {
    plot_box *names = calloc((size_t)p->n_series + 1, sizeof *names);
    for (int k = 0; names && k < p->n_series; k++) {
        const plot_series *one = &p->series[k];
        int i = plot_named_point(p, one);
        double px, py, width = plot_width_of(one->name);
        if (i < 0 || plot_ends_right(p, one, x)) continue;
        const double places[8][2] = {{10, 5},          {-10 - width, 5}, {-width / 2, -11},
                                     {-width / 2, 21}, {8, 20},          {8, -9},
                                     {-8 - width, -9}, {-8 - width, 20}};
        plot_box best = {0};
        for (int place = 0, least = 1 << 30; place < 16 && least > 0; place++) {
            plot_point_of(one, place < 8 ? i : 0, x, y, b, &px, &py);
            px += places[place % 8][0], py += places[place % 8][1];
            plot_box name = {px, py - 12, px + width, py + 4};
            int covered = plot_covered(p, one, x, y, b, name, names);
            if (covered >= least) continue;
            least = covered;
            best = name;
        }
        names[k] = best;
        plot_words(s, SCENE_INK, best.left, best.bottom - 4, 0, one->name);
    }
    free(names);
}

/* Write the names of lines that end at the right edge, one below the other. */
static void plot_draw_names_right(scene *s, const plot *p, const plot_axis *x, const plot_axis *y,
                                  plot_box b) {
    double *at = calloc((size_t)p->n_series + 1, sizeof *at), px, py;
    for (int k = 0; at && k < p->n_series; k++) {
        at[k] = -1e6 * (k + 1); /* far from all others */
        if (!plot_ends_right(p, &p->series[k], x)) continue;
        plot_point_of(&p->series[k], plot_named_point(p, &p->series[k]), x, y, b, &px, &at[k]);
        if (at[k] > b.bottom - 8) at[k] = b.bottom - 8;
    }
    for (int pass = 0; at && pass < 100; pass++)
        for (int i = 0; i < p->n_series; i++)
            for (int k = i + 1; k < p->n_series; k++) {
                double apart = PLOT_LINE - fabs(at[i] - at[k]), up = at[i] <= at[k] ? -1 : 1;
                if (apart > 0) at[i] += up * apart / 2, at[k] -= up * apart / 2;
            }
    for (int k = 0; at && k < p->n_series; k++) {
        if (at[k] < 0) continue;
        plot_point_of(&p->series[k], plot_named_point(p, &p->series[k]), x, y, b, &px, &py);
        scene_line(s, p->series[k].colour, 1, px + 7, py, b.right + 16, at[k]);
        plot_words(s, SCENE_INK, b.right + 21, at[k] + 5, 0, p->series[k].name);
    }
    free(at);
}

static void plot_draw_series(scene *s, const plot_series *one, int shape, const plot_axis *x,
                             const plot_axis *y, plot_box b) {
    double x0 = 0, y0 = 0, px, py;
    bool before = false;
    for (int i = 0; i < one->n && !one->dots; i++) {
        bool there = isfinite(one->x[i]) && isfinite(one->y[i]);
        plot_point_of(one, i, x, y, b, &px, &py);
        if (there && before && i < one->n - 1 && hypot(px - x0, py - y0) < 1) continue;
        if (there && before) scene_line(s, one->colour, 2.5, x0, y0, px, py);
        before = there;
        x0 = px, y0 = py;
    }
    for (int i = 0; i < one->n && plot_has_dots(one); i++) {
        if (!isfinite(one->x[i]) || !isfinite(one->y[i])) continue;
        plot_point_of(one, i, x, y, b, &px, &py);
        plot_dot(s, px, py, one->n > 100 ? -1 : shape, one->colour);
    }
}

static double plot_draw_lines(scene *s, const plot *p, plot_box b) {
    plot_axis x = plot_axis_over(p, false), y = plot_axis_over(p, true);
    double widest = 0, margin = 0, end = 1e9;
    for (int i = 0; i < y.n_ticks; i++)
        widest = larger(widest, plot_width_of(PLOT_LABEL(&y, y.ticks[i])));
    for (int i = 0; i < p->n_series; i++)
        if (plot_ends_right(p, &p->series[i], &x))
            margin = larger(margin, plot_width_of(p->series[i].name) + 21);
    plot_words(s, SCENE_INK, PLOT_MARGIN, b.top, 0, p->y_label);
    b.top += p->y_label[0] ? 18 : 0;
    b.bottom = b.top + 330;
    b.left += widest + 12;
    b.right -= larger(margin, 12);
    plot_draw_x_axis(s, p, &x, b);
    for (int i = 0; i < y.n_ticks; i++) {
        double at = b.bottom - plot_place(&y, y.ticks[i]) * (b.bottom - b.top);
        scene_line(s, SCENE_GRID, 1, b.left, at, b.right, at);
        if (at > end - 18) continue;
        plot_words(s, SCENE_MUTED, b.left - 10, at + 5, 1, PLOT_LABEL(&y, y.ticks[i]));
        end = at;
    }
    scene_line(s, SCENE_INK, 1.2, b.left, b.bottom, b.right, b.bottom);
    for (int i = 0; i < p->n_series; i++) plot_draw_series(s, &p->series[i], i % 5, &x, &y, b);
    plot_draw_names_right(s, p, &x, &y, b);
    plot_draw_names(s, p, &x, &y, b);
    return b.bottom;
}

static double plot_widest_category(const plot *p) {
    double widest = 0;
    for (int k = 0; k < p->n_categories; k++)
        widest = larger(widest, plot_width_of(p->categories[k]));
    return widest;
}

static double plot_draw_bars(scene *s, const plot *p, plot_box b) {
    plot_axis x = plot_axis_of_bars(p);
    int bars = p->stacked ? 1 : p->n_series, group = bars * PLOT_BAR + 11;
    b.left += plot_widest_category(p) + 12;
    b.right -= 56; /* room for the numbers */
    b.top -= 12;
    b.bottom = b.top + p->n_categories * group + 8;
    plot_draw_x_axis(s, p, &x, b);
    for (int k = 0; k < p->n_categories; k++) {
        double top = b.top + 9 + k * group, sum = 0, from = b.left;
        plot_words(s, SCENE_INK, b.left - 10, top + bars * PLOT_BAR / 2.0 + 5, 1, p->categories[k]);
        for (int i = 0; i < p->n_series; i++) {
            double v = k < p->series[i].n && isfinite(p->series[i].y[k]) ? p->series[i].y[k] : 0;
            sum = p->stacked ? sum + v : v;
            double to = b.left + plot_clamp(sum > 0 || !p->log_x ? plot_place(&x, sum) : 0) *
                                     (b.right - b.left);
            double y = top + (p->stacked ? 0 : i * PLOT_BAR);
            if (to > from + 0.2)
                scene_rectangle(s, p->series[i].colour, from, y + 0.5, to, y + PLOT_BAR - 0.5);
            if (p->stacked) from = to;
            if (!p->stacked || i == p->n_series - 1)
                plot_words(s, SCENE_INK, to + 7, y + 13.5, 0, PLOT_NUMBER(sum));
        }
    }
    scene_line(s, SCENE_INK, 1.2, b.left, b.top, b.left, b.bottom);
    return b.bottom;
}

static int plot_cell_of(const plot *p, int row, int column) {
    int series = p->cells[(size_t)column * (size_t)p->n_categories + (size_t)row] - 1;
    return series < p->n_series ? series : -1;
}

static double plot_draw_map(scene *s, const plot *p, plot_box b) {
    int columns = p->columns ? p->columns : 1, cell = p->n_categories > 30 ? 15 : 20;
    plot_axis x = {0, columns, false, {0}, 0, 0};
    double step = columns > 200 ? 50 : columns > 80 ? 20 : columns > 30 ? 10 : 5;
    for (double t = 0; t <= columns; t += step) plot_tick(&x, t);
    plot_words(s, SCENE_INK, PLOT_MARGIN, b.top, 0, p->y_label);
    b.top += p->y_label[0] ? 10 : -10;
    b.left += plot_widest_category(p) + 10;
    double wide = fmin((b.right - b.left) / columns, 1.3 * cell);
    b.right = b.left + wide * columns;
    b.bottom = b.top + p->n_categories * cell + 2;
    plot_draw_x_axis(s, p, &x, b);
    for (int row = 0; row < p->n_categories; row++) {
        double y = b.top + row * cell;
        scene_text(s, SCENE_MUTED, cell - 3 < PLOT_LETTER ? cell - 3 : PLOT_LETTER, b.left - 8,
                   y + 0.5 * cell + 5, 1, false, p->categories[row]);
        for (int column = 0, run; column < p->columns; column += run) {
            int i = plot_cell_of(p, row, column);
            for (run = 1; column + run < p->columns; run++) /* cells of the same series */
                if (plot_cell_of(p, row, column + run) != i) break;
            double left = b.left + column * wide, right = left + wide * run;
            scene_rectangle(s, i < 0 ? SCENE_EMPTY : p->series[i].colour, left + 0.6, y + 0.6,
                            right - 0.6, y + cell - 0.6);
            char mark[2] = {i < 0 ? 0 : p->series[i].mark, 0};
            if (i >= 0 && right - left > 10)
                scene_text(s, SCENE_ON + p->series[i].colour, 12, (left + right) / 2,
                           y + 0.5 * cell + 4.5, 0.5, false, mark);
        }
    }
    return b.bottom;
}

scene plot_scene(const plot *plots, int n) {
    scene s = {0};
    double y = 0;
    for (int i = 0; i < n; i++) {
        const plot *p = &plots[i];
        s.failed = s.failed || p->failed;
        scene_text(&s, SCENE_INK, 18, PLOT_MARGIN, y + 38, 0, true, p->title);
        y = plot_paragraph(&s, y + 62, p->note) + 4;
        if (p->kind != PLOT_LINES) y = plot_draw_legend(&s, p, y + 2);
        plot_box b = {PLOT_MARGIN, y, SCENE_WIDTH - PLOT_MARGIN, y};
        if (p->kind == PLOT_LINES) y = plot_draw_lines(&s, p, b);
        else if (p->kind == PLOT_BARS) y = plot_draw_bars(&s, p, b);
        else y = plot_draw_map(&s, p, b);
        y += (p->x_label[0] ? 2.1 : 1) * PLOT_LINE + 22;
    }
    s.height = ceil(y);
    return s;
}
