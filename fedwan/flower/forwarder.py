"""A site's forwarder: its SuperNode's calls on their way to the front door, with its certificate.

It serves nobody but the site's own user.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time

from starlette.requests import Request
from starlette.responses import Response

from fedwan.errors import ConfigError, IdentityError, UserError
from fedwan.flower import private_port
from fedwan.flower.bundle import check_bundle
from fedwan.flower.private_port import PrivateProtocol
from fedwan.flower.relay import REPLACED, Relay, reply, text_of
from fedwan.flower.site_file import SiteFile
from fedwan.link.tls import Identity, is_data_plane, now

_HEARTBEAT = "/v1/fleet/send-node-heartbeat"
_GET_FAB = "/v1/fleet/get-fab"
_PULL = "/v1/fleet/pull-messages"
_ASK_AGAIN_S = 0.3

_log = logging.getLogger(__name__)


class Forwarder(Relay):
    """A site's end of the way, on loopback; serves between `start("https://" + door)` and `close`.

    While the door is away it holds calls back, so that the SuperNode goes on within a second of the
    door's return.
    """

    _protocol = PrivateProtocol
    # Less than the 30 s after which a SuperNode gives a call up.
    _patience_s = 15.0

    def __init__(self, site: SiteFile, identity: Identity) -> None:
        self._door, self._bundles = site.door, site.bundles
        self._said = ""
        """Why the door is away, if it is."""
        self._has_met = False
        self.is_over = False
        """Whether this site's run is done: that its coordinator goes away then is in order."""
        self._lost = ""
        self.refusal: UserError | None = None
        """Set once the two ends do not accept each other's certificates, or this one not the
        other's code: trying again is vain."""
        super().__init__(private_port.listen(), identity, serves=False)

    async def _pass_on(self, path: str, body: bytes, headers: dict[str, str]) -> Response:
        """Where there is no ticket yet, ask on for a while: a SuperNode itself asks every 3 s.

        Code that this site's owner has not approved stays here.
        """
        deadline = time.monotonic() + self._patience_s
        while True:
            answer = await super()._pass_on(path, body, headers)
            is_good = answer.status_code == 200
            if is_good and (self._said or not self._has_met) and not self.is_over:
                self._said, self._has_met = "", True
                _log.info("front door %s answers", self._door)
            if answer.status_code == 401:
                self._lost = (
                    "the coordinator's SuperLink is a new one, or another has this identity"
                )
                if (text := bytes(answer.body).decode(errors="replace").strip()).endswith(REPLACED):
                    self._tell("", text)
            if path == _GET_FAB and is_good:
                try:
                    await asyncio.to_thread(check_bundle, bytes(answer.body), self._bundles)
                except ConfigError as error:
                    self.refusal = error
                    return reply(403, str(error))
            is_empty = path == _PULL and is_good and not answer.body
            if not is_empty or time.monotonic() > deadline:
                return answer
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _answer(self, request: Request) -> Response:
        """What has taken longer than the patience of who asked, as on a link that stood still."""
        answer, path = await super()._answer(request), request.scope["path"]
        if answer.status_code == 200 and answer.body and path != _HEARTBEAT:
            if await request.is_disconnected():
                self._lost = "an answer came when the SuperNode had given up"
        return answer

    def take_lost(self) -> str:
        """Why the SuperNode must come back as a new one to be sent a ticket; empty if it need not.

        SuperLink hands out a ticket once: a SuperNode will never see one whose answer was lost. And
        one that a new SuperLink does not know may hang on its way out.
        """
        lost, self._lost = self._lost, ""
        return lost

    def _trouble(self, path: str, error: Exception | None, *, is_lost: bool = False) -> None:
        self.refusal = self._refusal(error) or self.refusal
        if is_lost and not self._has_met and is_data_plane(self._door, self._renewable.identity):
            self.refusal = ConfigError(
                f"door = {self._door!r} is the coordinator's data plane (link.listen), no front "
                f"door; give the port of link.door, as in {self._door.rpartition(':')[0]}:7443"
            )
        if is_lost and path != _HEARTBEAT:
            self._lost = "an answer of the coordinator's was lost"
        if self.refusal is not None:
            return  # which ends the service
        cause = text_of(error) or "it cannot pass on calls now, its log says why"
        text, level = f"front door {self._door} is away: {cause}; trying on", logging.WARNING
        if self.is_over:
            text, level = "waits for the coordinator's next run", logging.INFO
        if text != self._said:  # said once, since coordinators come and go with their runs
            self._said = text
            _log.log(level, "%s", text)

    def _refusal(self, error: BaseException | None) -> IdentityError | None:
        """The certificate problem behind an error, if that is what it is."""
        identity = self._renewable.identity
        if identity.expires <= now():
            return IdentityError(
                f"this site's certificate expired on {identity.expires:%Y-%m-%d %H:%M} UTC; "
                f"have it renewed at the authority: fedwan pki renew {identity.name}"
            )
        while error is not None:
            if isinstance(error, IdentityError):
                return error
            # Once it has answered: anybody on the path can show one, and DNS be wrong for a minute.
            if isinstance(error, ssl.SSLCertVerificationError) and not self._has_met:
                return IdentityError(
                    f"front door {self._door} did not prove to be this run's coordinator "
                    f"({error.verify_message}); check `door`, and that ca.crt is the coordinator's"
                )
            error = error.__cause__ or error.__context__
        return None
