"""Task files, and rows that become problems."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import types
from pathlib import Path

import pytest
from llm_steer.eval import tasks
from llm_steer.eval.grading.graders import GRADERS

from llm_steer import SteerError

DATA = Path(__file__).parents[2].parent / "shared" / "data"
FILES = {
    "math500": ("math500.jsonl", 500),
    "aime24": ("aime24.jsonl", 30),
    "aime25": ("aime25.jsonl", 30),
    "amc23": ("amc23.jsonl", 40),
    "gsm8k": ("gsm8k_test_first200.jsonl", 200),
    "folio": ("folio_v0_validation.jsonl", 204),
    "proofwriter": ("proofwriter_dev_logicllm.json", 600),
    "prontoqa": ("prontoqa_dev_logicllm.json", 500),
    "proverqa": ("proverqa_easy.json", 500),
}

CHOICES = """
name: quiz
title: A quiz
grader: choice
columns: {problem: q}
choices: {correct: right, wrong: [w1, w2, w3]}
id: n
prompt: "{{problem}}\\n{{options}}"
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def jsonl(path: Path, *rows: object) -> Path:
    return write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_file_is_right(name):
    spec = tasks.find(name)
    assert spec.name == name
    assert spec.grader in GRADERS


def test_the_issue_s_tasks_are_there():
    asked = "math500 aime24 aime25 amc23 gsm8k gpqa_diamond olympiadbench folio proofwriter prontoqa proverqa"
    assert set(asked.split()) <= set(tasks.names())


@pytest.mark.parametrize("name", FILES)
def test_the_public_files(name):
    file, count = FILES[name]
    if not (DATA / file).exists():
        pytest.skip(f"needs ../shared/data/{file}, which is not shipped")
    loaded = tasks.load(tasks.find(name), DATA / file)
    assert len(loaded.items) == count
    assert loaded.sha256 == hashlib.sha256((DATA / file).read_bytes()).hexdigest()
    assert len({item.id for item in loaded.items}) == count
    assert all("{{" not in item.messages[-1]["content"] or name == "math500" for item in loaded.items)


def test_gpqa_as_it_is_published(tmp_path):
    """The columns of the authors' CSV; made-up problems."""
    rows = [
        {
            "Record ID": f"rec{n}",
            "Question": f"How much is {n} + {n}?",
            "Correct Answer": f"{2 * n}\n",
            **{f"Incorrect Answer {k}": f" {2 * n + k}" for k in (1, 2, 3)},
            "High-level domain": "Physics",
            "Explanation": "Addition.",
        }
        for n in range(100, 140)
    ]
    loaded = tasks.load(tasks.find("gpqa_diamond"), jsonl(tmp_path / "gpqa.jsonl", *rows), seed=1)
    assert [item.id for item in loaded.items] == [row["Record ID"] for row in rows]
    assert {item.level for item in loaded.items} == {"Physics"}
    assert {item.gold.answer for item in loaded.items} == set("ABCD")
    for n, item in zip(range(100, 140), loaded.items, strict=True):
        right = item.gold.options["ABCD".index(item.gold.answer)]
        assert right == str(2 * n)
        assert sorted(item.gold.options) == [str(2 * n + k) for k in range(4)]
        lines = item.messages[-1]["content"].split("\n")
        assert lines[0] == f"How much is {n} + {n}?"
        assert f"{item.gold.answer}) {2 * n}" in lines
        assert GRADERS["choice"]().grade(item.gold, f"\\boxed{{{item.gold.answer}}}").correct
    with pytest.raises(SteerError, match="line 1: Incorrect Answer 2"):
        tasks.load(loaded.spec, jsonl(tmp_path / "bad.jsonl", {**rows[0], "Incorrect Answer 2": None}))


def test_olympiadbench_as_it_is_published(tmp_path):
    """The fields of the published files: a list of final answers, dollar signs included; made-up problems."""
    rows = [
        {
            "id": 1606,
            "subfield": "Algebra",
            "context": None,
            "question": "Find all $x$ with $x^2=4$.",
            "solution": ["$x=\\pm 2$."],
            "final_answer": ["$2,-2$"],
            "is_multiple_answer": True,
            "unit": None,
            "answer_type": "Numerical",
            "error": None,
        },
        {"id": 1610, "question": "How much is $6\\cdot 7$?", "final_answer": ["42"], "answer_type": "Numerical"},
    ]
    two, one = tasks.load(tasks.find("olympiadbench"), jsonl(tmp_path / "ob.jsonl", *rows)).items
    assert two.messages[-1]["content"].startswith("Find all $x$ with $x^2=4$.\n")
    grade = GRADERS["math"]().grade
    assert grade(two.gold, "\\boxed{2, -2}").correct
    assert grade(one.gold, "\\boxed{42}").correct
    with pytest.raises(SteerError, match="line 1: final_answer"):
        tasks.load(tasks.find("olympiadbench"), jsonl(tmp_path / "bad.jsonl", {"question": "?", "final_answer": []}))


