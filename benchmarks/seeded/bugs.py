"""Bugs of the protocol, planted one at a time, to show that the simulation finds them."""

# ruff: noqa: ANN001, ANN202

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from fedwan import state
from fedwan.coordinator.masked import MaskedMerger
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.run import CoordinatedRun
from fedwan.protocol.round import Round
from fedwan.protocol.rounds import Rounds
from fedwan.site.checkpoint import Residuals, SiteCheckpoints
from fedwan.site.exchange import Exchange
from fedwan.site.place import Place
from fedwan.site.stub import CoordinatorStub
from fedwan.strategy import Strategy

Wrong = Callable[[Any], Any]
BUGS: dict[str, tuple[tuple[object, str, Wrong], ...]] = {}
"""What is replaced, and what makes the wrong one of the right one, by name."""


def _bug(name: str, owner: object, attribute: str) -> Callable[[Wrong], Wrong]:
    def note(wrong: Wrong) -> Wrong:
        BUGS[name] = (*BUGS.get(name, ()), (owner, attribute, wrong))
        return wrong

    return note


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The engine has this bug for as long as the context lasts."""
    _unsaved.clear()
    with ExitStack() as stack:
        for owner, attribute, wrong in BUGS[name]:
            made = wrong(getattr(owner, attribute))
            stack.enter_context(mock.patch.object(owner, attribute, made))
        yield


@_bug("error feedback is forgotten by a successor", Residuals, "restore")
def _(restore):
    return lambda self, fragments, versions, ledger: restore(self, fragments, versions, None)


@_bug("a site goes on with a coordinator of other versions", Exchange, "_rejoin")
def _(rejoin):
    def blind(self, lost, must_start_over):
        join_anew = self._join_anew

        def join_any(is_bound):
            join_anew(False)
            return self._place.versions

        with mock.patch.object(self, "_join_anew", join_any):
            return rejoin(self, lost, must_start_over)

    return blind


@_bug("a checkpoint holds G and D of two versions", GlobalModel, "save")
def _(save):
    kept: dict[str, Any] = {}

    def torn(self, folder, meta):
        whole = self.state
        own = {name: value.clone() for name, value in whole.items() if "discriminator" in name}
        self.state = whole | kept
        save(self, folder, meta)
        self.state = whole
        kept.clear()
        kept.update(own)

    return torn


@_bug("a version is called durable before it is", CoordinatedRun, "checkpoint")
def _(checkpoint):
    def early(self, model):
        self.hub.durable_version = model.version + 1
        checkpoint(self, model)
        self.hub.durable_version = model.version + 1

    return early


@_bug("a late contribution is accepted", Rounds, "settled")
def _(settled):
    return lambda self, key: settled(self, key).replace("stale", "")


@_bug("a successor does not send again what was lost", Place, "find")
def _(find):
    def forgetful(self, versions, run_step):
        self.is_exact = False
        return find(self, versions, run_step)

    return forgetful


AFTER_SENDING = "a site saves after its contribution has left"
_unsaved: list[Callable[[], None]] = []


@_bug(AFTER_SENDING, SiteCheckpoints, "save")
def _(save):
    def later(self, version, ledger, then=None):
        if then is not None:
            then(None)
        _unsaved.append(lambda: save(self, version, ledger))

    return later


@_bug(AFTER_SENDING, CoordinatorStub, "upload")
def _(send):
    def late(self, *args, **kwargs):
        receipt = send(self, *args, **kwargs)
        while _unsaved:
            _unsaved.pop(0)()
        return receipt

    return late


@_bug("a lost checkpoint is not made again", Strategy, "repeats")
def _(repeats):
    return lambda self, num_fragments: False


@_bug("a successor forgets its place in the data", SiteCheckpoints, "load")
def _(load):
    def partial(self, *args, **kwargs):
        with mock.patch.object(self, "_state", {}):
            return load(self, *args, **kwargs)

    return partial


@_bug("outer momentum is lost with the coordinator", GlobalModel, "load")
def _(load):
    def without(cls, folder, strategy, config):
        model = load(folder, strategy, config)
        fresh = GlobalModel(model.state, model.layout, strategy, config.half_life)
        model._server_step = fresh._server_step
        return model

    return classmethod(without)


@_bug("a checkpoint is removed before the next is written", state, "write_atomically")
def _(write_atomically):
    def in_place(path, write, previous=None, **options):
        path.unlink(missing_ok=True)
        write_atomically(path, write, **options)

    return in_place


@_bug("a sum under masks is lost with the coordinator", MaskedMerger, "save")
def _(save):
    return lambda self, folder, round_, run_id: None


@_bug("what comes after a round has closed is accepted", Rounds, "_least_wanted")
def _(least_wanted):
    return lambda self, fragment: self.versions[fragment] - self._policy.max_staleness


@_bug("contributions are merged in the order of their arrival", Round, "take")
def _(take):
    def in_arrival_order(self, *, closes):
        here = [key for key in self.whole if key[0] == self.version and key[1] in self.waiting]
        self.waiting = self.lacking()
        return here

    return in_arrival_order


@_bug("nobody begins anew where a site has lost what it had learnt", Rounds, "begin_anew")
def _(begin_anew):
    return lambda self, fragment: None


@_bug("a successor learns from what its predecessor sent", Rounds, "_leave")
def _(leave):
    def forgetful(self, site, checkpoint, repeats):
        for fragment, merged in enumerate(self._merged):
            if merged.get(site, (0, self._resumed_at[fragment]))[1] > checkpoint:
                self.begin_anew(fragment)

    return forgetful
