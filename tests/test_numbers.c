/* Chapter 7 of llm.h: the bits of each storage type, compared with those of the gguf package
 * (tests/data/numbers.bin, written by tests/make_numbers_golden.py) and with values computed
 * from the definition. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>
#define LLM_IMPLEMENTATION
#include "../llm.h"
#include "../models/quantize.c"

/* Open a file of tests/data, which is next to this source file or in ./tests. */
static FILE *open_data(const char *name) {
    char path[1024];
    const char *slash = strrchr(__FILE__, '/');
    snprintf(path, sizeof path, "%.*sdata/%s", slash ? (int)(slash - __FILE__ + 1) : 0, __FILE__,
             name);
    FILE *f = fopen(path, "rb");
    if (!f) {
        snprintf(path, sizeof path, "tests/data/%s", name);
        f = fopen(path, "rb");
    }
    return f;
}

static uint16_t to_bf16(float x) {
    uint16_t bits;
    llm_pack(LLM_BF16, &x, &bits, 1);
    return bits;
}

static void check_values(const llm_type_info *type, const float *values, const float *expected,
                         uint32_t count) {
    for (uint32_t i = 0; i < count; i++)
        if (memcmp(values + i, expected + i, sizeof *values) != 0 && values[i] != expected[i])
            fail_msg("%s: value %u is %.9g, expected %.9g", type->name, i, values[i], expected[i]);
}

static void test_gguf_package(void **state) {
    (void)state;
    static const llm_type packed_types[] = {LLM_F16,  LLM_BF16, LLM_Q8_0, LLM_Q4_0,
                                            LLM_Q4_1, LLM_Q5_0, LLM_Q5_1};
    static const llm_type read_types[] = {LLM_Q4_K, LLM_Q5_K, LLM_Q6_K};
    enum { READ = 8 * 256 };
    FILE *f = open_data("numbers.bin");
    assert_non_null(f);
    uint32_t count = 0;
    assert_int_equal(fread(&count, sizeof count, 1, f), 1);
    assert_true(count > 0 && count % 32 == 0 && count < 1 << 20);
    size_t bytes = count * sizeof(float), room = bytes + READ * sizeof(float);
    float *x = malloc(bytes), *expected_values = malloc(room), *values = malloc(room);
    uint8_t *expected = malloc(bytes), *packed = malloc(room);
    assert_int_equal(fread(x, 1, bytes, f), bytes);
    for (size_t k = 0; k < sizeof packed_types / sizeof *packed_types; k++) {
        const llm_type_info *type = llm_type_find(packed_types[k]);
        size_t packed_bytes = count / (size_t)type->block_values * (size_t)type->block_bytes;
        assert_int_equal(fread(expected, 1, packed_bytes, f), packed_bytes);
        assert_int_equal(fread(expected_values, 1, bytes, f), bytes);
        llm_pack(type->type, x, packed, count);
        for (size_t i = 0; i < packed_bytes; i++)
            if (packed[i] != expected[i])
                fail_msg("%s: byte %zu of the packed values is %d, expected %d", type->name, i,
                         packed[i], expected[i]);
        type->unpack(packed, values, count);
        check_values(type, values, expected_values, count);
    }
    for (size_t k = 0; k < sizeof read_types / sizeof *read_types; k++) {
        const llm_type_info *type = llm_type_find(read_types[k]);
        size_t packed_bytes = READ / (size_t)type->block_values * (size_t)type->block_bytes;
        assert_int_equal(fread(packed, 1, packed_bytes, f), packed_bytes);
        assert_int_equal(fread(expected_values, sizeof(float), READ, f), READ);
        type->unpack(packed, values, READ);
        check_values(type, values, expected_values, READ);
    }
    assert_int_equal(fgetc(f), EOF);
    fclose(f);
    free(x), free(expected_values), free(values), free(expected), free(packed);
}

/* The value of an f16, by its definition. */
static double f16_value(uint16_t half) {
    int exponent = half >> 10 & 31, fraction = half & 0x3ff;
    double magnitude = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
    return half & 0x8000 ? -magnitude : magnitude;
}

