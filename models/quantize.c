/* quantize.c - see quantize.h. It needs only llm.h's declarations. */
#include "quantize.h"

#include <errno.h>
#include <fcntl.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef LLM_MALLOC
#define LLM_MALLOC(bytes) malloc(bytes)
#define LLM_REALLOC(pointer, bytes) realloc(pointer, bytes)
#define LLM_FREE(pointer) free(pointer)
#endif

/* ---- Packing ---------------------------------------------------------
 * The layouts are in chapter 7 of llm.h. Each result is exact or rounded once, in a fixed order, so
 * a file has the same bytes on every machine. */

enum { BLOCK_VALUES = 32, SUPER_VALUES = 256 };

/* Store x as f16. Returns the rounded value. */
static float pack_half(uint8_t *p, float x) {
    uint16_t half = llm_f32_to_f16(x);
    memcpy(p, &half, sizeof half);
    return llm_f16_to_f32(half);
}

static void pack_f16(const float *values, uint8_t *out, int64_t count) {
    for (int64_t i = 0; i < count; i++) pack_half(out + 2 * i, values[i]);
}

/* Round to nearest, ties to even. */
static void pack_bf16(const float *values, uint8_t *out, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits, rounded;
        memcpy(&bits, values + i, sizeof bits);
        rounded = bits + 0x7fff + (bits >> 16 & 1);
        if ((bits & 0x7fffffff) > 0x7f800000) rounded = bits | 0x400000; /* quiet NaN */
        uint16_t half = (uint16_t)(rounded >> 16);
        memcpy(out + 2 * i, &half, sizeof half);
    }
}

/* The largest magnitude becomes 127. As in ggml, q is found with the scale before rounding. */
static void pack_q8_0(const float *values, uint8_t *block, int64_t count) {
    for (int64_t first = 0; first < count; first += BLOCK_VALUES, block += 2 + BLOCK_VALUES) {
        const float *x = values + first;
        float largest = 0.0f;
        for (int i = 0; i < BLOCK_VALUES; i++)
            largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
        float scale = largest / 127.0f;
        float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
        pack_half(block, scale);
        for (int i = 0; i < BLOCK_VALUES; i++) {
            float q = roundf(x[i] * inverse);
            if (!(q >= -127.0f)) q = q < 0.0f ? -127.0f : 0.0f; /* NaN: 0 */
            if (q > 127.0f) q = 127.0f;
            block[2 + i] = (uint8_t)(int8_t)q;
        }
    }
}

/* Pack as q4_0, q4_1, q5_0 or q5_1. Without a minimum, levels are -8 to +7 (5 bits: -16 to +15).
 * The value of largest magnitude gets the lowest level, so the scale has that value's opposite
 * sign. With a minimum, levels range from the smallest value to the largest. */
static void pack_nibbles(const float *values, uint8_t *block, int64_t count, int bits,
                         bool has_minimum) {
    int top = (1 << bits) - 1, zero = has_minimum ? 0 : 1 << (bits - 1);
    for (int64_t first = 0; first < count; first += BLOCK_VALUES) {
        const float *x = values + first;
        float largest = 0.0f, low = FLT_MAX, high = -FLT_MAX; /* largest keeps its sign */
        for (int i = 0; i < BLOCK_VALUES; i++) {
            largest = fabsf(x[i]) > fabsf(largest) ? x[i] : largest;
            low = x[i] < low ? x[i] : low;
            high = x[i] > high ? x[i] : high;
        }
        if (!has_minimum) low = 0.0f;
        float scale = has_minimum ? (high - low) / (float)top : largest / (float)-zero;
        float inverse = scale != 0.0f ? 1.0f / scale : 0.0f;
        pack_half(block, scale);
        if (has_minimum) pack_half(block + 2, low);
        uint8_t *fifth = block + (has_minimum ? 4 : 2), *nibbles = fifth + (bits == 5 ? 4 : 0);
        memset(fifth, 0, bits == 5 ? 4 + 16 : 16);
        for (int i = 0; i < BLOCK_VALUES; i++) {
            /* x / scale + zero, rounded. The cast prevents an FMA: same bits on every machine. */
            float shifted = (float)((double)(x[i] - low) * (double)inverse) + ((float)zero + 0.5f);
            if (!(shifted >= 0.0f)) shifted = shifted < 0.0f ? 0.0f : (float)zero; /* 0 for a NaN */
            int q = shifted > (float)top ? top : (int)shifted;
            nibbles[i % 16] = (uint8_t)(nibbles[i % 16] | (q & 15) << (i / 16 * 4));
            if (bits == 5) fifth[i / 8] = (uint8_t)(fifth[i / 8] | (q >> 4) << (i % 8));
        }
        block = nibbles + 16;
    }
}

/* v rounded to a whole number from 0 to top; NaN: 0 */
static float whole_between(float v, float top) {
    v = v > 0.0f ? v : 0.0f;
    v = v < top ? v : top;
    return (v + 12582912.0f) - 12582912.0f; /* 1.5 x 2^23, where a float's last bit is worth 1 */
}

/* The reverse of llm__group_scales in llm.h: store the scale and minimum, 6 bits each, of one of 8
 * groups. */
static void set_group_scales(uint8_t *packed, int group, int scale, int minimum) {
    uint8_t *p = packed + group % 4;
    if (group < 4) {
        p[0] = (uint8_t)((p[0] & 0xc0) | scale);
        p[4] = (uint8_t)((p[4] & 0xc0) | minimum);
    } else {
        p[8] = (uint8_t)((scale & 15) | (minimum & 15) << 4);
        p[0] = (uint8_t)((p[0] & 63) | scale >> 4 << 6);
        p[4] = (uint8_t)((p[4] & 63) | minimum >> 4 << 6);
    }
}

/* Find scale and offset, both >= 0, so that scale * q - offset, with q from 0 to top, best
 * approximates x (n values). If the extremes are a little outside the levels, the other values are
 * closer to them. So several spacings are tried. The q of each give a least-squares line through
 * the points (q, x), and the line with the smallest error is used. x is taken relative to the
 * smallest value, to keep precision. */
