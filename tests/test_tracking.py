"""Tracking against an oracle that sees a request's whole list of ids, however the tokens are delivered."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core_oracles import CPU, State, facts, long, one_of, row_of, spelled, states, token_of
from llm_steer import tracking
from llm_steer.markers import Markers, SpelledMarker
from llm_steer.plugin import Rows
from llm_steer.tracking import RING, Tracker, sampled_from

OPEN, CLOSE = 7, 8
SIMPLE = Markers(((OPEN,),), ((CLOSE,),))

TEXTS = ["<", "a", ">", "<a", "a>", ">\n", "</", "/", "\n", "\n\n", "x", "<a>", "x</a", ".\n\n", "</a>", "\n<"]
"""What the ids of these tests spell."""
VOCAB = len(TEXTS)


def text_of(ids: list[int]) -> str:
    return "".join(TEXTS[i] for i in ids)


def newlines() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(["\n\n" in text for text in TEXTS]),
        torch.tensor([text.endswith("\n") for text in TEXTS]),
        torch.tensor([text.startswith("\n") for text in TEXTS]),
    )


def is_boundary(ids: list[int]) -> bool:
    """The last id's text holds a blank line, or completes one with the text of the id before."""
    text, before = TEXTS[ids[-1]], TEXTS[ids[-2]] if len(ids) > 1 else ""
    return "\n\n" in text or (before.endswith("\n") and text.startswith("\n"))


