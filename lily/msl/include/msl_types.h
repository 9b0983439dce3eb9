// SPDX-License-Identifier: Apache-2.0
// Scalars and vectors of the Metal Shading Language for a C++20 compiler (clang on the host, nvcc).
//
// Conversions follow Metal: a vector converts to another element type only explicitly, there are no bfloat operations
// beyond those of the scalar type, and swizzles are member templates that lily/msl/translate.py writes.
// Not handled: vectors of 8 and 16, .r/.g/.b/.a on single components.
#pragma once
#if defined(__CUDACC_RTC__)
#include <cuda/std/cstddef>
#include <cuda/std/cstdint>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
namespace std {
using namespace cuda::std;
}
#else
#include <stddef.h>
#include <stdint.h>

#include <type_traits>
#include <utility>
#endif

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define MSL_INLINE __device__ __forceinline__
#else
#define MSL_INLINE inline __attribute__((always_inline))
#endif
#define METAL_FUNC MSL_INLINE
#define METAL_CONST static constexpr

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
#if defined(__CUDACC__)
typedef __half half;
typedef __nv_bfloat16 bfloat;
#else
typedef _Float16 half;
typedef __bf16 bfloat;
#endif

#ifdef MSL_CHECKED
extern "C" void msl_misaligned(const void *p, int bytes);
extern "C" void msl_component(int index, int count);
#endif

