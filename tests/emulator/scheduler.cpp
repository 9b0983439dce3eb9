// SPDX-License-Identifier: Apache-2.0
// Runs kernels with one fiber per GPU thread: simdgroups of 32 lanes, threadgroup barriers, threadgroup memory.
//
// A lane runs until it waits.  In a simdgroup operation the last lane to arrive computes all results; when some lanes
// can never arrive, those that did are served and the divergence is reported.  Groups run one after the other (or on
// several host threads), which is a legal schedule because no kernel may wait for another group.
#include "fiber.h"
#include "runtime.h"

#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>

struct MslSimdgroup {
    uint32_t all, ready, wait, barrier, done; // one bit a lane
    bool mixed;                               // lanes wait at different operations
    MslLane *lanes[32];
};

namespace emulator {

thread_local Worker *worker;

static bool checked(Worker *w) { return w->launch->flags & MSL_CHECK; }
static bool lax(Worker *w) { return w->launch->flags & MSL_LAX; }

static uint32_t next_random(Worker *w) {
    w->random = w->random * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(w->random >> 33);
}

static uint32_t pick(Worker *w, uint32_t mask) {
    if (w->launch->order == MSL_FORWARD) return (uint32_t)__builtin_ctz(mask);
    if (w->launch->order == MSL_REVERSE) return 31 - (uint32_t)__builtin_clz(mask);
    for (uint32_t skip = next_random(w) % (uint32_t)__builtin_popcount(mask); skip; skip--) mask &= mask - 1;
    return (uint32_t)__builtin_ctz(mask);
}

static bool same_operation(const MslOp *a, const MslOp *b) {
    return a->complete == b->complete && a->site.line == b->site.line && a->site.column == b->site.column;
}

static void complete(MslSimdgroup *s, uint32_t mask) {
    MslOp *ops[32];
    for (uint32_t m = mask; m; m &= m - 1) ops[__builtin_ctz(m)] = s->lanes[__builtin_ctz(m)]->op;
    MslOp *first = ops[__builtin_ctz(mask)];
    if (first->complete) first->complete(ops, mask);
    s->wait &= ~mask;
    s->ready |= mask;
}

// Nobody else can arrive: serves the lanes that wait at the earliest place.
static void resolve(Worker *w, MslSimdgroup *s) {
    MslOp *first = nullptr;
    for (uint32_t m = s->wait; m; m &= m - 1) {
        MslOp *op = s->lanes[__builtin_ctz(m)]->op;
        if (!first || op->site.line < first->site.line) first = op;
    }
    uint32_t mask = 0;
    for (uint32_t m = s->wait; m; m &= m - 1)
        if (same_operation(s->lanes[__builtin_ctz(m)]->op, first)) mask |= m & -m;
    if (!lax(w) && !w->stopped)
        report("divergence", first->site,
            "a simdgroup operation is reached by lanes %08x only (%08x ended, %08x at a barrier)", mask, s->done,
            s->barrier);
    complete(s, mask);
}

static void release_barrier(Worker *w) {
    if (w->group_op) {
        w->group_op = false;
        MslOp *ops[MSL_MAX_THREADS];
        uint32_t n = 0;
        for (uint32_t t = 0; t < w->barrier_target; t++) ops[n++] = w->group_ops[t];
        ops[0]->complete(ops, n);
    } else {
        if (w->barrier_flags & 1) w->device_epoch++;
        if (w->barrier_flags & 2) w->threadgroup_epoch++;
        if (checked(w)) check_barrier(w, w->barrier_flags);
    }
    w->waiting = 0;
    for (uint32_t i = 0; i < w->simdgroup_count; i++) {
        MslSimdgroup *s = &w->simdgroups[i];
        s->ready |= s->barrier;
        s->barrier = 0;
    }
}

static bool move_on(Worker *w) {
    uint32_t n = w->simdgroup_count, from = w->current;
    if (w->launch->order == MSL_RANDOM) from = next_random(w) % n;
    for (uint32_t k = 1; k <= n; k++) {
        uint32_t j = w->launch->order == MSL_REVERSE ? (from + n - k) % n : (from + k) % n;
        if (w->simdgroups[j].ready || w->simdgroups[j].wait) {
            w->current = j;
            return true;
        }
    }
    return false;
}

static MslLane *next_lane(Worker *w) {
    for (;;) {
        MslSimdgroup *s = &w->simdgroups[w->current];
        if (s->ready) {
            uint32_t i = pick(w, s->ready);
            s->ready &= ~(1u << i);
            return s->lanes[i];
        }
        if (s->wait) {
            resolve(w, s);
            continue;
        }
        if (move_on(w)) continue;
        if (!w->waiting) return nullptr;
        if (!w->stopped)
            report("divergence", w->barrier_site, "a threadgroup barrier is reached by %u of %u threads", w->waiting,
                w->barrier_target);
        if (w->group_op) { // its operands are missing
            for (uint32_t i = 0; i < w->simdgroup_count; i++) w->simdgroups[i].barrier = 0;
            w->group_op = false, w->waiting = 0;
            return nullptr;
        }
        release_barrier(w);
    }
}

static void yield(Worker *w, MslLane *l) {
    MslLane *n = next_lane(w);
    if (n != l) fiber_switch(&l->stack_pointer, n ? n->stack_pointer : w->main_stack);
}

static void lane_ends(Worker *w, MslLane *l) {
    MslSimdgroup *s = l->simdgroup;
    s->done |= 1u << l->lane;
    w->live--;
    MslLane *n = next_lane(w);
    fiber_switch(&l->stack_pointer, n ? n->stack_pointer : w->main_stack);
    abort();
}

[[noreturn]] void stop_lane() {
    MslLane *l = msl_self();
    worker_of(l)->stopped = true;
    lane_ends(worker_of(l), l);
    abort();
}

static void lane_begins() {
    MslLane *l = msl_self();
    Worker *w = worker_of(l);
    w->entry(w->launch, l);
    lane_ends(w, l);
}

static void meet_group(MslOp *op, uint32_t target, uint32_t flags, MslSite site) {
    MslLane *l = msl_self();
    Worker *w = worker_of(l);
    if (w->waiting &&
        (w->barrier_site.line != site.line || w->barrier_site.column != site.column || w->group_op != !!op))
        report("divergence", site, "threads of one group wait at different barriers (the other: %s:%d)",
            w->barrier_site.file, w->barrier_site.line);
    if (op) {
        w->group_op = true;
        w->group_ops[l->linear] = op;
    }
    w->barrier_site = site, w->barrier_flags = flags, w->barrier_target = target;
    l->simdgroup->barrier |= 1u << l->lane;
    if (++w->waiting == target) {
        release_barrier(w);
        l->simdgroup->ready &= ~(1u << l->lane);
        return;
    }
    yield(w, l);
}

enum : size_t { STACK_BYTES = (size_t)(MSL_MAX_THREADS + 1) * MSL_STACK };

static Worker *new_worker() {
    Worker *w = new Worker();
    void *stacks = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    void *arena = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stacks == MAP_FAILED || arena == MAP_FAILED) {
        perror("emulator: mmap");
        abort();
    }
    w->stack_memory = stacks;
    w->stacks = (uint8_t *)(((uintptr_t)stacks + MSL_STACK - 1) & ~(uintptr_t)(MSL_STACK - 1));
    for (int i = 0; i < MSL_MAX_THREADS; i++) mprotect(w->stacks + (size_t)i * MSL_STACK, 4096, PROT_NONE);
    w->arena = (uint8_t *)arena;
    w->simdgroups = new MslSimdgroup[MSL_MAX_THREADS / 32];
    return w;
}

