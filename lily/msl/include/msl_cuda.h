// SPDX-License-Identifier: Apache-2.0
// Metal's standard library on NVIDIA GPUs: what lily/msl/cuda.py includes first (nvcc or NVRTC, C++20).
//
// A threadgroup is a block, a simdgroup a warp; every simdgroup function expects all 32 lanes, as the checks of the
// emulator require of Lily's shaders.  simdgroup_matrix keeps the layout of Apple's GPUs and multiplies by shuffles:
// right, but not fast.  Not handled: tensor operations (MSL 4), 16-bit simdgroup functions.
#pragma once
#include "msl_math.h"

#define MSL_DEVICE __device__
#define MSL_CONSTANT static __constant__
#define MSL_DEFINE_CONSTANT(type, name, value) static constexpr type name = (type)(value)
#define MSL_UNDEFINED_CONSTANT(type, name) static constexpr type name = {}
#define MSL_THREADGROUP(type, name, align) \
    __shared__ __align__(align) \
    type name
#define MSL_COVER(n)

struct MslCudaLaunch { // passed by value
    void *buffers[31];
    uint threadgroup_offset[8]; // of threadgroup arguments in dynamic shared memory
};

namespace metal {

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
MSL_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
enum memory_order { memory_order_relaxed = 0, memory_order_seq_cst = 5 };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
MSL_INLINE void threadgroup_barrier(mem_flags) { __syncthreads(); }
MSL_INLINE void simdgroup_barrier(mem_flags) { __syncwarp(); }
MSL_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) { __threadfence(); }

MSL_INLINE uint msl_linear() { return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z); }
MSL_INLINE uint msl_lane() { return msl_linear() & 31; }

// ---- simdgroup functions ----
template <class T, class F> MSL_INLINE T msl_by_words(const T &v, F move) {
    static_assert(sizeof(T) % 4 == 0 || sizeof(T) == 2, "32 bits at a time");
    constexpr int n = (sizeof(T) + 3) / 4;
    uint words[n] = {};
    memcpy(words, &v, sizeof(T));
    for (int i = 0; i < n; i++) words[i] = move(words[i]);
    T r;
    memcpy((void *)&r, words, sizeof(T));
    return r;
}
template <class T> MSL_INLINE T simd_shuffle(T v, ushort lane) {
    return msl_by_words(v, [=](uint w) { return __shfl_sync(0xffffffffu, w, lane); });
}
template <class T> MSL_INLINE T simd_broadcast(T v, ushort lane) { return simd_shuffle(v, lane); }
template <class T> MSL_INLINE T simd_broadcast_first(T v) { return simd_shuffle(v, 0); }
template <class T> MSL_INLINE T simd_shuffle_xor(T v, ushort mask) {
    return msl_by_words(v, [=](uint w) { return __shfl_xor_sync(0xffffffffu, w, mask); });
}
template <class T> MSL_INLINE T simd_shuffle_down(T v, ushort delta) {
    return msl_by_words(v, [=](uint w) { return __shfl_down_sync(0xffffffffu, w, delta); });
}
template <class T> MSL_INLINE T simd_shuffle_up(T v, ushort delta) {
    return msl_by_words(v, [=](uint w) { return __shfl_up_sync(0xffffffffu, w, delta); });
}
#define MSL_REDUCTION(name, expression) \
    template <class T> MSL_INLINE T name(T a) { \
        for (int step = 16; step; step >>= 1) { \
            T b = simd_shuffle_xor(a, (ushort)step); \
            a = (T)(expression); \
        } \
        return a; \
    }
MSL_REDUCTION(simd_sum, a + b)
MSL_REDUCTION(simd_product, a *b)
MSL_REDUCTION(simd_max, max(a, b))
MSL_REDUCTION(simd_min, min(a, b))
MSL_REDUCTION(simd_and, a &b)
MSL_REDUCTION(simd_or, a | b)
MSL_REDUCTION(simd_xor, a ^ b)
#undef MSL_REDUCTION
template <class T> MSL_INLINE T simd_prefix_inclusive_sum(T v) {
    uint lane = msl_lane();
    for (int step = 1; step < 32; step <<= 1) {
        T b = simd_shuffle_up(v, (ushort)step);
        if (lane >= step) v = v + b;
    }
    return v;
}
template <class T> MSL_INLINE T simd_prefix_exclusive_sum(T v) {
    T r = simd_shuffle_up(simd_prefix_inclusive_sum(v), 1);
    return msl_lane() == 0 ? T(0) : r;
}
struct simd_vote {
    typedef ulong vote_t;
    ulong mask;
    MSL_INLINE explicit simd_vote(vote_t m = 0) : mask(m) {}
    MSL_INLINE explicit operator vote_t() const { return mask; }
    MSL_INLINE bool all() const { return (uint)mask == 0xffffffffu; }
    MSL_INLINE bool any() const { return mask != 0; }
};
MSL_INLINE simd_vote simd_ballot(bool v) { return simd_vote(__ballot_sync(0xffffffffu, v)); }
MSL_INLINE bool simd_any(bool v) { return __any_sync(0xffffffffu, v); }
MSL_INLINE bool simd_all(bool v) { return __all_sync(0xffffffffu, v); }
MSL_INLINE simd_vote simd_active_threads_mask() { return simd_vote(0xffffffffu); }
MSL_INLINE bool simd_is_first() { return msl_lane() == 0; }

