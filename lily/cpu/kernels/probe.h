// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, for `lily doctor`: copy, probe_level, probe_read, probe_matrix.
// Not here: what a thread or a barrier costs (runtime/pool.c).
#ifndef LILY_CPU_PROBE_H
#define LILY_CPU_PROBE_H

#include "tile.h"

#define COPY_BLOCK 65536

SHARED void kernel_copy(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const copy_params *p = call->params;
    size_t from = (size_t)begin * COPY_BLOCK, to = (size_t)end * COPY_BLOCK;
    (void)worker;
    if (to > p->bytes) to = p->bytes;
    if (from < to) memcpy((char *)call->arg[copy_DST] + from, (const char *)call->arg[copy_SRC] + from, to - from);
}

SHARED void kernel_probe_level(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    uint32_t *x = call->arg[probe_level_X];
    (void)worker;
    x[0] += end - begin;
}

// ---- reading --------------------------------------------------------------------------------------------------------

typedef uint32_t line __attribute__((vector_size(64), aligned(16), may_alias));

INLINE uint32_t line_sum(line a) {
    uint32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += a[i];
    return sum;
}

// Wrapping sum of n words, n a multiple of 4.  Prefetching, as the matrix kernels do it, so that this is their limit.
SHARED uint32_t sum_words(const uint32_t *p, size_t n) {
    line a = {0}, b = a, c = a, d = a;
    size_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const line *q = (const line *)(p + i);
#if defined(__x86_64__)
        for (int k = 0; k < 4; k++) __builtin_prefetch((const char *)(q + k) + 4096);
#endif
        a += q[0], b += q[1], c += q[2], d += q[3];
    }
    uint32_t sum = line_sum((a + b) + (c + d));
    for (; i < n; i++) sum += p[i];
    return sum;
}

SHARED void kernel_probe_read(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const probe_read_params *p = call->params;
    const uint8_t *src = call->arg[probe_read_SRC];
    uint32_t *sums = call->arg[probe_read_SUMS];
    (void)worker;
    for (uint32_t i = begin; i < end; i++) {
        const size_t from = (size_t)i * p->block, left = from < p->bytes ? p->bytes - from : 0;
        sums[i] = sum_words((const uint32_t *)(src + from), (left < p->block ? left : p->block) / 4);
    }
}

// ---- multiplying ----------------------------------------------------------------------------------------------------

#define PROBE_SIZE 64 // rows, columns and depth of a group's product

#if TILE_BF16
// Operands as pairs of bf16 along k: to[pair][row] of the columns [0, 64) of 16 rows.
INLINE void probe_pairs(const float *x, uint32_t *to) {
    for (int k = 0; k < PROBE_SIZE / 2; k++)
        for (int r = 0; r < LANES; r++) {
            const float low = x[r * PROBE_SIZE + 2 * k], high = x[r * PROBE_SIZE + 2 * k + 1];
            uint32_t a, b;
            memcpy(&a, &low, 4), memcpy(&b, &high, 4);
            to[k * LANES + r] = a >> 16 | (b & 0xffff0000u);
        }
}
#endif

#if TILE_AMX
// Two by two tiles of 16 by 16 sums, every operand of a step of 32 columns in a register: x row by row, w in pairs.
INLINE void probe_block(const float *x, const float *w, uint32_t rounds, float *y) {
    static const amx_config config = {
        .palette = 1,
        .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
        .rows = {16, 16, 16, 16, 16, 16, 16, 16},
    };
    _Alignas(64) uint16_t rows[2 * LANES * PROBE_SIZE];
    _Alignas(64) uint32_t pairs[2][PROBE_SIZE / 2 * LANES];
    for (int i = 0; i < 2 * LANES * PROBE_SIZE; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        rows[i] = (uint16_t)(bits >> 16);
    }
    for (int b = 0; b < 2; b++) probe_pairs(w + b * LANES * PROBE_SIZE, pairs[b]);
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < PROBE_SIZE; k += AMX_COLUMNS) {
        _tile_loadd(4, rows + k, 2 * PROBE_SIZE);
        _tile_loadd(5, rows + LANES * PROBE_SIZE + k, 2 * PROBE_SIZE);
        _tile_loadd(6, pairs[0] + k / 2 * LANES, AMX_ROW_BYTES);
        _tile_loadd(7, pairs[1] + k / 2 * LANES, AMX_ROW_BYTES);
        for (uint32_t i = 0; i < rounds; i++) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, y, 4 * PROBE_SIZE);
    _tile_stored(1, y + LANES, 4 * PROBE_SIZE);
    _tile_stored(2, y + LANES * PROBE_SIZE, 4 * PROBE_SIZE);
    _tile_stored(3, y + LANES * PROBE_SIZE + LANES, 4 * PROBE_SIZE);
    amx_end();
}

