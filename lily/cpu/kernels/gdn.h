// SPDX-License-Identifier: Apache-2.0
// Gated DeltaNet: gdn_step (decode), gdn_conv, gdn_scan, gdn_gate (prefill).
//
// Decode and prefill share every function that computes something, so a token's result has the same bits on both ways.
// Channels of a projected row: q[Hk*Dk] | k[Hk*Dk] | v[Hv*Dv], then z[Hv*Dv] | b[Hv] | a[Hv].  Dk and Dv are multiples
// of 16.  Not here: the projections around the layer (gemv.h, gemm.h).
#ifndef LILY_CPU_GDN_H
#define LILY_CPU_GDN_H

#include "cpu.h"
#include "rows.h"
#include "vec.h"

#define GDN_MAX_TAPS 8

typedef struct {
    uint32_t hk, hv, dk, dv, taps;
    uint32_t rep;           // value heads of a key head
    uint32_t k, v, z, b, a; // first channel of each part of a projected row (q is at 0)
} gdn_shape;

// The constants of all kernels here begin with hk, hv, dk, dv; `taps` follows where there is a convolution.
INLINE gdn_shape gdn_shape_of(const int32_t *c, uint32_t taps) {
    gdn_shape s = {
        .hk = (uint32_t)c[0], .hv = (uint32_t)c[1], .dk = (uint32_t)c[2], .dv = (uint32_t)c[3], .taps = taps};
    s.rep = s.hv / s.hk;
    s.k = s.hk * s.dk;
    s.v = 2 * s.k;
    s.z = s.v + s.hv * s.dv;
    s.b = s.z + s.hv * s.dv;
    s.a = s.b + s.hv;
    return s;
}

// ---- convolution and gates ------------------------------------------------------------------------------------------

// The rows that the convolution sees: T-1 of the conv state, then the projected rows of this step.
typedef struct {
    const float *state, *proj;
    size_t channels, pitch;
    uint32_t before; // T-1
} gdn_rows;

INLINE const float *gdn_row(const gdn_rows *r, size_t t) {
    return t < r->before ? r->state + t * r->channels : r->proj + (t - r->before) * r->pitch;
}

// Σ_j w[·,j]·row[j][i] for VL channels from i on; w is [channel][taps] from channel i on.
INLINE vf gdn_conv_lanes(const float *const *row, uint32_t i, const float *w, uint32_t taps) {
    vf sum = vf_set(0);
    for (uint32_t j = 0; j < taps; j++) {
        float t[VL];
        for (uint32_t c = 0; c < VL; c++) t[c] = w[c * taps + j];
        vf x = vf_load(row[j] + i);
        sum = j ? vf_fma(x, vf_load(t), sum) : x * vf_load(t);
    }
    return sum;
}

// The same for four taps, the usual number.
INLINE vf gdn_conv_lanes4(const float *const *row, uint32_t i, const float *w) {
    vu t[4];
    UNROLL
    for (int j = 0; j < 4; j++) t[j] = vu_gather4(w + 4 * j, 4 * 4 * sizeof *w);
    vu_transpose4(t);
    vf sum = vf_load(row[0] + i) * (vf)t[0];
    UNROLL
    for (int j = 1; j < 4; j++) sum = vf_fma(vf_load(row[j] + i), (vf)t[j], sum);
    return sum;
}

// y = silu of the convolution at row m, for n channels from `first` on.
SHARED void gdn_conv_row(
    const gdn_rows *rows, size_t m, const float *w, uint32_t taps, size_t first, uint32_t n, float *y) {
    const float *row[GDN_MAX_TAPS];
    for (uint32_t j = 0; j < taps; j++) row[j] = gdn_row(rows, m + j) + first;
    w += first * taps;
    for (uint32_t i = 0; i < n; i += VL, w += VL * taps)
        vf_store(y + i, vf_silu(taps == 4 ? gdn_conv_lanes4(row, i, w) : gdn_conv_lanes(row, i, w, taps)));
}

