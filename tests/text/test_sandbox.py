# SPDX-License-Identifier: Apache-2.0
"""What a chat template may do: its work is counted, and the sandbox holds."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from chats import A, S, T, U, call, embedded, needs_real, real
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lily.errors import CheckpointError, InvalidRequestError
from lily.text import sandbox
from lily.text.template import ChatTemplate

# Each of them runs for hours, or fills the memory, where its work is not counted.
ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops without a body": "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
    "a loop in itself": "{% for x in [[1, 1]] recursive %}{{ loop([[1, 1], [1, 1]]) if loop.depth < 60 }}{% endfor %}",
    "a macro in itself": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a long body": "{% for i in range(99999) %}" + "{{ i }}" * 2000 + "{% endfor %}",
    "loops in filters": "{% for i in range(99999) %}{% set y = range(99999) | map('string') | list %}{% endfor %}",
    "loops in select": "{% for i in range(99999) %}{% set y = range(99999) | select('eq', 3) | list %}{% endfor %}",
    "sums": "{% for i in range(99999) %}{% set y = range(99999) | sum %}{% endfor %}",
    "sorting": "{% set x = ['b', 'a'] * 50000 %}{% for i in range(99999) %}{% set y = x | sort %}{% endfor %}",
    "copies": "{% set x = [1] * 100000 %}{% for i in range(99999) %}{% set y = x[:] %}{% endfor %}",
    "searching": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{% set y = 'b' in x %}{% endfor %}",
    "counting": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{% set y = x.count('b') %}{% endfor %}",
    "output": "{% set x = 'a' * 10000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "repetition": "{{ 'a' * 10 ** 9 }}",
    "repetition of a list": "{% set x = [1] * 10 ** 9 %}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubled text": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "joined text": "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "a doubled list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubled output": "{% set ns = namespace(x='a') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "center": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(100000) }}",
    "a width": "{{ '%1000000000d' % 1 }}",
    "a width among the values": "{{ '%*d' % (1000000000, 1) }}",
    "a width in format": "{{ '{:1000000000}'.format(1) }}",
    "a width among the values of format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a width in a filter": "{{ ['%1000000000d'] | map('format', 1) | join }}",
    "a value in many fields": "{{ ('{0}' * 100000).format('a' * 100000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "the filter replace": "{{ ('a' * 1000000) | replace('', 'b' * 1000000) }}",
    "join": "{{ ('b' * 1000000).join(['a'] * 1000000) }}",
    "the filter join": "{{ (['a'] * 1000000) | join('b' * 1000000) }}",
    "indent": "{{ ('\n' * 100000) | indent(100000) }}",
    "tojson": "{{ ([1] * 100000) | tojson(indent=100000) }}",
    "wordwrap": "{{ ('a ' * 100000) | wordwrap(1, wrapstring='b' * 100000) }}",
    "batch": "{{ [1] | batch(10 ** 8, 'x') | list | length }}",
    "slice": "{{ [1] | slice(10 ** 8) | list | length }}",
    "a sum of lists": "{{ ([[1] * 1000] * 100000) | sum(start=[]) | length }}",
    "round": "{{ 1 | round(-10 ** 8) }}",
    "to_bytes": "{{ (5).to_bytes(1000000000, 'big') | length }}",
    "translate": "{{ ('a' * 100000).translate({97: 'b' * 100000}) | length }}",
    "marked text": "{{ ('a' | safe) * 10 ** 9 }}",
    # Every place of a text is compared with all of the argument.
    **{name: f"{{{{ ('a' * 100000).{name}('b' * 100000 ~ 'a') }}}}" for name in ("strip", "lstrip", "rstrip")},
    **{
        name: f"{{% set x = 'a' * 50000 %}}{{{{ ('a' * 200000).{name}(x ~ 'b' ~ x) }}}}"
        for name in ("rfind", "rindex", "rpartition", "rsplit")
    },
    "trim": "{{ ('a' * 100000) | trim('b' * 100000 ~ 'a') }}",
}

LISTS = (
    "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
)
TUPLES = "{% set ns = namespace(x=('a',)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
DEEP = "{% set ns = namespace(x=('a',)) %}{% for i in range(90000) %}{% set ns.x = (ns.x,) %}{% endfor %}"
NESTED = {
    "written": LISTS + "{{ ns.x }}",
    "as JSON": LISTS + "{{ ns.x | tojson }}",
    "compared": LISTS + "{{ ns.x == ns.y }}",
    "searched": LISTS + "{{ ns.x in [ns.y] }}",
    "tested": LISTS + "{{ ns.x is eq ns.y }}",
    "joined": LISTS + "{{ 'a' ~ ns.x }}",
    "formatted": LISTS + "{{ '%s' % (ns.x,) }}{{ '{}'.format(ns.x) }}",
    "as a key": TUPLES + "{{ {ns.x: 1} }}",
    "looked up": TUPLES + "{{ {1: 2}[ns.x] }}",
    "got": TUPLES + "{{ {1: 2}.get(ns.x) }}",
    "asked for": TUPLES + "{{ ns.x in {1: 2} }}",
    "deep, written": DEEP + "{{ ns.x }}",
    "deep, as a key": DEEP + "{{ {ns.x: 1} }}",
}


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the real bounds, reached in a hundredth of the time."""
    monkeypatch.setattr(sandbox, "MAX_STEPS", 200_000)
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", 1 << 24)


