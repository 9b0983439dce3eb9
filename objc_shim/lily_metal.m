// SPDX-License-Identifier: Apache-2.0
// The Metal device: lily_device.h on Apple's GPUs, with the classic Metal API of macOS 15.
// Manual retain/release.  All buffers are hazard-tracked, so command buffers that share memory run one after the other
// without fences; within a command buffer, whose one encoder is concurrent, barriers stand where the list says.
// With option replay=icb lists are indirect command buffers, which nothing tracks: fences order them (metal_replay.m).
// Not handled: several GPUs, GPUs without unified memory.
#include "metal_runtime.h"

#include <sys/mman.h>

// Buffers and lists may be freed after lily_close: the last one takes the device's record with it.
static void device_release(lily_device *d) {
    if (--d->users == 0) free(d);
}

// ---- open and close ---------------------------------------------------------------------------------------------------

// In a process without a window server's connection the default device can be nil where the list has it.
static id<MTLDevice> find_gpu(void) {
    id<MTLDevice> gpu = MTLCreateSystemDefaultDevice();
    if (gpu) return gpu;
    NSArray *all = MTLCopyAllDevices();
    if ([all count]) gpu = [[all objectAtIndex:0] retain];
    [all release];
    return gpu;
}

static int check_gpu(id<MTLDevice> gpu) {
    if (!gpu)
        return device_fail(LILY_EFAILED,
            "Metal finds no GPU here (a virtual machine, or a session without access to it?); use "
            "--device cpu");
    const char *name = text_of([gpu name]);
    const int version = macos_version();
    if (version < 1500)
        return device_fail(LILY_EFAILED,
            "%s: the metal device needs macOS 15 or later, this is %d.%d; use --device cpu", name, version / 100,
            version % 100);
    if (family_of(gpu) < 7 || ![gpu hasUnifiedMemory])
        return device_fail(LILY_EFAILED,
            "%s belongs to Apple GPU family %d; the metal device needs 7 (M1) or later with unified "
            "memory, use --device cpu",
            name, family_of(gpu));
    return LILY_OK;
}

static int check_capture(const open_options *o) {
    if (!o->capture[0]) return LILY_OK;
    if ([[MTLCaptureManager sharedCaptureManager] supportsDestination:MTLCaptureDestinationGPUTraceDocument])
        return LILY_OK;
    return device_fail(LILY_EFAILED,
        "Metal cannot write a GPU trace to %s; set MTL_CAPTURE_ENABLED=1 before the program starts", o->capture);
}

static int start(lily_device *d, const open_options *o) {
    // These are read when Metal starts; what the user set stays.
    setenv("AGX_RELAX_CDM_CTXSTORE_TIMEOUT", "1", 0);
    if (o->capture[0]) setenv("MTL_CAPTURE_ENABLED", "1", 0), setenv("METAL_CAPTURE_ENABLED", "1", 0);
    d->gpu = find_gpu();
    int code = check_gpu(d->gpu);
    if (!code) code = check_capture(o);
    if (code) return code;
    [d->gpu setShouldMaximizeConcurrentCompilation:YES];
    d->queue = [d->gpu newCommandQueueWithMaxCommandBufferCount:QUEUE_CAPACITY];
    if (!d->queue) return device_fail(LILY_EFAILED, "%s gave no command queue", text_of([d->gpu name]));
    code = replay_open(d, o);
    if (!code) code = library_open(d, o);
    return code ? code : residency_open(d, o->keep_s);
}

static void release_all(lily_device *d) {
    for (lily_kernel *k = d->kernels, *next; k; k = next) {
        next = k->next;
        kernel_release(k);
    }
    residency_release(d);
    [d->cache.found release];
    [d->cache.archive release];
    [d->fence release];
    [d->library release];
    [d->queue release];
    [d->gpu release];
    d->kernels = NULL;
}

