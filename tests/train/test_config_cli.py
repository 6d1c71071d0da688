"""The command line: overrides, flags and the help."""

from pathlib import Path

import pytest

from train.config import Config, PPOAlg, load_config
from train.config_types import keys

FILE = str(Path(__file__).parent / "rl4lms" / "causal_ppo.yml")


def load(*options: str) -> Config:
    return load_config(["--config", FILE, *options])


def fault(*options: str) -> str:
    with pytest.raises(ValueError) as caught:
        load(*options)
    return str(caught.value)


@pytest.mark.parametrize("options", [["--env.n_envs=4"], ["--env.n_envs", "4"], ["--env.n_envs=2", "--env.n_envs=4"]])
def test_overrides_win_over_the_file_and_the_last_wins(options: list[str]) -> None:
    assert load(*options).env.n_envs == 4


def test_override_values_are_yaml() -> None:
    config = load("--alg.kl_div.target_kl=null", "--alg.args.learning_rate=1e-5", "--env.args.terminate_on_eos=false")
    assert isinstance(config.alg, PPOAlg)
    assert config.alg.kl_div.target_kl is None
    assert config.alg.args.learning_rate == 1e-5
    assert config.env.args.terminate_on_eos is False


def test_lists_and_sections_are_overridden_as_a_whole() -> None:
    config = load("--train_evaluation.metrics=[{id: dates}]", "--datapool={id: jsonl}", "--tracking.trackers=[]")
    assert [metric.id for metric in config.train_evaluation.metrics] == ["dates"]
    assert (config.datapool.id, config.datapool.args, config.tracking.trackers) == ("jsonl", {}, ())
    assert "is no section; set it as a whole" in fault("--train_evaluation.metrics.0.id=dates")


def test_free_keys_can_be_overridden_below_what_is_there_or_not() -> None:
    config = load("--reward_fn.args.label_ix=0", "--reward_fn.args.deep.er=[1, 2]", "--datapool.args.x", "-1")
    assert config.reward_fn is not None
    assert config.reward_fn.args["label_ix"] == 0 and config.reward_fn.args["deep"] == {"er": [1, 2]}
    assert config.datapool.args == {"seed": 42, "x": -1}


def test_values_with_equals_signs_and_spaces() -> None:
    assert load("--datapool.args.prompt='a = b: c'").datapool.args["prompt"] == "a = b: c"
    assert load("--datapool.args.prompt=").datapool.args["prompt"] is None


def test_digits_are_a_name_where_a_name_is_expected() -> None:
    assert load("--experiment_name=00123").tracking.experiment_name == "00123"


def test_an_override_repairs_a_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(Path(FILE).read_text().replace("target_kl: 0.1", "target_kl: 0.1,"))
    with pytest.raises(ValueError, match="stray comma"):
        load_config(["--config", str(path)])
    assert load_config(["--config", str(path), "--alg.kl_div.target_kl=0.1"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "--alg.args.lerning_rate=1",
            "command line, --alg.args.lerning_rate: alg.args.lerning_rate: unknown key; did you",
        ),
        ("--env.n_envs=0", "command line, --env.n_envs: env.n_envs: expected int >= 1, got 0. Environments per rank"),
        ("--env.n_envs=4,", "stray comma"),
        ("--env.n_envs={a: 1, a: 2}", "given twice"),
        ("--env.args=[", "command line, --env.args: not valid YAML"),
        ("--env.n_envs", "--env.n_envs needs a value"),
        ("--env.n_envs.x=1", "command line, --env.n_envs.x: env.n_envs is no section"),
        ("--tokenizer.model_name.x=1", "tokenizer.model_name is no section"),
        ("--learning_rate=1", "unknown option '--learning_rate'; did you mean --alg.args.learning_rate?"),
        ("--overwrit", "--overwrit needs a value"),
        ("--overwrit=1", "unknown option '--overwrit'; did you mean '--overwrite'?"),
        ("--overwrite=1", "--overwrite takes no value"),
        ("stray", "unexpected argument 'stray'"),
    ],
)
def test_faults(option: str, message: str) -> None:
    assert message in fault(option)


def test_flags() -> None:
    assert (load().run.resume, load().run.overwrite) == (None, False)
    assert load("--resume").run.resume == "auto"
    assert load("--resume", "--overwrite").run.overwrite
    assert load("--resume", "runs/a/checkpoints/4").run.resume == "runs/a/checkpoints/4"
    assert load("--resume=never").run.resume == "never"


def test_short_names_and_those_of_rl4lms() -> None:
    config = load("--output_dir", "a", "--project_name=b", "--experiment_name=c")
    assert (config.tracking.output_dir, config.tracking.project_name, config.tracking.experiment_name) == (
        "a",
        "b",
        "c",
    )
    assert load("--base_path_to_store_results=d").tracking.output_dir == "d"


def test_a_file_is_needed() -> None:
    with pytest.raises(ValueError, match="--config FILE is required"):
        load_config([])
    with pytest.raises(ValueError, match=r"nowhere\.yml: no such file"):
        load_config(["--config=nowhere.yml"])


def test_the_command_line_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["ppo.py", "--config", FILE, "--env.n_envs=3"])
    assert load_config().env.n_envs == 3


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_key_with_type_default_and_text(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        load_config([option])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for key in keys(Config):
        assert f"--{key.path}  ({key.kind}; {key.default})" in text
    assert "--alg.args.gamma  (float > 0 and <= 1; default 0.99)\n      Discount per token." in text
    assert "alg with id supervised:" in text and "SCRIPT --config FILE" in text and "run.config_path" not in text
    assert max(map(len, text.splitlines())) < 160


def test_help_of_a_script_is_of_its_own_keys(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for algorithm in ("grpo", "a2c"):
        with pytest.raises(SystemExit):
            load_config(["--help"], algorithm)
        shown[algorithm] = capsys.readouterr().out
        assert f"python -m train.{algorithm} --config FILE" in shown[algorithm]
        assert "--alg.args.n_steps " in shown[algorithm] and "--env.n_envs " in shown[algorithm]
    assert "--alg.args.clip_range " in shown["grpo"] and "--alg.args.clip_range " not in shown["a2c"]
    assert "--alg.args.gae_lambda  (float >= 0 and <= 1; default 1.0)" in shown["a2c"]
    assert "--alg.args.gae_lambda " not in shown["grpo"]
