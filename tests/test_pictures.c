/* Pictures: plots drawn as SVG and PNG (docs/plot.c, docs/scene.c). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <unistd.h>

#include "docs/scene.c"
#include "docs/plot.c"

/* Lines that end at the same place, named points, bars of every form, a map, and names that XML
 * forbids. */
static int sample(plot *plots) {
    plot p = plot_new(PLOT_LINES, "Lines <that> end & meet", "x", "y");
    plot_note(&p, "A note of %d words that is too long for one line of the picture, so that it is "
                  "continued in a second line below the first.", 26);
    for (int s = 0; s < 4; s++) {
        plot_series_add(&p, (const char *[]){"first", "second", "third", "a\x01\xff<b"}[s]);
        for (int i = 0; i < 20; i++) plot_point(&p, s, i, s < 3 ? 2 + 0.001 * s * i : 1);
    }
    plots[0] = p;
    p = plot_new(PLOT_LINES, "Points", "x", "y");
    p.log_x = p.log_y = true;
    for (int s = 0; s < 5; s++) {
        plot_series_add(&p, (const char *[]){"one", "two", "three", "four", "five"}[s]);
        p.series[s].dots = true;
        plot_point(&p, s, 10 + 0.4 * s, 10 - s % 2);
    }
    plots[1] = p;
    for (int k = 0; k < 2; k++) {
        p = plot_new(PLOT_BARS, "Bars", "metres", "");
        p.stacked = k;
        plot_series_add(&p, "height");
        plot_series_add(&p, "depth");
        for (int i = 0; i < 3; i++) {
            plot_category(&p, (const char *[]){"a long category's name", "b", ""}[i]);
            plot_bar(&p, 0, i);
            plot_bar(&p, 1, 100 - i);
        }
        plots[2 + k] = p;
    }
    p = plot_new(PLOT_MAP, "A map", "columns", "row");
    for (int row = 0; row < 9; row++) {
        plot_series_add(&p, "an owner with a name");
        plot_category(&p, (char[2]){(char)('1' + row), 0});
    }
    for (int row = 0; row < 9; row++)
        for (int i = 0; i < 5 + row; i++) plot_cell(&p, row, i, row);
    plots[4] = p;
    return 5;
}

static scene sample_scene(void) {
    plot plots[5];
    int n = sample(plots);
    scene s = plot_scene(plots, n);
    for (int i = 0; i < n; i++) plot_free(&plots[i]);
    assert_false(s.failed);
    return s;
}

static char *file_text(const char *path, long *size) {
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *size = ftell(f);
    rewind(f);
    char *text = calloc((size_t)*size + 1, 1);
    assert_int_equal(fread(text, 1, (size_t)*size, f), *size);
    fclose(f);
    unlink(path);
    return text;
}

/* Is it one XML element, whose tags match, with quoted attributes and known entities? */
static bool well_formed(const char *t) {
    char open[8][16];
    int depth = 0, roots = 0;
    for (; *t; t++) {
        if (*t == '&' && strncmp(t, "&lt;", 4) && strncmp(t, "&amp;", 5)) return false;
        if ((unsigned char)*t < ' ' && *t != '\n') return false;
        if (*t != '<') {
            if (depth == 0 && *t != '\n') return false;
            continue;
        }
        bool end = t[1] == '/';
        t += 1 + end;
        int n = (int)strspn(t, "abcdefghijklmnopqrstuvwxyz");
        if (n == 0 || n > 15) return false;
        if (end) {
            if (depth == 0 || (int)strlen(open[--depth]) != n || strncmp(open[depth], t, (size_t)n))
                return false;
            t += n;
            if (*t != '>') return false;
            continue;
        }
        if (depth == 0 && roots++) return false;
        if (depth == 8) return false;
        snprintf(open[depth++], 16, "%.*s", n, t);
        for (t += n; *t == ' ' || *t == '\n';) {
            t += strspn(t, " \n");
            t += strspn(t, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-");
            if (*t++ != '=' || *t++ != '"') return false;
            t += strcspn(t, "\"<");
            if (*t++ != '"') return false;
        }
        if (*t == '/') t++, depth--;
        if (*t != '>') return false;
    }
    return depth == 0 && roots == 1;
}

static void test_xml_checker(void **state) {
    (void)state;
    assert_true(well_formed("<a b=\"1\"><c/>&lt;\n</a>\n"));
    const char *bad[] = {"<a>",    "<a></b>",     "<a b=1/>", "<a>&x;</a>",
                         "<a/><a/>", "<a>\x01</a>", "x"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) assert_false(well_formed(bad[i]));
}

static void test_svg(void **state) {
    (void)state;
    scene s = sample_scene();
    long size, size2;
    assert_true(scene_svg("pictures_test.svg", &s, "A & B <\x02>"));
    char *text = file_text("pictures_test.svg", &size);
    assert_true(scene_svg("pictures_test.svg", &s, "A & B <\x02>"));
    char *again = file_text("pictures_test.svg", &size2);
    assert_int_equal(size, size2);
    assert_memory_equal(text, again, size);
    assert_true(well_formed(text));
    const char *parts[] = {"<title>A &amp; B &lt;?></title>",
                           ">Lines &lt;that> end &amp; meet</text>", ">first</text>",
                           ">second</text>", ">third</text>", ">a??&lt;b</text>",
                           ">five</text>", ">height</text>", ">depth</text>", ">metres</text>",
                           ">a long category's name</text>", ">an owner with a name</text>",
                           "@media(prefers-color-scheme:dark)", "viewBox=\"0 0 940 "};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!strstr(text, parts[i])) fail_msg("no %s", parts[i]);
    /* every style that is used has a light and a dark rule */
    for (const char *c = text; (c = strstr(c, "class=\"")); c++) {
        char rule[16];
        snprintf(rule, sizeof rule, ".%.*s{", (int)strcspn(c + 7, "\" "), c + 7);
        const char *first = strstr(text, rule);
        if (!first || !strstr(first + 1, rule)) fail_msg("no two rules %s", rule);
    }
    free(text);
    free(again);
    scene_free(&s);
}

