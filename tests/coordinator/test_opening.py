"""Which site's initial weights a run begins with, where others send theirs badly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedwan.codecs.payload import Source
from fedwan.coordinator.intake import Measures, Upload
from fedwan.coordinator.opening import await_initial
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Reception
from fedwan.memory import Tidier
from tests.planes import Bench, eventually, header_of, payload_of

PATIENCE_S = 0.4
CHUNK = 1 << 12
NUM_CHUNKS = 8


class Opening:
    """Two sites before a run has weights; `send` uploads some chunks of a site's."""

    def __init__(self, folder: Path) -> None:
        num_values = NUM_CHUNKS * CHUNK // 4 - 64
        self.bench = Bench(folder, num_values=num_values, sites=("s1", "s2"))
        self.hub, self.over = self.bench.hub, threading.Event()
        self.hub.model = None
        for site in ("s1", "s2"):
            self.hub.join(site, self.bench.hello(site))
            self.signals = self.hub.attach(site, f"{site}-first")
        self.right, self.wrong = (payload_of(value, self.bench.layout) for value in (0.0, 1.0))
        assert -(-self.right.num_bytes // CHUNK) == NUM_CHUNKS

    def send(self, site: str, chunks: int, pause_s: float, payload: Any = None) -> wire.Receipt:
        payload = payload or self.right
        header = header_of(payload)
        header.kind, header.session, header.chunk_bytes = header.INITIAL, f"{site}-first", CHUNK
        reception = self.hub.open_upload(site, header)
        assert isinstance(reception, Reception)
        for index in range(chunks):
            if self.over.wait(pause_s):
                break
            size = min(CHUNK, payload.num_bytes - index * CHUNK)
            reception.write(index * CHUNK, payload.read(index * CHUNK, size))
        return self.hub.close_stripe(site, header)

    def begin(self, pause_s: float, *threads: Callable[[], object]) -> None:
        """Await the weights while these run; s2 sends its own once it is asked for them."""

        def other() -> None:
            assert self.signals.get(timeout=20).kind == wire.CoordinatorSignal.SEND_INITIAL
            self.send("s2", NUM_CHUNKS, pause_s)

        for call in (*threads, other):
            threading.Thread(target=call, daemon=True).start()
        config: Any = SimpleNamespace(
            round=SimpleNamespace(patience_s=PATIENCE_S), half_life=1000.0
        )
        try:
            await_initial(self.hub, self.bench.claim, self.bench.strategy, config, Tidier())
        finally:
            self.over.set()


def test_an_upload_that_died_near_its_end_does_not_hide_that_another_one_moves(
    tmp_path: Path,
) -> None:
    opening = Opening(tmp_path)
    opening.send("s1", NUM_CHUNKS - 1, 0.0)
    opening.begin(0.15 * PATIENCE_S)


def test_another_site_is_asked_where_one_sends_a_little_now_and_then(tmp_path: Path) -> None:
    opening = Opening(tmp_path)
    opening.begin(0.0, lambda: opening.send("s1", NUM_CHUNKS, 0.19 * PATIENCE_S, opening.wrong))


@pytest.mark.parametrize("has_told", [False, True])
def test_a_site_whose_weights_were_false_sends_no_others(tmp_path: Path, has_told: bool) -> None:
    opening = Opening(tmp_path)
    told = []

    def lie() -> None:
        opening.send("s1", NUM_CHUNKS, 0.0, opening.wrong)
        if has_told:  # how good they are, before they were looked at
            opening.hub.registry.answer("s1", 0)
        while opening.hub.initial is not None:
            time.sleep(0.01)
        header = header_of(payload_of(2.0, opening.bench.layout))
        header.kind, header.session, header.chunk_bytes = header.INITIAL, "s1-first", CHUNK
        told.append(opening.hub.open_upload("s1", header))

    opening.begin(0.03, lie)
    eventually(lambda: bool(told))
    (receipt,) = told
    assert receipt.status == wire.Receipt.REJECTED
    assert "other initial weights of s1 were refused before" in receipt.text


def test_false_weights_that_come_while_others_are_checked_are_not_blamed_on_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = Opening(tmp_path)
    hub, intake = opening.hub, opening.bench.intake
    inspect = intake.inspect

    def after_the_other(upload: Upload, payload: Source) -> Measures:
        monkeypatch.setattr(intake, "inspect", inspect)
        assert opening.send("s1", NUM_CHUNKS, 0.0, opening.wrong).status == wire.Receipt.ACCEPTED
        return inspect(upload, payload)

    monkeypatch.setattr(intake, "inspect", after_the_other)
    for chunks in (NUM_CHUNKS, 0):  # which a header alone asks for again
        assert opening.send("s2", chunks, 0.0).status == wire.Receipt.INCOMPLETE
        assert hub.registry.opener == "s1"
    hub.refuse_initial("s1", "they are false")
    assert hub.false_openers == {"s1"}
    assert opening.send("s2", 0, 0.0).status == wire.Receipt.ACCEPTED
    assert hub.registry.opener == "s2" and hub.initial is not None
