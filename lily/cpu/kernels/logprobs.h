// SPDX-License-Identifier: Apache-2.0
// The greatest few and their log-probabilities: top_logprobs, score_rows.  Ties go to the lower id.
//
// Not here: the draw (sample.h), the exact filters (sample_filter.h).
#ifndef LILY_CPU_LOGPROBS_H
#define LILY_CPU_LOGPROBS_H

#include "sample_common.h"

// The `want` greatest of x[0..count), greatest first, ties to the lower id; unused places are (-inf, -1).
INLINE void top_of(const float *x, uint32_t count, uint32_t want, float *values, int32_t *ids) {
    uint32_t held = 0;
    for (uint32_t i = 0; i < want; i++) values[i] = -INFINITY, ids[i] = -1;
    if (want == 0) return;
    for (uint32_t i = 0; i < count; i += VL) {
        vf v = load_ids(x, i, count, -INFINITY);
        if (held == want && !vi_any(v > vf_set(values[want - 1]))) continue;
        for (uint32_t j = i; j < i + VL && j < count; j++) {
            if (held == want && !(x[j] > values[want - 1])) continue;
            uint32_t at = held < want ? held++ : want - 1;
            for (; at > 0 && x[j] > values[at - 1]; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
            values[at] = x[j], ids[at] = (int32_t)j;
        }
    }
}

SHARED void kernel_top_logprobs(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const top_logprobs_params *p = call->params;
    const Request *r = call->arg[top_logprobs_REQUEST];
    uint32_t count = (uint32_t)r->vocab < p->count ? (uint32_t)r->vocab : p->count;
    (void)begin, (void)end, (void)worker;
    top_of(call->arg[top_logprobs_LOGITS], count, (uint32_t)r->top_logprobs, call->arg[top_logprobs_TOP_VALUES],
        call->arg[top_logprobs_TOP_IDS]);
}

SHARED void kernel_score_rows(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const score_rows_params *p = call->params;
    const uint32_t rows = (uint32_t)((const Step *)call->arg[score_rows_STEP])->rows;
    const Request *r = call->arg[score_rows_REQUEST];
    const int32_t *target = call->arg[score_rows_TARGET];
    const uint32_t vocab = (uint32_t)r->vocab < p->count ? (uint32_t)r->vocab : p->count;
    (void)worker;
    for (uint32_t i = begin; i < end && i < p->limit && p->first + i < rows; i++) {
        const float *logits = (const float *)call->arg[score_rows_LOGITS] + (size_t)i * p->count;
        size_t m = p->first + i;
        float *values = (float *)call->arg[score_rows_TOP_LOGPROBS] + m * p->top, stats[2];
        vi bad = vi_set(0);
        for (uint32_t j = 0; j < vocab; j += VL) bad |= not_finite(load_ids(logits, j, vocab, 0));
        stats[0] = max_of(logits, 0, vocab);
        stats[1] = (float)exp_total(logits, 0, vocab, stats[0]);
        double total = log_sum_exp(stats, 1, 2);
        ((float *)call->arg[score_rows_LOGPROBS])[m] = target[m] >= 0 ? (float)(logits[target[m]] - total) : 0;
        top_of(logits, vocab, p->top, values, (int32_t *)call->arg[score_rows_TOP_IDS] + m * p->top);
        for (uint32_t j = 0; j < p->top; j++) values[j] = (float)(values[j] - total);
        ((int32_t *)call->arg[score_rows_FLAGS])[m] = vi_any(bad);
    }
}

#endif
