// SPDX-License-Identifier: Apache-2.0
// Declarations only, with real address spaces and the compiler's own vectors: shaders are type-checked as Apple's
// compiler does, and nothing is generated (tests/msl_spaces.py).
//
// Looser than Metal where the compiler cannot follow: comparisons of vectors give integer vectors.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <utility>

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define coherent(scope)
#define MSL_THREADGROUP(type, name, align) threadgroup type &name = *(threadgroup type *)nullptr
#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY __builtin_huge_valf()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-7f
#define M_PI_F 3.14159265f
#define M_E_F 2.71828182f
#define M_LN2_F 0.69314718f
#define M_LOG2E_F 1.44269504f
#define UINT_MAX 4294967295u
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)

typedef _Float16 half;
typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace metal {

using std::conditional_t;
using std::enable_if_t;
using std::integral_constant;
using std::is_same_v;
using std::remove_cv_t;

template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
#define MSL_VECTORS(n) \
    typedef vec<n, 2> n##2; \
    typedef vec<n, 3> n##3; \
    typedef vec<n, 4> n##4; \
    struct packed_##n##2 { \
        n e[2]; \
        packed_##n##2(n##2); \
        operator n##2() const; \
    }; \
    struct packed_##n##4 { \
        n e[4]; \
        packed_##n##4(n##4); \
        operator n##4() const; \
    };
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
typedef bool bool2 __attribute__((ext_vector_type(2)));
typedef bool bool4 __attribute__((ext_vector_type(4)));

