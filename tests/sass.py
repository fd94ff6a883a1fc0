#!/usr/bin/env python3
"""sass.py - reads the machine code (SASS) of kernels as cuobjdump prints it, and says what their
main loops do. tests/gpu_model.py uses it; tests/sass.sh runs both. No packages.

The steps: instructions -> basic blocks -> loops (backward branches whose target dominates them) ->
the usual path through each loop (the one with the most matrix instructions and streamed loads; of
these the shortest) -> a walk along that path, in order, as one warp issues it.

A walk obeys the control bits that the compiler puts into each instruction: the clocks until the
next issue, the scoreboard that a load or another slow instruction sets, and the scoreboards that an
instruction waits for. With the clocks of CLOCKS it gives the clocks of a warp that runs alone. With
1 for each load from global memory and 0 for everything else it counts the round trips to memory
that the warp waits for one after another.
"""
import collections
import heapq
import math
import re
import subprocess

WARP = 32
RESERVED = 1024  # bytes of shared memory per block; from sm_90 on, cuobjdump counts them too
# Clocks until the result of a slow instruction is there (rounded figures of published
# microbenchmarks of Hopper GPUs). Loads from global memory: see Walk.
CLOCKS = {"LDS": 30, "LDSM": 33, "STS": 10, "SHFL": 24, "MUFU": 18, "LDC": 30, "ATOMS": 60,
          "S2R": 20, "HMMA": 33, "IMMA": 33, "slow": 20}
TENSOR_CLOCKS = 8  # an HMMA.16816 occupies the tensor core of its quarter of an SM for so long
MATRIX = ("HMMA", "IMMA", "HGMMA", "IGMMA")
ASYNC = ("HGMMA", "IGMMA")  # of a warp group (wgmma): a warp waits for them with WARPGROUP.DEPBAR
COPIES = ("LDGSTS", "UTMALDG", "UBLKCP")  # from global to shared memory, without registers


class Instruction:
    """One instruction: address, predicate, name with its suffixes, operands and control bits."""

    def __init__(self, address, predicate, text, word):
        self.address, self.predicate = address, predicate
        self.name, _, operands = text.partition(" ")
        self.operands = operands.strip()
        self.base, *self.suffixes = self.name.split(".")
        self.stall, self.sets = word >> 41 & 15, word >> 46 & 7
        self.releases, self.waits = word >> 49 & 7, word >> 52 & 63

    @property
    def never(self):
        return self.predicate == "@!PT"

    @property
    def width(self):
        """Bytes per lane of a load or store; 0: a bulk copy, whose size is not in the code."""
        if self.base in ("UTMALDG", "UBLKCP"):
            return 0
        for bits in ("128", "64"):
            if bits in self.suffixes:
                return int(bits) // 8
        return {"U8": 1, "S8": 1, "U16": 2, "S16": 2}.get(
            next((s for s in self.suffixes if s in ("U8", "S8", "U16", "S16")), ""), 4)

    @property
    def is_copy(self):
        return self.base in COPIES

    @property
    def is_load(self):
        """Reads global memory."""
        return self.base in ("LDG", "LD", "ATOMG", "ATOM") or self.is_copy

    @property
    def is_stream(self):
        """Reads data that is used once (__ldcs), or copies it to shared memory."""
        return self.is_copy or (self.base == "LDG" and "EF" in self.suffixes)

    @property
    def products(self):
        """16 x 16 x 16 products of one warp."""
        shape = re.search(r"\.(\d+)x(\d+)x(\d+)", self.name)
        if self.base in ASYNC and shape:  # a warp group: a quarter for each warp
            m, n, k = (int(x) for x in shape.groups())
            return m * n * k / 4096 / 4
        return 0.5 if self.base in MATRIX and ".16816" in self.name else \
            0.25 if self.base in MATRIX else 0

    @property
    def shared_read(self):
        """Bytes of shared memory that a warp's quarter of a warp group's product reads."""
        shape = re.search(r"\.(\d+)x(\d+)x(\d+)", self.name)
        if self.base not in ASYNC or not shape:
            return 0
        m, n, k = (int(x) for x in shape.groups())
        both = self.operands.count("gdesc") > 1  # A, too, is there
        return (n + m * both) * k * (2 if self.base == "HGMMA" else 1) / 4

    @property
    def target(self):
        """Address that a branch may go to; None: none, or not known, or only if the lanes of a
        warp have gone different ways."""
        if self.base not in ("BRA", "JMP") or ".DIV" in self.name:
            return None
        numbers = re.findall(r"0x[0-9a-f]+", self.operands)
        return int(numbers[-1], 16) if numbers else None

    @property
    def ends(self):
        """Whether the next instruction never follows."""
        if self.base in ("BRA", "JMP"):
            return not self.predicate and ".DIV" not in self.name and \
                not re.match(r"!?U?P\d", self.operands)
        return self.base in ("EXIT", "RET", "BRX", "KILL", "BPT") and not self.predicate

    def registers(self):
        return [int(n) for n in re.findall(r"\bR(\d+)\b", self.operands)]


