/* Chapter 8: GGUF files, read and written. Run from the repository's root. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include "test_util.h"
#define LLM_IMPLEMENTATION
#include "../llm.h"
#include "../models/quantize.c"
#include "walk.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* the file that the tests write, and the writer's temporary name for it */
static char path[1000], temporary[1010];

/* ---- Helpers ------------------------------------------------------------------------------ */

/* Open a copy of the data in an allocation of exactly n bytes, so that the address sanitizer
 * reports a read past the end. */
static llm_file *open_bytes(const uint8_t *data, size_t n, uint8_t **copy, llm_error *err) {
    *copy = (uint8_t *)malloc(n ? n : 1);
    assert_non_null(*copy);
    if (n) memcpy(*copy, data, n);
    return llm_file_from_memory(*copy, n, "test.gguf", err);
}

/* The reader must refuse the file with a message that contains `expected`. Frees the bytes. */
static void refuse_bytes(bytes b, const char *expected) {
    llm_error err = {.status = LLM_OK};
    uint8_t *copy;
    llm_file *file = open_bytes(b.data, b.length, &copy, &err);
    if (file || !strstr(err.message, expected))
        print_error("expected \"%s\", got \"%s\"\n", expected, file ? "(no error)" : err.message);
    assert_null(file);
    assert_true(err.status == LLM_ERROR_FORMAT || err.status == LLM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "test.gguf: "));
    assert_null(strchr(err.message, '\n'));
    assert_non_null(strstr(err.message, expected));
    free(copy);
    clear_bytes(&b);
}

static void refuse(gguf *g, const char *expected) {
    refuse_bytes(gguf_finish(g), expected);
    memset(g, 0, sizeof *g);
}

static bool same(llm_string s, const char *text) {
    return s.length == strlen(text) && !memcmp(s.data, text, s.length);
}

static void write_file(const char *name, const void *data, size_t n) {
    FILE *f = fopen(name, "wb");
    assert_non_null(f);
    assert_true(fwrite(data, 1, n, f) == n);
    assert_int_equal(fclose(f), 0);
}

/* A file with a value of each type, an array of each kind, and three tensors. */
static bytes sample_file(uint32_t version) {
    gguf g = {0};
    g.version = version;
    uint8_t u8 = 200;
    int8_t i8 = -100;
    uint16_t u16 = 60000;
    int16_t i16 = -30000;
    uint32_t u32 = 4000000000u;
    int32_t i32 = -2000000000;
    float f32 = 1.5f;
    uint64_t u64 = UINT64_MAX;
    int64_t i64 = INT64_MIN;
    double f64 = -0.1;
    gguf_value(&g, "u8", T_U8, &u8, 1);
    gguf_value(&g, "i8", T_I8, &i8, 1);
    gguf_value(&g, "u16", T_U16, &u16, 2);
    gguf_value(&g, "i16", T_I16, &i16, 2);
    gguf_value(&g, "u32", T_U32, &u32, 4);
    gguf_value(&g, "i32", T_I32, &i32, 4);
    gguf_value(&g, "f32", T_F32, &f32, 4);
    gguf_bool(&g, "bool", true);
    gguf_string(&g, "string", "h\xC3\xA9llo");
    gguf_value(&g, "u64", T_U64, &u64, 8);
    gguf_value(&g, "i64", T_I64, &i64, 8);
    gguf_value(&g, "f64", T_F64, &f64, 8);
    int16_t three[3] = {1, -2, 3};
    gguf_array(&g, "array.i16", T_I16, 3, three, sizeof three);
    bytes strings = {0};
    put_string(&strings, "one");
    put_string(&strings, "");
    put_string(&strings, "three");
    gguf_array(&g, "array.string", T_STRING, 3, strings.data, strings.length);
    clear_bytes(&strings);
    gguf_array(&g, "array.empty", T_F32, 0, NULL, 0);
    float numbers[64];
    for (int i = 0; i < 64; i++) numbers[i] = (float)i;
    uint8_t blocks[4 * 18] = {0};
    gguf_tensor(&g, "vector", 0, 5, LLM_F32, numbers, 20);
    gguf_tensor(&g, "matrix", 2, 64, LLM_Q4_0, blocks, sizeof blocks);
    gguf_tensor(&g, "half", 3, 8, LLM_F16, numbers, 48);
    return gguf_finish(&g);
}

/* ---- Reading ------------------------------------------------------------------------------ */

static void check_sample_file(uint32_t version) {
    llm_error err;
    bytes b = sample_file(version);
    llm_file *file = llm_file_from_memory(b.data, b.length, "sample", &err);
    assert_non_null(file);
    assert_int_equal(err.status, LLM_OK);
    assert_int_equal(llm_file_version(file), version);
    assert_int_equal(llm_file_n_values(file), 15);
    assert_int_equal(llm_file_n_tensors(file), 3);
    assert_true(llm_file_size(file) == b.length);
    assert_string_equal(llm_file_path(file), "sample");
    walk(file);
    uint64_t u;
    int64_t s;
    double d;
    bool flag;
    assert_true(llm_value_u64(llm_file_find(file, "u8"), 0, &u) && u == 200);
    assert_true(llm_value_i64(llm_file_find(file, "i8"), 0, &s) && s == -100);
    assert_true(llm_value_u64(llm_file_find(file, "u16"), 0, &u) && u == 60000);
    assert_true(llm_value_i64(llm_file_find(file, "i16"), 0, &s) && s == -30000);
    assert_true(llm_value_u64(llm_file_find(file, "u32"), 0, &u) && u == 4000000000u);
    assert_true(llm_value_i64(llm_file_find(file, "i32"), 0, &s) && s == -2000000000);
    assert_true(llm_value_f64(llm_file_find(file, "i32"), 0, &d) && d == -2e9);
    assert_true(llm_value_f64(llm_file_find(file, "f32"), 0, &d) && d == 1.5);
    assert_true(llm_value_bool(llm_file_find(file, "bool"), 0, &flag) && flag);
    assert_true(llm_value_u64(llm_file_find(file, "u64"), 0, &u) && u == UINT64_MAX);
    assert_true(llm_value_i64(llm_file_find(file, "i64"), 0, &s) && s == INT64_MIN);
    assert_true(llm_value_f64(llm_file_find(file, "i64"), 0, &d) && d == -9223372036854775808.0);
    assert_true(llm_value_f64(llm_file_find(file, "f64"), 0, &d) && d == -0.1);
    const llm_value *three = llm_file_find(file, "array.i16");
    assert_true(three && three->type == LLM_VALUE_ARRAY && three->element_type == LLM_VALUE_I16 &&
                three->count == 3);
    assert_true(llm_value_i64(three, 1, &s) && s == -2);
    assert_false(llm_value_i64(three, 3, &s));
    assert_false(llm_value_i64(three, UINT64_MAX, &s));
    size_t cursor = 0;
    llm_string text;
    const llm_value *strings = llm_file_find(file, "array.string");
    assert_true(llm_value_string(strings, &cursor, &text) && same(text, "one"));
    assert_true(llm_value_string(strings, &cursor, &text) && same(text, ""));
    assert_true(llm_value_string(strings, &cursor, &text) && same(text, "three"));
    assert_false(llm_value_string(strings, &cursor, &text));
    cursor = 0;
    assert_true(llm_value_string(llm_file_find(file, "string"), &cursor, &text) &&
                same(text, "h\xC3\xA9llo"));
    assert_null(llm_file_find(file, "nothing"));
    assert_null(llm_file_find(file, ""));
    const llm_tensor *matrix = llm_file_find_tensor(file, "matrix");
    assert_non_null(matrix);
    assert_true(matrix->type == LLM_Q4_0 && matrix->n_dims == 2 && matrix->dims[0] == 64 &&
                matrix->dims[1] == 2);
    assert_true(matrix->dims[2] == 1 && matrix->dims[3] == 1 && matrix->bytes == 4 * 18);
    const llm_tensor *vector = llm_file_find_tensor(file, "vector");
    float fifth;
    memcpy(&fifth, (const uint8_t *)vector->data + 16, sizeof fifth);
    assert_true(vector->n_dims == 1 && vector->bytes == 20 && fifth == 4);
    assert_null(llm_file_find_tensor(file, "u8"));
    llm_file_close(file);
    clear_bytes(&b);
}

