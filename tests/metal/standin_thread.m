// SPDX-License-Identifier: Apache-2.0
// Threads that are kept: a queue's thread ends with the queue, but the emulator keeps stacks for a thousand fibers for
// every system thread that has run kernels.  So a new queue takes a thread that another one has left.
#include "standin.h"

struct kept_thread {
    pthread_cond_t changed;
    void *(*run)(void *); // NULL: nothing to do
    void *argument;
    struct kept_thread *next; // of those nobody uses
};

static pthread_mutex_t threads_mutex = PTHREAD_MUTEX_INITIALIZER;
static kept_thread *unused;

static void *serve(void *argument) {
    kept_thread *t = argument;
    pthread_mutex_lock(&threads_mutex);
    for (;;) {
        while (!t->run) pthread_cond_wait(&t->changed, &threads_mutex);
        void *(*run)(void *) = t->run;
        pthread_mutex_unlock(&threads_mutex);
        run(t->argument);
        pthread_mutex_lock(&threads_mutex);
        t->run = NULL;
        pthread_cond_broadcast(&t->changed);
    }
    return NULL;
}

kept_thread *thread_start(void *(*run)(void *), void *argument) {
    pthread_mutex_lock(&threads_mutex);
    kept_thread *t = unused;
    if (t) {
        unused = t->next;
    } else {
        pthread_t handle;
        t = calloc(1, sizeof *t);
        pthread_cond_init(&t->changed, NULL);
        if (pthread_create(&handle, NULL, serve, t) || pthread_detach(handle)) abort();
    }
    t->run = run;
    t->argument = argument;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&threads_mutex);
    return t;
}

void thread_end(kept_thread *t) {
    pthread_mutex_lock(&threads_mutex);
    while (t->run) pthread_cond_wait(&t->changed, &threads_mutex);
    t->next = unused;
    unused = t;
    pthread_mutex_unlock(&threads_mutex);
}
