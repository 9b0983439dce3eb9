// SPDX-License-Identifier: Apache-2.0
// A device of objc_shim/lily_device.h whose kernels are the translated shaders: whole models run through them.
//
// Kernels come from the host: it registers a function that compiles one (emulated_metal.py).  Options: order=forward|
// reverse|random, seed=N, checked=0|1, workers=N, late=0|1 (submissions run when somebody waits for them, not at once).
// In reverse and random order the dispatches between two barriers change places too.
// Not handled: views of one buffer are told apart only where they do not touch.
#include "device_common.h"
#include "memory.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <stdio.h>
#include <string.h>
#include <string>
#include <vector>

extern "C" {
int msl_dispatch(MslEntry, const MslLaunch *);
const char *msl_reports();
void msl_clear_reports();
void *msl_region_new(uint64_t bytes, uint64_t skew);
void msl_region_free(void *base);
int msl_view(uint32_t number, const void *address, uint64_t bytes, int writable, const char *name);
void msl_device_barrier();

// What the host knows about a kernel once it has compiled it.
struct MslProvided {
    MslEntry entry;
    uint32_t max_threads;
    const char *names[LILY_MAX_ARGS];
    uint8_t writes[LILY_MAX_ARGS];
};
typedef int (*MslProvider)(const char *name, const int32_t *constants, uint32_t count, MslProvided *out);

struct lily_buffer {
    buffer_head head;
};
}

struct lily_kernel {
    kernel_head head;
    MslProvided made;
};

namespace {

struct Dispatch {
    lily_kernel *kernel;
    MslLaunch launch;
    uint64_t view_bytes[LILY_MAX_ARGS];
    uint8_t params[LILY_MAX_PARAM_BYTES];
    uint32_t arg_count;
    bool barrier;
};
struct Submission {
    uint64_t ticket;
    std::vector<lily_list *> lists;
};

MslProvider provider;
std::deque<uint64_t> announced; // bytes of the views of dispatches to come

} // namespace

struct lily_list {
    list_head head;
    std::vector<Dispatch> dispatches;
};

struct lily_device {
    device_head head;
    std::mutex guard; // of all below, held while submissions run
    uint32_t order = MSL_FORWARD, seed = 1, checked = 0, workers = 1, late = 0;
    std::deque<Submission> pending;
    std::map<std::string, lily_kernel *> kernels;
    std::vector<emulator::Counts> counts; // of the last submission, in the order of its dispatches
};

namespace {

int set_option(lily_device *d, const std::string &key, const std::string &value) {
    const char *names[] = {"forward", "reverse", "random"};
    for (uint32_t i = 0; key == "order" && i < 3; i++)
        if (value == names[i]) return d->order = i, LILY_OK;
    struct {
        const char *key;
        uint32_t *target;
    } numbers[] = {{"seed", &d->seed}, {"checked", &d->checked}, {"workers", &d->workers}, {"late", &d->late}};
    for (auto &n : numbers)
        if (key == n.key && sscanf(value.c_str(), "%u", n.target) == 1) return LILY_OK;
    return device_fail(LILY_EINVAL, "the emulated device knows no option %s=%s", key.c_str(), value.c_str());
}

// ---- running --------------------------------------------------------------------------------------------------------

void run(lily_device *d, Dispatch &p) {
    for (uint32_t i = 0; i < p.arg_count; i++)
        msl_view(i, p.launch.buffers[i], p.view_bytes[i], p.kernel->made.writes[i], p.kernel->made.names[i]);
    p.launch.buffers[p.arg_count] = p.params;
    p.launch.order = d->order, p.launch.seed = d->seed, p.launch.workers = d->workers;
    p.launch.flags = (d->checked ? MSL_CHECK : 0) | (d->order == MSL_RANDOM ? MSL_RANDOM_LAYOUT : 0);
    msl_dispatch(p.kernel->made.entry, &p.launch);
}

// What lies between two barriers, in an order of its own: nothing in it may depend on another part of it.
void run_interval(lily_device *d, Dispatch *first, size_t count, emulator::Counts *counts) {
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; i++) order[i] = d->order == MSL_REVERSE ? count - 1 - i : i;
    uint64_t state = d->seed * 0x9E3779B97F4A7C15ull + count;
    for (size_t i = count; d->order == MSL_RANDOM && i > 1; i--) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(order[i - 1], order[(state >> 33) % i]);
    }
    msl_device_barrier();
    for (size_t i : order) {
        run(d, first[i]);
        counts[i] = emulator::counts;
    }
}

