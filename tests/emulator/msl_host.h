// SPDX-License-Identifier: Apache-2.0
// Metal's standard library for kernels that run on the emulator: what lily/msl/host.py includes first.
#pragma once
#include "msl_math.h"
#include "msl_runtime.h"

#define MSL_HERE MslSite site = {__builtin_FILE(), __builtin_LINE(), __builtin_COLUMN()}
#define MSL_NOINLINE __attribute__((noinline))
#define MSL_NOSANITIZE __attribute__((no_sanitize("thread"))) // for what touches only lanes' own operands
// Not a constant expression, as in Metal, yet known to the optimiser.
#define MSL_DEFINE_CONSTANT(type, name, value) \
    static inline type msl_value_of_##name() { return (type)(value); } \
    static const type name = msl_value_of_##name()
#define MSL_UNDEFINED_CONSTANT(type, name) extern const type name
#define MSL_THREADGROUP(type, name, align) \
    static const char msl_key_of_##name = 0; \
    type &name = *(type *)msl_slot(&msl_key_of_##name, sizeof(type), align)
// The address space, which means nothing to this machine, keeps the sanitizer from looking at these stores.
#ifdef MSL_COVERAGE
extern "C" MSL_EXPORT unsigned char msl_covered[];
#define MSL_COVER(n) (void)(*(__attribute__((address_space(1))) unsigned char *)(msl_covered + (n)) = 1)
#define MSL_COVERED(n) unsigned char msl_covered[n + 1];
#else
#define MSL_COVER(n)
#define MSL_COVERED(n)
#endif

#include "msl_atomic.h"
#include "msl_simd.h"

#include "msl_matrix.h"
#include "msl_tensor.h"

#include "msl_bind.h"
