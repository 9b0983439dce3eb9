// SPDX-License-Identifier: Apache-2.0
// The CPU device: opening, the submission queue and its driver thread, tickets, errors.
// Submissions run one after the other on the driver thread and the pool that it drives; the host only waits.
// A kernel fails only for want of scratch memory (pool.h).  Not handled: use of a device from a forked process (LILY_ELOST).
#if defined(__linux__)
#define _GNU_SOURCE // pthread_condattr_setclock
#elif defined(__APPLE__)
#define _DARWIN_C_SOURCE // pthread_cond_timedwait_relative_np
#endif
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "machine.h"
#include "runtime.h"

static _Thread_local char error_text[512];

int cpu_fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return code;
}

// Each thread sees the text of its own last failed call.
const char *lily_error(lily_device *device) {
    (void)device;
    return error_text;
}

uint32_t lily_abi_version(void) { return LILY_ABI_VERSION; }

// ---- options ----------------------------------------------------------------------------------------------------------

typedef struct {
    uint32_t threads;
    char isa[32];
    bool null;
} open_options;

static int parse_option(open_options *o, const char *line, int length) {
    const char *equals = memchr(line, '=', length);
    if (!equals) return cpu_fail(LILY_EINVAL, "option \"%.*s\" is not of the form key=value", length, line);
    const int key = (int)(equals - line), value = length - key - 1;
    char text[32];
    if (value < 1 || value >= (int)sizeof text)
        return cpu_fail(LILY_EINVAL, "option %.*s has a value of %d characters; allowed: 1 to 31", key, line, value);
    memcpy(text, equals + 1, value);
    text[value] = 0;
    if (key == 7 && !memcmp(line, "threads", 7)) {
        char *end;
        const long n = strtol(text, &end, 10);
        if (*end || n < 1 || n > POOL_MAX_THREADS)
            return cpu_fail(LILY_EINVAL, "option threads is \"%s\"; allowed: 1 to %d", text, POOL_MAX_THREADS);
        o->threads = (uint32_t)n;
    } else if (key == 3 && !memcmp(line, "isa", 3)) {
        memcpy(o->isa, text, (size_t)value + 1);
    } else if (key == 4 && !memcmp(line, "null", 4)) {
        if (strcmp(text, "0") && strcmp(text, "1"))
            return cpu_fail(LILY_EINVAL, "option null is \"%s\"; allowed: 0, 1", text);
        o->null = text[0] == '1';
    } else {
        return cpu_fail(LILY_EINVAL, "the cpu device has no option \"%.*s\"; it has: threads, isa, null", key, line);
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

static void note_failure(lily_device *d, uint64_t ticket, size_t bytes) {
    queue_failure *f = &d->failed[ticket % TIMED_TICKETS];
    if (!f->ticket) atomic_fetch_add(&d->failures, 1);
    *f = (queue_failure){ticket, bytes};
}

static void *drive(void *argument) {
    lily_device *d = argument;
    uint64_t start = 0;
    size_t missing = 0;
    pool_enter_thread();
    pthread_mutex_lock(&d->mutex);
    for (;;) {
        while (!d->queued && !d->closing) pthread_cond_wait(&d->work, &d->mutex);
        if (!d->queued) break;
        const queue_entry entry = d->queue[d->head];
        pthread_mutex_unlock(&d->mutex);
        if (entry.first) start = machine_nanoseconds(), missing = 0;
        if (!missing) missing = run_list(d, entry.list);
        const uint64_t end = machine_nanoseconds();
        pthread_mutex_lock(&d->mutex);
        d->head = (d->head + 1) % QUEUE_ENTRIES;
        d->queued--;
        if (entry.last) {
            d->seconds[entry.ticket % TIMED_TICKETS] = (double)(end - start) * 1e-9;
            if (missing) note_failure(d, entry.ticket, missing);
            atomic_store(&d->completed, entry.ticket);
            pthread_cond_broadcast(&d->finished);
        }
    }
    pthread_mutex_unlock(&d->mutex);
    return NULL;
}

// ---- open and close ---------------------------------------------------------------------------------------------------

// The clock of timed waits must not jump.
static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

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
        return cpu_fail(
            LILY_EFAILED, "could not start %u threads: %s; ask for fewer (option threads)", threads, strerror(code));
    return LILY_OK;
}

static int open_device(const char *options, lily_device **out) {
    open_options o = {.isa = "auto"};
    const int code = parse_options(&o, options);
    if (code) return code;
    const cpu_isa *isa = isa_choose(o.isa, error_text, sizeof error_text);
    if (!isa) return LILY_EINVAL;
    lily_device *d = calloc(1, sizeof *d);
    if (!d) return cpu_fail(LILY_ENOMEM, "no memory left for a device");
    d->isa = isa;
    d->null = o.null;
    d->process = (long)getpid();
    pthread_mutex_init(&d->mutex, NULL);
    init_condition(&d->work);
    init_condition(&d->finished);
    const int started = start_threads(d, o.threads);
    if (started) {
        free(d);
        return started;
    }
    *out = d;
    return LILY_OK;
}

int lily_open(const char *options, lily_device **out, char *error, size_t error_bytes) {
    const int code = out ? open_device(options, out) : cpu_fail(LILY_EINVAL, "lily_open: no place for the result");
    if (error && error_bytes) snprintf(error, error_bytes, "%s", code ? error_text : "");
    return code;
}

static bool forked(const lily_device *d) { return d->process != (long)getpid(); }

void lily_close(lily_device *d) {
    if (!d) return;
    // In a forked process there are no threads to join, and the locks may be held by threads that do not exist.
    if (!forked(d)) {
        pthread_mutex_lock(&d->mutex);
        d->closing = true;
        pthread_cond_signal(&d->work);
        pthread_mutex_unlock(&d->mutex);
        pthread_join(d->driver, NULL);
        pool_free(d->pool);
        pthread_cond_destroy(&d->finished);
        pthread_cond_destroy(&d->work);
        pthread_mutex_destroy(&d->mutex);
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
    if (length >= 0 && (size_t)length < bytes) return LILY_OK;
    return cpu_fail(LILY_EINVAL, "lily_info needs room for %d bytes, it got %zu", length + 1, bytes);
}

// ---- submission and waiting -------------------------------------------------------------------------------------------

static int lost(const lily_device *d) {
    return cpu_fail(
        LILY_ELOST, "this device belongs to process %ld, which forked; open a device in this process", d->process);
}

static void push(lily_device *d, const lily_list *list, bool first, bool last) {
    d->queue[(d->head + d->queued++) % QUEUE_ENTRIES] = (queue_entry){list, d->submitted, first, last};
}

int lily_submit(lily_device *d, lily_list *const *lists, uint32_t count, uint64_t *ticket) {
    if (!d || (count && !lists)) return cpu_fail(LILY_EINVAL, "lily_submit: an argument is null");
    if (forked(d)) return lost(d);
    for (uint32_t i = 0; i < count; i++) {
        if (!lists[i] || !lists[i]->ended) return cpu_fail(LILY_EINVAL, "list %u of the submission was not ended", i);
        if (lists[i]->device != d)
            return cpu_fail(LILY_EINVAL, "list %u of the submission belongs to another device", i);
    }
    pthread_mutex_lock(&d->mutex);
    const uint32_t room = QUEUE_ENTRIES - d->queued, needed = count ? count : 1;
    if (needed <= room) {
        d->submitted++;
        if (ticket) *ticket = d->submitted;
        if (!count) push(d, NULL, true, true);
        for (uint32_t i = 0; i < count; i++) push(d, lists[i], i == 0, i + 1 == count);
        pthread_cond_signal(&d->work);
    }
    pthread_mutex_unlock(&d->mutex);
    if (needed <= room) return LILY_OK;
    return cpu_fail(LILY_EFAILED,
        "the queue holds %u lists and %u more do not fit in its %u places; wait for a ticket first",
        QUEUE_ENTRIES - room, needed, QUEUE_ENTRIES);
}

uint64_t lily_completed(lily_device *d) { return atomic_load(&d->completed); }

// Waits for the condition or until `end`; true when time is up.
static bool wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t end) {
    const uint64_t now = machine_nanoseconds();
    if (now >= end) return true;
#if defined(__APPLE__)
    const uint64_t at = end - now;
#else
    const uint64_t at = end;
#endif
    const struct timespec t = {.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
#if defined(__APPLE__)
    pthread_cond_timedwait_relative_np(condition, mutex, &t);
#else
    pthread_cond_timedwait(condition, mutex, &t);
#endif
    return false;
}

// How a finished ticket ended.
static int outcome(lily_device *d, uint64_t ticket) {
    queue_failure *f = &d->failed[ticket % TIMED_TICKETS];
    if (!ticket || f->ticket != ticket) return LILY_OK;
    f->ticket = 0;
    atomic_fetch_sub(&d->failures, 1);
    return cpu_fail(LILY_ENOMEM,
        "no memory left for %zu bytes of a kernel's scratch; close other programs, or use fewer threads", f->bytes);
}

int lily_wait(lily_device *d, uint64_t ticket, uint64_t timeout_ns) {
    if (!d) return cpu_fail(LILY_EINVAL, "lily_wait: no device");
    if (ticket <= atomic_load(&d->completed) && !atomic_load(&d->failures)) return LILY_OK;
    if (forked(d)) return lost(d);
    const uint64_t longest = (uint64_t)1 << 62; // fits a time_t after the division
    const uint64_t end = machine_nanoseconds() + (timeout_ns < longest ? timeout_ns : longest);
    int code = LILY_OK;
    pthread_mutex_lock(&d->mutex);
    if (ticket > d->submitted)
        code = cpu_fail(LILY_EINVAL, "ticket %llu was never given; the last one is %llu", (unsigned long long)ticket,
            (unsigned long long)d->submitted);
    while (!code && atomic_load(&d->completed) < ticket) {
        if (wait_until(&d->finished, &d->mutex, end))
            code = cpu_fail(LILY_ETIMEOUT, "ticket %llu did not finish within %.3f s; the last finished one is %llu",
                (unsigned long long)ticket, (double)timeout_ns * 1e-9, (unsigned long long)atomic_load(&d->completed));
    }
    if (!code) code = outcome(d, ticket);
    pthread_mutex_unlock(&d->mutex);
    return code;
}

double lily_seconds(lily_device *d, uint64_t ticket) {
    double seconds = -1;
    if (forked(d)) return seconds;
    pthread_mutex_lock(&d->mutex);
    const uint64_t completed = atomic_load(&d->completed);
    if (ticket && ticket <= completed && completed - ticket < TIMED_TICKETS)
        seconds = d->seconds[ticket % TIMED_TICKETS];
    pthread_mutex_unlock(&d->mutex);
    return seconds;
}
