"""The intake: payloads on their way in, chunk by chunk, and the check before one may be merged.

An upload is idempotent under (kind, fragment, version, site): sending it again, whole or in part,
from the same process or from its successor, changes nothing once it was accepted. One pass over a
whole payload checks its layout, its checksum and that every value is finite, and measures each
network's part from the codes themselves. Nothing of a contribution that fails reaches the
global state.
"""

from __future__ import annotations

import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from cryptography import x509

from fedwan.codecs import Codec, fp32
from fedwan.codecs.payload import Source
from fedwan.errors import FedwanError, PayloadError
from fedwan.fragments import Fragment, whole
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Proof
from fedwan.link.buffer import Buffer, FileBuffer, UploadReception
from fedwan.link.tls import has_signed
from fedwan.protocol.gate import LARGEST_COUNTER
from fedwan.protocol.round import Key
from fedwan.state import Layout, Role, is_moment, network_of

_LARGEST_BUFFER = torch.finfo(torch.float32).max / 8
"""Sum of squares: merging is in fp32, and of two means the square of their difference is taken."""
MAX_CHECKS = 8
"""Payloads checked at once, at most; as many as there are cores if these are fewer."""


class Upload(NamedTuple):
    """What is on its way in."""

    kind: wire.UploadHeader.Kind
    key: Key


class Measures(NamedTuple):
    """How large a payload's parts are."""

    norms: dict[str, float]
    """Of the parameters, by network."""
    buffers: dict[str, float]
    """Norms of running means and of variances, and the largest counter, by network and kind; not of
    optimisers' moments."""

    def figures(self) -> dict[str, float]:
        """All of them, by what they are called in a sentence."""
        return {f"{network}'s norm": norm for network, norm in self.norms.items()} | self.buffers


class Contribution(NamedTuple):
    """A whole, checked payload, ready to be merged."""

    payload: Buffer | FileBuffer
    work: wire.Work
    measures: Measures
    payload_hash: str
    """Of the payload's chunks, see `ChunkHashes`."""
    signature: bytes = b""
    """The site's; empty within a process."""
    bundle: wire.MaskBundle | None = None
    """Shares of the secrets of its masks, if it came under any."""


@dataclass
class Intake:
    """Receptions that are open. Not locked; `inspect` and `free` need no lock."""

    layout: Layout
    fragments: Sequence[Fragment]
    up: Codec
    folder: Path
    part: Callable[[Fragment, str], Fragment] = lambda fragment, _: fragment
    """What a site, by name, contributes of a fragment."""
    _open: dict[Upload, UploadReception] = field(default_factory=dict)
    _dropped: list[UploadReception] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Few at once: each holds a record, and all sites' payloads come together. The first to be
        # whole is the first to be checked, so that merging begins while others wait.
        self._checks = threading.Semaphore(min(MAX_CHECKS, os.cpu_count() or 1))

    def check(self, upload: Upload) -> None:
        """Refuse what names nothing that this run has, before anything is kept under it."""
        kind, (fragment, version, _) = upload
        if kind == wire.UploadHeader.INITIAL:
            is_good = fragment == version == 0
        else:
            is_good = kind == wire.UploadHeader.CONTRIBUTION and fragment < len(self.fragments)
        if not is_good:
            raise PayloadError(
                f"upload of kind {kind} for fragment {fragment}, version {version} is none that "
                "this run has; start site and coordinator from the same app"
            )

    def open(self, upload: Upload, header: wire.UploadHeader) -> UploadReception:
        """The reception for a payload; a new attempt with other bytes replaces the old one.

        Nothing is allocated for a size that the fragment does not take.
        """
        codec, layout = self._codec_and_layout(upload)
        expected = codec.payload_bytes(layout)
        if header.num_bytes != expected:
            raise PayloadError(
                f"payload of {header.num_bytes} bytes announced where the {codec.name} codec "
                f"makes {expected}; set the same codec and model on both sides"
            )
        present = self._open.get(upload)
        if present is not None:
            same = present.header.checksum == header.checksum
            if same and present.header.chunk_bytes == header.chunk_bytes:
                return present
            self.close(upload)
        reception = self._open[upload] = UploadReception(header, self.folder)
        return reception

    def _codec_and_layout(self, upload: Upload) -> tuple[Codec, Layout]:
        """How a payload is written: initial weights exactly, contributions by the run's codec."""
        if upload.kind == wire.UploadHeader.INITIAL:
            return fp32(), whole(self.layout)[0].layout
        fragment = self.fragments[upload.key.fragment]
        return self.up, self.part(fragment, upload.key.site).layout

    def find(self, upload: Upload) -> UploadReception | None:
        """The reception that is open."""
        return self._open.get(upload)

    def open_of(self, site: str = "") -> list[Upload]:
        """What is on its way in; of one site, or of all."""
        return [upload for upload in self._open if site in ("", upload.key.site)]

    def inspect(self, upload: Upload, payload: Source) -> Measures:
        """See `inspect` below; waits its turn, and takes a pass over the payload."""
        codec, layout = self._codec_and_layout(upload)
        with self._checks:
            return inspect(payload, layout, codec)

    def take(self, upload: Upload) -> None:
        """A payload was accepted: it is its contribution's from now on."""
        self._open.pop(upload, None)

    def close(self, upload: Upload, refusal: FedwanError | None = None) -> None:
        """Drop what is open; `free` gives its space back. A refusal ends its stream."""
        if upload in self._open:
            self._open[upload].refusal = refusal
            self._dropped.append(self._open.pop(upload))

    def free(self) -> None:
        """Close the files of what was dropped, which takes long: to be called without the lock."""
        with suppress(IndexError):
            while True:
                self._dropped.pop().close()

    def forget(self, fragment: int, before: int) -> None:
        """Drop what is open for a fragment's versions before one."""
        for upload in list(self._open):
            key = upload.key
            is_initial = upload.kind == wire.UploadHeader.INITIAL
            if is_initial or (key.fragment == fragment and key.version < before):
                self.close(upload)


