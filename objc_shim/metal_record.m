// SPDX-License-Identifier: Apache-2.0
// Recording: the list's flat arrays from which encoding needs no allocation.
#include "metal_runtime.h"

int record_check_threads(const kernel_row *row, const uint32_t threads[3]) {
    const uint64_t size = (uint64_t)threads[0] * threads[1] * threads[2];
    if (threads[0] > 1024 || threads[1] > 1024 || threads[2] > 1024 || size % SIMD_WIDTH || !size || size > 1024)
        return device_fail(LILY_EINVAL,
            "kernel %s: %u x %u x %u threads in a group; allowed: multiples of %d up to 1024", row->name, threads[0],
            threads[1], threads[2], SIMD_WIDTH);
    return LILY_OK;
}

// Makes room for `more` items after `used`; false if there is no memory.
static bool grow(void **items, uint32_t *capacity, uint32_t used, uint32_t more, size_t size) {
    if (used + more <= *capacity) return true;
    const uint32_t capacity_new = 2 * *capacity > used + more ? 2 * *capacity : used + more + 64;
    void *bigger = realloc(*items, capacity_new * size);
    if (!bigger) return false;
    *items = bigger;
    *capacity = capacity_new;
    return true;
}

static bool ensure_capacity(lily_list *l, uint32_t bindings) {
    uint32_t offsets = l->binding_capacity;
    return grow((void **)&l->dispatch, &l->capacity, l->count, 1, sizeof *l->dispatch) &&
        grow((void **)&l->offsets, &offsets, l->bindings, bindings, sizeof *l->offsets) &&
        grow((void **)&l->buffers, &l->binding_capacity, l->bindings, bindings, sizeof *l->buffers) &&
        grow((void **)&l->params, &l->param_capacity, l->param_bytes, PARAM_ALIGNMENT, 1);
}

static void bind_buffer(lily_list *l, id<MTLBuffer> buffer, NSUInteger offset) {
    l->buffers[l->bindings] = buffer;
    l->offsets[l->bindings++] = offset;
}

// What a thread does compared with one of the largest GEMM tile: in proportion to the rows of its tile.  With this, lists
// for 256 to 2,048 rows have the same work in proportion to their multiplications within a factor of two.
#define LARGEST_TILE 64.0

static double weight_of(const lily_kernel *k) {
    uint32_t i = 0;
    for (const char *name = k->head.row->constants; *name; name = device_next_name(name), i++) {
        if (!strncmp(name, "tile_m", strcspn(name, " "))) return k->constant[i] / LARGEST_TILE;
    }
    return 1;
}

int record_append(lily_list *l, const lily_kernel *k, id<MTLComputePipelineState> pipeline, const lily_arg *args,
    const void *params, const uint32_t grid[3], const uint32_t threads[3], bool barrier) {
    const kernel_row *row = k->head.row;
    if (!ensure_capacity(l, row->args + 1))
        return device_fail(LILY_ENOMEM, "no memory left for dispatch %u of a list", l->count);
    recorded *r = &l->dispatch[l->count++];
    *r = (recorded){
        .kernel = k, .pipeline = pipeline, .first = l->bindings, .params = l->param_bytes, .barrier = barrier};
    for (uint32_t i = 0; i < row->args; i++) bind_buffer(l, args[i].buffer->handle, args[i].offset);
    if (row->param_bytes) {
        bind_buffer(l, nil, l->param_bytes); // the buffer comes with lily_list_end
        memset(l->params + l->param_bytes, 0, PARAM_ALIGNMENT);
        memcpy(l->params + l->param_bytes, params, row->param_bytes);
        l->param_bytes += PARAM_ALIGNMENT;
    }
    r->bindings = l->bindings - r->first;
    r->grid = MTLSizeMake(grid[0], grid[1], grid[2]);
    r->threads = MTLSizeMake(threads[0], threads[1], threads[2]);
    r->work = weight_of(k) * grid[0] * grid[1] * grid[2] * threads[0] * threads[1] * threads[2];
    l->work += r->work;
    return LILY_OK;
}

int record_params(lily_list *l) {
    if (l->param_bytes) {
        const int code = lily_buffer_new(l->head.device, l->param_bytes, true, &l->constants);
        if (code) return code;
        memcpy(lily_buffer_contents(l->constants), l->params, l->param_bytes);
    }
    for (uint32_t i = 0; i < l->bindings; i++) {
        if (!l->buffers[i]) l->buffers[i] = l->constants->handle;
    }
    free(l->params);
    l->params = NULL;
    return LILY_OK;
}
