// SPDX-License-Identifier: Apache-2.0
// Tiles of 4-bit matrices with AMX: 16 rows of activations times 16 rows of weights, 32 columns an instruction.
//
// A tile register holds 16 rows of 64 bytes.  What tile_bf16 looks up for one word and nibble, the pairs of columns
// (8j+n, 8j+4+n) of 16 rows of weights, is one row of the right-hand operand; four words, 32 columns, fill a register.
// A sum over 32 columns is made by the instruction in its own order, so this path has its own bits; they do not depend
// on the number of rows either.
#ifndef LILY_CPU_TILE_AMX_H
#define LILY_CPU_TILE_AMX_H

#include <stdbool.h>

#include "tile_common.h"

#define AMX_ROWS 16
#define AMX_COLUMNS 32
#define AMX_ROW_BYTES 64
#define AMX_BYTES (AMX_ROWS * AMX_ROW_BYTES)
#define AMX_BATCH 4 // see amx_capacity
#if defined(__clang__)
#define UNROLL_BATCH _Pragma("unroll 4")
#else
#define UNROLL_BATCH _Pragma("GCC unroll 4")
#endif

// Tile registers.  The first three are for panels of 16 rows, the others for one row (amx_row).
#define SUMS 0
#define ROWS 1
#define WEIGHTS 2
#define BATCH_SUMS 3
#define BATCH 4

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_config;

INLINE void amx_begin(void) {
    static const amx_config config = {
        .palette = 1,
        .row_bytes = {64, 64, 64, 64, 64},
        .rows = {16, 16, 16, AMX_BATCH, AMX_BATCH},
    };
    _tile_loadconfig(&config);
}

// Without this the registers' 8 KiB would be saved at every change of thread.
INLINE void amx_end(void) { _tile_release(); }

// Columns that are summed in a tile register before scale and bias are applied: a group, or half of one of 128.
INLINE uint32_t amx_step(const quantised *w) { return w->group < 64 ? w->group : 64; }

// Rows of a panel's tiles.  A panel of up to 16 rows has 16; those not in use hold anything, as do their sums.  A panel of
// one row has AMX_BATCH: storing a register costs the same for one row of sums as for all, so each of AMX_BATCH steps
// gets a row of its own, which holds zeros in the tiles of the others.
INLINE uint32_t amx_capacity(uint32_t rows) { return rows == 1 ? AMX_BATCH : AMX_ROWS; }

INLINE size_t amx_panel_bytes(const quantised *w, uint32_t rows) {
    const size_t sums = w->k / w->group * sizeof(float);
    return (size_t)w->k * 2 * amx_capacity(rows) + sums * (rows == 1 ? 1 : AMX_ROWS);
}

INLINE void amx_pack_row(const quantised *w, const float *x, uint32_t rows, uint32_t m, uint8_t *panel) {
    const uint32_t capacity = amx_capacity(rows), step = amx_step(w);
    float *sums = (float *)(panel + (size_t)w->k * 2 * capacity) + m;
    if (rows == 1) memset(panel, 0, (size_t)w->k * 2 * capacity);
    for (uint32_t g = 0, c = 0; g < w->k / w->group; g++, sums += rows == 1 ? 1 : AMX_ROWS) {
        lanes sum = lanes_set(0);
        for (const uint32_t end = c + w->group; c < end; c += AMX_COLUMNS, panel += capacity * AMX_ROW_BYTES) {
            uint8_t *to = panel + (rows == 1 ? c / step % AMX_BATCH : m) * AMX_ROW_BYTES;
            sum = pack_pairs(x + c, sum, to);
            sum = pack_pairs(x + c + LANES, sum, to + AMX_ROW_BYTES / 2);
        }
        *sums = lanes_sum(sum);
    }
}

// One group's words as pairs of bf16, 1 KiB for 32 columns.  A nibble in the upper mantissa bits of 16 is 16 + q: a shift
// and a logical operation.  (The lookup of tile_bf16 costs two operations where there is AMX, and a shift as well.)  The
// 16 is taken out again with Σ x.
#define AMX_OFFSET 16.0f

INLINE __m512i amx_pairs(__m512i shifted) {
    const __m512i mantissa = _mm512_set1_epi16(0x0078), sixteen = _mm512_set1_epi16(0x4180);
    return _mm512_ternarylogic_epi32(shifted, mantissa, sixteen, 0xea); // (shifted & mantissa) | sixteen
}

