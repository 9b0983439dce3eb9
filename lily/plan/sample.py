# SPDX-License-Identifier: Apache-2.0
"""From ``hidden`` to the next token, on the device: head, filters, draw, and the hand-over to the next step."""

from __future__ import annotations

from lily.kernels import MAX_TOP_LOGPROBS
from lily.plan.builder import Builder, groups
from lily.plan.views import Plan, View
from lily.plan.weights_map import align


def sample_plan(b: Builder, *, greedy: bool, logprobs: bool) -> Plan:
    """Logits of ``hidden``, a token to ``outputs``, ``ids.out`` and ``step.out``.

    ``greedy`` takes the largest raw logit: no penalty, no bias, temperature 0.  ``logprobs`` adds log-probabilities.
    """
    c, p = b.config, b.policy
    v = c.vocab_size
    slices = groups(v, p.sample_slice)
    logits = b.fixed("logits")
    m = _SamplerMemory(b, v, slices)
    step, request = b.fixed("step.in"), b.fixed("request")
    head(b, b.fixed("hidden"), logits)
    if greedy and not logprobs:
        b.dispatch(
            "argmax", (slices,), request=request, logits=logits, best=m.best, flags=m.flags,
            params={"slice": p.sample_slice},
        )  # fmt: skip
    else:
        b.dispatch(
            "sample_logits", (slices,), step=step, request=request, logits=logits, bias_ids=b.fixed("bias.ids"),
            bias_values=b.fixed("bias.values"), history=b.fixed("history"), counts=b.fixed("counts"), y=m.y,
            stats=m.stats, flags=m.flags, params={"slice": p.sample_slice},
        )  # fmt: skip
        if logprobs:
            b.dispatch(
                "top_logprobs", (1,), request=request, logits=logits, top_ids=m.top_ids, top_values=m.top_values,
                params={"count": v},
            )  # fmt: skip
        b.dispatch(
            "sample_filter", (1,), request=request, y=m.y, stats=m.stats, cut=m.cut,
            params={"count": v, "groups": slices},
        )  # fmt: skip
        b.dispatch(
            "sample_draw", (slices,), step=step, request=request, y=m.y, cut=m.cut, best=m.best,
            params={"slice": p.sample_slice},
        )  # fmt: skip
    # Of `outputs` one entry is written; of `counts` and `logits` one element is used.
    b.dispatch(
        "advance", (1,), step=step, next_step=b.fixed("step.out"), request=request, best=m.best, flags=m.flags,
        logits=logits.using(4), stats=m.stats, top_ids=m.top_ids, top_values=m.top_values,
        next_ids=b.fixed("ids.out").using(4), history=b.fixed("history").using(4), counts=b.fixed("counts").using(4),
        outputs=b.fixed("outputs").using(200), params={"groups": slices, "logprobs": int(logprobs)},
    )  # fmt: skip
    return b.finish("sample" + ("-greedy" if greedy else "") + ("-logprobs" if logprobs else ""))


def head(b: Builder, x: View, logits: View) -> None:
    """Final norm and output projection of one row."""
    w = b.weights.head
    b.dispatch(
        "gemv_norm_f32", (groups(w.n, b.policy.gemv_rows),), b.policy.gemv_threads, label="lm_head",
        x=x, norm=b.weights.norm, w=w, y=logits,
        params={"n": w.n, "k": w.k, "eps": b.config.rms_norm_eps, "rows_per_group": b.policy.gemv_rows},
        constants=w.constants,
    )  # fmt: skip


class _SamplerMemory:
    """Parts of the ``sampler`` buffer (sizes as in ``memory.step_buffers``)."""

    def __init__(self, b: Builder, vocab: int, slices: int) -> None:
        whole, at = b.fixed("sampler"), 0
        parts = []
        for n in (vocab * 4, slices * 16, slices * 8, slices * 4, 8, MAX_TOP_LOGPROBS * 4, MAX_TOP_LOGPROBS * 4):
            parts.append(whole.part(at, n))
            at += align(n)
        self.y, self.stats, self.best, self.flags, self.cut, self.top_ids, self.top_values = parts
