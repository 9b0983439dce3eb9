# SPDX-License-Identifier: Apache-2.0
"""The progress bars: what is shown, how wide, and to whom."""

from __future__ import annotations

import io

import pytest

from lily.cli import run
from lily.cli.console import Progress, Reading, gigabytes


class Screen(io.StringIO):
    """A terminal of some width that keeps what is written."""

    def __init__(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr("sys.stderr", self)
        monkeypatch.setattr("lily.cli.console.terminal_width", lambda stream: columns)

    def isatty(self) -> bool:
        return True

    @property
    def pictures(self) -> list[str]:
        """Each state of the one line."""
        return [part.removesuffix("\x1b[K") for part in self.getvalue().split("\r")[1:]]


def test_the_progress_bar_names_its_work_at_once_ends_full_and_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(80, monkeypatch)
    bar = Progress("loading x", gigabytes)
    bar(0, 2_000_000_000)
    bar(1, 2_000_000_000)  # too soon to be shown
    bar(2_000_000_000, 2_000_000_000)
    bar.clear()
    empty, full = (f"loading x [{fill * 30}] {done} of 2.00 GB" for fill, done in ((" ", "0.00"), ("#", "2.00")))
    assert screen.pictures == ["loading x", empty, full, ""]


@pytest.mark.parametrize("columns", [1, 10, 40, 60, 80, 200])
def test_the_progress_bar_is_never_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A line that fills the terminal would be wrapped, and then each picture would be a line of its own."""
    screen = Screen(columns, monkeypatch)
    bar = Progress("loading mlx-community/Qwen3.6-35B-A3B-4bit-with-a-long-name", gigabytes)
    bar(20_400_000_000, 20_400_000_000)
    assert max(map(len, screen.pictures)) < columns
    assert columns < 60 or "########] 20.40 of 20.40 GB" in screen.pictures[-1]


def test_the_reading_of_a_long_prompt_is_shown_until_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(80, monkeypatch)
    long, short = Reading(), Reading()
    long(0, 3010)
    assert screen.pictures[-1].endswith("] 0 of 3,010 tokens")
    long(3010, 3010)
    assert screen.pictures[-1] == ""
    shown = len(screen.pictures)
    long.clear()
    for done in (2900, 3010):
        short(done, 3010)
    short.clear()
    assert len(screen.pictures) == shown


def test_loading_and_reading_are_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "Hello " * 300, "--ignore-chat-template", "--max-tokens", "1", "--temp", "0"]
    assert run(arguments) == 0
    assert "\r" not in capsys.readouterr().err
    screen = Screen(80, monkeypatch)
    assert run(arguments) == 0
    assert "loading the embedded model" in screen.pictures
    assert any(picture.startswith("reading the prompt [") for picture in screen.pictures)
