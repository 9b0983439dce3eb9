// SPDX-License-Identifier: Apache-2.0
// The last threadgroup to arrive finishes a reduction: the exact rule, and what happens when a part of it is missing.
// Buffers: result, payload (one float a group), counter.
#include <metal_stdlib>
using namespace metal;

#define ARGUMENTS \
    device float *result [[buffer(0)]], coherent(device) device float *payload [[buffer(1)]], \
        device atomic_uint *counter [[buffer(2)]], uint group [[threadgroup_position_in_grid]], \
        uint groups [[threadgroups_per_grid]], uint tid [[thread_index_in_threadgroup]]
#define FENCE atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_device)
#define BARRIER threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup)

inline void finish(device float *result, coherent(device) device float *payload, uint groups, uint tid) {
    if (tid < groups) result[tid] = payload[tid] * 2;
}

// expect: clean  4 x 32
kernel void exact(ARGUMENTS) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    BARRIER;
    if (tid == 0) {
        FENCE;
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        FENCE;
        if (last) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    }
    BARRIER;
    if (last) finish(result, payload, groups, tid);
}

// expect: clean  4 x 32
kernel void one_thread(ARGUMENTS) {
    if (tid != 0) return;
    payload[group] = group + 1;
    FENCE;
    const bool last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
    FENCE;
    if (!last) return;
    atomic_store_explicit(counter, 0u, memory_order_relaxed);
    for (uint g = 0; g < groups; g++) result[g] = payload[g];
}

// expect: visibility  4 x 32
kernel void no_qualifier(device float *result [[buffer(0)]], device float *payload [[buffer(1)]],
    device atomic_uint *counter [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint groups [[threadgroups_per_grid]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    BARRIER;
    if (tid == 0) {
        FENCE;
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        FENCE;
        if (last) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    }
    BARRIER;
    if (last && tid < groups) result[tid] = payload[tid] * 2;
}

// Written through a coherent pointer, read through another.
// expect: visibility  4 x 32
kernel void reader_not_coherent(ARGUMENTS) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    BARRIER;
    if (tid == 0) {
        FENCE;
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        FENCE;
        if (last) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    }
    BARRIER;
    device float *plain = (device float *)payload;
    if (last && tid < groups) result[tid] = plain[tid] * 2;
}

// expect: race  4 x 32
kernel void no_fence(ARGUMENTS) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    BARRIER;
    if (tid == 0) {
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        if (last) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    }
    BARRIER;
    if (last) finish(result, payload, groups, tid);
}

// expect: race  4 x 32
kernel void no_fence_before(ARGUMENTS) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    BARRIER;
    if (tid == 0) {
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        FENCE;
        if (last) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    }
    BARRIER;
    if (last) finish(result, payload, groups, tid);
}

// expect: race  4 x 32
kernel void no_fence_after(ARGUMENTS) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    BARRIER;
    if (tid == 0) {
        FENCE;
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        if (last) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    }
    BARRIER;
    if (last) finish(result, payload, groups, tid);
}

// A fence of a smaller scope is none.
// expect: race  4 x 32
kernel void fence_of_threadgroup_scope(ARGUMENTS) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    BARRIER;
    if (tid == 0) {
        atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_threadgroup);
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        atomic_thread_fence(mem_flags::mem_device, memory_order_seq_cst, thread_scope_threadgroup);
        if (last) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    }
    BARRIER;
    if (last) finish(result, payload, groups, tid);
}

// The payload of thread 5 is not yet ordered before thread 0's fence.
// expect: race  4 x 32
kernel void no_barrier_before_fence(ARGUMENTS) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    if (tid == 0) {
        FENCE;
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        FENCE;
        if (last) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    }
    BARRIER;
    if (last) finish(result, payload, groups, tid);
}

// expect: race  4 x 32
kernel void barrier_without_device_flag(ARGUMENTS) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 0) {
        FENCE;
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        FENCE;
        if (last) atomic_store_explicit(counter, 0u, memory_order_relaxed);
    }
    BARRIER;
    if (last) finish(result, payload, groups, tid);
}

// expect: not reset  4 x 32
kernel void no_reset(ARGUMENTS) {
    threadgroup uint last;
    if (tid == 5) payload[group] = group + 1;
    BARRIER;
    if (tid == 0) {
        FENCE;
        last = atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed) == groups - 1;
        FENCE;
    }
    BARRIER;
    if (last) finish(result, payload, groups, tid);
}

// Waits for the other groups: they may never run.
// expect: spin  2 x 1
kernel void spins(ARGUMENTS) {
    atomic_fetch_add_explicit(counter, 1u, memory_order_relaxed);
    while (atomic_load_explicit(counter, memory_order_relaxed) < groups) {
    }
    result[group] = 1;
}
