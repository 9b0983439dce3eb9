# SPDX-License-Identifier: Apache-2.0
"""The model in plain numpy, float32 or float64: what every device is held to.

Qwen3.6-35B-A3B as mlx-lm computes it, the simple way: dense matrices, one token at a
time where the formula is recurrent, no fusion.  It reads a checkpoint with its own few lines, so that a mistake in
``lily.checkpoint.checkpoint`` cannot hide behind itself.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

Array = Any


def bf16_to_f32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_bf16(x: Array) -> Array:
    """Nearest bfloat16 (ties to even), as float32."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def read_safetensors(path: Path) -> dict[str, Array]:
    """All tensors of one file; BF16 as float32, U32 as it is."""
    blob = path.read_bytes()
    (n,) = struct.unpack_from("<Q", blob)
    out = {}
    for name, entry in json.loads(blob[8 : 8 + n]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        raw = np.frombuffer(blob[8 + n + begin : 8 + n + end], np.uint8)
        kind = {"BF16": np.uint16, "F32": np.float32, "F16": np.float16, "U32": np.uint32}[entry["dtype"]]
        value = raw.view(kind).reshape(entry["shape"])
        out[name] = bf16_to_f32(value) if entry["dtype"] == "BF16" else value
    return out


def unpack(words: Array, bits: int) -> Array:
    """uint32 words [..., n] → unsigned integers [..., n·32/bits], lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words[..., None] >> shifts) & np.uint32((1 << bits) - 1)).reshape(*words.shape[:-1], -1)


def dequantize(words: Array, scales: Array, biases: Array, bits: int, group: int, dtype: Any = np.float32) -> Array:
    """w = scale·q + bias per group of columns."""
    q = unpack(words, bits).astype(dtype)
    q = q.reshape(*q.shape[:-1], -1, group)
    return (q * scales[..., None].astype(dtype) + biases[..., None].astype(dtype)).reshape(*q.shape[:-2], -1)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def softplus(x: Array) -> Array:
    return np.logaddexp(x, 0)


def rmsnorm(x: Array, weight: Array | None, eps: float) -> Array:
    y = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
    return y if weight is None else y * weight


class Reference:
    """The forward pass of a small checkpoint. ``dtype`` float64 gives a yardstick for float32 devices."""

    def __init__(self, folder: Path, dtype: Any = np.float32) -> None:
        self.dtype = dtype
        config = json.loads((folder / "config.json").read_text())
        self.config = c = config.get("text_config", config)
        self.quantization = config["quantization"]
        self.tensors: dict[str, Array] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            for name, value in read_safetensors(file).items():
                if name.startswith("language_model."):
                    self.tensors[name.removeprefix("language_model.").removeprefix("model.")] = value
        self.eps = c["rms_norm_eps"]
        rope = c["rope_parameters"]
        self.rotary = int(c["head_dim"] * rope["partial_rotary_factor"])
        self.inv_freq = rope["rope_theta"] ** (-np.arange(0, self.rotary, 2, dtype=np.float64) / self.rotary)
        self._dense: dict[str, Array] = {}

    def vector(self, name: str) -> Array:
        return self.tensors[name].astype(self.dtype)

    def matrix(self, module: str) -> Array:
        """[..., out, in] of a quantised module."""
        if module not in self._dense:
            spec = dict(self.quantization)
            for prefix in ("language_model.model.", "language_model.", "model.", ""):
                if isinstance(self.quantization.get(prefix + module), dict):
                    spec.update(self.quantization[prefix + module])
            self._dense[module] = dequantize(
                self.tensors[f"{module}.weight"], self.tensors[f"{module}.scales"], self.tensors[f"{module}.biases"],
                spec["bits"], spec["group_size"], self.dtype,
            )  # fmt: skip
        return self._dense[module]

    def linear(self, module: str, x: Array) -> Array:
        return x @ self.matrix(module).T

    def new_cache(self) -> list[dict[str, Array]]:
        c = self.config
        channels = (
            2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
            + c["linear_num_value_heads"] * c["linear_value_head_dim"]
        )
        out: list[dict[str, Array]] = []
        for i in range(c["num_hidden_layers"]):
            if self.is_attention(i):
                empty = np.zeros((0, c["num_key_value_heads"], c["head_dim"]), self.dtype)
                out.append({"k": empty, "v": empty})
            else:
                shape = (c["linear_num_value_heads"], c["linear_value_head_dim"], c["linear_key_head_dim"])
                out.append(
                    {
                        "conv": np.zeros((c["linear_conv_kernel_dim"] - 1, channels), self.dtype),
                        "state": np.zeros(shape, self.dtype),
                    }
                )
        return out

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.config.get("full_attention_interval", 4) == 0

    def attention(self, p: str, x: Array, cache: dict[str, Array]) -> Array:
        c, rows = self.config, len(x)
        hq, hkv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        qg = self.linear(p + "q_proj", x).reshape(rows, hq, 2, d)
        q, gate = qg[:, :, 0], qg[:, :, 1]
        k, v = (self.linear(p + n, x).reshape(rows, hkv, d) for n in ("k_proj", "v_proj"))
        positions = len(cache["k"]) + np.arange(rows)
        angle = positions[:, None, None] * self.inv_freq
        cos, sin, half = np.cos(angle), np.sin(angle), self.rotary // 2

        def rotate(z: Array) -> Array:
            a, b = z[..., :half], z[..., half : self.rotary]
            return np.concatenate([a * cos - b * sin, b * cos + a * sin, z[..., self.rotary :]], -1).astype(self.dtype)

        q = rotate(rmsnorm(q, self.vector(p + "q_norm.weight"), self.eps))
        k = rotate(rmsnorm(k, self.vector(p + "k_norm.weight"), self.eps))
        cache["k"], cache["v"] = np.concatenate([cache["k"], k]), np.concatenate([cache["v"], v])
        out = np.empty((rows, hq, d), self.dtype)
        for head in range(hq):
            keys, values = cache["k"][:, head // (hq // hkv)], cache["v"][:, head // (hq // hkv)]
            scores = q[:, head] @ keys.T / np.sqrt(d)
            scores = np.where(np.arange(len(keys)) <= positions[:, None], scores, -np.inf)
            e = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = e / e.sum(-1, keepdims=True) @ values
        return self.linear(p + "o_proj", (out * sigmoid(gate)).reshape(rows, -1))

    def gdn(self, p: str, x: Array, cache: dict[str, Array]) -> Array:
        c, rows = self.config, len(x)
        hk, hv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        dk, dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        window = np.concatenate([cache["conv"], self.linear(p + "in_proj_qkv", x)])
        z = self.linear(p + "in_proj_z", x).reshape(rows, hv, dv)
        beta = sigmoid(self.linear(p + "in_proj_b", x))
        decay = np.exp(
            -np.exp(self.vector(p + "A_log")) * softplus(self.linear(p + "in_proj_a", x) + self.vector(p + "dt_bias"))
        )
        weight = self.vector(p + "conv1d.weight")
        weight = weight.reshape(weight.shape[0], -1)
        taps = weight.shape[1]
        cache["conv"] = window[-(taps - 1) :]
        y = silu(sum(window[j : j + rows] * weight[:, j] for j in range(taps)))
        q, k = (y[:, i * hk * dk : (i + 1) * hk * dk].reshape(rows, hk, dk) for i in (0, 1))
        v = y[:, 2 * hk * dk :].reshape(rows, hv, dv)
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(dk)
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        q, k = (np.repeat(a, hv // hk, 1) for a in (q, k))
        state, out = cache["state"], np.empty((rows, hv, dv), self.dtype)  # [value head, Dv, Dk]
        for t in range(rows):
            state = state * decay[t][:, None, None]
            error = (v[t] - np.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
            state = state + error[:, :, None] * k[t][:, None, :]
            out[t] = np.einsum("hvk,hk->hv", state, q[t])
        cache["state"] = state.astype(self.dtype)
        normed = rmsnorm(out, self.vector(p + "norm.weight"), self.eps)
        return self.linear(p + "out_proj", (silu(z) * normed).reshape(rows, -1))

    def swiglu(self, p: str, x: Array) -> Array:
        return self.linear(p + "down_proj", silu(self.linear(p + "gate_proj", x)) * self.linear(p + "up_proj", x))

    def moe(self, p: str, x: Array) -> Array:
        c = self.config
        logits = self.linear(p + "gate", x)
        e = np.exp(logits - logits.max(-1, keepdims=True))
        probabilities = e / e.sum(-1, keepdims=True)
        chosen = np.argsort(-logits, -1, kind="stable")[:, : c["num_experts_per_tok"]]
        weights = np.take_along_axis(probabilities, chosen, -1)
        if c.get("norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdims=True)
        gate, up, down = (self.matrix(f"{p}switch_mlp.{n}_proj") for n in ("gate", "up", "down"))
        out = np.zeros_like(x)
        for expert in np.unique(chosen):
            rows, place = np.nonzero(chosen == expert)
            hidden = silu(x[rows] @ gate[expert].T) * (x[rows] @ up[expert].T)
            out[rows] += weights[rows, place, None] * (hidden @ down[expert].T)
        return out + sigmoid(self.linear(p + "shared_expert_gate", x)) * self.swiglu(p + "shared_expert.", x)

    def forward(self, tokens: Any, cache: list[dict[str, Array]]) -> Array:
        """Logits [rows, vocab]; the caches advance."""
        x = self.matrix("embed_tokens")[np.asarray(tokens)]
        for i in range(self.config["num_hidden_layers"]):
            p = f"layers.{i}."
            h = rmsnorm(x, self.vector(p + "input_layernorm.weight"), self.eps)
            x = x + (
                self.attention(p + "self_attn.", h, cache[i])
                if self.is_attention(i)
                else self.gdn(p + "linear_attn.", h, cache[i])
            )
            x = x + self.moe(p + "mlp.", rmsnorm(x, self.vector(p + "post_attention_layernorm.weight"), self.eps))
        x = rmsnorm(x, self.vector("norm.weight"), self.eps)
        head = "embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"
        return self.linear(head, x)


class _Bf16Cache(dict[str, Array]):
    """A layer's cache that keeps K and V as devices do."""

    def __setitem__(self, key: str, value: Array) -> None:
        super().__setitem__(key, round_bf16(value) if key in ("k", "v") else value)


class DeviceReference(Reference):
    """The reference with the devices' caches; it notes how near each row comes to a tie between experts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.leads: list[Array] = []  # by layer [rows]: of the last chosen expert's logit over the first left out

    def new_cache(self) -> list[dict[str, Array]]:
        return [_Bf16Cache(layer) for layer in super().new_cache()]

    def linear(self, module: str, x: Array) -> Array:
        y = super().linear(module, x)
        if module.endswith("mlp.gate"):
            active = self.config["num_experts_per_tok"]
            best = -np.sort(-y, -1)
            left_out = best[:, active] if active < best.shape[1] else -np.inf
            self.leads.append(best[:, active - 1] - left_out)
        return y
