// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet: gdn_step (decode), gdn_conv, gdn_scan, gdn_gate (prefill), gdn_scan_blocked (an ablation).
//
// Channels of a projected row: q[Hk*Dk] | k[Hk*Dk] | v[Hv*Dv], then z[Hv*Dv] | b[Hv] | a[Hv].  State S is [Hv,Dk,Dv],
// Dv fastest.  Legal shapes stand in the kernel table.
// Not handled: the projections around the layer (gemv.metal).

#include "common.h"

constant constexpr uint GDN_MAX_TAPS = 8;
constant constexpr uint GDN_MAX_DIM = 256;
constant constexpr uint GDN_THREADS = 256; // of a group of gdn_conv and gdn_scan, at most

inline uint gdn_k() { return C_HK * C_DK; }                  // first channel of the keys
inline uint gdn_v() { return 2 * C_HK * C_DK; }              // of the values
inline uint gdn_channels() { return gdn_v() + C_HV * C_DV; } // of the convolution; z follows

// Decay g = exp(-exp(a_log)·softplus(a + dt_bias)) and β = sigmoid(b) of value head h.
inline float2 gdn_gates(device const act *proj, device const float *a_log, device const float *dt_bias, uint h) {
    device const act *b = proj + gdn_channels() + C_HV * C_DV;
    const float rate = precise::exp(a_log[h]) * softplus(float(b[C_HV + h]) + dt_bias[h]);
    return float2(precise::exp(-rate), sigmoid(float(b[h])));
}

// ---- one token ------------------------------------------------------------------------------------------------------
//
// S' = g·S + d k̂ᵀ with d = β(v - g·S·k̂), and o = S'·q̂ = g·S·q̂ + d·(k̂·q̂): both products are of the old S, so one
// pass over it in registers is all.  A simdgroup holds 32 rows (key dims) by 32 columns (value dims): eight lanes side
// by side load 128 bytes of a row, four rows at a time.

constant constexpr uint GDN_ROWS = 8;            // rows of S in a thread's registers, four columns each
constant constexpr uint GDN_BAND = 4 * GDN_ROWS; // in a simdgroup's
constant constexpr uint GDN_STEP_THREADS = 512;

struct GdnPlace {
    uint column; // first of the thread's four columns
    uint row;    // of its first row; the others are 4 further each
    uint band;   // which GDN_BAND rows
    bool inside; // of the columns

    bool has(uint i) { return inside && row + 4 * i < uint(C_DK); }
};

inline GdnPlace gdn_place(uint lane, uint simdgroup) {
    const uint blocks = (C_DV + 31) / 32;
    GdnPlace p;
    p.column = simdgroup % blocks * 32 + lane % 8 * 4;
    p.band = simdgroup / blocks;
    p.row = p.band * GDN_BAND + lane / 8;
    p.inside = p.column < uint(C_DV) && p.band * GDN_BAND < uint(C_DK);
    return p;
}

// The convolution's weights of channel c, [C, taps]; four taps are the usual number.
inline void gdn_taps(device const float *w, uint c, thread float (&tap)[GDN_MAX_TAPS]) {
    if (C_TAPS == 4) {
        const float4 all = *(device const float4 *)(w + c * 4);
        tap[0] = all.x, tap[1] = all.y, tap[2] = all.z, tap[3] = all.w;
        return;
    }
#pragma unroll
    for (uint j = 0; j < GDN_MAX_TAPS; j++)
        if (j < uint(C_TAPS)) tap[j] = w[c * C_TAPS + j];
}

struct GdnConv {
    device const act *state; // [taps-1, C]
    device const act *proj;
    device const float *w; // [C, taps]
    device act *out;       // the next state
};

// silu of the convolution at channel c; stores the channel's next state if asked to.
inline float gdn_conv_channel(GdnConv conv, uint c, bool store) {
    const uint channels = gdn_channels();
    const act newest = conv.proj[c];
    float tap[GDN_MAX_TAPS], sum = 0;
    gdn_taps(conv.w, c, tap);
#pragma unroll
    for (uint j = 0; j < GDN_MAX_TAPS; j++) {
        if (j >= uint(C_TAPS)) continue;
        const bool old = j + 1 < uint(C_TAPS);
        const act x = old ? act(conv.state[j * channels + c]) : newest;
        sum = fma(float(x), tap[j], sum);
        if (store && j > 0) conv.out[(j - 1) * channels + c] = x;
    }
    return silu(sum);
}