static void test_f16_every_value(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t half = (uint16_t)i;
        float x = llm__f16_to_f32(half);
        bool special = (half >> 10 & 31) == 31;
        if (special && (half & 0x3ff)) {
            assert_true(isnan(x));
            assert_true(isnan(llm__f16_to_f32(llm__f32_to_f16(x))));
        } else {
            if (special) assert_true(isinf(x) && (x < 0) == (half >> 15));
            else assert_true((double)x == f16_value(half));
            /* the round trip keeps every value, minus zero included */
            assert_int_equal(llm__f32_to_f16(x), half);
        }
    }
}

/* A value halfway between two neighbours rounds to the even one; any other value rounds to the
 * nearer one. */
static void test_f16_rounding(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 0x7bff; i++) {
        float low = llm__f16_to_f32((uint16_t)i), high = llm__f16_to_f32((uint16_t)(i + 1));
        float middle = (float)(((double)low + high) / 2); /* exact */
        uint16_t even = (uint16_t)(i & 1 ? i + 1 : i);
        assert_int_equal(llm__f32_to_f16(middle), even);
        assert_int_equal(llm__f32_to_f16(-middle), even | 0x8000);
        assert_int_equal(llm__f32_to_f16(nextafterf(middle, 0.0f)), i);
        assert_int_equal(llm__f32_to_f16(nextafterf(middle, INFINITY)), i + 1);
    }
    assert_int_equal(llm__f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(llm__f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(llm__f32_to_f16(3e38f), 0x7c00);
    assert_int_equal(llm__f32_to_f16(-INFINITY), 0xfc00);
    /* a NaN does not become infinity */
    assert_true(isnan(llm__f16_to_f32(llm__f32_to_f16(llm__float_from_bits(0x7f800001)))));
    assert_true(isnan(llm__f16_to_f32(llm__f32_to_f16(llm__float_from_bits(0xff801fff)))));
    assert_int_equal(llm__f32_to_f16(1e-45f), 0);
    assert_int_equal(llm__f32_to_f16(-1e-45f), 0x8000);
}

static void test_bf16(void **state) {
    (void)state;
    for (uint32_t i = 0; i < 65536; i++) {
        uint16_t bits = (uint16_t)i;
        float x = llm__bf16_to_f32(bits);
        if (isnan(x)) assert_true(isnan(llm__bf16_to_f32(to_bf16(x))));
        else assert_int_equal(to_bf16(x), bits);
        if (i >= 0x7f7f) continue;
        float middle = llm__float_from_bits(i << 16 | 0x8000);
        assert_int_equal(to_bf16(middle), i & 1 ? i + 1 : i);
        assert_int_equal(to_bf16(nextafterf(middle, 0.0f)), i);
        assert_int_equal(to_bf16(nextafterf(middle, INFINITY)), i + 1);
    }
    assert_int_equal(to_bf16(3.4e38f), 0x7f80); /* rounds up, to infinity */
    /* a NaN does not become infinity */
    assert_true(isnan(llm__bf16_to_f32(to_bf16(llm__float_from_bits(0x7f800001)))));
}

/* Errors of the block formats: at most half a step, plus the rounding of the scale to f16. */
static void test_block_errors(void **state) {
    (void)state;
    float x[64], y[64];
    uint8_t packed[2 * LLM__Q8_0_BYTES];
    uint32_t seed = 1;
    for (int k = 0; k < 2000; k++) {
        float largest[2] = {0.0f, 0.0f};
        for (int i = 0; i < 64; i++) {
            seed = seed * 1664525 + 1013904223;
            x[i] = ((float)(seed >> 8) / 8388608.0f - 1.0f) * (i < 32 ? 1.0f : 40.0f);
            if (fabsf(x[i]) > largest[i / 32]) largest[i / 32] = fabsf(x[i]);
        }
        llm_pack(LLM_Q8_0, x, packed, 64);
        llm__unpack_q8_0(packed, y, 64);
        for (int i = 0; i < 64; i++)
            assert_true(fabsf(x[i] - y[i]) <= largest[i / 32] * (0.5f / 127 + 0.0006f));
        llm_pack(LLM_Q4_0, x, packed, 64);
        llm__unpack_q4_0(packed, y, 64);
        /* q4_0 has the levels -8 to 7: on the side that ends at 7, the error is up to a step */
        for (int i = 0; i < 64; i++)
            assert_true(fabsf(x[i] - y[i]) <= largest[i / 32] * (1.0f / 8 + 0.0006f));
    }
}

static float normal_value(uint32_t *seed) { /* roughly normal, standard deviation 1 */
    float sum = 0.0f;
    for (int i = 0; i < 12; i++) {
        *seed = *seed * 1664525 + 1013904223;
        sum += (float)(*seed >> 8) / 16777216.0f;
    }
    return sum - 6.0f;
}

/* The RMS error of each format on normally distributed values stays below its bound, at any scale
 * of the values. (The gguf package has the same errors for the formats that it packs. ggml has
 * 0.0721, 0.0385 and 0.0178 for q4_K, q5_K and q6_K: see compare_types.py.) */
static void test_rounding_errors(void **state) {
    (void)state;
    static const struct { llm_type type; double error;
    } expected[] = {{LLM_Q8_0, 0.0054}, {LLM_Q6_K, 0.0175}, {LLM_Q5_1, 0.0380}, {LLM_Q5_0, 0.0430},
                    {LLM_Q5_K, 0.0360}, {LLM_Q4_1, 0.0785}, {LLM_Q4_0, 0.0865}, {LLM_Q4_K, 0.0717}};
    enum { N = 256 * 40 };
    static float x[N], y[N];
    static uint8_t packed[N * 2];
    static const float sizes[] = {1.0f, 0.02f, 500.0f};
    uint32_t seed = 7;
    for (int size = 0; size < 3; size++) {
        for (int i = 0; i < N; i++) x[i] = normal_value(&seed) * sizes[size];
        for (size_t k = 0; k < sizeof expected / sizeof *expected; k++) {
            const llm_type_info *type = llm_type_find(expected[k].type);
            double sum = 0.0;
            llm_pack(type->type, x, packed, N);
            type->unpack(packed, y, N);
            for (int i = 0; i < N; i++) sum += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
            double error = sqrt(sum / N) / (double)sizes[size];
            if (!(error < expected[k].error))
                fail_msg("%s: error %g, expected below %g", type->name, error, expected[k].error);
        }
    }
}

/* Blocks that are zero, constant, one-sided, or zero except for one value have a small error. */
static void test_one_sided_and_constant_blocks(void **state) {
    (void)state;
    float x[256], y[256];
    uint8_t packed[1024];
    for (int i = 0; llm_type_at(i); i++) {
        const llm_type_info *type = llm_type_at(i);
        for (int kind = 0; kind < 6; kind++) {
            for (int k = 0; k < 256; k++)
                x[k] = kind == 0   ? 0.0f
                       : kind == 1 ? 3.0f
                       : kind == 2 ? -3.0f
                       : kind == 3 ? (float)(k % 8)
                       : kind == 4 ? (float)-(k % 8)
                       : k == 77   ? 5.0f
                                   : 0.0f;
            llm_pack(type->type, x, packed, 256);
            type->unpack(packed, y, 256);
            for (int k = 0; k < 256; k++)
                if (!(fabsf(x[k] - y[k]) <=
                      (type->type == LLM_Q4_0 && kind > 2 && kind < 5 ? 0.9f : 0.3f)) ||
                    (kind == 0 && y[k] != 0.0f))
                    fail_msg("%s, kind %d: %g became %g", type->name, kind, x[k], y[k]);
        }
    }
}

/* Values that are not finite, and arbitrary packed bytes, cause no undefined behaviour. */
static void test_arbitrary_input(void **state) {
    (void)state;
    const float strange[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e-45f, -1e-40f, 0.0f};
    float x[256], y[256];
    uint8_t packed[1024];
    for (int a = 0; a < 8; a++)
        for (int b = 0; b < 8; b++) {
            for (int i = 0; i < 256; i++) x[i] = i % 3 ? strange[a] : strange[b];
            for (int i = 0; llm_type_at(i); i++) {
                llm_pack(llm_type_at(i)->type, x, packed, 256);
                llm_type_at(i)->unpack(packed, y, 256);
            }
        }
    for (int k = 0; k < 1000; k++) {
        for (int i = 0; i < 1024; i++) packed[i] = (uint8_t)((k * 73 + i * 151) ^ (k >> 3));
        for (int i = 0; llm_type_at(i); i++) llm_type_at(i)->unpack(packed, y, 256);
    }
}

/* q8_0 rounds halves away from zero, as ggml does. The largest magnitude here is 127, so the scale
 * is 1. */
static void test_q8_0_halves(void **state) {
    static const struct {
        float x;
        int q;
    } cases[] = {{127, 127},  {0.5f, 1},  {1.5f, 2},       {2.5f, 3},     {-0.5f, -1}, {-1.5f, -2},
                 {-2.5f, -3}, {0.25f, 0}, {-126.5f, -127}, {126.5f, 127}, {NAN, 0}};
    float x[32] = {0};
    uint8_t packed[LLM__Q8_0_BYTES];
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) x[i] = cases[i].x;
    llm_pack(LLM_Q8_0, x, packed, 32);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if ((int8_t)packed[2 + i] != cases[i].q)
            fail_msg("%g became %d, not %d", (double)x[i], (int8_t)packed[2 + i], cases[i].q);
}

