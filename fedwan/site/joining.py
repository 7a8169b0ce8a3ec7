"""`fedwan.join`: a training script's way into a run.

The same script trains alone (a federation of one, without coordinator or network), in a thread of
`fedwan.simulate`, or at a site, whose service has started it with an assignment.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.app import complete, load_strategy, sources
from fedwan.config import Config, from_json, site_names
from fedwan.errors import ConfigError, FedwanError, IdentityError, UserError
from fedwan.initial import load_initial
from fedwan.link.base import Link
from fedwan.link.client import GrpcLink
from fedwan.link.shaped import ShapedLink
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator
from fedwan.names import nearest
from fedwan.rng import derive_seed, seed_torch
from fedwan.site.alone import Alone
from fedwan.site.assignment import Assignment, Outcome, end_with
from fedwan.site.group import Group, open_group
from fedwan.site.site import Membership, Script, Site
from fedwan.site.stateful import Stateful
from fedwan.strategy import Strategy
from fedwan.workloads.base import NetworkKind

__all__ = ["Place", "given_place", "join", "open_site", "standing_in"]

KINDS: tuple[NetworkKind, ...] = ("adversarial", "regression")


@dataclass(frozen=True)
class Place:
    """Where a script stands in a federation."""

    member: Membership
    open_link: Callable[[], Link]
    data_path: str = ""
    show_samples: bool = False
    strategy: Strategy | None = None
    """The run's, where it is no page that is found by name."""


_place: contextvars.ContextVar[Place | None] = contextvars.ContextVar("place", default=None)


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
    in DDP, sharded by FSDP2 or tensor parallel. Where there are several sites, torch's global
    generator is seeded anew from its last seed and the site's name, so that sites draw differently.

    Args:
        networks: by name, on their device; a network that no optimiser steps is frozen, and must be
            the same at every site.
        optimizers: by any name, over parameters of these networks.
        state: what else a killed script goes on from, by name: anything with `state_dict` and
            `load_state_dict`, such as a StatefulDataLoader, a scheduler, a GradScaler.
        kinds: by network `adversarial` or `regression`, which chooses outer defaults. All are
            adversarial if several are trained, else regression.
        steps: completed steps of the run; the run's own `steps` go before.
        evaluate: gets a seed; figures of the weights that the networks then hold. `fd` is shown.
        sample: gets a number and a seed; samples (num, channels, height, width) in [-1, 1] of the
            weights that the networks then hold. They leave the site.

    Returns:
        A context manager and iterator over steps.

    Raises:
        UserError: networks and optimisers do not fit together, or the script's processes differ.
        ConfigError: the run's strategy does not fit the networks.
    """
    sys.excepthook = _say_in_a_line
    try:
        return _join(networks, optimizers, state, kinds, steps, evaluate, sample)
    except Exception as error:
        Outcome.leave(error, 0)
        raise


def _join(
    networks: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    state: Mapping[str, Stateful] | None,
    kinds: Mapping[str, NetworkKind] | None,
    steps: int,
    evaluate: Callable[[int], Mapping[str, Any]] | None,
    sample: Callable[[int, int], Tensor] | None,
) -> Site | Alone:
    modules = {name: _unwrapped(module) for name, module in networks.items()}
    trained = _trained(modules, optimizers)
    script = Script(
        networks=modules,
        optimizers=optimizers,
        kinds=_kinds(trained, kinds),
        state=state or {},
        num_steps=steps,
        evaluate=evaluate,
        sample=sample,
        on_close=Outcome.leave,
    )
    place = given_place()
    if place is None:
        return Alone(steps)
    group = open_group()
    load_initial(modules, place.member.config.init, place.member.config.excluded)
    if place.member.config.sites > 1:
        seed = derive_seed(torch.initial_seed(), place.member.config.seed, place.member.name)
        seed_torch(seed)
    return open_site(place, script, group)


def given_place() -> Place | None:
    """Where this script stands: None alone."""
    place = _place.get()
    if place is not None:
        return place
    assignment = Assignment.given()
    return None if assignment is None else _place_of(assignment)


@contextlib.contextmanager
def standing_in(place: Place) -> Any:
    """`join` finds this place in this thread, for as long as the context lasts."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def open_site(place: Place, script: Script, group: Group) -> Site:
    """A site, not joined yet."""
    member = place.member
    config = complete(member.config, script.kinds, script.num_steps)
    member = replace(member, config=config, sources=sources(config) if not place.strategy else None)
    strategy = place.strategy or load_strategy(config.strategy).build(config)
    link = place.open_link() if group.rank == 0 else None
    try:
        return Site(member, script, strategy, link, group)
    except BaseException as error:
        if script.on_close is not None:
            script.on_close(error, 0)
        if link is not None:
            link.close()
        raise


