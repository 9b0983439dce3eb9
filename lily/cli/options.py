# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and their values checked before anything large is loaded."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from lily.cli.console import Console
from lily.device.kinds import KINDS
from lily.errors import CheckpointError, DeviceError, InvalidRequestError, LilyError
from lily.units import parse_size

if TYPE_CHECKING:
    from lily.engine import Engine

REAL_MODEL = "mlx-community/Qwen3.6-35B-A3B-4bit"
DEVICES = ("auto", *KINDS)

Command = Callable[..., None]

# Parameter of SamplingParams -> its flag.
_FLAGS = {
    "max_tokens": "--max-tokens",
    "temperature": "--temp",
    "top_p": "--top-p",
    "top_k": "--top-k",
    "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty",
    "presence_penalty": "--presence-penalty",
    "frequency_penalty": "--frequency-penalty",
    "logit_bias": "--logit-bias",
    "seed": "--seed",
    "stop": "--stop",
    "logprobs": "--logprobs",
}
# What the engine calls by another name than the command line, and no other text holds by chance.
_RENAMED = {name: flag for name, flag in _FLAGS.items() if "_" in name} | {
    "max_context": "--max-context",
    "cache_bytes": "--cache-bytes",
    "cache_disk_bytes": "--cache-disk-bytes",
    "stop_token_ids": "--extra-eos-token",
    "template_kwargs": "--chat-template-config",
}
_NAMES = re.compile(rf"(?<![\w./'\"-])({'|'.join(_RENAMED)})(?![\w./'\"-])")


@dataclass(frozen=True)
class EngineFlags:
    """Which engine to open."""

    model: str | None
    max_context: int | None
    device: str
    threads: int | None = None
    ablate: tuple[str, ...] = ()

    def open(self, console: Console, **options: Any) -> Engine:
        """Loads the model, with a progress bar on a terminal. options: further ones of the engine."""
        _require_build()
        if self.model is None:
            console.note(
                f"lily: using the small embedded model; for the real one: lily pull {REAL_MODEL}, then -m {REAL_MODEL}"
            )
        bar = console.progress(f"loading {self.model or 'the embedded model'}")
        try:
            return self.engine(progress=bar, **options)
        finally:
            if bar:
                bar.clear()

    def engine(self, **options: Any) -> Engine:
        """Loads the model without a word."""
        from lily.engine import Engine  # takes a while by itself, so a progress bar comes first

        return Engine(
            self.model, device=self.device, max_context=self.max_context, threads=self.threads, ablate=self.ablate,
            **options,
        )  # fmt: skip


@dataclass(frozen=True)
class SamplingFlags:
    """What was asked of the sampler; None is left to the checkpoint's defaults."""

    values: Mapping[str, Any]
    extra_eos_tokens: tuple[str, ...]

    def for_engine(self, engine: Engine) -> dict[str, Any]:
        """Keyword arguments of ``Engine.stream``; UsageError for an end token that the tokenizer does not know."""
        extra = [_token_id(engine, text) for text in self.extra_eos_tokens]
        return {**self.values, "stop_token_ids": extra}


def shell_text(text: str) -> str:
    """Type of an option whose value is text, as the shell gave it: UTF-8, whatever the locale."""
    try:
        return readable(text)
    except ValueError as error:
        raise click.BadParameter(f"is {error}") from None


def readable(text: str, encoding: str | None = None) -> str:
    """``text`` with the bytes that Python could not decode decoded after all; ValueError if they are not UTF-8.

    encoding: by which the text was decoded, if not as file names are.
    """
    if text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text):
        return text
    return utf8(text.encode(encoding or sys.getfilesystemencoding(), "surrogateescape"))


def utf8(data: bytes) -> str:
    """``data`` as text; ValueError says where it is none."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})") from None


def in_flags(error: LilyError) -> str:
    """The message with the engine's parameters as flags; one about a file is left as it is."""
    text = str(error)
    return text if isinstance(error, CheckpointError) else _NAMES.sub(lambda found: _RENAMED[found[1]], text)


def _require_build() -> None:
    """DeviceError in a checkout that was not built."""
    if importlib.util.find_spec("lily.run._submit") is None:
        raise DeviceError("Lily's compiled modules are missing: build them with `make build`")


