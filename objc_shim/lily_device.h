// SPDX-License-Identifier: Apache-2.0
// The one interface between Lily's host code and a device.  Every device is a shared library that exports exactly these
// functions: `metal` (objc_shim/), `cpu` (lily/cpu/), `cuda`.  Plain C, called through ctypes and from Cython.
//
// Conventions.  Functions that can fail return LILY_OK or a LILY_E* code; `lily_error(device)` then has one sentence with
// the cause (`lily_open` writes it into its own buffer, there being no device yet).  A device is used from one thread at a
// time, except `lily_wait`, `lily_completed`, `lily_kernel_get` and `lily_kernel_fit`, which any thread may call, several
// at once too: a kernel that many ask for is compiled once.  No function calls back into the host.
// Nothing in lily_submit allocates: all memory of a list exists when lily_list_end returns.
#ifndef LILY_DEVICE_H
#define LILY_DEVICE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define LILY_API
#else
#define LILY_API __attribute__((visibility("default")))
#endif

#define LILY_ABI_VERSION 2
#define LILY_MAX_ARGS 20
#define LILY_MAX_CONSTANTS 16
#define LILY_MAX_PARAM_BYTES 128

enum {
    LILY_OK = 0,
    LILY_EINVAL = 1,    // an argument is wrong: a fault of the caller
    LILY_ENOMEM = 2,    // device memory is exhausted
    LILY_ENOTFOUND = 3, // no such kernel, or not on this device
    LILY_EFAILED = 4,   // the device reported a failure; later submissions may succeed
    LILY_ETIMEOUT = 5,  // lily_wait ran out of time
    LILY_ELOST = 6      // the device cannot be used any more
};

typedef struct lily_device lily_device;
typedef struct lily_buffer lily_buffer;
typedef struct lily_kernel lily_kernel;
typedef struct lily_list lily_list;

// Options are NUL-terminated "key=value" lines; a device refuses keys it does not know.
// cpu: threads=N, isa=auto|portable|avx2|avx512|avx512bf16|amx|neon, null=0|1 (complete submissions without running kernels),
// discrete=0|1 (show the host no memory that is not shared, as a device with memory of its own does).
LILY_API uint32_t lily_abi_version(void);
LILY_API int lily_open(const char *options, lily_device **out, char *error, size_t error_bytes);
LILY_API void lily_close(lily_device *);                        // waits for everything submitted
LILY_API const char *lily_error(lily_device *);                 // of the last failed call; valid until the next call
LILY_API int lily_info(lily_device *, char *out, size_t bytes); // "key=value" lines: name, isa, threads, memory …

// Device memory, zero-filled, aligned to at least 256 bytes.  The host sees it where it is `shared`; elsewhere perhaps.
LILY_API int lily_buffer_new(lily_device *, uint64_t bytes, int shared, lily_buffer **out);
LILY_API void lily_buffer_free(lily_buffer *);      // no submitted list may still use it
LILY_API void *lily_buffer_contents(lily_buffer *); // NULL: the host does not see it, and has the transfers

// Transfers, for every buffer, done when they return.  No unfinished submission may write what they read or write, or read
// what they write; it may use the rest of the buffer.  LILY_EINVAL: a range is not within its buffer, and nothing was done.
LILY_API int lily_buffer_fill(lily_buffer *, uint64_t offset, uint64_t bytes, int value); // each byte
LILY_API int lily_buffer_copy(
    lily_buffer *to, uint64_t to_offset, lily_buffer *from, uint64_t from_offset, uint64_t bytes); // they may overlap
LILY_API int lily_buffer_read(lily_buffer *, uint64_t offset, uint64_t bytes, void *out);
LILY_API int lily_buffer_write(lily_buffer *, uint64_t offset, uint64_t bytes, const void *in);

// A kernel of the kernel table, specialised.  `constants` are in the order of the table.  The device owns kernels;
// asking again returns the same one.
LILY_API int lily_kernel_get(
    lily_device *, const char *name, const int32_t *constants, uint32_t count, lily_kernel **out);
// Compiles what groups of `threads` need, so that recording such a dispatch compiles nothing.  Never necessary.
LILY_API int lily_kernel_fit(lily_kernel *, uint32_t threads);

// A list of dispatches, recorded once and submitted any number of times.
typedef struct {
    lily_buffer *buffer;
    uint64_t offset; // a multiple of 16
} lily_arg;

LILY_API int lily_list_new(lily_device *, lily_list **out);
LILY_API void lily_list_free(lily_list *); // no submission of it may be unfinished
// `grid` counts groups, `threads` is the size of a group (ignored by cpu).  With `barrier`, everything recorded before
// has finished, and its writes are visible, before this dispatch starts; without, it may overlap its predecessors.
LILY_API int lily_list_dispatch(lily_list *, lily_kernel *, const lily_arg *args, uint32_t arg_count,
    const void *params, uint32_t param_bytes, const uint32_t grid[3], const uint32_t threads[3], int barrier);
LILY_API int lily_list_end(lily_list *);

// Runs the lists in order, each after the one before, after all earlier submissions.  Returns at once with a ticket;
// tickets count up by one from 1.
LILY_API int lily_submit(lily_device *, lily_list *const *lists, uint32_t count, uint64_t *ticket);
LILY_API uint64_t lily_completed(lily_device *); // the last finished ticket
// Blocks until `ticket` has finished.  LILY_EFAILED, LILY_ENOMEM: that submission failed (once reported, it is forgotten).
LILY_API int lily_wait(lily_device *, uint64_t ticket, uint64_t timeout_ns);
// Seconds the device spent on a finished ticket of the last 64; negative if unknown.
LILY_API double lily_seconds(lily_device *, uint64_t ticket);

#ifdef __cplusplus
}
#endif
#endif