// The conv state after `rows` rows: the last T-1 rows of all, n channels from `first` on.
SHARED void gdn_conv_state(const gdn_rows *from, size_t rows, size_t first, uint32_t n, float *out) {
    for (size_t t = 0; t < from->before; t++)
        memcpy(out + t * from->channels + first, gdn_row(from, rows + t) + first, n * sizeof *out);
}

// x·rsqrt(Σx² + 1e-6)·scale, in place.
INLINE void gdn_normalize(float *x, uint32_t n, float scale) {
    float s = scale / sqrtf(sum_squares(x, n) + 1e-6f);
    for (uint32_t i = 0; i < n; i += VL) vf_store(x + i, vf_load(x + i) * s);
}

// q̂ and k̂ of key head j at row m.
INLINE void gdn_query_key(
    const gdn_shape *s, const gdn_rows *rows, size_t m, const float *w, uint32_t j, float *q, float *k) {
    gdn_conv_row(rows, m, w, s->taps, (size_t)j * s->dk, s->dk, q);
    gdn_conv_row(rows, m, w, s->taps, s->k + (size_t)j * s->dk, s->dk, k);
    gdn_normalize(q, s->dk, 1.0f / sqrtf((float)s->dk));
    gdn_normalize(k, s->dk, 1.0f);
}

// Decay g = exp(-exp(a_log)·softplus(a + dt_bias)) and β = sigmoid(b) of n value heads from h on.
SHARED void gdn_gates(const gdn_shape *s, const float *proj, const float *a_log, const float *dt_bias, uint32_t h,
    uint32_t n, float *gate, float *beta) {
    for (uint32_t i = 0; i < n; i += VL) {
        uint32_t part = n - i < VL ? n - i : VL;
        vf a = vf_load_part(proj + s->a + h + i, part, 0), b = vf_load_part(proj + s->b + h + i, part, 0);
        vf rate = vf_exp(vf_load_part(a_log + h + i, part, 0));
        vf decay = vf_exp(-rate * vf_softplus(a + vf_load_part(dt_bias + h + i, part, 0)));
        vf_store_part(gate + i, part, decay);
        vf_store_part(beta + i, part, vf_sigmoid(b));
    }
}

// ---- recurrence -----------------------------------------------------------------------------------------------------

// One value head over several tokens; strides are in floats.
typedef struct {
    const float *q, *k, *v, *gate, *beta;
    float *o;
    size_t qk_stride, v_stride, gate_stride;
    uint32_t rows, dk, dv;
} gdn_tokens;

// Value dims are independent of each other, so the state S[k][v] is worked on in panels of GDN_PANEL vectors of value
// dims, which fit into the first cache.  With S the state before a token, the formulas
//     S' = g·S + d k̂ᵀ,  d = β(v - g·S·k̂),  o = S'·q̂ = g·S·q̂ + d·(k̂·q̂)
// read all they need from S, so that one pass over the panel updates it for token t and sums up for token t+1.
#define GDN_PANEL 4

// A panel in memory: row j (key dim) begins at s + j·stride.
typedef struct {
    float *s;
    size_t stride;
} gdn_place;

typedef struct {
    vf sk[GDN_PANEL], sq[GDN_PANEL]; // S·k̂ and S·q̂
    vf d[GDN_PANEL];
} gdn_sums;

