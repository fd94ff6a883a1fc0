/* buffer.h - a growing text, and writing JSON into it */
#ifndef BUFFER_H
#define BUFFER_H
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct buffer { /* a growing text; zero it first */
    char *data;
    size_t length, capacity;
    bool failed; /* memory ran out: the text is incomplete */
} buffer;

static void add_bytes(buffer *b, const char *bytes, size_t n) {
    if (n > b->capacity - b->length) {
        size_t capacity = 2 * (b->length + n) + 64;
        char *data = b->failed ? NULL : (char *)realloc(b->data, capacity);
        if (!data) {
            b->failed = true;
            return;
        }
        b->data = data;
        b->capacity = capacity;
    }
    if (n) memcpy(b->data + b->length, bytes, n);
    b->length += n;
}

static void add_text(buffer *b, const char *text) { add_bytes(b, text, strlen(text)); }

/* At most 1,023 bytes. */
__attribute__((format(printf, 2, 3))) static void add(buffer *b, const char *format, ...) {
    char piece[1024];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(piece, sizeof piece, format, arguments);
    va_end(arguments);
    if (n > 0) add_bytes(b, piece, n < (int)sizeof piece ? (size_t)n : sizeof piece - 1);
}

/* Length of the UTF-8 character at s; 0: the bytes are not valid UTF-8. */
static int utf8_length(const unsigned char *s, size_t n) {
    if (s[0] < 0x80) return 1;
    int length = s[0] >= 0xf0 ? 4 : s[0] >= 0xe0 ? 3 : 2;
    if (s[0] < 0xc2 || s[0] > 0xf4 || (size_t)length > n) return 0;
    for (int i = 1; i < length; i++)
        if (s[i] >> 6 != 2) return 0;
    unsigned second = s[1]; /* overlong forms, surrogates, beyond U+10FFFF */
    if ((s[0] == 0xe0 && second < 0xa0) || (s[0] == 0xed && second > 0x9f) ||
        (s[0] == 0xf0 && second < 0x90) || (s[0] == 0xf4 && second > 0x8f))
        return 0;
    return length;
}

/* A JSON string; a byte that is not UTF-8 becomes U+FFFD. */
static void add_string(buffer *b, const char *data, size_t n) {
    add_text(b, "\"");
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)data[i];
        int length = utf8_length((const unsigned char *)data + i, n - i);
        if (c == '"' || c == '\\') add(b, "\\%c", c);
        else if (c == '\n') add_text(b, "\\n");
        else if (c < 0x20 || c == 0x7f) add(b, "\\u%04x", c);
        else if (length) add_bytes(b, data + i, (size_t)length);
        else add_text(b, "\\ufffd");
        i += length ? (size_t)length : 1;
    }
    add_text(b, "\"");
}

/* JSON has no infinity: OpenAI's API has -9999 instead. */
static void add_logprob(buffer *b, float x) { add(b, "%.6g", x > -9999 ? (double)x : -9999.0); }

static void buffer_free(buffer *b) {
    free(b->data);
    *b = (buffer){0};
}

#endif
