// SPDX-License-Identifier: Apache-2.0
// The stand-in's indirect command buffers and fences: what may be recorded, and that all of it was.
// Executing them is the encoder's (standin_queue.m).
#include "standin.h"

@interface StandinIndirectDescriptor : MTLIndirectCommandBufferDescriptor {
  @public
    MTLIndirectCommandType types;
    BOOL buffers, pipeline;
    NSUInteger bindings;
}
@end
STANDS_FOR(MTLIndirectCommandBufferDescriptor, StandinIndirectDescriptor)
@implementation StandinIndirectDescriptor
- (id)init {
    self = [super init];
    buffers = pipeline = YES;
    return self;
}
- (void)setCommandTypes:(MTLIndirectCommandType)t {
    types = t;
}
- (void)setInheritBuffers:(BOOL)yes {
    buffers = yes;
}
- (void)setInheritPipelineState:(BOOL)yes {
    pipeline = yes;
}
- (void)setMaxKernelBufferBindCount:(NSUInteger)n {
    if (n > SLOTS) complain("%lu buffers for a command, allowed %d", (unsigned long)n, SLOTS);
    bindings = n;
}
@end

// One command; a view of its place in the buffer.
@interface StandinCommand : NSObject <MTLIndirectComputeCommand> {
  @public
    StandinIndirect *owner;
    NSUInteger index;
}
@end
@implementation StandinCommand
- (record *)place {
    if (owner->ended) complain("an indirect command buffer was changed after its use");
    return &owner->commands[index];
}
- (void)setComputePipelineState:(id<MTLComputePipelineState>)state {
    StandinPipeline *p = (StandinPipeline *)state;
    if (!p->indirect) complain("%s was not made for indirect command buffers", [p->function->name UTF8String]);
    [self place]->pipeline = p;
}
- (void)setKernelBuffer:(id<MTLBuffer>)buffer offset:(NSUInteger)offset atIndex:(NSUInteger)i {
    StandinBuffer *b = (StandinBuffer *)buffer;
    if (i >= owner->bindings) return complain("buffer %lu of %lu", (unsigned long)i, (unsigned long)owner->bindings);
    check_binding(b, offset, i);
    [self place]->buffer[i] = b;
    [self place]->offset[i] = offset;
}
- (void)setBarrier {
    if (owner->encoded[index]) complain("setBarrier after the dispatch");
    owner->barriers[index] = true;
}
- (void)concurrentDispatchThreadgroups:(MTLSize)grid threadsPerThreadgroup:(MTLSize)threads {
    record *r = [self place];
    if (owner->encoded[index]) complain("command %lu was not reset", (unsigned long)index);
    r->grid = grid;
    r->threads = threads;
    check_record(r);
    owner->encoded[index] = true;
}
@end

@implementation StandinIndirect
- (void)resetWithRange:(NSRange)range {
    if (range.location + range.length > size) return complain("reset beyond an indirect command buffer");
    memset(commands + range.location, 0, range.length * sizeof *commands);
    memset(barriers + range.location, 0, range.length * sizeof *barriers);
    memset(encoded + range.location, 0, range.length * sizeof *encoded);
}
- (id<MTLIndirectComputeCommand>)indirectComputeCommandAtIndex:(NSUInteger)i {
    if (i >= size) {
        complain("command %lu of %lu", (unsigned long)i, (unsigned long)size);
        return nil;
    }
    StandinCommand *c = [[[StandinCommand alloc] init] autorelease];
    c->owner = self;
    c->index = i;
    return c;
}
- (void)dealloc {
    free(commands);
    free(barriers);
    free(encoded);
    died("indirect command buffer");
    [super dealloc];
}
@end

id<MTLIndirectCommandBuffer> standin_indirect(
    MTLIndirectCommandBufferDescriptor *descriptor, NSUInteger count, MTLResourceOptions options) {
    StandinIndirectDescriptor *d = (StandinIndirectDescriptor *)descriptor;
    if (d->types != MTLIndirectCommandTypeConcurrentDispatch) complain("an indirect command buffer of another type");
    if (d->buffers || d->pipeline) complain("an indirect command buffer that inherits");
    if (options != MTLResourceStorageModeShared) complain("an indirect command buffer that the host cannot write");
    if (!count || count > 16384) complain("an indirect command buffer of %lu commands", (unsigned long)count);
    StandinIndirect *b = [[StandinIndirect alloc] init];
    born("indirect command buffer");
    b->size = count;
    b->bindings = d->bindings;
    b->commands = calloc(count, sizeof *b->commands);
    b->barriers = calloc(count, sizeof *b->barriers);
    b->encoded = calloc(count, sizeof *b->encoded);
    return b;
}

@interface StandinFence : NSObject <MTLFence>
@end
@implementation StandinFence
- (void)dealloc {
    died("fence");
    [super dealloc];
}
@end

id<MTLFence> standin_fence(void) {
    born("fence");
    return [[StandinFence alloc] init];
}
