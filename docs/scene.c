/* scene.c - implements scene.h */
#include "scene.h"

#include <math.h>
#include <stdint.h>
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
#endif
#define STB_IMAGE_WRITE_STATIC
#define STB_IMAGE_WRITE_IMPLEMENTATION
#define STBTT_STATIC
#define STB_TRUETYPE_IMPLEMENTATION
#include "stb/stb_image_write.h"
#include "stb/stb_truetype.h"
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

extern const unsigned char plot_font[]; /* docs/stb/DejaVuSans.ttf, embedded by the Makefile */

/* Navy, orange, blue, brick, pale blue, grey, purple, light grey; ink, muted, grid, empty, paper.
 * In greyscale, the first eight are 12, 63, 41, 29, 84, 52, 21 and 73 % of white on light paper:
 * all different, with large steps between neighbours. */
static const uint32_t scene_light[] = {0x0e1e60, 0xe69f00, 0x227db4, 0x9c2f00, 0xb4e0f6,
                                       0x858585, 0x5c186e, 0xbbbbbb, 0x222222, 0x555b66,
                                       0xdfe1e6, 0xf0f1f4, 0xffffff};
static const uint32_t scene_dark[] = {0x8397f2, 0xf0b232, 0x45a5de, 0xe2683a, 0xc4e8fa,
                                      0x7c8496, 0xb877d0, 0x566078, 0xe9ebf1, 0xa9b1c2,
                                      0x333b4d, 0x1f2636, 0x10141f};

/* The value of a colour. Text on a colour is black or white, whichever has more contrast. */
static uint32_t scene_rgb(int colour, bool dark) {
    const uint32_t *values = dark ? scene_dark : scene_light;
    if (colour < SCENE_ON) return values[colour];
    uint32_t c = values[colour - SCENE_ON];
    return 299 * (c >> 16) + 587 * (c >> 8 & 255) + 114 * (c & 255) < 118000 ? 0xffffff : 0x15181f;
}

void scene_free(scene *s) {
    free(s->items);
    memset(s, 0, sizeof *s);
}

static scene_item *scene_add(scene *s, scene_kind kind, int colour, double size) {
    static scene_item unused;
    if (s->n == s->capacity) {
        int wanted = s->capacity ? 2 * s->capacity : 256;
        scene_item *grown = realloc(s->items, (size_t)wanted * sizeof *grown);
        if (!grown) return s->failed = true, &unused;
        s->items = grown;
        s->capacity = wanted;
    }
    scene_item *item = &s->items[s->n++];
    memset(item, 0, sizeof *item);
    item->kind = kind;
    item->colour = colour;
    item->size = size;
    return item;
}

void scene_polygon(scene *s, int colour, const double *x, const double *y, int n) {
    scene_item *item = scene_add(s, SCENE_POLYGON, colour, 0);
    item->n = n;
    memcpy(item->x, x, (size_t)n * sizeof *x);
    memcpy(item->y, y, (size_t)n * sizeof *y);
}

void scene_rectangle(scene *s, int colour, double x0, double y0, double x1, double y1) {
    scene_polygon(s, colour, (double[]){x0, x1, x1, x0}, (double[]){y0, y0, y1, y1}, 4);
}

void scene_line(scene *s, int colour, double width, double x0, double y0, double x1, double y1) {
    scene_item *item = scene_add(s, SCENE_LINE, colour, width);
    item->n = 2;
    item->x[0] = x0, item->y[0] = y0, item->x[1] = x1, item->y[1] = y1;
}

void scene_text(scene *s, int colour, double size, double x, double y, double align, bool bold,
                const char *text) {
    scene_item *item = scene_add(s, SCENE_TEXT, colour, size);
    item->x[0] = x, item->y[0] = y, item->align = align, item->bold = bold;
    snprintf(item->text, sizeof item->text, "%s", text);
}

/* ---- Text -------------------------------------------------------------------------------- */

/* Take the next character of UTF-8. An invalid one, or one that XML forbids, becomes a question
 * mark. */
static int scene_next(const char **text) {
    const unsigned char *t = (const unsigned char *)*text;
    int n = t[0] < 0x80 ? 0 : t[0] >> 5 == 6 ? 1 : t[0] >> 4 == 14 ? 2 : t[0] >> 3 == 30 ? 3 : -1;
    int c = n > 0 ? t[0] & (0x3f >> n) : t[0];
    for (int i = 1; i <= n; i++) {
        if (t[i] >> 6 != 2) n = -1;
        else c = c << 6 | (t[i] & 0x3f);
    }
    *text += n < 0 ? 1 : n + 1;
    bool good = n >= 0 && c >= (int[]){0x20, 0x80, 0x800, 0x10000}[n] && c != 0x7f &&
                (c < 0xd800 || c > 0xdfff) && c != 0xfffe && c != 0xffff && c <= 0x10ffff;
    return good ? c : '?';
}

