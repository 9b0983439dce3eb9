// SPDX-License-Identifier: Apache-2.0
// Objects behind lily_device.h on Metal, and error texts, shared by lily_metal.m and the headers that it includes.
// Memory rules: manual retain/release; every id<...> field below is owned by the struct that holds it unless it says so.
#ifndef LILY_METAL_RUNTIME_H
#define LILY_METAL_RUNTIME_H

#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE // MAP_ANON, pthread_condattr_setclock
#endif
#if defined(__APPLE__)
#include <Availability.h>
#if defined(__MAC_OS_X_VERSION_MAX_ALLOWED) && __MAC_OS_X_VERSION_MAX_ALLOWED < 150000
#error \
    "these command-line tools know macOS 14 at most, Lily needs those of 15 or later: System Settings, Software Update"
#endif
#endif
#import <Metal/Metal.h>

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lily_device.h"

enum {
    SIMD_WIDTH = 32,       // the shaders are written for it
    PARAM_ALIGNMENT = 128, // one cache line per dispatch
    TIMED_TICKETS = 64,    // submissions that are remembered, unfinished ones included
    MAX_IN_FLIGHT = 32,    // unfinished submissions
    MAX_LISTS = 64,        // of one submission
    MAX_WIDE = 4,          // further pipelines of a kernel, for larger threadgroups
    MAX_PIECES = 48,       // command buffers of one submission, about
    QUEUE_CAPACITY = 256,  // unfinished command buffers; one more makes the host wait
    PATH_BYTES = 1024,
    ERROR_BYTES = 2048, // of a submission
    TEXT_BYTES = 16384  // of a failed call: a compiler may have much to say
};

// One row of the kernel table as C knows it.
typedef struct {
    const char *name;
    uint32_t args;
    const char *constants; // names, separated by blanks
    uint32_t param_bytes;
} kernel_row;

struct lily_buffer {
    lily_device *device;
    id<MTLBuffer> handle;
    uint64_t bytes; // as asked for
};

struct lily_kernel {
    lily_device *device;
    const kernel_row *row;
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
    lily_device *device;
    recorded *dispatch;
    id<MTLBuffer> *buffers; // of all dispatches, not owned
    NSUInteger *offsets;
    uint8_t *params; // until lily_list_end
    lily_buffer *constants;
    id<MTLIndirectCommandBuffer> replay; // the whole list, encoded once; nil: encoded at every submission
    uint32_t count, capacity, bindings, binding_capacity, param_bytes, param_capacity;
    double work, rate; // of all dispatches; seconds per unit of it, 0 until measured
    bool ended;
};

// A command buffer of a submission: what its completion handler has to know.
typedef struct {
    lily_list *list; // the list with most of the work
    double work, most;
    uint32_t dispatches;
    const char *first, *last; // kernels
} piece;

typedef struct {
    uint64_t ticket;
    uint32_t parts; // unfinished command buffers, and one while it is encoded
    int code;       // the first failure
    bool reported;
    double seconds;
    char error[ERROR_BYTES];
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
    id<MTLDevice> gpu;
    id<MTLCommandQueue> queue;
    id<MTLLibrary> library;
    id<MTLFence> fence; // orders encoders when lists are replayed, as nothing tracks what those use; else nil
    uint64_t allocated;
    uint32_t users; // buffers and lists that exist, and the open device itself
    pipeline_cache cache;
    bool from_metallib;
    char language[16], matrix[512]; // how the shaders were compiled, how they multiply matrices
    long process;

    // Kernels, which several threads may ask for at once.
    pthread_mutex_t kernel_mutex;
    pthread_cond_t kernel_made;
    lily_kernel *kernels;
    compile_counts compiled;

    // What keeps buffers in GPU memory, used by the host's thread and the heartbeat.
    pthread_mutex_t set_mutex;
    id<MTLResidencySet> set; // nil: switched off
    bool set_changed, set_held;
    uint64_t last_use, keep; // nanoseconds; keep 0: memory is not asked for ahead
    pthread_t heart;
    bool has_heart;

    // Everything below belongs to `mutex`: completion handlers run on threads of the system.
    pthread_mutex_t mutex;
    pthread_cond_t finished, beat;
    bool closing;
    submission ring[TIMED_TICKETS];
    uint64_t submitted, pieces;
    _Atomic uint64_t completed;
    double slice;           // seconds that a command buffer should not exceed; 0: no limit
    double rate;            // seconds per thread, for lists that were not measured yet; 0: nothing was
    char lost[ERROR_BYTES]; // why the device cannot be used any more

    char capture[PATH_BYTES];
    uint64_t capture_ticket;
};

// Each thread sees the text of its own last failed call.
static _Thread_local char error_text[TEXT_BYTES];

__attribute__((format(printf, 2, 3))) static int fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return code;
}

static const char *text_of(NSString *s) {
    const char *text = [s UTF8String];
    return text ? text : "no description";
}

static const char *reason(NSError *e) { return text_of([e localizedDescription]); }

static double gigabytes(uint64_t bytes) { return (double)bytes * 1e-9; }

#endif
