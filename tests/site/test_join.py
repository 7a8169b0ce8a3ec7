"""`fedwan.join` around a script of one's own, in one process."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fedwan
from fedwan import simulation
from fedwan.coordinator.model import GlobalModel
from fedwan.errors import ConfigError, UserError
from fedwan.link import wire_pb2 as wire
from fedwan.simulation import Absence, simulate
from fedwan.site import alone, quality
from fedwan.site.alone import Alone
from fedwan.site.assignment import VARIABLE, Outcome
from fedwan.site.site import Site
from fedwan.site.stub import CoordinatorStub
from fedwan.state import State, hash_state
from tests.site.support import WIDTH, Batches, Masters, asked, network
from tests.support import same_bits

STEPS = 12
PLAIN = {  # outer steps that take the mean of one site's weights for the new ones
    "diloco": "strategy=diloco outer.net.lr=1 outer.net.momentum=0",
    "local_sgd": "strategy=local_sgd",
}
OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.002, momentum=0.9, nesterov=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw_amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.5),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "masters": lambda params: Masters(params, lr=0.002),
    "around": lambda params: Leading(params),
    "telling": lambda params: Telling(params),
}


class Leading(torch.optim.Optimizer):
    """Has another optimiser step, and tells nothing of its moments, as SAM's does."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.002})
        self.base = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.base.param_groups

    def step(self, closure: Any = None) -> None:
        self.base.step()


class Telling(Leading):
    """Keeps the other one's state in its own, as some forms of Lookahead do."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups


class Trainer:
    """A plain loop's parts: a network with dropout, an optimiser, a scheduler, data.

    Weights near 1 stay within a factor of two of where they began, so that Δ is exact: near 0 it is
    rounded, and the global weights then lie a last bit beside the local ones.
    """

    def __init__(self, kind: str) -> None:
        self.net = nn.Sequential(network(), nn.Dropout(0.1))
        self.optimizer = OPTIMIZERS[kind](self.net.parameters())
        self.scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.batches = Batches()
        torch.manual_seed(7)

    def step(self, reduce: Callable[[], object] = lambda: None) -> Tensor:
        x, target = next(self.batches)
        loss = (self.net(x) - target).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        reduce()
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.detach()

    def join(self, **options: Any) -> Site | Alone:
        base = {"base": o.base} if type(o := self.optimizer) is Leading else {}
        given = {
            "networks": {"net": self.net},
            "optimizers": {"net": self.optimizer, **base},
            "state": {"scheduler": self.scheduler, "batches": self.batches},
        }
        return fedwan.join(**(given | options))

    def weights(self) -> State:
        return {f"net/{n}": p.detach().clone() for n, p in self.net.named_parameters()}


def loop(
    trainer: Trainer,
    body: Callable[[Trainer, Any], object] = lambda trainer, site: trainer.step(site.reduce),
    **options: Any,
) -> Trainer:
    """A script whose steps are `body`, as it ended; options are of `fedwan.join`."""
    with trainer.join(**options) as site:
        for _ in site:
            body(trainer, site)
    return trainer


def plainly(kind: str) -> Trainer:
    trainer = Trainer(kind)
    for _ in range(STEPS):
        trainer.step()
    return trainer


def joined(kind: str, folder: Path, words: str, **absences: Absence) -> tuple[State, Trainer]:
    """The coordinator's weights, and the trainer as its last process left it."""
    trainers: list[Trainer] = []

    def train(_: object) -> None:
        trainers.append(trainer := Trainer(kind))
        loop(trainer, lambda _, site: site.log(loss=trainer.step(site.reduce)))

    config = asked("steps=12", *words.split())
    run = simulate(config, folder, train=train, absences=absences)
    return run.model.state, trainers[-1]


def without(monkeypatch: pytest.MonkeyPatch, kind: wire.DownloadRequest.Kind) -> None:
    """Nobody may fetch this."""
    snapshot = GlobalModel.snapshot

    def of_others(model: GlobalModel, wanted: wire.DownloadRequest.Kind) -> Any:
        assert wanted != kind, "was fetched"
        return snapshot(model, wanted)

    monkeypatch.setattr(GlobalModel, "snapshot", of_others)


# What joining changes ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "h"), [("adamw", 1), *((kind, 4) for kind in OPTIMIZERS)])
def test_one_site_whose_mean_is_its_own_weights_takes_the_plain_scripts_steps(
    kind: str, h: int, tmp_path: Path
) -> None:
    plain = plainly(kind)
    for name, words in PLAIN.items():
        state, trainer = joined(kind, tmp_path / name, f"{words} h={h}")
        assert same_bits(trainer.weights(), plain.weights())
        assert trainer.scheduler.state_dict() == plain.scheduler.state_dict()
        torch.testing.assert_close(state, plain.weights(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("adamw_amsgrad", PLAIN["diloco"]),
        ("rmsprop", PLAIN["local_sgd"]),
        ("around", PLAIN["diloco"]),
        ("telling", PLAIN["diloco"]),
    ],
)
def test_a_killed_script_takes_the_steps_that_it_would_have_taken_and_fetches_no_weights(
    words: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, wire.DownloadRequest.GLOBAL)
    whole, first = joined(kind, tmp_path / "a", f"{words} h=2")
    again, second = joined(kind, tmp_path / "b", f"{words} h=2", s1=Absence(0.5, 0.5))
    assert same_bits(whole, again)
    assert first.scheduler.state_dict() == second.scheduler.state_dict()
    assert torch.equal(next(first.batches)[0], next(second.batches)[0])


