"""The journal of a run whose coordinator was killed, and what its check finds."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.x509 import load_pem_x509_certificate

from fedwan.coordinator.model import CHECKPOINT, PREVIOUS
from fedwan.errors import ConfigError, FedwanError
from fedwan.link.certificates import fingerprint
from fedwan.link.tls import Identity
from fedwan.output import journal
from fedwan.output.journal import DURABLE, FIRST, JOURNAL, Journal, verify
from fedwan.output.outputs import Outputs
from fedwan.output.records import Recorder
from fedwan.protocol.registry import DECIDED
from fedwan.state import read_tensors, write_tensors
from tests.output.runs import TOTALS, event_row
from tests.planes import Wires, in_thread
from tests.support import killed_after, run_tiny, tiny_config

KINDS = "start join contribution version checkpoint warning resume leave lost rejected done".split()


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run whose coordinator is killed after version 3, with version 2 saved, and resumed."""
    folder = tmp_path_factory.mktemp("runs") / "killed"
    config = tiny_config(h=2, steps=10, checkpoint={"every": 2})
    with killed_after(3):
        run_tiny(folder, config)
    with (folder / JOURNAL).open("a") as file:
        file.write('{"kind":"event","event":"ver')
    (sha256,) = run_tiny(folder, config, resume=True).hashes
    with Outputs(config, folder, resumed=(5, [5])) as outputs:
        outputs.record(event_row("lost", "s1"))
        outputs.record(event_row("rejected", "s1"))
        outputs.finish(TOTALS, 1.0, 5, 500, sha256)
    return folder, sha256


@pytest.fixture
def run(killed_run: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(killed_run[0], tmp_path / "run"))


def kinds(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / JOURNAL).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_whose_coordinator_was_killed_stands(killed_run: tuple[Path, str]) -> None:
    run, sha256 = killed_run
    found = verify(run)
    assert (found["versions"], found["checkpoint"], found["contributions"]) == ([5], [5], 10)
    assert (found["torn_bytes"], found["is_done"]) == (0, True)
    # Version 3 was made twice, the second time of the same contributions.
    events = found["events"]
    assert (events["version"], events["contribution"], events["resume"]) == (7, 12, 1)
    rows = [json.loads(line) for line in (run / JOURNAL).read_text().splitlines()]
    weights = [row["weights"] for row in rows if row["event"] == "version"]
    assert weights[3] == weights[4] and weights[-1] == sha256
    (warning,) = [row["text"] for row in rows if row["event"] == "warning"]
    assert "28 bytes" in warning and "cut off" in warning
    first = {json.dumps([r["payload"], r["weight"]]) for r in rows if r["event"] == "contribution"}
    assert len(first) == 10


def change(line: bytes) -> list[bytes]:
    return [line.replace(b'"site":', b'"site": ')]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spoil", [change, lambda line: [line, line], lambda line: []])
def test_a_line_that_is_changed_doubled_or_left_out_is_found(
    kind: str, spoil: Callable[[bytes], list[bytes]], run: Path
) -> None:
    lines = (run / JOURNAL).read_bytes().splitlines(keepends=True)
    at = kinds(run).index(kind)
    lines[at : at + 1] = new = spoil(lines[at])
    (run / JOURNAL).write_bytes(b"".join(lines))
    told = f"line {at + max(1, len(new))}: it does not"
    if at == len(lines):
        told = "its last line tells of no end"
    with pytest.raises(FedwanError, match=told):
        verify(run)


def test_a_finished_run_has_the_checkpoint_that_it_ended_with(run: Path) -> None:
    newest = run / "checkpoint" / CHECKPOINT
    newest.rename(newest.with_name("away"))
    with pytest.raises(FedwanError, match=r"the run ended at versions \[5\], and there is none"):
        verify(run)
    shutil.copy(newest.with_name(PREVIOUS), newest)
    with pytest.raises(FedwanError, match=r"\[5\], and it is of versions \[4\]: the last one was"):
        verify(run)


def version(number: int, fragment: int = 0) -> dict[str, Any]:
    weights = f"{fragment}{number}"
    return {"event": "version", "fragment": fragment, "version": number, "weights": weights}


def contribution(number: int, site: str = "s1") -> dict[str, Any]:
    return {"event": "contribution", "fragment": 0, "version": number, "site": site}


def resume(*versions: int, weights: str = "") -> dict[str, Any]:
    told = [weights or f"{index}{number}" for index, number in enumerate(versions)]
    return {"event": "resume", "versions": list(versions), "weights": told}


