// SPDX-License-Identifier: Apache-2.0
// The library of shaders: from a flattened source or a metallib, as the GPU and the system allow.
#include "metal_runtime.h"

#include <sys/stat.h>

#include "kernel_params.h"

int family_of(id<MTLDevice> gpu) {
    for (int family = 15; family > 0; family--) {
        if ([gpu supportsFamily:(MTLGPUFamily)(MTLGPUFamilyApple1 - 1 + family)]) return family;
    }
    return 0;
}

// Where the library may come from.
typedef struct {
    const open_options *options;
    NSString *source; // nil: there is none
    bool folder;      // the metallib is a folder with one for each kind of GPU (tools/metallib.py)
    uint64_t *key;    // of the cache of pipelines
} library_origin;

// A compiler's text from the first line with an error on: warnings come before it, and room for it is limited.
static const char *first_error(const char *text) {
    const char *at = strstr(text, " error: ");
    while (at && at > text && at[-1] != '\n') at--;
    return at ? at : text;
}

static int compile_source(lily_device *d, const library_origin *from, const char *language) {
    NSError *error = nil;
    if (!from->source)
        return device_fail(LILY_EFAILED, "%s has no library for this GPU (MSL %s%s), and no source was given",
            from->options->metallib, language, family_of(d->gpu) < 9 ? ", float" : "");
    MTLCompileOptions *options = [[[MTLCompileOptions alloc] init] autorelease];
    [options setLanguageVersion:(MTLLanguageVersion)language_version(language)];
    [options setMathMode:MTLMathModeRelaxed]; // keeps infinities and NaN; sums may be reordered
    [options setMathFloatingPointFunctions:MTLMathFloatingPointFunctionsPrecise];
    d->library = [d->gpu newLibraryWithSource:from->source options:options error:&error];
    if (!d->library)
        return device_fail(
            LILY_EFAILED, "Metal does not compile the shaders (MSL %s): %s", language, first_error(reason(error)));
    *from->key = hash_text(*from->key, text_of(from->source));
    return LILY_OK;
}

static int load_metallib(lily_device *d, const library_origin *from, const char *path, const struct stat *s) {
    NSError *error = nil;
    char version[64];
    NSURL *url = [NSURL fileURLWithPath:[NSString stringWithUTF8String:path]];
    d->library = [d->gpu newLibraryWithURL:url error:&error];
    if (!d->library)
        return device_fail(LILY_EFAILED, "%s cannot be loaded (%s); delete it to use the sources", path, reason(error));
    snprintf(version, sizeof version, "%lld %lld", (long long)s->st_size, (long long)s->st_mtime);
    *from->key = hash_text(hash_text(*from->key, path), version);
    d->from_metallib = true;
    return LILY_OK;
}

// The library for a version of the language: precompiled if there is one for this GPU, else from the source.
static int make_library(lily_device *d, const library_origin *from, const char *language) {
    char path[2 * PATH_BYTES];
    struct stat s;
    if (!language_version(language))
        return device_fail(LILY_EINVAL, "option msl is \"%s\"; allowed: auto, or 3.2 and later, as 3.2", language);
    snprintf(path, sizeof path, "%s/lily-%s%s.metallib", from->options->metallib, language,
        family_of(d->gpu) < 9 ? "-f32" : "");
    d->from_metallib = false;
    const int code =
        from->folder && !stat(path, &s) ? load_metallib(d, from, path, &s) : compile_source(d, from, language);
    if (!code) snprintf(d->language, sizeof d->language, "%.15s", language);
    return code;
}

// Compiled as Metal 4 the shaders multiply matrices with tensor operations: for GPUs that have units for them, where
// the system's compiler can do it.  Which way was taken, and why, is in lily_info.
static int make_best(lily_device *d, const library_origin *from, const char *language) {
    const bool automatic = !strcmp(language, "auto");
    const bool units = family_of(d->gpu) >= 10 && macos_version() >= 2602;
    snprintf(d->matrix, sizeof d->matrix, family_of(d->gpu) >= 9 ? "simdgroup bfloat" : "simdgroup float");
    if (!automatic || units) {
        int code = make_library(d, from, automatic ? "4.0" : language);
        if (!code && language_version(d->language) >= language_version("4.0")) {
            const lily_kernel gemm = {.head = {d, device_kernel_row("gemm")},
                .count = 3,
                .constant = {[gemm_C_BITS] = 4, [gemm_C_GROUP] = 64, [gemm_C_TILE_M] = 64}};
            code = automatic ? kernel_probe(d, gemm) : LILY_OK;
            if (!code) snprintf(d->matrix, sizeof d->matrix, "tensor");
        }
        if (!automatic || !code) return code;
        [d->library release];
        d->library = nil;
        const size_t used = strlen(d->matrix);
        snprintf(d->matrix + used, sizeof d->matrix - used, ", no tensor operations: %s", device_text());
        for (char *c = d->matrix; *c; c++) // one line of lily_info
            if (*c == '\n') *c = ' ';
    }
    return make_library(d, from, "3.2");
}

static int read_source(lily_device *d, library_origin *from) {
    const char *path = from->options->source;
    if (!path[0]) return LILY_OK;
    char *text = read_file(path);
    if (!text) return device_fail(LILY_EINVAL, "the shader source %s cannot be read: %s", path, strerror(errno));
    // Older GPUs have no bfloat arithmetic; see shaders/matrix.h.
    NSString *prefix = family_of(d->gpu) < 9 ? @"#define LILY_MATRIX_F32 1\n" : @"";
    NSString *body = [NSString stringWithUTF8String:text];
    free(text);
    if (!body) return device_fail(LILY_EINVAL, "%s is no UTF-8 text", path);
    from->source = [prefix stringByAppendingString:body];
    return LILY_OK;
}

// The key names everything that pipelines depend on: GPU, build of the system, sources and how they are compiled.
int library_open(lily_device *d, const open_options *o) {
    char system[64];
    system_text("kern.osversion", system, sizeof system);
    uint64_t key = hash_text(hash_text(0xcbf29ce484222325u, text_of([d->gpu name])), system);
    library_origin from = {.options = o, .key = &key};
    struct stat s;
    const uint64_t began = device_nanoseconds();
    int code = LILY_OK;
    if (d->fence) key = hash_text(key, "icb");
    if (o->metallib[0] && stat(o->metallib, &s))
        return device_fail(LILY_EINVAL, "the shader library %s cannot be read: %s", o->metallib, strerror(errno));
    if (o->metallib[0] && !S_ISDIR(s.st_mode)) {
        code = load_metallib(d, &from, o->metallib, &s);
        snprintf(d->language, sizeof d->language, "compiled");
        snprintf(d->matrix, sizeof d->matrix, "as compiled");
    } else {
        from.folder = o->metallib[0] != 0;
        code = read_source(d, &from);
        if (!code) code = make_best(d, &from, o->msl);
        key = hash_text(key, d->language);
    }
    d->compiled.library_s = (double)(device_nanoseconds() - began) * 1e-9;
    if (!code) cache_open(&d->cache, d->gpu, o->cache, key);
    return code;
}