@pytest.mark.parametrize("strategy", ["streaming_diloco", "diloco", "scaffnew", "eager_diloco"])
def test_a_killed_site_s_masters_are_those_of_the_weights_that_it_goes_on_with(
    strategy: str, tmp_path: Path
) -> None:
    """Under `streaming_diloco` these are the run's, and not those of its checkpoint."""
    kept: list[int] = []

    def body(trainer: Trainer, site: Any) -> None:
        state = trainer.optimizer.state
        kept.append(len(state))
        assert all(torch.equal(state[param]["master"], param) for param in state)
        site.log(loss=trainer.step())

    config = asked("steps=16", f"strategy={strategy}", "h=4")
    run = simulate(
        *(config, tmp_path),
        train=lambda _: loop(Trainer("masters"), body),
        absences={"s1": Absence(0.5, 0.5)},
    )
    assert kept[0] == 0 and all(kept[1:]), "the second process goes on from a checkpoint"
    assert run.totals.rejoins == 1


def leave_before_sending(monkeypatch: pytest.MonkeyPatch) -> Absence:
    """At version 0, with a checkpoint of version 1."""

    def send(self: CoordinatorStub, payload: Any, header: wire.UploadHeader) -> wire.Receipt:
        if header.kind == wire.UploadHeader.CONTRIBUTION and not left:
            left.append(True)
            raise simulation._Left
        return real(self, payload, header)

    left: list[bool] = []
    real = CoordinatorStub.upload
    monkeypatch.setattr(CoordinatorStub, "upload", send)
    return Absence(2.0, 0.0)


