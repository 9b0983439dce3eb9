// SPDX-License-Identifier: Apache-2.0
// Causal attention of many rows over cache and chunk: attn_prefill on simdgroup_matrix, any head size up to 256 that is a
// multiple of 8.
//
// A threadgroup takes STAGED_QUERIES queries: rows times the query heads of one KV head, so that all heads share what is
// read of the cache, and walks over the cache in blocks of PREFILL_KEYS positions:
//   scores      every simdgroup: all queries x its own eight positions, keys straight from the cache
//   softmax     every simdgroup: its own queries; the running maximum and sum stay in registers
//   outputs     every simdgroup: all queries x its own dims, values straight from the cache, sums in registers
// Only queries, scores and probabilities are staged; at head size 256 that is 26 KB.  Positions past a query's own get
// probability 0, and positions past the last query's are never multiplied, whatever the cache holds there.
// `split` has no meaning here: the running maximum spans all blocks.
// Not here: projections (gemm.metal), the preparation of its rows (attention_prep.metal), one row
// (attention_decode.metal), tensor operations (attention_tensor.h).
#include "attention_tensor.h"
#include "attention_tile.h"
#include "common.h"
#include "group.h"
#include "matrix.h"

constant constexpr uint PREFILL_MAX_DIM = 256;
constant constexpr uint PREFILL_MAX_QUERIES = 64;
constant constexpr uint STAGED_QUERIES = 64 / sizeof(operand); // what 32 KB hold
constant constexpr uint STAGED_FRAGMENTS = STAGED_QUERIES / 8;
constant constexpr uint QUERY_PAD = 16 / sizeof(operand);

// Scores, then queries; tensor operations need less.
constant constexpr uint STAGED_FLOATS =
    STAGED_QUERIES * (SCORE_PITCH + (PREFILL_MAX_DIM + QUERY_PAD) * sizeof(operand) / sizeof(float));

typedef simdgroup_matrix<operand, 8, 8> OperandFragment;

// A fragment of eight positions from `first` on and eight dims from `d` on, as [position][dim] or TRANSPOSED.
template <bool TRANSPOSED, typename T>
inline void load_clamped(
    thread simdgroup_matrix<T, 8, 8> &f, CacheHead cache, FragmentPlace place, uint first, uint d) {
#pragma unroll
    for (uint e = 0; e < 2; e++) {
        const uint key = TRANSPOSED ? place.column[e] : place.row[e], dim = TRANSPOSED ? place.row[e] : place.column[e];
        f.thread_elements()[e] = T(float(cache.at(first + key)[d + dim]));
    }
}

template <bool TRANSPOSED>
inline void load_cache(
    thread simdgroup_matrix<bfloat, 8, 8> &f, CacheHead cache, FragmentPlace place, uint first, uint d) {
    if (first + 7 <= cache.last)
        simdgroup_load(f, cache.rows + first * cache.stride + d, cache.stride, ulong2(0), TRANSPOSED);
    else
        load_clamped<TRANSPOSED>(f, cache, place, first, d);
}

template <bool TRANSPOSED>
inline void load_cache(
    thread simdgroup_matrix<float, 8, 8> &f, CacheHead cache, FragmentPlace place, uint first, uint d) {
    load_clamped<TRANSPOSED>(f, cache, place, first, d);
}

inline void stage_queries(device const act *q, Queries queries, PrefillScratch scratch, uint tid) {
    const uint dim = C_DIM, columns = dim / 4;
    for (uint i = tid; i < STAGED_QUERIES * columns; i += PREFILL_THREADS) {
        const uint query = min(i / columns, queries.count - 1), d = i % columns * 4;
        const float4 x = load4(q + (queries.row(query) * C_HQ + queries.head_of(query)) * dim + d);
        *(threadgroup vec<operand, 4> *)(scratch.q + i / columns * (dim + QUERY_PAD) + d) =
            vec<operand, 4>(operand(x.x), operand(x.y), operand(x.z), operand(x.w));
    }
}

