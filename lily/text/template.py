# SPDX-License-Identifier: Apache-2.0
"""Chats to prompts: OpenAI-style messages, made regular, then rendered by the checkpoint's own chat template.

What callers may rely on, beyond the OpenAI format:
* Leading system and developer messages become one system message, joined by blank lines.
* A later system or developer message stays at its place as a user message. Templates of this family refuse it there;
  moving it to the front would change the start of the prompt and so void every cached prefix of the chat.
* ``reasoning`` of an assistant message is accepted as another name of ``reasoning_content``.
* Objects of the caller are never changed.

Not handled: images, audio, video and files (an error names the message); separate templates for tool use
(``default`` is taken where a checkpoint has several); control tokens spelled in the content of a message, which the
tokenizer will recognise as mlx-lm and transformers do; parsing of replies.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from lily.checkpoint.strict_json import read_bytes
from lily.errors import CheckpointError, InvalidRequestError, LilyWarning, show
from lily.text.sandbox import CountingEnvironment, TemplateLimitError, compile_template, render
from lily.text.template_options import options_of
from lily.text.tokenizer import TOKENIZER_CONFIG_FILE, load_tokenizer_config, token_text

Message = dict[str, Any]

TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
TEXT_BLOCKS = ("text", "input_text", "output_text")
MEDIA = ("image", "audio", "video", "file")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
GIVEN = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")  # what Lily itself hands over
NO_TEMPLATE = "no chat template: the prompt is continued as it is"
MAX_TEMPLATE_BYTES = 1 << 20
"""Bound for a template's text; the 35B model's has 8 KB."""
TURN_MARKERS = ("<|im_start|>", "<|im_end|>")
END_THINK = "\n</think>\n\n"
"""What stands between reasoning and answer."""


class ChatTemplate:
    """The chat template of one checkpoint, compiled once. Any number of threads may render at the same time.

    available: the checkpoint has a template. Without one, ``render`` raises InvalidRequestError.
    """

    def __init__(
        self, source: str | None, *, origin: str = "chat template", special_tokens: Mapping[str, str] | None = None
    ) -> None:
        """source: Jinja text. origin: where it is from, for messages. special_tokens: ``eos_token`` etc. for templates.

        Raises CheckpointError if the template is not valid Jinja.
        """
        self.source = source
        self._origin = origin
        self._special_tokens = dict(special_tokens or {})
        self._template: jinja2.Template | None = None
        self._options: frozenset[str] = frozenset()
        self._flags: frozenset[str] = frozenset()
        if source is not None:
            try:
                environment = _environment()
                self._options, self._flags = options_of(environment.parse(source))
                self._template = compile_template(source, environment)
            except Exception as error:  # Jinja's own, and what Python says of the code that Jinja makes
                line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
                reason = next(iter(str(error).splitlines()), "")[:200] or type(error).__name__
                raise CheckpointError(f"{origin}: {line}not a valid template: {reason}; download it again") from None

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> ChatTemplate:
        """Reads ``chat_template.jinja`` of the folder, else ``chat_template`` of its ``tokenizer_config.json``."""
        config = load_tokenizer_config(path)
        special_tokens = {name: text for name in SPECIAL_TOKENS if (text := token_text(config.get(name))) is not None}
        file = Path(path) / TEMPLATE_FILE
        if os.path.lexists(file):  # a link to a file that is gone is an error, not a checkpoint without template
            origin = str(file)
            source: str | None = _read_template(file)
        else:
            origin = str(Path(path) / TOKENIZER_CONFIG_FILE)
            source = _template_of_config(config.get("chat_template"), origin)
        if source is None:
            origin = str(path)
        return cls(source, origin=origin, special_tokens=special_tokens)

    @property
    def available(self) -> bool:
        return self._template is not None

    @property
    def options(self) -> frozenset[str]:
        """Names of the variables that the template reads beside what Lily hands over by itself."""
        return self._options - {*SPECIAL_TOKENS, *GIVEN}

    @property
    def notes(self) -> tuple[str, ...]:
        """What users should know who have not asked for a plain continuation."""
        return () if self.available else (NO_TEMPLATE,)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The prompt for ``messages``, which ``normalise_messages`` makes regular first.

        tools: OpenAI-style tool descriptions, handed over as they are. template_kwargs: further variables of the
        template, such as ``enable_thinking`` and ``preserve_thinking``. A name that the template does not mention gives
        a LilyWarning. Raises InvalidRequestError for messages that cannot be rendered; it holds the template's own
        words if it has refused them. What a template may do is bounded (``lily.text.sandbox``).
        """
        if self._template is None:
            raise InvalidRequestError(
                f"{self._origin} has no chat template (neither {TEMPLATE_FILE} nor chat_template in "
                f"{TOKENIZER_CONFIG_FILE}), so it cannot chat; give a plain prompt instead"
            )
        if "messages" in template_kwargs:
            raise InvalidRequestError("'messages' cannot be set by template options; leave it out")
        self._check_options(template_kwargs)
        variables = {
            **self._special_tokens,
            **template_kwargs,
            "messages": normalise_messages(messages),
            "tools": _checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render(self._template, variables)
        except _RaisedByTemplate as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error.message}") from error
        except TemplateLimitError as error:
            raise InvalidRequestError(
                f"{self._origin}: rendering these messages takes {error}, which is refused; shorten the chat, or mend "
                "the template if a short chat needs as much"
            ) from None
        except Exception as error:  # a template is foreign code: any expression in it may fail on this chat
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}"
            ) from error

    def _check_options(self, options: Mapping[str, Any]) -> None:
        """A flag that is text would count as true, whatever it says, or as nothing; a misspelled name as nothing."""
        for name, value in options.items():
            if name in self._flags and not isinstance(value, (bool, NoneType)):
                raise InvalidRequestError(
                    f"template option {name} is {show(value)}; the chat template asks it for true or false: give one "
                    "of these, without quotes"
                )
        unknown = options.keys() - self._options
        if unknown:
            warnings.warn(
                f"the chat template does not mention {_list_of_names(unknown)}, which has no effect; it knows "
                f"{_list_of_names(self.options)}",
                LilyWarning,
                stacklevel=3,
            )