def inspect(payload: Source, layout: Layout, codec: Codec) -> Measures:
    """Check a payload from end to end, and measure it."""
    squares: dict[str, float] = defaultdict(float)
    buffers: dict[str, float] = defaultdict(float)
    for name, coded in codec.read_each(payload, layout):
        if codec.mask_bits:
            continue  # nobody can tell
        spec, network = layout[name], network_of(name)
        if spec.role is not Role.PARAMETER and not spec.dtype.is_floating_point:
            if spec.num_values and not is_moment(name):
                what = LARGEST_COUNTER.format(network)
                buffers[what] = max(buffers[what], float(coded.tensor().max()))
            continue
        square = coded.sum_of_squares()
        if spec.role is not Role.PARAMETER and square > _LARGEST_BUFFER:
            square = math.inf
        if not math.isfinite(square):
            mend = "lower the inner learning rate or clip the gradients at that site"
            if spec.role is not Role.PARAMETER and not is_moment(name):
                mend = f"register a constant, such as a mask, with persistent=False; else {mend}"
            raise PayloadError(
                f"tensor {name!r} holds values that are not finite, or too large to square; {mend}"
            )
        if spec.role is Role.PARAMETER and is_moment(name):
            buffers[f"{network}'s norm of averages' deltas"] += square
        elif spec.role is Role.PARAMETER:
            squares[network] += square
        elif spec.role is Role.VARIANCE and spec.num_values and float(coded.tensor().min()) < 0:
            raise PayloadError(f"variance {name!r} is below zero; refused")
        elif not is_moment(name):
            buffers[f"{network}'s norm of running {spec.role}s"] += square
    return Measures(
        {network: math.sqrt(square) for network, square in squares.items()},
        {what: v if what.endswith("counter") else math.sqrt(v) for what, v in buffers.items()},
    )


def check_proof(proof: Proof, said: bytes) -> None:
    """Refuse a contribution that its site has not signed, by a `PayloadError`."""
    certificate = x509.load_pem_x509_certificate(proof.certificate)
    if not has_signed(certificate, proof.signature, said):
        what = "is not by the key of its certificate" if proof.signature else "is missing"
        raise PayloadError(f"its signature {what}; install the same fedwan on both sides")
