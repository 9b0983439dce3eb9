// SPDX-License-Identifier: Apache-2.0
// Reductions and scans over a simdgroup or a threadgroup, and the kernel arguments that they need.
//
// Every function here has to be reached by all threads of its group.  `partial` is threadgroup memory of one value a
// simdgroup (32 at most); it may be used again at once.
#ifndef LILY_GROUP_H
#define LILY_GROUP_H

#include "common.h"

#define LILY_THREAD_ARGUMENTS \
    uint tid [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], \
        uint sg [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]

// Where a thread stands.
struct group_place {
    uint tid, lane, sg, simdgroups;

    uint threads() const { return simdgroups * LANES; }
};

inline float group_max(float x, threadgroup float *partial, group_place at) {
    x = simd_max(x);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.lane == 0) partial[at.sg] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return simd_max(at.lane < at.simdgroups ? partial[at.lane] : -INFINITY);
}

inline float group_sum(float x, threadgroup float *partial, group_place at) {
    x = simd_sum(x);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.lane == 0) partial[at.sg] = x;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return simd_sum(at.lane < at.simdgroups ? partial[at.lane] : 0.0f);
}

inline bool group_any(bool x, threadgroup uint *partial, group_place at) {
    const uint any = simd_any(x) ? 1 : 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.lane == 0) partial[at.sg] = any;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return simd_max(at.lane < at.simdgroups ? partial[at.lane] : 0u) > 0;
}

// The sum of `x` over all threads before this one; `total` becomes the sum over all.
inline uint group_scan(uint x, thread uint &total, threadgroup uint *partial, group_place at) {
    const uint through = simd_prefix_inclusive_sum(x);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.lane == 31) partial[at.sg] = through;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint sums = at.lane < at.simdgroups ? partial[at.lane] : 0;
    total = simd_sum(sums);
    return simd_sum(at.lane < at.sg ? sums : 0u) + through - x;
}

// Bit i: lane i's `x`.
inline uint simd_mask(bool x) { return uint(simd_vote::vote_t(simd_ballot(x))); }

// Lanes before this one.
inline uint lanes_before(uint lane) { return (1u << lane) - 1; }

#endif