@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco stream.tau=0"])
@pytest.mark.parametrize("leave", [lambda _: Absence(0.5, 0.5), leave_before_sending])
def test_a_script_that_goes_on_from_a_checkpoint_of_its_own_takes_over_the_run_s_weights(
    leave: Callable[[pytest.MonkeyPatch], Absence],
    strategy: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(folder: Path, **absences: Absence) -> simulation.SimulatedRun:
        kept: State = {}

        def train(_: object) -> None:
            trainer = Trainer("adamw")
            trainer.net.load_state_dict(kept, strict=False)
            loop(trainer, step_and_keep)

        def step_and_keep(trainer: Trainer, site: Any) -> None:
            site.log(loss=trainer.step())
            kept.update({n: v.clone() for n, v in trainer.net.state_dict().items()})

        config = asked("steps=8", "h=4", *f"strategy={strategy}".split())
        return simulate(config, folder, train=train, absences=absences)

    whole = run(tmp_path / "a").model.state
    again = run(tmp_path / "b", s1=leave(monkeypatch))
    assert set(again.site_sha256.values()) == {hash_state(again.model.state)}
    assert "stream" in strategy or same_bits(whole, again.model.state)


def by_data(trainer: Trainer) -> None:
    for param in trainer.net.parameters():
        assert param.grad is not None
        param.data = param.data - 0.01 * param.grad


def by_vector(trainer: Trainer) -> None:
    params = list(trainer.net.parameters())
    vector = nn.utils.parameters_to_vector(params)
    nn.utils.vector_to_parameters(vector * 1.001, params)


@pytest.mark.parametrize("way", [by_data, by_vector])
def test_weights_that_are_put_in_the_place_of_others_travel(
    way: Callable[[Trainer], None], tmp_path: Path
) -> None:
    trainers: list[Trainer] = []

    def body(trainer: Trainer, site: Any) -> None:
        trainer.step()
        way(trainer)
        trainer.net.count = trainer.net.count + 1

    def train(_: object) -> None:
        trainers.append(trainer := Trainer("sgd"))
        trainer.net.register_buffer("count", torch.zeros((), dtype=torch.int64))
        loop(trainer, body)

    run = simulate(asked("steps=12", "h=4"), tmp_path, train=train)
    assert int(run.model.state["net/count"]) == STEPS
    state = {"net/" + name: value for name, value in trainers[0].net.state_dict().items()}
    torch.testing.assert_close(state, run.model.state)


def test_evaluation_leaves_the_scripts_generators_alone(tmp_path: Path) -> None:
    def draws(*words: str) -> list[float]:
        drawn: list[float] = []

        def draw() -> float:
            return random.random() + np.random.rand() + float(torch.rand(()))

        def train(_: object) -> None:
            random.seed(0)
            np.random.seed(0)
            evaluate = {"evaluate": lambda seed: {"fd": np.float32(draw())}}
            loop(Trainer("sgd"), lambda trainer, site: drawn.append(draw()), **evaluate)

        simulate(asked("steps=12", *words), tmp_path / words[0], train=train)
        return drawn

    assert draws("eval.every=4") == draws("eval.every=0")


def test_of_many_figures_the_first_are_taken_whatever_recipes_tell_by_their_names(
    tmp_path: Path,
) -> None:
    figures = {"fd": 1.0, "real": torch.tensor(0.5), "moments": 3}
    figures |= {f"fd_of_class_{n}": float(n) for n in range(100)}
    ran = simulate(
        asked("steps=4"),
        tmp_path,
        train=lambda _: loop(Trainer("sgd"), evaluate=lambda seed: figures),
    )
    assert ran.totals.quality == dict(list(figures.items())[:64]) | {"real": 0.5}


class InOneProcess(nn.parallel.DistributedDataParallel):
    def __init__(self, module: Any) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda net: torch.compile(InOneProcess(net)), marks=pytest.mark.slow),
        pytest.param(lambda net: InOneProcess(torch.compile(net)), marks=pytest.mark.slow),
        nn.DataParallel,
    ],
    ids=["compiled ddp", "ddp of compiled", "dp"],
)
def test_names_are_those_of_the_network_whatever_is_around_it(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    trainer = Trainer("adamw")
    site: Any = trainer.join(networks={"net": wrap(trainer.net)}, steps=1)
    assert site._script.networks == {"net": trainer.net}


# One line each -----------------------------------------------------------------------------------


def refused(folder: Path, train: Callable[[Trainer], object], *words: str) -> str:
    with pytest.raises(UserError) as raised:
        simulate(asked(*words), folder, train=lambda _: train(Trainer("adamw")))
    text = str(raised.value)
    assert text and "\n" not in text
    return text


def never(trainer: Trainer, site: object) -> None:
    raise AssertionError("a step was begun")


def past_end(trainer: Trainer) -> None:
    with trainer.join(steps=4) as site:
        for _ in range(5):
            trainer.step(site.reduce)
            site.after_step()


def stray(trainer: Trainer) -> None:
    trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    trainer.join(steps=4)


def twice(trainer: Trainer) -> None:
    with trainer.join(steps=4) as site:
        for _ in site:
            trainer.step(site.reduce)
    with site:
        raise AssertionError("nobody is there any more")


def share(trainer: Trainer) -> None:
    head = nn.Sequential(trainer.net[0][0], nn.Linear(16, 2))  # type: ignore[index]
    trainer.optimizer.add_param_group({"params": head[1].parameters()})
    trainer.join(steps=4, networks={"d": trainer.net, "q": head})


class Unstateful(Batches):
    """As accelerate's loader is, unless it was asked otherwise."""

    use_stateful_dataloader = False

    def state_dict(self) -> dict[str, Tensor]:
        raise AttributeError("dl_state_dict")


ALONE_TOO: list[tuple[Callable[[Trainer], object] | dict[str, Any], str]] = [
    ({"evaluate": lambda seed: 0.5}, "evaluate returned a float; return numbers by name"),
    ({"evaluate": lambda seed: {"fd": torch.ones(2)}}, "evaluate returned a Tensor as 'fd'"),
    ({"evaluate": lambda seed: {"fd": "low"}}, "evaluate returned a str as 'fd'; return"),
    ({"evaluate": lambda seed: {"fd": seed.fd}}, "evaluate failed: AttributeError: 'int' obj"),
    ({"sample": lambda num, seed: [num]}, "sample(1, 0) returned a list of shape (); return one"),
    ({"sample": lambda n, seed: torch.ones(n, 8, 8)}, "of shape (1, 8, 8); return one tensor"),
    ({"sample": lambda num, seed: 1 / 0}, "sample failed: ZeroDivisionError: division by zero"),
    ({"networks": [nn.Linear(2, 2)]}, "got no networks by name, but a list; give a dict, as in"),
    (
        {"networks": {"net": nn.Linear(2, 2).state_dict()}},
        "['net'] is a OrderedDict; give a Module",
    ),
    ({"networks": {0: nn.Linear(2, 2)}}, "networks[0] is a Linear; give a Module by a name"),
    (
        lambda trainer: trainer.join(
            networks={"net": nn.Sequential(trainer.net, nn.LazyLinear(2))}, steps=4
        ),
        "'net/1.weight' has no shape yet; call its network once before",
    ),
    ({"optimizers": {"net": "adamw"}}, "optimizers['net'] is a str; give a Optimizer by"),
    ({"state": [3]}, "got no state by name, but a list; give a dict"),
    ({"kinds": "adversarial"}, "got no kinds by name, but a str; give a dict"),
    ({"steps": 20.0}, "steps = 20.0 is no number of steps; give an int, as in steps=2000"),
    ({"steps": -5}, "steps = -5 is no number of steps"),
    ({"steps": 10**20}, "steps = 100000000000000000000 is no number of steps"),
    ({"evaluate": 3}, "evaluate is a int; give a function"),
    ({"networks": {"my.net": nn.Linear(2, 2)}}, "networks has the name 'my.net', of which no"),
    ({"networks": {}}, "got no networks by name, but none; give"),
    ({"optimizers": {}}, "got no optimizers by name, but none; give"),
    (
        {"optimizers": {"net": torch.optim.SGD(network().parameters())}},
        "no optimiser holds a parameter of net",
    ),
    ({"kinds": {"nett": "regression"}}, "kinds['nett'] = 'regression': trained are net"),
    ({"kinds": {"net": "regresion"}}, "kinds are adversarial and regression"),
    (
        {"state": {"loader": Unstateful()}},
        "state['loader'] is a loader of accelerate's without a state_dict(); give Accelerator(",
    ),
    ({"state": {"loader": 3}}, "state['loader'] is a int, which has no state_dict"),
    (
        {"state": {"loader": DataLoader([torch.ones(1)])}},  # type: ignore[arg-type]
        "state['loader'] is a DataLoader, which has no state_dict and load_state_dict; give "
        "fedwan.data.Loader",
    ),
    (
        lambda trainer: loop(trainer, lambda trainer, site: next(iter(())), steps=4),
        "the script's data ended at step 0 of 4; take a loader that begins anew, as",
    ),
    (
        lambda trainer: loop(trainer, lambda trainer, site: site.log(loss="low"), steps=4),
        "site.log(loss='low') is no number; give one, such as loss.mean()",
    ),
    (
        lambda trainer: loop(trainer, lambda trainer, site: site.log(loss=1j), steps=4),
        "site.log(loss='1j') is no number; give one, such as loss.mean()",
    ),
    (
        lambda trainer: loop(trainer, lambda _, site: site.log(loss=torch.zeros(3)), steps=4),
        "site.log(loss='tensor([0., 0., 0.])') is no number",
    ),
    (past_end, "a step was begun at step 4 of 4, after the end of the run; leave the loop once"),
    (
        stray,
        "holds a parameter of shape (3,) that is in none of the networks net; build it from their "
        "parameters(), after they were wrapped or sharded, and before fedwan.join; a parameter of "
        "a loss is to be in one of them, or in one more: nn.ParameterList([parameter])",
    ),
    (share, "'d/0.0.weight' and 'q/0.weight' are one parameter, which"),
    (lambda trainer: list(trainer.join(steps=4)), "write `with fedwan.join(...) as site:` around"),
]


@pytest.mark.parametrize(("script", "told"), ALONE_TOO)
def test_what_cannot_be_joined_or_goes_wrong_is_told_alone_and_in_a_run(
    script: Callable[[Trainer], object] | dict[str, Any], told: str, tmp_path: Path
) -> None:
    def train(trainer: Trainer) -> object:
        if isinstance(script, dict):
            return loop(trainer, never, **{"steps": 4, **script})
        return script(trainer)

    assert told in refused(tmp_path, train, "steps=4", "h=4")
    with pytest.raises(UserError, match=re.escape(told)):
        train(Trainer("sgd"))


def test_a_script_that_has_left_its_run_cannot_join_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "assignment.json"))
    Outcome.leave(None, 8)
    with pytest.raises(UserError, match="put all networks and phases into one fedwan.join"):
        Trainer("sgd").join(steps=4)