namespace metal {

using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::decay_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_arithmetic;
using std::is_arithmetic_v;
using std::is_base_of_v;
using std::is_constructible_v;
using std::is_convertible_v;
using std::is_integral;
using std::is_integral_v;
using std::is_pointer_v;
using std::is_same;
using std::is_same_v;
using std::is_signed_v;
using std::is_unsigned_v;
using std::make_unsigned_t;
using std::remove_const_t;
using std::remove_cv_t;
using std::remove_pointer_t;
using std::remove_reference_t;
using std::true_type;

template <class T> using remove_addrspace_t = std::remove_cv_t<std::remove_reference_t<T>>;
template <class T>
struct is_floating_point : bool_constant<is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>> {};
template <class T> constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T>
concept msl_scalar = std::is_arithmetic_v<T> || std::is_enum_v<T> || is_same_v<T, half> || is_same_v<T, bfloat>;

template <class T, int N> struct vec;
template <class T, int N, int... I> struct msl_swizzle_ref;

template <class T> struct msl_components { static constexpr int n = msl_scalar<T> ? 1 : 0; };
template <class T, int N> struct msl_components<vec<T, N>> { static constexpr int n = N; };
template <class T> constexpr int msl_components_v = msl_components<remove_addrspace_t<T>>::n;

// The members that vectors of every size share.  In a checked build copies test their alignment; a volatile vector
// is one behind a coherent pointer.
#ifdef MSL_CHECKED
#define MSL_VEC_COPIES \
    vec(const vec &o) { \
        check(&o); \
        for (int i = 0; i < count; i++) data()[i] = o.data()[i]; \
    } \
    vec &operator=(const vec &o) { \
        check(this); \
        check(&o); \
        for (int i = 0; i < count; i++) data()[i] = o.data()[i]; \
        return *this; \
    } \
    static void check(const volatile void *p) { \
        uintptr_t address = (uintptr_t)p; \
        __asm__("" : "+r"(address)); /* or the compiler, trusting the type, removes the test */ \
        if (address % alignof(vec)) msl_misaligned((const void *)p, sizeof(vec)); \
    }
#define MSL_VEC_INDEX(i) \
    if (!__builtin_is_constant_evaluated() && (unsigned)(i) >= (unsigned)count) msl_component((int)(i), count);
#else
#define MSL_VEC_COPIES
#define MSL_VEC_INDEX(i)
#endif

#define MSL_VEC_MEMBERS(N) \
    static constexpr int count = N; \
    vec() = default; \
    MSL_VEC_COPIES \
    template <msl_scalar S> MSL_INLINE constexpr vec(S s) { \
        for (int i = 0; i < N; i++) (*this)[i] = (T)s; \
    } \
    template <class U> \
    requires(!std::is_same_v<U, T>) MSL_INLINE constexpr explicit vec(const vec<U, N> &o) { \
        for (int i = 0; i < N; i++) (*this)[i] = (T)o[i]; \
    } \
    template <class... A> \
    requires((sizeof...(A) > 1) && ((msl_components_v<A> + ...) == N) && ((msl_components_v<A> > 0) && ...)) \
        MSL_INLINE constexpr vec(const A &...a) { \
        int k = 0; \
        (put(k, a), ...); \
    } \
    template <class V> \
    requires(std::is_volatile_v<V> && std::is_same_v<std::remove_cv_t<V>, vec>) MSL_INLINE vec(V &o) { \
        for (int i = 0; i < N; i++) data()[i] = ((const volatile T *)&o)[i]; \
    } \
    MSL_INLINE void operator=(const vec &o) volatile { \
        for (int i = 0; i < N; i++) ((volatile T *)this)[i] = o.data()[i]; \
    } \
    template <int... I> MSL_INLINE constexpr vec<T, sizeof...(I)> swizzle() const { \
        return vec<T, sizeof...(I)>((*this)[I]...); \
    } \
    template <int... I> MSL_INLINE msl_swizzle_ref<T, N, I...> swizzle_ref() { return {*this}; } \
    MSL_INLINE T *data() { return (T *)this; } \
    MSL_INLINE const T *data() const { return (const T *)this; } \
\
  private: \
    template <msl_scalar S> MSL_INLINE constexpr void put(int &k, S s) { (*this)[k++] = (T)s; } \
    template <class U, int M> MSL_INLINE constexpr void put(int &k, const vec<U, M> &o) { \
        for (int i = 0; i < M; i++) (*this)[k++] = (T)o[i]; \
    } \
\
  public:

// A constant index must find its member without arithmetic on addresses, which constant evaluation rejects.
#define MSL_VEC_SUBSCRIPT(by_name) \
    MSL_INLINE constexpr T &operator[](int i) { \
        MSL_VEC_INDEX(i) \
        if (MSL_BY_NAME) return by_name; \
        return data()[i]; \
    } \
    MSL_INLINE constexpr const T &operator[](int i) const { \
        MSL_VEC_INDEX(i) \
        if (MSL_BY_NAME) return by_name; \
        return data()[i]; \
    }
#if defined(__CUDACC__) // keeps vectors in registers
#define MSL_BY_NAME true
#else
#define MSL_BY_NAME __builtin_is_constant_evaluated()
#endif

template <class T> struct alignas(sizeof(T) * 2) vec<T, 2> {
    T x, y;
    MSL_VEC_MEMBERS(2)
    MSL_VEC_SUBSCRIPT((i == 0 ? x : y))
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 3> {
    T x, y, z;
    MSL_VEC_MEMBERS(3)
    MSL_VEC_SUBSCRIPT((i == 0 ? x : i == 1 ? y : z))
};
template <class T> struct alignas(sizeof(T) * 4) vec<T, 4> {
    T x, y, z, w;
    MSL_VEC_MEMBERS(4)
    MSL_VEC_SUBSCRIPT((i == 0 ? x : i == 1 ? y : i == 2 ? z : w))
};

// v.zx = …: a swizzle on the left of an assignment.
template <class T, int N, int... I> struct msl_swizzle_ref {
    vec<T, N> &v;
    static constexpr int count = sizeof...(I);
    MSL_INLINE operator vec<T, count>() const { return v.template swizzle<I...>(); }
    MSL_INLINE const msl_swizzle_ref &operator=(const vec<T, count> &o) const {
        int k = 0;
        ((v[I] = o[k++]), ...);
        return *this;
    }
#define MSL_SWIZZLE_ASSIGN(op) \
    MSL_INLINE const msl_swizzle_ref &operator op##=(const vec<T, count> &o) const { \
        int k = 0; \
        ((v[I] = (T)(v[I] op o[k++])), ...); \
        return *this; \
    }
    MSL_SWIZZLE_ASSIGN(+) MSL_SWIZZLE_ASSIGN(-) MSL_SWIZZLE_ASSIGN(*) MSL_SWIZZLE_ASSIGN(/)
#undef MSL_SWIZZLE_ASSIGN
};

#define MSL_VEC_BINARY(op, R) \
    template <class T, int N> MSL_INLINE constexpr vec<R, N> operator op(const vec<T, N> &a, const vec<T, N> &b) { \
        vec<R, N> r; \
        for (int i = 0; i < N; i++) r[i] = (R)(a[i] op b[i]); \
        return r; \
    } \
    template <class T, int N, msl_scalar S> MSL_INLINE constexpr vec<R, N> operator op(const vec<T, N> &a, S s) { \
        T b = (T)s; \
        vec<R, N> r; \
        for (int i = 0; i < N; i++) r[i] = (R)(a[i] op b); \
        return r; \
    } \
    template <class T, int N, msl_scalar S> MSL_INLINE constexpr vec<R, N> operator op(S s, const vec<T, N> &b) { \
        T a = (T)s; \
        vec<R, N> r; \
        for (int i = 0; i < N; i++) r[i] = (R)(a op b[i]); \
        return r; \
    }
#define MSL_VEC_ARITHMETIC(op) \
    MSL_VEC_BINARY(op, T) \
    template <class T, int N> MSL_INLINE constexpr vec<T, N> &operator op##=(vec<T, N> &a, const vec<T, N> &b) { \
        for (int i = 0; i < N; i++) a[i] = (T)(a[i] op b[i]); \
        return a; \
    } \
    template <class T, int N, msl_scalar S> MSL_INLINE constexpr vec<T, N> &operator op##=(vec<T, N> &a, S s) { \
        T b = (T)s; \
        for (int i = 0; i < N; i++) a[i] = (T)(a[i] op b); \
        return a; \
    }