// One pass over a panel: with `update`, S' = g·S + d k̂ᵀ is written to `to`; with `sum`, sk and sq of the (updated) S.
INLINE void gdn_pass(uint32_t dk, gdn_place from, gdn_place to, float g, const float *k, const float *next_k,
    const float *next_q, gdn_sums *x, int width, int update, int sum) {
    gdn_sums y = *x;
    UNROLL
    for (int i = 0; i < width; i++) y.sk[i] = y.sq[i] = vf_set(0);
    for (uint32_t j = 0; j < dk; j++, from.s += from.stride, to.s += to.stride) {
        vf kj = vf_set(update ? k[j] : 0), next_kj = vf_set(sum ? next_k[j] : 0), next_qj = vf_set(sum ? next_q[j] : 0);
        UNROLL
        for (int i = 0; i < width; i++) {
            vf s = vf_load(from.s + i * VL);
            if (update) {
                s = vf_fma(y.d[i], kj, s * vf_set(g));
                vf_store(to.s + i * VL, s);
            }
            if (sum) {
                y.sk[i] = vf_fma(s, next_kj, y.sk[i]);
                y.sq[i] = vf_fma(s, next_qj, y.sq[i]);
            }
        }
    }
    *x = y;
}

// d and o of token t; kq = k̂·q̂.
INLINE void gdn_output(const gdn_tokens *x, size_t t, float kq, size_t at, gdn_sums *sums, int width) {
    vf g = vf_set(x->gate[t * x->gate_stride]), beta = vf_set(x->beta[t * x->gate_stride]);
    UNROLL
    for (int i = 0; i < width; i++) {
        size_t place = t * x->v_stride + at + (size_t)i * VL;
        sums->d[i] = beta * (vf_load(x->v + place) - g * sums->sk[i]);
        vf_store(x->o + place, vf_fma(sums->d[i], vf_set(kq), g * sums->sq[i]));
    }
}

// Rows of one head lie pages apart, which no hardware prefetcher follows: fetches those of token t.
INLINE void gdn_prefetch(const gdn_tokens *x, size_t t, size_t at, int width) {
    for (uint32_t j = 0; j < x->dk; j += 16) {
        __builtin_prefetch(x->k + t * x->qk_stride + j);
        __builtin_prefetch(x->q + t * x->qk_stride + j);
    }
    for (uint32_t i = 0; i < (uint32_t)width * VL; i += 16) {
        __builtin_prefetch(x->v + t * x->v_stride + at + i);
        __builtin_prefetch(x->o + t * x->v_stride + at + i, 1);
    }
}

// All tokens on the value dims from `at` on; `panel` is room for dk·GDN_PANEL·VL floats.
INLINE void gdn_panel(
    const gdn_tokens *x, const float *kq, const float *s_in, float *s_out, size_t at, float *panel, int width) {
    gdn_place from = {(float *)s_in + at, x->dv}, between = {panel, (size_t)width * VL}, to = {s_out + at, x->dv};
    const float *k = x->k, *q = x->q;
    const size_t last = x->rows - 1;
    gdn_sums sums = {0};
    gdn_pass(x->dk, from, from, 0, k, k, q, &sums, width, 0, 1);
    gdn_output(x, 0, kq[0], at, &sums, width);
    for (size_t t = 0; t < last; t++, k += x->qk_stride, from = between) {
        q += x->qk_stride;
        if (t + 2 <= last) gdn_prefetch(x, t + 2, at, width);
        gdn_pass(x->dk, from, between, x->gate[t * x->gate_stride], k, k + x->qk_stride, q, &sums, width, 1, 1);
        gdn_output(x, t + 1, kq[t + 1], at, &sums, width);
    }
    gdn_pass(x->dk, from, to, x->gate[last * x->gate_stride], k, k, q, &sums, width, 1, 0);
}

INLINE float gdn_dot(const float *a, const float *b, uint32_t n) {
    lanes sum = lanes_set(0);
    for (uint32_t i = 0; i < n; i += LANES) sum = lanes_fma(lanes_load(a + i), lanes_load(b + i), sum);
    return lanes_sum(sum);
}

INLINE size_t gdn_scratch_floats(uint32_t rows, uint32_t dk) { return rows + (size_t)dk * GDN_PANEL * VL + LANES; }

