#!/usr/bin/env python3
"""Compares the storage types of llm.h with the `gguf` package (pip install gguf numpy), and with
llama.cpp's ggml if its library is given, on many more values than the tests use.

    python3 tests/compare_types.py [PATH/libggml-base.so]

Prints a table in Markdown. The exit status is 1 if the same bytes unpack to different values. The
columns:

    bits      per weight
    read      how many blocks of random bytes unpack to exactly the same values
    error     RMS error of packing and unpacking values from the standard normal distribution
    ggml's    the same, packed by ggml
"""
import ctypes
import os
import subprocess
import sys
import tempfile

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

HERE = os.path.dirname(os.path.abspath(__file__))
WRAPPER = """
#define LLM_IMPLEMENTATION
#include "llm.h"
#include "models/quantize.c"
void unpack(const char *type, const void *b, float *x, int64_t n) {
    llm_type_by_name(type)->unpack(b, x, n);
}
void pack(const char *type, const float *x, void *b, int64_t n) {
    llm_pack(llm_type_by_name(type)->type, x, b, n);
}
"""


def ours():
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "types.so")
        command = [os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-fopenmp", "-shared", "-fPIC",
                   "-I", os.path.dirname(HERE), "-x", "c", "-", "-o", library, "-lm"]
        subprocess.run(command, input=WRAPPER.encode(), check=True)
        return ctypes.CDLL(library)


def pointer(a):
    return a.ctypes.data_as(ctypes.c_void_p)


def random_blocks(rng, kind, count):
    """Random bytes, with finite f16 scales at the beginning of each block (q6_K: at its end)."""
    block, size = GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (count, size), dtype=np.uint8)
    name = kind.name
    two = name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    places = [0, 2] if two else [size - 2] if name == "Q6_K" else [0]
    for place in places:
        f16 = rng.integers(0, 0x7C00, count).astype(np.uint16)
        f16 |= rng.integers(0, 2, count).astype(np.uint16) << 15
        data[:, place:place + 2] = f16.view(np.uint8).reshape(-1, 2)
    return data


def main():
    lib, ggml = ours(), None
    if len(sys.argv) > 1:
        ggml = ctypes.CDLL(sys.argv[1])
        ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
        ggml.ggml_quantize_chunk.argtypes = (
            [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 +
            [ctypes.c_void_p])
    rng = np.random.default_rng(7)
    x = rng.standard_normal(1 << 20).astype(np.float32)
    bad = 0
    print("| type | bits | bytes of a block | read | error | ggml's |\n|---|---|---|---|---|---|")
    for name in ("Q8_0", "Q6_K", "Q5_1", "Q5_0", "Q5_K", "Q4_1", "Q4_0", "Q4_K"):
        kind = GGMLQuantizationType[name]
        block, size = GGML_QUANT_SIZES[kind]
        ascii_name = name.lower().encode()
        data = random_blocks(rng, kind, (1 << 20) // block)
        expected = quants.dequantize(data, kind).reshape(-1)
        got = np.empty(data.shape[0] * block, np.float32)
        lib.unpack(ascii_name, pointer(data), pointer(got), ctypes.c_int64(got.size))
        same = np.count_nonzero(
            (got.view(np.uint32) == expected.view(np.uint32)).reshape(-1, block).all(axis=1))
        bad += same != data.shape[0]
        packed = np.empty(x.size // block * size, np.uint8)
        lib.pack(ascii_name, pointer(x), pointer(packed), ctypes.c_int64(x.size))
        back = np.empty_like(x)
        lib.unpack(ascii_name, pointer(packed), pointer(back), ctypes.c_int64(x.size))
        error, theirs = np.sqrt(np.mean((back.astype(np.float64) - x) ** 2)), ""
        if ggml:
            ggml.ggml_quantize_chunk(int(kind), pointer(x), pointer(packed), 0, x.size // 256, 256,
                                     None)
            lib.unpack(ascii_name, pointer(packed), pointer(back), ctypes.c_int64(x.size))
            theirs = "%.5f" % np.sqrt(np.mean((back.astype(np.float64) - x) ** 2))
        print("| %s | %g | %d | %d of %d | %.5f | %s |" %
              (name[:-1].lower() + name[-1] if name.endswith("K") else name.lower(),
               8 * size / block, size, same, data.shape[0], error, theirs))
    sys.exit(1 if bad else 0)


main()
