// SPDX-License-Identifier: Apache-2.0
// Runs lists of kernels that another process sends: the CPU device behind a pipe, for processors that are emulated
// (tests/emulated_device.py).
//
// Request: u32 buffers, each u64 bytes and contents; u32 dispatches, each: u32 length and name, u32 count and i32
// constants, u32 count and (u32 buffer, u64 offset) arguments, u32 bytes and params, u32[3] grid, u32 barrier.
// Answer: u32 0 and the contents of all buffers, or u32 length and an error text.  All little-endian.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lily_device.h"

static void need(void *to, size_t bytes) {
    if (bytes && fread(to, bytes, 1, stdin) != 1) exit(0); // the other end has closed
}

static uint32_t need_u32(void) {
    uint32_t value;
    need(&value, sizeof value);
    return value;
}

static void answer(const char *error) {
    const uint32_t length = (uint32_t)strlen(error);
    fwrite(&length, sizeof length, 1, stdout);
    fwrite(error, length, 1, stdout);
}

typedef struct {
    lily_buffer *handle;
    uint64_t bytes;
} buffer;

static int dispatch(lily_device *device, lily_list *list, const buffer *buffers) {
    char name[64] = "";
    int32_t constants[LILY_MAX_CONSTANTS];
    lily_arg args[LILY_MAX_ARGS];
    unsigned char params[LILY_MAX_PARAM_BYTES];
    uint32_t grid[3], threads[3] = {1, 1, 1};
    need(name, need_u32());
    const uint32_t constant_count = need_u32();
    need(constants, constant_count * sizeof *constants);
    const uint32_t arg_count = need_u32();
    for (uint32_t i = 0; i < arg_count; i++) {
        args[i].buffer = buffers[need_u32()].handle;
        need(&args[i].offset, sizeof args[i].offset);
    }
    const uint32_t param_bytes = need_u32();
    need(params, param_bytes);
    need(grid, sizeof grid);
    const int barrier = (int)need_u32();
    lily_kernel *kernel;
    const int code = lily_kernel_get(device, name, constants, constant_count, &kernel);
    return code ? code : lily_list_dispatch(list, kernel, args, arg_count, params, param_bytes, grid, threads, barrier);
}

static void serve(lily_device *device) {
    const uint32_t count = need_u32();
    buffer *buffers = calloc(count + 1, sizeof *buffers);
    for (uint32_t i = 0; i < count; i++) {
        need(&buffers[i].bytes, sizeof buffers[i].bytes);
        if (lily_buffer_new(device, buffers[i].bytes, 1, &buffers[i].handle)) abort();
        need(lily_buffer_contents(buffers[i].handle), buffers[i].bytes);
    }
    lily_list *list;
    int code = lily_list_new(device, &list);
    for (uint32_t n = need_u32(); n > 0; n--) {
        const int failed = dispatch(device, list, buffers);
        if (!code) code = failed;
    }
    uint64_t ticket;
    if (!code) code = lily_list_end(list);
    if (!code) code = lily_submit(device, &list, 1, &ticket);
    if (!code) code = lily_wait(device, ticket, UINT64_MAX);
    answer(code ? lily_error(device) : "");
    for (uint32_t i = 0; i < count; i++) {
        if (!code) fwrite(lily_buffer_contents(buffers[i].handle), buffers[i].bytes, 1, stdout);
        lily_buffer_free(buffers[i].handle);
    }
    fflush(stdout);
    lily_list_free(list);
    free(buffers);
}

int main(int count, char **arguments) {
    char error[512], info[4096];
    lily_device *device;
    if (lily_open(count > 1 ? arguments[1] : "", &device, error, sizeof error)) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    lily_info(device, info, sizeof info);
    answer(info);
    fflush(stdout);
    for (;;) serve(device);
}
