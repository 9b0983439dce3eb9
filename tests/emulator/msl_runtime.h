// SPDX-License-Identifier: Apache-2.0
// Between compiled kernels and the emulator's runtime: what a lane is, how lanes meet, how a kernel is launched.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MSL_EXPORT __attribute__((visibility("default")))

enum { MSL_BUFFERS = 31, MSL_MAX_THREADS = 1024, MSL_STACK = 1 << 17, MSL_THREADGROUP_LIMIT = 32768 };
enum { MSL_FORWARD, MSL_REVERSE, MSL_RANDOM }; // order of lanes, simdgroups and groups
enum { MSL_CHECK = 1, MSL_LAX = 2, MSL_RANDOM_LAYOUT = 4 };

struct MslSite { // where in the shader; or only which instruction
    const char *file;
    int line, column;
    const void *instruction;
};

// One lane's part in an operation of several lanes.  The last lane to arrive calls `complete` for all.
struct MslOp {
    void (*complete)(MslOp **lanes, uint32_t mask_or_count);
    MslSite site;
};

struct MslLaunch {
    void *buffers[MSL_BUFFERS];
    uint64_t bytes[MSL_BUFFERS];
    uint32_t threadgroup_bytes[MSL_BUFFERS];
    uint32_t grid[3];       // threads
    uint32_t groups[3];     // threadgroups
    uint32_t group_size[3]; // threads of a full threadgroup
    uint32_t order, seed, flags, workers;
    const char *name;
};

struct MslGroup {
    const MslLaunch *launch;
    uint32_t index[3], size[3];
    uint8_t *arena; // threadgroup memory
};

struct MslSimdgroup;
struct alignas(64) MslLane { // at the top of its own stack
    void *stack_pointer;
    MslGroup *group;
    MslSimdgroup *simdgroup;
    MslOp *op;
    uint32_t lane, simdgroup_index, linear, simdgroups;
    uint32_t position[3];
    uint32_t simd_epoch, fence_epoch;
};

typedef void (*MslEntry)(const MslLaunch *, MslLane *);
struct MslArgument {
    uint8_t kind, index, readonly;
    const char *name;
};
struct MslKernel {
    const char *name;
    MslEntry entry;
    const MslArgument *arguments;
    uint32_t argument_count, max_threads;
};

// The lane that runs: lanes' stacks are aligned to their size, so the frame address finds it.
static inline __attribute__((always_inline)) MslLane *msl_self() {
    uintptr_t here = (uintptr_t)__builtin_frame_address(0);
    return (MslLane *)((here | (MSL_STACK - 1)) + 1 - sizeof(MslLane));
}

extern "C" {
void msl_simd_op(MslOp *op);                          // all live lanes of the simdgroup meet
void msl_group_op(MslOp *op, uint32_t simdgroups);    // all threads of the first `simdgroups` simdgroups meet
void msl_group_barrier(uint32_t flags, MslSite site); // flags: mem_flags
void msl_simd_barrier(uint32_t flags, MslSite site);
void msl_fence(uint32_t flags, uint32_t order, uint32_t scope, MslSite site);
void *msl_slot(const void *key, uint32_t bytes, uint32_t align); // a threadgroup variable
void *msl_threadgroup_argument(uint32_t index);
// Before an atomic operation and after it; what lies between is one step.
void msl_atomic(const volatile void *p, uint32_t bytes, int reads, int writes, MslSite site);
void msl_touch(const volatile void *p, uint32_t bytes, int writes); // an access on behalf of a cooperative operation
// Row << 16 | column of each thread's `room` elements of a cooperative tensor, above that for none.
const uint32_t *msl_layout(uint32_t rows, uint32_t columns, uint32_t threads, uint32_t room);
float *msl_scratch(int which, size_t count);
void msl_matmul(float *z, const float *x, const float *y, int m, int n, int k, bool x_transposed, bool y_transposed,
    bool accumulate);
void msl_fail(const char *kind, const char *message, MslSite site);
}
