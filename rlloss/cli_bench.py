"""`rlloss bench`: its options, its progress bar and its files."""

import argparse
import sys
from pathlib import Path
from typing import Any

from rlloss.bench.measure import Line, Plan, busy_neighbour, measure_errors, measure_peak, measure_times
from rlloss.bench.problem import DTYPES, Shape, exact_gradients, make_problem
from rlloss.bench.report import make_table, write_json, write_picture
from rlloss.bench.subjects import Subject, subjects
from rlloss.errors import ConfigError


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the verb."""
    default = Shape()
    parser.add_argument("--tokens", type=int, default=default.tokens, help="N, tokens of the batch")
    parser.add_argument("--hidden", type=int, default=default.hidden, help="H, width of the hidden states")
    parser.add_argument("--vocabulary", type=int, default=default.vocabulary, help="V")
    parser.add_argument("--chunk-size", type=int, default=default.chunk_size, help="tokens of a chunk")
    parser.add_argument("--dtype", choices=[*DTYPES], default=default.dtype)
    parser.add_argument("--batch", choices=["dense", "rl"], default=default.batch, help="every token, or as in RL")
    parser.add_argument("--device", default=default.device)
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--pairs", type=int, default=Plan.pairs, help="quiet pairs of each subject")
    parser.add_argument("--most", type=int, default=Plan.most, help="pairs after which a subject is given up")
    parser.add_argument("--others", type=float, default=Plan.others_allowed, help="processor share others may use")
    parser.add_argument("--busy-neighbour", action="store_true", help="keep one processor busy meanwhile")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="subjects whose name contains it")
    parser.add_argument("--no-errors", action="store_true", help="leave the comparison with float64 out")
    parser.add_argument("--output", type=Path, default=Path("runs/bench"), help="folder of bench.json and bench.png")


def run_bench(options: argparse.Namespace) -> int:
    """`rlloss bench`: measures, prints the table, writes `bench.json` and `bench.png`."""
    import torch
    from rich.console import Console

    if options.threads:
        torch.set_num_threads(options.threads)
    shape = Shape(
        options.tokens,
        options.hidden,
        options.vocabulary,
        options.chunk_size,
        options.dtype,
        options.batch,
        options.device,
    )
    problem = make_problem(shape)
    found, missing = subjects(problem)
    chosen = [one for one in found if not options.only or any(text in one.name for text in options.only)]
    if not chosen:
        raise ConfigError(f"--only {options.only} fits none of: {', '.join(one.name for one in found)}.")
    exact = None if options.no_errors else exact_gradients(problem)
    plan = Plan(options.pairs, options.most, options.others)
    lines = _measure(chosen, shape, plan, exact, options.busy_neighbour)
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(make_table(shape, lines))
    for name, reason in missing.items():
        console.print(f"not measured: {name} ({reason.splitlines()[0]})", highlight=False)
    options.output.mkdir(parents=True, exist_ok=True)
    write_json(options.output / "bench.json", shape, lines, missing)
    write_picture(options.output / "bench.png", shape, lines)
    console.print(f"Written to {options.output}/bench.json and bench.png", highlight=False)
    return 0


def _measure(chosen: list[Subject], shape: Shape, plan: Plan, exact: Any, neighbour: bool) -> list[Line]:
    from rich.console import Console
    from rich.progress import Progress

    lines = [Line(subject.name) for subject in chosen]
    console = Console(stderr=True)
    with Progress(console=console) as progress, busy_neighbour(neighbour) as pid:
        task = progress.add_task("measuring", total=len(chosen) * plan.pairs)
        for number, (subject, line) in enumerate(zip(chosen, lines, strict=True)):

            def show(line: Line = line, done: int = number * plan.pairs) -> None:
                noisy = f", {line.noisy} of {plan.most} noisy" if line.noisy else ""
                progress.update(task, description=f"{line.name}{noisy}", completed=done + len(line.ratios))

            show()
            if exact is not None:
                measure_errors(subject, line, exact)
            line.peak_mib = measure_peak(subject, shape)
            measure_times(subject, line, shape, plan, pid, show)
            if not console.is_terminal:
                console.print(f"{line.name}: {len(line.ratios)} pairs, {line.noisy} noisy", highlight=False)
    return lines