static void fit_levels(const float *x, int n, int top, float *scale, float *offset) {
    enum { TRIALS = 20 };
    float low = 0.0f, high = 0.0f, best = FLT_MAX, sum = 0.0f;
    for (int i = 0; i < n; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    *scale = *offset = 0.0f;
    if (!(high > low) || !(high - low <= FLT_MAX)) return; /* all zero, or not finite */
    for (int i = 0; i < n; i++) sum += x[i] - low;
    for (int trial = 0; trial < TRIALS; trial++) {
        float inverse = ((float)top - 1.0f + 0.1f * (float)trial) / (high - low);
        float q_sum = 0.0f, qq_sum = 0.0f, qx_sum = 0.0f;
#ifdef _OPENMP
#pragma omp simd reduction(+ : q_sum, qq_sum, qx_sum)
#endif
        for (int i = 0; i < n; i++) {
            float q = whole_between((x[i] - low) * inverse, (float)top);
            q_sum += q;
            qq_sum += q * q;
            qx_sum += q * (x[i] - low);
        }
        float spread = (float)n * qq_sum - q_sum * q_sum; /* 0: all q equal */
        float slope = spread > 0.0f ? ((float)n * qx_sum - q_sum * sum) / spread : 0.0f;
        float start = (sum - slope * q_sum) / (float)n;
        if (start > -low) { /* offset < 0: take the best line through zero */
            start = -low;
            slope = (qx_sum - start * q_sum) / qq_sum;
        }
        /* squared error, without the constant sum of x^2 */
        float error = slope * (slope * qq_sum + 2.0f * start * q_sum - 2.0f * qx_sum) +
                      start * ((float)n * start - 2.0f * sum);
        if (!(error < best) || slope < 0.0f) continue;
        best = error;
        *scale = slope;
        *offset = -(start + low);
    }
}

/* Store scales or offsets (n) as whole numbers from 0 to 63 times an f16. */
static float pack_scales(const float *scales, int n, uint8_t *f16, int *packed) {
    float largest = 0.0f;
    for (int i = 0; i < n; i++) largest = scales[i] > largest ? scales[i] : largest;
    float unit = pack_half(f16, largest / 63.0f < 65504.0f ? largest / 63.0f : 65504.0f);
    float inverse = unit > 0.0f ? 1.0f / unit : 0.0f;
    for (int i = 0; i < n; i++) packed[i] = (int)whole_between(scales[i] * inverse, 63.0f);
    return unit;
}

/* q4_K and q5_K */
static void pack_groups(const float *values, uint8_t *block, int64_t count, int bits) {
    for (int64_t first = 0; first < count; first += SUPER_VALUES) {
        const float *x = values + first;
        float top = (float)((1 << bits) - 1), scales[8], offsets[8];
        int s[8], m[8];
        for (int group = 0; group < 8; group++)
            fit_levels(x + 32 * group, 32, (int)top, &scales[group], &offsets[group]);
        float scale = pack_scales(scales, 8, block, s);
        float minimum = pack_scales(offsets, 8, block + 2, m);
        uint8_t *fifth = block + 16, *nibbles = fifth + (bits == 5 ? 32 : 0);
        memset(block + 4, 0, (size_t)(nibbles + 128 - (block + 4)));
        for (int group = 0; group < 8; group++, x += 32) {
            set_group_scales(block + 4, group, s[group], m[group]);
            float group_scale = scale * (float)s[group], group_minimum = minimum * (float)m[group];
            float inverse = group_scale > 0.0f ? 1.0f / group_scale : 0.0f;
            for (int i = 0; i < 32; i++) {
                int q = (int)whole_between((x[i] + group_minimum) * inverse, top);
                uint8_t *nibble = &nibbles[group / 2 * 32 + i];
                *nibble = (uint8_t)(*nibble | (q & 15) << (group % 2 * 4));
                if (bits == 5) fifth[i] = (uint8_t)(fifth[i] | (q >> 4) << group);
            }
        }
        block = nibbles + 128;
    }
}

/* Like fit_levels, but around zero: q from -32 to 31, scale of any sign. The best scale of a
 * spacing is sum(qx) / sum(q^2), which reduces the squared error by sum(qx)^2 / sum(q^2). */
static float fit_scale(const float *x, int n) {
    enum { TRIALS = 19 };
    float largest = 0.0f, best = 0.0f, scale = 0.0f;
    for (int i = 0; i < n; i++) largest = fabsf(x[i]) > fabsf(largest) ? x[i] : largest;
    if (largest == 0.0f || !(fabsf(largest) <= FLT_MAX)) return 0.0f;
    for (int trial = 0; trial < TRIALS; trial++) {
        float inverse = -(32.0f + 0.1f * (float)(trial - TRIALS / 2)) / largest;
        float qx_sum = 0.0f, qq_sum = 0.0f;
#ifdef _OPENMP
#pragma omp simd reduction(+ : qx_sum, qq_sum)
#endif
        for (int i = 0; i < n; i++) {
            float q = whole_between(x[i] * inverse + 32.0f, 63.0f) - 32.0f;
            qx_sum += q * x[i];
            qq_sum += q * q;
        }
        float gain = qq_sum > 0.0f ? qx_sum * (qx_sum / qq_sum) : 0.0f;
        if (!(gain > best)) continue;
        best = gain;
        scale = qx_sum / qq_sum;
    }
    return scale;
}

static void pack_q6_K(const float *values, uint8_t *block, int64_t count) {
    enum { BYTES = 128 + 64 + 16 + 2 };
    for (int64_t first = 0; first < count; first += SUPER_VALUES, block += BYTES) {
        const float *x = values + first;
        float scales[16], largest = 0.0f;
        for (int group = 0; group < 16; group++) {
            scales[group] = fit_scale(x + 16 * group, 16);
            largest = fabsf(scales[group]) > fabsf(largest) ? scales[group] : largest;
        }
        memset(block, 0, BYTES);
        float unit = largest / -128.0f; /* the largest value gets -128 */
        unit = unit > 65504.0f ? 65504.0f : unit < -65504.0f ? -65504.0f : unit;
        unit = pack_half(block + 208, unit);
        for (int i = 0; i < SUPER_VALUES; i++) {
            int group = i / 16, half = i / 128, quarter = i / 32 % 4;
            float whole = 0.0f;
            if (unit != 0.0f) whole = whole_between(scales[group] / unit + 128.0f, 255.0f) - 128.0f;
            float group_scale = unit * whole;
            float inverse = group_scale != 0.0f ? 1.0f / group_scale : 0.0f;
            int q = (int)whole_between(x[i] * inverse + 32.0f, 63.0f);
            uint8_t *low = &block[64 * half + 32 * (quarter % 2) + i % 32];
            uint8_t *high = &block[128 + 32 * half + i % 32];
            *low = (uint8_t)(*low | (q & 15) << (quarter / 2 * 4));
            *high = (uint8_t)(*high | (q >> 4) << (2 * quarter));
            block[192 + group] = (uint8_t)(int8_t)whole;
        }
    }
}

static void pack_q4_Z(const float *values, uint8_t *block, int64_t count) {
    for (int64_t first = 0; first < count; first += BLOCK_VALUES, block += 4 + 16) {
        float low = 0.0f, high = 0.0f;
        for (int i = 0; i < BLOCK_VALUES; i++) {
            low = values[first + i] < low ? values[first + i] : low;
            high = values[first + i] > high ? values[first + i] : high;
        }
        float scale = pack_half(block, (high - low) / 15.0f);
        float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        int zero = (int)whole_between(-low * inverse, 15.0f);
        memset(block + 2, 0, 2 + 16);
        block[2] = (uint8_t)zero;
        for (int i = 0; i < BLOCK_VALUES; i++) {
            int q = (int)whole_between(values[first + i] * inverse + (float)zero, 15.0f);
            block[4 + i % 16] = (uint8_t)(block[4 + i % 16] | q << (i / 16 * 4));
        }
    }
}

void llm_pack(llm_type type, const float *values, void *blocks, int64_t count) {
    uint8_t *out = (uint8_t *)blocks;
    switch (type) {
    case LLM_F32: memcpy(out, values, (size_t)count * sizeof *values); break;
    case LLM_F16: pack_f16(values, out, count); break;
    case LLM_BF16: pack_bf16(values, out, count); break;
    case LLM_Q8_0: pack_q8_0(values, out, count); break;
    case LLM_Q4_0: pack_nibbles(values, out, count, 4, false); break;
    case LLM_Q4_1: pack_nibbles(values, out, count, 4, true); break;
    case LLM_Q5_0: pack_nibbles(values, out, count, 5, false); break;
    case LLM_Q5_1: pack_nibbles(values, out, count, 5, true); break;
    case LLM_Q4_K: pack_groups(values, out, count, 4); break;
    case LLM_Q5_K: pack_groups(values, out, count, 5); break;
    case LLM_Q6_K: pack_q6_K(values, out, count); break;
    case LLM_Q4_Z: pack_q4_Z(values, out, count); break;
    }
}

/* ---- Writing ---------------------------------------------------------
 * The counts at the start of the header are known only when it is complete, so values and
 * declarations are collected in memory (a few megabytes, mostly vocabulary) and written with the
 * first byte of data. */

typedef struct writer_buffer {
    uint8_t *data;
    size_t length, capacity;
} writer_buffer;

struct llm_writer {
    char *path, *temporary;
    int descriptor;
    llm_error err;                      /* first failure; all later calls do nothing */
    writer_buffer values, declarations; /* bytes in the form of the header */
    writer_buffer keys, names;          /* u64: start offset of each value, each declaration */
    writer_buffer sizes;                /* u64: bytes of each tensor */
    writer_buffer pending;              /* bytes not yet written to the file */
    uint64_t n_values, n_tensors;
    uint64_t alignment;
    uint64_t declared;      /* bytes of all declared data, with padding */
    uint64_t current;       /* index of the tensor that gets the next data */
    uint64_t current_bytes; /* bytes written of that tensor */
    uint64_t written;       /* bytes written of the file */
    bool data_begun;
};

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static bool quantize_fail(llm_error *err, llm_status status, const char *format, ...) {
    va_list arguments;
    if (!err) return false;
    err->status = status;
    err->option = NULL;
    va_start(arguments, format);
    vsnprintf(err->message, sizeof err->message, format, arguments);
    va_end(arguments);
    return false;
}

/* A name in a form that is safe to print; text: (72). */
static const char *writer_show(llm_string name, char *text) {
    size_t n = name.length < 64 ? name.length : 64;
    for (size_t i = 0; i < n; i++)
        text[i] = name.data[i] >= ' ' && name.data[i] <= '~' ? name.data[i] : '?';
    strcpy(text + n, name.length > n ? "..." : "");
    return text;
}

static void *quantize_memory(uint64_t bytes, const char *what, llm_error *err) {
    void *memory = bytes <= SIZE_MAX / 2 ? LLM_MALLOC(bytes ? (size_t)bytes : 1) : NULL;
    if (!memory)
        quantize_fail(err, LLM_ERROR_MEMORY, "out of memory: %llu bytes for %s",
                      (unsigned long long)bytes, what);
    return memory;
}

static bool writer_append(llm_writer *w, writer_buffer *b, const void *data, size_t n) {
    if (w->err.status != LLM_OK) return false;
    if (n > b->capacity - b->length) {
        size_t wanted = b->capacity * 2 > 4096 ? b->capacity * 2 : 4096;
        bool fits = n <= SIZE_MAX / 4 && b->length <= SIZE_MAX / 4;
        if (fits && wanted < b->length + n) wanted = b->length + n;
        uint8_t *grown = fits ? (uint8_t *)LLM_REALLOC(b->data, wanted) : NULL;
        if (!grown)
            return quantize_fail(&w->err, LLM_ERROR_MEMORY, "out of memory: %zu bytes to write",
                                 wanted);
        b->data = grown;
        b->capacity = wanted;
    }
    if (n) memcpy(b->data + b->length, data, n);
    b->length += n;
    return true;
}

static bool writer_append_u32(llm_writer *w, writer_buffer *b, uint32_t x) {
    return writer_append(w, b, &x, sizeof x);
}
static bool writer_append_u64(llm_writer *w, writer_buffer *b, uint64_t x) {
    return writer_append(w, b, &x, sizeof x);
}

static bool writer_append_string(llm_writer *w, writer_buffer *b, llm_string s) {
    return writer_append_u64(w, b, s.length) && writer_append(w, b, s.data, s.length);
}

static void writer_free(llm_writer *w) {
    writer_buffer *all[] = {&w->values, &w->declarations, &w->keys,
                            &w->names,  &w->sizes,        &w->pending};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) LLM_FREE(all[i]->data);
    LLM_FREE(w->path);
    LLM_FREE(w->temporary);
    LLM_FREE(w);
}