// q | k | v of value head h into `qkv`.
inline void gdn_conv_head(GdnConv conv, uint h, uint thread_index, uint threads, threadgroup float *qkv) {
    const uint rep = C_HV / C_HK, j = h / rep;
    for (uint i = thread_index; i < uint(2 * C_DK + C_DV); i += threads) {
        const bool is_v = i >= uint(2 * C_DK), is_k = i >= uint(C_DK);
        const uint c = is_v ? gdn_v() + h * C_DV + i - 2 * C_DK : (is_k ? gdn_k() - C_DK : 0) + j * C_DK + i;
        qkv[i] = gdn_conv_channel(conv, c, is_v || h % rep == 0);
    }
}

// Factors of the raw q and k, and k̂·q̂.
struct GdnScales {
    float q, k, kq;
};

inline GdnScales gdn_scales(threadgroup const float *qkv, uint lane) {
    float qq = 0, kk = 0, kq = 0;
    for (uint i = lane; i < uint(C_DK); i += LANES) {
        const float q = qkv[i], k = qkv[C_DK + i];
        qq = fma(q, q, qq), kk = fma(k, k, kk), kq = fma(k, q, kq);
    }
    GdnScales s;
    s.q = precise::rsqrt(simd_sum(qq) + 1e-6f) * precise::rsqrt(float(C_DK));
    s.k = precise::rsqrt(simd_sum(kk) + 1e-6f);
    s.kq = simd_sum(kq) * s.q * s.k;
    return s;
}

// Sums of S·k and S·q over the bands, for four columns from `column` on; [band][k or q][Dv].
inline float4 gdn_total(threadgroup const float *sums, uint which, uint column) {
    float4 total = float4(0.0f);
    for (uint band = 0; band < (C_DK + GDN_BAND - 1) / GDN_BAND; band++)
        total += *(threadgroup const float4 *)(sums + (2 * band + which) * C_DV + column);
    return total;
}

// y = silu(z)·rmsnorm(o), by one simdgroup for all columns.
inline void gdn_output(threadgroup const float *qkv, threadgroup const float *sums, float2 gates, GdnScales s,
    device const act *z, device const float *norm, float eps, uint lane, device act *y) {
    float4 o[GDN_MAX_DIM / 128];
    float squares = 0;
#pragma unroll
    for (uint i = 0; i < GDN_MAX_DIM / 128; i++) {
        const uint column = i * 128 + lane * 4;
        o[i] = float4(0.0f);
        if (column < uint(C_DV)) {
            const float4 v = *(threadgroup const float4 *)(qkv + 2 * C_DK + column);
            const float4 d = gates.y * (v - gates.x * s.k * gdn_total(sums, 0, column));
            o[i] = gates.x * s.q * gdn_total(sums, 1, column) + d * s.kq;
        }
        squares += dot(o[i], o[i]);
    }
    const float scale = precise::rsqrt(simd_sum(squares) / float(C_DV) + eps);
#pragma unroll
    for (uint i = 0; i < GDN_MAX_DIM / 128; i++) {
        const uint column = i * 128 + lane * 4;
        if (column < uint(C_DV)) {
            const float4 w = *(device const float4 *)(norm + column) * scale * o[i];
            y[column] = act(silu(float(z[column])) * w.x);
            y[column + 1] = act(silu(float(z[column + 1])) * w.y);
            y[column + 2] = act(silu(float(z[column + 2])) * w.z);
            y[column + 3] = act(silu(float(z[column + 3])) * w.w);
        }
    }
}

