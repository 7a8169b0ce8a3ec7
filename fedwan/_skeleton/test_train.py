"""The script trains, alone and without any service: python -m pytest."""

from train import train


def test_the_loss_falls() -> None:
    """In 300 steps by a tenth and more."""
    losses = train(steps=300)
    assert len(losses) == 300
    assert sum(losses[-50:]) < 0.9 * sum(losses[:50])
