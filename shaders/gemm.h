// SPDX-License-Identifier: Apache-2.0
// Tiles of rows times a quantised matrix: operands are brought into threadgroup memory, weights dequantised on the way, so
// that the expanded matrix never exists in memory.
//
// A tile is BM rows by BN outputs; k is a multiple of 32 (the smallest quantisation group).  The words of the next step are
// fetched into registers before this one is multiplied.  Rows and columns beyond the matrices repeat the last one: their
// products are not stored.
// Not here: which rows and which matrix (gemm.metal, moe_prefill.metal), the multiplication (matrix.h).
#ifndef LILY_GEMM_H
#define LILY_GEMM_H

#include "common.h"
#include "group.h"
#include "matrix.h"
#include "tensor.h"

// Threads that stage one row of an operand, half of a step's columns each.
constant constexpr uint STAGE_THREADS = 2;

// Outputs of a tile, by its rows: small tiles are bound by memory and want many threadgroups.  Two parts share the budget.
// Must match Policy.tile_columns in lily/policy.py.
constexpr uint tile_columns(uint rows, uint parts) { return rows <= 16 || parts == 2 ? 32 : 64; }

// Elements of threadgroup memory for both operands of the largest tile.
constant constexpr uint TILE_ROWS = 64;
template <typename T> constexpr uint stage_elements() {
    return 2 * TILE_ROWS * operand_pitch<T>(ProductFor<T, 1, TILE_ROWS, TILE_ROWS, true>::type::STEP);
}

template <typename T> inline void put_columns(threadgroup T *to, thread const float (&x)[QCOLUMNS]) {
#pragma unroll
    for (uint i = 0; i < QCOLUMNS; i += 4)
        *(threadgroup vec<T, 4> *)(to + i) = vec<T, 4>(T(x[i]), T(x[i + 1]), T(x[i + 2]), T(x[i + 3]));
}

// ---- rows -----------------------------------------------------------------------------------------------------------

// One thread's share of a tile's rows: threads are taken from the threadgroup's end, those of the weights from its start.
template <typename T, uint BM, uint STEP> struct RowStage {
    enum : uint { COLUMNS = STEP / STAGE_THREADS, PITCH = operand_pitch<T>(STEP) };

    device const act *from;
    threadgroup T *to;
    act4 fetched[COLUMNS / 4];
    uint left; // columns of the matrix from the thread's first one on
    bool on;

    // The row of the tile that thread `tid` stages.
    static uint row_of(uint tid) { return min((PRODUCT_THREADS - 1 - tid) / STAGE_THREADS, BM - 1); }

    void init(TileRows rows, threadgroup T *tile, bool staged, uint tid) {
        const uint t = PRODUCT_THREADS - 1 - tid, first = t % STAGE_THREADS * COLUMNS;
        on = staged && t < BM * STAGE_THREADS;
        from = rows.row(row_of(tid)) + first;
        left = max(rows.k, first) - first;
        to = tile + row_of(tid) * PITCH + first;
    }

    void fetch(uint k) {
        if (!on) return;
#pragma unroll
        for (uint i = 0; i < COLUMNS / 4; i++)
            fetched[i] = STEP == 32 || k + 4 * i < left ? *(device const act4 *)(from + k + 4 * i) : act4(act(0.0f));
    }

    void put() {
        if (!on) return;
#pragma unroll
        for (uint i = 0; i < COLUMNS / 4; i++) {
            const act4 x = fetched[i];
            *(threadgroup vec<T, 4> *)(to + 4 * i) = vec<T, 4>(T(x.x), T(x.y), T(x.z), T(x.w));
        }
    }
};

// ---- weights --------------------------------------------------------------------------------------------------------

// One thread's share of a tile's WROWS weight rows.
template <typename T, uint WROWS, int BITS, uint STEP> struct WeightStage {
    enum : uint { COLUMNS = STEP / STAGE_THREADS, PITCH = operand_pitch<T>(STEP) };

    device const uchar *words; // of the thread's row, from its first column on
    device const bfloat *scales;
    device const bfloat *biases;
    threadgroup T *to;
    uint fetched[COLUMNS / QCOLUMNS][BITS / 2];
    float scale, bias;
    uint first, group, columns;
    bool on;

    static uint row_of(uint tid) { return min(tid / STAGE_THREADS, WROWS - 1); }

    // `row` of the matrix, the one of the tile being row_of(tid).
    void init(Matrix w, uint row, threadgroup T *tile, uint k, uint tid) {
        first = tid % STAGE_THREADS * COLUMNS;
        columns = k;
        on = tid < WROWS * STAGE_THREADS;
        words = w.words + row * w.row_bytes + first / 8 * BITS;
        scales = w.scales + row * w.row_groups;
        biases = w.biases + row * w.row_groups;
        group = w.group;
        to = tile + row_of(tid) * PITCH + first;
    }

    // Columns beyond the matrix become zeros: the thread's share of them is all or nothing.
    void fetch(uint k) {
        scale = bias = 0;
        if (!on || (STEP > 32 && k + first >= columns)) return;
#pragma unroll
        for (uint i = 0; i < COLUMNS / QCOLUMNS; i++) load_words(words + (k + i * QCOLUMNS) / 8 * BITS, fetched[i]);
        scale = float(scales[(k + first) / group]);
        bias = float(biases[(k + first) / group]);
    }

    void put() {
        if (!on) return;
#pragma unroll
        for (uint i = 0; i < COLUMNS / QCOLUMNS; i++) {
            float x[QCOLUMNS];
            dequantize<BITS>(fetched[i], scale, bias, x);
            put_columns(to + i * QCOLUMNS, x);
        }
    }
};

