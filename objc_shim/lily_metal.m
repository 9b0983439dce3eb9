// SPDX-License-Identifier: Apache-2.0
// The Metal device: lily_device.h on Apple's GPUs, with the classic Metal API of macOS 15.
// Manual retain/release.  All buffers are hazard-tracked, so command buffers that share memory run one after the other
// without fences; within a command buffer, whose one encoder is concurrent, barriers stand where the list says.
// With option replay=icb lists are indirect command buffers, which nothing tracks: fences order them (metal_replay.h).
// Not handled: several GPUs, GPUs without unified memory.
#include "metal_encode.h"
#include "metal_library.h"
#include "metal_record.h"
#include "metal_replay.h"

#include <sys/mman.h>

uint32_t lily_abi_version(void) { return LILY_ABI_VERSION; }

const char *lily_error(lily_device *device) {
    (void)device;
    return error_text;
}

static bool forked(const lily_device *d) { return d->process != (long)getpid(); }

static int lost(const lily_device *d) {
    return fail(
        LILY_ELOST, "this device belongs to process %ld, which forked; open a device in this process", d->process);
}

// Buffers and lists may be freed after lily_close: the last one takes the device's record with it.
static void forget(lily_device *d) {
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
        return fail(LILY_EFAILED,
            "Metal finds no GPU here (a virtual machine, or a session without access to it?); use "
            "--device cpu");
    const char *name = text_of([gpu name]);
    const int version = macos_version();
    if (version < 1500)
        return fail(LILY_EFAILED, "%s: the metal device needs macOS 15 or later, this is %d.%d; use --device cpu", name,
            version / 100, version % 100);
    if (family_of(gpu) < 7 || ![gpu hasUnifiedMemory])
        return fail(LILY_EFAILED,
            "%s belongs to Apple GPU family %d; the metal device needs 7 (M1) or later with unified "
            "memory, use --device cpu",
            name, family_of(gpu));
    return LILY_OK;
}

static int check_capture(const open_options *o) {
    if (!o->capture[0]) return LILY_OK;
    if ([[MTLCaptureManager sharedCaptureManager] supportsDestination:MTLCaptureDestinationGPUTraceDocument])
        return LILY_OK;
    return fail(LILY_EFAILED,
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
    if (!d->queue) return fail(LILY_EFAILED, "%s gave no command queue", text_of([d->gpu name]));
    code = replay_open(d, o);
    if (!code) code = open_library(d, o);
    return code ? code : set_open(d, o->keep_s);
}

static void release_all(lily_device *d) {
    for (lily_kernel *k = d->kernels, *next; k; k = next) {
        next = k->next;
        release_kernel(k);
    }
    if (d->set) {
        if (d->set_held) [d->set endResidency];
        [d->queue removeResidencySet:d->set];
    }
    [d->set release];
    [d->cache.found release];
    [d->cache.archive release];
    [d->fence release];
    [d->library release];
    [d->queue release];
    [d->gpu release];
    d->set = nil;
    d->kernels = NULL;
}

static void stop_heart(lily_device *d) {
    pthread_mutex_lock(&d->mutex);
    while (atomic_load(&d->completed) < d->submitted) pthread_cond_wait(&d->finished, &d->mutex);
    d->closing = true;
    pthread_cond_signal(&d->beat);
    pthread_mutex_unlock(&d->mutex);
    if (d->has_heart) pthread_join(d->heart, NULL);
    d->has_heart = false;
}

void lily_close(lily_device *d) {
    if (!d) return;
    // A forked process has neither the threads nor the GPU's state of its parent: only its copy of the record goes.
    if (forked(d)) return forget(d);
    @autoreleasepool {
        stop_heart(d);
        cache_save(&d->cache);
        release_all(d);
    }
    pthread_cond_destroy(&d->beat);
    pthread_cond_destroy(&d->finished);
    pthread_mutex_destroy(&d->mutex);
    pthread_mutex_destroy(&d->set_mutex);
    pthread_cond_destroy(&d->kernel_made);
    pthread_mutex_destroy(&d->kernel_mutex);
    pthread_mutex_destroy(&d->cache.mutex);
    forget(d);
}

static int open_device(const char *text, lily_device **out) {
    open_options o = {.msl = "auto", .replay = "encode", .slice_ms = 250, .keep_s = 180, .capture_ticket = 2};
    int code = parse_options(&o, text);
    if (code) return code;
    lily_device *d = calloc(1, sizeof *d);
    if (!d) return fail(LILY_ENOMEM, "no memory left for a device");
    d->users = 1;
    d->process = (long)getpid();
    d->slice = o.slice_ms * 1e-3;
    snprintf(d->capture, sizeof d->capture, "%s", o.capture);
    d->capture_ticket = o.capture_ticket;
    pthread_mutex_init(&d->mutex, NULL);
    pthread_mutex_init(&d->set_mutex, NULL);
    pthread_mutex_init(&d->kernel_mutex, NULL);
    pthread_mutex_init(&d->cache.mutex, NULL);
    pthread_cond_init(&d->kernel_made, NULL);
    init_condition(&d->finished);
    init_condition(&d->beat);
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
        code = out ? open_device(options, out) : fail(LILY_EINVAL, "lily_open: no place for the result");
    }
    if (error && error_bytes) snprintf(error, error_bytes, "%s", code ? error_text : "");
    return code;
}

