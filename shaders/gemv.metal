// SPDX-License-Identifier: Apache-2.0
// Decode projections: one row through a quantised matrix.  Bound by memory; how the work is cut stands in gemv.h.
//
// Not handled: several rows (prefill), routed experts (moe_decode.metal).

#include "gemv.h"

[[kernel, max_total_threads_per_threadgroup(GEMV_THREADS)]] void gemv(device const act *x [[buffer(0)]],
    device const uchar *w [[buffer(1)]], device act *y [[buffer(2)]], constant gemv_params &p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float scratch[GEMV_SCRATCH];
    const GemvPlace t = gemv_place(lane, simdgroup, simdgroups, p.rows_per_group, GEMV_ROWS);
    const uint first = group * p.rows_per_group + t.first;
    uint row[GEMV_ROWS];
    float sums[GEMV_ROWS] = {};
    rows_from(first, p.n, row);
    PlainInput in = {x};
    add_product(matrix_at(w, p.n, p.k, C_BITS, C_GROUP), row, p.k, t, in, sums);
    const float sum = gemv_sum(sums, t, scratch);
    if (stores(t, first, GEMV_ROWS, p.n)) y[first + lane / 4] = act(sum);
}

template <typename T, typename Params>
inline void norm_gemv(device const act *x, device const float *norm, device const uchar *w, device T *y,
    constant Params &p, uint group, GemvPlace t, threadgroup float *scratch) {
    const uint first = group * p.rows_per_group + t.first;
    uint row[GEMV_ROWS];
    rows_from(first, p.n, row);
    const float sum = norm_product(x, norm, w, p, p.n, row, t, scratch);
    if (stores(t, first, GEMV_ROWS, p.n)) y[first + t.lane / 4] = T(sum);
}

[[kernel, max_total_threads_per_threadgroup(GEMV_THREADS)]] void gemv_norm(device const act *x [[buffer(0)]],
    device const float *norm [[buffer(1)]], device const uchar *w [[buffer(2)]], device act *y [[buffer(3)]],
    constant gemv_norm_params &p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float scratch[GEMV_SCRATCH];
    norm_gemv(x, norm, w, y, p, group, gemv_place(lane, simdgroup, simdgroups, p.rows_per_group, GEMV_ROWS), scratch);
}

[[kernel, max_total_threads_per_threadgroup(GEMV_THREADS)]] void gemv_norm_f32(device const act *x [[buffer(0)]],
    device const float *norm [[buffer(1)]], device const uchar *w [[buffer(2)]], device float *y [[buffer(3)]],
    constant gemv_norm_f32_params &p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float scratch[GEMV_SCRATCH];
    norm_gemv(x, norm, w, y, p, group, gemv_place(lane, simdgroup, simdgroups, p.rows_per_group, GEMV_ROWS), scratch);
}

[[kernel, max_total_threads_per_threadgroup(GEMV_THREADS)]] void gemv_norm_swiglu(device const act *x [[buffer(0)]],
    device const float *norm [[buffer(1)]], device const uchar *w [[buffer(2)]], device act *y [[buffer(3)]],
    constant gemv_norm_swiglu_params &p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float scratch[GEMV_SCRATCH];
    const GemvPlace t = gemv_place(lane, simdgroup, simdgroups, p.rows_per_group, GEMV_ROWS / 2);
    const uint first = group * p.rows_per_group + t.first;
    uint row[GEMV_ROWS];
    gate_up_rows(first, p.n, row);
    const float value = swiglu_of(norm_product(x, norm, w, p, 2 * p.n, row, t, scratch));
    if (stores(t, first, GEMV_ROWS / 2, p.n)) y[first + lane / 4] = act(value);
}

[[kernel, max_total_threads_per_threadgroup(GEMV_THREADS)]] void gemv_residual(device const act *y [[buffer(0)]],
    device const uchar *w [[buffer(1)]], device act *x [[buffer(2)]], constant gemv_residual_params &p [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float scratch[GEMV_SCRATCH];
    const GemvPlace t = gemv_place(lane, simdgroup, simdgroups, p.rows_per_group, GEMV_ROWS);
    const uint first = group * p.rows_per_group + t.first;
    uint row[GEMV_ROWS];
    float sums[GEMV_ROWS] = {};
    rows_from(first, p.n, row);
    PlainInput in = {y};
    add_product(matrix_at(w, p.n, p.k, C_BITS, C_GROUP), row, p.k, t, in, sums);
    const float sum = gemv_sum(sums, t, scratch);
    if (stores(t, first, GEMV_ROWS, p.n)) x[first + lane / 4] = act(float(x[first + lane / 4]) + sum);
}

[[kernel, max_total_threads_per_threadgroup(GEMV_THREADS)]] void gemv_gated_residual(device const act *o [[buffer(0)]],
    device const act *proj [[buffer(1)]], device const uchar *w [[buffer(2)]], device act *x [[buffer(3)]],
    constant gemv_gated_residual_params &p [[buffer(4)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float scratch[GEMV_SCRATCH];
    const GemvPlace t = gemv_place(lane, simdgroup, simdgroups, p.rows_per_group, GEMV_ROWS);
    const uint first = group * p.rows_per_group + t.first;
    uint row[GEMV_ROWS];
    float sums[GEMV_ROWS] = {};
    rows_from(first, p.n, row);
    GatedInput in = {{o}, {proj}, p.dim};
    add_product(matrix_at(w, p.n, p.k, C_BITS, C_GROUP), row, p.k, t, in, sums);
    const float sum = gemv_sum(sums, t, scratch);
    if (stores(t, first, GEMV_ROWS, p.n)) x[first + lane / 4] = act(float(x[first + lane / 4]) + sum);
}