static void test_read_v2(void **state) { (void)state; check_sample_file(2); }
static void test_read_v3(void **state) { (void)state; check_sample_file(3); }

static llm_value number(llm_value_type type, const void *data, size_t n) {
    llm_value value = {{"x", 1}, type, type, 1, (const uint8_t *)data, n};
    return value;
}

/* A conversion returns the same value, or fails if the type cannot hold it. */
static void test_conversions(void **state) {
    (void)state;
    uint64_t u;
    int64_t s;
    double d;
    bool flag;
    float f = 3.0f;
    llm_value v = number(LLM_VALUE_F32, &f, 4);
    assert_true(llm_value_u64(&v, 0, &u) && u == 3);
    f = -3.0f;
    assert_false(llm_value_u64(&v, 0, &u));
    assert_true(llm_value_i64(&v, 0, &s) && s == -3);
    f = 3.5f;
    assert_false(llm_value_i64(&v, 0, &s));
    f = 1e30f;
    assert_false(llm_value_u64(&v, 0, &u));
    f = NAN;
    assert_false(llm_value_u64(&v, 0, &u));
    assert_false(llm_value_bool(&v, 0, &flag));
    assert_true(llm_value_f64(&v, 0, &d) && d != d);
    double big = 9223372036854775808.0;
    v = number(LLM_VALUE_F64, &big, 8);
    assert_true(llm_value_u64(&v, 0, &u) && u == (uint64_t)1 << 63);
    assert_false(llm_value_i64(&v, 0, &s));
    big = -big;
    assert_true(llm_value_i64(&v, 0, &s) && s == INT64_MIN);
    uint64_t odd = ((uint64_t)1 << 53) + 1;
    v = number(LLM_VALUE_U64, &odd, 8);
    assert_false(llm_value_f64(&v, 0, &d));
    assert_true(llm_value_i64(&v, 0, &s) && s == (int64_t)odd);
    odd = UINT64_MAX;
    assert_false(llm_value_f64(&v, 0, &d));
    assert_false(llm_value_i64(&v, 0, &s));
    odd = (uint64_t)1 << 60;
    assert_true(llm_value_f64(&v, 0, &d) && d == 1152921504606846976.0);
    uint8_t byte = 2;
    v = number(LLM_VALUE_BOOL, &byte, 1);
    assert_false(llm_value_bool(&v, 0, &flag));
    byte = 1;
    assert_true(llm_value_bool(&v, 0, &flag) && flag);
    assert_true(llm_value_u64(&v, 0, &u) && u == 1);
    int8_t minus = -1;
    v = number(LLM_VALUE_I8, &minus, 1);
    assert_true(llm_value_i64(&v, 0, &s) && s == -1);
    assert_false(llm_value_u64(&v, 0, &u));
    assert_false(llm_value_bool(&v, 0, &flag));
    assert_false(llm_value_u64(&v, 1, &u));
    assert_false(llm_value_u64(NULL, 0, &u) || llm_value_i64(NULL, 0, &s) ||
                 llm_value_f64(NULL, 0, &d) || llm_value_bool(NULL, 0, &flag));
    size_t cursor = 0;
    llm_string text;
    assert_false(llm_value_string(&v, &cursor, &text) || llm_value_string(NULL, &cursor, &text));
}

static void test_files_without_tensors(void **state) {
    (void)state;
    gguf g = {0};
    gguf_string(&g, "general.architecture", "llama");
    bytes b = gguf_finish(&g);
    llm_error err;
    llm_file *file = llm_file_from_memory(b.data, b.length, "v", &err);
    assert_non_null(file);
    assert_int_equal(llm_file_n_tensors(file), 0);
    assert_null(llm_file_find_tensor(file, "x"));
    llm_file_close(file);
    clear_bytes(&b);
    gguf nothing = {0};
    b = gguf_finish(&nothing);
    file = llm_file_from_memory(b.data, b.length, "v", &err);
    assert_non_null(file);
    walk(file);
    llm_file_close(file);
    clear_bytes(&b);
}

static void test_many_names(void **state) {
    (void)state;
    enum { N = 5000 };
    gguf g = {0};
    char name[32];
    float x[8] = {0};
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "k%d", (i * 7919) % N);
        gguf_u32(&g, name, (uint32_t)i);
        if (i < 500) gguf_tensor(&g, name, 0, 8, LLM_F32, x, sizeof x);
    }
    bytes b = gguf_finish(&g);
    llm_error err;
    llm_file *file = llm_file_from_memory(b.data, b.length, "many", &err);
    assert_non_null(file);
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "k%d", (i * 7919) % N);
        assert_ptr_equal(llm_file_find(file, name), llm_file_value(file, i));
        assert_ptr_equal(llm_file_find_tensor(file, name), llm_file_tensor(file, i < 500 ? i : -1));
    }
    assert_null(llm_file_find(file, "k"));
    assert_null(llm_file_find(file, "k5000"));
    llm_file_close(file);
    clear_bytes(&b);
}

static void test_alignment(void **state) {
    (void)state;
    float x[4] = {1, 2, 3, 4};
    gguf g = {0};
    g.alignment = 128;
    gguf_u32(&g, "general.alignment", 128);
    gguf_tensor(&g, "a", 0, 4, LLM_F32, x, sizeof x);
    gguf_tensor(&g, "b", 0, 4, LLM_F32, x, sizeof x);
    bytes b = gguf_finish(&g);
    llm_error err;
    llm_file *file = llm_file_from_memory(b.data, b.length, "aligned", &err);
    assert_non_null(file);
    const uint8_t *second = (const uint8_t *)llm_file_find_tensor(file, "b")->data;
    assert_int_equal((second - b.data) % 128, 0);
    assert_memory_equal(second, x, sizeof x);
    llm_file_close(file);
    clear_bytes(&b);
}

/* ---- Damage --------------------------------------------------------------------------------- */

static void test_truncated_files(void **state) {
    (void)state;
    bytes b = sample_file(3);
    size_t data_end = 0;
    llm_error err;
    llm_file *file = llm_file_from_memory(b.data, b.length, "whole", &err);
    assert_non_null(file);
    for (int64_t i = 0; i < llm_file_n_tensors(file); i++) {
        const llm_tensor *t = llm_file_tensor(file, i);
        size_t end = (size_t)((const uint8_t *)t->data - b.data) + (size_t)t->bytes;
        if (end > data_end) data_end = end;
    }
    llm_file_close(file);
    assert_true(data_end == b.length);
    for (size_t n = 0; n < b.length; n++) {
        uint8_t *copy;
        err.status = LLM_OK;
        assert_null(open_bytes(b.data, n, &copy, &err));
        assert_int_equal(err.status, LLM_ERROR_FORMAT);
        assert_true(strlen(err.message) > 10);
        free(copy);
    }
    clear_bytes(&b);
    assert_int_equal(test_live, 0);
}

static void test_flipped_bytes(void **state) {
    (void)state;
    static const uint64_t extreme_values[] = {0,           1,
                                     7,           255,
                                     65536,       0x7fffffff,
                                     0x80000000u, 0xffffffffu,
                                     INT64_MAX,   (uint64_t)1 << 63,
                                     UINT64_MAX,  UINT64_MAX - 31};
    test_random random = {42};
    bytes b = sample_file(3);
    int accepted = 0;
    for (int round = 0; round < 20000; round++) {
        bytes damaged = {0};
        put(&damaged, b.data, b.length);
        for (int i = 1 + random_below(&random, 3); i > 0; i--) {
            int at = random_below(&random, (int)b.length - 8);
            if (random_below(&random, 2)) damaged.data[at] = (uint8_t)random_u64(&random);
            else
                memcpy(damaged.data + at,
                       &extreme_values[random_below(&random, sizeof extreme_values /
                                                                 sizeof *extreme_values)],
                       8);
        }
        uint8_t *copy;
        llm_error err;
        llm_file *file = open_bytes(damaged.data, damaged.length, &copy, &err);
        if (file) {
            walk(file);
            accepted++;
        } else {
            assert_true(err.status != LLM_OK && err.message[0]);
        }
        llm_file_close(file);
        free(copy);
        clear_bytes(&damaged);
    }
    assert_true(accepted > 0 && accepted < 20000);
    clear_bytes(&b);
    assert_int_equal(test_live, 0);
}

static bytes text_bytes(const char *text, size_t n) {
    bytes b = {0};
    put(&b, text, n);
    return b;
}