def test_both_files_of_folio_ask_the_same(tmp_path):
    files = [DATA / name for name in ("folio_v0_validation.jsonl", "folio_dev_logicllm.json")]
    if not all(file.exists() for file in files):
        pytest.skip("needs ../shared/data/folio_*, which is not shipped")
    ours, theirs = (tasks.load(tasks.find("folio"), file, limit=1).items[0] for file in files)
    assert ours.gold.answer == theirs.gold.answer == "Uncertain"
    for item in (ours, theirs):
        assert "Statement: Bonnie performs in school talent shows often.\n" in item.messages[0]["content"]


def test_folio_is_split_by_story(tmp_path):
    rows = [
        {"premises": ["p"], "conclusion": f"c{i}", "label": "True", **({} if story is None else {"story_id": story})}
        for i, story in enumerate([1, 303, 304, "480", None])
    ]
    items = tasks.load(tasks.find("folio"), jsonl(tmp_path / "folio.jsonl", *rows)).items
    assert [item.level for item in items] == ["easy", "easy", "difficult", "difficult", None]


def test_the_published_stories_of_folio():
    if not (file := DATA / "folio_v0_train.jsonl").exists():
        pytest.skip("needs ../shared/data/folio_*, which is not shipped")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    levels = [item.level for item in tasks.load(tasks.find("folio"), file).items]
    assert levels == ["easy" if row["story_id"] <= 303 else "difficult" for row in rows]
    assert len(levels) == 1004


def test_generated_problems():
    spec = tasks.find("testbed_arithmetic")
    one, two = tasks.load(spec, limit=5), tasks.load(spec, limit=5)
    assert one == two
    assert len({item.id for item in one.items}) == 5
    item = one.items[0]
    assert GRADERS["exact"]().grade(item.gold, f"x</think>\\boxed{{{item.gold.answer}}}").correct
    with pytest.raises(SteerError, match="generated"):
        tasks.load(spec, Path("x.jsonl"))


def test_a_user_s_own_task(tmp_path):
    task = write(
        tmp_path / "mine.yaml",
        "name: mine\ntitle: Mine\ngrader: math\ncolumns: {problem: [q, question], note: n}\n"
        "answer: {from: a, after: '#### '}\n"
        "level: {from: id, match: 'L(\\d)'}\nsystem: Be brief.\nprompt: '{{ problem }} ({{note}}) {{problem}}'\n",
    )
    rows = jsonl(tmp_path / "rows.jsonl", {"question": "a{{note}}\u2028b", "n": ["x", 2.0], "a": "so #### 7", "id": "L3"})
    item = tasks.load(tasks.find(str(task)), rows).items[0]
    assert [m["role"] for m in item.messages] == ["system", "user"]
    assert item.messages[1]["content"] == "a{{note}}\u2028b (x\n2) a{{note}}\u2028b"
    assert (item.gold.answer, item.level) == ("7", "3")


def test_options_are_shuffled_by_seed_and_problem(tmp_path):
    spec = tasks.find(str(write(tmp_path / "quiz.yaml", CHOICES)))
    rows = [{"q": f"q{n}", "right": "yes!", "w1": "a", "w2": "b", "w3": "c", "n": n} for n in range(200)]
    file = jsonl(tmp_path / "rows.jsonl", *rows)
    loaded = tasks.load(spec, file, seed=1)
    counts = [sum(item.gold.answer == letter for item in loaded.items) for letter in "ABCD"]
    assert all(30 <= count <= 70 for count in counts)
    for item in loaded.items:
        assert f"{item.gold.answer}) yes!" in item.messages[0]["content"]
    assert tasks.load(spec, file, seed=1) == loaded
    assert tasks.load(spec, file, seed=2).items != loaded.items
    # A problem's order does not depend on what stands around it.
    assert tasks.load(spec, jsonl(tmp_path / "last.jsonl", rows[-1]), seed=1).items[0] == loaded.items[-1]


def test_options_with_a_letter_for_the_right_one(tmp_path):
    text = CHOICES.replace("correct: right, wrong: [w1, w2, w3]", "options: opts") + "answer: key\n"
    spec = tasks.find(str(write(tmp_path / "quiz.yaml", text)))
    rows = [{"q": "?", "opts": ["A) no", "B) yes!", "C) never"], "key": "B", "n": n} for n in range(20)]
    items = tasks.load(spec, jsonl(tmp_path / "rows.jsonl", *rows)).items
    assert all(f"{item.gold.answer}) yes!" in item.messages[0]["content"] for item in items)
    assert len({item.gold.answer for item in items}) == 3


