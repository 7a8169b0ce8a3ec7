"""The coordinator's side of a run, as Flower starts it: the ServerApp."""

from collections.abc import Callable
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedwan.config import from_json, host_and_port
from fedwan.flower.serverapp import TicketSender, started_run
from fedwan.link.base import Ticket

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Open the data plane, then send every site a ticket until the run is over."""
    with started_run() as (start, tell):
        # Imported here: torch takes seconds, and its errors belong in the run's log.
        from fedwan.coordinator.service import run_coordinator

        def announce(ticket: Ticket, on_failure: Callable[[str, str], None]) -> TicketSender:
            tell(port=host_and_port(ticket.address)[1])
            return TicketSender(grid, ticket, on_failure)

        run_coordinator(
            from_json(start.config),
            start.run_id,
            Path(start.identity),
            start.resume,
            announce,
            start.goes_back,
            start.port,
        )
