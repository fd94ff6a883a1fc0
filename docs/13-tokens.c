/* 13-tokens.c - llm lesson tokens: how a word becomes tokens, and how many tokens a text takes. See
 * 13-tokens.md.
 *
 * The lesson joins the bytes of a word in the simplest way: look at all pairs of neighbours, join
 * the pair that was learned first, and repeat. The result must equal that of the engine's
 * tokenizer, which uses a linked list and a heap. */
#include "lesson.h"

enum { TOKENS_LONGEST = 64 };

/* Write the pieces of a word with bars between them, and _ for a space. */
static void tokens_spell(const llm_tokenizer *t, const int32_t *ids, int n, char *out,
                         size_t size) {
    size_t used = 0;
    for (int i = 0; i < n; i++) {
        char piece[64];
        token_text(t, ids[i], piece, sizeof piece);
        for (char *c = piece; *c; c++)
            if (*c == ' ') *c = '_';
        int written = snprintf(out + used, size - used, "%s%s", i ? "|" : "", piece);
        if (written < 0 || (size_t)written >= size - used) return;
        used += (size_t)written;
    }
}

/* Join the bytes of a word in the simplest way, and add a row to the table for each step. Returns
 * the number of tokens. */
static int tokens_by_hand(const llm_tokenizer *t, const char *word, int32_t *ids, table *steps) {
    int n = 0;
    char spelled[64];
    for (; word[n] && n < TOKENS_LONGEST; n++) ids[n] = t->bytes[(unsigned char)word[n]];
    for (int step = 0;; step++) {
        const llm__merge_rule *best = NULL;
        int at = 0;
        for (int i = 0; i + 1 < n; i++) {
            const llm__merge_rule *rule = llm__find_merge(t, ids[i], ids[i + 1]);
            if (rule->rank && (!best || rule->rank < best->rank)) best = rule, at = i;
        }
        tokens_spell(t, ids, n, spelled, sizeof spelled);
        add_row(steps, (double)step, (double)n, best ? (double)best->rank : NAN, spelled);
        if (!best) return n;
        ids[at] = best->result;
        memmove(ids + at + 1, ids + at + 2, (size_t)(n - at - 2) * sizeof *ids);
        n--;
    }
}

static bool tokens_word(lesson *l, const char *word) {
    static const column columns[] = {{"step", "step", "%.0f"},
                                     {"pieces", "pieces", "%.0f"},
                                     {"rank", "rank of the next pair", "%.0f"},
                                     {"word", "word", "%s"}};
    const llm_tokenizer *t = llm_model_tokenizer(l->loaded);
    if (!t->merges) {
        say(l, "(The vocabulary of this model has scores instead of a list of merges: the pair "
               "whose joined text has the highest score is joined first.)\n");
        return true;
    }
    int32_t ids[TOKENS_LONGEST], *real = NULL;
    for (const char *c = word; *c; c++)
        if (t->bytes[(unsigned char)*c] < 0)
            return !fail("--word: this vocabulary has no token for a byte of '%s'", word);
    table steps = new_table(columns, COUNT(columns));
    int n = tokens_by_hand(t, word, ids, &steps);
    llm_error err;
    int64_t n_real = llm_tokenize_new(t, word, strlen(word), 0, &real, &err);
    if (n_real < 0) fail_with(&err);
    bool same = n_real == n && !memcmp(ids, real, (size_t)n * sizeof *ids);
    llm_free(real);
    say(l, "A word, from bytes to tokens (_ is a space). Each step joins the pair of neighbours "
           "that was learned first: the one of lowest rank in the list of merges.\n\n");
    show_table(l, &steps, "steps");
    fact(l, "same_as_the_engine", same);
    say(l, "\nThe engine's tokenizer gives %s.\n\n",
        same ? "the same tokens" : "OTHER TOKENS (it first splits a text into words)");
    return n_real >= 0;
}

static int32_t *tokens_counts; /* for the comparison below; set only during tokens_share */
static int tokens_more(const void *a, const void *b) {
    return tokens_counts[*(const int32_t *)b] - tokens_counts[*(const int32_t *)a];
}

/* The number of tokens, most frequent first, that make up this share of a text. */
static int tokens_share(const int32_t *ids, int64_t n, int32_t size, double share) {
    int32_t *order = resize(NULL, (size_t)size * sizeof *order);
    tokens_counts = resize(NULL, (size_t)size * sizeof *order);
    for (int32_t i = 0; i < size; i++) tokens_counts[i] = 0, order[i] = i;
    for (int64_t i = 0; i < n; i++) tokens_counts[ids[i]]++;
    qsort(order, (size_t)size, sizeof *order, tokens_more);
    int kinds = 0;
    for (double sum = 0; kinds < size && sum < share * (double)n; kinds++)
        sum += tokens_counts[order[kinds]];
    free(order);
    free(tokens_counts);
    tokens_counts = NULL;
    return kinds;
}

