// SPDX-License-Identifier: Apache-2.0
// Grouped-query attention of a tile of queries over the cache, once for decode and prefill.
//
// The queries of a tile (rows × the query heads of one KV head) walk over the cache in splits, splits in blocks of
// ATTN_BLOCK positions.  A block is turned into float32 once for all queries: keys transposed, so that lanes are
// positions and a score is a plain sum over the head's dims; values as they are, so that lanes are dims and an output is
// a plain sum over positions.  No sum depends on which queries share a tile, so decode and prefill give the same bits.
// Positions beyond a query's own are never part of a sum, whatever the cache holds there.
//
// head dim: a multiple of 16.  Not here: kernels (attention_decode.h, attention_prefill.h).
#ifndef LILY_CPU_ATTENTION_TILE_H
#define LILY_CPU_ATTENTION_TILE_H

#include "cpu.h"
#include "vec.h"

#define ATTN_BLOCK 64

// A register tile: ATTN_QUERIES queries × two vectors.
#if VL == 8 || defined(__SSE2__) && VL == 4
#define ATTN_QUERIES 4 // 16 registers
#else
#define ATTN_QUERIES 8 // 32 registers
#endif
#define ATTN_STRIP (2 * VL)

typedef struct {
    uint32_t queries; // padded to whole panels of ATTN_QUERIES
    uint32_t rep;     // query heads of a KV head; query i belongs to row i / rep
    uint32_t dim;
    uint32_t position; // of row 0
    uint32_t last;     // position of the last row
    float *q;          // [panel][dim][ATTN_QUERIES], scaled by 1/√dim
    float *keys;       // [strip][dim][ATTN_STRIP] of one block
    float *values;     // [dim / ATTN_STRIP][ATTN_BLOCK][ATTN_STRIP] of one block; a last strip may be narrower
    float *weights;    // [ATTN_QUERIES][ATTN_BLOCK]
    float *sum;        // [queries][dim], of the split
    float *max_total;  // [queries][2], of the split: maximum and sum of exponentials
} attn_tile;

typedef struct {
    const uint16_t *k, *v; // of one KV head
    size_t stride;         // between positions
} attn_cache;

INLINE uint32_t attn_padded(uint32_t queries) { return (queries + ATTN_QUERIES - 1) / ATTN_QUERIES * ATTN_QUERIES; }

INLINE size_t attn_tile_floats(uint32_t queries, uint32_t dim) {
    size_t n = attn_padded(queries);
    return 2 * n * dim + 2 * ATTN_BLOCK * (size_t)dim + ATTN_QUERIES * ATTN_BLOCK + (2 * n + 15) / 16 * 16;
}

// Divides `memory`, attn_tile_floats floats.
INLINE void attn_tile_init(
    attn_tile *t, uint32_t queries, uint32_t rep, uint32_t dim, uint32_t position, float *memory) {
    size_t n = attn_padded(queries);
    *t = (attn_tile){.queries = (uint32_t)n, .rep = rep, .dim = dim, .position = position};
    t->last = position + (queries - 1) / rep;
    t->q = memory;
    t->sum = t->q + n * dim;
    t->keys = t->sum + n * dim;
    t->values = t->keys + ATTN_BLOCK * (size_t)dim;
    t->weights = t->values + ATTN_BLOCK * (size_t)dim;
    t->max_total = t->weights + ATTN_QUERIES * ATTN_BLOCK;
    memset(t->q, 0, n * dim * sizeof *t->q);
}

// Query i of the tile is x[dim].
INLINE void attn_tile_query(const attn_tile *t, uint32_t i, const float *x) {
    float *q = t->q + (size_t)(i / ATTN_QUERIES) * ATTN_QUERIES * t->dim + i % ATTN_QUERIES;
    const float scale = 1.0f / sqrtf((float)t->dim);
    for (uint32_t d = 0; d < t->dim; d++) q[d * ATTN_QUERIES] = x[d] * scale;
}

// ---- one block of positions -----------------------------------------------------------------------------------------

// VL positions, two dims in a word: four words at a time are transposed and split.
INLINE void attn_keys_group(const uint16_t *k, size_t stride, uint32_t dim, float *out) {
    for (uint32_t d = 0; d < dim; d += 8) {
        vu r[4];
        UNROLL
        for (int i = 0; i < 4; i++) r[i] = vu_gather4(k + i * stride + d, 4 * stride * sizeof *k);
        vu_transpose4(r);
        UNROLL
        for (int i = 0; i < 4; i++) {
            vf_store(out + (d + 2 * i) * ATTN_STRIP, (vf)(r[i] << 16));
            vf_store(out + (d + 2 * i + 1) * ATTN_STRIP, (vf)(r[i] & 0xffff0000));
        }
    }
}

