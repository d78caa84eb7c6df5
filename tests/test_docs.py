"""Every piece of Python in README, docs and docstrings runs, and so do the examples; every link leads somewhere."""

import doctest
import importlib
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

import rlloss
from rlloss import BaseLossConfig, GRPOLossConfig, policy_loss_names, unregister_policy_loss
from rlloss.doctor import check_loss
from rlloss.errors import BackendUnavailableError

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *ROOT.glob("C*.md")]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(autouse=True)
def _forget_registered_losses():
    """Pages register losses under the same names; each starts from the built-in ones."""
    before = set(policy_loss_names())
    yield
    for name in set(policy_loss_names()) - before:
        unregister_policy_loss(name)


def blocks_of(page: Path, peer: str = "") -> list[str]:
    """The Python of a page, of one peer or of none."""
    found = re.findall(r"^```python(?: needs=(\w+))?\n(.*?)^```", page.read_text(), re.S | re.M)
    return [block for needs, block in found if needs == peer]


def run(page: Path, blocks: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Runs blocks in one namespace; a line `print(...)  # text` has to print that text.

    No block writes a name that its library warns of as an old one.
    """
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        capsys.readouterr()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FutureWarning)
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)
        old = {word for warning in caught for word in re.findall(r"`(\w+)`[^`]*deprecated", str(warning.message))}
        assert not [word for word in old if re.search(rf"\b{word}\b", block)]
        expected = re.findall(r"^print\(.*\)  # (.+)$", block, re.M)
        if expected:
            assert capsys.readouterr().out.splitlines() == expected


PEERS = [(page, peer) for page in PAGES for peer in sorted(set(re.findall(r"needs=(\w+)$", page.read_text(), re.M)))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_a_page_runs_from_top_to_bottom(page, capsys):
    run(page, blocks_of(page), capsys)


@pytest.mark.parametrize(("page", "peer"), PEERS, ids=[f"{page.name}-{peer}" for page, peer in PEERS])
def test_python_of_a_page_runs_beside_the_real_peer(page, peer, capsys, tmp_path, monkeypatch):
    try:
        importlib.import_module(peer)
    except ImportError:
        pytest.skip(f"{peer} is not installed")
    monkeypatch.chdir(tmp_path)
    run(page, blocks_of(page, peer), capsys)


def test_the_blocks_for_xtuner_put_the_model_where_the_batch_goes(monkeypatch):
    """XTuner's `build` moves a batch to the accelerator; a page whose model stays behind fails for all who have one."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    page = ROOT / "docs" / "migrating.md"
    blocks = [block for block in blocks_of(page, "xtuner") + blocks_of(page) if "xtuner" in block]
    assert len(blocks) == 2
    for block in blocks:
        inputs = "".join(re.findall(r"^import torch\n|^(?:device|hidden_states|head_weight) = .*\n", block, re.M))
        names: dict[str, object] = {}
        exec(inputs.replace('"cuda"', '"meta"'), names)
        assert [names[name].device.type for name in ("hidden_states", "head_weight")] == ["meta", "meta"]


def test_every_block_of_python_is_run():
    for page in PAGES:
        fences = re.findall(r"^```python.*$", page.read_text(), re.M)
        assert len(fences) == len(blocks_of(page)) + sum(len(blocks_of(page, peer)) for _, peer in PEERS if _ == page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example, capsys):
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out.strip()


def faults(config: BaseLossConfig) -> list[str]:
    return [f"{found.name}: {found.detail}" for found in check_loss(config) if found.passed is False]


def test_losses_of_the_examples_pass_what_rlloss_checks():
    """A reader of examples/custom_losses.py tries `rlloss check` on it, as README says."""
    names = runpy.run_path(str(ROOT / "examples" / "custom_losses.py"))
    assert faults(names["FocalConfig"]()) == faults(names["ZLossConfig"](mode="chunk", chunk_size=4)) == []
    assert faults(GRPOLossConfig(policy_loss_cfg={"loss_type": "soft_clip"})) == []


@pytest.mark.parametrize("page", ["README.md", "docs/writing_a_loss.md"])
def test_losses_that_a_page_registers_pass_what_rlloss_checks(page, capsys):
    before = set(policy_loss_names())
    run(ROOT / page, blocks_of(ROOT / page), capsys)
    registered = set(policy_loss_names()) - before
    assert registered
    for name in registered:
        assert faults(GRPOLossConfig(policy_loss_cfg={"loss_type": name})) == [], name


def modules() -> list[str]:
    found = pkgutil.walk_packages(rlloss.__path__, "rlloss.")
    return [module.name for module in found if not module.name.endswith("__main__")]


NEEDS_A_PEER = ("rlloss.compat.trl", "rlloss.compat.xtuner.inside")


def test_examples_in_docstrings():
    tried = 0
    for name in modules():
        try:
            module = importlib.import_module(name)
        except BackendUnavailableError:
            assert name in NEEDS_A_PEER
            continue
        result = doctest.testmod(module)
        assert result.failed == 0, name
        tried += result.attempted
    assert tried > 0


def test_extras_that_a_page_installs_exist():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = [name for page in PAGES for name in re.findall(r"pip install \"?(?:\.|rlloss)\[(\w+)\]", page.read_text())]
    assert {"train", "trl"} <= set(named) <= extras


def test_each_framework_gets_an_environment_of_its_own_by_exact_commands():
    sections = (ROOT / "docs" / "migrating.md").read_text().split("\n## From ")[1:]
    commands = [re.findall(r"^```bash\n(.*?)^```", section, re.S | re.M) for section in sections]
    folders = []
    for blocks in commands:
        make, use, install = blocks[0].splitlines()
        folders.append(make.removeprefix("python3 -m venv "))
        assert use == f"source {folders[-1]}/bin/activate" and install.startswith("pip install ")
    assert len(set(folders)) == len(sections) == 3


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_readme_resumes_the_run_that_it_starts():
    """A resumed run takes the values of its checkpoint, so both lines have to set the same."""
    lines = re.findall(r"^rlloss train ([^#\n]*)", (ROOT / "README.md").read_text(), re.M)
    started = [line.split() for line in lines if "--resume" not in line]
    resumed = [[word for word in line.split() if word != "--resume"] for line in lines if "--resume" in line]
    assert resumed and all(line in started for line in resumed)


def test_verbs_of_the_readme_exist():
    verbs = set(re.findall(r"^rlloss (\w+)", (ROOT / "README.md").read_text(), re.M))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "rlloss", "--help"], capture_output=True, text=True, env=environment, check=True
    )
    assert verbs
    for verb in verbs:
        assert re.search(rf"^\s+{verb}\s", done.stdout, re.M), verb