@pytest.mark.parametrize(
    ("row", "where", "valid"),
    [
        ({"problem": "?"}, "rows.jsonl line 2: answer", "an answer"),
        ({"problem": "?", "answer": None}, "rows.jsonl line 2: answer", "an answer"),
        ({"problem": "?", "answer": "  "}, "rows.jsonl line 2: answer", "an answer"),
        ({"answer": "1"}, "rows.jsonl line 2: problem", "given"),
        ({"problem": "?", "answer": math.nan}, "rows.jsonl line 2: answer", "a text, a number"),
        ({"problem": "?", "answer": {"a": 1}}, "rows.jsonl line 2: answer", "a text, a number"),
        ({"problem": "?", "answer": ["1", ["2"]]}, "rows.jsonl line 2: answer", "a text, a number"),
        ([1], "rows.jsonl line 2", "a JSON object"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, where, valid):
    file = jsonl(tmp_path / "rows.jsonl", {"problem": "1+1", "answer": "2"}, row)
    with pytest.raises(SteerError, match=valid) as caught:
        tasks.load(tasks.find("amc23"), file)
    assert caught.value.field == where


def test_a_byte_order_mark_is_no_content(tmp_path):
    file = write(tmp_path / "rows.jsonl", '\ufeff{"problem": "1+1", "answer": "2"}\n')
    assert tasks.load(tasks.find("amc23"), file).items[0].gold.answer == "2"


def test_a_problem_with_two_answers_is_told(tmp_path, caplog):
    rows = [{"problem": "1+1", "answer": "2"}, {"problem": "1+2", "answer": "3"}, {"problem": " 1+1\n", "answer": "3"}]
    assert len(tasks.load(tasks.find("amc23"), jsonl(tmp_path / "rows.jsonl", *rows)).items) == 3
    (record,) = caplog.records
    assert record.getMessage() == "rows.jsonl line 3: the same problem as in line 1 with another answer, '3', there '2'"


def test_other_bad_data(tmp_path):
    spec = tasks.find("prontoqa")
    row = {"id": "1", "context": "c", "question": "false? q", "answer": "True"}
    with pytest.raises(SteerError, match="another than in line 1"):
        tasks.load(spec, jsonl(tmp_path / "twice.jsonl", row, row))
    with pytest.raises(SteerError, match="one of True, False"):
        tasks.load(spec, jsonl(tmp_path / "label.jsonl", {**row, "answer": "Perhaps"}))
    with pytest.raises(SteerError, match=r"line 1: got .* valid JSON"):
        tasks.load(spec, write(tmp_path / "torn.jsonl", '{"id": 1'))
    with pytest.raises(SteerError, match="No such file"):
        tasks.load(spec, tmp_path / "missing.jsonl")
    with pytest.raises(SteerError, match="at least one row"):
        tasks.load(spec, write(tmp_path / "empty.jsonl", "\n"))
    with pytest.raises(SteerError, match="not on the hub"):
        tasks.load(spec)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("grader: chess", "grader"),
        ("colour: red", "colour"),
        ("prompt: '{{nothing}}'", "prompt"),
        ("sampling: {temperature: hot}", "sampling.temperature"),
        ("level: {from: x, match: '('}", "level.match"),
        ("labels: {a: []}", "labels"),
        ("name: Bad Name", "name"),
    ],
)
def test_a_bad_task_file_names_the_field(tmp_path, change, field):
    base = {"name": "t", "title": "T", "grader": "math", "columns": "{q: q}", "answer": "a", "prompt": "'{{q}}'"}
    key, _, value = change.partition(": ")
    text = "".join(f"{k}: {v}\n" for k, v in {**base, key: value}.items())
    with pytest.raises(SteerError) as caught:
        tasks.find(str(write(tmp_path / "t.yaml", text)))
    assert caught.value.field == f"t.yaml: {field}"


def test_unknown_tasks():
    with pytest.raises(SteerError, match="did you mean 'math500'"):
        tasks.find("math50")


def test_the_hub(monkeypatch):
    asked = []

    def load_dataset(path, config, split, revision):
        asked.append((path, config, split))
        return [{"question": f"{config}?", "answer": "336^\\circ"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    loaded = tasks.load(tasks.find("aime25"))
    assert [config for _, config, _ in asked] == ["AIME2025-I", "AIME2025-II"]
    assert len(loaded.items) == 2
    assert len(loaded.sha256) == 64

    def unreachable(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(SteerError, match="no route"):
        tasks.load(tasks.find("aime25"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install"):
        tasks.load(tasks.find("aime25"))