class Loop:
    """A natural loop: its head, its blocks and the loops in it."""

    def __init__(self, head):
        self.head, self.blocks, self.parent, self.inner = head, {head}, None, []


class Kernel:
    """The blocks, loops and resources of one kernel."""

    def __init__(self, symbol, architecture):
        self.symbol, self.name, self.architecture = symbol, symbol, architecture
        self.code, self.registers, self.shared, self.local = [], 0, 0, 0

    # ---- Blocks and loops ----
    def analyse(self):
        self.paths = {}
        targets = {i.target for i in self.code if i.target is not None}
        self.blocks, by_address = [], {}
        for i in self.code:
            if not self.blocks or i.address in targets or self.blocks[-1][-1].ends or \
                    self.blocks[-1][-1].target is not None:
                by_address[i.address] = len(self.blocks)
                self.blocks.append([])
            self.blocks[-1].append(i)
        n = len(self.blocks)
        self.next = [[] for _ in range(n)]
        for b, block in enumerate(self.blocks):
            last = block[-1]
            if not last.ends and b + 1 < n:
                self.next[b].append(b + 1)
            if last.target in by_address and last.target != last.address:
                self.next[b].append(by_address[last.target])
        order, seen, stack = [], {0}, [(0, iter(self.next[0]))]
        while stack:
            b, rest = stack[-1]
            for c in rest:
                if c not in seen:
                    seen.add(c)
                    stack.append((c, iter(self.next[c])))
                    break
            else:
                order.append(b)
                stack.pop()
        self.order = order[::-1]
        self.place = {b: i for i, b in enumerate(self.order)}
        before = collections.defaultdict(list)
        for b in self.order:
            for c in self.next[b]:
                before[c].append(b)
        dominators = {b: None for b in self.order}
        dominators[0] = {0}
        changed = True
        while changed:
            changed = False
            for b in self.order[1:]:
                sets = [dominators[p] for p in before[b] if dominators[p] is not None]
                new = set.intersection(*sets) | {b}
                if new != dominators[b]:
                    dominators[b], changed = new, True
        loops = {}
        for b in self.order:
            for c in self.next[b]:
                if c not in dominators[b]:
                    continue
                loop, todo = loops.setdefault(c, Loop(c)), [b]
                while todo:
                    d = todo.pop()
                    if d not in loop.blocks:
                        loop.blocks.add(d)
                        todo += before[d]
        self.loops = sorted(loops.values(), key=lambda l: len(l.blocks))
        for i, loop in enumerate(self.loops):
            loop.parent = next((o for o in self.loops[i + 1:] if loop.blocks < o.blocks), None)
            if loop.parent:
                loop.parent.inner.append(loop)
        self.has_stream = any(i.is_stream and not i.never for i in self.code)
        self.has_hot = self.has_stream or any(i.base in MATRIX for i in self.code)
        self.ones = self.find_ones()
        self.main = self.find_main()

    def find_ones(self):
        """Matrix instructions whose matrix A is constant (ones): they only add up x."""
        constant, found = {}, set()
        for i in self.code:
            registers = i.registers()
            if i.base in MATRIX and len(registers) > 1 and constant.get(registers[1]):
                found.add(i.address)
            if registers and i.base not in ("STG", "STS", "BRA"):
                constant[registers[0]] = "MOV" in i.name and "0x3c003c00" in i.operands
        return found

    def find_main(self):
        """The innermost loop with the matrix instructions and the streamed loads; or with the
        matrix instructions; or with the most bytes of loads."""
        def all_of(loop):
            return [i for b in loop.blocks for i in self.blocks[b] if not i.never]
        def bytes_of(code):
            return sum(i.width for i in code if i.is_load)
        matrix = sum(i.base in MATRIX for i in self.code)
        looped = {b for loop in self.loops for b in loop.blocks}
        straight = bytes_of(i for b in self.order if b not in looped for i in self.blocks[b]
                            if not i.never)
        best, best_key = None, None
        for loop in self.loops:  # from small to large
            code = all_of(loop)
            products = sum(i.base in MATRIX for i in code)
            streams = sum(i.is_stream for i in code)
            if not products and not any(i.is_load for i in code):
                continue
            key = (2 * products >= matrix > 0 and (streams > 0 or not self.has_stream),
                   2 * products >= matrix > 0, bytes_of(code))
            if best is None or key[:2] > best_key[:2] or \
                    (key[:2] == best_key[:2] and not key[0] and key[2] > best_key[2]):
                best, best_key = loop, key
        # what is small beside the code that runs once is no main loop
        return best if matrix or best_key and best_key[2] >= straight else None

    # ---- Paths ----
    def weight(self, instruction):
        if instruction.never:
            return 0
        if self.has_hot:
            return instruction.base in MATRIX or instruction.is_stream
        return instruction.is_load

    def path(self, region, longest=False, through=None):
        """The usual path (or the one with the most instructions) through a loop, or through the
        whole kernel (region None): a list of blocks and loops. `through`: a loop to visit."""
        key = (region and region.head, longest, through and through.head)
        if key not in self.paths:
            self.paths[key] = self.find_path(region, longest, through)
        return self.paths[key]

    def find_path(self, region, longest, through):
        inner = region.inner if region else [l for l in self.loops if not l.parent]
        node_of, nodes = {}, {}
        for loop in inner:
            for b in loop.blocks:
                node_of[b] = loop
        inside = region.blocks if region else set(self.order)
        for b in self.order:
            if b in inside:
                nodes.setdefault(node_of.get(b, b), None)
        def position(node):
            return self.place[node.head if isinstance(node, Loop) else node]
        def edges(node):
            for b in node.blocks if isinstance(node, Loop) else [node]:
                for c in self.next[b]:
                    if c in inside and not (region and c == region.head):
                        to = node_of.get(c, c)
                        if to is not node and position(to) > position(node):
                            yield to
        def is_end(node):
            blocks = node.blocks if isinstance(node, Loop) else [node]
            if region:
                return any(region.head in self.next[b] for b in blocks)
            return any(not self.next[b] for b in blocks)
        first = node_of.get(region.head if region else 0, region.head if region else 0)
        best = {}
        for node in sorted(nodes, key=position, reverse=True):
            code = [i for b in (node.blocks if isinstance(node, Loop) else [node])
                    for i in self.blocks[b]]
            hot, size = sum(self.weight(i) for i in code), len(code)
            own = (10 ** 6 * (node is through) + (0 if longest else hot),
                   size if longest else -size)
            options = [best[e] for e in set(edges(node)) if best.get(e)]
            if is_end(node):
                options.append(((0, 0), []))
            if options:
                score, rest = max(options, key=lambda o: o[0])
                best[node] = ((score[0] + own[0], score[1] + own[1]), [node] + rest)
        return best[first][1] if best.get(first) else []

    def flat(self, path, trips=None, longest=False):
        """The instructions of a path. trips: iterations per loop (default 1)."""
        code = []
        for node in path:
            if isinstance(node, Loop):
                times = (trips or {}).get(node.head, 1)
                code += self.flat(self.path(node, longest), trips, longest) * times
            else:
                code += self.blocks[node]
        return [i for i in code if not i.never]

    def split(self, longest=False, trips=None):
        """The instructions before, in (one iteration) and after the main loop."""
        outer = self.main
        while outer and outer.parent:
            outer = outer.parent
        if not outer:
            return self.flat(self.path(None, longest), trips, longest), [], []
        way = self.path(None, longest, through=outer)
        at = way.index(outer) if outer in way else 0
        before, after = way[:at], way[at + 1:]
        chain, loop = [], self.main
        while loop is not outer:
            chain.append(loop)
            loop = loop.parent
        code_before, code_after, loop = self.flat(before, trips, longest), \
            self.flat(after, trips, longest), outer
        for inner in reversed(chain):
            way = self.path(loop, longest, through=inner)
            at = way.index(inner) if inner in way else 0
            code_before += self.flat(way[:at], trips, longest)
            code_after = self.flat(way[at + 1:], trips, longest) + code_after
            loop = inner
        return code_before, self.flat(self.path(self.main, longest), trips, longest), code_after


