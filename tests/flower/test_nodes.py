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


def test_the_front_door_holds_a_certificate_to_one_supernode_and_tells_the_other_s_service(
    identities: Path, superlink: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert KEY == FLEET_HTTP_PUBLIC_KEY_HEADER  # which Flower signs
    own = Identity.load(identities / "s1")

    def call(url: str, path: str, *keys: str) -> int:
        with httpx.Client(verify=own.ssl_context(server=False), trust_env=False) as client:
            return client.post(url + path, headers=[(KEY, key) for key in keys]).status_code

    with closing(FrontDoor(identities / "coordinator", Config(sites=1), print)) as door:
        door.start(f"http://127.0.0.1:{superlink.server_port}")
        at = f"https://127.0.0.1:{door.port}"
        assert [call(at, REGISTER, "old"), call(at, REGISTER, "new")] == [200, 200]
        assert [call(at, PULL, "new"), call(at, PULL, "old")] == [200, 401]
        assert call(at, PULL, "new", "old") == 401  # SuperLink would be told of the last alone
        with closing(Forwarder(SiteFile(door=f"127.0.0.1:{door.port}"), own)) as forwarder:
            forwarder.start(at)
            here = f"http://127.0.0.1:{forwarder.port}"
            assert [call(here, REGISTER, "new"), call(here, PULL, "old")] == [200, 401]
    assert len(superlink.requests) == 4
    told = "a later SuperNode of site s1, at 127.0.0.1, has taken the place of this one"
    told += "; end one of the two services with this certificate"
    assert f"site s1 at 127.0.0.1 refused: {told}" in caplog.text
    assert [r.levelname for r in caplog.records if r.getMessage() == told] == ["WARNING"]
