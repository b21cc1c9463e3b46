"""The `plait` command and its subcommands."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.cli.main import main as main
else:
    from plait.lazy import attach_names

    attach_names(__name__)