static void test_not_gguf(void **state) {
    (void)state;
    refuse_bytes(text_bytes("", 0), "not a GGUF file: it is empty");
    refuse_bytes(text_bytes("GG", 2), "not a GGUF file: it starts with \"GG\"");
    refuse_bytes(text_bytes("Once upon a time\nthere was", 26),
                 "not a GGUF file: it starts with \"Once upon a time\"");
    refuse_bytes(text_bytes("\n\x1b[31m\xff", 7), "it starts with \"??[31m?\"");
    refuse_bytes(text_bytes("GGUF", 4),
                 "the version at byte 4 needs 4 more bytes, but the file ends at byte 4");
    refuse_bytes(text_bytes("GGUF\1\0\0\0", 8), "GGUF version 1 is not supported (2 and 3 are)");
    refuse_bytes(text_bytes("GGUF\4\0\0\0", 8), "GGUF version 4 is not supported");
    refuse_bytes(text_bytes("GGUF\0\0\0\3", 8), "big-endian");
}

static void test_hostile_counts(void **state) {
    (void)state;
    static const uint64_t counts[] = {1, 1000, UINT32_MAX, INT64_MAX, UINT64_MAX};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        gguf g = {0};
        g.n_values = counts[i];
        refuse(&g, "bytes can hold: it is damaged");
        g.n_tensors = counts[i];
        refuse(&g, "bytes can hold: it is damaged");
    }
    gguf g = {0};
    gguf_u32(&g, "a", 1);
    for (int i = 0; i < 3; i++) gguf_u32(&g, "", 0);
    g.n_values = 2;
    refuse(&g, "has a key of 0 bytes");
    float x[16] = {0};
    gguf_tensor(&g, "t", 0, 16, LLM_F32, x, sizeof x);
    g.n_tensors = 2;
    refuse(&g, "has no name");
}

static void test_hostile_values(void **state) {
    (void)state;
    gguf g = {0};
    uint64_t huge = UINT64_MAX;
    gguf_u32(&g, "twice", 1);
    gguf_u32(&g, "once", 1);
    gguf_u32(&g, "twice", 2);
    refuse(&g, "the metadata has two values called 'twice'");
    gguf_value(&g, "odd", 13, &huge, 8);
    refuse(&g, "the value of 'odd' at byte 24 is of type 13, which does not exist");
    gguf_value(&g, "odd", UINT32_MAX, &huge, 8);
    refuse(&g, "of type 4294967295");
    gguf_array(&g, "nested", T_ARRAY, 1, &huge, 8);
    refuse(&g, "the value of 'nested' at byte 24 is an array of arrays");
    gguf_array(&g, "strange", 99, 1, &huge, 8);
    refuse(&g, "of type 99");
    gguf_array(&g, "long", T_U64, UINT64_MAX / 4, &huge, 8);
    refuse(&g, "the value of 'long' at byte");
    gguf_array(&g, "long", T_U16, UINT64_MAX / 2 + 2, &huge, 8); /* 2 times this overflows to 2 */
    refuse(&g, "more than the file can");
    gguf_array(&g, "long", T_STRING, UINT64_MAX / 8 + 1, &huge, 8);
    refuse(&g, "more than the file can");
    gguf_array(&g, "long", T_STRING, 1, &huge, 8); /* a string of 2^64 - 1 bytes */
    refuse(&g, "needs 18446744073709551615 more bytes");
    gguf_value(&g, "s", T_STRING, &huge, 8);
    refuse(&g, "the value of 's' at byte");
    put_u64(&g.values, UINT64_MAX - 3); /* the length of a key */
    for (int i = 0; i < 3; i++) put_u64(&g.values, 0);
    g.n_values = 1;
    refuse(&g, "the key of a metadata value at byte 24 needs");
    char *key = (char *)malloc(70001);
    memset(key, 'k', 70000);
    key[70000] = 0;
    gguf_u32(&g, key, 1);
    refuse(&g, "has a key of 70000 bytes");
    free(key);
    gguf_u32(&g, "line\nfeed\x1b", 1);
    gguf_u32(&g, "line\nfeed\x1b", 1);
    refuse(&g, "'line?feed?'");
}

/* A file with one tensor of this shape, type and offset and 4096 bytes of data must be refused. */
static void refuse_tensor(uint32_t n_dims, uint64_t d0, uint64_t d1, uint64_t d2, uint64_t d3,
                          uint32_t type, uint64_t offset, const char *expected) {
    gguf g = {0};
    uint8_t data[4096] = {0};
    uint64_t dims[5] = {d0, d1, d2, d3, 1};
    gguf_declare(&g, "weight", n_dims, dims, type, offset);
    put(&g.data, data, sizeof data);
    refuse(&g, expected);
}

static void test_hostile_tensors(void **state) {
    (void)state;
    refuse_tensor(0, 0, 0, 0, 0, LLM_F32, 0, "the tensor 'weight' at byte 24 has 0 dimensions");
    refuse_tensor(5, 1, 1, 1, 1, LLM_F32, 0, "has 5 dimensions");
    refuse_tensor(2, 0, 4, 0, 0, LLM_F32, 0, "impossible shape 0 x 4 x 1 x 1");
    refuse_tensor(2, 4, 0, 0, 0, LLM_F32, 0, "impossible shape");
    refuse_tensor(4, 1u << 16, 1u << 16, 1u << 16, 1u << 16, LLM_F32, 0, "impossible shape");
    refuse_tensor(2, (uint64_t)1 << 62, 2, 0, 0, LLM_F32, 0, "impossible shape");
    refuse_tensor(2, (uint64_t)1 << 61, 2, 0, 0, LLM_F32, 0, "impossible shape");
    refuse_tensor(2, UINT64_MAX, UINT64_MAX, 0, 0, LLM_F16, 0, "impossible shape");
    refuse_tensor(2, 33, 1, 0, 0, LLM_Q8_0, 0, "the first a multiple of 32 for q8_0");
    refuse_tensor(2, 16, 2, 0, 0, LLM_Q4_0, 0, "the first a multiple of 32 for q4_0");
    refuse_tensor(
        2, 256, 2, 0, 0, 10, 0,
        "the tensor 'weight' is of type 10 (q2_k), which is not supported; supported are f32, f16");
    refuse_tensor(1, 256, 0, 0, 0, 12345, 0, "type 12345 (unknown)");
    refuse_tensor(1, 256, 0, 0, 0, 4, 0, "type 4 (unknown)");
    static const struct {
        uint32_t type;
        const char *words;
    } unsupported[] = {
        {31, "type 31 (q4_0_4_4)"},   {32, "type 32 (q4_0_4_8)"},   {33, "type 33 (q4_0_8_8)"},
        {36, "type 36 (iq4_nl_4_4)"}, {37, "type 37 (iq4_nl_4_8)"}, {38, "type 38 (iq4_nl_8_8)"},
        {39, "type 39 (mxfp4)"},      {40, "type 40 (nvfp4)"},      {41, "type 41 (unknown)"}};
    for (size_t i = 0; i < sizeof unsupported / sizeof *unsupported; i++)
        refuse_tensor(2, 256, 8, 0, 0, unsupported[i].type, 0, unsupported[i].words);
    refuse_tensor(1, 4, 0, 0, 0, LLM_F32, 4, "which is not a multiple of the alignment 32");
    refuse_tensor(1, 4, 0, 0, 0, LLM_F32, 4096, "lies past the end of the file");
    refuse_tensor(1, 1025, 0, 0, 0, LLM_F32, 0, "(4100 bytes at offset 0");
    refuse_tensor(1, 4, 0, 0, 0, LLM_F32, UINT64_MAX - 31, "lies past the end of the file");
    refuse_tensor(1, (uint64_t)1 << 60, 0, 0, 0, LLM_F32, 0, "lies past the end of the file");
    refuse_tensor(1, ((uint64_t)1 << 61) - 1, 0, 0, 0, LLM_F32, UINT64_MAX - 31,
                  "lies past the end of the file");
}

