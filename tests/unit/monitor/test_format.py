from __future__ import annotations

import pytest

from plait.monitor.format import as_number, format_bytes, format_clock, format_count, format_duration


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7.25, "7.2"), (980, "980"), (12_340, "12.3k"), (999_960, "1.00M"), (1.2e6, "1.20M"), (3.4e10, "34.0G")],
)
def test_large_numbers_take_a_letter(value: float, text: str) -> None:
    assert format_count(value) == text


def test_times_and_sizes_have_the_unit_that_fits() -> None:
    assert (format_clock(794.9), format_clock(90_000)) == ("0:13:14", "1 day, 1:00:00")
    assert format_clock(1e300) == "?"  # a run of 10^18 steps has such an end
    assert (format_duration(0.414), format_duration(12.34), format_duration(75)) == ("0.41 s", "12.3 s", "0:01:15")
    assert (format_bytes(512), format_bytes(3.4 * 2**20), format_bytes(2**41)) == ("512 B", "3.4 MiB", "2.0 TiB")


def test_only_numbers_are_numbers() -> None:
    assert as_number("nan") != as_number("nan")
    assert as_number(True) is None
    assert as_number(None) is None
    assert as_number("zero3") is None
