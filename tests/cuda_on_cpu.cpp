/* cuda_on_cpu.cpp - the implementation of the emulated GPU: coroutines, blocks and warps, shared
 * memory, streams, graphs, errors. First read the comment at the top of cuda_on_cpu.h. */
#include "cuda_on_cpu.h"
#include "emulator.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define EMU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMU_ASAN 1
#endif
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

uint64_t emu_atomic_increments;

namespace {

/* ---- Coroutines ------------------------------------------------------------------------------
 * Each coroutine has a stack. emu_switch saves the registers that a call must preserve, changes
 * the stack and loads the other coroutine's registers. On processors other than x86-64 and arm64
 * the C library's (slower) ucontext does it. */

#if defined(__x86_64__)
extern "C" void emu_switch(void **save, void *load);
__asm__(".text\n"
        ".p2align 4\n"
        ".type emu_switch,@function\n"
        "emu_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n"
        "    pushq %r15\n    movq %rsp, (%rdi)\n    movq %rsi, %rsp\n    popq %r15\n"
        "    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n    ret\n"
        ".size emu_switch,.-emu_switch\n");
typedef void *context;
void context_switch(context *save, context *load) { emu_switch(save, *load); }
void context_make(context *c, void *stack, size_t bytes, void (*entry)()) {
    void **top = (void **)((uintptr_t)((char *)stack + bytes) & ~(uintptr_t)15);
    *--top = nullptr; /* in place of a return address: the entry expects this stack alignment */
    *--top = (void *)entry;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    *c = top;
}
#elif defined(__aarch64__)
extern "C" void emu_switch(void **save, void *load);
__asm__(".text\n"
        ".p2align 4\n"
        ".type emu_switch,%function\n"
        "emu_switch:\n"
        "    sub sp, sp, #160\n    stp x19, x20, [sp]\n    stp x21, x22, [sp, #16]\n"
        "    stp x23, x24, [sp, #32]\n    stp x25, x26, [sp, #48]\n    stp x27, x28, [sp, #64]\n"
        "    stp x29, x30, [sp, #80]\n    stp d8, d9, [sp, #96]\n    stp d10, d11, [sp, #112]\n"
        "    stp d12, d13, [sp, #128]\n    stp d14, d15, [sp, #144]\n    mov x9, sp\n"
        "    str x9, [x0]\n    mov sp, x1\n    ldp x19, x20, [sp]\n    ldp x21, x22, [sp, #16]\n"
        "    ldp x23, x24, [sp, #32]\n    ldp x25, x26, [sp, #48]\n    ldp x27, x28, [sp, #64]\n"
        "    ldp x29, x30, [sp, #80]\n    ldp d8, d9, [sp, #96]\n    ldp d10, d11, [sp, #112]\n"
        "    ldp d12, d13, [sp, #128]\n    ldp d14, d15, [sp, #144]\n    add sp, sp, #160\n"
        "    ret\n"
        ".size emu_switch,.-emu_switch\n");
typedef void *context;
void context_switch(context *save, context *load) { emu_switch(save, *load); }
void context_make(context *c, void *stack, size_t bytes, void (*entry)()) {
    void **top = (void **)((uintptr_t)((char *)stack + bytes) & ~(uintptr_t)15) - 20;
    for (int i = 0; i < 20; i++) top[i] = nullptr;
    top[11] = (void *)entry; /* x30, the return address */
    *c = top;
}
#else
#include <ucontext.h>
typedef ucontext_t context;
void context_switch(context *save, context *load) { swapcontext(save, load); }
void context_make(context *c, void *stack, size_t bytes, void (*entry)()) {
    getcontext(c);
    c->uc_stack.ss_sp = stack;
    c->uc_stack.ss_size = bytes;
    c->uc_link = nullptr;
    makecontext(c, entry, 0);
}
#endif

constexpr size_t STACK_BYTES = 256 * 1024; /* per thread; only touched pages take real memory */
constexpr unsigned char POISON = 0xff;     /* NaN in f32, f16 and bf16; -1 */
/* the most bytes of an allocation that are poisoned, to save time */
constexpr size_t POISONED_BYTES = 4 << 20;

/* ---- The running block ----------------------------------------------------------------------- */

enum thread_state { FRESH, READY, AT_BARRIER, AT_WARP, AT_MBARRIER, ENDED };

struct async_copy {
    void *to;
    const void *from;
    size_t bytes;
    bool valid;
};

struct mbarrier {
    int count, pending;              /* arrivals per phase; those that this phase still needs */
    int64_t bytes = 0;               /* bytes that the phase expects, less those copied */
    int64_t phase = 0;               /* phases that have ended */
    bool fenced = false;             /* the copy engine knows that it is initialized */
    std::vector<async_copy> copies;  /* not yet delivered */
    std::map<const void *, int64_t> seen; /* the last phase that each thread has waited for */
};

struct wgmma_operation {
    float *d;
    const uint32_t *a;   /* the registers */
    uint32_t values[4];  /* contents of these registers when the instruction was issued */
    uint64_t b;          /* the descriptor */
    int columns;
    bool transposed;
    const char *file;
    int line;
};

struct wgmma_sums { /* sums that pending wgmmas change: the registers hold all ones meanwhile */
    float *d;
    std::vector<float> values;
};

struct touch { /* one thread's part of a load or store */
    const void *instruction;
    uintptr_t address;
    uint32_t bytes, operations; /* calls of emulator_operation before this access */
    bool store;
};

struct thread {
    thread_state state;
    context where;
    char *stack;
    void *fake_stack; /* the address sanitizer's record of this stack */
    uint3 index;
    int lane, warp;
    emu::warp_operation operation; /* while AT_WARP */
    const char *file;              /* while AT_BARRIER or AT_MBARRIER */
    int line;
    const void *at;                /* while AT_MBARRIER: the barrier */
    emu::block_kind barrier;
    int predicate;
    bool has_waited; /* the thread has called llm__wait_for_last */
    uint32_t operations; /* calls of emulator_operation */
    std::vector<async_copy> copies; /* not yet delivered, oldest first */
    std::vector<size_t> groups;     /* ends of the committed groups in `copies` */
    bool wgmma_fenced;              /* no group has been committed since the last wgmma.fence */
    std::vector<wgmma_operation> products; /* pending wgmmas, oldest first */
    std::vector<size_t> product_groups;    /* ends of the committed groups in `products` */
    std::vector<wgmma_sums> sums;
    std::vector<touch> touches;     /* its loads and stores in order, if an observer is set */
};

struct pending_operation { /* a warp operation that some lanes have not reached yet */
    emu::warp_operation operation;
    unsigned lanes;
    bool is(const emu::warp_operation &o) const {
        return operation.kind == o.kind && operation.line == o.line && operation.mask == o.mask &&
               (operation.file == o.file || !strcmp(operation.file, o.file));
    }
};

struct shared_array {
    const void *site;
    size_t offset, bytes;
    const char *name, *file;
    int line;
};

/* Random numbers for LLM_EMU_ORDER=random (xorshift64*). */
struct order {
    enum { FORWARD, REVERSE, RANDOM } kind = FORWARD;
    uint64_t state = 1;
    size_t below(size_t n) {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return (size_t)((state * 2685821657736338717ull >> 32) % n);
    }
    void arrange(std::vector<int> &list) { /* 0 .. n - 1 */
        for (size_t i = 0; i < list.size(); i++)
            list[i] = (int)(kind == REVERSE ? list.size() - 1 - i : i);
        if (kind == RANDOM)
            for (size_t i = list.size(); i > 1; i--) std::swap(list[i - 1], list[below(i)]);
    }
};

struct allocation {
    size_t bytes;
    char *memory; /* from malloc; includes the gaps on both sides */
    const char *label;
};

struct operation { /* a queued operation of a stream, or a node of a graph */
    enum { LAUNCH, COPY, SET, HOST, RECORD, WAIT, GRAPH } kind;
    emu::launch launch;
    std::shared_ptr<void> arguments; /* the launch's arguments */
    void *to;
    const void *from;
    size_t bytes, to_pitch, from_pitch, rows; /* rows of `bytes` bytes each */
    int value;
    std::shared_ptr<std::vector<char>> staged; /* a copy of pageable memory */
    cudaHostFn_t host;
    void *user;
    std::shared_ptr<struct event_state> event;
    uint64_t ticket; /* RECORD, WAIT: number of the record of the event */
    std::shared_ptr<std::vector<operation>> graph;
};

struct event_state {
    uint64_t recorded = 0, reached = 0; /* tickets of the last record queued, and run */
    double seconds = 0;
    cudaStream_t stream = nullptr; /* the stream of the last record */
    struct capture *in = nullptr;  /* the open capture that contains the record */
};

struct capture {
    std::vector<operation> operations;
    std::vector<cudaStream_t> streams; /* the first one began the capture */
    bool invalid = false;
};

} // namespace

struct emu_stream {
    std::deque<operation> queue;
    bool blocking; /* it and the default stream wait for each other */
    capture *into = nullptr;
    bool draining = false;
    int device = 0; /* the device it belongs to */
};
struct emu_event {
    std::shared_ptr<event_state> state;
    bool timing;
};
struct emu_graph {
    std::shared_ptr<std::vector<operation>> operations;
};
struct emu_graph_exec {
    std::shared_ptr<std::vector<operation>> operations;
};

namespace {

struct device {
    std::recursive_mutex lock;
    /* settings */
    order arrangement;
    size_t memory = (size_t)8 << 30, shared_limit = 99 * 1024; /* Hopper: 227 KB */
    int processors = 4, count = 1, capability = 80, driver = 13000;
    bool trap = false;
    bool failure_happened = false;
    long fail_allocation = -1, fail_launch = -1, lose_device = -1;
    std::string corrupt; /* emulator_corrupt's name; "": none */
    int corrupt_index = -1;
    bool corrupt_nan = false;
    uint64_t corrupted = 0;
    std::vector<const void *> corruptible; /* the functions with that name */
    bool in_graph = false;
    /* memory */
    std::map<uintptr_t, allocation> allocations;
    std::map<uintptr_t, size_t> pinned, registered;
    size_t used = 0;
    bool kernels_may_touch = false; /* otherwise the address sanitizer guards device memory */
    /* streams */
    std::vector<cudaStream_t> streams;
    emu_stream default_stream;
    std::map<const void *, int> dynamic_limit; /* bytes per kernel, set by cudaFuncSetAttribute */
    emulator_counts counts = {};
    emulator_observer observer = nullptr; /* called for each memory access */
    void *observer_data = nullptr;
    const char *label = "";
    /* errors */
    cudaError_t last = cudaSuccess, lost = cudaSuccess;
    std::string fault;
    /* the running block */
    const emu::launch *launch = nullptr;
    std::vector<thread> threads;
    std::vector<std::vector<pending_operation>> pending; /* pending operations of each warp */
    std::vector<char *> free_stacks;
    thread *current = nullptr;
    context scheduler;
    /* the scheduler's current pass over a warp */
    std::vector<int> lanes;      /* the warp's lanes in the order of the pass */
    size_t next_lane = 0;        /* the next index into `lanes` */
    size_t first_thread = 0;     /* the warp's first thread */
    bool from_scheduler = false; /* the scheduler, not another thread, resumed the running thread */
    void *scheduler_fake_stack = nullptr;
    const void *scheduler_stack = nullptr;
    size_t scheduler_stack_bytes = 0;
    bool faulty = false;
    int barrier_result = 0;
    /* shared memory of the block: dynamic first, then the arrays, with gaps */
    char *arena = nullptr;
    size_t arena_bytes = 0, arena_used = 0, static_bytes = 0;
    size_t arena_touched = 0; /* end of the memory that the address sanitizer may allow */
    std::vector<shared_array> arrays;
    std::map<const void *, mbarrier> mbarriers;
    std::vector<char> async_view; /* dynamic shared memory as wgmma sees it; empty: not in use */
    /* each warpgroup's wgmmas (descriptor and line); how many of them each warp has issued */
    std::vector<std::vector<std::pair<uint64_t, int>>> issued;
    std::vector<size_t> n_issued;

