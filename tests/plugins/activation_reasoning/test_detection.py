"""Detection against its definition, in any portions, and the pieces that it is made of."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from ar_cases import (
    CPU,
    END,
    HIDDEN,
    NAMES,
    SPECIAL,
    dictionary,
    long,
    oracle,
    program,
    random_detected,
    score,
    story,
    tokens,
)  # fmt: skip
from hypothesis import given, settings
from hypothesis import strategies as st
from llm_steer.plugins.activation_reasoning.concepts import Dictionary, Tree, Tversky, feature_concept
from llm_steer.plugins.activation_reasoning.detection import Detector
from llm_steer.plugins.activation_reasoning.program import Detected
from llm_steer.plugins.activation_reasoning.sae import Code, Features
from llm_steer.plugins.activation_reasoning.scan import Runs, ordered, unordered
from llm_steer.plugins.activation_reasoning.scoring import Scorer

SLOTS = 4


def stream(rng: random.Random):
    """Requests with their ids and hidden states; multiples of 1/8, so that sums are exact everywhere."""
    requests = []
    for _ in range(rng.randint(1, 3)):
        count = rng.randint(1, 14)
        ids = [rng.choice([3, 4, 5, 5, 6, END, SPECIAL, 9, 10]) for _ in range(count)]
        hidden = [[rng.randint(-8, 16) / 8 for _ in range(HIDDEN)] for _ in range(count)]
        if rng.random() < 0.2:
            hidden[rng.randrange(count)] = [float("nan")] * HIDDEN
        requests.append((ids, hidden, rng.randint(1, count)))
    return requests


def portions(rng: random.Random, requests):
    """Forward passes: each takes the next few tokens of some requests, in any order, with nobody's tokens between."""
    done = [0] * len(requests)
    while any(d < len(r[0]) for d, r in zip(done, requests, strict=True)):
        slots, ids, positions, lens, hidden, keys = [], [], [], [], [], []
        for n in rng.sample(range(len(requests)), len(requests)):
            take = rng.randint(0, len(requests[n][0]) - done[n])
            for t in range(done[n], done[n] + take):
                slots.append(n)
                ids.append(requests[n][0][t])
                hidden.append(requests[n][1][t])
                positions.append(t)
                lens.append(requests[n][2])
                keys.append((n, t))
            done[n] += take
            if rng.random() < 0.3:
                slots.append(SLOTS - 1)
                ids.append(5)
                hidden.append([9.0] * HIDDEN)
                positions.append(rng.randrange(5))
                lens.append(0)
                keys.append(None)
        if ids:
            yield tokens(slots, ids, positions, lens), torch.tensor(hidden), keys


