// SPDX-License-Identifier: Apache-2.0
// The stand-in's command queue: encoders that check what they are given, and a thread that runs command buffers.
//
// A committed command buffer waits for earlier ones of its queue with which it shares a hazard-tracked buffer, and for
// no other: those it could overlap with on a GPU are run in an order that the test chooses.  Sharing a buffer that is
// not tracked, or that an indirect command buffer names, without such an order or a fence is a race, which is reported.
// Between barriers, dispatches run in a chosen order.
#define _GNU_SOURCE
#include <unistd.h>

#include "standin.h"

@interface StandinCommands : NSObject <MTLCommandBuffer> {
  @public
    StandinQueue *queue;
    record *records;
    NSUInteger count, room;
    uint32_t number, executions;
    id waits, updates; // fences, not owned
    bool encoding, encoded, committed;
    MTLCommandBufferStatus state;
    NSError *failure;
    double began, ended;
    void (^handler)(id<MTLCommandBuffer>);
    NSMutableSet *after; // numbers of earlier ones that must have ended
}
@end

@interface StandinEncoder : NSObject <MTLComputeCommandEncoder> {
  @public
    StandinCommands *commands;
    record current;
    bool ended;
}
@end

// ---- encoding ---------------------------------------------------------------------------------------------------------

static record *add_record(StandinCommands *c) {
    if (c->count == c->room) c->records = realloc(c->records, (c->room = 2 * c->room + 64) * sizeof *c->records);
    return memset(&c->records[c->count++], 0, sizeof(record));
}

void check_record(const record *r) {
    const NSUInteger size = r->threads.width * r->threads.height * r->threads.depth;
    StandinPipeline *p = r->pipeline;
    if (!p) return complain("a dispatch without a pipeline");
    const char *name = [p->function->name UTF8String];
    if (!size || size > p->threads)
        complain("%s: %lu threads, allowed %lu", name, (unsigned long)size, (unsigned long)p->threads);
    if (p->whole && size % (NSUInteger)config.simd_width)
        complain("%s: %lu threads are no whole simdgroups", name, (unsigned long)size);
    if (!r->grid.width || !r->grid.height || !r->grid.depth) complain("%s: an empty grid", name);
    for (int i = 0; i < SLOTS; i++) {
        if ((p->function->kernel.arguments >> i & 1) && !r->buffer[i]) complain("%s: buffer %d is not set", name, i);
    }
}

static bool same_buffer(const record *a, const record *b) {
    for (int k = 0; k < SLOTS; k++) {
        for (int l = 0; a->buffer[k] && l < SLOTS; l++)
            if (a->buffer[k] == b->buffer[l]) return true;
    }
    return false;
}

// A barrier inside an indirect command buffer waits for commands of the same execution only: what else was encoded since
// the encoder's last barrier must use other memory.
static void check_overlap(StandinCommands *c, StandinIndirect *b, NSRange range) {
    for (NSUInteger i = c->count; i-- > 0;) {
        const record *r = &c->records[i];
        if (!r->pipeline && !r->execution) return;
        for (NSUInteger k = range.location; r->pipeline && k < range.location + range.length; k++) {
            if (same_buffer(r, &b->commands[k]))
                return complain("race: commands of two executions in one encoder share a buffer without a barrier");
        }
    }
}

