"""One SuperNode for each site: what the front door lets a certificate do at SuperLink.

A SuperNode makes itself a key when it starts, registers it, and signs all its calls with it;
SuperLink takes a call for a node from the holder of that node's key alone, but any number of nodes.
The door holds each certificate to one key, that of its latest SuperNode: an older one is told to
end, but may say goodbye. How often a new one may come is bounded, since SuperLink goes on to count
those that did not say goodbye as connected, for up to an hour.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fedwan.protocol.limits import Allowance

KEY = "flwr-public-key"
"""Header with the key of the SuperNode that calls; SuperLink checks that it has signed."""

_REGISTER = "/v1/fleet/register-node"
_GOODBYES = ("/v1/fleet/deactivate-node", "/v1/fleet/unregister-node")
_MOST_AT_ONCE = 10
_ANOTHER_AFTER_S = 30.0


@dataclass
class _Site:
    key: str = ""
    allowance: Allowance = field(default_factory=lambda: Allowance(_MOST_AT_ONCE, _ANOTHER_AFTER_S))
    """Of new SuperNodes."""


class Nodes:
    """The present SuperNode of each site."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sites: dict[str, _Site] = {}

    def refusal(self, site: str, path: str, key: str) -> tuple[int, str]:
        """HTTP status and reason why a site's SuperNode may not make a Fleet call now.

        0 if it may. 401, at which a SuperNode ends, if a later one has taken its place; 503, at
        which it tries again, if too many have come. A door that started anew takes the first that
        calls for the present one.
        """
        if path in _GOODBYES:
            return 0, ""
        at = self._sites.setdefault(site, _Site())
        if key == at.key:
            return 0, ""
        if at.key and path != _REGISTER:
            return 401, f"a later SuperNode of site {site} has taken the place of this one"
        if not at.allowance.spend(self._clock()):
            return 503, f"site {site} starts SuperNodes too often; try again in a minute"
        at.key = key
        return 0, ""
