"""What sites can fetch, where the servicer's tests do not say."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.updates import Updates
from fedwan.link import wire_pb2 as wire
from fedwan.state import Role, TensorSpec
from strategies import async_diloco, scaffnew
from tests.support import ADAM, build_strategy

LAYOUT = {"velocity/w": TensorSpec(torch.Size([3]), torch.float32, Role.PARAMETER)}


def test_whole_weights_come_with_what_is_known_of_the_same_version() -> None:
    """Else a site whose contribution is in them would wait for one more update."""
    strategy = build_strategy(async_diloco, {"velocity": ADAM}, sites=2, h=4)
    model = GlobalModel({"velocity/w": torch.zeros(3)}, LAYOUT, strategy, 100.0)
    changed = threading.Condition()
    updates = Updates(changed, lambda: False, 1 << 20)
    updates.open(model, keep_bytes=1)
    payload = model.commit(model.fragments[0], {"velocity/w": torch.ones(3)}, samples=4)
    request = wire.DownloadRequest(kind=wire.DownloadRequest.GLOBAL)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(updates.fetch, "s1", request)
        with changed:
            changed.wait(0.2)
            assert not asked.done(), "committed, and not published yet"
            updates.publish(0, 1, payload, [("s1", 0)])
            changed.notify_all()
        header = asked.result(timeout=30).header
    assert (header.version, header.merged_from, header.merged_into) == (1, 0, 1)


def test_a_site_that_missed_an_update_it_is_merged_into_has_all_sites_begin_anew() -> None:
    strategy = build_strategy(scaffnew, {"velocity": ADAM}, sites=2, h=4)
    model = GlobalModel({"velocity/w": torch.zeros(3)}, LAYOUT, strategy, 100.0)
    updates = Updates(threading.Condition(), lambda: False, 1 << 20)
    updates.open(model)
    for version, merged in ((1, "s1"), (2, "s2")):
        payload = model.commit(model.fragments[0], {"velocity/w": torch.ones(3)}, samples=4)
        updates.publish(0, version, payload, [(merged, version - 1)])

    def anew_from(site: str) -> int:
        request = wire.DownloadRequest(kind=wire.DownloadRequest.UPDATE, version=1)
        header = updates.fetch(site, request).header
        assert header.status == wire.DownloadHeader.SUPERSEDED
        return header.anew_from

    assert anew_from("s2") == 0
    assert anew_from("s1") == 3
    assert anew_from("s2") == 3
