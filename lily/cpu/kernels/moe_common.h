// SPDX-License-Identifier: Apache-2.0
// What the experts' kernels of both phases share: where an expert's matrices lie, and the sum over experts.
#ifndef LILY_CPU_MOE_COMMON_H
#define LILY_CPU_MOE_COMMON_H

#include "product.h"

INLINE size_t padded_bytes(const quantised *w, uint32_t n) { return blocks_of(n) * block_bytes(w); }

INLINE vf add_expert(vf sum, float weight, vf y) { return sum + vf_set(weight) * y; }

INLINE vf add_shared(vf sum, float gate, vf shared, vf x) { return (sum + vf_set(gate) * shared) + x; }

#endif
