// SPDX-License-Identifier: Apache-2.0
// Happens-before: which accesses to device and threadgroup memory no barrier, fence or order of dispatches separates.
//
// A cell (two bytes) remembers the last write and the last read of the running dispatch; a read by several threads at
// once is remembered as such.  Accesses of one group are ordered by threadgroup barriers with the right flag, of one
// simdgroup also by simdgroup barriers.  Different groups are ordered only by the last-arriver rule: a seq_cst fence of
// device scope, then an atomic update of a counter; and on the other side an atomic read of the counter that sees it,
// then such a fence.  What crosses that way must be written and read through coherent pointers.  Everything else
// between groups, and between dispatches without a barrier, is a race.
//
// Not handled: a read by several groups, one of which is then ordered before a write, counts as unordered.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <string.h>
#include <unordered_map>
#include <vector>

namespace emulator {

// ---- stamps -----------------------------------------------------------------------------------------------------

// Who accesses device memory, and after which barriers and fences; a stamp in a cell is its number.
struct Context {
    uint32_t group, device_epoch, simd_epoch, fence_epoch, thread;
};
// Flags below it.  SHARED: read by several threads of the group, MIXED: of several simdgroups, GROUPS: by several
// groups; LOW, HIGH: which bytes.
enum : uint64_t { ATOMIC = 1, COHERENT = 2, SHARED = 4, MIXED = 8, GROUPS = 16, LOW = 32, HIGH = 64, FLAG_BITS = 7 };

static std::vector<Context> contexts;
static uint64_t first_context = 1; // of the running dispatch: older stamps are ordered by definition

// ---- what a lane knows of other groups ---------------------------------------------------------------------------

// Of a group's accesses: all before `device_epoch`, and in that epoch those of `thread` before `fence_epoch`.
struct Known {
    uint32_t device_epoch, thread, fence_epoch;
    bool operator<(const Known &o) const {
        return device_epoch != o.device_epoch ? device_epoch < o.device_epoch : fence_epoch < o.fence_epoch;
    }
};
typedef std::unordered_map<uint32_t, Known> Knowledge; // by group

static void learn(Knowledge &to, uint32_t group, const Known &k) {
    auto added = to.emplace(group, k);
    if (!added.second && added.first->second < k) added.first->second = k;
}
static void learn(Knowledge &to, const Knowledge &from) {
    for (auto &entry : from) learn(to, entry.first, entry.second);
}

struct LaneKnowledge {
    Knowledge seen;     // read from atomics, no fence yet
    Knowledge own;      // after a fence
    Knowledge released; // what the last fence made public
    bool fenced = false;
    uint32_t loads = 0;
};
enum : uint32_t { SPIN_LIMIT = 1000000 };
// A location of atomics in device memory.
struct Location {
    Knowledge released;
    uint32_t first_value = 0;
    bool arrivals = false; // groups synchronise through it
    MslSite site = {};
};

static std::unordered_map<uint32_t, LaneKnowledge> lanes; // of the running group, by thread
static Knowledge group_knowledge;                         // of the running group, after a barrier
static std::unordered_map<uintptr_t, Location> locations;

// ---- threadgroup memory -------------------------------------------------------------------------------------------

struct GroupCell {
    uint64_t write, read; // 0: never; else as stamped() makes them
};
enum : uint64_t { G_VALID = 1, G_ATOMIC = 2, G_SHARED = 4, G_MIXED = 8 };
static const uint64_t G_GAP = ~0ull; // in place of the last write: between two variables
static GroupCell *group_cells;

static uint64_t stamped(Worker *w, MslLane *l, uint64_t flags) {
    return (uint64_t)w->threadgroup_epoch << 32 | (uint64_t)(l->simd_epoch & 0x3ffff) << 14 | (uint64_t)l->linear << 4 |
        flags | G_VALID;
}
static uint32_t g_thread(uint64_t s) { return (uint32_t)(s >> 4) & 1023; }

// Whether an access stamped `before` is unordered with one stamped `now`; one of them writes.
static bool group_conflict(uint64_t before, uint64_t now) {
    if (!(before & G_VALID) || before >> 32 != now >> 32) return false;
    if (before & now & G_ATOMIC) return false;
    bool same_simdgroup = g_thread(before) / 32 == g_thread(now) / 32 && !(before & G_MIXED);
    if (same_simdgroup && (before >> 14 & 0x3ffff) != (now >> 14 & 0x3ffff)) return false;
    return before & G_SHARED || g_thread(before) != g_thread(now);
}

static void record_group_read(uint64_t &cell, uint64_t now) {
    if ((cell & G_VALID) && cell >> 32 == now >> 32) {
        if (g_thread(cell) != g_thread(now)) now |= G_SHARED;
        if (g_thread(cell) / 32 != g_thread(now) / 32) now |= G_MIXED;
        now |= cell & (G_SHARED | G_MIXED);
    }
    cell = now;
}

static void access_threadgroup(
    Worker *w, uintptr_t address, uint32_t bytes, bool writes, bool reads, bool atomic, MslSite site) {
    uint64_t offset = address - (uintptr_t)w->arena;
    MslLane *l = msl_self();
    if (offset + bytes > w->arena_used) {
        report("bounds", site, "%s of %u bytes at %llu of %u bytes of threadgroup memory", writes ? "write" : "read",
            bytes, (unsigned long long)offset, w->arena_used);
        return;
    }
    uint64_t now = stamped(w, l, atomic ? G_ATOMIC : 0);
    bool race = false, fresh = false;
    uint64_t end = (offset + bytes + 1) / 2;
    for (uint64_t i = offset / 2; i < end; i++) {
        GroupCell &c = group_cells[i];
        if (c.write == G_GAP) {
            report("bounds", site, "%s of %u bytes beyond a variable of threadgroup memory, by thread %u",
                writes ? "write" : "read", bytes, l->linear);
            return;
        }
        race |= group_conflict(c.write, now);
        if (writes) race |= group_conflict(c.read, now);
        if (reads) {
            fresh |= !c.write;
            record_group_read(c.read, now);
        }
        if (writes) c.write = now;
    }
    if (race)
        report("race", site, "%s of threadgroup memory by thread %u, unordered with another thread's access",
            writes ? "write" : "read", l->linear);
    if (fresh) report("uninitialised", site, "read of threadgroup memory that nobody wrote, by thread %u", l->linear);
}

// ---- device memory ------------------------------------------------------------------------------------------------

static uint64_t context_of(Worker *w, MslLane *l) {
    Context now = {w->linear_index, w->device_epoch, l->simd_epoch, l->fence_epoch, l->linear};
    static uint64_t newest[MSL_MAX_THREADS]; // of each lane, to use a context more than once
    uint64_t &mine = newest[l->linear];
    if (mine >= first_context && mine - first_context < contexts.size() &&
        !memcmp(&contexts[mine - first_context], &now, sizeof now))
        return mine;
    contexts.push_back(now);
    return mine = first_context + contexts.size() - 1;
}

static bool covers(const Knowledge &k, const Context &c) {
    auto it = k.find(c.group);
    if (it == k.end()) return false;
    const Known &e = it->second;
    return c.device_epoch < e.device_epoch ||
        (c.device_epoch == e.device_epoch && c.thread == e.thread && c.fence_epoch < e.fence_epoch);
}

enum Verdict { ORDERED, RACE, INCOHERENT };

static Verdict judge(uint64_t before, uint64_t now, const Context &b, bool before_writes) {
    if (before >> FLAG_BITS < first_context || before & now & ATOMIC || !(before & now & (LOW | HIGH))) return ORDERED;
    const Context &a = contexts[(before >> FLAG_BITS) - first_context];
    if (before & GROUPS) return RACE;
    if (a.group == b.group) {
        if (a.device_epoch != b.device_epoch) return ORDERED;
        if (!(before & SHARED) && a.thread == b.thread) return ORDERED;
        bool one_simdgroup = a.thread / 32 == b.thread / 32 && !(before & MIXED);
        return one_simdgroup && a.simd_epoch != b.simd_epoch ? ORDERED : RACE;
    }
    auto mine = lanes.find(b.thread);
    if (!covers(group_knowledge, a) && (mine == lanes.end() || !covers(mine->second.own, a))) return RACE;
    if (!before_writes) return ORDERED;
    return (before & (COHERENT | ATOMIC)) && (now & (COHERENT | ATOMIC)) ? ORDERED : INCOHERENT;
}

static void record_read(uint64_t &cell, uint64_t now, const Context &b) {
    if (cell >> FLAG_BITS >= first_context) {
        const Context &a = contexts[(cell >> FLAG_BITS) - first_context];
        if (a.group != b.group || cell & GROUPS)
            now |= GROUPS;
        else if (a.device_epoch == b.device_epoch) {
            if (a.thread != b.thread) now |= SHARED;
            if (a.thread / 32 != b.thread / 32) now |= MIXED;
            now |= cell & (SHARED | MIXED | LOW | HIGH);
        }
    }
    cell = now;
}

static void access_cells(
    Worker *w, const View &v, uint64_t offset, uint32_t bytes, bool writes, bool reads, uint64_t flags, MslSite site) {
    MslLane *l = msl_self();
    uint64_t context = context_of(w, l);
    const Context b = contexts[context - first_context];
    Verdict worst = ORDERED;
    uint64_t end = offset + bytes;
    for (uint64_t i = offset / 2; i * 2 < end; i++) {
        uint64_t parts = (i * 2 >= offset ? LOW : 0) | (i * 2 + 1 < end ? HIGH : 0);
        uint64_t now = context << FLAG_BITS | flags | parts;
        Cell &c = v.region->cells[i];
        worst = std::max(worst, judge(c.write, now, b, true));
        if (writes) worst = std::max(worst, judge(c.read, now, b, false));
        if (reads) record_read(c.read, now, b);
        if (writes) c.write = now;
    }
    const char *what = writes ? "write" : "read";
    if (worst == RACE)
        report("race", site, "%s of %s at byte %llu by thread %u, unordered with an access of another thread or group",
            what, v.name, (unsigned long long)(offset + v.region->base - (uint8_t *)v.address), l->linear);
    if (worst == INCOHERENT)
        report("visibility", site,
            "%s of %s at byte %llu crosses groups, but not through coherent(device) pointers on both sides", what,
            v.name, (unsigned long long)(offset + v.region->base - (uint8_t *)v.address));
}

static void access_device(
    Worker *w, uintptr_t address, uint32_t bytes, bool writes, bool reads, uint64_t flags, MslSite site) {
    const View *v = find_view(address, bytes, writes);
    if (!v) {
        const View *near = nearest_view(address);
        bool readonly = find_view(address, bytes, false);
        long long at = near ? (long long)(address - near->address) : 0;
        if (readonly)
            report("access", site, "write to %s, which this kernel may only read", near->name);
        else
            report("bounds", site, "%s of %u bytes at byte %lld of %s, which has %llu", writes ? "write" : "read",
                bytes, at, near ? near->name : "nothing", near ? (unsigned long long)near->bytes : 0);
        if (!is_mapped(address, bytes)) stop_lane();
        return;
    }
    Region *r = v->region;
    uint64_t offset = v->offset + (address - v->address);
    if (reads) {
        counts.bytes_read += bytes;
        counts.distinct_read += set_bits(r->read, offset, bytes);
    }
    if (writes) {
        counts.bytes_written += bytes;
        counts.distinct_written += set_bits(r->written, offset, bytes);
    }
    if (any_bit(r->earlier_written, offset, bytes) || (writes && any_bit(r->earlier_read, offset, bytes)))
        report("hazard", site, "%s of %s, which an earlier dispatch accesses with no barrier in between",
            writes ? "write" : "read", v->name);
    if (r->writable) access_cells(w, *v, offset, bytes, writes, reads, flags, site);
}

void check_access(const volatile void *p, uint32_t bytes, bool writes, bool reads, uint32_t how, MslSite site) {
    Worker *w = worker;
    if (!w || !(w->launch->flags & MSL_CHECK)) return;
    uintptr_t address = (uintptr_t)p;
    if (address - (uintptr_t)w->stacks < (uintptr_t)MSL_MAX_THREADS * MSL_STACK) return;
    bool atomic = how == ATOMIC_ACCESS;
    if (address - (uintptr_t)w->arena < ARENA)
        access_threadgroup(w, address, bytes, writes, reads, atomic, site);
    else if (in_device_memory(address))
        access_device(w, address, bytes, writes, reads, atomic ? ATOMIC : how == COHERENT_ACCESS ? COHERENT : 0, site);
    else if (address < 65536) {
        report("bounds", site, "%s through a null pointer by thread %u, which ends here", writes ? "write" : "read",
            msl_self()->linear);
        stop_lane();
    }
}

// ---- what orders accesses -------------------------------------------------------------------------------------------

void check_fence(Worker *w, MslLane *l) {
    LaneKnowledge &k = lanes[l->linear];
    learn(k.own, k.seen);
    k.released = group_knowledge;
    learn(k.released, k.own);
    l->fence_epoch++;
    k.released[w->linear_index] = Known{w->device_epoch, l->linear, l->fence_epoch};
    k.fenced = true;
}

void check_atomic(const volatile void *p, bool writes, bool reads, MslSite site) {
    uintptr_t address = (uintptr_t)p;
    if (!worker || !in_device_memory(address) || !find_view(address, 4, writes)) return;
    LaneKnowledge &k = lanes[msl_self()->linear];
    auto found = locations.find(address);
    if (found == locations.end()) {
        found = locations.emplace(address, Location()).first;
        found->second.first_value = *(const volatile uint32_t *)p;
    }
    Location &at = found->second;
    if (reads) learn(k.seen, at.released);
    if (reads && !writes && ++k.loads > SPIN_LIMIT) {
        report("spin", site, "thread %u loads atomics without end, as if it waited for another group; it ends here",
            msl_self()->linear);
        stop_lane();
    }
    if (!writes) return;
    if (!reads) at.released.clear();
    if (!k.fenced) return;
    learn(at.released, k.released);
    at.arrivals |= reads;
    at.site = site;
}

void check_barrier(Worker *, uint32_t flags) {
    if (!(flags & 1)) return;
    for (auto &entry : lanes) learn(group_knowledge, entry.second.own);
}

static void make_group_cells() {
    if (group_cells) return;
    void *p = mmap(nullptr, ARENA / 2 * sizeof(GroupCell), PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    group_cells = (GroupCell *)p;
}

void check_group_begins(Worker *) {
    lanes.clear();
    group_knowledge.clear();
    make_group_cells();
}

void check_gap(uint32_t begin, uint32_t end) {
    make_group_cells(); // a group's arguments are placed before it begins
    for (uint32_t i = (begin + 1) / 2; i < end / 2; i++) group_cells[i].write = G_GAP;
}

void check_group_ends(Worker *w) { memset((void *)group_cells, 0, (w->arena_used + 1) / 2 * sizeof(GroupCell)); }

void check_launch_begins(const MslLaunch *) {}

void check_launch_ends(const MslLaunch *) {
    for (auto &entry : locations) {
        uint32_t value = *(const volatile uint32_t *)entry.first;
        if (entry.second.arrivals && value != entry.second.first_value)
            report("not reset", entry.second.site,
                "a counter that groups meet at was %u before the dispatch and is %u after it", entry.second.first_value,
                value);
    }
    locations.clear();
    first_context += contexts.size();
    contexts.clear();
    memory_launch_ends();
}

} // namespace emulator
