"""The walls of the house: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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
LIGHT = ["fedwan/__init__.py", "strategies/__init__.py", "sites/__init__.py"]


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions too."""
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the whole name"
            yield node.module or ""


@cache
def packages_of(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(path)}


def test_there_is_something_to_walk() -> None:
    assert Path("fedwan/app.py") in SOURCES
    assert all(Path(path) in SOURCES for path in LIGHT)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_arrows_point_from_recipes_to_the_library_and_never_between_recipes(path: Path) -> None:
    forbidden = {
        "fedwan": {"strategies", "sites"},
        "strategies": {"sites"},
        "sites": {"strategies"},
    }
    assert not packages_of(path) & forbidden[path.parts[0]]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_flower_stays_in_its_room(path: Path) -> None:
    if not path.as_posix().startswith(FLOWER_ROOMS):
        assert "flwr" not in packages_of(path)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_nothing_needs_lightning_until_a_users_module_does(path: Path) -> None:
    assert not packages_of(path) & {"lightning", "lightning_fabric", "pytorch_lightning"}


def test_packages_that_flower_imports_stay_free_of_torch() -> None:
    code = "import sys, fedwan, strategies, sites; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_tests_and_benchmarks_are_imported_by_nothing() -> None:
    for path in SOURCES:
        assert not packages_of(path) & {"tests", "benchmarks"}
