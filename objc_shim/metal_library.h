// SPDX-License-Identifier: Apache-2.0
// The library of shaders: from a flattened source or a metallib, as the GPU and the system allow.
#ifndef LILY_METAL_LIBRARY_H
#define LILY_METAL_LIBRARY_H

#include "metal_pipelines.h"

// The newest Apple family that the GPU belongs to; 0: none.
static int family_of(id<MTLDevice> gpu) {
    for (int family = 15; family > 0; family--) {
        if ([gpu supportsFamily:(MTLGPUFamily)(MTLGPUFamilyApple1 - 1 + family)]) return family;
    }
    return 0;
}

static int compile(lily_device *d, NSString *source, const char *language) {
    NSError *error = nil;
    const NSUInteger version = language_version(language);
    if (!version) return fail(LILY_EINVAL, "option msl is \"%s\"; allowed: auto, or 3.2 and later, as 3.2", language);
    MTLCompileOptions *options = [[[MTLCompileOptions alloc] init] autorelease];
    [options setLanguageVersion:(MTLLanguageVersion)version];
    [options setMathMode:MTLMathModeRelaxed]; // keeps infinities and NaN; sums may be reordered
    [options setMathFloatingPointFunctions:MTLMathFloatingPointFunctionsPrecise];
    d->library = [d->gpu newLibraryWithSource:source options:options error:&error];
    if (!d->library)
        return fail(LILY_EFAILED, "Metal does not compile the shaders (MSL %s): %s", language, reason(error));
    snprintf(d->language, sizeof d->language, "%.15s", language);
    return LILY_OK;
}

// Compiled as Metal 4 the shaders multiply matrices with tensor operations: for GPUs that have units for them, where
// the system's compiler can do it.  Which way was taken, and why, is in lily_info.
static int compile_best(lily_device *d, NSString *source, const char *language) {
    const bool automatic = !strcmp(language, "auto");
    const bool units = family_of(d->gpu) >= 10 && macos_version() >= 2601;
    snprintf(d->matrix, sizeof d->matrix, family_of(d->gpu) >= 9 ? "simdgroup bfloat" : "simdgroup float");
    if (!automatic || units) {
        int code = compile(d, source, automatic ? "4.0" : language);
        if (!code && language_version(d->language) >= language_version("4.0")) {
            code = automatic ? probe(d, "gemm", (const int32_t[]){4, 64}) : LILY_OK;
            if (!code) snprintf(d->matrix, sizeof d->matrix, "tensor");
        }
        if (!automatic || !code) return code;
        [d->library release];
        d->library = nil;
        const size_t used = strlen(d->matrix);
        snprintf(d->matrix + used, sizeof d->matrix - used, ", no tensor operations: %.150s", error_text);
        d->matrix[strcspn(d->matrix, "\n")] = 0;
    }
    return compile(d, source, "3.2");
}

static int open_source(lily_device *d, const open_options *o, uint64_t *key) {
    char *text = read_file(o->source);
    if (!text) return fail(LILY_EINVAL, "the shader source %s cannot be read: %s", o->source, strerror(errno));
    // Older GPUs have no bfloat arithmetic; see shaders/matrix.h.
    NSString *prefix = family_of(d->gpu) < 9 ? @"#define LILY_MATRIX_F32 1\n" : @"";
    NSString *body = [NSString stringWithUTF8String:text];
    const int code = body ? compile_best(d, [prefix stringByAppendingString:body], o -> msl)
                          : fail(LILY_EINVAL, "%s is no UTF-8 text", o->source);
    *key = hash_text(hash_text(hash_text(*key, text), text_of(prefix)), d->language);
    free(text);
    return code;
}

static int open_metallib(lily_device *d, const open_options *o, uint64_t *key) {
    NSError *error = nil;
    char version[64];
    struct stat s;
    NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:o->metallib]];
    d->library = [d->gpu newLibraryWithURL:url error:&error];
    if (!d->library)
        return fail(LILY_EFAILED, "%s cannot be loaded (%s); delete it to use the sources", o->metallib, reason(error));
    if (stat(o->metallib, &s)) memset(&s, 0, sizeof s);
    snprintf(version, sizeof version, "%lld %lld", (long long)s.st_size, (long long)s.st_mtime);
    snprintf(d->language, sizeof d->language, "compiled");
    snprintf(d->matrix, sizeof d->matrix, "as compiled");
    *key = hash_text(hash_text(*key, o->metallib), version);
    return LILY_OK;
}

// The key names everything that pipelines depend on but the system's compiler: Metal itself refuses what does not fit.
static int open_library(lily_device *d, const open_options *o) {
    uint64_t key = hash_text(0xcbf29ce484222325u, text_of([d->gpu name]));
    d->from_metallib = o->metallib[0] != 0;
    const int code = d->from_metallib ? open_metallib(d, o, &key) : open_source(d, o, &key);
    if (!code) cache_open(&d->cache, d->gpu, o->cache, key);
    return code;
}

#endif