def flat(*parts: tuple[int, int, list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, slots, positions of (slot, first position, ids) one after another."""
    ids = [i for _, _, part in parts for i in part]
    slots = [slot for slot, _, part in parts for _ in part]
    positions = [first + n for _, first, part in parts for n in range(len(part))]
    return long(*ids), long(*slots), long(*positions)


ID = st.integers(0, VOCAB - 1)
SEQUENCE = st.lists(ID, min_size=1, max_size=3).map(tuple)


@st.composite
def markers(draw: st.DrawFn) -> tuple[Markers, object, object]:
    """Markers of either kind, and the oracle's idea of them."""
    table = newlines() if draw(st.booleans()) else ()
    if draw(st.booleans()):
        parts = tuple((i, text.encode()) for i, text in enumerate(TEXTS))
        opener, closer = SpelledMarker(b"<a>", parts), SpelledMarker(b"</a>", parts)
        return Markers(opener, closer, *table), spelled("<a>", text_of), spelled("</a>", text_of)
    openers = draw(st.lists(SEQUENCE, min_size=1, max_size=3, unique=True))
    closers = draw(st.lists(SEQUENCE, max_size=3, unique=True))
    # One id cannot open and close at once.
    closers = [c for c in closers if not any(c[-len(o) :] == o or o[-len(c) :] == c for o in openers)]
    return Markers(tuple(openers), tuple(closers), *table), one_of(openers), one_of(closers)


class Delivery(RuleBasedStateMachine):
    """Requests come and go while their tokens arrive in any portions, again, and are taken back."""

    NUM_SLOTS = 4

    @initialize(kind=markers(), ring=st.sampled_from([1, 3, 5, 16]))
    def begin(self, kind, ring):
        self.markers, self.opens, self.closes = kind
        self._ring, tracking.RING = tracking.RING, ring
        self.ring = ring
        self.tracker = Tracker(self.markers, self.NUM_SLOTS, CPU)
        self.nobody = self.NUM_SLOTS - 1
        # Of each slot: all ids; how many are the prompt, were known at admission, are fed and stand, were fed at most.
        self.requests: dict[int, dict] = {}

    def teardown(self):
        if hasattr(self, "_ring"):
            tracking.RING = self._ring

    def admit(self, slot, ids, prompt_len, cached):
        self.tracker.admit(slot, long(*ids[:prompt_len]), long(*ids[prompt_len:]))
        base = len(ids)
        fed = min(cached, max(base - 1, 0))
        self.requests[slot] = {"ids": list(ids), "prompt_len": prompt_len, "base": base, "fed": fed, "most": fed}

    def may_go_back(self, request):
        return max(0, min(self.ring - 1 - (request["most"] - request["fed"]), request["fed"] - request["base"]))

    @rule(slot=st.integers(0, 2), prompt=st.lists(ID, max_size=25), cached=st.integers(0, 25))
    def arrive(self, slot, prompt, cached):
        """Also onto a slot that another request has."""
        self.admit(slot, prompt, len(prompt), cached)

    @rule(slot=st.integers(0, 2))
    def leave(self, slot):
        self.tracker.release(slot)
        self.requests.pop(slot, None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def preempt(self, data):
        """What was sampled but not fed comes back too; some of it may still be cached."""
        slot = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[slot]
        if data.draw(st.booleans()):
            self.tracker.release(slot)
        ids = request["ids"][: max(request["fed"], request["base"])] + data.draw(st.lists(ID, max_size=1))
        self.admit(slot, ids, request["prompt_len"], data.draw(st.integers(0, len(ids))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def take_back(self, data):
        """Drafts are rejected: other tokens will be fed at their positions."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        request["fed"] -= data.draw(st.integers(0, self.may_go_back(request)))
        del request["ids"][max(request["fed"], request["base"]) :]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def forward(self, data):
        """Some tokens of some requests, in one flat batch with tokens of requests that do not steer."""
        parts, one_each = [], data.draw(st.booleans())
        for slot in data.draw(st.lists(st.sampled_from([*self.requests, self.nobody]), min_size=1, unique=True)):
            if slot == self.nobody:
                parts.append((slot, data.draw(st.integers(0, 30)), data.draw(st.lists(ID, max_size=1 if one_each else 4))))
                continue
            request = self.requests[slot]
            ids, fed = request["ids"], request["fed"]
            again = data.draw(st.integers(0, self.may_go_back(request)))
            count = 1 if one_each else data.draw(st.integers(0, 30)) + again
            first = fed - again
            missing = first + count - len(ids)
            # What was fed before is fed the same again; what is known from admission comes before what is new.
            ids.extend(data.draw(st.lists(ID, min_size=max(0, missing), max_size=max(0, missing))))
            parts.append((slot, first, ids[first : first + count]))
            request["fed"] = max(fed, first + count)
            request["most"] = max(request["most"], request["fed"])
        ids, slots, positions = flat(*parts)
        alone = all(len(part) <= 1 for _, _, part in parts) and data.draw(st.booleans())
        tokens = self.tracker.advance(ids, slots, positions, single=alone)
        if alone:  # then the rows of the very tokens are at hand
            at_hand, anew = self.tracker.rows(slots, positions), self.tracker.rows(slots.clone(), positions)
            mine = slots != self.nobody
            for name, value in vars(at_hand).items():
                assert torch.equal(value[mine], getattr(anew, name)[mine]), name
            assert not at_hand.live[~mine].any()
            assert not at_hand.thinking[~mine].any()
        expected = [token for part in parts for token in self.expected_tokens(*part)]
        for seen, is_boundary, slot, (what, boundary) in zip(
            facts(tokens), tokens.boundary.tolist(), tokens.slot.tolist(), expected, strict=True
        ):
            assert seen[0 if slot != self.nobody else 1 :] == what
            boundary, certain = boundary
            boundary = boundary and self.markers.blank_line is not None
            assert is_boundary == boundary or (boundary and not certain)
        assert tokens.is_prompt.tolist() == (tokens.output_position < 0).tolist()

    def expected_tokens(self, slot, first, ids):
        if slot == self.nobody:  # its tokens carry nothing
            return [((False, -1, False), (False, True))] * len(ids)
        request = self.requests[slot]
        prompt_len = request["prompt_len"]
        of = states(request["ids"], prompt_len, self.opens, self.closes)
        found = []
        for position in range(first, first + len(ids)):
            state = of[position] if position >= prompt_len - 1 else State()  # in the prompt, only its last token carries it
            what = token_of(state, position, prompt_len)
            # A blank line over two tokens, the first of which was cached long before the prompt's end, may not be seen.
            lost = position == first < prompt_len - self.ring and request["base"] == prompt_len
            found.append((what, (is_boundary(request["ids"][: position + 1]), not lost)))
        return found

    @invariant()
    def rows(self):
        for slot in range(self.NUM_SLOTS) if hasattr(self, "tracker") else ():
            request = self.requests.get(slot)
            if request is None:
                view = self.tracker.rows(long(*[slot] * 40), torch.arange(-1, 39))
                assert not view.live.any()
                assert not view.thinking.any()
                assert not view.think_ended.any()
                assert (view.think_position == -1).all()
                continue
            prompt_len, base, fed = request["prompt_len"], request["base"], request["fed"]
            of = [State(), *states(request["ids"], prompt_len, self.opens, self.closes)]
            # Rows of what was fed, as far back as tokens can be taken back; and of the last token known from admission.
            positions = sorted({base - 1, *range(max(base, request["most"] - self.ring), fed)})
            view = self.tracker.rows(long(*[slot] * len(positions)), long(*positions))
            assert facts(view) == [row_of(of[p + 1], p, prompt_len) for p in positions]
            assert view.live.all()
            early = torch.arange(-1, base - 1)
            assert not self.tracker.rows(torch.full_like(early, slot), early).live.any()
            late = max(request["most"], base) + torch.arange(10)
            assert not self.tracker.rows(torch.full_like(late, slot), late).live.any()


Delivery.TestCase.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
TestDelivery = Delivery.TestCase


@given(kind=markers(), prompt=st.lists(ID, max_size=20), output=st.lists(ID, max_size=2 * RING + 40), data=st.data())
@settings(max_examples=60, deadline=None)
def test_an_output_at_once_equals_token_by_token(kind, prompt, output, data):
    """More than the ring holds included; and the rows that are derived from it equal those taken on the way."""
    markers, opens, closes = kind
    output = output * data.draw(st.sampled_from([1, 1, 5]))
    whole, stepwise = (Tracker(markers, 2, CPU) for _ in range(2))
    for tracker in (whole, stepwise):
        tracker.admit(0, long(*prompt), long())
    start = len(prompt)
    first = whole.rows(long(0), long(start - 1))
    at_once = whole.advance(*flat((0, start, output)))
    assert len(at_once.ids) == len(output)

    live, one_by_one, boundary = [], [], []
    for n, token in enumerate(output):
        live.append(stepwise.rows(long(0), long(start + n - 1)))
        tokens = stepwise.advance(*flat((0, start + n, [token])))
        one_by_one += facts(tokens)
        boundary += tokens.boundary.tolist()
    assert facts(at_once) == one_by_one
    assert at_once.boundary.tolist() == boundary
    of = states([*prompt, *output], start, opens, closes)
    assert one_by_one == [token_of(of[p], p, start) for p in range(start, start + len(output))]

    derived = sampled_from(at_once, Rows(**{name: value[: len(output)] for name, value in vars(first).items()}))
    for name, value in vars(derived).items():
        assert value.tolist() == [item for row in live for item in getattr(row, name).tolist()], name


def test_more_than_the_ring_at_once_leaves_the_end_known():
    tracker = Tracker(SIMPLE, 2, CPU)
    tracker.admit(0, long(1, OPEN), long())
    output = [1] * (3 * RING) + [CLOSE] + [1] * (RING - 2)
    tracker.advance(*flat((0, 2, output)))
    end = 2 + len(output) - 1
    positions = torch.arange(end - RING + 1, end + 1)
    view = tracker.rows(torch.zeros_like(positions), positions)
    assert view.live.all()
    assert view.thinking.tolist() == [p < 2 + 3 * RING for p in positions.tolist()]


@pytest.mark.parametrize("taken_back", [1, RING - 1])
def test_a_draft_of_the_end_marker_is_taken_back(taken_back):
    tracker = Tracker(SIMPLE, 2, CPU)
    tracker.admit(0, long(OPEN), long())
    tracker.advance(*flat((0, 1, [1, 2, 3])))
    draft = [CLOSE] * taken_back
    after = tracker.advance(*flat((0, 4, draft)))
    assert not after.thinking.any()
    assert after.think_ended.all()
    assert tracker.rows(long(0, 0), long(3, 4)).thinking.tolist() == [True, False]
    redone = tracker.advance(*flat((0, 4, [5])))
    assert facts(redone) == [(3, True, 3, False)]
    assert facts(tracker.rows(long(0), long(4))) == [(4, True, 4, False)]


def test_half_a_marker_in_the_prompt_is_completed_by_the_output():
    tracker = Tracker(Markers(((1, 2, 3),), ((4, 5),)), 2, CPU)
    tracker.admit(0, long(0, 1, 2), long())
    assert facts(tracker.advance(*flat((0, 3, [3])))) == [(0, True, -1, False)]
    tracker.admit(0, long(1, 2, 3, 9, 4), long())
    # Its end was generated, if only by half.
    assert facts(tracker.advance(*flat((0, 5, [5, 1])))) == [(0, False, 0, True), (1, False, 1, True)]


def test_an_end_in_the_prompt_is_not_a_generated_end():
    tracker = Tracker(SIMPLE, 2, CPU)
    tracker.admit(0, long(OPEN, 1, CLOSE, 2), long())
    assert facts(tracker.rows(long(0), long(3))) == [(0, False, 0, False)]
    assert facts(tracker.advance(*flat((0, 4, [3, OPEN, 1, OPEN, CLOSE, OPEN, 1])))) == [
        (0, False, 0, False),
        (1, True, -1, False),
        (2, True, 0, False),
        (3, True, 1, False),  # inside a span an opener opens nothing
        (4, False, 2, True),
        (5, True, -1, True),
        (6, True, 0, True),
    ]


def test_ids_that_the_logits_do_not_hold_are_tracked():
    """Placeholders of images and embeddings in a prompt may be negative, or beyond the vocabulary."""
    tracker = Tracker(Markers(((3,),), SpelledMarker(b"</a>", ((0, b"</a>"),)), *newlines()), 2, CPU)
    tracker.admit(0, long(-1, 10**6, 8), long())
    tokens = tracker.advance(*flat((0, 0, [-1, 10**6, 8, 10**6, -1, 8, 8, 0])))
    assert tokens.boundary.tolist() == [False] * 6 + [True, False]
    assert tokens.think_ended.tolist() == [False] * 7 + [True]


def test_an_empty_prompt_and_an_empty_pass():
    tracker = Tracker(SIMPLE, 2, CPU)
    tracker.admit(0, long(), long())
    assert facts(tracker.rows(long(0), long(-1))) == [(0, False, -1, False)]
    assert facts(tracker.advance(long(), long(), long())) == []
    assert facts(tracker.advance(*flat((0, 0, [OPEN, 1])))) == [(0, True, -1, False), (1, True, 0, False)]


def test_markers_travel_between_processes():
    parts = ((3, b"</th"), (9, "ink>é".encode()), (4, b"\xff"))
    sent = Markers(((1, 2), (3,)), SpelledMarker(b"</think>", parts))
    assert Markers.from_wire(json.loads(json.dumps(sent.to_wire()))) == sent
    assert Markers.from_wire(Markers().to_wire()) == Markers()
    assert Markers.from_wire(json.loads(json.dumps(Markers().to_wire(boundaries=True)))) == Markers()


@pytest.mark.parametrize("cut", [["|a|b|a|"], ["|", "a|b", "|a|"], ["|a|b", "|a|b|a", "|"], ["|a|a", "|", "a|"]])
def test_a_marker_in_the_text_may_begin_with_the_end_of_another(cut):
    """However it is cut into tokens, each occurrence counts, those included that share bytes."""
    texts = ["|a|", "b", *cut]
    parts = tuple((i, text.encode()) for i, text in enumerate(texts))
    ids = list(range(2, 2 + len(cut)))
    tokens = Markers((), SpelledMarker(b"|a|", parts)).automaton
    codes = tokens.read(torch.zeros(1, dtype=torch.int64), tokens.kinds_of(long(ids[0])))
    found = [bool(codes & 1)]
    for i in ids[1:]:
        codes = tokens.read(codes & tokens.matched, tokens.kinds_of(long(i)))
        found.append(bool(codes & 1))
    whole = ["".join(cut[: n + 1]) for n in range(len(cut))]
    expected = [sum(text.startswith("|a|", i) for i in range(len(text))) for text in whole]
    assert found == [b > a for a, b in zip([0, *expected], expected, strict=False)]


def test_step_delimiters_travel_only_if_asked():
    flags = [torch.tensor(row, dtype=torch.bool) for row in ([0, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0])]
    sent = Markers(((1,),), (), *flags)
    assert Markers.from_wire(sent.to_wire()) == Markers(((1,),))
    got = Markers.from_wire(json.loads(json.dumps(sent.to_wire(boundaries=True))))
    assert (got.openers, got.closers) == (sent.openers, sent.closers)
    for name in ("blank_line", "ends_in_newline", "starts_with_newline"):
        assert torch.equal(getattr(got, name), getattr(sent, name)), name


@pytest.mark.parametrize("marker", [(1, 2, 3), (2, 3)])
def test_taking_back_all_that_can_be_keeps_half_a_marker(marker):
    """The ids before the first that is taken back are still known."""
    tracker = Tracker(Markers((), (marker,)), 2, CPU)
    tracker.admit(0, long(0), long())
    tracker.advance(*flat((0, 1, [*marker[:-1], *[9] * (RING - 1)])))
    assert tracker.advance(*flat((0, len(marker), [3]))).think_ended.tolist() == [True]


def test_a_blank_line_next_to_what_is_cached_of_an_output_is_seen():
    """After a preemption, however long ago its first half was generated."""
    tracker = Tracker(Markers(((OPEN,),), ((CLOSE,),), *newlines()), 2, CPU)
    line_break = TEXTS.index("\n")
    output = [line_break, line_break, *[1] * (2 * RING)]
    tracker.admit(0, long(1), long(*output))
    assert tracker.advance(*flat((0, 2, output[1:]))).boundary.tolist() == [True, *[False] * (2 * RING)]


def test_the_end_of_one_request_is_not_the_beginning_of_its_neighbour():
    """Next to each other in a batch, at positions that would fit."""
    tracker = Tracker(Markers((), ((1, 2),), *newlines()), 3, CPU)
    line_break = TEXTS.index("\n")
    for slot in (0, 1):
        tracker.admit(slot, long(5, 5), long())
    tokens = tracker.advance(*flat((0, 2, [1]), (1, 3, [2])))
    assert tokens.think_ended.tolist() == [False, False]
    tokens = tracker.advance(*flat((0, 3, [line_break]), (1, 4, [line_break])))
    assert tokens.boundary.tolist() == [False, False]
    assert tracker.advance(*flat((0, 4, [1, 2]))).think_ended.tolist() == [False, True]


def test_a_prompt_that_is_fed_again_carries_no_state_but_at_its_end():
    """With and without an output behind it."""
    for output in ([], [3, 4]):
        tracker = Tracker(SIMPLE, 2, CPU)
        tracker.admit(0, long(OPEN, 1, 2), long(*output))
        tokens = tracker.advance(*flat((0, 0, [OPEN, 1, 2, *output])))
        assert tokens.thinking.tolist() == [False, False, True, *[True] * len(output)]
        assert tokens.think_position.tolist() == [-1, -1, -1, *range(len(output))]


def test_nothing_comes_before_the_first_token():
    """Though a long prompt's end lies in the cell of the ring where position -1 would."""
    line_break = TEXTS.index("\n")
    prompt = [line_break] + [1] * (4 * RING)
    for first in range(RING, 3 * RING):
        prompt[first] = line_break
    tracker = Tracker(Markers(((OPEN,),), ((CLOSE,),), *newlines()), 2, CPU)
    tracker.admit(0, long(*prompt[: 3 * RING]), long())
    assert tracker.advance(*flat((0, 0, prompt[:2]))).boundary.tolist() == [False, False]


@pytest.mark.parametrize("change", ["release", "admit"])
def test_rows_at_hand_are_forgotten_when_the_slot_changes_hands(change):
    tracker = Tracker(SIMPLE, 2, CPU)
    tracker.admit(0, long(OPEN), long())
    slot, position = long(0), long(1)
    tracker.advance(long(5), slot, position, single=True)
    assert tracker.rows(slot, position).live.tolist() == [True]
    if change == "release":
        tracker.release(0)
    else:
        tracker.admit(0, long(1), long())
    rows = tracker.rows(slot, position)
    assert rows.live.tolist() == [False]
    assert rows.thinking.tolist() == [False]


def test_tokens_of_nobody_carry_nothing():
    tracker = Tracker(Markers(((OPEN,),), ((CLOSE,),), *newlines()), 2, CPU)
    blank = TEXTS.index("\n\n")
    for single in (False, True):
        tokens = tracker.advance(long(OPEN, blank, CLOSE), long(1, 1, 1), long(0, 1, 2), single=single)
        for name in ("thinking", "think_ended", "boundary"):
            assert not getattr(tokens, name).any(), name
        assert (tokens.think_position == -1).all()
        assert tokens.is_prompt.all()
        assert not tracker.rows(long(1, 1), long(1, 2)).live.any()
