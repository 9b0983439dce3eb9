// SPDX-License-Identifier: Apache-2.0
// Routing of rows to experts, all on the GPU: route_topk, and route_group (histogram, scan, scatter, block map).
//
// experts <= MAX_EXPERTS, active <= 32.  Not here: the router's projection (gemm.metal), the experts (moe_prefill.metal).
#include "common.h"
#include "group.h"

// Counters of route_group: MAX_EXPERTS for each of up to 28 simdgroups, so that all of it fits 32 KB.
constant constexpr uint ROUTE_COUNTERS = 28 * MAX_EXPERTS;

// One simdgroup a row.
[[kernel, max_total_threads_per_threadgroup(32)]] void route_topk(device const Step *step [[buffer(0)]],
    device const float *logits [[buffer(1)]], device int *ids [[buffer(2)]], device float *weights [[buffer(3)]],
    constant route_topk_params &p [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
    if (row >= uint(step->rows)) return;
    logits += row * (p.experts + 1);
    TopExperts top;
    top.init(logits, p.experts, lane);
    uint mine = 0;
    for (uint a = 0; a < p.active; a++) {
        const uint next = top.next();
        mine = a == lane ? next : mine;
    }
    const float weight = route_weight(logits, p.experts, p.active, p.renorm, mine, lane);
    if (lane < p.active) {
        ids[row * p.active + lane] = int(mine);
        weights[row * p.active + lane] = weight;
    }
}

// ---- grouping by expert ---------------------------------------------------------------------------------------------
// A stable counting sort.  Each simdgroup owns one range of the assignments and one row of counters, so the order inside
// an expert follows from the ranges alone and no result depends on which thread came first.

struct route_ranges {
    uint count, length; // ranges, assignments in each (a multiple of 32)
};

inline route_ranges route_split(uint assignments, uint experts, uint simdgroups) {
    const uint most = min(simdgroups, ROUTE_COUNTERS / experts);
    const uint length = (assignments + 32 * most - 1) / (32 * most) * 32;
    return {most, length};
}

// counter[range][e] = assignments of e in the range.
inline void route_count(device const int *ids, uint begin, uint end, threadgroup atomic_uint *row, uint lane) {
    for (uint i = begin + lane; i < end; i += 32) atomic_fetch_add_explicit(&row[ids[i]], 1u, memory_order_relaxed);
}

// first_place and first_block become exclusive sums over the experts, counters the first place of their range.
inline void route_scan(threadgroup atomic_uint *counter, threadgroup uint *first_place, threadgroup uint *first_block,
    threadgroup uint *partial, uint ranges, constant route_group_params &p, group_place at) {
    uint places = 0, blocks = 0;
    for (uint base = 0; base < p.experts; base += at.threads()) {
        const uint e = base + at.tid;
        uint rows = 0, all_rows, all_blocks;
        if (e < p.experts)
            for (uint r = 0; r < ranges; r++)
                rows += atomic_load_explicit(&counter[r * p.experts + e], memory_order_relaxed);
        uint place = places + group_scan(rows, all_rows, partial, at);
        const uint block = blocks + group_scan((rows + p.tile_m - 1) / p.tile_m, all_blocks, partial, at);
        if (e < p.experts) {
            first_place[e] = place;
            first_block[e] = block;
            for (uint r = 0; r < ranges; r++) {
                const uint n = atomic_load_explicit(&counter[r * p.experts + e], memory_order_relaxed);
                atomic_store_explicit(&counter[r * p.experts + e], place, memory_order_relaxed);
                place += n;
            }
        }
        places += all_rows;
        blocks += all_blocks;
    }
    if (at.tid == 0) {
        first_place[p.experts] = places;
        first_block[p.experts] = blocks;
    }
}

// Hands out the places of a range, 32 assignments at a time; lanes with the same expert go in order.
inline void route_scatter(device const int *ids, device int *order, uint begin, uint end, threadgroup atomic_uint *row,
    uint expert_bits, uint lane) {
    for (uint base = begin; base < end; base += 32) {
        const bool inside = base + lane < end;
        const uint e = inside ? uint(ids[base + lane]) : 0;
        uint same = simd_mask(inside);
        for (uint bit = 0; bit < expert_bits; bit++) {
            const bool set = (e >> bit & 1) != 0;
            const uint mask = simd_mask(set);
            same &= set ? mask : ~mask;
        }
        const uint rank = popcount(same & lanes_before(lane));
        if (inside) order[atomic_load_explicit(&row[e], memory_order_relaxed) + rank] = int(base + lane);
        simdgroup_barrier(mem_flags::mem_threadgroup);
        if (inside && rank == 0) atomic_fetch_add_explicit(&row[e], popcount(same), memory_order_relaxed);
        simdgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// The expert whose blocks hold `block`: the last e with first_block[e] <= block.
inline uint route_expert_of(threadgroup const uint *first_block, uint experts, uint block) {
    uint low = 0, high = experts;
    while (high - low > 1) {
        const uint middle = (low + high) / 2;
        if (first_block[middle] <= block)
            low = middle;
        else
            high = middle;
    }
    return low;
}

[[kernel, max_total_threads_per_threadgroup(1024)]] void route_group(device const Step *step [[buffer(0)]],
    device const int *ids [[buffer(1)]], device int *offsets [[buffer(2)]], device int *order [[buffer(3)]],
    device int *blocks [[buffer(4)]], constant route_group_params &p [[buffer(5)]], LILY_THREAD_ARGUMENTS) {
    threadgroup atomic_uint counter[ROUTE_COUNTERS];
    threadgroup uint first_place[MAX_EXPERTS + 1];
    threadgroup uint first_block[MAX_EXPERTS + 1];
    threadgroup uint partial[32];
    const group_place at = {tid, lane, sg, simdgroups};
    const uint assignments = uint(step->rows) * p.active;
    const route_ranges ranges = route_split(assignments, p.experts, simdgroups);
    const uint begin = min(sg * ranges.length, assignments), end = min(begin + ranges.length, assignments);
    threadgroup atomic_uint *row = counter + min(sg, ranges.count - 1) * p.experts;
    for (uint i = tid; i < ranges.count * p.experts; i += at.threads())
        atomic_store_explicit(&counter[i], 0u, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg < ranges.count) route_count(ids, begin, end, row, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    route_scan(counter, first_place, first_block, partial, ranges.count, p, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg < ranges.count) route_scatter(ids, order, begin, end, row, 32 - clz(p.experts - 1), lane);
    for (uint e = tid; e <= p.experts; e += at.threads()) offsets[e] = int(first_place[e]);
    for (uint b = tid; b < p.max_blocks; b += at.threads()) {
        const bool used = b < first_block[p.experts];
        const uint e = used ? route_expert_of(first_block, p.experts, b) : 0;
        blocks[2 * b] = used ? int(e) : -1;
        blocks[2 * b + 1] = used ? int(first_place[e] + (b - first_block[e]) * p.tile_m) : 0;
    }
}
