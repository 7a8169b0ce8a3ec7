from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("run_id", "protocol", "site", "session", "layout_json", "initial_sha256", "frozen_sha256", "checkpoint", "kinds_json", "num_steps", "sources_json", "error", "certificate", "card", "config_sha256", "held_versions", "is_bound")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_JSON_FIELD_NUMBER: _ClassVar[int]
    INITIAL_SHA256_FIELD_NUMBER: _ClassVar[int]
    FROZEN_SHA256_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    KINDS_JSON_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_JSON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    CARD_FIELD_NUMBER: _ClassVar[int]
    CONFIG_SHA256_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    IS_BOUND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    protocol: int
    site: str
    session: str
    layout_json: str
    initial_sha256: str
    frozen_sha256: str
    checkpoint: int
    kinds_json: str
    num_steps: int
    sources_json: str
    error: str
    certificate: bytes
    card: MaskCard
    config_sha256: bytes
    held_versions: _containers.RepeatedScalarFieldContainer[int]
    is_bound: bool
    def __init__(self, run_id: _Optional[str] = ..., protocol: _Optional[int] = ..., site: _Optional[str] = ..., session: _Optional[str] = ..., layout_json: _Optional[str] = ..., initial_sha256: _Optional[str] = ..., frozen_sha256: _Optional[str] = ..., checkpoint: _Optional[int] = ..., kinds_json: _Optional[str] = ..., num_steps: _Optional[int] = ..., sources_json: _Optional[str] = ..., error: _Optional[str] = ..., certificate: _Optional[bytes] = ..., card: _Optional[_Union[MaskCard, _Mapping]] = ..., config_sha256: _Optional[bytes] = ..., held_versions: _Optional[_Iterable[int]] = ..., is_bound: _Optional[bool] = ...) -> None: ...

