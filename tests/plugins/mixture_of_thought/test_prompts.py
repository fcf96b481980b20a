"""Prompts, those that are shipped and a user's own."""

from __future__ import annotations

import contextlib
import io
import os
import re
from importlib.resources import files
from pathlib import Path

import pytest
from llm_steer.plugins.mixture_of_thought import answers, prompts, truth_table
from llm_steer.plugins.mixture_of_thought.modalities import TAGS
from llm_steer.plugins.mixture_of_thought.modalities.code import program
from llm_steer.plugins.mixture_of_thought.params import OF_ANSWERS
from llm_steer.plugins.mixture_of_thought.truth_table import check

from llm_steer import SteerError

EVERY = [(a, m) for a, modalities in OF_ANSWERS.items() for m in modalities]
NASTY = "Is {x} <answer>(A)<end_of_answer> [[examples]] [[question]] \\1 {0} {{}} %s $x <nl_cot>?"


@pytest.mark.parametrize(("kind", "modality"), EVERY)
def test_shipped_prompts(kind: str, modality: str) -> None:
    """The question stands in it once and as it is; the last line opens the modality."""
    for examples in (False, True):
        (message,) = prompts.messages(NASTY, kind, modality, examples=examples)
        text = message["content"]
        assert message["role"] == "user"
        assert text.count(NASTY) == 1
        assert text.splitlines()[-1] == TAGS[modality]
        assert "[[" not in text.replace(NASTY, "")
        assert text.count("\nExample 1:\n") == examples
        assert not re.search(r"\n\n\n", text.replace("def ", ""), re.M) or modality == "code"


def worked(kind: str, modality: str) -> list[tuple[str, str]]:
    """Problem and solution of each example."""
    text = (files("llm_steer.prompts") / "mixture_of_thought" / kind / f"{modality}.examples.txt").read_text("utf-8")
    parts = re.split(r"Example \d:\n", text)[1:]
    return [(part.partition(TAGS[modality])[0], part.partition(TAGS[modality])[2]) for part in parts]


GOLD = {"three": ["True", "False", "Uncertain"], "two": ["True", "False"], "choice": ["B", "C"], "free": ["18", "78"]}


@pytest.mark.parametrize(("kind", "modality"), EVERY)
def test_worked_examples_are_right(kind: str, modality: str) -> None:
    examples = worked(kind, modality)
    assert len(examples) == len(GOLD[kind])
    for (problem, solution), gold in zip(examples, GOLD[kind], strict=True):
        if kind == "free":
            assert answers.read_free(solution).value == gold
        else:
            options = {"three": answers.THREE, "two": answers.TWO}.get(kind) or answers.options_in(problem)
            assert answers.read_choice(solution, options).value == gold
        if modality == "table":
            found = check(truth_table.read(solution.partition("<answer>")[0]))
            assert found.rows_right
            assert found.kind == "survivors"
            assert found.verdict == gold
        if modality == "code":
            source = program(solution)
            assert source is not None
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(source, {})  # our own, from the repository
            assert output.getvalue().strip() == gold


def test_no_prompt_names_the_reference_s_problems() -> None:
    """Written afresh: the three problems of the released prompts are not in it."""
    folder = files("llm_steer.prompts") / "mixture_of_thought"
    text = " ".join(path.read_text("utf-8") for kind in folder.iterdir() for path in kind.iterdir())
    assert "Optional[bool]" not in text
    assert "dragon" not in text.lower()


# -- a user's own folder -----------------------------------------------------------------------------------------------


def write(folder: Path, **texts: str) -> str:
    (folder / "three").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "three" / f"{name.replace('_', '.')}.txt").write_text(text)
    return str(folder)


def test_own_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, natural="Q: [[question]]", natural_system="words", code="[[examples]][[question]]\n<code>")
    asked = prompts.messages("why?", "three", "natural", examples=False, folder=folder)
    assert asked == [{"role": "system", "content": "words"}, {"role": "user", "content": "Q: why?"}]
    (message,) = prompts.messages("why?", "three", "code", examples=False, folder=folder)
    assert message["content"] == "why?\n<code>"
    write(tmp_path, code_examples="one\ntwo\n")
    (message,) = prompts.messages("why?", "three", "code", examples=True, folder=folder)
    assert message["content"] == "one\ntwowhy?\n<code>"


@pytest.mark.parametrize(
    ("texts", "examples", "words"),
    [
        ({}, False, ("three/natural.txt", "there is none")),
        ({"natural": "no field"}, False, ("three/natural.txt", "[[question]]")),
        ({"natural": "[[question]] [[answr]]"}, False, ("[[answr]]",)),
        ({"natural": "[[question]]"}, True, ("[[examples]]",)),
        ({"natural": "[[question]] [[examples]]"}, True, ("natural.examples.txt",)),
        ({"natural": "[[question]]" + "x" * 300_000}, False, ("200000",)),
    ],
)
def test_own_folder_with_something_missing(
    tmp_path: Path, texts: dict[str, str], examples: bool, words: tuple[str, ...]
) -> None:
    with pytest.raises(SteerError) as error:
        prompts.messages("why?", "three", "natural", examples=examples, folder=write(tmp_path, **texts))
    assert error.value.field == "prompts"
    for word in words:
        assert word in str(error.value)


def test_a_folder_that_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xfe")
    for folder in (str(tmp_path / "nowhere"), str(file)):
        with pytest.raises(SteerError, match="prompts"):
            prompts.messages("why?", "three", "natural", examples=False, folder=folder)


def test_a_pipe_is_no_prompt(tmp_path: Path) -> None:
    folder = write(tmp_path)
    os.mkfifo(Path(folder) / "three" / "natural.txt")
    with pytest.raises(SteerError, match=r"three/natural\.txt"):
        prompts.messages("why?", "three", "natural", examples=False, folder=folder)
