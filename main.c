/* main.c - the `llm` command: a driver over the public calls of llm.h, and nothing else
 *
 *     cc -O3 -std=gnu11 -fopenmp -ffp-contract=fast -o llm main.c -lm
 *
 * From top to bottom: output, the options parser, small tools, then one section per command.
 * Every command is a function int(command, argc, argv) that returns the exit status:
 * 0, 1 (it failed, or was stopped before it was done) or 2 (it was called wrongly). */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#define LLM_IMPLEMENTATION
#include "llm.h"
#include "models/quantize.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>
#ifdef LLM_WITH_EDITLINE
#include <editline/readline.h>
#endif

#define VERSION "0.1.0"
#define DEFAULT_MODEL "models/tales-q4_0.gguf"
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))
#if defined(__GNUC__)
#define PRINTF(string, first) __attribute__((format(printf, string, first)))
#else
#define PRINTF(string, first)
#endif

enum { FAILED = 1, MISUSED = 2 };

static const char *program_path = "llm";          /* argv[0] */
static volatile sig_atomic_t stop_requested = 0;  /* set by Ctrl-C and SIGTERM, to the signal's number */
static void set_signals(void);

/* Where to compute: what --device and its like said. */
enum { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA, DEVICE_EMULATED };
static struct {
    int device, isa;
    llm_gpu_options gpu;
    float memory_share;
    bool host_sampling, pack_weights, quiet;
    unsigned fusions; /* LLM_FUSE_... */
} chosen;

/* ---- Output ---------------------------------------------------------------------------
 * Standard output goes through a buffer of our own, so that the first error (disk full,
 * reader gone) is known exactly and a long run can stop at it. */
static struct {
    char data[1 << 16];
    size_t length;
    int error; /* errno of the first write that failed */
} output;

static bool flush_output(void) {
    for (size_t done = 0; done < output.length && !output.error;) {
        ssize_t n = write(STDOUT_FILENO, output.data + done, output.length - done);
        if (n >= 0) done += (size_t)n;
        else if (errno != EINTR) output.error = errno;
    }
    output.length = 0;
    return !output.error;
}

/* While set, what is put goes to the end of this text instead: a line that is to be written whole. */
typedef struct text text;
static text *captured = NULL;
static void append(text *t, const char *bytes, size_t n);

static void put_bytes(const char *bytes, size_t n) {
    if (captured) {
        append(captured, bytes, n);
        return;
    }
    while (n > 0) {
        size_t room = sizeof output.data - output.length, part = n < room ? n : room;
        memcpy(output.data + output.length, bytes, part);
        output.length += part;
        bytes += part;
        n -= part;
        if (output.length == sizeof output.data) flush_output();
    }
}

static void put_text(const char *text) { put_bytes(text, strlen(text)); }

/* For short pieces: what is longer than the buffer here is cut. */
PRINTF(1, 2)
static void put(const char *format, ...) {
    char piece[1024];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(piece, sizeof piece, format, arguments);
    va_end(arguments);
    if (n > 0) put_bytes(piece, n < (int)sizeof piece ? (size_t)n : sizeof piece - 1);
}

PRINTF(1, 2)
static int fail(const char *format, ...) {
    flush_output();
    fputs("llm: ", stderr);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    return FAILED;
}

/* What the engine says of its settings, in the words of our options. */
typedef struct words { char text[2 * sizeof ((llm_error *)0)->message]; } words;
static words our_words(const llm_error *err) {
    static const struct { const char *theirs, *ours; } dictionary[] = {
        {"cache_bytes", "--cache-memory"}, {"max_batch_tokens", "--max-batch-tokens"}, {"max_sequences", "--max-sequences"},
        {"context_length", "--context"},   {"max_speculation", "--speculate"}, {"without chunked_prefill", "with --no-chunked-prefill"},
        {"llm_engine_options.draft", "--draft"}, {"n_samples", "the number of samples"}};
    words out;
    bool settings = err->status == LLM_ERROR_ARGUMENT || err->status == LLM_ERROR_MEMORY || err->status == LLM_ERROR_CAPACITY;
    size_t n = 0;
    for (const char *p = err->message; *p && n + 32 < sizeof out.text;) {
        int i = settings ? 0 : COUNT(dictionary);
        while (i < COUNT(dictionary) && strncmp(p, dictionary[i].theirs, strlen(dictionary[i].theirs))) i++;
        if (i == COUNT(dictionary)) out.text[n++] = *p++;
        else n += (size_t)sprintf(out.text + n, "%s", dictionary[i].ours), p += strlen(dictionary[i].theirs);
    }
    out.text[n] = 0;
    return out;
}

static int fail_with(const llm_error *err) { return fail("%s", our_words(err).text); }

static bool is_terminal(int descriptor) {
    const char *term = getenv("TERM");
    return isatty(descriptor) && !(term && !strcmp(term, "dumb"));
}

static bool in_colour(int descriptor) {
    const char *no_color = getenv("NO_COLOR");
    return is_terminal(descriptor) && !(no_color && *no_color);
}

/* Text that we did not write: on a terminal, without the control characters that could upset it. */
static void put_foreign(const char *text, size_t length) {
    bool terminal = isatty(STDOUT_FILENO);
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        put_bytes(terminal && (c < 0x20 || c == 0x7F) && c != '\n' && c != '\t' ? "?" : &text[i], 1);
    }
}

static const char dim[] = "\033[2m", green[] = "\033[32m";

static void put_coloured(const char *colour, const char *data, size_t length) {
    bool coloured = in_colour(STDOUT_FILENO);
    if (coloured) put_text(colour);
    put_foreign(data, length);
    if (coloured) put_text("\033[0m");
}

/* A bar on standard error, if that is a terminal; done < 0 wipes it away; NAN: how much there is to do is not known. */
static void show_progress(const char *what, double done, const char *note) {
    static double last = 0;
    double now = llm_seconds();
    if (!is_terminal(STDERR_FILENO) || (!(done < 0) && now - last < 0.1)) return;
    last = now;
    if (done < 0) {
        fputs("\r\033[K", stderr);
    } else if (isnan(done)) {
        fprintf(stderr, "\r%s: %s\033[K", what, note);
    } else {
        int filled = (int)(30 * (done < 1 ? done : 1));
        fprintf(stderr, "\r%s [%.*s%.*s] %3.0f %%  %s\033[K", what, filled, "##############################",
                30 - filled, "..............................", 100 * done, note);
    }
    fflush(stderr);
}

/* ---- Memory, text and files -------------------------------------------------------------- */
static void *resize(void *memory, size_t bytes) {
    memory = realloc(memory, bytes ? bytes : 1);
    if (!memory) exit(fail("out of memory (%zu bytes)", bytes));
    return memory;
}

struct text { /* bytes that grow; zero it to start */
    char *data;
    size_t length, capacity;
};

static void append(text *t, const char *bytes, size_t n) {
    if (t->length + n > t->capacity) t->data = resize(t->data, t->capacity = 2 * t->capacity + n + 64);
    if (n) memcpy(t->data + t->length, bytes, n);
    t->length += n;
}

/* All of a file, or of standard input ("-"). */
static bool read_all(const char *path, text *t) {
    bool standard = !strcmp(path, "-");
    int file = standard ? STDIN_FILENO : open(path, O_RDONLY);
    char part[1 << 14];
    ssize_t n = file < 0 ? -1 : 0;
    int error = errno;
    while (file >= 0 && ((n = read(file, part, sizeof part)) > 0 || (n < 0 && errno == EINTR && !stop_requested)))
        if (n > 0) append(t, part, (size_t)n);
    if (file >= 0) error = errno;
    if (file >= 0 && !standard) close(file);
    const char *why = stop_requested ? "interrupted" : strerror(error);
    if (n < 0) fail("cannot read %s: %s", standard ? "standard input" : path, why);
    return n >= 0;
}

/* Refuse to write over anything but a plain file, since the writer renames a new file over it. */
static bool may_write(const char *out, const char *in) {
    struct stat a, b;
    if (stat(out, &a) != 0) return true; /* the writer tells if it cannot be made */
    if (!S_ISREG(a.st_mode)) fail("%s is not a plain file: give the path of a file to write", out);
    else if (in && stat(in, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
        fail("input and output are the same file, %s: give another path to write to", out);
    else return true;
    return false;
}

/* A bundled file, here or beside the executable, as memory that the caller frees; NULL: it is in neither place, and that was said. */
static char *bundled_path(const char *name) {
    text path = {0};
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    const char *executable = n > 0 ? self : program_path, *slash = strrchr(executable, '/');
    if (access(name, R_OK) != 0 && slash) append(&path, executable, (size_t)(slash - executable) + 1);
    append(&path, name, strlen(name) + 1);
    if (access(path.data, R_OK) == 0) return path.data;
    free(path.data);
    fail("the bundled %s is not here: work where it is, or give a model with -m FILE", name);
    return NULL;
}

/* The model to use: the given path, or else the bundled one. */
static char *model_path(const char *given) {
    text path = {0};
    if (!given) return bundled_path(DEFAULT_MODEL);
    append(&path, given, strlen(given) + 1);
    return path.data;
}

/* Ids of a text, in memory that the caller frees. -1: failed, and said so. */
static int64_t tokenize(const llm_tokenizer *t, const char *data, size_t length, unsigned flags, int32_t **ids) {
    llm_error err;
    int64_t capacity = (int64_t)length + 8, n;
    *ids = NULL;
    for (;;) {
        *ids = resize(*ids, (size_t)capacity * sizeof **ids);
        n = llm_tokenize(t, data, length, flags, *ids, capacity, &err);
        if (n < 0) fail_with(&err);
        if (n <= capacity) return n;
        capacity = n;
    }
}

static const char *human_bytes(double bytes, char *buffer, size_t size) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    while (bytes >= 1024 && unit < 4) bytes /= 1024, unit++;
    snprintf(buffer, size, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return buffer;
}
#define HUMAN(bytes) human_bytes((double)(bytes), (char[32]){0}, 32)

/* ---- JSON ------------------------------------------------------------------------------ */

/* Length of the UTF-8 character at s, or 0 where there is none. */
static int utf8_length(const unsigned char *s, size_t n) {
    if (s[0] < 0x80) return 1;
    int length = s[0] >= 0xF5 ? 0 : s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : s[0] >= 0xC2 ? 2 : 0;
    if (length == 0 || (size_t)length > n) return 0;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    bool overlong = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xED && s[1] >= 0xA0, beyond = s[0] == 0xF4 && s[1] >= 0x90;
    return overlong || surrogate || beyond ? 0 : length;
}

/* A JSON string; a byte that is no UTF-8 becomes U+FFFD, since JSON has no other way. */
static void put_json(const char *data, size_t length) {
    put_text("\"");
    for (size_t i = 0; i < length;) {
        unsigned char c = (unsigned char)data[i];
        int n = utf8_length((const unsigned char *)data + i, length - i);
        if (c == '"' || c == '\\') put("\\%c", c);
        else if (c == '\n') put_text("\\n");
        else if (c < 0x20 || c == 0x7F) put("\\u%04x", c);
        else if (n == 0) put_text("\\ufffd");
        else put_bytes(data + i, (size_t)n);
        i += n ? (size_t)n : 1;
    }
    put_text("\"");
}

static void put_json_text(const char *t) { put_json(t, strlen(t)); }

static void put_number(double x) {
    if (isfinite(x)) put("%.10g", x);
    else put_text("null");
}

static void put_ids(const int32_t *ids, int64_t n) {
    put_text("[");
    for (int64_t i = 0; i < n; i++) put(i ? ", %d" : "%d", ids[i]);
    put_text("]");
}

static const char *skip_space(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) p++;
    return p;
}

/* The text of a value that begins at p, in well-formed JSON. */
static llm_string json_source(const char *p, const char *end) {
    const char *start = p;
    int depth = 0;
    bool quoted = false;
    do {
        if (quoted && *p == '\\') p++; /* and what it escapes */
        else if (*p == '"') quoted = !quoted;
        else if (!quoted) depth += (*p == '[' || *p == '{') - (*p == ']' || *p == '}');
        p++;
    } while (p < end && (quoted || depth || !strchr(",]} \t\r\n", *p)));
    return (llm_string){start, (size_t)(p - start)};
}

/* The token ids of a JSON array. False: something else is there. */
static bool json_ids(const llm_json_node *array, int32_t **ids, int64_t *n) {
    *n = 0;
    if (!llm_json_has_kind(array, LLM_JSON_ARRAY)) return false;
    *ids = resize(*ids, ((size_t)array->length + 1) * sizeof **ids);
    for (const llm_json_node *item = llm_json_first(array); item;
         item = llm_json_next(array, item)) {
        int64_t id;
        if (!llm_json_i64(item, &id) || id < INT32_MIN || id > INT32_MAX) return false;
        (*ids)[(*n)++] = (int32_t)id;
    }
    return true;
}

/* Ids between spaces or commas. False: something else is there. */
static bool parse_ids(const char *data, size_t length, int32_t **ids, int64_t *n) {
    text t = {0}; /* zero-terminated, for strtol */
    append(&t, data, length);
    append(&t, "", 1);
    *n = 0;
    const char *p = t.data, *end = t.data + length;
    bool good = true;
    while (good && (p = skip_space(p, end)) < end) {
        char *after;
        errno = 0;
        long id = strtol(p, &after, 10);
        good = after > p && !errno && id >= INT32_MIN && id <= INT32_MAX;
        if (!good) break;
        if ((*n & (*n - 1)) == 0) *ids = resize(*ids, (size_t)(*n ? 2 * *n : 1) * sizeof **ids);
        (*ids)[(*n)++] = (int32_t)id;
        p = skip_space(after, end);
        p += p < end && *p == ',';
    }
    free(t.data);
    return good;
}

/* ---- Options ----------------------------------------------------------------------------
 * A command lists its options in a table; from it come the parsing, the checks and the help. */
typedef enum option_kind { FLAG, OFF, TEXT, TEXTS, WHOLE, REAL, SEED, SIZE, TYPE, LIST, RANGE, CHOICE, OMIT, DEPTH } option_kind;

typedef struct seed_value {
    bool given;
    uint64_t value;
} seed_value;

typedef struct int_list {
    int *values, count;
} int_list;

typedef struct int_range {
    int low, high;
} int_range;

typedef struct text_list {
    const char **items;
    int count;
} text_list;

typedef struct option {
    char letter; /* 0: none */
    const char *name, *argument;
    option_kind kind;
    void *value; /* by kind: bool (twice; OFF clears it), const char *, text_list, int, float, seed_value, uint64_t, llm_type,
                    int_list, int_range, int (which of the words in `argument`), unsigned (OMIT clears bit i for the i-th of
                    these words; the last word stands for all), int (or LLM_SPECULATE_AUTO) */
    double low, high; /* of WHOLE, REAL, DEPTH and the members of LIST and RANGE */
    const char *help;
} option;

typedef struct command {
    const char *name, *summary, *usage;
    int (*run)(const struct command *self, int argc, char **argv);
    const char *notes; /* what else --help says, and examples */
} command;

/* Levenshtein's distance: the fewest letters to insert, delete or replace. */
static int edit_distance(const char *a, const char *b) {
    int n = (int)strlen(b), row[64];
    if (n >= COUNT(row) || strlen(a) >= (size_t)COUNT(row)) return INT_MAX;
    for (int j = 0; j <= n; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int replace = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            int shift = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            row[j] = replace < shift ? replace : shift;
        }
    }
    return row[n];
}

typedef struct suggestion {
    const char *typed, *best;
    int distance;
} suggestion;

static void consider(suggestion *s, const char *name) {
    int distance = edit_distance(s->typed, name), limit = ((int)strlen(name) + 1) / 2;
    bool begins = strlen(s->typed) > 1 && !strncmp(s->typed, name, strlen(s->typed));
    if (begins) distance = 0;
    if (distance > 3 || distance > limit || (s->best && distance >= s->distance)) return;
    s->best = name;
    s->distance = distance;
}

/* What was called wrongly, and where the right way is written. */
PRINTF(2, 3)
static int misuse(const command *self, const char *format, ...) {
    fprintf(stderr, "llm%s%s: ", self ? " " : "", self ? self->name : "");
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\nTry: llm %s%s--help\n", self ? self->name : "", self ? " " : "");
    return MISUSED;
}

static int unknown_option(const command *self, const option *options, int n, const char *typed) {
    suggestion s = {typed, NULL, 0};
    for (int i = 0; i < n; i++) consider(&s, options[i].name);
    consider(&s, "help");
    if (s.best) return misuse(self, "unknown option --%s; did you mean --%s?", typed, s.best);
    return misuse(self, "unknown option --%s", typed);
}

static void show_help(const command *self, const option *options, int n) {
    put("Usage: llm %s %s\n\n", self->name, self->usage);
    put_text(self->summary);
    put_text("\n\nOptions:\n");
    for (int i = 0; i < n; i++) {
        const option *o = &options[i];
        char left[64];
        snprintf(left, sizeof left, o->letter ? "-%c, --%s %s" : "%c   --%s %s", o->letter ? o->letter : ' ', o->name,
                 o->argument ? o->argument : "");
        put("  %-30s ", left);
        put_text(o->help);
        put_text("\n");
    }
    put("  %-30s this text\n\n", "    --help");
    put_text(self->notes);
}

static bool parse_size(const char *s, uint64_t *out) {
    char *end;
    double x = strtod(s, &end);
    if (end == s || !(x >= 0)) return false;
    static const char units[] = "KMGT";
    const char *unit = *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    for (int i = 0; unit && i <= unit - units; i++) x *= 1024;
    end += unit != NULL;
    if (unit && *end == 'i') end++;
    if (*end == 'B') end++;
    *out = x < 1e18 ? (uint64_t)x : 0;
    return !*end && x < 1e18;
}

static bool parse_list(const char *s, double low, double high, int_list *list) {
    list->count = 0;
    list->values = resize(list->values, (strlen(s) + 1) * sizeof(int));
    for (;; s++) {
        char *end;
        long x = strtol(s, &end, 10);
        if (end == s || (double)x < low || (double)x > high || (*end && *end != ',')) return false;
        list->values[list->count++] = (int)x;
        if (!*end) return true;
        s = end;
    }
}

/* "10-500", or one number for both. */
static bool parse_range(const char *s, double low, double high, int_range *range) {
    char *end;
    long a = strtol(s, &end, 10), b = a;
    if (end == s || !isdigit((unsigned char)*s)) return false;
    if (*end == '-') {
        s = end + 1;
        b = strtol(s, &end, 10);
        if (!isdigit((unsigned char)*s)) return false;
    }
    *range = (int_range){(int)a, (int)b};
    return !*end && (double)a >= low && a <= b && (double)b <= high;
}

/* Which of the words, that stand in `words` with bars between them; -1: none. */
static int find_choice(const char *words, const char *s) {
    for (int i = 0;; i++, words++) {
        size_t n = strcspn(words, "|");
        if (strlen(s) == n && !strncasecmp(words, s, n)) return i;
        words += n;
        if (!*words) return -1;
    }
}

/* Clear the bits of the named words; the last word stands for all. */
static bool parse_omitted(const char *words, const char *s, unsigned *bits) {
    for (char word[32];; s++) {
        size_t n = strcspn(s, ",");
        snprintf(word, sizeof word, "%.*s", (int)n, s);
        int i = find_choice(words, word);
        if (i < 0) return false;
        *bits &= strcmp(word, strrchr(words, '|') + 1) ? ~(1u << i) : 0;
        s += n;
        if (!*s) return true;
    }
}

static bool parse_value(const option *o, const char *s) {
    char *end = NULL;
    errno = 0;
    switch (o->kind) {
    case TEXT: *(const char **)o->value = s; return true;
    case SIZE: return parse_size(s, o->value);
    case LIST: return parse_list(s, o->low, o->high, o->value);
    case RANGE: return parse_range(s, o->low, o->high, o->value);
    case CHOICE: return (*(int *)o->value = find_choice(o->argument, s)) >= 0;
    case OMIT: return parse_omitted(o->argument, s, o->value);
    case TEXTS: {
        text_list *list = o->value;
        list->items = resize(list->items, (size_t)(list->count + 1) * sizeof *list->items);
        list->items[list->count++] = s;
        return *s;
    }
    case DEPTH:
        if (!strcmp(s, "auto")) return *(int *)o->value = LLM_SPECULATE_AUTO, true;
        /* fallthrough */
    case WHOLE: {
        long x = strtol(s, &end, 10);
        *(int *)o->value = (double)x >= o->low && (double)x <= o->high ? (int)x : 0;
        return end > s && !*end && !errno && (double)x >= o->low && (double)x <= o->high;
    }
    case REAL: {
        double x = strtod(s, &end);
        *(float *)o->value = (float)x;
        return end > s && !*end && x >= o->low && x <= o->high;
    }
    case SEED: {
        seed_value *seed = o->value;
        seed->given = true;
        seed->value = strtoull(s, &end, 10);
        return isdigit((unsigned char)*s) && !*end && !errno;
    }
    case TYPE: {
        const llm_type_info *type = llm_type_by_name(s);
        if (type) *(llm_type *)o->value = type->type;
        return type != NULL;
    }
    case FLAG:
    case OFF: break;
    }
    return false;
}

/* What kind of value the option wants, in words. */
static const char *wanted(const option *o, char *buffer, size_t size) {
    switch (o->kind) {
    case WHOLE: snprintf(buffer, size, "a whole number from %.0f to %.0f", o->low, o->high); break;
    case DEPTH: snprintf(buffer, size, "a whole number from %.0f to %.0f, or auto", o->low, o->high); break;
    case REAL: snprintf(buffer, size, "a number from %g to %g", o->low, o->high); break;
    case SEED: snprintf(buffer, size, "a whole number from 0 to 18446744073709551615"); break;
    case SIZE: snprintf(buffer, size, "a size such as 512M or 8G"); break;
    case LIST: snprintf(buffer, size, "whole numbers from %.0f to %.0f with commas between them", o->low, o->high); break;
    case RANGE: snprintf(buffer, size, "a whole number, or two of them as LOW-HIGH, from %.0f to %.0f", o->low, o->high); break;
    case CHOICE: snprintf(buffer, size, "one of %s", o->argument); break;
    case OMIT: snprintf(buffer, size, "some of %s with commas between them", o->argument); break;
    case TEXT:
    case TEXTS: snprintf(buffer, size, "a text that is not empty"); break;
    case FLAG:
    case OFF: snprintf(buffer, size, "true or false"); break;
    case TYPE: {
        size_t n = (size_t)snprintf(buffer, size, "one of the types ");
        for (int i = 0; llm_type_at(i) && n < size; i++)
            n += (size_t)snprintf(buffer + n, size - n, i ? ", %s" : "%s", llm_type_at(i)->name);
    }
    }
    return buffer;
}
#define WANTED(option) wanted(option, (char[160]){0}, 160)

static const option *find_option(const option *options, int n, const char *name, size_t length, char letter) {
    for (int i = 0; i < n; i++) {
        bool named = strlen(options[i].name) == length && !strncmp(options[i].name, name, length);
        if (letter ? options[i].letter == letter : named) return &options[i];
    }
    return NULL;
}

enum { PARSED = -1 };

/* Fill the values of the options; leaves the *argc other arguments in argv. Returns PARSED, or the
 * exit status where there is nothing more to do: help was asked for, or the call was wrong. */
static int parse(const command *self, const option *options, int n_options, int *argc, char **argv, int max_arguments) {
    int n = 0;
    bool options_end = false;
    for (int i = 0; i < *argc; i++) {
        char *word = argv[i];
        if (options_end || word[0] != '-' || !word[1]) {
            if (n == max_arguments) return misuse(self, "one argument too many: '%s' (a text or a path with spaces needs quotes)", word);
            argv[n++] = word;
            continue;
        }
        if (!strcmp(word, "--")) {
            options_end = true;
            continue;
        }
        if (!strcmp(word, "--help") || !strcmp(word, "-h")) {
            show_help(self, options, n_options);
            return 0;
        }
        bool spelt = word[1] == '-';
        const char *name = word + (spelt ? 2 : 1), *equals = spelt ? strchr(name, '=') : NULL;
        size_t length = equals ? (size_t)(equals - name) : strlen(name);
        if (!spelt && word[2]) return misuse(self, "unknown option %s (options of more than one letter begin with --)", word);
        const option *o = find_option(options, n_options, name, length, spelt ? 0 : name[0]);
        if (!o && !spelt) return misuse(self, "unknown option %s", word);
        if (!o) {
            word[length + 2] = 0; /* cut off =value */
            return unknown_option(self, options, n_options, name);
        }
        if (o->kind == FLAG || o->kind == OFF) {
            if (equals) return misuse(self, "--%s takes no value", o->name);
            *(bool *)o->value = o->kind == FLAG;
            continue;
        }
        const char *value = equals ? equals + 1 : i + 1 < *argc ? argv[++i] : NULL;
        if (!value) return misuse(self, "--%s needs a value: --%s %s", o->name, o->name, o->argument);
        if (!parse_value(o, value)) return misuse(self, "--%s needs %s, not '%s'", o->name, WANTED(o), value);
    }
    *argc = n;
    return PARSED;
}

#define MODEL_OPTION(value) {'m', "model", "FILE", TEXT, &(value), 0, 0, "a GGUF file or a Hugging Face folder (default: " DEFAULT_MODEL ")"}
#define DEVICES "auto|cpu|cuda|emulated"
#define ISAS "reference|plain|dotprod|avx2|avx512|amx" /* the words of enum llm_isa, in its order */
#define FUSIONS "gate|rope|own-copies|side-by-side|all" /* the names of LLM_FUSE_..., in their order */
#define DEVICE_OPTIONS \
    {0, "device", DEVICES, CHOICE, &chosen.device, 0, 0, "where to compute (default auto: an NVIDIA GPU, or the CPU where there is none)"}, \
    {0, "isa", ISAS, CHOICE, &chosen.isa, 0, 0, "on the CPU: the best instruction set to use (default amx: all there is)"}, \
    {0, "no-packed-weights", NULL, OFF, &chosen.pack_weights, 0, 0, "... no second copy of the weights in the kernels' order: slower"}, \
    {0, "no-fusion", FUSIONS, OMIT, &chosen.fusions, 0, 0, "do not plan these fusions of operations; the results are the same bits"}, \
    {0, "gpu", "N", WHOLE, &chosen.gpu.device, 0, 1023, "which GPU (default 0)"}, \
    {0, "gpu-memory", "SHARE", REAL, &chosen.memory_share, 0.01, 1, "of the GPU's free memory for keys and values (default 0.9)"}, \
    {0, "no-graphs", NULL, OFF, &chosen.gpu.graphs, 0, 0, "on a GPU: launch kernels one by one"}, \
    {0, "no-fused", NULL, OFF, &chosen.gpu.fused, 0, 0, "... one kernel for each operation"}, \
    {0, "no-split-attention", NULL, OFF, &chosen.gpu.split_attention, 0, 0, "... one block for each sequence, however long"}, \
    {0, "overlap", NULL, FLAG, &chosen.gpu.overlap, 0, 0, "... let a kernel begin before the last has ended (Hopper; not measured yet)"}, \
    {0, "plain-kernels", NULL, FLAG, &chosen.gpu.plain, 0, 0, "... the textbook kernels, for comparison"}, \
    {0, "deterministic", NULL, FLAG, &chosen.gpu.deterministic, 0, 0, "... the same bits whatever else is in the batch"}, \
    {0, "host-sampling", NULL, FLAG, &chosen.host_sampling, 0, 0, "... draw tokens on the CPU"}
