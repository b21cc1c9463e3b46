"""How much a server takes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused, and with which status, is in the table of docs/chat.md."""

    body_bytes: int = 1 << 20
    """Of one request."""
    messages: int = 2048
    """Of one conversation."""
    batch_rows: int = 16
    """Answers that are written at the same time."""
    waiting: int = 256
    """Requests that wait for a place in the batch."""
    connections: int = 512
    """Open at the same time."""
    max_new_tokens: int = 1024
    """Of one answer."""
    request_s: float = 600.0
    """From the header of a request to the end of its answer."""
    header_s: float = 10.0
    """For the header of a request, and as long for what is left of a body that nobody wants."""
    body_s: float = 30.0
    """For the body of a request."""
    idle_s: float = 30.0
    """Between two requests of one connection."""
    stop_s: float = 20.0
    """For answers in progress when the server is stopped."""
