// SPDX-License-Identifier: Apache-2.0
// See metal_system.h.
#if defined(__linux__) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE // fileno
#endif
#include "metal_system.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
int sysctlbyname(const char *name, void *out, size_t *out_bytes, void *in, size_t in_bytes);
#endif

void system_text(const char *name, char *out, size_t bytes) {
    size_t length = bytes - 1;
    memset(out, 0, bytes);
    if (sysctlbyname(name, out, &length, NULL, 0)) out[0] = 0;
}

int macos_version(void) {
    char text[32];
    int major = 0, minor = 0;
    system_text("kern.osproductversion", text, sizeof text);
    sscanf(text, "%d.%d", &major, &minor);
    if (major >= 16 && major < 26) major += 10; // programs built before macOS 26 may be told 16
    return 100 * major + minor;
}

char *read_file(const char *path) {
    struct stat s;
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    if (file && !fstat(fileno(file), &s) && S_ISREG(s.st_mode) && (text = malloc((size_t)s.st_size + 1))) {
        const size_t bytes = fread(text, 1, (size_t)s.st_size, file);
        text[bytes] = 0;
        if (bytes != (size_t)s.st_size) {
            free(text);
            text = NULL;
        }
    }
    if (file) fclose(file);
    return text;
}

uint64_t hash_text(uint64_t hash, const char *text) { // FNV-1a
    for (; *text; text++) hash = (hash ^ (uint8_t)*text) * 0x100000001b3u;
    return (hash ^ 0xff) * 0x100000001b3u;
}
