"""SuperLink's Control API: submit a run, and ask how it does.

Called in-process over loopback HTTP instead of through the `flwr` command: the run's
configuration, kilobytes of JSON with quotes, passes unaltered, and asking costs milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Self

import httpx
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import FlowerError
from flwr.supercore.fab import Fab

from fedwan.errors import FedwanError

__all__ = ["Control", "RunState"]


class RunState(NamedTuple):
    """How a run does, in Flower's words."""

    status: str
    """`pending`, `starting`, `running` or `finished`."""
    outcome: str
    """Of a finished run: `completed`, `failed` or `stopped`."""
    details: str
    """Why it failed, where Flower knows."""

    @property
    def finished(self) -> bool:
        """Whether its ServerApp has ended."""
        return self.status == "finished"


class Control:
    """A connection to SuperLink's Control API.

    Args:
        address: `host:port` of SuperLink on loopback.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = ControlHttpClient.from_server_address(
            address, insecure=True, root_certificates=None, interceptors=[]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def start_run(self, fab: bytes, run_config: Mapping[str, str]) -> int:
        """Submit an app.

        Args:
            fab: the app's bundle.
            run_config: overrides of `[tool.flwr.app.config]`; every key must be there already.

        Returns:
            Flower's id of the run.

        Raises:
            FedwanError: SuperLink refused it or cannot be reached.
        """
        bundle = Fab(hashlib.sha256(fab).hexdigest(), fab, {})
        request = StartRunRequest(
            fab=fab_to_proto(bundle), override_config=user_config_to_proto(dict(run_config))
        )
        try:
            response = self._client.StartRun(request)
        except httpx.HTTPError as error:
            raise FedwanError(f"SuperLink did not take the run: {_reason(error)}") from error
        if not response.HasField("run_id"):
            raise FedwanError("SuperLink did not take the run and gave no reason; see its log")
        return int(response.run_id)

    def state(self, run_id: int) -> RunState:
        """How a run does.

        Raises:
            FedwanError: SuperLink cannot be reached.
        """
        try:
            response = self._client.ListRuns(ListRunsRequest(run_id=run_id))
        except httpx.HTTPError as error:
            raise FedwanError(f"SuperLink does not answer: {_reason(error)}") from error
        status = response.run_dict[run_id].status
        return RunState(status.status, status.sub_status, status.details)

    def runs(self) -> list[int]:
        """Ids of all runs that SuperLink knows.

        Raises:
            FedwanError: SuperLink cannot be reached.
        """
        try:
            return list(self._client.ListRuns(ListRunsRequest()).run_dict)
        except httpx.HTTPError as error:
            raise FedwanError(f"SuperLink does not answer: {_reason(error)}") from error


def _reason(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        told = FlowerError.from_json(error.response.text)
        if told is not None:
            return " ".join(f"{told.message} {told.public_details or ''}".split())
        return f"status {error.response.status_code}"
    return f"{type(error).__name__} {error}"