@implementation StandinEncoder
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
    if (ended) complain("setComputePipelineState after endEncoding");
    current.pipeline = (StandinPipeline *)state;
}
- (void)setBuffers:(const id<MTLBuffer> *)buffers offsets:(const NSUInteger *)offsets withRange:(NSRange)range {
    if (range.location + range.length > SLOTS)
        complain("buffer index %lu", (unsigned long)(range.location + range.length));
    for (NSUInteger i = 0; i < range.length && range.location + i < SLOTS; i++) {
        StandinBuffer *b = (StandinBuffer *)buffers[i];
        check_binding(b, offsets[i], range.location + i);
        current.buffer[range.location + i] = b;
        current.offset[range.location + i] = offsets[i];
    }
}
- (void)dispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threads {
    if (ended) complain("a dispatch after endEncoding");
    current.grid = grid;
    current.threads = threads;
    check_record(&current);
    if (!current.pipeline) return;
    *add_record(commands) = current;
    note("dispatch %s %lu %lu %lu x %lu", [current.pipeline->function->name UTF8String], (unsigned long)grid.width,
        (unsigned long)grid.height, (unsigned long)grid.depth,
        (unsigned long)(threads.width * threads.height * threads.depth));
}
- (void)executeCommandsInBuffer:(id<MTLIndirectCommandBuffer>)buffer withRange:(NSRange)range {
    StandinIndirect *b = (StandinIndirect *)buffer;
    if (ended) complain("executeCommandsInBuffer after endEncoding");
    if (!range.length || range.length > 16384 || range.location + range.length > b->size)
        return complain("commands %lu to %lu of an indirect command buffer of %lu", (unsigned long)range.location,
            (unsigned long)(range.location + range.length), (unsigned long)b->size);
    b->ended = true;
    commands->executions++;
    check_overlap(commands, b, range);
    for (NSUInteger i = range.location; i < range.location + range.length; i++) {
        if (!b->encoded[i]) complain("command %lu of an indirect command buffer is empty", (unsigned long)i);
        if (b->barriers[i]) add_record(commands)->execution = commands->executions;
        record *r = add_record(commands);
        *r = b->commands[i];
        r->execution = commands->executions;
    }
    note("execute %lu %lu", (unsigned long)range.location, (unsigned long)range.length);
}
- (void)waitForFence:(id<MTLFence>)fence {
    if (commands->count || ended) complain("waitForFence after the first command");
    commands->waits = fence;
}
- (void)updateFence:(id<MTLFence>)fence {
    if (ended) complain("updateFence after endEncoding");
    commands->updates = fence;
}
- (void)memoryBarrierWithScope:(MTLBarrierScope)scope {
    if (scope != MTLBarrierScopeBuffers) complain("barrier of another scope");
    if (ended) complain("barrier after endEncoding");
    add_record(commands);
    note("barrier");
}
- (void)endEncoding {
    if (ended) complain("endEncoding twice");
    ended = true;
    commands->encoding = false;
}
- (void)dealloc {
    if (!ended) complain("an encoder was dropped before endEncoding");
    died("encoder");
    [super dealloc];
}
@end

// ---- running ----------------------------------------------------------------------------------------------------------

static uint32_t shuffle_state;

static NSUInteger pick(NSUInteger count) {
    if (config.order == MSL_REVERSE) return count - 1;
    if (config.order == MSL_FORWARD || count < 2) return 0;
    shuffle_state = shuffle_state * 1664525u + 1013904223u;
    return (shuffle_state >> 8) % count;
}

static void run_record(const record *r) {
    StandinFunction *f = r->pipeline->function;
    MslLaunch launch = {
        .order = (uint32_t)config.order, .seed = (uint32_t)config.seed, .workers = (uint32_t)config.workers};
    launch.flags = config.checked ? MSL_CHECK : 0;
    launch.name = [f->name UTF8String];
    uint32_t views = 0;
    for (uint32_t i = 0; i < SLOTS; i++) {
        StandinBuffer *b = r->buffer[i];
        if (!b || !(f->kernel.arguments >> i & 1)) continue;
        if (!is_live(b)) {
            complain("%s: buffer %u was freed before its use", launch.name, i);
            return;
        }
        launch.buffers[i] = b->gpu + r->offset[i];
        launch.bytes[i] = b->length - r->offset[i];
        char name[16];
        snprintf(name, sizeof name, "buffer %u", i);
        if (config.checked &&
            backend.view(views++, launch.buffers[i], launch.bytes[i], f->kernel.writable >> i & 1, name))
            complain("%s: buffer %u is unknown to the emulator", launch.name, i);
    }
    const MTLSize sizes[2] = {r->grid, r->threads};
    const NSUInteger groups[3] = {sizes[0].width, sizes[0].height, sizes[0].depth};
    const NSUInteger threads[3] = {sizes[1].width, sizes[1].height, sizes[1].depth};
    for (int i = 0; i < 3; i++) {
        launch.groups[i] = (uint32_t)groups[i];
        launch.group_size[i] = (uint32_t)threads[i];
        launch.grid[i] = (uint32_t)(groups[i] * threads[i]);
    }
    if (backend.dispatch && f->kernel.entry) backend.dispatch(f->kernel.entry, &launch);
}