// Products of a tile on simdgroup_matrix; a simdgroup has WIDE fragments of dims.
template <uint WIDE> struct SimdgroupAttention {
    struct Sum {
        simdgroup_float8x8 at[STAGED_FRAGMENTS][WIDE];
    };

    FragmentPlace place;
    uint simdgroup, first_dim;

    void init(
        thread Sum &sum, PrefillArguments a, Queries queries, PrefillScratch scratch, uint tid, uint sg, uint lane) {
        simdgroup = sg;
        first_dim = 8 * WIDE * sg;
        place = fragment_place(scratch.scores + 64 * sg, lane);
        stage_queries(a.q, queries, scratch, tid);
#pragma unroll
        for (uint i = 0; i < STAGED_FRAGMENTS; i++)
#pragma unroll
            for (uint j = 0; j < WIDE; j++) sum.at[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }

    void scores(CacheHead keys, PrefillScratch scratch, uint base) {
        const uint first = base + 8 * simdgroup, pitch = C_DIM + QUERY_PAD;
        if (first > keys.last) return;
        simdgroup_float8x8 score[STAGED_FRAGMENTS];
#pragma unroll
        for (uint i = 0; i < STAGED_FRAGMENTS; i++) score[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        for (uint d = 0; d < uint(C_DIM); d += 8) {
            OperandFragment key;
            load_cache<true>(key, keys, place, first, d);
#pragma unroll
            for (uint i = 0; i < STAGED_FRAGMENTS; i++) {
                OperandFragment query;
                simdgroup_load(query, scratch.q + 8 * i * pitch + d, pitch);
                simdgroup_multiply_accumulate(score[i], query, key, score[i]);
            }
        }
#pragma unroll
        for (uint i = 0; i < STAGED_FRAGMENTS; i++)
            simdgroup_store(score[i], scratch.scores + 8 * i * SCORE_PITCH + 8 * simdgroup, SCORE_PITCH);
    }

    void add(thread Sum &sum, CacheHead values, PrefillScratch scratch, uint base) {
        rescale(sum, scratch);
        const uint count = min(values.last + 1 - base, PREFILL_KEYS);
        for (uint key = 0; key < count; key += 8) {
            OperandFragment weight[STAGED_FRAGMENTS];
#pragma unroll
            for (uint i = 0; i < STAGED_FRAGMENTS; i++)
                simdgroup_load(weight[i], scratch.weights + 8 * i * WEIGHT_PITCH + key, WEIGHT_PITCH);
#pragma unroll
            for (uint j = 0; j < WIDE; j++) {
                if (first_dim + 8 * j >= uint(C_DIM)) continue;
                OperandFragment value;
                load_cache<false>(value, values, place, base + key, first_dim + 8 * j);
#pragma unroll
                for (uint i = 0; i < STAGED_FRAGMENTS; i++)
                    simdgroup_multiply_accumulate(sum.at[i][j], weight[i], value, sum.at[i][j]);
            }
        }
    }

    void rescale(thread Sum &sum, PrefillScratch scratch) {
#pragma unroll
        for (uint i = 0; i < STAGED_FRAGMENTS; i++)
#pragma unroll
            for (uint e = 0; e < 2; e++) {
                const float factor = scratch.factor[8 * i + place.row[e]];
#pragma unroll
                for (uint j = 0; j < WIDE; j++) sum.at[i][j].thread_elements()[e] *= factor;
            }
    }

    void store(thread Sum &sum, PrefillArguments a, Queries queries, PrefillScratch scratch) {
#pragma unroll
        for (uint i = 0; i < STAGED_FRAGMENTS; i++)
#pragma unroll
            for (uint e = 0; e < 2; e++)
#pragma unroll
                for (uint j = 0; j < WIDE; j++) {
                    const uint query = 8 * i + place.row[e], d = first_dim + 8 * j + place.column[e];
                    const float x = sum.at[i][j].thread_elements()[e] * scratch.factor[query];
                    if (query < queries.count && d < uint(C_DIM)) a.store(queries, query, d, x);
                }
    }
};

// Tiles of tile_m rows and all query heads of a KV head.  The last rows see the most positions and start first.
inline void attend_staged(PrefillArguments a, PrefillScratch scratch, uint rows, uint position, uint tile_m,
    uint2 group, uint2 groups, uint tid, uint sg, uint lane) {
    const uint first_row = (groups.x - 1 - group.x) * tile_m, heads = C_HQ / C_HKV;
    if (first_row >= rows) return;
    const uint end = min(first_row + tile_m, rows) * heads;
    for (uint i = first_row * heads; i < end; i += STAGED_QUERIES) {
        const Queries queries = {i, min(STAGED_QUERIES, end - i), heads, group.y * heads, group.y, position};
        if (C_DIM <= 64)
            attend<SimdgroupAttention<1>, STAGED_QUERIES>(a, queries, scratch, tid, sg, lane);
        else if (C_DIM <= 128)
            attend<SimdgroupAttention<2>, STAGED_QUERIES>(a, queries, scratch, tid, sg, lane);
        else
            attend<SimdgroupAttention<4>, STAGED_QUERIES>(a, queries, scratch, tid, sg, lane);
    }
}

[[kernel, max_total_threads_per_threadgroup(PREFILL_THREADS)]] void attn_prefill(device const Step *step [[buffer(0)]],
    device const act *q [[buffer(1)]], device const act *proj [[buffer(2)]], device const bfloat *k [[buffer(3)]],
    device const bfloat *v [[buffer(4)]], device act *o [[buffer(5)]], constant attn_prefill_params &p [[buffer(6)]],
    uint2 group [[threadgroup_position_in_grid]], uint2 groups [[threadgroups_per_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup float memory[STAGED_FLOATS];
    threadgroup float factor[PREFILL_MAX_QUERIES];
    threadgroup operand *staged = (threadgroup operand *)(memory + STAGED_QUERIES * SCORE_PITCH);
    const PrefillScratch scratch = {staged, memory, (threadgroup operand *)memory, factor};
    const PrefillArguments a = {q, proj, k, v, o, p.pitch};
    const uint rows = uint(step->rows), position = uint(step->position);
#ifdef LILY_TENSOR_ATTENTION
    if (C_DIM == TENSOR_DIM) {
        attend_tensor(a, scratch, rows, position, group, groups, tid, sg, lane);
        return;
    }
#endif
    attend_staged(a, scratch, rows, position, p.tile_m, group, groups, tid, sg, lane);
}