BEGIN = [version(0), version(0, 1), contribution(0), version(1), version(1, 1)]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([version(3)], "tells of version 3 of fragment 0, expected 2"),
        ([version(1)], "tells of version 1 of fragment 0, expected 2"),
        ([version(0, 3)], "is none of its kind"),
        ([contribution(0)], "s1's contribution to version 0 .* before, into version 1"),
        ([contribution(1), contribution(1)], "s1's contribution to version 1 .* into version 2"),
        ([resume(2, 1)], "it resumes at version 2 of fragment 0 .*; no line tells of it"),
        ([resume(1)], r"resumes at versions \[1\], where the run was at \[1, 1\]"),
        ([version(2), resume(1, 1), resume(2, 1)], "no line tells of it"),
        ([resume(0, 0, weights="else")], "version 0 .* with weights else; line 1 tells of 00"),
        ([{"event": "checkpoint", "versions": [1, 0]}], r"\[1, 0\] were saved where \[1, 1\] "),
        ([{"event": "version", "fragment": 0}], "is none of its kind"),
    ],
)
def test_a_history_that_cannot_be_is_found_though_its_chain_is_whole(
    rows: list[dict[str, Any]], told: str, tmp_path: Path
) -> None:
    write(tmp_path, [*BEGIN, *rows])
    with pytest.raises(FedwanError, match=f"line {len(BEGIN) + len(rows)}: .*{told}"):
        verify(tmp_path)


def test_what_was_undone_by_a_resume_may_be_made_again(tmp_path: Path) -> None:
    again = [contribution(1), version(2)]
    rest = [contribution(1, "s2"), resume(1, 1)]
    write(tmp_path, [*BEGIN, *again, resume(1, 1), *rest, *again])
    found = verify(tmp_path)
    assert (found["versions"], found["contributions"]) == ([2, 1], 2)


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    lines = Journal(folder / JOURNAL, is_new=True)
    for row in rows:
        lines.append(row)
    lines.close()


def test_a_checkpoint_of_other_weights_is_found_with_its_versions_line(run: Path) -> None:
    path = run / "checkpoint" / CHECKPOINT
    tensors, meta = read_tensors(path)
    name = next(name for name in tensors if name.startswith("global:"))
    write_tensors(path, tensors | {name: torch.zeros_like(tensors[name])}, meta)
    last = len(kinds(run)) - kinds(run)[::-1].index("version")
    with pytest.raises(FedwanError, match=f"checkpoint stands at version 5 .*; line {last} tells"):
        verify(run)
    write_tensors(path, tensors, {"versions": meta["versions"]})
    with pytest.raises(FedwanError, match="is of another version of fedwan .'fragments'"):
        verify(run)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FedwanError, match="cannot be read"):
        verify(run)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory, identities: Path) -> list[dict[str, Any]]:
    """Of a run over real connections."""
    folder = tmp_path_factory.mktemp("runs") / "signed"
    with Wires(identities) as wires:
        run_tiny(folder, tiny_config(h=2, steps=6), wrap=wires.wrap)
    found = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("before", "hash")} for row in found]


@pytest.fixture
def signed(rows: list[dict[str, Any]], identities: Path, tmp_path: Path) -> list[bytes]:
    """Lines of a run's journal, as a coordinator with an identity writes them."""
    return sign(rows, Identity.load(identities / "coordinator", "coordinator"), tmp_path)


def sign(rows: list[dict[str, Any]], identity: Identity, run: Path) -> list[bytes]:
    lines = Journal(run / JOURNAL, is_new=True, sign=identity.sign)
    for row in [{**rows[0], "certificate": identity.cert_pem.decode()}, *rows[1:]]:
        lines.append(row)
    lines.close()
    return (run / JOURNAL).read_bytes().splitlines(keepends=True)


def seal_anew(lines: list[bytes]) -> bytes:
    """A whole chain of changed lines, by somebody who has no key."""
    before, found = FIRST.encode(), b""
    for line in filter(None, lines):
        body = re.sub(rb'"before":"\w+"', b'"before":"%b"' % before, line.rpartition(b',"hash')[0])
        before = hashlib.sha256(body).hexdigest().encode()
        found += body + b',"hash":"%b"}\n' % before
    return found