static void test_hostile_layout(void **state) {
    (void)state;
    gguf g = {0};
    float x[64] = {0};
    uint64_t dims[1] = {16};
    gguf_tensor(&g, "a", 0, 64, LLM_F32, x, sizeof x);
    gguf_tensor(&g, "a", 0, 64, LLM_F32, x, sizeof x);
    refuse(&g, "there are two tensors called 'a'");
    gguf_tensor(&g, "a", 0, 64, LLM_F32, x, sizeof x);
    gguf_declare(&g, "b", 1, dims, LLM_F32, 224);
    put(&g.data, x, sizeof x);
    refuse(&g, "the tensors 'a' and 'b' overlap");
    gguf_declare(&g, "b", 1, dims, LLM_F32, 0);
    gguf_declare(&g, "a", 1, dims, LLM_F32, 0);
    put(&g.data, x, sizeof x);
    refuse(&g, "overlap");
    gguf_declare(&g, "", 1, dims, LLM_F32, 0);
    put(&g.data, x, sizeof x);
    refuse(&g, "the tensor at byte 24 has no name");
    static const uint32_t alignments[] = {0, 3, 33, UINT32_MAX};
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++) {
        gguf_u32(&g, "general.alignment", alignments[i]);
        gguf_tensor(&g, "a", 0, 64, LLM_F32, x, sizeof x);
        refuse(&g, "must be a power of two");
    }
    gguf_string(&g, "general.alignment", "32");
    gguf_tensor(&g, "a", 0, 64, LLM_F32, x, sizeof x);
    refuse(&g, "must be a power of two");
    uint64_t huge = (uint64_t)1 << 63;
    gguf_value(&g, "general.alignment", T_U64, &huge, 8);
    gguf_tensor(&g, "a", 0, 64, LLM_F32, x, sizeof x);
    refuse(&g, "lies past the end of the file");
}

/* Reading tens of thousands of tensors and keys must not take quadratic time. */
static void test_many_tensors_take_linear_time(void **state) {
    (void)state;
    enum { N = 100000 };
    gguf g = {0};
    uint64_t dims[1] = {1};
    char name[32];
    for (int i = 0; i < N; i++) {
        snprintf(name, sizeof name, "%d", i);
        gguf_declare(&g, name, 1, dims, LLM_F32, 32 * (uint64_t)((i * (uint64_t)7919) % N));
        gguf_bool(&g, name, true);
    }
    uint8_t zeros[32] = {0};
    for (int i = 0; i < N; i++) put(&g.data, zeros, 32);
    bytes b = gguf_finish(&g);
    llm_error err;
    double start = computed_seconds();
    llm_file *file = llm_file_from_memory(b.data, b.length, "many", &err);
    assert_non_null(file);
    assert_true(computed_seconds() - start < 5);
    llm_file_close(file);
    clear_bytes(&b);
}

/* ---- Opening --------------------------------------------------------------------------------- */

static void refuse_path(const char *name, llm_status status, const char *expected) {
    llm_error err = {.status = LLM_OK};
    assert_null(llm_file_open(name, &err));
    if (!strstr(err.message, expected))
        print_error("expected \"%s\", got \"%s\"\n", expected, err.message);
    assert_int_equal(err.status, status);
    assert_non_null(strstr(err.message, expected));
    assert_null(llm_file_open(name, NULL));
}

static void test_open(void **state) {
    (void)state;
    refuse_path("/nonexistent/model.gguf", LLM_ERROR_FILE,
                "cannot open /nonexistent/model.gguf: No such file");
    refuse_path("/tmp", LLM_ERROR_FILE, "there is no config.json in this folder");
    refuse_path("/dev/null", LLM_ERROR_FILE, "it is a pipe or a device, not a file");
    refuse_path("", LLM_ERROR_ARGUMENT, "no path");
    refuse_path(NULL, LLM_ERROR_ARGUMENT, "no path");
    refuse_path("tests/test_files.c", LLM_ERROR_FORMAT,
                "tests/test_files.c: not a GGUF file: it starts with \"/* Chapter 8: GG\"");
    write_file(path, "", 0);
    refuse_path(path, LLM_ERROR_FORMAT, "it is empty");
    bytes b = sample_file(3);
    write_file(path, b.data, b.length);
    llm_error err;
    llm_file *file = llm_file_open(path, &err);
    assert_non_null(file);
    walk(file);
    llm_file_close(file);
    llm_file_close(NULL);
    write_file(path, b.data, b.length - 1);
    refuse_path(path, LLM_ERROR_FORMAT, "lies past the end of the file");
    clear_bytes(&b);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    refuse_path(path, LLM_ERROR_FILE, "a pipe or a device"); /* does not wait for a writer */
    unlink(path);
    assert_null(llm_file_from_memory(NULL, 5, "x", &err));
    assert_int_equal(err.status, LLM_ERROR_ARGUMENT);
    assert_int_equal(test_live, 0);
}

/* ---- Writing --------------------------------------------------------------------------------- */

static bool exists(const char *name) { return access(name, F_OK) == 0; }

static void test_write_and_read(void **state) {
    (void)state;
    static const uint64_t vector[1] = {5}, matrix[2] = {64, 3}, cube[4] = {2, 3, 1, 2};
    uint8_t data[20 + 6 * 34 + 48];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)(i * 31 + 7);
    int32_t ints[3] = {1, -2, INT32_MIN};
    float floats[2] = {0.5f, -1};
    llm_string strings[3] = {{"a", 1}, {"", 0}, {"\0b", 2}};
    /* write the same data in pieces of several sizes */
    for (int piece = 1; piece < 300; piece = piece * 3 + 1) {
        llm_error err;
        llm_writer *w = llm_writer_create(path, &err);
        assert_non_null(w);
        assert_true(exists(temporary));
        assert_true(llm_writer_string(w, "general.architecture", "llama"));
        assert_true(llm_writer_u32(w, "u32", 7) && llm_writer_f32(w, "f32", 2.5f) &&
                    llm_writer_bool(w, "bool", true));
        assert_true(llm_writer_string_array(w, "strings", strings, 3) &&
                    llm_writer_i32_array(w, "ints", ints, 3));
        assert_true(llm_writer_f32_array(w, "floats", floats, 2) &&
                    llm_writer_f32_array(w, "none", NULL, 0));
        assert_true(llm_writer_tensor(w, llm__string("vector"), LLM_F32, 1, vector));
        assert_true(llm_writer_tensor(w, llm__string("matrix"), LLM_Q8_0, 2, matrix));
        assert_true(llm_writer_tensor(w, llm__string("cube"), LLM_F32, 4, cube));
        for (size_t at = 0; at < sizeof data; at += (size_t)piece)
            assert_true(llm_writer_data(
                w, data + at, sizeof data - at < (size_t)piece ? sizeof data - at : (size_t)piece));
        assert_true(llm_writer_finish(w, &err));
        assert_int_equal(err.status, LLM_OK);
        assert_false(exists(temporary));
        llm_file *file = llm_file_open(path, &err);
        assert_non_null(file);
        walk(file);
        uint64_t u;
        int64_t s;
        double d;
        assert_true(llm_file_version(file) == 3 && llm_file_n_values(file) == 8 &&
                    llm_file_n_tensors(file) == 3);
        assert_true(llm_value_u64(llm_file_find(file, "u32"), 0, &u) && u == 7);
        assert_true(llm_value_i64(llm_file_find(file, "ints"), 2, &s) && s == INT32_MIN);
        assert_true(llm_value_f64(llm_file_find(file, "floats"), 1, &d) && d == -1);
        assert_true(llm_file_find(file, "none")->count == 0);
        const llm_tensor *t = llm_file_find_tensor(file, "vector");
        assert_memory_equal(t->data, data, 20);
        assert_int_equal((uintptr_t)t->data % 32, 0);
        t = llm_file_find_tensor(file, "matrix");
        assert_memory_equal(t->data, data + 20, 6 * 34);
        t = llm_file_find_tensor(file, "cube");
        assert_true(t->n_dims == 4 && t->dims[1] == 3 && t->dims[3] == 2);
        assert_memory_equal(t->data, data + 20 + 6 * 34, 48);
        llm_file_close(file);
    }
    unlink(path);
    assert_int_equal(test_live, 0);
}

