"""Names in configs."""

from pathlib import Path
from typing import Any

import pytest
import user_rewards

from envs import registry
from envs.metrics import METRICS
from envs.rewards import REWARDS
from envs.tasks import TASKS

TABLE = {"batched": "user_rewards:Batched", "stepwise": "user_rewards:stepwise", "gone": "user_rewards:gone"}


def test_name_and_path() -> None:
    assert registry.resolve("batched", TABLE, "reward") is user_rewards.Batched
    assert registry.resolve("user_rewards:token_a", TABLE, "reward") is user_rewards.token_a
    assert registry.resolve("user_rewards:Returns.values", TABLE, "reward") is user_rewards.Returns.values


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bached", r"unknown reward 'bached': did you mean 'batched'"),
        ("xyz", r"unknown reward 'xyz': known are \['batched', 'gone', 'stepwise'\]"),
        ("user_rewards:nothing", "reward 'user_rewards:nothing'.*no attribute 'nothing'"),
        ("gone", "reward 'gone'.*no attribute 'gone'"),
        ("no_such_module.sub:x", "there is no module 'no_such_module'"),
        ("envs.no_such_module:x", "there is no module 'envs.no_such_module'"),
    ],
)
def test_unknown(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.resolve(name, TABLE, "reward")


def test_the_working_directory_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_a_user.py").write_text("import no_such_library\n")
    (tmp_path / "other_module_of_a_user.py").write_text("value = 3\n")
    monkeypatch.chdir(tmp_path)
    assert registry.resolve("other_module_of_a_user:value", {}, "task") == 3
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):  # its own message says it best
        registry.resolve("module_of_a_user:x", {}, "task")


def test_build_a_class() -> None:
    assert registry.build("batched", {"scale": 2.0}, TABLE, "reward").scale == 2.0
    assert registry.build("batched", None, TABLE, "reward").scale == 1 / 3
    with pytest.raises(ValueError, match=r"reward 'batched' has no argument 'scael'; it has \['scale'\]"):
        registry.build("batched", {"scael": 2.0}, TABLE, "reward")
    with pytest.raises(ValueError, match="reward 'user_rewards:NeedsArgument' needs the argument 'needed'"):
        registry.build("user_rewards:NeedsArgument", {}, TABLE, "reward")


def test_build_a_function() -> None:
    assert registry.build("stepwise", {}, TABLE, "reward") is user_rewards.stepwise
    scaled = registry.build("user_rewards:scaled", {"scale": 2.0, "shift": 1.0}, TABLE, "reward")
    assert scaled(None, 0) == 3.0
    with pytest.raises(ValueError, match="no argument 'factor'"):
        registry.build("user_rewards:scaled", {"factor": 2.0}, TABLE, "reward")
    with pytest.raises(ValueError, match="needs the argument 'scale'"):
        registry.build("user_rewards:scaled", {}, TABLE, "reward", given=("episode", "t"))
    with pytest.raises(ValueError, match="is a dict, not"):
        registry.build("user_rewards:Returns.values", {}, TABLE, "reward")


@pytest.mark.parametrize("table", [REWARDS, TASKS, METRICS])
def test_every_registered_name_exists(table: dict[str, Any]) -> None:
    for name in table:
        assert callable(registry.resolve(name, table, "entry"))
