// SPDX-License-Identifier: Apache-2.0
// The option lines of lily_open.  Plain C.
#ifndef LILY_METAL_OPTIONS_H
#define LILY_METAL_OPTIONS_H

#include "device_common.h"

enum { PATH_BYTES = 1024 };

typedef struct {
    char source[PATH_BYTES], metallib[PATH_BYTES], cache[PATH_BYTES], capture[PATH_BYTES], msl[PATH_BYTES];
    char replay[PATH_BYTES];
    uint32_t slice_ms, keep_s, capture_ticket;
} open_options;

int parse_options(open_options *, const char *text); // LILY_OK, or the failure; what no line names stays
unsigned long language_version(const char *text);    // "3.2" as MTLLanguageVersion counts; 0 if it is no version

#endif