// A system thread's worker ends with it: the guard pages alone are a thousand mappings, of which a process may not have
// many.
struct OwnWorker {
    Worker *it = nullptr;

    ~OwnWorker() {
        if (!it) return;
        munmap(it->stack_memory, STACK_BYTES);
        munmap(it->arena, ARENA);
        delete[] it->simdgroups;
        delete it;
    }
};

static uint32_t aligned(uint32_t at, uint32_t align) { return (at + align - 1) & ~(align - 1); }

// In a checked launch variables do not touch: who runs over the end of one must not find the next.
static uint8_t *take_arena(Worker *w, uint32_t bytes, uint32_t align) {
    const bool gap = checked(w) && w->arena_used;
    uint32_t at = aligned(w->arena_used + (gap ? ARENA_GAP : 0), align);
    if (at + bytes > ARENA) {
        fprintf(stderr, "emulator: %s wants %u bytes of threadgroup memory\n", w->launch->name, at + bytes);
        abort();
    }
    if (gap) check_gap(w->arena_used, at);
    w->arena_used = at + bytes;
    w->arena_counted = aligned(w->arena_counted, align) + bytes;
    // All bits set is a NaN in every format: memory that a kernel forgot to write shows even in an unchecked build.
    memset(w->arena + at, 0xff, bytes);
    if (w->arena_counted > MSL_THREADGROUP_LIMIT && !w->too_large) {
        w->too_large = true;
        report("threadgroup memory", MslSite{}, "%u bytes are more than the %d there are", w->arena_counted,
            MSL_THREADGROUP_LIMIT);
    }
    return w->arena + at;
}

