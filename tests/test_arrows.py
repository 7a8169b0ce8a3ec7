"""The walls of the house: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("fedwan", "strategies", "sites")
    for path in (ROOT / folder).rglob("*.py")
)
FLOWER_ROOMS = ("fedwan/flower/", "strategies/server_app.py", "sites/client_app.py")
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}


@cache
def packages_of(path: Path) -> set[str]:
    """Every package that a file imports, inside functions too."""
    names = []
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the whole name"
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    ("start", "forbidden"),
    [
        ("fedwan/", {"strategies", "sites"}),
        ("strategies/", {"sites"}),
        ("sites/", {"strategies"}),
        ("", {"tests", "benchmarks", *LIGHTNING}),
    ],
)
def test_arrows_point_from_recipes_to_the_library(start: str, forbidden: set[str]) -> None:
    found = [path for path in SOURCES if path.as_posix().startswith(start)]
    assert found and not [path for path in found if packages_of(path) & forbidden]


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("fedwan.coordinator.service", ("fedwan.site.",)),
        ("fedwan.site.recipe", ("fedwan.coordinator.",)),
        ("fedwan.link.client", ("fedwan.coordinator.", "fedwan.site.")),
        ("fedwan.protocol.rounds", ("fedwan.coordinator.", "fedwan.site.")),
    ],
)
def test_site_and_coordinator_meet_in_messages_alone(
    module: str, forbidden: tuple[str, ...]
) -> None:
    code = f"import sys, {module}; print(*(m for m in sys.modules if m.startswith({forbidden})))"
    words = [sys.executable, "-c", code]
    found = subprocess.run(words, cwd=ROOT, check=True, text=True, capture_output=True)
    assert found.stdout.split() == []


def test_the_protocol_has_neither_io_nor_threads_nor_a_clock() -> None:
    inside = [path for path in SOURCES if path.as_posix().startswith("fedwan/protocol/")]
    outside = {"asyncio", "concurrent", "os", "pathlib", "queue", "select", "shutil", "socket"}
    outside |= {"ssl", "subprocess", "tempfile", "threading", "time", "cryptography", "grpc"}
    assert inside and not [path for path in inside if packages_of(path) & outside]


def test_flower_stays_in_its_room() -> None:
    others = [path for path in SOURCES if not path.as_posix().startswith(FLOWER_ROOMS)]
    assert not [path for path in others if "flwr" in packages_of(path)]


def test_what_flower_imports_and_what_reads_settings_stay_free_of_torch_and_flower() -> None:
    names = "{'torch', 'flwr'} & {*sys.modules}"
    code = f"import sys, fedwan.app, strategies, sites; sys.exit(bool({names}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
