// SPDX-License-Identifier: Apache-2.0
// What every device library does alike behind lily_device.h: error texts, the clock, rows of the kernel table, checks of
// recording and submission, tickets and waiting.
//
// device_common.c is compiled into each library and exports what needs nothing else: lily_abi_version, lily_error,
// lily_completed, lily_wait, lily_seconds; device_unified.c exports lily_buffer_contents and the transfers for a device
// whose memory the host reaches.  The structs behind lily_device.h are each device's own, but begin with the
// heads below, which is all that the common code looks at.  For C11, Objective-C and C++.
// Not here: how a device runs its lists.
#ifndef LILY_DEVICE_COMMON_H
#define LILY_DEVICE_COMMON_H

#include <pthread.h>
#include <stdbool.h>

#include "lily_device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    TIMED_TICKETS = 64,        // finished submissions that are remembered
    DEVICE_ERROR_BYTES = 4096, // of a submission
    DEVICE_TEXT_BYTES = 16384  // of a failed call: a compiler may have much to say
};

// One row of the kernel table as C knows it.
typedef struct {
    const char *name;
    uint32_t args;
    const char *constants; // names, separated by blanks
    uint32_t param_bytes;
} kernel_row;

typedef struct {
    uint64_t bytes;        // as asked for
    unsigned char *memory; // for device_unified.c
    bool hidden;           // from the host
} buffer_head;

typedef struct {
    lily_device *device;
    const kernel_row *row;
} kernel_head;

typedef struct {
    lily_device *device;
    bool ended;
} list_head;

typedef struct {
    uint64_t ticket; // 0: none
    int code;        // LILY_OK, or a failure that nobody was told yet
    double seconds;
    char error[DEVICE_ERROR_BYTES];
} finished_ticket;

typedef struct {
    long process; // that opened the device; its threads do not exist in a forked one
    // Called before a ticket is waited for or asked for; NULL: submissions run by themselves.
    void (*progress)(lily_device *, uint64_t ticket);
    pthread_mutex_t mutex; // of all below, and of what else the device says
    pthread_cond_t finished;
    uint64_t submitted;
    uint64_t completed; // lily_completed and lily_wait read it and `failures` without the mutex
    uint32_t failures;  // that nobody was told yet
    finished_ticket tickets[TIMED_TICKETS];
} device_head;

#ifndef __cplusplus
#define BEGINS_WITH_HEAD(type) _Static_assert(offsetof(struct type, head) == 0, #type " begins with its head")
#endif

// Sets this thread's error text and returns `code`.
int device_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *device_text(void); // what this thread's last failed call said

void device_init(device_head *); // for the calling process
void device_destroy(device_head *);
bool device_forked(const lily_device *);                      // this process is not the one that opened the device
int device_lost(const lily_device *);                         // the failure for that
int device_opened(int code, char *error, size_t error_bytes); // how lily_open ends
int device_told(int length, size_t bytes);                    // how lily_info ends; `length` is what snprintf returned

uint64_t device_nanoseconds(void);            // monotonic
void device_init_condition(pthread_cond_t *); // whose timed waits follow that clock
// Waits for the condition or until `end`; true when time is up.
bool device_wait_until(pthread_cond_t *, pthread_mutex_t *, uint64_t end);

const kernel_row *device_kernel_table(void);           // its rows, the last one without a name
const kernel_row *device_kernel_row(const char *name); // NULL: there is none
const char *device_next_name(const char *names);       // behind the first one and its blank

// Checks of the functions of lily_device.h; LILY_OK, or the failure.
int device_check_kernel(lily_device *, const char *name, const int32_t *constants, uint32_t count, lily_kernel **out,
    const kernel_row **row);
int device_check_dispatch(const lily_list *, const lily_kernel *, const lily_arg *args, uint32_t arg_count,
    const void *params, uint32_t param_bytes, const uint32_t grid[3]);
int device_check_end(const lily_list *);
int device_check_submission(const lily_device *, lily_list *const *lists, uint32_t count);

// Notes how the ticket after the last finished one ended, with the mutex held.
void device_finish(device_head *, uint64_t ticket, double seconds, int code, const char *error);

#ifdef __cplusplus
}
#endif
#endif
