/* plot.h - small plots, drawn twice from the same data: as a PNG, and as text for a terminal
 *
 * Fill a plot first, then draw it:
 *
 *     plot p = plot_new(PLOT_LINES, "Time per token", "tokens so far", "milliseconds");
 *     int with = plot_series_add(&p, "with the cache");
 *     plot_point(&p, with, 1, 0.4);
 *     ...
 *     plot_text(&p, put_bytes, 80, in_colour);    // to a terminal, a pipe, a page of the book
 *     plot_png("time.png", &p, 1);                // several plots: one under another
 *     plot_free(&p);
 *
 * Three kinds: lines (and points) over two axes, each linear or logarithmic; horizontal bars,
 * grouped or stacked; and a map of cells, each empty or of one of the series. Colours differ in
 * brightness as well as in hue, and marks and letters differ too, so that everybody can tell the
 * series apart, also on grey paper. stb draws the letters (stb_easy_font) and packs the file
 * (stb_image_write): two single headers in the public domain, in docs/stb/, so that `make` needs
 * nothing but a C compiler. */
#ifndef PLOT_H
#define PLOT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PLOT_COLOURS = 8 };
typedef enum plot_kind { PLOT_LINES, PLOT_BARS, PLOT_MAP } plot_kind;

typedef struct plot_series {
    char name[48];  /* none: the legend leaves it out */
    int colour;   /* which of the palette; its own number at first */
    char mark;    /* stands for it in a terminal, and in the cells of a map */
    bool dots;    /* PLOT_LINES: points that no line joins */
    double *x, *y; /* (n); of bars only y, one per category */
    int n, capacity;
} plot_series;

typedef struct plot {
    plot_kind kind;
    char title[96], x_label[64], y_label[64];
    bool log_x, log_y;
    bool named_dots;     /* lines: names are at the last points in the picture; no legend */
    bool stacked;        /* bars: the series follow each other in one bar */
    plot_series *series;
    int n_series;
    char (*categories)[32]; /* (n_categories) names of bars, or of the rows of a map */
    int n_categories;
    uint8_t *cells;      /* (columns, n_categories): 0: empty, or 1 + its series */
    int columns;
    bool failed;         /* memory ran out: what came then is missing */
} plot;

typedef void (*plot_sink)(const char *bytes, size_t n);

plot plot_new(plot_kind kind, const char *title, const char *x_label, const char *y_label);
void plot_free(plot *p);
int plot_series_add(plot *p, const char *name); /* returns its number; -1: out of memory */
void plot_point(plot *p, int series, double x, double y);
/* The next bar, whose values plot_bar then adds to each series; or the next row of a map. */
void plot_category(plot *p, const char *name);
void plot_bar(plot *p, int series, double value);
/* Give a cell of a map to a series. All rows must have been added. */
void plot_cell(plot *p, int row, int column, int series);
void plot_text(const plot *p, plot_sink sink, int width, bool colour);
/* Several plots are drawn one below another. False: out of memory, or the file is not written. */
bool plot_png(const char *path, const plot *plots, int n);

/* fmax(), but for NANs; gcc 12 for arm64 fails on a loop that takes the fmax() of differences. */
double larger(double a, double b);
#endif