/* What to compute with: for every command that makes an engine. */
#define THREADS_OPTION(value) \
    {'t', "threads", "N", WHOLE, &(value), 0, 4096, "threads to compute with, on the CPU (0: one per processor)"}, DEVICE_OPTIONS
#define JSON_OPTION(value) {0, "json", NULL, FLAG, &(value), 0, 0, "the result as JSON, for programs"}
/* As options (_ is "-") and as the keys of a line of llm batch (_ is "_"). */
#define SAMPLING_OPTIONS(s, _) \
    {0, "temperature", "T", REAL, &(s).temperature, 0, 100, "0: always the most likely token; 1: the model's own odds (default 0.8)"}, \
    {0, "top" _ "k", "K", WHOLE, &(s).top_k, 0, INT_MAX, "draw from the K most likely tokens only (0: all, the default)"}, \
    {0, "top" _ "p", "P", REAL, &(s).top_p, 1e-6, 1, "... from the fewest tokens that hold this much of the odds (default 0.95)"}, \
    {0, "min" _ "p", "P", REAL, &(s).min_p, 0, 1, "... from tokens at least P times as likely as the likeliest (default 0)"}, \
    {0, "repetition" _ "penalty", "X", REAL, &(s).repetition_penalty, 0.01, 100, "make tokens of late less likely (1: do not, the default)"}, \
    {0, "penalty" _ "window", "N", WHOLE, &(s).penalty_window, 0, INT_MAX, "how many tokens are of late (0: all; default 64)"}
#define STOP_OPTION(value) {0, "stop", "TEXT", TEXTS, &(value), 0, 0, "end before this text (may be given several times)"}
#define SPECULATION_OPTIONS(s) \
    {'d', "draft", "FILE", TEXT, &(s).path, 0, 0, "a small model of the same vocabulary, that proposes tokens"}, \
    {0, "speculate", "K|auto", DEPTH, &(s).depth, 0, MOST_PROPOSALS, "tokens to propose in a step (default: as many as pay)"}, \
    {0, "lookup", NULL, FLAG, &(s).lookup, 0, 0, "propose what stood behind the same words before; needs no draft"}
#define NAIVE_OPTION(e) {0, "naive-attention", NULL, FLAG, &(e).naive_attention, 0, 0, "the plain attention loop, for comparison"}
#define CACHE_TYPE_OPTION(e) {0, "cache-type", "f32|f16", CHOICE, &(e).cache_type, 0, 0, "of keys and values (default f16)"}
_Static_assert(LLM_F32 == 0 && LLM_F16 == 1 && sizeof(llm_type) == sizeof(int), "the choices stand in the order of llm_type");
#define CACHE_OPTION(e, fallback) \
    {0, "cache-memory", "SIZE", SIZE, &(e).cache_bytes, 0, 0, "for keys and values (default: " fallback ", up to 1G; on a GPU see --gpu-memory)"}
#define BLOCK_OPTION(e) {0, "block-size", "N", WHOLE, &(e).block_size, 1, 1 << 20, "tokens in a block of the cache (default 16)"}
#define STEP_OPTION(e) {0, "max-batch-tokens", "N", WHOLE, &(e).max_batch_tokens, 1, 1 << 20, "tokens in one forward pass (default 512)"}
#define SCHEDULE_OPTIONS(e) \
    {0, "max-sequences", "N", WHOLE, &(e).max_sequences, 1, 1 << 16, "sequences that run at the same time (default 16)"}, \
    STEP_OPTION(e), \
    {0, "preempt", PREEMPTIONS, CHOICE, &(e).preempt, 0, 0, "out of blocks: forget and recompute (default), or copy away"}, \
    {0, "no-prefix-cache", NULL, OFF, &(e).prefix_cache, 0, 0, "prompts that begin alike share no blocks"}, \
    {0, "no-chunked-prefill", NULL, OFF, &(e).chunked_prefill, 0, 0, "a prompt goes through the model in one step"}

/* The words of enum llm_preempt, in their order. */
#define PREEMPTIONS "recompute|swap"

/* ---- What run, batch and bench have in common ------------------------------------------------ */
enum { NO_DEPTH = -2, MOST_PROPOSALS = 64 };

typedef struct speculation { /* from the command line */
    const char *path; /* of the draft model; NULL: none */
    int depth;        /* NO_DEPTH: not given */
    bool lookup;
} speculation;

static int check_speculation(const command *self, const speculation *s) {
    if (s->path && s->lookup) return misuse(self, "--draft and --lookup: one of them is enough");
    if (s->depth != NO_DEPTH && s->depth != 0 && !s->path && !s->lookup)
        return misuse(self, "--speculate needs something to propose tokens: --draft FILE, or --lookup");
    return PARSED;
}

static void apply_speculation(const speculation *s, llm_engine_options *engine, llm_request *request) {
    bool wanted = s->path || s->lookup;
    request->lookup = s->lookup;
    request->speculate = s->depth != NO_DEPTH ? s->depth : wanted ? LLM_SPECULATE_AUTO : 0;
    if (s->depth > engine->max_speculation) engine->max_speculation = s->depth;
}

/* The model, and the draft where there is one. False: said why. */
static bool load_models(const char *path, const char *draft_path, llm_model **model, llm_model **draft) {
    llm_error err;
    *draft = NULL;
    if (!(*model = llm_model_load(path, &err))) return !fail_with(&err);
    if (draft_path && !(*draft = llm_model_load(draft_path, &err))) return !fail_with(&err);
    return true;
}

/* ---- The device ------------------------------------------------------------------------------------- */

/* A backend for what --device says; *backend NULL: the CPU, which the engine makes itself. */
static bool open_device(llm_backend **backend, llm_error *err) {
    const char *missing = NULL;
    *backend = NULL;
    if (chosen.device == DEVICE_AUTO || chosen.device == DEVICE_CUDA) {
#ifdef LLM_WITH_CUDA
        *backend = llm_cuda_backend(&chosen.gpu, err);
        if (!*backend && chosen.device == DEVICE_CUDA) return false;
        if (!*backend && err->status != LLM_ERROR_UNSUPPORTED && !chosen.quiet) fprintf(stderr, "%s; using the CPU\n", err->message);
#else
        if (chosen.device == DEVICE_CUDA) missing = "CUDA: install the CUDA Toolkit (nvcc)";
#endif
    }
    if (chosen.device == DEVICE_EMULATED) {
#ifdef LLM_WITH_EMULATED
        setenv("LLM_EMU_MEMORY", "1073741824", 0); /* it is filled, so that nobody reads what was never written */
        if (!(*backend = llm_emulated_backend(&chosen.gpu, err))) return false;
#else
        missing = "the emulated device: install a C++ compiler (g++)";
#endif
    }
    err->status = missing ? LLM_ERROR_UNSUPPORTED : LLM_OK;
    if (missing) snprintf(err->message, sizeof err->message, "this program was built without %s, then make again", missing);
    return !missing;
}

/* How long the CPU was busy with a step that a GPU did. */
static void print_host_time(const llm_statistics *s) {
    if (s->device_launches + s->device_replays == 0 || s->steps == 0) return;
    fprintf(stderr, "; a step took %.0f us of the CPU, %.1f launches and %.2f graphs",
            1e6 * (s->step_seconds - s->wait_seconds) / (double)s->steps, (double)s->device_launches / (double)s->steps,
            (double)s->device_replays / (double)s->steps);
}

/* What took which part of a device's memory. */
static void print_memory(const llm_engine *engine, const llm_backend *backend) {
    llm_statistics s = llm_engine_statistics(engine);
    llm_device_state state;
    if (!backend->state) return;
    backend->state(backend->context, &state);
    uint64_t known = s.weight_bytes + s.cache_bytes + s.arena_bytes, used = state.total_bytes - state.free_bytes;
    fprintf(stderr, "[%s: %s of memory: ", state.name, HUMAN(state.total_bytes));
    fprintf(stderr, "%s of weights, ", HUMAN(s.weight_bytes));
    fprintf(stderr, "%s of cache (%lld blocks of %d tokens), ", HUMAN(s.cache_bytes), (long long)s.blocks_total, s.block_size);
    fprintf(stderr, "%s of activations, ", HUMAN(s.arena_bytes));
    fprintf(stderr, "%s of other things, ", HUMAN(used > known ? used - known : 0));
    fprintf(stderr, "%s free]\n", HUMAN(state.free_bytes));
}

/* An engine on the device that was chosen. */
static llm_engine *create_engine(const llm_model *model, const llm_engine_options *options, llm_error *err) {
    llm_engine_options o = *options;
    o.memory_share = chosen.memory_share;
    o.host_sampling = chosen.host_sampling;
    o.max_isa = (llm_isa)chosen.isa;
    o.pack_weights = chosen.pack_weights;
    o.fusions &= chosen.fusions;
    if (!open_device(&o.backend, err)) return NULL;
    llm_engine *engine = llm_engine_create(model, &o, err);
    if (engine && o.backend && !chosen.quiet) print_memory(engine, o.backend);
    if (!engine) llm_backend_free(o.backend);
    return engine;
}

static void free_engine(llm_engine *engine) {
    llm_backend *backend = engine ? llm_engine_settings(engine)->backend : NULL;
    bool ours = backend && llm_cpu_threads(backend) == 0; /* a CPU backend is the engine's own */
    llm_engine_free(engine);
    if (ours) llm_backend_free(backend);
}

#include "docs/trace.h"

#define TRACE_OPTION(path) \
    {0, "trace", "FILE", TEXT, &(path), 0, 0, "write what each step decided: Chrome trace events, for Perfetto"}

static int check_trace_name(const command *self, const char *path) {
    if (!path || (*path && strcmp(path, "-"))) return PARSED;
    return misuse(self, "--trace needs the name of a file: standard output is for the text");
}

