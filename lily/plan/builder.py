# SPDX-License-Identifier: Apache-2.0
"""Helper with which a forward pass is written: one call per kernel, checked against the kernel table."""

from __future__ import annotations

from math import prod
from typing import Any

from lily.checkpoint.config import ModelConfig
from lily.errors import InvalidRequestError
from lily.kernels import KERNELS
from lily.plan import legal
from lily.plan.hazards import schedule
from lily.plan.memory import StateLayout, kv_row_bytes, step_buffers
from lily.plan.views import Dispatch, Plan, Values, View
from lily.plan.weights_map import BYTES, Dense, Matrix, WeightsMap, align, map_weights
from lily.policy import Policy


class Builder:
    """Collects the dispatches of one list.

    ``rows`` is the row bucket, ``kv_tokens`` how many tokens of the KV cache it may use, ``context`` the number of
    tokens that traffic is counted for.
    """

    def __init__(
        self, config: ModelConfig, policy: Policy, *, rows: int = 1, kv_tokens: int = 0, context: int | None = None,
        weights: WeightsMap | None = None,
    ) -> None:  # fmt: skip
        self.config, self.policy, self.rows, self.kv_tokens = config, policy, rows, kv_tokens
        self.context = kv_tokens if context is None else context
        self.weights = weights or map_weights(config, policy)
        self.state = StateLayout.of(config, policy)
        self.act_bytes = BYTES[policy.act]
        self.dispatches: list[Dispatch] = []
        self._scratch: dict[str, View] = {}
        self._scratch_used = 0
        self._fixed = step_buffers(config, policy, kv_tokens)
        self._same = self._same_everywhere()
        self._prefix = ""
        self._edges: list[int] = []

    def _same_everywhere(self) -> Values:
        """Values that a name has in every row of the kernel table: those of the sequence and of the model."""
        c = self.config
        return {
            "step": self.fixed("step.in"), "request": self.fixed("request"), "inv_freq": self.weights.inv_freq,
            "eps": c.rms_norm_eps, "hidden": c.hidden_size,
            "experts": c.num_experts, "active": c.experts_per_token, "renorm": c.norm_topk_prob,
            "hq": c.num_heads, "hkv": c.num_kv_heads, "dim": c.head_dim, "rot": c.rotary_dim,
            "hk": c.linear_num_key_heads, "hv": c.linear_num_value_heads, "dk": c.linear_key_head_dim,
            "dv": c.linear_value_head_dim, "taps": c.conv_kernel,
        }  # fmt: skip

    # ---- memory
    def scratch(self, name: str, nbytes: int) -> View:
        """Memory of this list by role; the same name is the same memory, for instance in every layer."""
        view = self._scratch.get(name)
        if view is None:
            view = self._scratch[name] = View("scratch", self._scratch_used, nbytes)
            self._scratch_used = align(self._scratch_used + nbytes)
        if view.nbytes != nbytes:
            raise ValueError(f"scratch {name!r} was {view.nbytes} bytes and is now asked for with {nbytes}")
        return view

    def act(self, name: str, *shape: int) -> View:
        """Scratch for activations of ``shape``."""
        return self.scratch(name, prod(shape) * self.act_bytes)

    def f32(self, name: str, *shape: int) -> View:
        """Scratch for float32 numbers of ``shape``."""
        return self.scratch(name, prod(shape) * BYTES["f32"])

    i32 = f32  # of the same width

    def residual(self) -> View:
        """The residual stream [rows, H], the only activations that one layer leaves to the next.

        Of a chunk that goes in parts it has a buffer of its own: others use the scratch memory between two parts.
        """
        if self.policy.parts(self.rows) == 1:
            return self.act("x", self.rows, self.config.hidden_size)
        return View("residual", 0, self.rows * self.config.hidden_size * self.act_bytes)

    def fixed(self, name: str) -> View:
        """One of the sequence's small buffers (``memory.step_buffers``), whole."""
        return View(name, 0, self._fixed[name])

    def kv(self, layer: int) -> Values:
        """K and V of ``layer``, [kv_tokens, Hkv, D] bf16: ``context`` rows count as read, ``rows`` as written."""
        row = kv_row_bytes(self.config)
        whole = (View(f"kv.{layer}.{which}", 0, self.kv_tokens * row) for which in "kv")
        k, v = (view.using(self.context * row, self.rows * row) for view in whole)
        return {"k": k, "v": v}

    def conv_rows(self, layer: int) -> Values:
        """Convolution rows of a GDN layer, [taps-1, C], before and after the step."""
        return {"conv_in": self.state.conv_view(layer, "in"), "conv_out": self.state.conv_view(layer, "out")}

    def recurrent(self, layer: int) -> Values:
        """Recurrent state of a GDN layer, [Hv, Dk, Dv] float32, before and after the step."""
        return {"s_in": self.state.recurrent_view(layer, "in"), "s_out": self.state.recurrent_view(layer, "out")}

    # ---- dispatch
    def layer(self, index: int | None) -> None:
        """Labels of what follows begin with the layer; None: it belongs to no layer."""
        self._prefix = "" if index is None else f"layers.{index}."
        self._edges.append(len(self.dispatches))

    def dispatch(
        self, kernel: str, grid: tuple[int, ...], threads: int = 0, *, label: str = "", host: bool = False, **given: Any
    ) -> None:
        """Records ``kernel`` on a grid of groups.

        ``given`` are buffers (View, Dense or Matrix), parameters and constants by their names in the kernel's row: all
        of them, except those that mean the same in every row (``_same_everywhere``).  ``threads`` of a group are given
        where the row leaves them to the policy.  ``host``: the host runs it, not the device.
        """
        k = KERNELS[kernel]
        buffers, params = [a.name for a in k.args], [name for name, _ in k.params]
        names = [*buffers, *params, *k.constants]
        values = {name: self._same[name] for name in names if name in self._same} | given
        if values.keys() != set(names):
            raise ValueError(f"{kernel} takes {sorted(names)}, given were {sorted(given)}")
        if bool(threads) == bool(k.threads) or threads > k.max_threads:
            allowed = f"the table says {k.threads}" if k.threads else f"1 to {k.max_threads} are allowed"
            raise ValueError(f"{kernel}: {threads} threads were given, {allowed}")
        label = self._prefix + (label or kernel)
        numbers = {name: values[name] for name in (*params, *k.constants)}
        legal.check(k, numbers, policy=self.policy, source=self.config.source, label=label)
        x, y, z = (*grid, 1, 1)[:3]
        self.dispatches.append(
            Dispatch(
                kernel=k,
                label=label,
                constants=tuple(int(values[name]) for name in k.constants),
                views=tuple(_view(values[name]) for name in buffers),
                params=tuple(values[name] for name in params),
                grid=(x, y, z),
                threads=(threads or k.threads, 1, 1),
                host=host,
            )
        )

    def finish(self, name: str) -> Plan:
        """The scheduled plan."""
        done = schedule(self.dispatches, every=self.policy.ablated("overlap"))
        buffers: dict[str, int] = {}
        for d in done:
            for v in d.views:
                buffers[v.buffer] = max(buffers.get(v.buffer, 0), v.offset + v.nbytes)
        return Plan(name, done, self._scratch_used, buffers, tuple(self._edges))


def _view(buffer: View | Dense | Matrix) -> View:
    return buffer if isinstance(buffer, View) else buffer.view


def groups(n: int, per_group: int) -> int:
    """Groups needed for ``n`` items."""
    return -(-n // per_group)


def check_rows(policy: Policy, rows: int) -> None:
    """InvalidRequestError unless a list for ``rows`` rows can be recorded."""
    if not 1 <= rows <= policy.buckets[-1]:
        raise InvalidRequestError(f"{rows} rows in one chunk; allowed are 1 to {policy.buckets[-1]}")
