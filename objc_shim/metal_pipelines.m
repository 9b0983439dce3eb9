// SPDX-License-Identifier: Apache-2.0
// From a row of the kernel table to a compiled pipeline: function constants, binary archive, limits; one thread at a
// time for a kernel, any number for different ones.
#include "metal_runtime.h"

// Function constants are numbered over the whole library, in the order in which the table first names them
// (lily/msl/flatten.py does the same).
static NSUInteger constant_index(const char *wanted) {
    const char *seen[256];
    const size_t length = strcspn(wanted, " ");
    size_t count = 0;
    for (const kernel_row *row = device_kernel_table(); row->name; row++) {
        for (const char *name = row->constants; *name; name = device_next_name(name)) {
            size_t i = 0;
            const size_t bytes = strcspn(name, " ");
            while (i < count && (strcspn(seen[i], " ") != bytes || memcmp(seen[i], name, bytes))) i++;
            if (i == count && count < sizeof seen / sizeof *seen) seen[count++] = name;
            if (bytes == length && !memcmp(name, wanted, length)) return i;
        }
    }
    return NSUIntegerMax;
}

static id<MTLFunction> specialise(lily_device *d, const kernel_row *row, const int32_t *constants, NSError **error) {
    MTLFunctionConstantValues *values = [[[MTLFunctionConstantValues alloc] init] autorelease];
    for (const char *name = row->constants; *name; name = device_next_name(name))
        [values setConstantValue:constants++ type:MTLDataTypeInt atIndex:constant_index(name)];
    return [d->library newFunctionWithName:[NSString stringWithUTF8String:row->name] constantValues:values error:error];
}

static void count_made(lily_device *d, uint32_t threads, bool hit) {
    pthread_mutex_lock(&d->kernel_mutex);
    d->compiled.pipelines++;
    d->compiled.cache_hits += hit;
    d->compiled.compiled += !hit;
    d->compiled.rebuilt += threads != 0;
    pthread_mutex_unlock(&d->kernel_mutex);
}

// `threads`: what a threadgroup must be allowed to have, at the price of registers; 0: as the compiler likes.
static id<MTLComputePipelineState> build(
    lily_device *d, const kernel_row *row, id<MTLFunction> function, uint32_t threads, NSError **error) {
    MTLComputePipelineDescriptor *descriptor = [[[MTLComputePipelineDescriptor alloc] init] autorelease];
    id<MTLComputePipelineState> made = nil;
    [descriptor setLabel:[NSString stringWithUTF8String:row->name]];
    [descriptor setComputeFunction:function];
    [descriptor setThreadGroupSizeIsMultipleOfThreadExecutionWidth:YES];
    if (d->fence) [descriptor setSupportIndirectCommandBuffers:YES];
    if (threads) [descriptor setMaxTotalThreadsPerThreadgroup:threads];
    if (d->cache.found) {
        [descriptor setBinaryArchives:[NSArray arrayWithObject:d->cache.found]];
        made = [d->gpu newComputePipelineStateWithDescriptor:descriptor
                                                     options:MTLPipelineOptionFailOnBinaryArchiveMiss
                                                  reflection:NULL
                                                       error:NULL];
    }
    const bool hit = made != nil;
    if (!hit)
        made = [d->gpu newComputePipelineStateWithDescriptor:descriptor
                                                     options:MTLPipelineOptionNone
                                                  reflection:NULL
                                                       error:error];
    if (made) count_made(d, threads, hit);
    if (made && !hit) cache_add(&d->cache, d->gpu, descriptor);
    return made;
}

static int check_pipeline(lily_device *d, const kernel_row *row, id<MTLComputePipelineState> pipeline) {
    if ([pipeline threadExecutionWidth] != SIMD_WIDTH)
        return device_fail(LILY_EFAILED, "kernel %s runs in simdgroups of %lu threads; the shaders need %d", row->name,
            (unsigned long)[pipeline threadExecutionWidth], SIMD_WIDTH);
    if ([pipeline staticThreadgroupMemoryLength] > [d->gpu maxThreadgroupMemoryLength])
        return device_fail(LILY_EFAILED, "kernel %s needs %lu bytes of threadgroup memory; this GPU has %lu", row->name,
            (unsigned long)[pipeline staticThreadgroupMemoryLength],
            (unsigned long)[d->gpu maxThreadgroupMemoryLength]);
    return LILY_OK;
}

static int make_kernel(lily_device *d, lily_kernel *k) {
    NSError *error = nil;
    k->function = specialise(d, k->head.row, k->constant, &error);
    if (!k->function)
        return device_fail(LILY_ENOTFOUND, "the shaders give no kernel %s: %s", k->head.row->name, reason(error));
    k->pipeline = build(d, k->head.row, k->function, 0, &error);
    if (!k->pipeline)
        return device_fail(LILY_EFAILED, "Metal makes no pipeline of kernel %s: %s", k->head.row->name, reason(error));
    return check_pipeline(d, k->head.row, k->pipeline);
}