/* In the formats without a minimum, a NaN becomes zero and the other values are not affected. */
static void test_nan_is_zero(void **state) {
    static const llm_type types[] = {LLM_Q8_0, LLM_Q4_0, LLM_Q5_0};
    (void)state;
    for (size_t k = 0; k < sizeof types / sizeof *types; k++) {
        const llm_type_info *type = llm_type_find(types[k]);
        float x[32], y[32];
        uint8_t packed[64];
        for (int i = 0; i < 32; i++) x[i] = i == 3 || i == 20 ? NAN : i % 2 ? -4.0f : 2.0f;
        llm_pack(type->type, x, packed, 32);
        type->unpack(packed, y, 32);
        for (int i = 0; i < 32; i++) {
            float expected = i == 3 || i == 20 ? 0.0f : x[i];
            if (!(fabsf(y[i] - expected) < 0.04f))
                fail_msg("%s: value %d is %g", type->name, i, (double)y[i]);
        }
    }
}

/* q4_Z, the format for AWQ and GPTQ weights: 16 levels with one scale and an integer zero point
 * from 0 to 15 per block. Values at these levels come back exactly. */
static void test_q4_Z(void **state) {
    (void)state;
    for (int zero = 0; zero < 16; zero++) {
        float x[32], y[32];
        uint8_t packed[LLM__Q4_Z_BYTES];
        for (int i = 0; i < 32; i++) x[i] = 0.25f * (float)(i * 7 % 16 - zero);
        llm_pack(LLM_Q4_Z, x, packed, 32);
        llm__own_type.unpack(packed, y, 32);
        for (int i = 0; i < 32; i++)
            if (x[i] != y[i]) fail_msg("zero %d: %g became %g", zero, (double)x[i], (double)y[i]);
    }
    /* the bytes of a block: f16 scale, zero point (16 is possible too), nibbles */
    uint8_t block[LLM__Q4_Z_BYTES] = {0x00, 0x38 /* 0.5 */, 16, 0};
    float y[32];
    for (int i = 0; i < 16; i++) block[4 + i] = (uint8_t)(i | (15 - i) << 4);
    llm__unpack_q4_Z(block, y, 32);
    for (int i = 0; i < 32; i++) assert_true(y[i] == 0.5f * (float)((i < 16 ? i : 31 - i) - 16));
}