    device() {
        if (const char *text = getenv("LLM_EMU_ORDER")) emulator_order_text(text);
        if (const char *text = getenv("LLM_EMU_MEMORY"))
            memory = (size_t)strtoull(text, nullptr, 10);
        if (const char *text = getenv("LLM_EMU_SHARED"))
            shared_limit = std::min((size_t)strtoull(text, nullptr, 10), (size_t)512 * 1024);
        if (const char *text = getenv("LLM_EMU_PROCESSORS")) processors = std::max(1, atoi(text));
        if (const char *text = getenv("LLM_EMU_TRAP")) trap = atoi(text) != 0;
        default_stream.blocking = true;
    }
    bool emulator_order_text(const char *text) {
        if (!strcmp(text, "forward")) arrangement.kind = order::FORWARD;
        else if (!strcmp(text, "reverse")) arrangement.kind = order::REVERSE;
        else if (!strncmp(text, "random:", 7)) {
            arrangement.kind = order::RANDOM;
            arrangement.state =
                strtoull(text + 7, nullptr, 10) * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
        } else return false;
        return true;
    }
};

/* The single device. It is never destroyed, since streams may exist after main returns. */
device &gpu() {
    static device *d = new device;
    return *d;
}

typedef std::lock_guard<std::recursive_mutex> guard;

double seconds_now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- Faults ---------------------------------------------------------------------------------- */

std::string text(const char *format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char *format, ...) {
    char buffer[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(buffer, sizeof buffer, format, list);
    va_end(list);
    return buffer;
}

const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

std::string describe(const thread &t) {
    return text("thread (%u, %u, %u), lane %d of warp %d", t.index.x, t.index.y, t.index.z, t.lane,
                t.warp);
}

/* Record a fault. Only the first one of a launch is kept. */
void set_fault(const std::string &what) {
    device &d = gpu();
    if (!d.faulty) {
        d.fault = what;
        if (d.launch)
            d.fault += text("; kernel %s, block (%u, %u, %u) of (%u, %u, %u), %u x %u x %u threads",
                            d.launch->name, blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x,
                            gridDim.y, gridDim.z, blockDim.x, blockDim.y, blockDim.z);
        if (d.trap) raise(SIGTRAP);
    }
    d.faulty = true;
}

/* Called when a thread resumes: tells the address sanitizer the current stack. */
void arrived(void *fake_stack) {
#ifdef EMU_ASAN
    device &d = gpu();
    const void *from;
    size_t bytes;
    __sanitizer_finish_switch_fiber(fake_stack, &from, &bytes);
    if (d.from_scheduler) d.scheduler_stack = from, d.scheduler_stack_bytes = bytes;
#else
    (void)fake_stack;
#endif
}

/* Suspend the running thread and continue with `next` (nullptr: with the scheduler), until this
 * thread is resumed. */
void leave(thread *next, bool for_good) {
    device &d = gpu();
    thread *t = d.current;
    d.from_scheduler = false;
    if (next) {
        d.current = next;
        threadIdx = next->index;
    }
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(for_good ? nullptr : &t->fake_stack,
                                   next ? next->stack : d.scheduler_stack,
                                   next ? STACK_BYTES : d.scheduler_stack_bytes);
#else
    (void)for_good;
#endif
    context_switch(&t->where, next ? &next->where : &d.scheduler);
    arrived(t->fake_stack);
}

void yield_to_scheduler(bool for_good) { leave(nullptr, for_good); }

/* Report a fault of the running thread. Does not return, so the thread must not own memory. */
[[noreturn]] void thread_fault(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void thread_fault(const char *file, int line, const char *format, ...) {
    {
        char what[512];
        va_list list;
        va_start(list, format);
        vsnprintf(what, sizeof what, format, list);
        va_end(list);
        set_fault(text("%s:%d: %s, in ", base_name(file), line, what) + describe(*gpu().current));
    }
    yield_to_scheduler(false);
    abort(); /* never resumed */
}

/* ---- Threads --------------------------------------------------------------------------------- */

void thread_entry() {
    device &d = gpu();
    arrived(nullptr);
    d.launch->run(d.launch->arguments);
    if (d.launch->early && !d.current->has_waited)
        set_fault("a thread ends without a call of llm__wait_for_last: " + describe(*d.current));
    d.current->state = ENDED;
    yield_to_scheduler(true);
    abort();
}

/* The stacks' tops have different offsets in their pages; with equal ones they would compete for
 * the same cache lines. */
size_t stack_top(const thread &t) { return STACK_BYTES - (size_t)(t.lane * 128); }

char *take_stack() {
    device &d = gpu();
    if (d.free_stacks.empty()) {
        size_t page = (size_t)sysconf(_SC_PAGESIZE);
        char *memory = (char *)mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) return nullptr;
        /* a guard page stops an overflow */
        mprotect(memory, page, PROT_NONE);
        return memory + page;
    }
    char *stack = d.free_stacks.back();
    d.free_stacks.pop_back();
    return stack;
}

void give_stack(thread &t) {
    if (!t.stack) return;
#ifdef EMU_ASAN
    /* an ended thread has left all functions but the first */
    size_t bytes = t.state == ENDED ? 8192 : STACK_BYTES;
    __asan_unpoison_memory_region(t.stack + STACK_BYTES - bytes, bytes);
#endif
    gpu().free_stacks.push_back(t.stack);
    t.stack = nullptr;
}

bool runnable(const thread &t) { return t.state == FRESH || t.state == READY; }

/* The next runnable thread of the scheduler's pass over a warp, with its stack; nullptr: none. */
thread *next_thread() {
    device &d = gpu();
    while (d.next_lane < d.lanes.size() && !d.faulty) {
        size_t i = d.first_thread + (size_t)d.lanes[d.next_lane++];
        if (i >= d.threads.size() || !runnable(d.threads[i])) continue;
        thread &t = d.threads[i];
        if (t.state == READY) return &t;
        t.stack = take_stack();
        if (!t.stack) {
            set_fault("the emulator has no memory for a thread's stack");
            return nullptr;
        }
        context_make(&t.where, t.stack, stack_top(t), thread_entry);
        t.state = READY;
        return &t;
    }
    return nullptr;
}

/* Suspend the running thread, and continue with the next one of its warp, or with the scheduler at
 * the end of the pass. */
void wait_here() { leave(next_thread(), false); }

/* Run a thread, and the following ones of this pass, until all wait or one ends. */
void resume(thread &t) {
    device &d = gpu();
    d.current = &t;
    threadIdx = t.index;
    d.from_scheduler = true;
#ifdef EMU_ASAN
    __sanitizer_start_switch_fiber(&d.scheduler_fake_stack, t.stack, STACK_BYTES);
#endif
    context_switch(&d.scheduler, &t.where);
#ifdef EMU_ASAN
    __sanitizer_finish_switch_fiber(d.scheduler_fake_stack, nullptr, nullptr);
#endif
    thread *last = d.current;
    d.current = nullptr;
    if (last->state == ENDED) give_stack(*last);
}

std::string where_waits(const thread &t) {
    if (t.state == ENDED) return "has ended";
    if (t.state == AT_BARRIER)
        return text("waits in __syncthreads at %s:%d", base_name(t.file), t.line);
    if (t.state == AT_MBARRIER)
        return text("waits at an mbarrier at %s:%d", base_name(t.file), t.line);
    return text("waits for its warp at %s:%d", base_name(t.operation.file), t.operation.line);
}

/* All threads wait and none can continue: report which thread waits where, and for what. */
void report_deadlock() {
    device &d = gpu();
    const thread *waits = nullptr; /* at an mbarrier; best at one that only lacks bytes */
    for (const thread &t : d.threads)
        if (t.state == AT_MBARRIER && (!waits || !d.mbarriers.at(t.at).pending)) waits = &t;
    if (waits) {
        const mbarrier &m = d.mbarriers.at(waits->at);
        return set_fault(text("%s:%d: an mbarrier's phase never ends: it needs %d more arrivals "
                              "and %lld more bytes, in ",
                              base_name(waits->file), waits->line, m.pending, (long long)m.bytes) +
                         describe(*waits));
    }
    for (const thread &t : d.threads) {
        if (t.state != AT_WARP) continue;
        for (int lane = 0; lane < 32; lane++) {
            if (!(t.operation.mask >> lane & 1)) continue;
            size_t other = (size_t)(t.warp * 32 + lane);
            std::string missing =
                text("%s:%d: a warp operation that lane %d (mask %08x) waits in is not reached by "
                     "lane %d, which ",
                     base_name(t.operation.file), t.operation.line, t.lane, t.operation.mask, lane);
            if (other >= d.threads.size()) return set_fault(missing + "the block does not have");
            const thread &o = d.threads[other];
            if (o.state == AT_WARP && o.operation.line == t.operation.line &&
                o.operation.kind == t.operation.kind)
                continue;
            return set_fault(missing + where_waits(o));
        }
    }
    for (const thread &t : d.threads)
        if (t.state == AT_BARRIER)
            for (const thread &o : d.threads)
                if (o.state != AT_BARRIER)
                    return set_fault(text("%s:%d: __syncthreads is not reached by all threads: ",
                                          base_name(t.file), t.line) +
                                     describe(o) + ", " + where_waits(o));
    set_fault("the threads of a block wait for each other");
}

/* All threads wait at a barrier. If it is the same one, they continue. */
void release_barrier() {
    device &d = gpu();
    const thread &first = d.threads[0];
    int count = 0;
    for (const thread &t : d.threads) {
        count += t.predicate != 0;
        if (t.line != first.line || t.barrier != first.barrier || strcmp(t.file, first.file)) {
            set_fault(text("%s:%d: __syncthreads is not reached by all threads: ",
                           base_name(first.file), first.line) +
                      describe(t) + ", " + where_waits(t));
            return;
        }
    }
    int n = (int)d.threads.size();
    d.barrier_result = first.barrier == emu::BARRIER_COUNT ? count
                       : first.barrier == emu::BARRIER_AND ? count == n
                                                           : count > 0;
    d.counts.barriers++;
    for (thread &t : d.threads) t.state = READY;
}

/* ---- Shared memory --------------------------------------------------------------------------- */

constexpr size_t GAP = 64; /* guarded bytes after each array */
/* The address of the dynamic shared memory: on a GPU it is a multiple of 16, not of 1024. */
constexpr size_t SHARED_START = 1024 + 16;

void arena_begin(size_t dynamic_bytes) {
    device &d = gpu();
    if (!d.arena) {
        d.arena_bytes = 1 << 20;
        d.arena = (char *)mmap(nullptr, d.arena_bytes, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (d.arena == MAP_FAILED) abort();
        d.arena += SHARED_START, d.arena_bytes -= SHARED_START;
        d.arena_touched = d.arena_bytes;
    }
    d.arrays.clear(), d.mbarriers.clear(), d.async_view.clear();
    d.static_bytes = 0;
    size_t dynamic_end = (dynamic_bytes + 15) / 16 * 16;
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(d.arena, dynamic_end + GAP);
#endif
    memset(d.arena, POISON, dynamic_bytes);
    memset(d.arena + dynamic_bytes, POISON ^ 0x55, dynamic_end + GAP - dynamic_bytes);
    d.arena_used = dynamic_end + GAP;
#ifdef EMU_ASAN
    __asan_poison_memory_region(d.arena + dynamic_bytes,
                                std::max(d.arena_touched, d.arena_used) - dynamic_bytes);
    d.arena_touched = d.arena_used;
#endif
}

/* Without the address sanitizer, a write into a gap is detected when the block ends. */
void arena_check(size_t dynamic_bytes) {
#ifndef EMU_ASAN
    device &d = gpu();
    auto intact = [&](size_t from, size_t to) {
        for (size_t i = from; i < to; i++)
            if ((unsigned char)d.arena[i] != (POISON ^ 0x55)) return false;
        return true;
    };
    size_t next = d.arrays.empty() ? d.arena_used : d.arrays[0].offset;
    if (!intact(dynamic_bytes, next))
        set_fault("something was written past the end of the dynamic shared memory");
    for (size_t i = 0; i < d.arrays.size(); i++) {
        const shared_array &a = d.arrays[i];
        next = i + 1 < d.arrays.size() ? d.arrays[i + 1].offset : d.arena_used;
        if (!intact(a.offset + a.bytes, next))
            set_fault(text("%s:%d: something was written past the end of the shared array %s",
                           base_name(a.file), a.line, a.name));
    }
#else
    (void)dynamic_bytes;
#endif
}

bool in_arena(const void *p, size_t bytes) {
    device &d = gpu();
    return (const char *)p >= d.arena && (const char *)p + bytes <= d.arena + d.arena_used;
}

/* ---- Memory accesses: emulator.h ------------------------------------------------------------- */

/* whether this CPU thread runs a kernel while an observer is set */
thread_local bool observing = false;

void note_touch(const void *address, size_t bytes, bool store, const void *instruction) {
    device &d = gpu();
    bool shared = in_arena(address, 1);
    if (!shared) {
        auto next = d.allocations.upper_bound((uintptr_t)address);
        /* a local variable, which is a register on a GPU */
        if (next == d.allocations.begin()) return;
        --next;
        if ((uintptr_t)address - next->first >= next->second.bytes) return;
    }
    d.current->touches.push_back(
        {instruction, (uintptr_t)address, (uint32_t)bytes, d.current->operations, store});
}

/* Count an access's sectors and lines, and the distinct bytes of its lanes. */
void count_global(emulator_access *a) {
    std::vector<std::pair<uint64_t, uint64_t>> spans; /* from, to */
    for (int i = 0; i < 32; i++)
        if (a->lanes >> i & 1) spans.push_back({a->address[i], a->address[i] + a->bytes});
    std::sort(spans.begin(), spans.end());
    uint64_t done = 0, sectors_done = 0, lines_done = 0; /* everything below these is counted */
    for (auto &s : spans) {
        if (s.second > done) a->used += (uint32_t)(s.second - std::max(s.first, done));
        uint64_t sectors = (s.second + 31) / 32, lines = (s.second + 127) / 128;
        if (sectors > sectors_done)
            a->sectors += (uint32_t)(sectors - std::max(s.first / 32, sectors_done));
        if (lines > lines_done) a->lines += (uint32_t)(lines - std::max(s.first / 128, lines_done));
        done = std::max(done, s.second), sectors_done = std::max(sectors_done, sectors),
        lines_done = std::max(lines_done, lines);
    }
}

/* Count the passes over the banks. In a pass, a bank delivers one word to all lanes that read
 * it. With 8 bytes per lane, half warps take turns; with 16, quarter warps. */
void count_shared(emulator_access *a) {
    uint32_t lanes_at_once = a->bytes >= 16 ? 8 : a->bytes == 8 ? 16 : 32;
    std::vector<uint64_t> all;
    for (uint32_t first = 0; first < 32; first += lanes_at_once) {
        std::vector<uint64_t> words;
        for (uint32_t i = first; i < first + lanes_at_once; i++)
            for (uint64_t w = a->address[i] / 4;
                 a->lanes >> i & 1 && w <= (a->address[i] + a->bytes - 1) / 4; w++)
                words.push_back(w);
        if (words.empty()) continue;
        std::sort(words.begin(), words.end());
        words.erase(std::unique(words.begin(), words.end()), words.end());
        uint32_t banks[32] = {}, most = 0;
        for (uint64_t w : words) most = std::max(most, ++banks[w % 32]);
        a->passes += most;
        a->least += (uint32_t)(words.size() + 31) / 32;
        all.insert(all.end(), words.begin(), words.end());
    }
    std::sort(all.begin(), all.end());
    a->used = (uint32_t)std::min<size_t>(
        4 * (size_t)(std::unique(all.begin(), all.end()) - all.begin()), a->bytes * 32);
}

/* Find the shared array or the allocation that contains the address. */
void name_memory(emulator_access *a, uintptr_t address) {
    device &d = gpu();
    if (!a->shared) {
        auto found = --d.allocations.upper_bound(address);
        a->memory = found->second.label, a->start = found->first;
        return;
    }
    a->memory = "dynamic", a->start = 0;
    for (const shared_array &s : d.arrays)
        if (address - (uintptr_t)d.arena >= s.offset) a->memory = s.name, a->start = s.offset;
}

/* Report the accesses of the block that has ended, warp by warp, in the order of each warp's first
 * lane. */
void show_accesses(const emu::launch &l) {
    device &d = gpu();
    for (size_t base = 0; base < d.threads.size(); base += 32) {
        std::vector<emulator_access> list;
        /* key: instruction, store, number of earlier executions */
        std::map<std::tuple<const void *, bool, uint32_t>, size_t> found;
        for (size_t i = base; i < std::min(base + 32, d.threads.size()); i++) {
            std::map<std::pair<const void *, bool>, uint32_t> times;
            for (const touch &t : d.threads[i].touches) {
                auto place = found.insert(
                    {{t.instruction, t.store, times[{t.instruction, t.store}]++}, list.size()});
                if (place.second) {
                    emulator_access a = {};
                    a.kernel = l.name, a.launch = d.counts.launches;
                    a.grid[0] = l.grid.x, a.grid[1] = l.grid.y, a.grid[2] = l.grid.z;
                    a.block[0] = l.block.x, a.block[1] = l.block.y, a.block[2] = l.block.z;
                    a.block_index[0] = blockIdx.x, a.block_index[1] = blockIdx.y,
                    a.block_index[2] = blockIdx.z;
                    a.warp = (uint32_t)(base / 32);
                    a.instruction = t.instruction, a.store = t.store, a.bytes = t.bytes;
                    a.operations = t.operations;
                    a.shared = in_arena((const void *)t.address, 1);
                    name_memory(&a, t.address);
                    list.push_back(a);
                }
                emulator_access &a = list[place.first->second];
                a.lanes |= 1u << (i - base);
                a.address[i - base] = a.shared ? t.address - (uintptr_t)d.arena : t.address;
            }
        }
        for (emulator_access &a : list) {
            if (a.shared) count_shared(&a);
            else count_global(&a);
            d.observer(d.observer_data, &a);
        }
    }
}

/* At the end of a block: nothing is on its way, and all warps of a warpgroup have issued the same
 * wgmmas. */
void async_check() {
    device &d = gpu();
    for (auto &m : d.mbarriers)
        if (!m.second.copies.empty()) set_fault("a block ends before its bulk copies");
    for (const thread &t : d.threads)
        if (!t.products.empty())
            return set_fault(text("%s:%d: a block ends before its wgmma, in ",
                                  base_name(t.products[0].file), t.products[0].line) +
                             describe(t));
    for (size_t warp = 0; warp < 4 * d.issued.size(); warp++)
        if (d.issued[warp / 4].size() != (warp < d.n_issued.size() ? d.n_issued[warp] : 0))
            return set_fault(text("warp %zu is missing from a wgmma at line %d", warp,
                                  d.issued[warp / 4].back().second));
}

/* ---- A launch -------------------------------------------------------------------------------- */

void run_block(const emu::launch &l) {
    device &d = gpu();
    size_t n = (size_t)l.block.x * l.block.y * l.block.z;
    arena_begin(l.shared_bytes);
    d.threads.resize(n);
    d.pending.resize((n + 31) / 32);
    for (auto &open : d.pending) open.clear();
    for (size_t i = 0; i < n; i++) {
        thread &t = d.threads[i];
        t.state = FRESH;
        t.has_waited = false;
        t.operations = 0;
        t.stack = nullptr;
        t.index = {(unsigned)(i % l.block.x), (unsigned)(i / l.block.x % l.block.y),
                   (unsigned)(i / l.block.x / l.block.y)};
        t.lane = (int)(i % 32), t.warp = (int)(i / 32);
        t.copies.clear(), t.groups.clear(), t.touches.clear();
        t.wgmma_fenced = false, t.products.clear(), t.product_groups.clear(), t.sums.clear();
    }
    d.issued.assign((n + 127) / 128, {}), d.n_issued.assign((n + 31) / 32, 0);
    std::vector<int> warps((n + 31) / 32);
    d.lanes.resize(32);
    observing = d.observer != nullptr;
    for (bool going = true; going && !d.faulty;) {
        bool ran = false;
        d.arrangement.arrange(warps);
        for (int warp : warps) {
            d.first_thread = (size_t)warp * 32;
            /* in the fixed orders a warp runs as far as it can; in the random order, only one pass
             * at a time */
            for (bool again = true; again && !d.faulty;) {
                again = false;
                d.arrangement.arrange(d.lanes);
                d.next_lane = 0;
                while (thread *t = next_thread()) {
                    resume(*t);
                    again = ran = true;
                }
                if (d.arrangement.kind == order::RANDOM) break;
            }
        }
        if (ran || d.faulty) continue;
        size_t ended = 0, waiting = 0;
        for (const thread &t : d.threads)
            ended += t.state == ENDED, waiting += t.state == AT_BARRIER;
        if (ended == n) going = false;
        else if (waiting == n) release_barrier();
        else report_deadlock();
    }
    observing = false;
    if (!d.faulty) async_check();
    if (!d.faulty) arena_check(l.shared_bytes);
    if (!d.faulty && d.observer) show_accesses(l);
    for (size_t i = 0; i < n; i += 32) {
        uint32_t most = 0;
        for (size_t k = i; k < std::min(i + 32, n); k++)
            most = std::max(most, d.threads[k].operations);
        d.counts.arithmetic += most;
    }
    for (thread &t : d.threads) give_stack(t);
    d.counts.blocks++;
    d.counts.threads += n;
}

void check_gaps();

/* Whether emulator_corrupt selects this kernel. */
bool to_corrupt(const emu::launch &l) {
    device &d = gpu();
    if (d.corrupt == "graph") return d.in_graph;
    if (d.corrupt == "atomicInc") return true; /* see run_launch */
    if (d.corrupt.empty() || !strstr(l.name, d.corrupt.c_str())) return false;
    auto found = std::find(d.corruptible.begin(), d.corruptible.end(), l.function);
    int index = (int)(found - d.corruptible.begin());
    if (found == d.corruptible.end()) d.corruptible.push_back(l.function);
    return d.corrupt_index < 0 || index == d.corrupt_index;
}

/* Change one word in each allocation that differs from its earlier content: the last one for
 * "atomicInc", otherwise one in the middle. */
void corrupt_changes(const std::vector<std::vector<char>> &before) {
    bool last = gpu().corrupt == "atomicInc";
    size_t i = 0;
    for (auto &a : gpu().allocations) {
        std::vector<size_t> changed;
        for (size_t at = 0; at + 4 <= before[i].size(); at += 4)
            if (memcmp(before[i].data() + at, (const char *)a.first + at, 4)) changed.push_back(at);
        if (changed.empty() && ++i) continue;
        size_t at = last ? changed.back() : changed[changed.size() / 2];
        uint32_t *word = (uint32_t *)(a.first + at);
        *word = gpu().corrupt_nan ? 0xffffffff : *word ^ 0x00400000;
        i++;
    }
    gpu().corrupted++;
}

void run_launch(const emu::launch &l) {
    device &d = gpu();
    bool corrupt = to_corrupt(l);
    uint64_t increments = emu_atomic_increments;
    std::vector<std::vector<char>> before;
    if (corrupt)
        for (auto &a : d.allocations)
            before.emplace_back((const char *)a.first, (const char *)a.first + a.second.bytes);
    d.counts.launches++;
    d.launch = &l;
    d.faulty = false;
    gridDim = l.grid, blockDim = l.block;
    size_t n = (size_t)l.grid.x * l.grid.y * l.grid.z;
    std::vector<int> list;
    if (d.arrangement.kind == order::RANDOM) {
        list.resize(n);
        d.arrangement.arrange(list);
    }
    for (size_t k = 0; k < n && !d.faulty; k++) {
        size_t i = d.arrangement.kind == order::RANDOM    ? (size_t)list[k]
                   : d.arrangement.kind == order::REVERSE ? n - 1 - k
                                                          : k;
        blockIdx = {(unsigned)(i % l.grid.x), (unsigned)(i / l.grid.x % l.grid.y),
                    (unsigned)(i / l.grid.x / l.grid.y)};
        run_block(l);
    }
    if (!d.faulty) check_gaps();
    if (corrupt && (d.corrupt != "atomicInc" || emu_atomic_increments > increments))
        corrupt_changes(before);
    d.launch = nullptr;
    if (d.faulty) d.lost = cudaErrorLaunchFailure;
    d.faulty = false;
}

} // namespace

/* ---- Functions that kernels call ------------------------------------------------------------- */

void llm__wait_for_last() { gpu().current->has_waited = true; }

int emu::block_barrier(block_kind kind, int predicate, const char *file, int line) {
    device &d = gpu();
    thread *t = d.current;
    t->state = AT_BARRIER;
    t->file = file, t->line = line, t->barrier = kind, t->predicate = predicate;
    wait_here();
    return d.barrier_result;
}

void *emu::shared(const void *site, size_t bytes, size_t alignment, const char *name,
                  const char *file, int line) {
    device &d = gpu();
    for (const shared_array &a : d.arrays)
        if (a.site == site) return d.arena + a.offset;
    d.static_bytes += bytes;
    if (d.static_bytes > 48 * 1024)
        thread_fault(file, line,
                     "the static shared memory of a block is %zu bytes with %s; 49152 is the most",
                     d.static_bytes, name);
    /* A GPU would refuse the launch. The emulator detects an array only when a thread reaches its
     * declaration. */
    size_t most = d.dynamic_limit.count(d.launch->function) ? d.shared_limit : 48 * 1024;
    if (d.static_bytes + d.launch->shared_bytes > most)
        thread_fault(file, line,
                     "the shared memory of a block is %zu bytes with %s, and %zu from the launch; "
                     "%zu in all is the most%s",
                     d.static_bytes, name, d.launch->shared_bytes, most,
                     most == 48 * 1024 ? " without cudaFuncSetAttribute" : "");
    size_t offset = (d.arena_used + alignment - 1) / alignment * alignment,
           end = offset + bytes + GAP;
    if (end > d.arena_bytes) thread_fault(file, line, "the emulator's shared memory is full");
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(d.arena + offset, bytes);
    memset(d.arena + offset, POISON, bytes);
#else
    memset(d.arena + d.arena_used, POISON ^ 0x55, end - d.arena_used);
    memset(d.arena + offset, POISON, bytes);
#endif
    d.arrays.push_back({site, offset, bytes, name, file, line});
    d.arena_used = d.arena_touched = end;
    return d.arena + offset;
}

void *emu::dynamic_shared() { return gpu().arena; }

size_t emu::dynamic_shared_bytes() { return gpu().launch ? gpu().launch->shared_bytes : 0; }

size_t __cvta_generic_to_shared(const void *p) {
    return (size_t)((const char *)p - gpu().arena) + SHARED_START;
}

long long clock64() { return (long long)(seconds_now() * 1e9); }

void __trap(const char *file, int line) { thread_fault(file, line, "__trap"); }

namespace {

uint16_t half_at(const void *p, int i) {
    uint16_t v;
    memcpy(&v, (const char *)p + 2 * i, 2);
    return v;
}

/* The fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point
 * type"). With group = lane / 4 and pair = lane % 4: value i of A is in row group (+ 8 for i = 2,
 * 3, 6, 7), column 2 pair + i % 2 (+ 8 for i >= 4); value i of B is in row 2 pair + i % 2 (+ 8 for
 * i >= 2), column group; value i of D is in row group (+ 8 for i >= 2), column 2 pair + i % 2. */
void mma_16(thread *const lanes[32], float (*decode)(uint16_t)) {
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; lane++) {
        int group = lane / 4, pair = lane % 4;
        const emu::warp_operation &o = lanes[lane]->operation;
        for (int i = 0; i < 8; i++)
            a[group + (i & 2 ? 8 : 0)][2 * pair + i % 2 + (i >= 4 ? 8 : 0)] =
                decode(half_at(o.in, i));
        for (int i = 0; i < 4; i++)
            b[2 * pair + i % 2 + (i >= 2 ? 8 : 0)][group] = decode(half_at(o.in2, i));
        for (int i = 0; i < 4; i++)
            d[group + (i >= 2 ? 8 : 0)][2 * pair + i % 2] = ((const float *)o.out)[i];
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            /* the product is exact */
            for (int col = 0; col < 8; col++) d[row][col] += a[row][k] * b[k][col];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            ((float *)lanes[lane]->operation.out)[i] =
                d[lane / 4 + (i >= 2 ? 8 : 0)][2 * (lane % 4) + i % 2];
}

/* mma.m16n8k32 of int8: value i of A is in row group (+ 8 where i & 4), column 4 pair + i % 4 (+ 16
 * for i >= 8); value i of B is in row 4 pair + i % 4 (+ 16 for i >= 4), column group; D is as
 * above. */
void mma_s8(thread *const lanes[32]) {
    int a[16][32], b[32][8];
    for (int lane = 0; lane < 32; lane++) {
        int group = lane / 4, pair = lane % 4;
        const int8_t *in = (const int8_t *)lanes[lane]->operation.in,
                     *in2 = (const int8_t *)lanes[lane]->operation.in2;
        for (int i = 0; i < 16; i++)
            a[group + (i & 4 ? 8 : 0)][4 * pair + i % 4 + (i >= 8 ? 16 : 0)] = in[i];
        for (int i = 0; i < 8; i++) b[4 * pair + i % 4 + (i >= 4 ? 16 : 0)][group] = in2[i];
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + (i >= 2 ? 8 : 0), col = 2 * (lane % 4) + i % 2;
            /* wraps, as the instruction does */
            uint32_t sum = (uint32_t)((int32_t *)lanes[lane]->operation.out)[i];
            for (int k = 0; k < 32; k++) sum += (uint32_t)(a[row][k] * b[k][col]);
            ((int32_t *)lanes[lane]->operation.out)[i] = (int32_t)sum;
        }
}

/* Lane 8 m + i has the address of row i of matrix m. From each matrix, each lane gets two
 * consecutive values of a row (of a column, if transposed): row lane / 4, columns 2 (lane % 4) and
 * the next. */
bool ldmatrix(thread *const lanes[32], int matrices, bool trans) {
    uint16_t rows[32][8];
    for (int i = 0; i < 8 * matrices; i++) {
        const void *row = lanes[i]->operation.in;
        if (!in_arena(row, 16) || (uintptr_t)row % 16) {
            const emu::warp_operation &o = lanes[i]->operation;
            set_fault(text("%s:%d: ldmatrix reads a row that is not 16 bytes of shared memory at a "
                           "multiple of 16, in ",
                           base_name(o.file), o.line) +
                      describe(*lanes[i]));
            return false;
        }
        memcpy(rows[i], row, 16);
    }
    for (int lane = 0; lane < 32; lane++)
        for (int m = 0; m < matrices; m++) {
            int r = lane / 4, c = 2 * (lane % 4);
            uint32_t low = trans ? rows[8 * m + c][r] : rows[8 * m + r][c],
                     high = trans ? rows[8 * m + c + 1][r] : rows[8 * m + r][c + 1];
            ((uint32_t *)lanes[lane]->operation.out)[m] = low | high << 16;
        }
    return true;
}

/* The lane that a lane reads in a shuffle; itself if the distance leaves its segment of `width`
 * lanes. */
int shuffle_source(const emu::warp_operation &o, int lane) {
    int first = lane / o.width * o.width, source = lane;
    if (o.kind == emu::SHUFFLE) return first + (o.lane & (o.width - 1));
    if (o.kind == emu::SHUFFLE_UP) source = lane - o.lane;
    if (o.kind == emu::SHUFFLE_DOWN) source = lane + o.lane;
    if (o.kind == emu::SHUFFLE_XOR) source = lane ^ o.lane;
    /* XOR may read lower segments */
    if (o.kind == emu::SHUFFLE_XOR) return source < first + o.width ? source : lane;
    return source >= first && source < first + o.width ? source : lane;
}

bool shuffle_all(thread *const lanes[32], unsigned mask) {
    unsigned char values[32][16];
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1) memcpy(values[i], lanes[i]->operation.in, lanes[i]->operation.bytes);
    for (int i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        const emu::warp_operation &o = lanes[i]->operation;
        int source = shuffle_source(o, i);
        if (source < 0 || source > 31 || !(mask >> source & 1)) {
            set_fault(text("%s:%d: a shuffle reads lane %d, which is not in its mask %08x, in ",
                           base_name(o.file), o.line, source, mask) +
                      describe(*lanes[i]));
            return false;
        }
        memcpy(o.out, values[source], o.bytes);
    }
    return true;
}

unsigned reduce(emu::warp_kind kind, unsigned x, unsigned y) {
    switch (kind) {
    case emu::REDUCE_ADD: return x + y;
    case emu::REDUCE_MIN: return x < y ? x : y;
    case emu::REDUCE_MAX: return x > y ? x : y;
    case emu::REDUCE_MIN_SIGNED: return (int)x < (int)y ? x : y;
    case emu::REDUCE_MAX_SIGNED: return (int)x > (int)y ? x : y;
    case emu::REDUCE_AND: return x & y;
    case emu::REDUCE_OR: return x | y;
    default: return x ^ y;
    }
}

/* ---- wgmma: one warp's 16 of 64 rows ---- */

/* The two bytes of B in row k and column n: chapter "Asynchronous Warpgroup Level Matrix Shared
 * Memory Layout" of the PTX ISA, with the 128-byte swizzle. Each 1024 bytes hold 8 columns of 64
 * rows (transposed: 8 rows of 64 columns), 128 bytes each, whose 16-byte pieces change places. */
size_t wgmma_address(uint64_t descriptor, bool transposed, int n, int k) {
    size_t start = (size_t)(descriptor & 0x3fff) << 4,
           leading = (size_t)(descriptor >> 16 & 0x3fff) << 4,
           stride = (size_t)(descriptor >> 32 & 0x3fff) << 4;
    size_t at = transposed ? start + (size_t)(n / 64) * leading + (size_t)(k / 8) * stride +
                                 (size_t)(k % 8 * 128 + n % 64 * 2)
                           : start + (size_t)(n / 8) * stride + (size_t)(n % 8 * 128 + k * 2);
    return at ^ (at >> 7 & 7) << 4;
}

bool wgmma_fault(const thread &t, const wgmma_operation &o, const char *what) {
    set_fault(text("%s:%d: %s, in ", base_name(o.file), o.line, what) + describe(t));
    return false;
}

/* Read B (16, columns). What threads wrote must have passed a fence. */
bool wgmma_read(const thread &t, const wgmma_operation &o, std::vector<float> &b) {
    device &d = gpu();
    if (o.b >> 62 != 1 || (o.b >> 49 & 7) || (o.b << 4 & 1023) >= 128)
        return wgmma_fault(t, o, "a descriptor without the 128-byte swizzle, or whose matrix does "
                                 "not start at a multiple of 1024 bytes");
    b.resize(16 * (size_t)o.columns);
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < o.columns; n++) {
            size_t at = wgmma_address(o.b, o.transposed, n, k) - SHARED_START;
            if (at + 2 > d.launch->shared_bytes)
                return wgmma_fault(t, o, "wgmma reads outside of the dynamic shared memory");
            if (d.async_view.empty() || memcmp(d.arena + at, &d.async_view[at], 2))
                return wgmma_fault(t, o, "wgmma reads shared memory that threads wrote without "
                                         "fence.proxy.async");
            b[(size_t)(k * o.columns + n)] = emu::from_f16(half_at(d.arena + at, 0));
        }
    return true;
}

/* D's fragments are those of mma.m16n8k16, side by side. */
bool wgmma_run(thread *const lanes[32], size_t index) {
    const wgmma_operation &o = lanes[0]->products[index];
    std::vector<float> b, d(16 * (size_t)o.columns);
    float a[16][16];
    if (!wgmma_read(*lanes[0], o, b)) return false;
    for (int lane = 0; lane < 32; lane++) {
        const wgmma_operation &own = lanes[lane]->products[index];
        if (own.b != o.b || own.line != o.line || own.columns != o.columns)
            return wgmma_fault(*lanes[lane], own, "the lanes of a warp issue different wgmmas");
        if (memcmp(own.values, own.a, sizeof own.values))
            return wgmma_fault(*lanes[lane], own, "a register of A is written before the wait");
        for (int i = 0; i < 8; i++)
            a[lane / 4 + (i & 2 ? 8 : 0)][2 * (lane % 4) + i % 2 + (i >= 4 ? 8 : 0)] =
                emu::from_f16(half_at(own.values, i));
    }
    auto each = [&](auto move) { /* calls move(a lane's sum, the corresponding element of d) */
        for (int lane = 0; lane < 32; lane++)
            for (wgmma_sums &s : lanes[lane]->sums)
                for (int i = 0; i < o.columns / 2 && s.d == lanes[lane]->products[index].d; i++)
                    move(s.values[(size_t)i], d[(size_t)((lane / 4 + (i & 2 ? 8 : 0)) * o.columns +
                                                         i / 4 * 8 + 2 * (lane % 4) + i % 2)]);
    };
    each([](float &value, float &place) { place = value; });
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < o.columns; n++)
                d[(size_t)(row * o.columns + n)] += a[row][k] * b[(size_t)(k * o.columns + n)];
    each([](float &value, float &place) { value = place; });
    gpu().counts.matrix_products++;
    return true;
}

