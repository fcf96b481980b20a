r"""Where an answer stands in a text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llm_steer.eval.grading import last_box
from llm_steer.eval.grading.boxes import after_thinking


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, \{2\}\}}", r"\{1, \{2\}\}"),
        (r"\boxed{ 3 }", "3"),
        (r"\boxed {3}", "3"),
        (r"$\boxed 7$", "7"),
        (r"\boxed12.", "12"),
        (r"\fbox{204}", "204"),
        (r"\boxed{1} then \boxed{", None),
        (r"\boxed{1} then \boxed{\frac{1}{2", None),
        (r"\boxed{1} then \boxed", None),
        (r"\boxed{1} then \boxed{}", None),
        (r"\boxed{ }", None),
        (r"\boxed{a\}", None),
        (r"\boxedness{5}", None),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\boxed{5}6}", "56"),
        (r"\boxed{x = \boxed{\frac{1}{2}}}", r"x = \frac{1}{2}"),
        (r"\boxed{\fbox 1, \boxed{2}}", "1, 2"),
        (r"\boxed{\boxed{1}} \boxed{2}", "2"),
        (r"\boxed{\boxed{5}", "5"),
        (r"\boxed{1 \boxed{5", None),
        (r"} { \boxed{5} }", "5"),
        (r"\boxed{5\ }", "5"),
        ("", None),
        ("the answer is 5", None),
    ],
)
def test_the_last_box(text, box):
    assert last_box(text) == box


@given(st.text(alphabet="\\{}boxed 1$", max_size=40))
def test_any_text_has_a_box_or_none(text):
    box = last_box(text)
    assert box is None or (box and "boxed{" not in box)
    if box and text.count("boxed") == 1:
        assert box in text


def nested(depth):
    return st.recursive(
        st.sampled_from(["1", r"\{", r"\}", "x ", r"\\"]),
        lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"),
        max_leaves=depth,
    )


@given(nested(8), st.text(alphabet="{}ab", max_size=5))
def test_balanced_content_comes_back_whole(content, behind):
    assert last_box(r"\boxed{a" + content + "}" + behind) == ("a" + content).strip()


@pytest.mark.parametrize(
    ("text", "optional", "required"),
    [
        ("a</think>b", "b", "b"),
        ("a</think>b</think>c", "c", "c"),
        ("still thinking", "still thinking", ""),
        ("a</think>", "", ""),
    ],
)
def test_what_follows_thinking(text, optional, required):
    assert after_thinking(text, required=False) == optional
    assert after_thinking(text, required=True) == required
