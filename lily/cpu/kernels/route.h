// SPDX-License-Identifier: Apache-2.0
// Routing of rows to experts: route_topk and route_group.
//
// Not here: the router's projection and the experts (moe_decode.h, which calls route_select as well; moe_prefill.h).
#ifndef LILY_CPU_ROUTE_H
#define LILY_CPU_ROUTE_H

#include "cpu.h"
#include "vec.h"

// Σ exp(logits - top).
INLINE float route_total(const float *logits, uint32_t experts, float top) {
    lanes total = lanes_set(0);
    for (uint32_t i = 0; i < experts; i += LANES) {
        float x[LANES];
        for (uint32_t j = 0; j < LANES; j++) x[j] = i + j < experts ? logits[i + j] : -INFINITY;
        lanes v = lanes_load(x);
        UNROLL
        for (int j = 0; j < LANES / VL; j++) total.part[j] += vf_exp(v.part[j] - top);
    }
    return lanes_sum(total);
}

// The `active` greatest of softmax(logits), greatest first, ties to the lower index, with their probabilities; these are
// divided by their sum if `renorm` is set.  Selection is by the logits: distinct logits may share a rounded probability.
// NaN comes last, so that ids are always valid.
static __attribute__((unused)) void route_select(
    const float *logits, uint32_t experts, uint32_t active, uint32_t renorm, int32_t *ids, float *weights) {
    uint32_t count = 0;
    for (uint32_t e = 0; e < experts; e++) {
        float x = logits[e] == logits[e] ? logits[e] : -INFINITY;
        if (count == active && !(x > weights[count - 1])) continue;
        uint32_t at = count < active ? count++ : count - 1;
        for (; at > 0 && x > weights[at - 1]; at--) weights[at] = weights[at - 1], ids[at] = ids[at - 1];
        weights[at] = x, ids[at] = (int32_t)e;
    }
    float top = weights[0], total = 0;
    for (uint32_t a = 0; a < active; a++) {
        weights[a] = exp_one(logits[ids[a]] - top);
        total += weights[a];
    }
    if (!renorm) total = route_total(logits, experts, top);
    for (uint32_t a = 0; a < active; a++) weights[a] /= total;
}

SHARED void kernel_route_topk(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const route_topk_params *p = call->params;
    const Step *step = call->arg[route_topk_STEP];
    const float *logits = call->arg[route_topk_LOGITS];
    int32_t *ids = call->arg[route_topk_IDS];
    float *weights = call->arg[route_topk_WEIGHTS];
    (void)worker;
    for (size_t m = begin; m < end && m < (size_t)step->rows; m++)
        route_select(logits + m * (p->experts + 1), p->experts, p->active, p->renorm, ids + m * p->active,
            weights + m * p->active);
}

// A counting sort.
SHARED void kernel_route_group(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const route_group_params *p = call->params;
    const uint32_t count = (uint32_t)((const Step *)call->arg[route_group_STEP])->rows * p->active;
    const int32_t *ids = call->arg[route_group_IDS];
    int32_t *offsets = call->arg[route_group_OFFSETS], *order = call->arg[route_group_ORDER];
    int32_t *blocks = call->arg[route_group_BLOCKS];
    int32_t *next = cpu_scratch(worker, p->experts * sizeof *next);
    (void)begin, (void)end;
    memset(next, 0, p->experts * sizeof *next);
    for (uint32_t i = 0; i < count; i++) next[ids[i]]++;
    uint32_t block = 0;
    int32_t place = 0;
    for (uint32_t e = 0; e < p->experts; e++) {
        int32_t rows = next[e];
        offsets[e] = next[e] = place;
        for (int32_t at = 0; at < rows && block < p->max_blocks; at += (int32_t)p->tile_m, block++)
            blocks[2 * block] = (int32_t)e, blocks[2 * block + 1] = place + at;
        place += rows;
    }
    offsets[p->experts] = place;
    for (; block < p->max_blocks; block++) blocks[2 * block] = -1, blocks[2 * block + 1] = 0;
    for (uint32_t i = 0; i < count; i++) order[next[ids[i]]++] = (int32_t)i;
}

#endif