// n positions from `first` on; `spare` is room for VL rows.  Lanes of the last group beyond n become 0.
INLINE void attn_load_keys(const attn_tile *t, const attn_cache *c, size_t first, uint32_t n, uint16_t *spare) {
    for (uint32_t i = 0; i < n; i += VL) {
        const uint16_t *k = c->k + (first + i) * c->stride;
        float *out = t->keys + (size_t)(i / ATTN_STRIP) * ATTN_STRIP * t->dim + i % ATTN_STRIP;
        if (n - i >= VL) {
            attn_keys_group(k, c->stride, t->dim, out);
            continue;
        }
        memset(spare, 0, VL * t->dim * sizeof *spare);
        for (uint32_t j = 0; j < n - i; j++) memcpy(spare + j * t->dim, k + j * c->stride, t->dim * sizeof *spare);
        attn_keys_group(spare, t->dim, t->dim, out);
    }
}

INLINE uint32_t attn_strip_width(uint32_t dim, uint32_t at) { return dim - at < ATTN_STRIP ? VL : ATTN_STRIP; }

INLINE void attn_load_values(const attn_tile *t, const attn_cache *c, size_t first, uint32_t n) {
    for (uint32_t j = 0; j < n; j++) {
        const uint16_t *v = c->v + (first + j) * c->stride;
        for (uint32_t at = 0, width; at < t->dim; at += width) {
            width = attn_strip_width(t->dim, at);
            for (uint32_t i = 0; i < width; i += VL)
                vf_store(t->values + (size_t)at * ATTN_BLOCK + j * width + i, vf_load_bf16(v + at + i));
        }
    }
}

// out[a] = factor[a]·out[a] + Σ_{j<n} left[a·step_a + j·step_j]·right[j] for `queries` rows of `vectors` (1 or 2) vectors.
// factor NULL: out starts from zero.
INLINE void attn_product(const float *left, size_t step_a, size_t step_j, const float *right, uint32_t n,
    const float *factor, float *out, size_t pitch, int queries, int vectors) {
    vf s0[ATTN_QUERIES], s1[ATTN_QUERIES];
    UNROLL
    for (int a = 0; a < queries; a++) {
        s0[a] = factor ? vf_load(out + a * pitch) * vf_set(factor[a]) : vf_set(0);
        if (vectors == 2) s1[a] = factor ? vf_load(out + a * pitch + VL) * vf_set(factor[a]) : vf_set(0);
    }
    for (uint32_t j = 0; j < n; j++, left += step_j, right += vectors * VL) {
        vf r0 = vf_load(right), r1 = vectors == 2 ? vf_load(right + VL) : r0;
        UNROLL
        for (int a = 0; a < queries; a++) {
            vf x = vf_set(left[a * step_a]);
            s0[a] = vf_fma(x, r0, s0[a]);
            if (vectors == 2) s1[a] = vf_fma(x, r1, s1[a]);
        }
    }
    UNROLL
    for (int a = 0; a < queries; a++) {
        vf_store(out + a * pitch, s0[a]);
        if (vectors == 2) vf_store(out + a * pitch + VL, s1[a]);
    }
}

// Turns a query's scores of `valid` positions into weights relative to the new maximum; what was summed up before has to
// be multiplied by the result.
INLINE float attn_softmax(float *s, uint32_t valid, float *max_total) {
    lanes top = lanes_set(-INFINITY), total = lanes_set(0);
    for (uint32_t i = 0; i < valid; i += LANES) {
        UNROLL
        for (int j = 0; j < LANES / VL; j++) {
            vi inside = vi_iota() < vi_set((int32_t)(valid - i) - j * VL);
            vf x = vf_select(inside, vf_load(s + i + j * VL), vf_set(-INFINITY));
            vf_store(s + i + j * VL, x);
            top.part[j] = vf_max(top.part[j], x);
        }
    }
    float before = max_total[0], now = lanes_max(top);
    if (before > now) now = before;
    for (uint32_t i = 0; i < valid; i += LANES) {
        UNROLL
        for (int j = 0; j < LANES / VL; j++) {
            vf p = vf_exp(vf_load(s + i + j * VL) - now);
            vf_store(s + i + j * VL, p);
            total.part[j] += p;
        }
    }
    float factor = exp_one(before - now);
    max_total[0] = now;
    max_total[1] = max_total[1] * factor + lanes_sum(total);
    return factor;
}

