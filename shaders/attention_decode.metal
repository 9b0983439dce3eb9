// SPDX-License-Identifier: Apache-2.0
// Grouped-query attention of one token: attn_decode over one split of the cache, attn_combine over the splits.
//
// A group takes a split for all query heads of a KV head.  PACK heads share every load of a KV row: that many heads are
// a team of simdgroups, and teams of different heads walk along the same rows side by side.  Within a team a simdgroup
// takes whole rows, a lane 1/32 of a row's dims, so that neighbouring lanes read neighbouring bytes.  Scores of
// ATTN_BLOCK positions are held in threadgroup memory; the running maximum changes once a block, not once a position.
// Exponentials are powers of two: q carries log2(e)/√D.  Head size 64, 128 or 256.
// Not handled: the projections and the output gate (gemv.metal), several rows (prefill).

#include "common.h"

constant constexpr uint ATTN_BLOCK = 256; // positions whose scores are held
constant constexpr uint ATTN_BATCH = 4;   // positions a simdgroup takes at a time
constant constexpr uint ATTN_HEADS = 8;   // query heads that a group holds at a time
constant constexpr uint ATTN_THREADS = 256;
constant constexpr uint ATTN_SCRATCH = 2 * ATTN_HEADS * 256;
constant constexpr float ATTN_LOWEST = -3.0e38f; // instead of -inf, which a compiler may assume away

struct AttnScratch {
    threadgroup float *q;      // [ATTN_HEADS][D]
    threadgroup float *scores; // [ATTN_HEADS][ATTN_BLOCK]
    threadgroup float *top;    // [ATTN_HEADS] maximum so far
    threadgroup float *total;  // sum of exponentials so far
    threadgroup float *factor; // what earlier sums have to be multiplied by
};

inline AttnScratch attn_scratch(threadgroup float *scratch, threadgroup float *stats) {
    const AttnScratch r = {scratch, scratch + ATTN_HEADS * 256, stats, stats + ATTN_HEADS, stats + 2 * ATTN_HEADS};
    return r;
}

// A simdgroup's place among the teams.
struct AttnTeam {
    uint lane;
    uint simdgroup, simdgroups; // within the team
    uint team, teams;
    uint passes; // team t takes packs t, t + teams, ...
};

// As many teams as packs, if that comes out even; else fewer, which take several packs in turn.
inline AttnTeam attn_team(uint lane, uint simdgroup, uint simdgroups) {
    const uint packs = (C_HQ / C_HKV + C_PACK - 1) / C_PACK;
    uint teams = 1;
    while (packs % (2 * teams) == 0 && simdgroups % (2 * teams) == 0 && 2 * teams * C_PACK <= ATTN_HEADS) teams *= 2;
    AttnTeam t;
    t.lane = lane, t.teams = teams, t.passes = packs / teams;
    t.simdgroups = simdgroups / teams;
    t.team = simdgroup / t.simdgroups;
    t.simdgroup = simdgroup % t.simdgroups;
    return t;
}

// One KV head's cache.
struct AttnCache {
    device const bfloat *k;
    device const bfloat *v;
    uint stride; // between positions
};

// ---- preparation: RMSNorm and RoPE ----------------------------------------------------------------------------------

