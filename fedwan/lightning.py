"""A run of fedwan inside Lightning's own Trainer, as one more of its callbacks.

    trainer = Trainer(max_epochs=-1, callbacks=[FedwanCallback()])
    trainer.fit(module, loader)

Loaders, loggers, callbacks, schedulers and validation stay the user's. Where nobody started the
script for a run, the callback does nothing.

Of Lightning's fit loop and its epoch loop `on_advance_start`, `on_advance_end` and `on_run_end` are
wrapped, and four private names are used, to go on where a fit was: `_checkpoint_connector`, and of
the loops `_data_fetcher`, `_last_train_dl_reload_epoch` and `_skip_next_val`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import IterableDataset

from fedwan.errors import UserError
from fedwan.pieces import is_plain
from fedwan.rng import derive_seed
from fedwan.site.checkpoint import Stateful, load_random_state, random_state
from fedwan.site.frozen import marks_of
from fedwan.site.joining import as_member, end_in_a_line, given_membership, join
from fedwan.site.script import DATA_ENDED
from fedwan.site.site import Membership, Site
from fedwan.state import State
from fedwan.workloads.base import NetworkKind

_log = logging.getLogger(__name__)

_FORGETS = (
    "Lightning put a DistributedSamplerWrapper around the sampler of a %s, which forgets its order "
    "there: after a kill the rest of the epoch is drawn anew; give Trainer(use_distributed_sampler="
    "False) and the loader torchdata's StatefulDistributedSampler"
)
_ENDED_EARLY = (
    "the fit ended at step {0.step} of {0.num_steps}, before the run was over; give "
    "Trainer(max_epochs=-1, max_steps=-1), and no callback that stops it"
)


def _lightning() -> Any:
    """The package that is there; first the one that is in use."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    end_in_a_line()
    raise UserError("fedwan.lightning needs Lightning; pip install 'fedwan[lightning]'")