/* A copy of every value and tensor has the same content. */
static void test_copy_a_file(void **state) {
    (void)state;
    bytes b = sample_file(2);
    llm_error err;
    llm_file *in = llm_file_from_memory(b.data, b.length, "in", &err);
    llm_writer *w = llm_writer_create(path, &err);
    assert_true(in && w);
    for (int64_t i = 0; i < llm_file_n_values(in); i++)
        assert_true(llm_writer_value(w, llm_file_value(in, i)));
    for (int64_t i = 0; i < llm_file_n_tensors(in); i++) {
        const llm_tensor *t = llm_file_tensor(in, i);
        assert_true(llm_writer_tensor(w, t->name, t->type, t->n_dims, t->dims));
    }
    for (int64_t i = 0; i < llm_file_n_tensors(in); i++)
        assert_true(llm_writer_data(w, llm_file_tensor(in, i)->data,
                                    (size_t)llm_file_tensor(in, i)->bytes));
    assert_true(llm_writer_finish(w, &err));
    llm_file *out = llm_file_open(path, &err);
    assert_non_null(out);
    assert_true(llm_file_n_values(in) == llm_file_n_values(out) &&
                llm_file_n_tensors(in) == llm_file_n_tensors(out));
    for (int64_t i = 0; i < llm_file_n_values(in); i++) {
        const llm_value *x = llm_file_value(in, i), *y = llm_file_value(out, i);
        assert_true(x->type == y->type && x->element_type == y->element_type &&
                    x->count == y->count && x->bytes == y->bytes);
        assert_true(!llm__compare_strings(&x->key, &y->key));
        assert_memory_equal(x->data, y->data, x->bytes);
    }
    for (int64_t i = 0; i < llm_file_n_tensors(in); i++)
        assert_memory_equal(llm_file_tensor(in, i)->data, llm_file_tensor(out, i)->data,
                            (size_t)llm_file_tensor(in, i)->bytes);
    llm_file_close(in);
    llm_file_close(out);
    clear_bytes(&b);
    /* a larger alignment is kept */
    w = llm_writer_create(path, &err);
    uint64_t one[1] = {1};
    float x = 1;
    assert_true(llm_writer_u32(w, "general.alignment", 256) &&
                llm_writer_tensor(w, llm__string("a"), LLM_F32, 1, one) &&
                llm_writer_tensor(w, llm__string("b"), LLM_F32, 1, one) &&
                llm_writer_data(w, &x, 4) && llm_writer_data(w, &x, 4));
    assert_true(llm_writer_finish(w, &err));
    out = llm_file_open(path, &err);
    assert_non_null(out);
    assert_int_equal((uintptr_t)llm_file_find_tensor(out, "b")->data % 256, 0);
    llm_file_close(out);
    unlink(path);
    assert_int_equal(test_live, 0);
}

static void refuse_finish(llm_writer *w, llm_status status, const char *expected) {
    llm_error err = {.status = LLM_OK};
    assert_false(llm_writer_finish(w, &err));
    if (!strstr(err.message, expected))
        print_error("expected \"%s\", got \"%s\"\n", expected, err.message);
    assert_int_equal(err.status, status);
    assert_non_null(strstr(err.message, expected));
    assert_false(exists(temporary));
}

static void test_writer_misuse(void **state) {
    (void)state;
    static const uint64_t shape[1] = {4}, odd[1] = {33}, zero[1] = {0};
    float x[8] = {0};
    write_file(path, "old", 3); /* a failure must not change this file */
    llm_error err;
    llm_writer *w = llm_writer_create(path, &err);
    assert_true(llm_writer_tensor(w, llm__string("t"), LLM_F32, 1, shape) &&
                llm_writer_data(w, x, 15));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "the data ended after 15 bytes of tensor 1 of 1");
    w = llm_writer_create(path, &err);
    assert_true(llm_writer_tensor(w, llm__string("t"), LLM_F32, 1, shape));
    assert_false(llm_writer_data(w, x, 17));
    assert_false(llm_writer_data(w, x, 1)); /* the first error is kept */
    refuse_finish(w, LLM_ERROR_ARGUMENT, "1 bytes of data more than the 1 declared tensors have");
    w = llm_writer_create(path, &err);
    assert_false(llm_writer_data(w, x, 1));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "more than the 0 declared tensors");
    w = llm_writer_create(path, &err);
    assert_true(llm_writer_tensor(w, llm__string("t"), LLM_F32, 1, shape) &&
                llm_writer_data(w, x, 1));
    assert_false(llm_writer_u32(w, "late", 1));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "metadata after the first data");
    w = llm_writer_create(path, &err);
    assert_true(llm_writer_tensor(w, llm__string("t"), LLM_F32, 1, shape) &&
                llm_writer_data(w, x, 16));
    assert_false(llm_writer_tensor(w, llm__string("late"), LLM_F32, 1, shape));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "a tensor declared after the first data");
    w = llm_writer_create(path, &err);
    assert_false(llm_writer_tensor(w, llm__string("odd"), LLM_Q4_0, 1, odd));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "there can be no tensor 'odd'");
    w = llm_writer_create(path, &err);
    assert_false(llm_writer_tensor(w, llm__string("zero"), LLM_F32, 1, zero));
    assert_false(llm_writer_string(w, "k", "v"));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "'zero'");
    w = llm_writer_create(path, &err);
    assert_false(llm_writer_tensor(w, llm__string("type"), (llm_type)77, 1, shape));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "'type'");
    w = llm_writer_create(path, &err);
    assert_true(llm_writer_u32(w, "k", 1) && llm_writer_string(w, "other", "x") &&
                llm_writer_u32(w, "k", 2));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "there are two metadata values called 'k'");
    w = llm_writer_create(path, &err);
    assert_true(llm_writer_tensor(w, llm__string("t"), LLM_F32, 1, shape) &&
                llm_writer_tensor(w, llm__string("t"), LLM_F32, 1, shape));
    assert_false(llm_writer_data(w, x, 16)); /* the header is written with the first data */
    refuse_finish(w, LLM_ERROR_ARGUMENT, "there are two tensors called 't'");
    w = llm_writer_create(path, &err);
    assert_false(llm_writer_u32(w, "general.alignment", 33));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "general.alignment must be a power of two");
    w = llm_writer_create(path, &err); /* too late: a tensor already has its offset */
    assert_true(llm_writer_tensor(w, llm__string("t"), LLM_F32, 1, shape));
    assert_false(llm_writer_u32(w, "general.alignment", 64));
    refuse_finish(w, LLM_ERROR_ARGUMENT, "and come before the tensors");
    w = llm_writer_create(path, &err);
    assert_true(llm_writer_u32(w, "k", 1));
    llm_writer_abandon(w);
    llm_writer_abandon(NULL);
    assert_false(exists(temporary));
    assert_false(llm_writer_finish(NULL, &err) || llm_writer_u32(NULL, "k", 1) ||
                 llm_writer_data(NULL, x, 1));
    bytes b = slurp(path);
    assert_true(b.length == 3 && !memcmp(b.data, "old", 3));
    clear_bytes(&b);
    unlink(path);
    assert_null(llm_writer_create("/nonexistent/x.gguf", &err));
    assert_non_null(strstr(err.message, "cannot create /nonexistent/x.gguf.tmp: No such file"));
    assert_null(llm_writer_create("/tmp", &err));
    assert_non_null(strstr(err.message, "a directory"));
    assert_null(llm_writer_create("/dev/full", &err)); /* writing would replace it by a file */
    assert_non_null(strstr(err.message, "a pipe or a device"));
    assert_null(llm_writer_create("", &err));
    assert_int_equal(test_live, 0);
}

/* A disk that fills up, simulated by a limit on the size of files. */
static void test_full_disk(void **state) {
    (void)state;
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small = before;
    small.rlim_cur = 100000;
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    static float zeros[1 << 16];
    static const uint64_t shape[2] = {1 << 16, 4};
    write_file(path, "old", 3);
    llm_error err;
    llm_writer *w = llm_writer_create(path, &err);
    assert_true(llm_writer_tensor(w, llm__string("big"), LLM_F32, 2, shape));
    bool ok = true;
    for (int i = 0; i < 4; i++) ok = llm_writer_data(w, zeros, sizeof zeros) && ok;
    assert_false(ok);
    refuse_finish(w, LLM_ERROR_FILE, ".tmp: File too large (100000 bytes written)");
    setrlimit(RLIMIT_FSIZE, &before);
    signal(SIGXFSZ, handler);
    bytes b = slurp(path);
    assert_true(b.length == 3 && !memcmp(b.data, "old", 3));
    clear_bytes(&b);
    unlink(path);
    /* also write to a device that is always full, if there is one */
    int full = open("/dev/full", O_WRONLY);
    if (full >= 0) {
        w = llm_writer_create(path, &err);
        close(w->descriptor);
        w->descriptor = full;
        llm_writer_u32(w, "k", 1);
        refuse_finish(w, LLM_ERROR_FILE,
                      "No space left on device (0 bytes written); free some space");
        assert_false(exists(path));
    }
    assert_int_equal(test_live, 0);
}

