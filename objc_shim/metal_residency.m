// SPDX-License-Identifier: Apache-2.0
// The residency set that keeps all buffers in the GPU's memory, and the thread that keeps asking for it.
#include "metal_runtime.h"

#include <signal.h>

static void change(lily_device *d, id<MTLAllocation> allocation, bool add) {
    pthread_mutex_lock(&d->residency_mutex);
    if (add)
        [d->residency addAllocation:allocation];
    else
        [d->residency removeAllocation:allocation];
    d->residency_changed = true;
    pthread_mutex_unlock(&d->residency_mutex);
}

void residency_add(lily_device *d, id<MTLAllocation> allocation) {
    if (d->residency) change(d, allocation, true);
}

// At once: until it is committed the set holds the memory.
void residency_drop(lily_device *d, id<MTLAllocation> allocation) {
    if (!d->residency) return;
    change(d, allocation, false);
    pthread_mutex_lock(&d->residency_mutex);
    [d->residency commit];
    pthread_mutex_unlock(&d->residency_mutex);
}

// What was added is then part of the set, and the set is asked for.
void residency_request(lily_device *d) {
    if (!d->residency) return;
    pthread_mutex_lock(&d->residency_mutex);
    if (d->residency_changed) [d->residency commit];
    if (d->keep && (d->residency_changed || !d->residency_requested)) [d->residency requestResidency];
    d->residency_changed = false;
    d->residency_requested = d->keep != 0;
    d->last_use = device_nanoseconds();
    pthread_mutex_unlock(&d->residency_mutex);
}

static void residency_tick(lily_device *d) {
    pthread_mutex_lock(&d->residency_mutex);
    if (d->residency_requested) {
        d->residency_requested = device_nanoseconds() - d->last_use < d->keep;
        if (d->residency_requested)
            [d->residency requestResidency];
        else
            [d->residency endResidency];
    }
    pthread_mutex_unlock(&d->residency_mutex);
}

// macOS lets memory go that was not asked for recently: asking twice a second keeps the next request fast.
static void *keep(void *argument) {
    lily_device *d = argument;
    pthread_mutex_lock(&d->head.mutex);
    while (!d->closing) {
        const uint64_t next = device_nanoseconds() + 500000000u;
        while (!d->closing && !device_wait_until(&d->keeper_wakes, &d->head.mutex, next)) {
        }
        if (d->closing) break;
        pthread_mutex_unlock(&d->head.mutex);
        @autoreleasepool {
            residency_tick(d);
        }
        pthread_mutex_lock(&d->head.mutex);
    }
    pthread_mutex_unlock(&d->head.mutex);
    return NULL;
}

// Replayed lists need the set even if memory is not to be asked for ahead: nothing else tells Metal what they use.
int residency_open(lily_device *d, uint32_t keep_s) {
    NSError *error = nil;
    if (!keep_s && !d->fence) return LILY_OK;
    MTLResidencySetDescriptor *descriptor = [[[MTLResidencySetDescriptor alloc] init] autorelease];
    [descriptor setLabel:@"lily"];
    d->residency = [d->gpu newResidencySetWithDescriptor:descriptor error:&error];
    if (!d->residency && !d->fence) return LILY_OK; // as in a virtual machine: memory is then not asked for ahead
    if (!d->residency) return device_fail(LILY_EFAILED, "Metal gave no residency set: %s", reason(error));
    [d->queue addResidencySet:d->residency];
    if (!keep_s) return LILY_OK;
    d->keep = (uint64_t)keep_s * 1000000000u;
    sigset_t all, before; // signals are for the host's threads
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    const int code = pthread_create(&d->keeper, NULL, keep, d);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    d->has_keeper = !code;
    return code ? device_fail(LILY_EFAILED, "could not start a thread: %s", strerror(code)) : LILY_OK;
}

void residency_close(lily_device *d) {
    pthread_mutex_lock(&d->head.mutex);
    while (d->head.completed < d->head.submitted) pthread_cond_wait(&d->head.finished, &d->head.mutex);
    d->closing = true;
    pthread_cond_signal(&d->keeper_wakes);
    pthread_mutex_unlock(&d->head.mutex);
    if (d->has_keeper) pthread_join(d->keeper, NULL);
    d->has_keeper = false;
}

void residency_release(lily_device *d) {
    if (!d->residency) return;
    if (d->residency_requested) [d->residency endResidency];
    [d->queue removeResidencySet:d->residency];
    [d->residency release];
    d->residency = nil;
}