// Head `x` normed, turned and scaled into `out`, by one simdgroup.
inline void attn_head(device const act *x, device const float *norm, device const float *inv_freq, int position,
    float eps, float scale, uint lane, threadgroup float *out) {
    float squares = 0;
    for (uint d = 4 * lane; d < uint(C_DIM); d += 4 * LANES) {
        const float4 v = load4(x + d);
        squares += dot(v, v);
    }
    const float factor = precise::rsqrt(simd_sum(squares) / float(C_DIM) + eps) * scale;
    for (uint d = 4 * lane; d < uint(C_DIM); d += 4 * LANES)
        *(threadgroup float4 *)(out + d) = load4(x + d) * *(device const float4 *)(norm + d) * factor;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const uint half_rot = C_ROT / 2;
    for (uint i = lane; i < half_rot; i += LANES) {
        const float angle = float(position) * inv_freq[i], c = precise::cos(angle), s = precise::sin(angle);
        const float a = out[i], b = out[i + half_rot];
        out[i] = a * c - b * s;
        out[i + half_rot] = b * c + a * s;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// What scores carry besides q·k: 1/√D, and log2(e) for exp2.
inline float attn_scale() { return M_LOG2E_F * precise::rsqrt(float(C_DIM)); }

// ---- one block of positions -----------------------------------------------------------------------------------------

// A lane's dims of a row of the cache.
inline void attn_load(device const bfloat *p, thread float (&x)[8]) { load8(p, x); }

inline void attn_load(device const bfloat *p, thread float (&x)[4]) {
    const float4 a = load4(p);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
}

inline void attn_load(device const bfloat *p, thread float (&x)[2]) {
    const float2 a = load2(p);
    x[0] = a.x, x[1] = a.y;
}

// Scores of `count` positions from `first` on for a team's PACK heads; WIDE = D/32 dims a lane.
template <uint PACK, uint WIDE>
inline void attn_scores(
    AttnTeam t, AttnCache cache, uint first, uint count, threadgroup const float *q, threadgroup float *scores) {
    float mine[PACK][WIDE];
#pragma unroll
    for (uint h = 0; h < PACK; h++) {
#pragma unroll
        for (uint i = 0; i < WIDE; i++) mine[h][i] = q[h * C_DIM + t.lane * WIDE + i];
    }
    for (uint j = t.simdgroup * ATTN_BATCH; j < count; j += t.simdgroups * ATTN_BATCH) {
        float key[ATTN_BATCH][WIDE], sum[PACK * ATTN_BATCH];
#pragma unroll
        for (uint b = 0; b < ATTN_BATCH; b++)
            attn_load(cache.k + (first + min(j + b, count - 1)) * cache.stride + t.lane * WIDE, key[b]);
#pragma unroll
        for (uint h = 0; h < PACK; h++) {
#pragma unroll
            for (uint b = 0; b < ATTN_BATCH; b++) {
                float dot_product = 0;
#pragma unroll
                for (uint i = 0; i < WIDE; i++) dot_product = fma(mine[h][i], key[b][i], dot_product);
                sum[h * ATTN_BATCH + b] = dot_product;
            }
        }
        const float score = scatter_sum<PACK * ATTN_BATCH>(sum, t.lane);
        constexpr uint share = LANES / (PACK * ATTN_BATCH);
        const uint which = t.lane / share, at = j + which % ATTN_BATCH;
        if (t.lane % share == 0 && at < count) scores[which / ATTN_BATCH * ATTN_BLOCK + at] = score;
    }
}

// The ablation of coalesced reads: a lane takes a position and walks along its row by itself.
template <uint PACK>
inline void attn_scores_apart(
    AttnTeam t, AttnCache cache, uint first, uint count, threadgroup const float *q, threadgroup float *scores) {
    for (uint j = t.simdgroup * LANES + t.lane; j < count; j += t.simdgroups * LANES) {
        float sum[PACK] = {};
        for (uint d = 0; d < uint(C_DIM); d++) {
            const float key = float(cache.k[(first + j) * cache.stride + d]);
#pragma unroll
            for (uint h = 0; h < PACK; h++) sum[h] = fma(q[h * C_DIM + d], key, sum[h]);
        }
#pragma unroll
        for (uint h = 0; h < PACK; h++) scores[h * ATTN_BLOCK + j] = sum[h];
    }
}

// Scores become exponentials relative to the new maximum, head by head; places up to a whole batch become 0.
inline void attn_softmax(AttnTeam t, AttnScratch scratch, uint count) {
    for (uint h = t.simdgroup; h < uint(C_PACK); h += t.simdgroups) {
        const uint head = t.team * C_PACK + h;
        threadgroup float *s = scratch.scores + head * ATTN_BLOCK;
        const float before = scratch.top[head];
        float top = before, sum = 0;
        for (uint i = t.lane; i < count; i += LANES) top = max(top, s[i]);
        top = simd_max(top);
        for (uint i = t.lane; i < count; i += LANES) {
            const float e = precise::exp2(s[i] - top);
            s[i] = e, sum += e;
        }
        if (count + t.lane < (count + ATTN_BATCH - 1) / ATTN_BATCH * ATTN_BATCH) s[count + t.lane] = 0;
        sum = simd_sum(sum);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (t.lane == 0) {
            const float factor = precise::exp2(before - top);
            scratch.top[head] = top;
            scratch.total[head] = fma(scratch.total[head], factor, sum);
            scratch.factor[head] = factor;
        }
    }
}

// out[h] = out[h]·factor[h] + Σ weight·value over this simdgroup's positions and this lane's dims.
template <uint PACK, uint WIDE>
inline void attn_values(AttnTeam t, AttnCache cache, uint first, uint count, threadgroup const float *weights,
    threadgroup const float *factor, thread float (&out)[PACK][WIDE]) {
#pragma unroll
    for (uint h = 0; h < PACK; h++) {
#pragma unroll
        for (uint i = 0; i < WIDE; i++) out[h][i] *= factor[h];
    }
    for (uint j = t.simdgroup * ATTN_BATCH; j < count; j += t.simdgroups * ATTN_BATCH) {
        float value[ATTN_BATCH][WIDE];
#pragma unroll
        for (uint b = 0; b < ATTN_BATCH; b++)
            attn_load(cache.v + (first + min(j + b, count - 1)) * cache.stride + t.lane * WIDE, value[b]);
#pragma unroll
        for (uint h = 0; h < PACK; h++) {
            const float4 w = *(threadgroup const float4 *)(weights + h * ATTN_BLOCK + j);
#pragma unroll
            for (uint i = 0; i < WIDE; i++)
                out[h][i] = fma(
                    w.w, value[3][i], fma(w.z, value[2][i], fma(w.y, value[1][i], fma(w.x, value[0][i], out[h][i]))));
        }
    }
}

// All of it for a team's pack, whose queries stand in scratch.q.
template <uint PACK, uint WIDE>
inline void attn_block(AttnTeam t, AttnCache cache, uint first, uint count, AttnScratch scratch, bool coalesced,
    thread float (&out)[PACK][WIDE]) {
    const uint head = t.team * PACK;
    threadgroup float *scores = scratch.scores + head * ATTN_BLOCK;
    if (coalesced)
        attn_scores<PACK, WIDE>(t, cache, first, count, scratch.q + head * C_DIM, scores);
    else
        attn_scores_apart<PACK>(t, cache, first, count, scratch.q + head * C_DIM, scores);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    attn_softmax(t, scratch, count);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    attn_values<PACK, WIDE>(t, cache, first, count, scores, scratch.factor + head, out);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// ---- one split ------------------------------------------------------------------------------------------------------

// Sums of a team's simdgroups, one head at a time through alternating halves of the scratch, to part_o [heads][D].
template <uint PACK, uint WIDE>
inline void attn_store(
    AttnTeam t, threadgroup float *scratch, thread const float (&out)[PACK][WIDE], uint heads, device float *part_o) {
    const uint half_scratch = ATTN_SCRATCH / 2, share = half_scratch / t.teams;
#pragma unroll
    for (uint h = 0; h < PACK; h++) {
        threadgroup float *mine = scratch + h % 2 * half_scratch + t.team * share;
#pragma unroll
        for (uint i = 0; i < WIDE; i++) mine[t.simdgroup * C_DIM + t.lane * WIDE + i] = out[h][i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (h >= heads) continue;
        for (uint d = t.simdgroup * LANES + t.lane; d < uint(C_DIM); d += t.simdgroups * LANES) {
            float sum = 0;
            for (uint s = 0; s < t.simdgroups; s++) sum += mine[s * C_DIM + d];
            part_o[h * C_DIM + d] = sum;
        }
    }
}

// Positions [first, end) for one pack of each team.  `heads` of the team's PACK are real;
// part_o and part_ml are those of its first head.
template <uint PACK, uint WIDE>
inline void attn_pack(AttnTeam t, AttnCache cache, uint first, uint end, threadgroup float *whole, AttnScratch scratch,
    uint heads, bool coalesced, device float *part_o, device float *part_ml) {
    const uint head = t.team * PACK;
    float out[PACK][WIDE];
#pragma unroll
    for (uint h = 0; h < PACK; h++) {
#pragma unroll
        for (uint i = 0; i < WIDE; i++) out[h][i] = 0;
    }
    for (uint at = first; at < end; at += ATTN_BLOCK)
        // The fixed-block layout has no bounds to check in whole blocks: the count is a constant there.
        if (C_FIXED != 0 && end - at >= ATTN_BLOCK)
            attn_block<PACK, WIDE>(t, cache, at, ATTN_BLOCK, scratch, coalesced, out);
        else
            attn_block<PACK, WIDE>(t, cache, at, min(ATTN_BLOCK, end - at), scratch, coalesced, out);
    attn_store<PACK, WIDE>(t, whole, out, heads, part_o);
    if (t.simdgroup == 0 && t.lane < heads) {
        part_ml[2 * t.lane] = scratch.top[head + t.lane] * M_LN2_F;
        part_ml[2 * t.lane + 1] = scratch.total[head + t.lane];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

template <uint PACK>
inline void attn_pack_of_size(AttnTeam t, AttnCache cache, uint first, uint end, threadgroup float *whole,
    AttnScratch scratch, uint heads, bool coalesced, device float *part_o, device float *part_ml) {
    if (C_DIM == 256)
        attn_pack<PACK, 8>(t, cache, first, end, whole, scratch, heads, coalesced, part_o, part_ml);
    else if (C_DIM == 128)
        attn_pack<PACK, 4>(t, cache, first, end, whole, scratch, heads, coalesced, part_o, part_ml);
    else
        attn_pack<PACK, 2>(t, cache, first, end, whole, scratch, heads, coalesced, part_o, part_ml);
}

// A pack's results; `head` is the team's first query head within the KV head's.
inline void attn_run(AttnTeam t, AttnCache cache, uint first, uint end, threadgroup float *whole, AttnScratch scratch,
    uint head, bool coalesced, device float *part_o, device float *part_ml) {
    const uint heads = min(uint(C_PACK), C_HQ / C_HKV - head);
    part_o += head * C_DIM, part_ml += 2 * head;
    if (C_PACK == 8)
        attn_pack_of_size<8>(t, cache, first, end, whole, scratch, heads, coalesced, part_o, part_ml);
    else if (C_PACK == 4)
        attn_pack_of_size<4>(t, cache, first, end, whole, scratch, heads, coalesced, part_o, part_ml);
    else if (C_PACK == 2)
        attn_pack_of_size<2>(t, cache, first, end, whole, scratch, heads, coalesced, part_o, part_ml);
    else
        attn_pack_of_size<1>(t, cache, first, end, whole, scratch, heads, coalesced, part_o, part_ml);
}

inline void attn_reset(AttnTeam t, AttnScratch scratch) {
    if (t.simdgroup == 0 && t.lane < uint(C_PACK)) {
        scratch.top[t.team * C_PACK + t.lane] = ATTN_LOWEST;
        scratch.total[t.team * C_PACK + t.lane] = 0;
    }
}

[[kernel, max_total_threads_per_threadgroup(ATTN_THREADS)]] void attn_decode(device const Step *step [[buffer(0)]],
    device const act *proj [[buffer(1)]], device const float *q_norm [[buffer(2)]],
    device const float *k_norm [[buffer(3)]], device const float *inv_freq [[buffer(4)]],
    device bfloat *k [[buffer(5)]], device bfloat *v [[buffer(6)]], device float *part_o [[buffer(7)]],
    device float *part_ml [[buffer(8)]], constant attn_decode_params &p [[buffer(9)]],
    uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float whole[ATTN_SCRATCH];
    threadgroup float stats[3 * ATTN_HEADS];
    const uint position = uint(step->position), first = group.x * p.split, kv = group.y, rep = C_HQ / C_HKV;
    if (first > position) return;
    const AttnScratch scratch = attn_scratch(whole, stats);
    const AttnTeam t = attn_team(lane, simdgroup, simdgroups);
    if (position < first + p.split) { // this split appends
        const uint at = (position * C_HKV + kv) * C_DIM;
        device const act *key = proj + 2 * C_HQ * C_DIM + kv * C_DIM;
        if (simdgroup == 0) {
            attn_head(key, k_norm, inv_freq, step->position, p.eps, 1.0f, lane, scratch.scores);
            for (uint d = lane; d < uint(C_DIM); d += LANES) k[at + d] = bfloat(scratch.scores[d]);
        }
        if (simdgroup == simdgroups - 1)
            for (uint d = lane; d < uint(C_DIM); d += LANES) v[at + d] = bfloat(float(key[C_HKV * C_DIM + d]));
    }
    const AttnCache cache = {k + kv * C_DIM, v + kv * C_DIM, uint(C_HKV * C_DIM)};
    const uint row = group.x * C_HQ + kv * rep;
    for (uint pass = 0; pass < t.passes; pass++) {
        const uint head = (pass * t.teams + t.team) * C_PACK;
        attn_reset(t, scratch);
        for (uint h = t.simdgroup; h < uint(C_PACK); h += t.simdgroups)
            attn_head(proj + 2 * (kv * rep + min(head + h, rep - 1)) * C_DIM, q_norm, inv_freq, step->position, p.eps,
                attn_scale(), lane, scratch.q + (t.team * C_PACK + h) * C_DIM);
        threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
        attn_run(t, cache, first, min(first + p.split, position + 1), whole, scratch, head, true, part_o + row * C_DIM,
            part_ml + 2 * row);
    }
}

// The queries were prepared and the cache appended by attn_prep: an ablation of that fusion.
[[kernel, max_total_threads_per_threadgroup(ATTN_THREADS)]] void attn_decode_prepared(
    device const Step *step [[buffer(0)]], device const act *q [[buffer(1)]], device const bfloat *k [[buffer(2)]],
    device const bfloat *v [[buffer(3)]], device float *part_o [[buffer(4)]], device float *part_ml [[buffer(5)]],
    constant attn_decode_prepared_params &p [[buffer(6)]], uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float whole[ATTN_SCRATCH];
    threadgroup float stats[3 * ATTN_HEADS];
    const uint position = uint(step->position), first = group.x * p.split, kv = group.y, rep = C_HQ / C_HKV;
    if (first > position) return;
    const AttnScratch scratch = attn_scratch(whole, stats);
    const AttnTeam t = attn_team(lane, simdgroup, simdgroups);
    const AttnCache cache = {k + kv * C_DIM, v + kv * C_DIM, uint(C_HKV * C_DIM)};
    const uint row = group.x * C_HQ + kv * rep;
    for (uint pass = 0; pass < t.passes; pass++) {
        const uint head = (pass * t.teams + t.team) * C_PACK;
        attn_reset(t, scratch);
        for (uint i = t.simdgroup * LANES + lane; i < uint(C_PACK * C_DIM); i += t.simdgroups * LANES)
            scratch.q[t.team * C_PACK * C_DIM + i] =
                float(q[(kv * rep + min(head + i / C_DIM, rep - 1)) * C_DIM + i % C_DIM]) * attn_scale();
        threadgroup_barrier(mem_flags::mem_threadgroup);
        attn_run(t, cache, first, min(first + p.split, position + 1), whole, scratch, head, C_COALESCED != 0,
            part_o + row * C_DIM, part_ml + 2 * row);
    }
}

// ---- the splits together --------------------------------------------------------------------------------------------

constant constexpr uint COMBINE_THREADS = 1024;

// A thread takes four dims of every n-th split; threads are a multiple of D/4.
[[kernel, max_total_threads_per_threadgroup(COMBINE_THREADS)]] void attn_combine(device const Step *step [[buffer(0)]],
    device const float *part_o [[buffer(1)]], device const float *part_ml [[buffer(2)]], device act *o [[buffer(3)]],
    constant attn_combine_params &p [[buffer(4)]], uint head [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float4 sums[COMBINE_THREADS];
    threadgroup float totals[COMBINE_THREADS / 16];
    const uint splits = uint(step->position) / p.split + 1, quads = C_DIM / 4;
    const uint walkers = threads / quads, walker = thread_index / quads, quad = thread_index % quads;
    float top = ATTN_LOWEST;
    for (uint i = lane; i < splits; i += LANES) top = max(top, part_ml[2 * (i * C_HQ + head)]);
    top = simd_max(top);
    float4 sum = float4(0.0f);
    float total = 0;
    for (uint i = walker; i < splits; i += walkers) {
        const uint row = i * C_HQ + head;
        const float weight = precise::exp(part_ml[2 * row] - top);
        total = fma(weight, part_ml[2 * row + 1], total);
        sum = fma(float4(weight), *(device const float4 *)(part_o + row * C_DIM + 4 * quad), sum);
    }
    sums[thread_index] = sum;
    if (quad == 0) totals[walker] = total;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (walker > 0) return;
    total = totals[0];
    for (uint i = 1; i < walkers; i++) sum += sums[i * quads + quad], total += totals[i];
    *(device act4 *)(o + head * C_DIM + 4 * quad) = act4(sum / total);
}
