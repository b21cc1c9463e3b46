"""Where all programs are to be installed, none that does not work is passed over."""

from __future__ import annotations

import pytest
from tests.real import VARIABLE, unavailable


@pytest.mark.parametrize(("value", "outcome"), [("1", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_program_that_does_not_work_fails_where_it_must(
    monkeypatch: pytest.MonkeyPatch, value: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(outcome) as ended:
        unavailable("Slurm does not come up")
    assert "Slurm does not come up" in str(ended.value)
