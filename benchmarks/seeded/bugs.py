"""Bugs of the protocol, planted one at a time, to show that the simulation finds them."""

# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from fedwan import state
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.run import CoordinatedRun
from fedwan.protocol.round import Round
from fedwan.protocol.rounds import Rounds
from fedwan.site.checkpoint import Residuals, SiteCheckpoints
from fedwan.site.place import Place
from fedwan.site.stub import CoordinatorStub
from fedwan.strategy import Strategy


def _forget_residual(restore: Any) -> Any:
    return lambda self, fragments, versions, ledger: restore(self, fragments, versions, None)


def _one_network_behind(save: Any) -> Any:
    """The checkpoint holds the discriminator of the one before."""
    kept: dict[str, Any] = {}

    def torn(self: GlobalModel, folder: Path, meta: Any) -> None:
        whole = self.state
        own = {name: value.clone() for name, value in whole.items() if "discriminator" in name}
        self.state = whole | kept
        save(self, folder, meta)
        self.state = whole
        kept.clear()
        kept.update(own)

    return torn


def _promise_too_early(checkpoint: Any) -> Any:
    def early(self: CoordinatedRun, model: GlobalModel) -> None:
        self.hub.durable_version = model.version + 1
        checkpoint(self, model)
        self.hub.durable_version = model.version + 1

    return early


def _accept_late(settled: Any) -> Any:
    return lambda self, key: settled(self, key).replace("stale", "")


def _do_not_send_again(find: Any) -> Any:
    """A successor forgets that the steps of its newest checkpoint are still to be merged."""

    def forgetful(self: Place, versions: Any, run_step: int) -> Any:
        self.is_exact = False
        return find(self, versions, run_step)

    return forgetful


def _save_after_sending(send: Any) -> Any:
    def late(self: CoordinatorStub, *args: Any) -> Any:
        receipt = send(self, *args)
        for save in _pending:
            save()
        _pending.clear()
        return receipt

    return late


_pending: list[Callable[[], None]] = []


def _keep_for_later(save: Any) -> Any:
    return lambda self, *args: _pending.append(lambda: save(self, *args))


def _lose_place_in_data(load: Any) -> Any:
    def partial(self: SiteCheckpoints, *args: Any, **kwargs: Any) -> Any:
        whole, self._state = self._state, {}
        try:
            return load(self, *args, **kwargs)
        finally:
            self._state = whole

    return partial


def _lose_outer_state(load: Any) -> Any:
    def without(cls: type, folder: Path, strategy: Any, config: Any) -> GlobalModel:
        model: GlobalModel = load(folder, strategy, config)
        fresh = GlobalModel(model.state, model.layout, strategy, config.half_life)
        model._server_step = fresh._server_step
        return model

    return classmethod(without)


def _write_in_place(write_atomically: Any) -> Any:
    def in_place(path: Path, write: Any, previous: Path | None = None) -> None:
        path.unlink(missing_ok=True)
        write_atomically(path, write)

    return in_place


def _merge_as_they_come(take: Any) -> Any:
    def in_arrival_order(self: Round[Any], *, closes: bool) -> Any:
        here = [key for key in self.whole if key[0] == self.version and key[1] in self.waiting]
        self.waiting = self.lacking()
        return here

    return in_arrival_order


def _any_session(find: Any) -> Any:
    return lambda self, name, session=None: find(self, name)


BUGS: dict[str, tuple[tuple[object, str, Callable[[Any], Any]], ...]] = {
    "error feedback is forgotten by a successor": ((Residuals, "restore", _forget_residual),),
    "a checkpoint holds G and D of two versions": ((GlobalModel, "save", _one_network_behind),),
    "a version is called durable before it is": (
        (CoordinatedRun, "checkpoint", _promise_too_early),
    ),
    "a late contribution is accepted": ((Rounds, "settled", _accept_late),),
    "a successor does not send again what was lost": ((Place, "find", _do_not_send_again),),
    "a site saves after its contribution has left": (
        (SiteCheckpoints, "save", _keep_for_later),
        (CoordinatorStub, "send_contribution", _save_after_sending),
    ),
    "a lost checkpoint is not made again": (
        (Strategy, "repeats", lambda repeats: lambda self, num_fragments: False),
    ),
    "a successor forgets its place in the data": ((SiteCheckpoints, "load", _lose_place_in_data),),
    "outer momentum is lost with the coordinator": ((GlobalModel, "load", _lose_outer_state),),
    "a checkpoint is removed before the next is written": (
        (state, "write_atomically", _write_in_place),
    ),
    "contributions are merged in the order of their arrival": (
        (Round, "take", _merge_as_they_come),
    ),
}
"""What is replaced by what, by name."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The engine has this bug for as long as the context lasts."""
    _pending.clear()
    patches = [
        mock.patch.object(owner, attribute, wrong(getattr(owner, attribute)))
        for owner, attribute, wrong in BUGS[name]
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
