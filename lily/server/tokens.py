# SPDX-License-Identifier: Apache-2.0
"""``/tokenize``, ``/detokenize``, ``/apply-template``, ``/v1/messages/count_tokens``: what the model would read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lily.engine import Engine
from lily.server.chat import read_chat
from lily.server.fields import Fields
from lily.server.messages import read_to_count
from lily.server.requests import Model, rendered

Answer = Callable[[Engine, Model, Mapping[str, Any]], dict[str, Any]]


def tokenize(engine: Engine, model: Model, body: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids of ``content``, or of a chat as it would be sent; with ``with_pieces`` their text, too."""
    fields = Fields(body)
    text = fields.text("content")
    if text is None:
        text = fields.text("prompt")
    if text is None:
        if fields.given("messages") is None:
            fields.refuse("content", "a string; or messages in its place")
        text = rendered(engine, read_chat(body, model))
    ids = engine.tokenizer.encode(text)
    tokens: list[Any] = list(ids)
    if fields.flag("with_pieces"):
        tokens = [{"id": id, "piece": engine.tokenizer.token_bytes[id].decode("utf-8", "replace")} for id in ids]
    return {"tokens": tokens, "count": len(ids), "max_model_len": engine.max_context}


def detokenize(engine: Engine, model: Model, body: Mapping[str, Any]) -> dict[str, Any]:
    """The text of ``tokens``."""
    fields = Fields(body)
    ids = fields.items("tokens")
    size = len(engine.tokenizer.token_bytes)
    if ids is None or not all(type(id) is int and 0 <= id < size for id in ids):
        fields.refuse("tokens", f"a list of token ids, whole numbers from 0 to {size - 1}")
    return {"content": engine.tokenizer.decode(ids)}


def apply_template(engine: Engine, model: Model, body: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt that a chat request makes."""
    return {"prompt": rendered(engine, read_chat(body, model))}


def count_tokens(engine: Engine, model: Model, body: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of the prompt that a request to ``/v1/messages`` makes, tools included."""
    return {"input_tokens": len(engine.tokenizer.encode(rendered(engine, read_to_count(body, model))))}


ANSWERS: dict[str, Answer] = {
    "/tokenize": tokenize,
    "/detokenize": detokenize,
    "/apply-template": apply_template,
    "/v1/messages/count_tokens": count_tokens,
}