/* Run the pending wgmmas of a warp, except the last `left` groups. Sums that no pending wgmma
 * changes return to their registers. */
bool wgmma_wait(thread *const lanes[32], size_t left) {
    size_t groups = lanes[0]->product_groups.size();
    for (int lane = 0; lane < 32; lane++)
        if (lanes[lane]->product_groups != lanes[0]->product_groups)
            return wgmma_fault(*lanes[lane], lanes[lane]->products[0],
                               "the lanes of a warp issue different wgmmas");
    if (groups <= left) return true;
    size_t end = lanes[0]->product_groups[groups - left - 1];
    for (size_t i = 0; i < end; i++)
        if (!wgmma_run(lanes, i)) return false;
    for (int lane = 0; lane < 32; lane++) {
        thread &t = *lanes[lane];
        wgmma_operation last = t.products[end - 1];
        t.products.erase(t.products.begin(), t.products.begin() + (ptrdiff_t)end);
        t.product_groups.erase(t.product_groups.begin(),
                               t.product_groups.begin() + (ptrdiff_t)(groups - left));
        for (size_t &g : t.product_groups) g -= end;
        for (size_t i = 0; i < t.sums.size();) {
            wgmma_sums &s = t.sums[i];
            size_t bytes = s.values.size() * sizeof(float);
            for (size_t j = 0; j < bytes; j++)
                if (((unsigned char *)s.d)[j] != POISON)
                    return wgmma_fault(t, last, "a sum is written before the wait");
            bool busy = false;
            for (const wgmma_operation &o : t.products) busy = busy || o.d == s.d;
            if (busy) {
                i++;
                continue;
            }
            memcpy(s.d, s.values.data(), bytes);
            t.sums.erase(t.sums.begin() + (ptrdiff_t)i);
        }
    }
    return true;
}

