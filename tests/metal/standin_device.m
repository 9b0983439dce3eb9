// SPDX-License-Identifier: Apache-2.0
// The stand-in's device and everything that it makes: buffers, libraries, pipelines, archives, residency sets.
// Only what the shim uses exists; any other message ends the process with its name.
#define _GNU_SOURCE
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "standin.h"

static pthread_mutex_t buffers_mutex = PTHREAD_MUTEX_INITIALIZER;
static StandinBuffer *buffers[4096]; // that exist

// ---- buffers ----------------------------------------------------------------------------------------------------------

static void keep_buffer(StandinBuffer *buffer, bool keep) {
    pthread_mutex_lock(&buffers_mutex);
    const int count = (int)(sizeof buffers / sizeof *buffers);
    for (int i = 0; i < count; i++) {
        if (buffers[i] != (keep ? nil : buffer)) continue;
        buffers[i] = keep ? buffer : nil;
        break;
    }
    pthread_mutex_unlock(&buffers_mutex);
}

bool is_live(StandinBuffer *buffer) {
    bool found = false;
    pthread_mutex_lock(&buffers_mutex);
    for (size_t i = 0; buffer && !found && i < sizeof buffers / sizeof *buffers; i++) found = buffers[i] == buffer;
    pthread_mutex_unlock(&buffers_mutex);
    return found;
}

void check_binding(StandinBuffer *buffer, NSUInteger offset, NSUInteger index) {
    if (!is_live(buffer))
        complain("buffer %lu is nil or was freed", (unsigned long)index);
    else if (offset > buffer->length)
        complain("offset %lu of buffer %lu", (unsigned long)offset, (unsigned long)index);
}

@implementation StandinBuffer
- (void *)contents {
    return pointer;
}
- (NSUInteger)length {
    return length;
}
- (void)dealloc {
    keep_buffer(self, false);
    if (gpu != pointer) backend.region_free(gpu);
    if (deallocator) {
        deallocator(pointer, length);
        Block_release(deallocator);
    }
    died("buffer");
    [super dealloc];
}
@end