static void prepare_lanes(Worker *w) {
    uint32_t x = 0, y = 0, z = 0;
    for (uint32_t t = 0; t < w->thread_count; t++) {
        MslLane *l = w->lane(t);
        l->group = w;
        l->simdgroup = &w->simdgroups[t >> 5];
        l->simdgroup->lanes[t & 31] = l;
        l->lane = t & 31, l->simdgroup_index = t >> 5, l->linear = t;
        l->position[0] = x, l->position[1] = y, l->position[2] = z;
        l->simdgroups = w->simdgroup_count;
        l->simd_epoch = l->fence_epoch = 0;
        if (++x == w->size[0]) {
            x = 0;
            if (++y == w->size[1]) y = 0, z++;
        }
        // Stacks that all began at the same offset would fight for the same cache sets.
        uintptr_t top = ((uintptr_t)l - 256 - (t * 7 % 48) * 64) & ~(uintptr_t)15;
        l->stack_pointer = fiber_make((void *)top, lane_begins);
    }
}

static void run_group(Worker *w, uint32_t linear) {
    const MslLaunch *launch = w->launch;
    w->linear_index = linear;
    w->index[0] = linear % launch->groups[0];
    w->index[1] = linear / launch->groups[0] % launch->groups[1];
    w->index[2] = linear / launch->groups[0] / launch->groups[1];
    for (int d = 0; d < 3; d++) {
        uint32_t left = launch->grid[d] - w->index[d] * launch->group_size[d];
        w->size[d] = left < launch->group_size[d] ? left : launch->group_size[d];
    }
    uint32_t n = w->thread_count = w->live = w->size[0] * w->size[1] * w->size[2];
    w->simdgroup_count = (n + 31) / 32;
    w->waiting = 0, w->group_op = w->stopped = false;
    w->threadgroup_epoch = w->device_epoch = 0;
    w->arena_used = w->arena_counted = w->slot_count = 0;
    for (int i = 0; i < MSL_BUFFERS; i++)
        if (launch->threadgroup_bytes[i]) w->arguments[i] = take_arena(w, launch->threadgroup_bytes[i], 16);
    for (uint32_t i = 0; i < w->simdgroup_count; i++) {
        MslSimdgroup *s = &w->simdgroups[i];
        uint32_t lanes = n - i * 32;
        s->all = s->ready = lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
        s->wait = s->barrier = s->done = 0;
        s->mixed = false;
    }
    prepare_lanes(w);
    if (checked(w)) check_group_begins(w);
    w->current = launch->order == MSL_REVERSE ? w->simdgroup_count - 1 : 0;
    fiber_switch(&w->main_stack, next_lane(w)->stack_pointer);
    if (checked(w)) check_group_ends(w);
}

// Hands out group numbers; random order is a full-period step through all of them.
struct Queue {
    const MslLaunch *launch;
    uint32_t total, step, start;
    std::atomic<uint32_t> next{0};

    explicit Queue(const MslLaunch *l) : launch(l), total(l->groups[0] * l->groups[1] * l->groups[2]) {
        uint32_t seed = l->seed * 2654435761u + 12345;
        start = total ? seed % total : 0;
        step = total ? seed / 7 % total | 1 : 1;
        while (total > 1 && gcd(step, total) != 1) step += 2;
    }
    static uint32_t gcd(uint32_t a, uint32_t b) { return b ? gcd(b, a % b) : a; }
    bool take(uint32_t &group) {
        uint32_t i = next++;
        if (i >= total) return false;
        group = i;
        if (launch->order == MSL_REVERSE) group = total - 1 - i;
        if (launch->order == MSL_RANDOM) group = (uint32_t)((start + (uint64_t)i * step) % total);
        return true;
    }
};

static void work(const MslLaunch *launch, MslEntry entry, Queue *queue, uint32_t number) {
    static thread_local OwnWorker mine;
    if (!mine.it) mine.it = new_worker();
    catch_crashes();
    Worker *w = worker = mine.it;
    w->launch = launch, w->entry = entry, w->too_large = false;
    w->random = (launch->seed + number * 7919ull) * 0x9E3779B97F4A7C15ull + 1;
    for (uint32_t group; queue->take(group);) run_group(w, group);
    worker = nullptr;
}

