// SPDX-License-Identifier: Apache-2.0
// See device_common.h.  C11, and C++20 for a device written in it.
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE // pthread_condattr_setclock
#elif defined(__APPLE__)
#define _DARWIN_C_SOURCE // pthread_cond_timedwait_relative_np
#endif
#include "device_common.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kernel_params.h"

// ---- errors -----------------------------------------------------------------------------------------------------------

// Each thread sees the text of its own last failed call.  Libraries that are loaded late have little thread-local memory,
// so the text lies on the heap and goes with its thread.
static pthread_once_t text_once = PTHREAD_ONCE_INIT;
static pthread_key_t text_key;

static void make_text_key(void) { pthread_key_create(&text_key, free); }

// This thread's text, NULL if there is no memory.
static char *own_text(void) {
    pthread_once(&text_once, make_text_key);
    char *text = (char *)pthread_getspecific(text_key);
    if (!text && (text = (char *)calloc(1, DEVICE_TEXT_BYTES))) pthread_setspecific(text_key, text);
    return text;
}

int device_fail(int code, const char *format, ...) {
    char *text = own_text();
    va_list arguments;
    va_start(arguments, format);
    if (text) vsnprintf(text, DEVICE_TEXT_BYTES, format, arguments);
    va_end(arguments);
    return code;
}

const char *device_text(void) {
    const char *text = own_text();
    return text ? text : "no memory left for the text of an error";
}

const char *lily_error(lily_device *device) {
    (void)device;
    return device_text();
}

uint32_t lily_abi_version(void) { return LILY_ABI_VERSION; }

int device_opened(int code, char *error, size_t error_bytes) {
    if (error && error_bytes) snprintf(error, error_bytes, "%s", code ? device_text() : "");
    return code;
}

int device_told(int length, size_t bytes) {
    if (length >= 0 && (size_t)length < bytes) return LILY_OK;
    return device_fail(LILY_EINVAL, "lily_info needs room for %d bytes, it got %zu", length + 1, bytes);
}

// ---- the clock --------------------------------------------------------------------------------------------------------

uint64_t device_nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void device_init_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