MSL_VEC_ARITHMETIC(+)
MSL_VEC_ARITHMETIC(-)
MSL_VEC_ARITHMETIC(*)
MSL_VEC_ARITHMETIC(/)
MSL_VEC_ARITHMETIC(%)
MSL_VEC_ARITHMETIC(&)
MSL_VEC_ARITHMETIC(|)
MSL_VEC_ARITHMETIC(^)
MSL_VEC_ARITHMETIC(<<)
MSL_VEC_ARITHMETIC(>>)
MSL_VEC_BINARY(<, bool)
MSL_VEC_BINARY(>, bool)
MSL_VEC_BINARY(<=, bool)
MSL_VEC_BINARY(>=, bool)
MSL_VEC_BINARY(==, bool)
MSL_VEC_BINARY(!=, bool)
MSL_VEC_BINARY(&&, bool)
MSL_VEC_BINARY(||, bool)
#undef MSL_VEC_ARITHMETIC
#undef MSL_VEC_BINARY

#define MSL_VEC_UNARY(op, R) \
    template <class T, int N> MSL_INLINE constexpr vec<R, N> operator op(const vec<T, N> &a) { \
        vec<R, N> r; \
        for (int i = 0; i < N; i++) r[i] = (R)(op a[i]); \
        return r; \
    }
MSL_VEC_UNARY(-, T)
MSL_VEC_UNARY(~, T)
MSL_VEC_UNARY(!, bool)
#undef MSL_VEC_UNARY

// Vectors aligned as their elements are.
template <class T, int N> struct packed_vec {
    T e[N];
    packed_vec() = default;
    MSL_INLINE packed_vec(const vec<T, N> &v) {
        for (int i = 0; i < N; i++) e[i] = v[i];
    }
    MSL_INLINE operator vec<T, N>() const {
        vec<T, N> r;
        for (int i = 0; i < N; i++) r[i] = e[i];
        return r;
    }
    MSL_INLINE T &operator[](int i) { return e[i]; }
    MSL_INLINE const T &operator[](int i) const { return e[i]; }
};

