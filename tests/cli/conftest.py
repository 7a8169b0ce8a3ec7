"""The command line as its tests call it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedwan.cli.main import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def fedwan(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command with words; gives its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(words)
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return run


def mistake(fedwan: Command, *words: str) -> str:
    """The one line that a user's mistake is told with."""
    code, _, text = fedwan(*words)
    assert code == 2 and text.startswith("fedwan: ") and text.count("\n") == 1, text
    return text
