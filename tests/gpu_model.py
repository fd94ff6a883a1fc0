#!/usr/bin/env python3
"""gpu_model.py - a forecast for an H200: the largest share of a limit that the kernels of llm.cu
can reach. tests/sass.sh runs it. Input: the machine code of the kernels (sass.py) and the launches
of gpu_launches.cpp. No packages. Nothing here has been measured.

A launch takes as long as the slowest of these, plus a launch gap and the time to begin and end:
  bytes    what must be read from memory, once
  L2       all that blocks read, from the L2 cache
  issue    warp instructions on the SM with the most blocks; each quarter issues one per clock
  tensor   matrix instructions on that SM
  shared   bytes that instructions read from and write to its shared memory
  latency  the blocks that an SM runs one after another: the warps of a quarter of an SM take turns
           (sass.interleaved), and wait for memory where they have too few loads in flight. If the
           turns themselves take most of that time, it is called issue or tensor.

What it cannot see: how requests spread over memory channels, limits of the L1 cache, bank
conflicts, blocks that wait at a barrier for their slowest warp, clocks below the nominal one. It
takes the usual path through a loop (attention: the longest one once per part), streamed loads and
copies to shared memory from memory, and all other loads from the L2 cache. Bulk copies (TMA) are
taken to arrive in time: of these, only the bytes count.
"""
import math
import re
import subprocess
import sys

sys.dont_write_bytecode = True  # no __pycache__ beside the source
import sass  # noqa: E402

# ---- Assumptions: all figures of the forecast are here and in sass.CLOCKS -----------------------
SMS, SCHEDULERS = 132, 4
HERTZ = 1.755e9
COPY_RATE = 4.3e12        # bytes/s that a copy reaches (4.8e12 in the data sheet)
L2_RATE = 5.5e12          # bytes/s
L2_CLOCK_BYTES = 64       # per clock and SM
MEMORY_CLOCKS = 1230      # 0.7 us
L2_CLOCKS = 300
EMPTY_CLOCKS = 1000       # a block that finds nothing to do: three loads, one after another
LAUNCH_GAP = 1.0e-6       # seconds between two kernels of a graph
TENSOR_PEAK = 990e12      # operations/s of the data sheet: 2048 multiply-adds per clock and SM with
                          # wgmma; mma.sync reaches half of it (sass.TENSOR_CLOCKS)
SHARED_CLOCK_BYTES = 128  # per clock and SM
REGISTERS, BLOCKS = 65536, 32  # per SM
SHARED = {"sm_80": 164 << 10, "sm_86": 100 << 10, "sm_89": 100 << 10}  # per SM; others: 228 KB
WARPS = {"sm_86": 48, "sm_89": 48}                                       # per SM; others: 64
PART, CHUNK = 256, 64     # llm.cu: positions in a part of attention; columns in a chunk
KV_HEADS, GROUP = 8, 4    # gpu_launches.cpp: kv heads; query heads that share one


