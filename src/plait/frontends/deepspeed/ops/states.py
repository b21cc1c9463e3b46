"""In which format the states of DeepSpeed's optimizers for the host are."""

from __future__ import annotations

from plait.errors import ConfigError, Problem


def only_fp32_states(fp32_optimizer_states: bool) -> None:
    """Refuse the other answer: states have the format of the weights that they update."""
    if not fp32_optimizer_states:
        message = "false is not offered: states are kept in the format of the weights that they update"
        raise ConfigError(Problem("fp32_optimizer_states", message, "Leave it out."))
