// SPDX-License-Identifier: Apache-2.0
// Objects behind lily_device.h that device.c, list.c, lookup.c and memory.c share.
#ifndef LILY_CPU_RUNTIME_H
#define LILY_CPU_RUNTIME_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "lily_device.h"
#include "pool.h"

// One row of the kernel table as C knows it.
typedef struct {
    const char *name;
    uint32_t args;
    const char *constants; // names, separated by blanks
    uint32_t param_bytes;
} kernel_row;

struct lily_kernel {
    const kernel_row *row;
    cpu_entry entry;
    lily_device *device;
    uint32_t count;
    int32_t constant[LILY_MAX_CONSTANTS];
    lily_kernel *next;
};

struct lily_buffer {
    unsigned char *contents;
    uint64_t bytes;
    void *mapping;
    size_t mapping_bytes;
};

struct lily_list {
    lily_device *device;
    struct recorded *recorded; // until lily_list_end
    uint32_t count, capacity;
    pool_dispatch *dispatch;
    pool_phase *phase;
    uint32_t phases;
    bool ended;
};

typedef struct {
    const char *name;
    const cpu_entry *kernels;
    uint32_t needs; // MACHINE_* features
    uint32_t worth; // features without which "auto" passes it over
} cpu_isa;

// A submission whose kernels found no memory for their scratch.
typedef struct {
    uint64_t ticket; // 0: none, or reported
    size_t bytes;
} queue_failure;

#define QUEUE_ENTRIES 4096
#define TIMED_TICKETS 64

typedef struct {
    const lily_list *list; // NULL: a submission of no lists
    uint64_t ticket;
    bool first, last; // of its submission
} queue_entry;

struct lily_device {
    const cpu_isa *isa;
    bool null;
    long process; // that opened the device; its threads do not exist in a forked one
    pool *pool;
    pthread_t driver;
    pthread_mutex_t mutex; // of all below
    lily_kernel *kernels;
    pthread_cond_t work, finished;
    bool closing;
    uint64_t submitted;
    _Atomic uint64_t completed;
    uint32_t head, queued;
    queue_entry queue[QUEUE_ENTRIES];
    double seconds[TIMED_TICKETS];
    atomic_uint failures; // not reported yet
    queue_failure failed[TIMED_TICKETS];
};

// Sets this thread's error text and returns `code`.
int cpu_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// isa.c.  The path called `name`, or for "auto" the best one that the machine has; NULL: `error` says why.
const cpu_isa *isa_choose(const char *name, char *error, size_t error_bytes);
void isa_names(char *out, size_t bytes); // that this machine can run, best first, separated by commas

#endif