def test_who_signed_a_run_is_told_and_that_an_authority_knows_them(
    signed: list[bytes], identities: Path, tmp_path: Path
) -> None:
    found, ca = verify(tmp_path), identities / "coordinator" / "ca.crt"
    assert verify(tmp_path, ca) == found and seal_anew(signed) == b"".join(signed)
    events = found["events"]
    assert found["signed_contributions"] == events["contribution"] == 6
    assert found["signed_lines"] == sum(events.get(event, 0) for event in DURABLE) >= 5
    assert found["unsigned_end"] == 0 and {*found["keys"]} == {"the coordinator", "s1", "s2"}
    key = load_pem_x509_certificate(Identity.load(identities / "s1").cert_pem).public_key()
    assert found["keys"]["s1"] == [fingerprint(key)]


def test_a_coordinator_that_died_in_a_line_may_come_back_with_another_key(
    signed: list[bytes], rows: list[dict[str, Any]], foreign_identities: Path, tmp_path: Path
) -> None:
    (tmp_path / JOURNAL).write_bytes(b"".join(signed) + b'{"kind":"ev')
    other = Identity.load(foreign_identities / "coordinator", "coordinator")
    recorder = Recorder(tmp_path, (99, [99]), other.sign)
    held = verify(tmp_path)
    (latest,) = [row for row in rows if row["event"] == "version"][-1:]
    told = {"versions": [latest["version"]], "weights": [latest["weights"]]}
    resume = {"event": "resume", "run": rows[0]["run"], **told}
    about = {"kind": "event", "site": None, "text": "", "certificate": other.cert_pem.decode()}
    recorder.write(about | resume)
    recorder.close()
    assert kinds(tmp_path)[-2:] == ["resume", "warning"]
    found = verify(tmp_path)
    assert len(found["keys"]["the coordinator"]) == 2 and found["lines"] == held["lines"] + 2


NOT_SIGNED = "the coordinator has not signed it"
NOT_BY_SITE = "s1 has not signed this contribution"


@pytest.mark.parametrize(
    ("kind", "pattern", "by", "named", "told"),
    [
        ("contribution", rb'"weight":[^,]*', b'"weight":9.0', "version", NOT_SIGNED),
        ("contribution", rb".*\n", b"", "version", NOT_SIGNED),
        ("contribution", rb'"samples":\d+', b'"samples":99', "contribution", NOT_BY_SITE),
        ("contribution", rb'"payload":"\w+', b'"payload":"00', "contribution", NOT_BY_SITE),
        ("contribution", rb',"signature":"[^"]*"', b"", "contribution", NOT_BY_SITE),
        ("version", rb'"weights":"\w+', b'"weights":"00', "version", NOT_SIGNED),
        ("version", rb',"signed":"[^"]*"', b"", "version", NOT_SIGNED),
        ("version", rb',"hash"', b',"weights":"00","hash"', "version", NOT_SIGNED),
        ("start", rb'"run":"', b'"run":"other ', "start", NOT_SIGNED),
        ("join", rb"joined", b"was let in", "version", NOT_SIGNED),
        ("join", rb',"certificate":"[^"]*"', b"", "version", NOT_SIGNED),
    ],
)
def test_a_line_that_is_changed_and_the_chain_made_anew_is_found_without_the_keys(
    kind: str,
    pattern: bytes,
    by: bytes,
    named: str,
    told: str,
    signed: list[bytes],
    tmp_path: Path,
) -> None:
    before = kinds(tmp_path)
    at = before.index(kind)
    signed[at] = re.sub(pattern, by, signed[at], count=1)
    (tmp_path / JOURNAL).write_bytes(seal_anew(signed))
    number = 1 + before.index(named, at) - (not signed[at])
    with pytest.raises(FedwanError, match=f"line {number}: {told}"):
        verify(tmp_path)


def test_who_signs_with_keys_of_a_site_or_of_another_authority_is_found_by_the_authority(
    rows: list[dict[str, Any]],
    signed: list[bytes],
    identities: Path,
    foreign_identities: Path,
    tmp_path: Path,
) -> None:
    ca = identities / "coordinator" / "ca.crt"
    sign(rows, Identity.load(foreign_identities / "coordinator", "coordinator"), tmp_path)
    assert verify(tmp_path)["signed_lines"]
    told = "line 1: the certificate of the coordinator is "
    with pytest.raises(FedwanError, match=f"{told}of no authority"):
        verify(tmp_path, ca)
    sign(rows, Identity.load(identities / "s1"), tmp_path)
    with pytest.raises(FedwanError, match=f"{told}a site's"):
        verify(tmp_path, ca)
    bare = [re.sub(rb',"(certificate|signed|signature)":"[^"]*"', b"", line) for line in signed]
    (tmp_path / JOURNAL).write_bytes(seal_anew(bare))
    assert verify(tmp_path)["signed_lines"] == 0
    with pytest.raises(FedwanError, match="line 1: nobody has signed this run"):
        verify(tmp_path, ca)
    with pytest.raises(FedwanError, match="no.crt cannot be read"):
        verify(tmp_path, ca.with_name("no.crt"))


