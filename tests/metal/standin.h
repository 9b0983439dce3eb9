// SPDX-License-Identifier: Apache-2.0
// A stand-in for Metal on Linux: what Python sets and reads (tests/metal/standin.py), shared by standin_*.m.
#ifndef LILY_STANDIN_H
#define LILY_STANDIN_H

#import <Metal/Metal.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// As tests/emulator/msl_runtime.h, which is C++, has them.
enum { MSL_BUFFERS = 31 };
enum { MSL_FORWARD, MSL_REVERSE, MSL_RANDOM };
enum { MSL_CHECK = 1 };
typedef struct {
    void *buffers[MSL_BUFFERS];
    uint64_t bytes[MSL_BUFFERS];
    uint32_t threadgroup_bytes[MSL_BUFFERS];
    uint32_t grid[3], groups[3], group_size[3];
    uint32_t order, seed, flags, workers;
    const char *name;
} MslLaunch;
typedef void *MslEntry;

#define STANDIN_API __attribute__((visibility("default")))

// What the stand-in pretends to be and when it fails; 0 is the ordinary case except where a default is given.
#define STANDIN_NUMBERS(X) \
    X(family, 9)        /* Apple GPU family */ \
    X(unified, 1)       /* unified memory */ \
    X(macos, 15.5)      /* version; 0: it is not told */ \
    X(build, 74)        /* of that version */ \
    X(no_default, 0)    /* the default device is nil */ \
    X(no_devices, 0)    /* the list of devices is empty */ \
    X(working_set, 8e9) /* bytes */ \
    X(max_buffer, 4e9)  /* bytes */ \
    X(simd_width, 32) \
    X(threadgroup_memory, 32768) /* bytes a group may have */ \
    X(static_memory, 1024)       /* bytes every pipeline says that it needs */ \
    X(pipeline_threads, 1024)    /* threads a pipeline allows if the descriptor asks for none */ \
    X(most_threads, 1024)        /* threads a pipeline allows at most */ \
    X(fail_queue, 0)             /* no command queue */ \
    X(fail_compile, 0)           /* the source does not compile: 1, or 4: only as Metal 4 */ \
    X(fail_metallib, 0)          /* the metallib does not load */ \
    X(fail_pipeline, 0)          /* the n-th pipeline from now is not made */ \
    X(fail_indirect, 0)          /* 1: no pipeline for indirect command buffers, 2: none of these, 3: no fence */ \
    X(compile_us, 0)             /* that a pipeline takes unless it is in an archive */ \
    X(compile_together, 0)       /* pipelines that must be in the making at a time before any is done */ \
    X(fail_buffer, 0)            /* no buffer from the n-th on */ \
    X(fail_set, 0)               /* no residency set */ \
    X(fail_archive, 0)           /* no binary archive: 1 from a file, 2 at all, 3 takes no functions, 4 not written */ \
    X(fail_encoder, 0)           /* no encoder from the n-th on */ \
    X(fail_capture, 0)           /* 1: no trace documents, 2: does not start */ \
    X(fail_submission, 0)        /* the n-th command buffer ends with this error: */ \
    X(fail_code, 1) \
    X(delay_us, 0)  /* before a command buffer runs */ \
    X(hold, 0)      /* command buffers that begin wait until it is 0 again */ \
    X(untracked, 0) /* hazard tracking is off, whatever the buffer says */ \
    X(unfenced, 0)  /* fences order nothing */ \
    X(homeless, 0)  /* residency sets hold nothing */ \
    X(order, 0)     /* of dispatches between barriers and of unordered command buffers: MSL_FORWARD … */ \
    X(seed, 1) \
    X(checked, 0) /* the kernels are the checked build */ \
    X(workers, 1) /* host threads of one dispatch */ \
    X(journal, 0) /* calls are written down */

typedef struct {
#define FIELD(name, value) double name;
    STANDIN_NUMBERS(FIELD)
#undef FIELD
    char name[128];      // of the GPU
    char fail_text[512]; // of fail_submission
} standin_config;

extern standin_config config;

