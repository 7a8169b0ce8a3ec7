"""What is shipped: one top-level package, a command, and versions that agree."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

import fedwan
from fedwan.flower.bundle import build_fab
from fedwan.rng import derive_seed
from tests.flower.fleet import listening

ROOT = Path(__file__).resolve().parents[1]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_package_and_the_project_bear_one_version() -> None:
    assert project()["version"] == fedwan.__version__


def test_every_dependency_is_pinned_exactly_and_hashed() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    hashed = r"^([a-z0-9-]+)==(\S+).*\\((?:\n    --hash=sha256:[0-9a-f]{64} ?\\?$)+)"
    pins = {name: version for name, version, _ in re.findall(hashed, lock, re.MULTILINE)}
    assert len(pins) == len(re.findall(r"^[^\s#]", lock, re.MULTILINE))
    extras = project()["optional-dependencies"].values()
    wanted = [*project()["dependencies"], *(line for extra in extras for line in extra)]
    for requirement in wanted:
        assert re.split(r"[<>=\[]", requirement)[0] in pins.keys() | {"fedwan"}, requirement
    assert pins["torch"] == "2.13.0"
    assert pins["flwr"].startswith("1.41.")


@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        ("exit 0", 0, "no known holes"),
        ('echo "idna 3.20 CVE-1" >"$out"; exit 1', 1, "idna 3.20 CVE-1"),
        ("echo Refused >&2; exit 1", 3, "not done"),
    ],
)
def test_an_audit_tells_holes_from_a_database_that_is_not_reached(
    answer: str, status: int, told: str, tmp_path: Path
) -> None:
    audit, uvx = tmp_path / ".ci" / "audit", tmp_path / ".venv" / "bin" / "uvx"
    for script in (audit, uvx):
        script.parent.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "audit", audit)
    uvx.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n{answer}\n')
    uvx.chmod(0o755)
    done = subprocess.run([audit], capture_output=True, text=True)
    assert done.returncode == status
    assert told in done.stdout + done.stderr and len((done.stdout + done.stderr).splitlines()) == 1


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
def test_the_wheel_holds_one_package_and_in_it_the_app(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"fedwan", f"fedwan-{fedwan.__version__}.dist-info"}
    assert {"fedwan/link/wire_pb2.py", "fedwan/_app/sites/gan.py"} <= set(names)
    assert not [name for name in names if name.endswith(".pyc")]
    # One version, one bundle: sites see by its hash what they are asked to start.
    assert build_fab(tmp_path / "fedwan" / "_app") == build_fab(ROOT)


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """The Python of a fresh environment with the wheel, and this one's other packages."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.check_output([python, "-c", where], text=True).strip()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Added to sys.path, but as no site directory: an editable fedwan there stays unknown.
    (Path(packages) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for tool in Path(sys.executable).parent.glob("fl*"):  # Flower's commands, under this Python
        lines = tool.read_text().splitlines(keepends=True)
        (environment / "bin" / tool.name).write_text(f"#!{python}\n" + "".join(lines[1:]))
        (environment / "bin" / tool.name).chmod(0o755)
    return python


_DRAW = """
import sys, torch
from safetensors.torch import load_file
from torch import nn

class LeakyTanh(nn.Module):
    def forward(self, h):
        return h.tanh() + 0.01 * h

main = nn.Sequential(
    nn.Linear(16, 768), nn.Unflatten(1, (48, 4, 4)), nn.LeakyReLU(0.2),
    nn.Conv2d(48, 48, 3, padding=1), nn.LeakyReLU(0.2), nn.Upsample(scale_factor=2),
    nn.Conv2d(48, 24, 3, padding=1), nn.LeakyReLU(0.2),
    nn.Conv2d(24, 1, 3, padding=1), LeakyTanh(),
)
generator = nn.ModuleDict({"main": main})
generator.load_state_dict(load_file("weights/generator.safetensors"))
latents = torch.randn(4, 16, generator=torch.Generator().manual_seed(int(sys.argv[1])))
with torch.no_grad():
    torch.save(main(latents).clamp(-1, 1), "drawn.pt")
assert "fedwan" not in sys.modules
"""
"""Draws the demo's pictures with nothing of fedwan, as `sample` with that seed draws them."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_fedwan_trains_samples_and_exports_in_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def start(*words: str, **output: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([str(installed), *words], cwd=folder, env=env, text=True, **output)

    def run(*words: str) -> str:
        process = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, out + err
        return out

    where = run("-c", "import fedwan; print(fedwan.__file__)")
    assert where.startswith(str(installed.parents[1]))
    fedwan_words = ("-P", "-m", "fedwan")
    words = ("demo", "sites=1", "site.processes=2", "steps=60", "eval.every=0")
    with (folder / "log").open("w") as log:
        demo = start(*fedwan_words, *words, stdout=log, stderr=log)
    torchruns: dict[int, set[tuple[str, int]]] = {}
    while demo.poll() is None:
        with contextlib.suppress(psutil.Error):  # gone meanwhile
            for child in psutil.Process(demo.pid).children(recursive=True):
                if "torch.distributed.run" in child.cmdline():
                    torchruns.setdefault(child.pid, set()).update(listening(child.pid))
        time.sleep(0.2)
    assert demo.returncode == 0, (folder / "log").read_text()
    # It meets its processes in a file, and opens no store on TCP beside that.
    # A process that it is starting looks like it for a moment.
    assert torchruns and not set().union(*torchruns.values())
    run(*fedwan_words, "sample", "runs/demo", "--num=4", "--seed=3", "--out=x.png")
    assert (folder / "x.png").stat().st_size > 1000
    run(*fedwan_words, "export", "runs/demo", "--to", "safetensors", "weights")
    (folder / "draw.py").write_text(_DRAW)
    run("draw.py", str(derive_seed(3, "sample")))
    own = "fedwan.load('runs/demo').workload().sample(4, 3)"
    run("-c", f"import fedwan, torch; assert torch.equal(torch.load('drawn.pt'), {own})")
    run(*fedwan_words, "new", "mine")
    folder = folder / "mine"
    assert "1 passed" in run("-m", "pytest", "-q")
    run("train.py")
