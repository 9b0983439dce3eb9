// SPDX-License-Identifier: Apache-2.0
// The option lines of lily_open, and clocks.  Plain C.
#ifndef LILY_METAL_OPTIONS_H
#define LILY_METAL_OPTIONS_H

#include <sys/stat.h>
#if defined(__APPLE__)
#include <sys/sysctl.h>
#else
int sysctlbyname(const char *name, void *out, size_t *out_bytes, void *in, size_t in_bytes);
#endif
#include <time.h>

#include "metal_runtime.h"

typedef struct {
    char source[PATH_BYTES], metallib[PATH_BYTES], cache[PATH_BYTES], capture[PATH_BYTES], msl[PATH_BYTES];
    char replay[PATH_BYTES];
    uint32_t slice_ms, keep_s, capture_ticket;
} open_options;

typedef struct {
    const char *key;
    char *text;       // a value of at most PATH_BYTES - 1 characters, or
    uint32_t *number; // a number up to `most`
    uint32_t most;
} option_row;

static int parse_value(const option_row *row, const char *value, int length) {
    if (length < 1 || length >= PATH_BYTES)
        return fail(
            LILY_EINVAL, "option %s has a value of %d characters; allowed: 1 to %d", row->key, length, PATH_BYTES - 1);
    char text[PATH_BYTES];
    memcpy(text, value, (size_t)length);
    text[length] = 0;
    if (row->text) {
        memcpy(row->text, text, (size_t)length + 1);
        return LILY_OK;
    }
    char *end;
    const unsigned long n = strtoul(text, &end, 10);
    if (*end || text[0] == '-' || n > row->most)
        return fail(LILY_EINVAL, "option %s is \"%s\"; allowed: 0 to %u", row->key, text, row->most);
    *row->number = (uint32_t)n;
    return LILY_OK;
}

static int parse_line(const option_row *rows, const char *line, int length) {
    const char *equals = memchr(line, '=', (size_t)length);
    if (!equals) return fail(LILY_EINVAL, "option \"%.*s\" is not of the form key=value", length, line);
    const int key = (int)(equals - line);
    char known[256] = "";
    for (size_t used = 0; rows->key; rows++) {
        if (strlen(rows->key) == (size_t)key && !memcmp(rows->key, line, (size_t)key))
            return parse_value(rows, equals + 1, length - key - 1);
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", rows->key);
    }
    return fail(LILY_EINVAL, "unknown option \"%.*s\"; the metal device knows %s", key, line, known);
}

static int parse_options(open_options *o, const char *text) {
    const option_row rows[] = {
        {"source", o->source, NULL, 0},
        {"metallib", o->metallib, NULL, 0},
        {"msl", o->msl, NULL, 0},
        {"cache", o->cache, NULL, 0},
        {"slice_ms", NULL, &o->slice_ms, 600000},
        {"keep_s", NULL, &o->keep_s, 86400},
        {"replay", o->replay, NULL, 0},
        {"capture", o->capture, NULL, 0},
        {"capture_ticket", NULL, &o->capture_ticket, UINT32_MAX},
        {NULL, NULL, NULL, 0},
    };
    while (text && *text) {
        const int length = (int)strcspn(text, "\n");
        const int code = length ? parse_line(rows, text, length) : LILY_OK;
        if (code) return code;
        text += length;
        text += *text == '\n';
    }
    const char *capture = getenv("LILY_METAL_CAPTURE");
    if (!o->capture[0] && capture) snprintf(o->capture, sizeof o->capture, "%s", capture);
    if (o->source[0] || o->metallib[0]) return LILY_OK;
    return fail(LILY_EINVAL,
        "the metal device needs its shaders: option source=FILE (flattened Metal source) or "
        "metallib=FILE (compiled)");
}

// "3.2" as MTLLanguageVersion counts; 0 if it is no version.
static NSUInteger language_version(const char *text) {
    unsigned major, minor;
    char end;
    if (sscanf(text, "%u.%u%c", &major, &minor, &end) != 2 || major < 3 || major > 99 || minor > 99) return 0;
    return ((NSUInteger)major << 16) + minor;
}

// A text of sysctl; empty if the system does not know it.
static void system_text(const char *name, char *out, size_t bytes) {
    size_t length = bytes - 1;
    memset(out, 0, bytes);
    if (sysctlbyname(name, out, &length, NULL, 0)) out[0] = 0;
}

// 100 times the major version plus the minor one; 0 if the system does not say.
static int macos_version(void) {
    char text[32];
    int major = 0, minor = 0;
    system_text("kern.osproductversion", text, sizeof text);
    sscanf(text, "%d.%d", &major, &minor);
    if (major >= 16 && major < 26) major += 10; // programs built before macOS 26 may be told 16
    return 100 * major + minor;
}

static uint64_t nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// A condition whose timed waits follow the clock that cannot be set.
static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

// Waits for the condition or until `end`; true when time is up.
static bool wait_until(pthread_cond_t *condition, pthread_mutex_t *mutex, uint64_t end) {
    const uint64_t now = nanoseconds();
    if (now >= end) return true;
#if defined(__APPLE__)
    const uint64_t at = end - now;
#else
    const uint64_t at = end;
#endif
    const struct timespec t = {.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
#if defined(__APPLE__)
    pthread_cond_timedwait_relative_np(condition, mutex, &t);
#else
    pthread_cond_timedwait(condition, mutex, &t);
#endif
    return false;
}

// The whole file, NUL-terminated, to be freed by the caller; NULL if it cannot be read.
static char *read_file(const char *path) {
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

static uint64_t hash_text(uint64_t hash, const char *text) { // FNV-1a
    for (; *text; text++) hash = (hash ^ (uint8_t)*text) * 0x100000001b3u;
    return (hash ^ 0xff) * 0x100000001b3u;
}

#endif
