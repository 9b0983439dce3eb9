# SPDX-License-Identifier: Apache-2.0
"""The engine: a model on a device, and the calls that make text.

Calls may come from any thread; a thread of the engine's own does their work, several requests in turn
(run/scheduler.py).
Not handled: batching of requests.
"""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Self, Unpack, overload

import numpy as np

from lily.checkpoint.checkpoint import Checkpoint
from lily.checkpoint.resolve import resolve_model
from lily.checks.tensor_check import open_checked
from lily.device.description import described
from lily.device.device import Device, cpu_remedy
from lily.device.kinds import choose_device
from lily.device.pipelines import compile_pipelines, pipelines
from lily.device.tuned import opening_options
from lily.device.weights import Weights
from lily.errors import DeviceError, InvalidRequestError, LilyError, show
from lily.kernels import MAX_SCORE_TOP
from lily.plan.weights_map import map_weights
from lily.policy import policy_for
from lily.reply_text import ReplyText
from lily.run.budget import (
    DISK_BYTES,
    SOME_LENGTH,
    Budget,
    CacheOptions,
    plan_context,
    residents_bytes,
    sequence_bytes,
    sequences_for,
)
from lily.run.chunks import cut, kept_points
from lily.run.identity import identity
from lily.run.points import Marks
from lily.run.requests import Request, Scheduling
from lily.run.residents import Resident, Residents, Slot
from lily.run.runner import Runner
from lily.run.saved import Saved, read, restore, save
from lily.run.scheduler import Scheduler, Task, Work
from lily.run.sequence import check_context
from lily.run.shelf import Shelf
from lily.sampling import Sampling, SamplingParams, check_ids, checkpoint_defaults, make_params
from lily.streaming import Completion, ReplyChunks, Stream
from lily.text.demands import NONE, Demands, Tools, demands_of, offered_tools
from lily.text.guide import Guide, Guides
from lily.text.reply_parts import ReplyForm
from lily.text.stops import stop_ids
from lily.text.template import ChatTemplate, checked_options
from lily.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lily.session import Session

MAX_THREADS = 256
_PROMPTS = "a prompt is text or a list of token ids (whole numbers)"

OnPrompt = Callable[[int, int], None]
"""Called with (tokens of the prompt that are done, tokens of the prompt)."""


@dataclass(frozen=True)
class Score:
    """Log-probabilities of given tokens: entry i belongs to token i+1, given tokens 0…i."""

    logprobs: np.ndarray[Any, np.dtype[np.float32]]  # [n-1]
    top_ids: np.ndarray[Any, np.dtype[np.int32]]  # [n-1, k]
    top_logprobs: np.ndarray[Any, np.dtype[np.float32]]  # [n-1, k]


class Chat(NamedTuple):
    """What the reply to a chat begins with, the tools that it may call, and what it has to be."""

    form: ReplyForm
    tools: Tools | None = None
    demands: Demands = NONE