// Runs what stands between two barriers, in the chosen order.
static void run_interval(const record *records, NSUInteger count) {
    const record *left[count + 1];
    for (NSUInteger i = 0; i < count; i++) left[i] = &records[i];
    while (count) {
        const NSUInteger i = pick(count);
        run_record(left[i]);
        memmove(&left[i], &left[i + 1], (--count - i) * sizeof *left);
    }
}

static void run_commands(StandinCommands *c) {
    if (config.delay_us) usleep((useconds_t)config.delay_us);
    while (*(volatile double *)&config.hold) usleep(1000);
    c->began = seconds_now();
    if (backend.barrier) backend.barrier();
    for (NSUInteger i = 0; i < c->count;) {
        NSUInteger end = i;
        while (end < c->count && c->records[end].pipeline) end++;
        run_interval(&c->records[i], end - i);
        if (backend.barrier) backend.barrier();
        i = end + 1;
    }
    c->ended = seconds_now();
    c->state = MTLCommandBufferStatusCompleted;
    const char *found = backend.reports ? backend.reports() : "";
    if (*found) {
        complain("%s", found);
        c->failure = [error_of(MTLCommandBufferErrorPageFault, found) retain];
        backend.clear_reports();
    }
    if (config.fail_submission == c->number)
        c->failure = [error_of((NSInteger)config.fail_code, config.fail_text) retain];
    if (c->failure) c->state = MTLCommandBufferStatusError;
}

// Whether both use a buffer in a way that Metal tracks, or in one that it does not.
static bool shares(StandinCommands *a, StandinCommands *b, bool tracked) {
    for (NSUInteger i = 0; i < a->count; i++) {
        const record *r = &a->records[i];
        for (int k = 0; k < SLOTS; k++) {
            StandinBuffer *x = r->buffer[k];
            for (NSUInteger j = 0; x && j < b->count; j++) {
                const bool seen = x->tracked && !r->execution && !b->records[j].execution;
                for (int l = 0; seen == tracked && l < SLOTS; l++)
                    if (b->records[j].buffer[l] == x) return true;
            }
        }
    }
    return false;
}

// Metal makes resident what an encoder is given, not what an indirect command buffer names.
static void check_residency(StandinCommands *c) {
    for (NSUInteger i = 0; i < c->count; i++) {
        const record *r = &c->records[i];
        for (int k = 0; r->execution && k < SLOTS; k++) {
            if (r->buffer[k] && (!r->buffer[k]->homes || !c->queue->sets))
                return complain("%s: buffer %d is not resident", [r->pipeline->function->name UTF8String], k);
        }
    }
}

static bool ready(StandinQueue *q, NSUInteger index) {
    StandinCommands *c = [q->waiting objectAtIndex:index];
    for (NSUInteger i = 0; i < index; i++) {
        StandinCommands *earlier = [q->waiting objectAtIndex:i];
        if ([c->after containsObject:[NSNumber numberWithUnsignedInt:earlier->number]]) return false;
    }
    return true;
}

// One that may run now; what runs before an earlier one must not share memory with it.
static StandinCommands *next_commands(StandinQueue *q) {
    NSUInteger candidates[512], count = 0;
    for (NSUInteger i = 0; i < [q->waiting count] && count < 512; i++)
        if (ready(q, i)) candidates[count++] = i;
    if (!count) return nil;
    const NSUInteger chosen = candidates[pick(count)];
    StandinCommands *c = [q->waiting objectAtIndex:chosen];
    for (NSUInteger i = 0; i < [q->waiting count]; i++) {
        StandinCommands *other = [q->waiting objectAtIndex:i];
        if (i < chosen && shares(c, other, false))
            complain("race: command buffers %u and %u share a buffer and are in no order", other->number, c->number);
    }
    return c;
}

