"""Which pieces are banned, and that nothing else is touched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from llm_steer.plugins.baselines import NoWait, NoWaitParams
from llm_steer.plugins.baselines.no_wait import SEEDS, pieces_with

from core_oracles import CPU, long
from llm_steer import SteerError
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime, replay
from llm_steer.spec import Steer

MARKERS = Markers(((1,),), ((2,),))
PIECES = [
    "wait",
    "Ġwait",
    "ĠWAIT",
    "▁Wait",
    "Wait,",
    '"But',
    "button",
    "Ġbutton",
    "Ohio",
    "oh",
    "Ġ",
    "company",
    "await",
    "wait_1",
]


def vocabulary(pieces):
    return SimpleNamespace(pieces={piece: i for i, piece in enumerate(pieces)}, size=len(pieces), check_ids=lambda *_: None)


def test_pieces():
    def found(match, keep=()):
        return [PIECES[i] for i in pieces_with(vocabulary(PIECES), list(SEEDS), match, list(keep))]

    words = ["wait", "Ġwait", "ĠWAIT", "▁Wait", "Wait,", '"But', "oh", "wait_1"]
    assert sorted(found("word")) == sorted(words)
    assert sorted(found("contains")) == sorted(set(PIECES) - {"Ġ"})
    assert set(found("contains", ["BUTTON", "ohio"])) == set(PIECES) - {"Ġ", "button", "Ġbutton", "Ohio"}


def test_pieces_beyond_the_logits_are_left_out():
    some = vocabulary(PIECES)
    some.size = 1
    assert pieces_with(some, ["wait"], "word", []) == [0]


def test_parameters():
    resolved = NoWaitParams(words=["wait"]).resolve(vocabulary(PIECES))
    assert resolved.resolve(None) == resolved
    with pytest.raises(SteerError, match="some piece"):
        NoWaitParams(words=["zebra"]).resolve(vocabulary(PIECES))
    with pytest.raises(SteerError, match="token_ids"):
        NoWaitParams().resolve(None)


@pytest.mark.parametrize(("scope", "acts"), [("output", [True, True, True]), ("think", [False, True, False])])
def test_where_it_acts(scope, acts):
    """Before, inside and behind a think span."""
    params = NoWaitParams(token_ids=[5, 6], scope=scope)
    runtime = Runtime(Context(num_slots=2, device=CPU, vocab_size=8), MARKERS)
    runtime.admit(0, (Steer(NoWait, params),), long(7))
    for n, (token, expected) in enumerate(zip((0, 1, 2), acts, strict=True)):
        runtime.forward(long(token), long(0), long(n + 1), single=True)
        before = torch.randn(1, 8)
        before[0, 6] = -torch.inf
        after = before.clone()
        runtime.logits(after, long(0), long(n + 1))
        assert after[0, 5] == before[0, 5] - (100 if expected else 0)
        assert after[0, 6] == -torch.inf
        assert torch.equal(after[0, :5], before[0, :5])
    (part,) = replay((Steer(NoWait, params),), MARKERS, 8, [7], [0, 5, 1, 2, 6])["plugins"]
    assert part["positions"] == [1, 4]
