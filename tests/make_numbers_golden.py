#!/usr/bin/env python3
"""Writes tests/data/numbers.bin: values packed by the `gguf` package (pip install gguf numpy),
which is bit-exact with ggml. llm.h must give the same bytes (tests/test_numbers.c).

The file has a u32 count and `count` f32 values. For each of f16, bf16, q8_0, q4_0, q4_1, q5_0 and
q5_1, the packed bytes and the f32 values that they unpack to follow. For q4_K, q5_K and q6_K, which
the package cannot pack, 8 blocks of random bytes and their f32 values follow.

    python3 tests/make_numbers_golden.py tests/data/numbers.bin
"""
import struct
import sys

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as T
from gguf import quants


def values():
    rng = np.random.default_rng(20240607)
    f32 = np.float32
    blocks = [
        rng.standard_normal(32).astype(f32) * f32(10.0**e) for e in range(-9, 5) for _ in range(3)
    ]
    blocks += [rng.integers(-9, 10, 32).astype(f32) for _ in range(6)]  # many ties
    blocks += [rng.integers(-15, 16, 32).astype(f32) * f32(0.5) for _ in range(6)]
    blocks += [np.zeros(32, f32), np.full(32, 3.25, f32), np.full(32, -3.25, f32)]
    blocks += [np.eye(1, 32, 7, dtype=f32)[0] * f32(-65000.0), np.arange(-16, 16).astype(f32)]
    # the limits of f16: its largest value, its smallest normal one, denormals, ties between values
    steps = np.array([
        65504, 65519, 65519.996, 2.0**-14, 2.0**-14 - 2.0**-25, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24,
        2.5 * 2.0**-24, 3.5 * 2.0**-24, 1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11,
        1.0 + 2.0**-11 + 2.0**-23, 2.0**-26, 1e-30, 0.0
    ], f32)
    blocks += [np.concatenate([steps, -steps])]
    # ties between bf16 values
    ties = (np.uint32(0x3F808000) + np.arange(16, dtype=np.uint32) * np.uint32(0x4000)).view(f32)
    blocks += [np.concatenate([ties, -ties])]
    return np.concatenate(blocks)


def random_blocks(t, scales):
    """Blocks of random bytes, with finite f16 numbers (one is denormal) at the offsets `scales`."""
    rng = np.random.default_rng(int(t))
    blocks = rng.integers(0, 256, (8, GGML_QUANT_SIZES[t][1]), dtype=np.uint8)
    for place in scales:
        f16 = rng.integers(0, 0x7C00, 8).astype("<u2") | (rng.integers(0, 2, 8).astype("<u2") << 15)
        f16[3] &= 0x83FF
        blocks[:, place : place + 2] = f16.view(np.uint8).reshape(-1, 2)
    return blocks


def main():
    x = values()
    with open(sys.argv[1], "wb") as f:
        f.write(struct.pack("<I", len(x)) + x.astype("<f4").tobytes())
        for t in (T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1):
            with np.errstate(over="ignore"):
                packed = quants.quantize(x, t)
            f.write(packed.tobytes())
            f.write(quants.dequantize(packed, t).astype("<f4").tobytes())
        for t, scales in ((T.Q4_K, (0, 2)), (T.Q5_K, (0, 2)), (T.Q6_K, (208,))):
            packed = random_blocks(t, scales)
            f.write(packed.tobytes())
            f.write(quants.dequantize(packed, t).astype("<f4").tobytes())


main()
