// SPDX-License-Identifier: Apache-2.0
// A submission as command buffers: encoding recorded lists, cutting them into parts, what completion handlers do.
//
// A submission is normally one command buffer with one concurrent encoder.  macOS stops GPU work that runs too long, so
// lists whose estimated time exceeds the device's slice are cut into several command buffers, at barriers only; hazard
// tracking orders these, and the cut takes the barrier's place.  The estimate is weighted threads times seconds per thread:
// what the list itself, or another large one, was measured to take; before anything was, a guess for a slow GPU.
#include "metal_runtime.h"

// Seconds per thread: a chunk of 2,048 rows of the 35B model has 10 TFLOP and 268 million threads, so 2.5 TFLOP/s.
#define GUESSED_RATE 15e-9
#define LARGE_WORK 1e7      // threads; lists of less say nothing about the time of large ones
#define SHORTEST_SLICE 0.01 // seconds

// ---- completion -------------------------------------------------------------------------------------------------------

static submission *submission_of(lily_device *d, uint64_t ticket) { return &d->in_flight[ticket % MAX_IN_FLIGHT]; }

// Goes up at once, down slowly: one slow run must not be forgotten by the next.
static void learn(double *rate, double measured) {
    const double decayed = 0.75 * *rate + 0.25 * measured;
    *rate = measured > decayed ? measured : decayed;
}

static double rate_of(const lily_device *d, const lily_list *list) {
    return list->rate > 0 ? list->rate : d->rate > 0 ? d->rate : GUESSED_RATE;
}

static void record_success(lily_device *d, submission *s, const command_part *p, double seconds) {
    s->seconds += seconds;
    if (!p->list || seconds <= 0 || p->work <= 0) return;
    learn(&p->list->rate, seconds / p->work);
    if (p->work >= LARGE_WORK) learn(&d->rate, seconds / p->work);
}

static void record_failure(lily_device *d, submission *s, const command_part *p, NSError *error) {
    char text[DEVICE_ERROR_BYTES];
    const failure_kind f = failure_describe(error, p, text, sizeof text);
    if (f.too_long && d->slice > SHORTEST_SLICE) d->slice /= 2;
    if (f.too_long && p->list) p->list->rate = 2 * rate_of(d, p->list);
    if (f.code == LILY_ELOST) snprintf(d->unusable, sizeof d->unusable, "%s", text);
    if (s->code) return; // what follows a failure in the same submission only has worse data
    s->code = f.code;
    snprintf(s->error, sizeof s->error, "%s", text);
}

// One part of the submission has ended, and the mutex is held; tickets are completed in their order.
static void end_part(lily_device *d, submission *s) {
    if (--s->parts) return;
    for (uint64_t t = d->head.completed + 1; t <= d->head.submitted && !submission_of(d, t)->parts; t++) {
        const submission *done = submission_of(d, t);
        device_finish(&d->head, t, done->seconds, done->code, done->error);
    }
}

// After end_part the host may free the list.
static void finish_part(lily_device *d, submission *s, const command_part *p, id<MTLCommandBuffer> buffer) {
    pthread_mutex_lock(&d->head.mutex);
    if ([buffer status] == MTLCommandBufferStatusCompleted)
        record_success(d, s, p, [buffer GPUEndTime] - [buffer GPUStartTime]);
    else
        record_failure(d, s, p, [buffer error]);
    end_part(d, s);
    pthread_mutex_unlock(&d->head.mutex);
}

// ---- encoding ---------------------------------------------------------------------------------------------------------

typedef struct {
    lily_device *device;
    submission *submission;
    id<MTLCommandBuffer> buffer; // these three: not owned
    id<MTLComputeCommandEncoder> encoder;
    id<MTLComputePipelineState> pipeline;
    command_part part;
    double seconds, slice; // estimated so far; how much a part may have, 0: any
} encoding;

// Lists and buffers outlive their submission, so the command buffer need not retain them.
static bool begin_part(encoding *e) {
    lily_device *d = e->device;
    e->buffer = [d->queue commandBufferWithUnretainedReferences];
    e->encoder = [e->buffer computeCommandEncoderWithDispatchType:MTLDispatchTypeConcurrent];
    if (d->fence) [e->encoder waitForFence:d->fence];
    e->pipeline = nil;
    e->seconds = 0;
    e->part = (command_part){0};
    return e->encoder != nil;
}

static void commit_part(encoding *e) {
    lily_device *d = e->device;
    submission *s = e->submission;
    const command_part p = e->part;
    if (d->fence) [e->encoder updateFence:d->fence];
    [e->encoder endEncoding];
    [e->buffer addCompletedHandler:^(id<MTLCommandBuffer> buffer) {
      finish_part(d, s, &p, buffer);
    }];
    pthread_mutex_lock(&d->head.mutex);
    s->parts++;
    d->command_buffers++;
    pthread_mutex_unlock(&d->head.mutex);
    [e->buffer commit];
    e->encoder = nil;
}