class Engine:
    """A loaded model. Use it as a context manager, or call ``close``.

    model: a folder, ``ORG/NAME[@REVISION]`` in the Hugging Face cache, or None for the small embedded model.
    device: ``auto``, ``cpu`` or ``metal``. max_context: tokens of prompt and reply together; by default what
    the model allows and memory holds. threads: of the cpu device. ablate: names of mechanisms to switch off.
    progress: called with (bytes done, bytes in all) while weights are read. sequences: conversations, at most, that
    stay on the device and may be under way at the same time; by default 4, fewer where memory is short. cache_bytes:
    what they may take together. cache_dir: a folder in which those are kept that have to give way, cache_disk_bytes at
    most (run/shelf.py).
    Raises CheckpointError, DeviceError or InvalidRequestError.
    """

    def __init__(
        self, model: str | Path | None = None, *, device: str = "auto", max_context: int | None = None,
        threads: int | None = None, ablate: Sequence[str] | str = (),
        progress: Callable[[int, int], None] | None = None, sequences: int | None = None,
        cache_bytes: int | None = None, cache_dir: str | Path | None = None, cache_disk_bytes: int = DISK_BYTES,
    ) -> None:  # fmt: skip
        self._closed = True  # until everything is there
        _check_options(max_context, threads)
        self._cache = CacheOptions.checked(sequences, cache_bytes, cache_dir, cache_disk_bytes)
        name = choose_device(device)
        self._policy = policy_for(name, _ablations(ablate))
        self.model = resolve_model(None if model is None else str(model))
        with Checkpoint.open(self.model.path) as checkpoint:
            self._describe(checkpoint)
            self._device = open_checked(device, **opening_options(name, self.model.key, threads))
            try:
                self._load(checkpoint, device, max_context, progress)
            except BaseException:
                self._device.close()
                raise
        self._closed = False

    def _describe(self, checkpoint: Checkpoint) -> None:
        """All about the model that needs no weights."""
        config = self.config = checkpoint.config
        self.tokenizer = Tokenizer.from_dir(self.model.path, config.vocab_size)
        self.chat_template = ChatTemplate.from_dir(self.model.path)
        self._notes = (*checkpoint.notes, *self.chat_template.notes)
        self._defaults = checkpoint_defaults(checkpoint.generation_config)
        own_stops = dict.fromkeys((*checkpoint.eos_token_ids, *self.tokenizer.eos_ids))
        # An id beyond the tokenizer's is a padding row, which is never drawn.
        self._stop_ids = tuple(id for id in own_stops if id < self.tokenizer.num_tokens)
        self._guides = Guides(self.tokenizer)
        self._fingerprint = checkpoint.fingerprint()
        self._marks = Marks.of(self.tokenizer.encode, self.tokenizer.id_of)

    def _load(
        self, checkpoint: Checkpoint, asked: str, max_context: int | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:  # fmt: skip
        """Weights into the device's memory, kernels compiled, a sequence ready to begin."""
        config, device, cache = self.config, self._device, self._cache
        weights = map_weights(config, self._policy)
        budget = Budget.of(device)
        self.max_context, self.memory = plan_context(
            config, self._policy, weights, budget=budget, max_context=max_context, name=self.model.name,
            pool=cache.bytes,
        )  # fmt: skip
        needed = partial(sequence_bytes, config, self._policy)
        pool = residents_bytes(budget, self.memory, needed(self.max_context), cache.bytes)
        self.sequences = cache.sequences or sequences_for(pool, needed(min(SOME_LENGTH, self.max_context)))
        shelf = self._shelf()
        with cpu_remedy(asked):
            compile_pipelines(device, pipelines(config, self._policy, weights, self.max_context))
        done = 0

        def report(n: int) -> None:
            nonlocal done
            done += n
            if progress:
                progress(done, checkpoint.total_bytes)

        with ExitStack() as parts:  # closed in the reverse order, here if something fails
            self._weights = Weights(device, weights)
            parts.callback(self._weights.close)
            self._weights.load(checkpoint, report)
            vocab = min(self.tokenizer.num_tokens, config.vocab_size)
            self._runner = Runner(device, config, self._policy, self._weights, vocab=vocab)
            parts.callback(self._runner.close)
            self._residents = Residents(
                self._runner, count=self.sequences, budget=pool, max_context=self.max_context, marks=self._marks,
                sequence_bytes=needed, shelf=shelf,
            )  # fmt: skip
            parts.callback(self._residents.shelve)
            self._device_info = described(device.info)
            kept = ExitStack()
            self._scheduler = Scheduler(
                self._residents, abandon=self._runner.abandon, release=partial(_release, kept, device),
                short=self._policy.part_rows,
            )  # fmt: skip
            kept.push(parts.pop_all())  # there is a thread that will give them back

    @cached_property
    def _identity(self) -> dict[str, str]:
        return identity(self._device, self._policy, self._fingerprint)

    def _shelf(self) -> Shelf | None:
        folder, limit = self._cache.folder, self._cache.disk_bytes
        return None if folder is None else Shelf(folder, limit, self._identity, vocab=self.config.vocab_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Ends the engine and gives its memory back; repeated calls do nothing.

        A call that runs in another thread is waited for; a stream that is not read to its end is cancelled.
        """
        self._closed = True  # for those that wait
        if (scheduler := getattr(self, "_scheduler", None)) is not None:
            scheduler.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an engine owns its device's memory: it cannot be copied or pickled")

    @property
    def closed(self) -> bool:
        """Whether no request can run any more: it was closed, or its thread has failed."""
        return self._closed or self._scheduler.failure is not None

    @property
    def info(self) -> dict[str, Any]:
        """What runs: model, device, path, context, memory in bytes, sampling defaults, ablations, notes."""
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
            "device": {"name": self._policy.device, **self._device_info},
            "max_context": self.max_context,
            "sequences": self.sequences,
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "sampling_defaults": dict(self._defaults),
            "stop_token_ids": list(self._stop_ids),
            "ablate": sorted(self._policy.ablate),
            "notes": list(self._notes),
        }

    def slots(self) -> list[Slot]:
        """The conversations that are on the device, and whether a request uses them. Waits for nothing."""
        return self._residents.slots

    # ---- conversations as files
    def save_cache(self, path: str | Path) -> int:
        """Writes the conversation that was used last to ``path``, for ``load_cache`` of a later engine; its tokens.

        It is written as far as a later prompt can go on from it: 0 tokens, and no file, where that is nowhere. Readable
        by this user only. LilyError: it cannot be written; what was there before is still there.
        """
        self._check_open()
        return self._scheduler.call(partial(self._save, Path(path)))

    def _save(self, path: Path) -> int:
        resident = self._residents.latest
        sequence, in_use = resident.sequence, resident.reserved > 0
        if not (sequence.points if in_use else sequence.positions()):
            return 0
        try:
            return save(path, self._identity, sequence, in_use=in_use).latest
        except OSError as error:
            raise LilyError(f"the conversation cannot be saved in {path}: {error.strerror}") from None

    def load_cache(self, path: str | Path) -> int:
        """Reads a conversation that ``save_cache`` wrote, so that prompts go on from it; gives its number of tokens.

        CacheError: the file is damaged, or of another model, machine, device or build of Lily, whose states would not
        give the same bits. ContextLengthError: it is longer than the context.
        """
        self._check_open()
        saved = read(Path(path), self._identity, vocab=self.config.vocab_size)
        check_context(self.config, self.max_context, saved.latest, "saved conversation")
        request = Request()
        task = Task(request, [*saved.tokens, 0], saved.latest + 1, partial(self._restore, saved))
        with request.reading:
            list(self._received(task, _nobody_waits))
        return saved.latest

    def _restore(self, saved: Saved, resident: Resident) -> Work:
        self._runner.reserve(resident.sequence, saved.latest + 1)
        for _ in restore(saved, self._identity, resident.sequence, saved.latest):
            yield saved.latest

    # ---- text
    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *,
        scheduling: Scheduling | None = None, **sampling: Unpack[Sampling],
    ) -> Completion:  # fmt: skip
        """Continues ``prompt`` (text, taken as it is, or token ids).

        ``sampling`` are fields of SamplingParams by name; what is not given comes from the checkpoint's
        generation_config.json. ``params`` gives all of them at once, and names given beside it change it.
        ``scheduling``: its priority among other requests, and its deadline.
        """
        with self.stream(prompt, params, scheduling=scheduling, **sampling) as stream:
            return stream.completion(alone=True)

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *,
        on_prompt: OnPrompt | None = None, scheduling: Scheduling | None = None, **sampling: Unpack[Sampling],
    ) -> Stream:  # fmt: skip
        """As ``generate``, in chunks. Closing the stream cancels within one token, or one chunk of the prompt.

        The request is checked at once; it runs when the first chunk is asked for. ``on_prompt`` is called with
        (tokens of the prompt that are done, tokens in all), first before any is run and then after each chunk; it
        must not call the engine, which is busy with this request. ``scheduling``: as in ``generate``, and for how long
        the reply may lie unread.
        """
        return Stream(self.request(prompt, sampling, params, on_prompt, scheduling=scheduling))

    def request(
        self, prompt: str | Sequence[int], sampling: Mapping[str, Any], params: SamplingParams | None = None,
        on_prompt: OnPrompt | None = None, chat: Chat | None = None, scheduling: Scheduling | None = None,
    ) -> Callable[[Request], ReplyChunks]:  # fmt: skip
        """A checked request, to be run as a stream's chunks. chat: of what the reply is, if it is one to a chat.

        What holds the reply to its demands is made here, in the caller's thread: a schema may take a while.
        """
        self._check_open()
        tokens = self._prompt_tokens(prompt)
        used = make_params(self._defaults, sampling, params).with_seed()
        stops = self._stop_token_ids(used)
        check_ids(used, stops, self.tokenizer.num_tokens)
        on_prompt, scheduling = on_prompt or _nobody_waits, scheduling or Scheduling()
        guide = None if chat is None else self._guides.guide(chat.demands, chat.form, chat.tools, stops)
        form = None if chat is None else chat.form
        return partial(self._chunks, tokens, used, stops, on_prompt, form, guide, scheduling)

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, template_kwargs: Mapping[str, Any] | None = None,
        continuation: str = "", on_prompt: OnPrompt | None = None, scheduling: Scheduling | None = None,
        tool_choice: str | Mapping[str, Any] | None = None, parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None, reasoning_budget: int | None = None,
        stream: Literal[False] = False, **sampling: Unpack[Sampling],
    ) -> Completion: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, template_kwargs: Mapping[str, Any] | None = None,
        continuation: str = "", on_prompt: OnPrompt | None = None, scheduling: Scheduling | None = None,
        tool_choice: str | Mapping[str, Any] | None = None, parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None, reasoning_budget: int | None = None,
        stream: Literal[True], **sampling: Unpack[Sampling],
    ) -> Stream: ...  # fmt: skip

    def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, template_kwargs: Mapping[str, Any] | None = None,
        continuation: str = "", on_prompt: OnPrompt | None = None, scheduling: Scheduling | None = None,
        tool_choice: str | Mapping[str, Any] | None = None, parallel_tool_calls: bool | None = None,
        response_format: Mapping[str, Any] | None = None, reasoning_budget: int | None = None,
        stream: bool = False, **sampling: Unpack[Sampling],
    ) -> Completion | Stream:  # fmt: skip
        """The assistant's reply to OpenAI-style ``messages``, rendered with the checkpoint's chat template.

        It comes in its parts: reasoning, content (``text``), and calls of ``tools``; without ``tools`` what looks like
        a call is content. Stop strings are looked for in the content. ``continuation``: the beginning of the reply,
        which goes on after it. ``on_prompt`` and ``scheduling`` as in ``stream``.

        ``tool_choice`` (auto, none, required, or a function), ``parallel_tool_calls`` and ``response_format`` (text,
        json_object, json_schema) are OpenAI's: the reply is held to them token by token, once its reasoning has ended.
        ``reasoning_budget``: the reasoning is ended after so many tokens.
        """
        demands = demands_of(
            tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, response_format=response_format,
            reasoning_budget=reasoning_budget,
        )  # fmt: skip
        tools = offered_tools(tools, tool_choice)
        tokens = self.render_chat(messages, tools=tools, template_kwargs=template_kwargs, continuation=continuation)
        reply = Stream(self.chat_request(tokens, sampling, params, on_prompt, tools, demands, scheduling))
        if stream:
            return reply
        with reply:
            return reply.completion(alone=True)

    def chat_request(
        self, tokens: Sequence[int], sampling: Mapping[str, Any], params: SamplingParams | None = None,
        on_prompt: OnPrompt | None = None, tools: Tools | None = None, demands: Demands = NONE,
        scheduling: Scheduling | None = None,
    ) -> Callable[[Request], ReplyChunks]:  # fmt: skip
        """A checked request of the rendered chat ``tokens``, whose reply is held to ``demands``."""
        chat = Chat(self.reply_form(tokens, tools), tools, demands)
        return self.request(tokens, sampling, params, on_prompt, chat, scheduling)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None, continuation: str = "",
    ) -> list[int]:  # fmt: skip
        """Token ids of the rendered chat, ready for the reply; ``continuation`` is the beginning of that reply."""
        kwargs = checked_options(template_kwargs)
        for name in ("tools", "add_generation_prompt", "messages"):
            if name in kwargs:
                raise InvalidRequestError(f"{name!r} is set by Lily itself and cannot be a template option")
        text = self.chat_template.render(messages, tools=tools, **kwargs)
        return self.tokenizer.encode(text + continuation)

    def reply_form(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]] | None = None) -> ReplyForm:
        """What the reply to the rendered chat ``prompt`` begins with, and the ``tools`` that it may call."""
        last = next((place for place in reversed(range(len(prompt))) if prompt[place] == self._marks.message), 0)
        return ReplyForm.of(self.tokenizer.decode(prompt[last:]), tools)

    def session(self, *, system: str | None = None, template_kwargs: Mapping[str, Any] | None = None) -> Session:
        """A conversation that remembers its turns; what it shares with the previous request is not run again."""
        from lily.session import Session

        return Session(self, system=system, template_kwargs=template_kwargs)

    def score(self, tokens: Sequence[int], top_k: int = 0) -> Score:
        """Log-probability of each token given those before it, with the ``top_k`` likeliest alternatives."""
        ids = self._check_ids(tokens, "score takes a list of token ids; of a text tokenizer.encode(text) makes them")
        if len(ids) < 2:
            raise InvalidRequestError(f"score needs at least 2 tokens, got {len(ids)}")
        known = self.tokenizer.num_tokens
        if type(top_k) is not int or not 0 <= top_k <= min(MAX_SCORE_TOP, known):
            raise InvalidRequestError(f"top_k is {show(top_k)}; allowed are 0 to {min(MAX_SCORE_TOP, known)}")
        if max(ids[1:]) >= known:
            raise InvalidRequestError(f"token id {max(ids[1:])} is a padding row, never drawn: it has no probability")
        check_context(self.config, self.max_context, len(ids) - 1, "text to score")
        request = Request()
        task = Task(request, (), len(ids), partial(self._score, request, ids, top_k))
        with request.reading:
            parts = list(self._received(task, _nobody_waits))
        logprobs, top_ids, values, flags = (np.concatenate(x) for x in zip(*parts, strict=True))
        if flags.any():
            raise DeviceError(f"the logits at position {int(flags.argmax())} are not finite: the weights are damaged")
        return Score(logprobs, top_ids, values)

    # ---- inside
    def _prompt_tokens(self, prompt: str | Sequence[int]) -> list[int]:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self._check_ids(prompt, _PROMPTS)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        check_context(self.config, self.max_context, len(tokens))
        return tokens

    def _check_ids(self, ids: Sequence[int], allowed: str) -> list[int]:
        try:
            # An iterator could be read once only, and a set has no order.
            if isinstance(ids, (str, bytes, bytearray, Mapping)) or not hasattr(ids, "__getitem__"):
                raise TypeError
            if any(isinstance(i, bool) for i in ids):
                raise TypeError
            tokens = [operator.index(i) for i in ids]
        except TypeError:
            raise InvalidRequestError(f"{allowed}; seen {_kind(ids)}") from None
        limit = self.config.vocab_size
        bad = next((i for i in tokens if not 0 <= i < limit), None)
        if bad is not None:
            raise InvalidRequestError(f"token id {show(bad)} is outside of the vocabulary (0 to {limit - 1})")
        return tokens

    def _stop_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self._stop_ids
        spelled = stop_ids(params.stop, self.tokenizer.id_of, self.skip_ids())
        return tuple(dict.fromkeys((*own, *params.stop_token_ids, *spelled)))

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidRequestError("the engine is closed")

    def _received(self, task: Task, on_prompt: OnPrompt) -> Iterator[Any]:
        """Has ``task`` done and gives what comes of it, in the caller's thread; it ends with whoever reads."""
        self._check_open()
        request = task.request
        if request.cancelled:
            return
        self._scheduler.submit(task)
        try:
            for event in request.events():
                if isinstance(event, _Progress):
                    on_prompt(event.done, event.total)
                else:
                    yield event
        except GeneratorExit:  # it is being closed: nothing more is done for it afterwards
            request.cancel()
            self._scheduler.settle(request)
            raise
        finally:
            if not request.over.is_set():  # Ctrl-C waits for nobody
                request.cancel()

    def _chunks(
        self, tokens: list[int], params: SamplingParams, stop_ids: tuple[int, ...], on_prompt: OnPrompt,
        form: ReplyForm | None, guide: Guide | None, scheduling: Scheduling, request: Request,
    ) -> ReplyChunks:  # fmt: skip
        limit = params.limit(self.max_context - len(tokens))
        work = partial(self._reply, request, tokens, params, stop_ids, limit, form, guide)
        yield from self._received(Task(request, tokens, len(tokens) + limit, work, scheduling), on_prompt)

    def _reply(
        self, request: Request, tokens: list[int], params: SamplingParams, stop_ids: tuple[int, ...], limit: int,
        form: ReplyForm | None, guide: Guide | None, resident: Resident,
    ) -> Work:  # fmt: skip
        """The engine's work on a prompt and its reply; what comes of it is put into ``request``."""
        began, runner, total = time.perf_counter(), self._runner, len(tokens)
        sequence = resident.sequence
        with closing(resident.fetch()) as pieces:
            for _ in pieces:
                yield total
        cached = sequence.resume(tokens)
        runner.reserve(sequence, total + 1)
        *chunks, last = cut(tokens, cached, self._policy, self._marks, resident.shared)
        request.put(_Progress(cached, total))
        try:
            for chunk in chunks:
                yield total - chunk.start
                yield from runner.prefill(sequence, tokens[chunk.start : chunk.end])
                if chunk.keep:
                    sequence.snapshot()
                request.put(_Progress(chunk.end, total))
            yield total - last.start
            sequence.keep_only(kept_points(tokens, cached, self._policy, self._marks, resident.shared))
            reply = yield from runner.start(sequence, tokens[last.start : last.end], params, stop_ids, limit, guide)
        except GeneratorExit:  # cancelled: what has been read stays
            sequence.snapshot()
            raise
        text = ReplyText(
            self.tokenizer, tokens, params, hidden=self.skip_ids(), stop_ids=frozenset(stop_ids), form=form,
            cached=cached, began=began, reuse=resident.reason,
        )  # fmt: skip
        try:
            request.put(_Progress(total, total))
            while (token := reply.next()) is not None:
                first = not text.token_ids
                if text.push(token, last=len(text.token_ids) + 1 == limit):
                    break
                if not request.whole:
                    request.put(text.chunk(), more=not first)
                if request.turn_over():
                    yield 0
            else:
                return
        finally:
            reply.stop()
        request.put(text.chunk())  # the device has finished before the last one is read

    def _score(self, request: Request, ids: list[int], top_k: int, resident: Resident) -> Work:
        """The engine's work on a text to be scored; each chunk's results are put into ``request``."""
        sequence = resident.sequence
        sequence.reset()
        self._runner.reserve(sequence, len(ids) - 1)
        for chunk in cut(ids[:-1], 0, self._policy, self._marks):
            yield len(ids) - 1 - chunk.start
            targets = ids[chunk.start + 1 : chunk.end + 1]
            request.put((yield from self._runner.score(sequence, ids[chunk.start : chunk.end], targets, top_k)))

    def skip_ids(self) -> frozenset[int]:
        """Ids without visible text: control tokens, and those that end a reply."""
        return frozenset(self.tokenizer.special_ids) | frozenset(self._stop_ids)


def _kind(ids: object) -> str:
    """What was given instead of token ids; of a list the kinds of its entries."""
    name = type(ids).__name__
    return f"a list of {', '.join(sorted({type(i).__name__ for i in ids}))}" if isinstance(ids, list) else name


def _ablations(given: object) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, Iterable):
        raise InvalidRequestError(f"ablate is {show(given)}; allowed: names of mechanisms")
    return tuple(names)


def _release(parts: ExitStack, device: Device) -> None:
    """Gives everything on the device back; the engine's thread does it in the end."""
    parts.close()
    device.close()


def _nobody_waits(done: int, total: int) -> None:
    """The ``on_prompt`` of those who gave none."""


def _check_options(max_context: object, threads: object) -> None:
    if max_context is not None and type(max_context) is not int:
        raise InvalidRequestError(f"max_context is {show(max_context)}; allowed: a whole number of tokens")
    if threads is not None and (type(threads) is not int or not 1 <= threads <= MAX_THREADS):
        raise InvalidRequestError(f"threads is {show(threads)}; allowed: a whole number from 1 to {MAX_THREADS}")


class _Progress(NamedTuple):
    """Of a prompt: tokens that are done, tokens in all."""

    done: int
    total: int
