// SPDX-License-Identifier: Apache-2.0
// What both matrix paths of prefill attention share: which queries a threadgroup takes, the cache, and the softmax of a
// block of scores.
//
// Not here: products (attention_prefill.metal on simdgroup_matrix, attention_tensor.h by tensor operations).
#ifndef LILY_ATTENTION_TILE_H
#define LILY_ATTENTION_TILE_H

#include "common.h"
#include "matrix.h"

constant constexpr uint PREFILL_SIMDGROUPS = 8;
constant constexpr uint PREFILL_THREADS = PREFILL_SIMDGROUPS * LANES;
constant constexpr uint PREFILL_KEYS = 64; // positions of a block
constant constexpr uint SCORE_PITCH = PREFILL_KEYS + 4;
constant constexpr uint WEIGHT_PITCH = SCORE_PITCH * sizeof(float) / sizeof(operand);
constant constexpr float PREFILL_LOWEST = -3.0e38f; // instead of -inf, which a compiler may assume away

// Queries that read one head of the cache: `count` of them from `first` on, counted over all rows with `heads` query heads
// each, the first of which is `head`.
struct Queries {
    uint first, count, heads, head, cache_head, position;

    uint row(uint i) const { return (first + i) / heads; }
    uint head_of(uint i) const { return head + (first + i) % heads; }
    uint last_key(uint i) const { return position + row(i); } // that query i sees
    uint keys() const { return last_key(count - 1) + 1; }
};

// One head of K or of V.
struct CacheHead {
    device const bfloat *rows;
    uint stride, last; // elements between positions, last position that may be read

    device const bfloat *at(uint position) const { return rows + min(position, last) * stride; }
};

struct PrefillArguments {
    device const act *q;
    device const act *proj;
    device const bfloat *k;
    device const bfloat *v;
    device act *o;
    uint pitch;

    CacheHead keys(Queries queries) const { return head_of(k, queries); }
    CacheHead values(Queries queries) const { return head_of(v, queries); }

    CacheHead head_of(device const bfloat *cache, Queries queries) const {
        return {cache + queries.cache_head * C_DIM, uint(C_HKV * C_DIM), queries.keys() - 1};
    }

    // o = x · sigmoid(gate) of one element of a query.
    void store(Queries queries, uint query, uint d, float x) const {
        const uint row = queries.row(query), head = queries.head_of(query);
        const float gate = float(proj[row * pitch + (2 * head + 1) * C_DIM + d]);
        o[(row * C_HQ + head) * C_DIM + d] = act(x * sigmoid(gate));
    }
};

// Threadgroup memory of a tile.
struct PrefillScratch {
    threadgroup operand *q;       // staged queries, if they are
    threadgroup float *scores;    // [queries][SCORE_PITCH]
    threadgroup operand *weights; // [queries][WEIGHT_PITCH], over the scores
    threadgroup float *factor;    // [queries] what earlier sums are to be multiplied by, in the end 1/total
};

// A lane's share of the softmax: some positions of one query, whose maximum and sum its lanes hold alike.
template <uint QUERIES> struct SoftmaxShare {
    enum : uint { SHARES = PREFILL_THREADS / QUERIES, KEYS = PREFILL_KEYS / SHARES };

    uint query, first; // first of the lane's positions in the block
    uint last_key;     // that the query sees
    float top, total;

    void init(Queries queries, uint tid) {
        query = tid / SHARES;
        first = tid % SHARES * KEYS;
        last_key = queries.last_key(min(query, queries.count - 1));
        top = PREFILL_LOWEST;
        total = 0;
    }

    // Scores of the block at `base` → powers of two relative to the new maximum, in their place.
    void block(PrefillScratch scratch, uint base, float scale) {
        float x[KEYS], greatest = top, sum = 0;
#pragma unroll
        for (uint i = 0; i < KEYS; i++) {
            const bool seen = base + first + i <= last_key;
            x[i] = seen ? scratch.scores[query * SCORE_PITCH + first + i] * scale : PREFILL_LOWEST;
            greatest = max(greatest, x[i]);
        }
#pragma unroll
        for (uint step = 1; step < SHARES; step *= 2) greatest = max(greatest, simd_shuffle_xor(greatest, step));
        simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (uint i = 0; i < KEYS; i++) {
            const float weight = base + first + i <= last_key ? precise::exp2(x[i] - greatest) : 0.0f;
            sum += weight;
            scratch.weights[query * WEIGHT_PITCH + first + i] = operand(weight);
        }
#pragma unroll
        for (uint step = 1; step < SHARES; step *= 2) sum += simd_shuffle_xor(sum, step);
        const float factor = precise::exp2(top - greatest);
        if (first == 0) scratch.factor[query] = factor;
        total = total * factor + sum;
        top = greatest;
    }

    void finish(PrefillScratch scratch) const {
        if (first == 0) scratch.factor[query] = 1.0f / total;
    }
};

// One tile: `Products` computes scores and sums on a matrix unit.  Interface:
//   Sum                          a thread's sums, a variable of the caller (see matrix.h)
//   init(sum, arguments, queries, scratch, tid, sg, lane)
//   scores(keys, scratch, base)     scores of the block at `base` → scratch.scores
//   add(sum, values, scratch, base) sums · factor + weights · values
//   store(sum, arguments, queries, scratch)
template <typename Products, uint QUERIES>
inline void attend(PrefillArguments a, Queries queries, PrefillScratch scratch, uint tid, uint sg, uint lane) {
    const CacheHead keys = a.keys(queries), values = a.values(queries);
    const float scale = M_LOG2E_F * precise::rsqrt(float(C_DIM));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Products products;
    typename Products::Sum sum;
    products.init(sum, a, queries, scratch, tid, sg, lane);
    SoftmaxShare<QUERIES> share;
    share.init(queries, tid);
    for (uint base = 0; base <= keys.last; base += PREFILL_KEYS) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        products.scores(keys, scratch, base);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        share.block(scratch, base, scale);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        products.add(sum, values, scratch, base);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    share.finish(scratch);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    products.store(sum, a, queries, scratch);
}

#endif
