// SPDX-License-Identifier: Apache-2.0
// sample_filter: exact top-p, min-p and top-k over the whole vocabulary.
//
// Not here: the selection itself (select.h), penalties and the draw (sample.metal), the greatest few (logprobs.metal).
#include "common.h"
#include "group.h"
#include "select.h"

// p·total, rounded down to a unit, 0 <= p < 1: p is taken as two digits of 32 bits, which hold all of its 24.
// At least one unit: with none the prefix would end before the greatest id.
inline ulong share_of_mass(float p, ulong total) {
    const float scaled = p * 4294967296.0f;
    const uint first = uint(scaled), second = uint((scaled - float(first)) * 4294967296.0f);
    const ulong high = total >> 32, low = total & 0xffffffffu;
    const ulong share = high * first + (low * first >> 32) + (high * second >> 32);
    return share > 0 ? share : 1;
}

// All filters keep a prefix of the ids, so the shortest one counts.
[[kernel, max_total_threads_per_threadgroup(1024)]] void sample_filter(device const Request *request [[buffer(0)]],
    device const float *y [[buffer(1)]], device const float *stats [[buffer(2)]], device float *cut [[buffer(3)]],
    constant sample_filter_params &p [[buffer(4)]], LILY_THREAD_ARGUMENTS) {
    threadgroup atomic_uint tally[SELECT_BUCKETS], low[SELECT_BUCKETS], high[SELECT_BUCKETS];
    threadgroup uint strips[4 * SELECT_STRIPS];
    threadgroup uint shared[LANES];
    const group_place at = {tid, lane, sg, simdgroups};
    const SelectTables tables = {tally, low, high, strips, shared};
    const uint vocab = min(uint(request->vocab), p.count), top_k = uint(max(request->top_k, 0));
    const bool limited = top_k > 0 && top_k < vocab;
    float top = -INFINITY;
    for (uint i = lane; i < p.groups; i += LANES) top = max(top, stats[4 * i + 2]);
    top = simd_max(top);
    Cut c = {-INFINITY, NO_ID};
    // Without a finite maximum there is nothing to choose from: `advance` reports it.
    const bool on = request->temperature != 0 && is_finite_bits(top);
    Selection s = {y, vocab, top, limited ? top_k : vocab, ALL_MASS};
    if (on && request->top_p < 1) {
        select_count_distances<true>(tables, s, at);
        s.mass = share_of_mass(request->top_p, total_mass<true>(tables));
        c = select_end<true>(tables, s, at);
    } else if (on && limited) {
        select_count_distances<false>(tables, s, at);
        c = select_end<false>(tables, s, at);
    }
    if (on && request->min_p > 0) {
        const float least = top + precise::log(request->min_p);
        if (least > c.value) c = Cut{least, NO_ID};
    }
    if (tid == 0) {
        cut[0] = c.value;
        cut[1] = as_type<float>(c.id);
    }
}