/* The levels, scales and minimums that llm__read_levels returns to kernels give the same values as
 * unpacking the block. */
static void test_read_levels(void **state) {
    (void)state;
    static const llm_type types[] = {LLM_Q8_0, LLM_Q4_0, LLM_Q4_1, LLM_Q5_0, LLM_Q5_1,
                                     LLM_Q4_K, LLM_Q5_K, LLM_Q6_K, LLM_Q4_Z};
    enum { COLS = 3 * 256 };
    uint32_t seed = 5;
    for (size_t k = 0; k < sizeof types / sizeof *types; k++) {
        const llm_type_info *type = llm_type_find(types[k]);
        static uint8_t row[COLS * 2];
        float values[COLS];
        size_t bytes = llm__row_bytes(type->type, COLS);
        for (size_t i = 0; i < bytes; i++) {
            seed = seed * 1664525 + 1013904223;
            row[i] = (uint8_t)(seed >> 24);
        }
        /* scales of moderate size: no infinities, no NaNs */
        for (size_t at = 0; at < bytes; at += (size_t)type->block_bytes) {
            uint8_t *scale = row + at + (type->type == LLM_Q6_K ? 208 : 0);
            scale[1] = (uint8_t)(0x30 | (scale[1] & 0x8f));
            if (type->type == LLM_Q4_1 || type->type == LLM_Q5_1 || type->type == LLM_Q4_K ||
                type->type == LLM_Q5_K)
                scale[3] = (uint8_t)(0x30 | (scale[3] & 0x8f));
            if (type->type == LLM_Q4_Z) llm__write_u16(scale + 2, scale[2] % 17);
        }
        type->unpack(row, values, COLS);
        for (int block = 0; block < COLS / 32; block++) {
            llm__levels l;
            llm__read_levels(type->type, row, block, &l);
            double scale = f16_value(l.scale), minimum = f16_value(l.minimum);
            for (int i = 0; i < 32; i++) {
                double q = l.q[i], value = 0;
                switch (type->type) {
                case LLM_Q8_0: value = scale * (int8_t)l.q[i]; break;
                case LLM_Q4_0: value = scale * (q - 8); break;
                case LLM_Q5_0: value = scale * (q - 16); break;
                case LLM_Q4_Z: value = scale * (q - l.minimum); break;
                case LLM_Q6_K: value = scale * (int8_t)l.group[i / 16] * (q - 32); break;
                case LLM_Q4_K:
                case LLM_Q5_K: value = scale * l.group[0] * q - minimum * l.group[1]; break;
                default: value = scale * q + minimum;
                }
                if (!(fabs(value - (double)values[32 * block + i]) <=
                      1e-6 * (fabs(value) + fabs(minimum) * 64)))
                    fail_msg("%s: value %d is %g, not %g", type->name, 32 * block + i, value,
                             (double)values[32 * block + i]);
            }
        }
    }
}

