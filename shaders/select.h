// SPDX-License-Identifier: Apache-2.0
// Exact selection by one threadgroup: where a prefix of the ids, in order of (value descending, id ascending), ends.
//
// The prefix ends as soon as `ids` ids are kept or their mass reaches `mass`.  Its end is found by counting into buckets,
// each time within the bucket that holds it: first by the distance from the greatest value, which spreads logits evenly,
// then by the bits of the value; equal values are told apart by id.  Masses are 64-bit integers, units of 2^-44 of the
// greatest probability: sums of them are exact and do not depend on the order of threads.
#ifndef LILY_SELECT_H
#define LILY_SELECT_H

#include "common.h"
#include "group.h"

enum : int { NO_ID = 0x7fffffff };
constant constexpr uint SELECT_BUCKETS = 2048;
constant constexpr uint SELECT_STRIPS = 64;  // of buckets, summed up in parallel
constant constexpr float SELECT_SCALE = 128; // buckets of distance per unit of log-probability
constant constexpr ulong ALL_MASS = ~0ul;

// Ids from <= id < to.
struct id_range {
    uint from, to;
};

// Group `group`'s slice of the vocabulary.
inline id_range slice_of(uint group, uint slice, device const Request *request) {
    const uint vocab = uint(request->vocab), from = min(group * slice, vocab);
    return {from, min(from + slice, vocab)};
}

inline bool is_finite_bits(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }

// An id is kept iff its value is greater, or equal and its id at most `id`.
struct Cut {
    float value;
    int id;

    bool keeps(float x, int candidate) const { return x > value || (x == value && candidate <= id); }
};

// What one threadgroup shares.  `low` and `high` (the halves of a bucket's mass) are not used when only ids are counted.
struct SelectTables {
    threadgroup atomic_uint *tally; // [SELECT_BUCKETS]
    threadgroup atomic_uint *low;   // [SELECT_BUCKETS]
    threadgroup atomic_uint *high;  // [SELECT_BUCKETS]
    threadgroup uint *strips;       // [4 * SELECT_STRIPS]
    threadgroup uint *shared;       // [LANES]
};

// The state that all threads hold alike.
struct Selection {
    device const float *x;
    uint count; // ids are below
    float top;  // greatest value
    uint ids;   // still to be kept
    ulong mass; // still to be kept; ALL_MASS: whatever the mass
};

// exp(x - top) <= 1 in units of 2^-44, in two halves: 31 bits before the point of the first product, 13 of the second.
inline uint2 mass_halves(float x, float top) {
    const float scaled = min(2147483648.0f, precise::exp(x - top) * 2147483648.0f); // NaN becomes 2^31, too
    const uint upper = uint(scaled), lower = uint((scaled - float(upper)) * 8192.0f);
    return uint2(upper << 13 | lower, upper >> 19);
}

inline ulong whole(uint2 halves) { return ulong(halves.y) << 32 | halves.x; }

inline ulong mass_of(float x, float top) { return whole(mass_halves(x, top)); }

// Ascending where values descend; 0 and -0 are equal.
inline uint descending_key(float x) { return ~order_key(x); }

