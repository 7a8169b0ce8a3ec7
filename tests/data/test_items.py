"""What is held out."""

from __future__ import annotations

from fedwan.data.items import hold_out_by_name, hold_out_every_tenth


def held(names: list[str]) -> set[str]:
    mask = hold_out_by_name(names).tolist()
    return {name for name, is_held in zip(names, mask, strict=True) if is_held}


NAMES = [f"{number}.png" for number in range(1000)]


def test_a_tenth_is_held_out_and_no_fewer_than_twelve_nor_more_than_512() -> None:
    many = [str(number) for number in range(6000)]
    assert [len(held(names)) for names in (NAMES[:24], NAMES[:300], many)] == [12, 30, 512]


def test_it_depends_on_names_alone_and_not_on_their_order() -> None:
    assert held(NAMES) == held(NAMES[::-1])


def test_names_that_come_or_go_move_few_others() -> None:
    before, after = held(NAMES), held(NAMES[50:] + [f"new-{n}" for n in range(100)])
    kept = before & set(NAMES[50:])
    assert len(kept - after) <= 8


def test_every_tenth_pair_is_held_out_and_four_at_least() -> None:
    assert hold_out_every_tenth(60).nonzero().flatten().tolist() == [0, 10, 20, 30, 40, 50]
    assert int(hold_out_every_tenth(8).sum()) == 4
