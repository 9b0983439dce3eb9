# SPDX-License-Identifier: Apache-2.0
"""From the tokens of a reply to what is given back: text, reasoning, calls, log-probabilities, the final result.

Tokens become text (text/detokenizer.py); a chat's text is split (text/reply_parts.py); stop strings are looked for in
its content (text/stops.py).  Of a plain prompt all text is content.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import replace
from hashlib import blake2b

from lily.run.reply import Token
from lily.sampling import SamplingParams
from lily.streaming import Completion, FinishReason, StreamChunk, Timings, TokenLogprob, ToolCall, ToolCallDelta
from lily.text.call_grammar import MARKERS
from lily.text.detokenizer import Detokenizer
from lily.text.reply_parts import CallPart, Content, Part, Reasoning, ReplyForm, ReplyParts
from lily.text.stops import StopMatcher
from lily.text.tokenizer import Tokenizer


class ReplyText:
    """Collects one reply."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams, *, hidden: Set[int],
        stop_ids: Set[int], form: ReplyForm | None, cached: int, began: float, reuse: str = "cold",
    ) -> None:  # fmt: skip
        """hidden: ids without visible text. form: of a chat's reply, None for a plain prompt's.

        cached: tokens of the prompt that were not run; reuse says why. began: when the request did, by
        ``time.perf_counter``.
        """
        self.token_ids: list[int] = []
        self._prompt, self._cached, self._reuse, self._began = len(prompt), cached, reuse, began
        self._seed = params.seed or 0
        self._detokenizer = Detokenizer(tokenizer.token_bytes, hidden | stop_ids)
        self._split = _Plain() if form is None else _Chat(tokenizer, form, stop_ids, call_ids(self._seed, prompt))
        self._matcher = StopMatcher(params.stop)
        self._chunk = _Chunk(self._matcher)  # of the last token
        self._reason: FinishReason | None = None
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._begun = ToolCallDelta(0)  # of the last call: its first delta, and its arguments so far
        self._arguments: list[str] = []
        self._calls: list[ToolCall] = []
        self._logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self._reasoning_tokens = 0
        self._first_token = 0.0

    def push(self, token: Token, *, last: bool) -> bool:
        """Takes one token; whether the reply ends with it. last: there is no room for another."""
        if not self.token_ids:
            self._first_token = time.perf_counter()
        self.token_ids.append(token.id)
        if self._logprobs is not None:
            self._logprobs.append(TokenLogprob(token.id, token.logprob or 0.0, token.top))
        self._reasoning_tokens += self._split.reasoning
        chunk = self._chunk = _Chunk(self._matcher)
        chunk.take(self._split.push(token.id, self._detokenizer.push(token.id)))
        self._reason = self._finish(chunk, token.stopped, last)
        self._keep(chunk)
        return self._reason is not None

    def chunk(self) -> StreamChunk:
        """What the token that was pushed last adds: what may be shown, and the end."""
        chunk, reason = self._chunk, self._reason
        return StreamChunk(
            chunk.text, self.token_ids[-1:], self._logprobs and self._logprobs[-1:], reason,
            self._completion(reason) if reason else None, chunk.reasoning, chunk.deltas,
        )  # fmt: skip

    def _finish(self, chunk: _Chunk, stopped: bool, last: bool) -> FinishReason | None:
        """Why the reply ends here, if it does; what was held back is added to ``chunk`` then."""
        if not (self._matcher.stopped or stopped or last):
            return None
        if not self._matcher.stopped:
            chunk.take(self._split.finish(self._detokenizer.flush(), ended=stopped))
            chunk.flush()
        if self._matcher.stopped:
            return "stop"
        if not stopped:
            return "length"
        return "tool_calls" if self._calls or chunk.finished else "stop"

    def _keep(self, chunk: _Chunk) -> None:
        """Adds a chunk to the completion."""
        self._texts.append(chunk.text)
        self._reasonings.append(chunk.reasoning)
        for delta in chunk.deltas:
            if delta.id is not None:
                self._begun, self._arguments = delta, []
            self._arguments.append(delta.arguments)
            if delta.index in chunk.finished:
                self._calls.append(ToolCall(self._begun.id or "", self._begun.name or "", "".join(self._arguments)))

    def _completion(self, reason: FinishReason) -> Completion:
        now = time.perf_counter()
        prompt_seconds, seconds = self._first_token - self._began, now - self._first_token
        n = len(self.token_ids)
        timings = Timings(
            prompt_seconds, seconds, (self._prompt - self._cached) / max(prompt_seconds, 1e-9),
            (n - 1) / max(seconds, 1e-9) if n > 1 else 0.0,
        )  # fmt: skip
        return Completion(
            "".join(self._texts), self.token_ids, reason, self._prompt, n, self._cached, self._logprobs, timings,
            self._seed, "".join(self._reasonings) or None, self._calls, self._reasoning_tokens, self._matcher.matched,
            self._reuse,
        )  # fmt: skip