def blocks_per_sm(kernel, threads, dynamic):
    warps = threads // 32
    registers = math.ceil(kernel.registers / 8) * 8 * 32
    shared = math.ceil((kernel.shared + dynamic + sass.RESERVED) / 128) * 128
    return max(1, min(BLOCKS, WARPS.get(kernel.architecture, 64) // warps,
                      REGISTERS // (registers * warps),
                      SHARED.get(kernel.architecture, 228 << 10) // shared))


class Launch:
    def __init__(self, fields, symbols):
        self.symbol = symbols.get(int(fields[0]))
        self.label = fields[1]
        x, y, z, self.threads, self.dynamic = (int(f) for f in fields[2:7])
        self.grid, self.y = x * y * z, y
        words = fields[7].split() if len(fields) > 7 else []
        self.integers = [int(w) for w in words if re.fullmatch(r"-?\d+", w)]
        named = [w.split("=") for w in words if "=" in w]
        self.rows = [int(v) for k, v in named if k == "rows"]
        self.columns = [int(v) for k, v in named if k == "cols"]
        self.bytes = sum(int(v) for k, v in named if k == "bytes")
        self.n = [int(v) for k, v in named if k == "n"]
        self.wide = [int(v) for k, v in named if k == "wide"]  # columns of rounded x
        # rows and columns of the norm that the last block of a product computes
        self.then = [tuple(int(x) for x in v.split("x")) for k, v in named if k == "then"]


class Case:
    def __init__(self, fields):
        self.name, self.shape, self.limit = fields[:3]
        self.bytes, self.operations = float(fields[3]), float(fields[4])
        self.launches, self.sequences = [], []


def read_launches(text, symbols):
    cases = []
    for line in text.splitlines():
        fields = line.split("\t")
        if fields[0] == "case":
            cases.append(Case(fields[1:]))
        elif fields[0] == "sequences":
            cases[-1].sequences = [tuple(int(x) for x in f.split(":")) for f in fields[1:]]
        elif fields[0] == "launch":
            cases[-1].launches.append(Launch(fields[1:], symbols))
    return cases


def read_symbols(program):
    """Symbol of each offset from llm_gpu_launches_base."""
    text = subprocess.run(["nm", program], check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [l.split() for l in text.splitlines() if len(l.split()) == 3]
    base = next(int(a, 16) for a, _, s in rows if s == "llm_gpu_launches_base")
    # a static function is _ZL... here and _Z... in machine code
    return {int(a, 16) - base: re.sub("^_ZL", "_Z", s) for a, t, s in rows if t in "tTwW"}


# ---- How often loops run ------------------------------------------------------------------------

def numbers(name):
    """The integer template arguments of a kernel, without those of its layout."""
    inside = re.sub(r"bits_layout<[^>]*>|bits<[^>]*>|[a-z]+\d+\w*", "", name.partition("<")[2])
    return [int(x) for x in re.findall(r"\d+", inside)]


def all_inner(loop):
    for inner in loop.inner:
        yield inner
        yield from all_inner(inner)


def tokens_of(name):
    """Tokens of a block of a product, with those that only fill up fragments. With one token, a
    column of x counts as a token."""
    sizes = numbers(name)
    return sizes[0] * 128 if "wgmma" in name else 8 if len(sizes) < 2 else \
        sizes[1] * 8 if "few" in name else sizes[1]


def product_trips(kernel, name, launch):
    """Iterations of the main loop, and of the loops in it."""
    n = launch.n[0] if launch.n else 1
    padded = math.ceil(n / tokens_of(name)) * tokens_of(name)
    products = sum(math.ceil(r / 16) * c / 16 * padded / 16
                   for r, c in zip(launch.rows, launch.columns))
    warps = launch.grid * launch.threads / 32
    def useful(region):
        return sum(i.products for i in kernel.flat(kernel.path(region))
                   if i.address not in kernel.ones)
    inner = [l for l in all_inner(kernel.main) if useful(l)]
    own = useful(kernel.main) or 1
    if not inner:
        return max(1, products / warps / own), {}
    main = launch.columns[0] / CHUNK
    times = max(1, round(products / warps / main / own))
    return main, {l.head: times for l in inner}


def tile_of(kernel, name, launch):
    """Positions in a tile of attention: keys and values are all that its main loop copies."""
    sizes = numbers(name)
    loop = kernel.flat(kernel.path(kernel.main))
    width = sum(i.width for i in loop if i.is_copy) * launch.threads
    return max(16, width // (4 * (sizes[0] if sizes else 128))) if width else 64


def end_of_part(kernel):
    """Clocks that the longest path through the main loop takes more than the usual one."""
    if kernel.symbol not in ends:
        clocks = []
        for longest in (False, True):
            w = sass.Walk(MEMORY_CLOCKS, L2_CLOCKS, sass.CLOCKS)
            clocks.append(sass.steady(w, kernel.split(longest)[1]))
        ends[kernel.symbol] = max(0, clocks[1] - clocks[0])
    return ends[kernel.symbol]


ends = {}


def is_few(name):
    """Whether a kernel of attention is for few queries: blocks of one group of 16 rows."""
    return numbers(name)[1:2] == [1]


def attention_trips(kernel, name, launch, case):
    """Tiles of the longest block, and of all blocks; blocks without tiles."""
    sizes = numbers(name)
    few = is_few(name)
    tile = tile_of(kernel, name, launch)
    rows = sizes[1] * 16 if len(sizes) > 1 else 128 if "wgmma" in name else 64
    kv, group = KV_HEADS, GROUP
    whole = kv * sum(math.ceil(count * group / rows) for _, count in case.sequences)
    longest, total, blocks = 1, 0, 0
    for context, count in case.sequences:
        for block in range(math.ceil(count * group / rows)):
            last = context - count + min(count, (block + 1) * rows // group)
            # more blocks than tiles of rows: each has one part of the positions
            spans = [min(PART, last - p) for p in range(0, last, PART)] \
                if few and launch.grid > whole else [last]
            for span in spans:
                tiles = math.ceil(span / tile)
                longest, total, blocks = max(longest, tiles), total + tiles * kv, blocks + kv
    return longest, total, max(0, launch.grid - blocks)


def merged(case):
    """The parts of the rows that are merged: on average, and of the longest."""
    parts = [math.ceil(c / PART) for c, _ in case.sequences if c > PART] or [1]
    return sum(parts) / len(parts), max(parts)


def row_trips(kernel, launch, case, longest=True):
    """For kernels without matrix instructions: iterations of each loop with loads."""
    merge = "merge" in launch.label
    elements = max(launch.columns + launch.wide + launch.integers + [128])
    threads = launch.threads
    if merge:  # the warps take turns
        elements, threads = merged(case)[longest], 1
    elif "swiglu" in launch.label or "gate" in launch.label:
        threads *= launch.grid
    elif "rope" in launch.label:
        elements, threads = 128, 32
    trips = {}
    for loop in kernel.loops:
        if any(i.is_load for l in loop.inner for b in l.blocks for i in kernel.blocks[b]):
            continue
        code = kernel.flat(kernel.path(loop))
        loads = sum(i.width for i in code if i.is_load) / 4
        stores = sum(i.width for i in code if i.base == "STG") / 4
        if loads:
            rounds = any(i.base == "STG" and i.width == 16 for i in code)  # writes x as f16
            each = sum(i.is_load and i.width == 16 for i in code) if merge else \
                loads if rounds else stores or loads
            trips[loop.head] = max(1, math.ceil(elements / threads / max(1, each)))
    return trips


# ---- Time ---------------------------------------------------------------------------------------

def tensor_clocks(code):
    """Clocks of the tensor core of a quarter of an SM."""
    return sum(i.products * (16 if i.base in ("HMMA", "IMMA") else 8) for i in code)


def shared_bytes(code):
    """Bytes from and to shared memory, without copies."""
    return sum(i.width * 32 for i in code if i.base in ("LDS", "STS")) + \
        512 * sum(i.base == "LDSM" for i in code) + sum(i.shared_read for i in code)


def loaded_again(code):
    """Bytes of loads other than copies and streamed ones."""
    return sum(i.width * 32 for i in code if i.is_load and not i.is_stream)


def copied(code):
    """Bytes of copies to shared memory."""
    return sum(i.width * 32 for i in code if i.is_copy)


COUNTS = (len, tensor_clocks, shared_bytes, loaded_again, copied)
profiles, shared_loops = {}, {}


def profile(kernel, trips, cached=L2_CLOCKS):
    """What one warp does: for the parts before, in (an iteration) and after the main loop, the
    clocks that it needs alone, and the counts of COUNTS (of a merge, on its longest path)."""
    key = (kernel.symbol, tuple(sorted(trips.items())), cached)
    if key not in profiles:
        longest = "merge" in kernel.symbol
        parts = kernel.split(longest, trips)
        clocks = sass.walk(kernel, MEMORY_CLOCKS, cached, sass.CLOCKS, trips, longest)
        profiles[key] = [[c] + [count(part) for count in COUNTS]
                         for c, part in zip(clocks, parts)]
    return profiles[key]


def loop_clocks(kernel, trips, warps):
    """Clocks of an iteration of the main loop with so many warps in each quarter of an SM."""
    key = (kernel.symbol, tuple(sorted(trips.items())), warps)
    if key not in shared_loops:
        shared_loops[key] = sass.interleaved(kernel.split(trips=trips)[1], warps, MEMORY_CLOCKS,
                                             L2_CLOCKS, sass.CLOCKS)
    return shared_loops[key]


def row_profile(kernel, trips, cached=L2_CLOCKS):
    """The same for a kernel without a matrix loop, as one part. The walks are of 3 and 6 iterations
    of the longest loop; more is extrapolated."""
    main = kernel.main.head if kernel.main else None
    most = max(list(trips.values()) + [1])
    def at(share):
        some = {head: max(1, round(n * share)) for head, n in trips.items()}
        before, loop, after = profile(kernel, {h: n for h, n in some.items() if h != main}, cached)
        n = some.get(main, 1) if main is not None else 0
        return [x + n * y + z for x, y, z in zip(before, loop, after)]
    if most <= 6:
        return at(1)
    few, more = at(3 / most), at(6 / most)
    return [x + (y - x) * (most - 3) / 3 for x, y in zip(few, more)]


def then_clocks(kernels, names, launch):
    """Clocks in which the last block of a product computes the norm after it: fences and a count,
    then the rows, one after another."""
    symbol = next((s for s, name in names.items() if name == "next_x<true, true>"), None)
    if not launch.then or symbol not in kernels:
        return 0
    (rows, columns), kernel = launch.then[0], kernels[symbol]
    norm = Launch(["0", "norm", 1, 1, 1, launch.threads, 0, "wide=%d" % columns], {})
    return EMPTY_CLOCKS + rows * row_profile(kernel, row_trips(kernel, norm, None))[0]


def launch_time(kernels, names, launch, case):
    """Seconds, and what they are bounded by."""
    kernel = kernels.get(launch.symbol)
    if kernel is None:
        return LAUNCH_GAP + 2e-6, "unknown"
    name = names[launch.symbol]
    iterations, empty, total, longest = 1, 0, None, 0
    matrix = kernel.main and any(i.base in sass.MATRIX for i in kernel.code)
    if matrix and launch.rows:
        iterations, trips = product_trips(kernel, name, launch)
        before, loop, after = profile(kernel, trips)
    elif matrix and case.sequences:
        iterations, total, empty = attention_trips(kernel, name, launch, case)
        trips = {}
        before, loop, after = profile(kernel, trips)
    else:
        # the warps of a merge take turns: each loads what it adds in its next one
        turns = launch.threads / 32 if "merge" in launch.label else 1
        before, slowest = (row_profile(kernel, row_trips(kernel, launch, case, l),
                                       L2_CLOCKS / turns) for l in (False, True))
        loop = after = [0] * 6
        longest = slowest[0]
    warps, together = launch.threads / 32, blocks_per_sm(kernel, launch.threads, launch.dynamic)
    if "merge" in launch.label:
        warps = 1
    blocks = max(1, launch.grid - empty)
    most = math.ceil(blocks / SMS)  # blocks of the busiest SM
    spread = blocks / most if total is None else SMS  # SMs that are busy, on average
    waves = math.ceil(most / together)
    # the longest blocks of attention start first, so that the SMs are filled evenly
    sm_iterations = most * iterations if total is None else max(total / SMS, iterations)
    _, issue, tensor, shared, again, copies = [
        warps * (sm_iterations * l + most * (b + a)) for b, l, a in zip(before, loop, after)]
    if matrix and launch.rows:  # a block reads its weights and x
        tiles = launch.integers[0] if launch.integers else 1  # of tokens
        quarters = launch.y  # 4: blocks write their sums, and the last of four reads them
        weights = launch.bytes * tiles / launch.grid
        token = launch.columns[0] * 2 / quarters
        sums = (quarters > 1) * 8 * tokens_of(name) * sum(launch.rows) * tiles / (
            launch.grid / quarters)
        again = most * (weights + min(launch.n[0], tokens_of(name)) * token + sums)
        # tokens that only fill up fragments are copied again, but from the same place
        shared += most * (weights + (1 if "one<" in name else tokens_of(name)) * token)
    elif total is not None:  # what is copied before the loop is not copied in it
        if is_few(name):  # only these of 16 rows of q are read
            again -= most * warps * before[4] * max(
                0, 1 - max(count for _, count in case.sequences) * GROUP / 16)
        again += sm_iterations * warps * loop[5]
        shared += sm_iterations * warps * loop[5]
    else:
        again += copies
        shared += copies
    if matrix and launch.bytes:
        moved = launch.bytes
    elif total is not None and is_few(name):  # few rows: each key and value is read once
        moved = total * loop[5] * warps
    else:
        moved = case.bytes if len(case.launches) == 1 else 0
    each = loop_clocks(kernel, trips, max(1, round(min(most, together) * warps / SCHEDULERS))) \
        if matrix else 0
    if total is not None:  # at the end of a part, while other blocks continue: the longest path
        each = max(each, loop[0] + end_of_part(kernel) * tile_of(kernel, name, launch) / PART)
    alone = before[0] + iterations * each + after[0]
    ends = before[0] + after[0] if matrix else 0
    if total is None:
        latency = max(waves * alone, longest) - ends
    else:
        latency = max(iterations * each, sm_iterations / together * each +
                      max(0, blocks / SMS / together - 1) * ends) + \
            math.ceil(empty / SMS / together) * EMPTY_CLOCKS
    bounds = {
        "issue": issue / SCHEDULERS,
        "tensor": tensor / SCHEDULERS,
        "shared": shared / SHARED_CLOCK_BYTES,
        "L2": max(again / L2_CLOCK_BYTES, again * spread / L2_RATE * HERTZ),
        "bytes": moved / COPY_RATE * HERTZ,
        "latency": latency,
    }
    bound = max(bounds, key=lambda b: bounds[b])
    seconds = bounds[bound] / HERTZ
    if bound == "latency" and matrix:  # name what the warps wait for
        bound = max(("issue", "tensor", "latency"),
                    key=lambda b: bounds[b] if b != "latency" else 0.75 * latency)
    if not matrix and bound != "latency":
        ends = L2_CLOCKS
    ends += then_clocks(kernels, names, launch)
    return seconds + ends / HERTZ + LAUNCH_GAP, bound


def case_time(kernels, names, case):
    """Seconds of a case, what bounds its longest kind of launch, and that kernel's name."""
    seconds, by = 0, {}
    for launch in case.launches:
        t, bound = launch_time(kernels, names, launch, case)
        seconds += t
        by[(launch.symbol, bound)] = by.get((launch.symbol, bound), 0) + t
    (symbol, bound), _ = max(by.items(), key=lambda item: item[1])
    return seconds, bound, names.get(symbol, "unknown")


HEADER = """| kernel | shape | limit | bounded by | forecast | share of the limit | launches | \
measured |
|---|---|---|---|---|---|---|---|"""


def forecast(kernels, names, cases):
    """The table of forecasts."""
    print(HEADER)
    for case in cases:
        seconds, bound, _ = case_time(kernels, names, case)
        if case.limit == "arithmetic":
            limit, figure = case.operations / TENSOR_PEAK, "%.0f TFLOP/s" % (
                case.operations / seconds * 1e-12)
        else:
            limit, figure = case.bytes / COPY_RATE, "%.2f TB/s" % (case.bytes / seconds * 1e-12)
        print("| %s | %s | %s us, %s | %s | %s us, %s | %.0f %% | %d | not measured |" % (
            case.name, case.shape, digits(limit * 1e6), case.limit, bound, digits(seconds * 1e6),
            figure, 100 * limit / seconds, len(case.launches)))


def digits(x):
    return "%.0f" % x if x >= 100 else "%.1f" % x if x >= 1 else "%.2f" % x


def report(kernels, names, cases):
    """The table of kernels that the cases launch."""
    used = {}
    for case in cases:
        for launch in case.launches:
            used.setdefault(launch.symbol, []).append(launch)
    print(sass.HEADER)
    for name, symbol in sorted((names.get(s) or "", s) for s in used):
        if symbol not in kernels:
            print("| %s: not in the machine code |" % symbol)
            continue
        kernel = kernels[symbol]
        most = max(used[symbol], key=lambda l: l.dynamic)
        shared = [kernel.shared]
        dynamic = sorted({l.dynamic for l in used[symbol]})
        shared.append(dynamic[0] if len(dynamic) == 1 else "%d-%d" % (dynamic[0], dynamic[-1]))
        weights = 0
        if "one<" in name or "few<" in name:
            weights = sum(i.products for b in kernel.split()[1:2] for i in b) * 4096 / \
                tokens_of(name) * most.bytes / sum(r * c for r, c in zip(most.rows, most.columns))
        together = {blocks_per_sm(kernel, l.threads, l.dynamic) for l in used[symbol]}
        print(sass.describe(name, kernel, "%s + %s" % tuple(shared), most.threads,
                            "-".join(str(b) for b in sorted({min(together), max(together)})),
                            weights))


def main(arguments):
    what, program, launches, machine_code, usage = arguments
    def text(path):
        with open(path, encoding="utf-8") as file:
            return file.read()
    kernels = sass.parse(text(machine_code), text(usage))
    names = sass.plain_names(sorted(kernels))
    cases = read_launches(text(launches), read_symbols(program))
    {"kernels": report, "forecast": forecast}[what](kernels, names, cases)


if __name__ == "__main__":
    main(sys.argv[1:])