INLINE void amx_unpack(const uint8_t *w, uint32_t words, uint8_t *to) {
    for (uint32_t j = 0; j < words; j++, w += WORD_BYTES, to += 4 * AMX_ROW_BYTES) {
        const __m512i word = _mm512_loadu_si512(w);
        _mm512_store_si512(to, amx_pairs(_mm512_slli_epi16(word, 3)));
        _mm512_store_si512(to + AMX_ROW_BYTES, amx_pairs(_mm512_srli_epi16(word, 1)));
        _mm512_store_si512(to + 2 * AMX_ROW_BYTES, amx_pairs(_mm512_srli_epi16(word, 5)));
        _mm512_store_si512(to + 3 * AMX_ROW_BYTES, amx_pairs(_mm512_srli_epi16(word, 9)));
    }
}

INLINE size_t amx_block_bytes(const quantised *q) { return (size_t)q->k * BLOCK_ROWS * 2; }

INLINE void amx_unpack_block(const quantised *q, const uint8_t *w, uint8_t *to) {
    const uint32_t words = q->group / 8;
    for (uint32_t g = 0; g < q->k / q->group;
         g++, w += words * WORD_BYTES + GROUP_BYTES, to += q->group * BLOCK_ROWS * 2)
        amx_unpack(w, words, to);
}

// Memory of one pass.  Loads whose address agrees in the last 12 bits with a store under way are held up, so the two
// slots lie in different halves of a page.
typedef struct {
    _Alignas(4096) uint8_t unpacked[2][2 * AMX_BYTES];
    float sums[2][AMX_BATCH][LANES];
} amx_slots;

// Adds step s of the row to its batch; a batch ends with `last`.
INLINE void amx_multiply_step(
    const uint8_t *x, const uint8_t *unpacked, uint32_t tiles, uint32_t s, bool last, amx_slots *slots) {
    if (s % AMX_BATCH == 0) _tile_zero(BATCH_SUMS);
    for (uint32_t c = 0; c < tiles; c++) {
        _tile_loadd(BATCH, x + c * AMX_BATCH * AMX_ROW_BYTES, AMX_ROW_BYTES);
        _tile_loadd(WEIGHTS, unpacked + c * AMX_BYTES, AMX_ROW_BYTES);
        _tile_dpbf16ps(BATCH_SUMS, BATCH, WEIGHTS);
    }
    if (last || (s + 1) % AMX_BATCH == 0) _tile_stored(BATCH_SUMS, slots->sums[s / AMX_BATCH % 2], AMX_ROW_BYTES);
}

// Scales, biases and Σx of the groups of a row, as its steps are closed one after the other.
typedef struct {
    const uint8_t *scales;
    const float *x;
    lanes part, total;
} amx_closing;

INLINE void amx_close_step(const quantised *q, uint32_t s, uint32_t per_group, const amx_slots *slots, amx_closing *c) {
    c->part = lanes_add(c->part, lanes_load(slots->sums[s / AMX_BATCH % 2][s % AMX_BATCH]));
    if ((s + 1) % per_group) return;
    close_group(c->scales, AMX_OFFSET, 1, &c->part, c->x++, &c->total);
    c->scales += q->group / 8 * WORD_BYTES + GROUP_BYTES;
    c->part = lanes_set(0);
}

// A block against one row.  Tile registers are filled from memory, where what was just stored cannot be had at once; so
// a step is multiplied after the next one has been unpacked, and closed a batch later.
INLINE void amx_row_of(
    const quantised *q, uint32_t columns, uint32_t per_group, const uint8_t *w, const uint8_t *x, lanes *out) {
    amx_slots slots;
    const uint32_t steps = q->k / columns;
    const uint32_t words = columns / 8, tiles = columns / AMX_COLUMNS, x_pitch = columns * 2 * AMX_BATCH;
    amx_closing closing = {
        w + q->group / 8 * WORD_BYTES, (const float *)(x + (size_t)steps * x_pitch), lanes_set(0), lanes_set(0)};
    UNROLL_BATCH
    for (uint32_t s = 0; s < steps + AMX_BATCH + 1; s++) {
        if (s < steps) {
            prefetch_weights(w, words * WORD_BYTES + GROUP_BYTES);
            amx_unpack(w, words, slots.unpacked[s % 2]);
            w += words * WORD_BYTES + ((s + 1) % per_group ? 0 : GROUP_BYTES);
        }
        if (s >= AMX_BATCH + 1) amx_close_step(q, s - AMX_BATCH - 1, per_group, &slots, &closing);
        if (s >= 1 && s <= steps)
            amx_multiply_step(
                x + (size_t)(s - 1) * x_pitch, slots.unpacked[(s - 1) % 2], tiles, s - 1, s == steps, &slots);
    }
    *out = closing.total;
}

