"""Rewards that raise, workers that die or hang, parents that die."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import user_rewards
from text_world import ENV, SAMPLES, make_tokenizer

from envs.text_env import TextEnv
from envs.vector import EnvError, TextVectorEnv, WorkerError

Make = Callable[..., TextVectorEnv]
A, B, EOS = 4, 5, 1
INDICES = [0, 1, 2]
RESPONSES = [[A, B, EOS], [B, A, A, EOS], [A] * 6]


def right() -> list[list[float]]:
    """What `play` gives without any failures."""
    rewards = []
    for index, ids in zip(INDICES, RESPONSES, strict=True):
        env = TextEnv(make_tokenizer(), SAMPLES, user_rewards.stepwise, **ENV)
        env.reset(options={"index": index})
        rewards.append([*env.play(ids)[0].tolist(), *[0.0] * (6 - len(ids))])
    return rewards


def right_step(t: int) -> list[float]:
    return [row[t] for row in right()]


def play(vector: TextVectorEnv) -> list[list[float]]:
    vector.reset(options={"indices": INDICES})
    result: list[list[float]] = vector.play(RESPONSES).rewards.tolist()
    return result


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(is_running, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


# Exceptions: who, where, and the workers live on.


@pytest.mark.parametrize("reward", ["Raises", "RaisesBatched"])
def test_an_exception_in_a_reward(make_vector: Make, reward: str) -> None:
    vector = make_vector(3, 2, reward, {"sample_id": "s1"}, first_env=20)
    pids = vector.worker_pids
    vector.reset(options={"indices": INDICES})
    with pytest.raises(EnvError, match=rf"environment 21, sample 's1': RewardError: reward {reward}") as error:
        vector.play(RESPONSES)
    assert (error.value.env, error.value.sample_id) == (21, "s1")
    assert "user_rewards.py" in str(error.value) and 'table["no such key"]' in error.value.traceback
    with pytest.raises(RuntimeError, match="or an error ended it"):
        vector.play(RESPONSES)
    vector.reset(options={"indices": [0, 2, 2]})
    assert vector.play(RESPONSES).terminated.tolist() == [True, True, False]
    assert vector.worker_pids == pids and vector.restarts == 0


def test_the_first_of_several_exceptions_after_all_have_answered(make_vector: Make) -> None:
    vector = make_vector(3, 3, "Raises", {"sample_id": "s1"})
    vector.reset(options={"indices": [0, 1, 1]})
    with pytest.raises(EnvError, match="environment 1,"):
        vector.play(RESPONSES)
    vector.reset(options={"indices": [0, 2, 3]})
    assert vector.play(RESPONSES).lengths.tolist() == [3, 4, 6]


@pytest.mark.parametrize("what", ["nan", "inf", "string", "none", "list"])
def test_a_value_that_is_no_reward(make_vector: Make, what: str) -> None:
    vector = make_vector(3, 1, "Returns", {"what": what})
    vector.reset(options={"indices": INDICES})
    with pytest.raises(EnvError, match="environment 1, sample 's1': RewardError: reward Returns .*not a finite number"):
        vector.play(RESPONSES)
    with pytest.raises(EnvError, match="sample 's1': RewardError"):
        vector.score("train", [0, 1], [[A], [A]])


@pytest.mark.parametrize(("reward", "text"), [("too_many", "2 values for 1 episodes"), ("one_number", "returned 1.0")])
def test_not_one_value_each(make_vector: Make, reward: str, text: str) -> None:
    vector = make_vector(2, 1, reward)
    vector.reset(options={"indices": [3, 4]})
    with pytest.raises(EnvError, match=f"environment 0, sample 's3': RewardError: reward {reward} .*{text}"):
        vector.play([[EOS], [EOS]])


def test_tokens_that_do_not_fit(make_vector: Make) -> None:
    vector = make_vector(2, 1)
    vector.reset(options={"indices": [3, 4]})
    with pytest.raises(EnvError, match="environment 1, sample 's4': ValueError.*ends after 1"):
        vector.play([[EOS], [EOS, A]])
    vector.reset()
    with pytest.raises(EnvError, match="environment 0, .*ValueError: tokens must be in"):
        vector.step([14, A])


def test_score_leaves_episodes_alone_when_it_fails(make_vector: Make) -> None:
    vector = make_vector(1, 2, "Raises", {"sample_id": "v17"})
    vector.reset(options={"indices": [0]})
    with pytest.raises(EnvError, match="^sample 'v17'"):
        vector.score("val", range(40), [[A]] * 40)
    assert vector.play([[A, EOS]]).rewards.tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("reward", "args", "text"),
    [
        ("missing", {}, "no attribute 'missing'"),
        ("NeedsArgument", {}, "needs the argument 'needed'"),
        ("Batched", {"scael": 1}, "no argument 'scael'"),
        ("no_reward", {}, "a reward takes"),
    ],
)
def test_a_reward_that_cannot_be_built(make_vector: Make, reward: str, args: dict[str, Any], text: str) -> None:
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"(?s)cannot start: ValueError.*{text}.*Traceback"):
        make_vector(3, 3, reward, args)
    assert time.monotonic() - start < 30
    assert not children()


def children() -> list[int]:
    """Worker processes of this process."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == os.getpid() and b"envs.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