/* All lanes of the mask have reached the operation: perform it. */
bool perform(thread *const lanes[32], const emu::warp_operation &o) {
    unsigned mask = o.mask, combined = 0;
    bool first = true;
    switch (o.kind) {
    case emu::SYNC: return true;
    case emu::SHUFFLE:
    case emu::SHUFFLE_UP:
    case emu::SHUFFLE_DOWN:
    case emu::SHUFFLE_XOR: return shuffle_all(lanes, mask);
    case emu::MMA_F16: mma_16(lanes, emu::from_f16); break;
    case emu::MMA_BF16: mma_16(lanes, emu::from_bf16); break;
    case emu::MMA_S8: mma_s8(lanes); break;
    case emu::WGMMA_WAIT: return wgmma_wait(lanes, (size_t)o.lane);
    case emu::LDMATRIX_1:
    case emu::LDMATRIX_1_TRANS: return ldmatrix(lanes, 1, o.kind == emu::LDMATRIX_1_TRANS);
    case emu::LDMATRIX_2:
    case emu::LDMATRIX_2_TRANS: return ldmatrix(lanes, 2, o.kind == emu::LDMATRIX_2_TRANS);
    case emu::LDMATRIX_4:
    case emu::LDMATRIX_4_TRANS: return ldmatrix(lanes, 4, o.kind == emu::LDMATRIX_4_TRANS);
    case emu::MATCH_ANY: case emu::MATCH_ALL:
        for (int i = 0; i < 32; i++) {
            if (!(mask >> i & 1)) continue;
            unsigned same = 0;
            for (int j = 0; j < 32; j++)
                if ((mask >> j & 1) && !memcmp(lanes[i]->operation.in, lanes[j]->operation.in, 8))
                    same |= 1u << j;
            *(unsigned *)lanes[i]->operation.out = o.kind == emu::MATCH_ANY ? same
                                                   : same == mask           ? mask
                                                                            : 0;
        }
        return true;
    default:
        for (int i = 0; i < 32; i++) {
            if (!(mask >> i & 1)) continue;
            unsigned value = *(const unsigned *)lanes[i]->operation.in;
            if (o.kind == emu::BALLOT) combined |= (value & 1) << i;
            else combined = first ? value : reduce(o.kind, combined, value);
            first = false;
        }
        for (int i = 0; i < 32; i++)
            if (mask >> i & 1) *(unsigned *)lanes[i]->operation.out = combined;
        return true;
    }
    gpu().counts.matrix_products++;
    return true;
}

} // namespace