void lily_close(lily_device *d) {
    if (!d) return;
    // A forked process has neither the threads nor the GPU's state of its parent: only its copy of the record goes.
    if (device_forked(d)) return device_release(d);
    @autoreleasepool {
        residency_close(d);
        cache_save(&d->cache);
        release_all(d);
    }
    pthread_cond_destroy(&d->keeper_wakes);
    pthread_mutex_destroy(&d->residency_mutex);
    pthread_cond_destroy(&d->kernel_made);
    pthread_mutex_destroy(&d->kernel_mutex);
    pthread_mutex_destroy(&d->cache.mutex);
    device_destroy(&d->head);
    device_release(d);
}

static int open_device(const char *text, lily_device **out) {
    open_options o = {.msl = "auto", .replay = "encode", .slice_ms = 250, .keep_s = 180, .capture_ticket = 2};
    int code = parse_options(&o, text);
    if (code) return code;
    lily_device *d = calloc(1, sizeof *d);
    if (!d) return device_fail(LILY_ENOMEM, "no memory left for a device");
    d->users = 1;
    device_init(&d->head);
    d->slice = o.slice_ms * 1e-3;
    snprintf(d->capture, sizeof d->capture, "%s", o.capture);
    d->capture_ticket = o.capture_ticket;
    pthread_mutex_init(&d->residency_mutex, NULL);
    pthread_mutex_init(&d->kernel_mutex, NULL);
    pthread_mutex_init(&d->cache.mutex, NULL);
    pthread_cond_init(&d->kernel_made, NULL);
    device_init_condition(&d->keeper_wakes);
    code = start(d, &o);
    if (code)
        lily_close(d);
    else
        *out = d;
    return code;
}

int lily_open(const char *options, lily_device **out, char *error, size_t error_bytes) {
    int code;
    @autoreleasepool {
        code = out ? open_device(options, out) : device_fail(LILY_EINVAL, "lily_open: no place for the result");
    }
    return device_opened(code, error, error_bytes);
}

int lily_info(lily_device *d, char *out, size_t bytes) {
    @autoreleasepool {
        const unsigned long long budget = [d->gpu recommendedMaxWorkingSetSize];
        const char *watchdog = getenv("AGX_RELAX_CDM_CTXSTORE_TIMEOUT");
        pthread_mutex_lock(&d->head.mutex);
        const double slice = d->slice;
        const unsigned long long buffers = d->command_buffers, submitted = d->head.submitted;
        pthread_mutex_unlock(&d->head.mutex);
        pthread_mutex_lock(&d->kernel_mutex);
        const compile_counts c = d->compiled;
        pthread_mutex_unlock(&d->kernel_mutex);
        char cache[sizeof d->cache.state];
        pthread_mutex_lock(&d->cache.mutex);
        memcpy(cache, d->cache.state, sizeof cache);
        pthread_mutex_unlock(&d->cache.mutex);
        const int length = snprintf(out, bytes,
            "name=metal\nchip=%s\nfamily=apple%d\nmemory=%llu\nmax_buffer=%llu\nallocated=%llu\nthreadgroup_memory=%lu\n"
            "shaders=%s\nmsl=%s\nmatrix=%s\nlibrary_s=%.3f\npipelines=%u\ncompiled=%u\ncache_hits=%u\nrebuilt=%u\n"
            "compile_s=%.3f\ncache=%s\nreplay=%s\nresidency=%s\nslice_ms=%.0f\nsubmissions=%llu\ncommand_buffers=%llu\n"
            "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=%s\n",
            text_of([d->gpu name]), family_of(d->gpu), budget, (unsigned long long)[d->gpu maxBufferLength],
            (unsigned long long)d->allocated, (unsigned long)[d->gpu maxThreadgroupMemoryLength],
            d->from_metallib ? "metallib" : "source", d->language, d->matrix, c.library_s, c.pipelines, c.compiled,
            c.cache_hits, c.rebuilt, c.seconds, cache, d->fence ? "icb" : "encode", d->keep ? "on" : "off", slice * 1e3,
            submitted, buffers, watchdog ? watchdog : "");
        return device_told(length, bytes);
    }
}

