"""A site's side of a run, as Flower starts it: the ClientApp, one process for the whole run."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedwan.flower.apps import answer_ticket
from fedwan.link.ticket import Ticket
from fedwan.site.settings import SiteSettings

app = ClientApp()


@app.train("ticket")
def take_part(message: Message, context: Context) -> Message:
    """Train until the coordinator says that the run is over."""
    return answer_ticket(message, context, _run)


def _run(ticket: Ticket, settings: SiteSettings) -> None:
    # Imported here: torch takes seconds, and its errors belong in the site's log.
    from fedwan.site.service import run_site

    run_site(ticket, settings)
