// SPDX-License-Identifier: Apache-2.0
// Switching between stacks: assembly for x86-64 and AArch64, ucontext elsewhere.
//
// fiber_make prepares a stack that ends at `top` (16-byte aligned) so that the first switch to it calls `entry`, which
// never returns; fiber_switch saves the running stack in *save and continues the other.
#pragma once
#include <stdint.h>

#if defined(__x86_64__) && !defined(FIBER_UCONTEXT)
extern "C" void fiber_switch(void **save, void *load);
asm(R"(
.text
.globl fiber_switch
fiber_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    retq
)");
static inline void *fiber_make(void *top, void (*entry)()) {
    uint64_t *sp = (uint64_t *)top;
    *--sp = 0; // where the caller of `entry` would have left its return address
    *--sp = (uint64_t)entry;
    for (int i = 0; i < 6; i++) *--sp = 0;
    return sp;
}

#elif defined(__aarch64__) && !defined(FIBER_UCONTEXT)
extern "C" void fiber_switch(void **save, void *load);
#if defined(__APPLE__)
#define FIBER_SYMBOL "_fiber_switch"
#else
#define FIBER_SYMBOL "fiber_switch"
#endif
asm(".text\n.p2align 2\n.globl " FIBER_SYMBOL "\n" FIBER_SYMBOL ":\n"
    R"(
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
static inline void *fiber_make(void *top, void (*entry)()) {
    uint64_t *sp = (uint64_t *)top - 20;
    for (int i = 0; i < 20; i++) sp[i] = 0;
    sp[11] = (uint64_t)entry; // x30
    return sp;
}

#else
#include <ucontext.h>
struct fiber_context {
    ucontext_t context;
};
static inline void fiber_switch(void **save, void *load) {
    fiber_context here;
    *save = &here;
    swapcontext(&here.context, &((fiber_context *)load)->context);
}
static inline void *fiber_make(void *top, void (*entry)()) {
    fiber_context *f = (fiber_context *)(((uintptr_t)top - sizeof(fiber_context)) & ~(uintptr_t)63);
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = (char *)f - 65536;
    f->context.uc_stack.ss_size = 65536;
    f->context.uc_link = nullptr;
    makecontext(&f->context, entry, 0);
    return f;
}
#endif