int lily_info(lily_device *d, char *out, size_t bytes) {
    @autoreleasepool {
        const unsigned long long room = [d->gpu recommendedMaxWorkingSetSize];
        const char *watchdog = getenv("AGX_RELAX_CDM_CTXSTORE_TIMEOUT");
        pthread_mutex_lock(&d->mutex);
        const double slice = d->slice;
        const unsigned long long pieces = d->pieces, submitted = d->submitted;
        pthread_mutex_unlock(&d->mutex);
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
            text_of([d->gpu name]), family_of(d->gpu), room, (unsigned long long)[d->gpu maxBufferLength],
            (unsigned long long)d->allocated, (unsigned long)[d->gpu maxThreadgroupMemoryLength],
            d->from_metallib ? "metallib" : "source", d->language, d->matrix, c.library_s, c.pipelines, c.compiled,
            c.cache_hits, c.rebuilt, c.seconds, cache, d->fence ? "icb" : "encode", d->keep ? "on" : "off", slice * 1e3,
            submitted, pieces, watchdog ? watchdog : "");
        if (length >= 0 && (size_t)length < bytes) return LILY_OK;
        return fail(LILY_EINVAL, "lily_info needs room for %d bytes, it got %zu", length + 1, bytes);
    }
}

// ---- buffers ----------------------------------------------------------------------------------------------------------