void emu::run_warp_operation(const warp_operation &operation) {
    device &d = gpu();
    thread *t = d.current;
    if (!(operation.mask >> t->lane & 1))
        thread_fault(operation.file, operation.line,
                     "a lane calls a warp operation whose mask %08x leaves it out", operation.mask);
    if (operation.width < 1 || operation.width > 32 || (operation.width & (operation.width - 1)))
        thread_fault(operation.file, operation.line,
                     "a shuffle of width %d: it must be a power of two, at most 32",
                     operation.width);
    if (observing && operation.kind >= LDMATRIX_1 && operation.kind <= LDMATRIX_4_TRANS) {
        int matrices = operation.kind == LDMATRIX_1 || operation.kind == LDMATRIX_1_TRANS   ? 1
                       : operation.kind == LDMATRIX_2 || operation.kind == LDMATRIX_2_TRANS ? 2
                                                                                            : 4;
        if (t->lane < 8 * matrices)
            note_touch(operation.in, 16, false, __builtin_return_address(0));
    }
    t->operation = operation;
    t->state = AT_WARP;
    std::vector<pending_operation> &open = d.pending[(size_t)t->warp];
    size_t m = 0;
    while (m < open.size() && !open[m].is(operation)) m++;
    if (m == open.size()) open.push_back({operation, 0});
    open[m].lanes |= 1u << t->lane;
    if (open[m].lanes != operation.mask) return wait_here();
    open[m] = open.back(), open.pop_back();
    thread *lanes[32] = {};
    for (int i = 0; i < 32; i++)
        if (operation.mask >> i & 1) lanes[i] = &d.threads[(size_t)(t->warp * 32 + i)];
    d.counts.warp_operations++;
    if (!perform(lanes, operation)) yield_to_scheduler(false); /* a fault: no lane continues */
    for (thread *lane : lanes)
        if (lane) lane->state = READY;
}

