// SPDX-License-Identifier: Apache-2.0
// The CPU device: opening, the submission queue and its driver thread.
// Submissions run one after the other on the driver thread and the pool that it drives; the host only waits.
// A kernel fails only for want of scratch memory (pool.h).  Not handled: use of a device from a forked process (LILY_ELOST).
#define _POSIX_C_SOURCE 200809L // pthread_sigmask
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"
#include "runtime.h"

// ---- options ----------------------------------------------------------------------------------------------------------

typedef struct {
    uint32_t threads;
    char isa[32];
    bool null, discrete;
} open_options;

static int parse_switch(const char *name, const char *text, bool *on) {
    if (strcmp(text, "0") && strcmp(text, "1"))
        return device_fail(LILY_EINVAL, "option %s is \"%s\"; allowed: 0, 1", name, text);
    *on = text[0] == '1';
    return LILY_OK;
}

static int parse_option(open_options *o, const char *line, int length) {
    const char *equals = memchr(line, '=', length);
    if (!equals) return device_fail(LILY_EINVAL, "option \"%.*s\" is not of the form key=value", length, line);
    const int key = (int)(equals - line), value = length - key - 1;
    char text[32];
    if (value < 1 || value >= (int)sizeof text)
        return device_fail(LILY_EINVAL, "option %.*s has a value of %d characters; allowed: 1 to 31", key, line, value);
    memcpy(text, equals + 1, value);
    text[value] = 0;
    if (key == 7 && !memcmp(line, "threads", 7)) {
        char *end;
        const long n = strtol(text, &end, 10);
        if (*end || n < 1 || n > POOL_MAX_THREADS)
            return device_fail(LILY_EINVAL, "option threads is \"%s\"; allowed: 1 to %d", text, POOL_MAX_THREADS);
        o->threads = (uint32_t)n;
    } else if (key == 3 && !memcmp(line, "isa", 3)) {
        memcpy(o->isa, text, (size_t)value + 1);
    } else if (key == 4 && !memcmp(line, "null", 4)) {
        return parse_switch("null", text, &o->null);
    } else if (key == 8 && !memcmp(line, "discrete", 8)) {
        return parse_switch("discrete", text, &o->discrete);
    } else {
        return device_fail(
            LILY_EINVAL, "the cpu device has no option \"%.*s\"; it has: threads, isa, null, discrete", key, line);
    }
    return LILY_OK;
}

static int parse_options(open_options *o, const char *text) {
    while (text && *text) {
        const int length = (int)strcspn(text, "\n");
        const int code = length ? parse_option(o, text, length) : LILY_OK;
        if (code) return code;
        text += length;
        text += *text == '\n';
    }
    const char *forced = getenv("LILY_CPU");
    if (!strcmp(o->isa, "auto") && forced && *forced) snprintf(o->isa, sizeof o->isa, "%s", forced);
    if (!o->threads) {
        o->threads = machine_processors();
        if (o->threads > POOL_MAX_THREADS) o->threads = POOL_MAX_THREADS;
    }
    return LILY_OK;
}

// ---- the driver -------------------------------------------------------------------------------------------------------

// 0, or the bytes of scratch memory that were missing.
static size_t run_list(lily_device *device, const lily_list *list) {
    size_t missing = 0;
    if (device->null || !list) return 0;
    for (uint32_t i = 0; i < list->phases && !missing; i++) missing = pool_run(device->pool, &list->phase[i]);
    return missing;
}

// With the mutex held.  `missing`: bytes of scratch memory, 0 for success.
static void finish(lily_device *d, uint64_t ticket, double seconds, size_t missing) {
    char error[160] = "";
    if (missing)
        snprintf(error, sizeof error,
            "no memory left for %zu bytes of a kernel's scratch; close other programs, or use fewer threads", missing);
    device_finish(&d->head, ticket, seconds, missing ? LILY_ENOMEM : LILY_OK, error);
}

