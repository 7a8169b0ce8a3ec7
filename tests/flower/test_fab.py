from __future__ import annotations

import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedwan.errors import ConfigError
from fedwan.flower.fab import build_fab, code_files
from fedwan.flower.processes import find_tool

# Flower's own, not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

REPOSITORY = Path(__file__).resolve().parents[2]

LOAD = """
import sys
from pathlib import Path
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.supercore.object_ref import load_app

root = Path(sys.argv[1])
server = load_app("strategies.server_app:app", RuntimeError, root)
client = load_app("sites.client_app:app", RuntimeError, root)
assert isinstance(server, ServerApp) and isinstance(client, ClientApp)
assert "torch" not in sys.modules, "the apps must be light: torch is loaded when a run begins"
import fedwan.coordinator.service, fedwan.site.service, fedwan.app
for name in ("strategies.diloco", "sites.gan"):
    __import__(name)
for name, module in sys.modules.items():
    if name.split(".")[0] in ("fedwan", "strategies", "sites"):
        places = [module.__file__] if module.__file__ else list(module.__path__)
        assert all(Path(place).is_relative_to(root) for place in places), (name, places)
print("loaded")
"""


def app_folder(root: Path) -> Path:
    (root / "fedwan").mkdir(parents=True)
    for name in ("strategies", "sites"):
        (root / name).mkdir()
        (root / name / "__init__.py").touch()
    (root / "strategies" / "server_app.py").write_text("app = 1\n")
    (root / "sites" / "client_app.py").write_text("app = 1\n")
    (root / "fedwan" / "__init__.py").touch()
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return root


def names_in(fab: bytes) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(fab)).namelist())


def test_a_bundle_holds_the_three_code_folders_and_nothing_else(tmp_path: Path) -> None:
    app = app_folder(tmp_path)
    (app / ".venv" / "deep" / "er").mkdir(parents=True)
    (app / ".venv" / "deep" / "er" / "x.py").touch()
    (app / "tests").mkdir()
    (app / "tests" / "test_x.py").touch()
    assert names_in(build_fab(app)) == {
        ".info/CONTENT",
        "pyproject.toml",
        "fedwan/__init__.py",
        "strategies/__init__.py",
        "strategies/server_app.py",
        "sites/__init__.py",
        "sites/client_app.py",
    }


def test_the_same_code_is_the_same_bundle(tmp_path: Path) -> None:
    assert build_fab(app_folder(tmp_path / "a")) == build_fab(app_folder(tmp_path / "b"))


def test_files_outside_the_code_folders_are_not_even_looked_at(tmp_path: Path) -> None:
    app = app_folder(tmp_path)
    deep = app.joinpath("runs", *(str(level) for level in range(30)))
    deep.mkdir(parents=True)
    (deep / "x.py").touch()
    assert not any(name.startswith("runs") for name in code_files(app))


def test_a_folder_that_is_no_app_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no fedwan app") as error:
        build_fab(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_app_loads_from_its_bundle_alone(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(build_fab(REPOSITORY))) as bundle:
        bundle.extractall(tmp_path)
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", LOAD, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert loaded.stdout == "loaded\n", loaded.stderr


@pytest.mark.slow
def test_flwr_build_makes_the_same_bundle(tmp_path: Path) -> None:
    app = tmp_path / "app"
    for name in ("fedwan", "strategies", "sites"):
        shutil.copytree(REPOSITORY / name, app / name)
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(REPOSITORY / name, app)
    built = subprocess.run(
        [find_tool("flwr"), "build"], cwd=app, capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (fab,) = app.glob("*.fab")
    assert fab.read_bytes() == build_fab(app)
