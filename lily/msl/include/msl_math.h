// SPDX-License-Identifier: Apache-2.0
// Metal's mathematical functions, with its overloads: float and half, no bfloat, scalars and vectors.
//
// An argument of another type is converted or ambiguous exactly as in Metal; a name that is not here does not exist
// there (expm1, log1p, erf …) or is not one that Lily's shaders may use.
#pragma once
#include "msl_types.h"

#if defined(__CUDACC__)
#define MSL_BUILTIN(f) ::f
#else
#define MSL_BUILTIN(f) __builtin_##f
#endif

namespace metal {

#define MSL_VECTOR_1(name) \
    template <class T, int N> MSL_INLINE vec<T, N> name(const vec<T, N> &a) { \
        vec<T, N> r; \
        for (int i = 0; i < N; i++) r[i] = name(a[i]); \
        return r; \
    }
#define MSL_VECTOR_2(name) \
    template <class T, int N> MSL_INLINE vec<T, N> name(const vec<T, N> &a, const vec<T, N> &b) { \
        vec<T, N> r; \
        for (int i = 0; i < N; i++) r[i] = name(a[i], b[i]); \
        return r; \
    }
#define MSL_VECTOR_3(name) \
    template <class T, int N> MSL_INLINE vec<T, N> name(const vec<T, N> &a, const vec<T, N> &b, const vec<T, N> &c) { \
        vec<T, N> r; \
        for (int i = 0; i < N; i++) r[i] = name(a[i], b[i], c[i]); \
        return r; \
    }

// ---- of one argument ----
#define MSL_MATH_1(name, expression) \
    MSL_INLINE float name(float x) { return expression; } \
    MSL_INLINE half name(half h) { \
        float x = (float)h; \
        return (half)(expression); \
    } \
    MSL_VECTOR_1(name)
MSL_MATH_1(exp, MSL_BUILTIN(expf)(x))
MSL_MATH_1(exp2, MSL_BUILTIN(exp2f)(x))
MSL_MATH_1(exp10, MSL_BUILTIN(exp2f)(x * 3.321928094887362f))
MSL_MATH_1(log, MSL_BUILTIN(logf)(x))
MSL_MATH_1(log2, MSL_BUILTIN(log2f)(x))
MSL_MATH_1(log10, MSL_BUILTIN(log10f)(x))
MSL_MATH_1(sin, MSL_BUILTIN(sinf)(x))
MSL_MATH_1(cos, MSL_BUILTIN(cosf)(x))
MSL_MATH_1(tan, MSL_BUILTIN(tanf)(x))
MSL_MATH_1(asin, MSL_BUILTIN(asinf)(x))
MSL_MATH_1(acos, MSL_BUILTIN(acosf)(x))
MSL_MATH_1(atan, MSL_BUILTIN(atanf)(x))
MSL_MATH_1(sinh, MSL_BUILTIN(sinhf)(x))
MSL_MATH_1(cosh, MSL_BUILTIN(coshf)(x))
MSL_MATH_1(tanh, MSL_BUILTIN(tanhf)(x))
MSL_MATH_1(asinh, MSL_BUILTIN(asinhf)(x))
MSL_MATH_1(acosh, MSL_BUILTIN(acoshf)(x))
MSL_MATH_1(atanh, MSL_BUILTIN(atanhf)(x))
MSL_MATH_1(sqrt, MSL_BUILTIN(sqrtf)(x))
MSL_MATH_1(rsqrt, 1.0f / MSL_BUILTIN(sqrtf)(x))
MSL_MATH_1(floor, MSL_BUILTIN(floorf)(x))
MSL_MATH_1(ceil, MSL_BUILTIN(ceilf)(x))
MSL_MATH_1(rint, MSL_BUILTIN(rintf)(x))
MSL_MATH_1(round, MSL_BUILTIN(roundf)(x))
MSL_MATH_1(trunc, MSL_BUILTIN(truncf)(x))
MSL_MATH_1(fabs, MSL_BUILTIN(fabsf)(x))
MSL_MATH_1(fract, x - MSL_BUILTIN(floorf)(x))
MSL_MATH_1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
MSL_MATH_1(saturate, x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)
#undef MSL_MATH_1

// ---- of two ----
#define MSL_MATH_2(name, expression) \
    MSL_INLINE float name(float x, float y) { return expression; } \
    MSL_INLINE half name(half a, half b) { \
        float x = (float)a, y = (float)b; \
        return (half)(expression); \
    } \
    MSL_VECTOR_2(name)
MSL_MATH_2(pow, MSL_BUILTIN(powf)(x, y))
MSL_MATH_2(powr, MSL_BUILTIN(powf)(x, y))
MSL_MATH_2(fmod, MSL_BUILTIN(fmodf)(x, y))
MSL_MATH_2(atan2, MSL_BUILTIN(atan2f)(x, y))
MSL_MATH_2(fmin, x != x ? y : y < x ? y : x)
MSL_MATH_2(fmax, x != x ? y : y > x ? y : x)
MSL_MATH_2(step, y < x ? 0.0f : 1.0f)
MSL_MATH_2(copysign, MSL_BUILTIN(copysignf)(x, y))
#undef MSL_MATH_2

// ---- min, max, clamp, abs: every scalar type has its own overload, so that mixed arguments are as in Metal ----
#define MSL_ORDER(T) \
    MSL_INLINE constexpr T min(T a, T b) { return b < a ? b : a; } \
    MSL_INLINE constexpr T max(T a, T b) { return a < b ? b : a; } \
    MSL_INLINE constexpr T clamp(T x, T low, T high) { return min(max(x, low), high); } \
    MSL_INLINE constexpr T min3(T a, T b, T c) { return min(min(a, b), c); } \
    MSL_INLINE constexpr T max3(T a, T b, T c) { return max(max(a, b), c); }
MSL_ORDER(char)
MSL_ORDER(uchar)
MSL_ORDER(short)
MSL_ORDER(ushort)
MSL_ORDER(int)
MSL_ORDER(uint)
MSL_ORDER(long)
MSL_ORDER(ulong)
#undef MSL_ORDER
#define MSL_ORDER(T) \
    MSL_INLINE T min(T a, T b) { return b < a || a != a ? b : a; } \
    MSL_INLINE T max(T a, T b) { return a < b || a != a ? b : a; } \
    MSL_INLINE T clamp(T x, T low, T high) { return min(max(x, low), high); } \
    MSL_INLINE T min3(T a, T b, T c) { return min(min(a, b), c); } \
    MSL_INLINE T max3(T a, T b, T c) { return max(max(a, b), c); }
MSL_ORDER(half)
MSL_ORDER(float)
#undef MSL_ORDER
MSL_VECTOR_2(min)
MSL_VECTOR_2(max)
MSL_VECTOR_3(clamp)
template <class T, int N>
MSL_INLINE vec<T, N> clamp(const vec<T, N> &x, std::type_identity_t<T> l, std::type_identity_t<T> h) {
    return clamp(x, vec<T, N>(l), vec<T, N>(h));
}

#define MSL_ABS(T) \
    MSL_INLINE constexpr T abs(T x) { return x < 0 ? (T)-x : x; }
MSL_ABS(char)
MSL_ABS(short)
MSL_ABS(int)
MSL_ABS(long)
#undef MSL_ABS
#define MSL_ABS(T) \
    MSL_INLINE constexpr T abs(T x) { return x; }
MSL_ABS(uchar)
MSL_ABS(ushort)
MSL_ABS(uint)
MSL_ABS(ulong)
#undef MSL_ABS
MSL_INLINE float abs(float x) { return MSL_BUILTIN(fabsf)(x); }
MSL_INLINE half abs(half x) { return (half)MSL_BUILTIN(fabsf)((float)x); }
MSL_VECTOR_1(abs)

// ---- of three, and mixed ----
MSL_INLINE float fma(float a, float b, float c) { return MSL_BUILTIN(fmaf)(a, b, c); }
MSL_INLINE half fma(half a, half b, half c) { return (half)MSL_BUILTIN(fmaf)((float)a, (float)b, (float)c); }
MSL_VECTOR_3(fma)
MSL_INLINE float mix(float a, float b, float t) { return a + (b - a) * t; }
MSL_INLINE half mix(half a, half b, half t) { return (half)((float)a + ((float)b - (float)a) * (float)t); }
MSL_VECTOR_3(mix)
MSL_INLINE float ldexp(float x, int e) { return MSL_BUILTIN(ldexpf)(x, e); }
MSL_INLINE float divide(float a, float b) { return a / b; }
#define MSL_SELECT(T) \
    MSL_INLINE constexpr T select(T a, T b, bool c) { return c ? b : a; }
MSL_FOR_TYPES(MSL_SELECT)
#undef MSL_SELECT
template <class T, int N> MSL_INLINE vec<T, N> select(const vec<T, N> &a, const vec<T, N> &b, const vec<bool, N> &c) {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
    return r;
}
template <int N> MSL_INLINE bool all(const vec<bool, N> &a) {
    bool r = true;
    for (int i = 0; i < N; i++) r = r && a[i];
    return r;
}
template <int N> MSL_INLINE bool any(const vec<bool, N> &a) {
    bool r = false;
    for (int i = 0; i < N; i++) r = r || a[i];
    return r;
}
template <class T, int N>
requires(is_same_v<T, float> || is_same_v<T, half>) MSL_INLINE T dot(const vec<T, N> &a, const vec<T, N> &b) {
    T s = a[0] * b[0];
    for (int i = 1; i < N; i++) s = s + a[i] * b[i];
    return s;
}
template <class T, int N> MSL_INLINE T length(const vec<T, N> &a) { return sqrt(dot(a, a)); }

// ---- classification, by bits ----
#define MSL_CLASSIFY(name, test) \
    MSL_INLINE bool name(float x) { \
        uint bits = as_type<uint>(x) & 0x7fffffffu; \
        return test; \
    } \
    MSL_INLINE bool name(half x) { return name((float)x); }
MSL_CLASSIFY(isnan, bits > 0x7f800000u)
MSL_CLASSIFY(isinf, bits == 0x7f800000u)
MSL_CLASSIFY(isfinite, bits < 0x7f800000u)
#undef MSL_CLASSIFY
MSL_INLINE bool signbit(float x) { return as_type<uint>(x) >> 31; }

// ---- integers ----
#define MSL_INTEGERS(S, U) \
    MSL_INLINE U extract_bits(U x, uint offset, uint bits) { \
        constexpr uint width = sizeof(U) * 8; \
        return bits == 0 ? (U)0 : (U)((U)(x << (width - offset - bits)) >> (width - bits)); \
    } \
    MSL_INLINE S extract_bits(S x, uint offset, uint bits) { \
        constexpr uint width = sizeof(S) * 8; \
        return bits == 0 ? (S)0 : (S)((S)((U)x << (width - offset - bits)) >> (width - bits)); \
    } \
    MSL_INLINE U insert_bits(U base, U insert, uint offset, uint bits) { \
        U mask = (U)((bits >= sizeof(U) * 8 ? (U)~U(0) : (U)(((U)1 << bits) - 1)) << offset); \
        return (U)((base & ~mask) | ((insert << offset) & mask)); \
    } \
    MSL_INLINE U rotate(U v, U by) { \
        constexpr U width = sizeof(U) * 8; \
        by &= width - 1; \
        return by ? (U)((v << by) | (v >> (width - by))) : v; \
    }
MSL_INTEGERS(int, uint)
MSL_INTEGERS(long, ulong)
MSL_INTEGERS(short, ushort)
#undef MSL_INTEGERS
#if defined(__CUDACC__)
MSL_INLINE uint popcount(uint x) { return __popc(x); }
MSL_INLINE uint clz(uint x) { return __clz(x); }
MSL_INLINE uint ctz(uint x) { return x ? __ffs(x) - 1 : 32; }
MSL_INLINE uint reverse_bits(uint x) { return __brev(x); }
#else
MSL_INLINE uint popcount(uint x) { return __builtin_popcount(x); }
MSL_INLINE ulong popcount(ulong x) { return __builtin_popcountl(x); }
MSL_INLINE uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
MSL_INLINE uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
MSL_INLINE uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
#endif
MSL_INLINE int popcount(int x) { return (int)popcount((uint)x); }
MSL_INLINE int clz(int x) { return (int)clz((uint)x); }
MSL_INLINE int ctz(int x) { return (int)ctz((uint)x); }
MSL_INLINE uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
MSL_INLINE int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }

namespace precise {
using metal::cos;
using metal::divide;
using metal::exp;
using metal::exp10;
using metal::exp2;
using metal::fma;
using metal::log;
using metal::log10;
using metal::log2;
using metal::pow;
using metal::rint;
using metal::round;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tan;
using metal::tanh;
} // namespace precise
namespace fast {
using metal::clamp;
using metal::cos;
using metal::divide;
using metal::exp;
using metal::exp2;
using metal::fma;
using metal::fmax;
using metal::fmin;
using metal::log;
using metal::log2;
using metal::max;
using metal::min;
using metal::pow;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tanh;
} // namespace fast

#undef MSL_VECTOR_1
#undef MSL_VECTOR_2
#undef MSL_VECTOR_3
} // namespace metal
