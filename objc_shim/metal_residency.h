// SPDX-License-Identifier: Apache-2.0
// The residency set that keeps all buffers in the GPU's memory, and the thread that keeps asking for it.
#ifndef LILY_METAL_RESIDENCY_H
#define LILY_METAL_RESIDENCY_H

#include <signal.h>

#include "metal_options.h"

static void set_change(lily_device *d, id<MTLAllocation> allocation, bool add) {
    pthread_mutex_lock(&d->set_mutex);
    if (add)
        [d->set addAllocation:allocation];
    else
        [d->set removeAllocation:allocation];
    d->set_changed = true;
    pthread_mutex_unlock(&d->set_mutex);
}

// At once: until it is committed the set holds the memory.
static void set_drop(lily_device *d, id<MTLAllocation> allocation) {
    if (!d->set) return;
    set_change(d, allocation, false);
    pthread_mutex_lock(&d->set_mutex);
    [d->set commit];
    pthread_mutex_unlock(&d->set_mutex);
}

// Before work: what was added is part of the set, and the set is asked for.
static void set_hold(lily_device *d) {
    if (!d->set) return;
    pthread_mutex_lock(&d->set_mutex);
    if (d->set_changed) [d->set commit];
    if (d->keep && (d->set_changed || !d->set_held)) [d->set requestResidency];
    d->set_changed = false;
    d->set_held = d->keep != 0;
    d->last_use = nanoseconds();
    pthread_mutex_unlock(&d->set_mutex);
}

static void set_beat(lily_device *d) {
    pthread_mutex_lock(&d->set_mutex);
    if (d->set_held) {
        d->set_held = nanoseconds() - d->last_use < d->keep;
        if (d->set_held)
            [d->set requestResidency];
        else
            [d->set endResidency];
    }
    pthread_mutex_unlock(&d->set_mutex);
}

// macOS lets memory go that was not asked for recently: asking twice a second keeps the next request fast.
static void *heartbeat(void *argument) {
    lily_device *d = argument;
    pthread_mutex_lock(&d->mutex);
    while (!d->closing) {
        const uint64_t next = nanoseconds() + 500000000u;
        while (!d->closing && !wait_until(&d->beat, &d->mutex, next)) {
        }
        if (d->closing) break;
        pthread_mutex_unlock(&d->mutex);
        @autoreleasepool {
            set_beat(d);
        }
        pthread_mutex_lock(&d->mutex);
    }
    pthread_mutex_unlock(&d->mutex);
    return NULL;
}

// Replayed lists need the set even if memory is not to be asked for ahead: nothing else tells Metal what they use.
static int set_open(lily_device *d, uint32_t keep_s) {
    NSError *error = nil;
    if (!keep_s && !d->fence) return LILY_OK;
    MTLResidencySetDescriptor *descriptor = [[[MTLResidencySetDescriptor alloc] init] autorelease];
    [descriptor setLabel:@"lily"];
    d->set = [d->gpu newResidencySetWithDescriptor:descriptor error:&error];
    if (!d->set && !d->fence) return LILY_OK; // as in a virtual machine: memory is then not asked for ahead
    if (!d->set) return fail(LILY_EFAILED, "Metal gave no residency set: %s", reason(error));
    [d->queue addResidencySet:d->set];
    if (!keep_s) return LILY_OK;
    d->keep = (uint64_t)keep_s * 1000000000u;
    sigset_t all, before; // signals are for the host's threads
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    const int code = pthread_create(&d->heart, NULL, heartbeat, d);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    d->has_heart = !code;
    return code ? fail(LILY_EFAILED, "could not start a thread: %s", strerror(code)) : LILY_OK;
}

#endif
