// SPDX-License-Identifier: Apache-2.0
// Barriers and simdgroup operations that not all threads reach.
#include <metal_stdlib>
using namespace metal;

// expect: divergence  1 x 64
kernel void barrier_in_branch(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    if (tid < 40) threadgroup_barrier(mem_flags::mem_threadgroup);
    o[tid] = 1;
}

// expect: divergence  1 x 64
kernel void different_barriers(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    if (tid < 32)
        threadgroup_barrier(mem_flags::mem_threadgroup);
    else
        threadgroup_barrier(mem_flags::mem_device);
    o[tid] = 1;
}

// expect: divergence  1 x 64
kernel void early_return(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    if (tid >= 48) return;
    threadgroup_barrier(mem_flags::mem_device);
    o[tid] = 1;
}

// expect: divergence  1 x 32
kernel void simd_sum_in_branch(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    float x = 0;
    if (tid & 1) x = simd_sum(1.0f);
    o[tid] = x;
}

// expect: divergence  1 x 32
kernel void simd_sum_after_return(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    if (tid == 7) return;
    o[tid] = simd_sum(1.0f);
}

// expect: divergence  1 x 32
kernel void matrix_in_branch(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    simdgroup_float8x8 a = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
    if (tid < 16) simdgroup_store(a, o);
}

// Whole simdgroups may part.
// expect: clean  1 x 64
kernel void simdgroups_part(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    float x = 1;
    if (tid < 32) x = simd_sum(x);
    threadgroup_barrier(mem_flags::mem_none);
    o[tid] = x;
}

// The last simdgroup of a group need not be full.
// expect: clean  1 x 40
kernel void partial_simdgroup(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    o[tid] = simd_sum(1.0f);
}
