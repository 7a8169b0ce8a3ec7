"""`fedwan.lightning`: runs in Lightning's own Trainer."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning_fabric.utilities.distributed import DistributedSamplerWrapper
from pytorch_lightning import Callback, LightningDataModule, LightningModule, Trainer
from pytorch_lightning.callbacks import (
    EMAWeightAveraging,
    LearningRateFinder,
    OnExceptionCheckpoint,
)
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins.precision import MixedPrecision
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler, RandomSampler

from fedwan.app import load_run
from fedwan.config import Config
from fedwan.errors import FedwanError, UserError
from fedwan.lightning import FedwanCallback
from fedwan.link.base import Link
from fedwan.rng import seeded_init
from fedwan.simulation import Absence, SimulatedRun, simulate
from fedwan.site.assignment import VARIABLE, read_outcome
from fedwan.state import State, hash_state, state_of
from tests.lightning_modules import Annealed, Keeping, Net, Points, Stream, fit, loader_of
from tests.site.support import ROOT, Served
from tests.support import PoisoningLink, same_bits

# Lightning has advice to give: workers, intervals, an accelerator.
pytestmark = pytest.mark.filterwarnings("ignore")

ONE = ("net", "plain", "clipping", "scaling", "falling", "keeping", "cycle", "renewing", "thawing")
NETWORKS = dict.fromkeys(ONE, ("net",)) | {"gan": ("discriminator", "generator")}
FULL = ("codec.up=fp32", "codec.down=fp32")


def config_of(module: str, steps: int, h: int, *words: str) -> Config:
    """One site whose outer optimiser takes over what the site has."""
    networks = NETWORKS.get(module, NETWORKS["gan"])
    outer = [f"outer.{n}.{word}" for n in networks for word in ("lr=1", "momentum=0")]
    fixed = ["workload=command", f"steps={steps}", "eval.every=0", "checkpoint.every=1"]
    return load_run(None, [*fixed, "sites=1", f"h={h}", *FULL, *outer, *words])


def trained(
    folder: Path,
    module: str = "net",
    steps: int = 12,
    h: int = 2,
    absence: Absence | None = None,
    wrap: Callable[[str, Link], Link] = lambda _, link: link,
    **settings: Any,
) -> SimulatedRun:
    """One site's run."""
    return simulate(
        config_of(module, steps, h),
        folder,
        train=lambda place: fit(folder, module, **settings),
        absences={"s1": absence} if absence else {},
        wrap=wrap,
    )


class Watcher(Callback):
    """Weights as each batch leaves them, and how often a user's hooks were called."""

    def __init__(self) -> None:
        self.seen: list[State] = []
        self.validations = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.seen.append({n: t.clone() for n, t in pl_module.state_dict().items()})

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validations += not trainer.sanity_checking


@pytest.mark.parametrize("module", ["net", "gan", "turns"])
def test_the_callback_changes_no_bit_of_what_the_trainer_does(tmp_path: Path, module: str) -> None:
    joined, plain = Watcher(), Watcher()
    per_step = 1 if module == "net" else 2
    run = trained(tmp_path / "run", module, steps=10, h=10, callbacks=[joined])
    max_steps = 10 * per_step
    made = fit(tmp_path, module, callbacks=[plain], with_fedwan=False, max_steps=max_steps)
    assert all(same_bits(*both) for both in zip(joined.seen, plain.seen, strict=True))
    children = {name: made.get_submodule(name) for name in NETWORKS.get(module, NETWORKS["gan"])}
    torch.testing.assert_close(run.model.state, state_of(children), rtol=0, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "loader", "leave_at"),
    [
        ("net", "stateful", (0.1, 0.4, 0.5, 0.6)),  # first epoch, later one, validation, its end
        ("net", "seeded", (0.4, 0.6)),
        ("turns", "stateful", (0.4,)),
    ],
)
def test_a_site_that_died_goes_on_to_the_same_bits(
    tmp_path: Path, module: str, loader: str, leave_at: tuple[float, ...]
) -> None:
    settings: dict[str, Any] = {"loader": loader}
    if module == "net":
        settings["val_check_interval"] = 4
    whole = trained(tmp_path / "whole", module, steps=20, **settings)
    for share in leave_at:
        absence = Absence(share, share)
        died = trained(tmp_path / str(share), module, 20, absence=absence, **settings)
        assert whole.site_sha256 == died.site_sha256, share


