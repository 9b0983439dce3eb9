// SPDX-License-Identifier: Apache-2.0
// Option replay=icb: a list is encoded once, into an indirect command buffer, and every submission only names it.
//
// Metal does not see what an indirect command buffer uses.  So its buffers are resident through the residency set of
// the queue, which macOS 15 lets stand for useResource:; and as residency sets track no hazards, a fence orders all
// encoders of the device.  Within the list setBarrier stands where the list has a barrier.
// Not handled: optimizeIndirectCommandBuffer:, after which ranges could no longer be cut for the watchdog.
#include "metal_runtime.h"

enum { MAX_COMMANDS = 16384, MAX_BINDINGS = 31 }; // of one executeCommandsInBuffer:, of one command
_Static_assert(LILY_MAX_ARGS + 1 <= MAX_BINDINGS, "a kernel's buffers and its parameters fit into one command");

// The device's fence says that lists are replayed.
int replay_open(lily_device *d, const open_options *o) {
    const bool icb = !strcmp(o->replay, "icb");
    if (!icb && strcmp(o->replay, "encode"))
        return device_fail(LILY_EINVAL, "option replay is \"%s\"; allowed: encode, icb", o->replay);
    if (icb) d->fence = [d->gpu newFence];
    if (icb && !d->fence) return device_fail(LILY_EFAILED, "Metal gave no fence; use replay=encode");
    return LILY_OK;
}

static id<MTLIndirectCommandBuffer> replay_buffer(const lily_list *l) {
    MTLIndirectCommandBufferDescriptor *descriptor = [[[MTLIndirectCommandBufferDescriptor alloc] init] autorelease];
    NSUInteger bindings = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        if (l->dispatch[i].bindings > bindings) bindings = l->dispatch[i].bindings;
    }
    [descriptor setCommandTypes:MTLIndirectCommandTypeConcurrentDispatch];
    [descriptor setInheritBuffers:NO];
    [descriptor setInheritPipelineState:NO];
    [descriptor setMaxKernelBufferBindCount:bindings];
    return [l->head.device->gpu newIndirectCommandBufferWithDescriptor:descriptor
                                                       maxCommandCount:l->count
                                                               options:MTLResourceStorageModeShared];
}

static void record_command(id<MTLIndirectComputeCommand> command, const lily_list *l, const recorded *r, bool barrier) {
    [command setComputePipelineState:r->pipeline];
    for (uint32_t i = 0; i < r->bindings; i++)
        [command setKernelBuffer:l->buffers[r->first + i] offset:l->offsets[r->first + i] atIndex:i];
    if (barrier) [command setBarrier]; // before the dispatch
    [command concurrentDispatchThreadgroups:r->grid threadsPerThreadgroup:r->threads];
}

int replay_record(lily_list *l) {
    if (!l->count) return LILY_OK;
    if (l->count > MAX_COMMANDS)
        return device_fail(LILY_EINVAL, "a list of %u dispatches cannot be replayed, at most %d; use replay=encode",
            l->count, MAX_COMMANDS);
    l->replay = replay_buffer(l);
    if (!l->replay)
        return device_fail(
            LILY_ENOMEM, "Metal refused an indirect command buffer for %u dispatches; use replay=encode", l->count);
    [l->replay resetWithRange:NSMakeRange(0, l->count)];
    for (uint32_t i = 0; i < l->count; i++)
        record_command(
            [l->replay indirectComputeCommandAtIndex:i], l, &l -> dispatch[i], l -> dispatch[i].barrier || !i);
    residency_add(l->head.device, l->replay);
    return LILY_OK;
}

void replay_free(lily_list *l) {
    if (!l->replay || device_forked(l->head.device)) return;
    @autoreleasepool {
        residency_drop(l->head.device, l->replay);
        [l->replay release];
    }
}
