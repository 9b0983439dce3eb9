# SPDX-License-Identifier: Apache-2.0
"""The engine: a model on a device, and the calls that make text.

One engine runs one request at a time; calls from any thread queue.  Not handled: batching of requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np

from lily.chat import ChatTemplate
from lily.checkpoint import Checkpoint
from lily.chunks import cut
from lily.context import SNAPSHOTS, plan_context
from lily.detokenizer import Detokenizer
from lily.device import Device, choose_device
from lily.errors import DeviceError, InvalidRequestError, LilyError
from lily.host_memory import available_bytes
from lily.policy import policy_for
from lily.resolve import resolve_model
from lily.runner import Runner, Token
from lily.sampling import SamplingParams, checkpoint_defaults, make_params
from lily.stops import StopMatcher
from lily.tokenizer import Tokenizer
from lily.weights import load_weights
from lily.weights_map import map_weights

if TYPE_CHECKING:
    from lily.session import Session

MESSAGE_START = "<|im_start|>"
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a generated token under the raw logits, and of the likeliest tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of a request. The first token counts to the prompt, as it comes out of its last chunk."""

    prompt_seconds: float
    generation_seconds: float
    prompt_tokens_per_second: float
    """Of the tokens that were really run, without the cached ones."""
    generation_tokens_per_second: float


