"""Requests from outside, which choose among files and bring rules of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ar_model import CHAIN, GREEDY, PROMPT, states
from llm_steer.plugins.activation_reasoning import ActivationReasoning, ActivationReasoningParams, params

from llm_steer import SteerError, spec, steer
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime


@pytest.fixture(autouse=True)
def _registered(register):
    register(ActivationReasoning)


def outside(steering, tiny_tokenizer, write, **fields):
    """What a server resolves requests with, that was started with two files."""
    from llm_steer.artifact import Shelf
    from llm_steer.tokens import Vocabulary

    vocabulary = Vocabulary(tiny_tokenizer, 512)
    other = write("rules: [c33 -> a]\nactions: [{when: a, log: true}]", "other.yaml")
    declared = ActivationReasoningParams(rules=write(CHAIN, "animals.yaml"), files=[other], **fields)
    declared = declared.resolve(vocabulary, steering.shelf)
    return declared, vocabulary, Shelf(steering.shelf.model, named=tuple(steering.shelf.read), declared=(declared,))


def test_requests_from_outside_choose_among_the_files_that_were_named(write, model, tiny_tokenizer):
    steering = steer(model, "off", tokenizer=tiny_tokenizer).steering
    declared, vocabulary, shelf = outside(steering, tiny_tokenizer, write)
    for name in ("animals", declared.rules, "other"):
        asked = ActivationReasoningParams(rules=name).resolve(vocabulary, shelf)
        assert asked.program == params.digest_of(declared.library["other"] if name == "other" else declared.program)
        assert asked.resolve(vocabulary, shelf) == asked
        assert asked.shown() == {"rules": "other" if name == "other" else "animals"}, "no path, no program"
    for fields, what in (
        ({"rules": "/etc/passwd"}, "rules: got '/etc/passwd'; must be one of the files that were named at start: animals"),
        ({"rules": "rules: [a]\n"}, "one of the files"),
        ({"rules": "animals", "extra_rules": ["a -> b"]}, "extra_rules.*left out, and facts, too"),
        ({"rules": "animals", "facts": ["c33"]}, "facts.*left out"),
        ({"rules": "animals", "allow_rules": 4}, "allow_rules: got 4; must be left out"),
        ({"rules": "animals", "files": ["x"]}, "files.*left out"),
        ({"rules": "animals", "program": "abc"}, "program: got 'abc'; must be left out"),
        ({"rules": "animals", "program": declared.program}, "program.*left out"),
        ({"rules": "animals", "library": {"x": declared.program}}, "library.*left out"),
    ):
        with pytest.raises(SteerError, match=what):
            ActivationReasoningParams(**fields).resolve(vocabulary, shelf)
    for text in ("abc", "0" * 10_000, "\u20ac"):
        with pytest.raises(SteerError, match="what this plugin filled in"):
            params.parse_program(text)


def test_rules_from_outside_are_limited_and_about_what_the_file_knows(write, model, tiny_tokenizer):
    steering = steer(model, "off", tokenizer=tiny_tokenizer).steering
    declared, vocabulary, shelf = outside(steering, tiny_tokenizer, write, allow_rules=3)
    plugin = ActivationReasoning(Context(2, torch.device("cpu"), 512, 2, 32, 64, declared=(declared,), shelf=shelf))

    def admitted(fields):
        plugin.admit(
            0, ActivationReasoningParams(rules="animals", **fields).resolve(vocabulary, shelf), torch.tensor(PROMPT)
        )

    admitted({"extra_rules": ["a and c33 -> new", "new -> c"], "facts": ["late"]})
    for fields, what in (
        ({"extra_rules": ["a -> c"] * 3, "facts": ["b"]}, "at most 3 of extra_rules and facts together, not 4"),
        ({"extra_rules": ["a and stranger -> c"]}, r"extra_rules\[0\].*'stranger'.*the file detects"),
        ({"extra_rules": ["c33 then a -> c"]}, "c33 then a"),
        ({"extra_rules": ["red(bob) -> c"]}, "'bob'.*the file's subjects"),
        ({"extra_rules": ["a and (b -> c"]}, r"extra_rules\[0\], line 1, column"),
        ({"extra_rules": ["not c -> late2", "late2 -> b"]}, "negation through a cycle"),
        ({"facts": ["not a"]}, "facts: got 'not a'"),
        ({"facts": ["a and b"]}, "an atom without variables"),
        ({"extra_rules": ["a -> " + " and ".join(f"x{i}" for i in range(300))] * 3}, "extra_rules"),
    ):
        with pytest.raises(SteerError, match=what):
            admitted(fields)


@pytest.mark.parametrize(
    "added",
    [
        {"extra_rules": ["a and late -> b"]},
        {"facts": ["late"]},
        {"facts": ["late", "c"]},
        {"extra_rules": ["b -> storm", "storm and key -> late"], "facts": ["key"]},
        {"extra_rules": ["not c33 -> c"]},
        {"extra_rules": ["not late and c33 -> false"]},
        {"extra_rules": ["(a xor late) and (b or c33) -> c"]},
    ],
)
@pytest.mark.parametrize("semantics", ["closed", "open"])
def test_rules_in_tables_are_the_rules_of_a_program_of_their_own(added, semantics, write, model, tiny_tokenizer):
    """What a slot with rules of its own does, beside others, is what a file with these rules does."""
    text = f"semantics: {semantics}\n{CHAIN.replace('{when: c,', '{when: late, force: [w70]}, {when: c,')}"
    steering = steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(text), **added).steering
    (whole,) = steering._resolved
    from llm_steer.artifact import Shelf
    from llm_steer.tokens import Vocabulary

    vocabulary = Vocabulary(tiny_tokenizer, 512)
    declared = ActivationReasoningParams(rules=write(text), allow_rules=4).resolve(vocabulary, steering.shelf)
    shelf = Shelf(steering.shelf.model, named=tuple(steering.shelf.read), declared=(declared,))
    context = Context(4, torch.device("cpu"), 512, 2, 32, 64)
    runs = []
    for given, asked, source in (
        (whole.params, whole.params, steering.shelf),
        (declared, ActivationReasoningParams(rules="rules", **added).resolve(vocabulary, shelf), shelf),
    ):
        runtime = Runtime(replace(context, shelf=source), Markers(), declared=(spec.Steer(ActivationReasoning, given),))
        for slot, own in ((0, asked), (1, given)):
            if source is shelf and slot:
                own = ActivationReasoningParams(rules="rules").resolve(vocabulary, shelf)
            runtime.admit(slot, (spec.Steer(ActivationReasoning, own),), torch.tensor(PROMPT))
        ids, hidden = torch.tensor([*PROMPT, 40, 41, 42]), states(model, [*PROMPT, 40, 41, 42])
        count = len(ids)
        tokens = runtime.forward(
            torch.cat([ids, ids]), torch.arange(2).repeat_interleave(count), torch.arange(count).repeat(2)
        )
        plugin = runtime.plugin(ActivationReasoning)
        delta = plugin.residual(0, torch.cat([hidden, hidden]), tokens)
        runs.append((delta[:count], plugin._actions.acting[0].tolist(), plugin.finish(0, tokens, None), delta[count:]))
    (delta, acting, trace, _), (own_delta, own_acting, own_trace, beside) = runs
    assert torch.equal(own_delta, delta)
    assert own_acting == acting
    assert own_trace["moments"] == trace["moments"]
    if semantics == "closed":
        assert beside.abs().sum() > 0, "the file's rules alone steer"


def test_of_actions_that_exclude_each_other_the_trace_names_the_one_that_acts(model, write, tiny_tokenizer):
    text = """
concepts: {late: {words: [w400]}}
actions:
  - {when: c33, force: [w70], duration: 2}
  - {when: c33, force: [w71], duration: 1, priority: 1}
  - {when: c33 and not late, log: true}
"""
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(text))
    model.generate(torch.tensor([PROMPT]), **GREEDY)
    moments = model.steering.traces[0]["plugins"][0]["moments"]
    told = [(m["position"], [a["number"] for a in m["actions"]]) for m in moments]
    # From the last prompt token on; the second keeps the first from acting for as long as it acts itself.
    assert told[:4] == [(4, []), (5, [1, 2]), (6, [0, 2]), (7, [2])]
