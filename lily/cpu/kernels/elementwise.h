// SPDX-License-Identifier: Apache-2.0
// Kernels that move or scale rows: embed, rmsnorm, last_row, swiglu.  One group a row.
//
// Not here: the projections that follow a norm (gemv.h), the per-head norms of gdn.h and attention_prep.h.
#ifndef LILY_CPU_ELEMENTWISE_H
#define LILY_CPU_ELEMENTWISE_H

#include "rows.h"
#include "tile_common.h"

#define QROWS_ALIGN 256 // of each section of the qrows layout: words, scales, biases

INLINE size_t qrows_section(size_t bytes) { return (bytes + QROWS_ALIGN - 1) / QROWS_ALIGN * QROWS_ALIGN; }

SHARED void embed_row(const uint8_t *table, size_t vocab, size_t row, const quantised *w, float *x) {
    const uint32_t groups = w->k / w->group, fields = 32 / w->bits, mask = (1u << w->bits) - 1;
    const size_t words = (size_t)w->k * w->bits / 32;
    const uint8_t *scales = table + qrows_section(vocab * words * 4);
    const uint8_t *biases = scales + qrows_section(vocab * groups * 2);
    const uint32_t *word = (const uint32_t *)table + row * words;
    const uint16_t *scale = (const uint16_t *)scales + row * groups, *bias = (const uint16_t *)biases + row * groups;
    for (uint32_t c = 0; c < w->k; c++) {
        const uint32_t value = word[c / fields] >> (c % fields * w->bits) & mask, g = c / w->group;
        x[c] = bf16_float(scale[g]) * (float)value + bf16_float(bias[g]);
    }
}

// An id outside of the table becomes a row of NaN, which the sampler reports.
SHARED void kernel_embed(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const embed_params *p = call->params;
    const Step *step = call->arg[embed_STEP];
    const int32_t *ids = call->arg[embed_IDS];
    const quantised w = {
        NULL, p->hidden, (uint32_t)call->constant[embed_C_BITS], (uint32_t)call->constant[embed_C_GROUP]};
    float *x = call->arg[embed_X];
    (void)worker;
    for (uint32_t m = begin; m < end && m < (uint32_t)step->rows; m++) {
        float *row = x + (size_t)m * p->hidden;
        if ((uint32_t)ids[m] < p->vocab)
            embed_row(call->arg[embed_TABLE], p->vocab, (uint32_t)ids[m], &w, row);
        else
            for (uint32_t c = 0; c < p->hidden; c++) row[c] = NAN;
    }
}

SHARED void kernel_rmsnorm(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const rmsnorm_params *p = call->params;
    const Step *step = call->arg[rmsnorm_STEP];
    const float *x = call->arg[rmsnorm_X], *norm = call->arg[rmsnorm_NORM];
    float *y = call->arg[rmsnorm_Y];
    (void)worker;
    for (uint32_t m = begin; m < end && m < (uint32_t)step->rows; m++)
        norm_row(x + (size_t)m * p->k, norm, p->k, p->eps, y + (size_t)m * p->k);
}

SHARED void kernel_last_row(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const last_row_params *p = call->params;
    const Step *step = call->arg[last_row_STEP];
    const float *x = call->arg[last_row_X];
    (void)begin, (void)end, (void)worker;
    memcpy(call->arg[last_row_Y], x + (size_t)(step->rows - 1) * p->hidden, p->hidden * sizeof *x);
}

SHARED void kernel_swiglu(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const swiglu_params *p = call->params;
    const float *gate = call->arg[swiglu_GATE], *up = call->arg[swiglu_UP];
    float *y = call->arg[swiglu_Y];
    (void)worker;
    for (size_t m = begin; m < end && m < p->rows; m++) swiglu_row(gate + m * p->n, up + m * p->n, p->n, y + m * p->n);
}

#endif
