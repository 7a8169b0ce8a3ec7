from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

import pytest

from fedwan.errors import ConfigError
from fedwan.flower.bundle import build_fab

# Flower's own, not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

REPOSITORY = Path(__file__).resolve().parents[2]


def app_folder(root: Path) -> Path:
    for name, entry in (("strategies", "server_app"), ("sites", "client_app")):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").touch()
        (root / name / f"{entry}.py").write_text("app = 1\n")
        (root / name / "recipe.py").touch()
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return root


def names_in(fab: bytes) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(fab)).namelist())


def test_a_bundle_holds_the_two_entry_points_and_nothing_else(tmp_path: Path) -> None:
    assert names_in(build_fab(app_folder(tmp_path))) == {
        ".info/CONTENT",
        "pyproject.toml",
        "strategies/__init__.py",
        "strategies/server_app.py",
        "sites/__init__.py",
        "sites/client_app.py",
    }
    with pytest.raises(ConfigError, match="is no fedwan app") as error:
        build_fab(tmp_path / "strategies")
    assert "\n" not in str(error.value)
