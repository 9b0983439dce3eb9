# SPDX-License-Identifier: Apache-2.0
"""``lily info``: versions, the model, the memory it needs and the device, without reading a weight."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from lily._version import __version__
from lily.cli.console import Console
from lily.cli.options import EngineFlags, console_options, engine_options
from lily.errors import LilyError
from lily.units import size

if TYPE_CHECKING:
    from lily.checkpoint.checkpoint import Checkpoint
    from lily.run.budget import Budget

_PACKAGES = ("numpy", "tokenizers", "click", "jinja2", "huggingface_hub")


@click.command()
@engine_options
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead of lines.")
@console_options
def info(console: Console, flags: EngineFlags, as_json: bool) -> None:
    """Show versions, model, memory and device.

    Reads a checkpoint's headers, not its weights. What does not work is said, and makes the exit code 1.
    """
    from lily.checkpoint.resolve import hub_cache

    report: dict[str, Any] = {"lily": __version__, "python": platform.python_version(), "platform": platform.platform()}
    report["packages"] = {name: _version(name) for name in _PACKAGES}
    try:
        report["hub_cache"] = str(hub_cache())
    except LilyError:
        report["hub_cache"] = None  # said with the model, where it needs one
    budget = None
    try:
        report["device"], budget = _device(flags)
    except LilyError as error:
        report["device"] = {"error": str(error)}
    try:
        report |= _model(flags, budget)
    except LilyError as error:
        report["model"] = {"error": str(error)}
    named = (
        ("model", "device") if "error" in report["device"] else ("model", "context", "device")
    )  # one cause, one error
    problems = [report[name]["error"] for name in named if "error" in report.get(name, {})]
    console.write(json.dumps(report, ensure_ascii=False) + "\n" if as_json else "\n".join(_lines(report)) + "\n")
    for problem in problems:
        console.error(problem)
    if problems:
        raise click.exceptions.Exit(1)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _model(flags: EngineFlags, budget: Budget | None) -> dict[str, Any]:
    from lily.checkpoint.checkpoint import Checkpoint
    from lily.checkpoint.resolve import resolve_model
    from lily.sampling import CHECKPOINT_DEFAULTS, SamplingParams, checkpoint_defaults
    from lily.text.template import ChatTemplate
    from lily.text.tokenizer import Tokenizer

    found = resolve_model(flags.model)
    with Checkpoint.open(found.path) as checkpoint:
        c = checkpoint.config
        tokenizer = Tokenizer.from_dir(found.path, c.vocab_size)
        template = ChatTemplate.from_dir(found.path)
        model = {
            "name": found.name,
            "path": str(found.path),
            "revision": found.revision,
            "embedded": found.embedded,
            "layers": c.num_layers,
            "attention_layers": c.layer_types.count("full_attention"),
            "hidden_size": c.hidden_size,
            "experts": c.num_experts,
            "experts_per_token": c.experts_per_token,
            "vocab_size": c.vocab_size,
            "tokens": tokenizer.num_tokens,
            "chat_template": template.available,
            "quantization": _quantization(checkpoint),
            "text_tensors": checkpoint.text_tensor_count,
            "skipped_tensors": len(checkpoint.skipped),
            "bytes": checkpoint.total_bytes,
            "notes": [*checkpoint.notes, *template.notes],
        }
        used = SamplingParams(**checkpoint_defaults(checkpoint.generation_config))
        return {
            "model": model,
            "sampling_defaults": {name: getattr(used, name) for name in CHECKPOINT_DEFAULTS},
            "context": _context(flags, checkpoint, found.name, budget),
        }


def _quantization(checkpoint: Checkpoint) -> dict[str, int]:
    """Bits and group size in words -> number of modules."""
    from lily.checkpoint.tensors import quantized_modules

    counts: dict[str, int] = {}
    for module in quantized_modules(checkpoint.config):
        spec = checkpoint.config.quantization_of(module)
        key = f"{spec.bits} bits, groups of {spec.group_size}"
        counts[key] = counts.get(key, 0) + 1
    return counts


def _context(flags: EngineFlags, checkpoint: Checkpoint, name: str, budget: Budget | None) -> dict[str, Any]:
    """The context that an engine would have here, and the memory for it."""
    from lily.device.kinds import choose_device
    from lily.plan.weights_map import map_weights
    from lily.policy import policy_for
    from lily.run.budget import plan_context

    config = checkpoint.config
    policy = policy_for(choose_device(flags.device), flags.ablate)
    if budget is None:
        return {"limit": config.max_position_embeddings, "error": "unknown: the device cannot be used"}
    weights = map_weights(config, policy)
    sizes: dict[str, Any] = {"limit": config.max_position_embeddings, "available_bytes": budget.total}
    try:
        tokens, memory = plan_context(config, policy, weights, budget=budget, max_context=flags.max_context, name=name)
    except LilyError as error:
        return {**sizes, "error": str(error)}
    return {"max_context": tokens, **sizes, "memory": {**asdict(memory), "total": memory.total}}


def _device(flags: EngineFlags) -> tuple[dict[str, Any], Budget]:
    """What the device that an engine would open says about itself, and the memory it has."""
    from lily.checks.tensor_check import open_checked
    from lily.device.description import described
    from lily.device.kinds import choose_device
    from lily.run.budget import Budget

    name = choose_device(flags.device)
    with open_checked(flags.device, **_options(flags, name)) as device:
        return {"name": name, **described(device.info)}, Budget.of(device)


def _options(flags: EngineFlags, device: str) -> dict[str, object]:
    """What an engine would open the device with; without what ``lily tune`` chose if the model is not here."""
    from lily.checkpoint.resolve import resolve_model
    from lily.device.kinds import kind_of
    from lily.device.tuned import opening_options

    try:
        return opening_options(device, resolve_model(flags.model).key, flags.threads)
    except LilyError:
        return kind_of(device).options(flags.threads)


def _lines(report: dict[str, Any]) -> list[str]:
    from lily.device.description import rows

    packages = ", ".join(f"{name} {version}" for name, version in report["packages"].items() if version)
    out = [
        f"lily {report['lily']}, Python {report['python']}, {report['platform']}",
        f"packages: {packages}",
        f"models are looked up in {report['hub_cache'] or 'no folder: set HF_HOME or HF_HUB_CACHE'}",
        "",
    ]
    model = report["model"]
    if "error" in model:
        out.append("model: cannot be used, see below")
    else:
        out += _model_lines(model) + _context_lines(report["context"])
        out.append("sampling defaults: " + ", ".join(f"{k} {v}" for k, v in report["sampling_defaults"].items()))
    device = report["device"]
    if "error" in device:
        return [*out, "device: cannot be used, see below"]
    return [*out, f"device: {device['name']}", *(f"  {row}" for row in rows(device))]


def _model_lines(m: dict[str, Any]) -> list[str]:
    revision = f", revision {m['revision']}" if m["revision"] else ""
    kinds = "; ".join(f"{count} modules of {spec}" for spec, count in m["quantization"].items())
    return [
        f"model: {m['name']}{' (embedded)' if m['embedded'] else ''}{revision}",
        f"  {m['path']}",
        f"  {m['layers']} layers ({m['attention_layers']} attention), hidden size {m['hidden_size']}, "
        f"{m['experts_per_token']} of {m['experts']} experts, {m['tokens']} tokens in {m['vocab_size']} rows, "
        f"{'with' if m['chat_template'] else 'without'} chat template",
        f"  {m['text_tensors']} text tensors, {size(m['bytes'])} ({kinds}); {m['skipped_tensors']} others skipped",
        *(f"  {note}" for note in m["notes"]),
    ]


def _context_lines(context: dict[str, Any]) -> list[str]:
    if "error" in context:
        return ["context: " + ("none fits, see below" if "available_bytes" in context else "unknown without a device")]
    m = context["memory"]
    parts = ("weights", "state", "kv", "scratch", "snapshots")
    return [
        f"context: {context['max_context']} tokens (the model's limit is {context['limit']}), "
        f"{m['kv_per_token']} bytes each",
        "memory: " + " + ".join(f"{name} {size(m[name])}" for name in parts)
        + f" = {size(m['total'])}, available {size(context['available_bytes'])}",
    ]  # fmt: skip
