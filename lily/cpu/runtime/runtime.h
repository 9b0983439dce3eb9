// SPDX-License-Identifier: Apache-2.0
// Objects behind lily_device.h that device.c, list.c, lookup.c and memory.c share.
#ifndef LILY_CPU_RUNTIME_H
#define LILY_CPU_RUNTIME_H

#include "device_common.h"
#include "pool.h"

struct lily_kernel {
    kernel_head head;
    cpu_entry entry;
    uint32_t count;
    int32_t constant[LILY_MAX_CONSTANTS];
    lily_kernel *next;
};

struct lily_buffer {
    buffer_head head;
    void *mapping;
    size_t mapping_bytes;
};

struct lily_list {
    list_head head;
    struct recorded *recorded; // until lily_list_end
    uint32_t count, capacity;
    pool_dispatch *dispatch;
    pool_phase *phase;
    uint32_t phases;
};

typedef struct {
    const char *name;
    const cpu_entry *kernels;
    uint32_t needs; // MACHINE_* features
    uint32_t worth; // features without which "auto" passes it over
} cpu_isa;

#define QUEUE_ENTRIES 4096

typedef struct {
    const lily_list *list; // NULL: a submission of no lists
    uint64_t ticket;
    bool first, last; // of its submission
} queue_entry;

struct lily_device {
    device_head head;
    const cpu_isa *isa;
    bool null, discrete;
    pool *pool;
    pthread_t driver;
    // Everything below belongs to the head's mutex.
    lily_kernel *kernels;
    pthread_cond_t work;
    bool closing;
    uint32_t first, queued;
    queue_entry queue[QUEUE_ENTRIES];
};

BEGINS_WITH_HEAD(lily_buffer);
BEGINS_WITH_HEAD(lily_kernel);
BEGINS_WITH_HEAD(lily_list);
BEGINS_WITH_HEAD(lily_device);

// isa.c.  The path called `name`, or for "auto" the best one that the machine has; NULL with the error text.
const cpu_isa *isa_choose(const char *name);
void isa_names(char *out, size_t bytes); // that this machine can run, best first, separated by commas

#endif
