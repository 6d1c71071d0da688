"""Worker processes that answer messages, and that are replaced when they die or hang."""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.protocol import Message
from envs.worker_process import WorkerProcess

ITEMS_PER_MESSAGE = 16  # of deal(); few, as the timeout is for one message
_CLOSE_SECONDS = 1.0


class WorkerError(RuntimeError):
    """Workers cannot be started, or die or hang again and again. The pool is closed."""


class EnvError(RuntimeError):
    """An exception in a worker, such as one in a reward function. The workers are still usable.

    env: number of the environment, None outside of one; sample_id: of the sample; traceback: the worker's, as text.
    """

    def __init__(self, answer: Message) -> None:
        self.env: int | None = answer["env"]
        self.sample_id: str | None = answer["sample_id"]
        self.traceback: str = answer["traceback"]
        where = "" if self.env is None else f"environment {self.env}, "
        super().__init__(f"{where}sample {self.sample_id!r}: {answer['error']}\n\n{self.traceback}")


@dataclass
class _Job:
    """Messages for one worker. The first of `recovery + script` is on its way, and is to be answered by `deadline`."""

    script: deque[Message]
    recovery: deque[Message] = field(default_factory=deque)
    answers: list[Message] = field(default_factory=list)
    deadline: float = 0.0

    @property
    def done(self) -> bool:
        return not (self.recovery or self.script)

    @property
    def current(self) -> Message:
        return (self.recovery or self.script)[0]