static void *drive(void *argument) {
    lily_device *d = argument;
    uint64_t start = 0;
    size_t missing = 0;
    pool_enter_thread();
    pthread_mutex_lock(&d->head.mutex);
    for (;;) {
        while (!d->queued && !d->closing) pthread_cond_wait(&d->work, &d->head.mutex);
        if (!d->queued) break;
        const queue_entry entry = d->queue[d->first];
        pthread_mutex_unlock(&d->head.mutex);
        if (entry.first) start = device_nanoseconds(), missing = 0;
        if (!missing) missing = run_list(d, entry.list);
        const double seconds = (double)(device_nanoseconds() - start) * 1e-9;
        pthread_mutex_lock(&d->head.mutex);
        d->first = (d->first + 1) % QUEUE_ENTRIES;
        d->queued--;
        if (entry.last) finish(d, entry.ticket, seconds, missing);
    }
    pthread_mutex_unlock(&d->head.mutex);
    return NULL;
}

// ---- open and close ---------------------------------------------------------------------------------------------------

// Signals are for the host's threads.
static int start_threads(lily_device *d, uint32_t threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    d->pool = pool_new(threads);
    int code = d->pool ? pthread_create(&d->driver, NULL, drive, d) : errno;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code && d->pool) pool_free(d->pool);
    if (code)
        return device_fail(
            LILY_EFAILED, "could not start %u threads: %s; ask for fewer (option threads)", threads, strerror(code));
    return LILY_OK;
}

static int open_device(const char *options, lily_device **out) {
    open_options o = {.isa = "auto"};
    const int code = parse_options(&o, options);
    if (code) return code;
    const cpu_isa *isa = isa_choose(o.isa);
    if (!isa) return LILY_EINVAL;
    lily_device *d = calloc(1, sizeof *d);
    if (!d) return device_fail(LILY_ENOMEM, "no memory left for a device");
    d->isa = isa;
    d->null = o.null;
    d->discrete = o.discrete;
    device_init(&d->head);
    device_init_condition(&d->work);
    const int started = start_threads(d, o.threads);
    if (started) {
        device_destroy(&d->head);
        pthread_cond_destroy(&d->work);
        free(d);
        return started;
    }
    *out = d;
    return LILY_OK;
}

int lily_open(const char *options, lily_device **out, char *error, size_t error_bytes) {
    const int code = out ? open_device(options, out) : device_fail(LILY_EINVAL, "lily_open: no place for the result");
    return device_opened(code, error, error_bytes);
}

void lily_close(lily_device *d) {
    if (!d) return;
    // In a forked process there are no threads to join, and the locks may be held by threads that do not exist.
    if (!device_forked(d)) {
        pthread_mutex_lock(&d->head.mutex);
        d->closing = true;
        pthread_cond_signal(&d->work);
        pthread_mutex_unlock(&d->head.mutex);
        pthread_join(d->driver, NULL);
        pool_free(d->pool);
        pthread_cond_destroy(&d->work);
        device_destroy(&d->head);
    }
    for (lily_kernel *k = d->kernels, *next; k; k = next) {
        next = k->next;
        free(k);
    }
    free(d);
}

int lily_info(lily_device *d, char *out, size_t bytes) {
    char paths[128];
    isa_names(paths, sizeof paths);
    const int length = snprintf(out, bytes, "name=cpu\nisa=%s\nisas=%s\nthreads=%u\nmemory=%llu\nnull=%d\n",
        d->isa->name, paths, pool_threads(d->pool), (unsigned long long)machine_memory(), d->null);
    return device_told(length, bytes);
}

// ---- submission -------------------------------------------------------------------------------------------------------

static void push(lily_device *d, const lily_list *list, bool first, bool last) {
    d->queue[(d->first + d->queued++) % QUEUE_ENTRIES] = (queue_entry){list, d->head.submitted, first, last};
}

int lily_submit(lily_device *d, lily_list *const *lists, uint32_t count, uint64_t *ticket) {
    const int code = device_check_submission(d, lists, count);
    if (code) return code;
    pthread_mutex_lock(&d->head.mutex);
    const uint32_t room = QUEUE_ENTRIES - d->queued, needed = count ? count : 1;
    if (needed <= room) {
        d->head.submitted++;
        if (ticket) *ticket = d->head.submitted;
        if (!count) push(d, NULL, true, true);
        for (uint32_t i = 0; i < count; i++) push(d, lists[i], i == 0, i + 1 == count);
        pthread_cond_signal(&d->work);
    }
    pthread_mutex_unlock(&d->head.mutex);
    if (needed <= room) return LILY_OK;
    return device_fail(LILY_EFAILED,
        "the queue holds %u lists and %u more do not fit in its %u places; wait for a ticket first",
        QUEUE_ENTRIES - room, needed, QUEUE_ENTRIES);
}