def console_options(command: Command) -> Command:
    """--quiet and --verbose; the command gets ``console``."""

    @click.option("--quiet", is_flag=True, help="Say nothing but errors.")
    @click.option("--verbose", is_flag=True, help="Say more, and show where a bug is.")
    @click.pass_obj
    @wraps(command)
    def call(console: Console, /, *args: Any, quiet: bool, verbose: bool, **rest: Any) -> None:
        console.quiet, console.verbose = quiet, verbose
        command(*args, console=console, **rest)

    return call


def ablate_option(command: Command) -> Command:
    """--ablate; the command gets ``ablate``, a tuple of known names."""

    def split(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
        from lily.policy import ABLATIONS

        names = tuple(dict.fromkeys(name.strip() for value in values for name in value.split(",") if name.strip()))
        for name in names:
            if name not in ABLATIONS:
                raise click.BadParameter(f"unknown mechanism {name!r}; known: {', '.join(ABLATIONS)}")
        return names

    help = "Switch a mechanism off by name, to measure what it gains. Repeatable, or names joined by commas."
    return click.option("--ablate", multiple=True, metavar="NAME", callback=split, help=help)(command)


def model_options(command: Command) -> Command:
    """Model, context and device; the command gets ``flags``, an EngineFlags."""

    @click.option(
        "-m", "--model", metavar="MODEL",
        help="A folder, or ORG/NAME[@REVISION] in the Hugging Face cache. Without it: the small embedded model.",
    )  # fmt: skip
    @click.option(
        "-c", "--max-context", type=click.IntRange(min=1), metavar="TOKENS",
        help="Tokens of prompt and reply together. Default: what model and memory allow.",
    )  # fmt: skip
    @click.option("--device", type=click.Choice(DEVICES), default="auto", show_default=True)
    @wraps(command)
    def call(*args: Any, model: str | None, max_context: int | None, device: str, **rest: Any) -> None:
        if model == "":
            raise click.BadParameter("is empty", param_hint="--model")
        command(*args, flags=EngineFlags(model, max_context, device), **rest)

    return call


def engine_options(command: Command) -> Command:
    """``model_options``, threads and mechanisms to switch off, all of them in ``flags``."""

    @model_options
    @click.option("-t", "--threads", type=click.IntRange(min=1), metavar="N", help="Threads of the cpu device.")
    @ablate_option
    @wraps(command)
    def call(*args: Any, flags: EngineFlags, threads: int | None, ablate: tuple[str, ...], **rest: Any) -> None:
        command(*args, flags=replace(flags, threads=threads, ablate=ablate), **rest)

    return call


def sampling_options(command: Command) -> Command:
    """How a reply is drawn and ended; the command gets ``sampling``, a SamplingFlags."""

    @click.option(
        "-n", "--max-tokens", type=int, metavar="N", help="At most this many tokens a reply.  [default: no limit]"
    )
    @click.option("--temp", "--temperature", "temperature", type=float, metavar="T", help="0 is greedy.")
    @click.option("--top-p", type=float, metavar="P", help="Keep the likeliest tokens that make up P; 1 is off.")
    @click.option("--top-k", type=int, metavar="K", help="Keep the K likeliest tokens; 0 is off.")
    @click.option("--min-p", type=float, metavar="P", help="Keep tokens P times as likely as the likeliest.")
    @click.option("--repetition-penalty", type=float, metavar="X", help="Of the last 20 tokens; 1 is off.")
    @click.option("--presence-penalty", type=float, metavar="X", help="Of tokens that the reply has; 0 is off.")
    @click.option("--frequency-penalty", type=float, metavar="X", help="The same, once per occurrence.")
    @click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=BIAS",
        help="Added to the logit of a token id. Repeatable, or one JSON object.",
        callback=_logit_bias,
    )
    @click.option("--seed", type=int, metavar="N", help="Same seed, same reply. Default: another one each time.")
    @click.option(
        "--stop", type=shell_text, multiple=True, metavar="TEXT", help="Ends the reply before TEXT. Repeatable."
    )
    @click.option(
        "--extra-eos-token",
        type=shell_text,
        multiple=True,
        metavar="TOKEN",
        help="A further token that ends it. Repeatable.",
    )
    @wraps(command)
    def call(*args: Any, extra_eos_token: tuple[str, ...], **rest: Any) -> None:
        values = {name: rest.pop(name) for name in _FLAGS if name in rest}
        command(*args, sampling=_checked(values, extra_eos_token), **rest)

    return call  # fmt: skip