@pytest.mark.parametrize("leave_at", [0.4, 0.5])  # in mid-epoch, at its end
def test_what_a_module_holds_outside_of_its_networks_survives_its_site(
    tmp_path: Path, leave_at: float
) -> None:
    found = []
    for number, absence in enumerate((None, Absence(leave_at, leave_at))):
        made: list[LightningModule] = []

        def train(place: Any, made: list[LightningModule] = made) -> None:
            made.append(fit(tmp_path, "keeping", "stateful"))

        folder = tmp_path / str(number)
        absences = {"s1": absence} if absence else {}
        run = simulate(config_of("keeping", 24, 2), folder, train=train, absences=absences)
        found.append((run.site_sha256, hash_state(made[-1].state_dict())))
    assert found[0] == found[1]
    assert int(made[-1].ema.n_averaged) == len(made[-1].bank) == 24
    sizes = [path.stat().st_size for path in tmp_path.rglob("site-*.safetensors")]
    assert sizes and max(sizes) < 500_000  # without the part that is frozen


def test_sites_compare_parameters_outside_of_their_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedwan.coordinator.run.FAREWELL_S", 0.1)
    for is_other in (False, True):
        modules = {}
        for site in ("s1", "s2"):
            with seeded_init(3):
                modules[site] = Keeping()
        modules["s2"].vae.bias.data.add_(float(is_other))

        def train(place: Any, modules: dict[str, Keeping] = modules) -> None:
            fit(tmp_path, lambda: modules[place.name])

        config = config_of("keeping", 4, 2, "sites=2")
        with pytest.raises(FedwanError, match="frozen") if is_other else nullcontext():
            simulate(config, tmp_path / str(is_other), train=train)


def test_the_run_ends_a_fit_whatever_steps_it_was_given(tmp_path: Path) -> None:
    """Steps that are taken again after a refusal count in Lightning's own numbers."""

    def poison(_: str, link: Link) -> Link:
        return PoisoningLink(link, 3)

    expected = trained(tmp_path / "a", wrap=poison)
    for number, limits in enumerate(({"max_steps": 12}, {"min_epochs": 20}, {"min_steps": 99})):
        ran = trained(tmp_path / str(number), wrap=poison, **limits)
        assert ran.totals.rejected == 1
        assert ran.site_sha256 == expected.site_sha256


def test_a_module_can_anneal_by_the_trainers_number_of_steps(tmp_path: Path) -> None:
    left: list[list[float]] = []

    def train(_: object) -> None:
        left.append(fit(tmp_path, Annealed, max_steps=12).left)

    simulate(config_of("plain", 12, 3), tmp_path, train=train)
    fit_alone = fit(tmp_path, Annealed, with_fedwan=False, max_steps=12)
    assert left == [fit_alone.left] and len(fit_alone.left) == 12


def test_under_sync_a_site_comes_back_whatever_its_optimisers_are_called(tmp_path: Path) -> None:
    """Lightning's are called by their numbers, the coordinator's by their networks."""
    words = ("strategy=sync", "sites=1", "steps=12", "eval.every=0", "checkpoint.every=1")
    inner = ("inner.net.name=adam", "inner.net.lr=0.01")
    run = simulate(
        load_run(None, ["workload=command", *words, *inner]),
        tmp_path,
        train=lambda place: fit(tmp_path, "plain", "stateful"),
        absences={"s1": Absence(0.5, 0.5)},
    )
    assert run.totals.rejoins == 1
    assert run.site_sha256 == {"s1": hash_state(run.model.state)}


@pytest.mark.slow
def test_a_process_that_is_killed_and_started_again_comes_to_the_same_bits(
    tmp_path: Path, identities: Path
) -> None:
    settings = {"loader": "stateful", "val_check_interval": 4}
    whole = trained(tmp_path / "whole", "net", steps=40, **settings)
    script = ("-W", "ignore", "-m", "tests.lightning_modules", tmp_path, "net", "stateful")
    served = Served(config_of("net", 40, 2), tmp_path / "killed", identities)
    with served.serving():
        process = served.start(*script)
        deadline = time.monotonic() + 60
        while served.run.share_done() < 0.4 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert served.start(*script).wait(60) == 0
    assert served.run.site_sha256() == whole.site_sha256 != {}


