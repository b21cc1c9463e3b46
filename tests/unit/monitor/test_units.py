from __future__ import annotations

import pytest

from plait.monitor.format import clock, compact, duration, number, size


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7.25, "7.2"), (980, "980"), (12_340, "12.3k"), (999_960, "1.00M"), (1.2e6, "1.20M"), (3.4e10, "34.0G")],
)
def test_large_numbers_take_a_letter(value: float, text: str) -> None:
    assert compact(value) == text


def test_times_and_sizes_have_the_unit_that_fits() -> None:
    assert (clock(794.9), clock(90_000)) == ("0:13:14", "1 day, 1:00:00")
    assert clock(1e300) == "?"  # a run of 10^18 steps has such an end
    assert (duration(0.414), duration(12.34), duration(75)) == ("0.41 s", "12.3 s", "0:01:15")
    assert (size(512), size(3.4 * 2**20), size(2**41)) == ("512 B", "3.4 MiB", "2.0 TiB")


def test_only_numbers_are_numbers() -> None:
    assert number("nan") != number("nan")
    assert number(True) is None
    assert number(None) is None
    assert number("zero3") is None