#define PROBE_ROWS (2 * LANES)
#define PROBE_COLUMNS (2 * LANES)

#elif TILE_BF16
INLINE void probe_block(const float *x, const float *w, uint32_t rounds, float *y) {
    uint32_t left[PROBE_SIZE / 2 * LANES], right[PROBE_SIZE / 2 * LANES];
    __m512 sum[LANES];
    probe_pairs(x, left), probe_pairs(w, right);
    UNROLL
    for (int m = 0; m < LANES; m++) sum[m] = _mm512_setzero_ps();
    for (uint32_t i = 0; i < rounds; i++)
        for (int k = 0; k < PROBE_SIZE / 2; k++) {
            const __m512bh b = (__m512bh)_mm512_loadu_si512(right + k * LANES);
            UNROLL
            for (int m = 0; m < LANES; m++)
                sum[m] = _mm512_dpbf16_ps(sum[m], (__m512bh)_mm512_set1_epi32((int)left[k * LANES + m]), b);
        }
    for (int m = 0; m < LANES; m++) _mm512_storeu_ps(y + m * PROBE_SIZE, sum[m]);
}

#define PROBE_ROWS LANES
#define PROBE_COLUMNS LANES

#else
// As many rows as leave the sums in registers.
#if VL == 16
#define PROBE_ROWS 16
#else
#define PROBE_ROWS 4
#endif
#define PROBE_COLUMNS LANES

INLINE void probe_block(const float *x, const float *w, uint32_t rounds, float *y) {
    float right[PROBE_SIZE * LANES], left[PROBE_SIZE * PROBE_ROWS];
    lanes sum[PROBE_ROWS];
    for (int k = 0; k < PROBE_SIZE; k++) {
        for (int n = 0; n < LANES; n++) right[k * LANES + n] = w[n * PROBE_SIZE + k];
        for (int m = 0; m < PROBE_ROWS; m++) left[k * PROBE_ROWS + m] = x[m * PROBE_SIZE + k];
    }
    UNROLL
    for (int m = 0; m < PROBE_ROWS; m++) sum[m] = lanes_set(0);
    for (uint32_t i = 0; i < rounds; i++)
        for (int k = 0; k < PROBE_SIZE; k++) {
            const lanes b = lanes_load(right + k * LANES);
            UNROLL
            for (int m = 0; m < PROBE_ROWS; m++) sum[m] = lanes_fma(lanes_set(left[k * PROBE_ROWS + m]), b, sum[m]);
        }
    UNROLL
    for (int m = 0; m < PROBE_ROWS; m++) lanes_store(y + m * PROBE_SIZE, sum[m]);
}
#endif

SHARED void kernel_probe_matrix(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const probe_matrix_params *p = call->params;
    const float *x = call->arg[probe_matrix_X], *w = call->arg[probe_matrix_W];
    (void)worker;
    for (uint32_t i = begin; i < end; i++) {
        float *y = (float *)call->arg[probe_matrix_Y] + (size_t)i * PROBE_SIZE * PROBE_SIZE;
        for (int m = 0; m < PROBE_SIZE; m += PROBE_ROWS)
            for (int n = 0; n < PROBE_SIZE; n += PROBE_COLUMNS)
                probe_block(x + m * PROBE_SIZE, w + n * PROBE_SIZE, p->rounds, y + m * PROBE_SIZE + n);
    }
}

#endif
