// SPDX-License-Identifier: Apache-2.0
// Dense matrix kernels: embed, gemv*, gemm*.
//
// Grids.  gemv*: x = groups of `rows_per_group` outputs.  gemm*: x = groups of `tile_n` outputs, y = groups of `tile_m`
// rows, of which the last takes all rows that are left (a grid with y = 1 is one group of all rows).  Multiples of 16
// outputs use whole blocks.  The sizes are only shares of work: results do not depend on them.
// embed: one group a row.
#ifndef LILY_CPU_MATMUL_H
#define LILY_CPU_MATMUL_H

#include "norm.h"
#include "product.h"

// ---- embedding --------------------------------------------------------------------------------------------------------

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

// ---- one row ----------------------------------------------------------------------------------------------------------

INLINE product product_of(const cpu_call *call, int arg, uint32_t n, uint32_t k, epilogue end) {
    // All matrix kernels have bits and group as their first constants, those of many rows tile_m as their third.
    return (product){{call->arg[arg], k, (uint32_t)call->constant[0], (uint32_t)call->constant[1]}, n, end};
}

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

// ---- many rows --------------------------------------------------------------------------------------------------------

typedef struct {
    const float *x;
    size_t x_pitch;
    float *y; // first output of row 0
    size_t y_pitch;
    uint32_t rows, tile_n;
} gemm_rows;

INLINE void gemm_blocks(
    const product *out, const gemm_rows *r, uint32_t first, uint32_t rows, block_range blocks, cpu_worker *worker) {
    uint8_t *room = cpu_scratch(worker, sweep_room(out) + 2 * rows * sizeof(float *));
    const float **x = (const float **)(room + sweep_room(out));
    float **y = (float **)(x + rows);
    for (uint32_t m = 0; m < rows; m++) {
        x[m] = r->x + (first + m) * r->x_pitch;
        y[m] = r->y + (first + m) * r->y_pitch;
    }
    int ready;
    const packed in = packed_at(cpu_prepared(worker, first, packed_bytes(&out->w, rows), &ready), rows);
    if (!ready) pack_rows(&out->w, x, &in);
    sweep_rows(out, blocks.begin, blocks.end, &in, y, room);
}

INLINE void gemm_groups(
    const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker, const product *out, const gemm_rows *r) {
    const uint32_t width = call->grid[0], height = call->grid[1], tile_m = (uint32_t)call->constant[gemm_C_TILE_M];
    for (uint32_t g = begin, next; g < end; g = next) {
        const uint32_t column = g % width, row = g / width;
        next = end - g < width - column ? end : g + width - column;
        const block_range blocks = blocks_of_groups(column, column + next - g, r->tile_n, out->n);
        uint64_t stop = row + 1 < height ? (uint64_t)(row + 1) * tile_m : r->rows;
        if (stop > r->rows) stop = r->rows;
        for (uint64_t first = (uint64_t)row * tile_m; first < stop; first += SWEEP_ROWS) {
            const uint64_t rows = stop - first < SWEEP_ROWS ? stop - first : SWEEP_ROWS;
            gemm_blocks(out, r, (uint32_t)first, (uint32_t)rows, blocks, worker);
        }
    }
}

SHARED void kernel_gemm(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gemm_params *p = call->params;
    const Step *step = call->arg[gemm_STEP];
    const product out = product_of(call, gemm_W, p->n, p->k, STORE);
    float *y = call->arg[gemm_Y];
    const gemm_rows rows = {call->arg[gemm_X], p->k, y + p->column, p->pitch, (uint32_t)step->rows, p->tile_n};
    gemm_groups(call, begin, end, worker, &out, &rows);
}

SHARED void kernel_gemm_f32(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gemm_f32_params *p = call->params;
    const Step *step = call->arg[gemm_f32_STEP];
    if ((uint32_t)step->rows <= p->first) return;
    const uint32_t left = (uint32_t)step->rows - p->first;
    const product out = product_of(call, gemm_f32_W, p->n, p->k, STORE);
    const float *x = call->arg[gemm_f32_X];
    float *y = call->arg[gemm_f32_Y];
    const gemm_rows rows = {
        x + (size_t)p->first * p->k, p->k, y + p->column, p->pitch, left < p->limit ? left : p->limit, p->tile_n};
    gemm_groups(call, begin, end, worker, &out, &rows);
}

SHARED void kernel_gemm_swiglu(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gemm_swiglu_params *p = call->params;
    const Step *step = call->arg[gemm_swiglu_STEP];
    const product out = product_of(call, gemm_swiglu_W, p->n, p->k, SWIGLU);
    const gemm_rows rows = {
        call->arg[gemm_swiglu_X], p->k, call->arg[gemm_swiglu_Y], p->n, (uint32_t)step->rows, p->tile_n};
    gemm_groups(call, begin, end, worker, &out, &rows);
}

SHARED void kernel_gemm_residual(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gemm_residual_params *p = call->params;
    const Step *step = call->arg[gemm_residual_STEP];
    const product out = product_of(call, gemm_residual_W, p->n, p->k, ADD);
    const gemm_rows rows = {
        call->arg[gemm_residual_Y], p->k, call->arg[gemm_residual_X], p->n, (uint32_t)step->rows, p->tile_n};
    gemm_groups(call, begin, end, worker, &out, &rows);
}

#endif