class FedwanCallback(_lightning().Callback):  # type: ignore[misc]
    """Takes part in the run that this script was started for, from the fit's begin to its end.

    A step is complete at the end of the batch in which the last of the optimisers has stepped since
    the step before, after all hooks of the batch, its validation and its epoch: an accumulated
    batch is no step, one that AMP skipped is, as in Lightning, and networks that are trained in
    turn make one step together. When the run is over, so is the fit.

    A script that is started again goes on where it was killed: position in the data, loops,
    schedulers, loss scale and the state of other callbacks come from the site's checkpoint, as from
    one of Lightning's: a StatefulDataLoader finds its place, any other loader begins anew.

    Args:
        kinds: by network `adversarial` or `regression`, as for `fedwan.join`.
        state: what else to go on from, by name, such as `{"ema": ema}`: anything with
            `state_dict` and `load_state_dict` that is no part of the module.
        networks: by name; else the module's children that its optimisers train.
        evaluate: gets a seed; figures of the weights that the networks then hold.
        sample: gets a number and a seed; samples (num, channels, height, width) in [-1, 1].

    Raises:
        UserError: in the fit, where module or Trainer do not fit the run.
    """

    def __init__(
        self,
        kinds: Mapping[str, NetworkKind] | None = None,
        state: Mapping[str, Stateful] | None = None,
        networks: Mapping[str, nn.Module] | None = None,
        evaluate: Callable[[int], Mapping[str, Any]] | None = None,
        sample: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        self._state = dict(state or {})
        if "lightning" in self._state:
            raise UserError("state['lightning'] is the fit's own place; give yours another name")
        self._networks = networks
        self._options: dict[str, Any] = {"kinds": kinds, "evaluate": evaluate, "sample": sample}
        self._member: Membership | None = None
        self._site: Site | None = None
        self._steps: Iterator[int] = iter(())
        self._hooks = ExitStack()
        self._stepped: set[torch.optim.Optimizer] = set()
        self._is_due = False
        """Whether a step is complete that the site does not know of yet."""
        self._is_reduced = False
        self._metrics: dict[str, Tensor] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what would train before the run is joined."""
        known = _lightning().callbacks
        self._member = given_membership() if stage == "fit" else None
        if self._member is None:
            return
        for each in trainer.callbacks:
            if isinstance(each, known.LearningRateFinder | known.BatchSizeFinder):
                raise UserError(
                    f"{type(each).__name__} trains by itself at every start of a site; take it out "
                    "of the callbacks, find its value once, alone (python train.py), and set that"
                )
            if isinstance(each, known.OnExceptionCheckpoint):
                raise UserError(
                    "OnExceptionCheckpoint has Lightning begin at its file once there is one, "
                    "where a site goes on from its own checkpoint; take it out of the callbacks"
                )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Join, and go on from where this site stands."""
        member = self._member
        if member is None:
            return
        if trainer.ckpt_path:
            raise UserError(
                f"ckpt_path = {str(trainer.ckpt_path)!r}: a site's weights and position come from "
                "the run; load the weights into the module before the fit, and give no ckpt_path; "
                "one that Slurm left: delete it, and give SLURMEnvironment(auto_requeue=False)"
            )
        optimizers: list[torch.optim.Optimizer] = trainer.optimizers
        networks = self._networks or _trained_children(pl_module, optimizers)
        self._position = _Position(trainer)
        with as_member(member):
            site = join(
                networks=networks,
                optimizers={str(index): optimizer for index, optimizer in enumerate(optimizers)},
                state={"lightning": self._position} | self._state,
                steps=max(0, trainer.max_steps) // max(1, len(optimizers)),
                **self._options,
            )
        assert isinstance(site, Site), "it is started for a run"
        if site.config.num_sites > 1:  # for the samplers that Lightning makes in DDP
            parts = os.environ.get("PL_GLOBAL_SEED", 0), site.config.seed, site.name
            os.environ["PL_GLOBAL_SEED"] = str(derive_seed(*parts) % 2**32)
        site.replica.compare(self._position.begin(networks))
        self._site = site.__enter__()
        # The run ends the fit, in which steps that are taken again count once more.
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
        _check_precision(trainer, site)
        self._position.take_over()
        _make_room(trainer, site.num_steps)
        self._steps = iter(site)
        self._held = [(each, len(each.param_groups)) for each in optimizers]
        for optimizer in optimizers:
            hook = optimizer.register_step_post_hook(lambda each, *_: self._stepped.add(each))
            self._hooks.callback(hook.remove)
        loop = trainer.fit_loop
        self._wrap(loop, "on_advance_start", self._start_epoch)
        # Before all callbacks: at the end of training an average may take the weights' place.
        self._wrap(loop, "on_run_end", lambda end: [call() for call in (self.on_fit_end, end)])
        self._wrap(loop, "on_advance_end", partial(self._end_batch, trainer, True))
        self._wrap(loop.epoch_loop, "on_advance_end", partial(self._end_batch, trainer, False))

    def _wrap(self, loop: Any, name: str, wrapper: Callable[..., object]) -> None:
        """There is no hook that comes after all others."""
        setattr(loop, name, partial(wrapper, getattr(loop, name)))
        self._hooks.callback(delattr, loop, name)

    def _begin_step(self, trainer: Any, *_: Any) -> None:
        """What is due is exchanged here, and the coordinator heard; no step if the run is over."""
        if self._site is not None and next(self._steps, None) is None:
            trainer.should_stop = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the first step."""
        if self._site is not None and trainer.is_global_zero:
            for loader in trainer.fit_loop._data_fetcher.combined_loader.flattened:
                owners = loader, getattr(loader, "batch_sampler", None)
                kinds = {type(getattr(owner, "sampler", None)).__name__ for owner in owners}
                if "DistributedSamplerWrapper" in kinds and isinstance(loader, Stateful):
                    _log.warning(_FORGETS, type(loader).__name__)
        self._begin_step(trainer)

    def _start_epoch(self, start: Callable[[], None]) -> None:
        """Find the place in the data: before an epoch that begins, or after one has begun."""
        self._position.go_on(is_over=True)
        start()
        self._position.go_on(is_over=False)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Refuse gradients that come too late to be exchanged."""
        if self._is_reduced:
            raise UserError(
                "this run's strategy exchanges the gradients of all networks at once, and an "
                "optimiser has stepped before the last backward(); call every manual_backward() "
                "before the first step(), or choose a strategy that sends deltas, such as diloco"
            )

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Exchange gradients, if the strategy does; a step counts even if AMP skips it."""
        self._stepped.add(optimizer)
        if self._site is not None and not self._is_reduced:
            self._site.reduce()
            self._is_reduced = self._site.strategy.contributes == "gradient"

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Count optimisers that have stepped; the step is complete when all have."""
        if self._site is None:
            return
        if [(each, len(each.param_groups)) for each in trainer.optimizers] != self._held:
            raise UserError(
                "optimisers were made anew or given parameters in mid-fit, where no run learns of "
                "it; have configure_optimizers hold all that is trained, with lr=0 what is to wait"
            )
        # They stay there; one that is logged anew has memory of its own.
        told = {value.data_ptr() for value in self._metrics.values()}
        self._metrics = metrics = dict(trainer.callback_metrics)
        # What Lightning calls by three names, as it is logged by step and epoch, by one.
        forks = {f"{name}_{each}" for name in metrics for each in ("step", "epoch")}
        new = (each for each in metrics.items() if each[1].data_ptr() not in told)
        self._site.log(**{n: v for n, v in new if n not in forks and v.numel() == 1})
        _make_room(trainer, self._site.num_steps)
        if len(self._stepped) == len(trainer.optimizers):
            self._stepped, self._is_due = set(), True

    def _end_batch(
        self, trainer: Any, is_epoch: bool, end: Callable[..., None], *fetcher: Any
    ) -> None:
        """End a step after its batch, or the last one of an epoch after that."""
        loop = trainer.fit_loop.epoch_loop
        if is_epoch and not loop.batch_progress.current.ready:
            raise UserError(DATA_ENDED.format(self._site))
        if loop._skip_next_val:  # the batch of a checkpoint: it has ended
            loop._skip_next_val = False
            return
        end(*fetcher)
        if self._is_due and (is_epoch or not trainer.is_last_batch):
            self._is_due = self._is_reduced = False
            self._begin_step(trainer)

    def on_fit_end(self, *_: Any) -> None:
        """Stay until the coordinator says stop."""
        if self._site is not None and not self._site.is_done:
            raise UserError(_ENDED_EARLY.format(self._site))
        self._leave(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run; neither a signal nor `sys.exit()` is a loop's end."""
        site = self._site
        is_over = site is None or site.is_done
        if is_over or not isinstance(exception, SystemExit) or exception.code:
            self._leave(exception)
        elif trainer.received_sigterm:
            exception.code = "stopped by SIGTERM"  # with Lightning's 0 it would seem complete
            self._leave(SystemExit(exception.code))
        else:
            self._leave(error := UserError(_ENDED_EARLY.format(site)))
            raise error from exception

    def _leave(self, error: BaseException | None) -> None:
        self._hooks.close()
        site, self._site = self._site, None
        self._stepped, self._is_due, self._is_reduced = set(), False, False
        if site is not None:
            site.__exit__(type(error), error, None)


class _Position:
    """Where a fit stands beside its weights, as Lightning's own checkpoints have it: `Stateful`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None

    def begin(self, networks: Mapping[str, nn.Module]) -> State:
        """Parameters outside of these networks, as the script has made them."""
        self._networks = networks
        self._marks = marks_of(found := self._outside(nn.Parameter))
        return found

    def _outside(self, kind: type[Tensor] = Tensor) -> State:
        """What the module holds under none of the networks, sharing memory."""
        modules = self._networks.values()
        inside = {id(t) for m in modules for t in m.state_dict(keep_vars=True).values()}
        held = self._trainer.lightning_module.state_dict(keep_vars=True).items()
        own = {n: t for n, t in held if isinstance(t, kind) and id(t) not in inside}
        return {n: t.detach() for n, t in own.items() if is_plain(t) and not t.is_meta}

    def state_dict(self) -> dict[str, Any]:
        """Of the batch that is complete; after an epoch's last one, of the epoch to come."""
        if self._loaded is not None:
            return self._loaded  # nothing has happened since
        trainer = self._trainer
        saved = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        is_averaged = "averaging_state" in saved  # then `state_dict` is a callback's own
        large = {"optimizer_states", "current_model_state" if is_averaged else "state_dict"}
        names = "hparams_name", "hparams_type", "hyper_parameters"
        known = {f"{of}{name}" for of in ("", "datamodule_") for name in names}
        still = dict(marks_of(self._outside(nn.Parameter)).items() & self._marks.items())
        told = {
            "outside": {n: t for n, t in self._outside().items() if n not in still},
            "is_over": trainer.is_last_batch,
            "reloaded": trainer.fit_loop._last_train_dl_reload_epoch,
            "generators": [g.get_state() for g in self._generators()],
        }
        return told | {name: saved[name] for name in saved.keys() - large - known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it until the fit can take it over."""
        self._loaded = state

    def take_over(self) -> None:
        """What `state_dict` gave, but for the place in the data."""
        loaded, loop = self._loaded, self._trainer.fit_loop
        if loaded is None:
            return
        self._random = random_state()
        self._put_back(loaded)
        loop.epoch_progress.increment_by(loaded["epoch"])
        loop.epoch_loop.load_state_dict(loaded["loops"]["fit_loop"], "epoch_loop.")
        loop.epoch_loop.restarting = not loaded["is_over"]
        loop.epoch_loop.val_loop.restarting = True  # its sanity was checked at the first start

    def _put_back(self, loaded: dict[str, Any]) -> None:
        """The states of the module, callbacks and the like."""
        module, connector = self._trainer.lightning_module, self._trainer._checkpoint_connector
        for name, value in loaded["outside"].items():
            owner, _, leaf = name.rpartition(".")
            buffers = module.get_submodule(owner)._buffers
            if leaf in buffers and getattr(buffers[leaf], "shape", None) != value.shape:
                buffers[leaf] = value.to(module.device)  # one that grows
        module.load_state_dict(loaded["outside"], strict=False)
        # Those of the run by now; an averaging callback has its own, and puts these back as well.
        weights = module.state_dict()
        checkpoint = {"state_dict": weights, **loaded, "current_model_state": weights}
        connector._loaded_checkpoint = checkpoint
        module.on_load_checkpoint(checkpoint)
        connector.restore_datamodule()
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
        connector.restore_lr_schedulers()
        connector._loaded_checkpoint = {}

    def go_on(self, is_over: bool) -> None:
        """Find the place in the data: called before Lightning begins an epoch, and after."""
        loaded = self._loaded
        if loaded is None or loaded["is_over"] != is_over:
            return
        self._loaded = None
        self._trainer.fit_loop._last_train_dl_reload_epoch = loaded["reloaded"]
        fetcher = self._trainer.fit_loop._data_fetcher
        states = loaded["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
        loaders = [each for each in fetcher.combined_loader.flattened if isinstance(each, Stateful)]
        for loader, state in zip(loaders, states, strict=not is_over):
            # A stream that can tell its place begins no epoch anew.
            stream = getattr(loader, "dataset", None)
            if not is_over or (
                isinstance(stream, IterableDataset) and isinstance(stream, Stateful)
            ):
                loader.load_state_dict(state)
        if not is_over:
            self._put_back(loaded)  # once more: hooks of an epoch's begin were called again
            iter(fetcher)
        load_random_state(self._random)
        for generator, state in zip(self._generators(), loaded["generators"], strict=True):
            generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        """The loaders' own, and those of their samplers, each once."""
        loaders = self._trainer.fit_loop._data_fetcher.combined_loader.flattened
        batches = [getattr(loader, "batch_sampler", None) for loader in loaders]
        samplers = [getattr(owner, "sampler", None) for owner in (*loaders, *batches)]
        found = [getattr(owner, "generator", None) for owner in (*loaders, *batches, *samplers)]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _make_room(trainer: Any, num_steps: int) -> None:
    """The run ends the fit, not `max_steps`, which stays what it was for who reads it till then.

    A schedule as long as the run stays at its end while steps are taken again.
    """
    loop = trainer.fit_loop.epoch_loop
    if 0 <= loop.max_steps <= loop.global_step:
        loop.max_steps = loop.global_step + 1
    for config in trainer.lr_scheduler_configs:
        each = config.scheduler
        if isinstance(each, OneCycleLR) and num_steps <= each.total_steps <= each.last_epoch:
            config.frequency = sys.maxsize


def _trained_children(
    module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, nn.Module]:
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    if own := [n for n, p in module.named_parameters(recurse=False) if id(p) in held]:
        raise UserError(
            f"{type(module).__name__} trains {', '.join(own)} outside of its networks; make it a "
            "parameter of a child module, or give FedwanCallback(networks=...)"
        )
    children = module.named_children()
    return {n: m for n, m in children if any(id(p) in held for p in m.parameters())}


def _check_precision(trainer: Any, site: Site) -> None:
    """Refuse steps that one site would skip and the others not, or clip by itself."""
    if site.strategy.contributes != "gradient":
        return
    module, usual = trainer.lightning_module, _lightning().LightningModule
    does_clip = type(module).configure_gradient_clipping is not usual.configure_gradient_clipping
    plugin = trainer.precision_plugin
    refused = {
        f"{type(module).__name__}.configure_gradient_clipping": does_clip,
        f"Trainer(gradient_clip_val={trainer.gradient_clip_val})": trainer.gradient_clip_val,
        f"Trainer(precision={trainer.precision!r})": getattr(plugin, "scaler", None),
    }
    if found := [text for text, value in refused.items() if value]:
        raise UserError(
            f"{found[0]} clips or skips what the coordinator, that steps as well, does "
            "not; clip by the run's inner.NETWORK.clip_norm, train in 'bf16-mixed', or choose a "
            "strategy that sends deltas, such as diloco"
        )