static char *writer_path(const char *a, const char *b, llm_error *err) {
    char *path = (char *)quantize_memory(strlen(a) + strlen(b) + 1, "a path", err);
    return path ? strcat(strcpy(path, a), b) : NULL;
}

llm_writer *llm_writer_create(const char *path, llm_error *err) {
    struct stat status;
    if (err) memset(err, 0, sizeof *err);
    if (!path || !*path) {
        quantize_fail(err, LLM_ERROR_ARGUMENT, "no path to write to was given");
        return NULL;
    }
    /* the new file would replace a device */
    if (!stat(path, &status) && !S_ISREG(status.st_mode)) {
        quantize_fail(err, LLM_ERROR_FILE, "cannot write %s: it is %s, not a file", path,
                      S_ISDIR(status.st_mode) ? "a directory" : "a pipe or a device");
        return NULL;
    }
    llm_writer *w = (llm_writer *)quantize_memory(sizeof *w, "a writer", err);
    if (!w) return NULL;
    memset(w, 0, sizeof *w);
    w->alignment = 32;
    w->path = writer_path(path, "", err);
    w->temporary = w->path ? writer_path(path, ".tmp", err) : NULL;
    w->descriptor = w->temporary ? open(w->temporary, O_WRONLY | O_CREAT | O_TRUNC, 0666) : -1;
    if (w->descriptor < 0) {
        if (w->temporary)
            quantize_fail(err, LLM_ERROR_FILE, "cannot create %s: %s", w->temporary,
                          strerror(errno));
        writer_free(w);
        return NULL;
    }
    return w;
}