template <class A> constexpr int msl_count() {
    if constexpr (requires { __builtin_vectorelements(A); })
        return (int)__builtin_vectorelements(A);
    else
        return 1;
}
// V(a, b, …): a conversion of one argument, else as many components as V has.
template <class V, class... A> V msl_make(A...) {
    constexpr int given = (msl_count<A>() + ...), wanted = msl_count<V>();
    static_assert(given == wanted || given == 1, "a vector is made of as many components as it has");
    return V{};
}

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
mem_flags operator|(mem_flags, mem_flags);
enum memory_order { memory_order_relaxed, memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
void atomic_thread_fence(mem_flags, memory_order, thread_scope);

// Overloads one by one: what is not a float, a half or a vector of them is converted or ambiguous, as in Metal.
#define MSL_FLOATS(X) X(float) X(float2) X(float3) X(float4) X(half) X(half2) X(half3) X(half4)
#define MSL_INTEGERS(X) \
    X(int) \
    X(int2) X(int3) X(int4) X(uint) X(uint2) X(uint3) X(uint4) X(short) X(ushort) X(char) X(uchar) X(long) X(ulong)
#define MSL_MATH(T) \
    T exp(T); \
    T exp2(T); \
    T exp10(T); \
    T log(T); \
    T log2(T); \
    T log10(T); \
    T sin(T); \
    T cos(T); \
    T tan(T); \
    T tanh(T); \
    T sqrt(T); \
    T rsqrt(T); \
    T floor(T); \
    T ceil(T); \
    T round(T); \
    T rint(T); \
    T trunc(T); \
    T fract(T); \
    T fabs(T); \
    T sign(T); \
    T saturate(T); \
    T pow(T, T); \
    T fmin(T, T); \
    T fmax(T, T); \
    T fmod(T, T); \
    T copysign(T, T); \
    T divide(T, T); \
    T fma(T, T, T); \
    T mix(T, T, T);
#define MSL_ORDERED(T) \
    T abs(T); \
    T min(T, T); \
    T max(T, T); \
    T clamp(T, T, T);
#define MSL_BITS(T) \
    T popcount(T); \
    T clz(T); \
    T ctz(T); \
    T reverse_bits(T); \
    T mulhi(T, T); \
    T rotate(T, T); \
    T extract_bits(T, uint, uint); \
    T insert_bits(T, T, uint, uint);
MSL_FLOATS(MSL_MATH)
MSL_FLOATS(MSL_ORDERED)
// A bfloat is made a float first: Metal's functions have no overloads for it.
#define MSL_NOT_BFLOAT_1(name) \
    void name(bfloat) = delete; \
    void name(bfloat2) = delete; \
    void name(bfloat4) = delete;
#define MSL_NOT_BFLOAT_2(name) \
    void name(bfloat, auto) = delete; \
    void name(auto, bfloat) = delete; \
    void name(bfloat, bfloat) = delete;
#define MSL_NOT_BFLOAT_3(name) \
    void name(bfloat, auto, auto) = delete; \
    void name(auto, bfloat, auto) = delete; \
    void name(auto, auto, bfloat) = delete; \
    void name(bfloat, bfloat, bfloat) = delete;
MSL_NOT_BFLOAT_1(exp)
MSL_NOT_BFLOAT_1(exp2)
MSL_NOT_BFLOAT_1(log)
MSL_NOT_BFLOAT_1(log2)
MSL_NOT_BFLOAT_1(sin)
MSL_NOT_BFLOAT_1(cos)
MSL_NOT_BFLOAT_1(tanh)
MSL_NOT_BFLOAT_1(sqrt)
MSL_NOT_BFLOAT_1(rsqrt)
MSL_NOT_BFLOAT_1(floor)
MSL_NOT_BFLOAT_1(ceil)
MSL_NOT_BFLOAT_1(round)
MSL_NOT_BFLOAT_1(rint)
MSL_NOT_BFLOAT_1(fabs)
MSL_NOT_BFLOAT_1(abs)
MSL_NOT_BFLOAT_1(sign)
MSL_NOT_BFLOAT_1(saturate)
MSL_NOT_BFLOAT_1(isnan)
MSL_NOT_BFLOAT_1(isinf)
MSL_NOT_BFLOAT_1(isfinite)
MSL_NOT_BFLOAT_2(pow)
MSL_NOT_BFLOAT_2(min)
MSL_NOT_BFLOAT_2(max)
MSL_NOT_BFLOAT_2(fmin)
MSL_NOT_BFLOAT_2(fmax)
MSL_NOT_BFLOAT_2(divide)
MSL_NOT_BFLOAT_3(fma)
MSL_NOT_BFLOAT_3(mix)
MSL_NOT_BFLOAT_3(clamp)
MSL_INTEGERS(MSL_ORDERED)
MSL_INTEGERS(MSL_BITS)
template <class T, class C> T select(T, T, C);
bool isnan(float);
bool isinf(float);
bool isfinite(float);
template <class V> bool all(V);
template <class V> bool any(V);
float ldexp(float, int);
#define MSL_DOT(T) \
    T dot(vec<T, 2>, vec<T, 2>); \
    T dot(vec<T, 3>, vec<T, 3>); \
    T dot(vec<T, 4>, vec<T, 4>);
MSL_DOT(float)
MSL_DOT(half)
namespace precise {
MSL_FLOATS(MSL_MATH)
MSL_NOT_BFLOAT_1(exp)
MSL_NOT_BFLOAT_1(exp2)
MSL_NOT_BFLOAT_1(log)
MSL_NOT_BFLOAT_1(log2)
MSL_NOT_BFLOAT_1(sin)
MSL_NOT_BFLOAT_1(cos)
MSL_NOT_BFLOAT_1(tanh)
MSL_NOT_BFLOAT_1(sqrt)
MSL_NOT_BFLOAT_1(rsqrt)
MSL_NOT_BFLOAT_2(pow)
MSL_NOT_BFLOAT_2(divide)
MSL_NOT_BFLOAT_3(fma)
} // namespace precise
namespace fast {
MSL_FLOATS(MSL_MATH)
MSL_NOT_BFLOAT_1(exp)
MSL_NOT_BFLOAT_1(exp2)
MSL_NOT_BFLOAT_1(log)
MSL_NOT_BFLOAT_1(log2)
MSL_NOT_BFLOAT_1(sin)
MSL_NOT_BFLOAT_1(cos)
MSL_NOT_BFLOAT_1(tanh)
MSL_NOT_BFLOAT_1(sqrt)
MSL_NOT_BFLOAT_1(rsqrt)
MSL_NOT_BFLOAT_2(pow)
MSL_NOT_BFLOAT_2(divide)
MSL_NOT_BFLOAT_3(fma)
} // namespace fast

#define MSL_SIMD(T) \
    T simd_sum(T); \
    T simd_product(T); \
    T simd_max(T); \
    T simd_min(T); \
    T simd_shuffle(T, ushort); \
    T simd_shuffle_xor(T, ushort); \
    T simd_shuffle_up(T, ushort); \
    T simd_shuffle_down(T, ushort); \
    T simd_broadcast(T, ushort); \
    T simd_broadcast_first(T); \
    T simd_prefix_inclusive_sum(T); \
    T simd_prefix_exclusive_sum(T); \
    T simd_and(T); \
    T simd_or(T); \
    T simd_xor(T);
#define MSL_SIMD_TYPES(X) MSL_FLOATS(X) X(int) X(int2) X(int4) X(uint) X(uint2) X(uint4) X(short) X(ushort)
MSL_SIMD_TYPES(MSL_SIMD)
struct simd_vote {
    typedef ulong vote_t;
    explicit simd_vote(vote_t);
    explicit operator vote_t() const;
    bool all() const;
    bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

template <class T> struct atomic { T value; };
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;
#define MSL_ATOMIC(space, T) \
    T atomic_load_explicit(const volatile space atomic<T> *, memory_order); \
    void atomic_store_explicit(volatile space atomic<T> *, T, memory_order); \
    T atomic_exchange_explicit(volatile space atomic<T> *, T, memory_order); \
    bool atomic_compare_exchange_weak_explicit(volatile space atomic<T> *, T *, T, memory_order, memory_order); \
    T atomic_fetch_add_explicit(volatile space atomic<T> *, T, memory_order);
#define MSL_ATOMIC_BITS(space, T) \
    T atomic_fetch_sub_explicit(volatile space atomic<T> *, T, memory_order); \
    T atomic_fetch_max_explicit(volatile space atomic<T> *, T, memory_order); \
    T atomic_fetch_min_explicit(volatile space atomic<T> *, T, memory_order); \
    T atomic_fetch_and_explicit(volatile space atomic<T> *, T, memory_order); \
    T atomic_fetch_or_explicit(volatile space atomic<T> *, T, memory_order); \
    T atomic_fetch_xor_explicit(volatile space atomic<T> *, T, memory_order);
MSL_ATOMIC(device, uint)
MSL_ATOMIC(device, int)
MSL_ATOMIC(device, float)
MSL_ATOMIC(threadgroup, uint)
MSL_ATOMIC(threadgroup, int)
MSL_ATOMIC_BITS(device, uint)
MSL_ATOMIC_BITS(device, int)
MSL_ATOMIC_BITS(threadgroup, uint)
MSL_ATOMIC_BITS(threadgroup, int)

template <class T, int C, int R> struct simdgroup_matrix { vec<T, 2> &thread_elements(); };
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int C, int R> simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define MSL_MATRIX(space) \
    template <class T> \
    void simdgroup_load(simdgroup_matrix<T, 8, 8> &, const space T *, ulong = 8, ulong2 = {}, bool = false); \
    template <class T> void simdgroup_store(simdgroup_matrix<T, 8, 8>, space T *, ulong = 8, ulong2 = {}, bool = false);
MSL_MATRIX(device)
MSL_MATRIX(threadgroup)
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(
    simdgroup_matrix<D, 8, 8> &, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>, simdgroup_matrix<C, 8, 8>);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &, simdgroup_matrix<A, 8, 8>, simdgroup_matrix<B, 8, 8>);

// ---- Metal 4 ----
template <class T, size_t N> struct array {
    T e[N];
    T &operator[](size_t);
    const T &operator[](size_t) const;
};
constexpr size_t dynamic_extent = (size_t)-1;
template <class I, size_t... E> struct extents {
    static constexpr size_t rank_value = sizeof...(E);
    constexpr extents() {}
    template <class... A> constexpr extents(A...) {}
    static constexpr size_t rank() { return rank_value; }
};
template <class I, class S> struct msl_dextents;
template <class I, size_t... K> struct msl_dextents<I, std::index_sequence<K...>> {
    using type = extents<I, (K * 0 + dynamic_extent)...>;
};
template <class I, size_t R> using dextents = typename msl_dextents<I, std::make_index_sequence<R>>::type;
struct tensor_handle {};
struct tensor_inline {};
struct tensor_offset {};
template <class T, class X, class D = tensor_handle, class... Tags> struct tensor {
    typedef T element_type;
    typedef std::remove_cv_t<T> value_type;
    tensor(T *, X);
    template <class S> tensor(T *, X, array<S, X::rank_value>);
    template <size_t... N, class... O> tensor<T, dextents<int, X::rank_value>, tensor_offset> slice(O...) const;
};
struct execution_thread {};
struct execution_simdgroup {};
template <int N> struct execution_simdgroups {};
template <class T> struct cooperative_tensor {
    T &operator[](int);
    const T &operator[](int) const;
    ushort get_capacity() const;
    bool is_valid_element(int) const;
    array<int, 2> get_multidimensional_index(int) const;
    template <class Tensor> void store(const Tensor &) const;
    template <class Tensor> void load(const Tensor &);
};
} // namespace metal