@given(seed=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_what_is_detected_is_what_the_definition_says(seed):
    rng = random.Random(seed)
    detected = [random_detected(rng, index) for index in range(6)]
    requests = stream(rng)
    truth = rng.choice(["crisp", "product"])
    detector = Detector([(program(detected, truth=truth), dictionary())], SLOTS, CPU)
    for slot in range(len(requests)):  # someone else's traces
        for flat, hidden, _ in portions(rng, [stream(rng)[0]]):
            detector(hidden, flat)
        detector.reset(slot)
    found, degrees = {}, {}
    for flat, hidden, keys in portions(rng, requests):
        passed = detector(hidden, flat)
        assert (passed.degrees is None) == (truth == "crisp")
        for at, (key, row) in enumerate(zip(keys, passed.facts.tolist(), strict=True)):
            if key is None:
                assert not any(row)
            found[key] = row
            degrees[key] = passed.degrees[at].tolist() if truth != "crisp" else None
    for n, (ids, hidden, prompt_len) in enumerate(requests):
        assert not detector.missed[n].any()
        assert detector.broken[n].item() == sum(h[0] != h[0] and t > 0 and ids[t] != SPECIAL for t, h in enumerate(hidden))
        for column, one in enumerate(detected):
            expected = oracle(one, ids, hidden, prompt_len)
            where = next(n_ for n_, literal in enumerate(detector.literals) if literal[1] == one.literal)
            assert [found[n, t][where] for t in range(len(ids))] == expected, (one, ids, prompt_len, column)
            if truth != "crisp":
                levels = [level for _, level in story(one, ids, hidden, prompt_len)]
                assert [degrees[n, t][where] for t in range(len(ids))] == pytest.approx(levels, abs=1e-6), one


def test_a_request_that_is_fed_again_from_the_start_gives_the_same():
    rng = random.Random(1)
    detected = [random_detected(rng, index) for index in range(12)]
    (ids, hidden, prompt_len), *_ = stream(random.Random(5))
    flat = tokens([0] * len(ids), ids, range(len(ids)), [prompt_len] * len(ids))
    detector = Detector([(program(detected), dictionary())], SLOTS, CPU)
    first = detector(torch.tensor(hidden), flat).facts
    again = detector(torch.tensor(hidden), flat).facts
    assert torch.equal(first, again)
    assert not detector.missed[0].any()


@pytest.mark.parametrize("first", [1, 5])
def test_a_request_that_is_fed_again_from_the_middle_goes_on_where_it_was(first):
    rng = random.Random(1)
    detected = [random_detected(rng, index) for index in range(12)]
    found = (request for seed in range(100) for request in stream(random.Random(seed)))
    ids, hidden, prompt_len = next(request for request in found if len(request[0]) > 9)
    plain, again = (Detector([(program(detected), dictionary())], SLOTS, CPU) for _ in range(2))

    def feed(detector, start, end):
        flat = tokens([0] * (end - start), ids[start:end], range(start, end), [prompt_len] * (end - start))
        return detector(torch.tensor(hidden[start:end]), flat)

    whole = feed(plain, 0, len(ids))
    feed(again, 0, 7)
    passed = feed(again, first, len(ids))
    assert torch.equal(passed.facts[7 - first :], whole.facts[7:])
    assert passed.slot.tolist() == [SLOTS - 1] * (7 - first) + [0] * (len(ids) - 7)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(again._state, plain._state, strict=True))


def test_tokens_that_never_came_are_told():
    detector = Detector([(program([random_detected(random.Random(0), 0)]), dictionary())], SLOTS, CPU)
    detector(torch.zeros(2, HIDDEN), tokens([0, 0], [9, 9], [4, 5], [6, 6]))
    assert detector.missed[0].item() == 1
    detector.reset(0)
    assert detector.missed[0].item() == 0


def test_two_subjects_in_one_sentence_are_kept_apart():
    """``Max is a wumpus and Sam a tumpus.``: each class goes to the subject next before it."""
    names = ["max", "sam", "wumpus", "tumpus"]
    words = {name: [[20 + index]] for index, name in enumerate(names)}

    def bound(kind, subject, other):
        return Detected(
            atom=f"{names[kind]}({names[subject]})", positive=True, concepts=[subject, kind], without=[other], pattern=True,
            within="sentence", level="token", aggregate="max", scope="both", hold=None, threshold=0.5,
        )  # fmt: skip

    detected = [bound(kind, subject, 1 - subject) for kind in (2, 3) for subject in (0, 1)]
    book = program(detected, concepts=names, words=words, dictionary=None)
    max_, sam, wumpus, tumpus, is_, and_ = 20, 21, 22, 23, 30, 31
    cases = {
        (max_, is_, wumpus, and_, sam, is_, tumpus, END): {"wumpus(max)", "tumpus(sam)"},
        (sam, and_, max_, is_, wumpus): {"wumpus(max)"},
        (max_, END, wumpus): set(),
        (wumpus, max_): set(),
        (max_, is_, tumpus, and_, wumpus, END, sam, wumpus): {"tumpus(max)", "wumpus(max)", "wumpus(sam)"},
    }
    for ids, expected in cases.items():
        detector = Detector([(book, None)], SLOTS, CPU)
        flat = tokens([1] * len(ids), list(ids), range(len(ids)), [len(ids)] * len(ids))
        facts = detector(torch.zeros(len(ids), HIDDEN), flat).facts[-1]
        true = {detector.literals[c][1].atom for c in range(len(detector.literals)) if facts[c]}
        assert true == expected, ids