static void *run_queue(void *argument) {
    StandinQueue *q = argument;
    pthread_mutex_lock(&q->mutex);
    for (;;) {
        NSAutoreleasePool *pool = [[NSAutoreleasePool alloc] init];
        while (![q->waiting count] && !q->closing) pthread_cond_wait(&q->changed, &q->mutex);
        if (![q->waiting count]) {
            [pool release];
            break;
        }
        StandinCommands *c = [next_commands(q) retain];
        pthread_mutex_unlock(&q->mutex);
        run_commands(c);
        if (c->handler) c->handler(c);
        pthread_mutex_lock(&q->mutex);
        [q->waiting removeObject:c];
        q->open--;
        pthread_cond_broadcast(&q->changed);
        [c release];
        [pool release];
    }
    pthread_mutex_unlock(&q->mutex);
    return NULL;
}

// ---- command buffers --------------------------------------------------------------------------------------------------

@implementation StandinCommands
- (id<MTLComputeCommandEncoder>)computeCommandEncoderWithDispatchType:(MTLDispatchType)type {
    if (type != MTLDispatchTypeConcurrent) complain("an encoder that is not concurrent");
    if (encoding || encoded) complain("a second encoder in a command buffer");
    if (config.fail_encoder && ++queue->encoders >= config.fail_encoder) return nil;
    encoding = encoded = true;
    StandinEncoder *e = [[[StandinEncoder alloc] init] autorelease];
    born("encoder");
    e->commands = self;
    note("encoder");
    return e;
}
- (void)addCompletedHandler:(void (^)(id<MTLCommandBuffer>))block {
    if (committed) complain("addCompletedHandler after commit");
    if (handler) complain("a second completion handler");
    handler = Block_copy(block);
}
- (void)commit {
    if (encoding) complain("commit before endEncoding");
    if (committed) complain("commit twice");
    pthread_mutex_lock(&queue->mutex);
    committed = true;
    number = ++queue->made; // of those that are run: one that got no encoder is dropped
    state = MTLCommandBufferStatusCommitted;
    for (StandinCommands *earlier in queue->waiting) {
        const bool fenced = waits && waits == earlier->updates && !config.unfenced;
        if (fenced || shares(self, earlier, true)) [after addObject:[NSNumber numberWithUnsignedInt:earlier->number]];
    }
    check_residency(self);
    [queue->waiting addObject:self];
    note("commit %u", number);
    pthread_cond_broadcast(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
}
- (MTLCommandBufferStatus)status {
    return state;
}
- (NSError *)error {
    return failure;
}
- (CFTimeInterval)GPUStartTime {
    return began;
}
- (CFTimeInterval)GPUEndTime {
    return ended;
}
- (void)dealloc {
    if (!committed) {
        pthread_mutex_lock(&queue->mutex);
        queue->open--;
        pthread_mutex_unlock(&queue->mutex);
    }
    free(records);
    [failure release];
    if (handler) Block_release(handler);
    [after release];
    died("command buffer");
    [super dealloc];
}
@end

@implementation StandinQueue
- (id<MTLCommandBuffer>)commandBufferWithUnretainedReferences {
    pthread_mutex_lock(&mutex);
    while (open >= capacity) pthread_cond_wait(&changed, &mutex);
    open++;
    StandinCommands *c = [[[StandinCommands alloc] init] autorelease];
    pthread_mutex_unlock(&mutex);
    born("command buffer");
    c->queue = self;
    c->after = [[NSMutableSet alloc] init];
    return c;
}
- (void)addResidencySet:(id<MTLResidencySet>)set {
    (void)set;
    sets++;
}
- (void)removeResidencySet:(id<MTLResidencySet>)set {
    (void)set;
    if (!sets--) complain("removeResidencySet of a set that the queue does not have");
}
- (void)dealloc {
    pthread_mutex_lock(&mutex);
    closing = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
    thread_end(thread);
    if (sets) complain("a queue was freed with its residency set");
    [waiting release];
    died("queue");
    [super dealloc];
}
@end

StandinQueue *standin_queue(NSUInteger capacity) {
    StandinQueue *q = [[StandinQueue alloc] init];
    born("queue");
    q->capacity = capacity;
    q->waiting = [[NSMutableArray alloc] init];
    shuffle_state = (uint32_t)config.seed;
    pthread_mutex_init(&q->mutex, NULL);
    pthread_cond_init(&q->changed, NULL);
    q->thread = thread_start(run_queue, q);
    return q;
}