static const stbtt_fontinfo *scene_font(void) {
    static stbtt_fontinfo font;
    if (!font.data) stbtt_InitFont(&font, plot_font, 0);
    return &font;
}

static int scene_glyph(const stbtt_fontinfo *font, int character) {
    int glyph = stbtt_FindGlyphIndex(font, character);
    return glyph ? glyph : stbtt_FindGlyphIndex(font, '?');
}

double scene_text_width(const char *text, double size, bool bold) {
    const stbtt_fontinfo *font = scene_font();
    double width = 0;
    int advance, bearing;
    while (*text) {
        stbtt_GetGlyphHMetrics(font, scene_glyph(font, scene_next(&text)), &advance, &bearing);
        width += advance;
    }
    /* letters of DejaVu Sans Bold are wider by about a tenth */
    return width * (double)stbtt_ScaleForMappingEmToPixels(font, (float)size) * (bold ? 1.12 : 1);
}

/* ---- SVG --------------------------------------------------------------------------------- */

/* Write a number with at most one decimal: 12, 0.5, -3. */
static void svg_number(FILE *f, double x) {
    double rounded = round(10 * x) / 10;
    fprintf(f, fabs(rounded - round(rounded)) < 0.05 ? "%.0f" : "%.1f",
            rounded == 0 ? 0.0 : rounded);
}

static void svg_point(FILE *f, char letter, double x, double y) {
    fputc(letter, f);
    svg_number(f, x);
    fputc(' ', f);
    svg_number(f, y);
}

static void svg_text(FILE *f, const char *text) {
    while (*text) {
        const char *start = text;
        int c = scene_next(&text);
        if (c == '<' || c == '&') fputs(c == '<' ? "&lt;" : "&amp;", f);
        else if (c == '?') fputc('?', f);
        else fwrite(start, 1, (size_t)(text - start), f);
    }
}

/* Class of an item: f or s (fill or stroke) and the colour. */
static char svg_class(const scene_item *item) { return item->kind == SCENE_LINE ? 's' : 'f'; }

/* The rules of all classes that n scenes use. */
static void svg_style(FILE *f, const scene *scenes, int n, bool dark) {
    bool used[2][2 * SCENE_ON] = {{0}};
    fprintf(f, "rect{fill:#%06x}", (unsigned)scene_rgb(SCENE_PAPER, dark));
    for (int k = 0; k < n; k++)
        for (int i = 0; i < scenes[k].n; i++)
            used[scenes[k].items[i].kind == SCENE_LINE][scenes[k].items[i].colour] = true;
    for (int stroke = 0; stroke < 2; stroke++)
        for (int c = 0; c < 2 * SCENE_ON; c++)
            if (used[stroke][c])
                fprintf(f, ".%c%d{%s:#%06x}", stroke ? 's' : 'f', c, stroke ? "stroke" : "fill",
                        (unsigned)scene_rgb(c, dark));
}

/* Write items from i on that are one path: shapes of the same kind, colour and width, one after the
 * other. Returns the index of the next item. */
static int svg_path(FILE *f, const scene *s, int i) {
    const scene_item *first = &s->items[i];
    fprintf(f, "<path class=\"%c%d\"", svg_class(first), first->colour);
    if (first->kind == SCENE_LINE) {
        fputs(" stroke-width=\"", f);
        svg_number(f, first->size);
        fputc('"', f);
    }
    fputs(" d=\"", f);
    for (; i < s->n; i++) {
        const scene_item *item = &s->items[i], *before = item > first ? item - 1 : NULL;
        if (item->kind != first->kind || item->colour != first->colour || item->size != first->size)
            break;
        bool joined = before && item->kind == SCENE_LINE && before->x[1] == item->x[0] &&
                      before->y[1] == item->y[0];
        for (int k = joined; k < item->n; k++) svg_point(f, k ? 'L' : 'M', item->x[k], item->y[k]);
        if (item->kind == SCENE_POLYGON) fputc('z', f);
    }
    fputs("\"/>\n", f);
    return i;
}

static void svg_words(FILE *f, const scene_item *item) {
    fprintf(f, "<text class=\"f%d%s%s\" x=\"", item->colour,
            item->align == 0.5 ? " m" : item->align == 1 ? " e" : "", item->bold ? " b" : "");
    svg_number(f, item->x[0]);
    fputs("\" y=\"", f);
    svg_number(f, item->y[0]);
    fputs("\" font-size=\"", f);
    svg_number(f, item->size);
    fputs("\">", f);
    svg_text(f, item->text);
    fputs("</text>\n", f);
}

