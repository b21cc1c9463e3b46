"""How long ranks are waited for once something has gone wrong."""

from __future__ import annotations

SAY_S = 2.0
"""The other ranks may go on so long once one has failed: they may have something to say about it."""
GRACE_S = 10.0
"""They may take so long to leave after SIGTERM. A step cannot be finished without the one that is gone."""
STUCK_S = 2.0
"""The same where the run hangs: nobody listens who waits in a collective."""
STACK_S = 0.5
"""Ranks may take so long to write down their stacks."""
