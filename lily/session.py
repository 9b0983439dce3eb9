# SPDX-License-Identifier: Apache-2.0
"""A conversation: messages with the assistant's replies added as they come.

The session owns messages only.  What the device already holds of the rendered conversation is found by the engine, by
comparing tokens; so an edited or repeated turn is as correct as a new one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Unpack

from lily.errors import InvalidRequestError, LilyError, show
from lily.run.requests import Request, Scheduling
from lily.sampling import Sampling, SamplingParams
from lily.streaming import Completion, ReplyChunks, Stream, StreamChunk, ToolCallDelta
from lily.text.demands import demands_of, offered_tools
from lily.text.template import checked_options

if TYPE_CHECKING:
    from lily.engine import Engine, OnPrompt


class Session:
    """Turns of one conversation with ``engine``. ``messages`` may be read and edited between turns."""

    def __init__(
        self, engine: Engine, *, system: str | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.engine, self.system = engine, system
        self.template_kwargs = checked_options(template_kwargs)
        self.messages: list[dict[str, Any]] = []
        self._replying = threading.Lock()  # held while a turn is under way
        self.reset()

    def reset(self) -> None:
        """Forgets every turn; the system prompt stays."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def send(
        self, message: str | Mapping[str, Any], params: SamplingParams | None = None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None, response_format: Mapping[str, Any] | None = None,
        reasoning_budget: int | None = None, scheduling: Scheduling | None = None, **sampling: Unpack[Sampling],
    ) -> Completion:  # fmt: skip
        """Adds a user message (or any message) and the reply to it; on an error the conversation is unchanged."""
        with self.stream(
            message, params, tools=tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls,
            response_format=response_format, reasoning_budget=reasoning_budget, scheduling=scheduling, **sampling,
        ) as stream:  # fmt: skip
            return stream.completion()

    def stream(
        self, message: str | Mapping[str, Any], params: SamplingParams | None = None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None, response_format: Mapping[str, Any] | None = None,
        reasoning_budget: int | None = None, on_prompt: OnPrompt | None = None,
        scheduling: Scheduling | None = None, **sampling: Unpack[Sampling],
    ) -> Stream:  # fmt: skip
        """As ``send``, in chunks. A reply that is cancelled stays in the conversation as far as it came.

        The turn begins when its first chunk is asked for, and follows the messages that are there then. It is an
        InvalidRequestError to begin one before the one before it has ended. What is demanded of the reply as in
        ``Engine.chat``, ``on_prompt`` and ``scheduling`` as in ``Engine.stream``.
        """
        turn = _turn_of(message)
        before = deepcopy(self.messages)
        demands = demands_of(
            tools, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, response_format=response_format,
            reasoning_budget=reasoning_budget,
        )  # fmt: skip
        tools = offered_tools(tools, tool_choice)

        def request() -> Callable[[Request], ReplyChunks]:
            messages = [*self.messages, turn]
            prompt = self.engine.render_chat(messages, tools=tools, template_kwargs=self.template_kwargs)
            return self.engine.chat_request(prompt, sampling, params, on_prompt, tools, demands, scheduling)

        checked = request()  # what is wrong with it is said at once
        return Stream(lambda made: self._turn(turn, lambda: (checked if self.messages == before else request())(made)))

    def _turn(self, turn: dict[str, Any], begin: Callable[[], ReplyChunks]) -> ReplyChunks:
        came = _Came()
        last: StreamChunk | None = None
        mine = False
        try:
            mine = self._replying.acquire(blocking=False)
            if not mine:
                raise InvalidRequestError("a reply of this conversation is unfinished; read it to its end or close it")
            with closing(begin()) as reply:
                for chunk in reply:
                    came.add(chunk)
                    if chunk.completion is None:
                        yield chunk
                    else:
                        last = chunk
        except LilyError:
            came = _Came()
            raise
        finally:
            if came.any:
                self.messages += [turn, came.message()]
            if mine:
                self._replying.release()
        if last is not None:
            yield last  # the conversation has the turn by now


class _Came:
    """What has come of a reply."""

    def __init__(self) -> None:
        self.any = False
        self._texts: list[str] = []
        self._reasonings: list[str] = []
        self._begun: dict[int, tuple[ToolCallDelta, list[str]]] = {}  # calls: the first delta, and arguments so far

    def add(self, chunk: StreamChunk) -> None:
        self.any = True
        self._texts.append(chunk.text)
        self._reasonings.append(chunk.reasoning)
        for delta in chunk.tool_calls:
            self._begun.setdefault(delta.index, (delta, []))[1].append(delta.arguments)

    def message(self) -> dict[str, Any]:
        """The assistant's message, in OpenAI's form; of its calls those that are complete."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._texts)}
        if reasoning := "".join(self._reasonings):
            message["reasoning_content"] = reasoning
        calls = ((delta, "".join(arguments)) for delta, arguments in self._begun.values())
        complete = [_call(delta, arguments) for delta, arguments in calls if _is_json(arguments)]
        return {**message, "tool_calls": complete} if complete else message


def _call(begun: ToolCallDelta, arguments: str) -> dict[str, Any]:
    return {"id": begun.id, "type": "function", "function": {"name": begun.name, "arguments": arguments}}


def _is_json(arguments: str) -> bool:
    """Whether a call's arguments are complete: their last brace comes with its end."""
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _turn_of(message: object) -> dict[str, Any]:
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"the message is {show(message)}; allowed: text, or a mapping with role and content")
    return dict(message)