static bool writer_ok(const llm_writer *w) { return w && w->err.status == LLM_OK; }

static bool write_all(llm_writer *w, const void *data, size_t n) {
    const uint8_t *bytes = (const uint8_t *)data;
    while (n) {
        /* some systems limit a write to 2 GiB */
        ssize_t wrote = write(w->descriptor, bytes, n < ((size_t)1 << 30) ? n : (size_t)1 << 30);
        if (wrote < 0 && errno == EINTR) continue;
        if (wrote <= 0)
            return quantize_fail(
                &w->err, LLM_ERROR_FILE, "cannot write %s: %s (%llu bytes written)%s", w->temporary,
                wrote ? strerror(errno) : "nothing was taken", (unsigned long long)w->written,
                wrote && errno == ENOSPC ? "; free some space, or choose another disk" : "");
        bytes += wrote;
        n -= (size_t)wrote;
        w->written += (uint64_t)wrote;
    }
    return true;
}

static bool writer_flush(llm_writer *w) {
    bool wrote = write_all(w, w->pending.data, w->pending.length);
    w->pending.length = 0;
    return wrote;
}

/* Write data; small pieces are collected first. */
static bool writer_put(llm_writer *w, const void *data, size_t n) {
    enum { GATHER = 1 << 18 };
    if (n < GATHER && w->pending.length < GATHER) return writer_append(w, &w->pending, data, n);
    return writer_flush(w) && write_all(w, data, n);
}

static bool writer_pad(llm_writer *w) {
    static const uint8_t zeros[64] = {0};
    uint64_t missing = (0 - (w->written + w->pending.length)) & (w->alignment - 1);
    for (; missing; missing -= missing < 64 ? missing : 64)
        if (!writer_put(w, zeros, (size_t)(missing < 64 ? missing : 64))) return false;
    return true;
}

static bool writer_is_text(llm_string s, const char *text) {
    return s.length == strlen(text) && !memcmp(s.data, text, s.length);
}

bool llm_writer_value(llm_writer *w, const llm_value *value) {
    if (!writer_ok(w)) return false;
    if (w->data_begun)
        return quantize_fail(&w->err, LLM_ERROR_ARGUMENT, "%s: metadata after the first data",
                             w->path);
    if (writer_is_text(value->key, "general.alignment")) {
        uint64_t alignment = 0;
        if (!llm_value_u64(value, 0, &alignment) || !alignment || (alignment & (alignment - 1)) ||
            alignment > 1 << 20 || w->n_tensors)
            return quantize_fail(
                &w->err, LLM_ERROR_ARGUMENT,
                "%s: general.alignment must be a power of two up to 2^20, and come "
                "before the tensors",
                w->path);
        w->alignment = alignment;
    }
    writer_buffer *b = &w->values;
    bool array = value->type == LLM_VALUE_ARRAY;
    w->n_values++;
    return writer_append_u64(w, &w->keys, b->length) && writer_append_string(w, b, value->key) &&
           writer_append_u32(w, b, (uint32_t)value->type) &&
           (!array || (writer_append_u32(w, b, (uint32_t)value->element_type) &&
                       writer_append_u64(w, b, value->count))) &&
           writer_append(w, b, value->data, value->bytes);
}

static bool writer_put_value(llm_writer *w, const char *key, llm_value_type type,
                             llm_value_type element_type, uint64_t count, const void *data,
                             size_t bytes) {
    llm_string name = {key, strlen(key)};
    llm_value value = {name, type, element_type, count, (const uint8_t *)data, bytes};
    return llm_writer_value(w, &value);
}

bool llm_writer_u32(llm_writer *w, const char *key, uint32_t x) {
    return writer_put_value(w, key, LLM_VALUE_U32, LLM_VALUE_U32, 1, &x, sizeof x);
}

