"""Huge pages for memory that other ranks read: contents and neighbours stay, and only what is used again is touched."""

from __future__ import annotations

import numpy as np
import pytest

from commhooks.links import pages
from commhooks.links.pages import HugePages, gather

_HUGE = 2 << 20


def _huge_kb(address: int, nbytes: int) -> int:
    """AnonHugePages of the mappings that hold a range, in KB."""
    total, inside = 0, False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                inside = low < address + nbytes and address < high
            elif inside and first == "AnonHugePages:":
                total += int(line.split()[1])
    return total


def _array(nbytes: int) -> tuple[np.ndarray, int]:
    array = np.empty(nbytes, dtype=np.uint8)
    array[:] = np.arange(nbytes, dtype=np.uint32).astype(np.uint8)
    return array, array.ctypes.data


@pytest.fixture
def supported() -> None:
    array, address = _array(3 * _HUGE)
    if not gather(address, len(array)):
        pytest.skip("this kernel doesn't gather huge pages")


@pytest.mark.parametrize("offset", [0, 4096, 777])
def test_contents_stay_and_whole_huge_pages_are_gathered(supported: None, offset: int) -> None:
    array, address = _array(5 * _HUGE)
    before = array.copy()
    assert gather(address + offset, len(array) - offset)
    assert np.array_equal(array, before)
    assert _huge_kb(address, len(array)) >= 3 * _HUGE // 1024


def test_memory_is_gathered_at_its_second_use_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(pages, "gather", lambda *which: asked.append(which) is None)
    known = HugePages()
    assert [known.used(0x1000, 9), known.used(0x2000, 9), known.used(0x1000, 9), known.used(0x1000, 9)] == [
        False,
        False,
        True,
        False,
    ]
    assert asked == [(0x1000, 9)]


def test_what_holds_no_huge_page_or_isnt_mapped_is_left_alone() -> None:
    array, address = _array(_HUGE // 2)
    assert not gather(address, len(array))
    assert not gather(1 << 46, 4 * _HUGE)


def test_many_buffers_are_forgotten_not_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "gather", lambda *which: True)
    known = HugePages()
    for address in range(5000):
        known.used(address, 1)
    assert len(known._gathered) <= 1024