// x->rows tokens in order, state from s_in to s_out (which may be one buffer).
SHARED void gdn_recurrence(const gdn_tokens *x, const float *s_in, float *s_out, float *scratch) {
    float *panel = scratch, *kq = scratch + (size_t)x->dk * GDN_PANEL * VL;
    for (size_t t = 0; t < x->rows; t++) kq[t] = gdn_dot(x->k + t * x->qk_stride, x->q + t * x->qk_stride, x->dk);
    uint32_t at = 0;
    for (; at + GDN_PANEL * VL <= x->dv; at += GDN_PANEL * VL) gdn_panel(x, kq, s_in, s_out, at, panel, GDN_PANEL);
    for (; at < x->dv; at += VL) gdn_panel(x, kq, s_in, s_out, at, panel, 1);
}

// y = silu(z)·rmsnorm(o).
SHARED void gdn_gated_norm(const float *o, const float *z, const float *norm, uint32_t n, float eps, float *y) {
    norm_row(o, norm, n, eps, y);
    swiglu_row(z, y, n, y);
}

// ---- kernels --------------------------------------------------------------------------------------------------------

SHARED void kernel_gdn_step(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gdn_step_params *p = call->params;
    const gdn_shape s = gdn_shape_of(call->constant, (uint32_t)call->constant[gdn_step_C_TAPS]);
    const float *proj = call->arg[gdn_step_PROJ], *w = call->arg[gdn_step_CONV_W];
    const float *s_in = call->arg[gdn_step_S_IN];
    float *s_out = call->arg[gdn_step_S_OUT], *conv_out = call->arg[gdn_step_CONV_OUT], *y = call->arg[gdn_step_Y];
    const gdn_rows rows = {call->arg[gdn_step_CONV_IN], proj, s.z, p->pitch, s.taps - 1};
    float *scratch = cpu_scratch(worker, (gdn_scratch_floats(1, s.dk) + 2 * s.dk + 2 * s.dv) * sizeof *scratch);
    float *q = scratch + gdn_scratch_floats(1, s.dk), *k = q + s.dk, *v = k + s.dk, *o = v + s.dv;
    for (uint32_t h = begin; h < end; h++) {
        uint32_t j = h / s.rep;
        float gate, beta;
        if (h == begin || h % s.rep == 0) gdn_query_key(&s, &rows, 0, w, j, q, k);
        size_t channel = s.v + (size_t)h * s.dv, state = (size_t)h * s.dk * s.dv;
        gdn_conv_row(&rows, 0, w, s.taps, channel, s.dv, v);
        gdn_conv_state(&rows, 1, channel, s.dv, conv_out);
        if (h % s.rep == 0) {
            gdn_conv_state(&rows, 1, (size_t)j * s.dk, s.dk, conv_out);
            gdn_conv_state(&rows, 1, s.k + (size_t)j * s.dk, s.dk, conv_out);
        }
        gdn_gates(&s, proj, call->arg[gdn_step_A_LOG], call->arg[gdn_step_DT_BIAS], h, 1, &gate, &beta);
        const gdn_tokens x = {q, k, v, &gate, &beta, o, 0, 0, 0, 1, s.dk, s.dv};
        gdn_recurrence(&x, s_in + state, s_out + state, scratch);
        gdn_gated_norm(o, proj + s.z + (size_t)h * s.dv, call->arg[gdn_step_NORM], s.dv, p->eps, y + (size_t)h * s.dv);
    }
}

