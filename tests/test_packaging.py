"""What is shipped: one top-level package, a command, and versions that agree."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fedwan

ROOT = Path(__file__).resolve().parents[1]


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_package_and_the_project_bear_one_version() -> None:
    assert project()["version"] == fedwan.__version__


def test_every_dependency_is_pinned_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    wanted = [*project()["dependencies"], *(line for extra in extras.values() for line in extra)]
    for requirement in wanted:
        assert re.split(r"[<>=\[]", requirement)[0] in names | {"fedwan"}, requirement
    assert pins["torch"] == "2.13.0"
    assert pins["flwr"].startswith("1.41.")


@pytest.mark.slow
def test_the_wheel_holds_no_top_level_package_but_fedwan(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"fedwan", f"fedwan-{fedwan.__version__}.dist-info"}
    assert "fedwan/link/wire_pb2.py" in names