INLINE void amx_row(const quantised *q, const uint8_t *w, const uint8_t *x, lanes *out) {
    if (q->group == 64) return amx_row_of(q, 64, 1, w, x, out); // literals: the loop has next to nothing to decide
    amx_row_of(q, amx_step(q), q->group / amx_step(q), w, x, out);
}

// sums = Σ x·q of a step for 16 rows.
INLINE void amx_multiply_rows(const uint8_t *x, const uint8_t *unpacked, uint32_t tiles, lanes *sums) {
    _tile_zero(SUMS);
    for (uint32_t c = 0; c < tiles; c++) {
        _tile_loadd(ROWS, x + c * AMX_BYTES, AMX_ROW_BYTES);
        _tile_loadd(WEIGHTS, unpacked + c * AMX_BYTES, AMX_ROW_BYTES);
        _tile_dpbf16ps(SUMS, ROWS, WEIGHTS);
    }
    _tile_stored(SUMS, sums, AMX_ROW_BYTES);
}

// A block against a panel of up to 16 rows, in steps as in amx_row.  `opened` is the unpacked block where there is one.
INLINE void amx_rows_of(const quantised *q, uint32_t columns, uint32_t per_group, const uint8_t *w,
    const uint8_t *opened, const uint8_t *x, lanes *out) {
    amx_slots slots;
    _Alignas(64) lanes part[2][AMX_ROWS];
    const uint32_t steps = q->k / columns, words = columns / 8, tiles = columns / AMX_COLUMNS;
    const uint32_t group_bytes = per_group * words * WORD_BYTES + GROUP_BYTES;
    const uint8_t *scales = w + per_group * words * WORD_BYTES;
    const float *sums = (const float *)(x + (size_t)q->k * 2 * AMX_ROWS);
    lanes total[AMX_ROWS];
    UNROLL
    for (int m = 0; m < AMX_ROWS; m++) total[m] = lanes_set(0);
    for (uint32_t s = 0; s < steps + 2; s++) {
        if (!opened && s < steps) {
            prefetch_weights(w, words * WORD_BYTES + GROUP_BYTES);
            amx_unpack(w, words, slots.unpacked[s % 2]);
            w += words * WORD_BYTES + ((s + 1) % per_group ? 0 : GROUP_BYTES);
        }
        if (s >= 2 && (s - 1) % per_group == 0) {
            for (int m = 0; per_group == 2 && m < AMX_ROWS; m++) part[1][m] = lanes_add(part[0][m], part[1][m]);
            close_group(scales, AMX_OFFSET, AMX_ROWS, part[s % 2], sums, total);
            scales += group_bytes;
            sums += AMX_ROWS;
        }
        if (s >= 1 && s <= steps) {
            const uint8_t *unpacked =
                opened ? opened + (size_t)(s - 1) * tiles * AMX_BYTES : slots.unpacked[(s - 1) % 2];
            amx_multiply_rows(x + (size_t)(s - 1) * tiles * AMX_BYTES, unpacked, tiles, part[(s - 1) % 2]);
        }
    }
    UNROLL
    for (int m = 0; m < AMX_ROWS; m++) out[m] = total[m];
}

INLINE void amx_rows(const quantised *q, const uint8_t *w, const uint8_t *opened, const uint8_t *x, lanes *out) {
    if (q->group == 64)
        return opened ? amx_rows_of(q, 64, 1, w, opened, x, out) : amx_rows_of(q, 64, 1, w, NULL, x, out);
    amx_rows_of(q, amx_step(q), q->group / amx_step(q), w, opened, x, out);
}

#undef SUMS
#undef ROWS
#undef WEIGHTS
#undef BATCH_SUMS
#undef BATCH

#endif
