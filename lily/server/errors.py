# SPDX-License-Identifier: Apache-2.0
"""What goes wrong with a request, as HTTP status and as the objects that OpenAI's and Anthropic's clients expect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lily.errors import CheckpointError, ContextLengthError, InvalidRequestError, LilyError

TOO_LONG = "context_length_exceeded"
_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    503: "overloaded_error",
}  # fmt: skip
_FIELD = re.compile(r"([a-z_]+)(?:\[\d+\]|\.[a-z_]+)*")
_OPTION = "template option "


class RequestError(LilyError):
    """A request that is refused or has failed: its HTTP ``status``, OpenAI's ``code``, the field at fault.

    headers: of the response, beside those of its body. too_long: both counts, of a prompt that does not fit.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None, too_long: str = "",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.too_long = too_long
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object of the response, and of the event that ends a stream."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The same for Anthropic's clients, which tell a prompt that is too long by how its message begins."""
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        message = f"{self.too_long}; {self}" if self.too_long else str(self)
        return {"type": "error", "error": {"type": kind, "message": message}}


def wrong(param: str, message: str, code: str | None = None) -> RequestError:
    """A field of the request is missing or wrong; the message says what was seen and what is allowed."""
    return RequestError(400, message, param=param, code=code)


def as_request_error(error: Exception, prompt_field: str, hidden: str = "") -> RequestError:
    """What an engine's error means for the request. ``prompt_field`` is at fault where no other is named.

    hidden: a path that no client is told. Of an error that is a bug only its type is told: its message could hold text
    of the prompt.
    """
    if isinstance(error, RequestError):
        return error
    text = str(error).replace(hidden, "the model's folder") if hidden else str(error)
    match error:
        case ContextLengthError():
            counts = f"prompt is too long: {error.tokens} tokens > {error.limit - 1} maximum"
            return RequestError(400, text, param=prompt_field, code=TOO_LONG, too_long=counts)
        case InvalidRequestError() if text.startswith(_OPTION):
            return wrong("chat_template_kwargs", f"chat_template_kwargs: {text}")
        case InvalidRequestError():
            return RequestError(400, text, param=_named_field(text) or prompt_field)
        case CheckpointError():  # of a chat template: the server cannot do what was asked
            return RequestError(500, text, code="checkpoint_error")
        case LilyError():
            return RequestError(500, text, code="device_error")
    return RequestError(500, f"this is a bug in Lily: {type(error).__name__}; the server's log says where", code="bug")


def _named_field(message: str) -> str | None:
    """The field with which the message begins, if it does."""
    found = _FIELD.match(message)
    return found[0] if found and found[1] in FIELDS else None


FIELDS = frozenset({
    "messages", "tools", "max_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "logprobs",
    "stop_token_ids", "ignore_eos", "tool_choice", "parallel_tool_calls", "response_format", "reasoning_budget",
})  # fmt: skip
"""Fields with which a message of the engine may begin."""
