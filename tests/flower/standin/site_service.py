"""Takes the place of `fedwan/site/service.py`: says hello, and waits to be told the end."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import fedwan
from fedwan.errors import JoinRefused, LinkLost
from fedwan.link.ticket import Ticket
from fedwan.site.settings import SiteSettings


def run_site(ticket: Ticket, site: SiteSettings) -> None:
    if (site.dir / "refuse-me").exists():
        raise JoinRefused("initial weights differ (stand-in); use the same seed")
    host, port = ticket.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        stream = connection.makefile("rw")
        hello = {"site": site.name, "pid": os.getpid(), "code": str(Path(fedwan.__file__).parent)}
        stream.write(json.dumps(hello) + "\n")
        stream.flush()
        if stream.readline() != "finish\n":
            raise LinkLost("the coordinator hung up")
