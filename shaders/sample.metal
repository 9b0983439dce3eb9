// SPDX-License-Identifier: Apache-2.0
// From logits to the next token: argmax, sample_logits, sample_draw, advance.
//
// Ids >= Request.vocab are padding: never read, never drawn.  Every "best" is the greatest value, ties to the lower id;
// where there is no candidate it is (-inf, NO_ID).  Not here: the head's projection (gemv.metal), the exact filters
// (sample_filter.metal), stop strings (host).
#include "common.h"
#include "group.h"
#include "select.h"

// ---- the greatest of many -------------------------------------------------------------------------------------------

struct Best {
    float value;
    int id;

    // Ids have to come in ascending order.
    void add(float x, int candidate) {
        const bool greater = x > value;
        value = greater ? x : value;
        id = greater ? candidate : id;
    }
};

inline Best simd_best(Best b) {
    const float value = simd_max(b.value);
    return {value, simd_min(b.value == value ? b.id : NO_ID)};
}

// Group `group`'s result, stored by one thread.
inline void store_best(
    Best b, device float *best, uint group, threadgroup float *values, threadgroup int *ids, group_place at) {
    b = simd_best(b);
    if (at.lane == 0) {
        values[at.sg] = b.value;
        ids[at.sg] = b.id;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool used = at.lane < at.simdgroups;
    b = simd_best({used ? values[at.lane] : -INFINITY, used ? ids[at.lane] : NO_ID});
    if (at.tid == 0) {
        best[2 * group] = b.value;
        best[2 * group + 1] = as_type<float>(b.id);
    }
}

kernel void argmax(device const Request *request [[buffer(0)]], device const float *logits [[buffer(1)]],
    device float *best [[buffer(2)]], device int *flags [[buffer(3)]], constant argmax_params &p [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup float values[LANES];
    threadgroup int ids[LANES];
    threadgroup uint partial[LANES];
    const group_place at = {tid, lane, sg, simdgroups};
    const id_range range = slice_of(group, p.slice, request);
    Best b = {-INFINITY, NO_ID};
    bool bad = false;
    for (uint id = range.from + tid; id < range.to; id += at.threads()) {
        bad = bad || !is_finite_bits(logits[id]);
        b.add(logits[id], int(id));
    }
    bad = group_any(bad, partial, at);
    if (tid == 0) flags[group] = bad ? 1 : 0;
    store_best(b, best, group, values, ids, at);
}

// ---- penalties ------------------------------------------------------------------------------------------------------

// Slices are at most this long: one bit an id says whether the repetition penalty applies.
constant constexpr uint SAMPLE_SLICE = 1 << 15;

// Marks the ids of the slice among history[from..to).
inline void mark_seen(
    threadgroup atomic_uint *seen, id_range range, device const int *history, int from, int to, group_place at) {
    for (uint i = at.tid; i < (range.to - range.from + 31) / 32; i += at.threads())
        atomic_store_explicit(&seen[i], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = from + int(at.tid); i < to; i += int(at.threads())) {
        const uint id = uint(history[i]);
        if (id >= range.from && id < range.to)
            atomic_fetch_or_explicit(&seen[(id - range.from) / 32], 1u << (id - range.from) % 32, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// y = logits + bias.  An id is listed once.
inline void add_bias(device const float *logits, device const int *bias_ids, device const float *bias, int biases,
    id_range range, device float *y, group_place at) {
    for (uint id = range.from + at.tid; id < range.to; id += at.threads()) y[id] = logits[id];
    threadgroup_barrier(mem_flags::mem_device);
    for (int i = int(at.tid); i < biases; i += int(at.threads())) {
        const uint id = uint(bias_ids[i]);
        if (id >= range.from && id < range.to) y[id] += bias[i];
    }
    threadgroup_barrier(mem_flags::mem_device);
}

// (greatest, Σ exp(x - greatest)) of the slice.
inline float2 slice_statistics(device const float *x, id_range range, threadgroup float *partial, group_place at) {
    float top = -INFINITY, total = 0;
    for (uint id = range.from + at.tid; id < range.to; id += at.threads()) top = max(top, x[id]);
    top = group_max(top, partial, at);
    for (uint id = range.from + at.tid; id < range.to; id += at.threads())
        total += x[id] > -INFINITY ? precise::exp(x[id] - top) : 0.0f;
    return {top, group_sum(total, partial, at)};
}

kernel void sample_logits(device const Step *step [[buffer(0)]], device const Request *request [[buffer(1)]],
    device const float *logits [[buffer(2)]], device const int *bias_ids [[buffer(3)]],
    device const float *bias_values [[buffer(4)]], device const int *history [[buffer(5)]],
    device const uint *counts [[buffer(6)]], device const uint *mask [[buffer(7)]], device float *y [[buffer(8)]],
    device float *stats [[buffer(9)]], device int *flags [[buffer(10)]],
    constant sample_logits_params &p [[buffer(11)]], uint group [[threadgroup_position_in_grid]],
    LILY_THREAD_ARGUMENTS) {
    threadgroup atomic_uint seen[SAMPLE_SLICE / 32];
    threadgroup float partial[LANES];
    threadgroup uint any[LANES];
    const group_place at = {tid, lane, sg, simdgroups};
    const id_range range = slice_of(group, p.slice, request);
    const int tokens = step->position + step->rows, window = request->repetition_window;
    const float repetition = request->repetition_penalty;
    const float presence = request->presence_penalty, frequency = request->frequency_penalty;
    const bool repeats = repetition != 1 && window > 0, counted = presence != 0 || frequency != 0;
    const bool masked = request->masked != 0;
    add_bias(logits, bias_ids, bias_values, request->bias_count, range, y, at);
    if (repeats) mark_seen(seen, range, history, max(tokens - window, 0), tokens, at);
    bool bad = false;
    for (uint id = range.from + tid; id < range.to; id += at.threads()) {
        const uint i = id - range.from;
        float v = y[id];
        bad = bad || !is_finite_bits(logits[id]);
        if (repeats && (atomic_load_explicit(&seen[i / 32], memory_order_relaxed) >> i % 32 & 1) != 0)
            v = v > 0 ? v / repetition : v * repetition;
        if (counted && counts[id] > 0) v = v - presence - frequency * float(counts[id]);
        if (masked && (mask[id / 32] >> id % 32 & 1) == 0) v = -INFINITY;
        y[id] = v;
    }
    bad = group_any(bad, any, at);
    const float2 raw = slice_statistics(logits, range, partial, at);
    const float2 changed = slice_statistics(y, range, partial, at);
    if (tid != 0) return;
    flags[group] = bad ? 1 : 0;
    stats[4 * group] = raw.x;
    stats[4 * group + 1] = raw.y;
    stats[4 * group + 2] = changed.x;
    stats[4 * group + 3] = changed.y;
}

// ---- draw -----------------------------------------------------------------------------------------------------------

// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") of the counter (c0, c1, 0, 0).
inline uint4 philox(uint2 seed, uint c0, uint c1) {
    uint4 c = uint4(c0, c1, 0, 0);
    for (uint i = 0; i < 10; i++) {
        const uint a = mulhi(0xD2511F53u, c.x), b = mulhi(0xCD9E8D57u, c.z);
        c = uint4(b ^ c.y ^ seed.x, 0xCD9E8D57u * c.z, a ^ c.w ^ seed.y, 0xD2511F53u * c.x);
        seed += uint2(0x9E3779B9u, 0xBB67AE85u);
    }
    return c;
}

// ln(1 - r) for 0 < r <= 1/2: -2·artanh(r/(2-r)), whose series has converged after eight terms.
inline float log_one_minus(float r) {
    const float s = r / (2.0f - r), z = s * s;
    float sum = 1.0f / 15;
    sum = fma(sum, z, 1.0f / 13);
    sum = fma(sum, z, 1.0f / 11);
    sum = fma(sum, z, 1.0f / 9);
    sum = fma(sum, z, 1.0f / 7);
    sum = fma(sum, z, 1.0f / 5);
    sum = fma(sum, z, 1.0f / 3);
    return -2.0f * s * fma(sum, z, 1.0f);
}

// -ln(-ln u), u = (k + 1/2)/2^24 with k the word's upper 24 bits.  From u = 1/2 on it is 1 - u that float holds exactly.
inline float gumbel(uint word) {
    const float unit = 1.0f / 16777216;
    const uint k = word >> 8;
    const float log_u =
        k < 0x800000u ? precise::log((float(k) + 0.5f) * unit) : log_one_minus((float(0xffffffu - k) + 0.5f) * unit);
    return -precise::log(-log_u);
}

// Word id % 4 of the block (id / 4, position) belongs to `id`, whatever slice and thread it is in.
kernel void sample_draw(device const Step *step [[buffer(0)]], device const Request *request [[buffer(1)]],
    device const float *y [[buffer(2)]], device const float *cut [[buffer(3)]], device float *best [[buffer(4)]],
    constant sample_draw_params &p [[buffer(5)]], uint group [[threadgroup_position_in_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup float values[LANES];
    threadgroup int ids[LANES];
    const group_place at = {tid, lane, sg, simdgroups};
    const id_range range = slice_of(group, p.slice, request);
    const uint position = uint(step->position + step->rows);
    const uint2 seed = uint2(request->seed_low, request->seed_high);
    const float temperature = request->temperature;
    const Cut limit = {cut[0], as_type<int>(cut[1])};
    Best b = {-INFINITY, NO_ID};
    for (uint block = range.from / 4 + tid; 4 * block < range.to; block += at.threads()) {
        uint4 words = 0;
        bool drawn = temperature == 0;
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const uint id = 4 * block + j;
            if (id < range.from || id >= range.to || !limit.keeps(y[id], int(id))) continue;
            if (!drawn) words = philox(seed, block, position);
            drawn = true;
            b.add(temperature == 0 ? y[id] : y[id] / temperature + gumbel(words[j]), int(id));
        }
    }
    store_best(b, best, group, values, ids, at);
}

// ---- hand-over ------------------------------------------------------------------------------------------------------

// The token that the groups found, or NO_ID if a flag is set or there is none.  By one simdgroup.
inline int chosen_token(device const float *best, device const int *flags, uint groups, uint lane) {
    Best b = {-INFINITY, NO_ID};
    bool bad = false;
    for (uint i = lane; i < groups; i += LANES) {
        bad = bad || flags[i] != 0;
        const float value = best[2 * i];
        const int id = as_type<int>(best[2 * i + 1]);
        if (value > b.value || (value == b.value && id < b.id)) b = Best{value, id};
    }
    b = simd_best(b);
    return simd_any(bad) ? NO_ID : b.id;
}

// (greatest, ln Σ exp(raw - greatest)) over all slices.
inline float2 log_total(device const float *stats, uint groups, uint lane) {
    float top = -INFINITY, total = 0;
    for (uint i = lane; i < groups; i += LANES) top = max(top, stats[4 * i]);
    top = simd_max(top);
    for (uint i = lane; i < groups; i += LANES)
        total += stats[4 * i + 1] > 0 ? stats[4 * i + 1] * precise::exp(stats[4 * i] - top) : 0.0f;
    return {top, precise::log(simd_sum(total))};
}

// One simdgroup.
[[kernel, max_total_threads_per_threadgroup(32)]] void advance(device const Step *step [[buffer(0)]],
    device Step *next_step [[buffer(1)]], device const Request *request [[buffer(2)]],
    device const float *best [[buffer(3)]], device const int *flags [[buffer(4)]],
    device const float *logits [[buffer(5)]], device const float *stats [[buffer(6)]],
    device const int *top_ids [[buffer(7)]], device const float *top_values [[buffer(8)]],
    device int *next_ids [[buffer(9)]], device int *history [[buffer(10)]], device uint *counts [[buffer(11)]],
    device Output *outputs [[buffer(12)]], constant advance_params &p [[buffer(13)]],
    uint lane [[thread_index_in_simdgroup]]) {
    const int token = chosen_token(best, flags, p.groups, lane);
    const int position = step->position + step->rows, count = step->count + 1, stopped = step->stopped;
    const bool found = token != NO_ID, logprobs = found && p.logprobs != 0;
    const bool listed = lane < uint(request->stop_count) && token == request->stop_ids[lane];
    const bool stop = !found || simd_any(listed);
    device Output *out = outputs + uint(step->count) % LILY_OUTPUT_RING;
    const int tops = logprobs ? min(request->top_logprobs, request->vocab) : 0;
    const float2 total = logprobs ? log_total(stats, p.groups, lane) : float2(0);
    if (int(lane) < tops) {
        out->top_ids[lane] = top_ids[lane];
        out->top_logprobs[lane] = (top_values[lane] - total.x) - total.y;
    }
    if (lane == 0) {
        out->token = found ? token : -1;
        out->position = position;
        out->status = !found ? LILY_STATUS_NONFINITE : stop ? LILY_STATUS_STOP : LILY_STATUS_OK;
        out->logprob = logprobs ? (logits[token] - total.x) - total.y : 0.0f;
        out->top_count = tops;
        if (found) {
            next_ids[0] = token;
            history[position] = token;
            counts[token] += 1;
        }
        next_step->position = position;
        next_step->rows = 1;
        next_step->count = count;
        next_step->stopped = stopped != 0 || stop ? 1 : 0;
    }
    // `count` tells the host that the entry is complete.
    threadgroup_barrier(mem_flags::mem_device);
    if (lane == 0) out->count = count;
}