// ---- atomics ----
template <class T> struct atomic { T msl_value; };
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
#define MSL_ATOMIC(T, ...) template <class T> MSL_INLINE T __VA_ARGS__
MSL_ATOMIC(T, atomic_load_explicit(const volatile atomic<T> *p, memory_order)) {
    return *(const volatile T *)&p->msl_value;
}
template <class T>
MSL_INLINE void atomic_store_explicit(volatile atomic<T> *p, std::type_identity_t<T> v, memory_order) {
    *(volatile T *)&p->msl_value = v;
}
#define MSL_ATOMIC_UPDATE(name, function, operand) \
    template <class T> MSL_INLINE T name(volatile atomic<T> *p, std::type_identity_t<T> v, memory_order) { \
        return function((T *)&p->msl_value, operand); \
    }
MSL_ATOMIC_UPDATE(atomic_exchange_explicit, atomicExch, v)
MSL_ATOMIC_UPDATE(atomic_fetch_add_explicit, atomicAdd, v)
MSL_ATOMIC_UPDATE(atomic_fetch_sub_explicit, atomicAdd, (T)-v)
MSL_ATOMIC_UPDATE(atomic_fetch_max_explicit, atomicMax, v)
MSL_ATOMIC_UPDATE(atomic_fetch_min_explicit, atomicMin, v)
MSL_ATOMIC_UPDATE(atomic_fetch_and_explicit, atomicAnd, v)
MSL_ATOMIC_UPDATE(atomic_fetch_or_explicit, atomicOr, v)
MSL_ATOMIC_UPDATE(atomic_fetch_xor_explicit, atomicXor, v)
#undef MSL_ATOMIC
#undef MSL_ATOMIC_UPDATE

// ---- simdgroup_matrix ----
template <class T, int Columns, int Rows> struct simdgroup_matrix {
    static_assert(Columns == 8 && Rows == 8, "simdgroup_matrix is 8x8");
    vec<T, 2> e;
    MSL_INLINE vec<T, 2> &thread_elements() { return e; }
    static MSL_INLINE void place(uint lane, uint &r, uint &c) {
        uint quad = lane >> 2;
        r = (quad & 4) | ((lane >> 1) & 3);
        c = (quad & 2) * 2 + (lane & 1) * 2;
    }
    static MSL_INLINE uint owner(uint r, uint c) { return (r & 4) << 2 | (r & 3) << 1 | (c & 4) << 1 | ((c >> 1) & 1); }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R = C> MSL_INLINE simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T v) {
    simdgroup_matrix<T, C, R> m;
    m.e.x = v, m.e.y = v;
    return m;
}
template <class T>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8> &d, const T *source, ulong pitch = 8,
    vec<ulong, 2> origin = vec<ulong, 2>(0ul, 0ul), bool transpose = false) {
    uint r, c;
    d.place(msl_lane(), r, c);
    const T *p = source + (transpose ? origin.x * pitch + origin.y : origin.y * pitch + origin.x);
    d.e.x = transpose ? p[c * pitch + r] : p[r * pitch + c];
    d.e.y = transpose ? p[(c + 1) * pitch + r] : p[r * pitch + c + 1];
}
template <class T>
MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8> &d, T *target, ulong pitch = 8,
    vec<ulong, 2> origin = vec<ulong, 2>(0ul, 0ul), bool transpose = false) {
    uint r, c;
    d.place(msl_lane(), r, c);
    T *p = target + (transpose ? origin.x * pitch + origin.y : origin.y * pitch + origin.x);
    (transpose ? p[c * pitch + r] : p[r * pitch + c]) = d.e.x;
    (transpose ? p[(c + 1) * pitch + r] : p[r * pitch + c + 1]) = d.e.y;
}
template <class D, class A, class B, class C>
MSL_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, simdgroup_matrix<A, 8, 8> a,
    simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c) {
    uint row, column;
    d.place(msl_lane(), row, column);
    float x = (float)c.e.x, y = (float)c.e.y;
    for (uint k = 0; k < 8; k++) {
        vec<A, 2> from_a = simd_shuffle(a.e, (ushort)d.owner(row, k & ~1u));
        vec<B, 2> from_b = simd_shuffle(b.e, (ushort)d.owner(k, column));
        float left = (float)(k & 1 ? from_a.y : from_a.x);
        x += left * (float)from_b.x;
        y += left * (float)from_b.y;
    }
    d.e.x = (D)x, d.e.y = (D)y;
}

} // namespace metal

