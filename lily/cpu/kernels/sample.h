// SPDX-License-Identifier: Apache-2.0
// From logits to the next token: argmax, sample_logits, sample_draw, advance.
//
// Ids >= Request.vocab are padding: never read, never drawn.  Every "best" is the greatest value, ties to the lower id;
// where there is no candidate it is (-inf, NO_ID).  Not here: the head's projection (gemv.h), the exact filters
// (sample_filter.h), the greatest few (logprobs.h), stop strings (host).
#ifndef LILY_CPU_SAMPLE_H
#define LILY_CPU_SAMPLE_H

#include "cpu.h"
#include "sample_common.h"
#include "vec.h"

// ---- the greatest of many -------------------------------------------------------------------------------------------

// The best of each lane; ids must come in ascending order.
typedef struct {
    vf value;
    vi id;
} best_lanes;

INLINE best_lanes best_none(void) { return (best_lanes){vf_set(-INFINITY), vi_set(NO_ID)}; }

INLINE void best_add(best_lanes *b, vf x, uint32_t first_id) {
    vi greater = x > b->value;
    b->value = vf_select(greater, x, b->value);
    b->id = vi_select(greater, vi_iota() + (int32_t)first_id, b->id);
}

INLINE int better(float a, int32_t a_id, float b, int32_t b_id) { return a > b || (a == b && a_id < b_id); }

INLINE void best_store(const best_lanes *b, float out[2]) {
    float value = -INFINITY;
    int32_t id = NO_ID;
    for (int i = 0; i < VL; i++)
        if (better(b->value[i], b->id[i], value, id)) value = b->value[i], id = b->id[i];
    out[0] = value, out[1] = int_as_float(id);
}

SHARED void kernel_argmax(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const argmax_params *p = call->params;
    const Request *request = call->arg[argmax_REQUEST];
    const float *logits = call->arg[argmax_LOGITS];
    (void)worker;
    for (uint32_t group = begin; group < end; group++) {
        id_range ids = slice_of(group, p->slice, request);
        best_lanes best = best_none();
        vi bad = vi_set(0);
        for (uint32_t i = ids.from; i < ids.to; i += VL) {
            bad |= not_finite(load_ids(logits, i, ids.to, 0));
            best_add(&best, load_ids(logits, i, ids.to, -INFINITY), i);
        }
        best_store(&best, (float *)call->arg[argmax_BEST] + 2 * (size_t)group);
        ((int32_t *)call->arg[argmax_FLAGS])[group] = vi_any(bad);
    }
}

// ---- penalties ------------------------------------------------------------------------------------------------------

// Each id of the slice that is among history[from..to) is penalised once; `seen` has a bit per id of the slice.
INLINE void repetition_penalty(
    float *y, id_range ids, const int32_t *history, int64_t from, int64_t to, float penalty, uint8_t *seen) {
    memset(seen, 0, (ids.to - ids.from + 7) / 8);
    for (int64_t i = from; i < to; i++) {
        uint32_t id = (uint32_t)history[i], at = id - ids.from;
        if (id < ids.from || id >= ids.to || seen[at / 8] >> at % 8 & 1) continue;
        seen[at / 8] |= (uint8_t)(1 << at % 8);
        y[id] = y[id] > 0 ? y[id] / penalty : y[id] * penalty;
    }
}

INLINE void count_penalties(float *y, id_range ids, const uint32_t *counts, float presence, float frequency) {
    for (uint32_t i = ids.from; i < ids.to; i++)
        if (counts[i] > 0) y[i] = y[i] - presence - frequency * (float)counts[i];
}

INLINE void mask_out(float *y, id_range ids, const uint32_t *mask) {
    for (uint32_t i = ids.from; i < ids.to; i++)
        if (!(mask[i / 32] >> i % 32 & 1)) y[i] = -INFINITY;
}

