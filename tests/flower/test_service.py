from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fedwan.errors import ConfigError
from fedwan.flower.service import listen, log_to, only_one, stop_on_sigterm


def test_a_folder_is_held_by_one_and_free_again_after(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with only_one(folder, "dir"):
        with pytest.raises(ConfigError, match=r"dir .* is in use by another service"):
            with only_one(folder, "dir"):
                pass
    with only_one(folder, "dir"):
        pass


def test_a_holder_that_is_killed_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fedwan.flower.service import only_one\n"
        "with only_one(Path(sys.argv[1]), 'dir'): print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError):
            with only_one(tmp_path, "dir"):
                pass
        holder.kill()
    with only_one(tmp_path, "dir"):
        pass


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        with only_one(tmp_path / "file" / "state", "dir"):
            pass


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


def test_a_port_in_use_names_who_where_and_the_mend() -> None:
    with listen("127.0.0.1", 0, "a test", "port") as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError) as error:
            listen("127.0.0.1", port, "the front door", "link.door")
    assert str(error.value) == (
        f"the front door cannot listen on 127.0.0.1:{port}: the port is in use; "
        "stop what holds it or set another link.door"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machine_is_told(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen(host, 0, "a test", "port")
