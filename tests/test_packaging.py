"""The wheel holds the library alone, says what it is, and works where no extra is installed."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from versions import VERSIONS

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "rlloss", "tests", "examples", "configs", "docs")
EXTRAS = ("transformers", "reasoning_gym", "tensorboard", "matplotlib", "rich", "trl", "verl", "xtuner", "datasets")

ONLY_THE_BASE = f"""
import importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ImportError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Refuse())
"""

STEP = """
import torch
import rlloss
from rlloss import GRPOLossConfig, GRPOLossContext

assert {folder!r} in rlloss.__file__, rlloss.__file__
torch.manual_seed(0)
labels = torch.tensor([[-100, 7, 3, 9, 1, -100], [-100, -100, 4, 4, 2, 8]])
batch = dict(shifted_labels=labels, advantages=torch.tensor([1.0, -1.0]), old_logprobs=torch.full((2, 6), -3.9))
hidden, weight = torch.randn(2, 6, 8), torch.randn(50, 8)
found = {{}}
for mode in ("eager", "chunk", "liger"):
    config = GRPOLossConfig(mode=mode)
    (context,) = GRPOLossContext.build_batches([config.build(batch)])
    leaf = weight.clone().requires_grad_()
    loss = context.forward(hidden, leaf).loss
    loss.backward()
    found[mode] = (loss.detach(), leaf.grad)
for mode in ("chunk", "liger"):
    torch.testing.assert_close(found[mode], found["eager"])
"""


def test_the_versions_that_were_tried_begin_where_the_ranges_do_and_stand_in_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = dict(need.partition(",")[0].split(">=") for need in project["dependencies"])
    table = (ROOT / "CONTRIBUTING.md").read_text()
    for row, wanted in VERSIONS.items():
        numbers = dict(package.split("==") for package in wanted)
        (line,) = re.findall(rf"^\| {row} .*$", table, re.M)
        cells = [cell.strip() for cell in line.split("|")[2:6]]
        assert cells == [numbers[name] for name in ("torch", "numpy", "pydantic", "liger-kernel")]
        assert numbers.keys() == lowest.keys()
    assert all(dict(p.split("==") for p in VERSIONS["oldest"])[name].startswith(low) for name, low in lowest.items())


class Installed:
    """A folder that the library was installed into, and Python that sees it, torch, pydantic and Liger alone."""

    def __init__(self, folder: Path, site: Path) -> None:
        site.mkdir()
        (site / "sitecustomize.py").write_text(ONLY_THE_BASE)
        self.folder, self.site = folder, site

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.site), str(self.folder)])
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.site, env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip


def pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory)


def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built out of a copy, so that nothing is left in the tree."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, folder / name)
    out = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out), str(folder))
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed") / "target"
    pip("install", "--no-deps", "--no-index", "--target", str(folder), str(wheel))
    return Installed(folder, tmp_path_factory.mktemp("elsewhere") / "site")


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(ROOT, tmp_path_factory.mktemp("elsewhere") / "site")


@pytest.mark.slow
def test_the_wheel_holds_the_library_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"rlloss", "-".join(wheel.name.split("-")[:2]) + ".dist-info"}
    assert "rlloss/py.typed" in names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "rlloss").rglob("*.py")}
    assert modules <= set(names)
    assert any(name.startswith("rlloss/heads/csrc/_native") for name in names) == (shutil.which("cc") is not None)
    assert not [name for name in names if name.endswith((".pyc", ".png")) or "test" in Path(name).name]


@pytest.mark.slow
def test_without_a_compiler_it_is_installed_and_works(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    made = build(tmp_path_factory)
    assert not [name for name in zipfile.ZipFile(made).namelist() if name.endswith(".so")]
    folder = tmp_path_factory.mktemp("without") / "target"
    pip("install", "--no-deps", "--no-index", "--target", str(folder), str(made))
    found = Installed(folder, tmp_path_factory.mktemp("elsewhere") / "site")
    code = "from rlloss.heads import native\nassert not native.compiled()\n" + STEP.format(folder=str(folder))
    done = found.run("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_metadata_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    meta: Message = email.message_from_bytes(archive.read(name))
    assert meta["Name"] == "rlloss"
    assert meta["License-Expression"] == "Apache-2.0"
    assert meta["Requires-Python"] == ">=3.11"
    assert meta["Description-Content-Type"] == "text/markdown"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3"} <= set(meta.get_all("Classifier") or [])
    assert {"train", "trl"} <= set(meta.get_all("Provides-Extra") or [])
    base = [need for need in meta.get_all("Requires-Dist") or [] if "extra ==" not in need]
    names = sorted(need.partition("<")[0].partition(">")[0] for need in base)
    assert names == ["liger-kernel", "numpy", "pydantic", "torch"]  # numpy: torch's import warns where it is missing
    assert any(entry.endswith("licenses/LICENSE") for entry in archive.namelist())


@pytest.mark.slow
def test_the_installed_library_works_without_extras(installed: Installed) -> None:
    done = installed.run("-c", STEP.format(folder=str(installed.folder)))
    assert done.returncode == 0 and not done.stderr, done.stderr
    listed = installed.run("-m", "rlloss", "list")
    assert listed.returncode == 0 and "gspo" in listed.stdout, listed.stderr
    config = installed.site / "mine.py"
    config.write_text("from rlloss import GRPOLossConfig\nconfig = GRPOLossConfig(mode='chunk')\n")
    checked = installed.run("-m", "rlloss", "check", str(config))
    assert checked.returncode == 0 and "FAIL" not in checked.stdout, checked.stdout + checked.stderr


MISSING = """
import contextlib, importlib, io, sys
from rlloss.cli import main
from rlloss.errors import BackendUnavailableError

def said(call, *arguments):
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        try:
            return str(call(*arguments)) + " " + errors.getvalue().strip()
        except BackendUnavailableError as error:
            return str(error)

configs = sys.argv[1]
print(said(main, ["train", configs + "/grpo_arithmetic.py"]))
print(said(main, ["plot"]))
print(said(importlib.import_module, "rlloss.compat.trl"))
print(said(importlib.import_module, "rlloss.compat.xtuner.inside"))
print(said(importlib.import_module("rlloss.compat.verl_registry").register_in_verl))
assert main(["show", configs + "/ppo_arithmetic.py"]) == 0
"""

WORDS = ("rlloss[train]", "rlloss[train]", "rlloss[trl]", "use rlloss.compat.xtuner", "pip install verl")


def test_a_missing_extra_is_named_and_what_needs_none_works(in_place: Installed) -> None:
    done = in_place.run("-c", MISSING, str(ROOT / "configs"))
    assert done.returncode == 0, done.stderr
    for line, words in zip(done.stdout.splitlines(), WORDS, strict=False):
        assert words in line, done.stdout
