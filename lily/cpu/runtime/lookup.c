// SPDX-License-Identifier: Apache-2.0
// Kernels by name: the table's rows as C knows them, the checks of constants, the specialised kernels of a device.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

#define ROW(name, args, constants, param_bytes) {#name, args, constants, param_bytes},
static const kernel_row TABLE[] = {LILY_KERNEL_TABLE(ROW){NULL, 0, NULL, 0}};
#undef ROW

// Legal values of constants, by name; others only have to be at least `least`.
static const struct {
    const char *name;
    int32_t allowed[4]; // ends with 0
    int32_t least;
} CONSTANTS[] = {
    {"bits", {4, 8}, 0}, {"shared_bits", {4, 8}, 0}, {"group", {32, 64, 128}, 0}, {"shared_group", {32, 64, 128}, 0},
    {"pack", {0}, 0}, {"fixed", {0}, 0}, {"coalesced", {0}, 0}, {"", {0}, 1}, // every other name: dimensions and counts
};

static int check_constant(const char *kernel, const char *name, int length, int32_t value) {
    const int last = sizeof CONSTANTS / sizeof CONSTANTS[0] - 1;
    int c = 0;
    while (c < last && (strlen(CONSTANTS[c].name) != (size_t)length || memcmp(CONSTANTS[c].name, name, length))) c++;
    const int32_t *allowed = CONSTANTS[c].allowed;
    if (!allowed[0]) {
        if (value >= CONSTANTS[c].least) return LILY_OK;
        return cpu_fail(LILY_EINVAL, "kernel %s: constant %.*s is %d; allowed: %d or more", kernel, length, name, value,
            CONSTANTS[c].least);
    }
    char list[64] = "";
    for (size_t used = 0; *allowed; allowed++) {
        if (value == *allowed) return LILY_OK;
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%d", used ? ", " : "", *allowed);
    }
    return cpu_fail(LILY_EINVAL, "kernel %s: constant %.*s is %d; allowed: %s", kernel, length, name, value, list);
}

static int check_constants(const kernel_row *row, const int32_t *constants, uint32_t count) {
    uint32_t seen = 0;
    for (const char *name = row->constants; *name; seen++) {
        const int length = (int)strcspn(name, " ");
        if (seen < count) {
            const int code = check_constant(row->name, name, length, constants[seen]);
            if (code) return code;
        }
        name += length;
        name += *name == ' ';
    }
    if (seen == count) return LILY_OK;
    return cpu_fail(
        LILY_EINVAL, "kernel %s takes %u constants (%s), %u were given", row->name, seen, row->constants, count);
}

static const cpu_entry *find_entry(const cpu_entry *entry, const char *name) {
    while (entry->name && strcmp(entry->name, name)) entry++;
    return entry->name ? entry : NULL;
}

int lily_kernel_get(
    lily_device *device, const char *name, const int32_t *constants, uint32_t count, lily_kernel **out) {
    if (!device || !name || !out || (count && !constants))
        return cpu_fail(LILY_EINVAL, "lily_kernel_get: an argument is null");
    *out = NULL;
    const kernel_row *row = TABLE;
    while (row->name && strcmp(row->name, name)) row++;
    if (!row->name) return cpu_fail(LILY_ENOTFOUND, "there is no kernel \"%s\" in the kernel table", name);
    const cpu_entry *entry = find_entry(device->isa->kernels, name);
    if (!entry) return cpu_fail(LILY_ENOTFOUND, "the cpu device has no kernel \"%s\"", name);
    const int code = check_constants(row, constants, count);
    if (code) return code;
    pthread_mutex_lock(&device->mutex);
    lily_kernel *k = device->kernels;
    while (k && (k->row != row || (count && memcmp(k->constant, constants, count * sizeof *constants)))) k = k->next;
    if (!k && (k = calloc(1, sizeof *k))) {
        *k = (lily_kernel){.row = row, .entry = *entry, .device = device, .count = count, .next = device->kernels};
        if (count) memcpy(k->constant, constants, count * sizeof *constants);
        device->kernels = k;
    }
    pthread_mutex_unlock(&device->mutex);
    *out = k;
    return k ? LILY_OK : cpu_fail(LILY_ENOMEM, "no memory left for kernel %s", name);
}

// Kernels are compiled with the library and take groups of any size.
int lily_kernel_fit(lily_kernel *kernel, uint32_t threads) {
    (void)threads;
    return kernel ? LILY_OK : cpu_fail(LILY_EINVAL, "lily_kernel_fit: no kernel");
}