/* Nothing is written over but an old trace, or an empty file; nor `output`, which this command writes too (NULL: none). */
static bool check_trace(const char *path, const char *output) {
    struct stat a, b;
    char first = '[';
    if (!path || stat(path, &a) != 0) return true;
    if (output && stat(output, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
        return !fail("--trace and the output are the same file, %s: give another path to write to", path);
    FILE *file = S_ISREG(a.st_mode) ? fopen(path, "r") : NULL;
    if (file && fread(&first, 1, 1, file) == 0) first = '[';
    if (file) fclose(file);
    return first == '[' || !fail("%s is there, and is no trace: give another path to write to", path);
}

/* Set the engine's options to write a trace to `path` (NULL: none). */
static bool open_trace(trace_writer *trace, const char *path, llm_engine_options *options) {
    int error = path ? trace_open(trace, path) : 0;
    if (error) return !fail("cannot write to %s: %s", path, strerror(error));
    options->trace = path ? trace_write : NULL;
    options->trace_user = trace;
    return true;
}

static bool close_trace(trace_writer *trace, const char *path) {
    int error = trace_close(trace);
    return !error || !fail("cannot write to %s: %s", path, strerror(error));
}

/* What speculation came to; 0: unknown. */
static double acceptance(const llm_statistics *s) { return s->proposed ? (double)s->accepted / (double)s->proposed : 0; }
static double tokens_per_step(const llm_statistics *s) {
    return s->decode_steps ? (double)s->generated_tokens / (double)s->decode_steps : 0;
}

static void print_speculation(const llm_statistics *s) {
    fprintf(stderr, "; %.0f %% of %llu proposals accepted, %.2f tokens a step", 100 * acceptance(s), (unsigned long long)s->proposed,
            tokens_per_step(s));
}

/* Another one each time, and short enough to be typed again. */
static uint64_t chance_seed(void) {
    return ((uint64_t)(llm_seconds() * 1e6) ^ (uint64_t)getpid() << 12 ^ (uint64_t)time(NULL)) % 1000000;
}

static const char *finish_name(llm_finish finish) {
    static const char *const names[] = {"none", "end", "length", "stop", "cancelled"};
    return (unsigned)finish < (unsigned)COUNT(names) ? names[finish] : "?";
}

typedef struct generated_token {
    int32_t id;
    float logprob;
    bool accepted;   /* by speculation */
    size_t text_end; /* its text ends here, in the sample's */
} generated_token;

typedef struct sample {
    text text;
    generated_token *tokens;
    int n_tokens;
    llm_finish finish;
    size_t n_shown;     /* bytes of text already on the screen, */
    int n_shown_tokens; /* and the tokens that these are the whole of */
} sample;

static sample *make_samples(int n) {
    sample *samples = resize(NULL, (size_t)n * sizeof *samples);
    memset(samples, 0, (size_t)n * sizeof *samples);
    return samples;
}

static void free_samples(sample *samples, int n) {
    for (int i = 0; samples && i < n; i++) {
        free(samples[i].text.data);
        free(samples[i].tokens);
    }
    free(samples);
}

static void take_event(sample *s, const llm_event *event) {
    append(&s->text, event->text, event->text_length);
    if (event->finish != LLM_FINISH_NONE) s->finish = event->finish;
    if (event->token < 0) return;
    if ((s->n_tokens & (s->n_tokens - 1)) == 0)
        s->tokens = resize(s->tokens, (size_t)(s->n_tokens ? 2 * s->n_tokens : 1) * sizeof *s->tokens);
    s->tokens[s->n_tokens++] = (generated_token){event->token, event->logprob, event->accepted, s->text.length};
}

/* Ids of a prompt, for the caller to free: BOS alone where it is empty; 0 where there is no BOS either. */
static int64_t prompt_ids(const llm_tokenizer *t, const text *words, bool special, int32_t **ids) {
    unsigned flags = LLM_TOKENIZE_BOS | (special ? LLM_TOKENIZE_SPECIAL : 0);
    int64_t n = tokenize(t, words->data ? words->data : "", words->length, flags, ids);
    if (n == 0 && llm_tokenizer_bos(t) >= 0) (*ids)[n++] = llm_tokenizer_bos(t);
    return n;
}

/* ---- The memory's bandwidth ----------------------------------------------------------------
 * Making one token reads all weights once, and does little with each: so the memory's speed is the
 * limit, and the share of it that a run reached says how good the run was. */

/* Bytes a second that `threads` threads read together, from a buffer that caches do not hold. */
static double measure_bandwidth(int threads) {
    enum { PARTS = 64, WORDS = (256 << 20) / 8 / PARTS }; /* of 4 MiB: small enough to share out evenly */
    enum { RUNS = 8, RUN = WORDS / RUNS }; /* read side by side: one run alone waits for its own pages and lines */
    uint64_t *buffer = malloc((size_t)PARTS * WORDS * sizeof *buffer);
    if (!buffer) return 0;
    double best = 0, start = 0;
    uint64_t sum = 0;
    for (int sweep = 0; sweep < 3 || llm_seconds() - start < 0.15; sweep++) {
        double began = llm_seconds();
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : sum)
#endif
        for (int part = 0; part < PARTS; part++) {
            uint64_t *p = buffer + (size_t)part * WORDS, a = 0, b = 0, c = 0, d = 0;
            if (sweep == 0) memset(p, part, WORDS * sizeof *p); /* gives the pages their memory */
            else
                for (int i = 0; i < RUN; i += 8)
                    for (int run = 0; run < RUNS; run++) {
                        const uint64_t *q = p + run * RUN + i;
                        a += q[0] + q[4];
                        b += q[1] + q[5];
                        c += q[2] + q[6];
                        d += q[3] + q[7];
                    }
            sum += a + b + c + d;
        }
        double rate = PARTS * (double)WORDS * sizeof *buffer / (llm_seconds() - began);
        if (sweep == 0) start = llm_seconds();
        else if (rate > best) best = rate;
        if (llm_seconds() - start > 0.3) break;
    }
    volatile uint64_t used = sum; /* so that the reads are not optimised away */
    (void)used, (void)threads;
    free(buffer);
    return best;
}

/* Bytes a second that memory delivers to the threads of an engine; 0: unknown, as that of a GPU is. */
static double engine_bandwidth(const llm_engine *engine) {
    int threads = llm_cpu_threads(llm_engine_settings(engine)->backend);
    return threads ? measure_bandwidth(threads) : 0;
}

static size_t row_bytes(llm_type type, uint64_t values) {
    const llm_type_info *info = llm_type_find(type);
    return (size_t)(values / (uint64_t)info->block_values) * (size_t)info->block_bytes;
}

#include "docs/program.h"

/* Operations a second of the engine's own matrix product, on a matrix of the model's type that stays in the cache and on
 * enough rows that nothing but arithmetic is left. */
static double arithmetic_peak(const llm_model *model, llm_backend *b) {
    enum { SIZE_ = 512, ROWS = 256 };
    llm_error err;
    llm_program p = {0};
    const llm_tensor *like = llm_file_find_tensor(llm_model_file(model), "blk.0.ffn_up.weight");
    const llm_type_info *type = llm_type_find(like ? like->type : LLM_F16);
    size_t bytes = row_bytes(type->type, SIZE_) * SIZE_;
    float *values = resize(NULL, SIZE_ * SIZE_ * sizeof *values);
    for (int i = 0; i < SIZE_ * SIZE_; i++) values[i] = (float)(llm_random(1, 2, (uint64_t)i) - 0.5);
    void *weights = resize(NULL, bytes);
    llm_pack(type->type, values, weights, SIZE_ * SIZE_);
    llm_weight w = {.type = type->type, .rows = SIZE_, .cols = SIZE_};
    float *x = b->allocate(b->context, ROWS * SIZE_ * sizeof *x, "a test", &err), *out = b->allocate(b->context, ROWS * SIZE_ * sizeof *x, "a test", &err);
    bool good = x && out && b->load_weight(b->context, &w, weights, &err) &&
                b->upload(b->context, x, values, ROWS * SIZE_ * sizeof *x, &err);
    double best = 0, end = llm_seconds() + 0.4;
    for (int i = 0; good && i < 4; i++) program_add(&p, LLM_OP_MATMUL, &w, x, SIZE_, out, SIZE_);
    while (good && llm_seconds() < end) {
        double start = llm_seconds();
        good = program_run(b, &p, ROWS, &err);
        double rate = 4 * 2.0 * ROWS * SIZE_ * SIZE_ / (llm_seconds() - start);
        if (rate > best) best = rate;
    }
    if (!good) fail_with(&err);
    program_free(b, &p);
    if (w.data) b->free_weight(b->context, &w);
    b->release(b->context, x);
    b->release(b->context, out);
    free(values);
    free(weights);
    return good ? best : 0;
}

/* Bytes of the largest cache of the processor; 0: unknown. */
static double processor_cache(void) {
#ifdef __GLIBC__
    long third = sysconf(_SC_LEVEL3_CACHE_SIZE), second = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return third > 0 ? (double)third : second > 0 ? (double)second : 0;
#else
    return 0;
#endif
}

/* ---- llm run ---------------------------------------------------------------------------- */
typedef struct figures { /* of a run */
    double submitted, first, last; /* clock: submit, first token, last token */
    uint64_t first_steps;          /* steps of the engine until the first token */
    uint64_t decode_tokens;        /* tokens of the later steps */
    double cache_bytes;            /* of keys and values that those read */
} figures;

typedef struct run {
    const char *model, *file, *trace_path;
    trace_writer trace;
    llm_engine_options engine;
    llm_request request;
    speculation speculation;
    text_list stop;
    seed_value seed;
    bool special, json, quiet;
    text prompt;
    int32_t *ids;
    llm_model *loaded, *draft;
    sample *samples;
    int shown;  /* samples that have been shown whole; the next is shown as it comes */
    int opened; /* samples whose beginning has been shown */
    figures figures;
} run;

/* The words, from the argument, the file or standard input. */
static bool run_read_prompt(run *r, int argc, char **argv) {
    const char *path = r->file ? r->file : argc && !strcmp(argv[0], "-") ? "-" : NULL;
    if (!path) {
        if (argc) append(&r->prompt, argv[0], strlen(argv[0]));
        return true;
    }
    if (!read_all(path, &r->prompt)) return false;
    if (r->prompt.length && r->prompt.data[r->prompt.length - 1] == '\n') r->prompt.length--;
    return true;
}

static bool run_make_ids(run *r) {
    const llm_tokenizer *t = llm_model_tokenizer(r->loaded);
    int64_t n = prompt_ids(t, &r->prompt, r->special, &r->ids);
    if (n == 0) fail("the prompt is empty, and this model has no BOS token to begin with: give a prompt");
    if (n <= 0) return false;
    r->request.prompt = r->ids;
    r->request.n_prompt = n < INT_MAX ? (int)n : INT_MAX;
    return true;
}

/* The new part of a sample's text, the tokens that speculation guessed in colour. */
static void run_show_sample(sample *s) {
    while (s->n_shown < s->text.length) {
        const generated_token *token = s->n_shown_tokens < s->n_tokens ? &s->tokens[s->n_shown_tokens] : NULL;
        size_t end = token ? token->text_end : s->text.length, n = end - s->n_shown;
        if (n && token && token->accepted) put_coloured(green, s->text.data + s->n_shown, n);
        else put_foreign(s->text.data + s->n_shown, n);
        s->n_shown = end;
        if (token) s->n_shown_tokens++;
    }
}

/* Show what there is to see: one sample as it comes, each other one after those before it. */
static bool run_show(run *r) {
    for (; r->shown < r->request.n_samples; r->shown++) {
        sample *s = &r->samples[r->shown];
        if (r->opened == r->shown) {
            r->opened++;
            if (r->request.n_samples > 1) put("[sample %d]\n", r->opened);
            if (!r->quiet) put_coloured(dim, r->prompt.data, r->prompt.length);
        }
        run_show_sample(s);
        if (s->finish == LLM_FINISH_NONE) break;
        put_text("\n");
    }
    return flush_output();
}

static void run_take(run *r, const llm_event *event, uint64_t steps) {
    take_event(&r->samples[event->sample], event);
    if (event->token < 0) return;
    figures *f = &r->figures;
    f->last = llm_seconds();
    if (f->first == 0) {
        f->first = f->last;
        f->first_steps = steps;
    } else if (event->index > 0) {
        f->decode_tokens++;
        double per_token = (double)llm_model_cache_bytes_per_token(r->loaded, r->engine.cache_type);
        f->cache_bytes += per_token * (r->request.n_prompt + event->index);
    }
}

/* Generate until all samples have ended, or somebody has had enough. */
static bool run_generate(run *r, llm_engine *engine) {
    llm_error err;
    llm_event event;
    uint64_t id;
    bool stopped = false;
    r->figures.submitted = llm_seconds();
    if (!llm_submit(engine, &r->request, &id, &err)) return fail_with(&err), false;
    if (!r->json) run_show(r);
    for (;;) {
        if (!stopped && (stop_requested || output.error)) {
            stopped = true;
            llm_cancel(engine, id, &err);
        } else if (llm_step(engine, &err) <= 0) {
            break;
        }
        uint64_t steps = llm_engine_statistics(engine).steps;
        while (llm_next_event(engine, &event)) run_take(r, &event, steps);
        if (!r->json) run_show(r);
    }
    if (err.status != LLM_OK) fail_with(&err);
    return err.status == LLM_OK;
}

typedef struct speeds { /* what the figures amount to; 0: unknown */
    int n_generated;
    double ttft, tokens_per_second, bytes_per_second, memory_bytes_per_second;
    llm_statistics statistics;
} speeds;

static speeds run_speeds(const run *r, llm_engine *engine) {
    const figures *f = &r->figures;
    speeds s = {.statistics = llm_engine_statistics(engine)};
    for (int i = 0; i < r->request.n_samples; i++) s.n_generated += r->samples[i].n_tokens;
    if (f->first > 0) s.ttft = f->first - f->submitted;
    if (f->decode_tokens == 0 || f->last <= f->first) return s;
    double seconds = f->last - f->first, steps = (double)(s.statistics.steps - f->first_steps);
    s.tokens_per_second = (double)f->decode_tokens / seconds;
    if (r->draft) return s; /* it reads its own weights too, in passes that nobody counts */
    s.bytes_per_second = ((double)llm_model_step_bytes(r->loaded) * steps + f->cache_bytes) / seconds;
    if (!r->quiet) s.memory_bytes_per_second = engine_bandwidth(engine);
    return s;
}

static void run_print_figures(const run *r, const speeds *s) {
    bool colour = in_colour(STDERR_FILENO);
    double step_bytes = (double)llm_model_step_bytes(r->loaded);
    fputs(colour ? "\033[2m[" : "[", stderr);
    fprintf(stderr, "%s%d prompt tokens", stop_requested ? "stopped; " : "", r->request.n_prompt);
    if (s->ttft > 0) fprintf(stderr, ", first token after %.1f ms", 1e3 * s->ttft);
    fprintf(stderr, "; %d tokens", s->n_generated);
    if (s->tokens_per_second > 0) fprintf(stderr, " at %.1f tokens/s", s->tokens_per_second);
    if (s->bytes_per_second > 0) {
        fprintf(stderr, " = %.2f GB/s", 1e-9 * s->bytes_per_second);
        if (s->memory_bytes_per_second > 0)
            fprintf(stderr, ", %.0f %% of the memory's %.1f GB/s", 100 * s->bytes_per_second / s->memory_bytes_per_second,
                    1e-9 * s->memory_bytes_per_second);
        if (s->memory_bytes_per_second > 0 && step_bytes < processor_cache())
            fprintf(stderr, " (though %s fit the processor's cache)", HUMAN(step_bytes));
    }
    if (r->request.speculate) print_speculation(&s->statistics);
    print_host_time(&s->statistics);
    if (r->request.sampling.temperature > 0) fprintf(stderr, "; seed %llu", (unsigned long long)r->request.sampling.seed);
    fprintf(stderr, "]%s\n", colour ? "\033[0m" : "");
}

static void run_print_json(const run *r, const speeds *s) {
    put_text("{\"model\": ");
    put_json_text(llm_file_path(llm_model_file(r->loaded)));
    put_text(", \"prompt\": ");
    put_json(r->prompt.data, r->prompt.length);
    put_text(", \"prompt_tokens\": ");
    put_ids(r->ids, r->request.n_prompt);
    put(", \"seed\": %llu,\n \"samples\": [", (unsigned long long)r->request.sampling.seed);
    for (int i = 0; i < r->request.n_samples; i++) {
        const sample *x = &r->samples[i];
        put_text(i ? ",\n  {\"text\": " : "\n  {\"text\": ");
        put_json(x->text.data, x->text.length);
        put(", \"finish\": \"%s\", \"tokens\": [", finish_name(x->finish));
        size_t start = 0;
        for (int k = 0; k < x->n_tokens; start = x->tokens[k++].text_end) {
            put(k ? ",\n   {\"id\": %d, \"logprob\": " : "\n   {\"id\": %d, \"logprob\": ", x->tokens[k].id);
            put_number(x->tokens[k].logprob);
            put_text(", \"text\": ");
            put_json(x->text.data + start, x->tokens[k].text_end - start);
            put_text(x->tokens[k].accepted ? ", \"accepted\": true}" : "}");
        }
        put_text("]}");
    }
    put(" ],\n \"timings\": {\"prompt_tokens\": %d, \"generated_tokens\": %d", r->request.n_prompt, s->n_generated);
    const struct { const char *name; double value; } values[] = {
        {"ttft_seconds", s->ttft}, {"tokens_per_second", s->tokens_per_second}, {"bytes_per_second", s->bytes_per_second},
        {"memory_bytes_per_second", s->memory_bytes_per_second}, {"proposed", (double)s->statistics.proposed},
        {"accepted", (double)s->statistics.accepted}, {"acceptance", acceptance(&s->statistics)},
        {"tokens_per_step", tokens_per_step(&s->statistics)}};
    for (int i = 0; i < COUNT(values); i++) {
        put(", \"%s\": ", values[i].name);
        put_number(values[i].value > 0 ? values[i].value : NAN);
    }
    put("}}\n");
}

/* The context is no longer than this request can become, so that a model of long context needs no huge cache. */
static int run_context(const run *r) {
    int64_t longest = llm_model_config(r->loaded)->context_length;
    int64_t wanted = r->request.max_tokens < 0 ? longest : (int64_t)r->request.n_prompt + r->request.max_tokens;
    return (int)(wanted < longest ? wanted : longest);
}

static int run_model(run *r, int argc, char **argv) {
    llm_error err;
    if (!check_trace(r->trace_path, NULL)) return FAILED;
    char *path = model_path(r->model);
    bool good = path && run_read_prompt(r, argc, argv);
    good = good && load_models(path, r->speculation.path, &r->loaded, &r->draft);
    free(path);
    if (!good || !run_make_ids(r)) return FAILED;
    r->engine.draft = r->draft;
    chosen.quiet = r->quiet;
    if (r->engine.context_length == 0) r->engine.context_length = run_context(r);
    if (!open_trace(&r->trace, r->trace_path, &r->engine)) return FAILED;
    llm_engine *engine = create_engine(r->loaded, &r->engine, &err);
    if (!engine) return close_trace(&r->trace, r->trace_path), fail_with(&err);
    r->trace.blocks_total = llm_engine_statistics(engine).blocks_total;
    r->samples = make_samples(r->request.n_samples);
    good = run_generate(r, engine);
    if (good) {
        speeds s = run_speeds(r, engine);
        if (r->json) run_print_json(r, &s);
        else if (!r->quiet && !output.error) run_print_figures(r, &s);
    }
    free_engine(engine);
    good = close_trace(&r->trace, r->trace_path) && good;
    return good && !stop_requested ? 0 : FAILED;
}

static int command_run(const command *self, int argc, char **argv) {
    run r = {.engine = llm_engine_defaults(), .request = llm_request_defaults(), .speculation.depth = NO_DEPTH};
    llm_sampling *s = &r.request.sampling;
    s->temperature = 0.8f;
    s->top_p = 0.95f;
    r.request.max_tokens = 512;
    const option options[] = {
        MODEL_OPTION(r.model),
        {'f', "file", "FILE", TEXT, &r.file, 0, 0, "read the prompt from a file (one newline at its end is dropped)"},
        {'n', "tokens", "N", WHOLE, &r.request.max_tokens, -1, INT_MAX, "generate at most N tokens (-1: to the end of the context; default 512)"},
        SAMPLING_OPTIONS(*s, "-"),
        {'s', "seed", "N", SEED, &r.seed, 0, 0, "of the random draws (default: another one each time; the figures tell it)"},
        {0, "samples", "N", WHOLE, &r.request.n_samples, 1, 4096, "continue the prompt N times, all at once (default 1)"},
        STOP_OPTION(r.stop),
        {0, "ignore-end", NULL, FLAG, &r.request.ignore_end, 0, 0, "go on where the model would end"},
        {0, "special", NULL, FLAG, &r.special, 0, 0, "read <|endoftext|> and the like in the prompt as special tokens"},
        THREADS_OPTION(r.engine.n_threads),
        {'c', "context", "N", WHOLE, &r.engine.context_length, 1, INT_MAX, "longest text, prompt included (default: as needed, up to the model's)"},
        SPECULATION_OPTIONS(r.speculation),
        NAIVE_OPTION(r.engine),
        CACHE_TYPE_OPTION(r.engine),
        CACHE_OPTION(r.engine, "as needed"),
        BLOCK_OPTION(r.engine),
        STEP_OPTION(r.engine),
        TRACE_OPTION(r.trace_path),
        JSON_OPTION(r.json),
        {'q', "quiet", NULL, FLAG, &r.quiet, 0, 0, "the new text alone: no prompt, no figures"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status == PARSED && argc && r.file) status = misuse(self, "two prompts: '%s' and --file %s", argv[0], r.file);
    if (status == PARSED) status = check_speculation(self, &r.speculation);
    if (status == PARSED) status = check_trace_name(self, r.trace_path);
    if (status != PARSED) return free(r.stop.items), status;
    apply_speculation(&r.speculation, &r.engine, &r.request);
    r.request.stop = r.stop.items;
    r.request.n_stop = r.stop.count;
    s->seed = r.seed.given ? r.seed.value : chance_seed();
    r.engine.max_sequences = r.request.n_samples;
    status = run_model(&r, argc, argv);
    free_samples(r.samples, r.request.n_samples);
    free(r.stop.items);
    free(r.ids);
    free(r.prompt.data);
    llm_model_free(r.loaded);
    llm_model_free(r.draft);
    return status;
}

static const char run_notes[] =
    "PROMPT is the text to continue; - reads it from standard input; without one the model begins by itself.\n"
    "The text goes to standard output as it is made, and then one line of figures to standard error: tokens\n"
    "of the prompt, time to the first token, tokens per second after it, the bytes of weights and cache\n"
    "that were read for them, and what share that is of the speed at which this machine reads memory.\n"
    "With --draft or --lookup the tokens that were guessed, and found right, are green on a terminal.\n"
    "Ctrl-C ends the text; the figures are of what there is by then, and the exit status is 1.\n"
    "\n"
    "Examples:\n"
    "  llm run \"Once upon a time\"\n"
    "  llm run -m some.gguf -n 100 --temperature 0 \"The capital of France is\"\n"
    "  llm run --samples 3 --seed 7 \"There was a fox who\"\n"
    "  llm run --json --seed 1 -n 20 \"The wolf\" > wolf.json\n"
    "  llm run --draft models/tales-draft.gguf --speculate 4 \"The wolf\"\n"
    "  llm run --samples 3 --trace trace.json \"The wolf\"    (open it at ui.perfetto.dev)\n"
    "  git log -1 --format=%B | llm run -m some.gguf -\n";

/* ---- llm chat ------------------------------------------------------------------------------ */
enum { CHAT_CONTEXT = 8192 };

typedef struct chat {
    const char *model, *system;
    text_list stop;
    llm_engine_options engine;
    llm_request request;
    llm_chat_options options;
    seed_value seed;
    speculation speculation;
    bool quiet, edits;       /* edits: lines are read with an editor, and a prompt */
    llm_model *loaded, *draft;
    llm_engine *running;
    llm_message *messages;   /* their texts are ours */
    int n_messages;
    text answer;
    int turn;
} chat;

static void chat_add(chat *c, llm_role role, const char *data, size_t length) {
    char *copy = resize(NULL, length);
    if (length) memcpy(copy, data, length);
    c->messages = resize(c->messages, (size_t)(c->n_messages + 1) * sizeof *c->messages);
    c->messages[c->n_messages++] = (llm_message){role, copy, length};
}

static void chat_drop(chat *c, int index) {
    free((char *)c->messages[index].text);
    c->n_messages--;
    memmove(c->messages + index, c->messages + index + 1, (size_t)(c->n_messages - index) * sizeof *c->messages);
}

/* A new conversation, with the same message of the system. */
static void chat_reset(chat *c) {
    while (c->n_messages) chat_drop(c, c->n_messages - 1);
    if (c->system && *c->system) chat_add(c, LLM_ROLE_SYSTEM, c->system, strlen(c->system));
}

/* The conversation as tokens, with room for an answer; where it is too long for that, without its oldest messages. One that is
 * too long by its last message alone is refused, and forgets nothing. */
static bool chat_prompt(chat *c, int32_t **ids) {
    const llm_tokenizer *t = llm_model_tokenizer(c->loaded);
    int64_t context = llm_engine_settings(c->running)->context_length, room = context / 4 < 512 ? context / 4 : 512, n;
    int longest = llm_model_config(c->loaded)->context_length, n_kept = c->n_messages;
    int oldest = n_kept && c->messages[0].role == LLM_ROLE_SYSTEM;
    llm_message *kept = resize(NULL, (size_t)n_kept * sizeof *kept);
    llm_error err;
    memcpy(kept, c->messages, (size_t)n_kept * sizeof *kept);
    while ((n = llm_chat_tokenize(t, &c->options, kept, n_kept, NULL, 0, &err)) + room > context && n_kept - oldest >= 3) {
        n_kept -= 2; /* a question, and its answer */
        memmove(kept + oldest, kept + oldest + 2, (size_t)(n_kept - oldest) * sizeof *kept);
    }
    free(kept);
    if (n < 0) return !fail_with(&err);
    if (n >= context)
        return !fail("this message alone makes a prompt of %lld tokens, even after /reset, and the context holds %lld: send a shorter one%s",
                     (long long)n, (long long)context, context < longest ? ", or start again with a larger --context" : "");
    if (n_kept < c->n_messages)
        fprintf(stderr, "llm: the oldest %d messages were forgotten, since the context holds %lld tokens\n", c->n_messages - n_kept, (long long)context);
    while (n_kept < c->n_messages) chat_drop(c, oldest);
    *ids = resize(NULL, (size_t)n * sizeof **ids);
    c->request.n_prompt = (int)llm_chat_tokenize(t, &c->options, c->messages, c->n_messages, *ids, n, &err);
    c->request.prompt = *ids;
    return c->request.n_prompt == n || !fail_with(&err);
}

static void chat_take(chat *c, const llm_event *event) {
    append(&c->answer, event->text, event->text_length);
    put_foreign(event->text, event->text_length);
    flush_output();
    if (event->finish == LLM_FINISH_LENGTH && !c->quiet) put_text(" ...");
}

static void chat_figures(const chat *c, const llm_statistics *before, double start) {
    llm_statistics s = llm_engine_statistics(c->running);
    uint64_t tokens = s.generated_tokens - before->generated_tokens;
    double seconds = llm_seconds() - start;
    bool colour = in_colour(STDERR_FILENO);
    fprintf(stderr, "%s%d prompt tokens (%llu from the cache), %llu tokens in %.1f s%s\n", colour ? dim : "", c->request.n_prompt,
            (unsigned long long)(s.prefix_hits - before->prefix_hits), (unsigned long long)tokens, seconds, colour ? "\033[0m" : "");
}

static void forget_interrupt(void) {
    stop_requested = 0;
    set_signals();
}

/* Ctrl-C stops the answer, not the program; what there is of it stays. */
static bool chat_answer(chat *c) {
    llm_error err;
    llm_event event;
    uint64_t id;
    int32_t *ids = NULL;
    llm_statistics before = llm_engine_statistics(c->running);
    double start = llm_seconds();
    bool stopped = false, good = chat_prompt(c, &ids);
    c->answer.length = 0;
    c->request.sampling.seed = c->seed.value + (uint64_t)c->turn++;
    if (good && !llm_submit(c->running, &c->request, &id, &err)) good = !fail_with(&err);
    free(ids);
    if (!good) return chat_drop(c, c->n_messages - 1), false;
    for (;;) {
        if (!stopped && (stop_requested || output.error)) stopped = llm_cancel(c->running, id, &err);
        else if (llm_step(c->running, &err) <= 0) break;
        while (llm_next_event(c->running, &event)) chat_take(c, &event);
    }
    put_text("\n");
    if (err.status != LLM_OK) fail_with(&err);
    chat_add(c, LLM_ROLE_ASSISTANT, c->answer.data, c->answer.length);
    if (stop_requested == SIGINT) forget_interrupt();
    flush_output();
    if (!c->quiet) chat_figures(c, &before, start);
    return err.status == LLM_OK;
}

/* As a list of objects {"role": ..., "content": ...}, the form in which chat programs exchange conversations. */
static void chat_save(const chat *c, const char *path) {
    static const char *const roles[] = {"system", "user", "assistant"};
    text t = {0};
    captured = &t;
    put_text("[\n");
    for (int i = 0; i < c->n_messages; i++) {
        put("  {\"role\": \"%s\", \"content\": ", roles[c->messages[i].role]);
        put_json(c->messages[i].text, c->messages[i].length);
        put_text(i + 1 < c->n_messages ? "},\n" : "}\n");
    }
    put_text("]\n");
    captured = NULL;
    FILE *file = fopen(path, "wb");
    bool good = file && fwrite(t.data, 1, t.length, file) == t.length;
    if (file && fclose(file)) good = false;
    if (!good) fail("cannot write %s: %s", path, strerror(errno));
    else if (!c->quiet) fprintf(stderr, "%d messages are in %s\n", c->n_messages, path);
    free(t.data);
}

static const char chat_commands[] =
    "/reset         begin a new conversation\n"
    "/system TEXT   begin a new one, with this message of the system (without TEXT: show the one there is)\n"
    "/save FILE     write the conversation into a file, as JSON\n"
    "/help          this text\n"
    "/quit          leave (or Ctrl-D)\n"
    "A line that ends in \\ goes on with the next. // at its beginning stands for a / that is no command.\n"
    "Ctrl-C stops the answer, or drops what was typed.\n";

/* A line that begins with a slash. False: leave. */
static bool chat_command(chat *c, const char *line) {
    size_t length = strcspn(line, " \t");
    const char *rest = line + length + strspn(line + length, " \t");
    bool bare = !*rest;
    if (!strcmp(line, "/quit") || !strcmp(line, "/exit")) return false;
    if (!strcmp(line, "/help")) {
        fputs(chat_commands, stderr);
    } else if (!strcmp(line, "/reset")) {
        chat_reset(c);
    } else if (length == 7 && !strncmp(line, "/system", 7) && bare) {
        if (c->system) fprintf(stderr, "%s\n", c->system);
        else fputs("no message of the system\n", stderr);
    } else if (length == 7 && !strncmp(line, "/system", 7)) {
        free((char *)c->system);
        c->system = strcpy(resize(NULL, strlen(rest) + 1), rest);
        chat_reset(c);
    } else if (length == 5 && !strncmp(line, "/save", 5) && !bare) {
        chat_save(c, rest);
    } else {
        fprintf(stderr, "llm: there is no command %.*s of that form; /help tells which there are\n", (int)length, line);
    }
    return true;
}

#ifdef LLM_WITH_EDITLINE
static struct {
    char *line;
    bool done;
} edited; /* what the editor has given us, which cannot hand on a pointer of ours */

static void take_edited(char *line) {
    edited.line = line;
    edited.done = true;
    rl_callback_handler_remove();
}

/* A line from the editor; NULL at the end, and where a signal came. We wait here and not in it, since it would read on then. */
static char *edit_line(const char *prompt) {
    struct pollfd input = {STDIN_FILENO, POLLIN, 0};
    edited.line = NULL;
    edited.done = false;
    rl_callback_handler_install(prompt, take_edited);
    while (!edited.done && !stop_requested)
        if (poll(&input, 1, -1) > 0) rl_callback_read_char();
    if (!edited.done) rl_callback_handler_remove();
    if (edited.line && *edited.line) add_history(edited.line);
    return edited.line;
}
#endif

/* A line of what is typed, without its end; false where there is no more. Ctrl-C on a terminal drops the whole message. */
#ifndef LLM_WITH_EDITLINE
/* Until something was typed, or Ctrl-C came: also one that came before we wait, which getline would sleep through. */
static void wait_for_typing(void) {
    sigset_t blocked, usual;
    fd_set typed;
    sigemptyset(&blocked), sigaddset(&blocked, SIGINT), sigaddset(&blocked, SIGTERM);
    FD_ZERO(&typed);
    FD_SET(STDIN_FILENO, &typed);
    sigprocmask(SIG_BLOCK, &blocked, &usual);
    if (!stop_requested) pselect(STDIN_FILENO + 1, &typed, NULL, NULL, NULL, &usual); /* which lets signals in, but only while it waits */
    sigprocmask(SIG_SETMASK, &usual, NULL);
}
#endif

static bool chat_line(chat *c, const char *prompt, text *line) {
    char *data = NULL;
    size_t capacity = 0;
    ssize_t n;
    (void)prompt;
#ifdef LLM_WITH_EDITLINE
    if (c->edits) {
        data = edit_line(prompt);
        n = data ? (ssize_t)strlen(data) : -1;
    } else n = getline(&data, &capacity, stdin);
#else
    if (c->edits) {
        put_text(prompt);
        flush_output();
        wait_for_typing();
    }
    n = c->edits && stop_requested ? -1 : getline(&data, &capacity, stdin);
#endif
    if (n > 0 && data[n - 1] == '\n') n--;
    if (n > 0 && data[n - 1] == '\r') n--;
    if (n > 0) append(line, data, (size_t)n);
    free(data);
    if (n < 0 && c->edits) {
        put_text("\n");
        flush_output();
    }
    if (n < 0 && c->edits && stop_requested == SIGINT) {
        clearerr(stdin);
        forget_interrupt();
        line->length = 0;
        return true;
    }
    return n >= 0;
}

/* A message of one line or, where they end in a backslash, more; zero-terminated. */
static bool chat_read(chat *c, text *line) {
    line->length = 0;
    bool more = chat_line(c, "> ", line);
    if (!more) return false;
    while (line->length && line->data[line->length - 1] == '\\') {
        line->data[line->length - 1] = '\n';
        if (!chat_line(c, ". ", line)) break;
    }
    append(line, "", 1);
    line->length--;
    return true;
}

static bool chat_talk(chat *c) {
    text line = {0};
    bool good = true;
    while (!stop_requested && !output.error && chat_read(c, &line)) {
        const char *message = line.data;
        if (message[0] == '/' && message[1] != '/') {
            if (!chat_command(c, message)) break;
            continue;
        }
        message += message[0] == '/';
        if (!message[strspn(message, " \t\n")]) continue;
        chat_add(c, LLM_ROLE_USER, message, line.length - (size_t)(message - line.data));
        good = chat_answer(c) && good;
    }
    free(line.data);
    return good;
}

static int chat_model(chat *c) {
    const llm_tokenizer *t = llm_model_tokenizer(c->loaded);
    const char *name = c->options.template_name ? c->options.template_name : llm_chat_template(t), *stop;
    int longest = llm_model_config(c->loaded)->context_length;
    llm_error err;
    chat_reset(c);
    chat_add(c, LLM_ROLE_USER, "?", 1); /* does the template take such a conversation? */
    if (llm_chat_tokenize(t, &c->options, c->messages, c->n_messages, NULL, 0, &err) < 0)
        return fail("%s%s", err.message, name ? "" : " (--template NAME)");
    chat_reset(c);
    if (c->options.no_thinking && strcmp(name, "qwen3"))
        return fail("--no-thinking is for the chat template qwen3; this model's, %s, has no form for it: leave it out", name);
    if ((stop = llm_chat_stop(t, &c->options)) != NULL) {
        c->stop.items = resize(c->stop.items, (size_t)(c->stop.count + 1) * sizeof *c->stop.items);
        c->stop.items[c->stop.count++] = stop;
    }
    c->request.stop = c->stop.items;
    c->request.n_stop = c->stop.count;
    c->engine.draft = c->draft;
    c->engine.max_sequences = 1;
    if (!c->engine.context_length) c->engine.context_length = longest < CHAT_CONTEXT ? longest : CHAT_CONTEXT;
    chosen.quiet = c->quiet;
    c->running = create_engine(c->loaded, &c->engine, &err);
    if (!c->running) return fail_with(&err);
    if (!c->quiet) fprintf(stderr, "chat template: %s; /help tells the commands\n", name);
    bool good = chat_talk(c);
    free_engine(c->running);
    return good && stop_requested != SIGTERM ? 0 : FAILED;
}

static int command_chat(const command *self, int argc, char **argv) {
    chat c = {.engine = llm_engine_defaults(), .request = llm_request_defaults(), .options = llm_chat_defaults(), .speculation.depth = NO_DEPTH};
    llm_sampling *s = &c.request.sampling;
    s->temperature = 0.8f;
    s->top_p = 0.95f;
    c.request.max_tokens = -1;
    const option options[] = {
        MODEL_OPTION(c.model),
        {0, "template", "NAME", TEXT, &c.options.template_name, 0, 0, "how the model writes down a conversation (default: the file's own; 'help' lists them)"},
        {0, "system", "TEXT", TEXT, &c.system, 0, 0, "a message of the system, to begin with"},
        {0, "no-thinking", NULL, FLAG, &c.options.no_thinking, 0, 0, "of models that think before they answer (qwen3): do not"},
        {'n', "tokens", "N", WHOLE, &c.request.max_tokens, -1, INT_MAX, "at most N tokens in an answer (-1, the default: to the end of the context)"},
        SAMPLING_OPTIONS(*s, "-"),
        {'s', "seed", "N", SEED, &c.seed, 0, 0, "of the random draws (default: another one each time)"},
        STOP_OPTION(c.stop),
        THREADS_OPTION(c.engine.n_threads),
        {'c', "context", "N", WHOLE, &c.engine.context_length, 1, INT_MAX, "longest conversation (default: 8192, or the model's where that is less)"},
        SPECULATION_OPTIONS(c.speculation),
        CACHE_TYPE_OPTION(c.engine),
        {'q', "quiet", NULL, FLAG, &c.quiet, 0, 0, "the answers alone: no figures"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED) status = check_speculation(self, &c.speculation);
    if (status == PARSED && c.options.template_name && !strcmp(c.options.template_name, "help")) {
        for (int i = 0; llm_chat_template_at(i); i++) put("%s\n", llm_chat_template_at(i));
        status = 0;
    }
    if (status != PARSED) return free(c.stop.items), status;
    apply_speculation(&c.speculation, &c.engine, &c.request);
    if (!c.seed.given) c.seed.value = chance_seed();
    if (c.system) c.system = strcpy(resize(NULL, strlen(c.system) + 1), c.system);
    c.edits = is_terminal(STDIN_FILENO) && is_terminal(STDOUT_FILENO);
    char *path = model_path(c.model);
    status = path && load_models(path, c.speculation.path, &c.loaded, &c.draft) ? chat_model(&c) : FAILED;
    free(path);
    while (c.n_messages) chat_drop(&c, c.n_messages - 1);
    free(c.messages);
    free((char *)c.system);
    free(c.answer.data);
    free(c.stop.items);
    llm_model_free(c.loaded);
    llm_model_free(c.draft);
    return status;
}

static const char chat_notes[] =
    "Each line is a message; the answer goes to standard output as it is made, and a line of figures to standard\n"
    "error. Lines that begin with / are commands: /reset, /system TEXT, /save FILE, /help, /quit. In a pipe\n"
    "there is no prompt. The special tokens around the messages come from the model's chat template, which must be\n"
    "one of those that are known, or be named; nothing in a message can stand for them. What was said before is\n"
    "still in the cache, and is not computed again.\n"
    "\n"
    "Examples:\n"
    "  llm chat -m some-instruct.gguf\n"
    "  llm chat -m some.gguf --template chatml --system \"You are a pirate.\"\n"
    "  echo \"Tell me a joke.\" | llm chat -m some-instruct.gguf --quiet\n";

/* A tale, as a first sight. */
static int command_demo(const command *self, int argc, char **argv) {
    char *words[] = {"Once upon a time"};
    int status = parse(self, NULL, 0, &argc, argv, 0);
    return status == PARSED ? command_run(self, 1, words) : status;
}

static const char demo_notes[] = "The same as: llm run \"Once upon a time\"\n";

/* ---- llm batch -------------------------------------------------------------------------------
 * Lines come in as the engine has room for them, and their results go out in the same order, each with one
 * write of a whole line. So the output is at any moment the results of the first lines, and perhaps a torn one
 * after them; when we start again we read it beside the input, cut off what is torn, and go on behind it. */
enum { LONGEST_LINE = 1 << 28, MOST_COMPLAINTS = 20 };

typedef struct line_reader { /* over a file that need not fit into memory */
    int file;
    text buffer;
    size_t at;       /* what is before it has been handed out */
    uint64_t number; /* of the line that was handed out last, from 1 */
    uint64_t offset; /* of the byte behind it, in the file */
    bool ended, torn; /* torn: the last line has no newline */
    int error;        /* errno */
} line_reader;

typedef enum line_state { LINE, NOT_YET, NO_MORE } line_state;

/* The next line, without its newline; valid until the next call. NOT_YET: we would have to wait for it, and may not. */
static line_state next_line(line_reader *r, bool may_wait, const char **line, size_t *length) {
    for (size_t searched = 0;;) {
        text *b = &r->buffer;
        char *start = b->data + r->at, *newline = b->length > r->at ? memchr(start + searched, '\n', b->length - r->at - searched) : NULL;
        searched = b->length - r->at;
        if (newline || (r->ended && searched > 0)) {
            *line = start;
            *length = newline ? (size_t)(newline - start) : searched;
            r->torn = !newline;
            r->at += *length + (newline != NULL);
            r->offset += *length + (newline != NULL);
            r->number++;
            return LINE;
        }
        if (r->ended || r->error || searched > LONGEST_LINE || stop_requested) return NO_MORE;
        struct pollfd ready = {r->file, POLLIN, 0};
        if (!may_wait && poll(&ready, 1, 0) == 0) return NOT_YET;
        if (r->at > 0) memmove(b->data, start, b->length -= r->at);
        r->at = 0;
        char part[1 << 16];
        ssize_t n = read(r->file, part, sizeof part);
        if (n > 0) append(b, part, (size_t)n);
        else if (n == 0) r->ended = true;
        else if (errno != EINTR) r->error = errno;
    }
}

typedef struct batch_line { /* from the input to the output */
    struct batch_line *next;
    uint64_t number, hash;
    uint64_t end;   /* offset in the input of the byte behind it */
    text id;        /* as it is to be echoed, JSON; empty: none */
    text error;     /* what is wrong with the line; empty: nothing */
    llm_request request; /* its pointers are into the following, until it was submitted */
    text prompt;
    int32_t *ids;
    int64_t n_ids;
    text_list stop;
    sample *samples;
    int n_live;
    double submitted, first, last;
} batch_line;

typedef struct batch {
    const char *model, *in_path, *out_path, *trace_path;
    trace_writer trace;
    llm_engine_options engine_options;
    llm_request request; /* what a line does not say */
    speculation speculation;
    text_list stop;
    seed_value seed;
    bool special, logprobs, no_timings, quiet;
    llm_model *loaded, *draft;
    llm_engine *engine;
    line_reader input;
    uint64_t input_bytes; /* 0: unknown */
    int out;
    bool out_is_file;
    uint64_t out_bytes;
    double synced;        /* on the clock */
    batch_line *first, *last; /* read, and not yet written */
    int n_held, n_running;    /* of these; in the engine */
    uint64_t n_lines, n_bad, n_skipped, n_prompt_tokens, n_tokens;
    double began;
} batch;

/* ---- A line of the input */

PRINTF(2, 3)
static bool line_wrong(batch_line *l, const char *format, ...) {
    char message[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    for (char *c = message; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7F) *c = '?';
    l->error.length = 0;
    append(&l->error, message, strlen(message));
    return false;
}

static bool read_stop(batch_line *l, const llm_json_node *value) {
    const llm_json_node *array = llm_json_has_kind(value, LLM_JSON_ARRAY) ? value : NULL;
    const llm_json_node *item = array ? llm_json_first(array) : value;
    for (; item; item = llm_json_next(array, item)) {
        llm_string words;
        text stop = {0};
        if (!llm_json_string(item, &words) || !words.length || memchr(words.data, 0, words.length))
            return line_wrong(l, "stop needs a text that is not empty, or an array of them");
        append(&stop, words.data, words.length);
        append(&stop, "", 1);
        l->stop.items = resize(l->stop.items, (size_t)(l->stop.count + 1) * sizeof *l->stop.items);
        l->stop.items[l->stop.count++] = stop.data;
    }
    return true;
}

/* A value into what the option points to: the same checks as on the command line. source: the
 * value as the line has it. */
static bool read_option(batch_line *l, const option *o, const llm_json_node *value,
                        llm_string source) {
    text t = {0};
    bool word = o->kind == DEPTH && llm_json_has_kind(value, LLM_JSON_STRING), good;
    append(&t, word ? value->text : source.data, word ? value->length : source.length);
    append(&t, "", 1);
    if (o->kind == FLAG) good = llm_json_bool(value, o->value);
    else good = (word || llm_json_has_kind(value, LLM_JSON_NUMBER)) && parse_value(o, t.data);
    if (!good) line_wrong(l, "%s needs %s, not %.60s", o->name, WANTED(o), t.data);
    free(t.data);
    return good;
}

/* The keys that are not options. */
enum { KEY_PROMPT, KEY_TOKENS, KEY_STOP, KEY_ID, N_OTHER_KEYS };
static const char *const other_keys[N_OTHER_KEYS] = {"prompt", "tokens", "stop", "id"};

/* Which key that is: first the others, then the options; -1, and told: none of them. */
static int find_key(batch_line *l, const option *options, int n, const text *key) {
    suggestion s = {key->data, NULL, 0};
    for (int i = 0; i < N_OTHER_KEYS + n; i++) {
        const char *name = i < N_OTHER_KEYS ? other_keys[i] : options[i - N_OTHER_KEYS].name;
        if (strlen(name) == key->length - 1 && !memcmp(name, key->data, key->length)) return i;
        consider(&s, name);
    }
    if (s.best) line_wrong(l, "unknown key '%.60s'; did you mean '%s'?", key->data, s.best);
    else line_wrong(l, "unknown key '%.60s'", key->data);
    return -1;
}

static bool read_key(batch_line *l, const option *options, int key, const llm_json_node *value,
                     llm_string source) {
    llm_string words;
    switch (key) {
    case KEY_ID: append(&l->id, source.data, source.length); return true;
    case KEY_STOP: return read_stop(l, value);
    case KEY_PROMPT:
        if (!llm_json_string(value, &words)) return line_wrong(l, "prompt needs a string");
        append(&l->prompt, words.data, words.length);
        return true;
    case KEY_TOKENS:
        return json_ids(value, &l->ids, &l->n_ids) ||
               line_wrong(l, "tokens needs an array of token ids");
    default: return read_option(l, &options[key - N_OTHER_KEYS], value, source);
    }
}

/* The object of a line, key by key; `seen` gets a bit for each that is there. */
static bool read_object(batch_line *l, const option *options, int n, const char *data,
                        size_t length, uint32_t *seen) {
    llm_json json;
    llm_error err;
    if (!llm_json_parse(&json, data, length, NULL, &err))
        return line_wrong(l, "not JSON: %s", err.message);
    const llm_json_node *object = json.nodes, *value = llm_json_first(object);
    bool good = llm_json_has_kind(object, LLM_JSON_OBJECT) || line_wrong(l, "not a JSON object");
    for (; good && value; value = llm_json_next(object, value)) {
        llm_string source = json_source(data + llm_json_offset(&json, value), data + length);
        text name = {0};
        append(&name, llm_json_key(value).data, llm_json_key(value).length);
        append(&name, "", 1);
        int key = find_key(l, options, n, &name);
        if (key >= 0) *seen |= 1u << key;
        good = key >= 0 && read_key(l, options, key, value, source);
        free(name.data);
    }
    llm_json_free(&json);
    return good;
}

/* What a line wants done. */
static bool read_line(const batch *b, batch_line *l, const char *data, size_t length) {
    llm_request *r = &l->request;
    seed_value seed = {false, 0};
    uint32_t seen = 0;
    const option options[] = {
        SAMPLING_OPTIONS(r->sampling, "_"),
        {0, "max_tokens", NULL, WHOLE, &r->max_tokens, -1, INT_MAX, ""},
        {0, "seed", NULL, SEED, &seed, 0, 0, ""},
        {0, "n", NULL, WHOLE, &r->n_samples, 1, 4096, ""},
        {0, "priority", NULL, WHOLE, &r->priority, -1000000, 1000000, ""},
        {0, "speculate", NULL, DEPTH, &r->speculate, 0, MOST_PROPOSALS, ""},
        {0, "lookup", NULL, FLAG, &r->lookup, 0, 0, ""},
        {0, "ignore_end", NULL, FLAG, &r->ignore_end, 0, 0, ""},
    };
    if (!read_object(l, options, COUNT(options), data, length, &seen)) return false;
    bool prompt = seen >> KEY_PROMPT & 1, tokens = seen >> KEY_TOKENS & 1;
    if (prompt == tokens) return line_wrong(l, prompt ? "both prompt and tokens: one of them" : "neither prompt nor tokens: one of them");
    if (prompt) l->n_ids = prompt_ids(llm_model_tokenizer(b->loaded), &l->prompt, b->special, &l->ids);
    if (l->n_ids <= 0) return line_wrong(l, "the prompt is empty%s", prompt ? ", and this model has no BOS token to begin with" : "");
    if (seed.given) r->sampling.seed = seed.value;
    if (r->speculate == NO_DEPTH) r->speculate = r->lookup || b->draft ? LLM_SPECULATE_AUTO : 0;
    if (seen >> KEY_STOP & 1) {
        r->stop = l->stop.items;
        r->n_stop = l->stop.count;
    }
    r->prompt = l->ids;
    r->n_prompt = l->n_ids < INT_MAX ? (int)l->n_ids : INT_MAX;
    r->user = l;
    return true;
}

/* FNV-1a. Two lines of one hash are taken for the same. */
static uint64_t hash_bytes(uint64_t hash, const char *data, size_t n) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)data[i]) * 0x100000001B3u;
    return hash;
}

/* Of a line, and of all else that decides its result: so that a changed input, or other options, are noticed. */
static uint64_t hash_line(const batch *b, const char *data, size_t n) {
    const llm_request *r = &b->request;
    const llm_sampling *s = &r->sampling;
    char options[256];
    int length = snprintf(options, sizeof options, "%llu %d %d %d %d %d %llu %g %d %g %g %g %d",
                          (unsigned long long)llm_file_size(llm_model_file(b->loaded)),
                          b->engine_options.context_length, (int)b->engine_options.cache_type,
                          r->max_tokens, r->ignore_end, b->special,
                          (unsigned long long)b->seed.value, (double)s->temperature, s->top_k,
                          (double)s->top_p, (double)s->min_p, (double)s->repetition_penalty,
                          s->penalty_window);
    uint64_t hash = hash_bytes(0xCBF29CE484222325u, options, (size_t)length);
    for (int i = 0; i < b->stop.count; i++) hash = hash_bytes(hash, b->stop.items[i], strlen(b->stop.items[i]) + 1);
    return hash_bytes(hash, data, n);
}

static void free_line_input(batch_line *l) { /* what is not wanted any more when the engine has it */
    for (int i = 0; i < l->stop.count; i++) free((char *)l->stop.items[i]);
    free(l->stop.items);
    free(l->ids);
    free(l->prompt.data);
    l->stop = (text_list){0};
    l->ids = NULL;
    l->prompt = (text){0};
}

static void free_line(batch_line *l) {
    free_line_input(l);
    free_samples(l->samples, l->request.n_samples);
    free(l->id.data);
    free(l->error.data);
    free(l);
}

/* ---- The output */

static void put_record(const batch *b, const batch_line *l) {
    put("{\"line\": %llu, \"hash\": \"%016llx\"", (unsigned long long)l->number, (unsigned long long)l->hash);
    if (l->error.length) put_text(", \"error\": "), put_json(l->error.data, l->error.length);
    if (l->id.length) put_text(", \"id\": "), put_bytes(l->id.data, l->id.length);
    for (int i = 0; !l->error.length && i < l->request.n_samples; i++) {
        const sample *s = &l->samples[i];
        put_text(i ? ", {\"text\": " : ", \"samples\": [{\"text\": ");
        put_json(s->text.data, s->text.length);
        put_text(", \"tokens\": [");
        for (int k = 0; k < s->n_tokens; k++) put(k ? ", %d" : "%d", s->tokens[k].id);
        if (b->logprobs) put_text("], \"logprobs\": [");
        for (int k = 0; b->logprobs && k < s->n_tokens; k++) put_text(k ? ", " : ""), put_number((double)s->tokens[k].logprob);
        put("], \"finish_reason\": \"%s\"}", finish_name(s->finish));
    }
    if (!l->error.length) {
        put("], \"prompt_tokens\": %d, \"seed\": %llu", l->request.n_prompt, (unsigned long long)l->request.sampling.seed);
        if (!b->no_timings) put(", \"ttft_seconds\": %.6f, \"seconds\": %.6f", l->first - l->submitted, l->last - l->submitted);
    }
    put_text("}\n");
}

/* All of a line, or, in a file, nothing of it. */
static bool write_line(batch *b, const text *line) {
    size_t done = 0;
    while (done < line->length) {
        ssize_t n = write(b->out, line->data + done, line->length - done);
        if (n >= 0) done += (size_t)n;
        else if (errno != EINTR) break;
    }
    if (done == line->length) return b->out_bytes += done, true;
    int error = errno;
    if (b->out_is_file && done > 0 && ftruncate(b->out, (off_t)b->out_bytes) != 0) error = errno;
    if (b->out == STDOUT_FILENO) output.error = error; /* main tells */
    else fail("cannot write to %s: %s", b->out_path, strerror(error));
    return false;
}

static void complain(const batch *b, const batch_line *l) {
    if (b->n_bad > MOST_COMPLAINTS) return;
    show_progress("batch", -1, "");
    fail("%s, line %llu: %s", b->in_path, (unsigned long long)l->number, l->error.data);
    if (b->n_bad == MOST_COMPLAINTS) fail("... and so on; the output tells of the others");
}

/* Write what is done, as far as all before it is done too. */
static bool write_finished(batch *b) {
    for (batch_line *l; (l = b->first) && l->n_live == 0;) {
        text record = {0};
        captured = &record;
        put_record(b, l);
        captured = NULL;
        append(&l->error, "", 1);
        if (l->error.length > 1) b->n_bad++, complain(b, l);
        bool good = write_line(b, &record);
        free(record.data);
        if (!good) return false;
        b->n_lines++;
        b->first = l->next;
        b->n_held--;
        double done = b->input_bytes ? (double)l->end / (double)b->input_bytes : NAN, now = llm_seconds();
        free_line(l);
        char note[96];
        snprintf(note, sizeof note, "%llu lines, %.1f tokens/s", (unsigned long long)(b->n_lines + b->n_skipped),
                 (double)b->n_tokens / (now - b->began));
        show_progress("batch", done, note);
        if (b->out_is_file && now - b->synced > 5) fsync(b->out), b->synced = now;
    }
    return true;
}

/* ---- Going on where an earlier run ended */

static bool is_blank(const char *line, size_t length) { return skip_space(line, line + length) == line + length; }

/* Step over the input up to a line that has a result, and see that it is the line that this was made from. */
static bool skip_to(batch *b, uint64_t number, uint64_t hash) {
    const char *line;
    size_t length;
    while (b->input.number < number) {
        if (next_line(&b->input, true, &line, &length) != LINE)
            return !fail("%s has a result for line %llu, and %s no such line: the input has changed; remove the output, or give another",
                         b->out_path, (unsigned long long)number, b->in_path);
        bool due = b->input.number == number;
        if (due ? hash_line(b, line, length) == hash : is_blank(line, length)) continue;
        return !fail("%s, line %llu is not what the result in %s was made from (or the model or the options are others): "
                     "remove the output, or give another", b->in_path, (unsigned long long)b->input.number, b->out_path);
    }
    return true;
}

static bool skip_done(batch *b) {
    line_reader old = {.file = b->out};
    const char *line;
    size_t length;
    bool good = true;
    while (good && next_line(&old, true, &line, &length) == LINE && !old.torn) {
        char head[96], after = 0;
        unsigned long long number = 0, hash = 0;
        snprintf(head, sizeof head, "%.*s", length < 95 ? (int)length : 95, line);
        good = sscanf(head, "{\"line\": %llu, \"hash\": \"%16llx\"%c", &number, &hash, &after) == 3 && number > b->input.number;
        if (!good) fail("%s, line %llu is not a result of llm batch: give another output", b->out_path, (unsigned long long)old.number);
        good = good && skip_to(b, number, hash);
        b->n_skipped++;
        b->n_bad += strstr(head, ", \"error\":") != NULL;
        b->out_bytes = old.offset;
    }
    if (good && old.error) good = !fail("cannot read %s: %s", b->out_path, strerror(old.error));
    free(old.buffer.data);
    if (good && old.torn && ftruncate(b->out, (off_t)b->out_bytes) != 0)
        good = !fail("cannot cut off the torn last line of %s: %s", b->out_path, strerror(errno));
    return good && !stop_requested;
}

/* Nobody else may write to it meanwhile. (Where files cannot be locked we trust in that.) */
static bool lock_output(const batch *b) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fcntl(b->out, F_SETLK, &lock) == 0 || (errno != EACCES && errno != EAGAIN)) return true;
    return !fail("another llm writes to %s", b->out_path);
}