/* ---- Asynchronous copies --------------------------------------------------------------------- */

void emu::copy_async(void *shared, const void *global, size_t bytes, bool valid, const char *file,
                     int line) {
    if (!in_arena(shared, bytes))
        thread_fault(file, line, "cp.async writes outside of shared memory");
    if ((uintptr_t)shared % bytes || (valid && (uintptr_t)global % bytes))
        thread_fault(file, line,
                     "cp.async of %zu bytes from or to an address that is no multiple of that",
                     bytes);
    if (observing) {
        if (valid) note_touch(global, bytes, false, __builtin_return_address(0));
        note_touch(shared, bytes, true, __builtin_return_address(0));
    }
    memset(shared, POISON, bytes);
    gpu().current->copies.push_back({shared, global, bytes, valid});
}

void emu::copy_commit() {
    thread *t = gpu().current;
    t->groups.push_back(t->copies.size());
}

void emu::copy_wait(int groups_left) {
    thread *t = gpu().current;
    if ((int)t->groups.size() <= groups_left) return;
    size_t done = t->groups.size() - (size_t)groups_left, end = t->groups[done - 1];
    for (size_t i = 0; i < end; i++) {
        const async_copy &c = t->copies[i];
        if (c.valid) memcpy(c.to, c.from, c.bytes);
        else memset(c.to, 0, c.bytes);
    }
    t->copies.erase(t->copies.begin(), t->copies.begin() + (ptrdiff_t)end);
    t->groups.erase(t->groups.begin(), t->groups.begin() + (ptrdiff_t)done);
    for (size_t &g : t->groups) g -= end;
}

/* ---- Hopper: mbarriers, bulk copies, wgmma --------------------------------------------------- */

namespace {

/* End the phase if all threads have arrived and all bytes have been copied. Copies are delivered as
 * late as possible: when a thread waits for them. */
void mbarrier_advance(const void *address, mbarrier &m, bool waited_for) {
    device &d = gpu();
    for (const thread &t : d.threads)
        waited_for = waited_for || (t.state == AT_MBARRIER && t.at == address);
    if (m.pending) return;
    if (waited_for) {
        for (const async_copy &c : m.copies) {
            memcpy(c.to, c.from, c.bytes);
            memcpy(&d.async_view[(size_t)((char *)c.to - d.arena)], c.from, c.bytes);
            m.bytes -= (int64_t)c.bytes;
        }
        m.copies.clear();
    }
    if (m.bytes || !m.copies.empty()) return;
    m.phase++, m.pending = m.count;
    for (thread &t : d.threads)
        if (t.state == AT_MBARRIER && t.at == address) t.state = READY;
}

mbarrier &mbarrier_at(const uint64_t *address, const char *file, int line) {
    auto found = gpu().mbarriers.find(address);
    if (found == gpu().mbarriers.end()) thread_fault(file, line, "an mbarrier is not initialized");
    return found->second;
}

/* From now on, differences between shared memory and its asynchronous view are detected. */
void async_begin() {
    device &d = gpu();
    if (d.async_view.empty()) d.async_view.assign(d.launch->shared_bytes, (char)POISON);
}

} // namespace

void emu::mbarrier_init(uint64_t *address, int count, const char *file, int line) {
    if (!in_arena(address, 8) || (uintptr_t)address % 8 || count < 1)
        thread_fault(file, line, "an mbarrier is 8 aligned bytes of shared memory");
    mbarrier m;
    m.count = m.pending = count;
    gpu().mbarriers[address] = m;
}

void emu::mbarrier_arrive(uint64_t *address, uint32_t bytes, const char *file, int line) {
    mbarrier &m = mbarrier_at(address, file, line);
    if (!m.pending) mbarrier_advance(address, m, true);
    if (!m.pending) thread_fault(file, line, "more threads arrive at an mbarrier than its count");
    m.bytes += bytes, m.pending--;
    mbarrier_advance(address, m, false);
}

void emu::mbarrier_wait(uint64_t *address, unsigned parity, const char *file, int line) {
    thread *t = gpu().current;
    mbarrier &m = mbarrier_at(address, file, line);
    /* the phase that the thread waits for: the current one, or the last one that ended */
    int64_t phase = (m.phase & 1) == (int64_t)parity ? m.phase : m.phase - 1;
    auto seen = m.seen.find(t);
    if (phase != (seen == m.seen.end() ? phase < 0 ? -1 : 0 : seen->second + 1))
        thread_fault(file, line, "a thread waits for phase %lld of an mbarrier, out of turn",
                     (long long)phase);
    m.seen[t] = phase;
    mbarrier_advance(address, m, phase == m.phase);
    while (phase >= m.phase) {
        t->state = AT_MBARRIER;
        t->at = address, t->file = file, t->line = line;
        wait_here();
    }
}

void emu::copy_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *address,
                    const char *file, int line) {
    device &d = gpu();
    mbarrier &m = mbarrier_at(address, file, line);
    if (!m.fenced)
        thread_fault(file, line, "no fence.proxy.async after the initialization of an mbarrier");
    if (!in_arena(shared, bytes) || (char *)shared + bytes > d.arena + d.launch->shared_bytes)
        thread_fault(file, line, "a bulk copy writes outside of the dynamic shared memory");
    if ((uintptr_t)shared % 16 || (uintptr_t)global % 16 || bytes % 16 || !bytes)
        thread_fault(file, line, "a bulk copy's addresses and size must be multiples of 16 bytes");
    async_begin();
    if (observing) {
        note_touch(global, bytes, false, __builtin_return_address(0));
        note_touch(shared, bytes, true, __builtin_return_address(0));
    }
    memset(shared, POISON, bytes);
    memset(&d.async_view[(size_t)((char *)shared - d.arena)], POISON, bytes);
    m.copies.push_back({shared, global, bytes, true});
    mbarrier_advance(address, m, false);
}

/* A real fence covers what this thread wrote, or knows through barriers; here it covers everything
 * so far. */
void emu::fence_async() {
    device &d = gpu();
    async_begin();
    if (!d.async_view.empty()) memcpy(&d.async_view[0], d.arena, d.async_view.size());
    for (auto &m : d.mbarriers) m.second.fenced = true;
}

void emu::wgmma_fence() { gpu().current->wgmma_fenced = true; }

void emu::wgmma_commit() {
    thread *t = gpu().current;
    t->wgmma_fenced = false;
    t->product_groups.push_back(t->products.size());
}

void emu::wgmma(float *sums, const uint32_t a[4], uint64_t b, int columns, bool transposed,
                const char *file, int line) {
    device &d = gpu();
    thread *t = d.current;
    if (!t->wgmma_fenced)
        thread_fault(file, line, "no wgmma.fence since the last group of wgmmas");
    if (t->lane == 0) {
        auto &log = d.issued[(size_t)t->warp / 4];
        size_t i = d.n_issued[(size_t)t->warp]++;
        if (i == log.size()) log.push_back({b, line});
        if (log[i] != std::make_pair(b, line))
            thread_fault(file, line, "the warps of a warpgroup issue different wgmmas");
    }
    size_t n = (size_t)columns / 2, i = 0;
    while (i < t->sums.size() && t->sums[i].d != sums) i++;
    if (i == t->sums.size()) {
        t->sums.push_back({sums, std::vector<float>(sums, sums + n)});
        memset((void *)sums, POISON, n * sizeof(float));
    }
    t->products.push_back({sums, a, {a[0], a[1], a[2], a[3]}, b, columns, transposed, file, line});
}

/* ---- Memory ---------------------------------------------------------------------------------- */

namespace {

#ifdef EMU_ASAN
/* Only the ends of a large allocation are changed, since this is called often. */
void hide(uintptr_t start, size_t bytes, bool hidden) {
    constexpr size_t END = (size_t)1 << 20;
    auto change = hidden ? __asan_poison_memory_region : __asan_unpoison_memory_region;
    change((void *)start, std::min(bytes, END));
    if (bytes > END) change((void *)(start + bytes - END), END);
}
#endif

/* Device memory is inaccessible to the host while no kernel or copy runs. */
void let_kernels_touch(bool may) {
    device &d = gpu();
    if (d.kernels_may_touch == may) return;
    d.kernels_may_touch = may;
#ifdef EMU_ASAN
    for (auto &a : d.allocations) hide(a.first, a.second.bytes, !may);
#endif
}

#ifndef EMU_ASAN
constexpr size_t MARGIN = 256; /* guarded bytes on both sides of an allocation */
#endif

/* Without the address sanitizer: check for writes next to allocations. */
void check_gaps() {
#ifndef EMU_ASAN
    for (auto &a : gpu().allocations) {
        const unsigned char *p = (const unsigned char *)a.first;
        for (size_t i = 0; i < MARGIN; i++) {
            if (p[a.second.bytes + i] == (POISON ^ 0x55) && p[-1 - (ptrdiff_t)i] == (POISON ^ 0x55))
                continue;
            set_fault(text("something was written %s an allocation of %zu bytes",
                           p[a.second.bytes + i] != (POISON ^ 0x55) ? "past the end of" : "before",
                           a.second.bytes));
            return;
        }
    }
#endif
}

cudaError_t failed(cudaError_t error) {
    gpu().last = error;
    return error;
}

/* The error that every call gives if the device is lost or there is none. */
cudaError_t usable() {
    device &d = gpu();
    if (d.driver < 12000) return failed(cudaErrorInsufficientDriver);
    if (d.count < 1) return failed(cudaErrorNoDevice);
    return d.lost ? failed(d.lost) : cudaSuccess;
}

bool counts_down(long &n) {
    bool now = n >= 0 && n-- == 0;
    if (now) gpu().failure_happened = true;
    return now;
}

/* Whether [p, p + bytes) is inside one allocation. */
bool on_device(const void *p, size_t bytes) {
    auto &map = gpu().allocations;
    auto next = map.upper_bound((uintptr_t)p);
    if (next == map.begin()) return false;
    --next;
    uintptr_t offset = (uintptr_t)p - next->first;
    return offset <= next->second.bytes && bytes <= next->second.bytes - offset;
}

bool is_pinned(const void *p) {
    for (auto *map : {&gpu().pinned, &gpu().registered}) {
        auto next = map->upper_bound((uintptr_t)p);
        if (next == map->begin()) continue;
        --next;
        if ((uintptr_t)p - next->first < next->second) return true;
    }
    return false;
}

cudaError_t drain_all();

} // namespace

