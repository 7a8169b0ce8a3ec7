"""Starting, showing and ending a run, with services that are a few lines long."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fedwan.app import complete, load_run
from fedwan.cli import run as commands
from fedwan.cli.folder import choose_folder, load_config
from fedwan.cli.run import start
from fedwan.config import Config, dump, to_tree
from fedwan.errors import ConfigError, FedwanError, RunStopped, UserError
from fedwan.flower.coordinator import _taken_back
from fedwan.flower.processes import listen, only_one, stop_on_sigterm
from fedwan.output.journal import JOURNAL, Journal
from fedwan.output.outputs import Outputs
from fedwan.state import write_tensors
from tests.cli.conftest import Command, mistake
from tests.flower.fleet import free_port
from tests.output.runs import make_config, round_row, write_run


def finish(config: Config, stop: threading.Event) -> None:
    """Services of a run that ends well."""
    with Outputs(config, Path(config.out)) as outputs:
        write_run(outputs, finish=True)


def leave_checkpoint(config: Config, step: int = 0) -> None:
    """And a journal, as a run that is not done does."""
    out = Path(config.out)
    meta = {"config": to_tree(config), "step": step}
    write_tensors(out / "checkpoint" / "coordinator.safetensors", {"global:x": torch.ones(2)}, meta)
    path = out / JOURNAL
    journal = Journal(path, is_new=not path.exists() or not path.stat().st_size)
    journal.append({"kind": "event", "event": "start", "site": None, "text": "", "t": 0.0})
    journal.close()


def test_a_run_that_fails_says_where_it_is_and_how_to_go_on_and_a_misspelt_one_only_the_mend(
    fedwan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error: FedwanError = FedwanError("the true reason")

    def fail(config: Config, **_: object) -> None:
        leave_checkpoint(config)
        dump(config, Path(config.out) / "config.yaml")
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedwan.flower.coordinator.run_local", fail)
    for folder in ("runs/demo", "runs/demo-2"):
        code, out, err = fedwan("demo", "steps=20")
        assert (code, err) == (1, "fedwan: the true reason\n")
        first, *_, last = out.splitlines()
        assert first == f"results go to {folder}"
        assert last == f"go on with it: fedwan run {tmp_path / folder / 'config.yaml'} --resume"
    error, path = UserError("the training script failed"), tmp_path / "my run" / "config.yaml"
    for workload, command in (
        ("flow", f"fedwan run '{path}' --resume"),
        ("command", f"fedwan launch --resume 'out={path.parent}'"),
    ):
        code, out, _ = fedwan("run", f"workload={workload}", "out=my run", "sites=1")
        assert out.splitlines()[-1] == f"once that is mended, go on with it: {command}"
        shutil.rmtree(path.parent)
    told = "fedwan: unknown key 'stesp' (= 3); did you mean 'steps'?\n"
    assert fedwan("demo", "stesp=3") == (2, "", told)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="out = '/proc/x' cannot be made: .*; choose another"):
        start(make_config(Path("/proc/x")), finish)


def test_a_live_run_is_told_as_one_before_anything_else(tmp_path: Path, fedwan: Command) -> None:
    with only_one(tmp_path, "out"):
        for more in ([], ["--resume"]):
            code, out, err = fedwan("run", f"out={tmp_path}", *more)
            assert (code, out) == (2, "") and f"out {tmp_path} is in use by another" in err


@pytest.mark.parametrize("key", ["listen", "door"])
def test_a_port_in_use_is_told_before_a_coordinator_s_run_has_a_folder(
    tmp_path: Path, identities: Path, fedwan: Command, key: str
) -> None:
    path, identity = tmp_path / "c.yaml", str(identities / "coordinator")
    path.write_text("workload: command\nsites: 1\n")
    out, ports = tmp_path / "run", {"listen": free_port(), "door": free_port()}
    with listen("127.0.0.1:0", "port") as held:
        ports[key] = held.getsockname()[1]
        words = [f"link.{name}=127.0.0.1:{port}" for name, port in ports.items()]
        told = fedwan("coordinator", str(path), "--identity", identity, f"out={out}", *words)
    assert told[:2] == (2, "") and "the port is in use" in told[2] and f"link.{key} = " in told[2]
    assert not out.exists()


@pytest.fixture
def at_a_terminal() -> Iterator[None]:
    """Whoever has started the tests: `nohup` ignores SIGHUP, and a shell's `&` SIGINT."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    also = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGHUP, before)
    signal.signal(signal.SIGINT, also)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_ends_the_services_in_order_as_does_a_terminal_that_is_closed(
    at_a_terminal: None, tmp_path: Path, number: signal.Signals
) -> None:
    ended: list[bool] = []

    def services(config: Config, stop: threading.Event) -> None:
        os.kill(os.getpid(), number)
        ended.append(stop.wait(20))
        raise RunStopped("stopped from outside")

    before = signal.getsignal(number)
    with pytest.raises(RunStopped):
        start(make_config(tmp_path), services)
    assert ended == [True]
    assert signal.getsignal(number) is before


