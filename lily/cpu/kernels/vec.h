// SPDX-License-Identifier: Apache-2.0
// Float vectors of the CPU kernels: the native width of the instruction set (VL lanes of float32), written with the
// vector extensions of GCC and clang.
//
// Two rules make every result independent of the vector width, of tails and of the way work is divided up.
// Element-wise functions treat all lanes alike, and tails go through padded vectors, never through scalar code that
// could round otherwise.  Reductions always run over LANES = 16 partial results, whatever VL is, and end in one fixed
// tree.  (Across instruction sets results still differ where there is no fused multiply-add.)
//
// Subnormal results count as zero: the pool sets flush-to-zero.  Not here: matrix products (product.h).
#ifndef LILY_CPU_VEC_H
#define LILY_CPU_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif
#define LANES 16

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef vf vf_any __attribute__((aligned(4), may_alias));
typedef vu vu_any __attribute__((aligned(4), may_alias));
typedef vh vh_any __attribute__((aligned(2), may_alias));
typedef float f4 __attribute__((vector_size(16)));

// Sixteen partial results of a reduction.
typedef struct {
    vf part[LANES / VL];
} lanes;

#define INLINE static inline __attribute__((always_inline, unused))
// Kernels and helpers that some instruction sets or callers do not use.
#define SHARED static __attribute__((unused))

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

INLINE vf vf_load(const float *p) { return *(const vf_any *)p; }
INLINE void vf_store(float *p, vf v) { *(vf_any *)p = v; }
INLINE vf vf_from_bits(vu v) { return (vf)v; }
INLINE vu vf_bits(vf v) { return (vu)v; }

INLINE vf vf_set(float x) {
#if VL == 16
    return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif VL == 8
    return (vf){x, x, x, x, x, x, x, x};
#else
    return (vf){x, x, x, x};
#endif
}

