"""The ticket: the one message that a site gets per run, and all it needs to take part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from fedwan.errors import WireError


@dataclass(frozen=True)
class Ticket:
    """Where the coordinator's data plane is, and what runs there."""

    address: str
    """`host:port` of the data plane, as sites dial it."""
    run_id: str
    """The run; the same after a resume, so that a site still alive rejoins without a new ticket."""
    config: str
    """The resolved configuration, as JSON."""

    def to_dict(self) -> dict[str, str]:
        """The fields as plain strings, for any carrier."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Ticket:
        """The inverse; fields that a newer coordinator added are ignored, missing ones refused."""
        found: dict[str, str] = {}
        for field in fields(cls):
            value = values.get(field.name)
            if not isinstance(value, str) or not value:
                raise WireError(
                    f"ticket field {field.name!r} is {value!r}, not a non-empty string; "
                    "run the same fedwan version on the coordinator and on every site"
                )
            found[field.name] = value
        return cls(**found)
