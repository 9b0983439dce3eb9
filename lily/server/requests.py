# SPDX-License-Identifier: Apache-2.0
"""A request as every dialect makes it: checked, and in the engine's words; and how the engine is asked.

What all dialects say in the same way (how a reply is drawn) is read here.  Not handled: what only one of them has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from lily.errors import show
from lily.kernels import MAX_BIAS, MAX_TOP_LOGPROBS
from lily.run.requests import Scheduling
from lily.server.errors import wrong
from lily.server.fields import Fields
from lily.streaming import Stream
from lily.text.demands import NONE, Demands, Tools
from lily.text.template import END_THINK, Message, normalise_messages, reply_start, starts_in_reasoning

if TYPE_CHECKING:
    from lily.engine import Engine, OnPrompt
    from lily.server.settings import Settings

EFFORTS = {"none": 0, "minimal": 512, "low": 2048, "medium": 8192, "high": 32768, "xhigh": None}
"""Tokens that reasoning may have; None: any number. With none the template is told not to reason at all."""
MAX_PRIORITY = 1 << 31
MAX_REPLIES = 8
SEEDS = 1 << 64

_SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "stop_token_ids",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What a dialect has to know of the model and the server in order to check a request.

    template_options: the variables that the chat template reads; ids: ids of tokens that can be drawn are below it.
    """

    template_options: frozenset[str]
    ids: int
    template_args: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None

    @classmethod
    def of(cls, engine: Engine, settings: Settings) -> Model:
        """That of an engine."""
        options = engine.chat_template.options
        return cls(options, engine.tokenizer.num_tokens, settings.template_args, settings.max_tokens)


@dataclass(frozen=True)
class Request:
    """What is asked of the engine, and how the answer is to be given.

    prompt: text or token ids, of a request that is no chat. begun: the assistant's message that is to be continued, if
    the chat ends with one. usage: whether the stream ends with a chunk that has the counts. priority: of requests that
    wait those with the lowest come first. demands: on a chat's reply. prompt_field: the field that holds the prompt.
    echo: what the response repeats of the request. replies: how many there are to be, one after the other.
    """

    sampling: Mapping[str, Any]
    stream: bool = False
    usage: bool = False
    priority: int = 0
    prompt: str | list[int] | None = None
    messages: Sequence[Message] = ()
    begun: Message | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    demands: Demands = NONE
    prompt_field: str = "messages"
    echo: Mapping[str, Any] = field(default_factory=dict)
    replies: int = 1


def read_sampling(fields: Fields, model: Model) -> dict[str, Any]:
    """Keyword arguments of ``Engine.stream``; the engine checks their values."""
    sampling = {name: fields.given(name) for name in _SAME_NAMES}
    if sampling["top_k"] == -1:  # so vLLM and SGLang, and what routes to them, say that there is no limit
        sampling["top_k"] = 0
    sampling["ignore_eos"] = fields.flag("ignore_eos")
    sampling["logit_bias"] = _bias(fields, model)
    sampling["max_tokens"] = limit(fields, model, "max_completion_tokens", "max_tokens")
    return {name: value for name, value in sampling.items() if value is not None}


def limit(fields: Fields, model: Model, *names: str) -> int | None:
    """The most tokens that the reply may have, by fields of these ``names`` and by the server."""
    asked = [fields.whole(name, 1) for name in names]
    return min((n for n in (*asked, model.max_tokens) if n is not None), default=None)


def _bias(fields: Fields, model: Model) -> dict[int, float] | None:
    given = fields.mapping("logit_bias")
    if given is None:
        return None
    full = fields.name("logit_bias")
    if len(given) > MAX_BIAS:
        raise wrong(full, f"{full} has {len(given)} entries; allowed: at most {MAX_BIAS}")
    for name in given:
        if not (name.isascii() and name.isdigit()) or len(name) > 9 or int(name) >= model.ids:
            raise wrong(full, f"{full} names token {name[:40]!r}; allowed: ids from 0 to {model.ids - 1}")
    return {int(name): value for name, value in given.items()}


def read_streaming(fields: Fields) -> tuple[bool, bool]:
    """Whether the reply is streamed, and whether its counts come with it."""
    options = Fields(fields.mapping("stream_options") or {}, fields.name("stream_options"))
    usage = options.flag("include_usage")
    return fields.flag("stream"), usage


def read_priority(fields: Fields) -> int:
    """Requests with a lower number come first, as with vLLM."""
    return fields.whole("priority", -MAX_PRIORITY, MAX_PRIORITY) or 0


