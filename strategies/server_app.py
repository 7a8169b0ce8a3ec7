"""The coordinator's side of a run, as Flower starts it: the ServerApp."""

from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedwan.config import from_json
from fedwan.flower.apps import errand_of
from fedwan.flower.tickets import TicketOffice

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Open the data plane, then keep every site in possession of a ticket until the run is over."""
    with errand_of(context) as (config, errand):
        # Imported here: torch takes seconds, and its errors belong in the run's log.
        from fedwan.coordinator.service import run_coordinator

        run_coordinator(
            from_json(config),
            errand.run_id,
            Path(errand.identity),
            errand.resume,
            lambda ticket: TicketOffice(grid, ticket),
        )