bool llm_writer_f32(llm_writer *w, const char *key, float x) {
    return writer_put_value(w, key, LLM_VALUE_F32, LLM_VALUE_F32, 1, &x, sizeof x);
}

bool llm_writer_bool(llm_writer *w, const char *key, bool x) {
    uint8_t byte = x;
    return writer_put_value(w, key, LLM_VALUE_BOOL, LLM_VALUE_BOOL, 1, &byte, 1);
}

bool llm_writer_i32_array(llm_writer *w, const char *key, const int32_t *x, uint64_t n) {
    return writer_put_value(w, key, LLM_VALUE_ARRAY, LLM_VALUE_I32, n, x, (size_t)n * sizeof *x);
}

bool llm_writer_f32_array(llm_writer *w, const char *key, const float *x, uint64_t n) {
    return writer_put_value(w, key, LLM_VALUE_ARRAY, LLM_VALUE_F32, n, x, (size_t)n * sizeof *x);
}

static bool writer_strings(llm_writer *w, const char *key, llm_value_type type, const llm_string *x,
                           uint64_t n) {
    bool ok = writer_put_value(w, key, type, LLM_VALUE_STRING, n, NULL, 0);
    for (uint64_t i = 0; ok && i < n; i++) ok = writer_append_string(w, &w->values, x[i]);
    return ok;
}

bool llm_writer_string(llm_writer *w, const char *key, const char *x) {
    llm_string s = {x, strlen(x)};
    return writer_strings(w, key, LLM_VALUE_STRING, &s, 1);
}

bool llm_writer_string_array(llm_writer *w, const char *key, const llm_string *x, uint64_t n) {
    return writer_strings(w, key, LLM_VALUE_ARRAY, x, n);
}

/* Bytes of a tensor; 0: no such tensor is possible. */
static uint64_t tensor_bytes(llm_type type, int n_dims, const uint64_t *dims) {
    const llm_type_info *info = type < LLM_Q4_Z ? llm_type_find(type) : NULL;
    uint64_t values = 1;
    if (!info || n_dims < 1 || n_dims > 4 || dims[0] % (uint64_t)info->block_values) return 0;
    for (int i = 0; i < n_dims; i++) {
        if (!dims[i] || dims[i] > INT64_MAX / 4 / values) return 0; /* 4: largest type */
        values *= dims[i];
    }
    return values / (uint64_t)info->block_values * (uint64_t)info->block_bytes;
}

bool llm_writer_tensor(llm_writer *w, llm_string name, llm_type type, int n_dims,
                       const uint64_t *dims) {
    char shown[72];
    if (!writer_ok(w)) return false;
    if (w->data_begun)
        return quantize_fail(&w->err, LLM_ERROR_ARGUMENT,
                             "%s: a tensor declared after the first data", w->path);
    uint64_t bytes = tensor_bytes(type, n_dims, dims);
    if (!name.length || !bytes || w->declared > INT64_MAX)
        return quantize_fail(&w->err, LLM_ERROR_ARGUMENT,
                             "%s: there can be no tensor '%s' of that type and shape", w->path,
                             writer_show(name, shown));
    writer_buffer *b = &w->declarations;
    writer_append_u64(w, &w->names, b->length);
    writer_append_string(w, b, name);
    writer_append_u32(w, b, (uint32_t)n_dims);
    for (int i = 0; i < n_dims; i++) writer_append_u64(w, b, dims[i]);
    writer_append_u32(w, b, (uint32_t)type);
    writer_append_u64(w, b, w->declared);
    writer_append_u64(w, &w->sizes, bytes);
    w->declared = (w->declared + bytes + w->alignment - 1) & ~(w->alignment - 1);
    w->n_tensors++;
    return writer_ok(w);
}

static int writer_compare(const void *a, const void *b) {
    const llm_string *x = (const llm_string *)a, *y = (const llm_string *)b;
    int order = memcmp(x->data, y->data, x->length < y->length ? x->length : y->length);
    return order ? order : (x->length > y->length) - (x->length < y->length);
}

/* Check that names are unique, since readers refuse the file otherwise. text: data in which a name
 * starts at each of these offsets. */
static bool writer_check(llm_writer *w, const writer_buffer *text, const writer_buffer *places,
                         const char *what) {
    size_t n = places->length / sizeof(uint64_t);
    char shown[72];
    llm_string *names =
        (llm_string *)quantize_memory(n * sizeof *names, "an index of names", &w->err);
    for (size_t i = 0; names && i < n; i++) {
        uint64_t place, length;
        memcpy(&place, places->data + i * sizeof place, sizeof place);
        memcpy(&length, text->data + place, sizeof length);
        names[i].data = (const char *)text->data + place + sizeof length;
        names[i].length = (size_t)length;
    }
    if (names) qsort(names, n, sizeof *names, writer_compare);
    for (size_t i = 1; names && i < n && w->err.status == LLM_OK; i++)
        if (!writer_compare(names + i - 1, names + i))
            quantize_fail(&w->err, LLM_ERROR_ARGUMENT, "%s: there are two %s called '%s'", w->path,
                          what, writer_show(names[i], shown));
    LLM_FREE(names);
    return writer_ok(w);
}

static bool writer_header(llm_writer *w) {
    static const uint32_t version = 3;
    w->data_begun = true;
    bool ok = writer_check(w, &w->values, &w->keys, "metadata values") &&
              writer_check(w, &w->declarations, &w->names, "tensors") && writer_put(w, "GGUF", 4) &&
              writer_put(w, &version, sizeof version) &&
              writer_put(w, &w->n_tensors, sizeof w->n_tensors) &&
              writer_put(w, &w->n_values, sizeof w->n_values) &&
              writer_put(w, w->values.data, w->values.length) &&
              writer_put(w, w->declarations.data, w->declarations.length);
    return ok && (!w->n_tensors || writer_pad(w));
}