def _list_of_names(names: Iterable[str]) -> str:
    return ", ".join(show(name, 40) for name in sorted(names)[:8]) or "none"


def checked_options(given: object) -> dict[str, Any]:
    """Options of a template by name, {} for None; InvalidRequestError for what is no mapping of names to values."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidRequestError(
            f"template_kwargs is {show(given)}; allowed: a mapping of names to values, as {{'enable_thinking': False}}"
        )
    return dict(given)


def starts_in_reasoning(prompt: str) -> bool:
    """Whether a reply to the rendered ``prompt`` begins inside of ``<think>``: only ``</think>`` shows its end.

    Only the unfinished last turn counts, so tags quoted in earlier messages do not matter.
    """
    turn = last_turn(prompt)
    return turn.rfind("<think>") > turn.rfind("</think>")


def reply_start(prompt: str, reply: str) -> str:
    """What to put after the rendered ``prompt`` so that the answer, not the reasoning before it, begins with ``reply``.

    A reply that itself opens with <think> continues the reasoning.
    """
    if not starts_in_reasoning(prompt):
        return reply
    if reply.startswith("<think>"):
        return reply.removeprefix("<think>").removeprefix("\n")
    if "</think>" in reply:
        return reply
    return END_THINK + reply


def last_turn(prompt: str) -> str:
    """The rendered ``prompt`` from the end of the last marker of a turn on; all of it if there is none."""
    return prompt[max(prompt.rfind(marker) + len(marker) if marker in prompt else 0 for marker in TURN_MARKERS) :]


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """OpenAI-style messages in the form that chat templates expect; see the top of this file for what is merged.

    ``content`` becomes a string and the ``arguments`` of tool calls become mappings. Other keys are kept. The result of
    normalising twice is that of normalising once. Raises InvalidRequestError, naming the message by its index.
    """
    given = _checked_list(messages, "messages")
    if not given:
        raise InvalidRequestError("messages is empty; give at least one message")
    normalised = [_normalise_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    leading = 0
    while leading < len(normalised) and normalised[leading]["role"] in SYSTEM_ROLES:
        leading += 1
    head = [_merge_system(normalised[:leading])] if leading else []
    return head + [{**m, "role": "user"} if m["role"] in SYSTEM_ROLES else m for m in normalised[leading:]]


def _merge_system(messages: list[Message]) -> Message:
    if len(messages) == 1:
        return {**messages[0], "role": "system"}
    return {"role": "system", "content": "\n\n".join(m["content"] for m in messages if m["content"].strip())}


def _normalise_message(value: object, where: str) -> Message:
    message = _checked_object(value, where)
    role = message.get("role")
    if role not in ROLES:
        seen = "has no role" if role is None else f"has the unknown role {role!r}"
        raise InvalidRequestError(f"{where} {seen}; allowed: {', '.join(ROLES)}")
    result = dict(message)
    content = message.get("content")
    # A tool may return nothing, and an assistant may only have called tools; others must have said something.
    if content is None and role not in ("assistant", "tool"):
        raise InvalidRequestError(f"{where} ({role}) has no content; give a string or a list of text blocks")
    result["content"] = _text_of(content, where)
    calls = result.pop("tool_calls", None)
    if result.pop("function_call", None):
        raise InvalidRequestError(f"{where} has a function_call; give it as an entry of tool_calls")
    if calls and role != "assistant":
        raise InvalidRequestError(f"{where} ({role}) has tool_calls; only assistant messages may have them")
    if role == "assistant":
        _normalise_reasoning(result, where)
        if calls:
            result["tool_calls"] = _normalise_calls(calls, where)
    return result


def _normalise_reasoning(message: Message, where: str) -> None:
    given = [message.pop(key, None) for key in ("reasoning_content", "reasoning")]
    reasoning = next((text for text in given if text is not None), None)
    if reasoning is None:
        return
    if not isinstance(reasoning, str):
        raise InvalidRequestError(f"{where}.reasoning_content must be a string, seen {type(reasoning).__name__}")
    message["reasoning_content"] = reasoning


def _text_of(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        return "".join(_text_of_block(block, f"{where}.content[{index}]") for index, block in enumerate(content))
    raise InvalidRequestError(
        f"{where}.content must be a string or a list of text blocks, seen {type(content).__name__}"
    )


def _text_of_block(value: object, where: str) -> str:
    block = _checked_object(value, where)
    kind = block.get("type", "text" if "text" in block else None)
    for medium in MEDIA:
        if medium in str(kind) or medium in block or f"{medium}_url" in block:
            raise InvalidRequestError(f"{where} is {medium} input; Lily reads text only, remove it")
    if kind not in TEXT_BLOCKS:
        raise InvalidRequestError(f"{where} has the unknown type {kind!r}; allowed: text")
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be a string, seen {type(text).__name__}")
    return text


def _normalise_calls(calls: object, where: str) -> list[Message]:
    where = f"{where}.tool_calls"
    return [_normalise_call(call, f"{where}[{index}]") for index, call in enumerate(_checked_list(calls, where))]


def _normalise_call(value: object, where: str) -> Message:
    """One tool call as {…, "function": {"name": str, "arguments": mapping}}; the function alone is accepted too."""
    call = _checked_object(value, where)
    wrapper, function = (call, call["function"]) if "function" in call else ({"type": "function"}, call)
    if not isinstance(function, Mapping) or wrapper.get("type", "function") not in ("function", None):
        raise InvalidRequestError(f"{where} is not a function call; allowed: {{'type': 'function', 'function': …}}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{where} has no function name; give a string as name")
    arguments = _normalise_arguments(function.get("arguments"), where)
    return {**wrapper, "function": {**function, "arguments": arguments}}


def _normalise_arguments(arguments: object, where: str) -> dict[str, Any]:
    """OpenAI sends a JSON string, templates want a mapping. No arguments at all may be "", null or missing."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"{where}: arguments is not valid JSON ({error}); give a JSON object") from error
    if arguments is None:
        return {}
    return dict(_checked_object(arguments, f"{where}: arguments"))


