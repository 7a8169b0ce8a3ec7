from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

from fedwan.config import Config
from fedwan.flower.forwarder import Forwarder
from fedwan.flower.front_door import KEY, FrontDoor, Nodes
from fedwan.flower.site_file import SiteFile
from fedwan.link.tls import Identity

REGISTER, PULL = "/v1/fleet/register-node", "/v1/fleet/pull-messages"


class Door:
    """`Nodes` with a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.nodes = Nodes(lambda: self.now)

    def asks(self, site: str, path: str, key: str) -> int:
        """The status of the refusal; 0 if there is none."""
        return self.nodes.refusal(site, path, key, "10.0.0.1")[0]


def test_a_later_supernode_of_a_site_takes_the_place_of_the_one_before_at_once() -> None:
    door = Door()
    assert door.asks("s1", REGISTER, "first") == door.asks("s1", PULL, "first") == 0
    assert door.asks("s2", REGISTER, "other") == 0
    assert door.asks("s1", PULL, "other") == 401
    assert door.asks("s1", REGISTER, "second") == door.asks("s1", PULL, "second") == 0
    assert door.asks("s1", PULL, "first") == 401
    assert door.asks("s1", "/v1/fleet/unregister-node", "first") == 0
    assert door.asks("s2", PULL, "other") == 0


def test_a_door_that_started_anew_knows_supernodes_by_their_next_call() -> None:
    door = Door()
    assert door.asks("s1", "/v1/fleet/send-node-heartbeat", "at work") == 0
    assert door.asks("s1", PULL, "at work") == 0
    assert door.asks("s1", PULL, "another") == 401


def test_a_site_cannot_register_supernodes_without_end() -> None:
    door = Door()
    assert [door.asks("s1", REGISTER, f"k{i}") for i in range(12)] == [0] * 10 + [503] * 2
    assert door.asks("s1", PULL, "k9") == 0  # the last one that came
    assert door.asks("s2", REGISTER, "other") == 0
    door.now = 31.0
    assert door.asks("s1", REGISTER, "k12") == 0
    assert door.asks("s1", REGISTER, "k13") == 503
    door.now = 1e6
    assert [door.asks("s1", REGISTER, f"l{i}") for i in range(11)] == [0] * 10 + [503]


def test_the_front_door_holds_a_certificate_to_one_supernode(
    identities: Path, superlink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert KEY == FLEET_HTTP_PUBLIC_KEY_HEADER  # which Flower signs

    def call(site: str, path: str, *keys: str) -> int:
        tls = Identity.load(identities / site).ssl_context(server=False)
        with httpx.Client(verify=tls, trust_env=False) as client:
            url = f"https://127.0.0.1:{door.port}{path}"
            return client.post(url, headers=[(KEY, key) for key in keys]).status_code

    with closing(FrontDoor(identities / "coordinator", Config(sites=1), print)) as door:
        door.start(f"http://127.0.0.1:{superlink.server_port}")
        assert [call("s1", REGISTER, "old"), call("s1", REGISTER, "new")] == [200, 200]
        assert [call("s1", PULL, "new"), call("s1", PULL, "old")] == [200, 401]
        assert call("s1", PULL, "new", "old") == 401  # SuperLink would be told of the last alone
    assert len(superlink.requests) == 3
    told = "site s1 at 127.0.0.1 refused: a later SuperNode of site s1, at 127.0.0.1, has taken the"
    assert told in caplog.text


def test_a_service_is_told_that_another_one_has_its_certificate(
    identities: Path, superlink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def call(path: str, key: str) -> int:
        with httpx.Client(trust_env=False) as client:
            url = f"http://127.0.0.1:{forwarder.port}{path}"
            return client.post(url, headers={KEY: key}).status_code

    with closing(FrontDoor(identities / "coordinator", Config(sites=1), print)) as door:
        door.start(f"http://127.0.0.1:{superlink.server_port}")
        site = SiteFile(door=f"127.0.0.1:{door.port}")
        with closing(Forwarder(site, Identity.load(identities / "s1"))) as forwarder:
            forwarder.start(f"https://127.0.0.1:{door.port}")
            asked = (REGISTER, "old"), (REGISTER, "new"), (PULL, "old")
            assert [call(*each) for each in asked] == [200, 200, 401]
    told = (
        "a later SuperNode of site s1, at 127.0.0.1, has taken the place of this one; end the "
        "other service that has this certificate"
    )
    assert [r.levelname for r in caplog.records if r.getMessage() == told] == ["WARNING"]
