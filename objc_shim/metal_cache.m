// SPDX-License-Identifier: Apache-2.0
// Compiled pipelines kept between runs: a binary archive in a folder that only this user can read or write.
// Nothing here is fatal: without a cache every start compiles anew, and lily_info says why.
// Apple does not say whether one archive may be searched and extended at the same time, so the file is opened twice:
// `found` is never changed and any thread searches it; `archive` takes what is new, under the mutex.
#include "metal_runtime.h"

#include <dirent.h>
#include <sys/stat.h>
#include <time.h>

#define CACHE_PREFIX "pipelines-"
enum { CACHE_DAYS = 30 }; // files of other versions that were not written for so long are removed

static void cache_off(pipeline_cache *c, const char *format, const char *detail) {
    [c->archive release];
    c->archive = nil;
    c->path[0] = 0;
    snprintf(c->state, sizeof c->state, format, detail);
}

// The folder's path in `out`; false with the reason in the state.
static bool cache_folder(pipeline_cache *c, const char *option, char *out, size_t bytes) {
    const char *home = getenv("HOME");
    if (option[0])
        snprintf(out, bytes, "%s", option);
    else if (home && *home)
        snprintf(out, bytes, "%s/Library/Caches/lily", home);
    else
        return cache_off(c, "off: %s", "HOME is not set"), false;
    struct stat s;
    if (mkdir(out, 0700) && errno != EEXIST)
        return cache_off(c, "off: cannot create the folder (%s)", strerror(errno)), false;
    if (lstat(out, &s) || !S_ISDIR(s.st_mode)) return cache_off(c, "off: %s is no folder", out), false;
    if (s.st_uid != getuid() || (s.st_mode & 077))
        return cache_off(c, "off: %s is open to other users (chmod 700)", out), false;
    return true;
}

static void cache_prune(const char *folder, const char *keep) {
    DIR *d = opendir(folder);
    if (!d) return;
    const time_t oldest = time(NULL) - CACHE_DAYS * 86400;
    for (struct dirent *e; (e = readdir(d));) {
        char path[2 * PATH_BYTES];
        struct stat s;
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        if (strncmp(e->d_name, CACHE_PREFIX, strlen(CACHE_PREFIX)) || !strcmp(path, keep)) continue;
        if (!lstat(path, &s) && S_ISREG(s.st_mode) && s.st_mtime < oldest) unlink(path);
    }
    closedir(d);
}

static id<MTLBinaryArchive> cache_load(id<MTLDevice> gpu, const char *path, NSError **error) {
    MTLBinaryArchiveDescriptor *descriptor = [[[MTLBinaryArchiveDescriptor alloc] init] autorelease];
    if (path) [descriptor setUrl:[NSURL fileURLWithPath:[NSString stringWithUTF8String:path]]];
    return [gpu newBinaryArchiveWithDescriptor:descriptor error:error];
}

// Earlier systems had faults in archives (Blender's Cycles, which found out by
// use, leaves them alone before 15.4).
void cache_open(pipeline_cache *c, id<MTLDevice> gpu, const char *option, uint64_t key) {
    char folder[PATH_BYTES];
    NSError *error = nil;
    if (!strcmp(option, "off")) return cache_off(c, "%s", "off");
    if (!option[0] && macos_version() < 1504) return cache_off(c, "off: %s", "macOS before 15.4");
    if (!cache_folder(c, option, folder, sizeof folder)) return;
    const int length = snprintf(c->path, sizeof c->path, "%s/" CACHE_PREFIX "%016llx", folder, (unsigned long long)key);
    if (length >= (int)sizeof c->path) return cache_off(c, "off: %s", "the folder's path is too long");
    cache_prune(folder, c->path);
    if (!access(c->path, R_OK)) c->found = cache_load(gpu, c->path, &error); // a damaged file is replaced at the end
    snprintf(c->state, sizeof c->state, "on");
}

void cache_add(pipeline_cache *c, id<MTLDevice> gpu, MTLComputePipelineDescriptor *descriptor) {
    NSError *error = nil;
    pthread_mutex_lock(&c->mutex);
    if (c->path[0] && !c->archive) c->archive = cache_load(gpu, c->found ? c->path : NULL, &error);
    if (c->path[0]) {
        if ([c->archive addComputePipelineFunctionsWithDescriptor:descriptor error:&error])
            c->added++;
        else
            cache_off(c, "off: %s", reason(error));
    }
    pthread_mutex_unlock(&c->mutex);
}

// Another process that starts meanwhile sees the old file or the new one.
void cache_save(pipeline_cache *c) {
    if (!c->archive || !c->added) return;
    char part[PATH_BYTES + 32];
    NSError *error = nil;
    snprintf(part, sizeof part, "%s.%ld", c->path, (long)getpid());
    NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:part]];
    if (![c->archive serializeToURL:url error:&error] || chmod(part, 0600) || rename(part, c->path)) unlink(part);
}