class _Chunk:
    """What one token adds to the reply, with its content searched for stop strings."""

    def __init__(self, matcher: StopMatcher) -> None:
        self._matcher = matcher
        self.text = self.reasoning = ""
        self.deltas: list[ToolCallDelta] = []  # at most one of each call
        self.finished: set[int] = set()  # indices of the calls that are complete now

    def take(self, parts: Iterable[Part]) -> None:
        """Adds parts of the reply, up to a stop string."""
        for part in parts:
            if self._matcher.stopped:
                return
            if isinstance(part, Content):
                self.text += self._matcher.push(part.text)[0]
            elif isinstance(part, Reasoning):
                self.reasoning += part.text
            else:
                self._take_call(part)

    def _take_call(self, part: CallPart) -> None:
        if part.id is not None:
            self.flush()  # no stop string goes on behind a call
            if self._matcher.stopped:
                return
        delta = ToolCallDelta(part.index, part.id, part.name, part.arguments)
        if self.deltas and self.deltas[-1].index == part.index:
            self.deltas[-1] = replace(self.deltas[-1], arguments=self.deltas[-1].arguments + part.arguments)
        else:
            self.deltas.append(delta)
        if part.done:
            self.finished.add(part.index)

    def flush(self) -> None:
        """Content that was held back goes out; a stop string may be in it."""
        if not self._matcher.stopped:
            self.text += self._matcher.flush()


class _Plain:
    """The reply to a plain prompt: all of it is content."""

    reasoning = False

    def push(self, id: int, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self, text: str, *, ended: bool) -> list[Part]:
        return [Content(text)] if text else []


class _Chat:
    """The reply to a chat, with the tokenizer's markers found among its tokens."""

    def __init__(
        self, tokenizer: Tokenizer, form: ReplyForm, stop_ids: Set[int], call_id: Callable[[int], str]
    ) -> None:
        ids = {marker: tokenizer.id_of(marker) for marker in MARKERS}
        # One that ends the reply has no text, and what is behind it never comes.
        self._markers = {id: marker for marker, id in ids.items() if id is not None and id not in stop_ids}
        self._parts = ReplyParts(form, call_id, without_token=[marker for marker, id in ids.items() if id is None])

    @property
    def reasoning(self) -> bool:
        return self._parts.reasoning

    def push(self, id: int, text: str) -> list[Part]:
        marker = self._markers.get(id)
        if marker is None:
            return self._parts.push(text) if text else []
        # Before the marker's text there is U+FFFD if it came inside of a character.
        return self._parts.push(text.removesuffix(marker)) + self._parts.mark(marker)

    def finish(self, text: str, *, ended: bool) -> list[Part]:
        return self._parts.push(text) + self._parts.finish(ended=ended)


def call_ids(seed: int, prompt: Sequence[int]) -> Callable[[int], str]:
    """Ids of a reply's calls by index: the same for the same request, others for every other turn of a conversation."""
    digests: list[bytes] = []  # of seed and prompt, made when it is asked for

    def call_id(index: int) -> str:
        if not digests:
            digests.append(blake2b(array("q", prompt).tobytes() + seed.to_bytes(16, "big", signed=True)).digest())
        return "call_" + blake2b(digests[0] + index.to_bytes(8, "big"), digest_size=12).hexdigest()

    return call_id
