"""Draws docs/ranks.png, the picture of what is reduced where: python docs/draw_ranks.py."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

DATA, SEQUENCE, VOCABULARY, NOBODY = "#3b6fb6", "#3a8f5c", "#c9752d", "#8a8a8a"
RANKS = {
    "data ranks\nother sequences": DATA,
    "sequence ranks\nother columns": SEQUENCE,
    "vocabulary ranks\nother words": VOCABULARY,
}
PHASES = ["build", "build_batches", "forward: head", "forward: loss", "forward: value", "backward", "metrics.reduce"]


def draw_shares(axes: Axes) -> None:
    """Four sequences over two data and two sequence ranks, and the head over two vocabulary ranks."""
    axes.set(xlim=(-1.2, 25), ylim=(-0.9, 5.6), aspect="equal")
    axes.axis("off")
    for row, length in enumerate((11, 7, 9, 12)):
        for column in range(12):
            shade = {(0, 0): "#cfdff3", (0, 1): "#d5ebdc", (1, 0): "#9dbde4", (1, 1): "#a9d4b8"}[row // 2, column // 6]
            ignored = column < 2 or column >= length
            face = "white" if ignored else shade
            axes.add_patch(
                Rectangle(
                    (column + 0.5 * (column > 5), 3.6 - row - 0.5 * (row > 1)), 1, 1, fc=face, ec="#b0b0b0", lw=0.8
                )
            )
    for row, text in enumerate(("data\nrank 0", "data\nrank 1")):
        axes.text(-0.3, 3.6 - 2.5 * row, text, ha="right", va="center", color=DATA, fontsize=9)
    for column, text in enumerate(("sequence rank 0", "sequence rank 1")):
        axes.text(3 + 6.5 * column, 4.9, text, ha="center", color=SEQUENCE, fontsize=9)
    axes.text(
        6.25, -0.75, "tokens of a batch: white ones are prompt or padding", ha="center", fontsize=9, color="#555555"
    )
    axes.annotate("", (15.6, 2.1), (13.2, 2.1), arrowprops={"arrowstyle": "->", "color": "#555555"})
    axes.text(14.4, 2.4, "hidden\nstates", ha="center", fontsize=8, color="#555555")
    for part, text in enumerate(("vocabulary rank 0", "vocabulary rank 1")):
        low = 2.3 - 2.5 * part
        axes.add_patch(Rectangle((16, low), 4, 2.1, fc=("#f6dcc3", "#edbd91")[part], ec="#b0b0b0"))
        axes.text(20.3, low + 1.05, text, va="center", color=VOCABULARY, fontsize=9)
    axes.text(18, 4.6, "head weight [V, H]", ha="center", fontsize=9, color="#555555")


def box(axes: Axes, phase: int, ranks: tuple[float, float], text: str, colour: str) -> None:
    """One exchange of a phase, over the rows of ranks from the first to the last."""
    low, high = 2.08 - ranks[1], 2.92 - ranks[0]
    shape = FancyBboxPatch(
        (phase + 0.05, low),
        0.9,
        high - low,
        boxstyle="round,pad=0,rounding_size=0.05",
        fc=colour,
        ec="none",
        alpha=0.92,
    )
    axes.add_patch(shape)
    axes.text(
        phase + 0.5, (low + high) / 2, text, ha="center", va="center", fontsize=7.8, color="white", linespacing=1.25
    )


def draw_exchanges(axes: Axes) -> None:
    """Phases from left to right, a row for each kind of ranks, a box where they talk."""
    axes.set(xlim=(-1.25, 7), ylim=(-0.05, 3.5))
    axes.axis("off")
    for number, phase in enumerate(PHASES):
        axes.text(number + 0.5, 3.2, phase, ha="center", fontsize=9.5, family="monospace")
        axes.axvline(number, 0, 0.9, color="#dddddd", lw=0.8)
    for number, (name, colour) in enumerate(RANKS.items()):
        axes.text(-0.08, 2.5 - number, name, ha="right", va="center", fontsize=9, color=colour)
    boxes = [
        (0, (1, 1), "rows padded\nand cut:\nno exchange", NOBODY),
        (1, (0, 0.5), "ONE vector of sums:\nerrors,\nmicro-batches,\ntokens, sequences,\nweights", DATA),
        (1, (1.42, 1.0), "errors first;\ntokens of sequences", SEQUENCE),
        (2, (0, 1), "the weight is\ngathered by FSDP2,\ninside LMHead\n\nnone of ours", NOBODY),
        (2, (2, 2), "a maximum and a sum\nof each chunk, hidden\ngradient once", VOCABULARY),
        (3, (1, 1), "of each quantity of a\nsequence: its sum,\nand its gradient's", SEQUENCE),
        (4, (0, 1), "one sum:\nthe loss of the step\n\nnone with\nreduce_loss=False", DATA),
        (5, (0, 1), "gradients are\naveraged by the\nwrapper: FSDP2, DDP\n\nnone of ours", NOBODY),
        (6, (0, 1), "alike on all ranks?\n\nsums\n\nmaxima and minima", DATA),
    ]
    for phase, ranks, text, colour in boxes:
        box(axes, phase, ranks, text, colour)
    for phase, text in ((1, "not counted:\nthe same tokens"), (5, "eager mode: the\nhidden gradient here")):
        axes.text(phase + 0.5, 0.5, text, ha="center", va="center", fontsize=7.8, color=VOCABULARY)


def main() -> None:
    """Writes the picture beside this file."""
    figure, (shares, exchanges) = plt.subplots(2, 1, figsize=(14, 7.6), height_ratios=(1, 1.15))
    draw_shares(shares)
    draw_exchanges(exchanges)
    figure.tight_layout(h_pad=1.5)
    figure.savefig(Path(__file__).with_name("ranks.png"), dpi=100)


if __name__ == "__main__":
    main()
