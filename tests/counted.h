/* counted.h - numbers for kernels whose arithmetic the emulated GPU counts: counted<float> is a
 * float, and each of its operations and conversions calls emulator_operation. On a GPU, a kernel
 * uses the plain type instead. Indexes are plain ints, so addresses and loops are not counted. */
#ifndef COUNTED_H
#define COUNTED_H
#include <math.h>

#include "emulator.h"

template <class T> struct counted {
    T value;
    counted() = default;
    counted(T v) : value(v) {}
    template <class From> explicit counted(counted<From> v) : value((T)v.value) {
        emulator_operation();
    }
    friend counted operator+(counted a, counted b) { return done(a.value + b.value); }
    friend counted operator-(counted a, counted b) { return done(a.value - b.value); }
    friend counted operator*(counted a, counted b) { return done(a.value * b.value); }
    friend counted operator&(counted a, counted b) { return done(a.value & b.value); }
    friend counted operator>>(counted a, int b) { return done(a.value >> b); }
    friend counted &operator+=(counted &a, counted b) { return a = a + b; }
    friend counted fmaf(counted a, counted b, counted c) {
        return done(::fmaf(a.value, b.value, c.value));
    }

private:
    static T done(T result) {
        emulator_operation();
        return result;
    }
};
#endif