@pytest.mark.slow
def test_under_ddp_each_site_draws_an_order_of_its_own_that_its_processes_share(
    tmp_path: Path, identities: Path
) -> None:
    config = config_of("plain", 4, 2, "sites=2")
    served = Served(config, tmp_path / "run", identities)
    found = []
    with served.serving():
        started = []
        for site in ("s1", "s2"):
            (folder := tmp_path / site).mkdir()
            served.assignment = folder / "assignment.json"
            script = ("-W", "ignore", "-m", "tests.lightning_modules", folder, "plain", "plain")
            started.append(served.start(*script, "ddp", site=site))
        assert [process.wait(120) for process in started] == [0, 0], served.stderr.read_text()
    for site in ("s1", "s2"):
        ranks = [json.loads((tmp_path / site / f"order{n}.json").read_text()) for n in (0, 1)]
        assert ranks[0]["seed"] == ranks[1]["seed"]
        assert sorted(ranks[0]["order"] + ranks[1]["order"]) == list(range(24))
        found.append(ranks[0])
    assert found[0]["order"] != found[1]["order"] and found[0]["seed"] != found[1]["seed"]


def test_users_callbacks_loggers_and_validation_stay(tmp_path: Path) -> None:
    watcher, logger = Watcher(), CSVLogger(tmp_path, "", "")
    settings = {"callbacks": [watcher], "logger": logger, "log_every_n_steps": 1}
    run = trained(tmp_path, steps=12, val_check_interval=3, **settings)
    assert (len(watcher.seen), watcher.validations) == (12, 4)
    rows = list(csv.DictReader((tmp_path / "metrics.csv").open()))
    assert len([row for row in rows if row["loss_step"]]) == 12
    told = [row for record in run.records for row in record.get("losses", {})]
    assert set(told) <= {"loss"}


class Metrics(Net):
    """One is called `self`, and one is logged now and then."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("self", 1.0)
        if batch_idx % 4 == 0:
            self.log("rare", float(self.global_step))
        return super().training_step(batch, batch_idx)


def test_metrics_count_where_they_were_logged_whatever_they_are_called(tmp_path: Path) -> None:
    config = config_of("net", 12, 6)
    run = simulate(config, tmp_path, train=lambda place: fit(tmp_path, Metrics))
    told = [record["losses"] for record in run.records if record.get("losses")]
    assert [losses["self"] for losses in told] == [1.0, 1.0]
    assert [losses["rare"] for losses in told] == [2.0, 8.0]  # of steps 0 and 4, and 6 and 10


@pytest.mark.parametrize(
    ("module", "steps", "batches", "settings"),
    [
        ("net", 4, 12, {"accumulate_grad_batches": 4}),  # of six in an epoch: four, and two
        ("turns", 6, 12, {}),  # networks that are trained in turn make one step together
    ],
)
def test_a_step_is_complete_when_all_optimisers_have_stepped(
    tmp_path: Path, module: str, steps: int, batches: int, settings: dict[str, Any]
) -> None:
    watcher = Watcher()
    trained(tmp_path, module, steps=steps, h=1, callbacks=[watcher], **settings)
    assert len(watcher.seen) == batches


class Overflow(Callback):
    """The third batch's gradients overflow."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 2:
            pl_module.net[0].weight.grad.fill_(torch.inf)


def test_a_step_that_amp_skips_counts_as_in_lightning(tmp_path: Path) -> None:
    """So a schedule as long as the run ends with it."""
    watcher, half = Watcher(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 8.0))
    settings = {"callbacks": [Overflow(), watcher], "plugins": [half], "max_steps": 8}
    run = trained(tmp_path, "cycle", steps=8, **settings)
    assert len(watcher.seen) == 8 and run.totals.contributions == 4
    assert same_bits(watcher.seen[1], watcher.seen[2])


