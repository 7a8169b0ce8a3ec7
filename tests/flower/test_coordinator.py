from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedwan.app import load_run
from fedwan.config import Config, to_json
from fedwan.errors import CheckpointError, ConfigError, IdentityError
from fedwan.flower.coordinator import serve_coordinator
from fedwan.flower.service import free_port, listen, only_one
from fedwan.flower.site_file import SiteFile
from fedwan.flower.status import serverapp_log
from tests.flower.fleet import STANDIN, Fleet, joins, wait_for

REPOSITORY = Path(__file__).resolve().parents[2]

COORDINATOR = """
import sys
from pathlib import Path
from fedwan.config import from_json
from fedwan.flower.coordinator import serve_coordinator

config, identity, resume = sys.argv[1:]
serve_coordinator(
    from_json(Path(config).read_text()), Path(identity), resume=resume == "resume"
)
"""


def config_for(out: Path, **link: Any) -> Config:
    config = Config(out=str(out), sites=1)
    config.link.listen = f"127.0.0.1:{link.get('listen', free_port())}"
    config.link.door = f"127.0.0.1:{link.get('door', free_port())}"
    return config


@pytest.mark.parametrize("key", ["listen", "door"])
def test_a_port_that_is_not_set_is_asked_for(tmp_path: Path, authority: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"link\.{key} = .* has port 0"):
        serve_coordinator(config_for(tmp_path, **{key: 0}), authority / "coordinator")


@pytest.mark.parametrize("key", ["listen", "door"])
def test_a_port_in_use_is_told_before_anything_starts(
    tmp_path: Path, authority: Path, key: str
) -> None:
    with listen("127.0.0.1", 0, "a test", "port") as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"{port}: the port is in use.*link\.{key}"):
            serve_coordinator(config_for(tmp_path, **{key: port}), authority / "coordinator")
    assert not (tmp_path / "flower").exists()


def test_a_second_coordinator_in_the_same_folder_is_refused(
    tmp_path: Path, authority: Path
) -> None:
    with only_one(tmp_path, "out"), pytest.raises(ConfigError, match="in use by another service"):
        serve_coordinator(config_for(tmp_path), authority / "coordinator")


def test_a_sites_identity_does_not_serve(tmp_path: Path, authority: Path) -> None:
    with pytest.raises(IdentityError, match="site's certificate"):
        serve_coordinator(config_for(tmp_path), authority / "s1")


def test_there_must_be_a_run_to_resume(tmp_path: Path, authority: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no run to go on with"):
        serve_coordinator(config_for(tmp_path), authority / "coordinator", resume=True)


@pytest.mark.slow
def test_a_site_outlives_its_coordinator_and_serves_the_next_run_too(
    tmp_path: Path, authority: Path
) -> None:
    """Two services, each in its own folder, as docs/deploy.md has them."""
    out, fleet = tmp_path / "run", Fleet()
    words = ("workload=command", "sites=1", "strategy=local_sgd", "h=2", "checkpoint.every=1")
    ports = [f"link.{key}=127.0.0.1:{free_port()}" for key in ("listen", "door")]
    config = load_run(None, [f"out={out}", *ports, *words])
    (tmp_path / "config.json").write_text(to_json(config))
    coordinator = (str(tmp_path / "config.json"), str(authority / "coordinator"))
    site = SiteFile(
        site="s1",
        identity=str(authority / "s1"),
        dir=str(tmp_path / "state"),
        door=config.link.door,
        command=f"python {STANDIN / 'train.py'} {out}",
        folder=str(tmp_path),
    )
    site.write(tmp_path / "site.json")
    services = [
        # The site first: it must not mind that there is no coordinator yet.
        fleet.start("-m", "fedwan.flower.site", str(tmp_path / "site.json")),
        fleet.start("-c", COORDINATOR, *coordinator, "anew"),
    ]
    try:
        wait_for(lambda: (out / "checkpoint" / "coordinator.safetensors").exists())
        services[1].kill()
        services[1].wait()
        services.append(fleet.start("-c", COORDINATOR, *coordinator, "resume"))
        wait_for(lambda: serverapp_log(out).read_text().count("ticket sent") == 2)
        (out / "finish").touch()
        assert services[2].wait(timeout=60) == 0
        # The site's service stays for the next run, in another folder.
        config.out = str(tmp_path / "next")
        (tmp_path / "config.json").write_text(to_json(config))
        services.append(fleet.start("-c", COORDINATOR, *coordinator, "anew"))
        assert services[3].wait(timeout=90) == 0
        # Of the first run twice: a script whose coordinator died goes on from its checkpoint.
        first, again, following = (row["step"] for row in joins(out))
        assert first == following == 0 and again > 0
        assert services[0].poll() is None
        services[0].terminate()
        assert services[0].wait(timeout=30) == 0
    finally:
        fleet.kill()
        for service in services:
            service.communicate()
