"""The command line: `rlloss VERB ...`, one function for each verb."""

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rlloss.cli_bench import add_bench_options, run_bench
from rlloss.cli_check import run_check
from rlloss.cli_list import run_list
from rlloss.cli_plot import add_plot_options, run_plot
from rlloss.cli_report import add_report_options, run_report
from rlloss.config_file import load_config
from rlloss.errors import ConfigError, RLLossError, nearest, require_known

if TYPE_CHECKING:
    from rlloss.training.config import TrainConfig
    from rlloss.training.run import Report

Verb = Callable[[argparse.Namespace], int]
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of rlloss: one line, with the nearest word that fits."""

    def error(self, message: str) -> NoReturn:
        """Raises what argparse found."""
        raise ConfigError(f"{message}. See {self.prog} --help.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None:
            require_known(str(action.metavar or action.dest).lower(), value, action.choices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit status; a user's mistake is one line on stderr and status 2."""
    try:
        options, unknown = make_parser().parse_known_args(arguments)
        if unknown:
            known = [f"--{name.replace('_', '-')}" for name in vars(options)]
            raise ConfigError(f"unrecognized argument {unknown[0]!r}.{nearest(unknown[0], known)}")
        verb: Verb = options.verb
        return verb(options)
    except RLLossError as error:
        sys.stderr.write(f"rlloss: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("rlloss: stopped at once; of a training run the last checkpoint is left\n")
        return INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all verbs."""
    parser = Parser(prog="rlloss", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    train = _verb(verbs, "train", run_train, "train as a config file says")
    _add_config(train)
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint, bit for bit")
    train.add_argument("--output", metavar="DIR", help="folder of the run (default: runs/NAME, numbered)")
    _add_config(_verb(verbs, "show", run_show, "print the resolved config as JSON"))
    _verb(verbs, "list", run_list, "list policy losses, reductions, KL kinds and modes")
    check = _verb(verbs, "check", run_check, "try every loss of a config file on random data")
    _add_config(check)
    check.add_argument("--seed", type=int, default=0, help="seed of the random data")
    add_bench_options(_verb(verbs, "bench", run_bench, "time, memory and accuracy of the modes and of installed peers"))
    add_plot_options(_verb(verbs, "plot", run_plot, "draw loss and gradient of policy losses over the ratio"))
    add_report_options(_verb(verbs, "report", run_report, "make one HTML page of a run"))
    return parser


def run_train(options: argparse.Namespace) -> int:
    """`rlloss train CONFIG`: runs every phase, then reports."""
    from rlloss.training.extras import require

    console = require("rich.console").Console()
    config = _load(options)
    output = output_folder(options.config, options.output, options.resume)
    from rlloss.training.ranks import is_main, ranks_of_torchrun
    from rlloss.training.run import Run

    with ranks_of_torchrun(config.device, config.rank_timeout):
        report = Run(config, output, console if is_main() else None).train(resume=options.resume)
        speaks = is_main()
    if not speaks:
        return 0 if report.finished else INTERRUPTED
    if not report.finished:
        console.print(
            f"Saved after step {report.step}. Resume with:\n  {resume_command(options, output)}", soft_wrap=True
        )
        return INTERRUPTED
    _print_report(console, report)
    return 0


def run_show(options: argparse.Namespace) -> int:
    """`rlloss show CONFIG`: prints the config with all defaults and overrides."""
    sys.stdout.write(json.dumps(_load(options).model_dump(mode="json"), indent=2) + "\n")
    return 0


def output_folder(config: str, output: str | None, resume: bool) -> Path:
    """Returns the folder of a run: the one that is given, or `runs/NAME`, numbered from the second run on.

    Args:
        config: Path of the config file, whose name names the run.
        output: The folder, where the user gave one.
        resume: Take the newest run instead of a fresh folder.
    """
    if output is not None:
        return Path(output)
    stem = Path(config).stem
    number = 1
    while _numbered(stem, number).exists():
        number += 1
    if not resume:
        return _numbered(stem, number)
    if number == 1:
        raise ConfigError(f"--resume: there is no run in {_numbered(stem, 1)}. Give its folder with --output DIR.")
    return _numbered(stem, number - 1)


def resume_command(options: argparse.Namespace, output: Path) -> str:
    """Returns the command that resumes a run, as a shell takes it."""
    settings = [word for assignment in options.set for word in ("--set", assignment)]
    return shlex.join([*launcher(), "train", options.config, *settings, "--output", str(output), "--resume"])


def launcher() -> list[str]:
    """Returns the words that start this process again, on as many ranks."""
    world, here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world == "1":
        return _program("rlloss", "rlloss")
    ranks = ["--nproc-per-node", world] if here == world else ["..."]
    return [*_program("torchrun", "torch.distributed.run"), *ranks, "-m", "rlloss"]


def _program(name: str, module: str) -> list[str]:
    """Returns the words that start a program: its name, or this Python with a module where a shell does not find it."""
    if shutil.which(name):
        return [name]
    # Not resolved: the link in a virtual environment is what makes it one.
    python = Path(sys.executable)
    return [str(python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python), "-m", module]


def _numbered(stem: str, number: int) -> Path:
    return Path("runs") / (stem if number == 1 else f"{stem}-{number}")


def _load(options: argparse.Namespace) -> "TrainConfig":
    from rlloss.training.config import TrainConfig

    return load_config(options.config, TrainConfig, options.set)


def _verb(verbs: Any, name: str, run: Verb, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.set_defaults(verb=run)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="Python file that defines `config`")
    parser.add_argument(
        "--set", metavar="A.B=C", action="append", default=[], help="set a field of the config; may be repeated"
    )


def _print_report(console: Any, report: "Report") -> None:
    names = {"start": "at the start", "supervised": "after the warm start", "grpo": "after GRPO", "ppo": "after PPO"}
    console.print(f"Greedy exact match on {report.questions} held-out questions:", highlight=False)
    for phase, exact in report.heldout.items():
        seconds = f"{report.seconds[phase]:6.1f} s" if phase in report.seconds else ""
        console.print(f"  {names[phase]:<22}{exact:.3f}  {seconds}", highlight=False)
    console.print(
        f"Metrics, curves, checkpoints and the policy are in {report.output}", highlight=False, soft_wrap=True
    )
