# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint's tensors to device buffers, in the layout that the kernels want.

Layouts of a quantised matrix [n, k] (MLX words: 32/bits consecutive weights, lowest bits first):

``rows``    words [n, k·bits/32], then scales bf16 [n, k/group], then biases bf16 [n, k/group]; each section begins at a
            multiple of 256 bytes.
``rows16``  blocks of 16 rows, n padded with zeros; a block holds, per group of columns, (group·bits/32) × 16 words
            (word j of all 16 rows side by side), 16 scales and 16 biases: a vector register takes one word of 16 rows.

Each tensor is read once, by pread, a bounded part at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from lily.bf16 import bf16_to_f32, f32_to_bf16
from lily.checkpoint.checkpoint import Checkpoint
from lily.checkpoint.config import QuantSpec
from lily.device._pack import pack_rows16
from lily.device.device import Bytes, Device, free
from lily.errors import CheckpointError
from lily.plan.views import View
from lily.plan.weights_map import Dense, Matrix, WeightsMap, align, matrix_bytes

Progress = Callable[[int], None]

_PART_BYTES = 32 << 20  # packed weights held in host memory at once, at most
_STORED = {"U32": np.uint32, "BF16": np.uint16, "F16": np.float16, "F32": np.float32}
_UNSCALED = ("A_log", "dt_bias")  # these tensors have no .weight in their name


def load_weights(
    checkpoint: Checkpoint, weights: WeightsMap, buffers: Mapping[str, Target], progress: Progress = lambda n: None
) -> None:
    """Fills the buffers of ``weights``; ``progress`` gets the number of checkpoint bytes done since its last call.

    Raises CheckpointError where a tensor cannot be read or represented.
    """
    loader = _Loader(checkpoint, buffers, progress)
    loader.inverse_frequencies(weights)
    for tensor in weights.placed:
        if isinstance(tensor, Matrix):
            loader.matrix(tensor)
        else:
            loader.dense(tensor)


def _is_model_norm(module: str) -> bool:
    """Whether Hugging Face stores w of a factor 1 + w here: layer, final, q and k norms, but not GDN's own norm."""
    return module.endswith("norm") and not module.endswith("linear_attn.norm")


class Target(Protocol):
    """What weights are put into: a Buffer."""

    def filling(self, start: int, nbytes: int) -> AbstractContextManager[Bytes]: ...


class Weights:
    """A model's weights on a device, in buffers that belong to this object."""

    def __init__(self, device: Device, weights: WeightsMap) -> None:
        """Buffers for all of ``weights``, zero-filled. DeviceError: there is no memory for them."""
        self.map = weights
        self.buffers = device.buffers(weights.buffers, shared=False)

    def load(self, checkpoint: Checkpoint, progress: Progress = lambda n: None) -> None:
        """As ``load_weights``."""
        load_weights(checkpoint, self.map, self.buffers, progress)

    @property
    def nbytes(self) -> int:
        """Device bytes in use."""
        return sum(b.nbytes for b in self.buffers.values())

    def close(self) -> None:
        """Gives the memory back; nothing that reads it may be in flight."""
        free(self.buffers)


