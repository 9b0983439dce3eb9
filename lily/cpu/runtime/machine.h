// SPDX-License-Identifier: Apache-2.0
// What the CPU device asks of the machine: instruction sets, usable processors, memory, time, denormals.
// Not handled: processors that differ within one machine beyond Apple's performance and efficiency cores.
#ifndef LILY_CPU_MACHINE_H
#define LILY_CPU_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

enum {
    MACHINE_AVX2 = 1,
    MACHINE_AVX512 = 2,
    MACHINE_AVX512BF16 = 4,
    MACHINE_FAST_BF16 = 8, // its dot product is no slower than two float32 multiply-adds
    MACHINE_AMX = 16,
    MACHINE_NEON = 32
};

uint32_t machine_features(void);    // MACHINE_* that both processor and operating system support
uint32_t machine_processors(void);  // this process may use: affinity and cgroup; Apple: performance cores
uint64_t machine_memory(void);      // bytes, cgroup limit included; 0 if unknown
uint64_t machine_nanoseconds(void); // monotonic
void machine_flush_denormals(void); // for the calling thread, results and operands
void machine_pause(void);           // in a spin loop

#endif