[[kernel, max_total_threads_per_threadgroup(GDN_STEP_THREADS)]] void gdn_step(device const act *proj [[buffer(0)]],
    device const float *conv_w [[buffer(1)]], device const float *a_log [[buffer(2)]],
    device const float *dt_bias [[buffer(3)]], device const float *norm [[buffer(4)]],
    device const act *conv_in [[buffer(5)]], device act *conv_out [[buffer(6)]], device const float *s_in [[buffer(7)]],
    device float *s_out [[buffer(8)]], device act *y [[buffer(9)]], constant gdn_step_params &p [[buffer(10)]],
    uint h [[threadgroup_position_in_grid]], uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
    threadgroup float qkv[3 * GDN_MAX_DIM];
    threadgroup float sums[2 * 1024];
    threadgroup float2 shared_gates;
    GdnPlace at = gdn_place(lane, simdgroup);
    const uint head = h * C_DK * C_DV;
    float4 s[GDN_ROWS];
#pragma unroll
    for (uint i = 0; i < GDN_ROWS; i++) { // first, for these loads take longest
        s[i] = float4(0.0f);
        if (at.has(i)) s[i] = *(device const float4 *)(s_in + head + (at.row + 4 * i) * C_DV + at.column);
    }
    const GdnConv conv = {conv_in, proj, conv_w, conv_out};
    gdn_conv_head(conv, h, thread_index, threads, qkv);
    if (thread_index == threads - 1) shared_gates = gdn_gates(proj, a_log, dt_bias, h);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const GdnScales scales = gdn_scales(qkv, lane);
    const float2 gates = shared_gates;
    float k[GDN_ROWS];
    float4 sk = float4(0.0f), sq = float4(0.0f);
#pragma unroll
    for (uint i = 0; i < GDN_ROWS; i++) {
        k[i] = at.has(i) ? qkv[C_DK + at.row + 4 * i] : 0.0f;
        sk += s[i] * k[i];
        sq += s[i] * (at.has(i) ? qkv[at.row + 4 * i] : 0.0f);
    }
    sk += simd_shuffle_xor(sk, 8), sq += simd_shuffle_xor(sq, 8);
    sk += simd_shuffle_xor(sk, 16), sq += simd_shuffle_xor(sq, 16);
    if (at.inside && lane < 16)
        *(threadgroup float4 *)(sums + (2 * at.band + lane / 8) * C_DV + at.column) = lane < 8 ? sk : sq;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (at.inside) {
        const float4 v = *(threadgroup const float4 *)(qkv + 2 * C_DK + at.column);
        const float4 d = gates.y * (v - gates.x * scales.k * gdn_total(sums, 0, at.column)) * scales.k;
#pragma unroll
        for (uint i = 0; i < GDN_ROWS; i++) {
            device float4 *to = (device float4 *)(s_out + head + (at.row + 4 * i) * C_DV + at.column);
            if (at.has(i)) *to = fma(d, float4(k[i]), s[i] * gates.x);
        }
    }
    if (simdgroup == simdgroups - 1)
        gdn_output(qkv, sums, gates, scales, proj + gdn_channels() + h * C_DV, norm, p.eps, lane, y + h * C_DV);
}

// ---- many tokens: convolution and gates -----------------------------------------------------------------------------

// Row t of conv state and projected rows together: the first taps-1 are the state's.
inline float4 gdn_row4(device const act *conv_in, device const act *proj, uint pitch, uint t, uint c) {
    const uint before = C_TAPS - 1;
    return t < before ? load4(conv_in + t * gdn_channels() + c) : load4(proj + (t - before) * pitch + c);
}

// Four channels from c on, over rows in order; `window` holds the rows before the current one, oldest first.
struct GdnWindow {
    float4 tap[GDN_MAX_TAPS]; // weights of the four channels
    float4 window[GDN_MAX_TAPS];

    void init(device const act *conv_in, device const act *proj, device const float *w, uint pitch, uint m, uint c) {
        float t0[GDN_MAX_TAPS], t1[GDN_MAX_TAPS], t2[GDN_MAX_TAPS], t3[GDN_MAX_TAPS];
        gdn_taps(w, c, t0), gdn_taps(w, c + 1, t1), gdn_taps(w, c + 2, t2), gdn_taps(w, c + 3, t3);
#pragma unroll
        for (uint j = 0; j < GDN_MAX_TAPS; j++) {
            if (j >= uint(C_TAPS)) continue;
            tap[j] = float4(t0[j], t1[j], t2[j], t3[j]);
            if (j > 0) window[j] = gdn_row4(conv_in, proj, pitch, m + j - 1, c);
        }
    }

    // silu of the convolution at the next row.
    float4 next(float4 row) {
        float4 sum = float4(0.0f);
#pragma unroll
        for (uint j = 0; j + 1 < GDN_MAX_TAPS; j++) {
            if (j + 1 >= uint(C_TAPS)) continue;
            window[j] = window[j + 1];
            sum = fma(window[j], tap[j], sum);
        }
        window[C_TAPS - 1] = row;
        sum = fma(row, tap[C_TAPS - 1], sum);
        return float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
    }
};