class Walk:
    """One warp that issues instructions in order. memory, cached: clocks of a streamed load, and of
    another load from global memory."""

    def __init__(self, memory, cached, clocks):
        self.memory, self.cached, self.clocks = memory, cached, clocks
        self.now, self.boards, self.pending = 0, [0] * 6, []  # pending: (end, bytes) of loads
        self.group, self.groups, self.ready, self.tensor = [], [], {}, [0]
        self.most, self.matrix_end, self.matrix_groups = 0, 0, []

    def wait(self, until):
        if until > self.now:
            self.pending = [(end, n) for end, n in self.pending if end > self.now]
            self.most = max(self.most, sum(n for _, n in self.pending))
            self.now = until

    def clock(self, name):
        return self.clocks.get(name, self.clocks.get("slow", 0))

    def run(self, code):
        for i in code:
            self.prepare(i)
            self.issue(i)

    def prepare(self, i):
        """Wait until i can be issued."""
        for board in range(6):
            if i.waits >> board & 1:
                self.wait(self.boards[board])
        registers = i.registers() if self.ready else []
        for r in registers[0 if i.base in ("STG", "STS") else 1:]:
            if r in self.ready:
                self.wait(self.ready[r])
        if i.base == "DEPBAR" and "SB" in i.operands:
            numbers = re.findall(r"0x[0-9a-f]+", i.operands)
            done = max(0, len(self.groups) - (int(numbers[-1], 16) if numbers else 0))
            for end in self.groups[:done]:
                self.wait(end)
            self.groups = self.groups[done:]
        if i.base == "WARPGROUP" and "DEPBAR" in i.name:
            numbers = re.findall(r"0x[0-9a-f]+", i.operands)
            done = max(0, len(self.matrix_groups) - (int(numbers[-1], 16) if numbers else 0))
            for end in self.matrix_groups[:done]:
                self.wait(end)
            self.matrix_groups = self.matrix_groups[done:]
        if i.base in MATRIX and self.clocks:
            self.wait(self.tensor[0])

    def issue(self, i):
        end = self.now
        if i.is_load:
            end += self.memory if i.is_stream else self.cached
            self.pending.append((end, i.width * WARP))
            if i.is_copy:
                self.group.append(end)
        elif i.base in MATRIX:
            if self.clocks:
                self.tensor[0] = self.now + i.products * 2 * TENSOR_CLOCKS
            if i.base in ASYNC:  # twice as fast, and nobody waits for it here
                self.tensor[0] = self.now + i.products * TENSOR_CLOCKS if self.clocks else 0
                self.matrix_end = max(self.tensor[0], self.now) + self.clock("HMMA")
                if "gsb" in i.operands:  # the last one of a group
                    self.matrix_groups.append(self.matrix_end)
            else:
                for r in range(i.registers()[0], i.registers()[0] + 4):
                    self.ready[r] = self.now + self.clock("HMMA")
        elif i.sets != 7:
            end += self.clock(i.base)
        if i.base not in MATRIX and self.ready and i.registers():
            self.ready.pop(i.registers()[0], None)
        if i.base == "LDGDEPBAR":
            self.groups.append(max(self.group + [self.now]))
            self.group = []
        elif i.sets != 7 and not i.is_copy:
            self.boards[i.sets] = max(self.boards[i.sets], end)
        if i.releases != 7 and self.clocks:
            self.boards[i.releases] = max(self.boards[i.releases], self.now + 12)
        if self.clocks:
            self.now += max(1, i.stall)


