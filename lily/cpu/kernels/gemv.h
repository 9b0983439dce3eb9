// SPDX-License-Identifier: Apache-2.0
// One row through a quantised matrix: gemv, gemv_norm and its variants, gemv_residual, gemv_gated_residual.
//
// Grid: x = groups of `rows_per_group` outputs.  Multiples of 16 outputs use whole blocks; the size is only a share of
// work: results do not depend on it.  Not here: several rows (gemm.h), routed experts (moe_decode.h).
#ifndef LILY_CPU_GEMV_H
#define LILY_CPU_GEMV_H

#include "product.h"
#include "rows.h"

// Memory for one activation row and its packed form, kept by each worker for the whole dispatch.
typedef struct {
    float *row;
    void *panel;
    int ready;
} row_input;

INLINE row_input prepare_row(const quantised *w, cpu_worker *worker) {
    row_input in;
    in.row = cpu_prepared(worker, 0, w->k * sizeof(float) + panel_bytes(w, 1), &in.ready);
    in.panel = in.row + w->k;
    return in;
}

INLINE void pack_one(const quantised *w, const float *x, void *panel) { pack_panel(w, &x, 1, panel); }

INLINE void sweep_groups(
    const product *p, uint32_t begin, uint32_t end, uint32_t per_group, const void *panel, float *y) {
    const block_range blocks = blocks_of_groups(begin, end, per_group, p->n);
    sweep_row(p, blocks.begin, blocks.end, panel, y);
}

// gemv_norm and its variants have the same arguments and parameters.
INLINE void gemv_normed(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker, epilogue how) {
    const gemv_norm_params *p = call->params;
    const product out = product_of(call, gemv_norm_W, p->n, p->k, how);
    const row_input in = prepare_row(&out.w, worker);
    if (!in.ready) {
        norm_row(call->arg[gemv_norm_X], call->arg[gemv_norm_NORM], p->k, p->eps, in.row);
        pack_one(&out.w, in.row, in.panel);
    }
    sweep_groups(&out, begin, end, p->rows_per_group, in.panel, call->arg[gemv_norm_Y]);
}

SHARED void kernel_gemv_norm(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    gemv_normed(call, begin, end, worker, STORE);
}

_Static_assert(sizeof(gemv_norm_f32_params) == sizeof(gemv_norm_params), "variants share their parameters");

SHARED void kernel_gemv_norm_f32(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    gemv_normed(call, begin, end, worker, STORE);
}

_Static_assert(sizeof(gemv_norm_swiglu_params) == sizeof(gemv_norm_params), "variants share their parameters");

SHARED void kernel_gemv_norm_swiglu(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    gemv_normed(call, begin, end, worker, SWIGLU);
}

SHARED void kernel_gemv(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gemv_params *p = call->params;
    const product out = product_of(call, gemv_W, p->n, p->k, STORE);
    const row_input in = prepare_row(&out.w, worker);
    if (!in.ready) pack_one(&out.w, call->arg[gemv_X], in.panel);
    sweep_groups(&out, begin, end, p->rows_per_group, in.panel, call->arg[gemv_Y]);
}

SHARED void kernel_gemv_residual(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gemv_residual_params *p = call->params;
    const product out = product_of(call, gemv_residual_W, p->n, p->k, ADD);
    const row_input in = prepare_row(&out.w, worker);
    if (!in.ready) pack_one(&out.w, call->arg[gemv_residual_Y], in.panel);
    sweep_groups(&out, begin, end, p->rows_per_group, in.panel, call->arg[gemv_residual_X]);
}

SHARED void kernel_gemv_gated_residual(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gemv_gated_residual_params *p = call->params;
    const float *o = call->arg[gemv_gated_residual_O], *proj = call->arg[gemv_gated_residual_PROJ];
    const product out = product_of(call, gemv_gated_residual_W, p->n, p->k, ADD);
    const row_input in = prepare_row(&out.w, worker);
    if (!in.ready) {
        for (uint32_t c = 0; c < p->k; c += p->dim) gate_row(o + c, proj + 2 * c + p->dim, p->dim, in.row + c);
        pack_one(&out.w, in.row, in.panel);
    }
    sweep_groups(&out, begin, end, p->rows_per_group, in.panel, call->arg[gemv_gated_residual_X]);
}

#endif