SHARED void kernel_gdn_conv(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gdn_conv_params *p = call->params;
    const Step *step = call->arg[gdn_conv_STEP];
    const gdn_shape s = gdn_shape_of(call->constant, (uint32_t)call->constant[gdn_conv_C_TAPS]);
    const float *proj = call->arg[gdn_conv_PROJ], *w = call->arg[gdn_conv_CONV_W];
    float *q = call->arg[gdn_conv_Q], *k = call->arg[gdn_conv_K], *v = call->arg[gdn_conv_V];
    float *gate = call->arg[gdn_conv_GATE], *beta = call->arg[gdn_conv_BETA], *out = call->arg[gdn_conv_CONV_OUT];
    const gdn_rows rows = {call->arg[gdn_conv_CONV_IN], proj, s.z, p->pitch, s.taps - 1};
    const size_t count = (size_t)step->rows, share = (count + call->grid[1] - 1) / call->grid[1];
    (void)worker;
    for (uint32_t group = begin; group < end; group++) {
        const uint32_t j = group % s.hk, h = j * s.rep;
        size_t m = group / s.hk * share;
        const size_t stop = m + share < count ? m + share : count;
        if (m >= stop) continue;
        for (; m < stop; m++) {
            const size_t head = (m * s.hk + j) * s.dk, first = m * s.hv + h;
            gdn_query_key(&s, &rows, m, w, j, q + head, k + head);
            gdn_conv_row(&rows, m, w, s.taps, s.v + (size_t)h * s.dv, s.rep * s.dv, v + first * s.dv);
            gdn_gates(&s, proj + m * p->pitch, call->arg[gdn_conv_A_LOG], call->arg[gdn_conv_DT_BIAS], h, s.rep,
                gate + first, beta + first);
        }
        if (m == count) {
            gdn_conv_state(&rows, count, (size_t)j * s.dk, s.dk, out);
            gdn_conv_state(&rows, count, s.k + (size_t)j * s.dk, s.dk, out);
            gdn_conv_state(&rows, count, s.v + (size_t)h * s.dv, s.rep * s.dv, out);
        }
    }
}

SHARED void kernel_gdn_scan(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const Step *step = call->arg[gdn_scan_STEP];
    const gdn_shape s = gdn_shape_of(call->constant, 0);
    const uint32_t rows = (uint32_t)step->rows;
    const float *q = call->arg[gdn_scan_Q], *k = call->arg[gdn_scan_K], *v = call->arg[gdn_scan_V];
    const float *gate = call->arg[gdn_scan_GATE], *beta = call->arg[gdn_scan_BETA], *s_in = call->arg[gdn_scan_S_IN];
    float *s_out = call->arg[gdn_scan_S_OUT], *o = call->arg[gdn_scan_O];
    float *scratch = cpu_scratch(worker, gdn_scratch_floats(rows, s.dk) * sizeof *scratch);
    for (size_t h = begin; h < end && rows > 0; h++) {
        size_t j = h / s.rep, state = h * s.dk * s.dv;
        const gdn_tokens x = {q + j * s.dk, k + j * s.dk, v + h * s.dv, gate + h, beta + h, o + h * s.dv,
            (size_t)s.hk * s.dk, (size_t)s.hv * s.dv, s.hv, rows, s.dk, s.dv};
        gdn_recurrence(&x, s_in + state, s_out + state, scratch);
    }
}

// The CPU has one way to scan: the ablation `register-scan` is the same.
_Static_assert((int)gdn_scan_O == (int)gdn_scan_blocked_O, "gdn_scan and gdn_scan_blocked have the same arguments");
#define kernel_gdn_scan_blocked kernel_gdn_scan

SHARED void kernel_gdn_gate(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const gdn_gate_params *p = call->params;
    const Step *step = call->arg[gdn_gate_STEP];
    const gdn_shape s = gdn_shape_of(call->constant, 0);
    const float *o = call->arg[gdn_gate_O], *proj = call->arg[gdn_gate_PROJ];
    float *y = call->arg[gdn_gate_Y];
    (void)worker;
    for (size_t m = begin; m < end && m < (size_t)step->rows; m++)
        for (uint32_t h = 0; h < s.hv; h++) {
            size_t at = (m * s.hv + h) * s.dv;
            gdn_gated_norm(
                o + at, proj + m * p->pitch + s.z + (size_t)h * s.dv, call->arg[gdn_gate_NORM], s.dv, p->eps, y + at);
        }
}

#endif
