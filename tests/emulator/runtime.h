// SPDX-License-Identifier: Apache-2.0
// Inside the runtime: what the scheduler (scheduler.cpp), the checks (check.cpp) and the reports share.
#pragma once
#include "msl_runtime.h"

namespace emulator {

struct Slot { // a threadgroup variable
    const void *key;
    uint8_t *address;
};

enum { ARENA = 1 << 17, ARENA_GAP = 16, SLOTS = 64 };

// A host thread that runs threadgroups, one after the other.
struct Worker : MslGroup {
    MslEntry entry;
    void *main_stack;
    void *stack_memory;
    uint8_t *stacks; // in it, aligned
    MslSimdgroup *simdgroups;
    uint32_t simdgroup_count, thread_count, live, current;
    uint64_t random;
    // The barrier or group operation that threads wait at.
    uint32_t waiting, barrier_flags, barrier_target;
    MslSite barrier_site;
    MslOp *group_ops[MSL_MAX_THREADS];
    bool group_op;
    // Threadgroup memory.
    uint32_t arena_used, arena_counted, slot_count; // the second without gaps between variables
    Slot slots[SLOTS];
    void *arguments[MSL_BUFFERS];
    bool too_large;
    // For the checks.
    uint32_t linear_index; // of the group
    uint32_t threadgroup_epoch, device_epoch;
    bool stopped; // a lane was: what the others wait for may never come

    MslLane *lane(uint32_t t) { return (MslLane *)(stacks + (size_t)(t + 1) * MSL_STACK - sizeof(MslLane)); }
};

extern thread_local Worker *worker __attribute__((tls_model("initial-exec")));

static inline Worker *worker_of(MslLane *l) { return static_cast<Worker *>(l->group); }

// Adds "kind: message" to the reports, once per kind and site.
void report(const char *kind, MslSite site, const char *format, ...) __attribute__((format(printf, 3, 4)));
[[noreturn]] void stop_lane(); // the running lane ends here
void catch_crashes();

// Hooks of the checks, called only for launches with MSL_CHECK.
void check_gap(uint32_t begin, uint32_t end); // of threadgroup memory
void check_group_begins(Worker *);
void check_group_ends(Worker *);
void check_barrier(Worker *, uint32_t flags);
void check_launch_begins(const MslLaunch *);
void check_launch_ends(const MslLaunch *);
void check_fence(Worker *, MslLane *);
void check_atomic(const volatile void *p, bool writes, bool reads, MslSite);

enum { PLAIN_ACCESS, COHERENT_ACCESS, ATOMIC_ACCESS };
void check_access(const volatile void *p, uint32_t bytes, bool writes, bool reads, uint32_t how, MslSite);

} // namespace emulator
