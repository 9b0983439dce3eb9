# SPDX-License-Identifier: Apache-2.0
"""``lily generate``: one reply, on standard output as it is written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lily.cli.console import Console, Reading
from lily.cli.demands import demand_options
from lily.cli.options import (
    EngineFlags,
    SamplingFlags,
    chat_template_options,
    console_options,
    engine_options,
    reasoning_option,
    sampling_options,
    shell_text,
    system_option,
)
from lily.cli.prompt_cache import prompt_cache, prompt_cache_option
from lily.cli.prompts import begin_reply, read_prompt
from lily.cli.shown import ShownReply

if TYPE_CHECKING:
    from lily.engine import Engine
    from lily.streaming import Completion, Stream, TokenLogprob


@click.command()
@click.argument("positional", type=shell_text, required=False, metavar="[PROMPT]")
@click.option("-p", "--prompt", type=shell_text, metavar="TEXT", help="The prompt, as it is; - reads standard input.")
@click.option("-f", "--file", metavar="FILE", help="A file that holds the prompt.")
@system_option
@click.option(
    "--prefill-response",
    type=shell_text,
    metavar="TEXT",
    help="The answer begins with this; the reply goes on after it.",
)
@click.option("--ignore-chat-template", is_flag=True, help="Continue the prompt itself instead of answering it.")
@click.option("--echo", is_flag=True, help="Write the prompt first; with --ignore-chat-template.")
@chat_template_options
@demand_options
@reasoning_option
@engine_options
@sampling_options
@click.option(
    "--logprobs", type=int, metavar="N", help="Report log-probabilities, also of the N likeliest tokens (0 to 20)."
)
@prompt_cache_option
@click.option("--json", "as_json", is_flag=True, help="Write one JSON object instead of the text.")
@console_options
def generate(
    console: Console, flags: EngineFlags, sampling: SamplingFlags, positional: str | None, prompt: str | None,
    file: str | None, system_prompt: str | None, prefill_response: str | None, ignore_chat_template: bool, echo: bool,
    template_config: dict[str, Any] | None, demands: dict[str, Any], reasoning: bool | None, as_json: bool,
    prompt_cache_file: Path | None,
) -> None:  # fmt: skip
    """Write a reply to a prompt.

    The prompt is an argument, -p TEXT, -f FILE, or comes through a pipe. It is put into the checkpoint's chat template,
    if there is one. Sampling defaults are the checkpoint's.
    """
    if ignore_chat_template and (system_prompt or prefill_response or template_config or demands):
        raise click.UsageError(
            "--ignore-chat-template takes the prompt as it is; leave out --system-prompt, --prefill-response, "
            "--chat-template-config, --no-thinking, --reasoning-budget and --json-schema, or it"
        )
    if echo and (as_json or not ignore_chat_template):
        raise click.UsageError(
            "--echo writes a prompt that the reply continues: with --ignore-chat-template, not --json"
        )
    text = read_prompt(prompt, positional, file)
    with flags.open(console) as engine, prompt_cache(console, engine, prompt_cache_file):
        describe(console, engine)
        how = {**sampling.for_engine(engine), "on_prompt": (bar := console.reading())}
        reply = (
            engine.stream(engine.tokenizer.encode(text), **how)
            if ignore_chat_template
            else begin_reply(engine, text, system_prompt, prefill_response, template_config, demands, **how)
        )
        shown = None if as_json else ShownReply(console, reasoning)
        completion = _read(reply, bar, shown, text if echo else "")
        if shown is None:
            console.write(json.dumps(_document(engine, completion), ensure_ascii=False) + "\n")
        else:
            shown.end()
            if completion.logprobs is not None:
                _report_logprobs(console, engine, completion.logprobs)
        if completion.finish_reason == "length":
            console.note(cut_off(completion, sampling))
        statistics(console, completion)


def cut_off(completion: Completion, sampling: SamplingFlags) -> str:
    """A remark on a reply that the model has not ended, with the flag that moves the limit."""
    flag = "--max-tokens" if completion.completion_tokens == sampling.values["max_tokens"] else "--max-context"
    where = "" if completion.text or not completion.reasoning else ", in the reasoning"
    return f"(cut off after {completion.completion_tokens} tokens{where}; {flag})"


def describe(console: Console, engine: Engine) -> None:
    """What the checkpoint lacks; for --verbose, what was loaded."""
    from lily.device.description import rows

    info = engine.info
    for note in info["notes"]:
        console.note(f"lily: {note}")
    console.detail(f"Model: {info['model']} ({info['path']}), context {info['max_context']} tokens")
    console.detail(f"Device: {info['device']['name']}")
    for row in rows(info["device"]):
        console.detail(f"  {row}")


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
    console.note(f"Seed: {completion.seed}")


def _read(reply: Stream, bar: Reading | None, shown: ShownReply | None, beginning: str) -> Completion:
    completion = None
    try:
        with reply:
            if shown:
                shown.text(beginning)
            for chunk in reply:
                if shown:
                    shown.chunk(chunk)
                completion = chunk.completion or completion
    finally:
        if bar:
            bar.clear()
    assert completion is not None
    return completion


def _document(engine: Engine, completion: Completion) -> dict[str, Any]:
    from lily.device.host_memory import peak_bytes

    result = asdict(completion)
    if completion.logprobs is not None:
        result["logprobs"] = [_logprob(engine, entry) for entry in completion.logprobs]
    info = engine.info
    return {
        **result,
        "model": {key: info[key] for key in ("model", "path", "revision")},
        "device": info["device"],
        "peak_memory_bytes": peak_bytes(),
    }


def _logprob(engine: Engine, entry: TokenLogprob) -> dict[str, Any]:
    def token(id: int, logprob: float) -> dict[str, Any]:
        return {"id": id, "token": engine.tokenizer.decode([id]), "logprob": logprob}

    return {**token(entry.token_id, entry.logprob), "top": [token(*pair) for pair in entry.top]}


def _report_logprobs(console: Console, engine: Engine, entries: Sequence[TokenLogprob]) -> None:
    """A line for each token."""
    for entry in entries:
        pairs = [(entry.token_id, entry.logprob), *entry.top]
        console.aside("\t".join(f"{engine.tokenizer.decode([id])!r} {value:.4f}" for id, value in pairs))