// In a checked run kernels see the same memory at another address, where the emulator recognises stray accesses.
static uint8_t *map_twice(uint8_t *pointer, size_t bytes) {
    uint8_t *region = backend.region_new(bytes, 0);
    const int file = memfd_create("standin", MFD_CLOEXEC);
    bool ok = region && file >= 0 && !ftruncate(file, (off_t)bytes);
    for (int i = 0; ok && i < 2; i++)
        ok = mmap(i ? region : pointer, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
    if (file >= 0) close(file);
    if (!ok) abort();
    return region;
}

// ---- descriptors ------------------------------------------------------------------------------------------------------

@interface StandinCompileOptions : MTLCompileOptions {
  @public
    MTLLanguageVersion version;
    MTLMathMode mode;
    MTLMathFloatingPointFunctions functions;
}
@end
@interface StandinConstants : MTLFunctionConstantValues {
  @public
    uint32_t count, index[64];
    int32_t value[64];
}
@end
@interface StandinPipelineDescriptor : MTLComputePipelineDescriptor {
  @public
    NSString *label;
    id<MTLFunction> function;
    NSArray *archives;
    NSUInteger threads;
    BOOL whole, indirect;
}
@end
@interface StandinArchiveDescriptor : MTLBinaryArchiveDescriptor {
  @public
    NSURL *url;
}
@end
@interface StandinSetDescriptor : MTLResidencySetDescriptor
@end
STANDS_FOR(MTLCompileOptions, StandinCompileOptions)
STANDS_FOR(MTLFunctionConstantValues, StandinConstants)
STANDS_FOR(MTLComputePipelineDescriptor, StandinPipelineDescriptor)
STANDS_FOR(MTLBinaryArchiveDescriptor, StandinArchiveDescriptor)
STANDS_FOR(MTLResidencySetDescriptor, StandinSetDescriptor)

@implementation StandinCompileOptions
- (void)setLanguageVersion:(MTLLanguageVersion)v {
    version = v;
}
- (void)setMathMode:(MTLMathMode)m {
    mode = m;
}
- (void)setMathFloatingPointFunctions:(MTLMathFloatingPointFunctions)f {
    functions = f;
}
@end
@implementation StandinConstants
- (void)setConstantValue:(const void *)v type:(MTLDataType)type atIndex:(NSUInteger)i {
    if (type != MTLDataTypeInt || i >= 65536 || count == 64)
        complain("constant %lu: unknown type or index", (unsigned long)i);
    index[count] = (uint32_t)i;
    memcpy(&value[count++], v, sizeof *value);
}
@end
@implementation StandinPipelineDescriptor
- (void)setLabel:(NSString *)text {
    label = [text copy];
}
- (void)setComputeFunction:(id<MTLFunction>)f {
    function = [f retain];
}
- (void)setBinaryArchives:(NSArray *)a {
    archives = [a retain];
}
- (void)setMaxTotalThreadsPerThreadgroup:(NSUInteger)n {
    threads = n;
}
- (void)setThreadGroupSizeIsMultipleOfThreadExecutionWidth:(BOOL)yes {
    whole = yes;
}
- (void)setSupportIndirectCommandBuffers:(BOOL)yes {
    indirect = yes;
}
- (void)dealloc {
    [label release];
    [function release];
    [archives release];
    [super dealloc];
}
@end
@implementation StandinArchiveDescriptor
- (void)setUrl:(NSURL *)u {
    url = [u retain];
}
- (void)dealloc {
    [url release];
    [super dealloc];
}
@end
@implementation StandinSetDescriptor
- (void)setLabel:(NSString *)text {
    (void)text;
}
@end
// ---- libraries and pipelines ------------------------------------------------------------------------------------------

@implementation StandinFunction
- (NSString *)name {
    return name;
}
- (void)dealloc {
    [name release];
    [key release];
    died("function");
    [super dealloc];
}
@end

@implementation StandinPipeline
- (NSUInteger)maxTotalThreadsPerThreadgroup {
    return threads;
}
- (NSUInteger)threadExecutionWidth {
    return (NSUInteger)config.simd_width;
}
- (NSUInteger)staticThreadgroupMemoryLength {
    return (NSUInteger)config.static_memory;
}
- (void)dealloc {
    [function release];
    died("pipeline");
    [super dealloc];
}
@end

@interface StandinLibrary : NSObject <MTLLibrary> {
  @public
    NSString *source;
    MTLLanguageVersion version;
}
@end
@implementation StandinLibrary
- (id<MTLFunction>)newFunctionWithName:(NSString *)name
                        constantValues:(MTLFunctionConstantValues *)values
                                 error:(NSError **)error {
    StandinConstants *c = (StandinConstants *)values;
    standin_kernel kernel = {.language = (uint32_t)version};
    char text[1024] = "";
    if (backend.compile &&
        backend.compile(
            [source UTF8String], [name UTF8String], c -> count, c -> index, c -> value, &kernel, text, sizeof text))
        return failed(error, MTLLibraryErrorFunctionNotFound, text);
    StandinFunction *f = [[StandinFunction alloc] init];
    born("function");
    f->name = [name copy];
    f->kernel = kernel;
    NSMutableString *key = [NSMutableString stringWithString:name];
    for (uint32_t i = 0; i < c->count; i++) [key appendFormat:@" %u=%d", c->index[i], c->value[i]];
    f->key = [key copy];
    return f;
}
- (void)dealloc {
    [source release];
    died("library");
    [super dealloc];
}
@end

// Its file holds the keys of the pipelines, one a line.
@interface StandinArchive : NSObject <MTLBinaryArchive> {
  @public
    NSMutableSet *keys;
    bool searched;
}
@end
static NSString *archive_key(StandinPipelineDescriptor *d) {
    return [NSString
        stringWithFormat:@"%@ %lu %d", ((StandinFunction *)d->function)->key, (unsigned long)d->threads, d->indirect];
}
@implementation StandinArchive
- (BOOL)addComputePipelineFunctionsWithDescriptor:(MTLComputePipelineDescriptor *)d error:(NSError **)error {
    if (config.fail_archive == 3) return failed(error, 1, "made to fail"), NO;
    StandinPipelineDescriptor *descriptor = (StandinPipelineDescriptor *)d;
    @synchronized(self) {
        if (searched) complain("an archive that is searched was extended");
        [keys addObject:archive_key(descriptor)];
    }
    return YES;
}
- (BOOL)serializeToURL:(NSURL *)url error:(NSError **)error {
    if (config.fail_archive == 4) return failed(error, 1, "made to fail"), NO;
    return [[[keys allObjects] componentsJoinedByString:@"\n"] writeToFile:[url path] atomically:NO];
}
- (void)dealloc {
    [keys release];
    died("archive");
    [super dealloc];
}
@end

// ---- residency --------------------------------------------------------------------------------------------------------

@interface StandinSet : NSObject <MTLResidencySet> {
    NSMutableArray *committed, *pending;
    bool held;
}
@end
@implementation StandinSet
- (id)init {
    self = [super init];
    committed = [[NSMutableArray alloc] init];
    pending = [[NSMutableArray alloc] init];
    born("residency set");
    return self;
}
- (void)home:(id)allocation change:(int)by {
    if ([allocation isKindOfClass:[StandinBuffer class]] && !config.homeless)
        ((StandinBuffer *)allocation)->homes += (uint32_t)by;
}
- (void)addAllocation:(id<MTLAllocation>)a {
    [pending addObject:a];
}
- (void)removeAllocation:(id<MTLAllocation>)a {
    if (![pending containsObject:a]) complain("removeAllocation of something that is not in the set");
    [pending removeObject:a];
}
- (void)commit {
    for (StandinBuffer *b in committed) [self home:b change:-1];
    [committed setArray:pending];
    for (StandinBuffer *b in committed) [self home:b change:1];
    note("residency commit %lu", (unsigned long)[committed count]);
}
- (void)requestResidency {
    held = true;
    note("residency request");
}
- (void)endResidency {
    if (!held) complain("endResidency without requestResidency");
    held = false;
    note("residency end");
}
- (void)dealloc {
    for (StandinBuffer *b in committed) [self home:b change:-1];
    [committed release];
    [pending release];
    died("residency set");
    [super dealloc];
}
@end

// ---- the device -------------------------------------------------------------------------------------------------------

@interface StandinDevice : NSObject <MTLDevice>
@end
// Whoever makes pipelines one after the other never has as many in the making, and is told after a minute.
static void meet_other_compilers(void) {
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    static int here, gone;
    const int wanted = (int)config.compile_together;
    const struct timespec end = {.tv_sec = time(NULL) + 60};
    pthread_mutex_lock(&mutex);
    here++;
    pthread_cond_broadcast(&changed);
    while (here < wanted)
        if (pthread_cond_timedwait(&changed, &mutex, &end)) {
            complain("fewer than %d pipelines were in the making at a time", wanted);
            break;
        }
    if (++gone == here) here = gone = 0;
    pthread_mutex_unlock(&mutex);
}

@implementation StandinDevice
- (NSString *)name {
    return [NSString stringWithUTF8String:config.name];
}
- (BOOL)supportsFamily:(MTLGPUFamily)family {
    return family >= MTLGPUFamilyApple1 && family < MTLGPUFamilyApple1 + (NSInteger)config.family;
}
- (BOOL)hasUnifiedMemory {
    return config.unified != 0;
}
- (uint64_t)recommendedMaxWorkingSetSize {
    return (uint64_t)config.working_set;
}
- (NSUInteger)maxBufferLength {
    return (NSUInteger)config.max_buffer;
}
- (NSUInteger)maxThreadgroupMemoryLength {
    return (NSUInteger)config.threadgroup_memory;
}
- (id<MTLCommandQueue>)newCommandQueueWithMaxCommandBufferCount:(NSUInteger)count {
    return config.fail_queue ? nil : standin_queue(count);
}
- (id<MTLBuffer>)newBufferWithBytesNoCopy:(const void *)bytes
                                   length:(NSUInteger)length
                                  options:(MTLResourceOptions)options
                              deallocator:(void (^)(void *, NSUInteger))deallocator {
    const NSUInteger page = (NSUInteger)sysconf(_SC_PAGESIZE);
    if ((uintptr_t)bytes % page || length % page || !length) complain("a buffer that is not made of whole pages");
    if (length > config.max_buffer) complain("a buffer beyond maxBufferLength");
    if (config.fail_buffer > 0 && config.fail_buffer-- == 1) return nil;
    StandinBuffer *b = [[StandinBuffer alloc] init];
    born("buffer");
    b->pointer = b->gpu = (uint8_t *)bytes;
    b->length = length;
    b->tracked = !config.untracked && !(options & MTLResourceHazardTrackingModeUntracked);
    b->deallocator = Block_copy(deallocator);
    if (config.checked) b->gpu = map_twice(b->pointer, length);
    keep_buffer(b, true);
    return b;
}
- (id<MTLFence>)newFence {
    return config.fail_indirect == 3 ? nil : standin_fence();
}
- (id<MTLIndirectCommandBuffer>)newIndirectCommandBufferWithDescriptor:(MTLIndirectCommandBufferDescriptor *)descriptor
                                                       maxCommandCount:(NSUInteger)count
                                                               options:(MTLResourceOptions)options {
    return config.fail_indirect == 2 ? nil : standin_indirect(descriptor, count, options);
}
- (id<MTLLibrary>)newLibraryWithSource:(NSString *)source options:(MTLCompileOptions *)o error:(NSError **)error {
    StandinCompileOptions *options = (StandinCompileOptions *)o;
    note("compile %lu characters, version %lx, math mode %ld, functions %ld", (unsigned long)[source length],
        (unsigned long)options->version, (long)options->mode, (long)options->functions);
    if (config.fail_compile == 1 || (config.fail_compile == 4 && options->version >= MTLLanguageVersion4_0))
        return failed(error, MTLLibraryErrorCompileFailure,
            "Compilation failed: \n\nprogram_source:1:1: warning: old\nint i;\nprogram_source:2:3: error: made to fail\n");
    StandinLibrary *l = [[StandinLibrary alloc] init];
    born("library");
    l->source = [source copy];
    l->version = options->version;
    return l;
}
- (id<MTLLibrary>)newLibraryWithURL:(NSURL *)url error:(NSError **)error {
    note("load %s", [[url path] UTF8String]);
    if (config.fail_metallib) return failed(error, MTLLibraryErrorUnsupported, "made to fail");
    StandinLibrary *l = [[StandinLibrary alloc] init];
    born("library");
    l->source = [[NSString alloc] initWithContentsOfFile:[url path]];
    return l;
}
- (id<MTLComputePipelineState>)newComputePipelineStateWithDescriptor:(MTLComputePipelineDescriptor *)d
                                                             options:(MTLPipelineOption)options
                                                          reflection:(MTLComputePipelineReflection **)reflection
                                                               error:(NSError **)error {
    StandinPipelineDescriptor *descriptor = (StandinPipelineDescriptor *)d;
    StandinFunction *f = (StandinFunction *)descriptor->function;
    (void)reflection;
    if (!f) return failed(error, 1, "no function");
    if (options & MTLPipelineOptionFailOnBinaryArchiveMiss) {
        StandinArchive *archive = (StandinArchive *)[descriptor->archives objectAtIndex:0];
        archive->searched = true;
        if (![archive->keys containsObject:archive_key(descriptor)]) return failed(error, 1, "not in the archive");
    } else {
        if (config.compile_together) meet_other_compilers();
        if (config.compile_us) usleep((useconds_t)config.compile_us);
    }
    if (descriptor->indirect && config.fail_indirect == 1)
        return failed(error, 3, "Compute function cannot be used with indirect command buffers");
    if (config.fail_pipeline > 0 && config.fail_pipeline-- == 1) return failed(error, 1, "made to fail");
    StandinPipeline *p = [[StandinPipeline alloc] init];
    born("pipeline");
    p->function = [f retain];
    p->threads = descriptor->threads ? descriptor->threads : (NSUInteger)config.pipeline_threads;
    if (f->kernel.max_threads) p->threads = f->kernel.max_threads;
    if (p->threads > config.most_threads) p->threads = (NSUInteger)config.most_threads;
    p->whole = descriptor->whole;
    p->indirect = descriptor->indirect;
    return p;
}
- (id<MTLBinaryArchive>)newBinaryArchiveWithDescriptor:(MTLBinaryArchiveDescriptor *)d error:(NSError **)error {
    NSURL *url = ((StandinArchiveDescriptor *)d)->url;
    if (config.fail_archive == 2 || (config.fail_archive == 1 && url)) return failed(error, 1, "made to fail");
    StandinArchive *a = [[StandinArchive alloc] init];
    born("archive");
    a->keys = [[NSMutableSet alloc] init];
    if (url) {
        NSString *text = [NSString stringWithContentsOfFile:[url path]];
        [a->keys addObjectsFromArray:[text componentsSeparatedByString:@"\n"]];
    }
    return a;
}
- (id<MTLResidencySet>)newResidencySetWithDescriptor:(MTLResidencySetDescriptor *)descriptor error:(NSError **)error {
    (void)descriptor;
    if (config.fail_set) return failed(error, 1, "made to fail");
    return [[StandinSet alloc] init];
}
- (void)setShouldMaximizeConcurrentCompilation:(BOOL)value {
    (void)value;
}
- (void)dealloc {
    died("device");
    [super dealloc];
}
@end

// macOS's way to ask for its version; 26.1 is set as 26.1.
STANDIN_API int sysctlbyname(const char *name, void *out, size_t *bytes, void *in, size_t in_bytes) {
    (void)in, (void)in_bytes;
    if (!config.macos) return -1;
    if (!strcmp(name, "kern.osversion"))
        *bytes = (size_t)snprintf(out, *bytes, "24F%.0f", config.build);
    else if (!strcmp(name, "kern.osproductversion"))
        *bytes = (size_t)snprintf(out, *bytes, "%.1f.3", config.macos);
    else
        return -1;
    return 0;
}

static id<MTLDevice> new_device(void) {
    born("device");
    note("device AGX_RELAX_CDM_CTXSTORE_TIMEOUT=%s", getenv("AGX_RELAX_CDM_CTXSTORE_TIMEOUT") ?: "");
    return [[StandinDevice alloc] init];
}

id<MTLDevice> MTLCreateSystemDefaultDevice(void) { return config.no_default ? nil : new_device(); }

NSArray *MTLCopyAllDevices(void) {
    if (config.no_devices) return [[NSArray alloc] init];
    id<MTLDevice> device = new_device();
    NSArray *all = [[NSArray alloc] initWithObjects:device, nil];
    [device release];
    return all;
}
