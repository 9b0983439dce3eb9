# SPDX-License-Identifier: Apache-2.0
"""Helper with which a forward pass is written: one call per kernel, checked against the kernel table."""

from __future__ import annotations

from typing import Any

from lily.checkpoint.config import ModelConfig
from lily.errors import InvalidRequestError
from lily.kernels import KERNELS
from lily.plan import legal
from lily.plan.hazards import schedule
from lily.plan.memory import ACT_BYTES, StateLayout, kv_row_bytes, step_buffers
from lily.plan.views import Dispatch, Plan, View
from lily.plan.weights_map import WeightsMap, align, map_weights
from lily.policy import Policy


class Builder:
    """Collects the dispatches of one list.

    ``rows`` is the row bucket, ``capacity`` how many tokens of the KV cache it may use, ``context`` the number
    of tokens that traffic is counted for.
    """

    def __init__(
        self, config: ModelConfig, policy: Policy, *, rows: int = 1, capacity: int = 0, context: int | None = None,
        weights: WeightsMap | None = None,
    ) -> None:  # fmt: skip
        self.config, self.policy, self.rows, self.capacity = config, policy, rows, capacity
        self.context = capacity if context is None else context
        self.weights = weights or map_weights(config, policy)
        self.state = StateLayout.of(config, policy)
        self.act_bytes = ACT_BYTES[policy.act]
        self.dispatches: list[Dispatch] = []
        self._scratch: dict[str, View] = {}
        self._scratch_used = 0
        self._fixed = step_buffers(config, policy, capacity)
        self._prefix = ""

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
        return self.scratch(name, _product(shape) * self.act_bytes)

    def f32(self, name: str, *shape: int) -> View:
        return self.scratch(name, _product(shape) * 4)

    i32 = f32

    def fixed(self, name: str) -> View:
        """One of the sequence's small buffers (``memory.step_buffers``), whole."""
        return View(name, 0, self._fixed[name])

    def kv(self, layer: int, which: str) -> View:
        """K or V cache of ``layer``, [capacity, Hkv, D] bf16: ``context`` rows count as read, ``rows`` as written."""
        row = kv_row_bytes(self.config)
        return View(f"kv.{layer}.{which}", 0, self.capacity * row).using(self.context * row, self.rows * row)

    # ---- dispatch
    def layer(self, index: int | None) -> None:
        """Labels of what follows begin with the layer; None: it belongs to no layer."""
        self._prefix = "" if index is None else f"layers.{index}."

    def dispatch(
        self, kernel: str, grid: tuple[int, ...], threads: int = 0, *, label: str = "",
        constants: dict[str, int] | None = None, params: dict[str, int | float] | None = None, host: bool = False,
        **args: Any,
    ) -> None:  # fmt: skip
        """Records ``kernel`` on a grid of groups; every argument, parameter and constant of its row must be given.

        ``args`` are the row's buffers by name: View, Dense or Matrix.  ``threads`` of a group are given where the row
        leaves them to the policy.  ``host``: the host runs it, not the device.
        """
        k = KERNELS[kernel]
        constants, params = constants or {}, params or {}
        for what, given, wanted in (
            ("arguments", args.keys(), [a.name for a in k.args]),
            ("parameters", params.keys(), [n for n, _ in k.params]),
            ("constants", constants.keys(), list(k.constants)),
        ):
            if set(given) != set(wanted):
                raise ValueError(f"{kernel}: {what} are {sorted(wanted)}, given were {sorted(given)}")
        if bool(threads) == bool(k.threads) or threads > k.max_threads:
            allowed = f"the table says {k.threads}" if k.threads else f"1 to {k.max_threads} are allowed"
            raise ValueError(f"{kernel}: {threads} threads were given, {allowed}")
        label = self._prefix + (label or kernel)
        legal.check(k, {**params, **constants}, device=self.policy.device, source=self.config.source, label=label)
        views = tuple(v if isinstance(v, View) else v.view for v in (args[a.name] for a in k.args))
        self.dispatches.append(
            Dispatch(
                kernel=k,
                label=label,
                constants=tuple(int(constants[n]) for n in k.constants),
                views=views,
                params=tuple(params[n] for n, _ in k.params),
                grid=(*grid, 1, 1)[:3],  # type: ignore[arg-type]
                threads=(threads or k.threads, 1, 1),
                host=host,
            )
        )

    def finish(self, name: str) -> Plan:
        """The scheduled plan."""
        done = schedule(self.dispatches, every=self.policy.off("overlap"))
        buffers: dict[str, int] = {}
        for d in done:
            for v in d.views:
                buffers[v.buffer] = max(buffers.get(v.buffer, 0), v.offset + v.nbytes)
        return Plan(name, done, self._scratch_used, buffers)


def _product(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


def groups(n: int, per_group: int) -> int:
    """Groups needed for ``n`` items."""
    return -(-n // per_group)


def check_rows(policy: Policy, rows: int) -> None:
    """InvalidRequestError unless a list for ``rows`` rows can be recorded."""
    if not 1 <= rows <= policy.buckets[-1]:
        raise InvalidRequestError(f"{rows} rows in one chunk; allowed are 1 to {policy.buckets[-1]}")
