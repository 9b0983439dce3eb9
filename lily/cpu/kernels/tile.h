// SPDX-License-Identifier: Apache-2.0
// Quantised matrix times packed activations: the arithmetic of every matrix kernel.
//
// Weights are in the rows16 layout (lily/weights.py): blocks of 16 rows; per block and quantisation group `group·bits/32`
// words of each of the 16 rows side by side, then 16 bf16 scales and 16 bf16 biases.  One 64-byte load thus holds 32/bits
// columns of 16 rows, and each row accumulates in a lane of its own: there are no sums across lanes.
//
//     y[row] = Σ_g ( scale[g,row]·Σ q·x + bias[g,row]·Σ x ),    inner sums in column order, groups in order
//
// A lane's operations depend on nothing but its own row and its own activations.  So a result has the same bits in a
// matrix-vector product, in a large matrix product and in an expert's tile of rows, whatever lies beside it.
//
// Activations are float32; with AVX512-BF16 and AMX those of 4-bit matrices are rounded to bf16 (nearest even), and sums
// are float32.
#ifndef LILY_CPU_TILE_H
#define LILY_CPU_TILE_H

#include "tile_common.h"
#if TILE_AMX
#include "tile_amx.h"
#endif

// ---- packed activations -----------------------------------------------------------------------------------------------
// A panel holds up to PANEL_ROWS rows side by side, column by column in the order in which a tile meets them, then Σ x
// of every group and row.

INLINE size_t panel_bytes(const quantised *w, uint32_t rows) {
    const size_t value = TILE_BF16 && w->bits == 4 ? 2 : 4;
#if TILE_AMX
    if (w->bits == 4) return amx_panel_bytes(w, rows);
#endif
    return rows * (w->k * value + w->k / w->group * sizeof(float));
}

// Field f of a word is cut out where it stands, at f·bits (mod 16), so its activation is divided by that power of two:
// exact, and it saves the shift.
INLINE void pack_row_float(const quantised *w, const float *x, uint32_t rows, float *to) {
    const uint32_t fields = 16 / w->bits;
    for (uint32_t c = 0; c < w->k; c++) to[(size_t)c * rows] = x[c] / (float)(1u << (c % fields * w->bits));
    float *sums = to + (size_t)w->k * rows;
    for (uint32_t g = 0; g < w->k / w->group; g++) {
        lanes sum = lanes_set(0);
        for (uint32_t c = 0; c < w->group; c += LANES) sum = lanes_add(sum, lanes_load(x + g * w->group + c));
        sums[(size_t)g * rows] = lanes_sum(sum);
    }
}

#if TILE_BF16 && !TILE_AMX
INLINE void pack_row_bf16(const quantised *w, const float *x, uint32_t rows, uint32_t *to) {
    float *sums = (float *)(to + (size_t)w->k / 2 * rows);
    for (uint32_t g = 0; g < w->k / w->group; g++) {
        lanes sum = lanes_set(0);
        for (uint32_t c = 0; c < w->group; c += LANES, x += LANES) {
            uint32_t pairs[LANES / 2];
            sum = pack_pairs(x, sum, pairs);
            for (int i = 0; i < LANES / 2; i++, to += rows) *to = pairs[i];
        }
        sums[(size_t)g * rows] = lanes_sum(sum);
    }
}
#endif

// Packs `rows` <= PANEL_ROWS rows into a panel.
SHARED void pack_panel(const quantised *w, const float *const *x, uint32_t rows, void *panel) {
    for (uint32_t m = 0; m < rows; m++) {
#if TILE_AMX
        if (w->bits == 4) {
            amx_pack_row(w, x[m], rows, m, panel);
            continue;
        }
#elif TILE_BF16
        if (w->bits == 4) {
            pack_row_bf16(w, x[m], rows, (uint32_t *)panel + m);
            continue;
        }
#endif
        pack_row_float(w, x[m], rows, (float *)panel + m);
    }
}

// ---- tiles ------------------------------------------------------------------------------------------------------------
// out[b][m] = block b times row m of the panel; block b lies at w + b·stride.  `blocks`, `rows` and `bits` are literals
// where these are called.

