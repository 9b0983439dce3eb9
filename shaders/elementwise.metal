// SPDX-License-Identifier: Apache-2.0
// Kernels that move or scale rows: embed, rmsnorm, last_row, swiglu.
//
// Not handled: norms fused into a projection (gemv.h) or a head (gdn.metal, attention_decode.metal).

#include "common.h"

// Words of the table are taken one by one: a row is short, and its threads are many.
template <int BITS>
inline void embed_row(
    device const uchar *table, uint id, constant embed_params &p, device act *out, uint thread_index, uint threads) {
    const Matrix m = matrix_at(table, p.vocab, p.hidden, BITS, C_GROUP);
    device const uint *words = (device const uint *)(m.words + id * m.row_bytes);
    for (uint i = thread_index; i < p.hidden * BITS / 32; i += threads) {
        const uint column = i * (32 / BITS), group = id * m.row_groups + column / m.group, word = words[i];
        const float scale = float(m.scales[group]), bias = float(m.biases[group]);
#pragma unroll
        for (uint j = 0; j < 32 / BITS; j += 4) {
            const uint4 q =
                uint4(word >> (BITS * j), word >> (BITS * (j + 1)), word >> (BITS * (j + 2)), word >> (BITS * (j + 3)));
            const float4 value = fma(float4(q & ((1u << BITS) - 1)), float4(scale), float4(bias));
            *(device act4 *)(out + column + j) = act4(value);
        }
    }
}

kernel void embed(device const Step *step [[buffer(0)]], device const int *ids [[buffer(1)]],
    device const uchar *table [[buffer(2)]], device act *x [[buffer(3)]], constant embed_params &p [[buffer(4)]],
    uint m [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    if (m >= uint(step->rows)) return;
    const uint id = uint(ids[m]);
    if (C_BITS == 4)
        embed_row<4>(table, id, p, x + m * p.hidden, thread_index, threads);
    else
        embed_row<8>(table, id, p, x + m * p.hidden, thread_index, threads);
}

kernel void rmsnorm(device const Step *step [[buffer(0)]], device const act *x [[buffer(1)]],
    device const float *norm [[buffer(2)]], device act *y [[buffer(3)]], constant rmsnorm_params &p [[buffer(4)]],
    uint m [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float partial[LANES];
    if (m >= uint(step->rows)) return;
    x += m * p.k, y += m * p.k;
    float squares = 0;
    for (uint i = 4 * thread_index; i < p.k; i += 4 * threads) {
        const float4 v = load4(x + i);
        squares += dot(v, v);
    }
    squares = simd_sum(squares);
    if (lane == 0) partial[simdgroup] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float total = simd_sum(lane < simdgroups ? partial[lane] : 0.0f);
    const float scale = precise::rsqrt(total / float(p.k) + p.eps);
    for (uint i = 4 * thread_index; i < p.k; i += 4 * threads)
        *(device act4 *)(y + i) = act4(load4(x + i) * scale * *(device const float4 *)(norm + i));
}

kernel void last_row(device const Step *step [[buffer(0)]], device const act *x [[buffer(1)]],
    device act *y [[buffer(2)]], constant last_row_params &p [[buffer(3)]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
    x += uint(step->rows - 1) * p.hidden;
    for (uint i = 4 * thread_index; i < p.hidden; i += 4 * threads)
        *(device act4 *)(y + i) = *(device const act4 *)(x + i);
}

kernel void swiglu(device const act *gate [[buffer(0)]], device const act *up [[buffer(1)]],
    device act *y [[buffer(2)]], constant swiglu_params &p [[buffer(3)]], uint m [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
    if (m >= p.rows) return;
    for (uint i = thread_index; i < p.n; i += threads) {
        const uint at = m * p.n + i;
        y[at] = act(silu(float(gate[at])) * float(up[at]));
    }
}
