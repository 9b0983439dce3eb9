// SPDX-License-Identifier: Apache-2.0
// Mixture-of-experts kernels: moe_gate_up, moe_down, moe_gemv for one row; moe_gemm_gate_up, moe_gemm_down, moe_combine
// for many.
//
// Grids.  moe_gate_up, moe_gemv: x = groups of `rows_per_group` outputs, y = place among the active experts.  moe_down: x
// only.  moe_gemm_*: x = groups of `tile_n` outputs, y = tiles of the block map; a sentinel's groups do nothing.
// moe_combine: one group a row.
#ifndef LILY_CPU_MOE_H
#define LILY_CPU_MOE_H

#include <stdbool.h>

#include "matmul.h"
#include "route.h"

INLINE size_t padded_bytes(const quantised *w, uint32_t n) { return blocks_of(n) * block_bytes(w); }

// ---- the sum over experts, once for both phases ------------------------------------------------------------------------

INLINE vf add_expert(vf sum, float weight, vf y) { return sum + vf_set(weight) * y; }

INLINE vf add_shared(vf sum, float gate, vf shared, vf x) { return (sum + vf_set(gate) * shared) + x; }

// ---- one row ----------------------------------------------------------------------------------------------------------

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

// ---- many rows --------------------------------------------------------------------------------------------------------

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
    uint8_t *room = cpu_scratch(worker, sweep_room(out) + 2 * rows * sizeof(float *));
    const float **x = (const float **)(room + sweep_room(out));
    float **y = (float **)(x + rows);
    for (uint32_t i = 0; i < rows; i++) {
        const size_t place = first + i, order = (uint32_t)r->order[place];
        x[i] = r->x + (r->gather ? order / r->active : place) * out->w.k;
        y[i] = r->y + (r->gather ? place : order) * out->n;
    }
    int ready;
    const packed in = packed_at(cpu_prepared(worker, tag, packed_bytes(&out->w, rows), &ready), rows);
    if (!ready) pack_rows(&out->w, x, &in);
    sweep_rows(out, blocks.begin, blocks.end, &in, y, room);
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
