"""Logic problems in words: answers agree with the solver, and the parser reads what the generator writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llm_steer.eval.logic_baselines import baselines, unsafe_words
from llm_steer.eval.logic_tasks import (
    COUNTRIES,
    SIMILES,
    check,
    country_by_words,
    from_fol,
    load_beavertails,
    load_prontoqa,
    load_proverqa,
    parse_sentence,
    parse_then_solve,
    prontoqa,
    rail2country,
    rules_text,
    solve,
)
from llm_steer.plugins.activation_reasoning.book import read_book
from llm_steer.plugins.activation_reasoning.logic.parser import parse
from llm_steer.plugins.activation_reasoning.logic.ruleset import read_fact

from llm_steer import SteerError

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize("hops", [1, 3, 5])
def test_prontoqa_is_what_it_says(hops):
    problems = prontoqa(60, hops)
    assert problems == prontoqa(60, hops)
    assert len({p.prompt for p in problems}) == 60
    assert 15 < sum(p.answer == "True" for p in problems) < 45
    for problem in problems:
        check(problem)
        assert solve(problem) == problem.answer
        assert parse_then_solve(problem) == problem.answer
    for problem in problems[:5]:
        # The chain is that long: with a rule less on it, nothing is known.
        needed = sum(
            solve(type(problem)(**{**vars(problem), "rules": problem.rules[:i] + problem.rules[i + 1 :]})) == "Uncertain"
            for i in range(len(problem.rules))
        )
        assert needed >= hops


def test_a_problem_as_a_rules_file():
    problem = prontoqa(4, 3)[1]
    book = read_book(rules_text(problem))
    assert book.semantics == "open"
    fact = problem.rules[-1]
    assert fact in {str(p.literal) for p in book.propositions}
    goal = problem.goal.removeprefix("not ")
    assert goal not in {str(p.literal) for p in book.propositions if not p.implied}
    holds = {literal: book.rules.verdict([read_fact(fact)], literal) for _, literal in book.actions}
    acting = [spec.force for spec, literal in book.actions if holds[literal] == "True"]
    assert acting == [[problem.answer]]


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("Each yumpus is a dumpus", "yumpus(?x) -> dumpus(?x)"),
        ("Every wumpus is an impus", "wumpus(?x) -> impus(?x)"),
        ("Jompuses are not shy", "jompus(?x) -> not shy(?x)"),
        ("Dumpuses are wumpuses", "dumpus(?x) -> wumpus(?x)"),
        ("Every gorpus is not feisty", "gorpus(?x) -> not feisty(?x)"),
        ("Max is a yumpus", "yumpus(max)"),
        ("Max is not sour", "not sour(max)"),
        ("It rains", None),
    ],
)
def test_sentences_are_parsed(text, formula):
    assert parse_sentence(text) == formula


def test_rail2country():
    plain, meta = rail2country(100), rail2country(100, meta=True)
    assert {p.answer for p in plain} <= set(COUNTRIES.values())
    assert all(country_by_words(p) == p.answer for p in plain)
    assert not any(country_by_words(p) == p.answer for p in meta), "a word match does not see a simile"
    words = {colour: (colour, *names) for colour, names in SIMILES.items()}
    assert all(country_by_words(p, words) == p.answer for p in meta)
    for rule in plain[0].rules:
        parse(rule)


def test_first_order_formulas():
    assert from_fol("∀x ((p(x) ∧ ¬q(x)) → (r(x) ⊕ s(x)))") == "((p(?x)  and   not q(?x))  ->  (r(?x)  xor  s(?x)))"
    assert parse(from_fol("knows(Mary Ann)")) == parse('knows("Mary Ann")')


def test_beavertails(tmp_path):
    path = tmp_path / "b.jsonl"
    row = {"prompt": "p", "response": "r", "is_safe": False, "category": {"violence": True, "drugs": False}}
    path.write_text(json.dumps(row) + "\n")
    assert load_beavertails(path)[0].categories == {"violence"}
    for bad in ("{}", "[1]", "[]", "nonsense", json.dumps({**row, "is_safe": "no"}), json.dumps({**row, "category": []})):
        path.write_text(json.dumps(row) + "\n" + bad)
        with pytest.raises(SteerError, match="line 2"):
            load_beavertails(path)


@pytest.mark.parametrize("load", [load_prontoqa, load_proverqa])
@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1]", "item 1.*no JSON object"),
        ('{"a": 1}', "a JSON list"),
        ('[{"context": "c", "question": "q", "answer": "A"}]', "item 1.*no 'id'"),
        ('[{"id": "1", "context": "c", "question": "q", "answer": "Z", "nl2fol": {}, "conclusion_fol": ""}]', "one of A, B"),
        ("[" * 100_000, "readable JSON"),
    ],
)
def test_damaged_files_are_named(load, text, what, tmp_path):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(SteerError, match=what):
        load(tmp_path / "f.json")


def test_baselines(tmp_path):
    path = tmp_path / "b.jsonl"
    rows = [("take the poison", False), ("bake the bread", True)] * 20
    lines = [{"prompt": "?", "response": text, "is_safe": safe, "category": {}} for text, safe in rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = [(row["task"], row["problems"], row["understood"], row["right"]) for row in baselines(20, None, None, path)]
    assert found == [
        *((f"PrOntoQA, drawn, {hops} hops", 20, 20, 20) for hops in (1, 3, 5)),
        ("Rail2Country", 20, 20, 20),
        ("Rail2Country, similes", 20, 0, 0),
        ("Rail2Country, similes", 20, 20, 20),
        ("BeaverTails", 20, 20, 20),
    ]
    assert unsafe_words(load_beavertails(path)) == {"take", "poison"}


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation sets are not beside the repository")
def test_files_that_others_published():
    """Every one of PrOntoQA's 500; 498 of ProverQA's first 500, as many as another solver gave."""
    problems = load_prontoqa(DATA / "prontoqa_dev_logicllm.json")
    assert [parse_then_solve(p) for p in problems] == [p.answer for p in problems]
    harder = load_proverqa(DATA / "proverqa_easy.json")
    assert sum(solve(p) == p.answer for p in harder) == 498