# Deaths and hangs: replaced, the same results, counted.


def limits(what: str) -> dict[str, Any]:
    """Short enough to wait for; a busy machine may start a worker more slowly, which must not fail the test."""
    return {"timeout": 60.0} if what in ("die", "exit") else {"timeout": 3.0, "max_failures": 8}


def counted(vector: TextVectorEnv, what: str) -> bool:
    return vector.restarts == 1 if what in ("die", "exit") else vector.restarts >= 1


def test_killed_while_idle(make_vector: Make) -> None:
    vector = make_vector(3, 2, "stepwise")
    os.kill(vector.worker_pids[0], signal.SIGKILL)
    assert play(vector) == right()
    vector.reset(options={"indices": INDICES})
    for pid in vector.worker_pids:
        os.kill(pid, signal.SIGKILL)
    assert vector.play(RESPONSES).rewards.tolist() == right()
    assert vector.restarts == 3


def test_killed_between_steps(make_vector: Make) -> None:
    vector = make_vector(3, 2, "stepwise")
    vector.reset(options={"indices": INDICES})
    rewards = []
    for t in range(3):
        os.kill(vector.worker_pids[t % 2], signal.SIGKILL)
        rewards.append(vector.step([ids[t] for ids in RESPONSES])[1].tolist())
    assert rewards == [right_step(t) for t in range(3)]
    assert vector.restarts == 3


@pytest.mark.parametrize("what", ["die", "exit", "sleep", "stop", "hold"])
@pytest.mark.parametrize("n_workers", [1, 3])
def test_trouble_in_play(make_vector: Make, tmp_path: Path, what: str, n_workers: int) -> None:
    vector = make_vector(3, n_workers, "Trouble", {"what": what, "flag": str(tmp_path / "flag")}, **limits(what))
    pids = vector.worker_pids
    assert play(vector) == right()
    assert counted(vector, what)
    replaced = set(pids) - set(vector.worker_pids)
    assert replaced and not wait_until_gone([*replaced], 1)


@pytest.mark.parametrize("what", ["die", "stop"])
def test_trouble_in_step(make_vector: Make, tmp_path: Path, what: str) -> None:
    args = {"what": what, "flag": str(tmp_path / "flag"), "at": 2}
    vector = make_vector(3, 2, "Trouble", args, **limits(what))
    vector.reset(options={"indices": INDICES})
    rewards = [vector.step([ids[t] for ids in RESPONSES])[1].tolist() for t in range(3)]
    assert rewards == [right_step(t) for t in range(3)]
    assert counted(vector, what)


@pytest.mark.parametrize("what", ["die", "sleep"])
def test_trouble_in_score(make_vector: Make, tmp_path: Path, what: str) -> None:
    args = {"what": what, "sample_id": "v20", "flag": str(tmp_path / "flag")}
    vector = make_vector(2, 2, "Trouble", args, **limits(what))
    vector.reset(options={"indices": [0, 1]})
    vector.step([A, B])
    responses = [[A] * (i % 7) for i in range(40)]
    scores = vector.score("val", range(40), responses).scores
    assert scores == make_vector(1, 1, "stepwise").score("val", range(40), responses).scores
    assert counted(vector, what)
    other = make_vector(2, 1, "stepwise")
    other.reset(options={"indices": [0, 1]})
    other.step([A, B])
    assert vector.play([[B, EOS], [EOS]]).rewards.tolist() == other.play([[B, EOS], [EOS]]).rewards.tolist()


def test_stopped_worker_whose_socket_is_full(make_vector: Make) -> None:
    vector = make_vector(
        2, 2, "token_a", env={"max_episode_length": 10**6, "terminate_on_eos": False}, **limits("stop")
    )
    vector.reset(options={"indices": [0, 1]})
    stopped, _ = vector.worker_pids
    os.kill(stopped, signal.SIGSTOP)
    result = vector.play([[A] * 400_000, [A, B]])
    assert result.rewards.sum(1).tolist() == pytest.approx([40_000.0, 0.1])
    assert counted(vector, "stop") and not wait_until_gone([stopped], 1)