// ---- buffers ----------------------------------------------------------------------------------------------------------

static double gigabytes(uint64_t bytes) { return (double)bytes * 1e-9; }

static int check_budget(lily_device *d, uint64_t bytes) {
    const uint64_t most = [d->gpu maxBufferLength], budget = [d->gpu recommendedMaxWorkingSetSize];
    if (bytes > most)
        return device_fail(LILY_ENOMEM,
            "a buffer of %.2f GB is beyond what one buffer of this GPU may have (%.2f GB); choose a "
            "smaller max_context",
            gigabytes(bytes), gigabytes(most));
    if (bytes > budget || d->allocated > budget - bytes)
        return device_fail(LILY_ENOMEM,
            "%.2f GB more on top of %.2f GB do not fit into the %.2f GB that macOS lets the GPU use; choose a smaller "
            "max_context or model, or raise that limit (sudo sysctl iogpu.wired_limit_mb=MEGABYTES)",
            gigabytes(bytes), gigabytes(d->allocated), gigabytes(budget));
    return LILY_OK;
}

// Fresh pages are zero, which Metal does not promise of memory that it allocates itself.
static id<MTLBuffer> map_buffer(lily_device *d, size_t bytes) {
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (pages == MAP_FAILED) return nil;
    id<MTLBuffer> buffer = [d->gpu newBufferWithBytesNoCopy:pages
                                                     length:bytes
                                                    options:MTLResourceStorageModeShared
                                                deallocator:^(void *pointer, NSUInteger length) {
                                                  munmap(pointer, length);
                                                }];
    if (!buffer) munmap(pages, bytes);
    return buffer;
}

// All memory is shared: host and GPU of a Mac have the same.
int lily_buffer_new(lily_device *d, uint64_t bytes, int shared, lily_buffer **out) {
    (void)shared;
    if (!d || !out) return device_fail(LILY_EINVAL, "lily_buffer_new: an argument is null");
    *out = NULL;
    if (device_forked(d)) return device_lost(d);
    @autoreleasepool {
        const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
        const int code = check_budget(d, bytes);
        if (code) return code;
        lily_buffer *b = calloc(1, sizeof *b);
        if (!b) return device_fail(LILY_ENOMEM, "no memory left for a buffer's record");
        b->handle = map_buffer(d, (size_t)((bytes + (bytes == 0) + page - 1) / page * page));
        if (!b->handle) {
            free(b);
            return device_fail(LILY_ENOMEM,
                "Metal refused a buffer of %.2f GB, %.2f GB are in use; close other programs or "
                "choose a smaller max_context",
                gigabytes(bytes), gigabytes(d->allocated));
        }
        b->device = d;
        b->head.bytes = bytes;
        b->head.memory = [b->handle contents];
        d->allocated += bytes;
        d->users++;
        residency_add(d, b->handle);
        *out = b;
        return LILY_OK;
    }
}

void lily_buffer_free(lily_buffer *b) {
    if (!b) return;
    lily_device *d = b->device;
    @autoreleasepool {
        if (!device_forked(d)) residency_drop(d, b->handle);
        d->allocated -= b->head.bytes;
        if (!device_forked(d)) [b->handle release];
    }
    free(b);
    device_release(d);
}

// ---- kernels ----------------------------------------------------------------------------------------------------------

int lily_kernel_get(lily_device *d, const char *name, const int32_t *constants, uint32_t count, lily_kernel **out) {
    const kernel_row *row;
    const int code = device_check_kernel(d, name, constants, count, out, &row);
    if (code) return code;
    @autoreleasepool {
        return kernel_get(d, row, constants, count, out);
    }
}

int lily_kernel_fit(lily_kernel *k, uint32_t threads) {
    if (!k) return device_fail(LILY_EINVAL, "lily_kernel_fit: no kernel");
    if (device_forked(k->head.device)) return device_lost(k->head.device);
    const uint32_t group[3] = {threads, 1, 1};
    const int code = record_check_threads(k->head.row, group);
    if (code) return code;
    @autoreleasepool {
        return kernel_pipeline(k, threads) ? LILY_OK : LILY_EFAILED;
    }
}

