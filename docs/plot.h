/* plot.h - small plots, drawn from the same data as text for a terminal and as a picture
 *
 * Fill a plot first, then draw it:
 *
 *     plot p = plot_new(PLOT_LINES, "Time per token", "tokens so far", "milliseconds");
 *     int with = plot_series_add(&p, "with the cache");
 *     plot_point(&p, with, 1, 0.4);
 *     ...
 *     plot_text(&p, put_bytes, 80, in_colour);    // as text
 *     scene s = plot_scene(&p, 1);                // as a picture: see scene.h
 *     scene_svg("time.svg", &s, p.title);
 *     scene_free(&s);
 *     plot_free(&p);
 *
 * There are three kinds: lines (and points) over two axes, each linear or logarithmic; horizontal
 * bars, grouped or stacked; and a map of cells, each empty or in the colour of one series. Series
 * differ in hue, brightness and mark, so that a plot is readable without colour. */
#ifndef PLOT_H
#define PLOT_H

#include "scene.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PLOT_COLOURS = SCENE_COLOURS };
typedef enum plot_kind { PLOT_LINES, PLOT_BARS, PLOT_MAP } plot_kind;

typedef struct plot_series {
    char name[48]; /* in pictures of lines next to a point, else in the legend; or empty */
    int named_at;  /* number of that point; initially -1: the last one */
    int colour;    /* index in the palette; initially the number of the series */
    char mark;     /* character of the series in a terminal, and in the cells of a map */
    bool dots;     /* PLOT_LINES: points without a line */
    double *x, *y; /* (n) points; bars have only y, one per category */
    int n, capacity;
} plot_series;

typedef struct plot {
    plot_kind kind;
    char title[96], x_label[64], y_label[64];
    char note[256];      /* what the picture shows, in a sentence or two; only in pictures */
    bool log_x, log_y;
    bool stacked;        /* bars: stack all series of a category in one bar */
    plot_series *series;
    int n_series;
    char (*categories)[32]; /* (n_categories) names of bars, or of the rows of a map */
    int n_categories;
    uint8_t *cells;      /* (columns, n_categories): 0 if empty, or 1 + the series */
    int columns;
    bool failed;         /* memory ran out; later data is missing */
} plot;

typedef void (*plot_sink)(const char *bytes, size_t n);

plot plot_new(plot_kind kind, const char *title, const char *x_label, const char *y_label);
void plot_free(plot *p);
/* Set the note, as by printf. */
void plot_note(plot *p, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 2, 3)))
#endif
    ;
int plot_series_add(plot *p, const char *name); /* returns its number; -1: out of memory */
void plot_point(plot *p, int series, double x, double y);
/* Add a category of bars, whose values plot_bar then adds to each series; or a row of a map. */
void plot_category(plot *p, const char *name);
void plot_bar(plot *p, int series, double value);
/* Set the series of a cell of a map. All rows must have been added. */
void plot_cell(plot *p, int row, int column, int series);
/* Write the plot as text, at most `width` columns wide. */
void plot_text(const plot *p, plot_sink sink, int width, bool colour);
/* Draw several plots below each other. */
scene plot_scene(const plot *plots, int n);

/* Like fmax(), except for NANs. (gcc 12 for arm64 fails on a loop with fmax() of differences.) */
double larger(double a, double b);
#endif