def test_an_error_of_the_script_s_own_goes_to_the_hook_that_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: told.append(error))
    for _ in range(2):
        loop(Trainer("sgd"), steps=1)
    sys.excepthook(ValueError, error := ValueError("its own"), None)
    assert told == [error]


class Odd:
    """Keeps what no checkpoint takes."""

    def state_dict(self) -> dict[str, object]:
        return {"self": Odd}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError


def follower(trainer: Trainer) -> None:
    ema = network()

    def follow(trainer: Trainer, site: object) -> None:
        trainer.step()
        with torch.no_grad():
            torch._foreach_mul_(list(ema.parameters()), 0.9)

    loop(trainer, follow, networks={"net": trainer.net, "ema": ema})


def thaw(trainer: Trainer) -> None:
    trainer.net[0].requires_grad_(False)[-1].requires_grad_(True)  # type: ignore[operator, index]
    loop(trainer, lambda trainer, site: trainer.net.requires_grad_(True) and trainer.step())


def spread(trainer: Trainer) -> None:
    trainer.net.register_buffer("mask", torch.ones(1).expand(4))
    trainer.join()


def bars(trainer: Trainer) -> None:
    trainer.net.register_parameter("a|b", nn.Parameter(torch.ones(1)))
    trainer.optimizer.add_param_group({"params": [trainer.net.get_parameter("a|b")]})
    trainer.join(state={})


def shrink_late(trainer: Trainer) -> None:
    """In place, so that it is the same tensor at the same address."""
    trainer.net.register_buffer("seen", torch.zeros(4))
    last = 7
    loop(trainer, lambda trainer, site: trainer.net.seen.resize_(4 if site.step < last else 2))


def leave_early(trainer: Trainer) -> None:
    with trainer.join() as site:
        for step in site:
            if step == 2:
                break


def clip_late(trainer: Trainer, site: Any) -> None:
    params = trainer.net.parameters()
    trainer.step(lambda: (site.reduce(), nn.utils.clip_grad_norm_(params, 0.01)))


def assign(trainer: Trainer, site: object) -> None:
    weights = {name: value.clone() for name, value in trainer.net.state_dict().items()}
    trainer.net.load_state_dict(weights, assign=True)


def add_late(trainer: Trainer, site: object) -> None:
    trainer.net.register_parameter("scale", nn.Parameter(torch.ones(1)))


def remember(trainer: Trainer, site: object) -> None:
    trainer.optimizer.state["global"] = {"steps": 1}  # type: ignore[index]


def remember_sparse(trainer: Trainer, site: object) -> None:
    weight = trainer.net[0][0].weight  # type: ignore[index]
    trainer.optimizer.state[weight]["rows"] = weight.detach().to_sparse()


def lead(trainer: Trainer) -> None:
    trainer.join(optimizers={"net": Leading(trainer.net.parameters())})


def scatter(trainer: Trainer) -> None:
    trainer.net.register_buffer("mask", torch.ones(4).to_sparse())
    trainer.join()


def having(**settings: object) -> Callable[[Trainer], object]:
    """A script whose optimiser has other settings."""

    def train(trainer: Trainer) -> None:
        trainer.optimizer.param_groups[0] |= settings
        trainer.join(state={})

    return train


def halve(trainer: Trainer) -> None:
    trainer.net[0][2].weight.data = trainer.net[0][2].weight.data.bfloat16()
    trainer.join(state={})


def set_rate(trainer: Trainer) -> None:
    trainer.optimizer.param_groups[0]["lr"] = 0.5


def in_loop(body: Callable[[Trainer, Any], object]) -> Callable[[Trainer], object]:
    """A script with this body, without a scheduler."""

    def train(trainer: Trainer) -> None:
        trainer.scheduler = None
        loop(trainer, body, state={})

    train.__name__ = body.__name__
    return train


NO_REDUCE = in_loop(lambda trainer, site: trainer.step())


@pytest.mark.parametrize(
    ("train", "words", "says"),
    [
        (
            lambda trainer: loop(trainer, state={"odd": Odd()}),
            "strategy=diloco",
            "state['odd'] cannot be kept in a checkpoint: it holds",
        ),
        (leave_early, "strategy=diloco", "left its loop at step 2 of 8"),
        (
            lambda trainer: loop(trainer, state={"scaler": torch.amp.GradScaler("cpu")}),
            "strategy=parameter_server",
            "state['scaler'] is a GradScaler, which the coordinator",
        ),
        (NO_REDUCE, "strategy=sync", "an optimiser has stepped before it; call every backward()"),
        (NO_REDUCE, "strategy=parameter_server", "an optimiser has stepped before it"),
        (NO_REDUCE, "strategy=sync inner.net.lr=0.001", "its lr is 0.01, the settings say 0.001"),
        (NO_REDUCE, "strategy=sync inner.net.name=sgd", "it is AdamW, the settings say 'sgd'"),
        (having(fused=True), "strategy=sync", "it is fused, which comes to other last bits"),
        (having(lr=torch.tensor(0.01)), "strategy=sync", "its lr is a tensor, which comes to"),
        (
            NO_REDUCE,
            "strategy=diloco inner.net.name=adam inner.net.state=average",
            "is not the one that sites' moments merge: it is AdamW, the settings say 'adam'",
        ),
        (
            NO_REDUCE,
            "strategy=diloco inner.net.name=adamw inner.net.beta2=0.99 inner.net.state=average",
            "its betas is (0.9, 0.999), the settings say (0.9, 0.99); make them agree",
        ),
        (in_loop(clip_late), "strategy=sync", "gradients of 'net' have changed since"),
        (
            in_loop(lambda trainer, site: (site.reduce(), trainer.step())),
            "strategy=sync",
            "gradients of 'net' have changed since",
        ),
        (loop, "strategy=sync", "state['scheduler'] is a CosineAnnealingLR, which the coord"),
        (
            in_loop(lambda trainer, site: (set_rate(trainer), trainer.step(site.reduce))),
            "strategy=sync",
            "the lr of 'net' is 0.5, not 0.01",
        ),
        (
            in_loop(lambda trainer, site: (trainer.step(site.reduce), trainer.optimizer.step())),
            "strategy=sync",
            "an optimiser has stepped twice after it",
        ),
        (
            in_loop(lambda trainer, site: (trainer.step(site.reduce), site.reduce())),
            "strategy=sync",
            "site.reduce() was called twice in one step",
        ),
        (in_loop(assign), "strategy=diloco", "was added, replaced or given the shape"),
        (in_loop(add_late), "strategy=diloco", "'net/scale' was added, replaced or given the"),
        (shrink_late, "strategy=diloco h=1", "'net/seen' was added, replaced or given the shape"),
        (follower, "strategy=diloco", "'ema/0.bias' was frozen when training began"),
        (thaw, "strategy=diloco", "hold it when fedwan.join is called, and freeze it afterwards"),
        (bars, "strategy=diloco", "tensor 'net/a|b' has a '|' in its name"),
        (
            lambda trainer: trainer.join(optimizers={"a|b": trainer.optimizer}),
            "strategy=diloco",
            "optimiser name 'a|b' holds a '|'",
        ),
        (twice, "strategy=diloco", "a script takes part in its run once, and this one has already"),
        (spread, "strategy=diloco", "'net/mask' lies on meta or is an expanded view"),
        (
            halve,
            "strategy=sync",
            "parameter 'net/0.2.weight' is bfloat16, and the coordinator takes the same steps in "
            "float32, which would lead elsewhere; keep weights in float32",
        ),
        (in_loop(remember), "strategy=diloco", "keeps 'global', which no checkpoint"),
        (in_loop(remember_sparse), "strategy=diloco", "keeps 'rows', which no checkpoint"),
        (
            lead,
            "strategy=diloco",
            "optimizers['net'] is a Leading around another optimiser, whose moments no checkpoint "
            "would have; give that one, too: optimizers={'net': it, 'net_inner': it.base}",
        ),
        (scatter, "strategy=diloco", "'net/mask' is a torch.sparse_coo, whose values lie in other"),
    ],
)
def test_a_script_that_goes_wrong_is_told_so(
    train: Callable[[Trainer], object], words: str, says: str, tmp_path: Path
) -> None:
    assert says in refused(tmp_path, train, *words.split())


class Around(torch.optim.Optimizer):
    """An optimiser around another one, as accelerate has it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]


@pytest.mark.parametrize("words", ["strategy=sync", "strategy=diloco inner.net.state=average"])
def test_an_optimiser_is_known_by_what_it_is_around(words: str, tmp_path: Path) -> None:
    def train(_: object) -> None:
        trainer = Trainer("adamw")
        trainer.scheduler = None
        loop(trainer, optimizers={"net": Around(Around(trainer.optimizer))}, state={})

    name = ["inner.net.name=adamw"] * ("average" in words)
    simulate(asked(*words.split(), *name, "steps=4"), tmp_path, train=train)


@pytest.mark.parametrize("state", ["average", "keep"])
def test_a_script_whose_moments_merge_has_its_own_rate_and_decay(
    state: str, tmp_path: Path
) -> None:
    def train(_: object) -> None:
        trainer = Trainer("adamw")
        params = trainer.net.parameters()
        trainer.optimizer = torch.optim.AdamW(params, 3e-4, (0.8, 0.99), weight_decay=0.02)
        trainer.scheduler = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer)
        loop(trainer)

    words = ["inner.net.name=adamw", "inner.net.beta2=0.99", f"inner.net.state={state}"]
    if state == "keep":
        with pytest.raises(ConfigError, match=r"beta2 = 0.99 has no effect: a script makes its"):
            asked("strategy=diloco", *words)
        return
    run = simulate(asked("strategy=diloco", *words), tmp_path, train=train)
    assert "net/0.0.weight|exp_avg_sq" in run.model.state


def test_under_sync_reduce_clips_as_the_coordinator_does(tmp_path: Path) -> None:
    norms: list[float] = []

    def body(trainer: Trainer, site: Any) -> None:
        trainer.step(site.reduce)
        grads = [p.grad for p in trainer.net.parameters() if p.grad is not None]
        norms.append(float(nn.utils.get_total_norm(grads)))

    config = asked("strategy=sync", "inner.net.clip_norm=0.01")
    copies: list[bool] = []

    def train(_: object) -> None:
        trainer = Trainer("adamw")
        trainer.scheduler = None
        with trainer.join(state={}) as site:
            assert isinstance(site, Site)
            base, live = site.replica.base, site.replica.live
            copies.extend(base[n] is not live[n] for n in live)
            for _ in site:
                body(trainer, site)

    run = simulate(config, tmp_path, train=train)
    assert copies and not any(copies)
    assert set(run.site_sha256.values()) == {hash_state(run.model.state)}
    assert max(norms) == pytest.approx(0.01, rel=1e-3)


# Alone -------------------------------------------------------------------------------------------


def test_processes_that_torchrun_started_do_not_train_alone_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="torchrun started 2 processes, but torch has no process"):
        Trainer("sgd").join(steps=4)


def test_a_script_that_nobody_started_trains_alone() -> None:
    plain, trainer = plainly("adamw"), Trainer("adamw")
    with trainer.join(steps=STEPS) as site:
        assert isinstance(site, Alone)
        for step in site:
            assert step == site.step
            site.log(loss=trainer.step(site.reduce))
    assert same_bits(trainer.weights(), plain.weights())
    assert site.is_done


@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_alone_each_step_is_said_once_and_the_last_one_always(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], every_s: float
) -> None:
    monkeypatch.setattr(alone, "SAY_EVERY_S", every_s)
    loop(Trainer("sgd"), lambda _, site: site.log(loss=float(site.step)), steps=2)
    lines = ["step 1 of 2: loss 0", "step 2 of 2: loss 1"]
    assert capsys.readouterr().out.splitlines() == (lines[1:] if every_s else lines)


def test_alone_the_first_value_that_is_not_finite_is_told_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = [0.5, math.inf, math.nan]
    loop(Trainer("sgd"), lambda _, site: site.log(a=1.0, loss=values[site.step]), steps=3)
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("warning: loss is inf at step 1 of 3; in a run the coordinator refuses")
    assert last == "step 3 of 3: a 1, loss nan"


def test_alone_quality_is_measured_at_both_ends_and_an_early_end_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer, drawn = Trainer("sgd"), torch.get_rng_state()

    def evaluate(seed: int) -> dict[str, float]:
        assert not trainer.net.training and not torch.is_grad_enabled()
        return {"fd": float(torch.rand(()) > -1)}

    with trainer.join(steps=3, evaluate=evaluate) as site:
        for step in site:
            site.log(loss=1.0)
            if step == 1:
                break
    assert trainer.net.training and torch.equal(torch.get_rng_state(), drawn)
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == ["step 0 of 3: fd 1", "step 1 of 3: loss 1", "step 1 of 3: fd 1"]
    assert "in a run this would end the site: the script left its loop at step 1" in told[3]


def test_alone_needs_a_number_of_steps_and_a_loop_that_ends_them() -> None:
    with pytest.raises(UserError, match="steps = 0: .* give fedwan.join"):
        Trainer("sgd").join()
    with Trainer("sgd").join(steps=2) as site, pytest.raises(UserError, match=r"at step 0; call"):
        while not site.is_done:
            pass


# Other loops than one over the site --------------------------------------------------------------


def in_epochs(trainer: Trainer, site: Site | Alone) -> int:
    """Five batches an epoch; in the second one the fourth body is broken off."""
    bodies = epoch = 0
    while not site.is_done:
        for _, part in zip(site, range(5), strict=False):
            bodies += 1
            if epoch == 1 and part == 3:
                break
            trainer.step(site.reduce)
        epoch += 1
    return bodies


def by_hand(trainer: Trainer, site: Site | Alone) -> int:
    bodies = 0
    while not site.is_done:
        trainer.step(site.reduce)
        site.after_step()
        bodies += 1
    return bodies


@pytest.mark.parametrize("strategy", ["strategy=diloco h=4", "strategy=sync"])
@pytest.mark.parametrize("loop", [in_epochs, by_hand])
def test_steps_count_that_were_taken_whatever_loop_takes_them(
    loop: Callable[[Trainer, Site | Alone], int], strategy: str, tmp_path: Path
) -> None:
    bodies: list[int] = []

    def train(_: object) -> None:
        trainer = Trainer("adamw")
        trainer.scheduler = None
        with trainer.join(state={}) as site:
            assert isinstance(site, Site)
            base, live = site.replica.base, site.replica.live
            assert all((base[n] is live[n]) == ("sync" in strategy) for n in live), "no copy"
            bodies.append(loop(trainer, site))

    config = asked("steps=12", *strategy.split())
    run = simulate(config, tmp_path, train=train)
    with Trainer("adamw").join(steps=12) as site:
        assert bodies == [loop(Trainer("adamw"), site)]
    rounds = [row for row in run.records if row["kind"] == "round"]
    assert [row["step"] for row in rounds][-1] == 12 and run.totals.rejected == 0
    assert sum(row["samples"] for row in rounds) == 12 * config.data.batch
    assert run.totals.compute_s > 1e-4


def test_losses_are_means_in_fp32_of_what_they_were_when_they_were_logged(tmp_path: Path) -> None:
    running = torch.zeros(1)

    def body(trainer: Trainer, site: Any) -> None:
        running.fill_(1)
        site.log(low=torch.tensor(1.0, dtype=torch.bfloat16), running=running)
        running.zero_()

    config = asked("steps=600", "h=600")
    run = simulate(config, tmp_path, train=lambda _: loop(Trainer("adamw"), body))
    (row,) = (row for row in run.records if row["kind"] == "round")
    assert row["losses"] == {"low": 1.0, "running": 1.0}


def bears_death(train: Callable[[object], object], folder: Path) -> None:
    """Its process dies or does not: the site ends on the same bits."""
    whole, died = (
        simulate(asked("steps=12"), folder / str(len(absences)), train=train, absences=absences)
        for absences in ({}, {"s1": Absence(0.5, 0.5)})
    )
    assert whole.site_sha256 == died.site_sha256


def test_what_a_network_keeps_for_itself_may_grow(tmp_path: Path) -> None:
    """And dies once: with and without, it ends on the same bits."""

    def body(trainer: Trainer, site: Any) -> None:
        trainer.step()
        trainer.net.register_buffer("cache", torch.zeros(2 + site.step), persistent=False)

    def train(_: object) -> None:
        trainer = Trainer("adamw")
        trainer.net.register_buffer("cache", torch.zeros(2), persistent=False)
        turns = torch.zeros(2, dtype=torch.complex128)
        trainer.net.register_buffer("turns", turns, persistent=False)
        loop(trainer, body)

    bears_death(train, tmp_path)


def test_buffers_of_a_network_that_nobody_steps_are_the_sites_own(tmp_path: Path) -> None:
    """As StyleGAN2-ADA's p: it moves, and who dies goes on with it as it was."""

    def train(_: object) -> None:
        trainer, augment = Trainer("adamw"), nn.BatchNorm1d(WIDTH, affine=False)
        augment.register_buffer("p", torch.zeros(()))

        def enter(_: object, args: tuple[Tensor, ...]) -> Tensor:
            return args[0] + augment.p + 0 * augment(args[0])

        def body(trainer: Trainer, site: Any) -> None:
            trainer.step()
            augment.p = augment.p + 0.125  # another tensor in its place

        trainer.net.register_forward_pre_hook(enter)
        loop(trainer, body, networks={"net": trainer.net, "augment": augment})
        ends.append(hash_state(augment.state_dict()))

    ends: list[str] = []
    bears_death(train, tmp_path)
    assert len(set(ends)) == 1


