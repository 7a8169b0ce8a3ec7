"""SuperLink's Control API: submit a run, and ask how it does.

Called in-process over loopback HTTP, where the `flwr` command would take half a second each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from fedwan.errors import FedwanError

_HEALTH_S = 0.5


class Control:
    """SuperLink's Control API at `host:port` on loopback; every call may raise a FedwanError."""

    def __init__(self, address: str) -> None:
        self._health = f"http://{address}/health"
        self._client = ControlHttpClient.from_server_address(
            address, insecure=True, root_certificates=None, interceptors=[]
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def answers(self) -> bool:
        """Whether SuperLink is up; its port takes connections before."""
        try:
            return httpx.get(self._health, timeout=_HEALTH_S, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def start_run(self, fab: bytes, run_config: Mapping[str, str] | None = None) -> int:
        """Submit an app's bundle; gives Flower's id of the run.

        `run_config` overrides `[tool.flwr.app.config]`; every key must be there already.
        """
        bundle = fab_to_proto(Fab(hashlib.sha256(fab).hexdigest(), fab, {}))
        overrides = user_config_to_proto(dict(run_config or {}))
        with _errors("take the run"):
            response = self._client.StartRun(StartRunRequest(fab=bundle, override_config=overrides))
        if not response.HasField("run_id"):
            raise FedwanError("SuperLink did not take the run and gave no reason; see its log")
        return int(response.run_id)

    def failure(self, run_id: int) -> str:
        """Why a run's ServerApp has ended, as far as Flower knows; empty while it goes on."""
        with _errors("answer"):
            runs = self._client.ListRuns(ListRunsRequest(run_id=run_id)).run_dict
        status = runs[run_id].status
        reason = " ".join(status.details.split()) or str(status.sub_status)
        return reason if status.status == "finished" else ""


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        told = isinstance(error, httpx.HTTPStatusError) and error.response.text
        reason = " ".join((told or repr(error)).split())
        raise FedwanError(f"SuperLink did not {what}: {reason}") from error
