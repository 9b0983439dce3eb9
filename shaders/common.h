// SPDX-License-Identifier: Apache-2.0
// What the shaders share: types, loads, the quantised matrix, reductions inside a simdgroup, activations.
//
// The kernel table's header (parameter structures) and the function constants C_NAME come before this file; see
// lily/msl/flatten.py.  Rules that hold everywhere: bf16 only where a value crosses a kernel boundary, float inside;
// a simdgroup has 32 lanes; arrays in registers have constant sizes and indices; indices are 32 bits wide.
// Not here: tiles for matrix units (prefill).
#ifndef LILY_COMMON_H
#define LILY_COMMON_H

#include <metal_stdlib>

using namespace metal;

#ifdef LILY_ACT_F32
typedef float act;
typedef float4 act4;
#else
typedef bfloat act;
typedef bfloat4 act4;
#endif

constant constexpr uint LANES = 32;

// ---- loads of bf16 and float as float -------------------------------------------------------------------------------

// Two bf16 of a word, the lower half first.
inline float2 bf16_pair(uint word) { return float2(as_type<float>(word << 16), as_type<float>(word & 0xffff0000u)); }

// Eight consecutive values; the address is a multiple of 16 bytes.
inline void load8(device const bfloat *p, thread float (&x)[8]) {
    const uint4 raw = *(device const uint4 *)p;
    const float2 a = bf16_pair(raw.x), b = bf16_pair(raw.y), c = bf16_pair(raw.z), d = bf16_pair(raw.w);
    x[0] = a.x, x[1] = a.y, x[2] = b.x, x[3] = b.y, x[4] = c.x, x[5] = c.y, x[6] = d.x, x[7] = d.y;
}

