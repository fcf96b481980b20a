"""Parameters: what goes together, what words become, what a request inherits from a server's defaults."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.reflection_cycle import ReflectionCycle, ReflectionCycleParams
from llm_steer.plugins.reflection_cycle.params import PRESETS, REFERENCE_WORDS, SHAPED_BY

from core_oracles import CPU
from core_tokenizers import byte_level
from llm_steer import SteerError, spec
from llm_steer.plugin import Context
from llm_steer.tokens import Vocabulary

PLAIN = Vocabulary(byte_level(), 500)
REASONING = Vocabulary(byte_level("<think>", "</think>"), 500)


def params(**fields) -> ReflectionCycleParams:
    (steer,) = spec.parse("reflection_cycle", fields)
    return steer.params


def refused(**fields) -> str:
    with pytest.raises(SteerError) as caught:
        spec.parse("reflection_cycle", fields)
    return str(caught.value)


def ids_of(*words: str) -> list[int]:
    return [PLAIN.pieces[word] for word in words]


def test_defaults_are_the_paper_s():
    default = params()
    assert (default.amplitude, default.period, default.phase, default.schedule) == (5.0, 1200.0, 0.0, "triangular")
    assert default.after_end == "off"
    assert default.window is None
    assert REFERENCE_WORDS == ("wait", "Wait", "but", "But", "Alternatively")


def test_every_field_and_schedule_is_described():
    schema = ReflectionCycleParams.model_json_schema()
    assert all(field.get("description") for field in schema["properties"].values())
    assert set(SHAPED_BY) == set(schema["properties"]["schedule"]["enum"])


# -- words -> ids --------------------------------------------------------------------------------------------------------


def test_words_become_ids_once_each_in_order():
    resolved = params(token_ids=[7, 8, 7], words=["Wait", "wait", "Wait"]).resolve(PLAIN)
    assert resolved.token_ids == [7, 8, *ids_of("Wait", "wait")]
    assert resolved.words == []
    again = params(token_ids=ids_of("Wait"), words=["Wait"]).resolve(PLAIN)
    assert again.token_ids == ids_of("Wait")


def test_without_words_and_ids_they_are_the_reference_s():
    found = [word for word in REFERENCE_WORDS if word in PLAIN.pieces]
    assert params().resolve(PLAIN).token_ids == ids_of(*found)
    assert params(token_ids=[9]).resolve(PLAIN).token_ids == [9]


def test_spaces_and_cases_on_request():
    forms = params(words=["wait"], leading_space=True, ignore_case=True).resolve(PLAIN)
    pieces = ["wait", "Ġwait", "Wait", "ĠWait", "WAIT", "ĠWAIT"]
    assert forms.token_ids == ids_of(*[piece for piece in pieces if piece in PLAIN.pieces])


def test_words_of_several_pieces():
    with pytest.raises(
        SteerError, match=r'^words: got \[\'nonsense\'\]; must be words that are one piece .*multi_piece="first"'
    ):
        params(words=["nonsense"]).resolve(PLAIN)
    first = params(words=["nonsense"], multi_piece="first").resolve(PLAIN)
    assert len(first.token_ids or []) == 1
    assert params(words=["nonsense", "wait"]).resolve(PLAIN).token_ids == ids_of("wait")


def test_ids_beyond_the_logits():
    with pytest.raises(SteerError, match=r"^token_ids: got 500; must be a token id between 0 and 499"):
        params(token_ids=[1, 500]).resolve(PLAIN)


def test_no_more_ids_than_another_process_would_take():
    many = list(range(900, 1924))
    wide = Vocabulary(byte_level(), 2000)
    assert params(token_ids=many).resolve(wide).token_ids == many
    assert params(token_ids=many[1:], words=["wait"]).resolve(wide).token_ids == [*many[1:], PLAIN.pieces["wait"]]
    with pytest.raises(
        SteerError, match=r"^token_ids: got a list of 1025 items; must be at most 1024 tokens, those of the words"
    ):
        params(token_ids=many, words=["wait"]).resolve(wide)


@pytest.mark.parametrize(
    ("fields", "field"),
    [({}, "words"), ({"words": ["wait"]}, "words"), ({"token_ids": [3]}, "origin"), ({"token_ids": []}, "words")],
)
def test_without_a_tokenizer_numbers_are_needed(fields, field):
    with pytest.raises(SteerError, match=rf"^{field}: got .* where no tokenizer is at hand"):
        params(**fields).resolve(None)
    complete = params(token_ids=[3], origin="output")
    assert complete.resolve(None) == complete


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_resolving_twice_changes_nothing(data):
    fields = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "words": st.lists(st.sampled_from(["wait", "But", "nonsense", "Hmm"]), min_size=1, max_size=4),
                "token_ids": st.lists(st.integers(0, 499), min_size=1, max_size=5),
                "multi_piece": st.just("first"),
                "leading_space": st.booleans(),
                "origin": st.sampled_from(["auto", "think", "output"]),
                "after_end": st.sampled_from(["off", "restart", "continue"]),
                "preset": st.just("reference"),
            },
        )
    )
    vocabulary = data.draw(st.sampled_from([PLAIN, REASONING]))
    try:
        once = params(**fields).resolve(vocabulary)
    except SteerError:
        assert set(fields["words"]) <= {"nonsense", "Hmm"}  # nothing of it is one piece
        return
    assert once.resolve(vocabulary) == once
    assert once.resolve(None) == once
    assert once.token_ids == list(dict.fromkeys(once.token_ids or []))
    assert once.origin != "auto"
    ReflectionCycle(Context(num_slots=2, device=CPU, vocab_size=500)).admit(0, once, None)  # type: ignore[arg-type]


def test_the_origin_depends_on_the_tokenizer():
    assert params().resolve(REASONING).origin == "think"
    assert params().resolve(PLAIN).origin == "output"
    assert params(origin="think").resolve(PLAIN).origin == "think"


# -- presets -------------------------------------------------------------------------------------------------------------


def test_the_reference_preset_spells_everything_out():
    preset = params(preset="reference")
    for name, value in PRESETS["reference"].items():
        assert getattr(preset, name) == value
    assert preset.window == [[0, 8192]]
    assert preset.origin == "output"
    assert not preset.leading_space
    resolved = preset.resolve(REASONING)
    assert resolved.token_ids == [REASONING.pieces[word] for word in REFERENCE_WORDS if word in REASONING.pieces]
    assert resolved.after_end == "off"


def test_fields_beside_a_preset_win():
    preset = params(preset="reference", window=[[5, 6]], words=["Hmm"])
    assert preset.window == [[5, 6]]
    assert preset.words == ["Hmm"]
    assert preset.origin == "output"


def test_the_reference_finds_no_end_where_the_tokenizer_has_none():
    assert params(preset="reference").resolve(PLAIN).after_end == "continue"
    assert params(preset="reference", after_end="restart").resolve(PLAIN).after_end == "restart"
    assert params(preset="reference", after_end="off").resolve(PLAIN).after_end == "off"
    assert params().resolve(PLAIN).after_end == "off"


# -- what a request inherits ---------------------------------------------------------------------------------------------


def merged(defaults: dict, own: dict) -> ReflectionCycleParams:
    (steer,) = spec.parse("reflection_cycle", own, spec.parse("reflection_cycle", defaults))
    return steer.params


@pytest.mark.parametrize(
    ("defaults", "own", "expected"),
    [
        ({"amplitude": 3, "period": 600}, {"amplitude": 7}, {"amplitude": 7, "period": 600}),
        ({"amplitude": 3}, {}, {"amplitude": 3}),
        # The schedule that is the default anyway changes nothing.
        ({"amplitude": 3, "period": 600}, {"schedule": "triangular"}, {"amplitude": 3, "period": 600}),
        # Another schedule has its own form, but moves the same words in the same place.
        (
            {"amplitude": 3, "period": 600, "words": ["Hmm"], "window": [[0, 9]], "origin": "output"},
            {"schedule": "cosine"},
            {"amplitude": 5, "period": 1200, "words": ["Hmm"], "window": [[0, 9]], "origin": "output"},
        ),
        ({"period": 600}, {"schedule": "constant", "amplitude": -3}, {"amplitude": -3, "schedule": "constant"}),
        ({"schedule": "piecewise", "points": [[0, 1]]}, {"points": [[0, 2]]}, {"points": [[0, 2]], "schedule": "piecewise"}),
        ({"schedule": "piecewise", "points": [[0, 1]]}, {"schedule": "silver"}, {"points": None, "schedule": "silver"}),
        # Words and ids replace each other.
        ({"words": ["Hmm"]}, {"token_ids": [3]}, {"words": None, "token_ids": [3]}),
        ({"token_ids": [3]}, {"words": ["Hmm"]}, {"words": ["Hmm"], "token_ids": None}),
        ({"token_ids": [3], "words": ["Hmm"]}, {"leading_space": True}, {"words": ["Hmm"], "token_ids": [3]}),
        # A preset starts afresh, and so does leaving one.
        ({"amplitude": 3, "words": ["Hmm"]}, {"preset": "reference"}, {"amplitude": 5, "words": list(REFERENCE_WORDS)}),
        ({"preset": "reference", "amplitude": 3}, {"preset": None}, {"amplitude": 5, "words": None, "origin": "auto"}),
        ({"preset": "reference", "amplitude": 3}, {"preset": "reference"}, {"amplitude": 3, "origin": "output"}),
        ({"preset": "reference"}, {"schedule": "constant"}, {"schedule": "constant", "window": [[0, 8192]]}),
        ({"window": [[0, 9]]}, {"window": None}, {"window": None}),
    ],
)
def test_a_request_over_a_server_s_defaults(defaults, own, expected):
    result = merged(defaults, own)
    assert {name: getattr(result, name) for name in expected} == expected


def test_what_does_not_fit_the_defaults_is_refused_in_the_request_s_words():
    defaults = spec.parse("reflection_cycle", {"schedule": "piecewise", "points": [[0, 1]]})
    with pytest.raises(SteerError, match=r"^steer_amplitude: got 3; must be left out with schedule='piecewise'"):
        spec.parse("reflection_cycle", {"amplitude": 3}, defaults, prefix="steer_")


# -- what goes together --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"schedule": "constant", "period": 5},
            "period: got 5; must be left out with schedule='constant', which does not read it",
        ),
        (
            {"schedule": "silver", "phase": 0.5},
            "phase: got 0.5; must be left out with schedule='silver', which does not read it",
        ),
        ({"points": [[0, 1]]}, "points: got [[0, 1]]; must be left out with schedule='triangular', which does not read it"),
        (
            {"schedule": "shuffled", "period": 7.5},
            "period: got 7.5; must be a whole number of tokens, at most 8192, with schedule='shuffled'",
        ),
        (
            {"schedule": "shuffled", "period": 9000},
            "period: got 9000; must be a whole number of tokens, at most 8192, with schedule='shuffled'",
        ),
        (
            {"shuffle_seed": 1},
            "shuffle_seed: got 1; must be left out with schedule='triangular', which does not read it",
        ),
        ({"schedule": "piecewise"}, "points: got None; must be a list of (t, offset) pairs with schedule='piecewise'"),
        (
            {"schedule": "piecewise", "points": [[-0.5, 1]]},
            "points: got [[-0.5, 1]]; must be pairs (t, offset) with t at least 0, below 2147483648 and strictly increasing",
        ),
        (
            {"schedule": "piecewise", "points": [[0, 1], [1e300, 1]]},
            "points: got [[0, 1], [1e+300, 1]]; must be pairs (t, offset) with t at least 0, below 2147483648 and strictly "
            "increasing",
        ),
        (
            {"schedule": "piecewise", "points": [[0, 101]]},
            "points: got [[0, 101]]; must be pairs (t, offset) with offsets between -100 and 100",
        ),
        ({"window": [[0, 5], [7, 7]]}, "window: got [[0, 5], [7, 7]]; must be pairs (start, end) with start below end"),
        ({"words": []}, "words: got []; must be a list with at least one word, unless token_ids are given"),
        (
            {"window": [1, 2, 3]},
            "window: got [1, 2, 3]; must be a list of pairs, or a flat list of an even number of numbers",
        ),
    ],
)
def test_fields_that_contradict_each_other(fields, message):
    assert refused(**fields) == message


def test_pairs_may_be_flat_and_tuples():
    nested = params(schedule="piecewise", points=[[0, 1], [9, -2.5]], window=[[0, 5], [7, 9]])
    assert nested == params(schedule="piecewise", points=[0, 1, 9, -2.5], window=[0, 5, 7, 9])
    assert nested == params(schedule="piecewise", points=((0, 1), (9, -2.5)), window=((0, 5), (7, 9)))
    assert nested == params(schedule="piecewise", points=(0, 1, 9, -2.5), window=(0, 5, 7, 9))
    assert params(words=("Hmm", "Wait")) == params(words=["Hmm", "Wait"])


def test_flags_may_be_0_and_1():
    assert params(leading_space=1, ignore_case=0) == params(leading_space=True, ignore_case=False)
