// SPDX-License-Identifier: Apache-2.0
// Objects behind lily_device.h on Metal, and what the files of the shim offer each other, file by file.
// Memory rules: manual retain/release; every id<...> field below is owned by the struct that holds it unless it says so.
#ifndef LILY_METAL_RUNTIME_H
#define LILY_METAL_RUNTIME_H

#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE // MAP_ANON
#endif
#if defined(__APPLE__)
#include <Availability.h>
#if defined(__MAC_OS_X_VERSION_MAX_ALLOWED) && __MAC_OS_X_VERSION_MAX_ALLOWED < 150000
#error \
    "these command-line tools know macOS 14 at most, Lily needs those of 15 or later: System Settings, Software Update"
#endif
#endif
#import <Metal/Metal.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device_common.h"
#include "metal_options.h"
#include "metal_system.h"

enum {
    SIMD_WIDTH = 32,       // the shaders are written for it
    PARAM_ALIGNMENT = 128, // one cache line per dispatch
    MAX_IN_FLIGHT = 32,    // unfinished submissions
    MAX_LISTS = 64,        // of one submission
    MAX_WIDE = 4,          // further pipelines of a kernel, for larger threadgroups
    MAX_PARTS = 48,        // command buffers of one submission, about
    QUEUE_CAPACITY = 256   // unfinished command buffers; one more makes the host wait
};

struct lily_buffer {
    buffer_head head;
    lily_device *device;
    id<MTLBuffer> handle;
};

struct lily_kernel {
    kernel_head head;
    int32_t constant[LILY_MAX_CONSTANTS];
    uint32_t count;
    id<MTLFunction> function;
    id<MTLComputePipelineState> pipeline;
    id<MTLComputePipelineState> wide[MAX_WIDE]; // compiled again for more threads than `pipeline` allows
    uint32_t wides;
    bool busy; // a thread compiles it without holding `kernel_mutex`
    lily_kernel *next;
};

typedef struct {
    const lily_kernel *kernel;
    id<MTLComputePipelineState> pipeline; // the kernel's
    uint32_t first, bindings;             // in the list's flat arrays, the parameters' buffer last
    uint32_t params;                      // offset of the parameters
    MTLSize grid, threads;
    double work; // threads in all, by weight_of
    bool barrier;
} recorded;

struct lily_list {
    list_head head;
    recorded *dispatch;
    id<MTLBuffer> *buffers; // of all dispatches, not owned
    NSUInteger *offsets;
    uint8_t *params; // until lily_list_end
    lily_buffer *constants;
    id<MTLIndirectCommandBuffer> replay; // the whole list, encoded once; nil: encoded at every submission
    uint32_t count, capacity, bindings, binding_capacity, param_bytes, param_capacity;
    double work, rate; // of all dispatches; seconds per unit of it, 0 until measured
};

// One command buffer of a submission: what its completion handler has to know.
typedef struct {
    lily_list *list; // the list with most of the work
    double work, most;
    uint32_t dispatches;
    const char *first, *last; // kernels
} command_part;

typedef struct {
    uint64_t ticket;
    uint32_t parts; // unfinished command buffers, and one while it is encoded
    int code;       // the first failure
    double seconds;
    char error[DEVICE_ERROR_BYTES];
} submission;

typedef struct {
    id<MTLBinaryArchive> found;   // of earlier runs: only read, by any thread; nil: there is none
    id<MTLBinaryArchive> archive; // the same and what is new, for the next run; nil: no cache
    pthread_mutex_t mutex;        // of `archive` and all below
    char path[PATH_BYTES];
    char state[256]; // for lily_info: on, or why not
    uint32_t added;
} pipeline_cache;

// How pipelines were made, for lily_info.
typedef struct {
    uint32_t pipelines, compiled, cache_hits, rebuilt;
    uint32_t active;           // threads that make one now
    uint64_t since;            // when the first of these began
    double seconds, library_s; // in which at least one thread made pipelines; that the library took
} compile_counts;

struct lily_device {
    device_head head;
    id<MTLDevice> gpu;
    id<MTLCommandQueue> queue;
    id<MTLLibrary> library;
    id<MTLFence> fence; // orders encoders when lists are replayed, as nothing tracks what those use; else nil
    uint64_t allocated;
    uint32_t users; // buffers and lists that exist, and the open device itself
    pipeline_cache cache;
    bool from_metallib;
    char language[16], matrix[512]; // how the shaders were compiled, how they multiply matrices

