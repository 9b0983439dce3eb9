// SPDX-License-Identifier: Apache-2.0
// See pool.h.
//
// A phase is published by one store to `state`: (serial, chunks, next chunk).  Whoever increments `next` by
// compare-and-swap owns that chunk, and the phase cannot end before the owner has added it to `done`; so everything that
// describes the phase is stable while a chunk of it is owned.  A thread that sleeps or was descheduled owns nothing: the
// phase ends without it, which keeps the pool fast on a machine with fewer free processors than threads.
#if defined(__linux__)
#define _GNU_SOURCE // pthread_setname_np
#endif
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "machine.h"

// Longest wait for the next phase, or for the end of one, before a thread sleeps: longer than the gap between two
// dispatches, far shorter than the gap between two requests.
#define SPIN_NANOSECONDS 200000
#define SPIN_TRIES 16 // between two looks at the clock, each with a sched_yield

// More chunks per thread balance better, fewer keep each one's memory contiguous.
#define CHUNKS_PER_THREAD 16

#define CACHE_LINE 64

typedef struct {
    void *memory;
    size_t bytes;
} scratch;

struct cpu_worker {
    scratch free_use;
    scratch prepared;
    // Of the running chunk, and of what `prepared` holds.
    const cpu_call *call, *prepared_call;
    uint64_t serial, prepared_serial, prepared_tag;
    jmp_buf no_memory; // out of the running kernel
    pool *owner;
    pthread_t thread;
    char padding[CACHE_LINE];
};

struct pool {
    _Atomic uint64_t state; // serial << 32 | chunks << 16 | next
    char state_alone[CACHE_LINE];
    _Atomic uint32_t done;
    char done_alone[CACHE_LINE];
    const pool_phase *phase;
    atomic_size_t missing; // see pool_run
    uint32_t serial;
    uint32_t threads, started;
    atomic_uint sleepers;
    atomic_bool driver_sleeps, closing;
    pthread_mutex_t mutex; // only for sleeping and waking
    pthread_cond_t work, finished;
    cpu_worker worker[];
};

static void *aligned(size_t bytes) {
    void *memory = NULL;
    return posix_memalign(&memory, CACHE_LINE, bytes) ? NULL : memory;
}

// Does not return when there is no memory: kernels need not look, and hold nothing that a jump would lose.
static void *grow(cpu_worker *w, scratch *s, size_t bytes) {
    if (bytes > s->bytes) {
        free(s->memory);
        // Half as much again: sizes that creep up are not copied each time.
        s->bytes = bytes + bytes / 2;
        s->memory = aligned(s->bytes);
        if (!s->memory) {
            atomic_store(&w->owner->missing, s->bytes);
            s->bytes = 0;
            _longjmp(w->no_memory, 1);
        }
    }
    return s->memory;
}

void *cpu_scratch(cpu_worker *w, size_t bytes) { return grow(w, &w->free_use, bytes ? bytes : 1); }

void *cpu_prepared(cpu_worker *w, uint64_t tag, size_t bytes, int *ready) {
    *ready = w->prepared_call == w->call && w->prepared_serial == w->serial && w->prepared_tag == tag &&
        w->prepared.memory && bytes <= w->prepared.bytes;
    w->prepared_call = w->call;
    w->prepared_serial = w->serial;
    w->prepared_tag = tag;
    return grow(w, &w->prepared, bytes ? bytes : 1);
}

static bool has_chunk(uint64_t state) { return (state & 0xffff) < (state >> 16 & 0xffff); }

// A kernel that finds no memory comes back here.  Not inlined: no caller's variable may live in a register meanwhile.
static __attribute__((noinline)) void run_kernel(const pool_dispatch *d, uint32_t begin, uint32_t end, cpu_worker *w) {
    if (!_setjmp(w->no_memory)) d->run(&d->call, begin, end, w);
}

static void run_chunk(const pool_phase *phase, uint32_t chunk, uint32_t serial, cpu_worker *w) {
    const pool_dispatch *d = phase->dispatch;
    while (chunk >= d->chunks) chunk -= d++->chunks;
    const uint32_t begin = (uint32_t)((uint64_t)d->groups * chunk / d->chunks);
    const uint32_t end = (uint32_t)((uint64_t)d->groups * (chunk + 1) / d->chunks);
    if (atomic_load(&w->owner->missing)) return; // the phase has failed
    w->call = &d->call;
    w->serial = serial;
    run_kernel(d, begin, end, w);
}

// Claims and runs chunks until none is left.
static void work(pool *p, cpu_worker *w) {
    uint64_t state = atomic_load(&p->state);
    while (has_chunk(state)) {
        if (!atomic_compare_exchange_weak(&p->state, &state, state + 1)) continue;
        const uint32_t chunks = state >> 16 & 0xffff;
        run_chunk(p->phase, state & 0xffff, (uint32_t)(state >> 32), w);
        if (atomic_fetch_add(&p->done, 1) + 1 == chunks && atomic_load(&p->driver_sleeps)) {
            pthread_mutex_lock(&p->mutex);
            pthread_cond_signal(&p->finished);
            pthread_mutex_unlock(&p->mutex);
        }
        state = atomic_load(&p->state);
    }
}

