// SPDX-License-Identifier: Apache-2.0
// Barriers and simdgroup functions: the last lane to arrive computes every lane's result.
//
// Reductions run as a tree over the active lanes, as hardware does, not from left to right.  A shuffle from a lane
// that is inactive or out of range is undefined in Metal: it yields a value that shows (all bits set).
#pragma once

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }

MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_HERE) { msl_group_barrier((uint)flags, site); }
MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_HERE) { msl_simd_barrier((uint)flags, site); }

template <class T> struct msl_lane_op : MslOp {
    T value, fill;
    uint parameter;
    static MSL_INLINE msl_lane_op &of(MslOp **lanes, uint i) { return *static_cast<msl_lane_op *>(lanes[i]); }
};

#define MSL_EACH_LANE(mask, i) \
    for (uint32_t left = (mask), i; left && (i = __builtin_ctz(left), true); left &= left - 1)

// T name(T value): `reduce` combines a and b.
#define MSL_REDUCTION(name, T, reduce) \
    MSL_NOINLINE inline T name(T value, MSL_HERE) { \
        msl_lane_op<T> op; \
        op.site = site, op.value = value; \
        op.complete = [](MslOp **lanes, uint32_t mask) MSL_NOSANITIZE { \
            T t[32]; \
            uint n = 0; \
            MSL_EACH_LANE(mask, i) t[n++] = msl_lane_op<T>::of(lanes, i).value; \
            for (uint step = 1; step < n; step *= 2) \
                for (uint k = 0; k + step < n; k += 2 * step) { \
                    T a = t[k], b = t[k + step]; \
                    t[k] = (T)(reduce); \
                } \
            MSL_EACH_LANE(mask, i) msl_lane_op<T>::of(lanes, i).value = t[0]; \
        }; \
        msl_simd_op(&op); \
        return op.value; \
    }
// The value of lane `source`, an expression of i (the lane) and p (its argument).
#define MSL_SHUFFLE(name, T, source) \
    MSL_NOINLINE inline T name(T value, ushort parameter, MSL_HERE) { \
        msl_lane_op<T> op; \
        op.site = site, op.value = value, op.parameter = parameter; \
        op.complete = [](MslOp **lanes, uint32_t mask) MSL_NOSANITIZE { \
            T t[32]; \
            MSL_EACH_LANE(mask, i) t[i] = msl_lane_op<T>::of(lanes, i).value; \
            MSL_EACH_LANE(mask, i) { \
                auto &o = msl_lane_op<T>::of(lanes, i); \
                uint p = o.parameter, s = (source); \
                if (s < 32 && (mask >> s & 1)) \
                    o.value = t[s]; \
                else \
                    __builtin_memset((void *)&o.value, 0xff, sizeof(T)); \
            } \
        }; \
        msl_simd_op(&op); \
        return op.value; \
    }
#define MSL_SHUFFLE_FILL(name, T, source) \
    MSL_NOINLINE inline T name(T value, T fill, ushort parameter, MSL_HERE) { \
        msl_lane_op<T> op; \
        op.site = site, op.value = value, op.fill = fill, op.parameter = parameter; \
        op.complete = [](MslOp **lanes, uint32_t mask) MSL_NOSANITIZE { \
            T t[32]; \
            MSL_EACH_LANE(mask, i) t[i] = msl_lane_op<T>::of(lanes, i).value; \
            MSL_EACH_LANE(mask, i) { \
                auto &o = msl_lane_op<T>::of(lanes, i); \
                uint p = o.parameter, s = (source); \
                o.value = s < 32 && (mask >> s & 1) ? t[s] : o.fill; \
            } \
        }; \
        msl_simd_op(&op); \
        return op.value; \
    }
#define MSL_PREFIX(name, T, start, combine, inclusive) \
    MSL_NOINLINE inline T name(T value, MSL_HERE) { \
        msl_lane_op<T> op; \
        op.site = site, op.value = value; \
        op.complete = [](MslOp **lanes, uint32_t mask) MSL_NOSANITIZE { \
            T a = (T)(start); \
            MSL_EACH_LANE(mask, i) { \
                T b = msl_lane_op<T>::of(lanes, i).value, both = (T)(combine); \
                msl_lane_op<T>::of(lanes, i).value = inclusive ? both : a; \
                a = both; \
            } \
        }; \
        msl_simd_op(&op); \
        return op.value; \
    }
#define MSL_FIRST(name, T) \
    MSL_NOINLINE inline T name(T value, MSL_HERE) { \
        msl_lane_op<T> op; \
        op.site = site, op.value = value; \
        op.complete = [](MslOp **lanes, uint32_t mask) MSL_NOSANITIZE { \
            T first = msl_lane_op<T>::of(lanes, __builtin_ctz(mask)).value; \
            MSL_EACH_LANE(mask, i) msl_lane_op<T>::of(lanes, i).value = first; \
        }; \
        msl_simd_op(&op); \
        return op.value; \
    }