def interleaved(code, warps, memory, cached, clocks):
    """Clocks per iteration of a loop if so many warps share a quarter of an SM: it issues one
    instruction per clock, and has one tensor core."""
    tensor, free, times = [0], 0, 6
    walks = [Walk(memory, cached, clocks) for _ in range(warps)]
    for k, w in enumerate(walks):
        w.tensor, w.now = tensor, k * len(code) // 2  # not all at the same place
    queue, ends = [(w.now, k, 0) for k, w in enumerate(walks)], []
    heapq.heapify(queue)
    while queue:
        now, k, at = heapq.heappop(queue)
        w, i = walks[k], code[at % len(code)]
        w.prepare(i)
        w.now = max(w.now, free)
        if w.now > now:  # another warp may be ready earlier
            heapq.heappush(queue, (w.now, k, at))
            continue
        free = w.now + 1
        w.issue(i)
        at += 1
        if at % len(code) == 0 and at // len(code) in (2, times):
            ends.append((at // len(code), w.now))
        if at < times * len(code):
            heapq.heappush(queue, (w.now, k, at))
    first = sum(t for n, t in ends if n == 2) / warps
    last = sum(t for n, t in ends if n == times) / warps
    return (last - first) / (times - 2)


def walk(kernel, memory, cached, clocks, trips=None, longest=False):
    """Walk the usual (or the longest) path. Returns the clocks before the main loop, per iteration
    and after it, and the bytes of loads that the warp has in flight when it waits in the loop."""
    before, loop, after = kernel.split(longest, trips)
    w = Walk(memory, cached, clocks)
    w.run(before)
    start = w.now
    each = steady(w, loop) if kernel.main else 0
    end, flight = w.now, w.most
    w.run(after)
    return start, each, w.now - end, flight


def steady(w, loop):
    """Clocks per iteration: six, after two in which a ring of stages fills."""
    for _ in range(2):
        w.run(loop)
    begin, w.most = w.now, 0
    for _ in range(6):
        w.run(loop)
    return (w.now - begin) / 6


def classes(code):
    """How many instructions of each class."""
    counts = collections.Counter()
    for i in code:
        kind = i.base if i.base in MATRIX + COPIES + ("LDS", "LDSM", "STS", "STG", "MUFU", "SHFL",
                                                      "BAR", "I2F", "F2I", "LDC") else None
        if i.base == "LDG":
            kind = "LDG stream" if i.is_stream else "LDG"
        if kind is None and re.match(r"(FADD|FMUL|FFMA|FMNMX|HFMA2|HADD2|HMUL2|DFMA|DMUL)", i.base):
            kind = "float"
        counts[kind or "other"] += 1
    return counts


def round_trips(kernel):
    """Loads from global memory that a warp waits for one after another: before the main loop, in an
    iteration (usual path), in an iteration (longest path), after it."""
    before, loop, after = kernel.split()
    worst = kernel.split(longest=True)[1]
    def count(code, walk_it):
        w = Walk(1, 1, {})
        return math.ceil(walk_it(w, code))
    def once(w, code):
        w.run(code)
        return w.now
    return count(before, once), count(loop, steady), count(worst, steady), count(after, once)


# ---- Reading what cuobjdump prints --------------------------------------------------------------
FUNCTION = re.compile(r"^\s*Function : (\S+)")
LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[T\d]+)\s+)?(\S.*?)\s*;"
                  r"\s*/\* (0x[0-9a-f]+) \*/")
