#!/usr/bin/env python3
"""test_sass.py - tests/sass.py on stored machine code (tests/data/kernels.sass: two kernels
compiled by nvcc 13.0 for sm_90) with known answers, and tests/gpu_page.sh on a small page. Ends in
a line of counts. The kernels:

stream: a loop with four streamed loads of 16 bytes per lane, used after all four have started; then
a store to a place that a look-up of a look-up gives.

matrix: a ring of two stages of 512 bytes per warp, filled by cp.async; an iteration has two matrix
instructions, the second with ones as its matrix A, and a store that is seldom executed.
"""
import os
import subprocess
import sys
import tempfile

here = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, here)
sys.dont_write_bytecode = True
import gpu_model  # noqa: E402
import sass  # noqa: E402

USAGE = """
 Function matrix:
  REG:24 STACK:0 SHARED:2048 LOCAL:0 CONSTANT[0]:552 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function stream:
  REG:23 STACK:16 SHARED:0 LOCAL:0 CONSTANT[0]:560 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
failed = passed = 0


def same(what, value, expected):
    global failed, passed
    if value == expected:
        passed += 1
    else:
        failed += 1
        print("FAILED: %s: %r instead of %r" % (what, value, expected))


with open(os.path.join(here, "data", "kernels.sass"), encoding="utf-8") as file:
    kernels = sass.parse(file.read(), USAGE)
same("kernels", sorted(kernels), ["matrix", "stream"])

stream = kernels["stream"]
before, loop, after = stream.split()
same("stream: resources", (stream.registers, stream.local, stream.shared), (23, 16, 0))
same("matrix: shared memory without what is reserved",
     (kernels["matrix"].architecture, kernels["matrix"].shared), ("sm_90", 1024))
same("stream: addresses of the loop", (loop[0].address, loop[-1].address), (0xb0, 0x1d0))
same("stream: instructions in the loop", len(loop), 19)
same("stream: bytes per iteration", sum(i.width for i in loop if i.is_stream) * 32, 2048)
same("stream: classes", sass.classes(loop)["LDG stream"], 4)
same("stream: bytes in flight", sass.walk(stream, 1000, 300, sass.CLOCKS)[3], 2048)
same("stream: round trips", sass.round_trips(stream), (0, 1, 1, 2))
start, each, end, _ = sass.walk(stream, 1000, 300, sass.CLOCKS)
same("stream: an iteration waits for memory", 1000 < each < 1100, True)
same("stream: the end has two look-ups", 600 < end < 750, True)
same("stream: stall of the first load", (loop[0].stall, loop[0].sets, loop[0].waits), (4, 2, 0))

matrix = kernels["matrix"]
before, loop, after = matrix.split()
same("matrix: instructions in the loop, without those that never run", len(loop), 37)
same("matrix: copies", [i.base for i in loop if i.is_load], ["LDGSTS"])
same("matrix: products", sum(i.products for i in loop), 1)
same("matrix: without ones", sum(i.products for i in loop if i.address not in matrix.ones), 0.5)
same("matrix: two stages in flight", sass.walk(matrix, 1000, 300, sass.CLOCKS)[3], 1024)
each = sass.walk(matrix, 1000, 300, sass.CLOCKS)[1]
same("matrix: two iterations per round trip", 500 < each < 700, True)
same("matrix: only the matrix instructions count", sass.walk(matrix, 0, 0, {"HMMA": 33})[1] >= 66,
     True)

def instruction(text):
    return sass.Instruction(0, "", text, 0x7 << 46 | 0x7 << 49)


group = instruction("HGMMA.64x128x16.F32 R24, R96, gdesc[UR8], R24, gsb0")
same("wgmma: products of a warp", group.products, 8)
same("wgmma: bytes of shared memory, of B", group.shared_read, 1024)
same("wgmma: ... of A and B",
     instruction("HGMMA.64x128x16.F32 R24, gdesc[UR4], gdesc[UR8], R24").shared_read, 1536)
walks = [sass.Walk(0, 0, sass.CLOCKS) for _ in range(2)]
for w, left in zip(walks, ("0x0", "0x1")):
    w.run([group, group, instruction("WARPGROUP.DEPBAR.LE gsb0, " + left)])
same("wgmma: a wait for all groups but the last is 64 clocks shorter",
     walks[0].now - walks[1].now, 64)
same("a branch of diverged lanes is not taken", instruction("BRA.DIV UR4, 0x2470").target, None)
same("bulk copy", (instruction("UBLKCP.S.G [UR4], [UR6], UR8").is_copy,
                   instruction("UBLKCP.S.G [UR4], [UR6], UR8").width), (True, 0))

same("blocks per SM, by shared memory", gpu_model.blocks_per_sm(matrix, 128, 98304), 2)
stream.registers = 168
same("blocks per SM, by registers", gpu_model.blocks_per_sm(stream, 256, 0), 1)
same("template arguments", gpu_model.numbers("matmul_few<bits<0, true>, 2, 4, false>"), [2, 4])
same("tokens of a block", [gpu_model.tokens_of(name) for name in (
    "matmul_one<q4_0>", "matmul_few<bits<0, true>, 4, 2>", "matmul_many<f16, 128, 64>",
    "matmul_wgmma<q4_0, 2>")], [8, 16, 64, 256])
same("attention of few queries", [gpu_model.is_few(name) for name in (
    "attention<128, 1, 4, 3>", "attention<128, 8, 1, 2>", "attention_wgmma")], [True, False, False])
same("... of a named layout", gpu_model.numbers("matmul_many<q4_0, 128, 64>"), [128, 64])

PAGE = """# Page
<!-- forecast -->
old
<!-- end forecast -->
<!-- measured: a b -->
| product | 1 x 1 | 5 us | 10 % |
<!-- end measured: a b -->
"""
TABLE = """| kernel | shape | limit | forecast | share | measured |
|---|---|---|---|---|---|
| product | 1 x 1 | 1 us | 2 us | 50 % | not measured |
| product | 2 x 2 | 1 us | 2 us | 50 % | 7 us |
"""
with tempfile.TemporaryDirectory() as folder:
    page, table = os.path.join(folder, "page.md"), os.path.join(folder, "table.md")
    for path, content in ((page, PAGE), (table, TABLE)):
        with open(path, "w", encoding="utf-8") as file:
            file.write(content)
    tool = ["sh", os.path.join(here, "gpu_page.sh")]
    for arguments in (["section", page, "forecast", table], ["beside", page],
                      ["section", page, "new", table]):
        same("gpu_page.sh " + arguments[0], subprocess.call(tool + arguments), 0)
    with open(page, encoding="utf-8") as file:
        lines = file.read().splitlines()
same("the old text is gone", "old" in lines, False)
same("a figure is beside its forecast",
     "| product | 1 x 1 | 1 us | 2 us | 50 % | 5 us |" in lines, True)
same("a forecast without a figure",
     "| product | 2 x 2 | 1 us | 2 us | 50 % | not measured |" in lines, True)
same("a new section", [l for l in lines if "new" in l], ["<!-- new -->", "<!-- end new -->"])

print("%d passed, %d failed" % (passed, failed))
sys.exit(failed > 0)
