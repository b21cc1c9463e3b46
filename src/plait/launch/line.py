"""A rank's or a host's connection back to the launcher, where mpirun, srun or pdsh stands between them."""

from __future__ import annotations

import json
import socket
from typing import Any

_CONNECT_S = 5.0


class Line:
    """News go out, orders come in. Where the launcher cannot be reached it is mute, and nothing else changes."""

    def __init__(self, contact: str) -> None:
        """`contact` is address, port and password, as `Desk` gives them out."""
        self.cut = False
        """The launcher was there, and is gone."""
        self._rest = b""
        self._socket: socket.socket | None = None
        if contact:
            address, port, password = contact.rsplit(":", 2)
            try:
                self._socket = socket.create_connection((address, int(port)), timeout=_CONNECT_S)
            except OSError:
                return  # a wall between the hosts: the run goes on, and each host explains its own failures
            self.say(password=password)

    @property
    def connected(self) -> bool:
        """Whether somebody listens."""
        return self._socket is not None and not self.cut

    def say(self, **news: Any) -> None:
        """Tell the launcher something."""
        if self._socket is None or self.cut:
            return
        try:
            self._socket.settimeout(_CONNECT_S)
            self._socket.sendall(json.dumps(news).encode() + b"\n")
        except OSError:
            self.cut = True

    def orders(self) -> list[dict[str, Any]]:
        """What has come since the last call; does not wait."""
        if self._socket is None or self.cut:
            return []
        self._socket.setblocking(False)
        data = b""
        try:
            data = self._socket.recv(65536)
            self.cut = not data
        except BlockingIOError:
            return []
        except OSError:
            self.cut = True
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """No more news."""
        if self._socket is not None:
            self._socket.close()