static bool open_files(batch *b) {
    struct stat in, out;
    bool from_stdin = !strcmp(b->in_path, "-");
    b->input.file = from_stdin ? STDIN_FILENO : open(b->in_path, O_RDONLY);
    if (b->input.file < 0 || fstat(b->input.file, &in) != 0) return !fail("cannot read %s: %s", b->in_path, strerror(errno));
    if (from_stdin) b->in_path = "standard input";
    if (S_ISREG(in.st_mode)) b->input_bytes = (uint64_t)in.st_size;
    b->out = STDOUT_FILENO;
    if (!strcmp(b->out_path, "-")) return true;
    bool same = stat(b->out_path, &out) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino;
    if (same) return !fail("input and output are the same file, %s: give another path to write to", b->out_path);
    b->out = open(b->out_path, O_RDWR | O_CREAT | O_APPEND, 0666);
    if (b->out < 0 || fstat(b->out, &out) != 0) return !fail("cannot write to %s: %s", b->out_path, strerror(errno));
    b->out_is_file = S_ISREG(out.st_mode);
    return !b->out_is_file || (lock_output(b) && skip_done(b));
}

/* ---- The engine */

/* One line more into the engine, or into the list of those that were bad. False: nothing can go on. */
static bool feed_line(batch *b, const char *data, size_t length) {
    llm_error err;
    batch_line *l = resize(NULL, sizeof *l);
    memset(l, 0, sizeof *l);
    l->number = b->input.number;
    l->end = b->input.offset;
    l->hash = hash_line(b, data, length);
    l->request = b->request;
    l->request.sampling.seed = b->seed.value + l->number;
    if (b->first) b->last->next = l;
    else b->first = l;
    b->last = l;
    b->n_held++;
    if (!read_line(b, l, data, length)) return true;
    l->submitted = llm_seconds();
    bool good = llm_submit(b->engine, &l->request, NULL, &err);
    free_line_input(l);
    if (!good && err.status != LLM_ERROR_MEMORY) line_wrong(l, "%s", our_words(&err).text);
    if (!good) return err.status != LLM_ERROR_MEMORY || !fail_with(&err);
    l->samples = make_samples(l->request.n_samples);
    l->n_live = l->request.n_samples;
    b->n_running++;
    b->n_prompt_tokens += (uint64_t)l->request.n_prompt;
    return true;
}

/* Enough lines that the engine never lacks one, and no more, so that the input may be longer than memory. */
static bool feed(batch *b, bool *more) {
    const char *line;
    size_t length;
    int at_once = 4 * b->engine_options.max_sequences;
    while (*more && b->n_running < at_once && b->n_held < 16 * at_once) {
        line_state state = next_line(&b->input, b->n_held == 0, &line, &length);
        if (state == NOT_YET) break;
        *more = state == LINE;
        if (*more && !is_blank(line, length) && !feed_line(b, line, length)) return false;
    }
    if (*more || stop_requested) return true;
    if (b->input.error) return !fail("cannot read %s: %s", b->in_path, strerror(b->input.error));
    return b->input.ended || !fail("%s, line %llu is too long", b->in_path, (unsigned long long)b->input.number + 1);
}

static bool take_events(batch *b) {
    llm_error err;
    llm_event event;
    if (llm_step(b->engine, &err) < 0) return !fail_with(&err);
    double now = llm_seconds();
    while (llm_next_event(b->engine, &event)) {
        batch_line *l = event.user;
        take_event(&l->samples[event.sample], &event);
        b->n_tokens += event.token >= 0;
        if (l->first == 0) l->first = now;
        l->last = now;
        if (event.finish != LLM_FINISH_NONE && --l->n_live == 0) b->n_running--;
    }
    return true;
}

static bool batch_run(batch *b) {
    bool more = true;
    b->began = b->synced = llm_seconds();
    while (!stop_requested && (more || b->n_held > 0)) {
        if (!feed(b, &more) || !write_finished(b)) return false;
        if (b->n_running > 0 && !take_events(b)) return false;
    }
    return stop_requested || write_finished(b);
}

static void batch_print_figures(const batch *b) {
    bool colour = in_colour(STDERR_FILENO);
    double seconds = llm_seconds() - b->began;
    llm_statistics s = llm_engine_statistics(b->engine);
    fprintf(stderr, "%s[%llu lines", colour ? dim : "", (unsigned long long)b->n_lines);
    if (b->n_skipped) fprintf(stderr, " (and %llu done before)", (unsigned long long)b->n_skipped);
    if (b->n_bad) fprintf(stderr, ", %llu bad", (unsigned long long)b->n_bad);
    fprintf(stderr, "; %llu prompt tokens, %.0f %% of them cached; %llu tokens in %.2f s = %.1f tokens/s", (unsigned long long)b->n_prompt_tokens,
            s.prefix_tokens ? 100 * (double)s.prefix_hits / (double)s.prefix_tokens : 0.0, (unsigned long long)b->n_tokens, seconds,
            (double)b->n_tokens / seconds);
    if (s.preemptions) fprintf(stderr, "; %llu preemptions", (unsigned long long)s.preemptions);
    if (s.proposed) print_speculation(&s);
    fprintf(stderr, "]%s\n", colour ? "\033[0m" : "");
}

static int batch_model(batch *b) {
    llm_error err;
    char *path = model_path(b->model);
    bool good = path && load_models(path, b->speculation.path, &b->loaded, &b->draft);
    free(path);
    if (!good || !open_files(b) || !check_trace(b->trace_path, b->out_path) ||
        !open_trace(&b->trace, b->trace_path, &b->engine_options))
        return FAILED;
    b->engine_options.draft = b->draft;
    b->engine = create_engine(b->loaded, &b->engine_options, &err);
    if (!b->engine) return close_trace(&b->trace, b->trace_path), fail_with(&err);
    b->trace.blocks_total = llm_engine_statistics(b->engine).blocks_total;
    good = batch_run(b);
    good = close_trace(&b->trace, b->trace_path) && good;
    show_progress("batch", -1, "");
    if (b->out_is_file && fsync(b->out) != 0 && good) good = !fail("cannot write to %s: %s", b->out_path, strerror(errno));
    if (good && !b->quiet) batch_print_figures(b);
    if (good && stop_requested)
        fail("stopped, with %llu lines done%s", (unsigned long long)(b->n_lines + b->n_skipped),
             b->out_is_file ? "; the same command goes on from there" : "");
    return good && !stop_requested && b->n_bad == 0 ? 0 : FAILED;
}

static int command_batch(const command *self, int argc, char **argv) {
    batch b = {.engine_options = llm_engine_defaults(), .request = llm_request_defaults(), .speculation.depth = NO_DEPTH,
               .out_path = "-", .out = -1, .input.file = -1};
    llm_engine_options *e = &b.engine_options;
    llm_sampling *s = &b.request.sampling;
    s->temperature = 0.8f;
    s->top_p = 0.95f;
    b.request.max_tokens = 512;
    const option options[] = {
        MODEL_OPTION(b.model),
        {'f', "file", "FILE", TEXT, &b.in_path, 0, 0, "the prompts: a JSON object a line (-: standard input)"},
        {'o', "output", "FILE", TEXT, &b.out_path, 0, 0, "the results, added to what is there (default -: standard output)"},
        {'n', "tokens", "N", WHOLE, &b.request.max_tokens, -1, INT_MAX, "generate at most N tokens (-1: to the end of the context; default 512)"},
        SAMPLING_OPTIONS(*s, "-"),
        {'s', "seed", "N", SEED, &b.seed, 0, 0, "line i draws with seed N + i, unless it has a seed itself (default 0)"},
        STOP_OPTION(b.stop),
        {0, "ignore-end", NULL, FLAG, &b.request.ignore_end, 0, 0, "go on where the model would end"},
        {0, "special", NULL, FLAG, &b.special, 0, 0, "read <|endoftext|> and the like in prompts as special tokens"},
        {0, "logprobs", NULL, FLAG, &b.logprobs, 0, 0, "tell the log-probability of each token"},
        {0, "no-timings", NULL, FLAG, &b.no_timings, 0, 0, "leave the times out: the same input gives the same bytes"},
        SPECULATION_OPTIONS(b.speculation),
        THREADS_OPTION(e->n_threads),
        {'c', "context", "N", WHOLE, &e->context_length, 1, INT_MAX, "longest text, prompt included (default: the model's)"},
        CACHE_TYPE_OPTION(*e),
        CACHE_OPTION(*e, "what all sequences need"),
        BLOCK_OPTION(*e),
        SCHEDULE_OPTIONS(*e),
        TRACE_OPTION(b.trace_path),
        {'q', "quiet", NULL, FLAG, &b.quiet, 0, 0, "no figures at the end"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED && !b.in_path) status = misuse(self, "the prompts are missing: -f FILE");
    if (status == PARSED) status = check_speculation(self, &b.speculation);
    if (status == PARSED) status = check_trace_name(self, b.trace_path);
    if (status == PARSED) {
        b.request.stop = b.stop.items;
        b.request.n_stop = b.stop.count;
        apply_speculation(&b.speculation, e, &b.request);
        if (b.speculation.depth == NO_DEPTH) b.request.speculate = NO_DEPTH; /* a line may know better */
        status = batch_model(&b);
    }
    while (b.first) {
        batch_line *l = b.first;
        b.first = l->next;
        free_line(l);
    }
    if (b.input.file > STDERR_FILENO) close(b.input.file);
    if (b.out > STDERR_FILENO) close(b.out);
    free_engine(b.engine);
    llm_model_free(b.loaded);
    llm_model_free(b.draft);
    free(b.input.buffer.data);
    free(b.stop.items);
    return status;
}

static const char batch_notes[] =
    "Each line of the input is an object with \"prompt\" (a string) or \"tokens\" (an array of ids), and, where they differ\n"
    "from the options above: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, penalty_window, seed,\n"
    "stop (a string or an array), n (samples), priority, speculate (a number or \"auto\"), lookup, ignore_end; and id, which is\n"
    "any value, and comes back. Blank lines count, and are passed over.\n"
    "Each line of the output is an object with line (from 1), hash (of the input's line and the options), id, samples (text,\n"
    "tokens, logprobs, finish_reason: end, length or stop), prompt_tokens, seed, ttft_seconds, seconds; or with line, hash\n"
    "and error, where the input's line was bad: this is told on standard error too, the others go on, and the exit\n"
    "status is 1. Results are in the order of the input, and each is written at once and whole.\n"
    "If the output has results already, of a run that was stopped or killed, it goes on behind them; it refuses to\n"
    "do so where the lines that they came from, or the options, have changed.\n"
    "\n"
    "Examples:\n"
    "  llm batch -f prompts.jsonl -o results.jsonl\n"
    "  llm batch -f prompts.jsonl -o results.jsonl --max-sequences 64 --temperature 0 -n 100\n"
    "  llm batch -f prompts.jsonl -o results.jsonl --trace trace.json    (open it at ui.perfetto.dev)\n"
    "  echo '{\"prompt\": \"The wolf\", \"n\": 3, \"stop\": \".\"}' | llm batch -f -\n";

/* ---- llm info ---------------------------------------------------------------------------- */
static const char *value_type_name(llm_value_type type) {
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    return (unsigned)type < (unsigned)COUNT(names) ? names[type] : "?";
}

static void put_element(const llm_value *v, uint64_t index, size_t *cursor) {
    llm_value_type type = v->type == LLM_VALUE_ARRAY ? v->element_type : v->type;
    llm_string s = {"", 0};
    double x = 0;
    int64_t i = 0;
    uint64_t u = 0;
    bool b = false;
    if (type == LLM_VALUE_STRING) {
        llm_value_string(v, cursor, &s);
        put_json(s.data, s.length);
    } else if (type == LLM_VALUE_BOOL) {
        llm_value_bool(v, index, &b);
        put_text(b ? "true" : "false");
    } else if (llm_value_u64(v, index, &u) && type != LLM_VALUE_F32 && type != LLM_VALUE_F64) {
        put("%llu", (unsigned long long)u);
    } else if (llm_value_i64(v, index, &i) && type != LLM_VALUE_F32 && type != LLM_VALUE_F64) {
        put("%lld", (long long)i);
    } else {
        llm_value_f64(v, index, &x);
        put_number(x);
    }
}

/* The first elements of a value as JSON, an array without its brackets. */
static void put_elements(const llm_value *v, uint64_t count) {
    size_t cursor = 0;
    for (uint64_t i = 0; i < count && i < v->count; i++) {
        if (i) put_text(", ");
        put_element(v, i, &cursor);
    }
}

typedef struct info {
    const char *model;
    bool tensors, json;
    bool program; /* that instead */
    program_view view;
    llm_engine_options engine;
    uint64_t memory;
    int context;
    llm_type cache_type;
    llm_file *file;
    llm_model *loaded; /* NULL: metadata only, because of ... */
    llm_error why;
} info;

typedef struct type_sum {
    uint64_t tensors, values, bytes;
} type_sum;

static uint64_t tensor_values(const llm_tensor *t) { return t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3]; }

/* Tensors, values and bytes of one type; of all types where type is NULL. */
static type_sum sum_type(const llm_file *file, const llm_type_info *type) {
    type_sum sum = {0, 0, 0};
    for (int64_t i = 0; i < llm_file_n_tensors(file); i++) {
        const llm_tensor *t = llm_file_tensor(file, i);
        if (type && t->type != type->type) continue;
        sum.tensors++;
        sum.bytes += t->bytes;
        sum.values += tensor_values(t);
    }
    return sum;
}

static double bits_per_value(uint64_t bytes, uint64_t values) { return values ? 8.0 * (double)bytes / (double)values : 0; }

static void put_type_sum(const char *name, type_sum sum) {
    put("  %-6s %5llu tensors %15llu values %12s, %7.4g bits each\n", name, (unsigned long long)sum.tensors,
        (unsigned long long)sum.values, HUMAN(sum.bytes), bits_per_value(sum.bytes, sum.values));
}

/* What of a memory is left for the cache once the weights are in it, in tokens. */
static uint64_t cache_tokens(const info *in) {
    uint64_t weights = sum_type(in->file, NULL).bytes;
    if (in->memory <= weights) return 0;
    return (in->memory - weights) / llm_model_cache_bytes_per_token(in->loaded, in->cache_type);
}

