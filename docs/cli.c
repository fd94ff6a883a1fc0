/* cli.c - implements cli.h */
#ifndef _DEFAULT_SOURCE
#define _DEFAULT_SOURCE
#endif
#include "cli.h"
#include "trace.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <strings.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

const char *program_path = "llm";
volatile sig_atomic_t stop_requested = 0;
device_choice chosen;

/* ---- Signals ----------------------------------------------------------------------------- */

static void request_stop(int signal_number) { stop_requested = signal_number; }

void set_signals(void) {
    struct sigaction stop = {0}, ignore = {0};
    stop.sa_handler = request_stop;
    stop.sa_flags = (int)SA_RESETHAND;
    ignore.sa_handler = SIG_IGN;
    sigaction(SIGINT, &stop, NULL);
    sigaction(SIGTERM, &stop, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
    sigaction(SIGXFSZ, &ignore, NULL);
}

void forget_interrupt(void) {
    stop_requested = 0;
    set_signals();
}

/* ---- Output ---------------------------------------------------------------------------------
 * Standard output has a separate buffer here, so that the first error (disk full, closed pipe) is
 * detected and a long run can stop at it. */
static struct {
    char data[1 << 16];
    size_t length;
} output;

int output_error = 0;
text *captured = NULL;

bool flush_output(void) {
    for (size_t done = 0; done < output.length && !output_error;) {
        ssize_t n = write(STDOUT_FILENO, output.data + done, output.length - done);
        if (n >= 0) done += (size_t)n;
        else if (errno != EINTR) output_error = errno;
    }
    output.length = 0;
    return !output_error;
}

void put_bytes(const char *bytes, size_t n) {
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

void put_text(const char *text) { put_bytes(text, strlen(text)); }

void put(const char *format, ...) {
    char piece[1024];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(piece, sizeof piece, format, arguments);
    va_end(arguments);
    if (n > 0) put_bytes(piece, n < (int)sizeof piece ? (size_t)n : sizeof piece - 1);
}

int fail(const char *format, ...) {
    flush_output();
    fputs("llm: ", stderr);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    return FAILED;
}

words our_words(const llm_error *err) {
    static const struct { const char *field, *option; } names[] = {
        {"backend", "--device"},
        {"block_size", "--block-size"},
        {"cache_bytes", "--cache-memory"},
        {"cache_type", "--cache-type"},
        {"context_length", "--context"},
        {"draft", "--draft"},
        {"max_batch_tokens", "--max-batch-tokens"},
        {"max_sequences", "--max-sequences"},
        {"max_speculation", "--speculate"},
        {"memory_share", "--gpu-memory"},
        {"n_samples", "n"}, /* only llm batch can report this one */
        {"n_threads", "--threads"},
        {"swap_bytes", "--preempt"},
    };
    words out;
    const char *ours = NULL;
    for (int i = 0; err->option && i < COUNT(names); i++)
        if (!strcmp(names[i].field, err->option)) ours = names[i].option;
    if (!ours) snprintf(out.text, sizeof out.text, "%s", err->message);
    else if (err->status == LLM_ERROR_MEMORY)
        snprintf(out.text, sizeof out.text, "%s; see %s", err->message, ours);
    else
        snprintf(out.text, sizeof out.text, "%s%s", ours, err->message + strlen(err->option));
    return out;
}

int fail_with(const llm_error *err) { return fail("%s", our_words(err).text); }

bool is_terminal(int descriptor) {
    const char *term = getenv("TERM");
    return isatty(descriptor) && !(term && !strcmp(term, "dumb"));
}

bool in_colour(int descriptor) {
    const char *no_color = getenv("NO_COLOR");
    return is_terminal(descriptor) && !(no_color && *no_color);
}

void put_foreign(const char *text, size_t length) {
    bool terminal = isatty(STDOUT_FILENO);
    for (size_t i = 0; i < length; i++) {
        unsigned char c = (unsigned char)text[i];
        put_bytes(terminal && (c < 0x20 || c == 0x7F) && c != '\n' && c != '\t' ? "?" : &text[i],
                  1);
    }
}

const char dim[] = "\033[2m", green[] = "\033[32m";

void put_coloured(const char *colour, const char *data, size_t length) {
    bool coloured = in_colour(STDOUT_FILENO);
    if (coloured) put_text(colour);
    put_foreign(data, length);
    if (coloured) put_text("\033[0m");
}

/* Print a progress line for a log, unless the last one (or the first call) was a short time ago. */
static void log_progress(const char *what, double done, const char *note, double now) {
    static double last = 0;
    const char *interval = getenv("LLM_PROGRESS_SECONDS");
    if (last == 0) last = now;
    if (now - last < (interval ? atof(interval) : 10)) return;
    last = now;
    if (isnan(done)) fprintf(stderr, "%s: %s\n", what, note);
    else fprintf(stderr, "%s: %.0f %%%s%s\n", what, 100 * done, *note ? ", " : "", note);
}

void show_progress(const char *what, double done, const char *note) {
    static double last = 0;
    double now = llm_seconds();
    if (!(done < 0) && now - last < 0.1) return;
    last = now;
    if (!is_terminal(STDERR_FILENO)) {
        if (!(done < 0)) log_progress(what, done, note, now);
    } else if (done < 0) {
        fputs("\r\033[K", stderr);
    } else if (isnan(done)) {
        fprintf(stderr, "\r%s: %s\033[K", what, note);
    } else {
        int filled = (int)(30 * (done < 1 ? done : 1));
        fprintf(stderr, "\r%s [%.*s%.*s] %3.0f %%  %s\033[K", what, filled,
                "##############################", 30 - filled, "..............................",
                100 * done, note);
    }
    fflush(stderr);
}

/* ---- Memory, text and files -------------------------------------------------------------- */
void *resize(void *memory, size_t bytes) {
    memory = realloc(memory, bytes ? bytes : 1);
    if (!memory) exit(fail("out of memory: %s", HUMAN(bytes)));
    return memory;
}

void append(text *t, const char *bytes, size_t n) {
    if (t->length + n > t->capacity)
        t->data = resize(t->data, t->capacity = 2 * t->capacity + n + 64);
    if (n) memcpy(t->data + t->length, bytes, n);
    t->length += n;
}

bool read_all(const char *path, text *t) {
    bool standard = !strcmp(path, "-");
    int file = standard ? STDIN_FILENO : open(path, O_RDONLY);
    char part[1 << 14];
    ssize_t n = file < 0 ? -1 : 0;
    int error = errno;
    while (file >= 0 && ((n = read(file, part, sizeof part)) > 0 ||
                         (n < 0 && errno == EINTR && !stop_requested)))
        if (n > 0) append(t, part, (size_t)n);
    if (file >= 0) error = errno;
    if (file >= 0 && !standard) close(file);
    const char *why = stop_requested ? "interrupted" : strerror(error);
    if (n < 0) fail("cannot read %s: %s", standard ? "standard input" : path, why);
    return n >= 0;
}

enum { LONGEST_LINE = 1 << 28 };

line_state next_line(line_reader *r, bool may_wait, const char **line, size_t *length) {
    for (size_t searched = 0;;) {
        text *b = &r->buffer;
        char *start = b->data + r->at,
             *newline = b->length > r->at
                            ? memchr(start + searched, '\n', b->length - r->at - searched)
                            : NULL;
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

bool temporary_file(char *name, size_t size) {
    const char *folder = getenv("TMPDIR");
    if (!folder || !*folder) folder = "/tmp";
    snprintf(name, size, "%s/llm-XXXXXX", folder);
    int descriptor = mkstemp(name);
    if (descriptor < 0)
        return !fail("cannot create a file in %s: %s (set TMPDIR to another folder)", folder,
                     strerror(errno));
    close(descriptor);
    return true;
}

/* The writer renames a new file to `out`, so `out` must be a plain file. */
bool may_write(const char *out, const char *in) {
    struct stat a, b;
    if (stat(out, &a) != 0) return true; /* the writer reports an error if it cannot create it */
    if (!S_ISREG(a.st_mode)) fail("%s is not a plain file: give the path of a file to write", out);
    else if (in && stat(in, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
        fail("input and output are the same file, %s: give another path to write to", out);
    else return true;
    return false;
}

/* The path in the current folder, or beside the executable. */
char *bundled_path(const char *name) {
    text path = {0};
    char self[4096];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    const char *executable = n > 0 ? self : program_path, *slash = strrchr(executable, '/');
    if (access(name, R_OK) != 0 && slash)
        append(&path, executable, (size_t)(slash - executable) + 1);
    append(&path, name, strlen(name) + 1);
    if (access(path.data, R_OK) == 0) return path.data;
    free(path.data);
    fail("the bundled %s is not here: run llm in the folder that has it, or give -m FILE", name);
    return NULL;
}

char *model_path(const char *given) {
    text path = {0};
    if (!given) return bundled_path(DEFAULT_MODEL);
    append(&path, given, strlen(given) + 1);
    return path.data;
}

const char *human_bytes(double bytes, char *buffer, size_t size) {
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    while (bytes >= 1024 && unit < 4) bytes /= 1024, unit++;
    snprintf(buffer, size, unit ? "%.1f %s" : "%.0f %s", bytes, units[unit]);
    return buffer;
}

/* ---- JSON -------------------------------------------------------------------------------- */
int utf8_length(const unsigned char *s, size_t n) {
    if (s[0] < 0x80) return 1;
    int length = s[0] >= 0xF5 ? 0 : s[0] >= 0xF0 ? 4 : s[0] >= 0xE0 ? 3 : s[0] >= 0xC2 ? 2 : 0;
    if (length == 0 || (size_t)length > n) return 0;
    for (int i = 1; i < length; i++)
        if ((s[i] & 0xC0) != 0x80) return 0;
    bool overlong = (s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xF0 && s[1] < 0x90);
    bool surrogate = s[0] == 0xED && s[1] >= 0xA0, beyond = s[0] == 0xF4 && s[1] >= 0x90;
    return overlong || surrogate || beyond ? 0 : length;
}

void put_json(const char *data, size_t length) {
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

void put_json_text(const char *t) { put_json(t, strlen(t)); }

void put_number(double x) {
    if (isfinite(x)) put("%.10g", x);
    else put_text("null");
}

void put_ids(const int32_t *ids, int64_t n) {
    put_text("[");
    for (int64_t i = 0; i < n; i++) put(i ? ", %d" : "%d", ids[i]);
    put_text("]");
}

const char *skip_space(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) p++;
    return p;
}

bool json_ids(const llm_json_node *array, int32_t **ids, int64_t *n) {
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

/* ---- Options ----------------------------------------------------------------------------- */
/* Levenshtein distance: the fewest letters to insert, delete or replace. */
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

void consider(suggestion *s, const char *name) {
    int distance = edit_distance(s->typed, name), limit = ((int)strlen(name) + 1) / 2;
    bool begins = strlen(s->typed) > 1 && !strncmp(s->typed, name, strlen(s->typed));
    if (begins) distance = 0;
    if (distance > 3 || distance > limit || (s->best && distance >= s->distance)) return;
    s->best = name;
    s->distance = distance;
}

int misuse(const command *self, const char *format, ...) {
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

/* Print words up to column 80; further lines begin at column `indent`. */
static void put_wrapped(const char *words, int indent) {
    for (int column = indent; *words; words += *words == ' ') {
        int n = (int)strcspn(words, " ");
        if (column > indent && column + 1 + n > 80) put("\n%*s", indent, ""), column = indent;
        if (column > indent) put_text(" "), column++;
        put_bytes(words, (size_t)n);
        words += n;
        column += n;
    }
    put_text("\n");
}

static void show_help(const command *self, const option *options, int n) {
    enum { LEFT = 26 }; /* width of the column of options and their arguments */
    put("Usage: llm %s %s\n\n", self->name, self->usage);
    put_text(self->summary);
    put_text("\n\nOptions:\n");
    for (int i = 0; i < n; i++) {
        const option *o = &options[i];
        char left[64];
        snprintf(left, sizeof left, o->letter ? "-%c, --%s %s" : "%c   --%s %s",
                 o->letter ? o->letter : ' ', o->name, o->argument ? o->argument : "");
        size_t n = strlen(left) - !o->argument;
        put(n > LEFT ? "  %.*s\n%*s" : "  %.*s%*s", (int)n, left,
            LEFT + 3 - (n > LEFT ? 0 : 2 + (int)n), "");
        put_wrapped(o->help, LEFT + 3);
    }
    put("  %-*s print this text\n\n", LEFT, "    --help");
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

bool parse_list(const char *s, double low, double high, int_list *list) {
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

/* Parse "10-500", or one number for both ends. */
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

/* The index of a word in `words`, where | separates the words; -1: not found. */
static int find_choice(const char *words, const char *s) {
    for (int i = 0;; i++, words++) {
        size_t n = strcspn(words, "|");
        if (strlen(s) == n && !strncasecmp(words, s, n)) return i;
        words += n;
        if (!*words) return -1;
    }
}

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

bool parse_value(const option *o, const char *s) {
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
        double x = strtod(s, &end); /* accepts 1e9 as a whole number */
        bool good = end > s && !*end && x >= o->low && x <= o->high && x == floor(x);
        good = good && !s[strcspn(s, "xXpP")]; /* refuse hexadecimal numbers */
        *(int *)o->value = good ? (int)x : 0;
        return good;
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
        if (*end == '.' || *end == 'e' || *end == 'E') { /* this form may also be a whole number */
            double x = strtod(s, &end);
            seed->value = x < 0x1p63 ? (uint64_t)x : 0;
            if (x != floor(x) || x >= 0x1p63) return false;
        }
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

const char *wanted(const option *o, char *buffer, size_t size) {
    switch (o->kind) {
    case WHOLE: snprintf(buffer, size, "a whole number from %.0f to %.0f", o->low, o->high); break;
    case DEPTH:
        snprintf(buffer, size, "a whole number from %.0f to %.0f, or auto", o->low, o->high);
        break;
    case REAL: snprintf(buffer, size, "a number from %g to %g", o->low, o->high); break;
    case SEED: snprintf(buffer, size, "a whole number from 0 to 18446744073709551615"); break;
    case SIZE: snprintf(buffer, size, "a size such as 512M or 8G"); break;
    case LIST:
        snprintf(buffer, size, "whole numbers from %.0f to %.0f with commas between them", o->low,
                 o->high);
        break;
    case RANGE:
        snprintf(buffer, size, "a whole number, or two of them as LOW-HIGH, from %.0f to %.0f",
                 o->low, o->high);
        break;
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

static const option *find_option(const option *options, int n, const char *name, size_t length,
                                 char letter) {
    for (int i = 0; i < n; i++) {
        bool named = strlen(options[i].name) == length && !strncmp(options[i].name, name, length);
        if (letter ? options[i].letter == letter : named) return &options[i];
    }
    return NULL;
}

int parse(const command *self, const option *options, int n_options, int *argc, char **argv,
          int max_arguments) {
    int n = 0;
    bool options_end = false;
    for (int i = 0; i < *argc; i++) {
        char *word = argv[i];
        if (options_end || word[0] != '-' || !word[1]) {
            if (n == max_arguments)
                return misuse(
                    self, "one argument too many: '%s' (a text or a path with spaces needs quotes)",
                    word);
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
        if (!spelt && word[2])
            return misuse(self, "unknown option %s (options of more than one letter begin with --)",
                          word);
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
        if (!value)
            return misuse(self, "--%s needs a value: --%s %s", o->name, o->name, o->argument);
        if (!parse_value(o, value))
            return misuse(self, "--%s needs %s, not '%s'", o->name, WANTED(o), value);
    }
    *argc = n;
    return PARSED;
}

/* ---- Models and engines ------------------------------------------------------------------ */
int check_speculation(const command *self, const speculation *s) {
    if (s->path && s->lookup) return misuse(self, "give only one of --draft and --lookup");
    if (s->depth != NO_DEPTH && s->depth != 0 && !s->path && !s->lookup)
        return misuse(self,
                      "--speculate needs something to propose tokens: --draft FILE, or --lookup");
    if (s->branches > 1 && !s->path && !s->lookup)
        return misuse(self, "--branches needs something to propose tokens: --draft FILE, or "
                            "--lookup");
    return PARSED;
}

void apply_speculation(const speculation *s, llm_engine_options *engine, llm_request *request) {
    bool wanted = s->path || s->lookup;
    request->lookup = s->lookup;
    request->branches = s->branches;
    request->speculate = s->depth != NO_DEPTH ? s->depth : wanted ? LLM_SPECULATE_AUTO : 0;
    if (s->depth > engine->max_speculation) engine->max_speculation = s->depth;
}

bool load_models(const char *path, const char *draft_path, llm_model **model, llm_model **draft) {
    llm_error err;
    *draft = NULL;
    if (!(*model = llm_model_load(path, &err))) return !fail_with(&err);
    if (draft_path && !(*draft = llm_model_load(draft_path, &err))) return !fail_with(&err);
    return true;
}

llm_backend *open_device(const llm_engine_options *options, llm_error *err) {
    static const char *const names[] = {"auto", "cpu", "cuda", "emulated"};
    llm_engine_options o = *options;
    o.max_isa = (llm_isa)chosen.isa;
    o.pack_weights = chosen.pack_weights;
    /* 1 GiB only: all of it is filled, to expose reads of uninitialized memory. */
    if (chosen.device == DEVICE_EMULATED) setenv("LLM_EMU_MEMORY", "1073741824", 0);
    llm_backend *device = llm_backend_open(names[chosen.device], &o, &chosen.gpu, err);
    if (device && err->message[0] && !chosen.quiet)
        fprintf(stderr, "%s; using the CPU\n", err->message);
    llm_device_state state = {0};
    if (device && device->state) device->state(device->context, &state);
    if (state.distrusted && !chosen.quiet)
        fprintf(stderr, "[%s: wrong results, so other kernels are used: %s]\n", state.name,
                state.distrusted);
    return device;
}

void print_host_time(const llm_statistics *s) {
    if (s->device_launches + s->device_replays == 0 || s->steps == 0) return;
    fprintf(stderr, "; a step took %.0f us of the CPU, %.1f launches and %.2f graphs",
            1e6 * (s->step_seconds - s->wait_seconds) / (double)s->steps,
            (double)s->device_launches / (double)s->steps,
            (double)s->device_replays / (double)s->steps);
}

/* Print how an engine's memory on the device is used. */
static void print_memory(const llm_engine *engine, const llm_backend *backend) {
    llm_statistics s = llm_engine_statistics(engine);
    llm_device_state state;
    if (!backend->state) return;
    backend->state(backend->context, &state);
    uint64_t known = s.weight_bytes + s.cache_bytes + s.arena_bytes,
             used = state.total_bytes - state.free_bytes;
    fprintf(stderr, "[%s: %s of memory: ", state.name, HUMAN(state.total_bytes));
    fprintf(stderr, "%s of weights, ", HUMAN(s.weight_bytes));
    fprintf(stderr, "%s of cache (%lld blocks of %d tokens), ", HUMAN(s.cache_bytes),
            (long long)s.blocks_total, s.block_size);
    fprintf(stderr, "%s of activations, ", HUMAN(s.arena_bytes));
    fprintf(stderr, "%s of other things, ", HUMAN(used > known ? used - known : 0));
    fprintf(stderr, "%s free]\n", HUMAN(state.free_bytes));
}

llm_engine *create_engine(const llm_model *model, const llm_engine_options *options,
                          llm_error *err) {
    llm_engine_options o = *options;
    o.memory_share = chosen.memory_share;
    o.host_sampling = chosen.host_sampling;
    o.fusions &= chosen.fusions;
    o.backend = open_device(&o, err);
    if (!o.backend) return NULL;
    llm_engine *engine = llm_engine_create(model, &o, err);
    if (engine && !chosen.quiet) print_memory(engine, o.backend);
    if (!engine) llm_backend_free(o.backend);
    return engine;
}

void free_engine(llm_engine *engine) {
    llm_backend *device = engine ? llm_engine_settings(engine)->backend : NULL;
    llm_engine_free(engine);
    llm_backend_free(device);
}

int check_trace_name(const command *self, const char *path) {
    if (!path || (*path && strcmp(path, "-"))) return PARSED;
    return misuse(self, "--trace needs the name of a file: standard output is for the text");
}

bool check_trace(const char *path, const char *output) {
    struct stat a, b;
    char first = '[';
    if (!path || stat(path, &a) != 0) return true;
    if (output && stat(output, &b) == 0 && a.st_dev == b.st_dev && a.st_ino == b.st_ino)
        return !fail("--trace and the output are the same file, %s: give another path to write to",
                     path);
    FILE *file = S_ISREG(a.st_mode) ? fopen(path, "r") : NULL;
    if (file && fread(&first, 1, 1, file) == 0) first = '[';
    if (file) fclose(file);
    return first == '[' ||
           !fail("%s exists and is not a trace: give another path to write to", path);
}

bool open_trace(trace_writer **trace, const char *path, llm_engine_options *options) {
    *trace = NULL;
    if (!path) return true;
    *trace = resize(NULL, sizeof **trace);
    int error = trace_open(*trace, path);
    if (error) {
        free(*trace);
        *trace = NULL;
        return !fail("cannot write to %s: %s", path, strerror(error));
    }
    options->trace = trace_write;
    options->trace_user = *trace;
    return true;
}

void trace_engine(trace_writer *trace, const llm_engine *engine) {
    if (trace) trace->blocks_total = llm_engine_statistics(engine).blocks_total;
}

bool close_trace(trace_writer *trace, const char *path) {
    int error = trace ? trace_close(trace) : 0;
    free(trace);
    return !error || !fail("cannot write to %s: %s", path, strerror(error));
}

double acceptance(const llm_statistics *s) {
    return s->proposed ? (double)s->accepted / (double)s->proposed : 0;
}
double tokens_per_step(const llm_statistics *s) {
    return s->decode_steps ? (double)s->generated_tokens / (double)s->decode_steps : 0;
}

void print_speculation(const llm_statistics *s) {
    fprintf(stderr, "; %.0f %% of %llu proposals accepted, %.2f tokens a step", 100 * acceptance(s),
            (unsigned long long)s->proposed, tokens_per_step(s));
}

uint64_t chance_seed(void) {
    return ((uint64_t)(llm_seconds() * 1e6) ^ (uint64_t)getpid() << 12 ^ (uint64_t)time(NULL)) %
           1000000;
}

int64_t prompt_ids(const llm_tokenizer *t, const text *words, bool special, int32_t **ids) {
    unsigned flags = LLM_TOKENIZE_BOS | (special ? LLM_TOKENIZE_SPECIAL : 0);
    llm_error err;
    int64_t n = llm_tokenize_new(t, words->data, words->length, flags, ids, &err);
    if (n < 0) fail_with(&err);
    if (n == 0 && llm_tokenizer_bos(t) >= 0) (*ids)[n++] = llm_tokenizer_bos(t);
    return n;
}

sample *make_samples(int n) {
    sample *samples = resize(NULL, (size_t)n * sizeof *samples);
    memset(samples, 0, (size_t)n * sizeof *samples);
    return samples;
}

void free_samples(sample *samples, int n) {
    for (int i = 0; samples && i < n; i++) {
        free(samples[i].text.data);
        free(samples[i].tokens);
    }
    free(samples);
}

void take_event(sample *s, const llm_event *event) {
    append(&s->text, event->text, event->text_length);
    if (event->finish != LLM_FINISH_NONE) s->finish = event->finish;
    if (event->error) snprintf(s->error, sizeof s->error, "%s", event->error);
    if (event->token < 0) return;
    if ((s->n_tokens & (s->n_tokens - 1)) == 0)
        s->tokens =
            resize(s->tokens, (size_t)(s->n_tokens ? 2 * s->n_tokens : 1) * sizeof *s->tokens);
    s->tokens[s->n_tokens++] =
        (generated_token){event->token, event->logprob, event->accepted, s->text.length};
}

/* ---- The memory's bandwidth -----------------------------------------------------------------
 * Generating one token reads all weights once, with little arithmetic for each. So the speed of the
 * memory is the limit, and a run is rated by the share of that speed that it reached. */

/* Measure the bandwidth with a buffer larger than the caches. */
double measure_bandwidth(int threads) {
    enum { PARTS = 64, WORDS = (256 << 20) / 8 / PARTS }; /* 4 MiB each, shared by the threads */
    enum { RUNS = 8, RUN = WORDS / RUNS }; /* read in turn: a single stream is slower */
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
            if (sweep == 0) memset(p, part, WORDS * sizeof *p); /* allocates the pages */
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

double engine_bandwidth(const llm_engine *engine) {
    int threads = llm_cpu_threads(llm_engine_settings(engine)->backend);
    return threads ? measure_bandwidth(threads) : 0;
}

uint64_t tensor_values(const llm_tensor *t) {
    return t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
}

type_sum sum_type(const llm_file *file, const llm_type_info *type) {
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

double bits_per_value(uint64_t bytes, uint64_t values) {
    return values ? 8.0 * (double)bytes / (double)values : 0;
}

void put_type_sum(const char *name, type_sum sum) {
    put("  %-6s %5llu tensors %15llu values %12s, %7.4g bits each\n", name,
        (unsigned long long)sum.tensors, (unsigned long long)sum.values, HUMAN(sum.bytes),
        bits_per_value(sum.bytes, sum.values));
}

size_t row_bytes(llm_type type, uint64_t values) {
    const llm_type_info *info = llm_type_find(type);
    return (size_t)(values / (uint64_t)info->block_values) * (size_t)info->block_bytes;
}

double processor_cache(void) {
#ifdef __GLIBC__
    long third = sysconf(_SC_LEVEL3_CACHE_SIZE), second = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return third > 0 ? (double)third : second > 0 ? (double)second : 0;
#else
    return 0;
#endif
}

uint64_t hash_bytes(uint64_t hash, const char *data, size_t n) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)data[i]) * 0x100000001B3u;
    return hash;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double median(double *x, int n) {
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

double percentile(double *x, int n, double p) {
    if (n == 0) return NAN;
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    int rank = (int)ceil(p * n);
    return x[rank > 0 ? rank - 1 : 0];
}
