from __future__ import annotations

import io
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedwan.errors import ConfigError
from fedwan.flower.bundle import build_fab
from fedwan.flower.processes import flower_environment

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
for name in ("strategies.server_app", "sites.client_app"):
    assert sys.modules[name].__file__.startswith(sys.argv[1])
import fedwan.app
for module in (fedwan.app.load_strategy("diloco"), fedwan.app.load_workload("gan")):
    assert module.__file__.startswith(sys.argv[2]), module
print("loaded")
"""


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


@pytest.mark.slow
def test_the_apps_of_a_bundle_run_what_is_installed(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(build_fab(REPOSITORY))) as bundle:
        bundle.extractall(tmp_path)
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), str(REPOSITORY)],
        cwd=tmp_path.parent,
        env=flower_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert loaded.stdout == "loaded\n", loaded.stderr
