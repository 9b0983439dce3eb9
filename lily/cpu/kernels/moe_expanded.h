// SPDX-License-Identifier: Apache-2.0
// Experts whose matrices are written to memory as bf16 before they are multiplied: expand, moe_gemm_expanded, the off
// variant of `fused-dequantisation`.
//
// Grids.  expand: one group a row of the stack.  moe_gemm_expanded as moe_gemm_down.
// Activations stay float32 and weights are rounded to bf16, so results have bits of their own; they do not depend on the
// number of rows either.  Not here: the block map (route.h), the kernels that these replace (moe_prefill.h).
#ifndef LILY_CPU_MOE_EXPANDED_H
#define LILY_CPU_MOE_EXPANDED_H

#include "moe_common.h"

typedef uint8_t vb __attribute__((vector_size(VL)));
typedef vb vb_any __attribute__((aligned(1), may_alias));
typedef uint8_t vb_half __attribute__((vector_size(VL / 2)));
typedef vb_half vb_half_any __attribute__((aligned(1), may_alias));
typedef uint16_t vh_half __attribute__((vector_size(VL)));

// VL values of a row from column c on; `words` are the row's, side by side.  Bytes hold columns, the low nibble first.
INLINE vf expand_values(const uint8_t *words, int bits, uint32_t c) {
    vb value;
    if (bits == 8) {
        value = *(const vb_any *)(words + c);
    } else {
        const vh_half pair = __builtin_convertvector(*(const vb_half_any *)(words + c / 2), vh_half);
        value = (vb)((pair | pair << 4) & 0x0f0f);
    }
    return __builtin_convertvector(__builtin_convertvector(value, vi), vf);
}

// Row r of a block.
INLINE void expand_row(const quantised *w, int bits, const uint8_t *block, uint32_t r, uint16_t *y) {
    const uint32_t words = w->group * (uint32_t)bits / 32;
    uint32_t row[128 * 8 / 32]; // the largest group
    for (uint32_t g = 0; g < w->k / w->group; g++, block += words * WORD_BYTES + GROUP_BYTES, y += w->group) {
        const uint16_t *scales = (const uint16_t *)(block + words * WORD_BYTES);
        const vf scale = vf_set(bf16_float(scales[r])), bias = vf_set(bf16_float(scales[BLOCK_ROWS + r]));
        for (uint32_t j = 0; j < words; j++) row[j] = ((const uint32_t *)block)[j * BLOCK_ROWS + r];
        for (uint32_t c = 0; c < w->group; c += VL)
            vf_store_bf16(y + c, vf_fma(scale, expand_values((const uint8_t *)row, bits, c), bias));
    }
}

SHARED void kernel_expand(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const expand_params *p = call->params;
    quantised w = product_of(call, expand_W, p->n, p->k, STORE).w;
    const uint8_t *experts = w.data;
    uint16_t *y = call->arg[expand_Y];
    (void)worker;
    for (uint32_t g = begin; g < end && g / p->n < p->experts; g++) {
        const uint32_t row = g % p->n;
        w.data = experts + (size_t)(g / p->n) * padded_bytes(&w, p->n);
        const uint8_t *block = block_at(&w, row / BLOCK_ROWS);
        uint16_t *to = y + (size_t)g * p->k;
        if (w.bits == 8)
            expand_row(&w, 8, block, row % BLOCK_ROWS, to);
        else
            expand_row(&w, 4, block, row % BLOCK_ROWS, to);
    }
}

#define DOT_ROWS 4 // of activations against one row of weights

INLINE void dot_rows(const uint16_t *w, const float *const *x, uint32_t k, int rows, float *const *y, uint32_t column) {
    lanes sum[DOT_ROWS];
    for (int m = 0; m < rows; m++) sum[m] = lanes_set(0);
    for (uint32_t c = 0; c < k; c += LANES) {
        const lanes weight = lanes_bf16((const uint8_t *)(w + c));
        UNROLL
        for (int m = 0; m < rows; m++) sum[m] = lanes_fma(weight, lanes_load(x[m] + c), sum[m]);
    }
    for (int m = 0; m < rows; m++) y[m][column] = lanes_sum(sum[m]);
}

SHARED void kernel_moe_gemm_expanded(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const moe_gemm_expanded_params *p = call->params;
    const int32_t *offsets = call->arg[moe_gemm_expanded_OFFSETS], *order = call->arg[moe_gemm_expanded_ORDER];
    const int32_t *blocks = call->arg[moe_gemm_expanded_BLOCKS];
    const float *from = call->arg[moe_gemm_expanded_X];
    const uint16_t *w = call->arg[moe_gemm_expanded_W];
    float *to = call->arg[moe_gemm_expanded_Y];
    const uint32_t width = call->grid[0], tile_m = (uint32_t)call->constant[moe_gemm_expanded_C_TILE_M];
    const float **x = cpu_scratch(worker, 2 * tile_m * sizeof *x);
    float **y = (float **)(x + tile_m);
    for (uint32_t g = begin; g < end; g++) {
        const uint32_t tile = g / width, column = g % width * p->tile_n;
        const int32_t expert = blocks[2 * tile], first = blocks[2 * tile + 1];
        if (expert < 0) continue;
        const uint32_t left = (uint32_t)(offsets[expert + 1] - first), rows = left < tile_m ? left : tile_m;
        for (uint32_t i = 0; i < rows; i++) {
            const size_t place = (uint32_t)first + i, assigned = (uint32_t)order[place];
            x[i] = from + (p->gather ? assigned / p->active : place) * p->k;
            y[i] = to + (p->gather ? place : assigned) * p->n;
        }
        const uint16_t *matrix = w + ((size_t)expert * p->stride + p->first) * p->k;
        const uint32_t stop = p->n - column < p->tile_n ? p->n : column + p->tile_n;
        for (uint32_t n = column; n < stop; n++) {
            const uint16_t *row = matrix + (size_t)n * p->k;
            uint32_t i = 0;
            for (; i + DOT_ROWS <= rows; i += DOT_ROWS) dot_rows(row, x + i, p->k, DOT_ROWS, y + i, n);
            for (; i < rows; i++) dot_rows(row, x + i, p->k, 1, y + i, n);
        }
    }
}

#endif