static plot_box text_box(const scene_item *t) {
    double width = scene_text_width(t->text, t->size, t->bold), x = t->x[0] - t->align * width;
    return (plot_box){x, t->y[0] - 0.75 * t->size, x + width, t->y[0] + 0.2 * t->size};
}

/* Everything is inside the picture, and no text covers other text. */
static void test_places(void **state) {
    (void)state;
    scene s = sample_scene();
    int names = 0;
    for (int i = 0; i < s.n; i++) {
        const scene_item *a = &s.items[i];
        for (int k = 0; a->kind != SCENE_TEXT && k < a->n; k++)
            assert_true(a->x[k] >= 0 && a->x[k] <= SCENE_WIDTH && a->y[k] >= 0 &&
                        a->y[k] <= s.height);
        if (a->kind != SCENE_TEXT || !a->text[0]) continue;
        plot_box box = text_box(a);
        names++;
        if (box.left < 4 || box.right > SCENE_WIDTH - 4 || box.top < 4 || box.bottom > s.height - 4)
            fail_msg("\"%s\" is outside", a->text);
        for (int k = i + 1; k < s.n; k++) {
            const scene_item *b = &s.items[k];
            plot_box other = text_box(b);
            if (b->kind == SCENE_TEXT && b->text[0] && box.left < other.right &&
                box.right > other.left && box.top < other.bottom && box.bottom > other.top)
                fail_msg("\"%s\" covers \"%s\"", a->text, b->text);
        }
    }
    assert_true(names > 80);
    scene_free(&s);
}

/* A name is next to its own dot, and not as near to that of another series. */
static void test_names_apart(void **state) {
    (void)state;
    for (int step = 2; step < 30; step++) {
        plot p = plot_new(PLOT_LINES, "Two dots", "x", "y");
        for (int s = 0; s < 2; s++) {
            plot_series_add(&p, s ? "there" : "here");
            p.series[s].dots = true;
            for (int i = 0; i < 2 && s; i++) plot_point(&p, s, 100 * i, 10 * i);
            plot_point(&p, s, 50 + 0.5 * s * step, 5);
        }
        scene s = plot_scene(&p, 1);
        plot_box name = {0};
        for (int i = 0; i < s.n; i++)
            if (s.items[i].kind == SCENE_TEXT && !strcmp(s.items[i].text, "here"))
                name = text_box(&s.items[i]);
        assert_true(name.right > 0);
        for (int i = 0; i < s.n; i++) {
            const scene_item *dot = &s.items[i];
            if (dot->kind != SCENE_POLYGON || dot->colour != 1) continue;
            double x = (dot->x[0] + dot->x[2]) / 2, y = (dot->y[0] + dot->y[2]) / 2;
            assert_false(x > name.left - 12 && x < name.right + 12 && y > name.top - 8 &&
                         y < name.bottom + 8);
        }
        scene_free(&s);
        plot_free(&p);
    }
}

static void test_png(void **state) {
    (void)state;
    scene s = sample_scene();
    long size;
    assert_true(scene_png("pictures_test.png", &s));
    uint8_t *file = (uint8_t *)file_text("pictures_test.png", &size);
    assert_memory_equal(file, "\x89PNG\r\n\x1a\n", 8);
    assert_int_equal(file[18] << 8 | file[19], 2 * SCENE_WIDTH);
    assert_int_equal(file[22] << 8 | file[23], 2 * (int)s.height);
    free(file);
    assert_false(scene_png("no/such/folder.png", &s));
    assert_false(scene_svg("no/such/folder.svg", &s, ""));
    s.failed = true;
    assert_false(scene_png("pictures_test.png", &s));
    assert_false(scene_svg("pictures_test.svg", &s, ""));
    scene_free(&s);
}