@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20))
def test_the_order_of_numbers_survives(values):
    x = torch.tensor(values)
    key = ordered(x)
    assert torch.equal(unordered(key), x)
    a, b = x[:, None], x[None]
    assert torch.equal(key[:, None] < key[None], (a < b) | ((a == b) & torch.signbit(a) & ~torch.signbit(b)))
    assert ordered(torch.tensor([float("nan")])).item() == -1


def test_runs_of_several_requests():
    first = torch.tensor([1, 0, 0, 1, 0, 1], dtype=torch.bool)
    runs = Runs.of(first, torch.tensor([1, 0, 0, 0, 0, 1], dtype=torch.bool))
    x = long(3, 5, 1, 2, 7, 4)[:, None]
    carry = long(4, 9, 9, 9, 9, 6)[:, None]
    assert runs.largest(x, carry).flatten().tolist() == [4, 5, 5, 2, 7, 6]
    assert runs.total(x, carry).flatten().tolist() == [7, 12, 13, 2, 9, 10]
    assert runs.before(x, carry).flatten().tolist() == [4, 3, 5, -1, 2, 6]


def random_tree(rng: random.Random, features: int) -> Tree:
    feature, threshold, left, right, probability = [], [], [], [], []

    def grow(depth):
        node = len(feature)
        feature.append(rng.randrange(features))
        threshold.append(rng.uniform(-1, 1))
        left.append(-1)
        right.append(-1)
        probability.append(rng.random())
        if depth and rng.random() < 0.8:
            left[node], right[node] = grow(depth - 1), grow(depth - 1)
        return node

    grow(4)
    return Tree(*map(tuple, (feature, threshold, left, right, probability)))


@pytest.mark.parametrize("seed", range(8))
def test_trees_side_by_side_score_as_one_by_one(seed):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    concepts = []
    for name in ("a", "b", "c"):
        count = rng.randint(1, 5)
        rows = torch.randn(count, HIDDEN, generator=generator)
        features = Features(rows, torch.ones(count), torch.randn(count, generator=generator), torch.zeros(count))
        tree = random_tree(rng, count) if name != "b" else None
        concepts.append(feature_concept(name, features, rows, [1.0] * count, {}, tree))
    both = Dictionary(tuple(concepts), 0)
    x = torch.randn(40, HIDDEN, generator=generator)
    scores = Scorer(both, ["c", "a", "b"], CPU)(x)
    for column, name in enumerate(("c", "a", "b")):
        assert torch.allclose(scores[:, column], both[name].score(x), atol=1e-5), name


def test_a_top_k_feature_counts_only_among_the_k_largest():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(50, HIDDEN, generator=generator)
    whole = Features(rows, torch.ones(50), torch.zeros(50), torch.zeros(50))
    part = Features(*(t[:1] for t in (whole.rows, whole.scale, whole.bias, whole.gate)))
    one = feature_concept("a", part, rows[:1], [1.0], {}, indices=[0])
    x = torch.randn(300, HIDDEN, generator=generator)
    code = torch.relu(x @ rows.T)
    kept = torch.zeros_like(code).scatter(1, code.topk(5).indices, code.topk(5).values)
    scores = Scorer(Dictionary((one,), 0, "none", whole, 5), ["a"], CPU)(x)[:, 0]
    assert torch.allclose(scores, kept[:, 0], atol=1e-5)
    assert 0 < (scores > 0).sum() < (code[:, 0] > 0).sum()
    assert torch.allclose(Scorer(Dictionary((one,), 0), ["a"], CPU)(x)[:, 0], code[:, 0], atol=1e-5)


