// SPDX-License-Identifier: Apache-2.0
// What the sampling kernels share: ids as bits, the range of ids of a group, loads that end with the vocabulary.
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

#endif
