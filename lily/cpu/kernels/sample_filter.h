// SPDX-License-Identifier: Apache-2.0
// sample_filter: exact top-p, min-p and top-k over the whole vocabulary.
//
// All filters keep a prefix of the ids in order of (value descending, id ascending); the shortest one counts.  It ends
// where either `ids` ids are kept or their mass reaches `mass`.  The end is found by a radix selection: first on the
// distance from the greatest value, then digit by digit on the value's bits, each time within the bucket that holds it.
//
// Not here: the penalties before and the draw after it (sample.h).
#ifndef LILY_CPU_SAMPLE_FILTER_H
#define LILY_CPU_SAMPLE_FILTER_H

#include "cpu.h"
#include "sample_common.h"
#include "vec.h"

#define SELECT_BITS 11
#define SELECT_BUCKETS (1 << SELECT_BITS)
#define DISTANCE_SCALE 64.0f // buckets per unit of log-probability
// Neighbours count in different tables, or equal values would wait for each other's additions in memory.
#define SELECT_WAYS 4
#define SELECT_TABLE (SELECT_WAYS * SELECT_BUCKETS)

typedef struct {
    const float *y;  // values
    float *e;        // exp(y - max), of all ids
    uint32_t *list;  // candidates, ascending
    uint32_t count;  // of candidates
    uint32_t differ; // bits in which their keys differ
    uint32_t ids;    // still to be kept
    double mass;     // still to be kept
    uint32_t *tally; // per way and bucket: number of ids
    double *sum;     // and their mass
} selection;

// Descending order of values as ascending order of bits.  -0 sorts as 0.
INLINE uint32_t descending_key(float x) {
    uint32_t u = (uint32_t)float_as_int(x + 0.0f);
    return u >> 31 ? u : ~u & 0x7fffffff;
}

INLINE uint32_t distance_bucket(float distance) {
    float b = distance * DISTANCE_SCALE;
    return b < SELECT_BUCKETS - 1 ? (uint32_t)b : SELECT_BUCKETS - 1;
}

INLINE void selection_clear(selection *s) {
    memset(s->tally, 0, SELECT_TABLE * sizeof *s->tally);
    memset(s->sum, 0, SELECT_TABLE * sizeof *s->sum);
}

INLINE void selection_add(selection *s, uint32_t i, uint32_t bucket, float mass) {
    uint32_t at = i % SELECT_WAYS * SELECT_BUCKETS + bucket;
    s->tally[at]++;
    s->sum[at] += mass;
}

INLINE void selection_merge(selection *s) {
    for (uint32_t i = SELECT_BUCKETS; i < SELECT_TABLE; i++) {
        s->tally[i % SELECT_BUCKETS] += s->tally[i];
        s->sum[i % SELECT_BUCKETS] += s->sum[i];
    }
}

// The bucket in which the prefix ends; what lies before it is taken off the targets.
INLINE uint32_t selection_walk(selection *s) {
    uint32_t last = SELECT_BUCKETS - 1;
    while (s->tally[last] == 0) last--;
    for (uint32_t b = 0; b < last; b++) {
        if (s->tally[b] >= s->ids || s->sum[b] >= s->mass) return b;
        s->ids -= s->tally[b], s->mass -= s->sum[b];
    }
    return last;
}

// Fills the list with the candidates of one bucket of distance from the maximum.
INLINE void selection_by_distance(selection *s, uint32_t vocab, float top, float top_p) {
    double total = 0;
    selection_clear(s);
    for (uint32_t i = 0; i < vocab; i += VL) {
        uint32_t n = vocab - i < VL ? vocab - i : VL;
        vf_store_part(s->e + i, n, vf_exp(load_ids(s->y, i, vocab, -INFINITY) - top));
        for (uint32_t j = i; j < i + n; j++) selection_add(s, j, distance_bucket(top - s->y[j]), s->e[j]);
    }
    selection_merge(s);
    for (uint32_t b = 0; b < SELECT_BUCKETS; b++) total += s->sum[b];
    if (top_p < 1) s->mass = (double)top_p * total;
    uint32_t bucket = selection_walk(s);
    for (uint32_t i = 0; i < vocab; i++) {
        s->list[s->count] = i;
        s->count += distance_bucket(top - s->y[i]) == bucket;
    }
    for (uint32_t i = 0; i < s->count; i++)
        s->differ |= descending_key(s->y[s->list[i]]) ^ descending_key(s->y[s->list[0]]);
}

// Narrows the list down to one value of the digit at `shift`.
INLINE void selection_by_digit(selection *s, int shift) {
    const uint32_t mask = SELECT_BUCKETS - 1;
    selection_clear(s);
    for (uint32_t i = 0; i < s->count; i++)
        selection_add(s, i, descending_key(s->y[s->list[i]]) >> shift & mask, s->e[s->list[i]]);
    selection_merge(s);
    uint32_t digit = selection_walk(s), count = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        uint32_t id = s->list[i];
        s->list[count] = id;
        count += (descending_key(s->y[id]) >> shift & mask) == digit;
    }
    s->count = count;
}

// The end of the prefix: (value, id).
INLINE void selection_end(selection *s, uint32_t vocab, float top, float top_p, float cut[2]) {
    selection_by_distance(s, vocab, top, top_p);
    for (int shift = 2 * SELECT_BITS; shift >= 0; shift -= SELECT_BITS)
        if (s->differ >> shift & (SELECT_BUCKETS - 1)) selection_by_digit(s, shift);
    // What is left is one value, at ascending ids.
    double keep = ceil(s->mass / s->e[s->list[0]]);
    uint32_t n = s->ids < s->count ? s->ids : s->count;
    if (keep < n) n = keep < 1 ? 1 : (uint32_t)keep;
    cut[0] = s->y[s->list[0]], cut[1] = int_as_float((int32_t)s->list[n - 1]);
}

SHARED void kernel_sample_filter(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const sample_filter_params *p = call->params;
    const Request *r = call->arg[sample_filter_REQUEST];
    const float *y = call->arg[sample_filter_Y], *stats = call->arg[sample_filter_STATS];
    const uint32_t vocab = (uint32_t)r->vocab < p->count ? (uint32_t)r->vocab : p->count;
    const int limited = r->top_k > 0 && (uint32_t)r->top_k < vocab;
    float *cut = call->arg[sample_filter_CUT], top = -INFINITY;
    (void)begin, (void)end;
    cut[0] = -INFINITY, cut[1] = int_as_float(NO_ID);
    for (uint32_t i = 0; i < p->groups; i++) top = stats[4 * i + 2] > top ? stats[4 * i + 2] : top;
    // Without a finite maximum there is nothing to choose from: `advance` reports it.
    if (r->temperature == 0 || !(top - top == 0)) return;
    if (r->top_p < 1 || limited) {
        char *memory = cpu_scratch(worker, SELECT_TABLE * (sizeof(double) + 4) + (size_t)vocab * 8);
        selection s = {.y = y, .mass = INFINITY, .ids = limited ? (uint32_t)r->top_k : vocab};
        s.sum = (double *)memory;
        s.tally = (uint32_t *)(s.sum + SELECT_TABLE);
        s.e = (float *)(s.tally + SELECT_TABLE);
        s.list = (uint32_t *)(s.e + vocab);
        selection_end(&s, vocab, top, r->top_p, cut);
    }
    if (r->min_p > 0) {
        float least = (float)((double)top + log((double)r->min_p));
        if (least > cut[0]) cut[0] = least, cut[1] = int_as_float(NO_ID);
    }
}

#endif