@pytest.mark.parametrize("k", [0, 9])
@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (1.0, 1.0), (0.0, 1.0), (0.1, 2.0), (0.0, 0.0)])
def test_similarity_of_feature_sets_is_tverskys(alpha, beta, k):
    """Of a JumpReLU and a top-k SAE, beside a concept of another kind, against sets in plain Python."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(60, HIDDEN, generator=generator)
    gate = torch.rand(60, generator=generator) * (0 if k else 2)
    whole = Features(rows, torch.ones(60), torch.zeros(60), gate)
    sets, concepts = {"a": [3, 17, 20, 41, 59], "b": [17], "c": [1, 2]}, []
    for name, indices in sets.items():
        part = Features(*(t[indices] for t in (whole.rows, whole.scale, whole.bias, whole.gate)))
        one = feature_concept(name, part, part.rows, [1.0] * len(indices), {}, indices=indices)
        if name != "c":
            code = Code(whole, k) if alpha or k else None
            one = replace(one, kind="tversky", tversky=Tversky(alpha, beta), code=code)
        concepts.append(one)
    needed = whole if alpha or k else None
    book = Dictionary(tuple(concepts), 0, "none", needed, k)
    x = torch.randn(200, HIDDEN, generator=generator)
    dots = (x @ rows.T).tolist()
    scores = Scorer(book, ["c", "b", "a"], CPU)(x)
    for row, dot in enumerate(dots):
        on = {f for f in range(60) if dot[f] > gate[f]}
        on = set(sorted(on, key=lambda f: -dot[f])[:k]) if k else on
        for column, name in ((1, "b"), (2, "a")):
            own = set(sets[name])
            shared, only, missing = len(on & own), len(on - own), len(own - on)
            expected = shared / (shared + alpha * only + beta * missing) if shared else 0.0
            assert float(scores[row, column]) == pytest.approx(expected, abs=1e-6)
    for name, column in (("a", 2), ("b", 1)):
        assert torch.allclose(book[name].score(x), scores[:, column], atol=1e-6)
    assert 0.05 < (scores[:, 2] > 0).float().mean() <= 1
    if not k:
        assert torch.allclose(scores[:, 0], book["c"].score(x), atol=1e-5)


def test_scores_are_those_of_the_concepts():
    x = torch.randn(30, HIDDEN)
    scores = Scorer(dictionary(), NAMES[:3], CPU)(x)
    for column, name in enumerate(NAMES[:3]):
        assert torch.allclose(scores[:, column], torch.tensor([score(name, h) for h in x.tolist()]), atol=1e-5)
    x[3, 2] = float("inf")
    assert torch.isnan(Scorer(dictionary(), NAMES[:3], CPU)(x)[3]).all()


def test_the_released_detection_ignores_thresholds_and_takes_the_strongest_of_the_top_two():
    """Spec B3: a feature among a token's two largest of the whole SAE fires, whatever the threshold says."""
    whole = Features(torch.eye(HIDDEN), torch.ones(HIDDEN), torch.zeros(HIDDEN), torch.zeros(HIDDEN))

    def one(name, index):
        part = Features(*(t[index : index + 1] for t in (whole.rows, whole.scale, whole.bias, whole.gate)))
        high = dict.fromkeys(("token", "sentence", "max", "mean"), 2.0)
        return feature_concept(name, part, part.rows, [1.0], high, indices=[index])

    book = Dictionary(tuple(one(name, index) for index, name in enumerate(("p", "q", "r"))), 1, "none", whole, 2)
    detected = [
        Detected(
            atom=name, positive=True, concepts=[column], without=[], pattern=False, within="sentence", level="token",
            aggregate="max", scope="prompt", hold=0, threshold=2.0,
        )
        for column, name in enumerate(("p", "q", "r"))
    ]  # fmt: skip
    rows = [[9.0, 0, 0, 0, 0, 0], [0.5, 0.4, 0.1, 0, 0, 0], [0.1, 0.2, 0, 0.9, 0.8, 0], [0, 0.3, 0.2, 0.9, 0, 0]]
    for reference, expected in ((True, [set(), {"p"}, set(), {"q"}]), (False, [set(), set(), set(), set()])):
        detector = Detector([(program(detected, reference=reference, words={}, concepts=["p", "q", "r"]), book)], SLOTS, CPU)
        facts = detector(torch.tensor(rows), tokens([0] * 4, [9] * 4, range(4), [4] * 4)).facts
        names = [literal.atom for _, literal in detector.literals]
        assert [{n for n, true in zip(names, row, strict=True) if true} for row in facts.tolist()] == expected
