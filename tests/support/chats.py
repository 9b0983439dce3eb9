# SPDX-License-Identifier: Apache-2.0
"""Messages, and the chat templates that tests render them with."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from needs import REAL_DATA, real_tokenizer
from paths import EMBEDDED

from lily.text.template import ChatTemplate

REAL = real_tokenizer()

needs_real = pytest.mark.skipif(REAL is None, reason=REAL_DATA)

# Refuses what the real template refuses, in the same words, so that these cases run without it.
STRICT = """
{%- if not messages %}{{ raise_exception('No messages provided.') }}{% endif %}
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- endif %}
    {{- '[' + m.role + ':' + m.content + ']' }}
{%- endfor %}
"""

S = {"role": "system", "content": "S"}
U = {"role": "user", "content": "U"}
A = {"role": "assistant", "content": "A"}
T = {"role": "tool", "content": "T"}


@cache
def real() -> ChatTemplate:
    assert REAL is not None
    return ChatTemplate.from_dir(REAL)


@cache
def embedded() -> ChatTemplate:
    return ChatTemplate.from_dir(EMBEDDED)


def call(arguments: Any = ..., name: Any = "f") -> dict[str, Any]:
    function = {"name": name} if arguments is ... else {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}