static bool work_or_close(pool *p) { return has_chunk(atomic_load(&p->state)) || atomic_load(&p->closing); }

static bool phase_done(pool *p) { return atomic_load(&p->done) == p->phase->chunks; }

static bool spin(pool *p, bool (*over)(pool *)) {
    const uint64_t end = machine_nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < SPIN_TRIES; i++) {
            if (over(p)) return true;
            machine_pause();
        }
        sched_yield();
    } while (machine_nanoseconds() < end);
    return false;
}

// Who sleeps says so before a last look; who publishes looks for sleepers afterwards.  Both orders are sequentially
// consistent, so that one of the two sees the other.
static void wait_for_work(pool *p) {
    if (spin(p, work_or_close)) return;
    pthread_mutex_lock(&p->mutex);
    atomic_fetch_add(&p->sleepers, 1);
    while (!work_or_close(p)) pthread_cond_wait(&p->work, &p->mutex);
    atomic_fetch_sub(&p->sleepers, 1);
    pthread_mutex_unlock(&p->mutex);
}

static void wait_for_phase(pool *p) {
    if (spin(p, phase_done)) return;
    pthread_mutex_lock(&p->mutex);
    atomic_store(&p->driver_sleeps, true);
    while (!phase_done(p)) pthread_cond_wait(&p->finished, &p->mutex);
    atomic_store(&p->driver_sleeps, false);
    pthread_mutex_unlock(&p->mutex);
}

static void wake_sleepers(pool *p) {
    if (!atomic_load(&p->sleepers)) return;
    pthread_mutex_lock(&p->mutex);
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mutex);
}

size_t pool_run(pool *p, const pool_phase *phase) {
    p->serial++;
    atomic_store(&p->missing, 0);
    if (phase->chunks == 1) { // nothing to share: leave the others alone
        run_chunk(phase, 0, p->serial, &p->worker[0]);
        return atomic_load(&p->missing);
    }
    p->phase = phase;
    atomic_store(&p->done, 0);
    atomic_store(&p->state, (uint64_t)p->serial << 32 | (uint64_t)phase->chunks << 16);
    wake_sleepers(p);
    work(p, &p->worker[0]);
    wait_for_phase(p);
    return atomic_load(&p->missing);
}

void pool_enter_thread(void) {
    machine_flush_denormals();
#if defined(__APPLE__)
    pthread_setname_np("lily-cpu");
    pthread_set_qos_class_self_np(QOS_CLASS_USER_INITIATED, 0); // performance cores
#elif defined(__linux__)
    pthread_setname_np(pthread_self(), "lily-cpu");
#endif
}

static void *worker_main(void *argument) {
    cpu_worker *w = argument;
    pool *p = w->owner;
    pool_enter_thread();
    while (!atomic_load(&p->closing)) {
        work(p, w);
        wait_for_work(p);
    }
    return NULL;
}

uint32_t pool_threads(const pool *p) { return p->threads; }

uint32_t pool_chunks(uint32_t threads, uint32_t groups, uint32_t grain) {
    if (threads == 1) return 1;
    const uint32_t worth = groups / (grain ? grain : 1), most = threads * CHUNKS_PER_THREAD;
    return worth < 1 ? 1 : worth < most ? worth : most;
}

pool *pool_new(uint32_t threads) {
    pool *p = calloc(1, sizeof *p + threads * sizeof p->worker[0]);
    if (!p) return NULL;
    p->threads = threads;
    pthread_mutex_init(&p->mutex, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_cond_init(&p->finished, NULL);
    for (uint32_t i = 0; i < threads; i++) p->worker[i].owner = p;
    for (p->started = 1; p->started < threads; p->started++) {
        cpu_worker *w = &p->worker[p->started];
        const int code = pthread_create(&w->thread, NULL, worker_main, w);
        if (code) {
            pool_free(p);
            errno = code;
            return NULL;
        }
    }
    return p;
}

void pool_free(pool *p) {
    atomic_store(&p->closing, true);
    pthread_mutex_lock(&p->mutex);
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->mutex);
    for (uint32_t i = 1; i < p->started; i++) pthread_join(p->worker[i].thread, NULL);
    for (uint32_t i = 0; i < p->threads; i++) {
        free(p->worker[i].free_use.memory);
        free(p->worker[i].prepared.memory);
    }
    pthread_cond_destroy(&p->finished);
    pthread_cond_destroy(&p->work);
    pthread_mutex_destroy(&p->mutex);
    free(p);
}
