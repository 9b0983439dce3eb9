# SPDX-License-Identifier: Apache-2.0
"""A conversation: messages with the assistant's replies added as they come.

The session owns messages only.  What the device already holds of the rendered conversation is found by the engine, by
comparing tokens; so an edited or repeated turn is as correct as a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Unpack

from lily.checkpoint.strict_json import show
from lily.errors import InvalidRequestError, LilyError
from lily.sampling import Sampling, SamplingParams
from lily.streaming import Completion, Pieces, Stream
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
        self.reset()

    def reset(self) -> None:
        """Forgets every turn; the system prompt stays."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def send(
        self, message: str | Mapping[str, Any], params: SamplingParams | None = None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, **sampling: Unpack[Sampling],
    ) -> Completion:  # fmt: skip
        """Adds a user message (or any message) and the reply to it; on an error the conversation is unchanged."""
        with self.stream(message, params, tools=tools, **sampling) as chunks:
            for chunk in chunks:
                if chunk.completion is not None:
                    completion = chunk.completion
        return completion

    def stream(
        self, message: str | Mapping[str, Any], params: SamplingParams | None = None, *,
        tools: Sequence[Mapping[str, Any]] | None = None, on_prompt: OnPrompt | None = None,
        **sampling: Unpack[Sampling],
    ) -> Stream:  # fmt: skip
        """As ``send``, in pieces. A reply that is cancelled stays in the conversation as far as it was shown.

        ``on_prompt`` as in ``Engine.stream``.
        """
        turn = _turn_of(message)
        prompt = self.engine.render_chat([*self.messages, turn], tools=tools, template_kwargs=self.template_kwargs)
        request = self.engine.request(prompt, sampling, params, on_prompt)
        return Stream(lambda control: self._turn(turn, request(control)))

    def _turn(self, turn: dict[str, Any], pieces: Pieces) -> Pieces:
        shown: list[str] = []
        try:
            with closing(pieces):
                for chunk in pieces:
                    shown.append(chunk.text)
                    yield chunk
        except LilyError:
            shown.clear()
            raise
        finally:
            if shown:
                self.messages += [turn, {"role": "assistant", "content": "".join(shown)}]


def _turn_of(message: object) -> dict[str, Any]:
    if isinstance(message, str):
        return {"role": "user", "content": message}
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"the message is {show(message)}; allowed: text, or a mapping with role and content")
    return dict(message)
