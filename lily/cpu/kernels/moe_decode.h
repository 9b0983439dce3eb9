// SPDX-License-Identifier: Apache-2.0
// Mixture of experts for one row: moe_gate_up, moe_down, moe_gemv (ablation `expert-fusion`).
//
// Grids.  moe_gate_up, moe_gemv: x = groups of `rows_per_group` outputs, y = place among the active experts.  moe_down: x
// only.  Not here: the router's logits and the shared expert's gate and up (gemv.h), many rows (moe_prefill.h).
#ifndef LILY_CPU_MOE_DECODE_H
#define LILY_CPU_MOE_DECODE_H

#include "gemv.h"
#include "moe_common.h"
#include "route.h"

SHARED void kernel_moe_gate_up(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const moe_gate_up_params *p = call->params;
    product out = product_of(call, moe_gate_up_W, p->n, p->k, SWIGLU);
    const uint8_t *experts = out.w.data;
    const size_t panel = panel_bytes(&out.w, 1), row_bytes = p->k * sizeof(float);
    int ready;
    float *row = cpu_prepared(worker, 0, row_bytes + panel + 8 * p->active, &ready);
    uint8_t *packed_row = (uint8_t *)row + row_bytes;
    int32_t *ids = (int32_t *)(packed_row + panel);
    float *weights = (float *)(ids + p->active);
    if (!ready) {
        norm_row(call->arg[moe_gate_up_X], call->arg[moe_gate_up_NORM], p->k, p->eps, row);
        pack_one(&out.w, row, packed_row);
        route_select(call->arg[moe_gate_up_LOGITS], p->experts, p->active, p->renorm, ids, weights);
    }
    if (begin == 0) {
        memcpy(call->arg[moe_gate_up_IDS], ids, p->active * sizeof *ids);
        memcpy(call->arg[moe_gate_up_WEIGHTS], weights, p->active * sizeof *weights);
    }
    float *act = call->arg[moe_gate_up_ACT];
    const uint32_t width = call->grid[0];
    for (uint32_t g = begin, next; g < end; g = next) {
        const uint32_t x = g % width, e = g / width;
        next = end - g < width - x ? end : g + width - x;
        out.w.data = experts + (size_t)ids[e] * 2 * padded_bytes(&out.w, p->n);
        sweep_groups(&out, x, x + next - g, p->rows_per_group, packed_row, act + (size_t)e * p->n);
    }
}

#define DOWN_BLOCKS 64 // of outputs that are summed over the experts at a time: long runs in each expert

// sums[b] += weight·(W·x) for `count` blocks from `first` on.
INLINE void add_expert_blocks(
    const quantised *w, uint32_t first, uint32_t count, const void *panel, float weight, lanes *sums) {
    for (uint32_t b = 0; b < count; b += 2) {
        lanes out[2];
        if (b + 1 < count)
            tile_pair(w, block_at(w, first + b), block_bytes(w), panel, out);
        else
            tile_one(w, block_at(w, first + b), panel, out);
        for (uint32_t i = 0; i < 2 && b + i < count; i++)
            for (int v = 0; v < LANES / VL; v++)
                sums[b + i].part[v] = add_expert(sums[b + i].part[v], weight, out[i].part[v]);
    }
}

INLINE void add_shared_block(
    lanes sum, float gate, const quantised *w, uint32_t block, const void *panel, uint32_t n, float *x) {
    const uint32_t left = n - block * BLOCK_ROWS, count = left < BLOCK_ROWS ? left : BLOCK_ROWS;
    float row[BLOCK_ROWS] = {0};
    lanes shared;
    tile_one(w, block_at(w, block), panel, &shared);
    memcpy(row, x + (size_t)block * BLOCK_ROWS, count * sizeof *x);
    for (int v = 0; v < LANES / VL; v++)
        vf_store(row + v * VL, add_shared(sum.part[v], gate, shared.part[v], vf_load(row + v * VL)));
    memcpy(x + (size_t)block * BLOCK_ROWS, row, count * sizeof *x);
}

SHARED void kernel_moe_down(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const moe_down_params *p = call->params;
    quantised w = product_of(call, moe_down_W, p->n, p->k, STORE).w;
    const quantised shared = {call->arg[moe_down_W_SHARED], p->ks, (uint32_t)call->constant[moe_down_C_SHARED_BITS],
        (uint32_t)call->constant[moe_down_C_SHARED_GROUP]};
    const uint8_t *experts = w.data;
    const float *act = call->arg[moe_down_ACT], *weights = call->arg[moe_down_WEIGHTS],
                *logits = call->arg[moe_down_LOGITS];
    const int32_t *ids = call->arg[moe_down_IDS];
    const size_t pitch = panel_bytes(&w, 1);
    int ready;
    uint8_t *panels = cpu_prepared(worker, 0, p->active * pitch + panel_bytes(&shared, 1), &ready);
    if (!ready) {
        for (uint32_t e = 0; e < p->active; e++) pack_one(&w, act + (size_t)e * p->k, panels + e * pitch);
        pack_one(&shared, call->arg[moe_down_SHARED], panels + p->active * pitch);
    }
    const block_range blocks = blocks_of_groups(begin, end, p->rows_per_group, p->n);
    tiles_begin();
    for (uint32_t first = blocks.begin; first < blocks.end; first += DOWN_BLOCKS) {
        const uint32_t count = blocks.end - first < DOWN_BLOCKS ? blocks.end - first : DOWN_BLOCKS;
        lanes sums[DOWN_BLOCKS];
        for (uint32_t b = 0; b < count; b++) sums[b] = lanes_set(0);
        for (uint32_t e = 0; e < p->active; e++) {
            w.data = experts + (size_t)ids[e] * padded_bytes(&w, p->n);
            add_expert_blocks(&w, first, count, panels + e * pitch, weights[e], sums);
        }
        for (uint32_t b = 0; b < count; b++)
            add_shared_block(sums[b], sigmoid_one(logits[p->experts]), &shared, first + b, panels + p->active * pitch,
                p->n, call->arg[moe_down_X]);
    }
    tiles_end();
}

SHARED void kernel_moe_gemv(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const moe_gemv_params *p = call->params;
    product out = product_of(call, moe_gemv_W, p->n, p->k, STORE);
    const uint8_t *experts = out.w.data;
    const float *x = call->arg[moe_gemv_X];
    const int32_t *ids = call->arg[moe_gemv_IDS];
    float *y = call->arg[moe_gemv_Y];
    void *panel = cpu_scratch(worker, panel_bytes(&out.w, 1));
    const uint32_t width = call->grid[0];
    for (uint32_t g = begin, next; g < end; g = next) {
        const uint32_t column = g % width, e = g / width;
        next = end - g < width - column ? end : g + width - column;
        pack_one(&out.w, x + (p->broadcast ? 0 : (size_t)e * p->k), panel);
        out.w.data = experts + ((size_t)ids[e] * p->stride + p->first) / BLOCK_ROWS * block_bytes(&out.w);
        sweep_groups(&out, column, column + next - g, p->rows_per_group, panel, y + (size_t)e * p->n);
    }
}

#endif
