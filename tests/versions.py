"""Runs the fast tests of numbers with the oldest and the newest dependencies that pyproject.toml allows.

    make versions                     # every row of VERSIONS, each in a virtual environment of its own
    make versions ONLY=oldest
    make versions ONLY=newest PYTHON3=python3.13

An environment takes several GB where PyPI's torch is a CUDA build. They stand in `.venv-versions/` and are kept.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSIONS: dict[str, tuple[str, ...]] = {
    "oldest": ("torch==2.6.0", "pydantic==2.7.0", "liger-kernel==0.8.5", "numpy==1.26.4"),
    "newest": ("torch==2.15.0", "pydantic==2.14.4", "liger-kernel==0.8.5", "numpy==2.4.6"),
}
"""What was tried, and stands in CONTRIBUTING.md."""

TOOLS = ("pytest", "hypothesis")
TESTS = ("test_contract.py", "test_parity.py", "test_golden.py", "test_head_limits.py", "test_head_tiles.py")


def main() -> int:
    """Makes each environment, installs, runs the tests; status 1 when one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=VERSIONS, help="one row")
    only = parser.parse_args().only
    failed = [name for name, wanted in VERSIONS.items() if only in (None, name) and not passes(name, wanted)]
    sys.stdout.write(f"failed: {', '.join(failed) or 'none'}\n")
    return int(bool(failed))


def passes(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether the tests pass in the environment of one row."""
    number = "{}.{}".format(*sys.version_info)
    folder = ROOT / ".venv-versions" / f"{name}-{number}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted, *TOOLS], check=True)
    sys.stdout.write(f"{name}: {', '.join(wanted)}, Python {sys.version.partition(' ')[0]}\n")
    sys.stdout.flush()
    tests = [str(ROOT / "tests" / test) for test in TESTS]
    options = ["-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return not subprocess.run([python, "-m", "pytest", *options, *tests], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
