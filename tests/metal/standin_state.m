// SPDX-License-Identifier: Apache-2.0
// The stand-in's settings, journal, complaints, and the number of its objects.
#include <stdarg.h>
#include <time.h>

#include "standin.h"

standin_config config;
standin_backend backend;

static pthread_mutex_t text_mutex = PTHREAD_MUTEX_INITIALIZER;
static char *journal_text, *complaint_text;
static size_t journal_bytes, complaint_bytes;
static struct {
    const char *what;
    int count;
} live[32];

static void add_line(char **text, size_t *bytes, const char *format, va_list arguments) {
    char line[1024];
    vsnprintf(line, sizeof line - 1, format, arguments);
    strcat(line, "\n");
    const size_t length = strlen(line);
    *text = realloc(*text, *bytes + length + 1);
    memcpy(*text + *bytes, line, length + 1);
    *bytes += length;
}

void complain(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&text_mutex);
    add_line(&complaint_text, &complaint_bytes, format, arguments);
    pthread_mutex_unlock(&text_mutex);
    va_end(arguments);
}

void note(const char *format, ...) {
    if (!config.journal) return;
    va_list arguments;
    va_start(arguments, format);
    pthread_mutex_lock(&text_mutex);
    add_line(&journal_text, &journal_bytes, format, arguments);
    pthread_mutex_unlock(&text_mutex);
    va_end(arguments);
}

static void count_object(const char *what, int change) {
    pthread_mutex_lock(&text_mutex);
    int i = 0;
    while (live[i].what && strcmp(live[i].what, what)) i++;
    live[i].what = what;
    live[i].count += change;
    pthread_mutex_unlock(&text_mutex);
}

void born(const char *what) { count_object(what, 1); }
void died(const char *what) { count_object(what, -1); }

double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

NSError *error_of(NSInteger code, const char *text) {
    NSDictionary *info = [NSDictionary dictionaryWithObject:[NSString stringWithUTF8String:text]
                                                     forKey:NSLocalizedDescriptionKey];
    return [NSError errorWithDomain:@"Standin" code:code userInfo:info];
}

id failed(NSError **error, NSInteger code, const char *text) {
    if (error) *error = error_of(code, text);
    return nil;
}

STANDIN_API void standin_reset(void) {
#define DEFAULT(name, value) config.name = value;
    STANDIN_NUMBERS(DEFAULT)
#undef DEFAULT
    strcpy(config.name, "Stand-in M0");
    strcpy(config.fail_text, "made to fail");
    pthread_mutex_lock(&text_mutex);
    free(journal_text);
    free(complaint_text);
    journal_text = complaint_text = NULL;
    journal_bytes = complaint_bytes = 0;
    pthread_mutex_unlock(&text_mutex);
}

STANDIN_API uint64_t standin_launch_bytes(void) { return sizeof(MslLaunch); }

STANDIN_API int standin_set(const char *key, double value) {
#define SET(name, unused) \
    if (!strcmp(key, #name)) return config.name = value, 0;
    STANDIN_NUMBERS(SET)
#undef SET
    return 1;
}

STANDIN_API void standin_fail_text(const char *text) {
    snprintf(config.fail_text, sizeof config.fail_text, "%s", text);
}
STANDIN_API void standin_run_with(const standin_backend *b) { backend = *b; }
STANDIN_API const char *standin_journal(void) { return journal_text ? journal_text : ""; }
STANDIN_API const char *standin_complaints(void) { return complaint_text ? complaint_text : ""; }

// "name count" of every kind of object that exists.
STANDIN_API const char *standin_live(void) {
    static char text[1024];
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; live[i].what; i++) {
        if (live[i].count)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s %d\n", live[i].what, live[i].count);
    }
    return text;
}
