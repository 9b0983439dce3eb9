// SPDX-License-Identifier: Apache-2.0
// Many rows through a quantised matrix: gemm, gemm_f32, gemm_swiglu, gemm_residual.
//
// Grid: x = groups of `tile_n` outputs, y = groups of `tile_m` rows, of which the last takes all rows that are left (a
// grid with y = 1 is one group of all rows).  Multiples of 16 outputs use whole blocks.  The sizes are only shares of
// work: results do not depend on them.  Not here: single rows (gemv.h), experts (moe_prefill.h).
#ifndef LILY_CPU_GEMM_H
#define LILY_CPU_GEMM_H

#include "product.h"

typedef struct {
    const float *x;
    size_t x_pitch;
    float *y; // first output of row 0
    size_t y_pitch;
    uint32_t rows, tile_n;
} gemm_rows;

INLINE void gemm_blocks(
    const product *out, const gemm_rows *r, uint32_t first, uint32_t rows, block_range blocks, cpu_worker *worker) {
    uint8_t *scratch = cpu_scratch(worker, sweep_scratch(out) + 2 * rows * sizeof(float *));
    const float **x = (const float **)(scratch + sweep_scratch(out));
    float **y = (float **)(x + rows);
    for (uint32_t m = 0; m < rows; m++) {
        x[m] = r->x + (first + m) * r->x_pitch;
        y[m] = r->y + (first + m) * r->y_pitch;
    }
    int ready;
    const packed in = packed_at(cpu_prepared(worker, first, packed_bytes(&out->w, rows), &ready), rows);
    if (!ready) pack_rows(&out->w, x, &in);
    sweep_rows(out, blocks.begin, blocks.end, &in, y, scratch);
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