static int check_room(lily_device *d, uint64_t bytes) {
    const uint64_t most = [d->gpu maxBufferLength], room = [d->gpu recommendedMaxWorkingSetSize];
    if (bytes > most)
        return fail(LILY_ENOMEM,
            "a buffer of %.2f GB is beyond what one buffer of this GPU may have (%.2f GB); choose a "
            "smaller max_context",
            gigabytes(bytes), gigabytes(most));
    if (bytes > room || d->allocated > room - bytes)
        return fail(LILY_ENOMEM,
            "%.2f GB more on top of %.2f GB do not fit into the %.2f GB that macOS lets the GPU use; choose a smaller "
            "max_context or model, or raise that limit (sudo sysctl iogpu.wired_limit_mb=MEGABYTES)",
            gigabytes(bytes), gigabytes(d->allocated), gigabytes(room));
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

int lily_buffer_new(lily_device *d, uint64_t bytes, lily_buffer **out) {
    if (!d || !out) return fail(LILY_EINVAL, "lily_buffer_new: an argument is null");
    *out = NULL;
    if (forked(d)) return lost(d);
    @autoreleasepool {
        const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
        const int code = check_room(d, bytes);
        if (code) return code;
        lily_buffer *b = calloc(1, sizeof *b);
        if (!b) return fail(LILY_ENOMEM, "no memory left for a buffer's record");
        b->handle = map_buffer(d, (size_t)((bytes + (bytes == 0) + page - 1) / page * page));
        if (!b->handle) {
            free(b);
            return fail(LILY_ENOMEM,
                "Metal refused a buffer of %.2f GB, %.2f GB are in use; close other programs or "
                "choose a smaller max_context",
                gigabytes(bytes), gigabytes(d->allocated));
        }
        b->device = d;
        b->bytes = bytes;
        d->allocated += bytes;
        d->users++;
        if (d->set) set_change(d, b->handle, true);
        *out = b;
        return LILY_OK;
    }
}

void lily_buffer_free(lily_buffer *b) {
    if (!b) return;
    lily_device *d = b->device;
    @autoreleasepool {
        if (!forked(d)) set_drop(d, b->handle);
        d->allocated -= b->bytes;
        if (!forked(d)) [b->handle release];
    }
    free(b);
    forget(d);
}

void *lily_buffer_contents(lily_buffer *b) {
    @autoreleasepool {
        return [b->handle contents];
    }
}

// ---- kernels ----------------------------------------------------------------------------------------------------------

int lily_kernel_get(lily_device *d, const char *name, const int32_t *constants, uint32_t count, lily_kernel **out) {
    if (!d || !name || !out || (count && !constants)) return fail(LILY_EINVAL, "lily_kernel_get: an argument is null");
    *out = NULL;
    if (forked(d)) return lost(d);
    const kernel_row *row = find_row(name);
    if (!row) return fail(LILY_ENOTFOUND, "there is no kernel \"%s\" in the kernel table", name);
    uint32_t wanted = 0;
    for (const char *c = row->constants; *c; c = next_name(c)) wanted++;
    if (count != wanted)
        return fail(
            LILY_EINVAL, "kernel %s takes %u constants (%s), %u were given", name, wanted, row->constants, count);
    @autoreleasepool {
        return get_kernel(d, row, constants, count, out);
    }
}

int lily_kernel_fit(lily_kernel *k, uint32_t threads) {
    if (!k) return fail(LILY_EINVAL, "lily_kernel_fit: no kernel");
    if (forked(k->device)) return lost(k->device);
    const uint32_t group[3] = {threads, 1, 1}, one[3] = {1, 1, 1};
    const int code = check_sizes(k->row, one, group);
    if (code) return code;
    @autoreleasepool {
        return pipeline_for(k, threads) ? LILY_OK : LILY_EFAILED;
    }
}

// ---- lists ------------------------------------------------------------------------------------------------------------

int lily_list_new(lily_device *d, lily_list **out) {
    if (!d || !out) return fail(LILY_EINVAL, "lily_list_new: an argument is null");
    *out = calloc(1, sizeof **out);
    if (!*out) return fail(LILY_ENOMEM, "no memory left for a list");
    (*out)->device = d;
    d->users++;
    return LILY_OK;
}

void lily_list_free(lily_list *list) {
    if (!list) return;
    lily_device *d = list->device;
    replay_free(list);
    lily_buffer_free(list->constants);
    free(list->dispatch);
    free(list->buffers);
    free(list->offsets);
    free(list->params);
    free(list);
    forget(d);
}

int lily_list_dispatch(lily_list *l, lily_kernel *k, const lily_arg *args, uint32_t arg_count, const void *params,
    uint32_t param_bytes, const uint32_t grid[3], const uint32_t threads[3], int barrier) {
    if (!l || !k || !args || !grid || !threads || (param_bytes && !params))
        return fail(LILY_EINVAL, "lily_list_dispatch: an argument is null");
    const kernel_row *row = k->row;
    if (l->ended) return fail(LILY_EINVAL, "kernel %s: this list has ended; record a new one", row->name);
    if (k->device != l->device)
        return fail(LILY_EINVAL, "kernel %s belongs to another device than the list", row->name);
    if (param_bytes != row->param_bytes || param_bytes > LILY_MAX_PARAM_BYTES)
        return fail(LILY_EINVAL, "kernel %s takes %u bytes of parameters, %u were given", row->name, row->param_bytes,
            param_bytes);
    int code = check_args(row, args, arg_count);
    if (!code) code = check_sizes(row, grid, threads);
    if (code) return code;
    @autoreleasepool {
        id<MTLComputePipelineState> pipeline = pipeline_for(k, threads[0] * threads[1] * threads[2]);
        if (!pipeline) return LILY_EFAILED;
        return append(l, k, pipeline, args, params, grid, threads, barrier != 0);
    }
}

int lily_list_end(lily_list *l) {
    if (!l) return fail(LILY_EINVAL, "lily_list_end: no list");
    if (l->ended) return fail(LILY_EINVAL, "this list has ended already");
    if (forked(l->device)) return lost(l->device);
    if (l->param_bytes) {
        const int code = lily_buffer_new(l->device, l->param_bytes, &l->constants);
        if (code) return code;
        memcpy(lily_buffer_contents(l->constants), l->params, l->param_bytes);
    }
    for (uint32_t i = 0; i < l->bindings; i++) {
        if (!l->buffers[i]) l->buffers[i] = l->constants->handle;
    }
    free(l->params);
    l->params = NULL;
    @autoreleasepool {
        const int code = l->device->fence ? replay_record(l) : LILY_OK;
        if (code) return code;
        l->ended = true;
        set_hold(l->device);
    }
    return LILY_OK;
}

// ---- submission and waiting -------------------------------------------------------------------------------------------

static int check_lists(lily_device *d, lily_list *const *lists, uint32_t count) {
    if (!d || (count && !lists)) return fail(LILY_EINVAL, "lily_submit: an argument is null");
    if (forked(d)) return lost(d);
    if (count > MAX_LISTS) return fail(LILY_EINVAL, "a submission of %u lists; allowed: 0 to %d", count, MAX_LISTS);
    for (uint32_t i = 0; i < count; i++) {
        if (!lists[i] || !lists[i]->ended) return fail(LILY_EINVAL, "list %u of the submission was not ended", i);
        if (lists[i]->device != d) return fail(LILY_EINVAL, "list %u of the submission belongs to another device", i);
    }
    return LILY_OK;
}

// A record with one part, the encoding, or NULL with the error text.
static submission *begin_submission(lily_device *d, int *code) {
    submission *s = NULL;
    pthread_mutex_lock(&d->mutex);
    const uint64_t unfinished = d->submitted - atomic_load(&d->completed);
    if (d->lost[0])
        *code = fail(LILY_ELOST, "%s", d->lost);
    else if (unfinished >= MAX_IN_FLIGHT)
        *code = fail(LILY_EFAILED, "%d submissions are unfinished; wait for a ticket first", MAX_IN_FLIGHT);
    else {
        s = submission_of(d, ++d->submitted);
        s->ticket = d->submitted;
        s->parts = 1;
        s->code = LILY_OK;
        s->reported = false;
        s->seconds = 0;
        s->error[0] = 0;
    }
    pthread_mutex_unlock(&d->mutex);
    return s;
}

static int begin_capture(lily_device *d, uint64_t ticket) {
    NSError *error = nil;
    if (!d->capture[0] || ticket != d->capture_ticket) return LILY_OK;
    MTLCaptureDescriptor *descriptor = [[[MTLCaptureDescriptor alloc] init] autorelease];
    [descriptor setCaptureObject:(NSObject *)d->queue];
    [descriptor setDestination:MTLCaptureDestinationGPUTraceDocument];
    [descriptor setOutputURL:[NSURL fileURLWithPath:[NSString stringWithUTF8String:d->capture]]];
    if ([[MTLCaptureManager sharedCaptureManager] startCaptureWithDescriptor:descriptor error:&error]) return LILY_OK;
    return fail(LILY_EFAILED, "the GPU trace %s cannot be written: %s", d->capture, reason(error));
}

static void end_capture(lily_device *d, uint64_t ticket) {
    if (d->capture[0] && ticket == d->capture_ticket) [[MTLCaptureManager sharedCaptureManager] stopCapture];
}

int lily_submit(lily_device *d, lily_list *const *lists, uint32_t count, uint64_t *ticket) {
    int code = check_lists(d, lists, count);
    if (code) return code;
    submission *s = begin_submission(d, &code);
    if (!s) return code;
    @autoreleasepool {
        set_hold(d);
        code = begin_capture(d, s->ticket);
        if (!code) encode(d, s, lists, count);
        if (!code) end_capture(d, s->ticket);
    }
    pthread_mutex_lock(&d->mutex);
    if (code) s->code = code, snprintf(s->error, sizeof s->error, "%s", error_text);
    if (ticket) *ticket = s->ticket;
    end_part(d, s);
    pthread_mutex_unlock(&d->mutex);
    return LILY_OK; // what went wrong is told by lily_wait
}

uint64_t lily_completed(lily_device *d) { return atomic_load(&d->completed); }

// Of a finished ticket: LILY_OK, or the failure, once.
static int report(lily_device *d, uint64_t ticket) {
    submission *s = submission_of(d, ticket);
    if (s->ticket != ticket || !s->code || s->reported) return LILY_OK;
    s->reported = true;
    return fail(s->code, "%s", s->error);
}

int lily_wait(lily_device *d, uint64_t ticket, uint64_t timeout_ns) {
    if (!d) return fail(LILY_EINVAL, "lily_wait: no device");
    if (forked(d)) return ticket <= atomic_load(&d->completed) ? LILY_OK : lost(d);
    const uint64_t longest = (uint64_t)1 << 62; // fits a time_t after the division
    const uint64_t end = nanoseconds() + (timeout_ns < longest ? timeout_ns : longest);
    int code = LILY_OK;
    pthread_mutex_lock(&d->mutex);
    if (ticket > d->submitted)
        code = fail(LILY_EINVAL, "ticket %llu was never given; the last one is %llu", (unsigned long long)ticket,
            (unsigned long long)d->submitted);
    while (!code && atomic_load(&d->completed) < ticket) {
        if (wait_until(&d->finished, &d->mutex, end))
            code = fail(LILY_ETIMEOUT, "ticket %llu did not finish within %.3f s; the last finished one is %llu",
                (unsigned long long)ticket, (double)timeout_ns * 1e-9, (unsigned long long)atomic_load(&d->completed));
    }
    if (!code) code = report(d, ticket);
    pthread_mutex_unlock(&d->mutex);
    return code;
}

double lily_seconds(lily_device *d, uint64_t ticket) {
    double seconds = -1;
    if (forked(d)) return seconds;
    pthread_mutex_lock(&d->mutex);
    const submission *s = submission_of(d, ticket);
    if (ticket && s->ticket == ticket && ticket <= atomic_load(&d->completed)) seconds = s->seconds;
    pthread_mutex_unlock(&d->mutex);
    return seconds;
}