/* ---- Failed allocations ---------------------------------------------------------------------- */

/* Each allocation fails once: the error is LLM_ERROR_MEMORY and nothing leaks. */
static void test_failed_allocations(void **state) {
    (void)state;
    static const uint64_t shape[1] = {4};
    bytes b = sample_file(3);
    float x[4] = {0};
    llm_error err;
    long i = 0;
    for (bool done = false; !done; i++) {
        test_fail_in = i;
        test_failed = false;
        llm_file *file = llm_file_from_memory(b.data, b.length, "sample", &err);
        done = !test_failed;
        assert_true((file != NULL) == done);
        if (!done) assert_int_equal(err.status, LLM_ERROR_MEMORY);
        llm_file_close(file);
        assert_int_equal(test_live, 0);
    }
    assert_true(i > 4);
    for (bool done = false, ok; !done; i++) {
        test_fail_in = i - 6;
        test_failed = false;
        llm_writer *w = llm_writer_create(path, &err);
        if (w) {
            llm_string name = {"s", 1};
            llm_writer_string_array(w, "strings", &name, 1);
            llm_writer_tensor(w, name, LLM_F32, 1, shape);
            llm_writer_data(w, x, sizeof x);
            ok = llm_writer_finish(w, &err);
        } else {
            ok = false;
        }
        done = !test_failed;
        assert_true(ok == done);
        if (!done) assert_int_equal(err.status, LLM_ERROR_MEMORY);
        assert_int_equal(test_live, 0);
        assert_false(exists(temporary));
    }
    test_fail_in = -1;
    unlink(path);
    clear_bytes(&b);
}

/* ---- The types that quantizing chooses ------------------------------------------------------- */

/* An f32 file with three matrices per layer, the embedding and, if wanted, the output. */
static llm_file *layers_file(bytes *b, int n_layers, bool output) {
    static const char *const parts[] = {"attn_q", "attn_v", "ffn_down"};
    gguf g = {0};
    llm_error err;
    char name[40];
    float *zeros = (float *)calloc(256, sizeof *zeros);
    gguf_tensor(&g, "token_embd.weight", 1, 256, LLM_F32, zeros, 256 * sizeof *zeros);
    if (output) gguf_tensor(&g, "output.weight", 1, 256, LLM_F32, zeros, 256 * sizeof *zeros);
    for (int layer = 0; layer < n_layers; layer++)
        for (int k = 0; k < 3; k++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", layer, parts[k]);
            gguf_tensor(&g, name, 1, 256, LLM_F32, zeros, 256 * sizeof *zeros);
        }
    gguf_tensor(&g, "output_norm.weight", 0, 256, LLM_F32, zeros, 256 * sizeof *zeros);
    free(zeros);
    *b = gguf_finish(&g);
    llm_file *file = llm_file_from_memory(b->data, b->length, "layers", &err);
    assert_non_null(file);
    return file;
}

static llm_type quantized_type(const llm_file *file, const char *name, llm_type type, bool mixed) {
    return llm_quantize_tensor_type(file, llm_file_find_tensor(file, name), type, mixed);
}

/* llama.cpp's Q4_K_M keeps attn_v and ffn_down as q6_K in layer i of n where
 * i < n/8 or i >= 7n/8 or (i - n/8) % 3 == 2. */
static void test_mixed_types(void **state) {
    (void)state;
    static const int counts[] = {1, 8, 22, 32};
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        int n = counts[c];
        bytes b;
        llm_file *file = layers_file(&b, n, true);
        for (int i = 0; i < n; i++) {
            char name[40];
            bool more = i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2;
            snprintf(name, sizeof name, "blk.%d.attn_v.weight", i);
            assert_int_equal(quantized_type(file, name, LLM_Q4_K, true),
                             more ? LLM_Q6_K : LLM_Q4_K);
            assert_int_equal(quantized_type(file, name, LLM_Q5_K, true),
                             more ? LLM_Q6_K : LLM_Q5_K);
            assert_int_equal(quantized_type(file, name, LLM_Q4_K, false), LLM_Q4_K);
            assert_int_equal(quantized_type(file, name, LLM_Q4_0, true), LLM_Q4_0);
            snprintf(name, sizeof name, "blk.%d.ffn_down.weight", i);
            assert_int_equal(quantized_type(file, name, LLM_Q4_K, true),
                             more ? LLM_Q6_K : LLM_Q4_K);
            snprintf(name, sizeof name, "blk.%d.attn_q.weight", i);
            assert_int_equal(quantized_type(file, name, LLM_Q4_K, true), LLM_Q4_K);
        }
        assert_int_equal(quantized_type(file, "output_norm.weight", LLM_Q4_K, true), LLM_F32);
        llm_file_close(file);
        clear_bytes(&b);
    }
    /* The matrix that computes the logits keeps at least 6 bits. Without an output matrix, that is
     * the embedding. */
    for (int output = 0; output < 2; output++) {
        bytes b;
        llm_file *file = layers_file(&b, 1, output);
        assert_int_equal(quantized_type(file, "token_embd.weight", LLM_Q4_K, true),
                         output ? LLM_Q4_K : LLM_Q6_K);
        assert_int_equal(quantized_type(file, "token_embd.weight", LLM_Q4_K, false), LLM_Q6_K);
        assert_int_equal(quantized_type(file, "token_embd.weight", LLM_Q4_0, false), LLM_Q8_0);
        assert_int_equal(quantized_type(file, "token_embd.weight", LLM_F16, false), LLM_F16);
        if (output)
            assert_int_equal(quantized_type(file, "output.weight", LLM_Q4_K, true), LLM_Q6_K);
        llm_file_close(file);
        clear_bytes(&b);
    }
    /* rows that are not whole blocks get a type with smaller blocks */
    static const struct {
        llm_type wanted;
        uint64_t cols;
        llm_type expected;
    } rows[] = {{LLM_Q4_K, 256, LLM_Q4_K}, {LLM_Q4_K, 288, LLM_Q5_0}, {LLM_Q5_K, 288, LLM_Q5_1},
                {LLM_Q6_K, 288, LLM_Q8_0}, {LLM_Q4_0, 288, LLM_Q4_0}, {LLM_Q4_K, 272, LLM_F16},
                {LLM_Q8_0, 40, LLM_F16},   {LLM_Q4_0, 16, LLM_F16},   {LLM_BF16, 40, LLM_BF16},
                {LLM_F32, 1, LLM_F32}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_int_equal(llm_quantize_type(rows[i].wanted, rows[i].cols, false), rows[i].expected);
    assert_int_equal(test_live, 0);
}

/* ---- Models in several files ----------------------------------------------------------------- */

enum { SPLIT_NO = 1, SPLIT_COUNT = 2, SPLIT_TENSORS = 4, SPLIT_ALL = 7 };

static char part_path_buffer[1100];
static const char *part_path(int number, int count) {
    snprintf(part_path_buffer, sizeof part_path_buffer, "%s-%05d-of-%05d.gguf", path, number + 1,
             count);
    return part_path_buffer;
}

/* Part `number` of `count`, with two tensors "t.N" and "u.N" of four values. The first part has
 * metadata and only one tensor. `said_number` and `said_tensors` are the part number and tensor
 * count in its metadata. */
static bytes part(int number, int count, int said_number, int said_tensors, int keys) {
    gguf g = {0};
    uint16_t no = (uint16_t)said_number, n = (uint16_t)count;
    int32_t tensors = said_tensors;
    char name[16];
    if (number == 0) gguf_string(&g, "general.name", "split in parts");
    if (keys & SPLIT_NO) gguf_value(&g, "split.no", T_U16, &no, 2);
    if (keys & SPLIT_COUNT) gguf_value(&g, "split.count", T_U16, &n, 2);
    if (keys & SPLIT_TENSORS) gguf_value(&g, "split.tensors.count", T_I32, &tensors, 4);
    for (int t = number == 0; t < 2; t++) {
        float x[4] = {(float)number, (float)t, 2, 3};
        snprintf(name, sizeof name, "%c.%d", t ? 'u' : 't', number);
        gguf_tensor(&g, name, 0, 4, LLM_F32, x, sizeof x);
    }
    return gguf_finish(&g);
}