static void info_print_shape(const info *in) {
    const llm_config *c = llm_model_config(in->loaded);
    uint64_t token = llm_model_cache_bytes_per_token(in->loaded, in->cache_type), fits = cache_tokens(in);
    put("\nShape\n");
    put("  %d layers of width %d, feed-forward %d\n", c->n_layers, c->dim, c->hidden_dim);
    put("  %d query heads and %d key/value heads of %d; ", c->n_heads, c->n_kv_heads, c->head_dim);
    put("%d dimensions turn, base %g, %s\n", c->rope_dim, (double)c->rope_base,
        c->rope_pairing == LLM_ROPE_HALVES ? "in halves" : "in adjacent pairs");
    if (c->rope_scaling != LLM_ROPE_UNSCALED)
        put("  RoPE scaled %g times, %s\n", (double)c->rope_factor, c->rope_scaling == LLM_ROPE_YARN ? "YaRN" : "linear");
    if (llm_file_find_tensor(in->file, "rope_freqs.weight")) put("  RoPE with divisors of its own (rope_freqs.weight)\n");
    if (c->window) put("  a sliding window of %d tokens\n", c->window);
    put("  vocabulary %d, context %d, ", c->vocab_size, c->context_length);
    put("%s output matrix\n", c->tied_output ? "tied" : "separate");
    put("\nCache of keys and values, %s\n", llm_type_find(in->cache_type)->name);
    put("  a token                %s\n", HUMAN(token));
    put("  a sequence of %-8d %s\n", in->context, HUMAN(token * (uint64_t)in->context));
    put("\nIn %s of memory\n", HUMAN(in->memory));
    if (fits == 0) put("  the weights do not fit, or leave no room for the cache\n");
    else
        put("  beside the weights, %llu tokens of cache fit: %llu whole sequences of %d\n", (unsigned long long)fits,
            (unsigned long long)(fits / (uint64_t)in->context), in->context);
    put("\nA decode step reads %s of weights, and all of its sequences' cache\n", HUMAN(llm_model_step_bytes(in->loaded)));
}

static void put_name(llm_string name) {
    put_text("  ");
    put_foreign(name.data, name.length);
    put("%*s", name.length < 40 ? 41 - (int)name.length : 1, "");
}

static void info_print(const info *in) {
    put_text(llm_file_path(in->file));
    if (llm_file_version(in->file)) put("\nGGUF version %d", llm_file_version(in->file));
    else put_text("\nHugging Face, as GGUF would have it");
    put(", %s, %lld tensors", HUMAN(llm_file_size(in->file)), (long long)llm_file_n_tensors(in->file));
    if (llm_file_n_parts(in->file) > 1) put(", in %lld files", (long long)llm_file_n_parts(in->file));
    put_text("\n\nMetadata\n");
    for (int64_t i = 0; i < llm_file_n_values(in->file); i++) {
        const llm_value *v = llm_file_value(in->file, i);
        bool array = v->type == LLM_VALUE_ARRAY;
        put_name(v->key);
        if (array) put("%llu x %s: ", (unsigned long long)v->count, value_type_name(v->element_type));
        put_elements(v, array ? 4 : 1);
        put_text(array && v->count > 4 ? ", ...\n" : "\n");
    }
    put("\nWeights\n");
    for (int i = 0; llm_type_at(i); i++) {
        type_sum sum = sum_type(in->file, llm_type_at(i));
        if (sum.tensors)
            put_type_sum(llm_type_at(i)->name, sum);
    }
    type_sum int4 = sum_type(in->file, llm_type_find(LLM_Q4_Z)); /* of AWQ and GPTQ, with zero points */
    if (int4.tensors) put_type_sum(llm_type_find(LLM_Q4_Z)->name, int4);
    put_type_sum("all", sum_type(in->file, NULL));
    for (int64_t i = 0; in->tensors && i < llm_file_n_tensors(in->file); i++) {
        const llm_tensor *t = llm_file_tensor(in->file, i);
        if (i == 0) put_text("\nTensors\n");
        put_name(t->name);
        put("%-5s", llm_type_find(t->type) ? llm_type_find(t->type)->name : "?");
        for (int d = 0; d < t->n_dims; d++) put(d ? " x %llu" : " %llu", (unsigned long long)t->dims[d]);
        put(", %s, %.4g bits each\n", HUMAN(t->bytes), bits_per_value(t->bytes, tensor_values(t)));
    }
    if (in->loaded) info_print_shape(in);
    else put("\nThis engine cannot run it: %s\n", in->why.message);
}

static void info_print_json_model(const info *in) {
    const llm_config *c = llm_model_config(in->loaded);
    uint64_t token = llm_model_cache_bytes_per_token(in->loaded, in->cache_type), fits = cache_tokens(in);
    const struct { const char *name; int value; } shape[] = {
        {"vocab_size", c->vocab_size}, {"context_length", c->context_length}, {"layers", c->n_layers}, {"dim", c->dim},
        {"hidden_dim", c->hidden_dim}, {"heads", c->n_heads}, {"kv_heads", c->n_kv_heads}, {"head_dim", c->head_dim},
        {"rope_dim", c->rope_dim}};
    put(",\n \"shape\": {\"architecture\": ");
    put_json_text(c->architecture);
    for (int i = 0; i < COUNT(shape); i++) put(", \"%s\": %d", shape[i].name, shape[i].value);
    put_text(", \"rope_base\": ");
    put_number(c->rope_base);
    put(", \"tied_output\": %s}", c->tied_output ? "true" : "false");
    put(",\n \"step_bytes\": %llu", (unsigned long long)llm_model_step_bytes(in->loaded));
    put(",\n \"cache\": {\"type\": \"%s\", \"bytes_per_token\": %llu, \"context\": %d, \"bytes_per_sequence\": %llu}",
        llm_type_find(in->cache_type)->name, (unsigned long long)token, in->context,
        (unsigned long long)(token * (uint64_t)in->context));
    put(",\n \"fits\": {\"memory\": %llu, \"tokens\": %llu, \"sequences\": %llu}", (unsigned long long)in->memory,
        (unsigned long long)fits, (unsigned long long)(fits / (uint64_t)in->context));
}

static void info_print_json(const info *in) {
    put_text("{\"path\": ");
    put_json_text(llm_file_path(in->file));
    put(", \"version\": %d, \"parts\": %lld, \"bytes\": %llu,\n \"metadata\": {", llm_file_version(in->file),
        (long long)llm_file_n_parts(in->file), (unsigned long long)llm_file_size(in->file));
    for (int64_t i = 0; i < llm_file_n_values(in->file); i++) {
        const llm_value *v = llm_file_value(in->file, i);
        put_text(i ? ",\n  " : "\n  ");
        put_json(v->key.data, v->key.length);
        put_text(": ");
        bool array = v->type == LLM_VALUE_ARRAY, whole = v->count <= 64;
        if (array && !whole)
            put("{\"count\": %llu, \"type\": \"%s\", \"first\": ", (unsigned long long)v->count,
                value_type_name(v->element_type));
        if (array) put_text("[");
        put_elements(v, array && !whole ? 4 : v->count);
        if (array) put_text(whole ? "]" : "]}");
    }
    put_text("},\n \"weights\": {");
    type_sum all = sum_type(in->file, NULL);
    for (int i = 0; llm_type_at(i); i++) {
        type_sum sum = sum_type(in->file, llm_type_at(i));
        if (sum.tensors)
            put("\"%s\": {\"tensors\": %llu, \"values\": %llu, \"bytes\": %llu}, ", llm_type_at(i)->name,
                (unsigned long long)sum.tensors, (unsigned long long)sum.values, (unsigned long long)sum.bytes);
    }
    put("\"all\": {\"tensors\": %llu, \"values\": %llu, \"bytes\": %llu}}", (unsigned long long)all.tensors,
        (unsigned long long)all.values, (unsigned long long)all.bytes);
    if (in->tensors) put_text(",\n \"tensors\": [");
    for (int64_t i = 0; in->tensors && i < llm_file_n_tensors(in->file); i++) {
        const llm_tensor *t = llm_file_tensor(in->file, i);
        put_text(i ? ",\n  {\"name\": " : "\n  {\"name\": ");
        put_json(t->name.data, t->name.length);
        put(", \"type\": \"%s\", \"dims\": [", llm_type_find(t->type) ? llm_type_find(t->type)->name : "?");
        for (int d = 0; d < t->n_dims; d++) put(d ? ", %llu" : "%llu", (unsigned long long)t->dims[d]);
        put("], \"bytes\": %llu, \"bits\": %.6g}", (unsigned long long)t->bytes, bits_per_value(t->bytes, tensor_values(t)));
    }
    if (in->tensors) put_text("]");
    put(",\n \"runs\": %s", in->loaded ? "true" : "false");
    if (in->loaded) info_print_json_model(in);
    else put_text(",\n \"why\": "), put_json_text(in->why.message);
    put_text("}\n");
}

/* ---- llm info --program */

/* Opens an engine that is small and quick to open, and shows what it would run. Returns the exit status. */
static int info_program(info *in) {
    llm_error err;
    llm_engine_options *o = &in->engine;
    if (chosen.device == DEVICE_AUTO) chosen.device = DEVICE_CPU;
    chosen.quiet = true;
    chosen.pack_weights = false;
    o->context_length = in->view.context = in->context;
    o->max_batch_tokens = in->view.tokens;
    o->max_sequences = 1;
    o->cache_type = in->cache_type;
    llm_engine *engine = create_engine(in->loaded, o, &err);
    if (!engine) return fail_with(&err);
    in->view.json = in->json;
    bool good = program_show(&in->view, engine, llm_file_path(in->file));
    free_engine(engine);
    return good ? 0 : FAILED;
}

static int command_info(const command *self, int argc, char **argv) {
    info in = {.cache_type = LLM_F16, .memory = UINT64_MAX, .engine = llm_engine_defaults()};
    const option options[] = {
        MODEL_OPTION(in.model),
        {0, "tensors", NULL, FLAG, &in.tensors, 0, 0, "list the tensors too"},
        {0, "memory", "SIZE", SIZE, &in.memory, 0, 0, "tell what fits in so much memory, such as 8G (default: this machine's)"},
        {'c', "context", "N", WHOLE, &in.context, 1, INT_MAX, "tokens of a whole sequence (default: the model's context)"},
        CACHE_TYPE_OPTION(in),
        JSON_OPTION(in.json),
        {0, "program", NULL, FLAG, &in.program, 0, 0, "instead: the operations of a step, with their bytes and arithmetic"},
        {0, "tokens", "N", WHOLE, &in.view.tokens, 1, 1 << 20, "... of so many tokens, the last of --context (default: 1, of up to 512)"},
        {0, "plan", NULL, FLAG, &in.view.plan, 0, 0, "... and what the device does together"},
        {0, "all", NULL, FLAG, &in.view.all, 0, 0, "... all layers, also where they are alike"},
        THREADS_OPTION(in.engine.n_threads), /* for the program; the device is the CPU if nothing is said */
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status != PARSED) return status;
    if (!in.program && (in.view.tokens || in.view.plan || in.view.all)) return misuse(self, "--tokens, --plan and --all go with --program");
    if (in.view.tokens == 0) in.view.tokens = 1;
    if (argc && in.model) return misuse(self, "two models: '%s' and '%s'", argv[0], in.model);
    if (in.memory == UINT64_MAX) in.memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
    char *path = model_path(argc ? argv[0] : in.model);
    llm_error err;
    if (!path) return FAILED;
    in.file = llm_file_open(path, &err);
    if (!in.file) status = fail_with(&err);
    else {
        in.loaded = llm_model_load(path, &in.why);
        int most = in.loaded ? llm_model_config(in.loaded)->context_length : INT_MAX;
        if (in.loaded && in.context == 0) in.context = in.program && most > 512 ? 512 : most;
        if (in.context > most) status = fail("--context is %d: the model was trained for 1 to %d tokens", in.context, most);
        else if (in.program && in.view.tokens > in.context) status = fail("--tokens is %d: they end at --context, %d", in.view.tokens, in.context);
        else if (in.program) status = in.loaded ? info_program(&in) : fail_with(&in.why);
        else if (in.json) info_print_json(&in), status = 0;
        else info_print(&in), status = 0;
    }
    llm_model_free(in.loaded);
    llm_file_close(in.file);
    free(path);
    return status;
}

static const char info_notes[] =
    "Any GGUF file or Hugging Face folder will do: where this engine cannot run the model, the end says why.\n"
    "\n"
    "Examples:\n"
    "  llm info\n"
    "  llm info some.gguf --tensors\n"
    "  llm info some.gguf --memory 8G --context 4096\n"
    "  llm info some.gguf --program --plan --tokens 512\n";

/* ---- llm tokenize -------------------------------------------------------------------------- */
typedef struct tokenizing {
    const char *model, *file;
    bool json, decode, bos, eos, special, pieces;
    const llm_tokenizer *tokenizer;
} tokenizing;

static unsigned tokenize_flags(const tokenizing *t) {
    return (t->bos ? LLM_TOKENIZE_BOS : 0) | (t->eos ? LLM_TOKENIZE_EOS : 0) | (t->special ? LLM_TOKENIZE_SPECIAL : 0);
}

/* Text in, ids out. */
static bool tokenize_text(const tokenizing *t, const char *data, size_t length) {
    int32_t *ids;
    int64_t n = tokenize(t->tokenizer, data, length, tokenize_flags(t), &ids);
    if (n >= 0 && t->json) put_ids(ids, n);
    for (int64_t i = 0; !t->json && i < n; i++) {
        put(t->pieces ? "%7d " : i ? " %d" : "%d", ids[i]);
        llm_string piece = llm_tokenizer_text(t->tokenizer, ids[i]);
        if (t->pieces) put_json(piece.data, piece.length), put_text("\n");
    }
    if (n >= 0 && !t->pieces) put_text("\n");
    free(ids);
    return n >= 0;
}

/* Ids in, text out. */
static bool tokenize_decode(const tokenizing *t, const char *data, size_t length) {
    llm_error err;
    int32_t *ids = NULL;
    int64_t n, bytes = -1;
    char *out = NULL;
    llm_json json = {0};
    bool good =
        t->json ? llm_json_parse(&json, data, length, NULL, NULL) && json_ids(json.nodes, &ids, &n)
                : parse_ids(data, length, &ids, &n);
    llm_json_free(&json);
    if (!good) {
        fail(t->json ? "the line is not a JSON array of token ids: %.*s" : "not a list of token ids: %.*s",
             length < 60 ? (int)length : 60, data);
    } else if ((bytes = llm_detokenize(t->tokenizer, ids, n, NULL, 0, &err)) < 0) {
        fail("%s, in %.*s", err.message, length < 60 ? (int)length : 60, data);
    } else {
        out = resize(NULL, (size_t)bytes);
        llm_detokenize(t->tokenizer, ids, n, out, (size_t)bytes, &err);
        if (t->json) put_json(out, (size_t)bytes), put_text("\n");
        else put_bytes(out, (size_t)bytes);
    }
    free(ids);
    free(out);
    return bytes >= 0;
}

/* One JSON value a line, and one line of answer to each, at once, so that a program can talk with us. */
static bool tokenize_lines(const tokenizing *t) {
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n;
    bool good = true;
    for (long number = 1; good && !output.error && (n = getline(&line, &capacity, stdin)) >= 0; number++) {
        const char *start = skip_space(line, line + n);
        size_t length = (size_t)(line + n - start);
        if (length == 0) continue;
        if (t->decode) {
            good = tokenize_decode(t, start, length);
        } else {
            llm_json json = {0};
            llm_string words;
            good = llm_json_parse(&json, start, length, NULL, NULL) &&
                   llm_json_string(json.nodes, &words);
            if (!good) fail("line %ld is not a JSON string", number);
            else good = tokenize_text(t, words.data, words.length);
            llm_json_free(&json);
        }
        flush_output();
    }
    if (good && ferror(stdin)) good = !fail("cannot read standard input: %s", strerror(errno));
    free(line);
    return good;
}

static bool tokenize_all(const tokenizing *t, int argc, char **argv) {
    if (t->json) return tokenize_lines(t);
    text words = {0};
    const char *path = t->file ? t->file : argc && strcmp(argv[0], "-") ? NULL : "-";
    bool good = true;
    if (path) good = read_all(path, &words);
    else
        for (int i = 0; i < argc; i++) append(&words, " ", i > 0), append(&words, argv[i], strlen(argv[i]));
    append(&words, "", 1);
    if (good) good = (t->decode ? tokenize_decode : tokenize_text)(t, words.data, words.length - 1);
    free(words.data);
    return good;
}

/* Where the vocabulary is. Of a folder the tokenizer.json will do, which the engine reads together with its neighbours: the weights may be
 * missing, or of a kind that is not read. */
static char *vocabulary_path(const char *given) {
    static const char name[] = "/tokenizer.json";
    char *path = model_path(given);
    text inside = {0};
    if (!path) return NULL;
    append(&inside, path, strlen(path));
    append(&inside, name, sizeof name);
    bool there = !access(inside.data, F_OK);
    free(there ? path : inside.data);
    return there ? inside.data : path;
}