void run_list(lily_device *d, lily_list *list) {
    size_t begin = 0, n = list->dispatches.size(), offset = d->counts.size();
    d->counts.resize(offset + n);
    while (begin < n) {
        size_t end = begin + 1;
        while (end < n && !list->dispatches[end].barrier) end++;
        run_interval(d, &list->dispatches[begin], end - begin, &d->counts[offset + begin]);
        begin = end;
    }
}

void run_next(lily_device *d) {
    Submission s = d->pending.front();
    d->pending.pop_front();
    d->counts.clear();
    auto start = std::chrono::steady_clock::now();
    for (lily_list *list : s.lists) run_list(d, list);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    const std::string found = msl_reports();
    msl_clear_reports();
    pthread_mutex_lock(&d->head.mutex);
    device_finish(&d->head, s.ticket, took.count(), found.empty() ? LILY_OK : LILY_EFAILED, found.c_str());
    pthread_mutex_unlock(&d->head.mutex);
}

// Who asks for the last finished ticket runs one submission, who waits for a ticket all up to it.
void progress(lily_device *d, uint64_t ticket) {
    std::lock_guard<std::mutex> lock(d->guard);
    if (!ticket && !d->pending.empty()) run_next(d);
    while (!d->pending.empty() && d->pending.front().ticket <= ticket) run_next(d);
}

} // namespace

