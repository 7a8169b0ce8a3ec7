"""Entry points that Flower calls; see `benchmarks/peers/flower_fedavg.py`."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Average weights over the rounds of a run."""
    from benchmarks.peers.flower_fedavg import serve

    serve(grid, str(context.run_config["folder"]))


@client.train()
def train(message: Message, context: Context) -> Message:
    """Take a round's steps from the weights in the message."""
    from benchmarks.peers.flower_fedavg import take_round

    return take_round(message, context)
