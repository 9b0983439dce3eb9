// SPDX-License-Identifier: Apache-2.0
// All kernels of one instruction-set path.  Each paths/isa_NAME.c includes this once, compiled with its own flags, after
// defining KERNELS as the name of its list; setup.py knows the flags.
#ifndef KERNELS
#error "define KERNELS first"
#endif

#include "attention_decode.h"
#include "attention_prefill.h"
#include "attention_prep.h"
#include "elementwise.h"
#include "gdn.h"
#include "gemm.h"
#include "gemv.h"
#include "logprobs.h"
#include "moe_decode.h"
#include "moe_expanded.h"
#include "moe_prefill.h"
#include "probe.h"
#include "route.h"
#include "sample.h"
#include "sample_filter.h"

// Name, and the least number of groups that are worth a thread's while.
// clang-format off
#define ENTRY(name, grain) {#name, kernel_##name, grain},
const cpu_entry KERNELS[] = {
    ENTRY(embed, 4)
    ENTRY(copy, 1)
    ENTRY(gemv_norm, 1)
    ENTRY(gemv_norm_f32, 1)
    ENTRY(gemv_norm_swiglu, 1)
    ENTRY(gemv_residual, 1)
    ENTRY(gemv_gated_residual, 1)
    ENTRY(gemv, 1)
    ENTRY(gdn_step, 1)
    ENTRY(attn_decode, 1)
    ENTRY(attn_combine, 1)
    ENTRY(moe_gate_up, 1)
    ENTRY(moe_down, 16)
    ENTRY(moe_gemv, 1)
    ENTRY(rmsnorm, 8)
    ENTRY(gemm, 1)
    ENTRY(gemm_f32, 1)
    ENTRY(gemm_swiglu, 1)
    ENTRY(gemm_residual, 1)
    ENTRY(gdn_conv, 1)
    ENTRY(gdn_scan, 1)
    ENTRY(gdn_gate, 4)
    ENTRY(attn_prep, 2)
    ENTRY(attn_prefill, 1)
    ENTRY(attn_decode_prepared, 1)
    ENTRY(gdn_scan_blocked, 1)
    ENTRY(route_topk, 8)
    ENTRY(route_group, 1)
    ENTRY(moe_gemm_gate_up, 1)
    ENTRY(moe_gemm_down, 1)
    ENTRY(moe_combine, 4)
    ENTRY(expand, 16)
    ENTRY(moe_gemm_expanded, 1)
    ENTRY(last_row, 1)
    ENTRY(swiglu, 4)
    ENTRY(argmax, 1)
    ENTRY(sample_logits, 1)
    ENTRY(sample_filter, 1)
    ENTRY(sample_draw, 1)
    ENTRY(top_logprobs, 1)
    ENTRY(advance, 1)
    ENTRY(score_rows, 1)
    ENTRY(probe_level, 1)
    ENTRY(probe_read, 1)
    ENTRY(probe_matrix, 1)
    {NULL, NULL, 0},
};
// clang-format on
