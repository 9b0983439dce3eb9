// SPDX-License-Identifier: Apache-2.0
// Why the GPU did not finish a command buffer, in words: cause, place and remedy.
// The texts in parentheses that macOS gives (kIOGPUCommandBufferCallbackError...) are not documented; codes are.
#include "metal_runtime.h"

typedef struct {
    const char *sign; // part of the text that macOS gives; NULL: only the code counts
    MTLCommandBufferError error;
    int code;
    bool too_long;
    const char *cause, *remedy;
} failure_row;

#define SMALLER "the next submission is cut into smaller parts: try again; close other programs that use the GPU"
#define BUG "the kernel or the plan is wrong: run `python -m lily doctor` and report what it prints"
#define OTHERS "close other programs or choose a smaller max_context"

static const failure_row FAILURES[] = {
    {"Interactivity", MTLCommandBufferErrorInternal, LILY_EFAILED, true,
        "macOS stopped the GPU because this work kept the screen waiting", SMALLER},
    {"InnocentVictim", MTLCommandBufferErrorInternal, LILY_EFAILED, false,
        "work of another program brought the GPU down", "try again"},
    {NULL, MTLCommandBufferErrorTimeout, LILY_EFAILED, true, "macOS stopped the GPU because this work took too long",
        SMALLER},
    {NULL, MTLCommandBufferErrorOutOfMemory, LILY_ENOMEM, false, "the GPU ran out of memory", OTHERS},
    {NULL, MTLCommandBufferErrorPageFault, LILY_EFAILED, false, "a kernel used memory that it has not been given", BUG},
    {NULL, MTLCommandBufferErrorInvalidResource, LILY_EFAILED, false, "a buffer had been freed before its use", BUG},
    {NULL, MTLCommandBufferErrorStackOverflow, LILY_EFAILED, false, "a kernel ran out of stack", BUG},
    {NULL, MTLCommandBufferErrorNotPermitted, LILY_ELOST, false, "macOS does not let this process use the GPU",
        "run it in a session of a logged-in user, or use --device cpu"},
    {NULL, MTLCommandBufferErrorAccessRevoked, LILY_ELOST, false,
        "macOS refuses further GPU work of this process after earlier errors", "start the program again"},
    {NULL, MTLCommandBufferErrorDeviceRemoved, LILY_ELOST, false, "the GPU is gone", "start the program again"},
};

static const failure_row UNKNOWN_FAILURE = {NULL, MTLCommandBufferErrorInternal, LILY_EFAILED, false,
    "the GPU reported an error", "try again; if it comes again run `python -m lily doctor` and report what it prints"};

static const failure_row *classify(NSError *error) {
    const char *said = reason(error);
    for (size_t i = 0; i < sizeof FAILURES / sizeof *FAILURES; i++) {
        const failure_row *f = &FAILURES[i];
        if (f->sign ? strstr(said, f->sign) != NULL : (NSUInteger)[error code] == f->error) return f;
    }
    return &UNKNOWN_FAILURE;
}

failure_kind failure_describe(NSError *error, const command_part *p, char *out, size_t bytes) {
    const failure_row *f = classify(error);
    snprintf(out, bytes, "%s, in %u dispatches from %s to %s (%s, code %ld); %s", f->cause, p->dispatches,
        p->first ? p->first : "none", p->last ? p->last : "none", reason(error), (long)[error code], f->remedy);
    return (failure_kind){f->code, f->too_long};
}
