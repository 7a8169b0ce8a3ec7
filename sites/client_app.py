"""A site's side of a run, as Flower starts it: the ClientApp, one process for the whole run."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedwan.flower.clientapp import answer_ticket

app = ClientApp()


@app.train("ticket")
def take_part(message: Message, context: Context) -> Message:
    """Train until the coordinator says that the run is over."""
    return answer_ticket(message)
