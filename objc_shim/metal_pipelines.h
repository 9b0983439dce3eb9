// SPDX-License-Identifier: Apache-2.0
// From a row of the kernel table to a compiled pipeline: function constants, binary archive, limits.
#ifndef LILY_METAL_PIPELINES_H
#define LILY_METAL_PIPELINES_H

#include "kernel_params.h"
#include "metal_cache.h"

#define ROW(name, args, constants, param_bytes) {#name, args, constants, param_bytes},
static const kernel_row TABLE[] = {LILY_KERNEL_TABLE(ROW){NULL, 0, NULL, 0}};
#undef ROW

static const char *next_name(const char *name) {
    name += strcspn(name, " ");
    return name + (*name == ' ');
}

// Function constants are numbered over the whole library, in the order in which the table first names them
// (lily/msl/flatten.py does the same).
static NSUInteger constant_index(const char *wanted) {
    const char *seen[256];
    const size_t length = strcspn(wanted, " ");
    size_t count = 0;
    for (const kernel_row *row = TABLE; row->name; row++) {
        for (const char *name = row->constants; *name; name = next_name(name)) {
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
    for (const char *name = row->constants; *name; name = next_name(name))
        [values setConstantValue:constants++ type:MTLDataTypeInt atIndex:constant_index(name)];
    return [d->library newFunctionWithName:[NSString stringWithUTF8String:row->name] constantValues:values error:error];
}

// `threads`: what a threadgroup must be allowed to have, at the price of registers; 0: as the compiler likes.
static id<MTLComputePipelineState> build(
    lily_device *d, const kernel_row *row, id<MTLFunction> function, uint32_t threads, NSError **error) {
    MTLComputePipelineDescriptor *descriptor = [[[MTLComputePipelineDescriptor alloc] init] autorelease];
    [descriptor setLabel:[NSString stringWithUTF8String:row->name]];
    [descriptor setComputeFunction:function];
    [descriptor setThreadGroupSizeIsMultipleOfThreadExecutionWidth:YES];
    if (threads) [descriptor setMaxTotalThreadsPerThreadgroup:threads];
    d->pipelines++;
    if (d->cache.archive) {
        [descriptor setBinaryArchives:[NSArray arrayWithObject:d->cache.archive]];
        id<MTLComputePipelineState> found =
            [d->gpu newComputePipelineStateWithDescriptor:descriptor
                                                  options:MTLPipelineOptionFailOnBinaryArchiveMiss
                                               reflection:NULL
                                                    error:NULL];
        if (found) return d->cache.hits++, found;
    }
    // Into the archive first: then the pipeline comes from there and is compiled only once.
    cache_add(&d->cache, descriptor);
    return [d->gpu newComputePipelineStateWithDescriptor:descriptor
                                                 options:MTLPipelineOptionNone
                                              reflection:NULL
                                                   error:error];
}

static int check_pipeline(lily_device *d, const kernel_row *row, id<MTLComputePipelineState> pipeline) {
    if ([pipeline threadExecutionWidth] != SIMD_WIDTH)
        return fail(LILY_EFAILED, "kernel %s runs in simdgroups of %lu threads; the shaders need %d", row->name,
            (unsigned long)[pipeline threadExecutionWidth], SIMD_WIDTH);
    if ([pipeline staticThreadgroupMemoryLength] > [d->gpu maxThreadgroupMemoryLength])
        return fail(LILY_EFAILED, "kernel %s needs %lu bytes of threadgroup memory; this GPU has %lu", row->name,
            (unsigned long)[pipeline staticThreadgroupMemoryLength],
            (unsigned long)[d->gpu maxThreadgroupMemoryLength]);
    return LILY_OK;
}

static int make_kernel(lily_device *d, lily_kernel *k) {
    NSError *error = nil;
    k->function = specialise(d, k->row, k->constant, &error);
    if (!k->function) return fail(LILY_ENOTFOUND, "the shaders give no kernel %s: %s", k->row->name, reason(error));
    k->pipeline = build(d, k->row, k->function, 0, &error);
    if (!k->pipeline)
        return fail(LILY_EFAILED, "Metal makes no pipeline of kernel %s: %s", k->row->name, reason(error));
    return check_pipeline(d, k->row, k->pipeline);
}

static const kernel_row *find_row(const char *name) {
    const kernel_row *row = TABLE;
    while (row->name && strcmp(row->name, name)) row++;
    return row->name ? row : NULL;
}

// Whether a kernel of the library becomes a pipeline; what it made is thrown away.
static int probe(lily_device *d, const char *name, const int32_t *constants) {
    lily_kernel k = {.device = d, .row = find_row(name)};
    for (const char *c = k.row->constants; *c; c = next_name(c)) k.constant[k.count] = constants[k.count], k.count++;
    const int code = make_kernel(d, &k);
    [k.pipeline release];
    [k.function release];
    d->pipelines = 0;
    d->cache.misses = 0;
    return code;
}

// The kernel's pipeline for threadgroups of `threads`; nil with the error text if there is none.
static id<MTLComputePipelineState> pipeline_for(lily_kernel *k, uint32_t threads) {
    NSError *error = nil;
    if (threads <= [k->pipeline maxTotalThreadsPerThreadgroup]) return k->pipeline;
    if (k->wide && threads <= [k->wide maxTotalThreadsPerThreadgroup]) return k->wide;
    if (!k->wide) {
        k->wide = build(k->device, k->row, k->function, threads, &error);
        k->device->rebuilt += k->wide != nil;
        if (threads <= [k->wide maxTotalThreadsPerThreadgroup]) return k->wide;
    }
    fail(LILY_EFAILED, "kernel %s cannot have %u threads in a threadgroup on this GPU, at most %lu%s%s", k->row->name,
        threads, (unsigned long)[k->pipeline maxTotalThreadsPerThreadgroup], error ? ": " : "",
        error ? reason(error) : "");
    return nil;
}

#endif
