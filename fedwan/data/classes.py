"""The classes of a data set of files, which all sites must number alike.

No site sees another's files, so they cannot be counted: `data.classes` names them, in order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fedwan.errors import ConfigError

__all__ = ["Classes", "parse_classes"]

_FORMS = "names like cat,dog, or how many there are, like 10, which numbers them 0 to 9"


@dataclass(frozen=True)
class Classes:
    """Names of classes by number."""

    names: tuple[str, ...]
    """Empty where samples have no classes."""

    @property
    def num(self) -> int:
        """Labels are 0 … num - 1; without classes all are 0."""
        return max(1, len(self.names))

    @property
    def is_numbered(self) -> bool:
        """Whether the names are nothing but the numbers."""
        return self.names == tuple(str(number) for number in range(len(self.names)))

    def find(self, name: str) -> int:
        """The number of a class, from its name or its number.

        Raises:
            ValueError: there is none such; the text says which there are.
        """
        if name in self.names:
            return self.names.index(name)
        if name.isdecimal() and int(name) < len(self.names):
            return int(name)
        shown = ", ".join(self.names[:10]) + (", …" if len(self.names) > 10 else "")
        raise ValueError(
            f"is of class {name!r}, which data.classes does not name ({shown}); name it there, at "
            "every site alike, or remove it here"
        )


def parse_classes(text: str) -> Classes:
    """Read `data.classes`.

    >>> parse_classes("cat, dog").names
    ('cat', 'dog')
    >>> parse_classes("3").names
    ('0', '1', '2')

    Raises:
        ConfigError: an empty name, a single one, or one twice.
    """
    if not text:
        return Classes(())
    if text.strip().isdecimal():
        names = tuple(str(number) for number in range(int(text)))
    else:
        names = tuple(name.strip() for name in text.split(","))
    if len(names) < 2:
        what = "a single class" if names and not names[0].isdecimal() else f"{len(names)} classes"
        raise ConfigError(f"data.classes is {text!r}, {what}; give two or more, {_FORMS}")
    if not all(names):
        raise ConfigError(f"data.classes is {text!r}, in which a name is empty; give {_FORMS}")
    (name, times), *_ = Counter(names).most_common(1)
    if times > 1:
        raise ConfigError(
            f"data.classes is {text!r} and holds {name!r} twice; name each class once"
        )
    return Classes(names)
