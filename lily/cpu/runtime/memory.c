// SPDX-License-Identifier: Apache-2.0
// Buffers.  Large ones lie on huge pages where the system has them: weights are read once per token, front to back, and
// with 4 KiB pages the page walks and the prefetchers' stops at page ends cost part of the bandwidth.
#if defined(__linux__)
#define _GNU_SOURCE // MADV_HUGEPAGE
#elif defined(__APPLE__)
#define _DARWIN_C_SOURCE // MAP_ANONYMOUS
#endif
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

#define ALIGNMENT 256u
#define HUGE_PAGE ((size_t)2 << 20)

int lily_buffer_new(lily_device *device, uint64_t bytes, int shared, lily_buffer **out) {
    if (!device || !out) return device_fail(LILY_EINVAL, "lily_buffer_new: an argument is null");
    *out = NULL;
    if (bytes > ((uint64_t)1 << 46))
        return device_fail(
            LILY_ENOMEM, "a buffer of %llu bytes is beyond this machine's address space", (unsigned long long)bytes);
    lily_buffer *b = calloc(1, sizeof *b);
    if (!b) return device_fail(LILY_ENOMEM, "no memory left for a buffer's record");
    b->head.bytes = bytes;
    b->head.hidden = device->discrete && !shared;
    // Readers may fetch whole vectors at the end, so the mapping goes on for a little.
    const bool huge = bytes >= HUGE_PAGE;
    b->mapping_bytes = (size_t)bytes + ALIGNMENT + (huge ? HUGE_PAGE : 0);
    b->mapping = mmap(NULL, b->mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->mapping == MAP_FAILED) {
        free(b);
        return device_fail(LILY_ENOMEM,
            "the system refused a buffer of %llu bytes (%s); close other programs or choose a smaller context",
            (unsigned long long)bytes, strerror(errno));
    }
    const size_t step = huge ? HUGE_PAGE : ALIGNMENT;
    b->head.memory = (unsigned char *)(((uintptr_t)b->mapping + step - 1) & ~(uintptr_t)(step - 1));
#if defined(MADV_HUGEPAGE)
    if (huge) madvise(b->head.memory, (size_t)bytes, MADV_HUGEPAGE); // refused where switched off: only slower
#endif
    *out = b;
    return LILY_OK;
}

void lily_buffer_free(lily_buffer *b) {
    if (!b) return;
    munmap(b->mapping, b->mapping_bytes);
    free(b);
}