inline float key_value(uint key) {
    const uint order = ~key;
    return as_type<float>(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

inline uint distance_bucket(float distance) {
    const float b = distance * SELECT_SCALE;
    return b < float(SELECT_BUCKETS - 1) ? uint(b) : SELECT_BUCKETS - 1;
}

// ---- buckets --------------------------------------------------------------------------------------------------------

template <bool MASS> inline void select_clear(SelectTables t, group_place at) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint b = at.tid; b < SELECT_BUCKETS; b += at.threads()) {
        atomic_store_explicit(&t.tally[b], 0u, memory_order_relaxed);
        if (!MASS) continue;
        atomic_store_explicit(&t.low[b], 0u, memory_order_relaxed);
        atomic_store_explicit(&t.high[b], 0u, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Adds `tally` ids of `mass` altogether to a bucket.
template <bool MASS> inline void select_add(SelectTables t, uint bucket, uint tally, uint2 mass) {
    atomic_fetch_add_explicit(&t.tally[bucket], tally, memory_order_relaxed);
    if (!MASS || (mass.x == 0 && mass.y == 0)) return;
    const uint before = atomic_fetch_add_explicit(&t.low[bucket], mass.x, memory_order_relaxed);
    const uint high = mass.y + (before + mass.x < before ? 1 : 0);
    if (high > 0) atomic_fetch_add_explicit(&t.high[bucket], high, memory_order_relaxed);
}

template <bool MASS> inline ulong bucket_mass(SelectTables t, uint b) {
    if (!MASS) return 0;
    return whole(uint2(
        atomic_load_explicit(&t.low[b], memory_order_relaxed), atomic_load_explicit(&t.high[b], memory_order_relaxed)));
}

// Whether the prefix ends within a bucket or strip of this size; if not, it is taken off.
inline bool select_ends(thread Selection &s, uint tally, ulong mass) {
    if (tally >= s.ids || mass >= s.mass) return true;
    s.ids -= tally;
    s.mass -= s.mass == ALL_MASS ? 0 : mass;
    return false;
}

// Sums the buckets up in strips; strips[0..1] of a strip are its mass, [2] its tally.
template <bool MASS> inline void select_strips(SelectTables t, group_place at) {
    for (uint strip = at.tid; strip < SELECT_STRIPS; strip += at.threads()) {
        const uint width = SELECT_BUCKETS / SELECT_STRIPS;
        uint tally = 0;
        ulong mass = 0;
        for (uint b = strip * width; b < (strip + 1) * width; b++) {
            tally += atomic_load_explicit(&t.tally[b], memory_order_relaxed);
            mass += bucket_mass<MASS>(t, b);
        }
        t.strips[4 * strip] = uint(mass);
        t.strips[4 * strip + 1] = uint(mass >> 32);
        t.strips[4 * strip + 2] = tally;
    }
}

inline ulong strip_mass(SelectTables t, uint strip) {
    return whole(uint2(t.strips[4 * strip], t.strips[4 * strip + 1]));
}

template <bool MASS> inline ulong total_mass(SelectTables t) {
    ulong total = 0;
    for (uint strip = 0; strip < SELECT_STRIPS; strip++) total += strip_mass(t, strip);
    return total;
}

// The bucket in which the prefix ends; what lies before it is taken off `s`.  One simdgroup looks, all get the result.
template <bool MASS> inline uint select_walk(SelectTables t, thread Selection &s, group_place at) {
    const uint width = SELECT_BUCKETS / SELECT_STRIPS;
    if (at.sg == 0) {
        uint strip = 0;
        while (strip + 1 < SELECT_STRIPS && !select_ends(s, t.strips[4 * strip + 2], strip_mass(t, strip))) strip++;
        uint b = strip * width;
        while (b + 1 < (strip + 1) * width &&
            !select_ends(s, atomic_load_explicit(&t.tally[b], memory_order_relaxed), bucket_mass<MASS>(t, b)))
            b++;
        if (at.lane == 0) {
            t.shared[0] = b;
            t.shared[1] = s.ids;
            t.shared[2] = uint(s.mass);
            t.shared[3] = uint(s.mass >> 32);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    s.ids = t.shared[1];
    s.mass = whole(uint2(t.shared[2], t.shared[3]));
    return t.shared[0];
}

// ---- passes ---------------------------------------------------------------------------------------------------------

// The keys that values of one bucket of distance can have.
struct key_range {
    uint first, last;
};

inline key_range keys_of_distance(uint bucket, float top) {
    const float upper = top - float(bucket) / SELECT_SCALE, lower = top - float(bucket + 1) / SELECT_SCALE;
    const float slack = 1e-6f * (fabs(upper) + fabs(lower) + fabs(top) + 1);
    const bool open = !is_finite_bits(top);
    return {open ? 0 : descending_key(upper + slack),
        open || bucket == SELECT_BUCKETS - 1 ? 0xffffffffu : descending_key(lower - slack)};
}

// Counts the ids of distance bucket `bucket` by (key - first) >> shift.
template <bool MASS>
inline void select_count_keys(
    SelectTables t, thread const Selection &s, uint bucket, key_range keys, uint shift, group_place at) {
    select_clear<MASS>(t, at);
    for (uint id = at.tid; id < s.count; id += at.threads()) {
        const float x = s.x[id];
        const uint key = descending_key(x);
        if (distance_bucket(s.top - x) == bucket && key >= keys.first && key <= keys.last)
            select_add<MASS>(t, (key - keys.first) >> shift, 1, MASS ? mass_halves(x, s.top) : uint2(0));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    select_strips<MASS>(t, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The id of the `nth` (from 1) id with this key.
inline int select_nth_id(SelectTables t, thread const Selection &s, uint key, uint nth, group_place at) {
    const uint length = (s.count + LANES * at.simdgroups - 1) / (LANES * at.simdgroups) * LANES;
    const uint begin = min(at.sg * length, s.count), end = min(begin + length, s.count);
    uint mine = 0, all;
    for (uint id = begin + at.lane; id < end; id += LANES) mine += descending_key(s.x[id]) == key ? 1 : 0;
    mine = simd_sum(mine);
    uint before = group_scan(at.lane == 0 ? mine : 0, all, t.shared, at);
    before = simd_broadcast(before, 0);
    if (at.tid == 0) t.strips[0] = uint(NO_ID);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (before < nth && nth <= before + mine)
        for (uint base = begin; base < end; base += LANES) {
            const uint id = base + at.lane;
            const bool hit = id < end && descending_key(s.x[min(id, end - 1)]) == key;
            const uint mask = simd_mask(hit);
            if (hit && before + popcount(mask & lanes_before(at.lane)) + 1 == nth) t.strips[0] = id;
            before += popcount(mask);
        }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return int(t.strips[0]);
}

// How many ids of equal value x belong to the prefix.
template <bool MASS> inline uint select_equal_ids(thread const Selection &s, float x) {
    if (!MASS || s.mass == ALL_MASS) return max(s.ids, 1u);
    const ulong each = mass_of(x, s.top);
    const ulong needed = each == 0 ? s.ids : (s.mass + each - 1) / each;
    return max(needed < s.ids ? uint(needed) : s.ids, 1u);
}

// After the pass over distances (tables filled and summed up): the prefix's end.
template <bool MASS> inline Cut select_end(SelectTables t, Selection s, group_place at) {
    const uint bucket = select_walk<MASS>(t, s, at);
    key_range keys = keys_of_distance(bucket, s.top);
    uint shift, equal;
    do {
        const uint width = keys.last - keys.first;
        shift = width < SELECT_BUCKETS ? 0 : 21 - clz(width);
        select_count_keys<MASS>(t, s, bucket, keys, shift, at);
        const uint digit = select_walk<MASS>(t, s, at);
        equal = atomic_load_explicit(&t.tally[digit], memory_order_relaxed);
        keys.first += digit << shift;
        keys.last = keys.first + min(keys.last - keys.first, (1u << shift) - 1);
    } while (shift > 0);
    const float value = key_value(keys.first);
    const uint kept = select_equal_ids<MASS>(s, value);
    return {value, kept >= equal ? NO_ID : select_nth_id(t, s, keys.first, kept, at)};
}

// The pass over distances.  Nearly all ids lie in the last bucket: a thread adds its own up first.
template <bool MASS> inline void select_count_distances(SelectTables t, thread const Selection &s, group_place at) {
    uint far = 0;
    ulong far_mass = 0;
    select_clear<MASS>(t, at);
    for (uint id = at.tid; id < s.count; id += at.threads()) {
        const float x = s.x[id];
        const uint bucket = distance_bucket(s.top - x);
        const uint2 mass = MASS ? mass_halves(x, s.top) : uint2(0);
        if (bucket < SELECT_BUCKETS - 1) {
            select_add<MASS>(t, bucket, 1, mass);
            continue;
        }
        far++;
        far_mass += whole(mass);
    }
    if (far > 0) select_add<MASS>(t, SELECT_BUCKETS - 1, far, uint2(uint(far_mass), uint(far_mass >> 32)));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    select_strips<MASS>(t, at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
}

#endif
