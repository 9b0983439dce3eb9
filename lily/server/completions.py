# SPDX-License-Identifier: Apache-2.0
"""The dialect ``/v1/completions``: a prompt that is continued as it is.

Pure functions, as in ``chat.py``.
Not handled, and refused by name: several prompts, the best of several replies, ``echo``, ``suffix``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lily.server.counts import Head, timings, usage
from lily.server.fields import Fields
from lily.server.replies import Choices
from lily.server.requests import (
    Model,
    Request,
    read_number_of_replies,
    read_priority,
    read_sampling,
    read_streaming,
    top_logprobs,
)
from lily.streaming import Completion, StreamChunk, TokenLogprob

_PROMPTS = "a string, or a list of token ids; or a list with one of these"


def read_completion(body: Mapping[str, Any], model: Model) -> Request:
    """The request that ``body`` makes. RequestError (400) naming the field."""
    fields = Fields(body)
    replies = read_number_of_replies(fields)
    if fields.whole("best_of", 1) not in (None, replies):
        fields.unavailable("best_of", "a choice among replies", "ask for all of them with n")
    if fields.flag("echo"):
        fields.unavailable("echo", "the prompt in the reply", "put it before the reply yourself")
    if fields.text("suffix"):
        fields.unavailable("suffix", "text after the gap", "give the model's own tokens for it in the prompt")
    prompt = _prompt(fields)
    stream, with_usage = read_streaming(fields)
    sampling = read_sampling(fields, model)
    logprobs = top_logprobs(fields, "logprobs")
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    priority = read_priority(fields)
    return Request(
        sampling, stream, with_usage, prompt=prompt, prompt_field="prompt", priority=priority, replies=replies
    )  # fmt: skip


def _prompt(fields: Fields) -> str | list[int]:
    given = fields.given("prompt")
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        if len(given) > 1:
            fields.unavailable("prompt", "more than one prompt", "send a request for each")
        given = given[0]
    if not isinstance(given, str) and not (isinstance(given, list) and all(type(id) is int for id in given)):
        fields.refuse("prompt", _PROMPTS)
    return given


class CompletionReply(Choices):
    """A reply in the dialect's objects, as ``ChatReply``."""

    def __init__(self, head: Head, request: Request, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__(request)
        self._head, self._request, self._bytes = head, request, token_bytes
        self._logprobs: list[TokenLogprob] = []  # of tokens that have shown nothing yet
        self._characters = 0  # of the tokens before

    def push(self, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The events that a chunk makes; one with the end makes the last ones."""
        self._logprobs += chunk.logprobs or ()
        reply = chunk.completion
        if reply is None:
            if chunk.text:
                yield self._event(chunk.text)
            return
        last = self._event(chunk.text, reply.finish_reason)
        yield last if self._request.usage else {**last, "timings": timings(reply)}
        self._done.append(reply)
        self._characters = 0
        if self._index == self._replies and self._request.usage:
            counts = {"usage": usage(*self._done), "timings": timings(reply)}
            yield {**self._head.of("text_completion"), "choices": [], **counts}

    def whole(self, reply: Completion) -> dict[str, Any]:
        """The response that is not streamed."""
        replies = self._all(reply)
        return {
            **self._head.of("text_completion"),
            "choices": [self._whole_choice(index, one) for index, one in enumerate(replies)],
            "usage": usage(*replies),
            "timings": timings(reply),
        }

    def _whole_choice(self, index: int, reply: Completion) -> dict[str, Any]:
        self._characters = 0
        return self._choice(index, reply.text, reply.finish_reason, reply.logprobs)

    def _event(self, text: str, reason: str | None = None) -> dict[str, Any]:
        logprobs, self._logprobs = self._logprobs or None, []
        head = self._head.of("text_completion")
        head |= {"usage": None} if self._request.usage else {}
        return {**head, "choices": [self._choice(self._index, text, reason, logprobs)]}

    def _choice(
        self, index: int, text: str, reason: str | None, logprobs: list[TokenLogprob] | None
    ) -> dict[str, Any]:  # fmt: skip
        return {"text": text, "index": index, "logprobs": self._logprob_object(logprobs), "finish_reason": reason}

    def _logprob_object(self, logprobs: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        tokens, offsets = [self._text(entry.token_id) for entry in logprobs], []
        for token in tokens:
            offsets.append(self._characters)
            self._characters += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [{self._text(id): value for id, value in entry.top} for entry in logprobs],
            "text_offset": offsets,
        }

    def _text(self, id: int) -> str:
        return self._bytes(id).decode("utf-8", "replace")
