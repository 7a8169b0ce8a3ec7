"""A coordinator's service, and whole runs through real SuperLinks and SuperNodes."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.proto.control_pb2 import ListRunsRequest
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from sqlalchemy import create_engine

from fedwan.app import load_run
from fedwan.config import Config
from fedwan.errors import CheckpointError, ConfigError, IdentityError, ProcessLost
from fedwan.flower import coordinator
from fedwan.flower.control import Control
from fedwan.flower.coordinator import run_local, serve_coordinator
from fedwan.flower.processes import flower_environment, listen, only_one
from fedwan.flower.site_file import SiteFile, load_site
from fedwan.flower.status import Start, Status, serverapp_files
from fedwan.link.tls import Identity
from fedwan.state import write_tensors
from tests.flower.fleet import (
    CALL,
    OPEN,
    REPOSITORY,
    TRAIN,
    Fleet,
    command_of,
    free_port,
    joins,
    listening,
    nobody,
    wait_for,
)

serve = partial(serve_coordinator, stop=threading.Event())


def config_for(out: Path, **link: Any) -> Config:
    config = Config(out=str(out), sites=1)
    config.link.listen = f"127.0.0.1:{link.get('listen', free_port())}"
    config.link.door = f"127.0.0.1:{link.get('door', free_port())}"
    return config


@pytest.mark.parametrize("key", ["listen", "door"])
def test_a_port_that_is_not_set_or_in_use_is_told_before_anything_starts(
    tmp_path: Path, identities: Path, key: str
) -> None:
    with pytest.raises(ConfigError, match=rf"link\.{key} = .* has port 0"):
        coordinator.check_ports(config_for(tmp_path, **{key: 0}))
    with listen("127.0.0.1:0", "port") as held:
        port = held.getsockname()[1]
        told = rf"link\.{key} = .*:{port} cannot be listened on: .* in use"
        with pytest.raises(ConfigError, match=told):
            serve(config_for(tmp_path, **{key: port}), identities / "coordinator")
    assert not (tmp_path / "flower").exists()


def test_superlink_s_database_is_in_the_run_s_folder_whatever_that_is_called(
    tmp_path: Path,
) -> None:
    path = tmp_path / "why? 100 %41 #ü=1&x+y%25" / "superlink.db"
    path.parent.mkdir()
    engine = create_engine(SqlObjectStore(coordinator._url_of(path)).database_url)
    engine.connect().close()
    engine.dispose()
    assert path.is_file() and list(tmp_path.iterdir()) == [path.parent]


def test_a_folder_in_use_a_sites_identity_and_no_run_to_resume_are_refused(
    tmp_path: Path, identities: Path
) -> None:
    config, identity = config_for(tmp_path), identities / "coordinator"
    with only_one(tmp_path, "out"), pytest.raises(ConfigError, match="in use by another service"):
        serve(config, identity)
    with pytest.raises(IdentityError, match="site's certificate"):
        serve(config, identities / "s1")
    with pytest.raises(CheckpointError, match="holds no run to go on with"):
        serve(config, identity, resume=True)


@pytest.mark.parametrize(
    ("version", "before", "has_file"), [(3, 2, True), (3, 3, True), (0, -1, True), (3, -1, False)]
)
def test_a_serverapp_that_is_gone_is_started_again_where_the_run_got_further(
    version: int, before: int, has_file: bool, tmp_path: Path
) -> None:
    """By its checkpoints; at the port that the first of them came to listen at."""
    first = Start.begin(Config(out=str(tmp_path)), tmp_path / "pki", resume=False, goes_back=True)
    status = serverapp_files(tmp_path)[1]
    replace(Status.of(), started_s=0.0, port=9).write(status)
    if has_file:
        path = tmp_path / "checkpoint" / "coordinator.safetensors"
        write_tensors(path, {}, {"versions": [version, version - 1]})
    gone = ProcessLost("it was killed")
    if version > before and has_file:
        assert coordinator._start_again(tmp_path, before, gone) == version
        assert Start.read(tmp_path) == replace(first, resume=True, goes_back=False, port=9)
        assert not status.exists()
        coordinator._start_again(tmp_path, before, gone)  # which was gone before it listened
        assert Start.read(tmp_path).port == 9
    else:
        with pytest.raises(ProcessLost, match="it was killed; go on .* with --resume"):
            coordinator._start_again(tmp_path, before, gone)
        assert Start.read(tmp_path) == first
    assert status.exists() == (version <= before or not has_file)


def tickets(out: Path) -> int:
    """How many the ServerApp has sent so far."""
    return serverapp_files(out)[0].read_text().count("ticket sent")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    found = Fleet()
    yield found
    found.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_site_comes_back_whatever_dies_and_serves_the_next_run_too(
    tmp_path: Path, identities: Path, fleet: Fleet
) -> None:
    """Two services, each in its own folder, as docs/deploy.md has them.

    Its script lives on where the coordinator dies. It is back in seconds on an idle machine; Flower
    alone takes a minute, or never notices.
    """
    out, door, path = tmp_path / "run", f"127.0.0.1:{free_port()}", tmp_path / "run.yaml"
    path.write_text("workload: command\nsites: 1\nstrategy: local_sgd\nh: 2\n")
    words = (f"link.door={door}", f"link.listen=127.0.0.1:{free_port()}", "checkpoint.every=1")
    identity = str(identities / "coordinator")
    coordinator = ("-m", "fedwan", "coordinator", str(path), "--identity", identity, *words)
    site = SiteFile(
        site="s1",
        identity=str(identities / "s1"),
        dir=str(tmp_path / "state"),
        door=door,
        command=f"python {TRAIN} {out}",
        folder=str(tmp_path),
    )
    site.write(tmp_path / "site.yaml")
    # The site first: it must not mind that there is no coordinator yet.
    service = fleet.start("-m", "fedwan", "site", str(tmp_path / "site.yaml"))
    first = fleet.start(*coordinator, f"out={out}")
    wait_for(lambda: (out / "checkpoint" / "coordinator.safetensors").exists())
    wait_for(lambda: list((tmp_path / "state").rglob("site-*.safetensors")))
    os.kill(joins(out)[0]["pid"], signal.SIGKILL)
    wait_for(lambda: len(joins(out)) == 2, 60)
    status = json.loads((tmp_path / "state" / "clientapp.json").read_text())
    os.kill(status["pid"], signal.SIGKILL)
    wait_for(lambda: len(joins(out)) == 3, 60)
    os.kill(fleet.pid_with("flower-supernode"), signal.SIGKILL)
    wait_for(lambda: len(joins(out)) == 4, 60)
    wait_for(lambda: (out / "journal.jsonl").read_text().count("s1 rejoined") == 3)
    num_tickets = tickets(out)
    first.kill()
    first.wait()
    second = fleet.start(*coordinator, f"out={out}", "--resume")
    wait_for(lambda: tickets(out) > num_tickets)
    (out / "finish").touch()
    assert second.wait(timeout=60) == 0
    # The site's service stays for the next run, in another folder.
    assert fleet.start(*coordinator, f"out={tmp_path / 'next'}").wait(timeout=90) == 0
    # Each time another script, which went on from its checkpoint.
    assert [row["step"] for row in joins(out)] == [0, 2, 2, 2, 0]
    assert len({row["pid"] for row in joins(out)}) == 5
    assert service.poll() is None
    service.terminate()
    assert service.wait(timeout=30) == 0


@pytest.mark.slow
def test_no_stranger_reaches_a_run_and_nothing_of_it_outlives_it(
    fleet: Fleet, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("--sites=1", "strategy=local_sgd", "h=2", "eval.every=0", "checkpoint.every=1")
    words += (f"out={out}", "python", str(TRAIN), str(out))
    launch = fleet.start("-m", "fedwan", "launch", *words)
    wait_for(lambda: joins(out))
    if os.geteuid() == 0:  # root alone can act as another user
        ports = {port for pid in fleet.pids() for _, port in listening(pid)}
        assert len(ports) == 5  # SuperLink, door, data plane, forwarder, SuperNode
        answers = dict(line.split() for line in nobody(CALL, *ports).splitlines())
        # Two ask for a certificate; to what is no TLS they answer with an alert at most.
        assert all(int(num_bytes) <= 7 for num_bytes in answers.values()), answers
    paths = [path for path in [out, *out.rglob("*")] if not path.is_symlink()]
    assert not [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert (out / "control.sock").is_socket()
    assert {"identity.key", "journal.jsonl", "site.yaml"} <= {path.name for path in paths}
    if os.geteuid() == 0:
        (tmp_path / "open").touch()
        for folder in (tmp_path, *tmp_path.parents[:-2]):  # which pytest has closed
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o011)
        found = nobody(OPEN, tmp_path / "open", *(path for path in paths if not path.is_dir()))
        assert found.split() == [str(tmp_path / "open")]
    # The forwarder's port, as the SuperNode was told, leads to the door with the site's identity.
    words = command_of(fleet.pid_with("flower-supernode"))
    forwarder = words[words.index("--superlink") + 1]
    home = tmp_path / "intruder"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "door"\n\n[superlink.door]\naddress = "{forwarder}"\n'
        "insecure = true\n"
    )
    tried = subprocess.run(
        [str(Path(sys.executable).with_name("flwr")), "run", str(REPOSITORY), "door"],
        env=flower_environment(home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert tried.returncode != 0, tried.stdout + tried.stderr
    # Nor does the door pass it on, whoever has the identity; and the run's journal has it.
    tls = Identity.load(out / "pki" / "s1").ssl_context(server=False)
    with httpx.Client(verify=tls, trust_env=False) as client:
        (port,) = re.findall(r"door at port (\d+)", (out / "logs/coordinator.log").read_text())
        assert client.post(f"https://127.0.0.1:{port}/v1/control/start-run").status_code == 404
    line = "front door: site s1 at 127.0.0.1 asked for 'POST /v1/control/start-run'"
    wait_for(lambda: line in (out / "journal.jsonl").read_text())
    superlink = command_of(fleet.pid_with("flower-superlink"))
    with closing(Control(f"127.0.0.1:{superlink[superlink.index('--port') + 1]}")) as control:
        assert len(control._client.ListRuns(ListRunsRequest()).run_dict) == 1
    # The forwarder does not even let it out of the site.
    site_log = (out / "sites" / "s1" / "logs" / "site.log").read_text()
    assert "/v1/control/start-run'; only Fleet calls pass" in site_log
    assert len(fleet.pids()) >= 9
    launch.kill()
    assert launch.wait(timeout=60) == -signal.SIGKILL
    wait_for(lambda: not fleet.pids(), 20)


def test_a_run_that_goes_on_keeps_the_command_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "Service", lambda name, argv, log, env: name)
    monkeypatch.setattr(coordinator.processes, "stop_all", lambda services, grace_s: None)
    path = tmp_path / "s1" / "site.yaml"
    found = []
    for command, where in ((["python", "train.py"], "a"), ([], "b"), (["python", "new.py"], "c")):
        (tmp_path / where).mkdir()
        monkeypatch.chdir(tmp_path / where)
        with coordinator._site_services(Config(), tmp_path / "pki", [path.parent], 7, command):
            site = load_site(path)
            found.append((site.command, Path(site.folder).name))
    assert found == [("python train.py", "a"), ("python train.py", "a"), ("python new.py", "c")]


def test_a_run_on_one_machine_deletes_no_federation_s_authority(tmp_path: Path) -> None:
    key = tmp_path / "pki" / "ca" / "7f.key"
    key.parent.mkdir(parents=True)
    key.touch()
    with pytest.raises(ConfigError, match="holds the key of an authority, .*7f.key, which a run"):
        run_local(load_run(None, [f"out={tmp_path}"]), stop=threading.Event())
    assert key.exists()


@pytest.mark.parametrize(
    ("num_sites", "num_processes", "named", "shares"),
    [
        (2, 1, "", ["0,1", "2,3"]),
        (3, 1, "", ["0", "1", "2"]),
        (6, 1, "", ["0", "1", "2", "3", "0", "1"]),
        (2, 1, "7,GPU-5c,4,3", ["7,GPU-5c", "4,3"]),
        (3, 2, "", ["0,1", "2,3", "0,1"]),
        (1, 8, "", ["0,1,2,3"]),
        (2, 4, "", ["0,1,2,3", "0,1,2,3"]),
    ],
)
def test_sites_of_one_machine_share_out_its_gpus(
    num_sites: int,
    num_processes: int,
    named: str,
    shares: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    gpus = coordinator.visible_gpus()
    found = [coordinator.gpus_of(i, num_sites, num_processes, gpus) for i in range(num_sites)]
    assert [",".join(each) for each in found] == shares
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert coordinator.visible_gpus() == []