bool llm_writer_data(llm_writer *w, const void *data, size_t bytes) {
    if (!writer_ok(w)) return false;
    if (!w->data_begun && !writer_header(w)) return false;
    const uint8_t *from = (const uint8_t *)data;
    while (bytes) {
        if (w->current == w->n_tensors)
            return quantize_fail(&w->err, LLM_ERROR_ARGUMENT,
                                 "%s: %zu bytes of data more than the %llu declared tensors have",
                                 w->path, bytes, (unsigned long long)w->n_tensors);
        uint64_t size;
        memcpy(&size, w->sizes.data + w->current * sizeof size, sizeof size);
        uint64_t wanted = size - w->current_bytes;
        size_t n = bytes < wanted ? bytes : (size_t)wanted;
        if (!writer_put(w, from, n)) return false;
        from += n;
        bytes -= n;
        w->current_bytes += n;
        if (w->current_bytes < size) break;
        if (!writer_pad(w)) return false;
        w->current++;
        w->current_bytes = 0;
    }
    return true;
}

static bool writer_complete(llm_writer *w) {
    if (!w->data_begun && !writer_header(w)) return false;
    if (w->current < w->n_tensors)
        return quantize_fail(&w->err, LLM_ERROR_ARGUMENT,
                             "%s: the data ended after %llu bytes of tensor %llu of %llu", w->path,
                             (unsigned long long)w->current_bytes,
                             (unsigned long long)w->current + 1, (unsigned long long)w->n_tensors);
    if (!writer_flush(w)) return false;
    /* the data must be on the disk before the file gets its name */
    if (fsync(w->descriptor))
        return quantize_fail(&w->err, LLM_ERROR_FILE, "cannot write %s: %s", w->temporary,
                             strerror(errno));
    return true;
}

bool llm_writer_finish(llm_writer *w, llm_error *err) {
    if (err) memset(err, 0, sizeof *err);
    if (!w) return quantize_fail(err, LLM_ERROR_ARGUMENT, "there is no writer to finish");
    bool ok = writer_ok(w) && writer_complete(w);
    if (close(w->descriptor) && ok)
        ok = quantize_fail(&w->err, LLM_ERROR_FILE, "cannot write %s: %s", w->temporary,
                           strerror(errno));
    if (ok && rename(w->temporary, w->path))
        ok = quantize_fail(&w->err, LLM_ERROR_FILE, "cannot rename %s to %s: %s", w->temporary,
                           w->path, strerror(errno));
    if (!ok) unlink(w->temporary);
    if (!ok && err) *err = w->err;
    writer_free(w);
    return ok;
}

void llm_writer_abandon(llm_writer *w) {
    if (!w) return;
    close(w->descriptor);
    unlink(w->temporary);
    writer_free(w);
}

/* ---- Rewriting a model in another type -------------------------------
 * Decoding is limited by the bytes it reads, so smaller weights make it faster. Rounding the
 * embedding and output matrix harms the choice of words first, so these keep more bits. */

/* Is the name "blk.N.part"? */
static bool is_tensor_of_layer(llm_string name, const char *part, int64_t *layer) {
    char text[64], wanted[64];
    if (name.length >= sizeof text || name.length < 4 || memcmp(name.data, "blk.", 4)) return false;
    memcpy(text, name.data, name.length);
    text[name.length] = 0;
    *layer = strtoll(text + 4, NULL, 10);
    snprintf(wanted, sizeof wanted, "blk.%lld.%s", (long long)*layer, part);
    return *layer >= 0 && !strcmp(text, wanted);
}

/* Does a mixed file keep this matrix at q6_K? As in llama.cpp: yes in the first and last layers,
 * and in every third layer between. */
static bool keeps_more_bits(const llm_file *file, llm_string name) {
    static const char *const delicate[] = {"attn_v.weight", "ffn_down.weight"};
    int64_t layer = 0, other, n_layers = 0;
    for (int i = 0; i < 2; i++)
        if (is_tensor_of_layer(name, delicate[i], &layer)) {
            for (int64_t k = 0; k < llm_file_n_tensors(file); k++)
                n_layers += is_tensor_of_layer(llm_file_tensor(file, k)->name, delicate[i], &other);
            return layer < n_layers / 8 || layer >= 7 * n_layers / 8 ||
                   (layer - n_layers / 8) % 3 == 2;
        }
    return false;
}

llm_type llm_quantize_type(llm_type type, uint64_t cols, bool output) {
    bool groups = type == LLM_Q4_K || type == LLM_Q5_K;
    bool few_bits =
        groups || type == LLM_Q4_0 || type == LLM_Q4_1 || type == LLM_Q5_0 || type == LLM_Q5_1;
    if (output && few_bits) type = groups ? LLM_Q6_K : LLM_Q8_0;
    if (cols % SUPER_VALUES)
        type = type == LLM_Q4_K   ? LLM_Q5_0
               : type == LLM_Q5_K ? LLM_Q5_1
               : type == LLM_Q6_K ? LLM_Q8_0
                                  : type;
    return cols % (uint64_t)llm_type_find(type)->block_values ? LLM_F16 : type;
}

static bool quantize_is_folder(const llm_file *file) { return llm_file_version(file) == 0; }

llm_type llm_quantize_tensor_type(const llm_file *file, const llm_tensor *tensor, llm_type type,
                                  bool mixed) {
    int64_t layer;
    bool router = is_tensor_of_layer(tensor->name, "ffn_gate_inp.weight", &layer) ||
                  is_tensor_of_layer(tensor->name, "ffn_gate_inp_shexp.weight", &layer);
    if (tensor->n_dims < 2 || router) /* norms, biases, routers: small, used by every token */
        return quantize_is_folder(file) ? LLM_F32 : tensor->type; /* GGUF readers expect f32 */
    bool groups = type == LLM_Q4_K || type == LLM_Q5_K;
    bool output = writer_is_text(tensor->name, "output.weight");
    if (writer_is_text(tensor->name, "token_embd.weight"))
        output = !(mixed && groups && llm_file_find_tensor(file, "output.weight"));
    if (mixed && groups && !output && keeps_more_bits(file, tensor->name)) type = LLM_Q6_K;
    return llm_quantize_type(type, tensor->dims[0], output);
}

