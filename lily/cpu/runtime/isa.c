// SPDX-License-Identifier: Apache-2.0
// The instruction-set paths that are compiled in, and the choice among them.
#include <stdio.h>
#include <string.h>

#include "machine.h"
#include "runtime.h"

// Best first.
static const cpu_isa PATHS[] = {
#if defined(__x86_64__)
    {"amx", cpu_kernels_amx, MACHINE_AMX, 0},
    {"avx512bf16", cpu_kernels_avx512bf16, MACHINE_AVX512BF16, MACHINE_FAST_BF16},
    {"avx512", cpu_kernels_avx512, MACHINE_AVX512, 0},
    {"avx2", cpu_kernels_avx2, MACHINE_AVX2, 0},
#elif defined(__aarch64__)
    {"neon", cpu_kernels_neon, MACHINE_NEON, 0},
#endif
    {"portable", cpu_kernels_portable, 0, 0},
};
enum { PATH_COUNT = sizeof PATHS / sizeof PATHS[0] };

static bool has(uint32_t features) { return (machine_features() & features) == features; }

static bool present(const cpu_isa *path) { return has(path->needs); }

void isa_names(char *out, size_t bytes) {
    size_t used = 0;
    out[0] = 0;
    for (int i = 0; i < PATH_COUNT; i++) {
        if (!present(&PATHS[i]) || used >= bytes) continue;
        used += (size_t)snprintf(out + used, bytes - used, "%s%s", used ? "," : "", PATHS[i].name);
    }
}

const cpu_isa *isa_choose(const char *name, char *error, size_t error_bytes) {
    const bool any = !strcmp(name, "auto");
    for (int i = 0; i < PATH_COUNT; i++)
        if (present(&PATHS[i]) && (any ? has(PATHS[i].worth) : !strcmp(name, PATHS[i].name))) return &PATHS[i];
    char names[128];
    isa_names(names, sizeof names);
    snprintf(error, error_bytes,
        "this machine has no instruction-set path \"%s\" (option isa or variable LILY_CPU); it has: %s", name, names);
    return NULL;
}