@pytest.mark.usefixtures("small_bounds")
@pytest.mark.parametrize("source", (ENDLESS | NESTED).values(), ids=(ENDLESS | NESTED).keys())
def test_a_template_that_would_not_end_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^chat template: rendering these messages takes") as caught:
        ChatTemplate(source).render([U])
    assert len(str(caught.value)) <= 500


def test_the_bounds_themselves_stop_a_template() -> None:
    with pytest.raises(InvalidRequestError, match="takes more than 20,000,000 steps"):
        ChatTemplate(ENDLESS["loops"]).render([U])
    with pytest.raises(InvalidRequestError, match="takes more than 268,435,456 characters of text"):
        ChatTemplate(ENDLESS["repetition"]).render([U])


@pytest.mark.parametrize("template", [embedded, pytest.param(real, marks=needs_real)])
def test_the_longest_chats_stay_far_below_the_bounds(
    monkeypatch: pytest.MonkeyPatch, template: Callable[[], ChatTemplate]
) -> None:
    turn = [
        U,
        {**call('{"a": 1, "b": [1, 2]}'), "reasoning": "R"},
        T,
        {**A, "content": "<think>\nR\n</think>\n\n" + "word " * 99},
    ]
    template()
    monkeypatch.setattr(sandbox, "MAX_STEPS", sandbox.MAX_STEPS // 5)
    monkeypatch.setattr(sandbox, "MAX_CHARACTERS", sandbox.MAX_CHARACTERS // 10)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"p": list(range(50))}}}] * 100
    assert template().render([S, *turn * 2500, U], tools=tools).count("<|im_end|>") > 7000


def test_counting_changes_no_text() -> None:
    source = (
        "{% macro m(x) %}<{{ x | trim }}>{% endmacro %}"
        "{% for x in xs if x != 2 %}{{ loop.index ~ x }}{{ m(' a ' + 'b') }}"
        "{% else %}none{% endfor %}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 8 }}{{ 'ab' * 2 }}{{ '%03d|%s' % (5, 'x') }}"
        "{{ '{:>4}{!r}'.format('a', 'b') }}{{ 'a,b'.split(',') | join('+') }}{{ [3, 1] | sort }}{{ 'abc'[::-1] }}"
        "{{ {'a': 1}.items() | list }}{{ 'a' in 'abc' }}{{ [1] + [2] }}{{ 'x' | center(5) }}{{ (1, 2) in {(1, 2): 3} }}"
        "{% set y %}{{ 1 }}{{ 2 }}{% endset %}{{ y }}{{ xs | map('string') | join }}{{ {'b': 1} | tojson }}"
        "{% block c %}[{{ xs | sum }}]{% endblock %}{{ self.c() }}{{ xs | batch(2) | list }}{{ 2.5 | round | int }}"
    )
    plain = ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = lambda value: json.dumps(value)
    assert ChatTemplate(source).render([U], xs=[1, 2, 3]) == plain.from_string(source).render(xs=[1, 2, 3])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.append(1) }}",
        "{{ ''['__class__'].mro() }}",
        "{{ (''|attr('__class__')).mro() }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        assert ChatTemplate(source).render([U]) == ""
    except InvalidRequestError as error:
        assert "SecurityError" in str(error)  # noqa: PT017 (either will do)


@pytest.mark.parametrize(
    "source",
    [
        "{% for x in y %}" * 22 + "{% endfor %}" * 22,
        "{% if x %}" * 120 + "{% endif %}" * 120,
        "{{ " + "9" * 5000 + " }}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ x | no_such_filter }}",
        "{% include 'a' %}{% for %}",
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"not a valid template: .*; download it again") as caught:
        ChatTemplate(source, origin="folder/chat_template.jinja")
    assert str(caught.value).startswith("folder/chat_template.jinja: ")
    assert "\n" not in str(caught.value)
