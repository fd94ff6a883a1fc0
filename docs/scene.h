/* scene.h - a drawing of polygons, lines and text, which is written as SVG, PNG or an animation
 *
 * Lengths are in units of 1/940 of a picture's usual width; y grows downwards. Each colour has a
 * light and a dark value: SVG has both, and shows the one that the reader's system prefers. PNG has
 * the light one, two pixels per unit, with text in the font docs/stb/DejaVuSans.ttf. In SVG the
 * reader's own font is used; DejaVu Sans is wide, so that text measured in it fits. */
#ifndef SCENE_H
#define SCENE_H

#include <stdbool.h>
#include <stddef.h>

enum { SCENE_COLOURS = 8, SCENE_WIDTH = 940 };
/* Colours: 0 to SCENE_COLOURS - 1 is the palette; then these. SCENE_ON + c: text on colour c. */
enum { SCENE_INK = SCENE_COLOURS, SCENE_MUTED, SCENE_GRID, SCENE_EMPTY, SCENE_PAPER, SCENE_ON };
typedef enum scene_kind { SCENE_POLYGON, SCENE_LINE, SCENE_TEXT } scene_kind;

typedef struct scene_item {
    scene_kind kind;
    int colour;
    double size;       /* width of a line, height of text */
    double x[4], y[4]; /* (n) corners of a convex polygon, ends of a line, start of text */
    int n;
    double align;      /* text: x is its left end (0), its centre (0.5) or its right end (1) */
    bool bold;
    char text[128];
} scene_item;

typedef struct scene {
    double height;
    scene_item *items; /* (n) in the order of painting */
    int n, capacity;
    bool failed;       /* memory ran out; later items are missing */
} scene;

void scene_free(scene *s);
void scene_polygon(scene *s, int colour, const double *x, const double *y, int n);
void scene_rectangle(scene *s, int colour, double x0, double y0, double x1, double y1);
void scene_line(scene *s, int colour, double width, double x0, double y0, double x1, double y1);
/* Write text whose base line is y. */
void scene_text(scene *s, int colour, double size, double x, double y, double align, bool bold,
                const char *text);
double scene_text_width(const char *text, double size, bool bold);

/* False: out of memory, or the file cannot be written. title: in SVG, the accessible name. */
bool scene_svg(const char *path, const scene *s, const char *title);
bool scene_png(const char *path, const scene *s);
/* Write a page that shows one of n scenes at a time, with a slider and a play button. */
bool scene_html(const char *path, const scene *scenes, int n, const char *title);
#endif
