"""The short way through tracking, for passes that feed one token of each request, against the long one."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core_oracles import CPU, long
from llm_steer.markers import Markers, SpelledMarker
from llm_steer.plugin import Rows, Tokens
from llm_steer.tracking import Tracker

TEXTS = ["<", "a", ">", "<a", "a>", ">\n", "</", "/", "\n", "\n\n", "<a>", "</a>"]
PARTS = tuple((i, text.encode()) for i, text in enumerate(TEXTS))
NEWLINES = (
    torch.tensor(["\n\n" in text for text in TEXTS]),
    torch.tensor([text.endswith("\n") for text in TEXTS]),
    torch.tensor([text.startswith("\n") for text in TEXTS]),
)
MARKERS = [
    Markers(((10,),), ((11,),)),
    Markers(((10,), (0, 1, 2)), ((11,), (6, 1))),
    Markers(SpelledMarker(b"<a>", PARTS), SpelledMarker(b"</a>", PARTS), *NEWLINES),
    Markers(((10,),), SpelledMarker(b"</a>", PARTS)),
    Markers(),
]
ID = st.integers(0, len(TEXTS) - 1)
IDS = st.lists(ID, max_size=6)
SLOTS = 4
NOBODY = SLOTS - 1


def same(mine: Tokens | Rows, other: Tokens | Rows, of: torch.Tensor) -> None:
    for name, value in vars(mine).items():
        assert torch.equal(value[of], getattr(other, name)[of]), name


@given(markers=st.sampled_from(MARKERS), prompts=st.lists(IDS, min_size=3, max_size=3), data=st.data())
@settings(max_examples=100, deadline=None)
def test_one_token_each(markers, prompts, data):
    """Also the last prompt token by itself, tokens that are fed again after a preemption, and slots that change hands."""
    short, plain = (Tracker(markers, SLOTS, CPU) for _ in range(2))
    at = {}

    def admit(slot, prompt, output):
        for tracker in (short, plain):
            tracker.admit(slot, long(*prompt), long(*output))
        at[slot] = data.draw(st.integers(0, len(prompt) + len(output)))
        known[slot] = [*prompt, *output]

    known: dict[int, list[int]] = {}
    for slot, prompt in enumerate(prompts):
        admit(slot, prompt, data.draw(IDS) if data.draw(st.booleans()) else [])
    for _ in range(data.draw(st.integers(1, 25))):
        if data.draw(st.integers(0, 9)) == 0:
            slot = data.draw(st.integers(0, 2))
            for tracker in (short, plain):
                tracker.release(slot)
            if data.draw(st.booleans()):
                admit(slot, data.draw(IDS), [])
            else:
                at.pop(slot, None)
        chosen = [slot for slot in at if data.draw(st.booleans())]
        parts = [(slot, at[slot]) for slot in chosen] + [(NOBODY, 5)] * data.draw(st.integers(0, 2))
        fed = []
        for slot, position in parts:
            ids = known[slot] if slot != NOBODY else []
            fed.append(ids[position] if position < len(ids) else data.draw(ID))
            if slot != NOBODY:
                at[slot] += 1
        ids, slots, positions = long(*fed), long(*(s for s, _ in parts)), long(*(p for _, p in parts))
        steered = slots != NOBODY
        same(short.advance(ids, slots, positions, single=True), plain.advance(ids, slots, positions), steered)
        expected = plain.rows(slots, positions)
        same(short.rows(slots, positions), expected, steered)  # made of what was fed
        same(short.rows(slots.clone(), positions), expected, steered)  # looked up
        assert not short.rows(slots, positions).live[~steered].any()


def test_rows_are_made_anew_when_a_slot_changes_hands():
    tracker = Tracker(MARKERS[0], 2, CPU)
    tracker.admit(0, long(10), long())
    slot, position = long(0), long(1)
    tracker.advance(long(1), slot, position, single=True)
    assert tracker.rows(slot, position).live.tolist() == [True]
    tracker.release(0)
    assert tracker.rows(slot, position).live.tolist() == [False]