#define TILE_MAX_BLOCKS 2

INLINE lane_words load_words(const uint8_t *p, int shift) {
    lane_words w;
    UNROLL
    for (int i = 0; i < LANES / VL; i++) w.part[i] = ((const vu_any *)p)[i] >> shift;
    return w;
}

// The bits under `mask` as floats; mask <= 0xffff.
INLINE lanes field(lane_words w, uint32_t mask) {
    lanes a;
    UNROLL
    for (int i = 0; i < LANES / VL; i++) a.part[i] = __builtin_convertvector((vi)(w.part[i] & mask), vf);
    return a;
}

INLINE void tile_float(
    const quantised *q, int bits, const uint8_t *w, size_t stride, int blocks, const float *x, int rows, lanes *out) {
    const uint32_t words = q->group * (uint32_t)bits / 32, groups = q->k / q->group;
    const float *sums = x + (size_t)q->k * (uint32_t)rows;
    UNROLL
    for (int i = 0; i < blocks * rows; i++) out[i] = lanes_set(0);
    for (uint32_t g = 0; g < groups; g++, sums += rows, w += GROUP_BYTES) {
        lanes part[TILE_MAX_BLOCKS * PANEL_ROWS];
        UNROLL
        for (int i = 0; i < blocks * rows; i++) part[i] = lanes_set(0);
        for (int b = 0; rows == 1 && b < blocks; b++)
            prefetch_weights(w + (size_t)b * stride, words * WORD_BYTES + GROUP_BYTES);
        for (uint32_t j = 0; j < words; j++, w += WORD_BYTES) {
            UNROLL
            for (int f = 0; f < 32 / bits; f++, x += rows) {
                const int at = f * bits % 16;
                lanes value[TILE_MAX_BLOCKS];
                UNROLL
                for (int b = 0; b < blocks; b++)
                    value[b] = field(load_words(w + (size_t)b * stride, f * bits - at), ((1u << bits) - 1) << at);
                UNROLL
                for (int m = 0; m < rows; m++) {
                    const lanes xm = lanes_set(x[m]);
                    UNROLL
                    for (int b = 0; b < blocks; b++) part[b * rows + m] = lanes_fma(value[b], xm, part[b * rows + m]);
                }
            }
        }
        UNROLL
        for (int b = 0; b < blocks; b++)
            close_group(w + (size_t)b * stride, 0, rows, part + b * rows, sums, out + b * rows);
    }
}

#if TILE_BF16 && !TILE_AMX
// As tile_float for 4 bits.  A word's 16-bit halves hold columns 8j..8j+3 and 8j+4..8j+7; the table lookup, which uses
// the low five bits of its index, turns nibble n of both into bf16 for one step of the pairwise dot product.
INLINE void tile_bf16(
    const quantised *q, const uint8_t *w, size_t stride, int blocks, const uint32_t *x, int rows, lanes *out) {
    const __m512i table = nibble_table();
    const uint32_t words = q->group / 8, groups = q->k / q->group;
    const float *sums = (const float *)(x + (size_t)q->k / 2 * (uint32_t)rows);
    UNROLL
    for (int i = 0; i < blocks * rows; i++) out[i] = lanes_set(0);
    for (uint32_t g = 0; g < groups; g++, sums += rows, w += GROUP_BYTES) {
        lanes part[TILE_MAX_BLOCKS * PANEL_ROWS];
        UNROLL
        for (int i = 0; i < blocks * rows; i++) part[i] = lanes_set(0);
        for (int b = 0; rows == 1 && b < blocks; b++)
            prefetch_weights(w + (size_t)b * stride, words * WORD_BYTES + GROUP_BYTES);
        for (uint32_t j = 0; j < words; j++, w += WORD_BYTES) {
            __m512i word[TILE_MAX_BLOCKS];
            UNROLL
            for (int b = 0; b < blocks; b++) {
                word[b] = _mm512_loadu_si512(w + (size_t)b * stride);
            }
            UNROLL
            for (int n = 0; n < 4; n++, x += rows) {
                __m512bh value[TILE_MAX_BLOCKS];
                UNROLL
                for (int b = 0; b < blocks; b++)
                    value[b] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(word[b], 4 * n), table);
                UNROLL
                for (int m = 0; m < rows; m++) {
                    const __m512bh xm = (__m512bh)_mm512_set1_epi32((int)x[m]);
                    UNROLL
                    for (int b = 0; b < blocks; b++) {
                        vf *sum = &part[b * rows + m].part[0];
                        *sum = (vf)_mm512_dpbf16_ps((__m512)*sum, value[b], xm);
                    }
                }
            }
        }
        UNROLL
        for (int b = 0; b < blocks; b++)
            close_group(w + (size_t)b * stride, 0, rows, part + b * rows, sums, out + b * rows);
    }
}
#endif

