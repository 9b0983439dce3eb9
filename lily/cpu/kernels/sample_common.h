// SPDX-License-Identifier: Apache-2.0
// What the sampling kernels share: ids as bits, the range of ids of a group, loads that end with the vocabulary, sums of
// exponentials.
#ifndef LILY_CPU_SAMPLE_COMMON_H
#define LILY_CPU_SAMPLE_COMMON_H

#include "cpu.h"
#include "vec.h"

// In the place of an id: there is none.
#define NO_ID INT32_MAX

INLINE float int_as_float(int32_t i) {
    float f;
    memcpy(&f, &i, sizeof f);
    return f;
}

INLINE int32_t float_as_int(float f) {
    int32_t i;
    memcpy(&i, &f, sizeof i);
    return i;
}

// Ids from <= id < to: group `group` of the sampler's grid.
typedef struct {
    uint32_t from, to;
} id_range;

INLINE id_range slice_of(uint32_t group, uint32_t slice, const Request *request) {
    uint64_t vocab = (uint64_t)request->vocab, from = (uint64_t)group * slice, to = from + slice;
    if (from > vocab) from = vocab;
    return (id_range){(uint32_t)from, (uint32_t)(to < vocab ? to : vocab)};
}

// x[i] for VL ids from i on, `fill` from `to` on.
INLINE vf load_ids(const float *x, uint32_t i, uint32_t to, float fill) {
    return to - i >= VL ? vf_load(x + i) : vf_load_part(x + i, to - i, fill);
}

INLINE vi not_finite(vf x) { return ((vi)x & 0x7f800000) == 0x7f800000; }

// ---- sums of exponentials -------------------------------------------------------------------------------------------

INLINE float max_of(const float *x, uint32_t from, uint32_t to) {
    lanes top = lanes_set(-INFINITY);
    for (uint32_t i = from; i < to; i += VL) top.part[0] = vf_max(load_ids(x, i, to, -INFINITY), top.part[0]);
    return lanes_max(top);
}

// Σ exp(x - top), in float32 over stretches of at most EXP_STRETCH ids, which are added up in double.  0 of nothing.
#define EXP_STRETCH 1024

INLINE double exp_total(const float *x, uint32_t from, uint32_t to, float top) {
    double total = 0;
    if (top == -INFINITY) return 0;
    while (from < to) {
        uint32_t stop = to - from < EXP_STRETCH ? to : from + EXP_STRETCH;
        lanes sum = lanes_set(0);
        for (; from < stop; from += LANES) {
            UNROLL
            for (uint32_t j = 0; j < LANES / VL; j++)
                if (from + j * VL < stop) sum.part[j] += vf_exp(load_ids(x, from + j * VL, stop, -INFINITY) - top);
        }
        total += lanes_sum(sum);
        from = stop;
    }
    return total;
}

// log Σ exp from per-group (maximum, sum) pairs, `pitch` floats apart.
INLINE double log_sum_exp(const float *stats, uint32_t groups, uint32_t pitch) {
    float top = -INFINITY;
    double total = 0;
    for (uint32_t i = 0; i < groups; i++)
        if (stats[i * pitch] > top) top = stats[i * pitch];
    for (uint32_t i = 0; i < groups; i++)
        if (stats[i * pitch + 1] > 0) total += stats[i * pitch + 1] * exp((double)stats[i * pitch] - top);
    return (double)top + log(total);
}

#endif
