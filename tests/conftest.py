"""Settings of all tests, made before any library reads them; processes that tests start inherit them."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_VERBOSITY="error",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    ACCELERATE_USE_CPU="true",
)
sys.path.append(os.path.dirname(__file__))  # for helpers and user_code; workers inherit it


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """models(family): the folder of a tiny model, randomly initialised, whose words are numbers; made once."""
    made: dict[str, Path] = {}

    def make(family: str = "gpt2") -> Path:
        if family not in made:
            from tools.make_tiny_model import build_model, numbers_tokenizer, save, wrap

            tokenizer = wrap(numbers_tokenizer(29), 32, family)
            model = build_model(family, tokenizer, layers=1, hidden=32, heads=2, positions=32, seed=0)
            made[family] = tmp_path_factory.mktemp("models") / family
            save(made[family], model, tokenizer)
        return made[family]

    return make
