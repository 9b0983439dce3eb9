// SPDX-License-Identifier: Apache-2.0
// RMSNorm and the element-wise helpers around it: rmsnorm, last_row, copy, swiglu.
//
// Not here: the projections that follow a norm (matmul.h), the per-head norms of gdn.h and attention.h, which call
// norm_row.
#ifndef LILY_CPU_NORM_H
#define LILY_CPU_NORM_H

#include "cpu.h"
#include "vec.h"

// Σ x², in 64 partial sums, then the fixed tree.
INLINE float sum_squares(const float *x, uint32_t n) {
    lanes a = lanes_set(0), b = a, c = a, d = a;
    uint32_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        lanes x0 = lanes_load(x + i), x1 = lanes_load(x + i + LANES);
        lanes x2 = lanes_load(x + i + 2 * LANES), x3 = lanes_load(x + i + 3 * LANES);
        a = lanes_fma(x0, x0, a), b = lanes_fma(x1, x1, b), c = lanes_fma(x2, x2, c), d = lanes_fma(x3, x3, d);
    }
    for (; i < n; i += LANES) {
        float part[LANES] = {0};
        memcpy(part, x + i, (n - i < LANES ? n - i : LANES) * sizeof *x);
        lanes v = lanes_load(part);
        a = lanes_fma(v, v, a);
    }
    return lanes_sum(lanes_add(lanes_add(a, b), lanes_add(c, d)));
}

// y = x·s·w; x and y may be the same.
INLINE void scale_row(const float *x, float s, const float *w, uint32_t n, float *y) {
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) vf_store(y + i, vf_load(x + i) * vf_set(s) * vf_load(w + i));
    if (i < n) vf_store_part(y + i, n - i, vf_load_part(x + i, n - i, 0) * vf_set(s) * vf_load_part(w + i, n - i, 0));
}

// y = x·rsqrt(mean(x²) + eps)·w; x and y may be the same.
SHARED void norm_row(const float *x, const float *w, uint32_t n, float eps, float *y) {
    scale_row(x, 1.0f / sqrtf(sum_squares(x, n) / (float)n + eps), w, n, y);
}

// y = silu(gate)·up.
SHARED void swiglu_row(const float *gate, const float *up, uint32_t n, float *y) {
    uint32_t i = 0;
    for (; i + VL <= n; i += VL) vf_store(y + i, vf_silu(vf_load(gate + i)) * vf_load(up + i));
    if (i < n) vf_store_part(y + i, n - i, vf_silu(vf_load_part(gate + i, n - i, 0)) * vf_load_part(up + i, n - i, 0));
}

// y = x·sigmoid(gate): what attn_prefill and gemv_gated_residual both do to an attention head.
SHARED void gate_row(const float *x, const float *gate, uint32_t n, float *y) {
    for (uint32_t i = 0; i < n; i += VL) vf_store(y + i, vf_load(x + i) * vf_sigmoid(vf_load(gate + i)));
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

#define COPY_BLOCK 65536

SHARED void kernel_copy(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const copy_params *p = call->params;
    size_t from = (size_t)begin * COPY_BLOCK, to = (size_t)end * COPY_BLOCK;
    (void)worker;
    if (to > p->bytes) to = p->bytes;
    if (from < to) memcpy((char *)call->arg[copy_DST] + from, (const char *)call->arg[copy_SRC] + from, to - from);
}

SHARED void kernel_swiglu(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const swiglu_params *p = call->params;
    const float *gate = call->arg[swiglu_GATE], *up = call->arg[swiglu_UP];
    float *y = call->arg[swiglu_Y];
    (void)worker;
    for (size_t m = begin; m < end && m < p->rows; m++) swiglu_row(gate + m * p->n, up + m * p->n, p->n, y + m * p->n);
}

#endif
