// SPDX-License-Identifier: Apache-2.0
// What the GPU can do at most, for `lily doctor`: copy, probe_level, probe_read, probe_matrix.
//
// probe_matrix multiplies with what gemm.metal uses: simdgroup_matrix, or, compiled as Metal 4, tensor operations.
// Not handled: the rate of scalar arithmetic.
#include "common.h"
#include "group.h"
#include "matrix.h"
#include "tensor.h"

constant constexpr uint COPY_BLOCK = 65536; // bytes of a group

kernel void copy(device const uchar *src [[buffer(0)]], device uchar *dst [[buffer(1)]],
    constant copy_params &p [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
    const uint first = group * (COPY_BLOCK / 16), end = min(first + COPY_BLOCK / 16, p.bytes / 16);
    for (uint i = first + thread_index; i < end; i += threads)
        ((device uint4 *)dst)[i] = ((device const uint4 *)src)[i];
}

kernel void probe_level(device uint *x [[buffer(0)]], uint thread_index [[thread_index_in_threadgroup]]) {
    if (thread_index == 0) x[0] += 1;
}

// Four loads of 16 bytes are under way in each thread.
kernel void probe_read(device const uchar *src [[buffer(0)]], device uint *sums [[buffer(1)]],
    constant probe_read_params &p [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup uint partial[LANES];
    const uint first = group * (p.block / 16), end = min(first + p.block / 16, p.bytes / 16);
    device const uint4 *words = (device const uint4 *)src;
    uint4 sum[4] = {uint4(0), uint4(0), uint4(0), uint4(0)};
    uint i = first + thread_index;
    for (; i + 3 * threads < end; i += 4 * threads) {
#pragma unroll
        for (uint j = 0; j < 4; j++) sum[j] += words[i + j * threads];
    }
    for (; i < end; i += threads) sum[0] += words[i];
    const uint4 all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    const uint own = simd_sum(all.x + all.y + all.z + all.w);
    if (lane == 0) partial[simdgroup] = own;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint total = simd_sum(lane < simdgroups ? partial[lane] : 0u);
    if (thread_index == 0) sums[group] = total;
}

constant constexpr uint PROBE_SIZE = 64; // rows, columns and depth of a group's product

#if __METAL_VERSION__ >= 400 && !defined(LILY_ACT_F32) && !defined(LILY_MATRIX_F32)

// Operands in threadgroup memory, as tiles of gemm.h have them.
struct ProbeProduct {
    typedef mpp::tensor_ops::matmul2d<mpp::tensor_ops::matmul2d_descriptor(PROBE_SIZE, PROBE_SIZE, PROBE_SIZE, false,
                                          true, false, mpp::tensor_ops::matmul2d_descriptor::mode::multiply_accumulate),
        execution_simdgroups<PRODUCT_SIMDGROUPS>>
        Multiply;
    typedef Multiply::cooperative_tensor_destination_t<StagedOperand, StagedOperand, float, int> Sum;
};

[[kernel, max_total_threads_per_threadgroup(PRODUCT_THREADS)]] void probe_matrix(device const act *x [[buffer(0)]],
    device const act *w [[buffer(1)]], device float *y [[buffer(2)]], constant probe_matrix_params &p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]]) {
    constexpr uint pitch = operand_pitch<bfloat>(PROBE_SIZE);
    threadgroup bfloat left[PROBE_SIZE * pitch], right[PROBE_SIZE * pitch];
    for (uint i = tid; i < PROBE_SIZE * PROBE_SIZE; i += PRODUCT_THREADS) {
        const uint at = i / PROBE_SIZE * pitch + i % PROBE_SIZE;
        left[at] = x[i];
        right[at] = w[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    StagedOperand a = staged_operand(left, PROBE_SIZE, PROBE_SIZE, pitch);
    StagedOperand b = staged_operand(right, PROBE_SIZE, PROBE_SIZE, pitch);
    ProbeProduct::Multiply multiply;
    ProbeProduct::Sum sum;
#pragma unroll
    for (uint i = 0; i < sum.get_capacity(); i++) sum[i] = 0.0f;
    for (uint i = 0; i < p.rounds; i++) multiply.run(a, b, sum);
    y += group * PROBE_SIZE * PROBE_SIZE;
#pragma unroll
    for (uint i = 0; i < sum.get_capacity(); i++) {
        if (!sum.is_valid_element(i)) continue;
        const auto place = sum.get_multidimensional_index(i);
        y[uint(place[1]) * PROBE_SIZE + uint(place[0])] = sum[i];
    }
}

#else

// A simdgroup has all rows of its own columns, as in SimdgroupProduct; operands of 16 values of k stay in registers.
constant constexpr uint PROBE_DEPTH = 16;

[[kernel, max_total_threads_per_threadgroup(PRODUCT_THREADS)]] void probe_matrix(device const act *x [[buffer(0)]],
    device const act *w [[buffer(1)]], device float *y [[buffer(2)]], constant probe_matrix_params &p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]]) {
    constexpr uint pitch = operand_pitch<operand>(PROBE_SIZE);
    constexpr uint rows = PROBE_SIZE / 8, columns = PROBE_SIZE / 8 / PRODUCT_SIMDGROUPS, depth = PROBE_DEPTH / 8;
    threadgroup operand stage[PROBE_SIZE * pitch];
    simdgroup_float8x8 sum[rows][columns];
    simdgroup_matrix<operand, 8, 8> a[rows][depth], b[columns][depth];
#pragma unroll
    for (uint m = 0; m < rows; m++)
#pragma unroll
        for (uint n = 0; n < columns; n++) sum[m][n] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint k = 0; k < PROBE_SIZE; k += PROBE_DEPTH) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < PROBE_SIZE * PROBE_SIZE; i += PRODUCT_THREADS)
            stage[i / PROBE_SIZE * pitch + i % PROBE_SIZE] = operand(x[i]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (uint m = 0; m < rows; m++)
#pragma unroll
            for (uint d = 0; d < depth; d++) simdgroup_load(a[m][d], stage + 8 * m * pitch + k + 8 * d, pitch);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = tid; i < PROBE_SIZE * PROBE_SIZE; i += PRODUCT_THREADS)
            stage[i / PROBE_SIZE * pitch + i % PROBE_SIZE] = operand(w[i]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (uint n = 0; n < columns; n++)
#pragma unroll
            for (uint d = 0; d < depth; d++)
                simdgroup_load(b[n][d], stage + 8 * (sg * columns + n) * pitch + k + 8 * d, pitch, ulong2(0), true);
        for (uint i = 0; i < p.rounds; i++) {
#pragma unroll
            for (uint d = 0; d < depth; d++)
#pragma unroll
                for (uint m = 0; m < rows; m++)
#pragma unroll
                    for (uint n = 0; n < columns; n++)
                        simdgroup_multiply_accumulate(sum[m][n], a[m][d], b[n][d], sum[m][n]);
        }
    }
    y += group * PROBE_SIZE * PROBE_SIZE;
#pragma unroll
    for (uint m = 0; m < rows; m++)
#pragma unroll
        for (uint n = 0; n < columns; n++)
            simdgroup_store(sum[m][n], y + 8 * m * PROBE_SIZE + 8 * (sg * columns + n), PROBE_SIZE);
}

#endif