@dataclass(frozen=True)
class Completion:
    """A finished reply. ``completion_tokens`` counts every sampled token, a final stop id included."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob] | None
    timings: Timings


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a reply as it arrives: text may be empty (inside a character or a possible stop string).

    The last chunk has ``finish_reason`` and ``completion``; all texts joined are ``completion.text``.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    completion: Completion | None = None


@dataclass(frozen=True)
class Score:
    """Log-probabilities of given tokens: entry i belongs to token i+1, given tokens 0…i."""

    logprobs: np.ndarray[Any, np.dtype[np.float32]]  # [n-1]
    top_ids: np.ndarray[Any, np.dtype[np.int32]]  # [n-1, k]
    top_logprobs: np.ndarray[Any, np.dtype[np.float32]]  # [n-1, k]


class Engine:
    """A loaded model. Use it as a context manager, or call ``close``.

    model: a folder, ``ORG/NAME[@REVISION]`` in the Hugging Face cache, or None for the small embedded model.
    device: ``auto``, ``cpu``, ``metal`` or ``cuda``. max_context: tokens of prompt and reply together; by default what
    the model allows and memory holds. threads: of the cpu device. ablate: names of mechanisms to switch off.
    progress: called with (bytes done, bytes in all) while weights are read.
    Raises CheckpointError, DeviceError or InvalidRequestError.
    """

    def __init__(
        self, model: str | Path | None = None, *, device: str = "auto", max_context: int | None = None,
        threads: int | None = None, ablate: Sequence[str] = (), progress: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        self._lock, self._owner = threading.Lock(), 0
        self._closed = False
        name = choose_device(device)
        self._policy = policy_for(name, tuple(ablate))
        self.model = resolve_model(None if model is None else str(model))
        with Checkpoint.open(self.model.path) as checkpoint:
            config = checkpoint.config
            self.config = config
            self.tokenizer = Tokenizer.from_dir(self.model.path, config.vocab_size)
            self.chat_template = ChatTemplate.from_dir(self.model.path)
            self._defaults = checkpoint_defaults(checkpoint.generation_config)
            self._stop_ids = tuple(dict.fromkeys((*checkpoint.eos_token_ids, *self.tokenizer.eos_ids)))
            weights = map_weights(config, self._policy)
            self.max_context, self.memory = plan_context(
                config, self._policy, weights, room=available_bytes(), max_context=max_context, name=self.model.name
            )
            self._device = Device(name, threads=threads) if name == "cpu" else Device(name)
            try:
                buffers = {key: self._device.buffer(size) for key, size in weights.buffers.items()}
                done = 0

                def report(n: int) -> None:
                    nonlocal done
                    done += n
                    if progress:
                        progress(done, checkpoint.total_bytes)

                load_weights(checkpoint, weights, {key: b.bytes for key, b in buffers.items()}, report)
                self._runner = Runner(
                    self._device, config, self._policy, weights, buffers, max_context=self.max_context,
                    vocab=min(self.tokenizer.num_tokens, config.vocab_size), snapshots=SNAPSHOTS,
                )  # fmt: skip
            except BaseException:
                self._device.close()
                raise
        self._message_start = self.tokenizer.id_of(MESSAGE_START)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine and gives its memory back; repeated calls do nothing."""
        if self._closed:
            return
        with self._exclusive():
            self._closed = True
            self._runner.close()
            self._device.close()

    @property
    def info(self) -> dict[str, Any]:
        """What runs: model, device, path, context, memory in bytes, sampling defaults, ablations."""
        c = self.config
        return {
            "model": self.model.name,
            "path": str(self.model.path),
            "revision": self.model.revision,
            "layers": c.num_layers,
            "hidden_size": c.hidden_size,
            "experts": c.num_experts,
            "experts_per_token": c.experts_per_token,
            "vocab_size": c.vocab_size,
            "device": {"name": self._policy.device, **self._device.info},
            "max_context": self.max_context,
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "sampling_defaults": dict(self._defaults),
            "stop_token_ids": list(self._stop_ids),
            "ablate": sorted(self._policy.ablate),
        }

    # ---- text
    def generate(self, prompt: str | Sequence[int], **sampling: Any) -> Completion:
        """Continues ``prompt`` (text, taken as it is, or token ids); ``sampling`` as in SamplingParams."""
        for chunk in self.stream(prompt, **sampling):
            if chunk.completion is not None:
                return chunk.completion
        raise LilyError("the stream ended without a result")

    def stream(self, prompt: str | Sequence[int], **sampling: Any) -> Iterator[StreamChunk]:
        """As ``generate``, in pieces. Closing the iterator cancels within one token."""
        tokens = self._prompt_tokens(prompt)
        params = make_params(self._defaults, sampling).with_seed()
        stops = self._stop_token_ids(params)
        return self._run(tokens, params, stops)

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None, stream: Literal[False] = False, **sampling: Any,
    ) -> Completion: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None, stream: Literal[True], **sampling: Any,
    ) -> Iterator[StreamChunk]: ...  # fmt: skip

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None, stream: bool = False, **sampling: Any,
    ) -> Completion | Iterator[StreamChunk]:  # fmt: skip
        """The assistant's reply to OpenAI-style ``messages``, rendered with the checkpoint's chat template."""
        tokens = self.render_chat(messages, tools=tools, template_kwargs=template_kwargs)
        return self.stream(tokens, **sampling) if stream else self.generate(tokens, **sampling)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None, continuation: str = "",
    ) -> list[int]:  # fmt: skip
        """Token ids of the rendered chat, ready for the reply; ``continuation`` is the beginning of that reply."""
        kwargs = dict(template_kwargs or {})
        for name in ("tools", "add_generation_prompt", "messages"):
            if name in kwargs:
                raise InvalidRequestError(f"{name!r} is set by Lily itself and cannot be a template option")
        text = self.chat_template.render(messages, tools=tools, **kwargs)
        return self.tokenizer.encode(text + continuation)

    def session(self, *, system: str | None = None, template_kwargs: Mapping[str, Any] | None = None) -> Session:
        """A conversation that remembers its turns; what it shares with the previous request is not run again."""
        from lily.session import Session

        return Session(self, system=system, template_kwargs=template_kwargs)

    def score(self, tokens: Sequence[int], top_k: int = 0) -> Score:
        """Log-probability of each token given those before it, with the ``top_k`` likeliest alternatives."""
        ids = self._check_ids(tokens)
        if len(ids) < 2:
            raise InvalidRequestError(f"score needs at least 2 tokens, got {len(ids)}")
        if not 0 <= top_k <= min(1024, self.tokenizer.num_tokens):
            raise InvalidRequestError(f"top_k is {top_k}; allowed are 0 to 1024")
        with self._exclusive():
            self._runner.check_context(len(ids) - 1, "text to score")
            self._runner.reset()
            parts = []
            for chunk in cut(ids[:-1], 0, self._policy, self._message_start):
                parts.append(
                    self._runner.score(ids[chunk.start : chunk.end], ids[chunk.start + 1 : chunk.end + 1], top_k)
                )
        logprobs, top_ids, values, flags = (np.concatenate(x) for x in zip(*parts, strict=True))
        if flags.any():
            raise DeviceError(f"the logits at position {int(flags.argmax())} are not finite: the weights are damaged")
        return Score(logprobs, top_ids, values)

    # ---- inside
    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self._check_ids(prompt)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        self._runner.check_context(len(tokens))
        return tokens

    def _check_ids(self, ids: Sequence[int]) -> list[int]:
        array = np.asarray(list(ids))
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise InvalidRequestError("a prompt is text or a list of token ids (whole numbers)")
        bad = array[(array < 0) | (array >= self.config.vocab_size)] if array.size else array
        if bad.size:
            last = self.config.vocab_size - 1
            raise InvalidRequestError(f"token id {bad[0]} is outside of the vocabulary (0 to {last})")
        return [int(i) for i in array]

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self._stop_ids
        return tuple(dict.fromkeys((*own, *params.stop_token_ids)))

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        me = threading.get_ident()
        if self._owner == me:
            raise InvalidRequestError(
                "this thread has an unfinished stream of the same engine; read it to its end or close it first"
            )
        with self._lock:
            if self._closed:
                raise InvalidRequestError("the engine is closed")
            self._owner = me
            try:
                yield
            finally:
                self._owner = 0

    def _run(self, tokens: list[int], params: SamplingParams, stop_ids: tuple[int, ...]) -> Iterator[StreamChunk]:
        with self._exclusive():
            began = time.perf_counter()
            runner = self._runner
            cached = runner.resume(tokens)
            limit = min(params.max_tokens, self.max_context - len(tokens))
            *chunks, last = cut(tokens, cached, self._policy, self._message_start)
            for chunk in chunks:
                runner.prefill(tokens[chunk.start : chunk.end])
                if chunk.keep:
                    runner.snapshot()
            reply = _Reply(self, tokens, cached, params, stop_ids, began)
            try:
                runner.start(tokens[last.start : last.end], params, stop_ids, limit)
                while not reply.finished and (token := runner.next()) is not None:
                    yield from reply.push(token, last=len(reply.token_ids) + 1 == limit)
            finally:
                runner.stop()

    def skip_ids(self) -> frozenset[int]:
        """Ids without visible text: control tokens, and those that end a reply."""
        return frozenset(self.tokenizer.special_ids) | frozenset(self._stop_ids)


