// SPDX-License-Identifier: Apache-2.0
// Mixture of experts for one row: the chosen experts' gate and up with their activation, and down with the routing
// weights, the shared expert and the residual.
//
// Not handled: the router's logits and the shared expert's gate/up (gemv.metal), many rows (prefill).

#include "gemv.h"

inline device const uchar *expert_at(device const uchar *w, uint expert, uint rows, uint k) {
    return w + ulong(expert) * matrix_bytes(rows, k, C_BITS, C_GROUP);
}

// The expert that is `place`-th by its logit.  The group that stores the choice takes out all `active` of them.
inline uint choose_expert(device const float *logits, constant moe_gate_up_params &p, uint place, bool store,
    GemvPlace t, device int *ids, device float *weights) {
    TopExperts top;
    top.init(logits, p.experts, t.lane);
    uint chosen = 0, mine = 0;
    const uint count = store ? p.active : place + 1;
    for (uint a = 0; a < count; a++) {
        const uint e = top.next();
        if (a == place) chosen = e;
        if (a == t.lane) mine = e;
    }
    if (store && t.simdgroup == 0) {
        const float weight = route_weight(logits, p.experts, p.active, p.renorm, mine, t.lane);
        if (t.lane < p.active) ids[t.lane] = int(mine), weights[t.lane] = weight;
    }
    return chosen;
}

// `out` is the table's argument act.
[[kernel, max_total_threads_per_threadgroup(GEMV_THREADS)]] void moe_gate_up(device const act *x [[buffer(0)]],
    device const float *norm [[buffer(1)]], device const float *logits [[buffer(2)]],
    device const uchar *w [[buffer(3)]], device act *out [[buffer(4)]], device int *ids [[buffer(5)]],
    device float *weights [[buffer(6)]], constant moe_gate_up_params &p [[buffer(7)]],
    uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float scratch[GEMV_SCRATCH];
    const GemvPlace t = gemv_place(lane, simdgroup, simdgroups, p.rows_per_group, GEMV_ROWS / 2);
    const uint first = group.x * p.rows_per_group + t.first, place = group.y;
    const uint expert = choose_expert(logits, p, place, group.x == 0 && place == 0, t, ids, weights);
    uint row[GEMV_ROWS];
    gate_up_rows(first, p.n, row);
    const float sum = norm_product(x, norm, expert_at(w, expert, 2 * p.n, p.k), p, 2 * p.n, row, t, scratch);
    const float value = swiglu_of(sum);
    if (stores(t, first, GEMV_ROWS / 2, p.n)) out[place * p.n + first + lane / 4] = act(value);
}

// A simdgroup takes whole experts, every parts-th; the shared expert counts as the last.
[[kernel, max_total_threads_per_threadgroup(GEMV_THREADS)]] void moe_down(device const act *in [[buffer(0)]],
    device const int *ids [[buffer(1)]], device const float *weights [[buffer(2)]],
    device const float *logits [[buffer(3)]], device const uchar *w [[buffer(4)]],
    device const act *shared [[buffer(5)]], device const uchar *w_shared [[buffer(6)]], device act *x [[buffer(7)]],
    constant moe_down_params &p [[buffer(8)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float scratch[GEMV_SCRATCH];
    const GemvPlace t = gemv_place(lane, simdgroup, simdgroups, p.rows_per_group, GEMV_ROWS);
    const uint first = group * p.rows_per_group + t.first, column = lane * QCOLUMNS, step = LANES * QCOLUMNS;
    uint row[GEMV_ROWS];
    float sums[GEMV_ROWS] = {};
    rows_from(first, p.n, row);
    for (uint e = t.part; e < p.active; e += t.parts) {
        const Matrix m = matrix_at(expert_at(w, uint(ids[e]), p.n, p.k), p.n, p.k, C_BITS, C_GROUP);
        WeightedInput expert = {{in + e * p.k}, weights[e]};
        if (C_BITS == 4)
            add_rows<4>(m, row, p.k, column, step, expert, sums);
        else
            add_rows<8>(m, row, p.k, column, step, expert, sums);
    }
    if (p.active % t.parts == t.part) {
        const Matrix m = matrix_at(w_shared, p.n, p.ks, C_SHARED_BITS, C_SHARED_GROUP);
        WeightedInput expert = {{shared}, sigmoid(logits[p.experts])};
        if (C_SHARED_BITS == 4)
            add_rows<4>(m, row, p.ks, column, step, expert, sums);
        else
            add_rows<8>(m, row, p.ks, column, step, expert, sums);
    }
    const float sum = gemv_sum(sums, t, scratch);
    if (stores(t, first, GEMV_ROWS, p.n)) x[first + lane / 4] = act(float(x[first + lane / 4]) + sum);
}

// ---- ablations of the fusions ---------------------------------------------------------------------------------------

[[kernel, max_total_threads_per_threadgroup(GEMV_THREADS)]] void moe_gemv(device const act *x [[buffer(0)]],
    device const int *ids [[buffer(1)]], device const uchar *w [[buffer(2)]], device act *y [[buffer(3)]],
    constant moe_gemv_params &p [[buffer(4)]], uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float scratch[GEMV_SCRATCH];
    const GemvPlace t = gemv_place(lane, simdgroup, simdgroups, p.rows_per_group, GEMV_ROWS);
    const uint first = group.x * p.rows_per_group + t.first, e = group.y;
    uint row[GEMV_ROWS];
    float sums[GEMV_ROWS] = {};
#pragma unroll
    for (uint r = 0; r < GEMV_ROWS; r++) row[r] = p.first + min(first + r, p.n - 1);
    PlainInput in = {x + (p.broadcast ? 0 : e * p.k)};
    const Matrix m = matrix_at(expert_at(w, uint(ids[e]), p.stride, p.k), p.stride, p.k, C_BITS, C_GROUP);
    add_product(m, row, p.k, t, in, sums);
    const float sum = gemv_sum(sums, t, scratch);
    if (stores(t, first, GEMV_ROWS, p.n)) y[e * p.n + first + lane / 4] = act(sum);
}
