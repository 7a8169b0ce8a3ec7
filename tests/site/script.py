"""A training script under torchrun, of which a rank may die: `script.py [RANK STEP]`."""

import os
import signal
import sys

import torch
from torch import nn

from tests.site.support import take_steps


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, step = (int(word) for word in sys.argv[1:]) if sys.argv[1:] else (-1, -1)

    def die(network: nn.Module) -> None:
        if torch.distributed.get_rank() == rank:
            calls = [0]

            def count(*_: object) -> None:
                calls[0] += 1
                if calls[0] > step:
                    os.kill(os.getpid(), signal.SIGKILL)

            network.register_forward_pre_hook(count)

    take_steps("fsdp", keep=die)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
