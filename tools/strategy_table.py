"""The README's table of algorithms and parallel strategies, from what tests/distributed/test_strategies_table.py found:

STRATEGY_RESULTS=runs/strategies.json python -m pytest tests/distributed/test_strategies_table.py
python -m tools.strategy_table runs/strategies.json
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

BEGIN = "<!-- made by tools/strategy_table.py: begin -->\n"
END = "<!-- made by tools/strategy_table.py: end -->\n"
README = Path(__file__).resolve().parents[1] / "README.md"
HEADS = {
    "ddp": "DDP",
    "zero0": "ZeRO-0",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp2": "FSDP2",
    "tensor_parallel": "tensor parallel",
}
Results = Mapping[str, Mapping[str, Mapping[str, str]]]
"""{algorithm: {strategy: {model family: "agrees", or the reason of a refusal}}}"""


def render(results: Results) -> str:
    """The table in Markdown, and below it the reasons of refusals, each once."""
    notes: dict[str, int] = {}
    lines = ["| | " + " | ".join(HEADS.values()) + " |", "|---" * (len(HEADS) + 1) + "|"]
    for algorithm, by_strategy in results.items():
        cells = [cell(by_strategy.get(strategy, {}), notes) for strategy in HEADS]
        lines.append(f"| `{algorithm}` | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {reason}" for reason, number in notes.items())] if notes else []
    return "\n".join(lines) + "\n"


def cell(outcomes: Mapping[str, str], notes: dict[str, int]) -> str:
    """The families that agree with one process, and the numbers of the reasons why others were refused."""
    agreeing = [family for family, outcome in outcomes.items() if outcome == "agrees"]
    refused = [f"{family} no [{notes.setdefault(outcome, len(notes) + 1)}]" for family, outcome in outcomes.items()
               if outcome != "agrees"]  # fmt: skip
    return ", ".join([*agreeing, *refused]) or "–"


def section(text: str) -> str:
    """What stands between the markers. Raises ValueError if they are not there."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the file lacks the lines {BEGIN.strip()} and {END.strip()}")
    return text.split(BEGIN)[1].split(END)[0]


def main(argv: list[str] | None = None) -> None:
    """Writes the table into the README."""
    parser = argparse.ArgumentParser(prog="python -m tools.strategy_table", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="the file that the test has left")
    parser.add_argument("--readme", type=Path, default=README)
    args = parser.parse_args(argv)
    text = args.readme.read_text("utf-8")
    table = render(json.loads(args.results.read_text("utf-8")))
    args.readme.write_text(text.replace(BEGIN + section(text) + END, BEGIN + table + END), "utf-8")


if __name__ == "__main__":
    main()