typedef struct quantizer {
    const llm_file *in;
    llm_writer *writer;
    bool (*progress)(void *user, uint64_t done, uint64_t total);
    void *user;
    uint64_t done, total; /* bytes of the input: processed; in all */
    bool stopped;         /* whether progress() returned false */
    float *values;        /* (QUANTIZE_VALUES, or a row if that is larger) */
    uint8_t *packed;      /* the same size */
} quantizer;

enum { QUANTIZE_VALUES = 1 << 20 };

static bool quantize_progress(quantizer *q, uint64_t bytes) {
    q->done += bytes;
    q->stopped = q->progress && !q->progress(q->user, q->done, q->total);
    return !q->stopped;
}

/* RoPE pairs are neighbours in the GGUF files of some architectures, half a head apart in folders.
 * Returns the head size if rows of this tensor must be reordered, else 0. */
static int64_t reordered_head(const llm_file *file, const llm_tensor *tensor) {
    static const char *const parts[] = {"attn_q.weight", "attn_k.weight", "attn_q.bias",
                                        "attn_k.bias"};
    static const char *const architectures[] = {"llama", "granite", "smollm3"};
    llm_string architecture = {"", 0};
    size_t cursor = 0;
    uint64_t head_dim = 0;
    int64_t layer;
    bool q_or_k = false, adjacent = false;
    char key[64];
    llm_value_string(llm_file_find(file, "general.architecture"), &cursor, &architecture);
    for (int i = 0; i < 4 && !q_or_k; i++)
        q_or_k = is_tensor_of_layer(tensor->name, parts[i], &layer);
    for (int i = 0; i < 3 && !adjacent; i++) {
        adjacent = writer_is_text(architecture, architectures[i]);
        snprintf(key, sizeof key, "%s.rope.dimension_count", architectures[i]);
    }
    if (!quantize_is_folder(file) || !q_or_k || !adjacent) return 0;
    llm_value_u64(llm_file_find(file, key), 0, &head_dim);
    uint64_t rows = tensor->dims[tensor->n_dims - 1];
    return head_dim && rows % head_dim == 0 ? (int64_t)head_dim : 0;
}

/* The old index of the row that moves to `row`. */
static int64_t reordered_row(int64_t row, int64_t head_dim) {
    int64_t i = row % head_dim;
    return row - i + i % 2 * (head_dim / 2) + i / 2;
}

/* reorder one row: values[to(j)] = values[j] */
static void reorder_values(float *values, float *copy, int64_t n, const int32_t *columns,
                           int64_t head_dim) {
    memcpy(copy, values, (size_t)n * sizeof *values);
    for (int64_t j = 0; j < n; j++)
        if (columns)
            values[columns[j]] = copy[j];
        else
            values[j] = copy[reordered_row(j, head_dim)];
}

static int64_t quantize_row_size(const llm_type_info *type, int64_t cols) {
    return cols / type->block_values * type->block_bytes;
}

static uint64_t quantize_count_rows(const llm_tensor *tensor) {
    return tensor->dims[1] * tensor->dims[2] * tensor->dims[3];
}

/* Refuse a tensor with a value that is not finite: it would spoil all values of its block. */
static bool quantize_check(quantizer *q, const llm_tensor *tensor, const void *data) {
    char shown[72];
    llm_faults faults =
        llm_type_check(tensor->type, data, quantize_count_rows(tensor) * tensor->dims[0]);
    return !faults.count ||
           quantize_fail(&q->writer->err, LLM_ERROR_FORMAT,
                         "%s: the tensor %s has %llu values that are not finite, the first is %g "
                         "at index %llu: fetch the model again, or convert it again",
                         llm_file_path(q->in), writer_show(tensor->source, shown),
                         (unsigned long long)faults.count, (double)faults.value,
                         (unsigned long long)faults.first);
}

/* Refuse q->packed (n values in blocks, from index `first` of the tensor) if one of its values or
 * scales is not finite, because it was too large for the type. */
static bool quantize_check_packed(quantizer *q, const llm_tensor *tensor, llm_type type,
                                  uint64_t first, uint64_t n) {
    char shown[72];
    uint64_t block = (uint64_t)llm_type_find(type)->block_values;
    llm_faults faults = llm_type_check(type, q->packed, n);
    if (!faults.count) return true;
    uint64_t largest = faults.first; /* the largest value of the block is the cause */
    for (uint64_t i = faults.first / block * block, end = i + block; i < end; i++)
        if (fabsf(q->values[i]) > fabsf(q->values[largest])) largest = i;
    return quantize_fail(&q->writer->err, LLM_ERROR_ARGUMENT,
                         "%s: the tensor %s has the value %g at index %llu, which is too large for "
                         "%s: choose another type, such as bf16",
                         llm_file_path(q->in), writer_show(tensor->source, shown),
                         (double)q->values[largest], (unsigned long long)(first + largest),
                         llm_type_find(type)->name);
}

/* Convert a tensor; data: its rows. Works on a few rows at a time. */
static bool quantize_rows(quantizer *q, const llm_tensor *tensor, const void *data, llm_type type) {
    int64_t head_dim = reordered_head(q->in, tensor);
    if (!quantize_check(q, tensor, data)) return false;
    if (type == tensor->type && !head_dim && !tensor->columns)
        return llm_writer_data(q->writer, data, (size_t)tensor->bytes) &&
               quantize_progress(q, tensor->bytes);
    const llm_type_info *in = llm_type_find(tensor->type), *out = llm_type_find(type);
    int64_t cols = (int64_t)tensor->dims[0], rows = (int64_t)quantize_count_rows(tensor);
    int64_t in_bytes = quantize_row_size(in, cols), out_bytes = quantize_row_size(out, cols);
    int64_t step = QUANTIZE_VALUES > cols ? QUANTIZE_VALUES / cols : 1;
    for (int64_t first = 0; first < rows; first += step) {
        int64_t n = step < rows - first ? step : rows - first;
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
        for (int64_t r = 0; r < n; r++) {
            int64_t source = first + r;
            if (head_dim && rows > 1) source = reordered_row(source, head_dim);
            in->unpack((const uint8_t *)data + source * in_bytes, q->values + r * cols, cols);
        }
        if (tensor->columns || (head_dim && rows == 1))
            for (int64_t r = 0; r < n; r++)
                reorder_values(q->values + r * cols, (float *)(void *)q->packed, cols,
                               tensor->columns, head_dim);
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
        for (int64_t r = 0; r < n; r++)
            llm_pack(type, q->values + r * cols, q->packed + r * out_bytes, cols);
        if (!quantize_check_packed(q, tensor, type, (uint64_t)(first * cols),
                                   (uint64_t)(n * cols)) ||
            !llm_writer_data(q->writer, q->packed, (size_t)(n * out_bytes)) ||
            !quantize_progress(q, (uint64_t)(n * in_bytes)))
            return false;
    }
    return true;
}

