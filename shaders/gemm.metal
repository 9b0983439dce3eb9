// SPDX-License-Identifier: Apache-2.0
// Dense quantised products of many rows: gemm, gemm_f32, gemm_swiglu, gemm_residual.
//
// Grid: [blocks of outputs, blocks of tile_m rows], PRODUCT_THREADS threads; a block of outputs is tile_columns of them.
// Router and head (gemm_f32) multiply in float32, whatever the operand type of the GPU.
// Not here: the tile (gemm.h), the matrix unit (matrix.h), experts (moe_prefill.metal), single rows (gemv.metal).
#include "common.h"
#include "gemm.h"
#include "group.h"

// Rows of the threadgroup's block; none if the block begins beyond `rows`.
inline TileRows block_rows(device const act *x, uint block, uint rows, uint k) {
    const uint tile_m = C_TILE_M, first = block * tile_m;
    return {x, nullptr, first, first < rows ? min(tile_m, rows - first) : 0, 1, k};
}

[[kernel, max_total_threads_per_threadgroup(PRODUCT_THREADS)]] void gemm(device const Step *step [[buffer(0)]],
    device const act *x [[buffer(1)]], device const uchar *w [[buffer(2)]], device act *y [[buffer(3)]],
    constant gemm_params &p [[buffer(4)]], uint2 block [[threadgroup_position_in_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup operand stage[stage_elements<operand>()];
    const TileRows rows = block_rows(x, block.y, uint(step->rows), p.k);
    if (rows.used == 0) return;
    const uint column = p.column + block.x * tile_columns(C_TILE_M, 1);
    const StoreRows<act> epilogue = {y + rows.first * p.pitch + column, p.pitch};
    quantised_tile_of<operand, 1, false>(
        rows, matrix_at(w, p.n, p.k, C_BITS, C_GROUP), p.n, block.x, epilogue, stage, {tid, lane, sg, simdgroups});
}

[[kernel, max_total_threads_per_threadgroup(PRODUCT_THREADS)]] void gemm_f32(device const Step *step [[buffer(0)]],
    device const act *x [[buffer(1)]], device const uchar *w [[buffer(2)]], device float *y [[buffer(3)]],
    constant gemm_f32_params &p [[buffer(4)]], uint2 block [[threadgroup_position_in_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup float stage[stage_elements<float>()];
    const uint all = uint(step->rows), window = all > p.first ? min(all - p.first, p.limit) : 0;
    const TileRows rows = block_rows(x + p.first * p.k, block.y, window, p.k);
    if (rows.used == 0) return;
    const uint column = p.column + block.x * tile_columns(C_TILE_M, 1);
    const StoreRows<float> epilogue = {y + rows.first * p.pitch + column, p.pitch};
    quantised_tile_of<float, 1, false>(
        rows, matrix_at(w, p.n, p.k, C_BITS, C_GROUP), p.n, block.x, epilogue, stage, {tid, lane, sg, simdgroups});
}

[[kernel, max_total_threads_per_threadgroup(PRODUCT_THREADS)]] void gemm_swiglu(device const Step *step [[buffer(0)]],
    device const act *x [[buffer(1)]], device const uchar *w [[buffer(2)]], device act *y [[buffer(3)]],
    constant gemm_swiglu_params &p [[buffer(4)]], uint2 block [[threadgroup_position_in_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup operand stage[stage_elements<operand>()];
    const TileRows rows = block_rows(x, block.y, uint(step->rows), p.k);
    if (rows.used == 0) return;
    const SwigluRows epilogue = {y + rows.first * p.n + block.x * tile_columns(C_TILE_M, 2), p.n};
    quantised_tile_of<operand, 2, false>(
        rows, matrix_at(w, 2 * p.n, p.k, C_BITS, C_GROUP), p.n, block.x, epilogue, stage, {tid, lane, sg, simdgroups});
}

[[kernel, max_total_threads_per_threadgroup(PRODUCT_THREADS)]] void gemm_residual(device const Step *step [[buffer(0)]],
    device const act *y [[buffer(1)]], device const uchar *w [[buffer(2)]], device act *x [[buffer(3)]],
    constant gemm_residual_params &p [[buffer(4)]], uint2 block [[threadgroup_position_in_grid]],
    LILY_THREAD_ARGUMENTS) {
    threadgroup operand stage[stage_elements<operand>()];
    const TileRows rows = block_rows(y, block.y, uint(step->rows), p.k);
    if (rows.used == 0) return;
    const AddRows epilogue = {x + rows.first * p.n + block.x * tile_columns(C_TILE_M, 1), p.n};
    quantised_tile_of<operand, 1, false>(
        rows, matrix_at(w, p.n, p.k, C_BITS, C_GROUP), p.n, block.x, epilogue, stage, {tid, lane, sg, simdgroups});
}
