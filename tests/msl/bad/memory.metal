// SPDX-License-Identifier: Apache-2.0
// Bounds, alignment, uninitialised and too much threadgroup memory, undefined operations.  The buffer has 256 floats.
#include <metal_stdlib>
using namespace metal;

// expect: bounds  1 x 64
kernel void device_write(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) { o[tid + 193] = 1; }

// expect: bounds  1 x 64
kernel void device_read_before(device float *o [[buffer(0)]], int tid [[thread_index_in_threadgroup]]) {
    o[64 + tid] = o[tid - 1];
}

// expect: bounds  1 x 1
kernel void straddles_the_end(device uchar *o [[buffer(0)]]) {
    *(device packed_float2 *)(o + 1020) = packed_float2(float2(1, 2));
}

// expect: access  1 x 32
kernel void writes_readonly(device const float *a [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    ((device float *)a)[tid] = 1;
}

// expect: bounds  1 x 1
kernel void null_pointer(device float *o [[buffer(0)]]) {
    device float *p = nullptr;
    if (o[0] == 0) p = (device float *)64;
    *p = 1;
}

// expect: bounds  1 x 64
kernel void threadgroup_index(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[32];
    if (tid < 32) s[tid] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float x = s[(tid & 31) + (tid == 63)];
    o[tid] = x;
}

// expect: bounds  1 x 64
kernel void threadgroup_pointer(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[32];
    threadgroup float *p = s;
    p[tid] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[tid] = p[tid & 31];
}

// expect: bounds  1 x 32
kernel void threadgroup_neighbour(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[32];
    threadgroup float t[32];
    threadgroup float *p = s;
    t[tid] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    p[tid + 1] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[tid] = t[31 - tid];
}

// expect: bounds  1 x 32
kernel void private_array(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    float a[4] = {0, 1, 2, 3};
    o[tid] = a[tid % 5];
}

// expect: bounds  1 x 32
kernel void vector_component(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    float4 a = float4(0, 1, 2, 3);
    o[tid] = a[tid % 5];
}

// expect: misaligned  1 x 1
kernel void misaligned_vector(device float *o [[buffer(0)]]) { *(device float4 *)(o + 1) = float4(1, 2, 3, 4); }

// expect: misaligned  1 x 1
kernel void misaligned_word(device uchar *o [[buffer(0)]]) { *(device uint *)(o + 2) = 1; }

// expect: clean  1 x 1
kernel void packed_vector(device float *o [[buffer(0)]]) {
    *(device packed_float4 *)(o + 1) = packed_float4(float4(1, 2, 3, 4));
}

// expect: uninitialised  1 x 64
kernel void uninitialised(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[128];
    s[tid] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[tid] = s[tid] + s[tid + 64];
}

// expect: threadgroup memory  1 x 32
kernel void too_much(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[8193];
    s[tid] = 1;
    o[tid] = s[tid];
}

// expect: clean  1 x 32
kernel void just_enough(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    threadgroup float s[8192];
    s[tid] = 1;
    o[tid] = s[tid];
}

// expect: undefined  1 x 64
kernel void shift_too_far(device uint *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    o[tid] = 1u << tid;
}

// expect: undefined  1 x 1
kernel void division_by_zero(device uint *o [[buffer(0)]]) { o[0] = 5 / o[1]; }

// expect: undefined  1 x 1
kernel void float_too_large(device float *o [[buffer(0)]]) { o[1] = float(int(o[0] + 3e9f)); }

// Far beyond the buffer, where nothing is mapped; the other lanes go on.
// expect: bounds  1 x 32
kernel void far_away(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    if (tid == 3) o[tid + (1ul << 32)] = 1;
    o[tid] = simd_sum(1.0f);
}

// Outside of device memory altogether.
// expect: crash  1 x 32
kernel void wild_pointer(device float *o [[buffer(0)]], uint tid [[thread_index_in_threadgroup]]) {
    if (tid == 3) *(device float *)(0x700000001000ul + tid * 4096ul) = 1;
    o[tid] = 1;
}
