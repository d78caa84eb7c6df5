"""`rlloss report`: a page of any run, safe whatever a model wrote, and right in a real browser."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from report_runs import NASTY, make_run, write_lines
from rlloss.cli import main
from rlloss.report.charts import Axis, thinned
from rlloss.report.data import read_run
from rlloss.report.heatmap import clip_lines, columns_of, level_of
from rlloss.report.page import page
from rlloss.report.panels import Chart
from rlloss.report.text import as_json, duration, escaped, number, percent

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)


class Tags(html.parser.HTMLParser):
    """Elements of a page, with what is open at its end."""

    VOID = frozenset({"meta", "link", "br", "line", "rect", "path", "circle", "i"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def count(self, tag: str, css: str = "") -> int:
        return sum(name == tag and (not css or css in (attrs.get("class") or "").split()) for name, attrs in self.seen)


RUNS = {
    "grpo": {},
    "ppo": {"phase": "ppo", "finished": False},
    "going": {"finished": None},
    "one step": {"supervised": 0, "rl": 1, "finished": None},
    "supervised": {"rl": 0},
    "long": {"supervised": 2000, "rl": 3000},
}
STATUS = {
    "grpo": "finished",
    "ppo": "stopped after step 50",
    "going": "running, step 50",
    "one step": "running, step 1",
    "supervised": "finished",
    "long": "finished",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_page_of_every_kind_of_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "run", **RUNS[name])
    assert main(["report", str(folder), "--open", "no"]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    text = (folder / "report.html").read_text(encoding="utf-8")
    tags = Tags(text)
    assert (tags.open, tags.wrong) == ([], [])
    assert f">{STATUS[name]}</span>" in text
    assert len(text) < 2_000_000
    assert not re.search(r"(src|href)=\"(?!data:)|url\(|@import|https?://", text)
    rl = name != "supervised"
    assert tags.count("figure", "heat") == (2 if rl else 0)
    assert tags.count("figure", "chart") >= 3
    assert ("Clip fractions" in text, "Generations" in text) == (rl, rl)
    assert ("Supervised loss" in text) == (name != "one step")


def test_a_run_that_was_killed_long_ago_and_one_without_a_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finished=None)
    hours_ago = time.time() - 7200
    os.utime(folder / "metrics.jsonl", (hours_ago, hours_ago))
    assert "unfinished, step 50" in page(read_run(folder))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 51, "pha')
    assert read_run(folder).steps == 50
    write_lines(folder / "metrics.jsonl", [])
    assert "No step is done yet." in page(read_run(folder))
    resumed = make_run(tmp_path / "resumed", finished=False)
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 51, "phase": "grpo", "loss": 1.0}\n')
    assert "running, step 51" in page(read_run(resumed))


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    run = make_run(tmp_path / "run", rl=1)
    cases = [
        (["report", str(tmp_path / "nothing")], "there is no such folder"),
        (["report", str(tmp_path)], "there is no metrics.jsonl in it"),
        (["report", str(run), "--output", str(tmp_path / "file" / "page.html")], "cannot be written"),
    ]
    for arguments, words in cases:
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_nothing_that_a_model_wrote_becomes_part_of_the_page(tmp_path: Path) -> None:
    text = page(read_run(make_run(tmp_path / "run")))
    tags = Tags(text)
    plain = Tags(page(read_run(make_run(tmp_path / "plain", rl=0))))
    assert tags.count("script") == plain.count("script") + tags.count("figure") - plain.count("figure")
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<b>sum" not in text and "&lt;b&gt;sum" in text
    for character in "\u202e\u202c\x1b\ud83d":
        assert character not in text
    assert "⟨202E⟩gnirts" in text and "␛[31m" in text and "⟨D83D⟩" in text and "שלום" in text
    assert tags.count("bdi", "t") == 2 * len(NASTY)
    assert "… 89 more tokens" in text
    assert as_json("</script><!--") == '"\\u003c/script>\\u003c!--"'
    assert escaped("a\tb\nc\u2028d\u200de") == "a\tb\nc⟨2028⟩d\u200de"


def test_numbers_are_written_for_people() -> None:
    assert [number(x) for x in (None, 0.0, 0.12345, -0.5, 1234.5, 12.345, 1e-7, 2.5e9, 100.0, 0.0001)] == [
        "–", "0", "0.123", "−0.5", "1,234", "12.3", "1e−7", "2.5e9", "100", "0.0001",
    ]  # fmt: skip
    assert (percent(0.1234), percent(None), duration(59), duration(600), duration(9000)) == (
        "12.3 %", "–", "59 s", "10 min", "2.5 h",
    )  # fmt: skip


def test_axes_and_thinning() -> None:
    axis = Axis.over([0.013, 0.21], Chart("", "", {}, zero=True))
    assert axis.ticks == [0.0, 0.1, 0.2, 0.3] and axis.place(0.3) < axis.place(0.0)
    assert Axis.over([5.0], Chart("", "", {})).low < 5.0 < Axis.over([5.0], Chart("", "", {})).high
    logarithmic = Axis.over([3e-7, 2e-4], Chart("", "", {}, logarithmic=True))
    assert (logarithmic.low, logarithmic.high) == (1e-7, 1e-3)
    points = [(k, None if k == 777 else float(k % 100)) for k in range(5000)]
    points[1234] = (1234, 1e6)
    kept = thinned(points)
    assert len(kept) < 800 and (1234, 1e6) in kept and (777, None) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_histograms_join_exactly_and_clip_bounds_lie_where_they_are() -> None:
    lines = [{"step": k, "log_ratio": [k, 1, 2]} for k in range(1, 301)]
    columns = columns_of(lines, "log_ratio")
    assert len(columns) <= 120 and columns[0][:2] == (1, 3) and columns[-1][1] == 300
    assert sum(counts[0] for _, _, counts in columns) == sum(range(1, 301))
    assert [level_of(share) for share in (0.0, 1e-9, 1e-4, 1.0)] == [0, 1, 1, 9]
    config = {"grpo": {"steps": 3, "loss": {"policy_loss_cfg": {"cliprange_low": 0.2, "cliprange_high": 0.25}}}}
    assert [(round(y, 4), label) for y, label in clip_lines(config)] == [(-0.2231, "clip low"), (0.2231, "clip high")]
    assert clip_lines({}) == []


CHECK = """
<script>
addEventListener("load", () => {
  const box = (e) => {
    const b = e.getBoundingClientRect();
    return b.width > 0 && (b.height > 0 || e.matches(".line"));  // a constant metric is a flat line
  };
  const all = (css) => [...document.querySelectorAll(css)];
  const tip = document.getElementById("tip");
  const tips = all("figure svg").map((svg) => {
    const b = svg.getBoundingClientRect();
    const at = {bubbles: true, clientX: b.left + b.width * 0.6, clientY: b.top + b.height * 0.5};
    svg.dispatchEvent(new PointerEvent("pointermove", at));
    return tip.hidden ? "" : tip.textContent;
  });
  const token = document.querySelector(".t");
  if (token) token.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, clientX: 5, clientY: 5}));
  const said = tip.textContent;
  const wide = all("main *").filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest("pre"));
  document.getElementById("theme").click();
  const found = {
    errors: window.problems, tips, said, theme: document.documentElement.dataset.theme,
    lines: all("path.line").length, empty: all("path.line, .heat path").filter((e) => !box(e)).length,
    figures: all("figure").filter(box).length, scroll: document.documentElement.scrollWidth - innerWidth,
    wide: wide.map((e) => e.outerHTML.slice(0, 80)), ink: getComputedStyle(document.body).backgroundColor,
  };
  document.body.innerHTML = "";
  document.title = JSON.stringify(found);
});
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
@pytest.mark.parametrize(("name", "width"), [("grpo", 1280), ("grpo", 500), ("ppo", 1280), ("one step", 500)])
def test_in_a_real_browser(name: str, width: int, tmp_path: Path) -> None:
    """No error, every curve has a size, numbers on hover, nothing sticks out of the page."""
    text = page(read_run(make_run(tmp_path / "run", **RUNS[name])))
    watch = "<head><script>window.problems = []; addEventListener('error', (e) => problems.push(e.message));</script>"
    path = tmp_path / "page.html"
    path.write_text(text.replace("<head>", watch, 1).replace("</body>", CHECK, 1))
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL).group(1))  # type: ignore[union-attr]
    found = json.loads(title)
    assert found["errors"] == [] and ":CONSOLE" not in done.stderr
    assert found["empty"] == (found["lines"] if name == "one step" else 0)  # one point is a dot, its line has no size
    assert found["lines"] >= 8 and found["figures"] == len(found["tips"])
    assert all(re.match(r"steps? \d+.*\n.+", tip) for tip in found["tips"])
    assert found["said"].startswith("log-ratio  +0.5000\nratio  1.6487\nadvantage  1.25")
    assert found["scroll"] <= 0 and found["wide"] == []
    assert found["theme"] in ("light", "dark") and found["ink"] != "rgba(0, 0, 0, 0)"