// Further host threads, started once; each waits for work of its own number.
class Pool {
  public:
    void run(uint32_t helpers, const MslLaunch *launch, MslEntry entry, Queue *queue) {
        {
            std::lock_guard<std::mutex> lock(guard);
            while (threads < helpers) std::thread(&Pool::serve, this, ++threads).detach();
            job = {launch, entry, queue};
            wanted = busy = helpers;
            round++;
        }
        begin.notify_all();
        work(launch, entry, queue, 0);
        std::unique_lock<std::mutex> lock(guard);
        finished.wait(lock, [this] { return busy == 0; });
    }

  private:
    struct Job {
        const MslLaunch *launch;
        MslEntry entry;
        Queue *queue;
    };
    void serve(uint32_t number) {
        uint64_t last = 0;
        for (;;) {
            std::unique_lock<std::mutex> lock(guard);
            begin.wait(lock, [&] { return round != last && number <= wanted && busy > 0; });
            last = round;
            Job mine = job;
            lock.unlock();
            work(mine.launch, mine.entry, mine.queue, number);
            lock.lock();
            if (--busy == 0) finished.notify_all();
        }
    }
    std::mutex guard;
    std::condition_variable begin, finished;
    Job job = {};
    uint32_t threads = 0, wanted = 0, busy = 0;
    uint64_t round = 0;
};

} // namespace emulator

using namespace emulator;

extern "C" {

void msl_simd_op(MslOp *op) {
    MslLane *l = msl_self();
    Worker *w = worker_of(l);
    MslSimdgroup *s = l->simdgroup;
    uint32_t bit = 1u << l->lane;
    l->op = op;
    if (!s->wait)
        s->mixed = false;
    else if (!same_operation(s->lanes[__builtin_ctz(s->wait)]->op, op))
        s->mixed = true;
    s->wait |= bit;
    // Lanes that ended count as missing: whether hardware still has them is not to be relied on.
    if (s->wait == s->all && !s->mixed) {
        complete(s, s->wait);
        s->ready &= ~bit;
        return;
    }
    yield(w, l);
}

void msl_group_op(MslOp *op, uint32_t simdgroups) {
    MslLane *l = msl_self();
    Worker *w = worker_of(l);
    if (simdgroups != w->simdgroup_count)
        report("divergence", op->site, "an operation of %u simdgroups in a threadgroup of %u", simdgroups,
            w->simdgroup_count);
    meet_group(op, w->thread_count, 0, op->site);
}

void msl_group_barrier(uint32_t flags, MslSite site) {
    meet_group(nullptr, worker_of(msl_self())->thread_count, flags, site);
}

void msl_simd_barrier(uint32_t flags, MslSite site) {
    MslOp op;
    op.complete = nullptr, op.site = site;
    msl_simd_op(&op);
    if (flags & 3) msl_self()->simd_epoch++;
}

void *msl_slot(const void *key, uint32_t bytes, uint32_t align) {
    Worker *w = worker_of(msl_self());
    for (uint32_t i = 0; i < w->slot_count; i++)
        if (w->slots[i].key == key) return w->slots[i].address;
    if (w->slot_count == SLOTS) {
        fprintf(stderr, "emulator: %s has more than %d threadgroup variables\n", w->launch->name, SLOTS);
        abort();
    }
    Slot &s = w->slots[w->slot_count++] = Slot{key, take_arena(w, bytes, align < 16 ? 16 : align)};
    return s.address;
}

void *msl_threadgroup_argument(uint32_t index) { return worker_of(msl_self())->arguments[index]; }

MSL_EXPORT int msl_dispatch(MslEntry entry, const MslLaunch *launch) {
    Queue queue(launch);
    if (!queue.total) return 0;
    if (launch->flags & MSL_CHECK) check_launch_begins(launch);
    uint32_t workers = launch->flags & MSL_CHECK ? 1 : launch->workers;
    if (workers > queue.total) workers = queue.total;
    static Pool *pool = new Pool(); // never destroyed: its threads do not end
    if (workers > 1)
        pool->run(workers - 1, launch, entry, &queue);
    else
        work(launch, entry, &queue, 0);
    if (launch->flags & MSL_CHECK) check_launch_ends(launch);
    return 0;
}

} // extern "C"