static void test_type_table(void **state) {
    (void)state;
    static const struct { llm_type type; const char *name; int values, bytes;
    } expected[] = {
        {LLM_F32, "f32", 1, 4},       {LLM_F16, "f16", 1, 2},       {LLM_BF16, "bf16", 1, 2},
        {LLM_Q8_0, "q8_0", 32, 34},   {LLM_Q4_0, "q4_0", 32, 18},   {LLM_Q4_1, "q4_1", 32, 20},
        {LLM_Q5_0, "q5_0", 32, 22},   {LLM_Q5_1, "q5_1", 32, 24},   {LLM_Q4_K, "q4_K", 256, 144},
        {LLM_Q5_K, "q5_K", 256, 176}, {LLM_Q6_K, "q6_K", 256, 210},
    };
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        const llm_type_info *type = llm_type_find(expected[i].type);
        assert_non_null(type);
        assert_ptr_equal(type, llm_type_by_name(expected[i].name));
        assert_int_equal(type->block_values, expected[i].values);
        assert_int_equal(type->block_bytes, expected[i].bytes);
    }
    assert_ptr_equal(llm_type_by_name("q4_k"), llm_type_find(LLM_Q4_K));
    assert_ptr_equal(llm_type_by_name("Q4_K"), llm_type_find(LLM_Q4_K));
    assert_ptr_equal(llm_type_by_name("BF16"), llm_type_find(LLM_BF16));
    assert_null(llm_type_find((llm_type)4));
    assert_null(llm_type_find((llm_type)-1));
    static const char *const unknown_names[] = {"q8_K", "Q4-0", "q4\x1F\x10", "q4_KK", "kq4_K",
                                           "q8",   "f",    "q4_",        "",      NULL};
    for (size_t i = 0; i < sizeof unknown_names / sizeof *unknown_names; i++)
        assert_null(llm_type_by_name(unknown_names[i]));
    assert_null(llm_type_at(-1));
    assert_null(llm_type_at(1000));
    for (int i = 0; llm_type_at(i); i++)
        assert_ptr_equal(llm_type_find(llm_type_at(i)->type), llm_type_at(i));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gguf_package), cmocka_unit_test(test_f16_every_value),
        cmocka_unit_test(test_f16_rounding), cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_block_errors), cmocka_unit_test(test_rounding_errors),
        cmocka_unit_test(test_one_sided_and_constant_blocks),
        cmocka_unit_test(test_arbitrary_input), cmocka_unit_test(test_q8_0_halves),
        cmocka_unit_test(test_nan_is_zero), cmocka_unit_test(test_q4_Z),
        cmocka_unit_test(test_read_levels), cmocka_unit_test(test_type_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