SHARED void kernel_sample_logits(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const sample_logits_params *p = call->params;
    const Step *step = call->arg[sample_logits_STEP];
    const Request *r = call->arg[sample_logits_REQUEST];
    const float *logits = call->arg[sample_logits_LOGITS], *bias = call->arg[sample_logits_BIAS_VALUES];
    const int32_t *bias_ids = call->arg[sample_logits_BIAS_IDS];
    float *y = call->arg[sample_logits_Y];
    uint8_t *seen = cpu_scratch(worker, p->slice / 8 + 1);
    const int64_t tokens = (int64_t)step->position + step->rows, window = r->repetition_window;
    for (uint32_t group = begin; group < end; group++) {
        id_range ids = slice_of(group, p->slice, r);
        float *stats = (float *)call->arg[sample_logits_STATS] + 4 * (size_t)group;
        vi bad = vi_set(0);
        for (uint32_t i = ids.from; i < ids.to; i += VL) bad |= not_finite(load_ids(logits, i, ids.to, 0));
        ((int32_t *)call->arg[sample_logits_FLAGS])[group] = vi_any(bad);
        memcpy(y + ids.from, logits + ids.from, (ids.to - ids.from) * sizeof *y);
        for (int32_t i = 0; i < r->bias_count; i++) {
            uint32_t id = (uint32_t)bias_ids[i];
            if (id >= ids.from && id < ids.to) y[id] += bias[i];
        }
        if (r->repetition_penalty != 1 && window > 0)
            repetition_penalty(y, ids, call->arg[sample_logits_HISTORY], tokens > window ? tokens - window : 0, tokens,
                r->repetition_penalty, seen);
        if (r->presence_penalty != 0 || r->frequency_penalty != 0)
            count_penalties(y, ids, call->arg[sample_logits_COUNTS], r->presence_penalty, r->frequency_penalty);
        if (r->masked) mask_out(y, ids, call->arg[sample_logits_MASK]);
        stats[0] = max_of(logits, ids.from, ids.to);
        stats[1] = (float)exp_total(logits, ids.from, ids.to, stats[0]);
        stats[2] = max_of(y, ids.from, ids.to);
        stats[3] = (float)exp_total(y, ids.from, ids.to, stats[2]);
    }
}

// ---- draw -----------------------------------------------------------------------------------------------------------

// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3").
INLINE void philox(uint32_t seed_low, uint32_t seed_high, uint32_t c0, uint32_t c1, uint32_t out[4]) {
    uint32_t c2 = 0, c3 = 0;
    UNROLL
    for (int i = 0; i < 10; i++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ seed_low, c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ seed_high, c3 = (uint32_t)a;
        seed_low += 0x9E3779B9u, seed_high += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

// -ln(-ln u), u = (k + ½)/2²⁴ with k the word's upper 24 bits.  From u = ½ on it is 1 - u that float32 holds exactly.
INLINE vf gumbel(vu word) {
    const vf unit = vf_set(0x1p-24f);
    vu k = word >> 8;
    vf low = (__builtin_convertvector((vi)k, vf) + 0.5f) * unit;
    vf rest = (__builtin_convertvector((vi)(0xffffff - k), vf) + 0.5f) * unit;
    vf log_u =
        vf_select((vi)(k >= 0x800000), vf_log1p(-vf_select((vi)(k >= 0x800000), rest, vf_set(0.5f))), vf_log(low));
    return -vf_log(-log_u);
}

// Of VL ids from i on (i a multiple of VL): word id%4 of the block (id/4, position).
INLINE vf gumbel_of(const Request *r, uint32_t position, uint32_t i) {
    uint32_t word[VL];
    UNROLL
    for (uint32_t j = 0; j < VL; j += 4) philox(r->seed_low, r->seed_high, (i + j) / 4, position, word + j);
    vu v;
    memcpy(&v, word, sizeof v);
    return gumbel(v);
}

SHARED void kernel_sample_draw(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const sample_draw_params *p = call->params;
    const Step *step = call->arg[sample_draw_STEP];
    const Request *r = call->arg[sample_draw_REQUEST];
    const float *y = call->arg[sample_draw_Y], *cut = call->arg[sample_draw_CUT];
    const vf threshold = vf_set(cut[0]);
    const vi last = vi_set(float_as_int(cut[1]));
    (void)worker;
    for (uint32_t group = begin; group < end; group++) {
        id_range ids = slice_of(group, p->slice, r);
        best_lanes best = best_none();
        for (uint32_t i = ids.from / VL * VL; i < ids.to; i += VL) {
            vf x = load_ids(y, i, ids.to, -INFINITY);
            vi id = vi_iota() + (int32_t)i;
            vi kept = ((x > threshold) | ((x == threshold) & (id <= last))) & (id >= vi_set((int32_t)ids.from));
            x = vf_select(kept, x, vf_set(-INFINITY));
            if (!vi_any(x > best.value) && r->temperature == 0) continue;
            if (!vi_any(kept)) continue;
            if (r->temperature != 0) x = x / r->temperature + gumbel_of(r, (uint32_t)(step->position + step->rows), i);
            best_add(&best, x, i);
        }
        best_store(&best, (float *)call->arg[sample_draw_BEST] + 2 * (size_t)group);
    }
}

// ---- hand-over --------------------------------------------------------------------------------------------------------

// The token that the groups found, or NO_ID if a flag is set or there is none.
INLINE int32_t chosen_token(const float *best, const int32_t *flags, uint32_t groups) {
    float value = -INFINITY;
    int32_t id = NO_ID, bad = 0;
    for (uint32_t i = 0; i < groups; i++) {
        bad |= flags[i];
        if (better(best[2 * i], float_as_int(best[2 * i + 1]), value, id))
            value = best[2 * i], id = float_as_int(best[2 * i + 1]);
    }
    return bad ? NO_ID : id;
}

INLINE void fill_logprobs(Output *out, const cpu_call *call, const Request *r, int32_t token, uint32_t groups) {
    const float *logits = call->arg[advance_LOGITS], *values = call->arg[advance_TOP_VALUES];
    const int32_t *ids = call->arg[advance_TOP_IDS];
    double total = log_sum_exp(call->arg[advance_STATS], groups, 4);
    out->logprob = (float)(logits[token] - total);
    out->top_count = r->top_logprobs < r->vocab ? r->top_logprobs : r->vocab;
    for (int32_t i = 0; i < out->top_count; i++)
        out->top_ids[i] = ids[i], out->top_logprobs[i] = (float)(values[i] - total);
}

SHARED void kernel_advance(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const advance_params *p = call->params;
    const Step step = *(const Step *)call->arg[advance_STEP];
    const Request *r = call->arg[advance_REQUEST];
    Output *out = (Output *)call->arg[advance_OUTPUTS] + step.count % LILY_OUTPUT_RING;
    const int32_t token = chosen_token(call->arg[advance_BEST], call->arg[advance_FLAGS], p->groups);
    const int32_t position = step.position + step.rows, count = step.count + 1;
    int32_t stop = 0;
    (void)begin, (void)end, (void)worker;
    out->logprob = 0;
    out->top_count = 0;
    out->position = position;
    if (token == NO_ID) {
        out->token = -1;
        out->status = LILY_STATUS_NONFINITE;
        stop = 1;
    } else {
        for (int32_t i = 0; i < r->stop_count; i++) stop |= token == r->stop_ids[i];
        out->token = token;
        out->status = stop ? LILY_STATUS_STOP : LILY_STATUS_OK;
        if (p->logprobs) fill_logprobs(out, call, r, token, p->groups);
        *(int32_t *)call->arg[advance_NEXT_IDS] = token;
        ((int32_t *)call->arg[advance_HISTORY])[position] = token;
        ((uint32_t *)call->arg[advance_COUNTS])[token]++;
    }
    *(Step *)call->arg[advance_NEXT_STEP] = (Step){position, 1, count, step.stopped || stop};
    // The host reads the ring while later steps run: `count` tells that the entry is complete.
    __atomic_store_n(&out->count, count, __ATOMIC_RELEASE);
}

#endif
