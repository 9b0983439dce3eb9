# SPDX-License-Identifier: Apache-2.0
"""A conversation: messages with the assistant's replies added as they come.

The session owns messages only.  What the device already holds of the rendered conversation is found by the engine, by
comparing tokens; so an edited or repeated turn is as correct as a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from lily.errors import LilyError
from lily.streaming import Completion, Pieces, Stream

if TYPE_CHECKING:
    from lily.engine import Engine


class Session:
    """Turns of one conversation with ``engine``. ``messages`` may be read and edited between turns."""

    def __init__(
        self, engine: Engine, *, system: str | None = None, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.engine, self.system = engine, system
        self.template_kwargs = dict(template_kwargs or {})
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forgets every turn; the system prompt stays."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def send(
        self, message: str | Mapping[str, Any], *, tools: Sequence[Mapping[str, Any]] | None = None, **sampling: Any
    ) -> Completion:
        """Adds a user message (or any message) and the reply to it; on an error the conversation is unchanged."""
        with self.stream(message, tools=tools, **sampling) as chunks:
            for chunk in chunks:
                if chunk.completion is not None:
                    completion = chunk.completion
        return completion

    def stream(
        self, message: str | Mapping[str, Any], *, tools: Sequence[Mapping[str, Any]] | None = None, **sampling: Any
    ) -> Stream:
        """As ``send``, in pieces. A reply that is cancelled stays in the conversation as far as it was shown."""
        turn = {"role": "user", "content": message} if isinstance(message, str) else dict(message)
        prompt = self.engine.render_chat([*self.messages, turn], tools=tools, template_kwargs=self.template_kwargs)
        request = self.engine.request(prompt, sampling)
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