INLINE void tile_any(
    const quantised *q, const uint8_t *w, size_t stride, int blocks, const void *panel, int rows, lanes *out) {
#if TILE_BF16 && !TILE_AMX
    if (q->bits == 4) return tile_bf16(q, w, stride, blocks, panel, rows, out);
#elif !TILE_AMX
    if (q->bits == 4) return tile_float(q, 4, w, stride, blocks, panel, rows, out);
#endif
    tile_float(q, 8, w, stride, blocks, panel, rows, out);
}

// ---- what products are made of ----------------------------------------------------------------------------------------

// Around any number of the calls below, on the same thread.
INLINE void tiles_begin(void) {
#if TILE_AMX
    amx_begin();
#endif
}

INLINE void tiles_end(void) {
#if TILE_AMX
    amx_end();
#endif
}

// Two blocks against one row, the shape of decode: two independent chains of sums hide each other's latency.
SHARED void tile_pair(const quantised *q, const uint8_t *w, size_t stride, const void *panel, lanes *out) {
#if TILE_AMX
    if (q->bits == 4) {
        amx_row(q, w, panel, &out[0]);
        amx_row(q, w + stride, panel, &out[1]);
        return;
    }
#endif
    tile_any(q, w, stride, 2, panel, 1, out);
}

// One block against one row.
SHARED void tile_one(const quantised *q, const uint8_t *w, const void *panel, lanes *out) {
#if TILE_AMX
    if (q->bits == 4) return amx_row(q, w, panel, out);
#endif
    tile_any(q, w, 0, 1, panel, 1, out);
}

// A block that meets many panels may be unpacked once: `scratch` bytes for it, 0 where it is used as it is.
INLINE size_t open_bytes(const quantised *q) {
#if TILE_AMX
    if (q->bits == 4) return amx_block_bytes(q);
#endif
    (void)q;
    return 0;
}

INLINE void open_block(const quantised *q, const uint8_t *w, void *scratch) {
#if TILE_AMX
    if (q->bits == 4) amx_unpack_block(q, w, scratch);
#endif
    (void)q, (void)w, (void)scratch;
}

// One block against all rows of a panel; `opened` may be null.
SHARED void tile_rows(
    const quantised *q, const uint8_t *w, const void *opened, const void *panel, uint32_t rows, lanes *out) {
    (void)opened;
#if TILE_AMX
    if (q->bits == 4) {
        if (rows == 1) return tile_one(q, w, panel, out);
        return amx_rows(q, w, opened, panel, out);
    }
#endif
    switch (rows) {
#define ROWS(r) \
    case r: \
        tile_any(q, w, 0, 1, panel, r, out); \
        break;
        ROWS(1)
        ROWS(2)
#if PANEL_ROWS > 2
        ROWS(3)
        ROWS(4)
#endif
#if PANEL_ROWS > 4
        ROWS(5)
        ROWS(6)
#endif
#if PANEL_ROWS > 6
        ROWS(7)
        ROWS(8)
        ROWS(9)
        ROWS(10)
        ROWS(11)
        ROWS(12)
        ROWS(13)
        ROWS(14)
        ROWS(15)
        ROWS(16)
#endif
#undef ROWS
    }
}

#endif
