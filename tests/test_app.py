"""Finding recipes, and leaving nothing open in a configuration."""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedwan import app
from fedwan.config import Config, InnerConfig, OuterConfig, dump
from fedwan.errors import ConfigError
from fedwan.workloads.settings import networks_of

WORKLOAD = """
from dataclasses import dataclass
from fedwan.config import InnerConfig

NETWORKS = {"generator": "adversarial", "discriminator": "adversarial"}

@dataclass
class Model:
    width: int = 16
    gamma: float = 1.0
    norm: str = "group"

DEFAULTS = {"data.batch": 32, "steps": 100, "inner.*": InnerConfig(lr=2e-4, beta1=0.0)}

def build(config, device):
    return None
"""
STRATEGY = """
from types import SimpleNamespace

from fedwan.codecs import fp32
from fedwan.config import OuterConfig

USES = ("h", "outer.*", "inner.*", "network.*", "site.*")
DEFAULTS = {"h": 20, "outer.*": OuterConfig(lr=0.5, momentum=0.5)}

def build(config):
    whole = {"contributes": "delta", "fragments": lambda layout: None}
    return SimpleNamespace(**whole, up=fp32(), down=fp32())
"""


@pytest.fixture
def root(no_recipes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An app of the user's own, as the present folder of a process that has imported no other."""
    for folder, name, text in [
        ("sites", "mine", WORKLOAD),
        ("sites", "__init__", ""),
        ("sites", "client_app", ""),
        ("sites", "_helper", ""),
        ("strategies", "gentle", STRATEGY),
        ("strategies", "__init__", ""),
        ("strategies", "server_app", ""),
        ("strategies", "lacking", "USES = ()"),
        ("strategies", "broken", "def build(:"),
        ("strategies", "failing", "\nimport does_not_exist"),
        ("strategies", "typo", 'DEFAULTS = {"hh": 10}\ndef build(config): ...'),
        ("strategies", "text", 'DEFAULTS = {"h": "ten"}\ndef build(config): ...'),
        ("strategies", "no_tuple", 'USES = "outer.*"\ndef build(config): ...'),
        ("strategies", "unknown", 'USES = ("outer.*.momentm",)\ndef build(config): ...'),
        ("strategies", "raising", "def build(config):\n    return 1 / 0"),
        ("strategies", "other", "def build(config):\n    return {}"),
        ("strategies", "coded", STRATEGY.replace("up=fp32()", "up=fp32()._replace(name='mine')")),
    ]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.py").write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_run(*words: str) -> Config:
    return app.load_run(None, ["workload=mine", "strategy=gentle", *words])


def test_what_the_pages_name_behind_the_package_is_there() -> None:
    code = "import fedwan; fedwan.data.Loader, fedwan.app.load_run"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_recipes_that_the_present_folder_lacks_come_from_fedwan(root: Path) -> None:
    own = app.installed_app()
    assert own == Path(app.__file__).resolve().parents[1]
    assert app.app_folders() == [root, own]
    assert app.load_workload("mine").__file__ == str(root / "sites" / "mine.py")
    assert app.load_strategy("diloco").__file__ == str(own / "strategies" / "diloco.py")
    assert {"gentle", "diloco"} <= set(app.strategy_names())


@pytest.fixture
def package(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with recipes, one of them under an entry point."""
    site = root / "site-packages"
    for folder in ("my_pkg", "my_pkg-1.0.dist-info"):
        (site / folder).mkdir(parents=True)
    (site / "my_pkg" / "__init__.py").touch()
    (site / "my_pkg" / "recipe.py").write_text(WORKLOAD)
    (site / "my_pkg" / "lacking.py").write_text("import does_not_exist")
    info = site / "my_pkg-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_pkg\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedwan.workloads]\nplugged = my_pkg.recipe\n")
    monkeypatch.syspath_prepend(site)
    yield site / "my_pkg"
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_pkg"]:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["my_pkg.recipe", "plugged"])
def test_recipes_of_installed_packages_are_found_by_module_and_by_entry_point(
    package: Path, name: str
) -> None:
    module = app.load_workload(name)
    assert module.__file__ == str(package / "recipe.py")
    config = load_run(f"workload={name}")
    sha256 = hashlib.sha256(WORKLOAD.encode()).hexdigest()
    assert app.sources(config)[f"workload {name}"] == sha256


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("workload=my_pkg.no_recipe", "is installed here; install the package that holds it"),
        ("workload=mind", " in sites/, nor command; did you mean 'mine'?"),
        ("strategy=gently", "did you mean 'gentle'?"),
        ("strategy=lacking", "defines no 'build'; see docs/strategies.md"),
        ("strategy=broken", "'broken' cannot be imported: SyntaxError: invalid syntax (broken.py"),
        ("strategy=failing", "NotFoundError: No module named 'does_not_exist' (failing.py:2)"),
        ("strategy=typo", "'typo' cannot be resolved: AttributeError: 'Config' object has no attr"),
        ("strategy=text", "strategy 'text' cannot be resolved: TypeError"),
        ("strategy=no_tuple", "USES is 'outer.*'; write a tuple, as ('outer.*',)"),
        ("strategy=unknown", "unknown.py: USES has 'outer.*.momentm', which is no setting"),
        ("strategy=raising", "ZeroDivisionError: division by zero (raising.py:2)"),
        ("strategy=other", "other.py: build returned {}, not a Strategy"),
        ("strategy=coded", "'mine' of strategy 'coded' has encoding = 1; choose one from 100"),
        ("stream.tau=3", "'gentle'"),
        ("workload=my_pkg.lacking", "No module named 'does_not_exist' (lacking.py:1)"),
        ("workload=client_app", "is none of diffusers_unet, distill, flow, gan, "),
        ("workload=../strategies/gentle", "is none of diffusers_unet, distill, flow, gan, "),
        ("workload=comand", " in sites/, nor command; did you mean 'command'?"),
        ("strategy=comand", " in strategies/; a page of your own is "),
        ("model.widht=3", "unknown key 'model.widht' (= 3); did you mean 'model.width'?"),
        ("model.width=wide", "model.width = 'wide' is no whole number"),
        ("inner.genrator.lr=1", "inner.genrator: workload 'mine' trains generator, discriminator"),
        ("outer.genrator.lr=1", "did you mean 'generator'?"),
        ("codec.down=fp23", "codec.down = 'fp23' is none of fp32, "),
    ],
)
def test_what_no_recipe_network_model_or_codec_has_is_refused(
    package: Path, word: str, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(word)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_resolving_leaves_nothing_open(root: Path) -> None:
    config = load_run("sites=2")
    assert config.model == {"width": 16, "gamma": 1.0, "norm": "group"}
    assert (config.h, config.steps, config.data.batch) == (20, 100, 32)
    assert config.inner["generator"] == InnerConfig(lr=2e-4, beta1=0.0)
    assert config.inner["generator"] is not config.inner["discriminator"]
    assert config.outer["discriminator"] == OuterConfig(lr=0.5, momentum=0.5)
    assert config.half_life == 100 * 2 * 32 / 10


def test_a_word_changes_its_own_setting_and_keeps_the_recipes_others(root: Path) -> None:
    config = load_run("outer.generator.lr=0.3", "inner.generator.lr=1e-3")
    assert config.outer["generator"] == OuterConfig(lr=0.3, momentum=0.5)
    assert config.inner["generator"] == InnerConfig(lr=1e-3, beta1=0.0)
    assert config.inner["discriminator"] == InnerConfig(lr=2e-4, beta1=0.0)

    # Another optimiser does not inherit the settings of the recipe's own.
    config = load_run("inner.generator.name=sgd", "inner.generator.lr=0.1")
    assert config.inner["generator"] == InnerConfig(name="sgd", lr=0.1)


def test_what_a_run_was_resolved_to_reads_back_exactly(tmp_path: Path) -> None:
    config = app.load_run(None, ["strategy=streaming_diloco", "stream.tau=0"])
    assert app.resolve(config) == config
    dump(config, tmp_path / "config.yaml")
    assert app.load_run(tmp_path / "config.yaml", []) == config


def test_a_module_that_hides_a_recipe_is_named(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other") / "sites"
    other.mkdir()
    (other / "mine.py").write_text(WORKLOAD)
    (other / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(other.parent)
    importlib.import_module("sites.mine")
    with pytest.raises(ConfigError, match="mine.py is hidden by .*/other"):
        app.load_workload("mine")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("RATE = 1", "{file} hides the folder strategies/ that has it; give that file another"),
        ("import nowhere", "cannot be imported: ModuleNotFoundError: .* .strategies.py:1."),
    ],
)
def test_a_file_of_the_script_s_that_hides_all_recipes_is_named(
    no_recipes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    file = tmp_path / "strategies.py"
    file.write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(app.installed_app()), *sys.path])
    with pytest.raises(ConfigError, match=f"strategy = 'diloco'.*{says.format(file=file)}"):
        app.load_strategy("diloco")


BARE = """
from types import SimpleNamespace
from torch import nn
from fedwan.workloads.optim import build_optimizers

def build(config, device):
    networks = {name: nn.Linear(2, 2) for name in %s}
    return SimpleNamespace(networks=networks, optimizers=build_optimizers(config.inner, networks))
"""


@pytest.mark.parametrize("names", [["velocity"], ["generator", "critic"]])
def test_a_page_that_only_builds_gets_everything_else(root: Path, names: list[str]) -> None:
    (root / "sites" / "mine.py").write_text(BARE % names)
    config = load_run()
    assert list(config.inner) == names and config.inner[names[0]] == InnerConfig()
    assert (config.steps, config.data.batch, config.model) == (2000, 32, {})
    kind = "regression" if len(names) == 1 else "adversarial"
    assert networks_of(app.load_workload("mine"), config) == dict.fromkeys(names, kind)


@pytest.mark.parametrize(
    ("words", "every"),
    [("", 280), ("steps=600", 200), ("steps=100000", 10_000), ("eval.every=50", 50)],
)
def test_a_recipe_is_measured_ten_times_a_run_at_most(words: str, every: int) -> None:
    assert app.load_run(None, words.split()).eval.every == every