#define MSL_FOR_TYPES(X) \
    X(float) X(half) X(bfloat) X(int) X(uint) X(short) X(ushort) X(char) X(uchar) X(long) X(ulong) X(bool)
#define MSL_VECTOR_NAMES(n) \
    typedef vec<n, 2> n##2; \
    typedef vec<n, 3> n##3; \
    typedef vec<n, 4> n##4; \
    typedef packed_vec<n, 2> packed_##n##2; \
    typedef packed_vec<n, 3> packed_##n##3; \
    typedef packed_vec<n, 4> packed_##n##4;
MSL_FOR_TYPES(MSL_VECTOR_NAMES)
#undef MSL_VECTOR_NAMES

template <class T> struct msl_limits {
    static constexpr bool is_signed = T(-1) < T(0);
    static constexpr int digits = sizeof(T) * 8 - is_signed;
    static MSL_INLINE constexpr T max() { return is_signed ? T((1ull << (sizeof(T) * 8 - 1)) - 1) : T(-1); }
    static MSL_INLINE constexpr T min() { return is_signed ? T(1ull << (sizeof(T) * 8 - 1)) : T(0); }
    static MSL_INLINE constexpr T lowest() { return min(); }
};
#define MSL_FLOAT_LIMITS(T, least, greatest, eps) \
    template <> struct msl_limits<T> { \
        static constexpr bool has_infinity = true; \
        static MSL_INLINE constexpr T min() { return (T)least; } \
        static MSL_INLINE constexpr T max() { return (T)greatest; } \
        static MSL_INLINE constexpr T lowest() { return (T)-greatest; } \
        static MSL_INLINE constexpr T epsilon() { return (T)eps; } \
        static MSL_INLINE constexpr T infinity() { return (T)__builtin_huge_valf(); } \
        static MSL_INLINE constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
    };
MSL_FLOAT_LIMITS(float, 1.17549435e-38f, 3.402823466e38f, 1.1920929e-7f)
#if !defined(__CUDACC__)
MSL_FLOAT_LIMITS(half, 6.103515625e-5f, 65504.f, 9.765625e-4f)
MSL_FLOAT_LIMITS(bfloat, 1.17549435e-38f, 3.38953139e38f, 7.8125e-3f)
#endif
template <class T> using numeric_limits = msl_limits<T>;

template <class T, size_t N> struct array {
    T e[N];
    MSL_INLINE constexpr T &operator[](size_t i) { return e[i]; }
    MSL_INLINE constexpr const T &operator[](size_t i) const { return e[i]; }
    static MSL_INLINE constexpr size_t size() { return N; }
};

} // namespace metal

template <class D, class S> MSL_INLINE D as_type(const S &s) {
    static_assert(sizeof(D) == sizeof(S), "as_type: the sizes differ");
    D d;
    __builtin_memcpy((void *)&d, (const void *)&s, sizeof(D));
    return d;
}

#if !defined(__CUDACC__) // CUDA has its own ::float4 …
#define MSL_VECTOR_NAMES(n) \
    using metal::n##2; \
    using metal::n##3; \
    using metal::n##4; \
    using metal::packed_##n##2; \
    using metal::packed_##n##3; \
    using metal::packed_##n##4;
MSL_FOR_TYPES(MSL_VECTOR_NAMES)
#undef MSL_VECTOR_NAMES
#endif

#ifndef INFINITY
#define INFINITY __builtin_huge_valf()
#endif
#ifndef NAN
#define NAN __builtin_nanf("")
#endif
#define M_PI_F 3.14159265358979323846f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.707106781186547524401f
#define M_2_SQRTPI_F 1.12837916709551257390f
#ifndef FLT_MAX
#define FLT_MAX 3.402823466e38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920929e-7f
#endif
#define HALF_MAX ((half)65504.f)
#define MAXFLOAT FLT_MAX
#define MAXHALF HALF_MAX
#ifndef UINT_MAX
#define UINT_MAX 4294967295u
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#endif
