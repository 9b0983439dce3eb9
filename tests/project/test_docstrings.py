# SPDX-License-Identifier: Apache-2.0
"""What ``make lint`` says of backticks in docstrings and comments, on planted sources."""

from __future__ import annotations

import pytest

from tools.docstrings import single_backticks

PLANTED = {
    "a module": ('"""Of `x`."""\n', [(1, "`x`")]),
    "a later line of a function": ('def f():\n    """One.\n\n    Of `x` and `y`.\n    """\n', [(4, "`x`"), (4, "`y`")]),
    "a class": ('class A:\n    """Of `x`."""\n', [(2, "`x`")]),
    "a comment": ("# of `x`\n", [(1, "`x`")]),
    "a comment behind code": ("a = 'of `y`'  # of `x`\n", [(1, "`x`")]),
}


@pytest.mark.parametrize("where", PLANTED)
def test_single_backticks_are_found(where: str) -> None:
    source, expected = PLANTED[where]
    assert single_backticks(source) == expected


FINE = {
    "double ones": '"""Of ``x``, ``y``."""\n',
    "a string": "a = 'say `x`'\n",
    "help that click shows": '@click.command()\n@other\ndef f():\n    """Of `x`."""\n',
    "help of a group": '@click.group(a=1)\ndef f():\n    """Of `x`."""\n',
    "a string that is no docstring": 'def f():\n    a()\n    """Of `x`."""\n',
    "a mark in a string": "a = '# `x`'\n",
}


@pytest.mark.parametrize("what", FINE)
def test_what_is_no_docstring_may_have_them(what: str) -> None:
    assert single_backticks(FINE[what]) == []