def _place_of(assignment: Assignment) -> Place:
    end_with(assignment.parent)
    _log_to_stderr()
    tune_allocator()
    config = from_json(assignment.config)
    if config.threads:
        torch.set_num_threads(config.threads)
    names = site_names(config)
    if assignment.site not in names:
        raise ConfigError(
            f"site {assignment.site!r} is not in this run, which has {', '.join(names)}; "
            "add it to site_names"
        )
    identity = Identity.load(Path(assignment.identity))
    if identity.name != assignment.site:
        raise IdentityError(
            f"the certificate in {assignment.identity} is of {identity.name!r}, this site is "
            f"{assignment.site!r}; use the identity folder that was issued for it"
        )
    member = Membership(
        config=config,
        run_id=assignment.run_id,
        name=assignment.site,
        folder=Path(assignment.dir) / "checkpoints" / assignment.run_id,
        device=choose_device(config.device),
    )
    return Place(
        member,
        lambda: _open_link(config, assignment.address, identity),
        assignment.data_path,
        assignment.show_samples,
    )


def _say_in_a_line(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """End a script for an error of fedwan's tree with one line and its exit code, no traceback."""
    if not isinstance(error, FedwanError):
        sys.__excepthook__(kind, error, trace)
        return
    print(f"fedwan: {error}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(error.exit_code)


def _log_to_stderr() -> None:
    """Say what the engine does in the site's log, where a script has set up no logging."""
    logger = logging.getLogger("fedwan")
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)


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
    link: Link = GrpcLink(
        address,
        identity,
        patience_s=config.round.patience_s,
        congestion=settings.congestion,
        pace_mbit=settings.pace_mbit,
    )
    if settings.rate_mbit or settings.rtt_ms or settings.loss:
        link = ShapedLink(link, settings.rate_mbit, settings.rtt_ms, settings.loss)
    return link


def _unwrapped(module: nn.Module) -> nn.Module:
    """The network itself, where DDP or torch.compile is around it."""
    is_wrapped = isinstance(module, nn.parallel.DistributedDataParallel)
    inner = module.module if is_wrapped else getattr(module, "_orig_mod", module)
    assert isinstance(inner, nn.Module)
    return inner


def _trained(
    networks: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
) -> Sequence[str]:
    """Names of the networks that some optimiser steps."""
    if not networks or not optimizers:
        what = "networks" if not networks else "optimizers"
        raise UserError(f"fedwan.join got no {what}; give at least one by name, as in {what}={{…}}")
    held = {id(p) for o in optimizers.values() for group in o.param_groups for p in group["params"]}
    trained = [n for n, m in networks.items() if any(id(p) in held for p in m.parameters())]
    if not trained:
        raise UserError(
            f"no optimiser holds a parameter of {', '.join(networks)}; build optimisers from the "
            "networks' parameters(), after they were wrapped or sharded"
        )
    return trained


def _kinds(
    trained: Sequence[str], given: Mapping[str, NetworkKind] | None
) -> dict[str, NetworkKind]:
    default = KINDS[0] if len(trained) > 1 else KINDS[1]
    for name, kind in (given or {}).items():
        if name not in trained or kind not in KINDS:
            raise UserError(
                f"kinds[{name!r}] = {kind!r}: trained are {', '.join(trained)}, kinds are "
                f"{' and '.join(KINDS)}{nearest(name, trained) if name not in trained else ''}"
            )
    return {name: (given or {}).get(name, default) for name in sorted(trained)}
