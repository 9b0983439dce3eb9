# SPDX-License-Identifier: Apache-2.0
"""`lily generate`: one reply, on standard output as it is written."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from lily.cli.console import Console
from lily.cli.options import (
    EngineFlags,
    SamplingFlags,
    chat_template_option,
    console_options,
    engine_options,
    sampling_options,
)
from lily.cli.prompts import prompt_tokens, read_prompt

if TYPE_CHECKING:
    from lily.engine import Engine
    from lily.streaming import Completion, TokenLogprob


@click.command()
@click.option("-p", "--prompt", required=True, metavar="TEXT", help="The prompt, as it is; - reads standard input.")
@click.option("--system-prompt", metavar="TEXT", help="System message of the chat.")
@click.option("--prefill-response", metavar="TEXT", help="The answer begins with this; the reply goes on after it.")
@click.option("--ignore-chat-template", is_flag=True, help="Continue the prompt itself instead of answering it.")
@chat_template_option
@engine_options
@sampling_options(256, "At most this many tokens.  [default: 256]")
@click.option(
    "--logprobs", type=int, metavar="N", help="Report log-probabilities, also of the N likeliest tokens (0 to 20)."
)
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead of the text.")
@console_options
def generate(
    console: Console, flags: EngineFlags, sampling: SamplingFlags, prompt: str, system_prompt: str | None,
    prefill_response: str | None, ignore_chat_template: bool, template_config: dict[str, Any] | None, as_json: bool,
) -> None:  # fmt: skip
    """Write a reply to a prompt.

    The prompt is put into the checkpoint's chat template, if there is one. Sampling defaults are the checkpoint's.
    """
    if ignore_chat_template and (system_prompt or prefill_response or template_config):
        raise click.UsageError(
            "--ignore-chat-template takes the prompt as it is; leave out --system-prompt, --prefill-response and "
            "--chat-template-config, or it"
        )
    text = read_prompt(prompt)
    with flags.open(console) as engine:
        describe(console, engine)
        tokens: Sequence[int] = (
            engine.tokenizer.encode(text)
            if ignore_chat_template
            else prompt_tokens(engine, text, system_prompt, prefill_response, template_config)
        )
        arguments = {**sampling.for_engine(engine), "seed": used_seed(sampling)}
        completion = _reply(engine, tokens, arguments, console, show=not as_json)
        if as_json:
            console.write(json.dumps(_result(engine, completion, arguments["seed"]), ensure_ascii=False) + "\n")
        else:
            console.end_line()
            if completion.logprobs is not None:
                _report_logprobs(engine, completion.logprobs)
        statistics(console, completion)


def used_seed(sampling: SamplingFlags) -> int:
    """The given seed, or one drawn here so that it can be reported."""
    from lily.sampling import SamplingParams

    seed = SamplingParams(seed=sampling.values["seed"]).with_seed().seed
    assert seed is not None
    return seed


def describe(console: Console, engine: Engine) -> None:
    """What the checkpoint lacks; for --verbose, what was loaded."""
    info = engine.info
    for note in info["notes"]:
        console.note(f"lily: {note}")
    console.detail(f"Model: {info['model']} ({info['path']}), context {info['max_context']} tokens")
    console.detail("Device: " + ", ".join(f"{key} {value}" for key, value in info["device"].items()))


def statistics(console: Console, completion: Completion) -> None:
    """The lines that users of mlx-lm know."""
    from lily.device.host_memory import peak_bytes

    t = completion.timings
    cached = f" ({completion.cached_tokens} cached)" if completion.cached_tokens else ""
    console.note("==========")
    console.note(f"Prompt: {completion.prompt_tokens} tokens{cached}, {t.prompt_tokens_per_second:.3f} tokens-per-sec")
    console.note(
        f"Generation: {completion.completion_tokens} tokens, {t.generation_tokens_per_second:.3f} tokens-per-sec"
    )
    console.note(f"Peak memory: {peak_bytes() / 1e9:.3f} GB")


def _reply(
    engine: Engine, tokens: Sequence[int], arguments: dict[str, Any], console: Console, *, show: bool
) -> Completion:
    completion = None
    with engine.stream(tokens, **arguments) as pieces:
        for chunk in pieces:
            if show:
                console.write(chunk.text)
            completion = chunk.completion or completion
    assert completion is not None
    return completion


def _result(engine: Engine, completion: Completion, seed: int) -> dict[str, Any]:
    from lily.device.host_memory import peak_bytes

    result = asdict(completion)
    if completion.logprobs is not None:
        result["logprobs"] = [_logprob(engine, entry) for entry in completion.logprobs]
    info = engine.info
    return {
        **result,
        "seed": seed,
        "model": {key: info[key] for key in ("model", "path", "revision")},
        "device": info["device"],
        "peak_memory_bytes": peak_bytes(),
    }


def _logprob(engine: Engine, entry: TokenLogprob) -> dict[str, Any]:
    def token(id: int, logprob: float) -> dict[str, Any]:
        return {"id": id, "token": engine.tokenizer.decode([id]), "logprob": logprob}

    return {**token(entry.token_id, entry.logprob), "top": [token(*pair) for pair in entry.top]}


def _report_logprobs(engine: Engine, entries: Sequence[TokenLogprob]) -> None:
    """A line for each token. They were asked for by name, so --quiet does not silence them."""
    for entry in entries:
        pairs = [(entry.token_id, entry.logprob), *entry.top]
        print("\t".join(f"{engine.tokenizer.decode([id])!r} {value:.4f}" for id, value in pairs), file=sys.stderr)