inline void load8(device const float *p, thread float (&x)[8]) {
    const float4 a = *(device const float4 *)p, b = *(device const float4 *)(p + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// Four consecutive values; the address is a multiple of four elements.
inline float4 load4(device const bfloat *p) {
    const uint2 raw = *(device const uint2 *)p;
    return float4(bf16_pair(raw.x), bf16_pair(raw.y));
}

inline float4 load4(device const float *p) { return *(device const float4 *)p; }

inline float2 load2(device const bfloat *p) { return bf16_pair(*(device const uint *)p); }

// ---- scalar functions -----------------------------------------------------------------------------------------------

inline float sigmoid(float x) { return 1.0f / (1.0f + precise::exp(-x)); }

inline float silu(float x) { return x / (1.0f + precise::exp(-x)); }

// log(1 + e) for 0 <= e <= 1: 2·artanh(e/(2+e)), whose series has converged after seven terms.
inline float log_one_plus(float e) {
    const float s = e / (2.0f + e), z = s * s;
    float sum = 1.0f / 13;
    sum = fma(sum, z, 1.0f / 11);
    sum = fma(sum, z, 1.0f / 9);
    sum = fma(sum, z, 1.0f / 7);
    sum = fma(sum, z, 1.0f / 5);
    sum = fma(sum, z, 1.0f / 3);
    return 2.0f * s * fma(sum, z, 1.0f);
}

inline float softplus(float x) { return max(x, 0.0f) + log_one_plus(precise::exp(-fabs(x))); }

inline bool is_nan_bits(float x) { return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u; }

// An integer that orders as the float does; NaN lies below all numbers, 0 below every result, and -0 equals 0.
inline uint order_key(float x) {
    const uint bits = as_type<uint>(x);
    if (is_nan_bits(x)) return 1;
    if (bits == 0x80000000u) return 0x80000000u;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// ---- quantised matrices ---------------------------------------------------------------------------------------------
//
// Layout `rows` of lily/weights.py: words [n, k·bits/32], scales bf16 [n, k/group], biases bf16 [n, k/group], each
// section at a multiple of 256 bytes.  A lane takes QCOLUMNS consecutive columns at a time: one load of 2·bits bytes,
// always inside one group, which has one scale and one bias.

constant constexpr uint QCOLUMNS = 16;

inline uint align256(uint n) { return (n + 255) & ~255u; }

// Bytes of one matrix; experts follow each other at this distance.
inline uint matrix_bytes(uint n, uint k, uint bits, uint group) {
    return align256(n * (k / 8 * bits)) + 2 * align256(n * (k / group) * 2);
}

struct Matrix {
    device const uchar *words;
    device const bfloat *scales;
    device const bfloat *biases;
    uint row_bytes;  // of words
    uint row_groups; // of scales and of biases
    uint group;
};

inline Matrix matrix_at(device const uchar *w, uint n, uint k, uint bits, uint group) {
    Matrix m;
    m.row_bytes = k / 8 * bits;
    m.row_groups = k / group;
    m.group = group;
    m.words = w;
    m.scales = (device const bfloat *)(w + align256(n * m.row_bytes));
    m.biases = (device const bfloat *)(w + align256(n * m.row_bytes) + align256(n * m.row_groups * 2));
    return m;
}

// The words of QCOLUMNS columns: two at 4 bits, four at 8.
inline void load_words(device const uchar *p, thread uint (&w)[2]) {
    const uint2 raw = *(device const uint2 *)p;
    w[0] = raw.x, w[1] = raw.y;
}

inline void load_words(device const uchar *p, thread uint (&w)[4]) {
    const uint4 raw = *(device const uint4 *)p;
    w[0] = raw.x, w[1] = raw.y, w[2] = raw.z, w[3] = raw.w;
}

// Weight i of the words, as it stands in its word: 2^(BITS·(i mod 32/BITS)) times too large.
template <int BITS> inline float weight_in_place(thread const uint (&w)[BITS / 2], uint i) {
    return float(w[i / (32 / BITS)] & (((1u << BITS) - 1) << (BITS * (i % (32 / BITS)))));
}

// Its inverse factor.
template <int BITS> inline float place_factor(uint i) { return 1.0f / float(1u << (BITS * (i % (32 / BITS)))); }

// Scale and bias applied: QCOLUMNS weights.
template <int BITS>
inline void dequantize(thread const uint (&w)[BITS / 2], float scale, float bias, thread float (&out)[QCOLUMNS]) {
#pragma unroll
    for (uint i = 0; i < QCOLUMNS; i++) out[i] = fma(weight_in_place<BITS>(w, i), scale * place_factor<BITS>(i), bias);
}

// Makes x ready for dot_words, so that masks need no shifts, and returns Σx.
template <int BITS> inline float prescale(thread float (&x)[QCOLUMNS]) {
    float sum = 0;
#pragma unroll
    for (uint i = 0; i < QCOLUMNS; i++) {
        sum += x[i];
        x[i] *= place_factor<BITS>(i);
    }
    return sum;
}

// Σ q·x over QCOLUMNS columns.
template <int BITS> inline float dot_words(thread const uint (&w)[BITS / 2], thread const float (&x)[QCOLUMNS]) {
    float sum = 0;
#pragma unroll
    for (uint i = 0; i < QCOLUMNS; i++) sum = fma(weight_in_place<BITS>(w, i), x[i], sum);
    return sum;
}

// ---- reductions -----------------------------------------------------------------------------------------------------

// Sums N values over the simdgroup, N a power of two up to 32: lane l gets the sum of value l / (32/N).  Half of what
// is left is exchanged in each step, so that N sums take N - 1 + log2(32/N) shuffles instead of 5·N.
template <int N> inline float scatter_sum(thread float (&v)[N], uint lane) {
#pragma unroll
    for (uint half_n = N / 2; half_n > 0; half_n /= 2) {
        const uint mask = half_n * (LANES / N);
        const bool upper = (lane & mask) != 0;
#pragma unroll
        for (uint i = 0; i < N / 2; i++)
            if (i < half_n) {
                const float send = upper ? v[i] : v[i + half_n];
                v[i] = (upper ? v[i + half_n] : v[i]) + simd_shuffle_xor(send, mask);
            }
    }
    float sum = v[0];
#pragma unroll
    for (uint mask = LANES / N / 2; mask > 0; mask /= 2) sum += simd_shuffle_xor(sum, mask);
    return sum;
}

// ---- routing --------------------------------------------------------------------------------------------------------

constant constexpr uint MAX_EXPERTS = LILY_MAX_EXPERTS;
constant constexpr uint EXPERTS_PER_LANE = MAX_EXPERTS / LANES;

// The greatest of up to MAX_EXPERTS logits, taken out one after the other by a whole simdgroup; ties go to the lower
// index, and NaN comes last, so that indices are always valid.
struct TopExperts {
    uint key[EXPERTS_PER_LANE]; // of experts lane·EXPERTS_PER_LANE + i; 0: taken, or none
    uint lane;

    void init(device const float *logits, uint experts, uint which) {
        lane = which;
#pragma unroll
        for (uint i = 0; i < EXPERTS_PER_LANE; i++) {
            const uint e = lane * EXPERTS_PER_LANE + i;
            key[i] = e < experts ? order_key(logits[e]) : 0;
        }
    }

    uint next() {
        uint best = key[0], slot = 0;
#pragma unroll
        for (uint i = 1; i < EXPERTS_PER_LANE; i++)
            if (key[i] > best) best = key[i], slot = i;
        const uint top = simd_max(best);
        const uint winner = simd_min(best == top ? lane * EXPERTS_PER_LANE + slot : MAX_EXPERTS);
#pragma unroll
        for (uint i = 0; i < EXPERTS_PER_LANE; i++)
            if (winner == lane * EXPERTS_PER_LANE + i) key[i] = 0;
        return winner;
    }
};

// Weights of the `active` <= 32 chosen experts, lane a holding the a-th's index in `mine`, the greatest first: softmax
// over the chosen (`renorm`) or over all experts.
inline float route_weight(device const float *logits, uint experts, uint active, uint renorm, uint mine, uint lane) {
    const bool chosen = lane < active;
    const float logit = chosen ? logits[mine] : 0.0f, top = simd_broadcast(logit, 0);
    const float weight = chosen ? precise::exp(logit - top) : 0.0f;
    float total = weight;
    if (!renorm) {
        total = 0;
        for (uint e = lane; e < experts; e += LANES) total += precise::exp(logits[e] - top);
    }
    return weight / simd_sum(total);
}

#endif