// What runs kernels; without it dispatches only are checked.
typedef struct {
    MslEntry entry;
    uint32_t max_threads, writable; // bit i: the kernel may write to buffer i
    uint32_t arguments;             // bit i: the kernel has buffer i
    uint32_t language;              // of the library, as MTLLanguageVersion counts; set before `compile`
} standin_kernel;

typedef struct {
    // Compiles a specialised kernel; 0, or 1 with the reason.
    int (*compile)(const char *source, const char *name, uint32_t count, const uint32_t *index, const int32_t *value,
        standin_kernel *out, char *error, size_t error_bytes);
    int (*dispatch)(MslEntry entry, const MslLaunch *launch);
    void (*barrier)(void);
    int (*view)(uint32_t number, const void *address, uint64_t bytes, int writable, const char *name);
    void *(*region_new)(uint64_t bytes, uint64_t skew);
    void (*region_free)(void *base);
    const char *(*reports)(void);
    void (*clear_reports)(void);
} standin_backend;

extern standin_backend backend;

__attribute__((format(printf, 1, 2))) void complain(const char *format, ...); // a rule of Metal was broken
__attribute__((format(printf, 1, 2))) void note(const char *format, ...);     // for the journal
void born(const char *what), died(const char *what);
double seconds_now(void);
typedef struct kept_thread kept_thread;
kept_thread *thread_start(void *(*run)(void *), void *argument);
void thread_end(kept_thread *thread); // waits until `run` has returned
NSError *error_of(NSInteger code, const char *text);
id failed(NSError **error, NSInteger code, const char *text); // nil, with the error

@interface StandinBuffer : NSObject <MTLBuffer> {
  @public
    uint8_t *pointer, *gpu; // the host's view and that of kernels
    NSUInteger length;
    bool tracked;
    uint32_t homes; // residency sets of the queue that hold it
    void (^deallocator)(void *, NSUInteger);
}
@end
bool is_live(StandinBuffer *buffer);

// Complaints about a buffer that an encoder or a command is given.
void check_binding(StandinBuffer *buffer, NSUInteger offset, NSUInteger index);

@interface StandinFunction : NSObject <MTLFunction> {
  @public
    NSString *name, *key;
    standin_kernel kernel;
}
@end

@interface StandinPipeline : NSObject <MTLComputePipelineState> {
  @public
    StandinFunction *function;
    NSUInteger threads;
    bool whole;    // groups are multiples of the SIMD width
    bool indirect; // may be used in indirect command buffers
}
@end

enum { SLOTS = MSL_BUFFERS };

// What an encoder was told: a dispatch, or with a nil pipeline a barrier.
typedef struct {
    StandinPipeline *pipeline;
    StandinBuffer *buffer[SLOTS];
    NSUInteger offset[SLOTS];
    MTLSize grid, threads;
    uint32_t execution; // 0, or which executeCommandsInBuffer: of the command buffer it came from
} record;

// Complaints about a dispatch before it is run.
void check_record(const record *r);

@interface StandinIndirect : NSObject <MTLIndirectCommandBuffer> {
  @public
    record *commands;
    bool *barriers, *encoded;
    NSUInteger size, bindings;
    bool ended; // in use by the GPU: nothing may be changed any more
}
@end

@interface StandinQueue : NSObject <MTLCommandQueue> {
  @public
    NSMutableArray *waiting; // committed command buffers
    NSUInteger capacity, open;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    kept_thread *thread;
    bool closing;
    uint32_t made, encoders, sets;
}
@end

// Objects of the generated classes are of a subclass with memory for what is set.
#define STANDS_FOR(Class, Sub) \
    @implementation Class \
    +(id)alloc { \
        return self == [Class class] ? [Sub alloc] : [super alloc]; \
    } \
    -(id)copyWithZone : (NSZone *)zone { \
        return [self retain]; \
    } \
    @end

StandinQueue *standin_queue(NSUInteger capacity);
id<MTLFence> standin_fence(void);
id<MTLIndirectCommandBuffer> standin_indirect(
    MTLIndirectCommandBufferDescriptor *descriptor, NSUInteger count, MTLResourceOptions options);

#endif
