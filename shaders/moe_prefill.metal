// SPDX-License-Identifier: Apache-2.0
// Mixture of experts for many rows: moe_gemm_gate_up, moe_gemm_down, moe_combine.
//
// Grid of the products: [blocks of outputs, blocks of the block map], PRODUCT_THREADS threads.  A block of the map is
// tile_m sorted places of one expert; sentinels do nothing.
// Not here: the tile (gemm.h), the matrix unit (matrix.h), the block map (route.metal).
#include "common.h"
#include "gemm.h"
#include "group.h"
#include "moe_tile.h"

[[kernel, max_total_threads_per_threadgroup(PRODUCT_THREADS)]] void moe_gemm_gate_up(
    device const Step *step [[buffer(0)]], device const act *x [[buffer(1)]], device const int *offsets [[buffer(2)]],
    device const int *order [[buffer(3)]], device const int *blocks [[buffer(4)]], device const uchar *w [[buffer(5)]],
    device act *y [[buffer(6)]], constant moe_gemm_gate_up_params &p [[buffer(7)]],
    uint2 block [[threadgroup_position_in_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup operand stage[stage_elements<operand>()];
    const ExpertTile tile = expert_tile(blocks, offsets, block.y);
    if (tile.used == 0) return;
    const TileRows rows = {x, order + tile.first, 0, tile.used, p.active, p.k};
    const uint bytes = matrix_bytes(2 * p.n, p.k, C_BITS, C_GROUP);
    const Matrix m = matrix_at(w + ulong(tile.expert) * bytes, 2 * p.n, p.k, C_BITS, C_GROUP);
    const SwigluRows epilogue = {y + tile.first * p.n + block.x * tile_columns(C_TILE_M, 2), p.n};
    quantised_tile_of<operand, 2, true>(rows, m, p.n, block.x, epilogue, stage, {tid, lane, sg, simdgroups});
}

[[kernel, max_total_threads_per_threadgroup(PRODUCT_THREADS)]] void moe_gemm_down(device const Step *step [[buffer(0)]],
    device const act *x [[buffer(1)]], device const int *offsets [[buffer(2)]], device const int *order [[buffer(3)]],
    device const int *blocks [[buffer(4)]], device const uchar *w [[buffer(5)]], device act *y [[buffer(6)]],
    constant moe_gemm_down_params &p [[buffer(7)]], uint2 block [[threadgroup_position_in_grid]],
    LILY_THREAD_ARGUMENTS) {
    threadgroup operand stage[stage_elements<operand>()];
    const ExpertTile tile = expert_tile(blocks, offsets, block.y);
    if (tile.used == 0) return;
    const TileRows rows = {x, nullptr, tile.first, tile.used, p.active, p.k};
    const uint bytes = matrix_bytes(p.n, p.k, C_BITS, C_GROUP);
    const Matrix m = matrix_at(w + ulong(tile.expert) * bytes, p.n, p.k, C_BITS, C_GROUP);
    const ScatterRows epilogue = {y + block.x * tile_columns(C_TILE_M, 1), order + tile.first, p.n};
    quantised_tile_of<operand, 1, false>(rows, m, p.n, block.x, epilogue, stage, {tid, lane, sg, simdgroups});
}

// hidden is a multiple of four.
kernel void moe_combine(device const Step *step [[buffer(0)]], device const act *y [[buffer(1)]],
    device const float *weights [[buffer(2)]], device const float *logits [[buffer(3)]],
    device const act *shared [[buffer(4)]], device act *x [[buffer(5)]], constant moe_combine_params &p [[buffer(6)]],
    uint row [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
    if (row >= uint(step->rows)) return;
    const float gate = sigmoid(logits[row * (p.experts + 1) + p.experts]);
    y += row * p.active * p.hidden;
    weights += row * p.active;
    for (uint column = 4 * tid; column < p.hidden; column += 4 * threads) {
        float4 sum = 0;
        for (uint a = 0; a < p.active; a++) sum += weights[a] * load4(y + a * p.hidden + column);
        const uint at = row * p.hidden + column;
        const float4 out = (sum + gate * load4(shared + at)) + load4(x + at);
        *(device act4 *)(x + at) = act4(act(out.x), act(out.y), act(out.z), act(out.w));
    }
}