// Overloads, as Metal has them: none for bfloat, none for 64 bits or bool.
#define MSL_SIMD_MOVES(T) \
    MSL_SHUFFLE(simd_shuffle, T, p) \
    MSL_SHUFFLE(simd_broadcast, T, p) \
    MSL_SHUFFLE(simd_shuffle_xor, T, i ^ p) \
    MSL_SHUFFLE(simd_shuffle_down, T, i + p) \
    MSL_SHUFFLE(simd_shuffle_up, T, i - p) \
    MSL_SHUFFLE(simd_shuffle_rotate_down, T, (i + p) & 31) \
    MSL_SHUFFLE(simd_shuffle_rotate_up, T, (i - p) & 31) \
    MSL_SHUFFLE(quad_shuffle, T, (i & ~3u) | (p & 3)) \
    MSL_SHUFFLE(quad_broadcast, T, (i & ~3u) | (p & 3)) \
    MSL_SHUFFLE(quad_shuffle_xor, T, i ^ (p & 3)) \
    MSL_SHUFFLE_FILL(simd_shuffle_and_fill_down, T, i + p) \
    MSL_SHUFFLE_FILL(simd_shuffle_and_fill_up, T, i - p) \
    MSL_FIRST(simd_broadcast_first, T)
#define MSL_SIMD_ARITHMETIC(T) \
    MSL_REDUCTION(simd_sum, T, a + b) \
    MSL_REDUCTION(simd_product, T, a *b) \
    MSL_REDUCTION(simd_max, T, max(a, b)) \
    MSL_REDUCTION(simd_min, T, min(a, b)) \
    MSL_PREFIX(simd_prefix_inclusive_sum, T, 0, a + b, true) \
    MSL_PREFIX(simd_prefix_exclusive_sum, T, 0, a + b, false) \
    MSL_PREFIX(simd_prefix_inclusive_product, T, 1, a *b, true) \
    MSL_PREFIX(simd_prefix_exclusive_product, T, 1, a *b, false)
#define MSL_SIMD_BITS(T) \
    MSL_REDUCTION(simd_and, T, a &b) \
    MSL_REDUCTION(simd_or, T, a | b) \
    MSL_REDUCTION(simd_xor, T, a ^ b)
#define MSL_SIMD_VECTORS(T) \
    MSL_SIMD_MOVES(T) \
    MSL_SIMD_MOVES(T##2) \
    MSL_SIMD_MOVES(T##3) \
    MSL_SIMD_MOVES(T##4)
MSL_SIMD_VECTORS(float)
MSL_SIMD_VECTORS(half)
MSL_SIMD_VECTORS(int)
MSL_SIMD_VECTORS(uint)
MSL_SIMD_VECTORS(short)
MSL_SIMD_VECTORS(ushort)
MSL_SIMD_ARITHMETIC(float)
MSL_SIMD_ARITHMETIC(half)
MSL_SIMD_ARITHMETIC(int)
MSL_SIMD_ARITHMETIC(uint)
MSL_SIMD_ARITHMETIC(short)
MSL_SIMD_ARITHMETIC(ushort)
MSL_SIMD_BITS(int)
MSL_SIMD_BITS(uint)
MSL_SIMD_BITS(short)
MSL_SIMD_BITS(ushort)
#define MSL_SIMD_VECTOR_SUMS(T) \
    MSL_REDUCTION(simd_sum, T##2, a + b) \
    MSL_REDUCTION(simd_sum, T##3, a + b) \
    MSL_REDUCTION(simd_sum, T##4, a + b) \
    MSL_REDUCTION(simd_max, T##2, max(a, b)) \
    MSL_REDUCTION(simd_max, T##4, max(a, b)) \
    MSL_REDUCTION(simd_min, T##2, min(a, b)) \
    MSL_REDUCTION(simd_min, T##4, min(a, b))
MSL_SIMD_VECTOR_SUMS(float)
MSL_SIMD_VECTOR_SUMS(half)

// ---- votes ----
struct simd_vote {
    typedef ulong vote_t;
    ulong mask;
    MSL_INLINE explicit simd_vote(vote_t m = 0) : mask(m) {}
    MSL_INLINE explicit operator vote_t() const { return mask; }
    MSL_INLINE bool all() const { return (uint)mask == 0xffffffffu; }
    MSL_INLINE bool any() const { return mask != 0; }
};
// Bits of the lanes where `vote` holds below, of the active lanes above.
MSL_NOINLINE inline ulong msl_ballot(bool vote, MslSite site) {
    msl_lane_op<ulong> op;
    op.site = site, op.value = vote;
    op.complete = [](MslOp **lanes, uint32_t mask) MSL_NOSANITIZE {
        ulong r = (ulong)mask << 32;
        MSL_EACH_LANE(mask, i) if (msl_lane_op<ulong>::of(lanes, i).value) r |= 1ul << i;
        MSL_EACH_LANE(mask, i) msl_lane_op<ulong>::of(lanes, i).value = r;
    };
    msl_simd_op(&op);
    return op.value;
}
MSL_INLINE simd_vote simd_ballot(bool v, MSL_HERE) { return simd_vote((uint)msl_ballot(v, site)); }
MSL_INLINE bool simd_any(bool v, MSL_HERE) { return (uint)msl_ballot(v, site) != 0; }
MSL_INLINE bool simd_all(bool v, MSL_HERE) {
    ulong r = msl_ballot(v, site);
    return (uint)r == (uint)(r >> 32);
}
MSL_INLINE simd_vote simd_active_threads_mask(MSL_HERE) { return simd_vote(msl_ballot(true, site) >> 32); }
MSL_INLINE bool simd_is_first(MSL_HERE) {
    return (uint)__builtin_ctz((uint)(msl_ballot(true, site) >> 32)) == msl_self()->lane;
}

} // namespace metal
