"""Draw a run: its curves, and the same prompts answered before and after training.

    python -m tools.plot runs/quickstart/ppo [--out run.png]

Reads what is there of the run folder's metrics.jsonl, rollout_info.jsonl, {val,test}_split_metrics.jsonl and
epoch_*_{test,val}_split_predictions.json; a panel without data says so.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.run_files import describe, pairs, points, read_predictions, read_run

BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#d9731a", "#2d8a57", "#6b7280"
N_SAMPLES = 10


@dataclass(frozen=True)
class Line:
    """A curve: from which source, under which names (the first that is there), and how it is drawn."""

    source: str
    names: tuple[str, ...]
    label: str
    color: str
    marker: str = ""
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    lines: tuple[Line, ...]
    right: tuple[Line, ...] = ()
    right_unit: str = ""
    from_zero: bool = False


REWARD = ("rollout/reward", "rollout/reward_mean", "rollout_info/ep_rew")
KL = ("kl/ref", "kl/ref_mean", "rollout_info/kl_div_mean")
KL_COEF = ("kl/coef", "rollout_info/kl_coeff")
LENGTH = ("rollout/length", "rollout/length_mean", "rollout_info/ep_lens")
PERPLEXITY = ("fluency_metrics/reference_perplexity",)

PANELS = (
    Panel(
        "Reward",
        "mean per response",
        (
            Line("train", REWARD, "train (rollouts)", BLUE),
            Line("val", ("reward",), "validation", ORANGE, "o"),
            Line("test", ("reward",), "test", GREEN, "D", ""),
        ),
    ),
    Panel(
        "KL to the reference model",
        "nats per token",
        (Line("train", KL, "KL", BLUE),),
        (Line("train", KL_COEF, "KL coefficient", GREY, "", ":"),),
        "KL coefficient",
    ),
    Panel(
        "Response length",
        "tokens",
        (
            Line("train", LENGTH, "train (rollouts)", BLUE),
            Line("val", ("length",), "validation", ORANGE, "o"),
        ),
        from_zero=True,
    ),
    Panel(
        "Diversity and fluency (validation)",
        "distinct n-grams / n-grams",
        tuple(
            Line("val", (f"diversity_metrics/distinct-{n}",), f"distinct-{n}", color, "o")
            for n, color in ((1, BLUE), (2, GREEN), (3, ORANGE))
        ),
        (Line("val", PERPLEXITY, "perplexity under the reference", GREY, "s", ":"),),
        "perplexity",
        from_zero=True,
    ),
)


def draw_panel(ax: Any, panel: Panel, run: dict[str, list[dict[str, Any]]]) -> None:
    ax.set_title(panel.title, fontsize=11, fontweight="bold", loc="left")
    ax.set_xlabel("iteration", fontsize=9)
    ax.set_ylabel(panel.unit, fontsize=9)
    handles = draw_lines(ax, panel.lines, run)
    if panel.from_zero and handles:
        start_at_zero(ax)
    if not handles:
        ax.set_ylabel("")
        ax.set_yticks([])
    if any(points(run[line.source], line.names) for line in panel.right):
        twin = ax.twinx()
        twin.set_ylabel(panel.right_unit, fontsize=9, color=GREY)
        twin.tick_params(labelsize=8, colors=GREY)
        twin.spines["top"].set_visible(False)
        handles += draw_lines(twin, panel.right, run)
        start_at_zero(twin)
    if handles:
        ax.legend(
            handles=handles,
            fontsize=8,
            frameon=False,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.2),
            ncols=len(handles),
        )
    else:
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color=GREY)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def start_at_zero(ax: Any) -> None:
    """So that noise does not look like a trend."""
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0), high + 0.1 * (high - min(low, 0)))


def draw_lines(ax: Any, lines: Iterable[Line], run: dict[str, list[dict[str, Any]]]) -> list[Any]:
    handles = []
    for line in lines:
        if data := points(run[line.source], line.names):
            x, y = zip(*data, strict=True)
            handles += ax.plot(
                x,
                y,
                label=line.label,
                color=line.color,
                marker=line.marker,
                markersize=4,
                linestyle=line.style,
                linewidth=1.6,
            )
    return handles


def short(text: str, width: int, lines: int = 2) -> str:
    """On at most `lines` lines of `width` characters."""
    text = " ".join(str(text).split()) or "–"
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))


def draw_samples(ax: Any, folder: Path) -> None:
    """A table: prompt, response and reward before, response and reward after."""
    split, predictions = read_predictions(folder)
    shown = pairs(predictions, N_SAMPLES)
    ax.axis("off")
    if not shown:
        ax.text(0.5, 0.9, "no predictions in this folder", ha="center", color=GREY)
        return
    first, last = predictions[0][0], predictions[-1][0]
    ax.set_title(
        f"The same prompts of the {split} split before and after training", fontsize=11, fontweight="bold", loc="left"
    )
    columns = ((0.0, "prompt"), (0.23, f"response at iteration {first}"), (0.615, f"response at iteration {last}"))
    scores = ((0.565, "reward"), (0.95, "reward"))
    height = 1.0 / (N_SAMPLES + 1)

    def write(x: float, y: float, text: str, color: str = "black") -> None:
        # A dollar sign in a response is no formula.
        ax.text(x, y, text, fontsize=9, va="center", color=color, parse_math=False)

    for x, text in (*columns, *scores):
        write(x, 1 - height / 2, text, GREY)
    for i, (before, after) in enumerate(shown, start=1):
        y = 1 - height * (i + 0.5)
        ax.axhline(1 - height * i, color="#d1d5db", linewidth=0.8)
        write(columns[0][0], y, short(before.get("prompt_text", ""), 34))
        for (x, _), (x_reward, _), row in zip(columns[1:], scores, (before, after), strict=True):
            write(x, y, short(row.get("generated_text", ""), 52))
            reward = row.get("reward")
            write(x_reward, y, f"{reward:.2f}" if isinstance(reward, int | float) else "–", BLUE)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)


def plot(folder: Path, out: Path) -> None:
    """Writes the picture. Raises ValueError if the folder has nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    run = read_run(folder)
    if not any(run.values()) and not read_predictions(folder)[1]:
        raise ValueError(f"{folder} has no metrics and no predictions: is it a run's folder?")
    figure = plt.figure(figsize=(13, 15), dpi=110)
    grid = figure.add_gridspec(
        3, 2, height_ratios=(1, 1, 2.3), hspace=0.42, wspace=0.26, left=0.06, right=0.94, top=0.92, bottom=0.01
    )
    for i, panel in enumerate(PANELS):
        draw_panel(figure.add_subplot(grid[i // 2, i % 2]), panel, run)
    draw_samples(figure.add_subplot(grid[2, :]), folder)
    figure.suptitle(str(folder)[-100:], fontsize=14, fontweight="bold", x=0.06, y=0.978, ha="left", parse_math=False)
    figure.text(
        0.06, 0.958, short(describe(folder), 175), fontsize=9.5, color=GREY, ha="left", va="center", parse_math=False
    )
    figure.savefig(out)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.plot", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the run's folder")
    parser.add_argument("--out", type=Path, help="the picture (run.png in the run's folder)")
    args = parser.parse_args(argv)
    out = args.out or args.folder / "run.png"
    if not args.folder.is_dir():
        parser.error(f"there is no folder {args.folder}")
    try:
        plot(args.folder, out)
    except ValueError as error:
        parser.error(str(error))
    print(out)


if __name__ == "__main__":
    sys.exit(main())
