// SPDX-License-Identifier: Apache-2.0
// The memory read limit that decode is measured against: threads that each sum their part of a large buffer.
// usage: read_limit THREADS MEBIBYTES; then each line on stdin is answered with one figure in GB/s (best of 3 passes).
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef uint64_t lanes __attribute__((vector_size(64)));

typedef struct {
    const lanes *data;
    size_t count;
    uint64_t sum;
} part;

static void *read_part(void *argument) {
    part *p = argument;
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i + 4 <= p->count; i += 4) {
        a += p->data[i];
        b += p->data[i + 1];
        c += p->data[i + 2];
        d += p->data[i + 3];
        __builtin_prefetch(&p->data[i + 64]);
    }
    a += b + c + d;
    for (int i = 0; i < 8; i++) p->sum += a[i];
    return NULL;
}

static double pass(part *parts, int threads) {
    pthread_t ids[64];
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 1; i < threads; i++) pthread_create(&ids[i], NULL, read_part, &parts[i]);
    read_part(&parts[0]);
    for (int i = 1; i < threads; i++) pthread_join(ids[i], NULL);
    clock_gettime(CLOCK_MONOTONIC, &end);
    return (double)(end.tv_sec - begin.tv_sec) + 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 2;
    size_t bytes = (size_t)(argc > 2 ? atoi(argv[2]) : 1024) << 20;
    if (threads < 1 || threads > 64 || bytes == 0) return 2;
    char *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return 1;
#ifdef MADV_HUGEPAGE
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
    memset(data, 1, bytes);
    part parts[64] = {{0}};
    size_t each = bytes / 64 / (size_t)threads;
    for (int i = 0; i < threads; i++) parts[i] = (part){(const lanes *)data + each * (size_t)i, each, 0};
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        double best = 1e9;
        for (int i = 0; i < 3; i++) {
            double t = pass(parts, threads);
            if (t < best) best = t;
        }
        printf("{\"GB/s\": %.3f, \"sum\": %llu}\n", (double)(each * 64 * (size_t)threads) / best / 1e9,
               (unsigned long long)parts[0].sum);
        fflush(stdout);
    }
    return 0;
}
