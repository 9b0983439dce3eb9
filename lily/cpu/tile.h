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
// Activations are float32; with AVX512-BF16 those of 4-bit matrices are rounded to bf16 (nearest even), accumulated in
// float32.
#ifndef LILY_CPU_TILE_H
#define LILY_CPU_TILE_H

#include "cpu.h"
#include "vec.h"

#if defined(__AVX512BF16__)
#define TILE_BF16 1
#else
#define TILE_BF16 0
#endif

// Rows of activations that one pass over the weights serves: as many as leave the accumulators in registers.
#if VL == 16
#define PANEL_ROWS 16
#elif VL == 8
#define PANEL_ROWS 4
#elif defined(__aarch64__)
#define PANEL_ROWS 4
#else
#define PANEL_ROWS 2
#endif

#define BLOCK_ROWS LANES
#define WORD_BYTES (4 * BLOCK_ROWS)  // one word of each row
#define GROUP_BYTES (4 * BLOCK_ROWS) // scales and biases of one quantisation group

typedef struct {
    const uint8_t *data;
    uint32_t k;
    uint32_t bits, group;
} quantised;

typedef struct {
    vu part[LANES / VL];
} lane_words;

INLINE size_t block_bytes(const quantised *w) {
    return (size_t)(w->k / w->group) * (w->group * w->bits / 32 * WORD_BYTES + GROUP_BYTES);
}

INLINE uint32_t blocks_of(uint32_t n) { return (n + BLOCK_ROWS - 1) / BLOCK_ROWS; }

INLINE const uint8_t *block_at(const quantised *w, size_t block) { return w->data + block * block_bytes(w); }

INLINE lanes lanes_bf16(const uint8_t *p) {
    lanes a;
    UNROLL
    for (int i = 0; i < LANES / VL; i++) a.part[i] = vf_load_bf16((const uint16_t *)p + i * VL);
    return a;
}

INLINE void lanes_store(float *p, lanes a) {
    UNROLL
    for (int i = 0; i < LANES / VL; i++) vf_store(p + i * VL, a.part[i]);
}

// ---- packed activations -----------------------------------------------------------------------------------------------
// A panel holds up to PANEL_ROWS rows side by side, column by column in the order in which tile() meets them, then
// Σ x of every group and row.  A panel of r rows takes r·panel_row_bytes().