def test_a_schedule_as_long_as_the_run_stays_at_its_end_where_steps_are_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedwan.coordinator.run.FAREWELL_S", 0.1)
    watcher = Watcher()
    settings: dict[str, Any] = {"wrap": lambda _, link: PoisoningLink(link, 3), "max_steps": 12}
    run = trained(tmp_path, "cycle", callbacks=[watcher], **settings)
    assert run.totals.rejected == 1 and len(watcher.seen) == 14
    with pytest.raises(ValueError, match="of total steps is 6"):  # the mistake of a user
        trained(tmp_path / "short", "cycle", **settings | {"max_steps": 6})


def exchanging(folder: Path, module: str, **settings: Any) -> SimulatedRun:
    networks = NETWORKS.get(module, NETWORKS["gan"])
    inner = [f"inner.{n}.{word}" for n in networks for word in ("name=adam", "lr=0.01")]
    fixed = ["workload=command", "strategy=sync", "sites=1", "steps=4", "eval.every=0"]
    config = load_run(None, [*fixed, *inner])
    return simulate(config, folder, train=lambda place: fit(folder, module, **settings))


def test_the_run_ends_before_an_average_takes_the_weights_place(tmp_path: Path) -> None:
    def train(place: object) -> None:
        averaged = EMAWeightAveraging(decay=0.9)
        fit(tmp_path, "plain", callbacks=[averaged, FedwanCallback()], with_fedwan=False)

    words = ("strategy=sync", "sites=1", "steps=4", "eval.every=0")
    inner = ("inner.net.name=adam", "inner.net.lr=0.01")
    run = simulate(load_run(None, ["workload=command", *words, *inner]), tmp_path, train=train)
    assert run.site_sha256 == {"s1": hash_state(run.model.state)}


def test_gradients_of_all_networks_are_exchanged_before_the_first_step(tmp_path: Path) -> None:
    run = exchanging(tmp_path, "together")
    plain = fit(tmp_path, "together", with_fedwan=False, max_steps=8)
    children = {name: plain.get_submodule(name) for name in NETWORKS["gan"]}
    torch.testing.assert_close(run.model.state, state_of(children), rtol=0, atol=1e-6)


def requeued(folder: Path) -> SimulatedRun:
    """In a job of Slurm's, with what it left in the fit's folder when it was queued again."""
    (folder / "x.ckpt").rename(folder / "hpc_ckpt_1.ckpt")
    names = ("NTASKS", "JOB_ID", "NODEID", "PROCID", "LOCALID")
    job = {f"SLURM_{name}": "0" for name in names} | {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "x"}
    with mock.patch.dict(os.environ, job):
        return trained(folder, devices=1)


@pytest.mark.parametrize(
    ("start", "told"),
    [
        (lambda folder: exchanging(folder, "gan"), "call every manual_backward"),
        (lambda folder: exchanging(folder, "plain", gradient_clip_val=0.5), r"=0.5.*clip_norm"),
        (lambda folder: exchanging(folder, "clipping"), "Clipping.configure_gradient_clipping"),
        (lambda folder: exchanging(folder, "scaling"), "gradients of 'net' have changed since"),
        (lambda folder: exchanging(folder, "falling"), "the lr of 'net' is 0.005, not 0.01"),
        (lambda folder: trained(folder, max_epochs=1), r"ended at step 6 of 12.*max_epochs=-1"),
        (lambda folder: trained(folder, "loose"), "Loose trains scale outside"),
        (requeued, "hpc_ckpt_1.ckpt.*delete it.*auto_requeue=False"),
        (lambda folder: trained(folder, "renewing"), "made anew.*lr=0"),
        (lambda folder: trained(folder, "thawing", h=12), "given parameters.*lr=0"),
        (lambda folder: trained(folder, ckpt_path=folder / "x.ckpt"), "ckpt_path"),
        (lambda folder: trained(folder, loader=DataLoader(Stream(24), 4)), "data ended at step 6"),
        (lambda folder: trained(folder, callbacks=[LearningRateFinder()]), "Finder trains by its"),
        (
            lambda folder: trained(
                folder, callbacks=[OnExceptionCheckpoint(folder)], enable_checkpointing=True
            ),
            "OnExceptionCheckpoint has Lightning begin at its file",
        ),
    ],
)
def test_what_does_not_fit_a_run_is_refused(
    start: Callable[[Path], object], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedwan.coordinator.run.FAREWELL_S", 0.1)  # of a script that has failed
    trainer = Trainer(accelerator="cpu", barebones=True, max_steps=1)
    trainer.fit(Net(), DataLoader(torch.ones(4, 2)))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=told):
        start(tmp_path)