def test_what_nohup_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_sigterm(threading.Event()):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_ctrl_c_waits_for_the_services_whether_or_not_anybody_looks_or_they_end_already(
    at_a_terminal: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, ended = threading.Event(), []

    def gone(*_: object, **__: object) -> None:
        looked.set()
        raise OSError(errno.EIO, "Input/output error")

    def services(config: Config, stop: threading.Event, is_failing: bool) -> None:
        if is_failing:
            stop.set()
        looked.wait(20)
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(stop.wait(20) and not time.sleep(0.1))
        raise FedwanError("the true reason") if is_failing else RunStopped("stopped")

    monkeypatch.setattr(commands, "watch", gone)
    monkeypatch.setattr(Console, "print", gone)
    with pytest.raises(FedwanError, match="the true reason"):
        start(make_config(tmp_path / "a"), partial(services, is_failing=True))
    looked.clear()
    with pytest.raises(KeyboardInterrupt):
        start(make_config(tmp_path / "b"), partial(services, is_failing=False))
    assert ended == [True, True]


def test_runs_without_a_folder_are_numbered_and_the_latest_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    default = Path("runs/demo")
    with pytest.raises(ConfigError, match="no run: out = .*demo' does not exist; leave --resume"):
        commands.demo(resume=True)
    default.mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds no checkpoint yet; leave --resume out"):
        commands.demo(resume=True)
    (default / "checkpoint").mkdir()  # what a failed start left is used again
    (default / "checkpoint" / ".coordinator.safetensors.tmp").touch()
    assert choose_folder(default, ["h=3"], resume=False) == default
    with only_one(default, "out"):  # a run before its first checkpoint
        assert choose_folder(default, ["h=3"], resume=False) == Path("runs/demo-2")
    assert choose_folder(default, ["h=3"], resume=False) == default
    for folder in (default, Path("runs/demo-2")):
        leave_checkpoint(Config(out=str(folder)))
        (folder / "config.yaml").touch()
    Path("runs/demo-3").mkdir()
    with pytest.raises(ConfigError, match="nemo' does not exist; did you mean 'demo'"):
        commands.launch(["out=runs/nemo"], resume=True)
    assert choose_folder(default, ["h=3"], resume=False) == Path("runs/demo-3")
    assert choose_folder(default, ["h=3"], resume=True) == Path("runs/demo-2")
    named = ["out=x", "outer.generator.lr=3", "out=here"]
    assert choose_folder(default, named, resume=False) == Path("here")
    with pytest.raises(ConfigError, match="out = '' says nothing"):
        commands.demo(["out="])
    calls: list[Any] = []
    monkeypatch.setattr(commands, "run_here", lambda *words, resume: calls.append((*words, resume)))
    script = ["h=3", "out=runs/demo", "python", "train.py"]
    commands.launch(script)
    commands.launch(script[1:], resume=True)  # with the settings that it began with
    assert calls == [
        (None, ["sites=2", "workload=command", "out=runs/demo", *script[:2]], script[2:], False),
        (None, ["out=runs/demo"] * 2, script[2:], True),
    ]


@pytest.fixture(scope="module")
def one_done(tmp_path_factory: pytest.TempPathFactory) -> Config:
    out = tmp_path_factory.mktemp("done") / "run"
    config = load_config(None, [f"out={out}", "sites=2"], resume=False)
    finish(config, threading.Event())
    return config


@pytest.fixture
def done(one_done: Config, tmp_path: Path) -> Config:
    """A run that is done."""
    config = replace(one_done, out=str(shutil.copytree(one_done.out, tmp_path / "run")))
    dump(config, Path(config.out) / "config.yaml")
    return config


def test_a_new_run_gets_an_absolute_folder_and_nothing_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["out=here", "sites=2"], resume=False)
    assert config.out == str(tmp_path / "here")
    assert config.inner and config.outer and config.steps and config.h
    assert not (tmp_path / "here").exists()