static void svg_styles(FILE *f, const scene *scenes, int n) {
    fputs("<style>path[class^=s]{fill:none}.m{text-anchor:middle}.e{text-anchor:end}"
          ".b{font-weight:600}text{white-space:pre}", f);
    svg_style(f, scenes, n, false);
    fputs("\n@media(prefers-color-scheme:dark){", f);
    svg_style(f, scenes, n, true);
    fputs("}</style>\n", f);
}

static void svg_open(FILE *f, const scene *s) {
    fprintf(f, "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %.0f\" width=\"%d\" "
               "height=\"%.0f\" role=\"img\"\n font-family=\"system-ui,'Segoe UI',Roboto,Helvetica,"
               "Arial,'DejaVu Sans',sans-serif\" stroke-linecap=\"round\" "
               "stroke-linejoin=\"round\">\n",
            SCENE_WIDTH, s->height, SCENE_WIDTH, s->height);
}

static void svg_items(FILE *f, const scene *s) {
    fputs("<rect width=\"100%\" height=\"100%\"/>\n", f);
    for (int i = 0; i < s->n;) {
        if (s->items[i].kind != SCENE_TEXT) i = svg_path(f, s, i);
        else svg_words(f, &s->items[i++]);
    }
    fputs("</svg>\n", f);
}

static bool svg_close(FILE *f) {
    bool good = !ferror(f);
    return fclose(f) == 0 && good;
}

bool scene_svg(const char *path, const scene *s, const char *title) {
    FILE *f = s->failed ? NULL : fopen(path, "wb");
    if (!f) return false;
    svg_open(f, s);
    fputs("<title>", f);
    svg_text(f, title);
    fputs("</title>\n", f);
    svg_styles(f, s, 1);
    svg_items(f, s);
    return svg_close(f);
}

/* ---- An animation: all scenes in one page, of which it shows one ----------------------------- */

static const char html_head[] =
    "<meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\n"
    "<meta name=\"color-scheme\" content=\"light dark\"><link rel=\"icon\" href=\"data:,\">\n"
    "<style>body{font:16px system-ui,sans-serif;max-width:1280px;margin:16px auto;padding:0 16px}\n"
    "svg{display:none;width:100%;height:auto}svg.on{display:block}\n"
    "form{display:flex;gap:12px;align-items:center}input{flex:1}button{font:inherit;width:5em}\n"
    "output{min-width:8em;text-align:right}</style>\n";
static const char html_controls[] =
    "<form><button type=\"button\">Play</button>"
    "<input type=\"range\" min=\"1\" value=\"1\" aria-label=\"step\"><output></output></form>\n";
static const char html_script[] =
    "<script>\n"
    "const all = document.querySelectorAll('svg'), slider = document.querySelector('input'),\n"
    "  play = document.querySelector('button'), output = document.querySelector('output');\n"
    "let timer = 0;\n"
    "function show() {\n"
    "  all.forEach((svg, i) => svg.classList.toggle('on', i == slider.value - 1));\n"
    "  output.textContent = slider.value + ' of ' + all.length;\n"
    "}\n"
    "function stop() { clearInterval(timer); timer = 0; play.textContent = 'Play'; }\n"
    "play.onclick = () => {\n"
    "  if (timer) return stop();\n"
    "  if (slider.value == all.length) slider.value = 1;\n"
    "  play.textContent = 'Stop';\n"
    "  timer = setInterval(() => {\n"
    "    slider.value++;\n"
    "    show();\n"
    "    if (slider.value == all.length) stop();\n"
    "  }, all.length > 20 ? 400 : 1200);\n"
    "  show();\n"
    "};\n"
    "slider.max = all.length;\n"
    "slider.value = 1;\n"
    "slider.oninput = () => { stop(); show(); };\n"
    "show();\n"
    "</script>\n";

bool scene_html(const char *path, const scene *scenes, int n, const char *title) {
    for (int i = 0; i < n; i++)
        if (scenes[i].failed) return false;
    FILE *f = fopen(path, "wb");
    if (!f) return false;
    fputs("<!DOCTYPE html>\n<html lang=\"en\">\n<title>", f);
    svg_text(f, title);
    fprintf(f, "</title>\n%s", html_head);
    svg_styles(f, scenes, n);
    fputs(html_controls, f);
    for (int i = 0; i < n; i++) {
        svg_open(f, &scenes[i]);
        svg_items(f, &scenes[i]);
    }
    fputs(html_script, f);
    return svg_close(f);
}

/* ---- PNG --------------------------------------------------------------------------------- */

enum { PNG_SCALE = 2 }; /* pixels per unit */

typedef struct png_canvas {
    int width, height;
    uint8_t *pixels; /* (height, width, 3) */
} png_canvas;

