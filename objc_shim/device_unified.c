// SPDX-License-Identifier: Apache-2.0
// Transfers of lily_device.h for a device whose memory the host reaches, whether it tells so or not.
#include <string.h>

#include "device_common.h"

static const buffer_head *head_of(const lily_buffer *b) { return (const buffer_head *)b; }

static int check_range(const char *what, const lily_buffer *b, uint64_t offset, uint64_t bytes) {
    if (!b) return device_fail(LILY_EINVAL, "%s: no buffer", what);
    const uint64_t size = head_of(b)->bytes;
    if (offset <= size && bytes <= size - offset) return LILY_OK;
    return device_fail(LILY_EINVAL, "%s: %llu bytes at %llu are not within a buffer of %llu", what,
        (unsigned long long)bytes, (unsigned long long)offset, (unsigned long long)size);
}

void *lily_buffer_contents(lily_buffer *b) { return head_of(b)->hidden ? NULL : head_of(b)->memory; }

int lily_buffer_fill(lily_buffer *b, uint64_t offset, uint64_t bytes, int value) {
    const int code = check_range("lily_buffer_fill", b, offset, bytes);
    if (!code) memset(head_of(b)->memory + offset, value, (size_t)bytes);
    return code;
}

int lily_buffer_copy(lily_buffer *to, uint64_t to_offset, lily_buffer *from, uint64_t from_offset, uint64_t bytes) {
    int code = check_range("lily_buffer_copy: to", to, to_offset, bytes);
    if (!code) code = check_range("lily_buffer_copy: from", from, from_offset, bytes);
    if (!code) memmove(head_of(to)->memory + to_offset, head_of(from)->memory + from_offset, (size_t)bytes);
    return code;
}

int lily_buffer_read(lily_buffer *b, uint64_t offset, uint64_t bytes, void *out) {
    const int code = check_range("lily_buffer_read", b, offset, bytes);
    if (!code && bytes) memcpy(out, head_of(b)->memory + offset, (size_t)bytes);
    return code;
}

int lily_buffer_write(lily_buffer *b, uint64_t offset, uint64_t bytes, const void *in) {
    const int code = check_range("lily_buffer_write", b, offset, bytes);
    if (!code && bytes) memcpy(head_of(b)->memory + offset, in, (size_t)bytes);
    return code;
}
