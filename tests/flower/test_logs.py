from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from fedwan.flower.logs import log_to, stop_on_sigterm


def test_what_fedwan_logs_is_in_the_file_and_what_others_log_is_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "logs" / "service.log"
    with log_to(path, echo=True):
        logging.getLogger("fedwan.flower.door").info("site s1 asked for '/'")
        logging.getLogger("other").warning("noise")
    logging.getLogger("fedwan.flower.door").info("after")
    assert path.read_text().rstrip().endswith("INFO site s1 asked for '/'")
    assert "site s1 asked" in capfd.readouterr().err


def test_sigterm_sets_the_event_and_the_old_handler_comes_back() -> None:
    stop = threading.Event()
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_sigterm(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wait(5)
    assert signal.getsignal(signal.SIGTERM) is before