// ---- lists ------------------------------------------------------------------------------------------------------------

int lily_list_new(lily_device *d, lily_list **out) {
    if (!d || !out) return device_fail(LILY_EINVAL, "lily_list_new: an argument is null");
    *out = calloc(1, sizeof **out);
    if (!*out) return device_fail(LILY_ENOMEM, "no memory left for a list");
    (*out)->head.device = d;
    d->users++;
    return LILY_OK;
}

void lily_list_free(lily_list *list) {
    if (!list) return;
    lily_device *d = list->head.device;
    replay_free(list);
    lily_buffer_free(list->constants);
    free(list->dispatch);
    free(list->buffers);
    free(list->offsets);
    free(list->params);
    free(list);
    device_release(d);
}

int lily_list_dispatch(lily_list *l, lily_kernel *k, const lily_arg *args, uint32_t arg_count, const void *params,
    uint32_t param_bytes, const uint32_t grid[3], const uint32_t threads[3], int barrier) {
    if (!threads) return device_fail(LILY_EINVAL, "lily_list_dispatch: an argument is null");
    int code = device_check_dispatch(l, k, args, arg_count, params, param_bytes, grid);
    if (!code) code = record_check_threads(k->head.row, threads);
    if (code) return code;
    @autoreleasepool {
        id<MTLComputePipelineState> pipeline = kernel_pipeline(k, threads[0] * threads[1] * threads[2]);
        if (!pipeline) return LILY_EFAILED;
        return record_append(l, k, pipeline, args, params, grid, threads, barrier != 0);
    }
}

int lily_list_end(lily_list *l) {
    int code = device_check_end(l);
    if (code) return code;
    if (device_forked(l->head.device)) return device_lost(l->head.device);
    @autoreleasepool {
        code = record_params(l);
        if (!code && l->head.device->fence) code = replay_record(l);
        if (code) return code;
        l->head.ended = true;
        residency_request(l->head.device);
    }
    return LILY_OK;
}

// ---- submission -------------------------------------------------------------------------------------------------------

static int begin_capture(lily_device *d, uint64_t ticket) {
    NSError *error = nil;
    if (!d->capture[0] || ticket != d->capture_ticket) return LILY_OK;
    MTLCaptureDescriptor *descriptor = [[[MTLCaptureDescriptor alloc] init] autorelease];
    [descriptor setCaptureObject:(NSObject *)d->queue];
    [descriptor setDestination:MTLCaptureDestinationGPUTraceDocument];
    [descriptor setOutputURL:[NSURL fileURLWithPath:[NSString stringWithUTF8String:d->capture]]];
    if ([[MTLCaptureManager sharedCaptureManager] startCaptureWithDescriptor:descriptor error:&error]) return LILY_OK;
    return device_fail(LILY_EFAILED, "the GPU trace %s cannot be written: %s", d->capture, reason(error));
}

static void end_capture(lily_device *d, uint64_t ticket) {
    if (d->capture[0] && ticket == d->capture_ticket) [[MTLCaptureManager sharedCaptureManager] stopCapture];
}

int lily_submit(lily_device *d, lily_list *const *lists, uint32_t count, uint64_t *ticket) {
    int code = device_check_submission(d, lists, count);
    if (!code && count > MAX_LISTS)
        code = device_fail(LILY_EINVAL, "a submission of %u lists; allowed: 0 to %d", count, MAX_LISTS);
    if (code) return code;
    submission *s = submission_begin(d, &code);
    if (!s) return code;
    if (ticket) *ticket = s->ticket;
    @autoreleasepool {
        residency_request(d);
        code = begin_capture(d, s->ticket);
        if (!code) submission_encode(d, s, lists, count);
        if (!code) end_capture(d, s->ticket);
    }
    submission_end(d, s, code);
    return LILY_OK; // what went wrong is told by lily_wait
}
