"""Chunks are dealt each once, to whoever asks."""

from __future__ import annotations

import threading

from fedwan.link import dealing
from fedwan.link.dealing import Dealer, Deals


def test_every_chunk_is_dealt_once_to_any_number_of_threads() -> None:
    dealer = Dealer(range(20_000))
    dealt: list[list[int]] = []

    def take() -> None:
        dealt.append(list(dealer))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(chunk for part in dealt for chunk in part) == list(range(20_000))


def test_calls_of_one_deal_share_the_first_one_s_chunks() -> None:
    deals = Deals()
    first, second = deals.join("s1", 5, [1, 2, 3]), deals.join("s1", 5, [1, 2, 3])
    assert [next(first), next(second), next(first)] == [1, 2, 3]
    assert list(second) == []
    assert list(deals.join("s1", 5, [1, 2, 3])) == []  # late


def test_deals_of_other_sites_and_other_numbers_are_their_own() -> None:
    deals = Deals()
    assert list(deals.join("s1", 5, [1])) == [1]
    assert list(deals.join("s2", 5, [2])) == [2]
    assert list(deals.join("s1", 6, [3])) == [3]


def test_the_longest_unused_deal_is_forgotten_first() -> None:
    deals = Deals()
    list(deals.join("s1", 0, [1]))
    for number in range(1, dealing.MAX_DEALS):
        deals.join("s1", number, [])
    assert list(deals.join("s1", 0, [1])) == []
    deals.join("s1", dealing.MAX_DEALS, [])
    assert list(deals.join("s1", 0, [1])) == []
    assert list(deals.join("s1", 1, [7])) == [7]
