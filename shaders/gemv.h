// SPDX-License-Identifier: Apache-2.0
// The product of a quantised matrix with one row, for the decode kernels of gemv.metal and moe_decode.metal.
//
// A simdgroup computes GEMV_ROWS rows: its lanes walk along the columns, QCOLUMNS at a time, and load the words, scales
// and biases of all rows before they use any.  y = Σ scale·Σq·x + bias·Σx.  A group's simdgroups either take different
// rows or share the columns of the same ones (`parts`), which fills the GPU where there are few rows.
// RMSNorm costs no pass of its own: y = rsqrt(mean x² + eps) · W·(x∘norm), and Σx² is summed up on the way.
// Not handled: several rows of x (prefill).
#ifndef LILY_GEMV_H
#define LILY_GEMV_H

#include "common.h"

constant constexpr uint GEMV_ROWS = 8;      // rows of the matrix a simdgroup computes
constant constexpr uint GEMV_SUMS = 9;      // and the sum of squares
constant constexpr uint GEMV_THREADS = 256; // of a group, at most
constant constexpr uint GEMV_SCRATCH = GEMV_THREADS / LANES * GEMV_SUMS;

// A simdgroup's place in its group.
struct GemvPlace {
    uint lane, simdgroup;
    uint first; // output, within the group
    uint part;  // which share of the columns
    uint parts;
};

// `outputs` of `rows_per_group` are one simdgroup's; the number of simdgroups is a multiple of the number of such
// blocks.
inline GemvPlace gemv_place(uint lane, uint simdgroup, uint simdgroups, uint rows_per_group, uint outputs) {
    GemvPlace t;
    t.lane = lane, t.simdgroup = simdgroup;
    t.parts = simdgroups * outputs / rows_per_group;
    t.first = simdgroup / t.parts * outputs;
    t.part = simdgroup % t.parts;
    return t;
}

// ---- what is multiplied: QCOLUMNS values from `column` on -----------------------------------------------------------

struct PlainInput {
    device const act *x;

    void load(uint column, thread float (&out)[QCOLUMNS]) {
        float a[8], b[8];
        load8(x + column, a);
        load8(x + column + 8, b);
#pragma unroll
        for (uint i = 0; i < 8; i++) out[i] = a[i], out[i + 8] = b[i];
    }
};

struct NormInput {
    PlainInput plain;
    device const float *norm;
    float squares;

    void load(uint column, thread float (&out)[QCOLUMNS]) {
        plain.load(column, out);
#pragma unroll
        for (uint i = 0; i < QCOLUMNS; i += 4) {
            const float4 w = *(device const float4 *)(norm + column + i);
            squares = fma(out[i], out[i], squares), squares = fma(out[i + 1], out[i + 1], squares);
            squares = fma(out[i + 2], out[i + 2], squares), squares = fma(out[i + 3], out[i + 3], squares);
            out[i] *= w.x, out[i + 1] *= w.y, out[i + 2] *= w.z, out[i + 3] *= w.w;
        }
    }
};

struct WeightedInput {
    PlainInput plain;
    float weight;

    void load(uint column, thread float (&out)[QCOLUMNS]) {
        plain.load(column, out);
#pragma unroll
        for (uint i = 0; i < QCOLUMNS; i++) out[i] *= weight;
    }
};

// o·sigmoid(gate), where a head of `dim` columns (a multiple of QCOLUMNS) has its gate behind its query in proj.
struct GatedInput {
    PlainInput o, proj;
    uint dim;

    void load(uint column, thread float (&out)[QCOLUMNS]) {
        float gate[QCOLUMNS];
        o.load(column, out);
        proj.load(column + (column / dim + 1) * dim, gate);
#pragma unroll
        for (uint i = 0; i < QCOLUMNS; i++) out[i] *= sigmoid(gate[i]);
    }
};

// ---- the product ----------------------------------------------------------------------------------------------------

