// SPDX-License-Identifier: Apache-2.0
// Experts whose matrices are written to memory as bf16 before they are multiplied: expand, moe_gemm_expanded, the off
// variant of `fused-dequantisation`.
//
// Grid of moe_gemm_expanded: as moe_gemm_down.  Not here: the tile (gemm.h), what these replace (moe_prefill.metal).
#include "common.h"
#include "gemm.h"
#include "group.h"
#include "moe_tile.h"

template <int BITS> inline void expand_row(Matrix m, device bfloat *y, uint row, uint k, uint tid, uint threads) {
    for (uint column = QCOLUMNS * tid; column < k; column += QCOLUMNS * threads) {
        uint words[BITS / 2];
        float x[QCOLUMNS];
        load_words(m.words + row * m.row_bytes + column / 8 * BITS, words);
        const uint g = row * m.row_groups + column / m.group;
        dequantize<BITS>(words, float(m.scales[g]), float(m.biases[g]), x);
#pragma unroll
        for (uint i = 0; i < QCOLUMNS; i += 4)
            *(device bfloat4 *)(y + column + i) =
                bfloat4(bfloat(x[i]), bfloat(x[i + 1]), bfloat(x[i + 2]), bfloat(x[i + 3]));
    }
}

kernel void expand(device const uchar *w [[buffer(0)]], device bfloat *y [[buffer(1)]],
    constant expand_params &p [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
    const uint expert = group / p.n, row = group % p.n;
    if (expert >= p.experts) return;
    const Matrix m = matrix_at(w + ulong(expert) * matrix_bytes(p.n, p.k, C_BITS, C_GROUP), p.n, p.k, C_BITS, C_GROUP);
    y += ulong(group) * p.k;
    if (C_BITS == 8)
        expand_row<8>(m, y, row, p.k, tid, threads);
    else
        expand_row<4>(m, y, row, p.k, tid, threads);
}

// One thread's share of a tile's weight rows that are bf16 in memory; compare WeightStage.
template <typename T, uint WROWS, uint STEP> struct ExpandedStage {
    enum : uint { COLUMNS = STEP / STAGE_THREADS, PITCH = operand_pitch<T>(STEP) };

    device const bfloat *from;
    threadgroup T *to;
    float fetched[COLUMNS / QCOLUMNS][QCOLUMNS];
    uint left;
    bool on;

    static uint row_of(uint tid) { return min(tid / STAGE_THREADS, WROWS - 1); }

    void init(device const bfloat *row, threadgroup T *tile, uint k, uint tid) {
        const uint first = tid % STAGE_THREADS * COLUMNS;
        on = tid < WROWS * STAGE_THREADS;
        from = row + first;
        left = max(k, first) - first;
        to = tile + row_of(tid) * PITCH + first;
    }

    void fetch(uint k) {
        if (!on) return;
#pragma unroll
        for (uint i = 0; i < COLUMNS / QCOLUMNS; i++)
#pragma unroll
            for (uint j = 0; j < QCOLUMNS; j += 4) {
                const uint column = k + i * QCOLUMNS + j;
                const float4 x = STEP == 32 || column < left ? load4(from + column) : float4(0);
                fetched[i][j] = x.x, fetched[i][j + 1] = x.y, fetched[i][j + 2] = x.z, fetched[i][j + 3] = x.w;
            }
    }

    void put() {
        if (!on) return;
#pragma unroll
        for (uint i = 0; i < COLUMNS / QCOLUMNS; i++) put_columns(to + i * QCOLUMNS, fetched[i]);
    }
};

template <uint BM, typename Epilogue>
inline void expanded_tile(TileRows rows, device const bfloat *w, uint n, uint block, Epilogue epilogue,
    threadgroup operand *stage, group_place at) {
    constexpr uint BN = tile_columns(BM, 1);
    typedef typename ProductFor<operand, 1, BM, BN, true>::type Product;
    typedef RowStage<operand, BM, Product::STEP> Rows;
    typedef ExpandedStage<operand, BN, Product::STEP> Weights;
    const uint first_output = block * BN;
    threadgroup operand *w_tile = stage + BM * operand_pitch<operand>(Product::STEP);
    Product product;
    typename Product::Sum first, second;
    product.init(first, second, (threadgroup float *)stage, at.sg, at.lane);
    Rows x_stage;
    x_stage.init(rows, stage, true, at.tid);
    Weights w_stage;
    w_stage.init(w + weight_row(Weights::row_of(at.tid), BN, first_output, n) * rows.k, w_tile, rows.k, at.tid);
    multiply_staged<operand>(product, first, second, x_stage, w_stage, stage, w_tile, rows);
    product.visit(first, second, epilogue, rows.used, min(BN, n - first_output));
}

template <typename Epilogue>
inline void expanded_tile_of(TileRows rows, device const bfloat *w, uint n, uint block, Epilogue epilogue,
    threadgroup operand *stage, group_place at) {
    if (C_TILE_M == 64)
        expanded_tile<64>(rows, w, n, block, epilogue, stage, at);
    else if (C_TILE_M == 32)
        expanded_tile<32>(rows, w, n, block, epilogue, stage, at);
    else
        expanded_tile<16>(rows, w, n, block, epilogue, stage, at);
}

// With `gather` x[order/active] → y[place], else x[place] → y[order].
[[kernel, max_total_threads_per_threadgroup(PRODUCT_THREADS)]] void moe_gemm_expanded(
    device const Step *step [[buffer(0)]], device const act *x [[buffer(1)]], device const int *offsets [[buffer(2)]],
    device const int *order [[buffer(3)]], device const int *blocks [[buffer(4)]], device const bfloat *w [[buffer(5)]],
    device act *y [[buffer(6)]], constant moe_gemm_expanded_params &p [[buffer(7)]],
    uint2 block [[threadgroup_position_in_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup operand stage[stage_elements<operand>()];
    const ExpertTile tile = expert_tile(blocks, offsets, block.y);
    if (tile.used == 0) return;
    const uint column = block.x * tile_columns(C_TILE_M, 1);
    const group_place at = {tid, lane, sg, simdgroups};
    w += (ulong(tile.expert) * p.stride + p.first) * p.k;
    if (p.gather) {
        const TileRows rows = {x, order + tile.first, 0, tile.used, p.active, p.k};
        const StoreRows<act> epilogue = {y + tile.first * p.n + column, p.n};
        expanded_tile_of(rows, w, p.n, block.x, epilogue, stage, at);
    } else {
        const TileRows rows = {x, nullptr, tile.first, tile.used, p.active, p.k};
        const ScatterRows epilogue = {y + column, order + tile.first, p.n};
        expanded_tile_of(rows, w, p.n, block.x, epilogue, stage, at);
    }
}
