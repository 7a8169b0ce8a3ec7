from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedwan.config import Config, to_json
from fedwan.errors import CheckpointError, ConfigError, IdentityError
from fedwan.flower.coordinator import serve_coordinator
from fedwan.flower.lock import only_one
from fedwan.flower.ports import free_port, listen
from fedwan.flower.processes import in_sessions

COORDINATOR = """
import sys
from pathlib import Path
from fedwan.config import from_json
from fedwan.flower.coordinator import serve_coordinator

config, identity, resume = sys.argv[1:]
serve_coordinator(
    from_json(Path(config).read_text()), Path(identity), resume=resume == "resume"
)
"""


def config_for(out: Path, **link: Any) -> Config:
    config = Config(out=str(out), sites=1)
    config.link.port = link.get("port", free_port())
    config.link.door_port = link.get("door_port", free_port())
    return config


@pytest.mark.parametrize("key", ["port", "door_port"])
def test_a_port_that_is_not_set_is_asked_for(tmp_path: Path, authority: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"link\.{key} is 0"):
        serve_coordinator(config_for(tmp_path, **{key: 0}), authority / "coordinator")


@pytest.mark.parametrize("key", ["port", "door_port"])
def test_a_port_in_use_is_told_before_anything_starts(
    tmp_path: Path, authority: Path, key: str
) -> None:
    with listen("127.0.0.1", 0, "a test", "port") as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"{port}: the port is in use.*link\.{key}"):
            serve_coordinator(config_for(tmp_path, **{key: port}), authority / "coordinator")
    assert not (tmp_path / "flower").exists()


def test_a_second_coordinator_in_the_same_folder_is_refused(
    tmp_path: Path, authority: Path
) -> None:
    with only_one(tmp_path, "out"), pytest.raises(ConfigError, match="in use by another service"):
        serve_coordinator(config_for(tmp_path), authority / "coordinator")


def test_a_sites_identity_does_not_serve(tmp_path: Path, authority: Path) -> None:
    with pytest.raises(IdentityError, match="site's certificate"):
        serve_coordinator(config_for(tmp_path), authority / "s1")


def test_there_must_be_a_run_to_resume(tmp_path: Path, authority: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run to go on with"):
        serve_coordinator(config_for(tmp_path), authority / "coordinator", resume=True)


@pytest.mark.slow
def test_a_site_outlives_its_coordinator_and_serves_the_next_run_too(
    tmp_path: Path, authority: Path, standin_app: Path
) -> None:
    """Two services, each in its own folder, as docs/deploy.md has them."""
    out = tmp_path / "run"
    config = config_for(out)
    (tmp_path / "config.json").write_text(to_json(config))
    words = [str(tmp_path / "config.json"), str(authority / "coordinator")]
    site_words = [
        "--name=s1",
        f"--identity={authority / 's1'}",
        f"--dir={tmp_path / 'state'}",
        f"--door=127.0.0.1:{config.link.door_port}",
    ]
    services = [
        # The site first: it must not mind that there is no coordinator yet.
        start(
            standin_app, "-m", "fedwan.flower.site", *(f"--{k}={v}" for k, v in site_words.items())
        ),
        start(standin_app, "-c", COORDINATOR, *words, "anew"),
    ]
    try:
        wait_for(lambda: len(joins(out)) == 1)
        services[1].kill()
        services[1].wait()
        services.append(start(standin_app, "-c", COORDINATOR, *words, "resume"))
        wait_for(lambda: len(joins(out)) == 2)
        time.sleep(5)
        first, second = joins(out)
        assert first["pid"] == second["pid"]
        (out / "finish").touch()
        assert services[2].wait(timeout=30) == 0
        # The site's service stays for the next run, in another folder.
        config.out = str(tmp_path / "next")
        (tmp_path / "config.json").write_text(to_json(config))
        services.append(start(standin_app, "-c", COORDINATOR, *words, "anew"))
        wait_for(lambda: len(joins(tmp_path / "next")) == 1)
        (tmp_path / "next" / "finish").touch()
        assert services[3].wait(timeout=30) == 0
        assert services[0].poll() is None
        services[0].terminate()
        assert services[0].wait(timeout=30) == 0
    finally:
        for service in services:
            for pid in in_sessions({service.pid}):
                os.kill(pid, signal.SIGKILL)
            service.wait()


def start(app: Path, *words: str) -> subprocess.Popen[bytes]:
    env = {**os.environ, "PYTHONPATH": str(app)}
    return subprocess.Popen([sys.executable, "-P", *words], start_new_session=True, env=env)


def joins(out: Path) -> list[dict[str, Any]]:
    path = out / "seen.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for line in lines if "joined" in (entry := json.loads(line))]


def wait_for(what: Callable[[], object], patience_s: float = 90) -> None:
    deadline = time.monotonic() + patience_s
    while not what():
        if time.monotonic() > deadline:
            pytest.fail(f"it did not happen within {patience_s} s")
        time.sleep(0.05)