def test_what_could_not_be_written_is_not_in_the_journal_later(tmp_path: Path) -> None:
    written = Journal(tmp_path / JOURNAL, is_new=True)
    written.append(event_row("join", "s1"))
    size = (tmp_path / JOURNAL).stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    was = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
        with pytest.raises(OSError):  # some of the line had room
            written.append(event_row("ejected", "s2"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, was)
    written.append(event_row("leave", "s1"))
    written.close()
    assert kinds(tmp_path) == ["join", "leave"]


def test_a_journal_whose_line_ends_were_changed_is_not_cut_to_nothing(
    signed: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / JOURNAL
    path.write_bytes(b"".join(signed).replace(b"\n", b"\r\n"))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="none of its lines is as it was written"):
        Journal(path, is_new=False)
    assert path.read_bytes() == before
    path.write_bytes(b'{"kind":"ev')  # of a run that died in its first line
    Journal(path, is_new=False).close()
    assert path.read_bytes() == b""


def test_no_event_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites' events are told under the coordinator's lock."""
    begun, goes_on = threading.Event(), threading.Event()

    def slow(number: int) -> None:
        begun.set()
        assert goes_on.wait(10)

    recorder = Recorder(tmp_path)
    monkeypatch.setattr(journal.os, "fsync", slow)
    syncing = in_thread(lambda: recorder.write({"kind": "event", "site": None, **version(0)}))
    assert begun.wait(10)
    recorder.write(event_row("join", "s1"))
    assert kinds(tmp_path) == ["version", "join"]
    goes_on.set()
    syncing(10.0)
    monkeypatch.setattr(journal.os, "fsync", os.fsync)
    recorder.close()


@pytest.mark.parametrize("event", ["start", "version", "checkpoint", "done", *DECIDED.values()])
def test_what_a_coordinator_goes_on_by_is_on_disk_once_it_is_told(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    lines, path = Journal(tmp_path / JOURNAL, is_new=True), tmp_path / JOURNAL
    monkeypatch.setattr(journal.os, "fsync", lambda _: synced.append(path.stat().st_size))
    lines.append({"event": event})
    size = path.stat().st_size
    lines.append({"event": "join"})
    lines.close()
    assert synced == [size]


def test_what_cannot_be_brought_to_the_disk_is_not_read_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, path = Journal(tmp_path / JOURNAL, is_new=True), tmp_path / JOURNAL
    lines.append({"event": "join"})
    before = path.read_bytes()

    def full(number: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", full)
        with pytest.raises(OSError, match="quota"):
            lines.append({"event": "ejected"})
    assert path.read_bytes() == before
    lines.append({"event": "ejected"})

    def late(number: int) -> None:
        lines.append({"event": "leave"})  # another thread's, which stands upon it
        full(number)

    monkeypatch.setattr(journal.os, "fsync", late)
    with pytest.raises(OSError, match="quota"):
        lines.append({"event": "drained"})
    lines.close()
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [row["event"] for row in rows] == ["join", "ejected", "drained", "leave"]
    assert [row["before"] for row in rows] == [FIRST, *(row["hash"] for row in rows[:-1])]


@pytest.mark.parametrize("tail", [1, 40, 1 << 20])
def test_the_last_line_is_found_without_reading_those_before(
    tail: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_TAIL", tail)
    path = tmp_path / JOURNAL
    for number in range(3):
        lines = Journal(path, is_new=not number)
        assert lines.num_cut == (5 if number else 0)
        lines.append({"event": "join", "site": f"s{number}"})
        lines.close()
        with path.open("ab") as file:
            file.write(b'{"t":')
    rows = [json.loads(line) for line in path.read_bytes().splitlines()[:-1]]
    assert [row["before"] for row in rows] == [FIRST, *(row["hash"] for row in rows[:2])]
