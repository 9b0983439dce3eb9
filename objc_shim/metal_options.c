// SPDX-License-Identifier: Apache-2.0
// See metal_options.h.
#include "metal_options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const char *key;
    char *text;       // a value of at most PATH_BYTES - 1 characters, or
    uint32_t *number; // a number up to `most`
    uint32_t most;
} option_row;

static int parse_value(const option_row *row, const char *value, int length) {
    if (length < 1 || length >= PATH_BYTES)
        return device_fail(
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
        return device_fail(LILY_EINVAL, "option %s is \"%s\"; allowed: 0 to %u", row->key, text, row->most);
    *row->number = (uint32_t)n;
    return LILY_OK;
}

static int parse_line(const option_row *rows, const char *line, int length) {
    const char *equals = memchr(line, '=', (size_t)length);
    if (!equals) return device_fail(LILY_EINVAL, "option \"%.*s\" is not of the form key=value", length, line);
    const int key = (int)(equals - line);
    char known[256] = "";
    for (size_t used = 0; rows->key; rows++) {
        if (strlen(rows->key) == (size_t)key && !memcmp(rows->key, line, (size_t)key))
            return parse_value(rows, equals + 1, length - key - 1);
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", used ? ", " : "", rows->key);
    }
    return device_fail(LILY_EINVAL, "unknown option \"%.*s\"; the metal device knows %s", key, line, known);
}

int parse_options(open_options *o, const char *text) {
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
    return device_fail(LILY_EINVAL,
        "the metal device needs its shaders: option source=FILE (flattened Metal source) or "
        "metallib=FILE (compiled)");
}

unsigned long language_version(const char *text) {
    unsigned major, minor;
    char end;
    if (sscanf(text, "%u.%u%c", &major, &minor, &end) != 2 || major < 3 || major > 99 || minor > 99) return 0;
    return ((unsigned long)major << 16) + minor;
}