static bool quantize_tensor(quantizer *q, const llm_tensor *tensor, llm_type type) {
    if (tensor->data) return quantize_rows(q, tensor, tensor->data, type);
    /* 4-bit integers of AWQ or GPTQ: bring them into the form of llm_tensor first */
    llm_error *err = &q->writer->err;
    char shown[72];
    void *rows = quantize_memory(tensor->bytes, writer_show(tensor->source, shown), err);
    bool good = rows && llm_tensor_rows(tensor, 0, quantize_count_rows(tensor), rows, err) &&
                quantize_rows(q, tensor, rows, type);
    LLM_FREE(rows);
    return good;
}

/* A folder has a matrix for each expert, in order; a GGUF file has one tensor for all of them.
 * Returns the number of matrices that begin with tensor `index`, and their common name (64) if
 * there are several; 0: the tensor follows others of its kind. */
static int quantize_experts(const llm_file *in, int64_t index, char *name) {
    int layer, expert, n = 0;
    char part[8], text[64];
    for (; index + n < llm_file_n_tensors(in); n++) {
        llm_string s = llm_file_tensor(in, index + n)->name;
        snprintf(text, sizeof text, "%.*s", (int)s.length, s.data);
        int found = sscanf(text, "blk.%d.ffn_%7[a-z].%d.weight", &layer, part, &expert);
        if (n > 0 && (found != 3 || expert != n)) break;
        if (found != 3 || !quantize_is_folder(in)) return 1;
        if (n == 0 && expert > 0) return 0;
        if (n == 0) snprintf(name, 64, "blk.%d.ffn_%s_exps.weight", layer, part);
    }
    return n;
}

static bool quantize_file(quantizer *q, llm_type type, bool mixed) {
    const llm_file *in = q->in;
    for (int64_t i = 0; i < llm_file_n_values(in); i++) {
        const llm_value *value = llm_file_value(in, i);
        if (writer_is_text(value->key, "general.file_type") ||
            writer_is_text(value->key, "general.alignment") ||
            writer_is_text(value->key, "general.quantization_version") ||
            /* the output is one file */
            (value->key.length > 6 && !memcmp(value->key.data, "split.", 6)))
            continue;
        if (!llm_writer_value(q->writer, value)) return false;
    }
    int medium = mixed && (type == LLM_Q4_K || type == LLM_Q5_K); /* 15: Q4_K_M, 14: Q4_K_S */
    llm_writer_u32(q->writer, "general.file_type",
                   (uint32_t)(llm_type_find(type)->file_type + medium));
    llm_writer_u32(q->writer, "general.quantization_version", 2);
    for (int64_t i = 0; i < llm_file_n_tensors(in); i++) {
        const llm_tensor *t = llm_file_tensor(in, i);
        char name[64];
        int n = quantize_experts(in, i, name);
        uint64_t dims[4] = {t->dims[0], t->dims[1], n > 1 ? (uint64_t)n : t->dims[2], t->dims[3]};
        if (n && !llm_writer_tensor(q->writer,
                                    n > 1 ? (llm_string){name, strlen(name)} : t->name,
                                    llm_quantize_tensor_type(in, t, type, mixed),
                                    n > 1 ? 3 : t->n_dims, dims))
            return false;
    }
    for (int64_t i = 0; i < llm_file_n_tensors(in); i++) {
        const llm_tensor *t = llm_file_tensor(in, i);
        if (!quantize_tensor(q, t, llm_quantize_tensor_type(in, t, type, mixed))) return false;
    }
    return true;
}

bool llm_quantize(const char *in_path, const char *out_path, llm_type type, bool mixed,
                  bool (*progress)(void *user, uint64_t bytes_done, uint64_t bytes_total),
                  void *user, llm_error *err) {
    uint64_t longest = QUANTIZE_VALUES; /* larger of this and the longest row */
    if (!in_path || !out_path)
        return quantize_fail(err, LLM_ERROR_ARGUMENT, "llm_quantize: a path is NULL");
    if (type >= LLM_Q4_Z || !llm_type_find(type))
        return quantize_fail(err, LLM_ERROR_ARGUMENT, "llm_quantize: unknown type %d", (int)type);
    llm_file *in = llm_file_open(in_path, err);
    if (!in) return false;
    quantizer q = {in, NULL, progress, user, 0, 0, false, NULL, NULL};
    for (int64_t i = 0; i < llm_file_n_tensors(in); i++) {
        const llm_tensor *t = llm_file_tensor(in, i);
        q.total += t->bytes;
        if (t->dims[0] > longest) longest = t->dims[0];
    }
    q.values = (float *)quantize_memory(longest * sizeof(float), "rows to quantize", err);
    if (q.values)
        q.packed = (uint8_t *)quantize_memory(longest * sizeof(float), "quantized rows", err);
    if (q.packed) q.writer = llm_writer_create(out_path, err);
    bool ok = q.writer != NULL;
    if (ok) {
        quantize_file(&q, type, mixed);
        if (q.stopped) {
            llm_writer_abandon(q.writer);
            ok = quantize_fail(err, LLM_ERROR_FILE,
                               "%s: stopped by the caller; nothing was written", out_path);
        } else {
            ok = llm_writer_finish(q.writer, err); /* reports the first failure of the writer */
        }
    }
    LLM_FREE(q.values);
    LLM_FREE(q.packed);
    llm_file_close(in);
    return ok;
}