static void write_part(int number, int count, bytes b) {
    write_file(part_path(number, count), b.data, b.length);
    clear_bytes(&b);
}

static void write_parts(int count) {
    for (int i = 0; i < count; i++)
        write_part(i, count, part(i, count, i, 2 * count - 1, SPLIT_ALL));
}

static void remove_parts(int count) {
    for (int i = 0; i < count; i++) unlink(part_path(i, count));
}

static void refuse_parts(int opened, int count, llm_status status, const char *expected) {
    llm_error err = {.status = LLM_OK};
    llm_file *file = llm_file_open(part_path(opened, count), &err);
    if (file || !strstr(err.message, expected))
        print_error("expected \"%s\", got \"%s\"\n", expected, file ? "(no error)" : err.message);
    assert_null(file);
    assert_int_equal(err.status, status);
    assert_non_null(strstr(err.message, expected));
}

static void test_split_model(void **state) {
    (void)state;
    enum { COUNT_OF_PARTS = 4 };
    llm_error err;
    write_parts(COUNT_OF_PARTS);
    for (int opened = 0; opened < COUNT_OF_PARTS; opened++) { /* any of the parts may be passed */
        llm_file *file = llm_file_open(part_path(opened, COUNT_OF_PARTS), &err);
        if (!file) fail_msg("%s", err.message);
        assert_int_equal(llm_file_n_parts(file), COUNT_OF_PARTS);
        assert_int_equal(llm_file_n_tensors(file), 2 * COUNT_OF_PARTS - 1);
        assert_non_null(llm_file_find(file, "general.name"));
        assert_string_equal(llm_file_path(file), part_path(0, COUNT_OF_PARTS));
        uint64_t size = 0;
        for (int i = 0; i < COUNT_OF_PARTS; i++) {
            struct stat s;
            char name[16];
            assert_int_equal(stat(part_path(i, COUNT_OF_PARTS), &s), 0);
            size += (uint64_t)s.st_size;
            for (int t = i == 0; t < 2; t++) {
                snprintf(name, sizeof name, "%c.%d", t ? 'u' : 't', i);
                const llm_tensor *tensor = llm_file_find_tensor(file, name);
                assert_non_null(tensor);
                assert_true(((const float *)tensor->data)[0] == (float)i &&
                            ((const float *)tensor->data)[1] == (float)t);
            }
        }
        assert_true(llm_file_size(file) == size);
        walk(file);
        llm_file_close(file);
    }
    /* a file with a count of 0 or 1 is not split, whatever its name */
    for (int count = 0; count < 2; count++) {
        bytes b = part(1, count, 0, 2, SPLIT_COUNT);
        write_file(path, b.data, b.length);
        clear_bytes(&b);
        llm_file *file = llm_file_open(path, &err);
        assert_non_null(file);
        assert_int_equal(llm_file_n_parts(file), 1);
        llm_file_close(file);
    }
    /* quantizing joins the parts into one file */
    assert_true(llm_quantize(part_path(2, COUNT_OF_PARTS), path, LLM_F16, false, NULL, NULL, &err));
    llm_file *whole = llm_file_open(path, &err);
    assert_non_null(whole);
    assert_int_equal(llm_file_n_parts(whole), 1);
    assert_int_equal(llm_file_n_tensors(whole), 2 * COUNT_OF_PARTS - 1);
    assert_null(llm_file_find(whole, "split.count"));
    for (int i = 0; i < 2 * COUNT_OF_PARTS - 1; i++) {
        const llm_tensor *tensor = llm_file_tensor(whole, i);
        float x[4];
        llm_type_find(tensor->type)->unpack(tensor->data, x, 4);
        assert_true(x[0] == (float)(tensor->name.data[2] - '0') &&
                    x[1] == (float)(tensor->name.data[0] == 'u') && x[3] == 3);
    }
    llm_file_close(whole);
    unlink(path);
    remove_parts(COUNT_OF_PARTS);
}

static void test_damaged_split_models(void **state) {
    (void)state;
    write_parts(3);
    unlink(part_path(1, 3));
    refuse_parts(0, 3, LLM_ERROR_FILE, "part 2 of 3 of the model is missing");
    refuse_parts(2, 3, LLM_ERROR_FILE, "part 2 of 3 of the model is missing");
    write_parts(3);
    unlink(part_path(0, 3));
    refuse_parts(2, 3, LLM_ERROR_FILE, "part 1 of 3 of the model is missing");
    write_parts(3);
    write_file(part_path(2, 3), "GGUF", 4);
    refuse_parts(0, 3, LLM_ERROR_FORMAT, "part 3 of 3 of the model is missing or damaged");
    refuse_parts(2, 3, LLM_ERROR_FORMAT, "the version");
    write_part(2, 3, part(2, 3, 1, 5, SPLIT_ALL));
    refuse_parts(0, 3, LLM_ERROR_FORMAT, "but its metadata says part 2 of 3");
    refuse_parts(2, 3, LLM_ERROR_FORMAT, "its name must end in -00002-of-00003.gguf");
    write_part(2, 3, part(2, 5, 2, 5, SPLIT_ALL));
    refuse_parts(0, 3, LLM_ERROR_FORMAT, "but its metadata says part 3 of 5");
    write_part(2, 3, part(2, 3, 2, 6, SPLIT_ALL));
    refuse_parts(0, 3, LLM_ERROR_FORMAT, "with 6: the parts are of different models");
    write_part(2, 3, part(1, 3, 2, 5, SPLIT_ALL)); /* the tensors of another part */
    refuse_parts(0, 3, LLM_ERROR_FORMAT, "two parts have a tensor called '");
    write_part(2, 3, part(0, 3, 2, 5, SPLIT_ALL)); /* one tensor too few */
    refuse_parts(1, 3, LLM_ERROR_FORMAT, "the 3 parts hold 4 tensors, but should hold 5");
    write_part(2, 3, part(2, 3, 2, 5, SPLIT_COUNT | SPLIT_TENSORS));
    refuse_parts(0, 3, LLM_ERROR_FORMAT, "split.no does not say which");
    write_part(2, 3, part(2, 3, 3, 5, SPLIT_ALL));
    refuse_parts(0, 3, LLM_ERROR_FORMAT, "split.no does not say which");
    write_part(2, 3, part(2, 3, 2, 5, SPLIT_COUNT | SPLIT_NO));
    refuse_parts(2, 3, LLM_ERROR_FORMAT, "has no split.tensors.count");
    write_part(2, 3, part(2, 3, 2, -5, SPLIT_ALL));
    refuse_parts(2, 3, LLM_ERROR_FORMAT, "has no split.tensors.count");
    /* opening the first part checks its own count */
    gguf g = {0};
    gguf_string(&g, "split.count", "three");
    write_part(0, 3, gguf_finish(&g));
    refuse_parts(0, 3, LLM_ERROR_FORMAT, "split.count is not a number from 0 to 99999");
    /* a file in memory cannot find the other parts */
    llm_error err;
    bytes b = part(0, 3, 0, 5, SPLIT_ALL);
    assert_null(llm_file_from_memory(b.data, b.length, "memory", &err));
    assert_int_equal(err.status, LLM_ERROR_UNSUPPORTED);
    assert_non_null(strstr(err.message, "one of 3 parts of a model"));
    assert_null(llm_file_from_memory(b.data, b.length, "memory", NULL));
    clear_bytes(&b);
    /* when an allocation fails, the files that were opened are closed */
    write_parts(3);
    long failures = 0;
    for (bool done = false; !done; failures++) {
        test_fail_in = failures;
        test_failed = false;
        llm_file *file = llm_file_open(part_path(1, 3), &err);
        done = !test_failed;
        assert_true((file != NULL) == done);
        if (!done) assert_int_equal(err.status, LLM_ERROR_MEMORY);
        llm_file_close(file);
        assert_int_equal(test_live, 0);
    }
    test_fail_in = -1;
    assert_true(failures > 20);
    remove_parts(3);
}

/* ---- Values that are not finite -------------------------------------------------------------- */

/* llm_type_check finds a scale, a minimum or a value that is not finite, in every type, and its
 * index. */
