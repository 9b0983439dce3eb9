// SPDX-License-Identifier: Apache-2.0
// What all tiles share: the layout of weights and of packed activations, and the end of a quantisation group.
// Not here: the products themselves (tile.h).
#ifndef LILY_CPU_TILE_COMMON_H
#define LILY_CPU_TILE_COMMON_H

#include "cpu.h"
#include "vec.h"

#if defined(__AVX512BF16__)
#define TILE_BF16 1
#else
#define TILE_BF16 0
#endif
#if defined(__AMX_BF16__)
#define TILE_AMX 1
#else
#define TILE_AMX 0
#endif

// Rows of activations that one pass over the weights serves: as many as leave the accumulators in registers.
#if VL == 16
#define PANEL_ROWS 16
#elif VL == 8
#define PANEL_ROWS 6
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
#if VL == 16 // GCC's own conversion takes several detours
    a.part[0] = (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    UNROLL
    for (int i = 0; i < LANES / VL; i++) a.part[i] = vf_load_bf16((const uint16_t *)p + i * VL);
#endif
    return a;
}

INLINE void lanes_store(float *p, lanes a) {
    UNROLL
    for (int i = 0; i < LANES / VL; i++) vf_store(p + i * VL, a.part[i]);
}

// Where a pass serves one row, memory is the limit: weights are fetched far ahead into the second-level cache and just
// ahead into the first.  Measured on x86; Arm's cores do it by themselves.
#define PREFETCH_NEAR 2048
#define PREFETCH_FAR 16384

INLINE void prefetch_weights(const uint8_t *w, uint32_t bytes) {
#if defined(__x86_64__)
    for (uint32_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(w + at + PREFETCH_NEAR, 0, 3);
        __builtin_prefetch(w + at + PREFETCH_FAR, 0, 2);
    }
#else
    (void)w, (void)bytes;
#endif
}

// Ends a group: total += scale·part + bias·Σx, where `part` was summed with q + offset in place of q.
INLINE void close_group(
    const uint8_t *scales, float offset, int rows, const lanes *part, const float *sums, lanes *total) {
    const lanes scale = lanes_bf16(scales);
    lanes bias = lanes_bf16(scales + 2 * BLOCK_ROWS);
    if (offset != 0) bias = lanes_fma(scale, lanes_set(-offset), bias);
    UNROLL
    for (int m = 0; m < rows; m++) total[m] = lanes_fma(bias, lanes_set(sums[m]), lanes_fma(scale, part[m], total[m]));
}

#if TILE_BF16
// bf16 of 0..15, twice: a lookup uses the low five bits of its index.
INLINE __m512i nibble_table(void) {
    return _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100,
        0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170));
}

// Rounds 16 activations and stores them as pairs of columns (8j+n, 8j+4+n), n = 0..3: what the two 16-bit halves of
// word j hold at nibble n.  Returns sum + the rounded values.
INLINE lanes pack_pairs(const float *x, lanes sum, void *to) {
    const __m256i order = _mm256_setr_epi16(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x));
    _mm256_storeu_si256(to, _mm256_permutexvar_epi16(order, rounded));
    sum.part[0] += (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16);
    return sum;
}
#endif

#endif