cudaError_t cudaMalloc(void **out, size_t bytes) {
    guard hold(gpu().lock);
    device &d = gpu();
    *out = nullptr;
    if (cudaError_t error = usable()) return error;
    for (cudaStream_t s : d.streams)
        if (s->into) {
            s->into->invalid = true;
            return failed(cudaErrorStreamCaptureUnsupported);
        }
    if (counts_down(d.fail_allocation) || bytes > d.memory || d.used > d.memory - bytes)
        return failed(cudaErrorMemoryAllocation);
    if (bytes == 0) return cudaSuccess;
    allocation a = {bytes, nullptr, d.label};
#ifdef EMU_ASAN
    if (posix_memalign((void **)&a.memory, 256, bytes)) return failed(cudaErrorMemoryAllocation);
    char *p = a.memory;
#else
    if (posix_memalign((void **)&a.memory, 256, bytes + 2 * MARGIN))
        return failed(cudaErrorMemoryAllocation);
    char *p = a.memory + MARGIN;
    memset(a.memory, POISON ^ 0x55, MARGIN);
    memset(p + bytes, POISON ^ 0x55, MARGIN);
#endif
    memset(p, POISON, std::min(bytes, POISONED_BYTES));
#ifdef EMU_ASAN
    if (!d.kernels_may_touch) hide((uintptr_t)p, bytes, true);
#endif
    d.allocations[(uintptr_t)p] = a;
    d.used += bytes;
    *out = p;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p) {
    guard hold(gpu().lock);
    device &d = gpu();
    cudaError_t error = drain_all();
    if (p) {
        auto found = d.allocations.find((uintptr_t)p);
        if (found == d.allocations.end()) return failed(cudaErrorInvalidValue);
        let_kernels_touch(true);
        free(found->second.memory);
        d.used -= found->second.bytes;
        d.allocations.erase(found);
        let_kernels_touch(false);
    }
    return error;
}

cudaError_t cudaMallocAsync(void **p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return cudaFree(p); }

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned) {
    guard hold(gpu().lock);
    device &d = gpu();
    *out = nullptr;
    if (cudaError_t error = usable()) return error;
    if (counts_down(d.fail_allocation) || posix_memalign(out, 4096, bytes ? bytes : 1))
        return failed(cudaErrorMemoryAllocation);
    memset(*out, POISON, std::min(bytes, POISONED_BYTES));
    d.pinned[(uintptr_t)*out] = bytes;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

cudaError_t cudaFreeHost(void *p) {
    guard hold(gpu().lock);
    cudaError_t error = drain_all();
    if (p && !gpu().pinned.erase((uintptr_t)p)) return failed(cudaErrorInvalidValue);
    free(p);
    return error;
}

cudaError_t cudaHostRegister(void *host, size_t bytes, unsigned) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    if (counts_down(gpu().fail_allocation)) return failed(cudaErrorMemoryAllocation);
    gpu().registered[(uintptr_t)host] = bytes;
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *host) {
    guard hold(gpu().lock);
    cudaError_t error = drain_all();
    return gpu().registered.erase((uintptr_t)host) ? error : failed(cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    *total_bytes = gpu().memory;
    *free_bytes = gpu().memory - std::min(gpu().memory, gpu().used);
    return cudaSuccess;
}

/* ---- Streams --------------------------------------------------------------------------------- */

namespace {

void run(const operation &o);

/* Run a stream's queue: all of it, or (until_ticket not 0) up to that record of the event. */
void drain(emu_stream *s, const event_state *until = nullptr, uint64_t until_ticket = 0) {
    if (s->draining || s->queue.empty()) return; /* already running; or empty */
    s->draining = true;
    bool touched = gpu().kernels_may_touch;
    let_kernels_touch(true);
    while (!s->queue.empty() && !(until && until->reached >= until_ticket)) {
        operation o = std::move(s->queue.front());
        s->queue.pop_front();
        run(o);
    }
    let_kernels_touch(touched);
    s->draining = false;
}

cudaError_t drain_all() {
    device &d = gpu();
    drain(&d.default_stream);
    for (size_t i = 0; i < d.streams.size(); i++) drain(d.streams[i]);
    return d.lost ? failed(d.lost) : cudaSuccess;
}

void run(const operation &o) {
    device &d = gpu();
    if (o.kind == operation::RECORD) {
        o.event->reached = std::max(o.event->reached, o.ticket);
        o.event->seconds = seconds_now();
        return;
    }
    if (o.kind == operation::WAIT) {
        for (size_t i = 0; i < d.streams.size(); i++)
            if (d.streams[i] == o.event->stream) drain(d.streams[i], o.event.get(), o.ticket);
        return;
    }
    if (counts_down(d.lose_device)) d.lost = cudaErrorUnknown;
    if (d.lost) return;
    if (o.kind == operation::GRAPH) {
        d.counts.graph_launches++;
        d.in_graph = true;
        for (const operation &node : *o.graph) run(node);
        d.in_graph = false;
        return;
    }
    if (o.kind == operation::HOST) return o.host(o.user);
    if (o.kind == operation::LAUNCH) run_launch(o.launch);
    else d.counts.copies++;
    if (o.kind == operation::COPY)
        for (size_t row = 0; row < o.rows; row++)
            memmove((char *)o.to + row * o.to_pitch,
                    (o.staged ? o.staged->data() : (const char *)o.from) + row * o.from_pitch,
                    o.bytes);
    if (o.kind == operation::SET) memset(o.to, o.value, o.bytes);
}

emu_stream *resolve(cudaStream_t stream) { return stream ? stream : &gpu().default_stream; }

cudaError_t queue(cudaStream_t stream, operation &&o) {
    device &d = gpu();
    emu_stream *s = resolve(stream);
    if (s->into) {
        if (s->into->invalid) return failed(cudaErrorStreamCaptureInvalidated);
        s->into->operations.push_back(std::move(o));
        return cudaSuccess;
    }
    /* The default stream and the other streams wait for each other, except for non-blocking
     * ones. */
    if (s == &d.default_stream)
        for (size_t i = 0; i < d.streams.size(); i++)
            if (d.streams[i]->blocking) drain(d.streams[i]);
    if (s != &d.default_stream && s->blocking) drain(&d.default_stream);
    s->queue.push_back(std::move(o));
    return d.lost ? failed(d.lost) : cudaSuccess;
}

/* The host must not wait for a stream that is being captured. */
cudaError_t wait_for(emu_stream *s) {
    if (s->into) {
        s->into->invalid = true;
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    drain(s);
    return gpu().lost ? failed(gpu().lost) : cudaSuccess;
}

cudaError_t check_copy(const void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind == cudaMemcpyDefault) return cudaSuccess;
    if (to_device != (bytes ? on_device(to, bytes) : to_device))
        return failed(cudaErrorInvalidValue);
    if (from_device != (bytes ? on_device(from, bytes) : from_device))
        return failed(cudaErrorInvalidValue);
    return cudaSuccess;
}

} // namespace

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    if (!width || !height) return cudaSuccess;
    if (cudaError_t error = check_copy(to, from, (height - 1) * from_pitch + width, kind))
        return error;
    operation o = {};
    o.kind = operation::COPY;
    o.to = to, o.from = from, o.bytes = width, o.rows = height, o.to_pitch = to_pitch,
    o.from_pitch = from_pitch;
    if (kind == cudaMemcpyHostToDevice && !is_pinned(from) && !resolve(stream)->into) {
        /* the driver copies pageable memory before it returns */
        const char *bytes = (const char *)from;
        o.staged =
            std::make_shared<std::vector<char>>(bytes, bytes + (height - 1) * from_pitch + width);
    }
    return queue(stream, std::move(o));
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, bytes ? 1 : 0, kind, stream);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    guard hold(gpu().lock);
    if (cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, 0)) return error;
    return wait_for(&gpu().default_stream);
}

cudaError_t cudaMemsetAsync(void *device, int value, size_t bytes, cudaStream_t stream) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    if (bytes && !on_device(device, bytes)) return failed(cudaErrorInvalidValue);
    operation o = {};
    o.kind = operation::SET;
    o.to = device, o.value = value, o.bytes = bytes;
    return queue(stream, std::move(o));
}

cudaError_t cudaMemset(void *device, int value, size_t bytes) {
    return cudaMemsetAsync(device, value, bytes, 0);
}

static thread_local int current_device; /* of this CPU thread, set by cudaSetDevice */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    *stream = new emu_stream;
    (*stream)->blocking = !(flags & cudaStreamNonBlocking);
    (*stream)->device = current_device;
    gpu().streams.push_back(*stream);
    gpu().counts.live_handles++;
    return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    guard hold(gpu().lock);
    device &d = gpu();
    auto found = std::find(d.streams.begin(), d.streams.end(), stream);
    if (found == d.streams.end()) return failed(cudaErrorInvalidResourceHandle);
    if (stream->into) delete stream->into;
    stream->into = nullptr;
    drain(stream);
    d.streams.erase(std::find(d.streams.begin(), d.streams.end(), stream));
    delete stream;
    d.counts.live_handles--;
    return d.lost ? failed(d.lost) : cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    return wait_for(resolve(stream));
}

/* Reports unfinished work as a GPU does: with an error code, which also becomes the last error. */
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    emu_stream *s = resolve(stream);
    bool busy = !s->queue.empty();
    if (cudaError_t error = wait_for(s)) return error;
    return busy ? failed(cudaErrorNotReady) : cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    for (cudaStream_t s : gpu().streams)
        if (s->into) return wait_for(s);
    return drain_all();
}

cudaError_t cudaDeviceReset(void) {
    guard hold(gpu().lock);
    drain_all();
    gpu().lost = gpu().last = cudaSuccess;
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *user) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    operation o = {};
    o.kind = operation::HOST;
    o.host = function, o.user = user;
    return queue(stream, std::move(o));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    *event = new emu_event{std::make_shared<event_state>(), !(flags & cudaEventDisableTiming)};
    gpu().counts.live_handles++;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    guard hold(gpu().lock);
    if (!event) return failed(cudaErrorInvalidResourceHandle);
    delete event;
    gpu().counts.live_handles--;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    emu_stream *s = resolve(stream);
    event->state->in = s->into;
    if (s->into) return cudaSuccess;
    event->state->stream = stream;
    operation o = {};
    o.kind = operation::RECORD;
    o.event = event->state;
    o.ticket = ++event->state->recorded;
    return queue(stream, std::move(o));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    emu_stream *s = resolve(stream);
    if (event->state->in) { /* the stream joins the capture in which the event was recorded */
        if (!s->into) event->state->in->streams.push_back(stream);
        s->into = event->state->in;
        return cudaSuccess;
    }
    operation o = {};
    o.kind = operation::WAIT;
    o.event = event->state;
    o.ticket = event->state->recorded;
    return queue(stream, std::move(o));
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    event_state *e = event->state.get();
    if (e->reached < e->recorded) drain(resolve(e->stream), e, e->recorded);
    return gpu().lost ? failed(gpu().lost) : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) { return cudaEventSynchronize(event); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    if (!start->timing || !end->timing || !start->state->recorded || !end->state->recorded)
        return failed(cudaErrorInvalidResourceHandle);
    if (start->state->reached < start->state->recorded ||
        end->state->reached < end->state->recorded)
        return failed(cudaErrorNotReady);
    *milliseconds = (float)(1e3 * (end->state->seconds - start->state->seconds));
    return cudaSuccess;
}