// A head of `dim` channels from `first` on, over rows [begin, end), by one simdgroup; rows of `out` lie `stride` apart.
// `scale` > 0: x·rsqrt(Σx² + 1e-6)·scale.
template <uint QUADS>
inline void gdn_conv_rows(device const act *conv_in, device const act *proj, device const float *w, uint pitch,
    uint first, uint dim, uint begin, uint end, float scale, uint lane, device act *out, uint stride) {
    GdnWindow window[QUADS];
#pragma unroll
    for (uint i = 0; i < QUADS; i++)
        if (i * 128 + lane * 4 < dim) window[i].init(conv_in, proj, w, pitch, begin, first + i * 128 + lane * 4);
    for (uint m = begin; m < end; m++) {
        float4 y[QUADS];
        float squares = 0;
#pragma unroll
        for (uint i = 0; i < QUADS; i++) {
            const uint c = i * 128 + lane * 4;
            y[i] = float4(0.0f);
            if (c < dim) y[i] = window[i].next(load4(proj + m * pitch + first + c));
            squares += dot(y[i], y[i]);
        }
        const float factor = scale > 0 ? precise::rsqrt(simd_sum(squares) + 1e-6f) * scale : 1.0f;
#pragma unroll
        for (uint i = 0; i < QUADS; i++)
            if (i * 128 + lane * 4 < dim) *(device act4 *)(out + m * stride + i * 128 + lane * 4) = act4(y[i] * factor);
    }
}

// The conv state after `rows` rows: the last taps-1 rows of all, bit by bit.
inline void gdn_conv_state(device const act *conv_in, device const act *proj, uint pitch, uint rows, uint first,
    uint dim, uint lane, device act *out) {
    const uint before = C_TAPS - 1, channels = gdn_channels();
    for (uint t = 0; t < before; t++)
        for (uint c = first + lane; c < first + dim; c += LANES)
            out[t * channels + c] =
                rows + t < before ? conv_in[(rows + t) * channels + c] : proj[(rows + t - before) * pitch + c];
}

// Grid: [Hk, parts of the rows].  The segments of key head j (q, k, its value heads) go to the simdgroups in turn.
[[kernel, max_total_threads_per_threadgroup(GDN_THREADS)]] void gdn_conv(device const Step *step [[buffer(0)]],
    device const act *proj [[buffer(1)]], device const float *conv_w [[buffer(2)]],
    device const float *a_log [[buffer(3)]], device const float *dt_bias [[buffer(4)]],
    device const act *conv_in [[buffer(5)]], device act *conv_out [[buffer(6)]], device act *q [[buffer(7)]],
    device act *k [[buffer(8)]], device act *v [[buffer(9)]], device float *gate [[buffer(10)]],
    device float *beta [[buffer(11)]], constant gdn_conv_params &p [[buffer(12)]],
    uint2 group [[threadgroup_position_in_grid]], uint2 groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    const uint rows = uint(step->rows), share = (rows + groups.y - 1) / groups.y;
    const uint begin = group.y * share, end = min(begin + share, rows), rep = C_HV / C_HK, j = group.x;
    if (begin >= end) return;
    for (uint segment = simdgroup; segment < 2 + rep; segment += simdgroups) {
        const uint h = j * rep + segment - 2, key = j * C_DK, dim = segment < 2 ? C_DK : C_DV;
        const uint first = segment == 0 ? key : segment == 1 ? gdn_k() + key : gdn_v() + h * C_DV;
        const uint stride = segment < 2 ? C_HK * C_DK : C_HV * C_DV;
        const float scale = segment == 0 ? precise::rsqrt(float(C_DK)) : segment == 1 ? 1.0f : 0.0f;
        device act *out = segment == 0 ? q + key : segment == 1 ? k + key : v + h * C_DV;
        if (C_DK <= 128 && C_DV <= 128)
            gdn_conv_rows<1>(conv_in, proj, conv_w, p.pitch, first, dim, begin, end, scale, lane, out, stride);
        else
            gdn_conv_rows<2>(conv_in, proj, conv_w, p.pitch, first, dim, begin, end, scale, lane, out, stride);
        if (end == rows) gdn_conv_state(conv_in, proj, p.pitch, rows, first, dim, lane, conv_out);
        if (segment < 2) continue;
        for (uint m = begin + lane; m < end; m += LANES) {
            const float2 gates = gdn_gates(proj + m * p.pitch, a_log, dt_bias, h);
            gate[m * C_HV + h] = gates.x, beta[m * C_HV + h] = gates.y;
        }
    }
}

