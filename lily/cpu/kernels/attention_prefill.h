// SPDX-License-Identifier: Apache-2.0
// Causal attention of many rows over cache and chunk: attn_prefill.
//
// Not here: the preparation of its rows (attention_prep.h), the projections (gemm.h).
#ifndef LILY_CPU_ATTENTION_PREFILL_H
#define LILY_CPU_ATTENTION_PREFILL_H

#include "attention_tile.h"
#include "rows.h"

// One tile: `rows` rows from `row` on, one KV head.  `o` and `max_total` are room for the running result.
INLINE void attn_prefill_tile(
    const attn_tile *t, const attn_cache *c, uint32_t split, uint32_t queries, float *o, float *max_total) {
    memset(o, 0, (size_t)queries * t->dim * sizeof *o);
    for (uint32_t i = 0; i < queries; i++) max_total[2 * i] = -INFINITY, max_total[2 * i + 1] = 0;
    for (size_t first = 0; first <= t->last; first += split) {
        attn_split(t, c, first, first + split);
        for (uint32_t i = 0; i < queries; i++)
            if (t->position + i / t->rep >= first)
                attn_merge(o + (size_t)i * t->dim, max_total + 2 * i, t->sum + (size_t)i * t->dim, t->max_total + 2 * i,
                    t->dim);
    }
    for (uint32_t i = 0; i < queries; i++) attn_finish(o + (size_t)i * t->dim, max_total + 2 * i, t->dim);
}

SHARED void kernel_attn_prefill(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const attn_prefill_params *p = call->params;
    const uint32_t hq = (uint32_t)call->constant[attn_prefill_C_HQ], hkv = (uint32_t)call->constant[attn_prefill_C_HKV];
    const uint32_t dim = (uint32_t)call->constant[attn_prefill_C_DIM], rep = hq / hkv, most = rep * p->tile_m;
    const Step *step = call->arg[attn_prefill_STEP];
    const float *q = call->arg[attn_prefill_Q], *proj = call->arg[attn_prefill_PROJ];
    const uint16_t *k = call->arg[attn_prefill_K], *v = call->arg[attn_prefill_V];
    float *out = call->arg[attn_prefill_O];
    size_t tile = attn_tile_floats(most, dim);
    float *memory = cpu_scratch(worker, (tile + (size_t)most * (dim + 2)) * sizeof *memory);
    float *o = memory + tile, *max_total = o + (size_t)most * dim;
    for (uint32_t group = begin; group < end; group++) {
        uint32_t row = group % call->grid[0] * p->tile_m, kv = group / call->grid[0], rows = (uint32_t)step->rows;
        if (row >= rows) continue;
        rows = rows - row < p->tile_m ? rows - row : p->tile_m;
        attn_tile t;
        attn_tile_init(&t, rows * rep, rep, dim, (uint32_t)step->position + row, memory);
        for (uint32_t i = 0; i < rows * rep; i++)
            attn_tile_query(&t, i, q + ((size_t)(row + i / rep) * hq + (size_t)kv * rep + i % rep) * dim);
        attn_cache c = {k + (size_t)kv * dim, v + (size_t)kv * dim, (size_t)hkv * dim};
        attn_prefill_tile(&t, &c, p->split, rows * rep, o, max_total);
        for (uint32_t i = 0; i < rows * rep; i++) {
            size_t m = row + i / rep, h = (size_t)kv * rep + i % rep;
            gate_row(o + (size_t)i * dim, proj + m * p->pitch + (2 * h + 1) * dim, dim, out + (m * hq + h) * dim);
        }
    }
}

#endif
