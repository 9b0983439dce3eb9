// SPDX-License-Identifier: Apache-2.0
// Recording: checks each dispatch, resolves its buffers to addresses, and splits the list into phases, the runs of
// dispatches between barriers.  After lily_list_end a list is constant.
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

struct recorded {
    const lily_kernel *kernel;
    void *arg[LILY_MAX_ARGS];
    _Alignas(16) unsigned char params[LILY_MAX_PARAM_BYTES];
    uint32_t grid[3];
    bool barrier;
};

int lily_list_new(lily_device *device, lily_list **out) {
    if (!device || !out) return cpu_fail(LILY_EINVAL, "lily_list_new: an argument is null");
    *out = calloc(1, sizeof **out);
    if (!*out) return cpu_fail(LILY_ENOMEM, "no memory left for a list");
    (*out)->device = device;
    return LILY_OK;
}

void lily_list_free(lily_list *list) {
    if (!list) return;
    free(list->recorded);
    free(list->dispatch);
    free(list->phase);
    free(list);
}

static int check_args(const kernel_row *row, const lily_arg *args, uint32_t count) {
    if (count != row->args || count > LILY_MAX_ARGS)
        return cpu_fail(LILY_EINVAL, "kernel %s takes %u buffers, %u were given", row->name, row->args, count);
    for (uint32_t i = 0; i < count; i++) {
        if (!args[i].buffer) return cpu_fail(LILY_EINVAL, "kernel %s: buffer %u is null", row->name, i);
        if (args[i].offset % 16)
            return cpu_fail(LILY_EINVAL, "kernel %s: offset %llu of buffer %u is no multiple of 16", row->name,
                (unsigned long long)args[i].offset, i);
        if (args[i].offset > args[i].buffer->bytes)
            return cpu_fail(LILY_EINVAL, "kernel %s: offset %llu lies beyond the %llu bytes of buffer %u", row->name,
                (unsigned long long)args[i].offset, (unsigned long long)args[i].buffer->bytes, i);
    }
    return LILY_OK;
}

static int check_grid(const kernel_row *row, const uint32_t grid[3]) {
    uint64_t groups = grid[0];
    for (int i = 1; i < 3 && groups <= UINT32_MAX; i++) groups *= grid[i];
    if (groups >= 1 && groups <= UINT32_MAX) return LILY_OK;
    return cpu_fail(LILY_EINVAL, "kernel %s: a grid of %u x %u x %u groups; allowed: 1 to %u", row->name, grid[0],
        grid[1], grid[2], UINT32_MAX);
}

static struct recorded *append(lily_list *list) {
    if (list->count == list->capacity) {
        const uint32_t capacity = list->capacity ? 2 * list->capacity : 64;
        void *bigger = realloc(list->recorded, capacity * sizeof *list->recorded);
        if (!bigger) return NULL;
        list->recorded = bigger;
        list->capacity = capacity;
    }
    return &list->recorded[list->count++];
}

int lily_list_dispatch(lily_list *list, lily_kernel *kernel, const lily_arg *args, uint32_t arg_count,
    const void *params, uint32_t param_bytes, const uint32_t grid[3], const uint32_t threads[3], int barrier) {
    (void)threads;
    if (!list || !kernel || !args || !grid || (param_bytes && !params))
        return cpu_fail(LILY_EINVAL, "lily_list_dispatch: an argument is null");
    const kernel_row *row = kernel->row;
    if (list->ended) return cpu_fail(LILY_EINVAL, "kernel %s: this list has ended; record a new one", row->name);
    if (kernel->device != list->device)
        return cpu_fail(LILY_EINVAL, "kernel %s belongs to another device than the list", row->name);
    if (param_bytes != row->param_bytes || param_bytes > LILY_MAX_PARAM_BYTES)
        return cpu_fail(LILY_EINVAL, "kernel %s takes %u bytes of parameters, %u were given", row->name,
            row->param_bytes, param_bytes);
    int code = check_args(row, args, arg_count);
    if (!code) code = check_grid(row, grid);
    if (code) return code;
    struct recorded *r = append(list);
    if (!r) return cpu_fail(LILY_ENOMEM, "no memory left for dispatch %u of a list", list->count);
    r->kernel = kernel;
    for (uint32_t i = 0; i < arg_count; i++) r->arg[i] = args[i].buffer->contents + args[i].offset;
    if (param_bytes) memcpy(r->params, params, param_bytes);
    memcpy(r->grid, grid, sizeof r->grid);
    r->barrier = barrier != 0;
    return LILY_OK;
}

// One phase per run of dispatches without a barrier; a run with too many chunks for one phase becomes several.
static uint32_t split(const lily_list *list, pool_phase *phase) {
    uint32_t phases = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const pool_dispatch *d = &list->dispatch[i];
        pool_phase *last = phases ? &phase[phases - 1] : NULL;
        if (!last || list->recorded[i].barrier || last->chunks + d->chunks > POOL_MAX_CHUNKS)
            phase[phases++] = (pool_phase){.dispatch = d, .count = 1, .chunks = d->chunks};
        else
            last->count++, last->chunks += d->chunks;
    }
    return phases;
}

int lily_list_end(lily_list *list) {
    if (!list) return cpu_fail(LILY_EINVAL, "lily_list_end: no list");
    if (list->ended) return cpu_fail(LILY_EINVAL, "this list has ended already");
    list->dispatch = calloc(list->count + 1, sizeof *list->dispatch);
    list->phase = calloc(list->count + 1, sizeof *list->phase);
    if (!list->dispatch || !list->phase)
        return cpu_fail(LILY_ENOMEM, "no memory left for a list of %u dispatches", list->count);
    const uint32_t threads = list->device->pool ? pool_threads(list->device->pool) : 1;
    for (uint32_t i = 0; i < list->count; i++) {
        struct recorded *r = &list->recorded[i];
        const uint32_t groups = r->grid[0] * r->grid[1] * r->grid[2];
        list->dispatch[i] = (pool_dispatch){
            .run = r->kernel->entry.run,
            .call = {.arg = r->arg, .params = r->params, .constant = r->kernel->constant},
            .groups = groups,
            .chunks = pool_chunks(threads, groups, r->kernel->entry.grain),
        };
        memcpy(list->dispatch[i].call.grid, r->grid, sizeof r->grid);
    }
    list->phases = split(list, list->phase);
    list->ended = true;
    return LILY_OK;
}