static void encode_dispatch(encoding *e, const lily_list *list, const recorded *r) {
    if (r->pipeline != e->pipeline) [e->encoder setComputePipelineState:r->pipeline];
    e->pipeline = r->pipeline;
    [e->encoder setBuffers:list->buffers + r->first
                   offsets:list->offsets + r->first
                 withRange:NSMakeRange(0, r->bindings)];
    [e->encoder dispatchThreadgroups:r->grid threadsPerThreadgroup:r->threads];
}

static void count_dispatch(encoding *e, lily_list *list, const recorded *r, double rate) {
    command_part *p = &e->part;
    if (!p->dispatches++) p->first = r->kernel->head.row->name;
    p->last = r->kernel->head.row->name;
    p->work += r->work;
    e->seconds += r->work * rate;
    if (!p->list || list->work > p->most) p->list = list, p->most = list->work;
}

static void encode_replay(encoding *e, const lily_list *list, uint32_t first, uint32_t end) {
    if (list->replay && first < end)
        [e->encoder executeCommandsInBuffer:list->replay withRange:NSMakeRange(first, end - first)];
}

// A replayed list has its barriers inside; only the one before it is the encoder's.
static bool encode_list(encoding *e, lily_list *list, double rate) {
    uint32_t first = 0; // of the dispatches that are to be replayed in this part
    for (uint32_t i = 0; i < list->count; i++) {
        const recorded *r = &list->dispatch[i];
        const bool barrier = r->barrier || i == 0;
        if (e->encoder && barrier && e->slice > 0 && e->seconds >= e->slice) {
            encode_replay(e, list, first, i);
            first = i;
            commit_part(e);
        }
        if (!e->encoder) {
            if (!begin_part(e)) return false;
        } else if (barrier && (i == 0 || !list->replay)) {
            [e->encoder memoryBarrierWithScope:MTLBarrierScopeBuffers];
        }
        if (!list->replay) encode_dispatch(e, list, r);
        count_dispatch(e, list, r, rate);
    }
    encode_replay(e, list, first, list->count);
    return true;
}

// What is committed runs; if Metal gives no more command buffers the submission fails.
void submission_encode(lily_device *d, submission *s, lily_list *const *lists, uint32_t count) {
    encoding e = {.device = d, .submission = s};
    double rates[MAX_LISTS] = {0}, seconds = 0;
    pthread_mutex_lock(&d->head.mutex);
    for (uint32_t i = 0; i < count; i++) {
        rates[i] = rate_of(d, lists[i]);
        seconds += rates[i] * lists[i]->work;
    }
    e.slice = d->slice;
    pthread_mutex_unlock(&d->head.mutex);
    if (e.slice > 0 && seconds > e.slice * MAX_PARTS) e.slice = seconds / MAX_PARTS;
    bool ok = true;
    for (uint32_t i = 0; ok && i < count; i++) ok = encode_list(&e, lists[i], rates[i]);
    if (e.encoder) commit_part(&e);
    if (ok) return;
    pthread_mutex_lock(&d->head.mutex);
    s->code = LILY_EFAILED;
    snprintf(s->error, sizeof s->error, "Metal gave no command buffer; close other programs that use the GPU");
    pthread_mutex_unlock(&d->head.mutex);
}

// ---- a submission from its ticket to its last part ---------------------------------------------------------------------

submission *submission_begin(lily_device *d, int *code) {
    submission *s = NULL;
    pthread_mutex_lock(&d->head.mutex);
    const uint64_t unfinished = d->head.submitted - d->head.completed;
    if (d->unusable[0])
        *code = device_fail(LILY_ELOST, "%s", d->unusable);
    else if (unfinished >= MAX_IN_FLIGHT)
        *code = device_fail(LILY_EFAILED, "%d submissions are unfinished; wait for a ticket first", MAX_IN_FLIGHT);
    else {
        s = submission_of(d, ++d->head.submitted);
        s->ticket = d->head.submitted;
        s->parts = 1;
        s->code = LILY_OK;
        s->seconds = 0;
        s->error[0] = 0;
    }
    pthread_mutex_unlock(&d->head.mutex);
    return s;
}

void submission_end(lily_device *d, submission *s, int code) {
    pthread_mutex_lock(&d->head.mutex);
    if (code) s->code = code, snprintf(s->error, sizeof s->error, "%s", device_text());
    end_part(d, s);
    pthread_mutex_unlock(&d->head.mutex);
}
