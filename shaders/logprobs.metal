// SPDX-License-Identifier: Apache-2.0
// The greatest few and their log-probabilities: top_logprobs, score_rows.  Ties go to the lower id.
//
// Not here: the selection itself (select.h), the draw (sample.metal).
#include "common.h"
#include "group.h"
#include "select.h"

// Where the kept ids are collected.
struct TopList {
    threadgroup float *values; // [want]
    threadgroup int *ids;      // [want]
    threadgroup atomic_uint *held;
};

// The `want` greatest of x[0..count) in order, ties to the lower id; unused places are (-inf, -1).  `top` is the greatest.
// values are shifted by `minus`.
inline void top_of(SelectTables t, TopList list, device const float *x, uint count, float top, uint want,
    device int *ids, device float *values, float2 minus, group_place at) {
    Cut c = {-INFINITY, NO_ID};
    if (want == 0) return;
    if (want < count) {
        Selection s = {x, count, top, want, ALL_MASS};
        select_count_distances<false>(t, s, at);
        c = select_end<false>(t, s, at);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (at.tid == 0) atomic_store_explicit(list.held, 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint id = at.tid; id < count; id += at.threads()) {
        if (!c.keeps(x[id], int(id))) continue;
        const uint place = atomic_fetch_add_explicit(list.held, 1u, memory_order_relaxed);
        if (place >= want) continue;
        list.values[place] = x[id];
        list.ids[place] = int(id);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint held = min(atomic_load_explicit(list.held, memory_order_relaxed), want);
    for (uint entry = at.tid; entry < want; entry += at.threads()) {
        uint place = entry;
        float value = -INFINITY;
        int id = -1;
        if (entry < held) {
            value = list.values[entry];
            id = list.ids[entry];
            place = 0;
            for (uint i = 0; i < held; i++)
                if (list.values[i] > value || (list.values[i] == value && list.ids[i] < id)) place++;
        }
        ids[place] = id;
        values[place] = (value - minus.x) - minus.y;
    }
}

inline float greatest_of(device const float *x, uint count, threadgroup float *partial, group_place at) {
    float top = -INFINITY;
    for (uint id = at.tid; id < count; id += at.threads()) top = max(top, x[id]);
    return group_max(top, partial, at);
}

[[kernel, max_total_threads_per_threadgroup(1024)]] void top_logprobs(device const Request *request [[buffer(0)]],
    device const float *logits [[buffer(1)]], device int *top_ids [[buffer(2)]], device float *top_values [[buffer(3)]],
    constant top_logprobs_params &p [[buffer(4)]], LILY_THREAD_ARGUMENTS) {
    threadgroup atomic_uint tally[SELECT_BUCKETS];
    threadgroup uint strips[4 * SELECT_STRIPS];
    threadgroup uint shared[LANES];
    threadgroup float partial[LANES], list_values[LILY_MAX_TOP_LOGPROBS];
    threadgroup int list_ids[LILY_MAX_TOP_LOGPROBS];
    threadgroup atomic_uint held;
    const group_place at = {tid, lane, sg, simdgroups};
    const SelectTables tables = {tally, tally, tally, strips, shared};
    const TopList list = {list_values, list_ids, &held};
    const uint count = min(uint(request->vocab), p.count);
    const uint want = min(uint(request->top_logprobs), uint(LILY_MAX_TOP_LOGPROBS));
    const float top = greatest_of(logits, count, partial, at);
    top_of(tables, list, logits, count, top, want, top_ids, top_values, float2(0), at);
}

[[kernel, max_total_threads_per_threadgroup(1024)]] void score_rows(device const Step *step [[buffer(0)]],
    device const Request *request [[buffer(1)]], device const float *logits [[buffer(2)]],
    device const int *target [[buffer(3)]], device float *logprobs [[buffer(4)]], device int *top_ids [[buffer(5)]],
    device float *top_logprobs [[buffer(6)]], device int *flags [[buffer(7)]],
    constant score_rows_params &p [[buffer(8)]], uint row [[threadgroup_position_in_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup atomic_uint tally[SELECT_BUCKETS];
    threadgroup uint strips[4 * SELECT_STRIPS];
    threadgroup uint shared[LANES];
    threadgroup float partial[LANES], list_values[LILY_MAX_SCORE_TOP];
    threadgroup int list_ids[LILY_MAX_SCORE_TOP];
    threadgroup atomic_uint held;
    const group_place at = {tid, lane, sg, simdgroups};
    const SelectTables tables = {tally, tally, tally, strips, shared};
    const TopList list = {list_values, list_ids, &held};
    const uint m = p.first + row, count = min(uint(request->vocab), p.count);
    if (row >= p.limit || m >= uint(step->rows)) return;
    device const float *x = logits + row * p.count;
    const float top = greatest_of(x, count, partial, at);
    float total = 0;
    bool bad = false;
    for (uint id = tid; id < count; id += at.threads()) {
        bad = bad || !is_finite_bits(x[id]);
        total += precise::exp(x[id] - top);
    }
    total = group_sum(total, partial, at);
    bad = group_any(bad, shared, at);
    const float2 minus = float2(top, precise::log(total));
    if (tid == 0) {
        logprobs[m] = target[m] >= 0 ? (x[target[m]] - minus.x) - minus.y : 0.0f;
        flags[m] = bad ? 1 : 0;
    }
    top_of(tables, list, x, count, top, min(p.top, uint(LILY_MAX_SCORE_TOP)), top_ids + m * p.top,
        top_logprobs + m * p.top, minus, at);
}