// ---- the loop over k ------------------------------------------------------------------------------------------------

// Sums of rows · weightsᵀ; x_tile and w_tile are where the stages put their operands.
template <typename T, typename Product, typename Sum, typename Rows, typename Weights>
inline void multiply_staged(thread Product &product, thread Sum &first, thread Sum &second, thread Rows &x,
    thread Weights &w, threadgroup T *x_tile, threadgroup T *w_tile, TileRows rows) {
    x.fetch(0);
    w.fetch(0);
    for (uint at = 0; at < rows.k; at += Product::STEP) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        x.put();
        w.put();
        if (at + Product::STEP < rows.k) {
            x.fetch(at + Product::STEP);
            w.fetch(at + Product::STEP);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        product.step(first, second, x_tile, w_tile, rows, at);
    }
}

// ---- epilogues: what becomes of an output ---------------------------------------------------------------------------

// y[m] = the product.
template <typename Y> struct StoreRows {
    device Y *y; // first output of the tile's row 0
    uint pitch;

    void operator()(uint m, uint n, thread const float (&v)[1]) const { y[m * pitch + n] = Y(v[0]); }
};

// x[m] += the product.
struct AddRows {
    device act *x;
    uint pitch;

    void operator()(uint m, uint n, thread const float (&v)[1]) const {
        x[m * pitch + n] = act(float(x[m * pitch + n]) + v[0]);
    }
};

// y[m] = silu(gate)·up.
struct SwigluRows {
    device act *y;
    uint pitch;

    void operator()(uint m, uint n, thread const float (&v)[2]) const { y[m * pitch + n] = act(silu(v[0]) * v[1]); }
};

// y[order[m]] = the product.
struct ScatterRows {
    device act *y;           // first output of row 0
    device const int *order; // of the tile's row 0
    uint pitch;

    void operator()(uint m, uint n, thread const float (&v)[1]) const { y[uint(order[m]) * pitch + n] = act(v[0]); }
};

// ---- one tile -------------------------------------------------------------------------------------------------------

// Row of a stacked matrix (part p at rows p·n and on) that is tile row r of the tile with first output `first`.
inline uint weight_row(uint r, uint columns, uint first, uint n) {
    return r / columns * n + min(first + r % columns, n - 1);
}

template <typename T, uint PARTS, bool GATHER, uint BM, int BITS, typename Epilogue>
inline void quantised_tile(
    TileRows rows, Matrix w, uint n, uint first_output, Epilogue epilogue, threadgroup T *stage, group_place at) {
    constexpr uint BN = tile_columns(BM, PARTS);
    typedef typename ProductFor<T, PARTS, BM, BN, GATHER>::type Product;
    typedef RowStage<T, BM, Product::STEP> Rows;
    typedef WeightStage<T, PARTS * BN, BITS, Product::STEP> Weights;
    threadgroup T *w_tile = stage + BM * operand_pitch<T>(Product::STEP);
    Product product;
    typename Product::Sum first, second;
    product.init(first, second, (threadgroup float *)stage, at.sg, at.lane);
    Rows x_stage;
    x_stage.init(rows, stage, Product::STAGED != 0, at.tid);
    Weights w_stage;
    w_stage.init(w, weight_row(Weights::row_of(at.tid), BN, first_output, n), w_tile, rows.k, at.tid);
    multiply_staged<T>(product, first, second, x_stage, w_stage, stage, w_tile, rows);
    product.visit(first, second, epilogue, rows.used, min(BN, n - first_output));
}

// The instance for this pipeline's tile and bits: constants, so that a small tile does not pay for a large one's registers.
template <typename T, uint PARTS, bool GATHER, typename Epilogue>
inline void quantised_tile_sized(
    TileRows rows, Matrix w, uint n, uint block, Epilogue epilogue, threadgroup T *stage, group_place at) {
#define LILY_TILE(BM, BITS) \
    quantised_tile<T, PARTS, GATHER, BM, BITS>(rows, w, n, block * tile_columns(BM, PARTS), epilogue, stage, at)
    if (C_BITS == 8) {
        if (C_TILE_M == 64)
            LILY_TILE(64, 8);
        else if (C_TILE_M == 32)
            LILY_TILE(32, 8);
        else
            LILY_TILE(16, 8);
    } else {
        if (C_TILE_M == 64)
            LILY_TILE(64, 4);
        else if (C_TILE_M == 32)
            LILY_TILE(32, 4);
        else
            LILY_TILE(16, 4);
    }
#undef LILY_TILE
}

// With groups of 32 columns k may end within a step of the tensor path; rows are then staged, with zeros after their end.
template <typename T, uint PARTS, bool GATHER, typename Epilogue>
inline void quantised_tile_of(
    TileRows rows, Matrix w, uint n, uint block, Epilogue epilogue, threadgroup T *stage, group_place at) {
    if (C_GROUP == 32)
        quantised_tile_sized<T, PARTS, true>(rows, w, n, block, epilogue, stage, at);
    else
        quantised_tile_sized<T, PARTS, GATHER>(rows, w, n, block, epilogue, stage, at);
}

#endif