SECOND = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/")


def parse(sass, usage=""):
    """Kernels by symbol. sass: output of cuobjdump -sass; usage: of cuobjdump -res-usage."""
    kernels, kernel, architecture, pending = {}, None, "", None
    for line in sass.splitlines():
        found = FUNCTION.match(line)
        if found:
            kernel = kernels[found.group(1)] = Kernel(found.group(1), architecture)
            continue
        found = re.match(r"\s*(?:arch = |code for |\.target\s+)(sm_\w+)", line)
        if found:
            architecture = found.group(1)
        found = LINE.match(line)
        if found and kernel:
            pending = (int(found.group(1), 16), found.group(2) or "", found.group(3))
            continue
        found = SECOND.match(line)
        if found and kernel and pending:
            kernel.code.append(Instruction(*pending, int(found.group(1), 16)))
            pending = None
    name = None
    for line in usage.splitlines():
        found = re.match(r"^\s*Function (\S+):", line)
        if found:
            name = found.group(1)
        found = re.match(r"^\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line)
        if found and name in kernels:
            k = kernels[name]
            k.registers, stack, k.shared, local = (int(x) for x in found.groups())
            k.local = stack + local
            if k.shared >= RESERVED and not re.match(r"sm_8\d", k.architecture):
                k.shared -= RESERVED
    for k in kernels.values():
        k.analyse()
    return kernels


def plain_names(symbols):
    """Names of C++ symbols without their arguments: llm__merge_kernel, matmul_few_kernel<...>."""
    try:
        lines = subprocess.run(["c++filt", "-p"], input="\n".join(symbols), text=True, check=True,
                               stdout=subprocess.PIPE).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        lines = list(symbols)
    short = [re.sub(r"^void |llm__|_kernel|_layout", "", l).replace("> >", ">>") for l in lines]
    return dict(zip(symbols, short))


def describe(name, k, shared, threads, together, weights=0):
    """A row of the report. shared, threads, together: shared memory, threads, blocks per SM.
    weights: bytes of weights that a warp multiplies in an iteration; 0: what the loop loads."""
    loop = k.split()[1] if k.main else k.split()[0]
    matrix = [i for i in loop if i.base in MATRIX]
    # the loads that a loop is for: the streamed ones, if it has some
    loaded = sum(i.width for i in loop if i.is_load and i.is_stream >= k.has_stream) * WARP
    products = sum(i.products for i in loop)
    useful = sum(i.products for i in loop if i.address not in k.ones)
    flight, trips = walk(k, 1230, 300, CLOCKS)[3], round_trips(k)
    per, loaded = [], weights or loaded
    if loaded and (weights or not matrix or not any(i.is_copy for i in loop)):
        per.append("%.0f per KB" % (len(loop) / loaded * 1024))
    if useful:
        per.append("%.1f per product" % (len(loop) / useful))
    if products > useful:
        per.append("%.0f %% of the products add up x" % (100 * (1 - useful / products)))
    counts = [c for c in classes(loop).most_common(9) if c[0] != "other"]
    return "| %s | %d | %s | %s | %d | %s | %d | %s | %d | %d, %s, %d | %s |" % (
        name, k.registers, k.local or "-", shared, threads, together, len(loop), "; ".join(per),
        flight, trips[0], "-".join(str(t) for t in sorted(set(trips[1:3]))), trips[3],
        ", ".join("%s %d" % c for c in counts))


HEADER = """| kernel | registers | spills | shared memory | threads | blocks per SM | \
instructions in the loop | that is | bytes in flight | round trips | the loop |
|---|---|---|---|---|---|---|---|---|---|---|"""
