// SPDX-License-Identifier: Apache-2.0
// Races and their correct counterparts.  Above each kernel: what the checks must say, groups, threads.
#include <metal_stdlib>
using namespace metal;

// expect: race  1 x 64
kernel void no_barrier(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[tid] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s[tid] = tid;
    o[tid] = s[63 - tid];
}

// expect: clean  1 x 64
kernel void with_barrier(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[tid] = tid;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[tid] = s[63 - tid];
}

// expect: race  1 x 64
kernel void wrong_flag(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[tid] = tid;
    threadgroup_barrier(mem_flags::mem_device);
    o[tid] = s[63 - tid];
}

// The second round overwrites what slower threads still read.
// expect: race  1 x 64
kernel void no_barrier_before_reuse(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    float sum = 0;
    for (uint i = 0; i < 2; i++) {
        s[tid] = tid + i;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum += s[63 - tid];
    }
    o[tid] = sum;
}

// expect: race  1 x 32
kernel void simd_no_barrier(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[32];
    s[tid] = tid;
    const float x = simd_sum(1.0f);
    o[tid] = s[tid ^ 1] + x;
}

// expect: clean  1 x 64
kernel void simd_with_barrier(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[tid] = tid;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    o[tid] = s[tid ^ 1];
}

// expect: race  1 x 64
kernel void simd_barrier_across_simdgroups(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[64];
    s[tid] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s[tid] = tid;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    o[tid] = s[tid ^ 32];
}

// Many threads read a value that one then overwrites.
// expect: race  1 x 64
kernel void write_after_shared_read(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s;
    if (tid == 0) s = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float x = s;
    if (tid == 63) s = 2;
    o[tid] = x;
}

// A simdgroup function makes lanes meet, but orders nothing in memory; lane 31 writes what all have read.
// expect: race  1 x 32
kernel void write_after_read_in_step(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s;
    if (tid == 0) s = 1;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float x = s, sum = simd_sum(x);
    if (tid == 31) s = sum;
    o[tid] = sum;
}

// expect: clean  1 x 32
kernel void write_after_read_with_barrier(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s;
    if (tid == 0) s = 1;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float x = s, sum = simd_sum(x);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (tid == 31) s = sum;
    o[tid] = sum;
}

// The same in device memory.
// expect: race  1 x 32
kernel void device_write_after_read_in_step(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    const float x = o[100], sum = simd_sum(x);
    if (tid == 31) o[100] = sum;
    o[tid] = sum;
}

// expect: race  1 x 64
kernel void device_no_barrier(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    o[tid] = tid;
    o[128 + tid] = o[63 - tid];
}

// expect: race  1 x 64
kernel void device_wrong_flag(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    o[tid] = tid;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[128 + tid] = o[63 - tid];
}

// expect: clean  1 x 64
kernel void device_with_barrier(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    o[tid] = tid;
    threadgroup_barrier(mem_flags::mem_device);
    o[128 + tid] = o[63 - tid];
}

// expect: race  2 x 32
kernel void across_groups(device float *o [[buffer(0)]], uint group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
    o[tid] = group;
}

// Both groups read what the second one overwrites.
// expect: race  2 x 32
kernel void write_after_read_across_groups(device float *o [[buffer(0)]], uint group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
    const float x = o[tid];
    o[64 + 32 * group + tid] = x;
    if (group == 1) o[tid] = 1;
}

// Neighbouring halves of one word belong to different groups: no race.
// expect: clean  2 x 32
kernel void halves_of_a_word(device half *o [[buffer(0)]], uint group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
    o[2 * tid + group] = half(group);
}

// expect: clean  2 x 32
kernel void neighbouring_bytes(device uchar *o [[buffer(0)]], uint i [[thread_position_in_grid]]) { o[i] = uchar(i); }

// expect: clean  2 x 32
kernel void atomic_sum(device atomic_uint *o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    atomic_fetch_add_explicit(o, i, memory_order_relaxed);
}

// expect: race  2 x 32
kernel void atomic_and_plain(device uint *o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    atomic_fetch_add_explicit((device atomic_uint *)o, i, memory_order_relaxed);
    if (i == 40) o[0] = 7;
}
