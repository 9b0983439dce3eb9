// SPDX-License-Identifier: Apache-2.0
// See machine.h.
#if defined(__linux__)
#define _GNU_SOURCE // sched_getaffinity, CPU_COUNT
#endif
#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#endif

#if defined(__x86_64__)

static uint64_t enabled_state(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

// Linux gives tile registers to processes that ask; it refuses where a signal stack is too small to hold them.
static bool tiles_granted(void) {
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

// Intel's processors make four operations of a bf16 dot product and one of a float32 multiply-add with half its work.
static bool is_intel(void) {
    uint32_t a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == 0x756e6547 && d == 0x49656e69 && c == 0x6c65746e; // "GenuineIntel"
}

uint32_t machine_features(void) {
    enum { FMA = 1u << 12, OSXSAVE = 1u << 27, AVX = 1u << 28, F16C = 1u << 29 }; // leaf 1, ecx
    enum { AVX2 = 1u << 5 };                                                      // leaf 7.0, ebx
    const uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;            // F DQ BW VL
    const uint32_t avx512bf16 = 1u << 5;                                          // leaf 7.1, eax
    const uint32_t amx = 1u << 22 | 1u << 24;                                     // leaf 7.0, edx: BF16 TILE
    const uint64_t ymm_state = 0x06, zmm_state = 0xe6, tile_state = 0x60000;
    uint32_t a, b, c, d, features = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return 0;
    const uint32_t base = FMA | AVX | F16C;
    const bool has_base = (c & base) == base;
    const uint64_t state = enabled_state();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    const uint32_t leaf7_subleaves = a;
    const bool has_amx = (d & amx) == amx && (state & tile_state) == tile_state;
    if (has_base && (b & AVX2) && (state & ymm_state) == ymm_state) features |= MACHINE_AVX2;
    if ((features & MACHINE_AVX2) && (b & avx512) == avx512 && (state & zmm_state) == zmm_state) {
        features |= MACHINE_AVX512;
        if (leaf7_subleaves >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & avx512bf16))
            features |= MACHINE_AVX512BF16 | (is_intel() ? 0 : MACHINE_FAST_BF16);
    }
    if ((features & MACHINE_AVX512BF16) && has_amx && tiles_granted()) features |= MACHINE_AMX;
    return features;
}

void machine_flush_denormals(void) {
    const uint32_t flush_to_zero = 0x8000, denormals_are_zero = 0x0040;
    _mm_setcsr(_mm_getcsr() | flush_to_zero | denormals_are_zero);
}

void machine_pause(void) { _mm_pause(); }

#elif defined(__aarch64__)

uint32_t machine_features(void) { return MACHINE_NEON; }

void machine_flush_denormals(void) {
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
    fpcr |= (uint64_t)1 << 24; // FZ: results and operands
    __asm__ volatile("msr fpcr, %0" : : "r"(fpcr));
}

void machine_pause(void) { __asm__ volatile("yield"); }

#else

uint32_t machine_features(void) { return 0; }
void machine_flush_denormals(void) {}
void machine_pause(void) {}

#endif

#if defined(__linux__)
// The first number of a cgroup file; `fallback` where the file is missing or says "max".
static double cgroup_number(const char *path, double *second, double fallback) {
    FILE *file = fopen(path, "re");
    if (!file) return fallback;
    double first = fallback;
    const int fields = fscanf(file, "%lf %lf", &first, second ? second : &(double){0});
    fclose(file);
    return fields >= 1 ? first : fallback;
}

static uint32_t cgroup_processors(void) {
    double period = 100000;
    double quota = cgroup_number("/sys/fs/cgroup/cpu.max", &period, -1);
    if (quota <= 0) {
        quota = cgroup_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", NULL, -1);
        period = cgroup_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us", NULL, 100000);
    }
    if (quota <= 0 || period <= 0) return UINT32_MAX;
    const double whole = (quota + period - 1) / period;
    return whole < 1 ? 1 : whole > 65536 ? 65536 : (uint32_t)whole;
}
#endif

uint32_t machine_processors(void) {
    long found = sysconf(_SC_NPROCESSORS_ONLN);
#if defined(__APPLE__)
    int32_t cores = 0;
    size_t bytes = sizeof cores;
    if (!sysctlbyname("hw.perflevel0.physicalcpu", &cores, &bytes, NULL, 0) && cores > 0) found = cores;
#elif defined(__linux__)
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set)) found = CPU_COUNT(&set); // fails beyond 1,024 processors
    const uint32_t limit = cgroup_processors();
    if (found > 0 && (uint32_t)found > limit) found = limit;
#endif
    return found > 0 ? (uint32_t)found : 1;
}

uint64_t machine_memory(void) {
    const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    double bytes = pages > 0 && page > 0 ? (double)pages * (double)page : 0;
#if defined(__linux__)
    double limit = cgroup_number("/sys/fs/cgroup/memory.max", NULL, 0);
    if (limit <= 0) limit = cgroup_number("/sys/fs/cgroup/memory/memory.limit_in_bytes", NULL, 0);
    if (limit > 0 && limit < bytes) bytes = limit;
#endif
    return (uint64_t)bytes;
}

uint64_t machine_nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