extern "C" {

MSL_EXPORT void msl_provide(MslProvider p) { provider = p; }

// Exact sizes of the views of the next dispatches to be recorded; without them a view reaches to its buffer's end.
MSL_EXPORT void msl_announce(const uint64_t *bytes, uint32_t count) {
    announced.assign(bytes, bytes + count); // those of a list that was refused go
}

// Bytes moved by dispatch `i` of the last submission; 0 beyond the last.
MSL_EXPORT int msl_dispatch_counts(lily_device *d, uint32_t i, uint64_t *out) {
    if (i >= d->counts.size()) return 0;
    memcpy(out, &d->counts[i], sizeof d->counts[i]);
    return 1;
}

LILY_API int lily_open(const char *options, lily_device **out, char *error, size_t error_bytes) {
    lily_device *d = new lily_device();
    device_init(&d->head);
    d->head.progress = progress;
    std::string text = options ? options : "";
    for (size_t at = 0; at < text.size();) {
        size_t end = std::min(text.find('\n', at), text.size()), equals = text.find('=', at);
        int code = equals < end ? set_option(d, text.substr(at, equals - at), text.substr(equals + 1, end - equals - 1))
                                : device_fail(LILY_EINVAL, "an option without a value");
        if (code) {
            lily_close(d);
            return device_opened(code, error, error_bytes);
        }
        at = end + 1;
    }
    *out = d;
    return device_opened(LILY_OK, error, error_bytes);
}

LILY_API void lily_close(lily_device *d) {
    while (!d->pending.empty()) run_next(d);
    for (auto &k : d->kernels) delete k.second;
    device_destroy(&d->head);
    delete d;
}

LILY_API int lily_info(lily_device *d, char *out, size_t bytes) {
    const char *orders[] = {"forward", "reverse", "random"};
    const int length = snprintf(out, bytes, "name=emulated Metal\nisa=translated\nthreads=%u\norder=%s\nchecked=%u\n",
        d->workers, orders[d->order], d->checked);
    return device_told(length, bytes);
}

LILY_API int lily_buffer_new(lily_device *, uint64_t bytes, int, lily_buffer **out) {
    void *base = msl_region_new(bytes, 0);
    if (!base) return device_fail(LILY_ENOMEM, "no room for a buffer of %llu bytes", (unsigned long long)bytes);
    *out = new lily_buffer{{bytes, (unsigned char *)base, false}};
    return LILY_OK;
}
LILY_API void lily_buffer_free(lily_buffer *b) {
    msl_region_free(b->head.memory);
    delete b;
}

LILY_API int lily_kernel_get(
    lily_device *d, const char *name, const int32_t *constants, uint32_t count, lily_kernel **out) {
    const kernel_row *row;
    const int code = device_check_kernel(d, name, constants, count, out, &row);
    if (code) return code;
    std::string key = name;
    for (uint32_t i = 0; i < count; i++) key += "," + std::to_string(constants[i]);
    auto found = d->kernels.find(key);
    if (found == d->kernels.end()) {
        lily_kernel *k = new lily_kernel{{d, row}, {}};
        if (!provider || provider(name, constants, count, &k->made)) {
            delete k;
            return device_fail(LILY_ENOTFOUND, "kernel %s cannot be made", key.c_str());
        }
        found = d->kernels.emplace(key, k).first;
    }
    *out = found->second;
    return LILY_OK;
}

LILY_API int lily_kernel_fit(lily_kernel *, uint32_t) { return LILY_OK; }

LILY_API int lily_list_new(lily_device *d, lily_list **out) {
    *out = new lily_list{{d, false}, {}};
    return LILY_OK;
}
LILY_API void lily_list_free(lily_list *list) { delete list; }

LILY_API int lily_list_dispatch(lily_list *list, lily_kernel *kernel, const lily_arg *args, uint32_t arg_count,
    const void *params, uint32_t param_bytes, const uint32_t grid[3], const uint32_t threads[3], int barrier) {
    const int code = device_check_dispatch(list, kernel, args, arg_count, params, param_bytes, grid);
    if (code) return code;
    const MslProvided &k = kernel->made;
    const char *name = kernel->head.row->name;
    const uint32_t in_group = threads[0] * threads[1] * threads[2];
    if (in_group > k.max_threads)
        return device_fail(
            LILY_EINVAL, "%s: %u threads in a group, the kernel allows %u", name, in_group, k.max_threads);
    Dispatch p = {};
    p.kernel = kernel, p.arg_count = arg_count, p.barrier = barrier != 0;
    for (uint32_t i = 0; i < arg_count; i++) {
        const lily_buffer *b = args[i].buffer;
        p.launch.buffers[i] = b->head.memory + args[i].offset;
        p.view_bytes[i] = b->head.bytes - args[i].offset;
        if (announced.empty()) continue;
        if (announced.front() > p.view_bytes[i])
            return device_fail(LILY_EINVAL, "%s: view %u ends beyond its buffer", name, i);
        p.view_bytes[i] = announced.front();
        announced.pop_front();
    }
    if (param_bytes) memcpy(p.params, params, param_bytes);
    for (int i = 0; i < 3; i++) {
        p.launch.groups[i] = grid[i], p.launch.group_size[i] = threads[i];
        p.launch.grid[i] = grid[i] * threads[i];
    }
    p.launch.name = name;
    list->dispatches.push_back(p);
    return LILY_OK;
}

LILY_API int lily_list_end(lily_list *list) {
    const int code = device_check_end(list);
    if (!code) list->head.ended = true;
    return code;
}

LILY_API int lily_submit(lily_device *d, lily_list *const *lists, uint32_t count, uint64_t *ticket) {
    const int code = device_check_submission(d, lists, count);
    if (code) return code;
    std::lock_guard<std::mutex> lock(d->guard);
    pthread_mutex_lock(&d->head.mutex);
    *ticket = ++d->head.submitted;
    pthread_mutex_unlock(&d->head.mutex);
    d->pending.push_back(Submission{*ticket, std::vector<lily_list *>(lists, lists + count)});
    while (!d->late && !d->pending.empty()) run_next(d);
    return LILY_OK;
}

} // extern "C"