def system_option(command: Command) -> Command:
    return click.option(
        "--system-prompt",
        "--system",
        "system_prompt",
        type=shell_text,
        metavar="TEXT",
        help="System message of the chat.",
    )(command)


def nbytes(context: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    """Callback of an option whose value is a number of bytes: 8000000000, 8GB or 8GiB."""
    if text is None:
        return None
    value = parse_size(text)
    if value is None or value < 1:
        raise click.BadParameter(f"{text!r}: expected bytes: 8000000000, 8GB (10^9) or 8GiB (2^30)")
    return value


def json_object(context: click.Context, parameter: click.Parameter, text: str | None) -> dict[str, Any] | None:
    """Callback of an option whose value is a JSON object."""
    return None if text is None else _object(text)


def chat_template_options(command: Command) -> Command:
    """--chat-template-config and --no-thinking; the command gets ``template_config``, None if neither is given."""

    @click.option(
        "--chat-template-config", "template_config", type=shell_text, metavar="JSON", callback=json_object,
        help="Options of the chat template, for instance '{\"enable_thinking\": false}'.",
    )  # fmt: skip
    @click.option("--no-thinking", is_flag=True, help="Ask the chat template for a reply without reasoning.")
    @wraps(command)
    def call(*args: Any, template_config: dict[str, Any] | None, no_thinking: bool, **rest: Any) -> None:
        if no_thinking:
            if "enable_thinking" in (template_config or {}):
                raise click.UsageError(
                    "--no-thinking sets enable_thinking, and so does --chat-template-config; leave out one of them"
                )
            template_config = {**(template_config or {}), "enable_thinking": False}
        command(*args, template_config=template_config, **rest)

    return call


def reasoning_option(command: Command) -> Command:
    """--show-reasoning and --hide-reasoning; the command gets ``reasoning``, None if neither is given."""
    return click.option(
        "--show-reasoning/--hide-reasoning", "reasoning", default=None,
        help="Write what the model thinks before it answers.  [default: on a terminal]",
    )(command)  # fmt: skip


def _checked(values: dict[str, Any], extra_eos_tokens: tuple[str, ...]) -> SamplingFlags:
    from lily.sampling import make_params

    try:
        make_params({}, values)
    except InvalidRequestError as error:
        message = str(error)
        name = next((name for name in _FLAGS if message.startswith(name)), "")
        raise click.UsageError(_FLAGS.get(name, "") + message.removeprefix(name)) from None
    if "" in extra_eos_tokens:
        raise click.BadParameter("is empty", param_hint="--extra-eos-token")
    return SamplingFlags(values, extra_eos_tokens)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise click.BadParameter("expected a JSON object: {…}")
    return value


def _logit_bias(
    context: click.Context, parameter: click.Parameter, items: tuple[str, ...]
) -> dict[int, float] | None:  # fmt: skip
    bias: dict[int, float] = {}
    for item in items:
        pairs = _object(item).items() if item.lstrip().startswith("{") else [item.partition("=")[::2]]
        for id, value in pairs:
            try:
                bias[int(id)] = float(value)
            except (TypeError, ValueError):
                raise click.BadParameter(f"{item!r}: expected ID=BIAS with a token id and a number") from None
            if int(id) < 0 or not math.isfinite(bias[int(id)]):
                raise click.BadParameter(f"{item!r}: expected an id from 0 and a finite number")
    return bias or None


def _token_id(engine: Engine, text: str) -> int:
    id = engine.tokenizer.id_of(text)
    if id is None:
        ids = engine.tokenizer.encode(text)
        if len(ids) != 1:
            raise click.BadParameter(f"{text!r} is no single token of this model", param_hint="--extra-eos-token")
        id = ids[0]
    return id
