// SPDX-License-Identifier: Apache-2.0
// What the Metal device asks of the system: its version, files.  Plain C.
#ifndef LILY_METAL_SYSTEM_H
#define LILY_METAL_SYSTEM_H

#include <stddef.h>
#include <stdint.h>

void system_text(const char *name, char *out, size_t bytes); // a text of sysctl; empty if the system does not know it
int macos_version(void);           // 100 times the major version plus the minor one; 0 if the system does not say
char *read_file(const char *path); // the whole file, NUL-terminated, to be freed; NULL if it cannot be read
uint64_t hash_text(uint64_t hash, const char *text); // `hash` and the text together

#endif
