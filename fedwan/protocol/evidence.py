"""What a site signs of its contribution, so that others can check the journal's line of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedwan.link import wire_pb2 as wire
from fedwan.protocol.round import Key
from fedwan.protocol.unmasking import digest_of

_SIGNED = ("site", "fragment", "version", "payload", "steps", "samples", "attempt")


def fields_of(
    key: Key, payload: str, work: wire.Work, bundle: wire.MaskBundle | None
) -> dict[str, Any]:
    """What the journal's line holds of a contribution, as far as its site knows it."""
    fields: dict[str, Any] = {
        "site": key.site,
        "fragment": key.fragment,
        "version": key.version,
        "payload": payload,
        "steps": work.steps,
        "samples": work.samples,
    }
    return fields if bundle is None else fields | {"attempt": digest_of(bundle).hex()}


def statement(run_id: str, fields: Mapping[str, Any]) -> bytes:
    """What is signed: the fields in a fixed order, whatever else is among them."""
    signed = {name: fields[name] for name in _SIGNED if name in fields}
    return json.dumps(["fedwan contribution", run_id, signed]).encode()


def statement_of(header: wire.UploadHeader, site: str, payload: str) -> bytes:
    """The statement of a contribution, by the header that it came with."""
    bundle = header.bundle if header.HasField("bundle") else None
    key = Key(header.fragment, header.version, site)
    return statement(header.run_id, fields_of(key, payload, header.work, bundle))