class Ended(Callback):
    """A script that is ended in its fourth batch."""

    def __init__(self, by_signal: bool) -> None:
        self.by_signal = by_signal

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *at: Any) -> None:
        if trainer.global_step == 4:
            trainer._signal_connector.received_sigterm = self.by_signal
            if not self.by_signal:
                sys.exit()


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_fit_that_is_ended_is_told_of_the_signal_or_of_its_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_signal: bool
) -> None:
    monkeypatch.setattr("fedwan.coordinator.run.FAREWELL_S", 0.1)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "assignment.json"))
    told = "stopped by SIGTERM" if by_signal else r"ended at step \d of 12.*max_epochs=-1"
    with pytest.raises((UserError, SystemExit), match="" if by_signal else told) as raised:
        trained(tmp_path, callbacks=[Ended(by_signal)])
    outcome = read_outcome(tmp_path / "assignment.json")[0]
    assert outcome is not None and re.search(told, outcome.text)
    # A script that was killed is started again; an error of fedwan's own tree is final.
    assert outcome.is_own == (not by_signal)
    assert not by_signal or raised.value.code == told


def test_the_documented_script_trains_alone_and_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/lightning.md").read_text().replace("max_steps=400", "max_steps=80")
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, "docs/lightning.md", "exec"), script)
    script["main"]()
    config = load_run(None, ["workload=command", "sites=1", "h=20", "eval.every=0"])
    run = simulate(config, tmp_path / "run", train=lambda place: script["main"]())
    assert run.totals.contributions == 2


def test_the_name_of_the_fit_s_own_state_is_refused() -> None:
    with pytest.raises(UserError, match=r"state\['lightning'\]"):
        FedwanCallback(state={"lightning": Counting()})


@pytest.mark.slow
def test_where_lightning_is_missing_it_is_said_what_to_install() -> None:
    hide = "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None"
    argv = [sys.executable, "-c", f"{hide}; import fedwan.lightning"]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "pip install 'fedwan[lightning]'" in ended.stderr