class MaskCard(_message.Message):
    __slots__ = ("site", "exchange_key", "signing_key", "certificate", "signature")
    SITE_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNING_KEY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    site: str
    exchange_key: bytes
    signing_key: bytes
    certificate: bytes
    signature: bytes
    def __init__(self, site: _Optional[str] = ..., exchange_key: _Optional[bytes] = ..., signing_key: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...

class MaskBundle(_message.Message):
    __slots__ = ("epoch", "basis", "sealed", "hashes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    basis: bytes
    sealed: _containers.RepeatedScalarFieldContainer[bytes]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, epoch: _Optional[int] = ..., basis: _Optional[bytes] = ..., sealed: _Optional[_Iterable[bytes]] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Unmask(_message.Message):
    __slots__ = ("fragment", "version", "survivors", "digests", "signers", "signatures", "sealed", "basis", "epoch")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SURVIVORS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SIGNERS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    survivors: _containers.RepeatedScalarFieldContainer[str]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    signers: _containers.RepeatedScalarFieldContainer[str]
    signatures: _containers.RepeatedScalarFieldContainer[bytes]
    sealed: _containers.RepeatedScalarFieldContainer[bytes]
    basis: bytes
    epoch: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., survivors: _Optional[_Iterable[str]] = ..., digests: _Optional[_Iterable[bytes]] = ..., signers: _Optional[_Iterable[str]] = ..., signatures: _Optional[_Iterable[bytes]] = ..., sealed: _Optional[_Iterable[bytes]] = ..., basis: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class Unmasked(_message.Message):
    __slots__ = ("fragment", "version", "signature", "shares")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    signature: bytes
    shares: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., signature: _Optional[bytes] = ..., shares: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("refusal", "versions", "send_initial", "run_step", "is_waiting", "text", "roster", "epoch", "start")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SEND_INITIAL_FIELD_NUMBER: _ClassVar[int]
    RUN_STEP_FIELD_NUMBER: _ClassVar[int]
    IS_WAITING_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ROSTER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    refusal: str
    versions: _containers.RepeatedScalarFieldContainer[int]
    send_initial: bool
    run_step: int
    is_waiting: bool
    text: str
    roster: _containers.RepeatedCompositeFieldContainer[MaskCard]
    epoch: int
    start: str
    def __init__(self, refusal: _Optional[str] = ..., versions: _Optional[_Iterable[int]] = ..., send_initial: _Optional[bool] = ..., run_step: _Optional[int] = ..., is_waiting: _Optional[bool] = ..., text: _Optional[str] = ..., roster: _Optional[_Iterable[_Union[MaskCard, _Mapping]]] = ..., epoch: _Optional[int] = ..., start: _Optional[str] = ...) -> None: ...

class SiteSignal(_message.Message):
    __slots__ = ("session", "step")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    session: str
    step: int
    def __init__(self, session: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class CoordinatorSignal(_message.Message):
    __slots__ = ("kind", "text", "is_complete", "version")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        HEARTBEAT: _ClassVar[CoordinatorSignal.Kind]
        EVALUATE: _ClassVar[CoordinatorSignal.Kind]
        STOP: _ClassVar[CoordinatorSignal.Kind]
        SEND_INITIAL: _ClassVar[CoordinatorSignal.Kind]
        GONE: _ClassVar[CoordinatorSignal.Kind]
        NOT_JOINED: _ClassVar[CoordinatorSignal.Kind]
    HEARTBEAT: CoordinatorSignal.Kind
    EVALUATE: CoordinatorSignal.Kind
    STOP: CoordinatorSignal.Kind
    SEND_INITIAL: CoordinatorSignal.Kind
    GONE: CoordinatorSignal.Kind
    NOT_JOINED: CoordinatorSignal.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IS_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    kind: CoordinatorSignal.Kind
    text: str
    is_complete: bool
    version: int
    def __init__(self, kind: _Optional[_Union[CoordinatorSignal.Kind, str]] = ..., text: _Optional[str] = ..., is_complete: _Optional[bool] = ..., version: _Optional[int] = ...) -> None: ...

class UploadHeader(_message.Message):
    __slots__ = ("run_id", "session", "kind", "fragment", "version", "num_bytes", "checksum", "chunk_bytes", "bundle", "work", "signature")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        CONTRIBUTION: _ClassVar[UploadHeader.Kind]
        INITIAL: _ClassVar[UploadHeader.Kind]
        MEASUREMENT: _ClassVar[UploadHeader.Kind]
    CONTRIBUTION: UploadHeader.Kind
    INITIAL: UploadHeader.Kind
    MEASUREMENT: UploadHeader.Kind
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    session: str
    kind: UploadHeader.Kind
    fragment: int
    version: int
    num_bytes: int
    checksum: int
    chunk_bytes: int
    bundle: MaskBundle
    work: Work
    signature: bytes
    def __init__(self, run_id: _Optional[str] = ..., session: _Optional[str] = ..., kind: _Optional[_Union[UploadHeader.Kind, str]] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., bundle: _Optional[_Union[MaskBundle, _Mapping]] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., signature: _Optional[bytes] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("step", "steps", "samples", "losses", "compute_s", "wait_s", "bytes_up", "bytes_down", "figures")
    class LossesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_UP_FIELD_NUMBER: _ClassVar[int]
    BYTES_DOWN_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    samples: int
    losses: _containers.ScalarMap[str, float]
    compute_s: float
    wait_s: float
    bytes_up: int
    bytes_down: int
    figures: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., samples: _Optional[int] = ..., losses: _Optional[_Mapping[str, float]] = ..., compute_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., bytes_up: _Optional[int] = ..., bytes_down: _Optional[int] = ..., figures: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("status", "text", "missing", "others_step")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INCOMPLETE: _ClassVar[Receipt.Status]
        ACCEPTED: _ClassVar[Receipt.Status]
        REJECTED: _ClassVar[Receipt.Status]
        STALE: _ClassVar[Receipt.Status]
    INCOMPLETE: Receipt.Status
    ACCEPTED: Receipt.Status
    REJECTED: Receipt.Status
    STALE: Receipt.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    OTHERS_STEP_FIELD_NUMBER: _ClassVar[int]
    status: Receipt.Status
    text: str
    missing: _containers.RepeatedScalarFieldContainer[int]
    others_step: int
    def __init__(self, status: _Optional[_Union[Receipt.Status, str]] = ..., text: _Optional[str] = ..., missing: _Optional[_Iterable[int]] = ..., others_step: _Optional[int] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("run_id", "kind", "fragment", "version", "wait_s", "chunks", "checksum", "transfer", "packed", "held_sha256", "held_versions")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UPDATE: _ClassVar[DownloadRequest.Kind]
        GLOBAL: _ClassVar[DownloadRequest.Kind]
        EMA: _ClassVar[DownloadRequest.Kind]
        OUTER: _ClassVar[DownloadRequest.Kind]
        MEASUREMENT: _ClassVar[DownloadRequest.Kind]
    UPDATE: DownloadRequest.Kind
    GLOBAL: DownloadRequest.Kind
    EMA: DownloadRequest.Kind
    OUTER: DownloadRequest.Kind
    MEASUREMENT: DownloadRequest.Kind
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    HELD_SHA256_FIELD_NUMBER: _ClassVar[int]
    HELD_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    kind: DownloadRequest.Kind
    fragment: int
    version: int
    wait_s: float
    chunks: _containers.RepeatedScalarFieldContainer[int]
    checksum: int
    transfer: int
    packed: bool
    held_sha256: str
    held_versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run_id: _Optional[str] = ..., kind: _Optional[_Union[DownloadRequest.Kind, str]] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., wait_s: _Optional[float] = ..., chunks: _Optional[_Iterable[int]] = ..., checksum: _Optional[int] = ..., transfer: _Optional[int] = ..., packed: _Optional[bool] = ..., held_sha256: _Optional[str] = ..., held_versions: _Optional[_Iterable[int]] = ...) -> None: ...

class DownloadHeader(_message.Message):
    __slots__ = ("status", "version", "num_bytes", "checksum", "chunk_bytes", "durable_version", "versions", "merged_from", "merged_into", "steps", "run_step", "anew_from", "is_own", "congestion", "unmask", "sizes", "others_step")
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        READY: _ClassVar[DownloadHeader.Status]
        NOT_YET: _ClassVar[DownloadHeader.Status]
        SUPERSEDED: _ClassVar[DownloadHeader.Status]
        DONE: _ClassVar[DownloadHeader.Status]
        HELD: _ClassVar[DownloadHeader.Status]
        UNMASK: _ClassVar[DownloadHeader.Status]
        BEHIND: _ClassVar[DownloadHeader.Status]
    READY: DownloadHeader.Status
    NOT_YET: DownloadHeader.Status
    SUPERSEDED: DownloadHeader.Status
    DONE: DownloadHeader.Status
    HELD: DownloadHeader.Status
    UNMASK: DownloadHeader.Status
    BEHIND: DownloadHeader.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DURABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MERGED_FROM_FIELD_NUMBER: _ClassVar[int]
    MERGED_INTO_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    RUN_STEP_FIELD_NUMBER: _ClassVar[int]
    ANEW_FROM_FIELD_NUMBER: _ClassVar[int]
    IS_OWN_FIELD_NUMBER: _ClassVar[int]
    CONGESTION_FIELD_NUMBER: _ClassVar[int]
    UNMASK_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    OTHERS_STEP_FIELD_NUMBER: _ClassVar[int]
    status: DownloadHeader.Status
    version: int
    num_bytes: int
    checksum: int
    chunk_bytes: int
    durable_version: int
    versions: _containers.RepeatedScalarFieldContainer[int]
    merged_from: int
    merged_into: int
    steps: int
    run_step: int
    anew_from: int
    is_own: bool
    congestion: str
    unmask: Unmask
    sizes: bytes
    others_step: int
    def __init__(self, status: _Optional[_Union[DownloadHeader.Status, str]] = ..., version: _Optional[int] = ..., num_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., durable_version: _Optional[int] = ..., versions: _Optional[_Iterable[int]] = ..., merged_from: _Optional[int] = ..., merged_into: _Optional[int] = ..., steps: _Optional[int] = ..., run_step: _Optional[int] = ..., anew_from: _Optional[int] = ..., is_own: _Optional[bool] = ..., congestion: _Optional[str] = ..., unmask: _Optional[_Union[Unmask, _Mapping]] = ..., sizes: _Optional[bytes] = ..., others_step: _Optional[int] = ...) -> None: ...

class QualityReport(_message.Message):
    __slots__ = ("run_id", "version", "figures_json", "samples", "evaluation_s")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FIGURES_JSON_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_S_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    figures_json: str
    samples: bytes
    evaluation_s: float
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ..., figures_json: _Optional[str] = ..., samples: _Optional[bytes] = ..., evaluation_s: _Optional[float] = ...) -> None: ...

class Farewell(_message.Message):
    __slots__ = ("session", "global_sha256", "work", "error")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SHA256_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    session: str
    global_sha256: str
    work: Work
    error: str
    def __init__(self, session: _Optional[str] = ..., global_sha256: _Optional[str] = ..., work: _Optional[_Union[Work, _Mapping]] = ..., error: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
