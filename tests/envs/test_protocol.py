"""Messages on a stream that delivers them in pieces."""

import socket
import threading

import numpy as np
import pytest

from envs import protocol


def test_pieces_and_several_at_once() -> None:
    messages = [{"a": "ü\n\U0001f600"}, {}, {"b": [1, None, True]}]
    data = b"".join(map(protocol.encode, messages))
    buffer, found = bytearray(), []
    for byte in data:
        buffer.append(byte)
        if (message := protocol.decode(buffer)) is not None:
            found.append(message)
    assert found == messages and not buffer
    buffer += data
    assert [protocol.decode(buffer) for _ in range(4)] == [*messages, None]


def test_floats_are_exact() -> None:
    values = np.frombuffer(np.random.default_rng(0).bytes(8 * 10_000))
    values = np.array([*values[np.isfinite(values)], 0.1, -0.0, 5e-324, np.float32(0.1)])
    message = protocol.decode(bytearray(protocol.encode({"values": values.tolist()})))
    assert message and np.array(message["values"]).tobytes() == values.tobytes()


@pytest.mark.parametrize("body", [b"[1]", b"{", b"\xff\xff"])
def test_junk(body: bytes) -> None:
    with pytest.raises(ValueError):
        protocol.decode(bytearray(len(body).to_bytes(4, "big") + body))


def test_receive() -> None:
    ours, theirs = socket.socketpair()
    big = {"ids": list(range(200_000))}
    thread = threading.Thread(target=lambda: (theirs.sendall(protocol.encode(big)), theirs.close()))
    thread.start()
    buffer = bytearray()
    assert protocol.receive(ours, buffer) == big
    assert protocol.receive(ours, buffer) is None
    thread.join()
    ours.close()