def _checked_tools(tools: object) -> list[Mapping[str, Any]] | None:
    if tools is None:
        return None
    checked = [_checked_object(tool, f"tools[{index}]") for index, tool in enumerate(_checked_list(tools, "tools"))]
    return checked or None


def _checked_list(value: object, where: str) -> Sequence[Any]:
    if isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence):
        raise InvalidRequestError(f"{where} must be a list of objects, seen {type(value).__name__}")
    return value


def _checked_object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"{where} must be an object, seen {type(value).__name__}")
    return value


def _read_template(file: Path) -> str:
    try:
        return read_bytes(file, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); download it again") from None


def _template_of_config(entry: object, origin: str) -> str | None:
    """``chat_template`` of a tokenizer_config: text, or a list of named templates."""
    if entry is None or isinstance(entry, str):
        return entry
    named = {t.get("name"): t.get("template") for t in entry if isinstance(t, dict)} if isinstance(entry, list) else {}
    source = named.get("default")
    if not isinstance(source, str):
        raise CheckpointError(f"{origin}: chat_template is neither text nor a list with a template named default")
    return source


class _RaisedByTemplate(jinja2.TemplateError):
    """The template called ``raise_exception``."""


def _raise_exception(message: object) -> NoReturn:
    raise _RaisedByTemplate(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, which models have not been trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """``{% generation %} … {% endgeneration %}``, which marks replies for training: here, just its content."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    """Templates come with downloads: they run in the sandbox, with the names and settings that authors rely on."""
    environment = CountingEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.price_filters()
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment
