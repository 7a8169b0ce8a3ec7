"""`fedwan.join`: a training script's way into a run.

The same script trains alone (a federation of one, without coordinator or network), in a thread of
`fedwan.simulate`, or at a site, whose service has started it with an assignment.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedwan.config import Config, from_json, site_names
from fedwan.errors import ConfigError, FedwanError, UserError
from fedwan.link.base import Link
from fedwan.link.client import GrpcLink
from fedwan.link.loopback import ShapedLink
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator
from fedwan.names import nearest
from fedwan.rng import derive_seed, seed_all
from fedwan.site.alone import Alone
from fedwan.site.assignment import Assignment, Outcome, end_with, machine
from fedwan.site.checkpoint import Stateful
from fedwan.site.group import has_group, open_group
from fedwan.site.script import ONCE, Script
from fedwan.site.site import Membership, Site
from fedwan.weights import load_initial, unwrapped
from fedwan.workloads.base import NetworkKind

KINDS: tuple[NetworkKind, ...] = ("adversarial", "regression")

_membership: contextvars.ContextVar[Membership | None] = contextvars.ContextVar(
    "membership", default=None
)


def join(
    *,
    networks: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    state: Mapping[str, Stateful] | None = None,
    kinds: Mapping[str, NetworkKind] | None = None,
    steps: int = 0,
    evaluate: Callable[[int], Mapping[str, Any]] | None = None,
    sample: Callable[[int, int], Tensor] | None = None,
) -> Site | Alone:
    """Take part in the run that this script was started for; or train alone.

        with fedwan.join(networks={"unet": unet}, optimizers={"unet": opt}, steps=2000) as site:
            for step in site:
                loss = training_loss(unet, next(batches))
                loss.backward()
                site.reduce()
                opt.step()
                opt.zero_grad()
                site.log(loss=loss)

    Every process of a site calls it, with the same networks under the same initial weights: plain,
    in DDP, sharded by FSDP2 or tensor parallel. Where there are several sites, the global
    generators of torch, Python and NumPy are seeded anew from torch's last seed and the site's
    name, so that sites draw differently.

    Args:
        networks: by name, on their device; one that no optimiser steps is frozen, and must be the
            same at every site.
        optimizers: by any name, over parameters of these networks.
        state: what else a killed script goes on from, by name: anything with `state_dict` and
            `load_state_dict`, such as a StatefulDataLoader, a scheduler, a GradScaler.
        kinds: by network `adversarial` or `regression`, which chooses outer defaults. All are
            adversarial if several are trained, else regression.
        steps: completed steps of the run; the run's own `steps` go before.
        evaluate: gets a seed; figures of the weights that the networks then hold. `fd` is shown.
        sample: gets a number and a seed; pictures (num, 1 or 3, height, width) in [-1, 1], or
            points (num, 2), of the weights that the networks then hold. They leave the site.

    Raises:
        UserError: networks and optimisers do not fit together, or the script's processes differ.
        ConfigError: the run's strategy does not fit the networks.
    """
    end_in_a_line()
    if Outcome.is_left():
        raise UserError(ONCE)
    _check(networks, optimizers, state or {}, kinds or {}, steps)
    for what, call in (("evaluate", evaluate), ("sample", sample)):
        if call is not None and not callable(call):
            raise UserError(f"{what} is a {type(call).__name__}; give a function")
    modules = {name: unwrapped(module) for name, module in networks.items()}
    optimizers = {name: _optimizer_in(wrapper) for name, wrapper in optimizers.items()}
    try:
        held = {
            id(p) for o in optimizers.values() for group in o.param_groups for p in group["params"]
        }
        trained = _trained(modules, held, kinds or {})
        script = Script(modules, optimizers, trained, state or {}, steps, evaluate, sample)
        if (member := given_membership()) is None:
            has_group()
            return Alone(script)
        config = member.config
        group = open_group(config.round.patience_s)
        load_initial(modules, config, held)
        if config.num_sites > 1:
            seed_all(derive_seed(torch.initial_seed(), config.seed, member.name))
        return Site(member, script, group)
    except Exception as error:
        Outcome.leave(error, 0)
        raise


def _check(networks: Any, optimizers: Any, state: Any, kinds: Any, steps: Any) -> None:
    """Refuse what is none of what `join` takes: scripts are not typed."""
    for what, given, kind, least in (
        ("networks", networks, nn.Module, 1),
        ("optimizers", optimizers, torch.optim.Optimizer, 1),
        ("state", state, object, 0),
        ("kinds", kinds, str, 0),
    ):
        if not isinstance(given, Mapping) or len(given) < least:
            but = f"a {type(given).__name__}" if given else "none"
            raise UserError(
                f'fedwan.join got no {what} by name, but {but}; give a dict, as in {what}={{"net": '
                "…}"
            )
        for name, value in given.items():
            if not isinstance(name, str) or not isinstance(value, kind):
                raise UserError(
                    f"{what}[{name!r}] is a {type(value).__name__}; give a {kind.__name__} by a "
                    "name, which is text"
                )
    if odd := [name for name in networks if not re.fullmatch(r"[\w-]+", name)]:
        raise UserError(
            f"networks has the name {odd[0]!r}, of which no setting can be named (outer.NAME.lr); "
            "use letters, digits, _ and -"
        )
    for name, value in state.items():
        if not isinstance(value, Stateful):
            mend = "an object with both, such as a scheduler"
            if isinstance(value, DataLoader):
                mend = "fedwan.data.Loader, or torchdata's StatefulDataLoader"
            raise UserError(
                f"state[{name!r}] is a {type(value).__name__}, which has no state_dict and "
                f"load_state_dict; give {mend}"
            )
        # To ask a loader for its state may begin its epoch, so that accelerate's is known by this.
        if getattr(value, "use_stateful_dataloader", True) is False:
            raise UserError(
                f"state[{name!r}] is a loader of accelerate's without a state_dict(); give "
                "Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader="
                "True)), or take fedwan.data.Loader"
            )
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 1 << 31:
        raise UserError(f"steps = {steps!r} is no number of steps; give an int, as in steps=2000")


def given_membership() -> Membership | None:
    """What this script was started for; None alone."""
    if (member := _membership.get()) is not None:
        return member
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "the process of a loader's worker imports this script, and would join as well; put "
            'what it does under `if __name__ == "__main__":`'
        )
    if (assignment := Assignment.given()) is None:
        return None
    if assignment.machine == machine():  # elsewhere what started its processes ends them
        end_with(assignment.parent)
    if not (logger := logging.getLogger("fedwan")).hasHandlers():  # a script has set up none
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    tune_allocator()
    config = from_json(assignment.config)
    names = site_names(config)
    if assignment.site not in names:
        raise ConfigError(
            f"site {assignment.site!r} is not in this run, which has {', '.join(names)}; "
            "ask whoever runs it to add it to sites"
        )
    identity = Identity.load(Path(assignment.identity), name=assignment.site)
    return Membership(
        config=config,
        run_id=assignment.run_id,
        name=assignment.site,
        folder=assignment.checkpoints,
        open_link=partial(_open_link, config, assignment.address, identity),
        device=choose_device(config.device),
        data_path=assignment.data_path,
        show_samples=assignment.show_samples,
        error=assignment.error,
        identity=identity,
        home=Path(assignment.dir),
    )


@contextlib.contextmanager
def as_member(member: Membership) -> Iterator[None]:
    """`join` finds this membership in this thread, for as long as the context lasts."""
    token = _membership.set(member)
    try:
        yield
    finally:
        _membership.reset(token)


def end_in_a_line() -> None:
    """From here on an error of fedwan's tree ends this script with one line and its exit code.

    Others go to the hook that was there.
    """
    if getattr(sys.excepthook, "func", None) is not _end:
        sys.excepthook = partial(_end, sys.excepthook)


def _end(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    Outcome.leave(error, 0)  # of an error outside of the loop nobody has left word
    if not isinstance(error, FedwanError) or hasattr(sys, "ps1"):  # somebody types
        before(kind, error, trace)
        return
    print(f"fedwan: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU where there is one; of several processes each its own."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda' but this site has no CUDA GPU; set device=auto or cpu")
    if not has_cuda or name not in ("auto", "cuda"):
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def _open_link(config: Config, address: str, identity: Identity) -> Link:
    settings = config.link
    link: Link = GrpcLink(address, identity, settings, patience_s=config.round.patience_s)
    if settings.rate_mbit or settings.rtt_ms:
        link = ShapedLink(link, settings.rate_mbit, settings.rtt_ms)
    return link


def _optimizer_in(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimiser itself, where one is around it that has no state of its own: accelerate's."""
    while True:
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner.state is not optimizer.state:
            return optimizer
        optimizer = inner


def _trained(
    networks: Mapping[str, nn.Module], held: Collection[int], kinds: Mapping[str, NetworkKind]
) -> dict[str, NetworkKind]:
    """Kinds of the networks that some optimiser steps; `held` is `id` of what they step."""
    trained = [n for n, m in networks.items() if any(id(p) in held for p in m.parameters())]
    if not trained:
        raise UserError(
            f"no optimiser holds a parameter of {', '.join(networks)}; build optimisers from the "
            "networks' parameters(), after they were wrapped or sharded"
        )
    for name, kind in kinds.items():
        if name not in trained or kind not in KINDS:
            raise UserError(
                f"kinds[{name!r}] = {kind!r}: trained are {', '.join(trained)}, kinds are "
                f"{' and '.join(KINDS)}{nearest(name, trained) if name not in trained else ''}"
            )
    default = KINDS[0] if len(trained) > 1 else KINDS[1]
    return {name: kinds.get(name, default) for name in sorted(trained)}
