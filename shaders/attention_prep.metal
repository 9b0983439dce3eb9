// SPDX-License-Identifier: Apache-2.0
// Queries, keys and values of many rows: attn_prep, which is RMSNorm, RoPE and the append to the cache.
//
// Not here: the same for one token inside attn_decode (attention_decode.metal).
#include "common.h"
#include "group.h"

constant constexpr uint PREP_MAX_PAIRS = 128; // of RoPE

// Element d of RoPE(rmsnorm(x)); `turn` holds (cos, sin) of every pair (i, i + pairs).
inline float prep_element(
    device const act *x, device const float *norm, threadgroup const float2 *turn, float factor, uint d) {
    const uint pairs = C_ROT / 2;
    const float value = float(x[d]) * factor * norm[d];
    if (d >= 2 * pairs) return value;
    const uint other = d < pairs ? d + pairs : d - pairs;
    const float2 t = turn[d < pairs ? d : other];
    const float partner = float(x[other]) * factor * norm[other];
    return d < pairs ? value * t.x - partner * t.y : value * t.x + partner * t.y;
}

template <typename Y>
inline void prep_head(
    device const act *x, device const float *norm, threadgroup const float2 *turn, float eps, uint lane, device Y *y) {
    float squares = 0;
    for (uint d = lane; d < uint(C_DIM); d += LANES) squares += float(x[d]) * float(x[d]);
    const float factor = precise::rsqrt(simd_sum(squares) / float(C_DIM) + eps);
    for (uint d = lane; d < uint(C_DIM); d += LANES) y[d] = Y(prep_element(x, norm, turn, factor, d));
}

kernel void attn_prep(device const Step *step [[buffer(0)]], device const act *proj [[buffer(1)]],
    device const float *q_norm [[buffer(2)]], device const float *k_norm [[buffer(3)]],
    device const float *inv_freq [[buffer(4)]], device act *q [[buffer(5)]], device bfloat *k [[buffer(6)]],
    device bfloat *v [[buffer(7)]], constant attn_prep_params &p [[buffer(8)]],
    uint row [[threadgroup_position_in_grid]], LILY_THREAD_ARGUMENTS) {
    threadgroup float2 turn[PREP_MAX_PAIRS];
    const uint hq = C_HQ, hkv = C_HKV, dim = C_DIM, threads = simdgroups * LANES;
    if (row >= uint(step->rows)) return;
    const uint position = uint(step->position) + row;
    for (uint i = tid; i < uint(C_ROT) / 2; i += threads) {
        const float angle = float(position) * inv_freq[i];
        turn[i] = float2(precise::cos(angle), precise::sin(angle));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    proj += row * p.pitch;
    q += row * hq * dim;
    k += position * hkv * dim;
    v += position * hkv * dim;
    device const act *keys = proj + 2 * hq * dim;
    for (uint h = sg; h < hq + hkv; h += simdgroups) {
        if (h < hq)
            prep_head(proj + 2 * h * dim, q_norm, turn, p.eps, lane, q + h * dim);
        else
            prep_head(keys + (h - hq) * dim, k_norm, turn, p.eps, lane, k + (h - hq) * dim);
    }
    for (uint d = tid; d < hkv * dim; d += threads) v[d] = bfloat(float(keys[hkv * dim + d]));
}
