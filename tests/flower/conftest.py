from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedwan.link import pki

REPOSITORY = Path(__file__).resolve().parents[2]
STANDINS = Path(__file__).parent / "standin"


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority, its coordinator, and the sites s1 and s2."""
    folder = tmp_path_factory.mktemp("authority")
    pki.init(folder, ["127.0.0.1"])
    pki.issue(folder, "s1")
    pki.issue(folder, "s2")
    return folder


@pytest.fixture(scope="session")
def foreign_authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another federation's authority, with sites of the same names."""
    folder = tmp_path_factory.mktemp("foreign")
    pki.init(folder, ["127.0.0.1"])
    pki.issue(folder, "s1")
    return folder


@pytest.fixture(scope="session")
def standin_app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's app, with services in place of training that only wait."""
    app = tmp_path_factory.mktemp("app")
    junk = shutil.ignore_patterns("__pycache__")
    for name in ("fedwan", "strategies", "sites"):
        shutil.copytree(REPOSITORY / name, app / name, ignore=junk)
    shutil.copy(REPOSITORY / "pyproject.toml", app)
    shutil.copy(STANDINS / "coordinator_service.py", app / "fedwan" / "coordinator" / "service.py")
    shutil.copy(STANDINS / "site_service.py", app / "fedwan" / "site" / "service.py")
    return app


def seen(out: Path, key: str) -> list[dict[str, object]]:
    """What the stand-in coordinator wrote down that has this key."""
    path = out / "seen.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for line in lines if key in (entry := json.loads(line))]


def wait_for(what: Callable[[], object], patience_s: float) -> float:
    """Seconds until something is true; fails the test if it never is."""
    begin = time.monotonic()
    while not what():
        if time.monotonic() - begin > patience_s:
            pytest.fail(f"nothing after {patience_s} s")
        time.sleep(0.05)
    return time.monotonic() - begin
