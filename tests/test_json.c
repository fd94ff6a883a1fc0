/* The JSON reader (llm_json_...): it accepts exactly what RFC 8259 allows, and an error names the
 * line and column of the mistake. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <locale.h>

#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "llm.h"

static llm_json parse(const char *text) {
    llm_json json;
    llm_error err;
    if (!llm_json_parse(&json, text, strlen(text), "text", &err))
        fail_msg("%s: %s", text, err.message);
    return json;
}

/* The reader must refuse the text with an error that names `place` and contains `why`, and must
 * leave no memory allocated. */
static void refuse(const char *text, size_t n, const char *place, const char *why) {
    long live = test_live;
    llm_json json;
    llm_error err;
    char where[64];
    memset(&err, 0, sizeof err);
    if (llm_json_parse(&json, text, n, "text", &err)) fail_msg("accepted: %.*s", (int)n, text);
    assert_int_equal(err.status, LLM_ERROR_FORMAT);
    snprintf(where, sizeof where, "text, %s: ", place);
    if (strncmp(err.message, where, strlen(where)) || !strstr(err.message, why))
        fail_msg("%.*s: %s", (int)n, text, err.message);
    assert_int_equal(test_live, live);
}

static void check_string(const char *text, const char *expected, size_t n) {
    llm_json json = parse(text);
    llm_string s;
    assert_true(llm_json_string(json.nodes, &s));
    assert_int_equal(s.length, n);
    assert_memory_equal(s.data, expected, n);
    llm_json_free(&json);
}

static void test_values(void **state) {
    (void)state;
    llm_json json = parse(" {\"a\": [1, -2.5e3, true, false, null, \"x\"],\r\n\t\"b\": {}, "
                          "\"c\" : [ ], \"\": {\"d\": {\"e\": 7}}} \n");
    const llm_json_node *root = json.nodes, *a = llm_json_member(root, "a");
    assert_int_equal(root->length, 4);
    assert_int_equal(a->length, 6);
    int64_t i = 0;
    double d = 0;
    bool flag = false;
    const llm_json_node *e = llm_json_first(a);
    assert_true(llm_json_i64(e, &i) && i == 1);
    e = llm_json_next(a, e);
    assert_true(llm_json_f64(e, &d) && d == -2500 && !llm_json_i64(e, &i));
    e = llm_json_next(a, e);
    assert_true(llm_json_bool(e, &flag) && flag);
    e = llm_json_next(a, e);
    assert_true(llm_json_bool(e, &flag) && !flag);
    e = llm_json_next(a, e);
    assert_true(llm_json_has_kind(e, LLM_JSON_NULL) && !llm_json_bool(e, &flag));
    e = llm_json_next(a, e);
    assert_true(llm_json_is(e, "x") && !llm_json_is(e, "xy") && !llm_json_is(e, ""));
    assert_null(llm_json_next(a, e));
    assert_null(llm_json_first(llm_json_member(root, "b")));
    assert_null(llm_json_first(llm_json_member(root, "c")));
    assert_null(llm_json_member(root, "d"));
    assert_null(llm_json_member(a, "d"));
    e = llm_json_member(llm_json_member(llm_json_member(root, ""), "d"), "e");
    assert_true(llm_json_i64(e, &i) && i == 7);
    assert_null(llm_json_member(llm_json_member(llm_json_member(root, "x"), "d"), "e"));
    const char *const keys[] = {"a", "b", "c", ""};
    int n = 0;
    for (const llm_json_node *v = llm_json_first(root); v; v = llm_json_next(root, v), n++) {
        llm_string key = llm_json_key(v);
        assert_int_equal(key.length, strlen(keys[n]));
        assert_memory_equal(key.data, keys[n], key.length);
    }
    assert_int_equal(n, 4);
    llm_json_free(&json);
}

static void test_strings(void **state) {
    (void)state;
    check_string("\"\"", "", 0);
    check_string("\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", "\"\\/\b\f\n\r\t", 8);
    check_string("\"\\u0041\\u00e9\\u20AC\\uD83D\\uDe00\\u0000z\"",
                 "A\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\0z", 12);
    check_string("\"\\uFFFF\\u07FF\\u0800\\uDBFF\\uDFFF\"",
                 "\xEF\xBF\xBF\xDF\xBF\xE0\xA0\x80\xF4\x8F\xBF\xBF", 12);
    check_string("\"\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80 \x7F\"",
                 "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80 \x7F", 13);
}