static void test_check_types(void **state) {
    static const struct {
        llm_type type;
        int bits[2]; /* byte offsets in a block of 16-bit numbers; -1: none */
    } cases[] = {{LLM_F32, {2, -1}},    {LLM_F16, {0, -1}},    {LLM_BF16, {0, -1}},
                 {LLM_Q8_0, {0, -1}},   {LLM_Q4_0, {0, -1}},   {LLM_Q4_1, {0, 2}},
                 {LLM_Q5_0, {0, -1}},   {LLM_Q5_1, {0, 2}},    {LLM_Q4_K, {0, 2}},
                 {LLM_Q5_K, {0, 2}},    {LLM_Q6_K, {208, -1}}, {LLM_Q4_Z, {0, -1}}};
    enum { VALUES = 3 * 1024 + 512 };
    static float values[VALUES];
    static uint8_t blocks[4 * VALUES];
    test_random r = {5};
    (void)state;
    for (int i = 0; i < VALUES; i++) values[i] = (float)random_below(&r, 2001) / 1000 - 1;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const llm_type_info *info = llm_type_find(cases[c].type);
        llm_pack(cases[c].type, values, blocks, VALUES);
        assert_int_equal(llm_type_check(cases[c].type, blocks, VALUES).count, 0);
        for (int k = 0; k < 4; k++) {
            int at = cases[c].bits[k / 2];
            if (at < 0) continue;
            /* infinity and NaN as f16 bits; for f32 and bf16, as the value's upper 16 bits */
            bool brain = cases[c].type == LLM_F32 || cases[c].type == LLM_BF16;
            uint16_t bad = brain ? k % 2 ? 0x7fc0 : 0xff80 : k % 2 ? 0x7e00 : 0xfc00, good[2];
            uint64_t n = VALUES / (uint64_t)info->block_values, first = n / 2, last = n - 1;
            uint8_t *p = blocks + first * (uint64_t)info->block_bytes + at,
                    *q = blocks + last * (uint64_t)info->block_bytes + at;
            memcpy(good, p, 2);
            memcpy(good + 1, q, 2);
            memcpy(q, &bad, 2);
            llm_faults faults = llm_type_check(cases[c].type, blocks, VALUES);
            assert_int_equal(faults.count, info->block_values);
            assert_int_equal(faults.first, last * (uint64_t)info->block_values);
            memcpy(p, &bad, 2);
            faults = llm_type_check(cases[c].type, blocks, VALUES);
            assert_int_equal(faults.count, 2 * info->block_values);
            assert_int_equal(faults.first, first * (uint64_t)info->block_values);
            assert_true(isnan(faults.value) || isinf(faults.value));
            if (cases[c].type == LLM_F16)
                assert_true(k % 2 ? isnan(faults.value) : isinf(faults.value));
            memcpy(p, good, 2);
            memcpy(q, good + 1, 2);
        }
    }
}

static void test_check_files(void **state) {
    (void)state;
    llm_error err;
    write_parts(3);
    llm_file *file = llm_file_open(part_path(0, 3), &err);
    assert_true(file && llm_file_check(file, &err) && err.status == LLM_OK);
    llm_file_close(file);
    /* also in the last part */
    float x[4] = {2, 1, 2, -INFINITY};
    bytes b = slurp(part_path(2, 3));
    size_t at = 0;
    for (float good[4] = {2, 1, 2, 3}; memcmp(b.data + at, good, sizeof good);) at += 4;
    memcpy(b.data + at, x, sizeof x);
    write_part(2, 3, b);
    file = llm_file_open(part_path(0, 3), &err);
    assert_non_null(file);
    assert_false(llm_file_check(file, &err));
    assert_int_equal(err.status, LLM_ERROR_FORMAT);
    assert_non_null(
        strstr(err.message,
               "the tensor u.2 has 1 values that are not finite, the first is -inf at index 3"));
    llm_file_close(file);
    remove_parts(3);
    assert_int_equal(test_live, 0);
}

/* A matrix of 2 rows of 256 values, all 1 except the one at `index`. */
static void write_matrix(const char *name, float value, uint64_t index) {
    float x[512];
    gguf g = {0};
    for (int i = 0; i < 512; i++) x[i] = 1;
    x[index] = value;
    gguf_tensor(&g, "m", 2, 256, LLM_F32, x, sizeof x);
    bytes b = gguf_finish(&g);
    write_file(name, b.data, b.length);
    clear_bytes(&b);
}

/* llm_quantize refuses values that are not finite before or after the conversion, and leaves no
 * file. */
static void test_quantize_not_finite(void **state) {
    static const struct {
        float value;
        llm_type type;
        const char *words; /* NULL: accepted */
    } cases[] = {
        {NAN, LLM_Q4_0,
         "the tensor m has 1 values that are not finite, the first is nan at index 300"},
        {INFINITY, LLM_F16, "the first is inf at index 300"},
        {-INFINITY, LLM_F32, "the first is -inf at index 300"}, /* copied unchanged */
        {NAN, LLM_Q6_K, "the first is nan at index 300"},
        {65504, LLM_F16, NULL},
        {-1e5f, LLM_F16,
         "the tensor m has the value -100000 at index 300, which is too large for f16"},
        {1e5f, LLM_BF16, NULL},
        {1e5f, LLM_Q8_0, NULL},
        {1e7f, LLM_Q8_0, "the value 1e+07 at index 300, which is too large for q8_0"},
        {1e7f, LLM_Q5_1, "the value 1e+07 at index 300, which is too large for q5_1"},
    };
    char in[1010];
    (void)state;
    snprintf(in, sizeof in, "%s.in", path);
    unlink(path);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        llm_error err = {.status = LLM_OK};
        write_matrix(in, cases[i].value, 300);
        bool ok = llm_quantize(in, path, cases[i].type, false, NULL, NULL, &err);
        if (ok != !cases[i].words || (!ok && !strstr(err.message, cases[i].words)))
            fail_msg("case %zu: %s", i, err.message);
        assert_true(ok || strstr(err.message, in));
        assert_int_equal(access(path, F_OK) == 0, ok);
        assert_true(access(temporary, F_OK) != 0);
        unlink(path);
    }
    unlink(in);
    assert_int_equal(test_live, 0);
}

/* A GGUF file of 123 tensors begins with bytes that could also be the length of a safetensors
 * header (14 GB) and its '{'. */
static void test_large_file_of_123_tensors(void **state) {
    static const unsigned char start[16] = {'G', 'G', 'U', 'F', 3, 0, 0, 0, 123};
    size_t size = (size_t)15000000000u;
    llm_error err;
    (void)state;
    char *data = sizeof size < 8 ? NULL
                                 : mmap(NULL, size, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!data || data == MAP_FAILED) skip();
    memcpy(data, start, sizeof start);
    assert_null(llm_file_from_memory(data, size, "large", &err));
    if (strstr(err.message, "safetensors")) fail_msg("%s", err.message);
    munmap(data, size);
}

int main(void) {
    const char *folder = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/llm-test-files-%ld.gguf", folder ? folder : "/tmp",
             (long)getpid());
    snprintf(temporary, sizeof temporary, "%s.tmp", path);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_read_v2),        cmocka_unit_test(test_read_v3),
        cmocka_unit_test(test_conversions),    cmocka_unit_test(test_files_without_tensors),
        cmocka_unit_test(test_many_names),     cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_truncated_files), cmocka_unit_test(test_flipped_bytes),
        cmocka_unit_test(test_not_gguf),       cmocka_unit_test(test_hostile_counts),
        cmocka_unit_test(test_hostile_values), cmocka_unit_test(test_hostile_tensors),
        cmocka_unit_test(test_hostile_layout), cmocka_unit_test(test_many_tensors_take_linear_time),
        cmocka_unit_test(test_open),           cmocka_unit_test(test_write_and_read),
        cmocka_unit_test(test_copy_a_file),           cmocka_unit_test(test_writer_misuse),
        cmocka_unit_test(test_full_disk),      cmocka_unit_test(test_failed_allocations),
        cmocka_unit_test(test_mixed_types),    cmocka_unit_test(test_split_model),
        cmocka_unit_test(test_damaged_split_models),
        cmocka_unit_test(test_check_types),    cmocka_unit_test(test_check_files),
        cmocka_unit_test(test_quantize_not_finite),
        cmocka_unit_test(test_large_file_of_123_tensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
