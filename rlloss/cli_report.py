"""`rlloss report`: one HTML page of a run."""

import argparse
import os
import sys
import webbrowser
from pathlib import Path

from rlloss.errors import ConfigError
from rlloss.report.data import read_run
from rlloss.report.page import page


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `rlloss report`."""
    parser.add_argument("run", metavar="RUN", help="folder of a run; it may still be going")
    parser.add_argument("--output", metavar="FILE", help="the page (default: RUN/report.html)")
    parser.add_argument("--open", choices=("yes", "no"), help="open it in a browser (default: yes at a desktop)")


def run_report(options: argparse.Namespace) -> int:
    """`rlloss report RUN`: writes the page and says where."""
    folder = Path(options.run)
    path = write_report(folder, folder / "report.html" if options.output is None else Path(options.output))
    sys.stdout.write(f"{path}\n")
    if options.open == "yes" or (options.open is None and _at_a_desktop()):
        webbrowser.open(path.resolve().as_uri())
    return 0


def write_report(folder: Path, output: Path) -> Path:
    """Writes the page of a run, and returns where.

    Args:
        folder: Folder of the run.
        output: The file; its folder is made when it is missing.

    Raises:
        ConfigError: The folder holds no run, or the file cannot be written.
    """
    text = page(read_run(folder))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror}. Give another file.") from error
    return output


def _at_a_desktop() -> bool:
    display = sys.platform in ("darwin", "win32") or any(os.environ.get(n) for n in ("DISPLAY", "WAYLAND_DISPLAY"))
    return display and sys.stdout.isatty()