class _Loader:
    def __init__(self, checkpoint: Checkpoint, buffers: Mapping[str, Target], progress: Progress) -> None:
        self.checkpoint, self.buffers, self.progress = checkpoint, buffers, progress

    def _filling(self, view: View, start: int = 0, nbytes: int = -1) -> AbstractContextManager[Bytes]:
        """Bytes of a view, all of them or a part, to be written to."""
        return self.buffers[view.buffer].filling(view.offset + start, view.nbytes if nbytes < 0 else nbytes)

    def dense(self, dense: Dense) -> None:
        """A small tensor as float32; raw RMSNorm weights get the 1 that conversion would have added."""
        name = dense.module if dense.module.endswith(_UNSCALED) else dense.module + ".weight"
        value = self.checkpoint.read_float32(name)
        if self.checkpoint.raw_norms and _is_model_norm(dense.module):
            value = value + np.float32(1)
            if self.checkpoint.tensors[name].dtype == "BF16":
                value = bf16_to_f32(f32_to_bf16(value))  # a converted checkpoint holds the rounded sum
        with self._filling(dense.view) as out:
            out.view(np.float32)[:] = value.reshape(-1)
        self.progress(self.checkpoint.tensors[name].nbytes)

    def inverse_frequencies(self, weights: WeightsMap) -> None:
        """RoPE: theta^(-2i/rotary), i < rotary/2, in float32."""
        c = self.checkpoint.config
        i = np.arange(0, c.rotary_dim, 2, dtype=np.float64)
        with self._filling(weights.inv_freq) as out:
            out.view(np.float32)[:] = c.rope_theta ** (-i / c.rotary_dim)

    def matrix(self, m: Matrix) -> None:
        """All parts of a matrix, or of a stack of experts."""
        write = _WRITERS[m.layout]
        for first, count in self._expert_ranges(m):
            words, scales, biases = self._read_stack(m, first, count)
            with self._filling(m.view, first * m.expert_bytes, count * m.expert_bytes) as out:
                write(out.reshape(count, m.expert_bytes), words, scales, biases, m.spec.bits, m.spec.group_size)

    def _expert_ranges(self, m: Matrix) -> Iterator[tuple[int, int]]:
        step = max(1, _PART_BYTES // m.expert_bytes)
        for first in range(0, m.experts, step):
            yield first, min(step, m.experts - first)

    def _read_stack(self, m: Matrix, first: int, count: int) -> tuple[Any, Any, Any]:
        """(words, scales, biases) of experts [first, first+count), parts stacked by rows: [count, n, columns]."""
        groups = m.k // m.spec.group_size
        words = np.zeros((count, m.n, m.k * m.spec.bits // 32), np.uint32)
        scales, biases = (np.zeros((count, m.n, groups), np.uint16) for _ in range(2))
        for part in m.parts:
            for suffix, out in (("weight", words), ("scales", scales), ("biases", biases)):
                rows = slice(first, first + count) if m.experts > 1 else None
                self._read(f"{part.module}.{suffix}", rows, out[:, part.first : part.first + part.rows])
        return words, scales, biases

    def _read(self, name: str, rows: slice | None, out: Any) -> None:
        """Fills ``out`` [count, rows, columns] with a tensor, or some of its experts, without a copy where possible."""
        stored = _STORED[self.checkpoint.tensors[name].dtype]
        raw = out if stored == out.dtype and out.flags.c_contiguous else np.empty(out.shape, stored)
        self.checkpoint.read_into(name, raw, rows)
        self.progress(raw.nbytes)
        if raw is not out:
            out[:] = self._bf16_bits(name, raw) if raw.dtype.kind == "f" else raw

    def _bf16_bits(self, name: str, raw: Any) -> Any:
        narrow = f32_to_bf16(raw)
        if not np.array_equal(bf16_to_f32(narrow), raw.astype(np.float32)):
            info = self.checkpoint.tensors[name]
            raise CheckpointError(
                f"{info}: {info.dtype} values that bfloat16 cannot hold; Lily keeps scales and biases in bfloat16. "
                "Convert the model with dtype bfloat16."
            )
        return narrow


def _write_rows(out: Bytes, words: Any, scales: Any, biases: Any, bits: int, group: int) -> None:
    count = len(out)
    at = 0
    for section in (words, scales, biases):
        flat = section.reshape(count, -1).view(np.uint8)
        out[:, at : at + flat.shape[1]] = flat
        at = align(at + flat.shape[1])


def _write_rows16(out: Bytes, words: Any, scales: Any, biases: Any, bits: int, group: int) -> None:
    for one, w, s, b in zip(out, words, scales, biases, strict=True):
        rows, groups = s.shape
        pack_rows16(one.ctypes.data, w.ctypes.data, s.ctypes.data, b.ctypes.data, rows, groups, group * bits // 32)


_WRITERS = {"rows": _write_rows, "rows16": _write_rows16}


def pack_matrices(layout: str, words: Any, scales: Any, biases: Any, bits: int, group: int) -> Bytes:
    """Bytes [count, bytes of one] of matrices whose sections are C-contiguous [count, n, columns]."""
    count, n, columns = words.shape
    one = matrix_bytes(layout, n, columns * 32 // bits, QuantSpec(bits, group))
    out = np.zeros((count, one), np.uint8)
    _WRITERS[layout](out, words, scales, biases, bits, group)
    return out