// ---- calling a kernel ----
namespace msl {

extern __shared__ __align__(16) unsigned char msl_dynamic[];

enum {
    BUFFER = 1,
    THREADGROUP,
    GRID_POSITION,
    GROUP_POSITION,
    GROUP_INDEX,
    LINEAR_INDEX,
    LANE,
    SIMDGROUP,
    SIMDGROUPS,
    GROUP_SIZE,
    GRID_SIZE,
    GROUPS,
    SIMD_WIDTH,
    QUAD_LANE,
    QUADGROUP
};

template <class P> MSL_INLINE P spread(uint x, uint y, uint z) {
    if constexpr (metal::msl_scalar<P>)
        return (P)x;
    else if constexpr (metal::msl_components_v<P> == 2)
        return P(x, y);
    else
        return P(x, y, z);
}
template <class P> MSL_INLINE P pointer(void *p) {
    if constexpr (std::is_reference_v<P>)
        return *(std::remove_reference_t<P> *)p;
    else
        return (P)p;
}
template <class P, int Kind, int Index> MSL_INLINE P argument(const MslCudaLaunch &launch) {
    if constexpr (Kind == BUFFER)
        return pointer<P>(launch.buffers[Index]);
    else if constexpr (Kind == THREADGROUP)
        return pointer<P>(msl_dynamic + launch.threadgroup_offset[Index]);
    else if constexpr (Kind == GRID_POSITION)
        return spread<P>(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y,
            blockIdx.z * blockDim.z + threadIdx.z);
    else if constexpr (Kind == GROUP_POSITION)
        return spread<P>(threadIdx.x, threadIdx.y, threadIdx.z);
    else if constexpr (Kind == GROUP_INDEX)
        return spread<P>(blockIdx.x, blockIdx.y, blockIdx.z);
    else if constexpr (Kind == LINEAR_INDEX)
        return (P)metal::msl_linear();
    else if constexpr (Kind == LANE)
        return (P)metal::msl_lane();
    else if constexpr (Kind == SIMDGROUP)
        return (P)(metal::msl_linear() / 32);
    else if constexpr (Kind == SIMDGROUPS)
        return (P)((blockDim.x * blockDim.y * blockDim.z + 31) / 32);
    else if constexpr (Kind == GROUP_SIZE)
        return spread<P>(blockDim.x, blockDim.y, blockDim.z);
    else if constexpr (Kind == GRID_SIZE)
        return spread<P>(gridDim.x * blockDim.x, gridDim.y * blockDim.y, gridDim.z * blockDim.z);
    else if constexpr (Kind == GROUPS)
        return spread<P>(gridDim.x, gridDim.y, gridDim.z);
    else if constexpr (Kind == QUAD_LANE)
        return (P)(metal::msl_linear() & 3);
    else if constexpr (Kind == QUADGROUP)
        return (P)(metal::msl_linear() >> 2);
    else
        return (P)32;
}

template <int... KindIndex> struct binding {};
template <class F> struct signature_of;
template <class... P> struct signature_of<void (*)(P...)> { using type = void(P...); };
template <class F> using signature = typename signature_of<F>::type;

template <class F, class B, class S> struct call;
template <class... P, int... KindIndex, size_t... I>
struct call<void(P...), binding<KindIndex...>, std::index_sequence<I...>> {
    template <void (*function)(P...)> static MSL_INLINE void run(const MslCudaLaunch &launch) {
        constexpr int k[] = {KindIndex..., 0};
        function(argument<P, k[2 * I], k[2 * I + 1]>(launch)...);
    }
};

} // namespace msl
