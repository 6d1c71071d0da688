"""The handle that a parent has on one worker process: start it, exchange messages without blocking, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

from envs import protocol
from envs.protocol import Message


class WorkerProcess:
    """A running `python -m envs.worker` and the parent's end of its socket, which never blocks."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) or os.getcwd() for path in sys.path),
            "PYTHONSAFEPATH": "1",  # or -m would put the working directory, and an `envs` in it, first
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "envs.worker", str(theirs.fileno()), str(os.getpid())],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints goes to stderr
                start_new_session=True,
            )
        except BaseException:
            self.socket.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> bool:
        """Starts to send a message; see `flush`."""
        self._outgoing = memoryview(protocol.encode(message))
        return self.flush()

    def flush(self) -> bool:
        """Sends what the socket takes now; whether the message is out. Raises OSError if the worker is gone."""
        with contextlib.suppress(BlockingIOError):
            while self._outgoing:
                self._outgoing = self._outgoing[self.socket.send(self._outgoing) :]
        return not self._outgoing

    def receive(self) -> Message | None:
        """A message if a whole one is there. Raises EOFError or OSError if the worker is gone, ValueError on junk."""
        with contextlib.suppress(BlockingIOError):
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError("the worker closed its socket")
            self._incoming += data
        return protocol.decode(self._incoming)

    def hang_up(self) -> None:
        """Tells the worker to end, which it does once it is idle."""
        with contextlib.suppress(OSError):  # already gone
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def end(self, grace: float) -> str:
        """Gives the worker `grace` seconds to end by itself, then kills it and what it started. Says how it ended."""
        self.hang_up()
        try:
            code = self._process.wait(grace)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # also ends a stopped process; it leads its own session
            with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may still hold it, in a file system call
                self._process.wait(grace + 1)
            return "did not end by itself and was killed"
        if code < 0:
            return f"was killed by signal {-code} ({signal.strsignal(-code)})"
        return f"ended with exit code {code}"