def test_what_is_frozen_once_it_was_joined_may_thaw(tmp_path: Path) -> None:
    """The way that the message tells, and as if nothing had been frozen to who dies."""

    def train(_: object) -> None:
        trainer = Trainer("adamw")
        first = next(trainer.net.parameters())
        began = first.detach().clone()

        def body(trainer: Trainer, site: Any) -> None:
            first.requires_grad_(site.step >= 6)
            trainer.step()
            assert site.step >= 6 or torch.equal(first, began)

        loop(trainer, body)
        assert not torch.equal(first, began)

    bears_death(train, tmp_path)


def test_a_parameter_of_a_loss_is_trained_in_a_network_of_its_own(tmp_path: Path) -> None:
    def train(_: object) -> None:
        trainer, weight = Trainer("adamw"), nn.Parameter(torch.zeros(()))
        trainer.optimizer.add_param_group({"params": [weight]})
        trainer.scheduler = None
        networks = {"net": trainer.net, "loss": nn.ParameterList([weight])}

        def body(trainer: Trainer, site: object) -> None:
            trainer.optimizer.zero_grad()
            (weight.square() - weight).backward()
            trainer.optimizer.step()

        loop(trainer, body, networks=networks, state={})

    run = simulate(asked("steps=4"), tmp_path, train=train)
    assert float(run.model.state["loss/0"]) > 0.0


