// SPDX-License-Identifier: Apache-2.0
// Mixture of experts for many rows: moe_gemm_gate_up, moe_gemm_down, moe_combine.
//
// Grids.  moe_gemm_*: x = groups of `tile_n` outputs, y = tiles of the block map; a sentinel's groups do nothing.
// moe_combine: one group a row.  Not here: the block map (route.h), one row (moe_decode.h).
#ifndef LILY_CPU_MOE_PREFILL_H
#define LILY_CPU_MOE_PREFILL_H

#include <stdbool.h>

#include "moe_common.h"

// The rows of one tile of the block map: where they come from and where their results go.
typedef struct {
    const float *x;
    float *y;
    const int32_t *order;
    uint32_t active;
    bool gather; // x[order/active] → y[place]; else x[place] → y[order]
} expert_rows;

INLINE void expert_tile(const product *out, const expert_rows *r, uint32_t tag, uint32_t first, uint32_t rows,
    block_range blocks, cpu_worker *worker) {
    uint8_t *scratch = cpu_scratch(worker, sweep_scratch(out) + 2 * rows * sizeof(float *));
    const float **x = (const float **)(scratch + sweep_scratch(out));
    float **y = (float **)(x + rows);
    for (uint32_t i = 0; i < rows; i++) {
        const size_t place = first + i, order = (uint32_t)r->order[place];
        x[i] = r->x + (r->gather ? order / r->active : place) * out->w.k;
        y[i] = r->y + (r->gather ? place : order) * out->n;
    }
    int ready;
    const packed in = packed_at(cpu_prepared(worker, tag, packed_bytes(&out->w, rows), &ready), rows);
    if (!ready) pack_rows(&out->w, x, &in);
    sweep_rows(out, blocks.begin, blocks.end, &in, y, scratch);
}

// moe_gemm_gate_up and moe_gemm_down have the same parameters and the same places of arguments.
INLINE void expert_groups(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker, bool gate_up) {
    const moe_gemm_down_params *p = call->params;
    const int32_t *offsets = call->arg[moe_gemm_down_OFFSETS], *blocks = call->arg[moe_gemm_down_BLOCKS];
    product out = product_of(call, moe_gemm_down_W, p->n, p->k, gate_up ? SWIGLU : STORE);
    const uint8_t *experts = out.w.data;
    const size_t expert_bytes = (gate_up ? 2 : 1) * padded_bytes(&out.w, p->n);
    const expert_rows rows = {
        call->arg[moe_gemm_down_X], call->arg[moe_gemm_down_Y], call->arg[moe_gemm_down_ORDER], p->active, gate_up};
    const uint32_t width = call->grid[0], tile_m = (uint32_t)call->constant[moe_gemm_down_C_TILE_M];
    for (uint32_t g = begin, next; g < end; g = next) {
        const uint32_t x = g % width, tile = g / width;
        next = end - g < width - x ? end : g + width - x;
        const int32_t expert = blocks[2 * tile], first = blocks[2 * tile + 1];
        if (expert < 0) continue;
        const uint32_t left = (uint32_t)(offsets[expert + 1] - first);
        out.w.data = experts + (size_t)expert * expert_bytes;
        expert_tile(&out, &rows, tile, (uint32_t)first, left < tile_m ? left : tile_m,
            blocks_of_groups(x, x + next - g, p->tile_n, p->n), worker);
    }
}

_Static_assert(sizeof(moe_gemm_gate_up_params) == sizeof(moe_gemm_down_params) &&
        (int)moe_gemm_gate_up_Y == (int)moe_gemm_down_Y && (int)moe_gemm_gate_up_W == (int)moe_gemm_down_W &&
        (int)moe_gemm_gate_up_C_TILE_M == (int)moe_gemm_down_C_TILE_M,
    "expert_groups reads both alike");

SHARED void kernel_moe_gemm_gate_up(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    expert_groups(call, begin, end, worker, true);
}

SHARED void kernel_moe_gemm_down(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    expert_groups(call, begin, end, worker, false);
}

SHARED void combine_row(
    const float *y, const float *weights, uint32_t active, float gate, const float *shared, uint32_t n, float *x) {
    for (uint32_t c = 0; c < n; c += VL) {
        const uint32_t left = n - c < VL ? n - c : VL;
        vf sum = vf_set(0);
        for (uint32_t a = 0; a < active; a++)
            sum = add_expert(sum, weights[a], vf_load_part(y + (size_t)a * n + c, left, 0));
        vf_store_part(
            x + c, left, add_shared(sum, gate, vf_load_part(shared + c, left, 0), vf_load_part(x + c, left, 0)));
    }
}

SHARED void kernel_moe_combine(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const moe_combine_params *p = call->params;
    const Step *step = call->arg[moe_combine_STEP];
    const float *y = call->arg[moe_combine_Y], *weights = call->arg[moe_combine_WEIGHTS];
    const float *logits = call->arg[moe_combine_LOGITS], *shared = call->arg[moe_combine_SHARED];
    float *x = call->arg[moe_combine_X];
    (void)worker;
    for (size_t m = begin; m < end && m < (uint32_t)step->rows; m++) {
        const float gate = sigmoid_one(logits[m * (p->experts + 1) + p->experts]);
        combine_row(y + m * p->active * p->hidden, weights + m * p->active, p->active, gate, shared + m * p->hidden,
            p->hidden, x + m * p->hidden);
    }
}

#endif
