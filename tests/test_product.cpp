/* The seven versions of a product in docs/17-product.cu equal the plain loop: for shapes that fill
 * no tile, in each order of the emulated device's threads, with the same bits in every order.
 *
 *  make build/test_product && build/test_product */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <vector>
extern "C" {
#include <cmocka.h>
}

#define LLM_EMULATED
#include "../docs/17-product.cu"
#include "../llm.h"
#include "../models/quantize.h"

enum { VERSIONS = sizeof versions / sizeof *versions };
static const char *const orders[] = {"forward", "reverse", "random:1", "random:2"};
/* rows, columns; a tile has 16 rows, a chunk 64 columns, a split 8 segments of chunks */
static const int shapes[][2] = {{1, 32},   {16, 64},   {17, 96},   {40, 512},
                                {5, 1024}, {33, 1056}, {130, 320}, {3, 4096 + 32}};

/* Random weights as a file has them, x, and the result of the plain loop. */
struct example {
    std::vector<unsigned char> blocks;
    std::vector<float> x, out;
    std::vector<double> expected, size; /* sums of products, and of absolute products */

    example(int rows, int columns, uint64_t seed)
        : blocks((size_t)rows * (size_t)columns / 32 * 18), x((size_t)columns), out((size_t)rows),
          expected((size_t)rows), size((size_t)rows) {
        auto random = [&] {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            return (float)((int32_t)(seed >> 32) / 2147483648.0);
        };
        std::vector<float> row(x.size());
        for (float &v : x) v = random();
        for (size_t r = 0; r < out.size(); r++) {
            unsigned char *to = blocks.data() + r * x.size() / 32 * 18;
            for (float &v : row) v = random();
            llm_pack(LLM_Q4_0, row.data(), to, columns);
            llm_type_find(LLM_Q4_0)->unpack(to, row.data(), columns);
            for (size_t i = 0; i < x.size(); i++) {
                expected[r] += (double)row[i] * x[i];
                size[r] += fabs((double)row[i] * x[i]);
            }
        }
    }
    /* Run a version. Returns its largest error, relative to `size`. */
    double run(int number) {
        for (float &v : out) v = NAN;
        const char *failure = product_run(number, blocks.data(), x.data(), (int)out.size(),
                                          (int)x.size(), out.data(), 0, NULL);
        if (failure) fail_msg("version %d: %s", number, failure);
        double worst = 0.0;
        for (size_t r = 0; r < out.size(); r++) {
            double error = fabs(out[r] - expected[r]) / size[r];
            if (isnan(error)) return INFINITY;
            if (error > worst) worst = error;
        }
        return worst;
    }
};

static void test_versions(void **) {
    for (auto &shape : shapes) {
        example e(shape[0], shape[1], 1);
        for (int number = 1; number <= VERSIONS; number++) {
            /* x as f16 has 11 bits; version 4 also adds four products in f16 */
            double most = number < 4 ? 1e-6 : number == 4 ? 2e-3 : 3e-4;
            std::vector<float> first;
            for (auto order : orders) {
                assert_true(emulator_order(order));
                double error = e.run(number);
                if (!(error <= most))
                    fail_msg("version %d, %d x %d, %s: error %g", number, shape[0], shape[1],
                             order, error);
                if (first.empty()) first = e.out;
                assert_memory_equal(first.data(), e.out.data(), first.size() * sizeof(float));
            }
        }
    }
    emulator_order("forward");
    assert_int_equal(emulator_counted().live_allocations, 0);
}

/* Weights 8 q - 8 and x that f16 holds: all versions are exact. */
static void test_exact(void **) {
    enum { ROWS = 19, COLUMNS = 160 };
    example e(ROWS, COLUMNS, 2);
    for (size_t i = 0; i < e.x.size(); i++) e.x[i] = (float)((int)(i * 5 % 9) - 4);
    for (size_t r = 0; r < ROWS; r++) {
        e.expected[r] = 0.0, e.size[r] = 1.0;
        for (size_t b = 0; b < COLUMNS / 32; b++) {
            unsigned char *block = e.blocks.data() + (r * COLUMNS / 32 + b) * 18;
            uint16_t scale = 0x3800; /* 0.5 */
            memcpy(block, &scale, sizeof scale);
            for (size_t i = 0; i < 16; i++) {
                block[2 + i] = (unsigned char)(r * 31 + b * 7 + i * 17);
                e.expected[r] += 0.5 * ((block[2 + i] & 15) - 8) * e.x[b * 32 + i] +
                                 0.5 * ((block[2 + i] >> 4) - 8) * e.x[b * 32 + 16 + i];
            }
        }
    }
    for (int number = 1; number <= VERSIONS; number++) assert_true(e.run(number) == 0.0);
}

/* A launch that fails is reported, and frees its memory. */
static void test_failures(void **) {
    example e(20, 64, 3);
    for (int number = 1; number <= VERSIONS; number++) {
        emulator_fail_launch(0);
        const char *failure = product_run(number, e.blocks.data(), e.x.data(), 20, 64,
                                          e.out.data(), 0, NULL);
        assert_true(failure && strstr(failure, "too many resources"));
        emulator_fail_allocation(number % 4);
        failure = product_run(number, e.blocks.data(), e.x.data(), 20, 64, e.out.data(), 0, NULL);
        assert_true(failure && strstr(failure, "out of memory"));
        emulator_fail_allocation(-1);
        emulator_fail_launch(-1);
        assert_int_equal(emulator_counted().live_allocations, 0);
    }
}

/* Launches are timed over several copies of the weights; events and copies are freed. */
static void test_timing(void **) {
    example e(64, 4096, 4);
    double seconds = 0.0;
    assert_null(product_run(7, e.blocks.data(), e.x.data(), 64, 4096, e.out.data(), 3, &seconds));
    assert_true(seconds > 0.0);
    assert_int_equal(emulator_counted().live_allocations, 0);
    assert_int_equal(emulator_counted().live_handles, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_versions), cmocka_unit_test(test_exact),
        cmocka_unit_test(test_failures), cmocka_unit_test(test_timing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