namespace mpp {
namespace tensor_ops {
struct matmul2d_descriptor {
    enum class mode { multiply, multiply_accumulate };
    int m, n, k;
    bool left, right, relaxed;
    mode how;
    constexpr matmul2d_descriptor(int m, int n, int k = -1, bool left = false, bool right = false, bool relaxed = false,
        mode how = mode::multiply)
        : m(m), n(n), k(k), left(left), right(right), relaxed(relaxed), how(how) {}
};
template <matmul2d_descriptor D, class Scope> struct matmul2d {
    template <class L, class R, class C> metal::cooperative_tensor<L> get_left_input_cooperative_tensor() const;
    template <class L, class R, class C> metal::cooperative_tensor<R> get_right_input_cooperative_tensor() const;
    template <class L, class R, class C, class Coordinate, class... More>
    using cooperative_tensor_destination_t = metal::cooperative_tensor<C>;
    template <class L, class R, class C> metal::cooperative_tensor<C> get_destination_cooperative_tensor() const;
    template <class A, class B, class C> void run(const A &, const B &, C &) const;
};
} // namespace tensor_ops
} // namespace mpp

template <class D, class S> D as_type(S) {
    static_assert(sizeof(D) == sizeof(S), "as_type: the sizes differ");
    return D{};
}
#define MSL_USING(n) \
    using metal::n##2; \
    using metal::n##3; \
    using metal::n##4; \
    using metal::packed_##n##2; \
    using metal::packed_##n##4;
MSL_USING(float)
MSL_USING(half)
MSL_USING(bfloat)
MSL_USING(int)
MSL_USING(uint)
MSL_USING(short)
MSL_USING(ushort)
MSL_USING(char)
MSL_USING(uchar)
MSL_USING(long)
MSL_USING(ulong)
using metal::bool2;
using metal::bool4;
