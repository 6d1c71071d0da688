"""The table of algorithms and strategies in the README."""

import json
from pathlib import Path

import pytest

from tools.strategy_table import main


def test_the_table_says_what_was_found_and_replaces_the_old_one(tmp_path: Path) -> None:
    path, readme = tmp_path / "results.json", tmp_path / "README.md"
    found = {"ppo": {"ddp": {"gpt2": "agrees", "t5": "agrees"}, "fsdp2": {"gpt2": "agrees", "t5": "why not"}},
             "a2c": {"ddp": {"gpt2": "because"}, "zero1": {"gpt2": "why not"}}}  # fmt: skip
    path.write_text(json.dumps(found))
    begin, end = "<!-- made by tools/strategy_table.py: begin -->\n", "<!-- made by tools/strategy_table.py: end -->\n"
    readme.write_text(f"before\n{begin}old\n{end}after\n")
    main([str(path), "--readme", str(readme)])
    table = readme.read_text().removeprefix(f"before\n{begin}").removesuffix(f"{end}after\n").splitlines()
    assert table[0].startswith("| | DDP | ZeRO-0 |") and table[0].count("|") == table[1].count("|") == 9
    assert table[2] == "| `ppo` | gpt2, t5 | – | – | – | – | gpt2, t5 no [1] | – |"
    assert table[3] == "| `a2c` | gpt2 no [2] | – | gpt2 no [1] | – | – | – | – |"
    assert table[4:] == ["", "1. why not", "2. because"]
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="lacks the lines"):
        main([str(path), "--readme", str(readme)])