REST = {
    "cut off": b'{"step": 51, "pha',
    "no object": b"5\n[1]\nnull\n",
    "no text": b"\xff\xfe\x00" + bytes(50),
    "deep": b"[" * 100_000 + b"\n",
    "too many digits": b'{"step": 51, "phase": "grpo", "loss": 1' + b"0" * 5000 + b"}\n",
}
NUMBERS = {
    "not finite": b'{"step": 51, "phase": "grpo", "loss": Infinity, "lr": NaN}\n',
    "beyond": b'{"step": 51, "phase": "grpo", "loss": 1e308, "lr": 5e-324}\n'
    b'{"step": 52, "phase": "grpo", "loss": -1e308, "lr": -1.0, "rollout_logprob_gap": -1.0}\n',
    "many digits": b'{"step": 51, "phase": "grpo", "loss": 1' + b"0" * 400 + b"}\n",
}


@pytest.mark.parametrize("file", ["metrics", "histograms", "samples"])
@pytest.mark.parametrize("rest", REST)
def test_what_a_kill_or_a_disk_leaves_in_a_file_is_passed_over(tmp_path: Path, rest: str, file: str) -> None:
    as_many_charts_as_without(tmp_path, f"{file}.jsonl", REST[rest])


@pytest.mark.parametrize("numbers", NUMBERS)
def test_numbers_that_no_picture_can_hold(tmp_path: Path, numbers: str) -> None:
    as_many_charts_as_without(tmp_path, "metrics.jsonl", NUMBERS[numbers])


def as_many_charts_as_without(tmp_path: Path, file: str, rest: bytes) -> None:
    folder = make_run(tmp_path / "run")
    with (folder / file).open("ab") as lines:
        lines.write(rest)
    tags = Tags(page(read_run(folder)))
    assert not tags.open and not tags.wrong
    assert tags.count("figure", "chart") == Tags(page(read_run(make_run(tmp_path / "whole")))).count("figure", "chart")