// sums[r] += this lane's columns of W[row[r]]·x.
template <int BITS, typename Input>
inline void add_rows(Matrix m, thread const uint (&row)[GEMV_ROWS], uint k, uint first, uint step, thread Input &in,
    thread float (&sums)[GEMV_ROWS]) {
    for (uint column = first; column < k; column += step) {
        uint w[GEMV_ROWS][BITS / 2];
        float scale[GEMV_ROWS], bias[GEMV_ROWS], x[QCOLUMNS];
        const uint at = column / 8 * BITS, group = column / m.group;
#pragma unroll
        for (uint r = 0; r < GEMV_ROWS; r++) {
            load_words(m.words + row[r] * m.row_bytes + at, w[r]);
            scale[r] = float(m.scales[row[r] * m.row_groups + group]);
            bias[r] = float(m.biases[row[r] * m.row_groups + group]);
        }
        in.load(column, x);
        const float total = prescale<BITS>(x);
#pragma unroll
        for (uint r = 0; r < GEMV_ROWS; r++)
            sums[r] = fma(scale[r], dot_words<BITS>(w[r], x), fma(bias[r], total, sums[r]));
    }
}

template <typename Input>
inline void add_product(Matrix m, thread const uint (&row)[GEMV_ROWS], uint k, GemvPlace t, thread Input &in,
    thread float (&sums)[GEMV_ROWS]) {
    const uint first = (t.part * LANES + t.lane) * QCOLUMNS, step = t.parts * LANES * QCOLUMNS;
    if (C_BITS == 4)
        add_rows<4>(m, row, k, first, step, in, sums);
    else
        add_rows<8>(m, row, k, first, step, in, sums);
}

// Over lanes and over the simdgroups that share the columns: lane l of part 0 gets the sum of row l/4.  `squares` is
// summed up alike.  Every thread of the group must come here.
inline float gemv_sum(thread float (&sums)[GEMV_ROWS], thread float &squares, GemvPlace t, threadgroup float *scratch) {
    float sum = scatter_sum<GEMV_ROWS>(sums, t.lane);
    squares = simd_sum(squares);
    if (t.parts == 1) return sum;
    threadgroup float *mine = scratch + t.simdgroup * GEMV_SUMS;
    if (t.lane % 4 == 0) mine[t.lane / 4] = sum;
    if (t.lane == 0) mine[GEMV_ROWS] = squares;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t.part == 0)
        for (uint i = 1; i < t.parts; i++) {
            sum += mine[i * GEMV_SUMS + t.lane / 4];
            squares += mine[i * GEMV_SUMS + GEMV_ROWS];
        }
    return sum;
}

inline float gemv_sum(thread float (&sums)[GEMV_ROWS], GemvPlace t, threadgroup float *scratch) {
    float unused = 0;
    return gemv_sum(sums, unused, t, scratch);
}

// GEMV_ROWS rows from `first` on; beyond the last row it is read again, and not stored.
inline void rows_from(uint first, uint n, thread uint (&row)[GEMV_ROWS]) {
#pragma unroll
    for (uint r = 0; r < GEMV_ROWS; r++) row[r] = min(first + r, n - 1);
}

// Half as many rows of G, and as many of U, which follows after n rows.
inline void gate_up_rows(uint first, uint n, thread uint (&row)[GEMV_ROWS]) {
#pragma unroll
    for (uint r = 0; r < GEMV_ROWS / 2; r++) {
        row[r] = min(first + r, n - 1);
        row[r + GEMV_ROWS / 2] = n + row[r];
    }
}

// Whether this lane stores an output, and which: row = first + lane / 4.
inline bool stores(GemvPlace t, uint first, uint outputs, uint n) {
    return t.part == 0 && t.lane % 4 == 0 && t.lane / 4 < outputs && first + t.lane / 4 < n;
}

// W·rmsnorm(x) of a simdgroup's rows, as gemv_sum leaves it.
template <typename Params>
inline float norm_product(device const act *x, device const float *norm, device const uchar *w, constant Params &p,
    uint rows, thread const uint (&row)[GEMV_ROWS], GemvPlace t, threadgroup float *scratch) {
    float sums[GEMV_ROWS] = {};
    NormInput in = {{x}, norm, 0};
    add_product(matrix_at(w, rows, p.k, C_BITS, C_GROUP), row, p.k, t, in, sums);
    const float sum = gemv_sum(sums, in.squares, t, scratch);
    return sum * precise::rsqrt(in.squares / float(p.k) + p.eps);
}

// silu(g)·u of output lane/4, for the lanes of the first half: u was summed up half a simdgroup further.
inline float swiglu_of(float sum) { return silu(sum) * simd_shuffle_xor(sum, LANES / 2); }

#endif
