"""The structure that CONTRIBUTING.md describes is enforced here, and each rule is shown to catch a breach."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import structure_rules as rules
from structure_rules import Module

PACKAGE = Path(__file__).parent.parent / "rlloss"
Rule = Callable[[Module], Iterator[str]]


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_rlloss_keeps_the_rule(rule: Rule) -> None:
    modules = rules.load_modules(PACKAGE)
    assert modules, f"no module under {PACKAGE}"
    broken = [sentence for module in modules for sentence in rule(module)]
    assert not broken, "\n".join(broken)


BREACHES = [
    (rules.imports_go_down, "rlloss.heads.chunk", "from rlloss.losses.base import X"),
    (rules.imports_go_down, "rlloss.heads.chunk", "from ..losses import base"),
    (rules.imports_go_down, "rlloss.heads.chunk", "from .. import losses"),
    (rules.imports_go_down, "rlloss.heads.chunk", "import rlloss.functional.kl"),
    (rules.imports_go_down, "rlloss.heads.chunk", "def f():\n    from rlloss.functional import kl"),
    (rules.imports_go_down, "rlloss.functional.kl", "from rlloss.heads import eager"),
    (rules.imports_go_down, "rlloss.losses.base", "from rlloss import GRPOLossConfig"),
    (rules.imports_go_down, "rlloss.losses.base", "import rlloss"),
    (rules.imports_go_down, "rlloss.errors", "from rlloss.functional import kl"),
    (rules.imports_go_down, "rlloss.training.grpo", "from rlloss.cli import main"),
    (rules.imports_go_down, "rlloss.novelty", "import torch"),
    (rules.gated_packages, "rlloss.heads.chunk", "import pydantic"),
    (rules.gated_packages, "rlloss.losses.ce", "import liger_kernel.chunked_loss"),
    (rules.gated_packages, "rlloss.losses.ce", "from transformers import AutoModel"),
    (rules.gated_packages, "rlloss.compat.trl", "import transformers"),
    (rules.collectives_in_one_place, "rlloss.losses.base", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (rules.collectives_in_one_place, "rlloss.losses.base", "import torch\ntorch.distributed.all_gather(x, y)"),
    (rules.collectives_in_one_place, "rlloss.losses.base", "from torch import distributed as d\nd.barrier()"),
    (rules.collectives_in_one_place, "rlloss.losses.base", "from torch.distributed import broadcast"),
    (rules.collectives_in_one_place, "rlloss.losses.base", "import torch.distributed.nn.functional as F"),
    (rules.small_files, "rlloss.errors", "x = 1\n" * 301),
    (rules.small_functions, "rlloss.errors", "def f():\n" + "    x = 1\n" * 60),
    (rules.few_parameters, "rlloss.errors", "def f(a, b, c, d, e, *, f, g, h): ..."),
    (rules.few_parameters, "rlloss.errors", "class A:\n    def f(self, a, b, c, d, e, f, g, **h): ..."),
    (rules.no_print, "rlloss.errors", "print(1)"),
    (rules.has_docstrings, "rlloss.errors", "x = 1"),
    (rules.has_docstrings, "rlloss.errors", '"""Doc."""\ndef f(): ...'),
    (rules.has_docstrings, "rlloss.errors", '"""Doc."""\nclass A: ...'),
    (rules.has_docstrings, "rlloss.errors", '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self): ...'),
]


@pytest.mark.parametrize(("rule", "name", "source"), BREACHES)
def test_a_breach_is_caught(rule: Rule, name: str, source: str) -> None:
    assert list(rule(Module(name, source)))


KEPT = [
    (rules.imports_go_down, "rlloss.heads.chunk", "from . import eager\nfrom ..errors import BatchError\nimport torch"),
    (rules.imports_go_down, "rlloss.losses.base", "from rlloss.functional import kl\nfrom rlloss.heads import eager"),
    (rules.imports_go_down, "rlloss.training.grpo", "from rlloss import GRPOLossConfig, heads"),
    (rules.imports_go_down, "rlloss.layout", "from rlloss.errors import BatchError"),
    (rules.imports_go_down, "rlloss.cli_check", "from rlloss.cli import main"),
    (rules.gated_packages, "rlloss.heads.liger", "def f():\n    import liger_kernel"),
    (rules.gated_packages, "rlloss.losses.base", "from pydantic import BaseModel"),
    (rules.collectives_in_one_place, "rlloss.distributed", "import torch.distributed as dist\ndist.all_reduce(x)"),
    (rules.collectives_in_one_place, "rlloss.losses.base", "from rlloss import distributed\ndistributed.all_reduce(x)"),
    (rules.collectives_in_one_place, "rlloss.heads.eager", "import torch\ntorch.gather(x, 1, y)\nx.scatter(1, y, z)"),
    (rules.few_parameters, "rlloss.errors", "class A:\n    def f(self, a, b, c, d, e, f, g): ..."),
    (rules.small_functions, "rlloss.errors", "def f():\n" + "    x = 1\n" * 59),
]


@pytest.mark.parametrize(("rule", "name", "source"), KEPT)
def test_what_is_allowed_passes(rule: Rule, name: str, source: str) -> None:
    assert not list(rule(Module(name, source)))


def test_import_is_light() -> None:
    """`import rlloss` loads torch and pydantic, and none of the packages that only some users need."""
    code = (
        "import sys, rlloss; "
        "heavy = ['transformers', 'triton', 'liger_kernel', 'pandas', 'reasoning_gym', 'matplotlib', 'rich']; "
        "loaded = [name for name in heavy if name in sys.modules]; "
        "sys.exit(f'import rlloss loads {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, done.stderr