static int count(const char *text, const char *part) {
    int n = 0;
    for (; (text = strstr(text, part)); text++) n++;
    return n;
}

/* An animation has all frames, one style and one script, and refers to nothing else. */
static void test_html(void **state) {
    (void)state;
    scene scenes[2] = {sample_scene(), {.height = 100}};
    long size;
    scene_text(&scenes[1], SCENE_ON + SCENE_GRID, 14, 20, 20, 0, false, " a frame");
    assert_true(scene_html("pictures_test.html", scenes, 2, "A & B"));
    char *text = file_text("pictures_test.html", &size);
    assert_int_equal(count(text, "<svg "), 2);
    assert_int_equal(count(text, "</svg>"), 2);
    assert_int_equal(count(text, "<title>A &amp; B</title>"), 1);
    assert_int_equal(count(text, "\"> a frame</text>"), 1);
    assert_int_equal(count(text, ".f23{"), 2); /* in light and dark */
    assert_int_equal(count(text, "http"), 2);  /* the name space of each frame */
    assert_int_equal(count(text, "<script>"), 1);
    free(text);
    assert_false(scene_html("no/such/folder.html", scenes, 2, ""));
    scenes[1].failed = true;
    assert_false(scene_html("pictures_test.html", scenes, 2, ""));
    for (int i = 0; i < 2; i++) scene_free(&scenes[i]);
}

/* Edges are smooth: a pixel's value is the part of it that the shape covers; letters have grey
 * pixels. */
static void test_smooth(void **state) {
    (void)state;
    uint8_t pixels[60 * 40 * 3];
    png_canvas c = {60, 40, pixels};
    scene s = {0};
    memset(pixels, 0xff, sizeof pixels);
    scene_rectangle(&s, SCENE_INK, 1, 1, 5.25, 5);
    scene_line(&s, SCENE_INK, 2, 12, 2, 20, 10);
    scene_text(&s, SCENE_INK, 14, 1, 18, 0, false, "O");
    png_shape(&c, &s.items[0]);
    int ink = (int)(scene_light[SCENE_INK] & 255);
#define PIXEL(x, y) pixels[((y) * 60 + (x)) * 3]
    assert_int_equal(PIXEL(5, 5), ink);
    assert_int_equal(PIXEL(1, 5), 0xff);
    assert_in_range(PIXEL(10, 5), (255 + ink) / 2 - 1, (255 + ink) / 2 + 1);
    png_shape(&c, &s.items[1]);
    assert_int_equal(PIXEL(32, 12), ink);
    int grey = 0;
    for (int x = 24; x < 44; x++) grey += PIXEL(x, 12) > ink + 20 && PIXEL(x, 12) < 235;
    assert_in_range(grey, 2, 4);
    png_text(&c, &s.items[2]);
    grey = 0;
    for (int i = 0; i < 24 * 20; i++)
        grey += PIXEL(i % 24, 16 + i / 24) > ink + 20 && PIXEL(i % 24, 16 + i / 24) < 235;
    assert_in_range(grey, 20, 100);
    scene_free(&s);
}

static void test_letters(void **state) {
    (void)state;
    const struct { const char *text; int character; } cases[] = {
        {"a", 'a'}, {"\xc3\xa9", 0xe9}, {"\xe2\x82\xac", 0x20ac}, {"\xf0\x9f\x98\x80", 0x1f600},
        {"\xff", '?'}, {"\xc3", '?'}, {"\xe2\x82", '?'}, {"\xc0\xaf", '?'}, {"\x1f", '?'},
        {"\xed\xa0\x80", '?'}, {"\xf4\x90\x80\x80", '?'}, {"\x7f", '?'}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *at = cases[i].text;
        assert_int_equal(scene_next(&at), cases[i].character);
        assert_true(at > cases[i].text && at <= cases[i].text + strlen(cases[i].text));
    }
    assert_true(scene_text_width("wide", 14, false) > scene_text_width("ill", 14, false));
    assert_true(scene_text_width("wide", 14, true) > scene_text_width("wide", 14, false));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_xml_checker), cmocka_unit_test(test_svg),
        cmocka_unit_test(test_places),      cmocka_unit_test(test_names_apart),
        cmocka_unit_test(test_png),         cmocka_unit_test(test_html),
        cmocka_unit_test(test_smooth),      cmocka_unit_test(test_letters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
