// SPDX-License-Identifier: Apache-2.0
// Upper bounds of this machine for bench/cpu_kernels.py: a plain loop that reads memory, and the rate of the
// multiply-accumulate instruction that the kernels use, on some threads.  Compiled for the machine it runs on.
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MAX_THREADS 256

typedef uint64_t line __attribute__((vector_size(64), aligned(64)));

typedef struct {
    const char *memory;
    size_t bytes;
    uint64_t seen;
} share;

static void *read_share(void *argument) {
    share *s = argument;
    const line *p = (const line *)s->memory;
    line a = {0}, b = a, c = a, d = a;
    for (size_t i = 0; i + 4 <= s->bytes / sizeof *p; i += 4) {
        __builtin_prefetch((const char *)(p + i) + 4096);
        __builtin_prefetch((const char *)(p + i) + 4160);
        __builtin_prefetch((const char *)(p + i) + 4224);
        __builtin_prefetch((const char *)(p + i) + 4288);
        a ^= p[i], b ^= p[i + 1], c ^= p[i + 2], d ^= p[i + 3];
    }
    a ^= b ^ c ^ d;
    s->seen = a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
    return NULL;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double on_threads(void *(*run)(void *), void *shares, size_t size, int threads) {
    pthread_t thread[MAX_THREADS];
    const double start = seconds();
    for (int i = 1; i < threads; i++) pthread_create(&thread[i], NULL, run, (char *)shares + i * size);
    run(shares);
    for (int i = 1; i < threads; i++) pthread_join(thread[i], NULL);
    return seconds() - start;
}

// Seconds to read the memory once.
double bench_read(const void *memory, size_t bytes, int threads, uint64_t *seen) {
    share shares[MAX_THREADS];
    const size_t part = bytes / (size_t)threads / 256 * 256;
    for (int i = 0; i < threads; i++) shares[i] = (share){(const char *)memory + (size_t)i * part, part, 0};
    const double time = on_threads(read_share, shares, sizeof *shares, threads);
    for (int i = 0; i < threads; i++) *seen ^= shares[i].seen;
    return time;
}

#define PEAK_STEPS 20000000L

static void *multiply(void *argument) {
    (void)argument;
    for (long i = 0; i < PEAK_STEPS / 10; i++) {
#if defined(__AVX512BF16__)
#define STEP(r) "vdpbf16ps %%zmm31, %%zmm31, %%zmm" #r "\n\t"
#elif defined(__AVX512F__)
#define STEP(r) "vfmadd231ps %%zmm31, %%zmm31, %%zmm" #r "\n\t"
#elif defined(__AVX2__)
#define STEP(r) "vfmadd231ps %%ymm15, %%ymm15, %%ymm" #r "\n\t"
#endif
#if defined(STEP)
        __asm__ volatile(STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9)::
                             : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9");
#elif defined(__aarch64__)
#define STEP(r) "fmla v" #r ".4s, v31.4s, v31.4s\n\t"
        __asm__ volatile(STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7) STEP(8) STEP(9)::
                             : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9");
#endif
    }
    return NULL;
}

// Multiply-accumulates a second of all threads together; 0 where this file knows no instruction.
double bench_peak(int threads) {
#if defined(__AVX512BF16__)
    const double per_step = 32;
#elif defined(__AVX512F__)
    const double per_step = 16;
#elif defined(__AVX2__)
    const double per_step = 8;
#elif defined(__aarch64__)
    const double per_step = 4;
#else
    return 0;
#endif
    return per_step * PEAK_STEPS * threads / on_threads(multiply, NULL, 0, threads);
}