def read_number_of_replies(fields: Fields) -> int:
    """How many replies the request asks for."""
    return fields.whole("n", 1, MAX_REPLIES) or 1


def branches(request: Request) -> list[Request]:
    """A request for each reply that is asked for: the same with seeds that follow each other, if it has one."""
    seed = request.sampling.get("seed")
    seeds = [(seed + number) % SEEDS if type(seed) is int and number else seed for number in range(request.replies)]
    return [replace(request, sampling={**request.sampling, "seed": seed}, replies=1) for seed in seeds]


def template_options(fields: Fields, model: Model, *, tools: bool, thinking: bool | None) -> dict[str, Any]:
    """Options of the chat template; what it does not read is left out, as an unknown field of the request is.

    With tools, earlier reasoning is kept where the template can: what was read before then stays a prefix of the
    next prompt. thinking: whether the reply is to begin with reasoning, if the request says it.
    """
    options: dict[str, Any] = {"preserve_thinking": True} if tools else {}
    options |= model.template_args
    if thinking is not None:
        options["enable_thinking"] = thinking
    given = fields.mapping("chat_template_kwargs") or {}
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in given:
            full = f"chat_template_kwargs.{name}"
            raise wrong(full, f"{full} is set by Lily itself; leave it out")
    options |= given
    return {name: value for name, value in options.items() if name in model.template_options}


def objects(fields: Fields, name: str) -> list[Fields]:
    """The objects of a list, each with its own name; [] where there is no list."""
    found = []
    for index, value in enumerate(fields.items(name) or ()):
        where = f"{fields.name(name)}[{index}]"
        if not isinstance(value, dict):
            raise wrong(where, f"{where} is {show(value)}; allowed: an object")
        found.append(Fields(value, where))
    return found


def json_schema(fields: Fields) -> Mapping[str, Any]:
    """The field ``schema``, which must be there."""
    schema = fields.mapping("schema")
    if schema is None:
        fields.refuse("schema", "a JSON schema")
    return schema


def check_offered(choice: Fields, name: str | None, tools: Tools) -> None:
    """Refuses a choice of a tool that is not among those of the request."""
    if not any(tool["function"]["name"] == name for tool in tools):
        choice.refuse("name", "the name of one of the tools")


def continued(messages: Sequence[Mapping[str, Any]], name: str) -> tuple[list[Message], Message | None]:
    """Messages made regular, and the last one if it is a reply that is to go on. name: of the field that has them."""
    regular = normalise_messages(messages)
    last = regular[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return regular, None
    if len(regular) == 1:
        raise wrong(name, f"{name} is a reply alone; give at least one message before the reply to continue")
    return regular[:-1], last


def top_logprobs(fields: Fields, name: str) -> int | None:
    """How many of the likeliest tokens are to be reported beside each that was drawn."""
    return fields.whole(name, 0, MAX_TOP_LOGPROBS)


def open_stream(engine: Engine, request: Request, on_prompt: OnPrompt) -> Stream:
    """Asks the engine, which checks the rest of the request. Raises what ``Engine.stream`` raises."""
    scheduling = Scheduling(priority=request.priority)
    if request.prompt is not None:
        return engine.stream(request.prompt, on_prompt=on_prompt, scheduling=scheduling, **request.sampling)
    tokens = engine.render_chat(
        request.messages, tools=request.tools, template_kwargs=request.template_kwargs,
        continuation=continuation(engine, request),
    )  # fmt: skip
    made = engine.chat_request(
        tokens, request.sampling, None, on_prompt, request.tools, request.demands, scheduling
    )  # fmt: skip
    return Stream(made)


def rendered(engine: Engine, request: Request) -> str:
    """The prompt of a chat as text, up to where the reply begins."""
    text = engine.chat_template.render(request.messages, tools=request.tools, **request.template_kwargs)
    return text + continuation(engine, request, text)


def continuation(engine: Engine, request: Request, prompt: str | None = None) -> str:
    """The beginning of the reply that the chat itself holds: "" if it ends with another message than a reply.

    prompt: the rendered chat before it, if it is there already.
    """
    if request.begun is None:
        return ""
    if prompt is None:
        prompt = engine.chat_template.render(request.messages, tools=request.tools, **request.template_kwargs)
    answer: str = request.begun["content"]
    reasoning: str | None = request.begun.get("reasoning_content")
    if reasoning and starts_in_reasoning(prompt):
        return reasoning + (END_THINK + answer if answer else "")
    return reply_start(prompt, answer) if answer else ""
