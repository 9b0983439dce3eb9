// SPDX-License-Identifier: Apache-2.0
// Conversions to bfloat16 that clang calls and libgcc 12 lacks: to nearest, ties to even, NaN stays NaN.
#include "msl_runtime.h"

#include <string.h>

static __bf16 rounded(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    uint16_t h;
    if ((u & 0x7fffffff) > 0x7f800000)
        h = (uint16_t)(u >> 16 | 0x40);
    else
        h = (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
    __bf16 r;
    memcpy(&r, &h, 2);
    return r;
}

extern "C" MSL_EXPORT __bf16 __truncsfbf2(float f) { return rounded(f); }
extern "C" MSL_EXPORT __bf16 __truncdfbf2(double d) { return rounded((float)d); }
