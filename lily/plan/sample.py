# SPDX-License-Identifier: Apache-2.0
"""From ``hidden`` to the next token, on the device: head, filters, draw, and the hand-over to the next step."""

from __future__ import annotations

from lily import structs
from lily.kernels import MAX_TOP_LOGPROBS
from lily.plan.builder import Builder, groups
from lily.plan.layers import gemv
from lily.plan.views import Plan
from lily.plan.weights_map import align


def sample_plan(b: Builder, *, greedy: bool, logprobs: bool) -> Plan:
    """Logits of ``hidden``, a token to ``outputs``, ``ids.out`` and ``step.out``.

    ``greedy`` takes the largest raw logit: no penalty, no bias, no mask, temperature 0.  ``logprobs`` adds
    log-probabilities.
    """
    p, v = b.policy, b.config.vocab_size
    slices = groups(v, p.sample_slice)
    logits = b.fixed("logits")  # [V]
    m = _SamplerMemory(b, v, slices)

    gemv(
        b, "gemv_norm_f32", b.weights.head, shape=p.head_shape, label="lm_head", x=b.fixed("hidden"),
        norm=b.weights.norm, y=logits,
    )  # fmt: skip
    if greedy and not logprobs:
        b.dispatch("argmax", (slices,), logits=logits, best=m.best, flags=m.flags, slice=p.sample_slice)
    else:
        b.dispatch(
            "sample_logits", (slices,), logits=logits, bias_ids=b.fixed("bias.ids"), bias_values=b.fixed("bias.values"),
            history=b.fixed("history"), counts=b.fixed("counts"), mask=b.fixed("mask"), y=m.y, stats=m.stats,
            flags=m.flags, slice=p.sample_slice,
        )  # fmt: skip
        if logprobs:
            b.dispatch("top_logprobs", (1,), logits=logits, top_ids=m.top_ids, top_values=m.top_values, count=v)
        b.dispatch("sample_filter", (1,), y=m.y, stats=m.stats, cut=m.cut, count=v, groups=slices)
        b.dispatch("sample_draw", (slices,), y=m.y, cut=m.cut, best=m.best, slice=p.sample_slice)
    # Of ``outputs`` one entry is written; of ``counts`` and ``logits`` one element is used.
    b.dispatch(
        "advance", (1,), next_step=b.fixed("step.out"), best=m.best, flags=m.flags, logits=logits.using(4),
        stats=m.stats, top_ids=m.top_ids, top_values=m.top_values, next_ids=b.fixed("ids.out").using(4),
        history=b.fixed("history").using(4), counts=b.fixed("counts").using(4),
        outputs=b.fixed("outputs").using(structs.OUTPUT.itemsize), groups=slices, logprobs=int(logprobs),
    )  # fmt: skip
    return b.finish("sample" + ("-greedy" if greedy else "") + ("-logprobs" if logprobs else ""))


class _SamplerMemory:
    """Parts of the ``sampler`` buffer (sizes as in ``memory.step_buffers``)."""

    def __init__(self, b: Builder, vocab: int, slices: int) -> None:
        whole, at = b.fixed("sampler"), 0
        parts = []
        for n in (vocab * 4, slices * 16, slices * 8, slices * 4, 8, MAX_TOP_LOGPROBS * 4, MAX_TOP_LOGPROBS * 4):
            parts.append(whole.part(at, n))
            at += align(n)
        self.y, self.stats, self.best, self.flags, self.cut, self.top_ids, self.top_values = parts