/* ---- Graphs: a capture records operations instead of queuing them ---------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    if (!stream || stream->into) return failed(cudaErrorStreamCaptureUnsupported);
    stream->into = new capture;
    stream->into->streams.push_back(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    guard hold(gpu().lock);
    *graph = nullptr;
    if (!stream || !stream->into || stream->into->streams[0] != stream)
        return failed(cudaErrorStreamCaptureUnmatched);
    capture *c = stream->into;
    for (cudaStream_t s : c->streams) resolve(s)->into = nullptr;
    bool invalid = c->invalid;
    if (!invalid) {
        *graph = new emu_graph{std::make_shared<std::vector<operation>>(std::move(c->operations))};
        gpu().counts.live_handles++;
    }
    delete c;
    if (invalid) return failed(cudaErrorStreamCaptureInvalidated);
    return usable();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    guard hold(gpu().lock);
    capture *c = resolve(stream)->into;
    *status = !c           ? cudaStreamCaptureStatusNone
              : c->invalid ? cudaStreamCaptureStatusInvalidated
                           : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    if (!graph) return failed(cudaErrorInvalidValue);
    if (counts_down(gpu().fail_allocation)) return failed(cudaErrorMemoryAllocation);
    *exec = new emu_graph_exec{graph->operations};
    gpu().counts.live_handles++;
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t) {
    return exec ? usable() : failed(cudaErrorInvalidValue);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    if (!exec) return failed(cudaErrorInvalidValue);
    if (counts_down(gpu().fail_launch)) return failed(cudaErrorLaunchOutOfResources);
    operation o = {};
    o.kind = operation::GRAPH;
    o.graph = exec->operations;
    return queue(stream, std::move(o));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    guard hold(gpu().lock);
    if (!graph) return failed(cudaErrorInvalidValue);
    delete graph;
    gpu().counts.live_handles--;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    guard hold(gpu().lock);
    if (!exec) return failed(cudaErrorInvalidValue);
    delete exec;
    gpu().counts.live_handles--;
    return cudaSuccess;
}

/* ---- Launches -------------------------------------------------------------------------------- */

void emu::queue_launch(const launch &l, cudaStream_t stream) {
    guard hold(gpu().lock);
    device &d = gpu();
    std::shared_ptr<void> arguments(l.arguments, l.destroy);
    if (usable()) return;
    if (counts_down(d.fail_launch)) {
        d.last = cudaErrorLaunchOutOfResources;
        return;
    }
    if (stream && stream->device != current_device) { /* a launch must be on the current device */
        d.last = cudaErrorInvalidResourceHandle;
        return;
    }
    auto limit = d.dynamic_limit.find(l.function);
    size_t threads = (size_t)l.block.x * l.block.y * l.block.z,
           blocks = (size_t)l.grid.x * l.grid.y * l.grid.z;
    if (!threads || threads > 1024 || l.block.z > 64 || !blocks || l.grid.x > 2147483647u ||
        l.grid.y > 65535 || l.grid.z > 65535) {
        d.last = cudaErrorInvalidConfiguration;
        return;
    }
    if (l.shared_bytes >
        (limit == d.dynamic_limit.end() ? (size_t)48 * 1024 : (size_t)limit->second)) {
        d.last = cudaErrorInvalidValue;
        return;
    }
    operation o = {};
    o.kind = operation::LAUNCH;
    o.launch = l;
    o.arguments = arguments;
    queue(stream, std::move(o));
}

cudaError_t emu::set_attribute(const void *function, cudaFuncAttribute attribute, int value) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (size_t)value > gpu().shared_limit) return failed(cudaErrorInvalidValue);
    gpu().dynamic_limit[function] = value;
    return cudaSuccess;
}

cudaError_t emu::get_attributes(cudaFuncAttributes *attributes, const void *function) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    *attributes = {};
    attributes->maxThreadsPerBlock = 1024;
    attributes->sharedSizeBytes = 16; /* unknown before a launch: anything but 0 */
    attributes->binaryVersion = attributes->ptxVersion = gpu().capability;
    auto limit = gpu().dynamic_limit.find(function);
    attributes->maxDynamicSharedSizeBytes =
        limit == gpu().dynamic_limit.end() ? 48 * 1024 : limit->second;
    return cudaSuccess;
}

/* ---- The device ------------------------------------------------------------------------------ */

cudaError_t cudaGetDeviceCount(int *count) {
    guard hold(gpu().lock);
    *count = 0;
    if (gpu().driver < 12000) return failed(cudaErrorInsufficientDriver);
    if (gpu().count < 1) return failed(cudaErrorNoDevice);
    *count = gpu().count;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    guard hold(gpu().lock);
    if (cudaError_t error = usable()) return error;
    if (device < 0 || device >= gpu().count) return failed(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int index) {
    guard hold(gpu().lock);
    if (index < 0 || index >= gpu().count) return failed(cudaErrorInvalidDevice);
    device &d = gpu();
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "emulated GPU");
    p->totalGlobalMem = d.memory;
    p->sharedMemPerBlock = 48 * 1024, p->sharedMemPerBlockOptin = d.shared_limit,
    p->sharedMemPerMultiprocessor = d.shared_limit + 1024;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048,
    p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = d.capability / 10, p->minor = d.capability % 10;
    p->multiProcessorCount = d.processors;
    p->l2CacheSize = 4 << 20, p->memoryBusWidth = 64, p->concurrentKernels = 1,
    p->asyncEngineCount = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrIntegrated: *value = 0; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (int)p.sharedMemPerMultiprocessor;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; break;
    default: return failed(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = gpu().driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = 13000;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void) {
    guard hold(gpu().lock);
    cudaError_t error = gpu().last;
    gpu().last = gpu().lost;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return gpu().last; }

static const struct {
    cudaError_t error;
    const char *name, *text;
} error_texts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources",
     "too many resources requested for launch"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "the capture was not initiated in this stream"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const char *cudaGetErrorString(cudaError_t error) {
    if (error == cudaErrorLaunchFailure && !gpu().fault.empty()) return gpu().fault.c_str();
    for (auto &e : error_texts)
        if (e.error == error) return e.text;
    return "unrecognized error code";
}

const char *cudaGetErrorName(cudaError_t error) {
    for (auto &e : error_texts)
        if (e.error == error) return e.name;
    return "unrecognized error code";
}

/* ---- emulator.h ------------------------------------------------------------------------------ */

bool emulator_order(const char *order) {
    guard hold(gpu().lock);
    return gpu().emulator_order_text(order);
}
void emulator_memory(size_t bytes) {
    guard hold(gpu().lock);
    gpu().memory = bytes;
}
void emulator_devices(int count, int compute_capability, int driver_version) {
    guard hold(gpu().lock);
    gpu().count = count, gpu().capability = compute_capability, gpu().driver = driver_version;
    if (!getenv("LLM_EMU_SHARED"))
        gpu().shared_limit = (compute_capability == 90 ? 227 : 99) * 1024;
}
void emulator_fail_allocation(long n) {
    guard hold(gpu().lock);
    gpu().fail_allocation = n, gpu().failure_happened = false;
}
void emulator_fail_launch(long n) {
    guard hold(gpu().lock);
    gpu().fail_launch = n, gpu().failure_happened = false;
}
void emulator_lose_device(long n) {
    guard hold(gpu().lock);
    gpu().lose_device = n, gpu().failure_happened = false;
}
bool emulator_failed(void) { return gpu().failure_happened; }
void emulator_corrupt(const char *name, int index, bool nan) {
    guard hold(gpu().lock);
    device &d = gpu();
    d.corrupt = name ? name : "", d.corrupt_index = index, d.corrupt_nan = nan;
    d.corrupted = 0, d.corruptible.clear();
}
uint64_t emulator_corrupted(void) { return gpu().corrupted; }
const char *emulator_fault(void) { return gpu().fault.c_str(); }
void emulator_recover(void) {
    guard hold(gpu().lock);
    device &d = gpu();
    d.lost = d.last = cudaSuccess;
    d.fault.clear();
    d.fail_allocation = d.fail_launch = d.lose_device = -1;
}
emulator_counts emulator_counted(void) {
    guard hold(gpu().lock);
    device &d = gpu();
    emulator_counts c = d.counts;
    c.live_allocations = d.allocations.size();
    c.live_bytes = d.used;
    c.live_pinned = d.pinned.size() + d.registered.size();
    return c;
}
void emulator_operation(void) { gpu().current->operations++; }
void emulator_observe(emulator_observer observer, void *user) {
    guard hold(gpu().lock);
    gpu().observer = observer, gpu().observer_data = user;
}
void emulator_label(const char *label) {
    guard hold(gpu().lock);
    gpu().label = label;
}

/* The functions that -fsanitize=thread calls: gcc's names, and clang's additional ones. */
#define EMU_TOUCH(name, bytes, store)                                                  \
    extern "C" void __tsan_##name(void *address) {                                     \
        if (observing) note_touch(address, bytes, store, __builtin_return_address(0)); \
    }
#define EMU_TOUCHES(bytes)                         \
    EMU_TOUCH(read##bytes, bytes, false)           \
    EMU_TOUCH(write##bytes, bytes, true)           \
    EMU_TOUCH(unaligned_read##bytes, bytes, false) \
    EMU_TOUCH(unaligned_write##bytes, bytes, true)
EMU_TOUCHES(1)
EMU_TOUCHES(2)
EMU_TOUCHES(4)
EMU_TOUCHES(8)
EMU_TOUCHES(16)
extern "C" void __tsan_read_range(void *address, size_t bytes) {
    if (observing) note_touch(address, bytes, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void *address, size_t bytes) {
    if (observing) note_touch(address, bytes, true, __builtin_return_address(0));
}
extern "C" void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
    __tsan_read_range((void *)from, bytes);
    __tsan_write_range(to, bytes);
    return memcpy(to, from, bytes);
}
extern "C" void *__tsan_memset(void *to, int value, size_t bytes) {
    __tsan_write_range(to, bytes);
    return memset(to, value, bytes);
}
extern "C" void __tsan_init(void) {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit(void *) {}
