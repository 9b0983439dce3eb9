// SPDX-License-Identifier: Apache-2.0
// A kernel that touches unmapped memory ends that lane with a report instead of the process.
//
// The signal handler lets the lane continue in a function that reports and stops it; outside of kernels the signal
// goes to whoever handled it before.
#include "runtime.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

namespace emulator {

static struct sigaction before[2];
static thread_local const void *faulting_pc;

static void fallen_lane() {
    report("crash", MslSite{nullptr, 0, 0, faulting_pc}, "access to unmapped memory by thread %u, which ends here",
        msl_self()->linear);
    stop_lane();
}

static void handle(int number, siginfo_t *info, void *context) {
    ucontext_t *c = (ucontext_t *)context;
    if (!worker || !worker->launch) {
        const struct sigaction &old = before[number == SIGBUS];
        if (old.sa_flags & SA_SIGINFO)
            old.sa_sigaction(number, info, context);
        else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN)
            old.sa_handler(number);
        else {
            signal(number, SIG_DFL);
            raise(number);
        }
        return;
    }
#if defined(__x86_64__) && defined(__linux__)
    greg_t *r = c->uc_mcontext.gregs;
    faulting_pc = (const void *)r[REG_RIP];
    r[REG_RSP] = ((r[REG_RSP] - 256) & ~(greg_t)15) - 8;
    r[REG_RIP] = (greg_t)fallen_lane;
#elif defined(__aarch64__) && defined(__linux__)
    faulting_pc = (const void *)c->uc_mcontext.pc;
    c->uc_mcontext.sp = (c->uc_mcontext.sp - 256) & ~15ull;
    c->uc_mcontext.pc = (uint64_t)fallen_lane;
#else
    (void)c;
    signal(number, SIG_DFL);
#endif
}

// Once for the process, and a stack for the handler on every thread that runs kernels.
void catch_crashes() {
    static thread_local bool has_stack;
    if (has_stack) return;
    has_stack = true;
    stack_t stack = {};
    stack.ss_size = 1 << 16;
    stack.ss_sp = malloc(stack.ss_size);
    sigaltstack(&stack, nullptr);
    static bool installed;
    if (installed) return;
    installed = true;
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
}

} // namespace emulator