class WorkerPool:
    """n_workers processes, started when they are first needed.

    recovery: for a worker's number, the messages that bring a new process to where its predecessor was (`init` first)
    timeout: seconds a worker may take for one message; max_failures: deaths and timeouts of a worker, without an answer
    between them, at which the pool gives up. restarts counts replaced processes.
    """

    def __init__(
        self, n_workers: int, recovery: Callable[[int], list[Message]], *, timeout: float, max_failures: int
    ) -> None:
        self.timeout = timeout
        self.max_failures = max_failures
        self.restarts = 0
        self._recovery = recovery
        self._processes: list[WorkerProcess | None] = [None] * n_workers
        self._failures = [0] * n_workers
        self._owner = os.getpid()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process]

    def run(self, scripts: Mapping[int, Sequence[Message]]) -> dict[int, list[Message]]:
        """Sends each worker its messages, one after the other, all workers at once. Returns their answers.

        Raises EnvError if a worker answers with an exception: the first one, after all other workers have finished.
        Raises WorkerError if a worker cannot be started or fails max_failures times in a row.
        """
        if self._closed:
            raise RuntimeError("the workers are closed")
        jobs = {worker: _Job(deque(script)) for worker, script in scripts.items() if script}
        busy = dict(jobs)
        try:
            with selectors.DefaultSelector() as selector:
                for worker, job in jobs.items():
                    if self._processes[worker] is None:
                        self._start(worker, job)
                for worker in jobs:
                    self._next(selector, worker, busy)
                while busy:
                    self._wait(selector, busy)
        except WorkerError:
            self.close()
            raise
        except BaseException:  # an interrupt: answers that are under way must not meet the next question
            for worker in busy:
                self._end(worker)
            raise
        errors = [answer for job in jobs.values() for answer in job.answers if "error" in answer]
        if errors:
            raise EnvError(min(errors, key=lambda answer: -1 if answer["env"] is None else answer["env"]))
        return {worker: job.answers for worker, job in jobs.items()}

    def _start(self, worker: int, job: _Job) -> None:
        job.recovery = deque(self._recovery(worker))
        self._processes[worker] = WorkerProcess()

    def _next(self, selector: selectors.BaseSelector, worker: int, busy: dict[int, _Job]) -> None:
        """Sends the worker's current message, or marks it as done."""
        process, job = self._processes[worker], busy[worker]
        assert process is not None
        known = process.socket in selector.get_map()
        if job.done:
            del busy[worker]
            selector.unregister(process.socket)
            return
        job.deadline = time.monotonic() + self.timeout
        try:
            out = process.send(job.current)
        except OSError:
            out = True  # it is gone, which shows when its answer is read
        events = selectors.EVENT_READ if out else selectors.EVENT_READ | selectors.EVENT_WRITE
        (selector.modify if known else selector.register)(process.socket, events, worker)

    def _wait(self, selector: selectors.BaseSelector, busy: dict[int, _Job]) -> None:
        """Waits for the next answer, death or timeout, and acts on it."""
        first = min(job.deadline for job in busy.values())
        for key, events in selector.select(max(0.0, first - time.monotonic())):
            worker, process = key.data, self._processes[key.data]
            assert process is not None
            try:
                if events & selectors.EVENT_WRITE and process.flush():
                    selector.modify(process.socket, selectors.EVENT_READ, worker)
                answer = process.receive() if events & selectors.EVENT_READ else None
            except (OSError, EOFError):
                self._fail(selector, worker, busy)
                continue
            except ValueError as error:
                self._fail(selector, worker, busy, f"sent an unreadable answer: {error}")
                continue
            if answer is not None:
                self._answered(answer, worker, busy[worker])
                self._next(selector, worker, busy)
        now = time.monotonic()
        for worker in [worker for worker, job in busy.items() if job.deadline <= now]:
            command = busy[worker].current["cmd"]
            self._fail(selector, worker, busy, f"gave no answer to {command!r} within {self.timeout:g} s")

    def _answered(self, answer: Message, worker: int, job: _Job) -> None:
        if "error" in answer and job.current["cmd"] == "init":
            raise WorkerError(f"worker {worker} cannot start: {answer['error']}\n\n{answer['traceback']}")
        if job.recovery and "error" not in answer:
            job.recovery.popleft()
            return
        self._failures[worker] = 0
        job.answers.append(answer)
        job.script.popleft()
        if "error" in answer:
            job.recovery.clear()
            job.script.clear()

    def _fail(self, selector: selectors.BaseSelector, worker: int, busy: dict[int, _Job], problem: str = "") -> None:
        """Replaces a worker that died or has a problem, and gives the new one the messages that have no answer yet."""
        process = self._processes[worker]
        assert process is not None
        selector.unregister(process.socket)
        how = self._end(worker, grace=0.2 if problem else 3.0)  # one that is ending by itself shall say its exit code
        self._failures[worker] += 1
        n_failures = self._failures[worker]
        if n_failures >= self.max_failures:
            raise WorkerError(f"worker {worker} failed {n_failures} times in a row; the last time it {problem or how}")
        self.restarts += 1
        self._start(worker, busy[worker])
        self._next(selector, worker, busy)

    def _end(self, worker: int, grace: float = 0.2) -> str:
        process, self._processes[worker] = self._processes[worker], None
        return process.end(grace) if process else "had not started"

    def deal(self, values: Sequence[Any], **message: Any) -> list[Any]:
        """Results for any number of `values`, in their order: dealt over the workers, a few in each message."""
        n_workers = len(self._processes)
        own = {worker: values[worker::n_workers] for worker in range(n_workers)}
        scripts = {
            worker: [
                {**message, "values": part[start : start + ITEMS_PER_MESSAGE]}
                for start in range(0, len(part), ITEMS_PER_MESSAGE)
            ]
            for worker, part in own.items()
        }
        results: list[Any] = [None] * len(values)
        for worker, answers in self.run(scripts).items():
            results[worker::n_workers] = [result for answer in answers for result in answer["results"]]
        return results

    def close(self) -> None:
        """Ends all workers; takes a second or so at most. Safe to call again, and in a process that was forked off."""
        self._closed = True
        processes, self._processes = [p for p in self._processes if p], []
        if os.getpid() != self._owner:
            return
        for process in processes:
            process.hang_up()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for process in processes:
            process.end(grace=max(0.0, deadline - time.monotonic()))
