"""The coordinator's side of a run, as Flower starts it: the ServerApp."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedwan.config import from_json
from fedwan.flower.serverapp import TicketSender, started_run

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Open the data plane, then send every site a ticket until the run is over."""
    with started_run() as start:
        # Imported here: torch takes seconds, and its errors belong in the run's log.
        from fedwan.coordinator.service import run_coordinator

        run_coordinator(
            from_json(start.config),
            start.run_id,
            Path(start.identity),
            start.resume,
            lambda ticket, on_failure: TicketSender(grid, ticket, on_failure),
            start.goes_back,
            start.port,
        )