class Hyper(Net):
    """Its hyperparameters are a class and a path; `is_kept` has it keep the path itself."""

    def __init__(self, kind: type, root: Path, is_kept: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hparams_type"] = self.hparams.kind  # as Lightning has it of OmegaConf's
        if self.hparams.is_kept:
            checkpoint["root"] = self.hparams.root


class HyperData(LightningDataModule):
    def __init__(self, root: Path) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        return loader_of("stateful")


def test_hyperparameters_are_no_part_of_a_position_and_other_objects_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedwan.coordinator.run.FAREWELL_S", 0.1)
    for is_kept in (False, True):

        def train(place: object, is_kept: bool = is_kept) -> None:
            fit(tmp_path, lambda: Hyper(Net, tmp_path, is_kept), HyperData(tmp_path))

        told = "it holds pathlib.*on_save_checkpoint"
        with pytest.raises(UserError, match=told) if is_kept else nullcontext():
            simulate(config_of("net", 4, 2), tmp_path / str(is_kept), train=train)


class Counting:
    """Counts the hooks that come after the callback's own; what it serves depends on the counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.counts = Counter(state)


def _counted(name: str) -> Callable[..., None]:
    def count(self: Any, *_: Any) -> None:
        self.counts[name] += 1

    return count


AFTER = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")


class Later(Counting, Callback):
    """Listed after the callback."""


class Curriculum(Net):
    """Its data grow with what it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("number", float(self.counts.total()))
        return super().training_step(batch * (1 + self.counts.total() / 100), batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        slower = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.8, patience=0)
        by_step = {"scheduler": slower, "interval": "step", "monitor": "number"}
        return {"optimizer": optimizer, "lr_scheduler": by_step}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counts"] = dict(self.counts)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["global_step"] > 0 <= checkpoint["epoch"]
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()
        self.counts = Counter(checkpoint["counts"])


for kind in (Later, Curriculum):
    for name in AFTER:
        setattr(kind, name, _counted(name))


class Staged(Net):
    """Sets at an epoch's begin what follows from its number, counts it, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.drawn, self.rate = 0, 0.0, 0.0

    def on_train_epoch_start(self) -> None:
        self.begun += 1
        self.drawn = float(torch.rand(1))
        self.rate = 1 + self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch * self.begun * self.rate + self.drawn, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["begun"], checkpoint["drawn"] = self.begun, self.drawn

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.begun, self.drawn = checkpoint["begun"], checkpoint["drawn"]


@pytest.mark.parametrize("leave_at", [0.4, 0.6])  # in the second epoch, at its end
def test_what_an_epoch_began_with_is_what_its_rest_goes_on_with(
    tmp_path: Path, leave_at: float
) -> None:
    found = []
    for number, absence in enumerate((None, Absence(leave_at, leave_at))):
        run = simulate(
            config_of("net", 20, 2),
            tmp_path / str(number),
            train=lambda place: fit(tmp_path, Staged, "stateful"),
            absences={"s1": absence} if absence else {},
        )
        found.append(run.site_sha256)
    assert found[0] == found[1]


class Told(Net):
    """Notes what it has read."""

    def __init__(self, read: list[float]) -> None:
        super().__init__()
        self.read = read

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.read.append(round(float(batch[0, 0] * 24)))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("per_epoch", [3, 4])
def test_a_stream_goes_on_where_it_was_at_an_epoch_s_end_as_well(
    tmp_path: Path, per_epoch: int
) -> None:
    found = []
    for number, absence in enumerate((None, Absence(0.5, 0.5))):
        read: list[float] = []

        def train(place: object, read: list[float] = read) -> None:
            loader = StatefulDataLoader(Stream(), 1)
            fit(tmp_path, lambda: Told(read), loader, limit_train_batches=per_epoch)

        absences = {"s1": absence} if absence else {}
        folder = tmp_path / str(number)
        run = simulate(config_of("net", 12, 2), folder, train=train, absences=absences)
        found.append((run.site_sha256, read[-6:]))
    assert found[0] == found[1]
    assert found[0][1] == list(range(7, 13))


class Growing(Counting, LightningDataModule):
    """Batches grow as they are served."""

    def train_dataloader(self) -> Any:
        return loader_of("stateful")

    def val_dataloader(self) -> Any:
        return DataLoader(Points(), 6)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.counts["batches"] += 1
        return batch * (1 + self.counts["batches"] / 100)


@pytest.mark.parametrize(  # in mid-epoch, at its end, in the next
    ("leave_at", "is_averaged"), [(0.2, True), (0.4, False), (0.7, True)]
)
def test_what_hooks_changed_after_the_callback_and_lightning_s_average_survive_their_site(
    tmp_path: Path, leave_at: float, is_averaged: bool
) -> None:
    found: list[tuple[Any, ...]] = []
    for absence in (None, Absence(leave_at, leave_at)):
        made: list[tuple[Any, ...]] = []

        def train(place: Any, made: list[tuple[Any, ...]] = made) -> None:
            later, data = Later(), Growing()
            averages = [EMAWeightAveraging(decay=0.9)] if is_averaged else []
            settings = {"val_check_interval": 2, "reload_dataloaders_every_n_epochs": 1}
            module = fit(tmp_path, Curriculum, data, [later, *averages], **settings)
            hashes = [hash_state(each._average_model.state_dict()) for each in averages]
            made.append((*(each.counts for each in (later, data, module)), hashes))

        absences = {"s1": absence} if absence else {}
        folder = tmp_path / f"{absence}"
        run = simulate(config_of("net", 12, 2), folder, train=train, absences=absences)
        assert run.totals.rejoins == len(absences)
        found.append((run.site_sha256, *made[-1]))
    assert found[0] == found[1]
    assert found[0][1] == {AFTER[0]: 12, AFTER[1]: 7, AFTER[2]: 2}  # one of a sanity check


def test_a_loader_that_lightning_made_forget_its_order_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = DistributedSamplerWrapper(RandomSampler(Points()), num_replicas=1, rank=0)
    batches = BatchSampler(wrapped, 4, drop_last=False)  # as Lightning makes it anew
    trained(tmp_path, steps=2, loader=StatefulDataLoader(Points(), batch_sampler=batches))
    (told,) = [line for line in caplog.messages if "StatefulDistributedSampler" in line]
    assert "of a StatefulDataLoader, which forgets" in told
