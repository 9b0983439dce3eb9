// SPDX-License-Identifier: Apache-2.0
// What the emulator has to say: a list of "kind: kernel: file:line: message" lines, each place once.
#include "runtime.h"

#include <dlfcn.h>
#include <mutex>
#include <set>
#include <stdarg.h>
#include <stdio.h>
#include <string>

namespace emulator {

static std::mutex guard;
static std::string text;
static std::set<std::string> seen;

void report(const char *kind, MslSite site, const char *format, ...) {
    std::lock_guard<std::mutex> lock(guard);
    const char *kernel = worker && worker->launch ? worker->launch->name : "?";
    char place[256] = "";
    Dl_info where_from;
    if (site.line)
        snprintf(place, sizeof place, "%s:%d: ", site.file, site.line);
    else if (site.instruction && dladdr(site.instruction, &where_from)) // the harness finds the line
        snprintf(place, sizeof place, "@%s+0x%zx: ", where_from.dli_fname,
            (size_t)((const char *)site.instruction - (const char *)where_from.dli_fbase));
    if (!seen.insert(std::string(kind) + kernel + place).second || seen.size() > 200) return;
    char message[768];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    text += std::string(kind) + ": " + kernel + ": " + place + message;
    if (worker && worker->launch && worker->simdgroup_count) {
        char where[96];
        snprintf(where, sizeof where, " [group %u,%u,%u]", worker->index[0], worker->index[1], worker->index[2]);
        text += where;
    }
    text += "\n";
}

} // namespace emulator

using namespace emulator;

extern "C" {

MSL_EXPORT const char *msl_reports() { return text.c_str(); }

MSL_EXPORT void msl_clear_reports() {
    std::lock_guard<std::mutex> lock(guard);
    text.clear();
    seen.clear();
}

void msl_fail(const char *kind, const char *message, MslSite site) { report(kind, site, "%s", message); }
}
