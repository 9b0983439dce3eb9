// SPDX-License-Identifier: Apache-2.0
// Attention of one token: attn_decode over one split of the cache, attn_combine over the splits, attn_decode_prepared
// (ablation `attention-fusion`).
//
// Not here: the projections and the output gate (gemv.h), several rows (attention_prefill.h).
#ifndef LILY_CPU_ATTENTION_DECODE_H
#define LILY_CPU_ATTENTION_DECODE_H

#include "attention_prep.h"
#include "attention_tile.h"

// A split's partial results for the query heads of one KV head.
INLINE void attn_decode_split(
    attn_tile *t, const attn_cache *c, uint32_t split, uint32_t index, float *part_o, float *part_ml) {
    size_t first = (size_t)index * split;
    attn_split(t, c, first, first + split);
    memcpy(part_o, t->sum, (size_t)t->rep * t->dim * sizeof *part_o);
    memcpy(part_ml, t->max_total, 2 * t->rep * sizeof *part_ml);
}

SHARED void kernel_attn_decode(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const attn_decode_params *p = call->params;
    const int32_t *constant = call->constant;
    const attn_shape s = {(uint32_t)constant[attn_decode_C_HQ], (uint32_t)constant[attn_decode_C_HKV],
        (uint32_t)constant[attn_decode_C_DIM], (uint32_t)constant[attn_decode_C_ROT], p->eps,
        call->arg[attn_decode_Q_NORM], call->arg[attn_decode_K_NORM], call->arg[attn_decode_INV_FREQ]};
    const uint32_t position = (uint32_t)((const Step *)call->arg[attn_decode_STEP])->position;
    const uint32_t splits = call->grid[0], rep = s.hq / s.hkv;
    const float *proj = call->arg[attn_decode_PROJ];
    uint16_t *k = call->arg[attn_decode_K], *v = call->arg[attn_decode_V];
    float *part_o = call->arg[attn_decode_PART_O], *part_ml = call->arg[attn_decode_PART_ML];
    size_t tile = attn_tile_floats(rep, s.dim);
    float *memory = cpu_scratch(worker, (tile + s.dim + s.rot) * sizeof *memory);
    float *head = memory + tile, *cos_sin = head + s.dim;
    attn_angles(&s, (int32_t)position, cos_sin);
    for (uint32_t group = begin; group < end; group++) {
        uint32_t index = group % splits, kv = group / splits;
        if ((size_t)index * p->split > position) continue;
        if (index == position / p->split) attn_append(&s, proj, kv, cos_sin, (int32_t)position, k, v, head);
        attn_tile t;
        attn_tile_init(&t, rep, rep, s.dim, position, memory);
        for (uint32_t i = 0; i < rep; i++) {
            attn_head(&s, proj + 2 * ((size_t)kv * rep + i) * s.dim, s.q_norm, cos_sin, head);
            attn_tile_query(&t, i, head);
        }
        attn_cache c = {k + (size_t)kv * s.dim, v + (size_t)kv * s.dim, (size_t)s.hkv * s.dim};
        size_t at = (size_t)index * s.hq + (size_t)kv * rep;
        attn_decode_split(&t, &c, p->split, index, part_o + at * s.dim, part_ml + 2 * at);
    }
}

SHARED void kernel_attn_decode_prepared(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const attn_decode_prepared_params *p = call->params;
    const uint32_t hq = (uint32_t)call->constant[attn_decode_prepared_C_HQ];
    const uint32_t hkv = (uint32_t)call->constant[attn_decode_prepared_C_HKV];
    const uint32_t dim = (uint32_t)call->constant[attn_decode_prepared_C_DIM];
    const uint32_t position = (uint32_t)((const Step *)call->arg[attn_decode_prepared_STEP])->position;
    const uint32_t splits = call->grid[0], rep = hq / hkv;
    const float *q = call->arg[attn_decode_prepared_Q];
    const uint16_t *k = call->arg[attn_decode_prepared_K], *v = call->arg[attn_decode_prepared_V];
    float *part_o = call->arg[attn_decode_prepared_PART_O], *part_ml = call->arg[attn_decode_prepared_PART_ML];
    float *memory = cpu_scratch(worker, attn_tile_floats(rep, dim) * sizeof *memory);
    for (uint32_t group = begin; group < end; group++) {
        uint32_t index = group % splits, kv = group / splits;
        if ((size_t)index * p->split > position) continue;
        attn_tile t;
        attn_tile_init(&t, rep, rep, dim, position, memory);
        for (uint32_t i = 0; i < rep; i++) attn_tile_query(&t, i, q + ((size_t)kv * rep + i) * dim);
        attn_cache c = {k + (size_t)kv * dim, v + (size_t)kv * dim, (size_t)hkv * dim};
        size_t at = (size_t)index * hq + (size_t)kv * rep;
        attn_decode_split(&t, &c, p->split, index, part_o + at * dim, part_ml + 2 * at);
    }
}

SHARED void kernel_attn_combine(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const attn_combine_params *p = call->params;
    const uint32_t hq = (uint32_t)call->constant[attn_combine_C_HQ], dim = (uint32_t)call->constant[attn_combine_C_DIM];
    const uint32_t splits = (uint32_t)((const Step *)call->arg[attn_combine_STEP])->position / p->split + 1;
    const float *part_o = call->arg[attn_combine_PART_O], *part_ml = call->arg[attn_combine_PART_ML];
    (void)worker;
    for (uint32_t h = begin; h < end; h++) {
        float *o = (float *)call->arg[attn_combine_O] + (size_t)h * dim, max_total[2] = {-INFINITY, 0};
        memset(o, 0, dim * sizeof *o);
        for (size_t i = 0; i < splits; i++)
            attn_merge(o, max_total, part_o + (i * hq + h) * dim, part_ml + 2 * (i * hq + h), dim);
        attn_finish(o, max_total, dim);
    }
}

#endif
