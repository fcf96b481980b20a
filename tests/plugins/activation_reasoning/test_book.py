"""Rules files: what they mean, and what is refused with line and column."""

from __future__ import annotations

import pytest
from llm_steer.plugins.activation_reasoning.book import read_book

from llm_steer import SteerError

GOOD = """semantics: closed
concepts:
  wumpus: {words: [wumpus]}
  negation: {words: [not, never]}
subjects: [max, sam]
propositions:
  wumpus(?x): {pattern: ["?x", wumpus], without: [negation], hold: 9}
  rude: {level: global, aggregate: mean, scope: output}
rules:
  - wumpus(?x) -> mammal(?x)
  - mammal(max) and rude -> trouble
  - red then white then red -> austria
actions:
  - {when: trouble or austria, steer: {concept: rude, strength: -0.3}, duration: 64}
  - {when: trouble, stop: true}
"""


def test_a_file_is_read():
    book = read_book(GOOD)
    found = {str(p.literal): p for p in book.propositions}
    assert set(found) == {"wumpus(max)", "wumpus(sam)", "rude", "red then white then red"}
    assert found["wumpus(max)"].spec.without == ["negation", "sam"]
    assert found["wumpus(max)"].spec.hold == 9
    assert found["red then white then red"].spec.pattern == ["red", "white", "red"]
    assert found["red then white then red"].spec.within == "scope"
    assert [literal.atom for _, literal in book.actions] == ['"action 0"', "trouble"]
    assert set(book.concepts) == {"wumpus", "negation", "max", "sam", "rude", "red", "white"}
    assert len(book.texts) == 3


def test_a_dictionary_is_looked_for_beside_its_file(tmp_path):
    (tmp_path / "animals").mkdir()
    (tmp_path / "f.yaml").write_text("dictionary: animals\nrules: [a -> b]\n")
    assert read_book(tmp_path / "f.yaml").dictionary == str(tmp_path / "animals")
    (tmp_path / "f.yaml").write_text("dictionary: owner/animals\nrules: [a -> b]\n")
    assert read_book(tmp_path / "f.yaml").dictionary == "owner/animals"


BAD = [
    ("? [a, b]\n: 3\n", "line 1, column 3", "keys are plain text"),
    ("{[a]: 1}\n", "line 1, column 2", "keys are plain text"),
    ("rules:\n  - a\x00b\n", "line 2, column 6", "special characters"),
    ("rules: [a]\nactions:\n  - {when: a, log: true, priority: " + "1" * 200_000 + "}\n", "line 3, column 36", "100 digits"),
    ("subjects: [max, sam, max]\nrules: [a]\n", "line 1, column 11", "max is there twice"),
    ("rules:\n  - at least 20 of (" + ", ".join(f"p{i}" for i in range(40)) + ") -> z\n", "line 2, column 5", "1000"),
    ("rules:\n  - a -> b\n  - 'c and (d -> e'\n", "line 3, column 19", "closing parenthesis"),
    ("rules:\n  - a -> b\n  - c & d\n", "line 3, column 7", "written 'and'"),
    ("rules:\n  - not b -> a\n  - not a -> b\n", "line 3, column 5", "negation through a cycle"),
    ("rules:\n  - a or b -> c or d\n", "line 2, column 5", "semantics: open"),
    ("rules: [a]\nrulez: []\n", "line 2, column 1", "did you mean 'rules'"),
    ("rules: [a]\nsemantics: fuzzy\n", "line 2, column 12", "'closed' or 'open'"),
    ("rules: [a]\nactions:\n  - {when: a, stop: true, log: true}\n", "line 3, column 5", "exactly one of"),
    ("rules: [a]\nactions:\n  - {when: a, steer: {concept: a, strength: 9}}\n", "line 3, column 45", "less than"),
    ("rules: [a]\nactions:\n  - {when: a, steer: {concept: a, strength: .nan}}\n", "line 3", "valid number"),
    ("rules: [a]\npropositions:\n  b: {levle: token}\n", "line 3, column 7", "did you mean 'level'"),
    ("rules: [a]\npropositions:\n  b: {pattern: [x], concept: y}\n", "line 3, column 6", "a pattern takes the place"),
    ("rules: [a]\npropositions:\n  'b(?x': {}\n", "line 3, column 8", "closing parenthesis"),
    ("rules: ['p(?x) -> q']\npropositions: {}\n", "line 1, column 10", "names subjects"),
    ("rules: [a\n", "line 2, column 1", "valid YAML"),
    ("rules: [a]\nrules: [b]\n", "line 2, column 1", "there twice"),
    ("a: &x [1]\nb: *x\n", "line 2, column 4", "aliases are not supported"),
    ("rules: " + "[" * 100_000 + "\n", "line 1, column ", "nested"),
    ("rules:\n  - '" + "(" * 100_000 + "'\n", "line 2, column 6", "at most 4096 characters"),
    ("rules: [a]\ntruth: fuzzy\n", "line 2, column 8", "'crisp', 'product' or 'goedel'"),
    ("semantics: open\ntruth: product\nrules: [a]\n", "line 2, column 8", "crisp with semantics: open"),
    ("rules: [a]\nactions:\n  - {when: a, log: true, above: 0.3}\n", "line 3, column 33", "left out with truth: crisp"),
    ("truth: goedel\nactions:\n  - {when: a, log: true, above: 1}\n", "line 3, column 33", "less than 1"),
    ("- a\n", "", "a mapping"),
    ("\n", "", "a mapping"),
    ("rules: [a]\nconcepts:\n  'x/y': {words: [z]}\n", "line 3, column 4", "a letter"),
    ("rules: [a -> a then b]\n", "line 1, column 9", "never derived"),
    ("rules: [a then b then c then d then e -> f]\n", "line 1, column 9", "2 to 4"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "where", "what"), BAD)
def test_mistakes_are_named_with_their_place(text, where, what):
    with pytest.raises(SteerError) as caught:
        read_book(text)
    assert where in caught.value.field
    assert what in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_file_of_ten_megabytes_is_not_read(tmp_path):
    (tmp_path / "f.yaml").write_text("rules:\n" + "  - a -> b\n" * 1_000_000)
    with pytest.raises(SteerError, match="at most 262144 characters"):
        read_book(tmp_path / "f.yaml")
    (tmp_path / "f.yaml").write_text("rules:\n" + "  - a -> b\n" * 5000)
    with pytest.raises(SteerError, match="at most 2000"):
        read_book(tmp_path / "f.yaml")


def test_grounding_that_explodes_is_refused():
    subjects = ", ".join(f"s{i}" for i in range(40))
    with pytest.raises(SteerError, match=r"line 2, column 10.*ground rules"):
        read_book(f"subjects: [{subjects}]\nrules: ['p(?a) and p(?b) and p(?c) -> q(?a)']\n")