// ---- many tokens: recurrence ----------------------------------------------------------------------------------------
//
// A column of the state (one value dim) is independent of the others.  It stays in the registers of Dk/PER lanes from
// the first token to the last; they meet through shuffles.  The next token's loads are under way while one is computed.

struct GdnTokens {
    device const act *q; // of the lane's first key dim
    device const act *k;
    device const act *v; // of the lane's column
    device const float *gate;
    device const float *beta;
    device act *o;
    uint rows;
};

// The key dims of a lane.
inline void gdn_load(device const act *p, thread float (&x)[4]) {
    const float4 a = load4(p);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
}

inline void gdn_load(device const act *p, thread float (&x)[8]) { load8(p, x); }

inline void gdn_load(device const act *p, thread float (&x)[16]) {
    float a[8], b[8];
    load8(p, a);
    load8(p + 8, b);
#pragma unroll
    for (uint i = 0; i < 8; i++) x[i] = a[i], x[i + 8] = b[i];
}

// PER key dims per lane.  `lead`: this lane stores the column's output.
template <uint PER>
inline void gdn_scan_column(GdnTokens x, device const float *s_in, device float *s_out, bool inside, bool lead) {
    const uint lanes = C_DK / PER, qk = C_HK * C_DK, vs = C_HV * C_DV;
    float s[PER], k[PER], q[PER];
#pragma unroll
    for (uint i = 0; i < PER; i++) s[i] = inside ? s_in[i * C_DV] : 0.0f;
    gdn_load(x.k, k);
    gdn_load(x.q, q);
    float v = float(*x.v), gate = *x.gate, beta = *x.beta;
    for (uint t = 0; t < x.rows; t++) {
        const uint next = min(t + 1, x.rows - 1);
        float next_k[PER], next_q[PER];
        gdn_load(x.k + next * qk, next_k);
        gdn_load(x.q + next * qk, next_q);
        const float next_v = float(x.v[next * vs]), next_gate = x.gate[next * C_HV], next_beta = x.beta[next * C_HV];
        float sk = 0, o = 0;
#pragma unroll
        for (uint i = 0; i < PER; i++) s[i] *= gate, sk = fma(s[i], k[i], sk);
        for (uint mask = 1; mask < lanes; mask *= 2) sk += simd_shuffle_xor(sk, mask);
        const float d = beta * (v - sk);
#pragma unroll
        for (uint i = 0; i < PER; i++) s[i] = fma(k[i], d, s[i]), o = fma(s[i], q[i], o);
        for (uint mask = 1; mask < lanes; mask *= 2) o += simd_shuffle_xor(o, mask);
        if (lead) x.o[t * vs] = act(o);
#pragma unroll
        for (uint i = 0; i < PER; i++) k[i] = next_k[i], q[i] = next_q[i];
        v = next_v, gate = next_gate, beta = next_beta;
    }
#pragma unroll
    for (uint i = 0; i < PER; i++)
        if (inside) s_out[i * C_DV] = s[i];
}

// Grid: [Hv, parts of the columns].  With a simdgroup for every column its lanes share the column; else columns are
// packed, 16 key dims a lane, which takes fewer shuffles.
[[kernel, max_total_threads_per_threadgroup(GDN_THREADS)]] void gdn_scan(device const Step *step [[buffer(0)]],
    device const act *q [[buffer(1)]], device const act *k [[buffer(2)]], device const act *v [[buffer(3)]],
    device const float *gate [[buffer(4)]], device const float *beta [[buffer(5)]],
    device const float *s_in [[buffer(6)]], device float *s_out [[buffer(7)]], device act *o [[buffer(8)]],
    uint2 group [[threadgroup_position_in_grid]], uint2 groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    const uint walkers = groups.y * simdgroups, walker = group.y * simdgroups + simdgroup, h = group.x;
    const bool alone = walkers >= uint(C_DV) && C_DK >= 128;
    const uint lanes = alone ? LANES : C_DK / 16, per = C_DK / lanes, columns = LANES / lanes;
    const uint key = h / (C_HV / C_HK) * C_DK + lane % lanes * per;
    for (uint first = walker * columns; first < uint(C_DV); first += walkers * columns) {
        const uint column = first + lane / lanes, place = h * C_DV + min(column, uint(C_DV) - 1);
        const uint state = (h * C_DK + lane % lanes * per) * C_DV + min(column, uint(C_DV) - 1);
        const bool inside = column < uint(C_DV), lead = inside && lane % lanes == 0;
        const GdnTokens x = {q + key, k + key, v + place, gate + h, beta + h, o + place, uint(step->rows)};
        if (!alone)
            gdn_scan_column<16>(x, s_in + state, s_out + state, inside, lead);
        else if (C_DK == 128)
            gdn_scan_column<4>(x, s_in + state, s_out + state, inside, lead);
        else
            gdn_scan_column<8>(x, s_in + state, s_out + state, inside, lead);
    }
}