INLINE vi vi_set(int32_t x) {
#if VL == 16
    return (vi){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif VL == 8
    return (vi){x, x, x, x, x, x, x, x};
#else
    return (vi){x, x, x, x};
#endif
}

INLINE vi vi_iota(void) {
#if VL == 16
    return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif VL == 8
    return (vi){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (vi){0, 1, 2, 3};
#endif
}

// a·b + c, fused where the instruction set can.
INLINE vf vf_fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vf vf_select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vi vi_select(vi mask, vi yes, vi no) { return (mask & yes) | (~mask & no); }

// The greater of two; b where either is NaN.
INLINE vf vf_max(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

INLINE vf vf_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE int vi_any(vi mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

// The first n <= VL elements, `fill` in the rest.
INLINE vf vf_load_part(const float *p, uint32_t n, float fill) {
    if (n == VL) return vf_load(p);
    vf v = vf_set(fill);
    memcpy(&v, p, n * sizeof *p);
    return v;
}

INLINE void vf_store_part(float *p, uint32_t n, vf v) {
    if (n == VL)
        vf_store(p, v);
    else
        memcpy(p, &v, n * sizeof *p);
}

INLINE float bf16_float(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

INLINE vf vf_load_bf16(const uint16_t *p) { return (vf)(__builtin_convertvector(*(const vh_any *)p, vu) << 16); }

// Rounds to nearest even; NaN stays NaN.
INLINE void vf_store_bf16(uint16_t *p, vf v) {
    vu u = (vu)v;
    vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vu quiet = (u >> 16) | 0x40;
    vi nan = (u & 0x7fffffff) > 0x7f800000;
    *(vh_any *)p = __builtin_convertvector((vu)vi_select(nan, (vi)quiet, (vi)rounded), vh);
}

INLINE lanes lanes_set(float x) {
    lanes a;
    UNROLL
    for (int i = 0; i < LANES / VL; i++) a.part[i] = vf_set(x);
    return a;
}

INLINE lanes lanes_load(const float *p) {
    lanes a;
    UNROLL
    for (int i = 0; i < LANES / VL; i++) a.part[i] = vf_load(p + i * VL);
    return a;
}

INLINE lanes lanes_fma(lanes a, lanes b, lanes c) {
    UNROLL
    for (int i = 0; i < LANES / VL; i++) c.part[i] = vf_fma(a.part[i], b.part[i], c.part[i]);
    return c;
}

INLINE lanes lanes_add(lanes a, lanes b) {
    UNROLL
    for (int i = 0; i < LANES / VL; i++) a.part[i] += b.part[i];
    return a;
}

// Sum and maximum in the fixed order: lane i with i+8, then i+4, i+2, i+1.
INLINE float lanes_sum(lanes a) {
    f4 q[4];
    memcpy(q, &a, sizeof q);
    f4 s = (q[0] + q[2]) + (q[1] + q[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

INLINE float lanes_max(lanes a) {
    float t[LANES];
    memcpy(t, &a, sizeof t);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) t[i] = t[i] > t[i + n] ? t[i] : t[i + n];
    return t[0];
}

// e^x: 2^n·e^r with |r| <= ln2/2, error below 1 ulp with fused multiply-add.  NaN stays NaN; exp(-inf) = 0.
INLINE vf vf_exp(vf x) {
    const vf magic = vf_set(0x1.8p23f); // adding it rounds to an integer, in the low bits
    const vf top = vf_set(88.7228394f), bottom = vf_set(-87.3365479f);
    vi over = x > top, under = x < bottom;
    vf y = vf_select(over, top, vf_select(under, bottom, x));
    vf shifted = vf_fma(y, vf_set(1.44269504f), magic);
    vf n = shifted - magic;
    vi k = (vi)shifted - (vi)magic;
    vf r = vf_fma(n, vf_set(-0.693359375f), y); // these ten bits of ln2 times n are exact
    r = vf_fma(n, vf_set(2.12194440e-4f), r);
    vf p = vf_fma(vf_set(0.0013814467f), r, vf_set(0.0083687808f));
    p = vf_fma(p, r, vf_set(0.0416683927f));
    p = vf_fma(p, r, vf_set(0.1666651964f));
    p = vf_fma(p, r, vf_set(0.4999999404f));
    p = vf_fma(p, r * r, r) + 1.0f;
    // Two factors, because 2^128 is no float.
    vi half = k >> 1;
    vf result = p * (vf)((half + 127) << 23) * (vf)((k - half + 127) << 23);
    return vf_select(over, vf_set(INFINITY), vf_select(under, vf_set(0.0f), result));
}

// 2·atanh(s) for |s| <= 1/3.
INLINE vf vf_atanh2(vf s) {
    vf z = s * s;
    vf p = vf_fma(vf_set(0.2801877260f), z, vf_set(0.2800053656f));
    p = vf_fma(p, z, vf_set(0.4002159834f));
    p = vf_fma(p, z, vf_set(0.6666641235f));
    return vf_fma(p, z * s, s + s);
}

// ln(1 + f) for -1/2 <= f <= 1, relative error below 2 ulp.
INLINE vf vf_log1p(vf f) { return vf_atanh2(f / (f + 2.0f)); }

// ln x of positive normal numbers.
INLINE vf vf_log(vf x) {
    const vi half = vi_set(0x3f3504f3); // √½
    vi bits = (vi)x;
    vi e = (bits - half) >> 23;
    vf m = (vf)(bits - (e << 23)); // √½ <= m < √2
    vf n = __builtin_convertvector(e, vf);
    vf low = vf_fma(n, vf_set(-2.12194440e-4f), vf_log1p(m - 1.0f));
    return vf_fma(n, vf_set(0.693359375f), low);
}

INLINE vf vf_sigmoid(vf x) { return 1.0f / (1.0f + vf_exp(-x)); }
INLINE vf vf_silu(vf x) { return x / (1.0f + vf_exp(-x)); }

// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|): no cut-off is needed, the second term fades away by itself.
INLINE vf vf_softplus(vf x) {
    vf positive = vf_select(x < 0.0f, vf_set(0.0f), x); // keeps NaN
    return positive + vf_log1p(vf_exp(-vf_abs(x)));
}

// One value, with the same bits as a lane.
INLINE float exp_one(float x) { return vf_exp(vf_set(x))[0]; }
INLINE float sigmoid_one(float x) { return vf_sigmoid(vf_set(x))[0]; }
INLINE float silu_one(float x) { return vf_silu(vf_set(x))[0]; }

// Transposes 4 rows of 4 elements in each 128-bit part of VL/4 blocks: r[i] part b, element j <-> r[j] part b, element i.
INLINE void vu_transpose4(vu r[4]) {
#if VL == 16
#define ZIP(a, b, i, j) \
    __builtin_shufflevector(a, b, i, 16 + i, j, 16 + j, 4 + i, 20 + i, 4 + j, 20 + j, 8 + i, 24 + i, 8 + j, 24 + j, \
        12 + i, 28 + i, 12 + j, 28 + j)
#define PAIR(a, b, i, j) \
    __builtin_shufflevector(a, b, i, j, 16 + i, 16 + j, 4 + i, 4 + j, 20 + i, 20 + j, 8 + i, 8 + j, 24 + i, 24 + j, \
        12 + i, 12 + j, 28 + i, 28 + j)
#elif VL == 8
#define ZIP(a, b, i, j) __builtin_shufflevector(a, b, i, 8 + i, j, 8 + j, 4 + i, 12 + i, 4 + j, 12 + j)
#define PAIR(a, b, i, j) __builtin_shufflevector(a, b, i, j, 8 + i, 8 + j, 4 + i, 4 + j, 12 + i, 12 + j)
#else
#define ZIP(a, b, i, j) __builtin_shufflevector(a, b, i, 4 + i, j, 4 + j)
#define PAIR(a, b, i, j) __builtin_shufflevector(a, b, i, j, 4 + i, 4 + j)
#endif
    vu a = ZIP(r[0], r[1], 0, 1), b = ZIP(r[0], r[1], 2, 3), c = ZIP(r[2], r[3], 0, 1), d = ZIP(r[2], r[3], 2, 3);
    r[0] = PAIR(a, c, 0, 1), r[1] = PAIR(a, c, 2, 3), r[2] = PAIR(b, d, 0, 1), r[3] = PAIR(b, d, 2, 3);
#undef ZIP
#undef PAIR
}

// Four elements from each of VL/4 places, `stride` bytes apart.
INLINE vu vu_gather4(const void *p, size_t stride) {
    const char *c = p;
#if defined(__AVX512F__)
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)c));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(c + stride)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(c + 2 * stride)), 2);
    return (vu)_mm512_inserti32x4(v, _mm_loadu_si128((const __m128i *)(c + 3 * stride)), 3);
#elif defined(__AVX2__)
    __m256i v = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)c));
    return (vu)_mm256_inserti128_si256(v, _mm_loadu_si128((const __m128i *)(c + stride)), 1);
#else
    (void)stride;
    return *(const vu_any *)c;
#endif
}

#endif