def test_a_run_that_was_moved_goes_on_where_it_is(done: Config, tmp_path: Path) -> None:
    Path(done.out).rename(tmp_path / "new")
    resumed = load_config(tmp_path / "new" / "config.yaml", [], resume=True)
    assert resumed == replace(done, out=str(tmp_path / "new"))
    assert load_config(None, [f"out={tmp_path / 'new'}"], resume=True) == resumed


def test_a_copy_without_a_checkpoint_does_not_train_the_run_that_it_is_of(
    done: Config, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(done.out, tmp_path / "copy"))
    (copy / "summary.json").unlink()  # `done` has no checkpoint
    with pytest.raises(ConfigError, match=f"{copy}.*no checkpoint yet"):
        load_config(copy / "config.yaml", [], resume=True)


@pytest.mark.slow
def test_a_run_that_is_done_is_shown_reported_and_not_started_again(
    done: Config, fedwan: Command
) -> None:
    path, page = Path(done.out) / "config.yaml", Path(done.out) / "report.html"
    code, shown, _ = fedwan("run", str(path), "--resume")
    assert code == 0 and "Fréchet distance 0.9" in shown
    assert "is complete, and nothing was run" in shown
    page.unlink()
    assert fedwan("report", done.out) == (0, f"{page}\n", "") and page.exists()
    assert "holds a finished run; choose another out=" in mistake(fedwan, "run", str(path))
    told = mistake(fedwan, "run", str(path), "--from-version", "3")
    assert "--from-version=3 is for a run that goes on; add --resume" in told
    # Without its summary it has not ended, and goes on from a checkpoint that must be whole.
    (page.parent / "summary.json").unlink()
    leave_checkpoint(done)
    (page.parent / "checkpoint" / "coordinator.safetensors").write_bytes(b"cut off")
    assert "coordinator.safetensors" in mistake(fedwan, "run", str(path), "--resume")
    told = f"holds a run already; go on with it: fedwan run {path} --resume"
    assert told in mistake(fedwan, "run", str(path))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["seed=9"], "seed = 9, and the run in '{out}' began with 0; leave it out, or"),
        (["model.width=16", "h=10"], "model.width = 16"),
        (["inner.generator.state=average"], "inner.generator.state = 'average', and the run"),
        (["steps=20"], "steps = 20, and the run in '{out}' has taken 40; leave it out, or give"),
    ],
)
def test_what_a_run_cannot_change_on_its_way_is_refused(
    done: Config, fedwan: Command, words: list[str], told: str
) -> None:
    out = Path(done.out)
    (out / "summary.json").unlink()
    leave_checkpoint(done)
    with (out / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"t": 9.0, **round_row(4, "s1")}) + "\n")
    code, _, err = fedwan("run", str(out / "config.yaml"), "--resume", *words)
    assert code == 2 and told.format(out=out) in err and err.count("\n") == len(words)


def test_what_a_run_began_with_is_known_from_its_checkpoint(done: Config) -> None:
    """Whatever has become of its other files, which anybody may have edited or emptied."""
    out, path = Path(done.out), Path(done.out) / "config.yaml"
    (out / "summary.json").unlink()
    leave_checkpoint(done, step=40)
    held, metrics = path.read_text(), (out / "metrics.jsonl")
    newest = out / "checkpoint" / "coordinator.safetensors"
    data = newest.read_bytes()
    newest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # for who goes on from it to find
    assert load_config(path, [], resume=True) == done
    path.write_text(held.replace("seed: 0", "seed: 7"))
    with pytest.raises(ConfigError, match="seed = 7, and the run in .* began with 0"):
        load_config(path, [], resume=True)
    path.write_text(held)
    metrics.write_bytes(b"")
    with pytest.raises(ConfigError, match="steps = 20, and the run in .* has taken 40"):
        load_config(path, ["steps=20"], resume=True)
    path.write_text(held[: held.index("\nstream:")])
    with pytest.raises(ConfigError, match=r"config.yaml is not whole, it lacks .*log; restore it"):
        load_config(path, [], resume=True)
    path.write_text(held)
    (out / JOURNAL).write_bytes(b"")
    with pytest.raises(ConfigError, match="holds no line as it was written, and the run cannot"):
        load_config(path, [], resume=True)
    (out / JOURNAL).unlink()
    with pytest.raises(ConfigError, match="journal.jsonl was removed, and the run cannot go on"):
        load_config(path, [], resume=True)


@pytest.mark.parametrize("name", ["journal.jsonl", "metrics.jsonl"])
def test_a_run_whose_records_are_lost_is_not_told_of_as_if_it_had_done_nothing(
    done: Config, fedwan: Command, name: str
) -> None:
    out = Path(done.out)
    (out / name).write_bytes(b"")
    for command in ("status", "doctor", "report"):
        assert f"{out / name} was removed or emptied" in mistake(fedwan, command, done.out)
    (out / name).unlink()
    assert f"{out / name} was removed or emptied" in mistake(fedwan, "status", done.out)