class _Reply:
    """Collects a reply: text from tokens, stop strings, log-probabilities, the final result."""

    def __init__(
        self, engine: Engine, prompt: list[int], cached: int, params: SamplingParams, stop_ids: tuple[int, ...],
        began: float,
    ) -> None:  # fmt: skip
        self.prompt, self.cached, self.stop_ids, self.began = len(prompt), cached, frozenset(stop_ids), began
        self.detokenizer = Detokenizer(engine.tokenizer.token_bytes, engine.skip_ids() | self.stop_ids)
        self.matcher = StopMatcher(params.stop)
        self.token_ids: list[int] = []
        self.text: list[str] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finished = False
        self.first_token = 0.0

    def push(self, token: Token, *, last: bool) -> Iterator[StreamChunk]:
        """Takes one token; yields what may be shown, and the end."""
        if not self.token_ids:
            self.first_token = time.perf_counter()
        self.token_ids.append(token.id)
        logprob = None
        if self.logprobs is not None:
            logprob = [TokenLogprob(token.id, token.logprob or 0.0, token.top)]
            self.logprobs += logprob
        text, stopped = self.matcher.push(self.detokenizer.push(token.id))
        reason: FinishReason | None = "stop" if stopped or token.stopped else ("length" if last else None)
        if reason is not None and not stopped:
            tail, stopped = self.matcher.push(self.detokenizer.flush())
            text += tail + ("" if stopped else self.matcher.flush())
            if self.matcher.stopped:
                reason = "stop"
        self.text.append(text)
        self.finished = reason is not None
        yield StreamChunk(text, [token.id], logprob, reason, self._completion(reason) if reason else None)

    def _completion(self, reason: FinishReason) -> Completion:
        now = time.perf_counter()
        prompt_seconds, seconds = self.first_token - self.began, now - self.first_token
        n = len(self.token_ids)
        timings = Timings(
            prompt_seconds, seconds, (self.prompt - self.cached) / max(prompt_seconds, 1e-9),
            (n - 1) / max(seconds, 1e-9) if n > 1 else 0.0,
        )  # fmt: skip
        return Completion(
            "".join(self.text), self.token_ids, reason, self.prompt, n, self.cached, self.logprobs, timings
        )