bool device_wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t end) {
    const uint64_t now = device_nanoseconds();
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

// ---- processes --------------------------------------------------------------------------------------------------------

void device_init(device_head *h) {
    h->process = (long)getpid();
    pthread_mutex_init(&h->mutex, NULL);
    device_init_condition(&h->finished);
}

void device_destroy(device_head *h) {
    pthread_cond_destroy(&h->finished);
    pthread_mutex_destroy(&h->mutex);
}

static const device_head *head_of(const lily_device *d) { return (const device_head *)d; }

bool device_forked(const lily_device *d) { return head_of(d)->process != (long)getpid(); }

int device_lost(const lily_device *d) {
    return device_fail(LILY_ELOST, "this device belongs to process %ld, which forked; open a device in this process",
        head_of(d)->process);
}

// ---- the kernel table -------------------------------------------------------------------------------------------------

#define ROW(name, args, constants, param_bytes) {#name, args, constants, param_bytes},
static const kernel_row TABLE[] = {LILY_KERNEL_TABLE(ROW){NULL, 0, NULL, 0}};
#undef ROW

const kernel_row *device_kernel_table(void) { return TABLE; }

const kernel_row *device_kernel_row(const char *name) {
    const kernel_row *row = TABLE;
    while (row->name && strcmp(row->name, name)) row++;
    return row->name ? row : NULL;
}

const char *device_next_name(const char *names) {
    names += strcspn(names, " ");
    return names + (*names == ' ');
}

int device_check_kernel(lily_device *d, const char *name, const int32_t *constants, uint32_t count, lily_kernel **out,
    const kernel_row **row) {
    if (!d || !name || !out || (count && !constants))
        return device_fail(LILY_EINVAL, "lily_kernel_get: an argument is null");
    *out = NULL;
    if (device_forked(d)) return device_lost(d);
    *row = device_kernel_row(name);
    if (!*row) return device_fail(LILY_ENOTFOUND, "there is no kernel \"%s\" in the kernel table", name);
    uint32_t wanted = 0;
    for (const char *c = (*row)->constants; *c; c = device_next_name(c)) wanted++;
    if (count == wanted) return LILY_OK;
    return device_fail(
        LILY_EINVAL, "kernel %s takes %u constants (%s), %u were given", name, wanted, (*row)->constants, count);
}

// ---- lists ------------------------------------------------------------------------------------------------------------

static int check_args(const kernel_row *row, const lily_arg *args, uint32_t count) {
    if (count != row->args || count > LILY_MAX_ARGS)
        return device_fail(LILY_EINVAL, "kernel %s takes %u buffers, %u were given", row->name, row->args, count);
    for (uint32_t i = 0; i < count; i++) {
        const unsigned long long offset = args[i].offset;
        if (!args[i].buffer) return device_fail(LILY_EINVAL, "kernel %s: buffer %u is null", row->name, i);
        if (offset % 16)
            return device_fail(
                LILY_EINVAL, "kernel %s: offset %llu of buffer %u is no multiple of 16", row->name, offset, i);
        const unsigned long long bytes = ((const buffer_head *)args[i].buffer)->bytes;
        if (offset > bytes)
            return device_fail(LILY_EINVAL, "kernel %s: offset %llu lies beyond the %llu bytes of buffer %u", row->name,
                offset, bytes, i);
    }
    return LILY_OK;
}

static int check_grid(const kernel_row *row, const uint32_t grid[3]) {
    uint64_t groups = grid[0];
    for (int i = 1; i < 3 && groups <= UINT32_MAX; i++) groups *= grid[i];
    if (groups >= 1 && groups <= UINT32_MAX) return LILY_OK;
    return device_fail(LILY_EINVAL, "kernel %s: a grid of %u x %u x %u groups; allowed: 1 to %u", row->name, grid[0],
        grid[1], grid[2], UINT32_MAX);
}

int device_check_dispatch(const lily_list *list, const lily_kernel *kernel, const lily_arg *args, uint32_t arg_count,
    const void *params, uint32_t param_bytes, const uint32_t grid[3]) {
    if (!list || !kernel || !args || !grid || (param_bytes && !params))
        return device_fail(LILY_EINVAL, "lily_list_dispatch: an argument is null");
    const list_head *l = (const list_head *)list;
    const kernel_head *k = (const kernel_head *)kernel;
    const kernel_row *row = k->row;
    if (l->ended) return device_fail(LILY_EINVAL, "kernel %s: this list has ended; record a new one", row->name);
    if (k->device != l->device)
        return device_fail(LILY_EINVAL, "kernel %s belongs to another device than the list", row->name);
    if (param_bytes != row->param_bytes || param_bytes > LILY_MAX_PARAM_BYTES)
        return device_fail(LILY_EINVAL, "kernel %s takes %u bytes of parameters, %u were given", row->name,
            row->param_bytes, param_bytes);
    const int code = check_args(row, args, arg_count);
    return code ? code : check_grid(row, grid);
}

int device_check_end(const lily_list *list) {
    if (!list) return device_fail(LILY_EINVAL, "lily_list_end: no list");
    if (((const list_head *)list)->ended) return device_fail(LILY_EINVAL, "this list has ended already");
    return LILY_OK;
}

int device_check_submission(const lily_device *d, lily_list *const *lists, uint32_t count) {
    if (!d || (count && !lists)) return device_fail(LILY_EINVAL, "lily_submit: an argument is null");
    if (device_forked(d)) return device_lost(d);
    for (uint32_t i = 0; i < count; i++) {
        const list_head *l = (const list_head *)lists[i];
        if (!l || !l->ended) return device_fail(LILY_EINVAL, "list %u of the submission was not ended", i);
        if (l->device != d) return device_fail(LILY_EINVAL, "list %u of the submission belongs to another device", i);
    }
    return LILY_OK;
}

// ---- tickets ----------------------------------------------------------------------------------------------------------

static uint64_t completed_of(const device_head *h) { return __atomic_load_n(&h->completed, __ATOMIC_SEQ_CST); }

static uint32_t failures_of(const device_head *h) { return __atomic_load_n(&h->failures, __ATOMIC_SEQ_CST); }

// Forgets a failure of that place: somebody was told, or 64 more submissions have finished.
static void forget_failure(device_head *h, finished_ticket *f) {
    if (f->code) __atomic_fetch_sub(&h->failures, 1, __ATOMIC_SEQ_CST);
    f->code = LILY_OK;
}

void device_finish(device_head *h, uint64_t ticket, double seconds, int code, const char *error) {
    finished_ticket *f = &h->tickets[ticket % TIMED_TICKETS];
    forget_failure(h, f);
    f->ticket = ticket;
    f->seconds = seconds;
    f->code = code;
    if (code) {
        snprintf(f->error, sizeof f->error, "%s", error);
        __atomic_fetch_add(&h->failures, 1, __ATOMIC_SEQ_CST);
    }
    __atomic_store_n(&h->completed, ticket, __ATOMIC_SEQ_CST);
    pthread_cond_broadcast(&h->finished);
}

uint64_t lily_completed(lily_device *d) {
    const device_head *h = head_of(d);
    if (h->progress) h->progress(d, 0); // who asks again and again must see progress
    return completed_of(h);
}

// How a finished ticket ended.
static int outcome(device_head *h, uint64_t ticket) {
    finished_ticket *f = &h->tickets[ticket % TIMED_TICKETS];
    if (!ticket || f->ticket != ticket || !f->code) return LILY_OK;
    const int code = f->code;
    forget_failure(h, f);
    return device_fail(code, "%s", f->error);
}

int lily_wait(lily_device *d, uint64_t ticket, uint64_t timeout_ns) {
    if (!d) return device_fail(LILY_EINVAL, "lily_wait: no device");
    device_head *h = (device_head *)d;
    if (h->progress) h->progress(d, ticket);
    if (ticket <= completed_of(h) && !failures_of(h)) return LILY_OK;
    if (device_forked(d)) return device_lost(d);
    const uint64_t longest = (uint64_t)1 << 62; // fits a time_t after the division
    const uint64_t end = device_nanoseconds() + (timeout_ns < longest ? timeout_ns : longest);
    int code = LILY_OK;
    pthread_mutex_lock(&h->mutex);
    if (ticket > h->submitted)
        code = device_fail(LILY_EINVAL, "ticket %llu was never given; the last one is %llu", (unsigned long long)ticket,
            (unsigned long long)h->submitted);
    while (!code && completed_of(h) < ticket) {
        if (device_wait_until(&h->finished, &h->mutex, end))
            code = device_fail(LILY_ETIMEOUT, "ticket %llu did not finish within %.3f s; the last finished one is %llu",
                (unsigned long long)ticket, (double)timeout_ns * 1e-9, (unsigned long long)completed_of(h));
    }
    if (!code) code = outcome(h, ticket);
    pthread_mutex_unlock(&h->mutex);
    return code;
}

double lily_seconds(lily_device *d, uint64_t ticket) {
    device_head *h = (device_head *)d;
    double seconds = -1;
    if (device_forked(d)) return seconds;
    pthread_mutex_lock(&h->mutex);
    const finished_ticket *f = &h->tickets[ticket % TIMED_TICKETS];
    if (ticket && f->ticket == ticket) seconds = f->seconds;
    pthread_mutex_unlock(&h->mutex);
    return seconds;
}