    // Kernels, which several threads may ask for at once.
    pthread_mutex_t kernel_mutex;
    pthread_cond_t kernel_made;
    lily_kernel *kernels;
    compile_counts compiled;

    // What keeps buffers in GPU memory, used by the host's thread and the keeper's.
    pthread_mutex_t residency_mutex;
    id<MTLResidencySet> residency; // nil: switched off
    bool residency_changed, residency_requested;
    uint64_t last_use, keep; // nanoseconds; keep 0: memory is not asked for ahead
    pthread_t keeper;
    bool has_keeper;

    // Everything below belongs to the head's mutex: completion handlers run on threads of the system.
    pthread_cond_t keeper_wakes;
    bool closing;
    submission in_flight[MAX_IN_FLIGHT];
    uint64_t command_buffers;
    double slice;                      // seconds that a command buffer should not exceed; 0: no limit
    double rate;                       // seconds per thread, for lists that were not measured yet; 0: nothing was
    char unusable[DEVICE_ERROR_BYTES]; // why the device cannot be used any more; empty: it can

    char capture[PATH_BYTES];
    uint64_t capture_ticket;
};

BEGINS_WITH_HEAD(lily_buffer);
BEGINS_WITH_HEAD(lily_kernel);
BEGINS_WITH_HEAD(lily_list);
BEGINS_WITH_HEAD(lily_device);

static inline const char *text_of(NSString *s) {
    const char *text = [s UTF8String];
    return text ? text : "no description";
}

static inline const char *reason(NSError *e) { return text_of([e localizedDescription]); }

// ---- metal_library.m: shaders from source or metallib ------------------------------------------------------------------

int family_of(id<MTLDevice>); // the newest Apple family that the GPU belongs to; 0: none
int library_open(lily_device *, const open_options *);

// ---- metal_pipelines.m: from a row of the kernel table to a compiled pipeline ------------------------------------------

int kernel_get(lily_device *, const kernel_row *, const int32_t *constants, uint32_t count, lily_kernel **out);
int kernel_probe(lily_device *, lily_kernel); // whether it becomes a pipeline; what it made is thrown away
void kernel_release(lily_kernel *);
// The pipeline for threadgroups of `threads`, compiled if need be; nil with the error text if there is none.
id<MTLComputePipelineState> kernel_pipeline(lily_kernel *, uint32_t threads);

// ---- metal_cache.m: pipelines kept between runs -------------------------------------------------------------------------

void cache_open(pipeline_cache *, id<MTLDevice>, const char *option, uint64_t key); // `key` names all they depend on
void cache_add(pipeline_cache *, id<MTLDevice>, MTLComputePipelineDescriptor *);    // of a pipeline that was just made
void cache_save(pipeline_cache *);

// ---- metal_record.m: recording -----------------------------------------------------------------------------------------

int record_check_threads(const kernel_row *, const uint32_t threads[3]);
int record_append(lily_list *, const lily_kernel *, id<MTLComputePipelineState>, const lily_arg *args,
    const void *params, const uint32_t grid[3], const uint32_t threads[3], bool barrier);
int record_params(lily_list *); // puts the parameters of all dispatches into a buffer of their own

// ---- metal_replay.m: lists as indirect command buffers -----------------------------------------------------------------

int replay_open(lily_device *, const open_options *);
int replay_record(lily_list *);
void replay_free(lily_list *);

// ---- metal_encode.m: submissions as command buffers --------------------------------------------------------------------

submission *submission_begin(lily_device *, int *code); // with one part, the encoding; NULL with the failure
void submission_encode(lily_device *, submission *, lily_list *const *lists, uint32_t count);
// The encoding is done; `code` is the failure that this thread's error text is about, or LILY_OK.
void submission_end(lily_device *, submission *, int code);

// ---- metal_failure.m: what Metal's errors mean and what to do ----------------------------------------------------------

typedef struct {
    int code;
    bool too_long; // smaller parts may help
} failure_kind;

failure_kind failure_describe(NSError *, const command_part *, char *out, size_t bytes);

// ---- metal_residency.m: keeping buffers in the GPU's memory ------------------------------------------------------------

int residency_open(lily_device *, uint32_t keep_s);
void residency_close(lily_device *); // ends the keeper; everything submitted has finished
void residency_release(lily_device *);
void residency_add(lily_device *, id<MTLAllocation>);
void residency_drop(lily_device *, id<MTLAllocation>);
void residency_request(lily_device *); // before work

#endif
