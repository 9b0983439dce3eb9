// SPDX-License-Identifier: Apache-2.0
// Recording: resolves the buffers of each dispatch to addresses, and splits the list into phases, the runs of
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
    if (!device || !out) return device_fail(LILY_EINVAL, "lily_list_new: an argument is null");
    *out = calloc(1, sizeof **out);
    if (!*out) return device_fail(LILY_ENOMEM, "no memory left for a list");
    (*out)->head.device = device;
    return LILY_OK;
}

void lily_list_free(lily_list *list) {
    if (!list) return;
    free(list->recorded);
    free(list->dispatch);
    free(list->phase);
    free(list);
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
    const int code = device_check_dispatch(list, kernel, args, arg_count, params, param_bytes, grid);
    if (code) return code;
    struct recorded *r = append(list);
    if (!r) return device_fail(LILY_ENOMEM, "no memory left for dispatch %u of a list", list->count);
    r->kernel = kernel;
    for (uint32_t i = 0; i < arg_count; i++) r->arg[i] = args[i].buffer->head.memory + args[i].offset;
    if (param_bytes) memcpy(r->params, params, param_bytes);
    memcpy(r->grid, grid, sizeof r->grid);
    r->barrier = barrier != 0;
    return LILY_OK;
}

// One phase per run of dispatches without a barrier; a run with too many shares for one phase becomes several.
static uint32_t split(const lily_list *list, pool_phase *phase) {
    uint32_t phases = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        const pool_dispatch *d = &list->dispatch[i];
        pool_phase *last = phases ? &phase[phases - 1] : NULL;
        if (!last || list->recorded[i].barrier || last->shares + d->shares > POOL_MAX_SHARES)
            phase[phases++] = (pool_phase){.dispatch = d, .count = 1, .shares = d->shares};
        else
            last->count++, last->shares += d->shares;
    }
    return phases;
}

int lily_list_end(lily_list *list) {
    const int code = device_check_end(list);
    if (code) return code;
    list->dispatch = calloc(list->count + 1, sizeof *list->dispatch);
    list->phase = calloc(list->count + 1, sizeof *list->phase);
    if (!list->dispatch || !list->phase)
        return device_fail(LILY_ENOMEM, "no memory left for a list of %u dispatches", list->count);
    const uint32_t threads = list->head.device->pool ? pool_threads(list->head.device->pool) : 1;
    for (uint32_t i = 0; i < list->count; i++) {
        struct recorded *r = &list->recorded[i];
        const uint32_t groups = r->grid[0] * r->grid[1] * r->grid[2];
        list->dispatch[i] = (pool_dispatch){
            .run = r->kernel->entry.run,
            .call = {.arg = r->arg, .params = r->params, .constant = r->kernel->constant},
            .groups = groups,
            .shares = pool_shares(threads, groups, r->kernel->entry.grain),
        };
        memcpy(list->dispatch[i].call.grid, r->grid, sizeof r->grid);
    }
    list->phases = split(list, list->phase);
    list->head.ended = true;
    return LILY_OK;
}