/* Add a row and a bar for one text. */
static void tokens_count(const llm_tokenizer *t, const char *name, const char *data, size_t length,
                         table *rows, plot *p) {
    llm_error err;
    int32_t *ids;
    char *back;
    int64_t n = llm_tokenize_new(t, data, length, 0, &ids, &err);
    if (n < 0) { /* the vocabulary lacks a byte */
        add_row(rows, name, (double)length, NAN, NAN, NAN, NAN, "no token");
        return;
    }
    int64_t n_back = llm_detokenize_new(t, ids, n, &back, &err);
    bool same = n_back == (int64_t)length && !memcmp(back, data, length);
    double rate = n ? (double)length / (double)n : 0;
    int32_t size = llm_tokenizer_size(t);
    add_row(rows, name, (double)length, (double)n, rate, (double)tokens_share(ids, n, size, 1),
            (double)tokens_share(ids, n, size, 0.5), same ? "same" : "DIFFERENT");
    plot_category(p, name);
    plot_bar(p, 0, rate);
    llm_free(back);
    llm_free(ids);
}

static bool tokens_texts(lesson *l, const char *own) {
    static const column columns[] = {{"text", "text", "%s"},
                                     {"bytes", "bytes", "%.0f"},
                                     {"tokens", "tokens", "%.0f"},
                                     {"bytes_per_token", "bytes/token", "%.2f"},
                                     {"different", "different", "%.0f"},
                                     {"half", "half", "%.0f"},
                                     {"back", "decoded", "%s"}};
    const struct { const char *name, *text;
    } texts[] = {
        {"tales (eval.txt)", NULL},
        {"modern English", "The committee will publish its quarterly report on broadband "
                           "infrastructure next Thursday."},
        {"German",
         "Der Fischer fuhr jeden Tag auf die See hinaus, und seine Frau war mit nichts zufrieden."},
        {"Greek",
         "\xCE\x9C\xCE\xB9\xCE\xB1 \xCF\x86\xCE\xBF\xCF\x81\xCE\xAC \xCE\xBA\xCE\xB1\xCE\xB9 "
         "\xCE\xAD\xCE\xBD\xCE\xB1\xCE\xBD \xCE\xBA\xCE\xB1\xCE\xB9\xCF\x81\xCF\x8C"},
        {"numbers", "3.14159265358979 2718281828 1999-12-31 192.168.0.1"},
        {"C", "for (int i = 0; i < n; i++) sum += row[i] * row[i];"},
        {"--text", own}};
    const llm_tokenizer *t = llm_model_tokenizer(l->loaded);
    table rows = new_table(columns, COUNT(columns));
    plot p = plot_new(PLOT_BARS, "Bytes per token", "bytes", "");
    plot_note(&p, "The vocabulary comes from tales, so it has long tokens for such text. Other "
                  "text takes more tokens, at worst one for each byte.");
    plot_series_add(&p, "");
    char *path = bundled_path("models/eval.txt");
    text tales = {0};
    if (!path || !read_all(path, &tales)) return plot_free(&p), free(path), false;
    for (int i = 0; i < COUNT(texts); i++) {
        const char *data = i == 0 ? tales.data : texts[i].text;
        if (data)
            tokens_count(t, texts[i].name, data, i == 0 ? tales.length : strlen(data), &rows, &p);
    }
    free(tales.data);
    free(path);
    say(l,
        "The vocabulary has %d tokens. Different: how many of them the text uses; half: how many "
        "make up half of the text, the most frequent first.\n\n",
        llm_tokenizer_size(t));
    show_table(l, &rows, "texts");
    fact(l, "vocabulary", llm_tokenizer_size(t));
    show_plot(l, &p);
    return true;
}

static int lesson_tokenizer(const command *self, int argc, char **argv) {
    lesson l = {.engine = llm_engine_defaults()};
    const char *word = " gingerbread", *own = NULL;
    const option options[] = {
        LESSON_OPTIONS(l),
        {'w', "word", "TEXT", TEXT, &word, 0, 0,
         "the word, usually with a space before it (default \" gingerbread\")"},
        {0, "text", "TEXT", TEXT, &own, 0, 0, "another text for the second table"},
    };
    int status = lesson_begin(&l, self, options, COUNT(options), argc, argv, NULL);
    if (status != PARSED) return status;
    if (!*word || strlen(word) > 24)
        return fail("--word must have 1 to 24 bytes"), lesson_end(&l, false);
    return lesson_end(&l, tokens_word(&l, word) && tokens_texts(&l, own));
}

static const char tokens_notes[] =
    "A vocabulary is learned from texts. A text that resembles them takes few tokens; any other\n"
    "text takes more.\n"
    "\n"
    "Examples:\n"
    "  llm lesson tokens\n"
    "  llm lesson tokens --word \" unbelievable\" --text \"Guten Morgen\"\n";

const command tokens_lesson = {
    "lesson tokens", "How a word becomes tokens; how many tokens a text takes.", "[options]",
    lesson_tokenizer, tokens_notes};
