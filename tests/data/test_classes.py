"""Names of classes."""

from __future__ import annotations

import pytest

from fedwan.data.classes import Classes, parse_classes
from tests.data.files import refused


def test_a_class_is_found_by_name_and_by_number() -> None:
    classes = parse_classes("cat,dog")
    assert [classes.find(text) for text in ("cat", "dog", "0", "1")] == [0, 1, 0, 1]
    assert (classes.num, classes.is_numbered) == (2, False)


def test_a_number_stands_for_the_numbers_below_it() -> None:
    classes = parse_classes("12")
    assert (classes.num, classes.find("11"), classes.is_numbered) == (12, 11, True)


def test_a_name_wins_over_a_number() -> None:
    assert parse_classes("7,0").find("0") == 1


def test_without_classes_all_labels_are_the_same() -> None:
    assert parse_classes("") == Classes(())
    assert parse_classes("").num == 1


@pytest.mark.parametrize("name", ["bird", "2", "-1", "", "CAT"])
def test_what_is_no_class_is_told_with_those_that_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"is of class .* does not name \(cat, dog\)"):
        parse_classes("cat,dog").find(name)


@pytest.mark.parametrize(
    ("text", "says"),
    [("astronaut", "a single class; give two or more"), ("1", "1 classes"), ("0", "0 classes")]
    + [("cat,,dog", "a name is empty"), ("cat,dog,cat", "holds 'cat' twice")],
)
def test_what_names_no_classes_is_refused(text: str, says: str) -> None:
    refused(says, lambda: parse_classes(text))