@pytest.mark.parametrize(
    ("what", "reason"),
    [("die", "killed by signal 9"), ("exit", "exit code 3"), ("sleep", "no answer to 'play' within 3 s")],
)
def test_gives_up_after_failures_in_a_row(make_vector: Make, what: str, reason: str) -> None:
    vector = make_vector(3, 2, "Trouble", {"what": what}, timeout=3.0, max_failures=2)
    vector.reset(options={"indices": [0, 2, 2]})
    vector.play(RESPONSES)
    with pytest.raises(WorkerError, match=f"worker 0 failed 2 times in a row; the last time it .*{reason}"):
        play(vector)
    assert not children()
    with pytest.raises(RuntimeError, match="closed"):
        vector.reset()


def test_failures_that_are_not_in_a_row_are_forgiven(make_vector: Make) -> None:
    vector = make_vector(1, 1, "stepwise", max_failures=2)
    for _ in range(3):
        os.kill(vector.worker_pids[0], signal.SIGKILL)
        vector.reset()
    assert vector.restarts == 3


def test_an_interrupted_call_leaves_no_stale_answers(make_vector: Make, tmp_path: Path) -> None:
    vector = make_vector(3, 2, "Trouble", {"what": "sleep", "flag": str(tmp_path / "flag")})
    vector.reset(options={"indices": INDICES})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            vector.play(RESPONSES)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert play(vector) == right()


def test_signals_for_the_training_process_do_not_end_workers(make_vector: Make) -> None:
    vector = make_vector(3, 1, "stepwise")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        os.kill(vector.worker_pids[0], number)
    assert play(vector) == right()
    assert vector.restarts == 0


def test_made_in_a_thread_that_has_ended(make_vector: Make) -> None:
    made: list[TextVectorEnv] = []
    thread = threading.Thread(target=lambda: made.append(make_vector(3, 1, "stepwise")))
    thread.start()
    thread.join()
    assert play(made[0]) == right()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="older Pythons always search the working directory first")
def test_a_folder_of_the_user_with_the_name_of_ours(
    make_vector: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("raise ImportError('the wrong package')")
    monkeypatch.chdir(tmp_path)
    assert play(make_vector(3, 1, "stepwise")) == right()


# The end.


def test_close_is_quick_and_can_be_repeated(make_vector: Make) -> None:
    vector = make_vector(4, 4, "stepwise")
    pids = vector.worker_pids
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)
    start = time.monotonic()
    vector.close()
    vector.close()
    assert time.monotonic() - start < 3
    assert not [pid for pid in pids if is_running(pid)] and vector.worker_pids == []


def test_close_without_close(make_vector: Make, init: Callable[..., dict[str, Any]]) -> None:
    with TextVectorEnv(1, 1, init=init(), seed=0) as vector:
        pids = vector.worker_pids
    dropped = TextVectorEnv(1, 1, init=init(), seed=0)
    pids += dropped.worker_pids
    del dropped
    gc.collect()
    assert not wait_until_gone(pids, 3)


PARENT = """
import json, sys
from envs.vector import TextVectorEnv
vector = TextVectorEnv(2, 2, init=json.loads(sys.argv[1]), seed=0)
vector.reset(options={"indices": [0, 1]})
print(*vector.worker_pids, flush=True)
if sys.argv[2] == "play":
    vector.play([[4, 4], [4, 4]])
elif sys.argv[2] == "wait":
    input()
"""


@pytest.mark.parametrize(
    ("what", "do"), [("sleep", "play"), ("hold", "play"), ("stop", "play"), ("sleep", "wait"), ("sleep", "end")]
)
def test_no_orphans(init: Callable[..., dict[str, Any]], what: str, do: str) -> None:
    message = json.dumps(init("Trouble", {"what": what}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, message, do],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        if do != "end":
            assert all(map(is_running, pids))
            time.sleep(0.5)  # into the reward call
            parent.kill()
        parent.wait(10)
        assert not wait_until_gone(pids, 3)


def test_a_reward_that_prints(make_vector: Make, capfd: pytest.CaptureFixture[str]) -> None:
    vector = make_vector(1, 1, "prints")
    vector.reset()
    assert vector.play([[A, EOS]]).rewards.tolist() == [[1, 1]]
    out, err = capfd.readouterr()
    assert out == "" and err.count("printed by a reward") == err.count("written by a reward") == 2


def test_the_environment_of_workers(make_vector: Make) -> None:
    vector = make_vector(1, 1)
    (pid,) = vector.worker_pids
    assert os.getsid(pid) == pid
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    assert {"OMP_NUM_THREADS=1", "TOKENIZERS_PARALLELISM=false", "CUDA_VISIBLE_DEVICES="} <= set(environment)
