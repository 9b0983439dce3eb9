// SPDX-License-Identifier: Apache-2.0
// What the kernels of the CPU device and its runtime (runtime/device.c, pool.c) share.
//
// A dispatch is a grid of groups.  The pool gives each worker ranges of the linear group index
// x + grid[0]*(y + grid[1]*z); a kernel must compute a group the same way whatever range it comes in.
#ifndef LILY_CPU_H
#define LILY_CPU_H

#include <stddef.h>
#include <stdint.h>

#include "kernel_params.h"

typedef struct {
    void *const *arg;        // buffers in the order of the kernel table
    const void *params;      // struct NAME_params
    const int32_t *constant; // in the order of the kernel table
    uint32_t grid[3];
} cpu_call;

typedef struct cpu_worker cpu_worker; // one per thread of the pool

// The worker's scratch memory: 64-byte aligned, at least `bytes`, contents undefined; valid until the next call of
// cpu_scratch by the same worker, so a kernel asks once and divides it up.  When memory is exhausted this does not return:
// the kernel ends there and its submission fails.  So kernels hold nothing that has to be given back.
void *cpu_scratch(cpu_worker *, size_t bytes);

// A second scratch memory, which survives between the ranges of one dispatch on one worker.  `*ready` is 1 when it still
// holds what this worker left there under the same `tag` in an earlier range of the running dispatch: what all groups
// need (a normalised row, packed activations) is prepared once per worker.  Independent of cpu_scratch.
void *cpu_prepared(cpu_worker *, uint64_t tag, size_t bytes, int *ready);

typedef void cpu_kernel(const cpu_call *, uint32_t begin, uint32_t end, cpu_worker *);

typedef struct {
    const char *name;
    cpu_kernel *run;
    // Least number of groups that are worth a range of their own (0 = 1): keeps tiny groups together.
    uint32_t grain;
} cpu_entry;

// Per instruction set, all kernels; ends with a NULL name.
extern const cpu_entry cpu_kernels_portable[], cpu_kernels_avx2[], cpu_kernels_avx512[], cpu_kernels_avx512bf16[],
    cpu_kernels_amx[], cpu_kernels_neon[];

#endif
