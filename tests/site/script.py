"""A site's script that goes wrong: `script.py [WAY] [CUT]` under torchrun, or `SITE FILE`."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from fedwan.site import assignment
from tests.site.support import take_steps


def main(way: str = "", blocks: str = "") -> None:
    torch.set_num_threads(1)
    is_pair = "RANK" in os.environ
    if is_pair:
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank() if is_pair else 0
    calls = [0]

    if way == "two_machines":
        assignment.ORPHAN_GRACE_S = 0.0

    def misbehave(*_: object) -> None:
        calls[0] += 1
        if calls[0] == 2 and way == "two_machines":
            time.sleep(1.5)  # in which a process ends whose service is gone
        if calls[0] == 6 and way == "rank_0_dies" and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if calls[0] == 2 and way == "rank_1_fails" and rank == 1:
            raise ValueError("its own fault")
        if calls[0] == 2 and way in ("s1", "s2"):
            if way == "s2":
                Path(blocks).touch()
                time.sleep(600)
            while not Path(blocks).exists():
                time.sleep(0.02)
            sys.exit(0)

    def keep(network: nn.Module) -> None:
        network.register_forward_pre_hook(misbehave)

    take_steps((blocks or "fsdp") if is_pair else "plain", keep=keep)
    if is_pair:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
