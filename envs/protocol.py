"""Messages between a process and its workers: 4 bytes of length, then JSON in UTF-8.

JSON writes a float so that reading it gives the same float back, and nothing has to be pickled.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

Message = dict[str, Any]

_HEADER = struct.Struct("!I")


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _HEADER.pack(len(body)) + body


def decode(buffer: bytearray) -> Message | None:
    """Takes a message off the front of the buffer; None if it is not complete. Raises ValueError if it is not one."""
    if len(buffer) < _HEADER.size:
        return None
    end = _HEADER.size + _HEADER.unpack_from(buffer)[0]
    if len(buffer) < end:
        return None
    message = json.loads(bytes(buffer[_HEADER.size : end]))
    del buffer[:end]
    if not isinstance(message, dict):
        raise ValueError(f"a message must be a JSON object, got {type(message).__name__}")
    return message


def receive(sock: socket.socket, buffer: bytearray) -> Message | None:
    """Waits for a message on a blocking socket; None when the other side is gone. buffer: kept between calls."""
    while (message := decode(buffer)) is None:
        data = sock.recv(1 << 16)
        if not data:
            return None
        buffer += data
    return message
