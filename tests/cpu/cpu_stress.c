// SPDX-License-Identifier: Apache-2.0
// The CPU device's runtime under load, for a sanitizer: the real device.c, list.c, pool.c and so on with two kernels of
// this file, which check that barriers order dispatches, that every group runs once and that scratch memory is private.
// Usage: cpu_stress SUBMISSIONS.  Prints nothing and returns 0 when all is well.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../lily/cpu/kernels/cpu.h"
#include "lily_device.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) fprintf(stderr, "line %d: %s is false\n", __LINE__, #condition), abort(); \
    } while (0)

#define GROUPS 500

// Group i: dst[i] = src[GROUPS-1-i] + 1.  Not atomic, so that a missing barrier is a race.
static void reverse_add(const cpu_call *call, uint32_t begin, uint32_t end, cpu_worker *worker) {
    const uint32_t *src = call->arg[copy_SRC];
    uint32_t *dst = call->arg[copy_DST], *row = cpu_scratch(worker, (end - begin) * sizeof *row);
    int ready;
    uint32_t *seen = cpu_prepared(worker, begin % 2, 64 + begin % 7, &ready);
    if (ready)
        CHECK(*seen == begin % 2);
    else
        *seen = begin % 2;
    for (uint32_t i = begin; i < end; i++) row[i - begin] = src[GROUPS - 1 - i] + 1;
    memcpy(dst + begin, row, (end - begin) * sizeof *row);
}

#define LIST_OF(name) const cpu_entry name[] = {{"copy", reverse_add, 1}, {NULL, NULL, 0}};
LIST_OF(cpu_kernels_portable)
LIST_OF(cpu_kernels_avx2)
LIST_OF(cpu_kernels_avx512)
LIST_OF(cpu_kernels_avx512bf16)
LIST_OF(cpu_kernels_amx)
LIST_OF(cpu_kernels_neon)

typedef struct {
    lily_device *device;
    lily_buffer *buffer;
    lily_list *list;
    uint32_t steps;
} chain;

// `steps` dispatches, each reading the region that the one before wrote; every third level has two dispatches.
static chain make_chain(lily_device *device, uint32_t steps) {
    chain c = {.device = device, .steps = steps};
    const uint64_t region = 2048; // of GROUPS words
    CHECK(!lily_buffer_new(device, 4 * region, 1, &c.buffer));
    lily_kernel *kernel;
    CHECK(!lily_kernel_get(device, "copy", NULL, 0, &kernel));
    CHECK(!lily_list_new(device, &c.list));
    const uint32_t grid[3] = {GROUPS, 1, 1};
    const copy_params params = {0};
    for (uint32_t s = 0; s < steps; s++) {
        const lily_arg args[2] = {{c.buffer, s % 2 * region}, {c.buffer, (s + 1) % 2 * region}};
        CHECK(!lily_list_dispatch(c.list, kernel, args, 2, &params, sizeof params, grid, grid, 1));
        const lily_arg beside[2] = {{c.buffer, s % 2 * region}, {c.buffer, 2 * region}};
        if (s % 3 == 0) CHECK(!lily_list_dispatch(c.list, kernel, beside, 2, &params, sizeof params, grid, grid, 0));
    }
    CHECK(!lily_list_end(c.list));
    return c;
}

typedef struct {
    lily_device *device;
    uint64_t last;
} waiter;

static void *wait_for_each(void *argument) {
    const waiter *w = argument;
    for (uint64_t t = 1; t <= w->last; t++) {
        int code;
        while ((code = lily_wait(w->device, t, 200000)) == LILY_ETIMEOUT || code == LILY_EINVAL) {
        }
        CHECK(code == LILY_OK);
        CHECK(lily_completed(w->device) >= t);
        lily_seconds(w->device, t);
    }
    return NULL;
}

static void stress(const char *options, uint32_t submissions) {
    lily_device *device;
    char error[256];
    CHECK(!lily_open(options, &device, error, sizeof error));
    chain a = make_chain(device, 20), b = make_chain(device, 7);
    waiter w = {device, submissions};
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, wait_for_each, &w);
    uint32_t runs = 0;
    uint64_t ticket = 0;
    for (uint32_t i = 0; i < submissions; i++) {
        lily_list *lists[3] = {a.list, b.list, a.list};
        CHECK(!lily_submit(device, lists, i % 4, &ticket));
        runs += i % 4 == 0 ? 0 : i % 4 == 3 ? 2 : 1;
        if (i % 50 == 49) CHECK(!lily_wait(device, ticket, UINT64_MAX)); // the workers may fall asleep
    }
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    // An even number of reversals: every word has grown by one per dispatch of the chain.
    const uint32_t *words = lily_buffer_contents(a.buffer);
    for (int i = 0; i < GROUPS; i++) CHECK(words[i] == runs * a.steps);
    CHECK(!lily_submit(device, &b.list, 1, &ticket));
    lily_close(device); // with work in the queue
    chain both[2] = {a, b};
    for (int i = 0; i < 2; i++) {
        lily_list_free(both[i].list);
        lily_buffer_free(both[i].buffer);
    }
}

static void *stress_thread(void *argument) {
    stress("threads=3", *(uint32_t *)argument);
    return NULL;
}

int main(int count, char **arguments) {
    uint32_t submissions = count > 1 ? (uint32_t)atoi(arguments[1]) : 200;
    for (int threads = 1; threads <= 8; threads *= 2) {
        char options[32];
        snprintf(options, sizeof options, "threads=%d", threads);
        stress(options, submissions);
    }
    pthread_t devices[3]; // several at once
    for (int i = 0; i < 3; i++) pthread_create(&devices[i], NULL, stress_thread, &submissions);
    for (int i = 0; i < 3; i++) pthread_join(devices[i], NULL);
    return 0;
}
