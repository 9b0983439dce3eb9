// SPDX-License-Identifier: Apache-2.0
// The arithmetic of one row that kernels of several subjects call: norm_row, swiglu_row, gate_row.
//
// Not here: kernels (elementwise.h for those that do nothing else), products (product.h).
#ifndef LILY_CPU_ROWS_H
#define LILY_CPU_ROWS_H

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

#endif