// y = silu(z)·rmsnorm(o).  Grid: one group a row; a simdgroup takes a head.
kernel void gdn_gate(device const Step *step [[buffer(0)]], device const act *o [[buffer(1)]],
    device const act *proj [[buffer(2)]], device const float *norm [[buffer(3)]], device act *y [[buffer(4)]],
    constant gdn_gate_params &p [[buffer(5)]], uint m [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
    if (m >= uint(step->rows)) return;
    for (uint h = simdgroup; h < uint(C_HV); h += simdgroups) {
        const uint at = (m * C_HV + h) * C_DV;
        device const act *z = proj + m * p.pitch + gdn_channels() + h * C_DV;
        float4 x[GDN_MAX_DIM / 128];
        float squares = 0;
#pragma unroll
        for (uint i = 0; i < GDN_MAX_DIM / 128; i++) {
            const uint c = i * 128 + lane * 4;
            x[i] = float4(0.0f);
            if (c < uint(C_DV)) x[i] = load4(o + at + c);
            squares += dot(x[i], x[i]);
        }
        const float scale = precise::rsqrt(simd_sum(squares) / float(C_DV) + p.eps);
#pragma unroll
        for (uint i = 0; i < GDN_MAX_DIM / 128; i++) {
            const uint c = i * 128 + lane * 4;
            if (c >= uint(C_DV)) continue;
            const float4 g = load4(z + c), n = x[i] * scale * *(device const float4 *)(norm + c);
            *(device act4 *)(y + at + c) = act4(float4(silu(g.x), silu(g.y), silu(g.z), silu(g.w)) * n);
        }
    }
}

// ---- the ablation of the register-resident scan ----------------------------------------------------------------------

constant constexpr uint GDN_BLOCK = 8; // tokens whose q and k are staged at a time

// The state stays in memory and is read and written for every token.  Grid: one group a value head.
kernel void gdn_scan_blocked(device const Step *step [[buffer(0)]], device const act *q [[buffer(1)]],
    device const act *k [[buffer(2)]], device const act *v [[buffer(3)]], device const float *gate [[buffer(4)]],
    device const float *beta [[buffer(5)]], device const float *s_in [[buffer(6)]], device float *s_out [[buffer(7)]],
    device act *o [[buffer(8)]], uint h [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
    threadgroup float staged_q[GDN_BLOCK * GDN_MAX_DIM], staged_k[GDN_BLOCK * GDN_MAX_DIM];
    const uint rows = uint(step->rows), key = h / (C_HV / C_HK) * C_DK, head = h * C_DK * C_DV;
    for (uint first = 0; first < rows; first += GDN_BLOCK) {
        const uint count = min(GDN_BLOCK, rows - first);
        for (uint i = thread_index; i < count * C_DK; i += threads) {
            const uint at = (first + i / C_DK) * C_HK * C_DK + key + i % C_DK;
            staged_q[i] = float(q[at]), staged_k[i] = float(k[at]);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint t = 0; t < count; t++) {
            const uint token = (first + t) * C_HV + h;
            device const float *from = token == h ? s_in : s_out;
            for (uint c = thread_index; c < uint(C_DV); c += threads) {
                float sk = 0, out = 0;
                for (uint i = 0; i < uint(C_DK); i++)
                    sk = fma(from[head + i * C_DV + c] * gate[token], staged_k[t * C_DK + i], sk);
                const float d = beta[token] * (float(v[token * C_DV + c]) - sk);
                for (uint i = 0; i < uint(C_DK); i++) {
                    const float s = fma(staged_k[t * C_DK + i], d, from[head + i * C_DV + c] * gate[token]);
                    s_out[head + i * C_DV + c] = s;
                    out = fma(s, staged_q[t * C_DK + i], out);
                }
                o[token * C_DV + c] = act(out);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
