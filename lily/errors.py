# SPDX-License-Identifier: Apache-2.0
"""Every error that Lily raises on purpose.

A message says what was seen, what is allowed, and what to do; the command line prints it without a traceback.
"""

from __future__ import annotations

MESSAGE_LIMIT = 500
"""The most characters of a message."""

_END = 200  # of a longer message's characters those that stay at its end, where it says what to do
_LEFT_OUT = " ... "


class LilyError(Exception):
    """Base class of all of Lily's errors. What it says has at most MESSAGE_LIMIT characters.

    ``full``: the whole message, where the middle of it was left out for that.
    """

    def __init__(self, message: str = "") -> None:
        self.full = message
        beginning = MESSAGE_LIMIT - _END - len(_LEFT_OUT)
        fits = len(message) <= MESSAGE_LIMIT
        super().__init__(message if fits else f"{message[:beginning]}{_LEFT_OUT}{message[-_END:]}")


class LilyWarning(UserWarning):
    """Something was accepted that has no effect. The command line prints it as a note; see the module ``warnings``."""


class CheckpointError(LilyError):
    """A checkpoint is missing, incomplete, damaged or of a kind Lily does not run."""


class CacheError(LilyError):
    """A file with a conversation is damaged, or of another model, device or version of Lily; it was left as it is."""


class ContextLengthError(LilyError):
    """A prompt does not fit into the context; the message holds both token counts.

    ``tokens``: those of the prompt; ``limit``: how many the context holds, with the reply.
    """

    def __init__(self, message: str = "", *, tokens: int = 0, limit: int = 0) -> None:
        super().__init__(message)
        self.tokens, self.limit = tokens, limit


class InvalidRequestError(LilyError):
    """An argument of a request is outside of what is allowed."""


class DeviceError(LilyError):
    """A device cannot be opened, ran out of memory, or reported a failed submission.

    ``again``: the device can be used further, and the same submission may succeed.
    """

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


class TimeLimitError(LilyError):
    """A request was ended at a time that its caller had set: it had not begun by then, or nobody read its reply."""


def show(value: object, limit: int = 80) -> str:
    """A value from a file as printable text of bounded length, for use in messages."""
    try:
        text = ascii(value)
    except ValueError:  # an int beyond sys.set_int_max_str_digits()
        return "a number of thousands of digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."