INLINE size_t panel_row_bytes(const quantised *w) {
    const size_t value = TILE_BF16 && w->bits == 4 ? 2 : 4;
    return w->k * value + w->k / w->group * sizeof(float);
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

#if TILE_BF16
// Pairs of columns (8j+n, 8j+4+n), n = 0..3: what the two 16-bit halves of word j hold at nibble n.
INLINE void pack_row_bf16(const quantised *w, const float *x, uint32_t rows, uint32_t *to) {
    const __m256i order = _mm256_setr_epi16(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    float *sums = (float *)(to + (size_t)w->k / 2 * rows);
    for (uint32_t g = 0; g < w->k / w->group; g++) {
        lanes sum = lanes_set(0);
        for (uint32_t c = 0; c < w->group; c += LANES, x += LANES) {
            const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x));
            sum.part[0] += (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
            uint32_t pairs[8];
            _mm256_storeu_si256((__m256i *)pairs, _mm256_permutexvar_epi16(order, rounded));
            for (int i = 0; i < 8; i++, to += rows) *to = pairs[i];
        }
        sums[(size_t)g * rows] = lanes_sum(sum);
    }
}
#endif

// Packs `rows` <= PANEL_ROWS rows into a panel.
SHARED void pack_panel(const quantised *w, const float *const *x, uint32_t rows, void *panel) {
    for (uint32_t m = 0; m < rows; m++) {
#if TILE_BF16
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
#define PREFETCH_BYTES 3072 // ahead in the weights; matters where a pass serves one row and memory is the limit

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

// Ends a group: total += scale·part + bias·Σx.
INLINE void close_group(const uint8_t *scales, int rows, const lanes *part, const float *sums, lanes *total) {
    const lanes scale = lanes_bf16(scales), bias = lanes_bf16(scales + 2 * BLOCK_ROWS);
    UNROLL
    for (int m = 0; m < rows; m++)
        total[m] = lanes_fma(bias, lanes_set(sums[m]), lanes_fma(scale, part[m], total[m]));
}

INLINE void tile_float(const quantised *q, int bits, const uint8_t *w, size_t stride, int blocks, const float *x, int rows,
    lanes *out) {
    const uint32_t words = q->group * (uint32_t)bits / 32, groups = q->k / q->group;
    const float *sums = x + (size_t)q->k * (uint32_t)rows;
    UNROLL
    for (int i = 0; i < blocks * rows; i++) out[i] = lanes_set(0);
    for (uint32_t g = 0; g < groups; g++, sums += rows, w += GROUP_BYTES) {
        lanes part[TILE_MAX_BLOCKS * PANEL_ROWS];
        UNROLL
        for (int i = 0; i < blocks * rows; i++) part[i] = lanes_set(0);
        for (uint32_t j = 0; j < words; j++, w += WORD_BYTES) {
            UNROLL
            for (int b = 0; rows == 1 && b < blocks; b++) __builtin_prefetch(w + (size_t)b * stride + PREFETCH_BYTES);
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
        for (int b = 0; b < blocks; b++) close_group(w + (size_t)b * stride, rows, part + b * rows, sums, out + b * rows);
    }
}

#if TILE_BF16
// As tile_float for 4 bits.  A word's 16-bit halves hold columns 8j..8j+3 and 8j+4..8j+7; the table lookup, which uses
// the low five bits of its index, turns nibble n of both into bf16 for one step of the pairwise dot product.
INLINE void tile_bf16(const quantised *q, const uint8_t *w, size_t stride, int blocks, const uint32_t *x, int rows,
    lanes *out) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0,
        0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
    const uint32_t words = q->group / 8, groups = q->k / q->group;
    const float *sums = (const float *)(x + (size_t)q->k / 2 * (uint32_t)rows);
    UNROLL
    for (int i = 0; i < blocks * rows; i++) out[i] = lanes_set(0);
    for (uint32_t g = 0; g < groups; g++, sums += rows, w += GROUP_BYTES) {
        lanes part[TILE_MAX_BLOCKS * PANEL_ROWS];
        UNROLL
        for (int i = 0; i < blocks * rows; i++) part[i] = lanes_set(0);
        for (uint32_t j = 0; j < words; j++, w += WORD_BYTES) {
            __m512i word[TILE_MAX_BLOCKS];
            UNROLL
            for (int b = 0; b < blocks; b++) {
                if (rows == 1) __builtin_prefetch(w + (size_t)b * stride + PREFETCH_BYTES);
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
        for (int b = 0; b < blocks; b++) close_group(w + (size_t)b * stride, rows, part + b * rows, sums, out + b * rows);
    }
}
#endif

INLINE void tile_any(const quantised *q, const uint8_t *w, size_t stride, int blocks, const void *panel, int rows,
    lanes *out) {
#if TILE_BF16
    if (q->bits == 4) return tile_bf16(q, w, stride, blocks, panel, rows, out);
#endif
    if (q->bits == 4) return tile_float(q, 4, w, stride, blocks, panel, rows, out);
    tile_float(q, 8, w, stride, blocks, panel, rows, out);
}

// Two blocks against one row, the shape of decode: two independent chains of sums hide each other's latency.
SHARED void tile_pair(const quantised *q, const uint8_t *w, size_t stride, const void *panel, lanes *out) {
    tile_any(q, w, stride, 2, panel, 1, out);
}

// One block against all rows of a panel.
SHARED void tile_rows(const quantised *q, const uint8_t *w, const void *panel, uint32_t rows, lanes *out) {
    switch (rows) {
#define ROWS(r) \
    case r: tile_any(q, w, 0, 1, panel, r, out); break;
        ROWS(1)
        ROWS(2)
#if PANEL_ROWS > 2
        ROWS(3)
        ROWS(4)
#endif
#if PANEL_ROWS > 4
        ROWS(5)
        ROWS(6)
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