// The weighted values of `queries` (1 or ATTN_QUERIES) queries that see the same n positions.
INLINE void attn_weigh(const attn_tile *t, uint32_t query, uint32_t n, const float *factor, int queries) {
    const float *weights = t->weights + query % ATTN_QUERIES * ATTN_BLOCK;
    for (uint32_t at = 0, width; at < t->dim; at += width) {
        width = attn_strip_width(t->dim, at);
        const float *values = t->values + (size_t)at * ATTN_BLOCK;
        float *out = t->sum + (size_t)query * t->dim + at;
        if (width == ATTN_STRIP)
            attn_product(weights, ATTN_BLOCK, 1, values, n, factor, out, t->dim, queries, 2);
        else
            attn_product(weights, ATTN_BLOCK, 1, values, n, factor, out, t->dim, queries, 1);
    }
}

// How many of the n positions from `first` on query i sees.
INLINE uint32_t attn_valid(const attn_tile *t, uint32_t i, size_t first, uint32_t n) {
    size_t position = t->position + i / t->rep;
    if (position > t->last) position = t->last; // padding
    if (position < first) return 0;
    return position - first + 1 < n ? (uint32_t)(position - first + 1) : n;
}

SHARED void attn_panel(const attn_tile *t, uint32_t query, size_t first, uint32_t n) {
    uint32_t least = n, most = 0, valid[ATTN_QUERIES];
    float factor[ATTN_QUERIES];
    for (uint32_t a = 0; a < ATTN_QUERIES; a++) {
        valid[a] = attn_valid(t, query + a, first, n);
        least = valid[a] < least ? valid[a] : least;
        most = valid[a] > most ? valid[a] : most;
    }
    for (uint32_t at = 0; at < most; at += ATTN_STRIP)
        attn_product(t->q + (size_t)query * t->dim, 1, ATTN_QUERIES, t->keys + (size_t)at * t->dim, t->dim, NULL,
            t->weights + at, ATTN_BLOCK, ATTN_QUERIES, 2);
    for (uint32_t a = 0; a < ATTN_QUERIES; a++)
        if (valid[a] > 0)
            factor[a] = attn_softmax(t->weights + a * ATTN_BLOCK, valid[a], t->max_total + 2 * (query + a));
    if (least == most && most > 0)
        attn_weigh(t, query, most, factor, ATTN_QUERIES);
    else
        for (uint32_t a = 0; a < ATTN_QUERIES; a++)
            if (valid[a] > 0) attn_weigh(t, query + a, valid[a], factor + a, 1);
}

// Fills sum and max_total for the positions first <= p < end, as far as each query sees them.
SHARED void attn_split(const attn_tile *t, const attn_cache *c, size_t first, size_t end) {
    memset(t->sum, 0, (size_t)t->queries * t->dim * sizeof *t->sum);
    for (uint32_t i = 0; i < t->queries; i++) t->max_total[2 * i] = -INFINITY, t->max_total[2 * i + 1] = 0;
    if (end > (size_t)t->last + 1) end = (size_t)t->last + 1;
    for (; first < end; first += ATTN_BLOCK) {
        uint32_t n = end - first < ATTN_BLOCK ? (uint32_t)(end - first) : ATTN_BLOCK;
        attn_load_keys(t, c, first, n, (uint16_t *)t->values); // the values come after
        attn_load_values(t, c, first, n);
        for (uint32_t i = 0; i < t->queries; i += ATTN_QUERIES) attn_panel(t, i, first, n);
    }
}

// Adds a split to a running result (sum, maximum and total), which starts as zeros with maximum -inf.
INLINE void attn_merge(float *o, float *max_total, const float *part, const float *part_max_total, uint32_t dim) {
    float m = max_total[0] > part_max_total[0] ? max_total[0] : part_max_total[0];
    float a = exp_one(max_total[0] - m), b = exp_one(part_max_total[0] - m);
    for (uint32_t d = 0; d < dim; d += VL)
        vf_store(o + d, vf_fma(vf_load(part + d), vf_set(b), vf_load(o + d) * vf_set(a)));
    max_total[0] = m;
    max_total[1] = max_total[1] * a + part_max_total[1] * b;
}

INLINE void attn_finish(float *o, const float *max_total, uint32_t dim) {
    float inverse = 1.0f / max_total[1];
    for (uint32_t d = 0; d < dim; d += VL) vf_store(o + d, vf_load(o + d) * vf_set(inverse));
}

#endif
