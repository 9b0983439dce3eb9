// SPDX-License-Identifier: Apache-2.0
// Queries, keys and values of a row: RMSNorm, RoPE and the append to the cache.  attn_prep does it for many rows;
// attn_decode for its own, with the same functions.
//
// Not here: attention itself (attention_tile.h).
#ifndef LILY_CPU_ATTENTION_PREP_H
#define LILY_CPU_ATTENTION_PREP_H

#include "rows.h"

typedef struct {
    uint32_t hq, hkv, dim, rot;
    float eps;
    const float *q_norm, *k_norm, *inv_freq;
} attn_shape;

// Cosines, then sines, of a position's rot/2 angles.  Angles reach 262,143 radians, so this takes the C library's exact
// argument reduction; never a fast approximation.
INLINE void attn_angles(const attn_shape *s, int32_t position, float *cos_sin) {
    uint32_t half = s->rot / 2;
    for (uint32_t i = 0; i < half; i++) {
        float angle = (float)position * s->inv_freq[i];
        cos_sin[i] = cosf(angle);
        cos_sin[half + i] = sinf(angle);
    }
}

// y = RoPE(rmsnorm(x, w)).
INLINE void attn_head(const attn_shape *s, const float *x, const float *w, const float *cos_sin, float *y) {
    uint32_t half = s->rot / 2;
    norm_row(x, w, s->dim, s->eps, y);
    for (uint32_t i = 0; i < half; i += VL) {
        uint32_t n = half - i < VL ? half - i : VL;
        vf c = vf_load_part(cos_sin + i, n, 0), sine = vf_load_part(cos_sin + half + i, n, 0);
        vf a = vf_load_part(y + i, n, 0), b = vf_load_part(y + half + i, n, 0);
        vf_store_part(y + i, n, a * c - b * sine);
        vf_store_part(y + half + i, n, b * c + a * sine);
    }
}

INLINE void attn_store(uint16_t *to, const float *x, uint32_t dim) {
    for (uint32_t d = 0; d < dim; d += VL) vf_store_bf16(to + d, vf_load(x + d));
}

// Appends KV head `head` of a projected row at `position`; `spare` is room for dim floats.
INLINE void attn_append(const attn_shape *s, const float *proj, uint32_t head, const float *cos_sin, int32_t position,
    uint16_t *k, uint16_t *v, float *spare) {
    const float *key = proj + 2 * (size_t)s->hq * s->dim + (size_t)head * s->dim,
                *value = key + (size_t)s->hkv * s->dim;
    size_t at = ((size_t)position * s->hkv + head) * s->dim;
    attn_head(s, key, s->k_norm, cos_sin, spare);
    attn_store(k + at, spare, s->dim);
    attn_store(v + at, value, s->dim);
}

SHARED void kernel_attn_prep(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const attn_prep_params *p = call->params;
    const int32_t *constant = call->constant;
    const attn_shape s = {(uint32_t)constant[attn_prep_C_HQ], (uint32_t)constant[attn_prep_C_HKV],
        (uint32_t)constant[attn_prep_C_DIM], (uint32_t)constant[attn_prep_C_ROT], p->eps, call->arg[attn_prep_Q_NORM],
        call->arg[attn_prep_K_NORM], call->arg[attn_prep_INV_FREQ]};
    const Step *step = call->arg[attn_prep_STEP];
    float *spare = cpu_scratch(worker, (s.dim + s.rot) * sizeof *spare), *cos_sin = spare + s.dim;
    for (uint32_t m = begin; m < end && m < (uint32_t)step->rows; m++) {
        const float *proj = (const float *)call->arg[attn_prep_PROJ] + (size_t)m * p->pitch;
        float *q = (float *)call->arg[attn_prep_Q] + (size_t)m * s.hq * s.dim;
        int32_t position = step->position + (int32_t)m;
        attn_angles(&s, position, cos_sin);
        for (size_t h = 0; h < s.hq; h++) attn_head(&s, proj + 2 * h * s.dim, s.q_norm, cos_sin, q + h * s.dim);
        for (uint32_t h = 0; h < s.hkv; h++)
            attn_append(&s, proj, h, cos_sin, position, call->arg[attn_prep_K], call->arg[attn_prep_V], spare);
    }
}

#endif