/* Blend a colour into a pixel; cover: the share of it that the shape covers. */
static void png_blend(png_canvas *c, int x, int y, double cover, uint32_t rgb) {
    if (x < 0 || y < 0 || x >= c->width || y >= c->height || cover <= 0) return;
    uint8_t *p = c->pixels + ((size_t)y * (size_t)c->width + (size_t)x) * 3;
    if (cover > 1) cover = 1;
    for (int k = 0; k < 3; k++) {
        double value = rgb >> (16 - 8 * k) & 255;
        p[k] = (uint8_t)(p[k] + (value - p[k]) * cover + 0.5);
    }
}

/* Distance of a point from an item's edge, in pixels: positive inside. */
static double png_inside(const scene_item *item, double px, double py) {
    double inside = INFINITY;
    if (item->kind == SCENE_LINE) {
        double dx = item->x[1] - item->x[0], dy = item->y[1] - item->y[0];
        double squared = dx * dx + dy * dy;
        double t = squared > 0
                       ? ((px - item->x[0]) * dx + (py - item->y[0]) * dy) / squared : 0;
        t = t < 0 ? 0 : t > 1 ? 1 : t;
        return item->size / 2 - hypot(px - item->x[0] - t * dx, py - item->y[0] - t * dy);
    }
    for (int i = 0; i < item->n; i++) { /* corners are in clockwise order on the screen */
        int next = (i + 1) % item->n;
        double dx = item->x[next] - item->x[i], dy = item->y[next] - item->y[i];
        double length = hypot(dx, dy);
        if (length > 0)
            inside = fmin(inside, (dx * (py - item->y[i]) - dy * (px - item->x[i])) / length);
    }
    return inside;
}

/* Draw a polygon or a line: a pixel's cover depends on how far inside its centre is. */
static void png_shape(png_canvas *c, const scene_item *unscaled) {
    scene_item item = *unscaled;
    double left = INFINITY, top = INFINITY, right = -INFINITY, bottom = -INFINITY;
    item.size *= PNG_SCALE;
    for (int i = 0; i < item.n; i++) {
        item.x[i] *= PNG_SCALE, item.y[i] *= PNG_SCALE;
        left = fmin(left, item.x[i]), right = fmax(right, item.x[i]);
        top = fmin(top, item.y[i]), bottom = fmax(bottom, item.y[i]);
    }
    double margin = item.size / 2 + 1;
    for (int y = (int)(top - margin); y <= (int)(bottom + margin); y++)
        for (int x = (int)(left - margin); x <= (int)(right + margin); x++)
            png_blend(c, x, y, 0.5 + png_inside(&item, x + 0.5, y + 0.5),
                      scene_rgb(item.colour, false));
}

static void png_text(png_canvas *c, const scene_item *item) {
    const stbtt_fontinfo *font = scene_font();
    float scale = stbtt_ScaleForMappingEmToPixels(font, (float)(item->size * PNG_SCALE));
    double x = (item->x[0] - item->align * scene_text_width(item->text, item->size, item->bold)) *
               PNG_SCALE;
    int base = (int)round(item->y[0] * PNG_SCALE);
    for (const char *text = item->text; *text;) {
        int glyph = scene_glyph(font, scene_next(&text)), advance, bearing, width, height, dx, dy;
        stbtt_GetGlyphHMetrics(font, glyph, &advance, &bearing);
        float part = (float)(x - floor(x));
        uint8_t *bits = stbtt_GetGlyphBitmapSubpixel(font, scale, scale, part, 0, glyph, &width,
                                                     &height, &dx, &dy);
        for (int i = 0; bits && i < width * height; i++)
            for (int k = 0; k <= 2 * item->bold; k++) /* bold: side by side */
                png_blend(c, (int)floor(x) + dx + i % width + k, base + dy + i / width,
                          bits[i] / 255.0, scene_rgb(item->colour, false));
        stbtt_FreeBitmap(bits, NULL);
        x += advance * (double)scale * (item->bold ? 1.05 : 1);
    }
}

bool scene_png(const char *path, const scene *s) {
    png_canvas c = {SCENE_WIDTH * PNG_SCALE, (int)s->height * PNG_SCALE, NULL};
    size_t bytes = (size_t)c.width * (size_t)c.height * 3;
    if (s->failed || !(c.pixels = malloc(bytes))) return false;
    memset(c.pixels, 0xff, bytes);
    for (int i = 0; i < s->n; i++) {
        if (s->items[i].kind == SCENE_TEXT) png_text(&c, &s->items[i]);
        else png_shape(&c, &s->items[i]);
    }
    bool good = stbi_write_png(path, c.width, c.height, 3, c.pixels, c.width * 3) != 0;
    free(c.pixels);
    return good;
}