static void test_invalid_texts(void **state) {
    (void)state;
    static const struct {
        const char *text, *place, *why;
    } cases[] = {
        {"", "line 1, column 1", "ends where a value"},
        {"  \n ", "line 2, column 2", "ends where a value"},
        {"[1,]", "line 1, column 4", "']' where a value"},
        {"[,1]", "line 1, column 2", "a value"},
        {"[1 2]", "line 1, column 4", "',' or ']'"},
        {"[1", "line 1, column 3", "',' or ']'"},
        {"[1}", "line 1, column 3", "',' or ']'"},
        {"{\"a\":1,}", "line 1, column 8", "a key in quotation marks"},
        {"{a:1}", "line 1, column 2", "a key"},
        {"{\"a\" 1}", "line 1, column 6", "':'"},
        {"{\"a\":}", "line 1, column 6", "a value"},
        {"{\"a\":1", "line 1, column 7", "',' or '}'"},
        {"{\n \"a\":1,\n \"b\":2,\n \"a\":3}", "line 4, column 3", "\"a\" occurs twice"},
        {"{\"\\u0061\":1,\"a\":2}", "line 1, column 14", "twice"},
        {"1 1", "line 1, column 3", "the end"},
        {"[] x", "line 1, column 4", "the end"},
        {"nul", "line 1, column 1", "a value"},
        {"True", "line 1, column 1", "a value"},
        {"NaN", "line 1, column 1", "a value"},
        {"-Infinity", "line 1, column 2", "a digit"},
        {"+1", "line 1, column 1", "a value"},
        {".5", "line 1, column 1", "a value"},
        {"1.", "line 1, column 3", "a digit"},
        {"01", "line 1, column 1", "begin with a 0"},
        {"-01", "line 1, column 2", "begin with a 0"},
        {"1e", "line 1, column 3", "a digit"},
        {"1e+", "line 1, column 4", "a digit"},
        {"0x10", "line 1, column 2", "the end"},
        {"'a'", "line 1, column 1", "a value"},
        {"/* */1", "line 1, column 1", "a value"},
        {"\"abc", "line 1, column 1", "does not end"},
        {"\"abc\\", "line 1, column 6", "an escape"},
        {"\"a\\x\"", "line 1, column 4", "an escape"},
        {"\"\\u12G4\"", "line 1, column 6", "hexadecimal"},
        {"\"\\u12", "line 1, column 6", "hexadecimal"},
        {"\"\\uD800\"", "line 1, column 2", "surrogate"},
        {"\"\\uDC00\"", "line 1, column 2", "surrogate"},
        {"\"\\uD800\\u0041\"", "line 1, column 2", "surrogate"},
        {"\"\\uD800\\n\"", "line 1, column 2", "surrogate"},
        {"\"\\uD800\\uD801\"", "line 1, column 2", "surrogate"},
        {"\"\\uD800\\uE000\"", "line 1, column 2", "surrogate"},
        {"\"a\nb\"", "line 1, column 3", "control character 10"},
        {"\"\xC3\xA9\xFF\"", "line 1, column 3", "0xFF is not valid UTF-8"},
        {"\"\xC0\x80\"", "line 1, column 2", "UTF-8"},
        {"\"\xED\xA0\x80\"", "line 1, column 2", "UTF-8"},
        {"\"\xF4\x90\x80\x80\"", "line 1, column 2", "UTF-8"},
        {"\"\xE2\x82", "line 1, column 2", "UTF-8"},
        {"\xEF\xBB\xBF{}", "line 1, column 1", "a value"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refuse(cases[i].text, strlen(cases[i].text), cases[i].place, cases[i].why);
    refuse("1\0", 2, "line 1, column 2", "the end");
    refuse("\"\0\"", 3, "line 1, column 2", "control character 0");
}

static void test_numbers(void **state) {
    (void)state;
    static const char *const texts[] = {"0", "-0", "1", "-1", "10000.0", "1e-05", "1e-5", "1E+2",
                                        "0.07", "1.0e-06", "500000.0", "1000000",
                                        "3.141592653589793", "1.7976931348623157e308",
                                        "2.2250738585072014e-308", "123456789012345678901234567890",
                                        "0.000000000000000000000000001",
                                        "0.1234567890123456789012345", "12345678901234567890.12345",
                                        "9007199254740993", "1e22", "1e23", "8.0", "0.1",
                                        "-12.5e-1", "0e999999999999", "1e-999999999"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        llm_json json = parse(texts[i]);
        double d = 12345, expected = strtod(texts[i], NULL);
        assert_true(llm_json_f64(json.nodes, &d));
        if (fabs(d - expected) > 2.3e-16 * fabs(expected))
            fail_msg("%s is read as %.17g", texts[i], d);
        llm_json_free(&json);
    }
    static const struct {
        const char *text;
        bool whole;
        int64_t value;
    } wholes[] = {{"9223372036854775807", true, INT64_MAX},
                  {"-9223372036854775808", true, INT64_MIN},
                  {"9223372036854775808", false, 0},
                  {"-9223372036854775809", false, 0},
                  {"99999999999999999999999", false, 0},
                  {"8.0", false, 0},
                  {"1e3", false, 0},
                  {"-0", true, 0}};
    for (size_t i = 0; i < sizeof wholes / sizeof *wholes; i++) {
        llm_json json = parse(wholes[i].text);
        int64_t x = 0;
        uint64_t u = 0;
        assert_int_equal(llm_json_i64(json.nodes, &x), wholes[i].whole);
        assert_true(x == wholes[i].value);
        assert_int_equal(llm_json_u64(json.nodes, &u), wholes[i].whole && wholes[i].value >= 0);
        llm_json_free(&json);
    }
    llm_json json = parse("1e309");
    double d;
    assert_false(llm_json_f64(json.nodes, &d));
    llm_json_free(&json);
}

static void test_nesting_limit(void **state) {
    (void)state;
    char text[4096];
    for (int depth = 63; depth <= 65; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        if (depth <= 64) {
            text[2 * depth] = 0;
            llm_json json = parse(text);
            assert_int_equal(json.n_nodes, depth);
            llm_json_free(&json);
        } else refuse(text, (size_t)(2 * depth), "line 1, column 65", "more than 64");
    }
    memset(text, '[', sizeof text); /* a text of opening brackets only */
    refuse(text, sizeof text, "line 1, column 65", "more than 64");
    /* the limit is on depth: the number of arrays side by side is not limited */
    bytes b = {0};
    put(&b, "[", 1);
    for (int i = 0; i < 1000; i++) put(&b, "[[]],", 5);
    put(&b, "[]]", 3);
    llm_json json;
    llm_error err;
    assert_true(llm_json_parse(&json, (const char *)b.data, b.length, "text", &err));
    assert_int_equal(json.nodes->length, 1001);
    llm_json_free(&json);
    clear_bytes(&b);
}

/* llm_json_offset returns where each value begins in the text, also after strings with escapes.
 * Errors in a text without a name give the column alone. An absent value (NULL) is accepted
 * everywhere. */
static void test_offsets(void **state) {
    static const char text[] = "{\"a\\n\": [null, \"\\u00e9\", true], \"b\": -1, \"c\": {}}";
    static const char *const values[] = {"{\"a", "[null", "null", "\"\\u00e9", "true]", "-1", "{}"};
    int n = 0;
    llm_error err;
    int64_t x;
    (void)state;
    llm_json json = parse(text);
    for (const llm_json_node *v = json.nodes; v < json.nodes + json.n_nodes; v++) {
        bool key = v == json.nodes + 1 || v == json.nodes + 6 || v == json.nodes + 8;
        const char *at = text + llm_json_offset(&json, v);
        if (key) assert_true(*at == '"');
        else assert_memory_equal(at, values[n], strlen(values[n]));
        n += !key;
    }
    assert_int_equal(n, 7);
    llm_json_free(&json);
    assert_false(llm_json_parse(&json, "[1, 2", 5, NULL, &err));
    assert_string_equal(err.message, "column 6: the text ends where ',' or ']' should be");
    assert_false(llm_json_parse(&json, NULL, 7, NULL, &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_true(!llm_json_first(NULL) && !llm_json_next(NULL, NULL) && !llm_json_i64(NULL, &x));
    assert_true(!llm_json_member(NULL, "a") && !llm_json_is(NULL, ""));
    assert_true(llm_json_parse(&json, "1", 1, NULL, &err) && err.status == LLM_OK);
    llm_json_free(&json);
}

/* Each allocation fails once: the reader reports the error and leaves no memory allocated. */
static void test_failed_allocations(void **state) {
    (void)state;
    static const char text[] = "{\"a\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,"
                               "23,24,25,26,27,28,29,30,31,32,33,34,35,36,37,38,39,40,41,42,43,44,"
                               "45,46,47,48,49,50,51,52,53,54,55,56,57,58,59,60,61,62,63,64,65],"
                               "\"b\":2}";
    long live = test_live;
    for (int i = 0;; i++) {
        llm_json json;
        llm_error err;
        test_fail_in = i;
        test_failed = false;
        bool ok = llm_json_parse(&json, text, sizeof text - 1, "text", &err);
        test_fail_in = -1;
        assert_int_equal(ok, !test_failed);
        if (ok) {
            llm_json_free(&json);
            assert_true(i >= 3);
            break;
        }
        assert_int_equal(err.status, LLM_ERROR_MEMORY);
        assert_int_equal(test_live, live);
    }
    assert_int_equal(test_live, live);
}

/* Parse a text like a tokenizer.json: `entries` tokens, then as many merges as pairs. Print and
 * return the best processor time of three, in seconds. */
static double time_large_text(int entries) {
    bytes b = {0};
    char line[100];
    put(&b, "{\"model\": {\"vocab\": {\n", 22);
    for (int i = 0; i < entries; i++)
        put(&b, line,
            (size_t)snprintf(line, sizeof line, "      \"\xC4\xA0token%x\\u00e9\": %d%s\n",
                             (unsigned)i * 2654435761u, i, i + 1 < entries ? "," : ""));
    put(&b, "}, \"merges\": [\n", 15);
    for (int i = 0; i < entries; i++)
        put(&b, line,
            (size_t)snprintf(line, sizeof line, "      [\n \"\xC4\xA0t%x\",\n \"oken%x\"\n ]%s\n",
                             (unsigned)i * 7u, (unsigned)i, i + 1 < entries ? "," : ""));
    put(&b, "]}}", 3);
    llm_json json;
    llm_error err;
    double best = 1e9;
    for (int k = 0; k < 3; k++) {
        double start = computed_seconds();
        if (!llm_json_parse(&json, (const char *)b.data, b.length, "text", &err))
            fail_msg("%s", err.message);
        double seconds = computed_seconds() - start;
        if (seconds < best) best = seconds;
        const llm_json_node *model = llm_json_member(json.nodes, "model");
        assert_int_equal(llm_json_member(model, "vocab")->length, entries);
        assert_int_equal(llm_json_member(model, "merges")->length, entries);
        assert_int_equal(json.n_nodes, 7 + 5 * (int64_t)entries);
        llm_json_free(&json);
    }
    print_message("%d entries, %.1f MB: %.0f ms\n", entries, (double)b.length / 1e6, 1e3 * best);
    clear_bytes(&b);
    return best;
}

static void test_large_text_takes_linear_time(void **state) {
    (void)state;
    double small = time_large_text(20000), big = time_large_text(160000);
    /* the text is eight times as long; a quadratic reader would take 64 times as long */
    assert_true(big < 40 * small);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values), cmocka_unit_test(test_strings),
        cmocka_unit_test(test_invalid_texts), cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_nesting_limit), cmocka_unit_test(test_offsets),
        cmocka_unit_test(test_failed_allocations),
        cmocka_unit_test(test_large_text_takes_linear_time),
    };
    return cmocka_run_group_tests_name("json", tests, NULL, NULL);
}