int kernel_probe(lily_device *d, lily_kernel k) {
    const int code = make_kernel(d, &k);
    [k.pipeline release];
    [k.function release];
    d->compiled = (compile_counts){.library_s = d->compiled.library_s};
    return code;
}

// ---- one thread at a time ---------------------------------------------------------------------------------------------

// Both with `kernel_mutex` held; in between, the kernel is this thread's, without the mutex.
static void claim(lily_kernel *k) {
    lily_device *d = k->head.device;
    k->busy = true;
    if (!d->compiled.active++) d->compiled.since = device_nanoseconds();
    pthread_mutex_unlock(&d->kernel_mutex);
}

static void yield_kernel(lily_kernel *k) {
    lily_device *d = k->head.device;
    pthread_mutex_lock(&d->kernel_mutex);
    k->busy = false;
    if (!--d->compiled.active) d->compiled.seconds += (double)(device_nanoseconds() - d->compiled.since) * 1e-9;
    pthread_cond_broadcast(&d->kernel_made);
}

static lily_kernel *find_kernel(lily_device *d, const kernel_row *row, const int32_t *constants, uint32_t count) {
    lily_kernel *k = d->kernels;
    while (k && (k->head.row != row || (count && memcmp(k->constant, constants, count * sizeof *constants))))
        k = k->next;
    return k;
}

static lily_kernel *add_kernel(lily_device *d, const kernel_row *row, const int32_t *constants, uint32_t count) {
    lily_kernel *k = calloc(1, sizeof *k);
    if (!k) return NULL;
    *k = (lily_kernel){.head = {d, row}, .count = count, .next = d->kernels};
    if (count) memcpy(k->constant, constants, count * sizeof *constants);
    return d->kernels = k;
}

void kernel_release(lily_kernel *k) {
    for (uint32_t i = 0; i < k->wides; i++) [k->wide[i] release];
    [k->pipeline release];
    [k->function release];
    free(k);
}

static void drop_kernel(lily_device *d, lily_kernel *k) {
    lily_kernel **link = &d->kernels;
    while (*link != k) link = &(*link)->next;
    *link = k->next;
    kernel_release(k);
}

// The kernel, compiled.  Who comes while another thread compiles it waits; after a failure he tries himself.
int kernel_get(lily_device *d, const kernel_row *row, const int32_t *constants, uint32_t count, lily_kernel **out) {
    lily_kernel *k;
    int code = LILY_OK;
    pthread_mutex_lock(&d->kernel_mutex);
    while ((k = find_kernel(d, row, constants, count)) && k->busy) pthread_cond_wait(&d->kernel_made, &d->kernel_mutex);
    if (!k && !(k = add_kernel(d, row, constants, count))) {
        code = device_fail(LILY_ENOMEM, "no memory left for kernel %s", row->name);
    } else if (!k->pipeline) {
        claim(k);
        code = make_kernel(d, k);
        yield_kernel(k);
        if (code) drop_kernel(d, k);
    }
    pthread_mutex_unlock(&d->kernel_mutex);
    if (!code) *out = k;
    return code;
}

static id<MTLComputePipelineState> fitting(const lily_kernel *k, uint32_t threads) {
    if (threads <= [k->pipeline maxTotalThreadsPerThreadgroup]) return k->pipeline;
    for (uint32_t i = 0; i < k->wides; i++) {
        if (threads <= [k->wide[i] maxTotalThreadsPerThreadgroup]) return k->wide[i];
    }
    return nil;
}

// A pipeline that was given out stays: lists use it.
id<MTLComputePipelineState> kernel_pipeline(lily_kernel *k, uint32_t threads) {
    lily_device *d = k->head.device;
    NSError *error = nil;
    pthread_mutex_lock(&d->kernel_mutex);
    while (k->busy) pthread_cond_wait(&d->kernel_made, &d->kernel_mutex);
    if (!fitting(k, threads) && k->wides < MAX_WIDE) {
        claim(k);
        id<MTLComputePipelineState> made = build(d, k->head.row, k->function, threads, &error);
        yield_kernel(k);
        if (made) k->wide[k->wides++] = made;
    }
    id<MTLComputePipelineState> found = fitting(k, threads);
    pthread_mutex_unlock(&d->kernel_mutex);
    if (found) return found;
    device_fail(LILY_EFAILED, "kernel %s cannot have %u threads in a threadgroup on this GPU, at most %lu%s%s",
        k->head.row->name, threads, (unsigned long)[k->pipeline maxTotalThreadsPerThreadgroup], error ? ": " : "",
        error ? reason(error) : "");
    return nil;
}
