"""The page: whole, on its own, and safe with whatever a model writes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llm_steer.eval import report
from llm_steer.eval.config import RunConfig
from llm_steer.eval.methods import parse_methods
from llm_steer.eval.report import html, markdown, svg
from llm_steer.eval.run import run
from llm_steer.eval.summary import summarize

from llm_steer.engines.base import Response
from support.fake_engine import FakeEngine, sums

HOSTILE = "Wait</script><script>alert(1)</script><!-- <b>&amp; \u2028 ]]> \\u003c"


def answer(request):
    trace = {
        "plugins": [{"name": "x", "positions": [0], "deltas": [2.0], "steered_steps": 1, "confidence": [0.1, 0.9, 0.4]}]
    }
    return Response(text=HOSTILE + "</think>\\boxed{10}", tokens=7, steering=None if request.steer == "off" else trace)


@pytest.fixture
def summary(tmp_path):
    steer = ["none", {"label": "a <b>bold</b> | label", "steer": "reflection_cycle"}]
    config = RunConfig(**{**sums(tmp_path, 4), "steer": steer, "samples": 2})
    run(config, FakeEngine(answer))
    return summarize(Path(config.out))


class Page(HTMLParser):
    """Elements, text by element, and what would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not (v or "").startswith("data:")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


def data_of(text: str) -> dict:
    """What the page's script gets: the text between the tags, as the browser cuts it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page(summary):
    report.write(summary)
    text = (summary.folder / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.fetched == []
    assert "url(" not in text
    assert "@import" not in text
    assert page.tags.count("script") == 2
    assert "b" not in page.tags
    assert any(t == "a <b>bold</b> | label" for _, t in page.texts)
    answers = [a for p in data_of(text)["problems"] for a in p["answers"]]
    assert len(answers) == 16
    assert all(a["text"] == HOSTILE + "</think>\\boxed{10}" for a in answers)
    assert {len(a["curves"]) for a in answers} == {0, 1}
    assert "prefers-color-scheme: dark" in text
    assert text.count("<svg") == 2  # the plot, and the wave of the steered method


def test_markdown(summary):
    report.write(summary)
    lines = (summary.folder / "report.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| a \\<b>bold\\</b> \\| label |")]
    assert rows
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("| none |")}
    assert widths == {len(re.findall(r"(?<!\\)\|", row)) for row in rows if "against" not in row} & widths


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Sums\n# of <img src=x> | two", "Sums # of \\<img src=x> \\| two"),
        ("*a* `b` ~~c~~ _d_ [e](f)", "\\*a\\* \\`b\\` \\~\\~c\\~\\~ \\_d\\_ [e]\\(f)"),
        ("# reflection_cycle:max_delta=5", "\\# reflection_cycle:max_delta=5"),
        ("44.1 [42.0, 46.2]", "44.1 [42.0, 46.2]"),
        ("<0.0001", "<0.0001"),
    ],
)
def test_text_of_others_is_no_markup(summary, text, shown):
    assert markdown.plain(text) == shown
    summary.tasks[0].about["title"] = text
    assert f"## {shown}\n" in markdown.document(summary)


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@given(
    st.lists(
        st.tuples(st.floats(svg.LEFT, svg.WIDTH - svg.RIGHT), st.floats(svg.TOP, svg.HEIGHT - svg.BOTTOM)), max_size=10
    ),
    st.lists(st.integers(1, svg.LABEL), min_size=10, max_size=10),
)
@example([(300 + i, 200.0) for i in range(7)], [20] * 10)
def test_labels_do_not_meet(points, letters):
    letters = letters[: len(points)]
    corners = svg.place_labels(points, letters)
    boxes = [(x, y, x + svg.LETTER * n, y + svg.LINE) for (x, y), n in zip(corners, letters, strict=True)]
    for i, box in enumerate(boxes):
        assert 0 <= box[0] <= box[2] <= svg.WIDTH
        assert 0 <= box[1] <= box[3] <= svg.HEIGHT - svg.BOTTOM
        assert not any(overlap(box, (x - 4, y - 4, x + 4, y + 4)) for x, y in points)
        assert not any(overlap(box, other) for other in boxes[:i])


def test_what_is_too_much_goes_into_side_files(summary, monkeypatch):
    monkeypatch.setattr(html, "EMBEDDED", 1500)
    monkeypatch.setattr(html, "SIDE_FILE", 2500)
    report.write(summary)
    problems = data_of((summary.folder / "report.html").read_text(encoding="utf-8"))["problems"]
    assert [("file" in p) for p in problems] == [False, True, True, True]
    files = sorted(p.name for p in (summary.folder / "traces").iterdir())
    assert files == sorted({p["file"] for p in problems if "file" in p})
    assert len(files) > 1
    for problem in problems[1:]:
        text = (summary.folder / "traces" / problem["file"]).read_text(encoding="utf-8")
        held = json.loads(text.removeprefix("traces(").removesuffix(");\n"))
        assert len(held[f"sums/{problem['id']}"]["answers"]) == 4
        assert "</script" not in text


DOM = """
const fs = require("fs");
class Node {
  constructor(tag) {
    Object.assign(this, { tag, children: [], own: "", attributes: {}, value: tag === "select" ? "all" : "" });
  }
  set textContent(t) { this.own = t; this.children = []; }
  get textContent() { return this.own + this.children.map(c => c.textContent ?? c).join(""); }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; this.own = ""; }
  setAttribute(k, v) { this.attributes[k] = v; }
  all(tag) {
    return this.children.filter(c => c instanceof Node).flatMap(c => (c.tag === tag ? [c] : []).concat(c.all(tag)));
  }
}
const places = { data: new Node("script"), browser: new Node("div") };
places.data.textContent = fs.readFileSync(process.argv[2], "utf8");
global.document = {
  getElementById: id => places[id], createElement: t => new Node(t), createElementNS: (_, t) => new Node(t),
};
require("vm").runInThisContext(fs.readFileSync(process.argv[3], "utf8"));
const out = places.browser, texts = tag => out.all(tag).map(n => n.textContent);
const marks = out.all("mark").map(n => [n.textContent, n.className || ""]);
const counts = { figures: out.all("figure").length, scripts: out.all("script").length };
console.log(JSON.stringify({ pre: texts("pre"), options: texts("option"), marks, ...counts }));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script(summary, tmp_path):
    """On a small stand-in for a document: what is shown is what was written."""
    for row in summary.rows:
        row["marks"] = [[0, 4, 2.0]] if row["steering"] else []
    report.write(summary)
    text = (summary.folder / "report.html").read_text(encoding="utf-8")
    (tmp_path / "data.json").write_text(json.dumps(data_of(text)))
    script = Path(html.__file__).parent / "page.js"
    (tmp_path / "dom.js").write_text(DOM)
    done = subprocess.run(["node", tmp_path / "dom.js", tmp_path / "data.json", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["pre"][0] == "10+0"
    assert shown["pre"][1:] == [HOSTILE + "</think>\\boxed{10}"] * 4
    assert shown["marks"] == [["Wait", ""], ["Wait", "up"]] * 2
    assert shown["figures"] == 2
    assert shown["scripts"] == 0
    assert len(shown["options"]) == 3 + 4


@pytest.mark.parametrize(
    ("fields", "highest"),
    [({}, 5.0), ({"schedule": "constant", "amplitude": 2.0}, 2.0), ({"schedule": "shuffled", "period": 8.0}, 5.0)],
)
def test_the_curve_of_a_method(fields, highest):
    (method,) = parse_methods([{"label": "a", "steer": {"name": "reflection_cycle", **fields}}])
    (drawn,) = html._previews(method.steer)
    assert max(drawn["delta"]) == highest
    assert html._previews([method.steer, {"name": "tip"}]) == [drawn]
    assert html._previews({**method.steer, "name": "gone"}) == []
    assert html._previews({**method.steer, "height": 1}) == []


def test_every_method_that_has_a_curve_shows_it(summary):
    assert html._methods(summary).count("<svg") == 1


def test_where_nothing_differs_nothing_is_claimed(tmp_path):
    config = RunConfig(**{**sums(tmp_path, 5), "steer": ["none", "tip"]})
    run(config, FakeEngine(lambda request: Response(text="?", tokens=request.sampling.seed % 9)))
    summary = summarize(Path(config.out))
    assert math.isnan(summary.tasks[0].against[0].accuracy.detectable)
    text = " ".join(markdown.seen(summary.tasks[0]))
    assert "No difference was seen" in text
    assert "could have seen (" not in text
    drawn = svg.pareto(summary.tasks[0])
    assert ">0.2</text>" in drawn
    assert ">-" not in drawn


def test_ticks_are_round():
    assert svg._ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert svg._ticks(-3, 47) == [0, 10, 20, 30, 40]
