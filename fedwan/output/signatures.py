"""The signatures in a journal: the coordinator's of lines, and the sites' of contributions.

They are checked by certificates that the journal holds: the coordinator's in the line of each
start, a site's in that of each Join, and in `renewed` where it has shown another one meanwhile.
They may have expired since, which is not looked at.
"""

from __future__ import annotations

from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.x509 import Certificate

from fedwan.errors import ConfigError, IdentityError
from fedwan.link.certificates import fingerprint
from fedwan.link.tls import Role, has_signed, parse_file, read_certificate
from fedwan.output.journal import DURABLE, SIGNED
from fedwan.protocol.evidence import statement


class Signatures:
    """Those that a walk has met, and whose they are.

    Once a start has a certificate, all is signed that can be. `ca`, a file of authorities, demands
    that of the first line, and certificates of theirs.
    """

    def __init__(self, ca: Path | None) -> None:
        self._ca, self._authorities = ca, None if ca is None else _read(ca)
        self._run_id = ""
        self._coordinator: Certificate | None = None
        self._sites: dict[str, list[Certificate]] = defaultdict(list)
        """What each has shown until now."""
        self._keys: dict[str, list[str]] = defaultdict(list)
        """Fingerprints, by who signs with them."""
        self._counts: Counter[str] = Counter()

    def take(self, row: Mapping[str, Any], line: bytes) -> None:
        """The next line; a `ValueError` or `IdentityError` tells what is wrong with it."""
        event, site = row["event"], row.get("site")
        if "certificate" in row and event in ("start", "resume"):
            self._coordinator = self._read("the coordinator", "coordinator", row)
            self._run_id = row["run"]
        self._counts["unsigned_end"] += 1
        if self._coordinator is None:
            if self._authorities is not None and event in DURABLE | {"contribution"}:
                raise ValueError("nobody has signed this run, or the signatures were taken out")
        elif event == "contribution":
            self._check_contribution(row)
        elif event in DURABLE:
            self._check_line(row, line, self._coordinator)
        elif "certificate" in row and site:
            self._sites[site].append(self._read(site, "site", row))

    def _read(self, name: str, role: Role, row: Mapping[str, Any]) -> Certificate:
        pem = str(row["certificate"]).encode()
        try:
            shown = read_certificate(name, role, pem, self._authorities)
        except IdentityError as error:
            mend = (
                f"; {self._ca} has to be the ca.crt of the coordinator's identity, and of a run "
                "that changed its authority, all of them in one file"
            )
            raise IdentityError(f"{error}{mend if self._ca else ''}") from None
        if (key := fingerprint(shown.public_key())) not in self._keys[name]:
            self._keys[name].append(key)
        return shown

    def _check_contribution(self, row: Mapping[str, Any]) -> None:
        said, signature = statement(self._run_id, row), b64decode(row.get("signature", ""))
        if not any(has_signed(shown, signature, said) for shown in self._sites[row["site"]]):
            raise ValueError(f"{row['site']} has not signed this contribution: it was changed")
        self._counts["signed_contributions"] += 1

    def _check_line(self, row: Mapping[str, Any], line: bytes, by: Certificate) -> None:
        signed = row.get("signed", "")
        body, _, end = line.rpartition(b',"signed":"')
        is_whole = end == f'{signed}","hash":"{row["hash"]}"}}\n'.encode()
        if not is_whole or not has_signed(by, b64decode(signed), SIGNED + body):
            raise ValueError(
                "the coordinator has not signed it: it was written by somebody else, or a line "
                "before it, since the last that is signed"
            )
        self._counts["signed_lines"] += 1
        self._counts["unsigned_end"] = 0

    def found(self) -> dict[str, Any]:
        """For `verify`: signatures, lines after the last of them, and fingerprints of keys."""
        names = ("signed_lines", "signed_contributions", "unsigned_end")
        return {name: self._counts[name] for name in names} | {"keys": dict(self._keys)}


def _read(ca: Path) -> list[Certificate]:
    try:
        return parse_file(ca.read_bytes(), ca)
    except OSError as error:
        raise ConfigError(
            f"{ca} cannot be read: {error.strerror}; give the ca.crt of the coordinator's identity"
        ) from None