def test_a_file_may_need_the_words_that_it_comes_with(tmp_path: Path) -> None:
    (path := tmp_path / "my.yaml").write_text("round:\n  quorum: 5\n")
    config = load_config(path, ["sites=6", f"out={tmp_path / 'run'}"], resume=False)
    assert config.round.quorum == 5


@pytest.mark.parametrize("unit", ["sample", "site"])
def test_a_budget_of_privacy_and_what_its_noise_is_made_for_stay_as_they_are(
    tmp_path: Path, unit: str
) -> None:
    out = tmp_path / "run"
    words = f"workload=flow sites=2 steps=40 privacy.epsilon=8 privacy.unit={unit}:1 out={out}"
    with Outputs(config := load_run(None, words.split()), out):
        pass
    leave_checkpoint(config)
    path = out / "config.yaml"
    for word in ("privacy.epsilon=9", f"privacy.unit={unit}:2", "steps=80"):
        key = word.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"{key} = .*and the run in .* began with"):
            load_config(path, [word], resume=True)
    if unit == "site":
        with pytest.raises(ConfigError, match="no version is made twice .* privacy"):
            load_config(path, [], resume=True, from_version=1)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("diloco", ["codec.up=masked4", "codec.down=int4", "round.quorum=2"]),
        ("streaming_diloco", ["stream.fragments=2", "codec.up=int2", "network.net.exclude=norm.*"]),
        ("local_sgd", ["privacy.epsilon=8", "privacy.unit=site:0.3"]),
    ],
)
def test_a_script_s_run_goes_on_with_the_file_that_leaves_its_settings_open(
    tmp_path: Path, strategy: str, words: list[str]
) -> None:
    """As a coordinator's service does: what is open there was settled once the sites had joined.

    What words settled then, such as masks, is not given up where they are left out.
    """
    path, out = tmp_path / "c.yaml", tmp_path / "run"
    sites = 3 if "codec.up=masked4" in words else 2
    path.write_text(f"workload: command\nstrategy: {strategy}\nsites: {sites}\nout: {out}\n")
    begun = complete(load_run(path, words), {"net": "regression"}, 600)
    with Outputs(begun, out):
        pass
    leave_checkpoint(begun)
    again = complete(load_config(path, [], resume=True), {"net": "regression"}, 600)
    for key in ("codec", "stream", "network", "privacy", "h"):
        assert getattr(again, key) == getattr(begun, key)
    assert again.round.quorum == begun.round.quorum
    with pytest.raises(ConfigError, match="h = 10, and the run in .* began with 20"):
        load_config(path, ["h=10"], resume=True)


def test_what_a_refused_start_has_changed_is_as_it_was(done: Config) -> None:
    """Unless a round was made with it, the next start would go on with what cannot be."""
    out = Path(done.out)
    path, held = out / "config.yaml", (out / "config.yaml").read_text()
    with pytest.raises(UserError), _taken_back(out):
        path.write_text(held.replace("sites: 2", "sites: 3"))
        raise UserError("its networks are other ones")
    assert path.read_text() == held
    with pytest.raises(RunStopped), _taken_back(out):
        path.write_text(held.replace("sites: 2", "sites: 3"))
        raise RunStopped("Ctrl-C")
    assert path.read_text() != held


def test_words_that_change_a_run_that_is_complete_are_refused(done: Config) -> None:
    path = Path(done.out) / "config.yaml"
    with pytest.raises(ConfigError, match="is complete, steps=5000 would change nothing"):
        load_config(path, ["steps=5000"], resume=True)
    with pytest.raises(ConfigError, match="is complete, --from-version=1 would change nothing"):
        load_config(path, [], resume=True, from_version=1)
    same = load_config(path, ["sites=2"], resume=True)
    assert same.num_sites == 2  # which it began with


def test_a_run_whose_sites_are_elsewhere_is_not_resumed_with_sites_of_this_machine(
    done: Config, fedwan: Command
) -> None:
    out = Path(done.out)
    (out / "summary.json").unlink()
    (out / "flower").mkdir()
    leave_checkpoint(done)
    for words in (["--resume"], []):
        command = f"fedwan coordinator {out / 'config.yaml'} --identity DIR --resume"
        told = mistake(fedwan, "run", str(out / "config.yaml"), *words)
        assert f"go on with it: {command}" in told