def test_a_frozen_network_does_not_move_while_quality_is_measured(tmp_path: Path) -> None:
    judge = nn.BatchNorm1d(4)

    def evaluate(seed: int) -> dict[str, float]:
        judge(torch.full((8, 4), 3.0))
        return {"fd": 1.0}

    def train(_: object) -> None:
        trainer = Trainer("adamw")
        loop(trainer, networks={"net": trainer.net, "judge": judge}, evaluate=evaluate)

    simulate(asked("eval.every=4"), tmp_path, train=train)
    assert float(judge.running_mean.sum()) == 0.0


@pytest.mark.parametrize(
    ("shape", "num", "dtype"),
    [
        ((2,), 64, torch.float32),
        ((3, 32, 32), 64, torch.uint8),
        ((3, 256, 256), 32, torch.uint8),
        ((3, 1024, 1024), 2, torch.uint8),
        ((3, 2048, 2048), 0, torch.uint8),
    ],
    ids=str,
)
def test_of_large_samples_as_many_are_shown_as_a_message_has_room_for(
    shape: tuple[int, ...], num: int, dtype: torch.dtype
) -> None:
    made = torch.ones(()).expand(70, *shape)
    shown = quality._fitting({"generated": made, "real": made})
    found = [(*value.shape, value.dtype) for value in shown.values()]
    assert found == [(num, *shape, dtype)] * (2 if num else 0)
    none = {"generated": made, "real": made[:0]}  # held back nothing
    assert [*quality._fitting(none)] == ["generated"] * bool(num)


def test_a_script_that_measures_nothing_fetches_nothing_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, wire.DownloadRequest.EMA)
    config = asked("steps=8", "h=2", "eval.every=2")
    ran = simulate(config, tmp_path, train=lambda _: loop(Trainer("sgd")))
    assert ran.totals.quality_version == 4 and ran.totals.quality == {}