static int command_tokenize(const command *self, int argc, char **argv) {
    tokenizing t = {0};
    const option options[] = {
        MODEL_OPTION(t.model),
        {'f', "file", "FILE", TEXT, &t.file, 0, 0, "read from a file"},
        {'d', "decode", NULL, FLAG, &t.decode, 0, 0, "the other way: ids to text"},
        {0, "bos", NULL, FLAG, &t.bos, 0, 0, "put the BOS token in front, if the model's file asks for it"},
        {0, "eos", NULL, FLAG, &t.eos, 0, 0, "put the EOS token behind, if the model's file asks for it"},
        {0, "special", NULL, FLAG, &t.special, 0, 0, "read <|endoftext|> and the like as special tokens"},
        {'p', "pieces", NULL, FLAG, &t.pieces, 0, 0, "one token a line, with its text as the vocabulary spells it"},
        {0, "json", NULL, FLAG, &t.json, 0, 0, "from each line of standard input, one JSON string, to one array of ids"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1000);
    if (status != PARSED) return status;
    if (argc && t.file) return misuse(self, "two texts: '%s' and --file %s", argv[0], t.file);
    if (t.json && (t.file || (argc && strcmp(argv[0], "-"))))
        return misuse(self, "--json reads standard input, and no other text");
    if (argc > 1 && !t.decode) return misuse(self, "one argument too many: '%s' (a text with spaces needs quotes)", argv[1]);
    if (t.pieces && (t.json || t.decode)) return misuse(self, "--pieces goes with neither --json nor --decode");
    char *path = vocabulary_path(t.model);
    if (!path) return FAILED;
    llm_error err;
    llm_file *file = llm_file_open(path, &err);
    llm_tokenizer *tokenizer = file ? llm_tokenizer_create(file, &err) : NULL;
    t.tokenizer = tokenizer;
    if (!tokenizer) status = fail_with(&err);
    else status = tokenize_all(&t, argc, argv) ? 0 : FAILED;
    llm_tokenizer_free(tokenizer);
    llm_file_close(file);
    free(path);
    return status;
}

static const char tokenize_notes[] =
    "Without TEXT, standard input is read. The model's file needs no weights, a vocabulary is enough: a GGUF file,\n"
    "a tokenizer.json, or a folder that holds one.\n"
    "With --json --decode each line is an array of ids, and the answer a string, in which a byte that is not\n"
    "part of UTF-8 becomes U+FFFD; without --json the bytes come out as they are.\n"
    "\n"
    "Examples:\n"
    "  llm tokenize \"Once upon a time\"\n"
    "  llm tokenize --pieces \"Once upon a time\"\n"
    "  llm tokenize -f tale.txt | llm tokenize --decode\n"
    "  echo '\"The wolf\"' | llm tokenize --json\n";

/* ---- llm perplexity ------------------------------------------------------------------------ */
typedef struct perplexity {
    const char *model;
    int context, threads;
    bool json;
    llm_model *loaded;
    llm_engine *engine;
    /* the document at hand */
    int32_t *ids;
    int64_t n_ids, start, done; /* the window begins at ids[start]; ids[1 .. done - 1] have been predicted */
    double document_nats;
    /* of all so far */
    uint64_t documents, bytes, predicted, computed;
    double nats, seconds;
} perplexity;

/* The logits after a position of the window say how likely the model held the token that follows. */
static void perplexity_hook(void *user, uint64_t request, int sample_index, int position, float *logits) {
    perplexity *p = user;
    (void)request, (void)sample_index;
    int64_t next = p->start + position + 1;
    if (next != p->done || next >= p->n_ids) return; /* an earlier window has predicted it */
    p->document_nats -= (double)llm_logprob(logits, llm_model_config(p->loaded)->vocab_size, p->ids[next]);
    p->done++;
}

static bool perplexity_window(perplexity *p, uint64_t bytes_before, uint64_t document_bytes, uint64_t all_bytes) {
    llm_error err;
    llm_request request = llm_request_defaults();
    int64_t rest = p->n_ids - 1 - p->start;
    uint64_t id;
    request.prompt = p->ids + p->start;
    request.n_prompt = (int)(rest < p->context ? rest : p->context);
    request.max_tokens = 0;
    request.logits_hook = perplexity_hook;
    request.user = p;
    if (!llm_submit(p->engine, &request, &id, &err)) return !fail_with(&err);
    int status;
    while ((status = llm_step(p->engine, &err)) > 0 && !stop_requested) {
        char note[64];
        double share = (double)(p->done - 1) / (double)(p->n_ids - 1);
        double nats = p->nats + p->document_nats, bytes = (double)bytes_before + share * (double)document_bytes;
        snprintf(note, sizeof note, "%.3f bits per byte", bytes > 0 ? nats / log(2) / bytes : 0.0);
        show_progress("perplexity", bytes / (double)all_bytes, note);
    }
    p->computed += (uint64_t)request.n_prompt;
    if (status < 0) return !fail_with(&err);
    if (stop_requested) llm_cancel(p->engine, id, &err);
    return true;
}

/* One document: BOS, its tokens, EOS. Windows of the context's length advance by half of it. */
static bool perplexity_document(perplexity *p, const char *data, size_t length, uint64_t all_bytes) {
    const llm_tokenizer *t = llm_model_tokenizer(p->loaded);
    int32_t *words, bos = llm_tokenizer_bos(t), eos = llm_tokenizer_eos(t);
    int64_t n = tokenize(t, data, length, 0, &words);
    if (n < 0) return free(words), false;
    p->ids = resize(NULL, (size_t)(n + 2) * sizeof *p->ids);
    p->n_ids = 0;
    if (bos >= 0) p->ids[p->n_ids++] = bos;
    memcpy(p->ids + p->n_ids, words, (size_t)n * sizeof *words);
    p->n_ids += n;
    if (eos >= 0) p->ids[p->n_ids++] = eos;
    free(words);

    bool good = true;
    uint64_t before = p->bytes;
    p->document_nats = 0;
    p->done = 1;
    int stride = p->context > 1 ? p->context / 2 : 1;
    for (p->start = 0; good && p->done < p->n_ids && !stop_requested; p->start += stride)
        good = perplexity_window(p, before, length, all_bytes);
    int64_t covered = p->done < p->n_ids ? llm_detokenize(t, p->ids, p->done, NULL, 0, NULL) : (int64_t)length;
    p->documents += p->done == p->n_ids;
    p->bytes += p->done > 1 && covered > 0 ? (uint64_t)covered : 0;
    p->predicted += (uint64_t)(p->done - 1);
    p->nats += p->document_nats;
    free(p->ids);
    return good;
}

/* The next document: up to a line that holds only <|endoftext|>; newlines around it are not part of it. */
static bool next_document(const char **p, const char *end, const char **document, size_t *length) {
    static const char mark[] = "<|endoftext|>";
    const char *start = *p, *stop = end, *line = start;
    if (start == end) return false;
    for (*p = end; line < end;) {
        const char *newline = memchr(line, '\n', (size_t)(end - line)), *after = newline ? newline + 1 : end;
        size_t n = (size_t)((newline ? newline : end) - line);
        if (n && line[n - 1] == '\r') n--;
        if (n == sizeof mark - 1 && !memcmp(line, mark, n)) {
            stop = line;
            *p = after;
            break;
        }
        line = after;
    }
    while (start < stop && (*start == '\n' || *start == '\r')) start++;
    while (stop > start && (stop[-1] == '\n' || stop[-1] == '\r')) stop--;
    *document = start;
    *length = (size_t)(stop - start);
    return true;
}

static void perplexity_print(const perplexity *p, const char *path) {
    double bits = p->nats / log(2) / (double)p->bytes, per_token = exp(p->nats / (double)p->predicted);
    double rate = p->seconds > 0 ? (double)p->computed / p->seconds : 0;
    if (!p->json) {
        put("%.4f bits per byte, perplexity %.3f per token", bits, per_token);
        put(" (%llu documents, %llu bytes, ", (unsigned long long)p->documents, (unsigned long long)p->bytes);
        put("%llu tokens predicted; context %d; ", (unsigned long long)p->predicted, p->context);
        put("%.1f tokens/s)%s\n", rate, stop_requested ? " - stopped" : "");
        return;
    }
    put_text("{\"model\": ");
    put_json_text(llm_file_path(llm_model_file(p->loaded)));
    put_text(", \"file\": ");
    put_json_text(path);
    put(", \"complete\": %s", stop_requested ? "false" : "true");
    const struct { const char *name; double value; } values[] = {
        {"context", p->context}, {"documents", (double)p->documents}, {"bytes", (double)p->bytes},
        {"tokens_predicted", (double)p->predicted}, {"tokens_computed", (double)p->computed}, {"nats", p->nats},
        {"bits_per_byte", bits}, {"perplexity", per_token}, {"seconds", p->seconds}, {"tokens_per_second", rate}};
    for (int i = 0; i < COUNT(values); i++) {
        put(", \"%s\": ", values[i].name);
        put_number(values[i].value);
    }
    put_text("}\n");
}

static int perplexity_file(perplexity *p, const char *path, const text *words) {
    llm_error err;
    llm_engine_options options = llm_engine_defaults();
    int longest = llm_model_config(p->loaded)->context_length;
    if (p->context == 0) p->context = longest < 2048 ? longest : 2048;
    options.context_length = p->context;
    options.max_sequences = 1;
    options.n_threads = p->threads;
    p->engine = create_engine(p->loaded, &options, &err);
    if (!p->engine) return fail_with(&err);

    const char *at = words->data, *document;
    size_t length;
    bool good = true;
    double began = llm_seconds();
    while (good && !stop_requested && next_document(&at, words->data + words->length, &document, &length))
        if (length > 0) good = perplexity_document(p, document, length, words->length);
    p->seconds = llm_seconds() - began;
    show_progress("", -1, "");
    if (good && p->predicted > 0) perplexity_print(p, path);
    else if (good && stop_requested) fail("interrupted before the first figures");
    else if (good) good = !fail("%s holds no text to predict", path);
    free_engine(p->engine);
    return good && !stop_requested ? 0 : FAILED;
}

static int command_perplexity(const command *self, int argc, char **argv) {
    perplexity p = {0};
    const option options[] = {
        MODEL_OPTION(p.model),
        {'c', "context", "N", WHOLE, &p.context, 1, INT_MAX, "tokens of a window (default: the model's context, at most 2048)"},
        THREADS_OPTION(p.threads),
        JSON_OPTION(p.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status != PARSED) return status;
    if (argc == 0) return misuse(self, "a text file is missing");
    llm_error err;
    text words = {0};
    char *path = model_path(p.model);
    if (!path || !read_all(argv[0], &words)) status = FAILED;
    else if (!(p.loaded = llm_model_load(path, &err))) status = fail_with(&err);
    else status = perplexity_file(&p, argv[0], &words);
    llm_model_free(p.loaded);
    free(words.data);
    free(path);
    return status;
}

static const char perplexity_notes[] =
    "How well the model foresees a text: the fewer bits it needs for each byte, the better.\n"
    "A line that holds only <|endoftext|> ends a document; newlines around a document do not count. Each\n"
    "document stands alone: BOS (if the model has one), its text, and EOS (if the model has one), which is to be\n"
    "predicted too. A document longer than the context is read in windows that advance by half a context;\n"
    "each token is predicted once, in the first window that has it, so from the second window on with at\n"
    "least half a context before it. Bits per byte = all the surprise, in bits, over all bytes of text.\n"
    "\n"
    "Examples:\n"
    "  llm perplexity models/eval.txt\n"
    "  llm perplexity -m some.gguf --context 512 --json book.txt\n";

/* ---- llm quantize -------------------------------------------------------------------------- */
static bool quantize_progress(void *user, uint64_t done, uint64_t total) {
    show_progress(user, total ? (double)done / (double)total : 1, "");
    return !stop_requested;
}

/* "q4_K_M" is q4_K mixed with q6_K, the rest are names of the table. */
static bool parse_quantized_type(const char *name, llm_type *type, bool *mixed) {
    size_t length = strlen(name);
    *mixed = !strcasecmp(name, "q4_K_M") || !strcasecmp(name, "q5_K_M");
    const llm_type_info *found = *mixed ? llm_type_by_name((char[8]){name[0], name[1], '_', 'K'}) : llm_type_by_name(name);
    if (found) *type = found->type;
    return found && length;
}

/* Which matrices could not be of the type asked for. */
static void put_other_types(const llm_file *file, llm_type type) {
    const llm_tensor *first = NULL;
    int block = llm_type_find(type)->block_values, others = 0;
    for (int64_t i = 0; i < llm_file_n_tensors(file); i++) {
        const llm_tensor *t = llm_file_tensor(file, i);
        if (t->n_dims < 2 || t->dims[0] % (uint64_t)block == 0) continue;
        if (!others++) first = t;
    }
    if (!others) return;
    put("note: %d of the matrices have rows that are not whole blocks of %d values, and are of another type:\n  ", others, block);
    put_foreign(first->name.data, first->name.length);
    put(", with rows of %llu, is %s%s\n", (unsigned long long)first->dims[0], llm_type_find(first->type)->name,
        others > 1 ? ", and so on (see llm info --tensors)" : "");
}

/* What is in the new file. */
static void put_quantized(const llm_file *file, llm_type type) {
    for (int i = 0; llm_type_at(i); i++)
        if (sum_type(file, llm_type_at(i)).tensors) put_type_sum(llm_type_at(i)->name, sum_type(file, llm_type_at(i)));
    put_other_types(file, type);
}

static int command_quantize(const command *self, int argc, char **argv) {
    const char *name = "q4_0";
    const option options[] = {{0, "type", "TYPE", TEXT, &name, 0, 0,
                               "f32, f16, bf16, q8_0, q6_K, q5_K, q5_1, q5_0, q4_K, q4_1 or q4_0 (default); or q4_K_M, q5_K_M"}};
    llm_type type;
    bool mixed;
    llm_error err;
    char what[] = "quantize";
    int status = parse(self, options, COUNT(options), &argc, argv, 2);
    if (status != PARSED) return status;
    const option wanted_type = {0, "type", "TYPE", TYPE, NULL, 0, 0, ""};
    if (!parse_quantized_type(name, &type, &mixed))
        return misuse(self, "--type needs %s, q4_K_M, q5_K_M, not '%s'", WANTED(&wanted_type), name);
    if (argc < 2) return misuse(self, argc ? "the file to write is missing" : "the file to read is missing");
    if (!may_write(argv[1], argv[0])) return FAILED;
    bool good = llm_quantize(argv[0], argv[1], type, mixed, quantize_progress, what, &err);
    show_progress(what, -1, "");
    if (!good) return stop_requested ? fail("interrupted: %s was not written", argv[1]) : fail_with(&err);
    llm_file *before = llm_file_open(argv[0], &err), *after = before ? llm_file_open(argv[1], &err) : NULL;
    if (after) {
        double bytes = (double)llm_file_size(before);
        put_text(argv[1]);
        put(": %s, %s before (%.0f %%)\n", HUMAN(llm_file_size(after)), HUMAN(bytes), 100 * (double)llm_file_size(after) / bytes);
        put_quantized(after, type);
    }
    good = after != NULL;
    llm_file_close(after);
    llm_file_close(before);
    return good ? 0 : fail_with(&err);
}

static const char quantize_notes[] =
    "Rewrites the matrices of a model file in another type. Vectors stay as they are. The embedding and the output\n"
    "matrix decide the words, and are kept as q8_0 for q4_0, q4_1, q5_0 and q5_1, as q6_K for q4_K and q5_K. q4_K_M and\n"
    "q5_K_M keep half of attn_v and ffn_down as q6_K too. Rows that are not whole blocks of 256 values become q5_0\n"
    "instead of q4_K, q5_1 instead of q5_K, q8_0 instead of q6_K. The file appears only when it is whole.\n"
    "\n"
    "Examples:\n"
    "  llm quantize model-f16.gguf model-q4_0.gguf --type q4_0\n"
    "  llm quantize model-f16.gguf model-q4_K_M.gguf --type q4_K_M\n"
    "  llm quantize model-f16.gguf model-q8_0.gguf --type q8_0\n";

/* ---- llm bench ----------------------------------------------------------------------------- */
typedef struct bench {
    const char *model;
    int_list threads, prompts;
    int generate, runs;
    bool json, profile;
    llm_engine_options engine;
    llm_model *loaded;
    double bandwidth; /* with the threads at hand */
    int n_rows;
} bench;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

enum { PROFILE_PREFILL, PROFILE_DECODE, PROFILE_PHASES };

typedef struct profile_row { /* of an operation, or of those that are done together */
    char name[96];
    double seconds, predicted, bytes, operations; /* of all calls */
    int calls;
} profile_row;

typedef struct profile {
    llm_program *program;
    double bandwidth, peak; /* bytes (0: unknown) and operations a second, to predict from */
    int prompt, done;       /* tokens of the prompt; tokens in the cache */
    profile_row rows[PROFILE_PHASES][48];
    int n_rows[PROFILE_PHASES];
} profile;

static void profile_step(profile *p, const llm_engine *engine, int n, bool logits);

/* One request of random tokens: seconds to its first token, and from there to its last. p: what takes its profile; NULL: nothing. */
static bool bench_once(llm_engine *engine, int n_prompt, int n_generate, profile *p, double *prefill, double *decode) {
    int vocab = llm_model_config(llm_engine_model(engine))->vocab_size;
    int32_t *ids = resize(NULL, (size_t)n_prompt * sizeof *ids);
    for (int i = 0; i < n_prompt; i++) ids[i] = (int32_t)(llm_random(1, 0, (uint64_t)i) * vocab);
    llm_error err;
    llm_event event;
    llm_request request = llm_request_defaults();
    uint64_t id;
    request.prompt = ids;
    request.n_prompt = n_prompt;
    request.max_tokens = 1 + n_generate;
    request.ignore_end = true;
    double start = llm_seconds(), first = 0, last = 0, spent = 0; /* the last: on the profile */
    bool good = llm_submit(engine, &request, &id, &err);
    int status = 0;
    uint64_t before = llm_engine_statistics(engine).prompt_tokens;
    while (good && !stop_requested && (status = llm_step(engine, &err)) > 0) {
        double now = llm_seconds();
        uint64_t after = p ? llm_engine_statistics(engine).prompt_tokens : 0;
        bool any = false;
        for (; llm_next_event(engine, &event); any = true) {
            last = now - spent;
            if (first == 0) first = last;
        }
        if (p) profile_step(p, engine, after > before ? (int)(after - before) : 1, any);
        before = after;
        spent += llm_seconds() - now;
    }
    if (!good || status < 0) fail_with(&err);
    else if (stop_requested) llm_cancel(engine, id, &err);
    free(ids);
    *prefill = first - start;
    *decode = last - first;
    return good && status >= 0;
}

static void bench_print(bench *b, int threads, int n_prompt, double prefill, double decode) {
    uint64_t token = llm_model_cache_bytes_per_token(b->loaded, b->engine.cache_type);
    double bytes = (double)llm_model_step_bytes(b->loaded) + (double)token * (n_prompt + (b->generate + 1) / 2.0);
    double rate = b->generate / decode, used = bytes * rate;
    if (b->json) {
        put_text(b->n_rows ? ",\n" : "\n");
        put("  {\"threads\": %d, \"prompt\": %d, \"prefill_tokens_per_second\": ", threads, n_prompt);
        put_number(n_prompt / prefill);
        put(", \"decode_tokens_per_second\": ");
        put_number(rate);
        put(", \"bytes_per_token\": %.0f, \"bytes_per_second\": ", bytes);
        put_number(used);
        put(", \"memory_bytes_per_second\": ");
        put_number(b->bandwidth);
        put(", \"share\": ");
        put_number(b->bandwidth > 0 ? used / b->bandwidth : 0);
        put_text("}");
    } else if (b->bandwidth > 0) {
        put("%7d %7d %13.1f %13.1f %9.2f %9.2f %6.0f %%\n", threads, n_prompt, n_prompt / prefill, rate, 1e-9 * used,
            1e-9 * b->bandwidth, 100 * used / b->bandwidth);
    } else {
        put("%7s %7d %13.1f %13.1f %9.2f %9s %6s\n", "-", n_prompt, n_prompt / prefill, rate, 1e-9 * used, "-", "-");
    }
    b->n_rows++;
    flush_output();
}

/* All prompt lengths with one number of threads. */
static bool bench_threads(bench *b, int threads) {
    llm_error err;
    char note[64];
    b->engine.n_threads = threads;
    llm_engine *engine = create_engine(b->loaded, &b->engine, &err);
    if (!engine) return !fail_with(&err);
    b->bandwidth = engine_bandwidth(engine);
    if (b->bandwidth == 0) b->threads.count = 1; /* a GPU has its own: one row for each prompt */
    double *prefill = resize(NULL, 2 * (size_t)b->runs * sizeof *prefill), *decode = prefill + b->runs;
    bool good = bench_once(engine, 1, b->generate < 8 ? b->generate : 8, NULL, prefill, decode); /* to warm up */
    for (int i = 0; good && i < b->prompts.count && !stop_requested && !output.error; i++) {
        for (int k = 0; good && k < b->runs && !stop_requested; k++) {
            snprintf(note, sizeof note, "%d threads, prompt of %d", threads, b->prompts.values[i]);
            show_progress("bench", (i + (double)k / b->runs) / b->prompts.count, note);
            good = bench_once(engine, b->prompts.values[i], b->generate, NULL, &prefill[k], &decode[k]);
        }
        show_progress("", -1, "");
        if (good && !stop_requested)
            bench_print(b, threads, b->prompts.values[i], median(prefill, b->runs), median(decode, b->runs));
    }
    free(prefill);
    free_engine(engine);
    return good;
}

/* ---- llm bench --profile: where a step's time goes ----------------------------------------------- */

/* The row of operations that are done together: their names, and all their costs. */
static profile_row *profile_find(profile *p, int phase, const int *owner, int op) {
    char name[96] = "";
    for (int i = 0; i < p->program->n_ops; i++)
        if (owner[i] == owner[op]) snprintf(name + strlen(name), sizeof name - strlen(name), *name ? "+%s" : "%s", OP_NAME(&p->program->ops[i]));
    for (int i = 0; i < p->n_rows[phase]; i++)
        if (!strcmp(p->rows[phase][i].name, name)) return &p->rows[phase][i];
    if (p->n_rows[phase] == COUNT(p->rows[0])) return NULL;
    profile_row *row = &p->rows[phase][p->n_rows[phase]++];
    *row = (profile_row){.seconds = 0};
    snprintf(row->name, sizeof row->name, "%s", name);
    return row;
}

/* Account for the last step: so many tokens of one sequence, after p->done others. */
static void profile_step(profile *p, const llm_engine *engine, int n, bool logits) {
    lone_batch l;
    int phase = p->done >= p->prompt ? PROFILE_DECODE : PROFILE_PREFILL, n_ops = logits ? p->program->n_ops : p->program->n_body;
    int *owner = resize(NULL, (size_t)p->program->n_ops * sizeof *owner);
    make_lone_batch(&l, n, p->done + n, 16, logits);
    find_owners(llm_engine_settings(engine)->backend, p->program, &l.batch, owner);
    for (int i = 0; i < n_ops; i++) {
        profile_row *row = profile_find(p, phase, owner, i);
        if (!row) continue;
        llm_cost cost = llm_op_cost(p->program, &p->program->ops[i], &l.batch);
        row->calls += owner[i] == i;
        row->seconds += p->program->seconds[i];
        row->bytes += cost_bytes(&cost);
        row->operations += cost.operations;
        row->predicted += fmax(p->bandwidth > 0 ? cost_bytes(&cost) / p->bandwidth : 0, cost.operations / p->peak);
    }
    memset(p->program->seconds, 0, (size_t)p->program->n_ops * sizeof(double));
    p->done += n;
    free(l.memory);
    free(owner);
}

static int compare_profile_rows(const void *a, const void *b) {
    double x = ((const profile_row *)a)->seconds, y = ((const profile_row *)b)->seconds;
    return (x < y) - (x > y);
}

/* One phase: seconds in all, for so many tokens. */
static void profile_print(const bench *b, profile *p, int phase, int tokens, double seconds) {
    profile_row *rows = p->rows[phase], rest = {.name = "all else", .seconds = seconds};
    int n = p->n_rows[phase];
    qsort(rows, (size_t)n, sizeof *rows, compare_profile_rows);
    if (!b->json)
        put("\n%s of %d tokens: %.2f ms, %.1f tokens/s\n%-29s %6s %9s %9s %7s %7s %7s\n", phase == PROFILE_PREFILL ? "Prefill" : "Decode",
            tokens, 1e3 * seconds, tokens / seconds, "operation", "calls", "us each", "predicted", "time %", "GB/s", "GFLOP/s");
    for (int i = 0; i <= n; i++) {
        const profile_row *r = i < n ? &rows[i] : &rest;
        rest.seconds -= i < n ? r->seconds : 0;
        double read = r->seconds > 0 ? r->bytes / r->seconds : 0, done = r->seconds > 0 ? r->operations / r->seconds : 0;
        if (b->json) {
            put("%s\n   {\"operation\": \"%s\", \"calls\": %d, \"seconds\": %.9f, \"predicted_seconds\": %.9f, \"bytes\": %.0f, "
                "\"operations\": %.0f}", i ? "," : "", r->name, r->calls, r->seconds, r->predicted, r->bytes, r->operations);
            continue;
        }
        put("%-29s", r->name);
        if (r->calls) put(" %6d %9.1f %9.1f", r->calls, 1e6 * r->seconds / r->calls, 1e6 * r->predicted / r->calls);
        else put(" %6s %9s %9s", "", "", "");
        put(" %5.1f %%", 100 * r->seconds / seconds);
        if (i < n) put(" %7.2f %7.1f", 1e-9 * read, 1e-9 * done);
        put_text("\n");
    }
}

/* One prompt and what follows, with a clock around each operation of the program. */
static bool bench_profile(bench *b, int threads) {
    llm_error err;
    profile p = {.prompt = 0};
    double prefill, decode;
    b->engine.n_threads = threads;
    llm_engine *engine = create_engine(b->loaded, &b->engine, &err);
    if (!engine) return !fail_with(&err);
    llm_backend *device = llm_engine_settings(engine)->backend;
    p.program = llm_engine_program(engine, false);
    p.bandwidth = engine_bandwidth(engine);
    p.peak = arithmetic_peak(b->loaded, device);
    int prompt = b->prompts.values[0], begin = prompt < 16 ? prompt : 16;
    bool good = p.peak > 0 && bench_once(engine, begin, b->generate < 4 ? b->generate : 4, NULL, &prefill, &decode); /* to warm up */
    p.prompt = prompt;
    p.program->seconds = resize(NULL, (size_t)p.program->n_ops * sizeof(double));
    memset(p.program->seconds, 0, (size_t)p.program->n_ops * sizeof(double));
    good = good && bench_once(engine, prompt, b->generate, &p, &prefill, &decode) && !stop_requested;
    if (good && b->json)
        put("{\"threads\": %d, \"memory_bytes_per_second\": %.0f, \"operations_per_second\": %.0f, \"prefill_seconds\": %.9f, "
            "\"decode_seconds\": %.9f, \"prefill\": [", threads, p.bandwidth, p.peak, prefill, decode);
    else if (good)
        put("%d threads; memory reads %.2f GB/s; the engine's own matrix product from the cache %.0f GFLOP/s\n", llm_cpu_threads(device),
            1e-9 * p.bandwidth, 1e-9 * p.peak);
    if (good) profile_print(b, &p, PROFILE_PREFILL, prompt, prefill);
    if (good && b->json) put_text("\n  ], \"decode\": [");
    if (good) profile_print(b, &p, PROFILE_DECODE, b->generate, decode);
    if (good && b->json) put_text("\n  ]}\n");
    free(p.program->seconds);
    p.program->seconds = NULL;
    free_engine(engine);
    return good;
}

/* What the lists hold where none was given: 1 thread and all; the usual lengths, as far as they fit. */
static void bench_defaults(bench *b) {
    static const int lengths[] = {16, 128, 512};
    int all = llm_processor_count(), room = llm_model_config(b->loaded)->context_length - b->generate - 1;
    if (b->threads.count == 0) {
        b->threads.values = resize(NULL, 2 * sizeof(int));
        b->threads.values[b->threads.count++] = 1;
        if (all > 1) b->threads.values[b->threads.count++] = all;
    }
    if (b->prompts.count == 0) {
        b->prompts.values = resize(NULL, sizeof lengths);
        for (int i = 0; i < COUNT(lengths); i++)
            if (i == 0 || lengths[i] <= room) b->prompts.values[b->prompts.count++] = lengths[i];
    }
}

/* What all of them end with: the rows of a JSON text are whole, or not. Returns the exit status. */
static int end_bench(bool json, bool good) {
    good = good && !stop_requested;
    if (json) put("\n ], \"complete\": %s}\n", good ? "true" : "false");
    return good ? 0 : FAILED;
}

static bool bench_fits(const llm_model *model, int prompt, int more) {
    int context = llm_model_config(model)->context_length;
    if ((int64_t)prompt + more <= context) return true;
    return !fail("a prompt of %d and %d more tokens are longer than the model's context of %d: give a shorter --prompt or --gen", prompt,
                 more, context);
}

static int bench_model(bench *b, const char *path) {
    llm_error err;
    b->loaded = llm_model_load(path, &err);
    if (!b->loaded) return fail_with(&err);
    bench_defaults(b);
    int longest = 0;
    for (int i = 0; i < b->prompts.count; i++) longest = b->prompts.values[i] > longest ? b->prompts.values[i] : longest;
    if (!bench_fits(b->loaded, longest, b->generate + 1)) return FAILED;
    b->engine.context_length = longest + b->generate + 1;
    b->engine.max_sequences = 1;
    if (b->profile) return bench_profile(b, b->threads.values[b->threads.count - 1]) ? 0 : FAILED;
    double step_bytes = (double)llm_model_step_bytes(b->loaded);
    if (b->json) {
        put_text("{\"model\": ");
        put_json_text(path);
        put(", \"step_bytes\": %.0f, \"processor_cache_bytes\": %.0f", step_bytes, processor_cache());
        put(", \"generate\": %d, \"runs\": %d, \"rows\": [", b->generate, b->runs);
    } else {
        put_text(path);
        put(": a decode step reads %s of weights; ", HUMAN(step_bytes));
        put("medians of %d runs, %d tokens each\n", b->runs, b->generate);
        if (step_bytes < processor_cache())
            put("(these may stay in the processor's cache of %s, so the share of the memory's speed says little)\n",
                HUMAN(processor_cache()));
        put("threads  prompt  prefill tok/s  decode tok/s      GB/s    memory    share\n");
    }
    bool good = true;
    for (int i = 0; good && i < b->threads.count && !stop_requested && !output.error; i++)
        good = bench_threads(b, b->threads.values[i]);
    return end_bench(b->json, good);
}

/* ---- llm bench batch: how many sequences share a step ------------------------------------------
 * A step reads all weights once, for one sequence or for many: so many cost little more than one, until the arithmetic
 * takes longer than the reading. */
typedef struct bench_batch {
    const char *model;
    int_list sequences;
    int prompt, generate, runs;
    bool json;
    llm_engine_options engine;
    llm_model *loaded;
} bench_batch;

/* n requests at once, of tokens that only this stream of random numbers has: seconds until all have ended, and tokens per
 * second from when all have begun. */
static bool bench_group(llm_engine *engine, int n, int n_prompt, int n_generate, uint64_t stream, double *seconds, double *rate) {
    int vocab = llm_model_config(llm_engine_model(engine))->vocab_size, begun = 0;
    int32_t *ids = resize(NULL, (size_t)n_prompt * sizeof *ids);
    llm_error err;
    llm_event event;
    llm_request request = llm_request_defaults();
    request.prompt = ids;
    request.n_prompt = n_prompt;
    request.max_tokens = n_generate;
    request.ignore_end = true;
    double start = llm_seconds(), all_begun = start, now = start;
    int64_t counted = 0;
    bool good = true;
    for (int i = 0; good && i < n; i++) {
        for (int k = 0; k < n_prompt; k++)
            ids[k] = (int32_t)(llm_random(stream, (uint64_t)i, (uint64_t)k) * vocab);
        good = llm_submit(engine, &request, NULL, &err);
    }
    free(ids);
    int status = 1;
    while (good && status > 0 && !stop_requested) {
        status = llm_step(engine, &err);
        now = status > 0 ? llm_seconds() : now;
        int before = begun;
        while (llm_next_event(engine, &event)) {
            begun += event.index == 0;
            counted += before == n && event.token >= 0; /* tokens of a step in which all had begun */
        }
        if (begun == n && before < n) all_begun = now;
    }
    if (!good || status < 0) return !fail_with(&err);
    *seconds = now - start;
    *rate = now > all_begun ? (double)counted / (now - all_begun) : 0;
    return true;
}

/* The prompts first, without a token after them: they stay in the prefix cache. Then the same prompts, with one token more at
 * their end, and all decode from the first step on. */
static bool bench_batch_once(const bench_batch *b, llm_engine *engine, int n, uint64_t stream, double *prefill, double *decode) {
    double seconds = 0, unused;
    if (!bench_group(engine, n, b->prompt, 0, stream, &seconds, &unused)) return false;
    *prefill = (double)n * b->prompt / seconds;
    return bench_group(engine, n, b->prompt + 1, 1 + b->generate, stream, &seconds, decode);
}

static void bench_batch_print(const bench_batch *b, int row, double prefill, double decode, double alone) {
    int n = b->sequences.values[row];
    if (!b->json) {
        put("%9d %13.1f %13.1f %13.1f %9.2f", n, prefill, decode, decode / n, 1e3 * n / decode);
        put(alone > 0 ? " %8.2f x\n" : "\n", decode / alone);
        return;
    }
    const struct { const char *name; double value; } values[] = {
        {"prefill_tokens_per_second", prefill}, {"decode_tokens_per_second", decode}, {"step_seconds", n / decode},
        {"times_one", alone > 0 ? decode / alone : NAN}};
    put("%s\n  {\"sequences\": %d", row ? "," : "", n);
    for (int i = 0; i < COUNT(values); i++) put(", \"%s\": ", values[i].name), put_number(values[i].value);
    put_text("}");
}

/* All sizes in turn, and that several times, so that a machine that is busy for a while is so to all. */
static bool bench_batch_rows(bench_batch *b, llm_engine *engine) {
    int n_rows = b->sequences.count, runs = b->runs;
    double *prefill = resize(NULL, 2 * (size_t)n_rows * (size_t)runs * sizeof *prefill), *decode = prefill + n_rows * runs, alone = 0, unused;
    bool good = bench_group(engine, 1, 8, 8, 0, &unused, &unused); /* to warm up */
    for (int k = 0; good && k < runs; k++)
        for (int i = 0; good && i < n_rows && !stop_requested; i++) {
            char note[64];
            snprintf(note, sizeof note, "%d sequences", b->sequences.values[i]);
            show_progress("bench", (double)(k * n_rows + i) / (runs * n_rows), note);
            uint64_t stream = 1 + (uint64_t)(k * n_rows + i);
            good = bench_batch_once(b, engine, b->sequences.values[i], stream, &prefill[i * runs + k], &decode[i * runs + k]);
        }
    show_progress("bench", -1, "");
    for (int i = 0; good && i < n_rows && !stop_requested; i++) {
        double before = median(prefill + i * runs, runs), rate = median(decode + i * runs, runs);
        if (b->sequences.values[i] == 1) alone = rate;
        bench_batch_print(b, i, before, rate, alone);
    }
    free(prefill);
    return good;
}

static void bench_batch_head(const bench_batch *b, const char *path, int threads) {
    if (b->json) {
        put_text("{\"model\": ");
        put_json_text(path);
        put(", \"threads\": %d, \"prompt\": %d, \"generate\": %d, \"runs\": %d, \"rows\": [", threads, b->prompt, b->generate, b->runs);
    } else {
        put_text(path);
        put(": prompts of %d, then %d tokens; %d threads; medians of %d runs\n", b->prompt, b->generate, threads, b->runs);
        put_text("sequences prefill tok/s  decode tok/s  ... for each   ms/step  against 1\n");
    }
    flush_output();
}

static int bench_batch_model(bench_batch *b, const char *path) {
    llm_error err;
    if (!(b->loaded = llm_model_load(path, &err))) return fail_with(&err);
    int most = 0;
    for (int i = 0; i < b->sequences.count; i++) most = b->sequences.values[i] > most ? b->sequences.values[i] : most;
    b->engine.context_length = b->prompt + b->generate + 2;
    b->engine.max_sequences = most;
    if (b->engine.max_batch_tokens < most) b->engine.max_batch_tokens = most;
    if (!bench_fits(b->loaded, b->prompt, b->generate + 2)) return FAILED;
    llm_engine *engine = create_engine(b->loaded, &b->engine, &err);
    if (!engine) return fail_with(&err);
    bench_batch_head(b, path, llm_cpu_threads(llm_engine_settings(engine)->backend));
    int status = end_bench(b->json, bench_batch_rows(b, engine));
    free_engine(engine);
    return status;
}

static int command_bench_batch(const command *self, int argc, char **argv) {
    bench_batch b = {.prompt = 128, .generate = 64, .runs = 3, .engine = llm_engine_defaults()};
    const option options[] = {
        MODEL_OPTION(b.model),
        {0, "sequences", "LIST", LIST, &b.sequences, 1, 4096, "how many at once (default 1,2,4,8,16,32,64)"},
        {'p', "prompt", "N", WHOLE, &b.prompt, 1, 1 << 20, "tokens of each prompt (default 128)"},
        {'g', "gen", "N", WHOLE, &b.generate, 1, 1 << 20, "tokens to generate after each (default 64)"},
        {'r', "runs", "R", WHOLE, &b.runs, 1, 1000, "times to do each; the median is told (default 3)"},
        THREADS_OPTION(b.engine.n_threads),
        NAIVE_OPTION(b.engine),
        CACHE_TYPE_OPTION(b.engine),
        CACHE_OPTION(b.engine, "as needed"),
        BLOCK_OPTION(b.engine),
        STEP_OPTION(b.engine),
        JSON_OPTION(b.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    char usual[] = "1,2,4,8,16,32,64";
    if (status == PARSED && b.sequences.count == 0) parse_list(usual, 1, 64, &b.sequences);
    char *path = status == PARSED ? model_path(b.model) : NULL;
    if (status == PARSED) status = path ? bench_batch_model(&b, path) : FAILED;
    free(path);
    free(b.sequences.values);
    llm_model_free(b.loaded);
    return status;
}

static const char bench_batch_notes[] =
    "For each number of sequences: so many prompts of random tokens (prefill), and then --gen tokens after each of them, all\n"
    "sequences in one step (decode; the tokens of all are counted). A step that serves many reads the weights once.\n"
    "\n"
    "Examples:\n"
    "  llm bench batch\n"
    "  llm bench batch -m some.gguf --sequences 1,16 --prompt 128 --gen 64 --runs 5 --json\n";

#include "docs/groups.h"

/* ---- llm bench serve: requests that come and go ---------------------------------------------------
 * The same requests, at the same times, for each policy. TTFT is counted from the time at which a request was to arrive. */
enum {
    SECONDS, THROUGHPUT, TTFT_50, TTFT_90, TTFT_99, TPOT_50, TPOT_90, TPOT_99, BATCH, OCCUPANCY, PADDING, STEPS, PREEMPTIONS_MADE,
    HIT_RATE, WASTE, SCHEDULER, HOST, ACCEPTANCE, PER_STEP, N_FIGURES
};

static const struct {
    const char *words, *json;
    double scale; /* of the words' unit */
    int decimals;
} serve_figures[N_FIGURES] = {
    {"seconds", "seconds", 1, 2}, {"tokens/s", "tokens_per_second", 1, 1},
    {"TTFT p50, ms", "ttft_p50_seconds", 1e3, 1}, {"TTFT p90, ms", "ttft_p90_seconds", 1e3, 1}, {"TTFT p99, ms", "ttft_p99_seconds", 1e3, 1},
    {"TPOT p50, ms", "tpot_p50_seconds", 1e3, 2}, {"TPOT p90, ms", "tpot_p90_seconds", 1e3, 2}, {"TPOT p99, ms", "tpot_p99_seconds", 1e3, 2},
    {"sequences in a step, mean", "sequences_per_step", 1, 2}, {"... of the most, %", "occupancy", 100, 1},
    {"... ended, and still computed", "padding_per_step", 1, 2}, {"steps", "steps", 1, 0},
    {"preemptions", "preemptions", 1, 0}, {"prompt tokens cached, %", "prefix_hit_rate", 100, 1},
    {"cache slots wasted, mean, %", "kv_waste", 100, 2}, {"scheduler's share of time, %", "scheduler_share", 100, 3},
    {"a step's time of the CPU, us", "host_seconds_per_step", 1e6, 1}, /* of a GPU's step */
    {"proposals accepted, %", "acceptance", 100, 1}, {"tokens per sequence's step", "tokens_per_step", 1, 2},
};

typedef struct serve_request {
    double arrival;     /* seconds from the start */
    member member;
    double first, last; /* tokens, on the clock */
} serve_request;

typedef struct serve {
    const char *model;
    llm_engine_options engine_options;
    speculation speculation;
    int policy; /* of POLICIES; their number: all of them, side by side */
    int n_requests, shared, runs;
    int ask; /* for so many tokens; 0: for those that it will get */
    float rate, window;
    int_range prompt, generate;
    seed_value seed;
    bool json;
    llm_model *loaded, *draft;
    serve_request *requests;
    int32_t *ids; /* of all prompts, one after another */
} serve;

static int draw_range(int_range r, uint64_t seed, uint64_t stream, uint64_t index) {
    return r.low + (int)(llm_random(seed, stream, index) * (r.high - r.low + 1));
}

/* When they come, and what they ask for: the same in every run. */
static void serve_plan(serve *v) {
    double clock = 0;
    uint64_t seed = v->seed.value;
    int vocab = llm_model_config(v->loaded)->vocab_size;
    size_t n_ids = 0;
    for (int i = 0; i < v->n_requests; i++) {
        serve_request *r = &v->requests[i];
        llm_request *request = &r->member.request;
        int n_prompt = v->shared + draw_range(v->prompt, seed, 1, (uint64_t)i);
        if (v->rate > 0) clock -= log(1 - llm_random(seed, 0, (uint64_t)i)) / (double)v->rate;
        *r = (serve_request){.arrival = clock, .member.request = llm_request_defaults()};
        apply_speculation(&v->speculation, &v->engine_options, request);
        v->ids = resize(v->ids, (n_ids + (size_t)n_prompt) * sizeof *v->ids);
        for (int k = 0; k < n_prompt; k++)
            v->ids[n_ids++] = (int32_t)(llm_random(seed, k < v->shared ? 3 : 4 + (uint64_t)i, (uint64_t)k) * vocab);
        r->member.wanted = draw_range(v->generate, seed, 2, (uint64_t)i);
        request->n_prompt = n_prompt;
        request->max_tokens = v->ask ? v->ask : r->member.wanted;
        request->ignore_end = true;
        request->user = r;
    }
    n_ids = 0; /* they stay where they are from here on */
    for (int i = 0; i < v->n_requests; i++) {
        v->requests[i].member.request.prompt = v->ids + n_ids;
        n_ids += (size_t)v->requests[i].member.request.n_prompt;
    }
}

/* The value that a share p of them do not exceed. Sorts them. */
static double percentile(double *x, int n, double p) {
    if (n == 0) return NAN;
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    int rank = (int)ceil(p * n);
    return x[rank > 0 ? rank - 1 : 0];
}

static void serve_summary(const serve *v, const batcher *b, double start, double *figures) {
    int n = v->n_requests, n_paced = 0;
    double *ttft = resize(NULL, 2 * (size_t)n * sizeof *ttft), *tpot = ttft + n, last = start;
    static const double shares[] = {0.5, 0.9, 0.99};
    int64_t tokens = 0;
    for (int i = 0; i < n; i++) {
        const serve_request *r = &v->requests[i];
        ttft[i] = r->first - start - r->arrival;
        if (r->member.n_tokens > 1) tpot[n_paced++] = (r->last - r->first) / (r->member.n_tokens - 1);
        tokens += r->member.n_tokens;
        if (r->last > last) last = r->last;
    }
    for (int i = 0; i < COUNT(shares); i++) {
        figures[TTFT_50 + i] = percentile(ttft, n, shares[i]);
        figures[TPOT_50 + i] = percentile(tpot, n_paced, shares[i]);
    }
    free(ttft);
    llm_statistics s = llm_engine_statistics(b->engine);
    figures[SECONDS] = last - start;
    figures[THROUGHPUT] = (double)tokens / (last - start);
    figures[STEPS] = (double)s.steps;
    figures[BATCH] = (double)(s.sequence_steps - b->padding_steps) / (double)s.steps;
    figures[OCCUPANCY] = figures[BATCH] / v->engine_options.max_sequences;
    figures[PADDING] = (double)b->padding_tokens / (double)s.steps;
    figures[PREEMPTIONS_MADE] = (double)s.preemptions;
    figures[HIT_RATE] = s.prefix_tokens ? (double)s.prefix_hits / (double)s.prefix_tokens : 0;
    figures[SCHEDULER] = (s.step_seconds - s.forward_seconds - s.draft_seconds - s.sampling_seconds) / s.step_seconds;
    figures[HOST] = s.device_launches + s.device_replays ? (s.step_seconds - s.wait_seconds) / (double)s.steps : NAN;
    figures[ACCEPTANCE] = s.proposed ? acceptance(&s) : NAN;
    figures[PER_STEP] = tokens_per_step(&s);
}

/* All requests through one engine, each when its time has come. */
static bool serve_requests(serve *v, batcher *b, double *figures) {
    llm_error err;
    llm_event event;
    int n_steps = 0, n_looks = 0;
    double start = llm_seconds();
    for (int next = 0, n_ended = 0; n_ended < v->n_requests && !stop_requested;) {
        double now = llm_seconds() - start;
        while (next < v->n_requests && v->requests[next].arrival <= now)
            if (!batcher_submit(b, &v->requests[next++].member, &err)) return !fail_with(&err);
        int status = batcher_step(b, &err);
        if (status < 0) return !fail_with(&err);
        if (status == 0) poll(NULL, 0, (int)fmin(100, fmax(1e3 * (v->requests[next].arrival - now), 0))); /* nobody is here */
        now = llm_seconds();
        while (batcher_next_event(b, &event)) {
            serve_request *r = event.user;
            if (r->first == 0) r->first = now;
            r->last = now;
            n_ended += event.finish != LLM_FINISH_NONE;
        }
        if (b->n_running == 0 || n_steps++ % 8) continue; /* a look at the pool takes time, of a large one too much for each step */
        figures[WASTE] += batcher_waste(b);
        n_looks++;
        char note[64];
        snprintf(note, sizeof note, "%s, %d of %d requests", policy_names[b->policy], n_ended, v->n_requests);
        show_progress("bench", (double)n_ended / v->n_requests, note);
    }
    figures[WASTE] /= n_looks ? n_looks : 1;
    if (!stop_requested) serve_summary(v, b, start, figures);
    return true;
}

static bool serve_once(serve *v, int policy, double *figures) {
    llm_error err;
    for (int i = 0; i < N_FIGURES; i++) figures[i] = 0;
    serve_plan(v);
    batcher b = {.engine = create_engine(v->loaded, &v->engine_options, &err), .policy = policy, .window = (double)v->window};
    if (!b.engine) return !fail_with(&err);
    bool good = serve_requests(v, &b, figures);
    free_engine(b.engine);
    return good;
}

static void serve_print_head(const serve *v, const char *path) {
    put_text(v->json ? "{\"model\": " : "");
    if (v->json) {
        put_json_text(path);
        put(", \"requests\": %d, \"rate\": %g, \"prompt\": [%d, %d], \"generate\": [%d, %d], \"ask\": %d, \"shared\": %d, \"seed\": %llu, ", v->n_requests,
            (double)v->rate, v->prompt.low, v->prompt.high, v->generate.low, v->generate.high, v->ask, v->shared,
            (unsigned long long)v->seed.value);
        put("\"max_sequences\": %d, \"runs\": %d, \"rows\": [", v->engine_options.max_sequences, v->runs);
        return;
    }
    put_text(path);
    put(": %d requests, ", v->n_requests);
    if (v->rate > 0) put("%g a second by chance", (double)v->rate);
    else put_text("all at once");
    put(", prompts of %d to %d", v->prompt.low, v->prompt.high);
    if (v->shared) put(" after the same %d", v->shared);
    put(", %d to %d tokens each", v->generate.low, v->generate.high);
    if (v->ask) put(" of %d asked for", v->ask);
    put("; up to %d sequences; medians of %d runs\n", v->engine_options.max_sequences, v->runs);
}

/* figures (policies, runs, N_FIGURES) */
static void serve_print(const serve *v, const double *figures, int first, int n) {
    double *x = resize(NULL, (size_t)v->runs * sizeof *x), medians[N_POLICIES][N_FIGURES];
    for (int p = 0; p < n; p++)
        for (int i = 0; i < N_FIGURES; i++) {
            for (int k = 0; k < v->runs; k++) x[k] = figures[(p * v->runs + k) * N_FIGURES + i];
            medians[p][i] = median(x, v->runs);
        }
    free(x);
    for (int p = 0; v->json && p < n; p++) {
        put("%s\n  {\"policy\": \"%s\"", p ? "," : "", policy_names[first + p]);
        for (int i = 0; i < N_FIGURES; i++) put(", \"%s\": ", serve_figures[i].json), put_number(medians[p][i]);
        put_text("}");
    }
    if (v->json) return;
    put("%-30s", "");
    for (int p = 0; p < n; p++) put(" %12s", policy_names[first + p]);
    put_text("\n");
    for (int i = 0; i < N_FIGURES; i++) {
        if (isnan(medians[0][i]) || (i == PER_STEP && isnan(medians[0][ACCEPTANCE]))) continue; /* no speculation */
        put("%-30s", serve_figures[i].words);
        for (int p = 0; p < n; p++) put(" %12.*f", serve_figures[i].decimals, serve_figures[i].scale * medians[p][i]);
        put_text("\n");
    }
}

static int serve_model(serve *v, const char *path) {
    if (!load_models(path, v->speculation.path, &v->loaded, &v->draft)) return FAILED;
    int longest = v->shared + v->prompt.high + (v->ask ? v->ask : v->generate.high), context = llm_model_config(v->loaded)->context_length;
    if (longest > context)
        return fail("a request may have %d tokens, and the model's context is %d: give a shorter --prompt, --gen, --ask or --shared", longest, context);
    llm_request unused = llm_request_defaults();
    apply_speculation(&v->speculation, &v->engine_options, &unused);
    v->engine_options.context_length = longest;
    v->engine_options.draft = v->draft;
    v->requests = resize(NULL, (size_t)v->n_requests * sizeof *v->requests);
    int first = v->policy < N_POLICIES ? v->policy : 0, n = v->policy < N_POLICIES ? 1 : N_POLICIES;
    double *figures = resize(NULL, (size_t)n * (size_t)v->runs * N_FIGURES * sizeof *figures);
    serve_print_head(v, path);
    flush_output();
    bool good = true;
    for (int k = 0; k < v->runs && good && !stop_requested; k++) /* in turn: a machine that is busy for a while is so to all */
        for (int p = 0; p < n && good && !stop_requested; p++) good = serve_once(v, first + p, figures + (p * v->runs + k) * N_FIGURES);
    show_progress("bench", -1, "");
    if (good && !stop_requested) serve_print(v, figures, first, n);
    free(figures);
    return end_bench(v->json, good);
}

static int command_bench_serve(const command *self, int argc, char **argv) {
    serve v = {.engine_options = llm_engine_defaults(), .speculation.depth = NO_DEPTH, .policy = N_POLICIES, .n_requests = 64, .runs = 1,
               .window = 0.05f, .prompt = {16, 128}, .generate = {10, 200}, .seed = {false, 1}};
    llm_engine_options *e = &v.engine_options;
    const option options[] = {
        MODEL_OPTION(v.model),
        {0, "requests", "N", WHOLE, &v.n_requests, 1, 1 << 24, "how many (default 64)"},
        {0, "rate", "R", REAL, &v.rate, 0, 1e6, "that come in a second, at random times (default 0: all at once)"},
        {'p', "prompt", "LOW-HIGH", RANGE, &v.prompt, 1, 1 << 20, "tokens of a prompt (default 16-128)"},
        {'g', "gen", "LOW-HIGH", RANGE, &v.generate, 1, 1 << 20, "tokens to generate after it (default 10-200)"},
        {0, "ask", "N", WHOLE, &v.ask, 1, 1 << 20,
         "tokens that each request asks for, not knowing how soon it will end (default: what it will get)"},
        {0, "shared", "N", WHOLE, &v.shared, 0, 1 << 20, "tokens that all prompts begin with, besides (default 0)"},
        {'s', "seed", "N", SEED, &v.seed, 0, 0, "of the times, lengths and tokens (default 1)"},
        {'r', "runs", "R", WHOLE, &v.runs, 1, 1000, "times to do each; the medians are told (default 1)"},
        {0, "policy", POLICIES "|all", CHOICE, &v.policy, 0, 0, "when requests enter (default all, side by side)"},
        {0, "window", "SECONDS", REAL, &v.window, 0, 3600, "how long dynamic batching waits for a group to fill (default 0.05)"},
        SCHEDULE_OPTIONS(*e),
        SPECULATION_OPTIONS(v.speculation),
        THREADS_OPTION(e->n_threads),
        CACHE_TYPE_OPTION(*e),
        CACHE_OPTION(*e, "what all sequences need"),
        BLOCK_OPTION(*e),
        JSON_OPTION(v.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED) status = check_speculation(self, &v.speculation);
    if (status == PARSED && v.ask && v.ask < v.generate.high)
        status = misuse(self, "--ask is %d, and --gen gives up to %d tokens: ask for as many, or more", v.ask, v.generate.high);
    char *path = status == PARSED ? model_path(v.model) : NULL;
    if (status == PARSED) status = path ? serve_model(&v, path) : FAILED;
    free(path);
    free(v.requests);
    free(v.ids);
    llm_model_free(v.loaded);
    llm_model_free(v.draft);
    return status;
}

static const char bench_serve_notes[] =
    "Requests of random tokens and random lengths, as a server would get them, through one engine for each policy. TTFT is\n"
    "the time from the arrival of a request to its first token; TPOT the time per token after it; p90: nine of ten requests have\n"
    "no more. A step's time that is spent neither in the models nor in choosing tokens is the scheduler's.\n"
    "\n"
    "Static and dynamic batching are done here, outside of the engine. Requests wait until the engine is empty, and enter it\n"
    "as a group, which is one array: each member asks for as many tokens as the one that asks for most, and no more enter\n"
    "than the cache has room for, at that length. A request that has its tokens is computed on, as padding, until the last\n"
    "of the group has its own. Nobody knows beforehand when a model will end a text, so requests mostly ask for more (--ask).\n"
    "\n"
    "\"Sequences in a step\" are those that still want tokens; \"ended, and still computed\" are tokens of padding per step.\n"
    "\"Cache slots wasted\": continuous batching, the share of the blocks in use that holds no token of a running sequence;\n"
    "groups, the share of what was set aside for the group that holds no token of a request that still wants some.\n"
    "\n"
    "Examples:\n"
    "  llm bench serve\n"
    "  llm bench serve --requests 100 --rate 5 --gen 10-500 --runs 3\n"
    "  llm bench serve --requests 100 --gen 10-500 --ask 500 --max-sequences 32 --cache-memory 16M\n"
    "  llm bench serve --policy continuous --shared 256 --no-prefix-cache\n"
    "  llm bench serve --policy continuous --cache-memory 4M --preempt swap --json\n";

/* ---- llm bench speculate: does guessing pay? ------------------------------------------------------- */
typedef struct bench_speculate {
    const char *model, *file;
    llm_engine_options engine_options;
    speculation speculation;
    float temperature;
    int prompt, generate, n_texts, runs;
    bool json;
    llm_model *loaded, *draft;
    text words;
    int32_t **ids;  /* (n_texts, prompt) */
    int n_prompts;
} bench_speculate;

enum { DEPTHS = 10 }; /* 0 to 8, and auto */
static int depth_at(int i) { return i < DEPTHS - 1 ? i : LLM_SPECULATE_AUTO; }

typedef struct speculate_sum { /* over all prompts, and all runs */
    double seconds;
    uint64_t tokens, hash; /* after the first ones; of all, so that we see whether they are the same */
    llm_statistics before, after;
} speculate_sum;

static bool speculate_once(bench_speculate *b, llm_engine *engine, int depth, speculate_sum *sum) {
    llm_error err;
    llm_event event;
    llm_request request = llm_request_defaults();
    request.n_prompt = b->prompt;
    request.max_tokens = 1 + b->generate;
    request.ignore_end = true;
    request.speculate = depth;
    request.lookup = b->speculation.lookup;
    request.sampling.temperature = b->temperature;
    *sum = (speculate_sum){.before = llm_engine_statistics(engine)};
    for (int i = 0; i < b->n_prompts && !stop_requested; i++) {
        double first = 0, last = 0;
        int status = 1;
        request.prompt = b->ids[i];
        if (!llm_submit(engine, &request, NULL, &err)) return !fail_with(&err);
        while (!stop_requested && (status = llm_step(engine, &err)) > 0)
            while (llm_next_event(engine, &event)) {
                last = llm_seconds();
                if (first == 0) first = last;
                sum->tokens += event.index > 0;
                sum->hash = (sum->hash ^ (uint64_t)event.token) * 0x100000001B3u;
            }
        if (status < 0) return !fail_with(&err);
        sum->seconds += last - first;
    }
    sum->after = llm_engine_statistics(engine);
    return true;
}

static void speculate_print(const bench_speculate *b, int depth, double rate, double plain, const speculate_sum *sum) {
    llm_statistics s = sum->after;
    s.proposed -= sum->before.proposed;
    s.accepted -= sum->before.accepted;
    s.decode_steps -= sum->before.decode_steps;
    s.generated_tokens -= sum->before.generated_tokens;
    double a = acceptance(&s), per_step = tokens_per_step(&s);
    double formula = depth >= 0 ? a < 1 ? (1 - pow(a, depth + 1)) / (1 - a) : depth + 1 : NAN;
    if (b->json) {
        const struct { const char *name; double value; } values[] = {
            {"tokens_per_second", rate}, {"times_plain", rate / plain}, {"acceptance", s.proposed ? a : NAN}, {"tokens_per_step", per_step},
            {"formula", formula}};
        put(depth == 0 ? "\n  {\"speculate\": %d" : depth > 0 ? ",\n  {\"speculate\": %d" : ",\n  {\"speculate\": \"auto\"", depth);
        for (int i = 0; i < COUNT(values); i++) put(", \"%s\": ", values[i].name), put_number(values[i].value);
        put_text("}");
        return;
    }
    if (depth < 0) put("auto");
    else put("%4d", depth);
    put(" %11.1f %8.2f x", rate, rate / plain);
    if (s.proposed) put(" %9.1f %%", 100 * a);
    else put(" %11s", "");
    put(" %14.2f", per_step);
    if (isnan(formula)) put_text("\n");
    else put(" %9.2f\n", formula);
}

static bool speculate_rows(bench_speculate *b, llm_engine *engine) {
    double *rates = resize(NULL, (size_t)DEPTHS * (size_t)b->runs * sizeof *rates), plain = 0;
    speculate_sum sums[DEPTHS], warm;
    bool good = speculate_once(b, engine, 0, &warm);
    for (int k = 0; k < b->runs; k++)
        for (int i = 0; good && i < DEPTHS && !stop_requested; i++) {
            show_progress("bench", (double)(k * DEPTHS + i) / (b->runs * DEPTHS), "");
            good = speculate_once(b, engine, depth_at(i), &sums[i]);
            rates[i * b->runs + k] = (double)sums[i].tokens / sums[i].seconds;
        }
    show_progress("bench", -1, "");
    for (int i = 0; good && i < DEPTHS && !stop_requested; i++) {
        double rate = median(rates + i * b->runs, b->runs);
        if (i == 0) plain = rate;
        speculate_print(b, depth_at(i), rate, plain, &sums[i]);
        if (b->temperature == 0 && sums[i].hash != sums[0].hash) good = !fail("speculation has changed the text: this is a bug");
    }
    free(rates);
    return good;
}

/* The beginnings of the first texts of the file that are long enough. */
static bool speculate_read(bench_speculate *b) {
    if (!read_all(b->file, &b->words)) return false;
    const char *at = b->words.data, *document;
    size_t length;
    b->ids = resize(NULL, (size_t)b->n_texts * sizeof *b->ids);
    while (b->n_prompts < b->n_texts && next_document(&at, b->words.data + b->words.length, &document, &length)) {
        int64_t n = tokenize(llm_model_tokenizer(b->loaded), document, length, LLM_TOKENIZE_BOS, &b->ids[b->n_prompts]);
        if (n >= b->prompt) b->n_prompts++;
        else free(b->ids[b->n_prompts]);
        if (n < 0) return false;
    }
    return b->n_prompts > 0 || !fail("%s holds no text of %d tokens", b->file, b->prompt);
}

static void speculate_head(const bench_speculate *b, const char *path) {
    if (b->json) {
        put_text("{\"model\": ");
        put_json_text(path);
        put_text(", \"draft\": ");
        put_json_text(b->draft ? b->speculation.path : "lookup");
        put(", \"texts\": %d, \"prompt\": %d, \"generate\": %d, \"temperature\": %g, \"runs\": %d, \"rows\": [", b->n_prompts, b->prompt,
            b->generate, (double)b->temperature, b->runs);
    } else {
        put_text(path);
        put_text(" with ");
        put_text(b->draft ? b->speculation.path : "lookup");
        put(": %d texts, prompts of %d, then %d tokens, one after another; temperature %g; medians of %d runs\n", b->n_prompts, b->prompt,
            b->generate, (double)b->temperature, b->runs);
        if (b->draft)
            put("a step of the model reads %s of weights, one of the draft %s\n", HUMAN(llm_model_step_bytes(b->loaded)),
                HUMAN(llm_model_step_bytes(b->draft)));
        put_text("   K    tokens/s  against 0   accepted  tokens a step   formula\n");
    }
    flush_output();
}

static int speculate_model(bench_speculate *b, const char *path) {
    llm_error err;
    if (!load_models(path, b->speculation.path, &b->loaded, &b->draft) || !speculate_read(b)) return FAILED;
    llm_engine_options *e = &b->engine_options;
    e->draft = b->draft;
    e->max_sequences = 1;
    e->prefix_cache = false;
    e->context_length = b->prompt + b->generate + 1;
    if (!bench_fits(b->loaded, b->prompt, b->generate + 1)) return FAILED;
    llm_engine *engine = create_engine(b->loaded, e, &err);
    if (!engine) return fail_with(&err);
    speculate_head(b, path);
    int status = end_bench(b->json, speculate_rows(b, engine));
    free_engine(engine);
    return status;
}

static int command_bench_speculate(const command *self, int argc, char **argv) {
    bench_speculate b = {.file = "models/eval.txt", .engine_options = llm_engine_defaults(), .speculation.depth = NO_DEPTH,
                         .prompt = 32, .generate = 64, .n_texts = 8, .runs = 3};
    const option options[] = {
        MODEL_OPTION(b.model),
        {'d', "draft", "FILE", TEXT, &b.speculation.path, 0, 0, "a small model of the same vocabulary, that proposes tokens"},
        {0, "lookup", NULL, FLAG, &b.speculation.lookup, 0, 0, "propose what stood behind the same words before; needs no draft"},
        {'f', "file", "FILE", TEXT, &b.file, 0, 0, "texts, between lines of <|endoftext|> (default models/eval.txt)"},
        {0, "texts", "N", WHOLE, &b.n_texts, 1, 100000, "how many of them to continue (default 8)"},
        {'p', "prompt", "N", WHOLE, &b.prompt, 1, 1 << 20, "tokens of a text's beginning (default 32)"},
        {'g', "gen", "N", WHOLE, &b.generate, 1, 1 << 20, "tokens to generate after it (default 64)"},
        {0, "temperature", "T", REAL, &b.temperature, 0, 100, "of the draws (default 0: none)"},
        {'r', "runs", "R", WHOLE, &b.runs, 1, 1000, "times to do each; the medians are told (default 3)"},
        THREADS_OPTION(b.engine_options.n_threads),
        JSON_OPTION(b.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    if (status == PARSED && !b.speculation.path && !b.speculation.lookup)
        status = misuse(self, "nothing proposes tokens: --draft FILE, or --lookup");
    if (status == PARSED) status = check_speculation(self, &b.speculation);
    char *path = status == PARSED ? model_path(b.model) : NULL;
    if (status == PARSED) status = path ? speculate_model(&b, path) : FAILED;
    for (int i = 0; i < b.n_prompts; i++) free(b.ids[i]);
    free(b.ids);
    free(b.words.data);
    free(path);
    llm_model_free(b.loaded);
    llm_model_free(b.draft);
    return status;
}

static const char bench_speculate_notes[] =
    "One sequence after another, with 0 to 8 proposals a step, and with as many as the engine thinks will pay. If a share a of\n"
    "the proposals is accepted, each with the same chance, a step makes (1 - a^(K+1)) / (1 - a) tokens: the formula. Guessing\n"
    "pays if these are worth more than what the guesses, and the wider step, cost.\n"
    "\n"
    "Examples:\n"
    "  llm bench speculate --draft models/tales-draft.gguf\n"
    "  llm bench speculate --lookup -f letters.txt --temperature 0.8 --json\n";

/* ---- llm bench itself ---------------------------------------------------------------------------- */
static const command bench_modes[] = {
    {"bench batch", "How much faster many sequences are together than one.", "[-m FILE] [options]", command_bench_batch, bench_batch_notes},
    {"bench serve", "Requests that come and go: throughput and waiting times, by policy.", "[-m FILE] [options]", command_bench_serve,
     bench_serve_notes},
    {"bench speculate", "One sequence, by the number of proposals in a step.", "--draft FILE | --lookup [-m FILE] [options]",
     command_bench_speculate, bench_speculate_notes},
};

static int bench_mode(const command *self, int argc, char **argv) {
    suggestion s = {argv[0], NULL, 0};
    for (int i = 0; i < COUNT(bench_modes); i++) {
        const char *name = bench_modes[i].name + sizeof "bench";
        if (!strcmp(name, argv[0])) return bench_modes[i].run(&bench_modes[i], argc - 1, argv + 1);
        consider(&s, name);
    }
    if (s.best) return misuse(self, "no benchmark is named '%s'; did you mean '%s'?", argv[0], s.best);
    return misuse(self, "no benchmark is named '%s'", argv[0]);
}

static int command_bench(const command *self, int argc, char **argv) {
    if (argc > 0 && argv[0][0] != '-') return bench_mode(self, argc, argv);
    bench b = {.generate = 32, .runs = 3, .engine = llm_engine_defaults()};
    b.engine.prefix_cache = false; /* each run is to do its whole prompt */
    const option options[] = {
        MODEL_OPTION(b.model),
        {'t', "threads", "LIST", LIST, &b.threads, 1, 4096, "numbers of threads to try (default: 1 and one per processor)"},
        DEVICE_OPTIONS,
        {'p', "prompt", "LIST", LIST, &b.prompts, 1, 1 << 20, "lengths of prompt to try (default 16,128,512)"},
        {'g', "gen", "N", WHOLE, &b.generate, 1, 1 << 20, "tokens to generate after each prompt (default 32)"},
        {'r', "runs", "R", WHOLE, &b.runs, 1, 1000, "times to do each; the median is told (default 3)"},
        {0, "profile", NULL, FLAG, &b.profile, 0, 0, "where the time goes, operation by operation, for the first --prompt and the last --threads"},
        NAIVE_OPTION(b.engine),
        CACHE_TYPE_OPTION(b.engine),
        BLOCK_OPTION(b.engine),
        STEP_OPTION(b.engine),
        JSON_OPTION(b.json),
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 0);
    char *path = status == PARSED ? model_path(b.model) : NULL;
    if (status == PARSED) status = path ? bench_model(&b, path) : FAILED;
    free(path);
    free(b.threads.values);
    free(b.prompts.values);
    llm_model_free(b.loaded);
    return status;
}

static const char bench_notes[] =
    "For each number of threads and each length: a prompt of so many random tokens (prefill), then --gen tokens\n"
    "after it (decode). GB/s is the weights and cached keys and values that decoding read, per second; memory is how fast\n"
    "so many threads just read memory here, measured first; share is the one over the other. With --profile, predicted is the time that\n"
    "an operation's bytes or its arithmetic take at least, whichever is longer, if all bytes come from memory.\n"
    "\n"
    "Other benchmarks, each with a --help of its own:\n"
    "  llm bench batch        how much faster many sequences are together than one\n"
    "  llm bench serve        requests that come and go: throughput and waiting times, by policy\n"
    "  llm bench speculate    one sequence, by the number of proposals in a step\n"
    "\n"
    "Examples:\n"
    "  llm bench\n"
    "  llm bench -m some.gguf --threads 1,2,4 --prompt 128,1024 --gen 64 --runs 5\n"
    "  llm synth --shape tinyllama-1.1b --type q4_0 tiny.gguf && llm bench -m tiny.gguf --json\n";

/* ---- llm synth: a model of any shape, of random weights ------------------------------------- */
typedef struct shape {
    const char *name;
    int dim, layers, heads, kv_heads, hidden, vocab, context, head_dim; /* head_dim 0: dim / heads */
    float rope_base;
    int tied;
} shape;

static const shape shapes[] = {
    {"tales", 256, 8, 8, 4, 768, 4096, 1024, 0, 1e4f, 1},
    {"qwen2.5-0.5b", 896, 24, 14, 2, 4864, 151936, 32768, 0, 1e6f, 1},
    {"tinyllama-1.1b", 2048, 22, 32, 4, 5632, 32000, 2048, 0, 1e4f, 0},
    {"llama-3.2-1b", 2048, 16, 32, 8, 8192, 128256, 131072, 0, 5e5f, 1},
    {"llama-2-7b", 4096, 32, 32, 32, 11008, 32000, 4096, 0, 1e4f, 0},
    {"mistral-7b", 4096, 32, 32, 8, 14336, 32000, 32768, 0, 1e6f, 0},
    {"llama-3.1-8b", 4096, 32, 32, 8, 14336, 128256, 131072, 0, 5e5f, 0},
};

/* "dim=64,layers=2,...": what is not said stays as in the first shape of the table. Returns what is wrong, or NULL. */
static const char *parse_shape(const char *s, shape *out) {
    *out = shapes[0];
    for (int i = 0; i < COUNT(shapes); i++)
        if (!strcmp(s, shapes[i].name)) return *out = shapes[i], NULL;
    if (!strchr(s, '=')) return "no such shape";
    out->name = "synthetic";
    out->tied = 0;
    while (*s) {
        const struct { const char *name; int *value; } fields[] = {
            {"dim", &out->dim}, {"layers", &out->layers}, {"heads", &out->heads}, {"kv-heads", &out->kv_heads},
            {"hidden", &out->hidden}, {"vocab", &out->vocab}, {"context", &out->context}, {"head-dim", &out->head_dim},
            {"tied", &out->tied}, {"rope-base", NULL}};
        size_t n = strcspn(s, "=");
        int k = 0;
        while (k < COUNT(fields) && (strlen(fields[k].name) != n || strncmp(s, fields[k].name, n))) k++;
        if (k == COUNT(fields) || s[n] != '=') return "no such size";
        char *end;
        double x = strtod(s + n + 1, &end);
        bool may_be_zero = fields[k].value == &out->tied;
        bool number = end > s + n + 1 && (!*end || *end == ',');
        if (!number || !(x >= (may_be_zero ? 0 : 1) && x <= 1 << 24)) return "a size is not a number from 1 to 16777216";
        if (fields[k].value) *fields[k].value = (int)x;
        else out->rope_base = (float)x;
        s = *end ? end + 1 : end;
    }
    return NULL;
}

enum { BYTE_TOKENS = 256, FIRST_BYTE = 2, FIRST_MERGE = FIRST_BYTE + BYTE_TOKENS, MAX_PIECE = 32 };

static const char *check_shape(shape *s) {
    int head_dim = s->head_dim ? s->head_dim : s->dim / s->heads;
    if (!s->head_dim && s->dim % s->heads) return "dim is not a multiple of heads (or give head-dim)";
    s->head_dim = head_dim;
    if (s->heads % s->kv_heads) return "heads is not a multiple of kv-heads";
    if (head_dim % 2) return "the heads' width must be even";
    if (s->vocab < FIRST_MERGE) return "vocab must be at least 258: two special tokens and all bytes";
    return NULL;
}

/* A byte as byte-level vocabularies spell it: printable ones as they are, the others from U+0100 on. */
static int spell_byte(int byte, char *out) {
    int others = 0;
    for (int b = 0; b <= byte; b++) others += !((b > ' ' && b < 0x7F) || (b > 0xA0 && b != 0xAD));
    bool printable = (byte > ' ' && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    int c = printable ? byte : 0x100 + others - 1;
    if (c < 0x80) return out[0] = (char)c, 1;
    out[0] = (char)(0xC0 | c >> 6);
    out[1] = (char)(0x80 | (c & 0x3F));
    return 2;
}

/* A vocabulary of pronounceable nonsense: BOS, EOS, all bytes, and then every word that grows from a letter or a
 * space by one letter at a time, vowels and consonants in turn, shortest first. Each is its parent
 * and a letter, so the merge that makes it is valid, and no word comes twice. */
static bool synth_vocabulary(llm_writer *w, int vocab) {
    char (*pieces)[MAX_PIECE] = resize(NULL, (size_t)vocab * sizeof *pieces);
    char (*merges)[MAX_PIECE] = resize(NULL, (size_t)vocab * sizeof *merges);
    llm_string *strings = resize(NULL, (size_t)vocab * sizeof *strings);
    int32_t *types = resize(NULL, (size_t)vocab * sizeof *types);
    strcpy(pieces[0], "<|bos|>");
    strcpy(pieces[1], "<|endoftext|>");
    for (int b = 0; b < BYTE_TOKENS; b++) pieces[FIRST_BYTE + b][spell_byte(b, pieces[FIRST_BYTE + b])] = 0;
    int n = FIRST_MERGE;
    for (int parent = FIRST_BYTE + ' '; n < vocab; parent++) {
        if (parent > FIRST_BYTE + ' ' && parent < FIRST_BYTE + 'a') parent = FIRST_BYTE + 'a';
        if (parent > FIRST_BYTE + 'z' && parent < FIRST_MERGE) parent = FIRST_MERGE;
        char word[MAX_PIECE];
        int length = (int)strlen(memcpy(word, pieces[parent], MAX_PIECE));
        bool vowel = strchr("aeiou", word[length - 1]) != NULL, letter = islower((unsigned char)word[length - 1]);
        for (char c = 'a'; c <= 'z' && n < vocab; c++) {
            if (letter && (strchr("aeiou", c) != NULL) == vowel) continue;
            /* a vocabulary of millions has words of 9 letters, so none is cut */
            snprintf(pieces[n], MAX_PIECE, "%.*s%c", MAX_PIECE - 4, word, c);
            snprintf(merges[n++], MAX_PIECE, "%.*s %c", MAX_PIECE - 4, word, c);
        }
    }
    bool good = true;
    for (int i = 0; i < vocab; i++) {
        strings[i] = (llm_string){pieces[i], strlen(pieces[i])};
        types[i] = i < FIRST_BYTE ? 3 : 1; /* control, normal */
    }
    good &= llm_writer_string(w, "tokenizer.ggml.model", "gpt2") && llm_writer_string(w, "tokenizer.ggml.pre", "gpt-2");
    good &= llm_writer_string_array(w, "tokenizer.ggml.tokens", strings, (uint64_t)vocab);
    good &= llm_writer_i32_array(w, "tokenizer.ggml.token_type", types, (uint64_t)vocab);
    for (int i = FIRST_MERGE; i < vocab; i++) strings[i] = (llm_string){merges[i], strlen(merges[i])};
    good &= llm_writer_string_array(w, "tokenizer.ggml.merges", strings + FIRST_MERGE, (uint64_t)(vocab - FIRST_MERGE));
    good &= llm_writer_u32(w, "tokenizer.ggml.bos_token_id", 0) && llm_writer_u32(w, "tokenizer.ggml.eos_token_id", 1);
    good &= llm_writer_bool(w, "tokenizer.ggml.add_bos_token", true);
    good &= llm_writer_bool(w, "tokenizer.ggml.add_eos_token", false);
    free(pieces), free(merges), free(strings), free(types);
    return good;
}

static bool synth_metadata(llm_writer *w, const shape *s, llm_type type) {
    const struct { const char *name; int value; } sizes[] = {
        {"llama.vocab_size", s->vocab}, {"llama.context_length", s->context}, {"llama.embedding_length", s->dim},
        {"llama.block_count", s->layers}, {"llama.feed_forward_length", s->hidden}, {"llama.attention.head_count", s->heads},
        {"llama.attention.head_count_kv", s->kv_heads}, {"llama.attention.key_length", s->head_dim},
        {"llama.attention.value_length", s->head_dim}, {"llama.rope.dimension_count", s->head_dim}};
    uint32_t file_type = (uint32_t)llm_type_find(type)->file_type;
    bool good = llm_writer_string(w, "general.architecture", "llama") && llm_writer_string(w, "general.name", s->name);
    good &= llm_writer_string(w, "general.description", "random weights, for benchmarks");
    good &= llm_writer_u32(w, "general.file_type", file_type) && llm_writer_u32(w, "general.quantization_version", 2);
    for (int i = 0; i < COUNT(sizes); i++) good &= llm_writer_u32(w, sizes[i].name, (uint32_t)sizes[i].value);
    good &= llm_writer_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    good &= llm_writer_f32(w, "llama.rope.freq_base", s->rope_base);
    return good && synth_vocabulary(w, s->vocab);
}

/* Rows come out of a pool of packed random values, each from another place of it, since drawing and packing
 * billions of values one by one would take minutes. A place is a multiple of 32 values, or of the type's block. */
typedef struct pool {
    llm_type type;
    bool output;     /* for the embedding and the output matrix */
    uint8_t *data;
    uint64_t place;  /* values from one place to the next */
    uint64_t places; /* a power of two; behind the last one is room for the longest row */
    uint64_t rows;   /* taken so far */
} pool;

/* Weights of mean 0 and deviation 0.02: small enough that activations stay sane in any shape. A sum of three
 * uniform numbers is bell-shaped enough, and the same on every platform. */
static pool make_pool(llm_type type, bool output, uint64_t seed, const shape *s) {
    pool p = {.type = type, .output = output, .place = 32, .places = 256};
    uint64_t longest = (uint64_t)s->heads * (uint64_t)s->head_dim, count;
    float values[256];
    if (llm_type_find(type)->block_values > 32) p.place = (uint64_t)llm_type_find(type)->block_values;
    if ((uint64_t)s->hidden > longest) longest = (uint64_t)s->hidden;
    if ((uint64_t)s->dim > longest) longest = (uint64_t)s->dim;
    while (p.places < (uint64_t)s->vocab && p.places < 1 << 18) p.places *= 2;
    count = (p.places + longest / p.place + 1) * p.place;
    p.data = resize(NULL, row_bytes(type, count));
    for (uint64_t i = 0; i < count; i += p.place) {
        for (uint64_t k = 0; k < p.place; k++) {
            double sum = 0;
            for (uint64_t j = 0; j < 3; j++) sum += llm_random(seed, 0, 3 * (i + k) + j);
            values[k] = (float)(0.02 * 2 * (sum - 1.5));
        }
        llm_pack(type, values, p.data + row_bytes(type, i), (int64_t)p.place);
    }
    return p;
}

typedef struct synth {
    const char *shape_name;
    llm_type type;
    seed_value seed;
    shape shape;
    llm_writer *writer;
    bool declaring; /* the tensors are visited twice: to declare them, then to write them */
    pool *pools;    /* (n_pools) for each type of matrix */
    int n_pools;
    uint64_t done, total; /* bytes */
} synth;

typedef enum tensor_kind { NORM, MATRIX, OUTPUT } tensor_kind;

/* Where the values of a matrix come from, whose type llm_quantize would choose by the length of its rows. */
static pool *pool_for(synth *s, bool output, int64_t cols) {
    llm_type type = llm_quantize_type(s->type, (uint64_t)cols, output);
    int i = 0;
    while (i < s->n_pools && (s->pools[i].type != type || s->pools[i].output != output)) i++;
    if (i == s->n_pools) {
        s->pools = resize(s->pools, (size_t)++s->n_pools * sizeof *s->pools);
        s->pools[i] = make_pool(type, output, s->seed.value + output, &s->shape);
    }
    return &s->pools[i];
}

/* Declare or write one tensor: a matrix (rows, cols), or as a norm a vector of ones. */
static bool synth_tensor(synth *s, tensor_kind kind, const char *prefix, int layer, const char *name, int64_t cols, int64_t rows) {
    pool *from = kind == NORM ? NULL : pool_for(s, kind == OUTPUT, cols);
    char full[64];
    int n = snprintf(full, sizeof full, prefix, layer);
    n += snprintf(full + n, sizeof full - (size_t)n, "%s.weight", name);
    uint64_t dims[2] = {(uint64_t)cols, (uint64_t)rows};
    size_t bytes = row_bytes(from ? from->type : LLM_F32, (uint64_t)cols);
    if (s->declaring) {
        s->total += bytes * (uint64_t)rows;
        return llm_writer_tensor(s->writer, (llm_string){full, (size_t)n}, from ? from->type : LLM_F32, from ? 2 : 1, dims);
    }
    bool good = true;
    const float one = 1;
    for (int64_t i = 0; !from && good && i < cols; i++) good = llm_writer_data(s->writer, &one, sizeof one);
    for (int64_t row = 0; from && good && row < rows && !stop_requested; row++) {
        uint64_t place = from->rows++ * 0x9E3779B97F4A7C15u & (from->places - 1); /* odd factor: all places in turn */
        good = llm_writer_data(s->writer, from->data + row_bytes(from->type, place * from->place), bytes);
        s->done += bytes;
        if (row % 1024 == 0) show_progress("synth", (double)s->done / (double)s->total, full);
    }
    return good;
}

static bool synth_tensors(synth *s) {
    const shape *x = &s->shape;
    int64_t q = (int64_t)x->heads * x->head_dim, kv = (int64_t)x->kv_heads * x->head_dim;
    bool good = synth_tensor(s, OUTPUT, "", 0, "token_embd", x->dim, x->vocab);
    for (int i = 0; good && i < x->layers && !stop_requested; i++) {
        good = synth_tensor(s, NORM, "blk.%d.", i, "attn_norm", x->dim, 1) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "attn_q", x->dim, q) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "attn_k", x->dim, kv) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "attn_v", x->dim, kv) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "attn_output", q, x->dim) &&
               synth_tensor(s, NORM, "blk.%d.", i, "ffn_norm", x->dim, 1) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "ffn_gate", x->dim, x->hidden) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "ffn_up", x->dim, x->hidden) &&
               synth_tensor(s, MATRIX, "blk.%d.", i, "ffn_down", x->hidden, x->dim);
    }
    good = good && synth_tensor(s, NORM, "", 0, "output_norm", x->dim, 1);
    return good && (x->tied || synth_tensor(s, OUTPUT, "", 0, "output", x->dim, x->vocab));
}

static int synth_file(synth *s, const char *path) {
    llm_error err;
    if (!may_write(path, NULL)) return FAILED;
    s->writer = llm_writer_create(path, &err);
    if (!s->writer) return fail_with(&err);
    s->declaring = true;
    bool good = synth_metadata(s->writer, &s->shape, s->type) && synth_tensors(s);
    s->declaring = false;
    if (good) synth_tensors(s);
    show_progress("", -1, "");
    while (s->n_pools) free(s->pools[--s->n_pools].data);
    free(s->pools);
    if (stop_requested) {
        llm_writer_abandon(s->writer);
        return fail("interrupted: %s was not written", path);
    }
    if (!llm_writer_finish(s->writer, &err)) return fail_with(&err);
    put_text(path);
    put(": %s of random weights, %s, %s\n", HUMAN(s->total), s->shape.name, llm_type_find(s->type)->name);
    llm_file *file = llm_file_open(path, &err);
    if (!file) return fail_with(&err);
    put_other_types(file, s->type);
    llm_file_close(file);
    return 0;
}

static int command_synth(const command *self, int argc, char **argv) {
    synth s = {.type = LLM_Q4_0, .seed = {false, 1}};
    const option options[] = {
        {0, "shape", "NAME|SIZES", TEXT, &s.shape_name, 0, 0, "a name from the list below, or sizes"},
        {0, "type", "TYPE", TYPE, &s.type, 0, 0, "of the matrices: q4_0 (default), q4_K, f16 or any other that llm quantize knows"},
        {'s', "seed", "N", SEED, &s.seed, 0, 0, "of the random weights (default 1)"},
    };
    int status = parse(self, options, COUNT(options), &argc, argv, 1);
    if (status != PARSED) return status;
    if (!s.shape_name) return misuse(self, "--shape is missing: a name such as tinyllama-1.1b, or sizes");
    if (argc == 0) return misuse(self, "the file to write is missing");
    const char *wrong = parse_shape(s.shape_name, &s.shape);
    if (wrong && !strchr(s.shape_name, '=')) {
        suggestion near = {s.shape_name, NULL, 0};
        for (int i = 0; i < COUNT(shapes); i++) consider(&near, shapes[i].name);
        if (near.best) return misuse(self, "no shape is named '%s'; did you mean %s?", s.shape_name, near.best);
    }
    if (!wrong) wrong = check_shape(&s.shape);
    if (wrong) return misuse(self, "--shape %s: %s", s.shape_name, wrong);
    return synth_file(&s, argv[0]);
}

static const char synth_notes[] =
    "A model that says nothing sensible, but runs as fast as a real one of its shape, with a vocabulary that decodes. As\n"
    "`llm quantize` does, q4_0 keeps the embedding and the output matrix as q8_0, q4_K as q6_K, and a matrix whose rows\n"
    "are not whole blocks of the type is of another, which is said.\n"
    "\n"
    "Shapes: tales, qwen2.5-0.5b (the sizes of it, without its biases), tinyllama-1.1b, llama-3.2-1b, llama-2-7b,\n"
    "mistral-7b, llama-3.1-8b (both Llama 3 without the stretched frequencies), or sizes, such as\n"
    "dim=256,layers=8,heads=8,kv-heads=4,hidden=768,vocab=4096,context=1024[,head-dim=32][,rope-base=10000][,tied=1];\n"
    "what is left out is as just shown.\n"
    "\n"
    "Examples:\n"
    "  llm synth --shape tinyllama-1.1b --type q4_0 tinyllama.gguf\n"
    "  llm synth --shape dim=512,layers=4,heads=8,kv-heads=2,hidden=1024 --type f16 small.gguf\n";

/* ---- llm lesson, llm ladder: each lesson is a small file beside its page in docs/ --------------- */
#include "docs/lessons.h"

/* ---- The command itself ------------------------------------------------------------------- */
static const command commands[] = {
    {"run", "Continue a prompt.", "[-m FILE] [options] [PROMPT | -f FILE | -]", command_run, run_notes},
    {"chat", "Talk with a model.", "[-m FILE] [options]", command_chat, chat_notes},
    {"batch", "Continue many prompts at once, from a file into a file.", "-f PROMPTS.jsonl [-o RESULTS.jsonl] [-m FILE] [options]",
     command_batch, batch_notes},
    {"demo", "Tell a tale with the bundled model.", "", command_demo, demo_notes},
    {"info", "What a model file holds, how much memory it takes, and what fits.", "[FILE] [options]", command_info, info_notes},
    {"tokenize", "Text to token ids, and back.", "[-m FILE] [options] [TEXT | -f FILE | -]", command_tokenize, tokenize_notes},
    {"perplexity", "How well a model foresees a text: bits per byte, and perplexity.", "[-m FILE] [options] TEXTFILE",
     command_perplexity, perplexity_notes},
    {"quantize", "Rewrite a model's weights in another type.", "IN OUT --type TYPE", command_quantize, quantize_notes},
    {"bench", "Measure prefill and decode, against the memory's speed; or batches, serving, speculation.", "[batch|serve|speculate] [-m FILE] [options]", command_bench, bench_notes},
    {"synth", "Write a model of random weights, of a well-known shape, for benchmarks.", "--shape NAME|SIZES --type TYPE OUT",
     command_synth, synth_notes},
    {"lesson", "Teach one idea, computed live; without a name: which there are.", "[NAME] [options]", command_lesson, lesson_notes},
    {"ladder", "The whole course in one table: from the naive engine to the full one.", "[options]", command_ladder, ladder_notes},
};

static void show_commands(void) {
    put_text("llm " VERSION " - a small LLM inference engine\n\nUsage: llm COMMAND [options]\n\nCommands:\n");
    for (int i = 0; i < COUNT(commands); i++) put("  %-12s %s\n", commands[i].name, commands[i].summary);
    put_text("\n  llm COMMAND --help   the options of a command, with examples\n"
             "  llm --version        the version\n"
             "\nExamples:\n"
             "  llm run \"Once upon a time\"\n"
             "  llm run -m some.gguf -n 100 \"The capital of France is\"\n"
             "  llm info some.gguf\n"
             "\nExit status: 0; 1: it failed or was stopped; 2: it was called wrongly.\n");
}

static int dispatch(int argc, char **argv) {
    if (argc < 2) {
        show_commands();
        return misuse(NULL, "a command is missing");
    }
    const char *name = argv[1];
    bool help = !strcmp(name, "--help") || !strcmp(name, "-h") || !strcmp(name, "help");
    if (!strcmp(name, "--version")) return put_text("llm " VERSION "\n"), 0;
    if (help && argc == 2) return show_commands(), 0;
    char help_option[] = "--help", *help_words[] = {help_option};
    if (help) name = argv[2];
    for (int i = 0; i < COUNT(commands); i++)
        if (!strcmp(name, commands[i].name))
            return help ? commands[i].run(&commands[i], 1, help_words) : commands[i].run(&commands[i], argc - 2, argv + 2);
    suggestion s = {name, NULL, 0};
    for (int i = 0; i < COUNT(commands); i++) consider(&s, commands[i].name);
    const char *what = name[0] == '-' ? "option" : "command";
    if (s.best) return misuse(NULL, "unknown %s '%s'; did you mean '%s'?", what, name, s.best);
    return misuse(NULL, "unknown %s '%s'", what, name);
}

static void request_stop(int signal_number) { stop_requested = signal_number; }

/* Ctrl-C asks once for an orderly end; a second one ends us at once. A reader that went away, or a file that
 * may not grow, is an error of the write, not the end of the process. */
static void set_signals(void) {
    struct sigaction stop = {0}, ignore = {0};
    stop.sa_handler = request_stop;
    stop.sa_flags = (int)SA_RESETHAND;
    ignore.sa_handler = SIG_IGN;
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
    sigaction(SIGXFSZ, &ignore, NULL);
}

int main(int argc, char **argv) {
    int descriptor; /* if one of the standard three is closed, no file of ours may take its number */
    while ((descriptor = open("/dev/null", O_RDONLY)) >= 0 && descriptor <= STDERR_FILENO) continue;
    if (descriptor > STDERR_FILENO) close(descriptor);
    if (argc > 0) program_path = argv[0];
    set_signals();
    chosen.gpu = llm_gpu_defaults();
    chosen.memory_share = llm_engine_defaults().memory_share;
    chosen.isa = LLM_ISA_BEST;
    chosen.pack_weights = true;
    chosen.fusions = LLM_FUSE_ALL;
    int status = dispatch(argc, argv);
    if (!flush_output()) {
        if (output.error != EPIPE) fprintf(stderr, "llm: cannot write to standard output: %s\n", strerror(output.error));
        return FAILED;
    }
    return status;
}
