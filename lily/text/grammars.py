# SPDX-License-Identifier: Apache-2.0
"""Grammars of JSON documents and of calls, which say at every point of a reply which tokens may come next.

The llguidance library does the work: it compiles a schema and finds the tokens.  Compiling is bounded by sizes and by
the library's own count of its steps, so that a schema is too large on every machine or on none.  Nothing is fetched: a
``$ref`` leads within its schema.
Not handled: keywords that the library does not know (``not``, ``if``, ``uniqueItems`` …) and ``pattern`` and ``format``
of a tool's text, which are refused by name.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lily.errors import InvalidRequestError, show
from lily.text.call_arguments import parameter_types
from lily.text.call_grammar import MAX_NAME
from lily.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_CHARS = 65_536
MAX_SCHEMA_DEPTH = 64
_LIMITS = {"initial_lexer_fuel": 1_000_000, "step_lexer_fuel": 200_000, "step_max_items": 50_000,
           "max_lexer_states": 50_000, "max_grammar_size": 500_000}  # fmt: skip
_MISSING = (
    "replies in a given format, and forced calls, need llguidance; install it with: pip install '.[json]' "
    "(or pip install llguidance)"
)
_DATA = ("const", "enum", "default", "examples")  # whose values are no schemas
_PLAIN = {"type", "title", "description", "default", "examples", "deprecated"}
_END = "\n</parameter>\n"


class Grammar:
    """A grammar at one point of a reply."""

    def __init__(self, matcher: LLMatcher, eos_ids: Sequence[int], words: int, also: int | None = None) -> None:
        """words: of the mask. eos_ids: what the model may end with. also: an id that is allowed beside."""
        self._matcher, self._eos_ids, self._words, self._also = matcher, eos_ids, words, also

    def copy(self) -> Grammar:
        """The same point, to go on from apart."""
        return Grammar(self._matcher.deep_copy(), self._eos_ids, self._words)

    def with_also(self, id: int | None) -> Grammar:
        """The same point with one more id allowed."""
        return Grammar(self._matcher, self._eos_ids, self._words, id)

    @property
    def complete(self) -> bool:
        """Whether nothing more can follow."""
        return bool(self._matcher.is_stopped())

    def write(self, mask: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        """Sets the bits of ids that may come next; others are 0 already."""
        part = mask[: self._words]
        self._matcher.unsafe_compute_mask_ptr(part.ctypes.data, part.nbytes)
        self._check()
        also = () if self._also is None else (self._also,)
        for id in (*also, *(self._eos_ids if self._matcher.is_accepting() else ())):
            mask[id // 32] |= np.uint32(1 << id % 32)

    def take(self, id: int) -> None:
        """The token that was drawn."""
        self._matcher.consume_token(id)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequestError(
                f"the reply's format is too complex to go on: {self._matcher.get_error()[:200]}; give a simpler schema"
            )


class Grammars:
    """Makes grammars over one tokenizer, whose form for the library is made with the first of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._converted: LLTokenizer | None = None

    def json(self, schema: Mapping[str, Any]) -> Grammar:
        """Documents of ``schema``; of ``{}`` any object."""
        text = _checked(schema, "response_format")
        library = _library()
        source = library.LLMatcher.grammar_from_json_schema(text if schema else '{"type": "object"}', _spaces())
        return self._compiled(source, "response_format")

    def calls(self, functions: Sequence[Mapping[str, Any]]) -> Grammar:
        """The inside of a ``<tool_call>`` of one of ``functions``, with arguments that its schema allows."""
        source = _library().LLMatcher.grammar_from_lark(call_lark(functions))
        return self._compiled(source, "tools")

    def _compiled(self, source: str, field: str) -> Grammar:
        library, converted = _library(), self._convert()
        matcher = library.LLMatcher(converted, source, log_level=0, limits=library.LLParserLimits(**_LIMITS))
        if matcher.is_error():
            raise InvalidRequestError(f"{field}: this schema cannot be used: {matcher.get_error()[:300]}")
        return Grammar(matcher, self._tokenizer.eos_ids, (self._tokenizer.num_tokens + 31) // 32)

    def _convert(self) -> LLTokenizer:
        with self._lock:
            if self._converted is None:
                library = _library()
                form = library.TokenizerWrapper(_Converted(self._tokenizer))
                self._converted = library.LLTokenizer(form, n_vocab=self._tokenizer.num_tokens)
            return self._converted


class _Converted:
    """A tokenizer as the library wants it. Added tokens are no text, so that no document holds one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.eos_ids:
            raise InvalidRequestError("this model names no token that ends a reply, so no format can be demanded of it")
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], None
        self.tokens = tokenizer.token_bytes[: tokenizer.num_tokens]
        self.special_token_ids = sorted(tokenizer.added_ids)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, plain=True)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise InvalidRequestError(_MISSING) from None
    return llguidance


def _spaces() -> dict[str, Any]:
    """Bounded, since a model that has lost its way writes spaces until its limit."""
    return {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{1,40}"}


def _checked(schema: object, field: str) -> str:
    """The schema as text. InvalidRequestError: too large, too deep, no JSON, or leading out of itself."""
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(f"{field}: the schema is not JSON, or nested too deeply") from None
    if len(text) > MAX_SCHEMA_CHARS:
        raise InvalidRequestError(f"{field}: the schema has {len(text):,} characters; at most {MAX_SCHEMA_CHARS:,}")
    _check_inside(schema, field, MAX_SCHEMA_DEPTH)
    return text


def _check_inside(schema: object, field: str, depth: int) -> None:
    if depth == 0:
        raise InvalidRequestError(f"{field}: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    if isinstance(schema, Mapping):
        reference = schema.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise InvalidRequestError(
                f"{field}: $ref is {show(reference)}; allowed: a place in the schema (#/…), since nothing is fetched"
            )
        inside = [value for key, value in schema.items() if key not in _DATA]
    else:
        inside = list(schema) if isinstance(schema, list) else []
    for part in inside:
        _check_inside(part, field, depth - 1)


# ---- calls
def call_lark(functions: Sequence[Mapping[str, Any]]) -> str:
    """The grammar, in the library's Lark, of what stands between ``<tool_call>`` and ``</tool_call>``."""
    rules = ["start: " + " | ".join(f"f{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        rules += _function(f"f{index}", function)
    return "\n".join(rules) + "\n"


def _function(rule: str, function: Mapping[str, Any]) -> list[str]:
    """A call of one function: its parameters in the schema's order, those that are not required left out or not."""
    name = _name(function.get("name"), "tools")
    parameters = function.get("parameters") or {}
    _checked(parameters, f"tools: {name}")
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or ()
    missing = [key for key in required if key not in properties]
    if missing:
        raise InvalidRequestError(f"tools: {name} requires {show(missing[0])}, which is not among its properties")
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    sequence, rules = [f'"\\n<function={name}>\\n"'], []
    for index, (key, schema) in enumerate(properties.items()):
        part = f"{rule}p{index}"
        sequence.append(part if key in required else f"{part}?")
        may_be_text = "string" in parameter_types(parameters)[key]
        rules += _parameter(part, _name(key, f"tools: {name}"), schema, definitions, may_be_text=may_be_text)
    return [f"{rule}: {' '.join(sequence)} {_literal('</function>' + chr(10))}", *rules]


def _parameter(
    rule: str, key: str, schema: object, definitions: Mapping[str, Any], *, may_be_text: bool
) -> list[str]:  # fmt: skip
    """A value is text as it is where the schema has it so, else JSON."""
    begin, value = _literal(f"<parameter={key}>\n"), f"{rule}v"
    schema = schema if isinstance(schema, Mapping) else {}
    texts = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if texts and all(isinstance(one, str) for one in texts):
        return [f"{rule}: {begin} ({' | '.join(map(_literal, texts))}) {_literal(_END)}"]
    if may_be_text:
        return [f"{rule}: {begin} {value}", _text(value, key, schema)]
    return [f"{rule}: {begin} {value} {_literal(_END)}", f"{value}: %json {json.dumps({**schema, **definitions})}"]


def _text(rule: str, key: str, schema: Mapping[str, Any]) -> str:
    """A text up to the end of its parameter, which is the first one. One of a given length holds no tag.

    Where the schema allows other types as well, a text that reads as one of them becomes it; any will do then.
    """
    kinds = schema.get("anyOf", ())
    other = sorted(schema.keys() - _PLAIN - {"minLength", "maxLength", "anyOf"})
    other += sorted({word for kind in kinds for word in kind.keys() - _PLAIN})
    if schema.get("type") != "string" and schema.keys() & {"minLength", "maxLength"}:
        other.append("minLength or maxLength")
    if other:
        raise InvalidRequestError(
            f"tools: {other[0]} of the text {show(key)} cannot be held to in a forced call; leave it out"
        )
    if schema.keys() & {"minLength", "maxLength"}:
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        return f"{rule}: /[^<]{{{least},{most}}}/ {_literal(_END)}"
    return f"{rule}[suffix={_literal(_END)}]: /(?s:.*)/"


def _name(given: object, field: str) -> str:
    """A name that the form of a call can hold."""
    if not isinstance(given, str) or not 0 < len(given) <= MAX_NAME or any(c in '<>\n"\\' for c in given):
        raise InvalidRequestError(f"{field}: the name {show(given)} cannot be written in a call")
    return given


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
