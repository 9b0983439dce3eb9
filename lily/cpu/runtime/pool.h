// SPDX-License-Identifier: Apache-2.0
// Threads that run dispatches in ranges of groups.  One thread, the driver, calls pool_run and works along as worker 0;
// the pool owns the others.
// Not handled: queues, tickets, recording (device.c, list.c).
#ifndef LILY_CPU_POOL_H
#define LILY_CPU_POOL_H

#include "../kernels/cpu.h"

#define POOL_MAX_THREADS 256

typedef struct {
    cpu_kernel *run;
    cpu_call call;
    uint32_t groups;
    uint32_t chunks; // pool_chunks(): equal ranges of the groups, each the work of one claim
} pool_dispatch;

// Dispatches that may run at the same time.
typedef struct {
    const pool_dispatch *dispatch;
    uint32_t count;
    uint32_t chunks; // of all dispatches, at most POOL_MAX_CHUNKS
} pool_phase;

#define POOL_MAX_CHUNKS 0xffff

typedef struct pool pool;

pool *pool_new(uint32_t threads); // driver included; NULL with errno set
void pool_free(pool *);
uint32_t pool_threads(const pool *);
uint32_t pool_chunks(uint32_t threads, uint32_t groups, uint32_t grain);

// Prepares the calling thread for kernels; the driver calls it once.
void pool_enter_thread(void);

// Runs a phase to its end.  Always from the same thread.  Returns 0, or how many bytes of scratch memory a kernel asked for
// in vain: what the phase should have written is undefined then.
size_t pool_run(pool *, const pool_phase *);

#endif
