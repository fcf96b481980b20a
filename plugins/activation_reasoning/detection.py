"""From scores to propositions: what is true at each token of each request.

What is true at a token is a function of its request's tokens up to it. A request that is fed in portions, or again from
its first token, gives the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from llm_steer.plugin import Tokens

from .concepts import Dictionary
from .program import Detected, Program
from .scan import NONE, UNIT, Runs, fixed, ordered, unordered
from .scoring import Scorer

FOREVER = 2**40
FAR = 2**31
"""Positions stay below."""


@dataclass(frozen=True)
class Passed:
    """What is known of the tokens of a forward pass."""

    slot: torch.Tensor
    """int64 ``[tokens]``: nobody's for tokens that are fed again and known already."""

    runs: Runs
    """By request."""
    last: torch.Tensor
    """bool ``[tokens]``, the last one of its request in this pass."""
    owner: torch.Tensor
    """int64 ``[tokens]``: the slot to write back to, from the last token only; nobody's for all others."""
    facts: torch.Tensor
    """bool ``[tokens, literals]``."""
    degrees: torch.Tensor | None
    """float32 ``[tokens, literals]`` in [0, 1], where a program asks how true they are."""


class Detector:
    """What is true at each token, for several programs at once. A token sees its own request's program only where the caller
    says so: everything here is computed for all.

    Args:
        programs: with their dictionaries (None where all concepts are words).
        num_slots: the last one is nobody's.
        device: where state lives.
    """

    def __init__(self, programs: Sequence[tuple[Program, Dictionary | None]], num_slots: int, device: torch.device) -> None:
        self.device, self.nobody = device, num_slots - 1
        concepts: list[tuple[int, str]] = [(n, name) for n, (p, _) in enumerate(programs) for name in p.concepts]
        place = {key: column for column, key in enumerate(concepts)}
        self._count = len(concepts)
        # One scorer for each dictionary, whatever number of programs use it.
        self._scorers: list[tuple[Scorer, torch.Tensor, bool]] = []
        groups = {(id(d), p.reference): d for p, d in programs if d is not None}
        for (key, reference), dictionary in groups.items():
            mine = [
                id(programs[n][1]) == key and programs[n][0].reference == reference
                and name not in programs[n][0].words for n, name in concepts
            ]  # fmt: skip
            names = sorted({name for (_, name), ours in zip(concepts, mine, strict=True) if ours})
            if names:
                columns = [names.index(name) if ours else len(names) for (_, name), ours in zip(concepts, mine, strict=True)]
                self._scorers.append((Scorer(dictionary, names, device), torch.tensor(columns, device=device), reference))
        released = [programs[n][0].reference and name not in programs[n][0].words for n, name in concepts]
        self._released = torch.tensor(released, dtype=torch.bool, device=device)
        self._words = _Words(
            [programs[n][0].words.get(name, []) for n, name in concepts], device
        ) if any(p.words for p, _ in programs) else None  # fmt: skip
        self._is_word = torch.tensor([name in programs[n][0].words for n, name in concepts], device=device)

        detected = [(n, d) for n, (p, _) in enumerate(programs) for d in p.propositions]
        self.literals = [(n, literal) for n, (p, _) in enumerate(programs) for literal in dict.fromkeys(
            [*(d.literal for d in p.propositions), *sorted(p.given)])]  # fmt: skip
        """Program and literal of each column of ``facts``."""
        self.given = torch.tensor(
            [literal in programs[n][0].given for n, literal in self.literals], dtype=torch.bool, device=device
        )
        plain = [(n, d) for n, d in detected if not d.pattern]
        chains = [(n, d) for n, d in detected if d.pattern]
        self.order = [*plain, *chains]
        """Program and proposition, in the order of the columns of scores."""
        into = torch.zeros(len(self.order), len(self.literals))
        for row, (n, d) in enumerate(self.order):
            into[row, self.literals.index((n, d.literal))] = 1
        self._into = into.to(device)
        self._plain = _Plain(
            [d for _, d in plain], [place[n, programs[n][0].concepts[d.concepts[0]]] for n, d in plain], device
        )
        self._chains = _Chains(
            [d for _, d in chains],
            [[place[n, programs[n][0].concepts[c]] for c in d.concepts] for n, d in chains],
            [[place[n, programs[n][0].concepts[c]] for c in d.without] for n, d in chains], self._count, device,
        )  # fmt: skip
        hold = [FOREVER if d.hold is None else d.hold for _, d in self.order]
        self._hold = torch.tensor(hold, dtype=torch.int64, device=device)
        token = [0.5] * self._count
        for n, (p, own) in enumerate(programs):
            for name in p.concepts:
                if own and name in own.names and name not in p.words:
                    token[place[n, name]] = own[name].thresholds["token"]
        self._token = torch.tensor(token, device=device)
        longest = max((max(p.sentence_ends) for p, _ in programs if p.sentence_ends), default=-1)
        ids = {i for p, _ in programs for i in p.sentence_ends}
        self._ends = torch.zeros(longest + 2, dtype=torch.bool, device=device)  # the last: any other token
        self._ends[sorted(ids)] = True
        self._special = torch.tensor(sorted({i for p, _ in programs for i in p.special}), dtype=torch.int64, device=device)

        def table(width: int, fill: int = NONE) -> torch.Tensor:
            return torch.full((num_slots, width), fill, dtype=torch.int64, device=device)

        width = len(self.order)
        self.next = table(1)
        """The position that is expected next; -1 before the first."""
        self.missed = table(1, 0)
        """Tokens were never seen here: what they hold may have been missed."""
        self.broken = table(1, 0)
        """Tokens whose hidden states were not finite."""
        self._sentence = table(1, 0)
        self._ids = table(self._words.reach if self._words else 1)
        self._high, self._sum, self._seen = table(len(plain)), table(len(plain), 0), table(len(plain), 0)
        self._last_true = table(width)
        self._soft = any(p.truth != "crisp" for p, _ in programs)
        self._degree = torch.zeros(num_slots, width if self._soft else 0, device=device)
        """How true each proposition was when it was last detected."""
        self._chain = table(self._chains.width)
        self._reset = table(len(chains))
        self.peak, self.peak_at = table(width), table(width)
        """Highest score of each proposition so far, as :func:`~.scan.ordered`, and where."""

    def reset(self, slot: int) -> None:
        for state in self._state:
            state[slot] = NONE
        for state in (self.missed, self.broken, self._sentence, self._sum, self._seen, self._degree):
            state[slot] = 0

    @property
    def _state(self) -> tuple[torch.Tensor, ...]:
        return (
            self.next, self.missed, self.broken, self._sentence, self._ids, self._high, self._sum, self._seen,
            self._last_true, self._degree, self._chain, self._reset, self.peak, self.peak_at,
        )  # fmt: skip

    def __call__(self, hidden: torch.Tensor, tokens: Tokens) -> Passed:
        """Note the tokens of a forward pass.

        Args:
            hidden: ``[tokens, hidden_size]``, behind the layer of the dictionaries.
        """
        position = tokens.position
        slot = self._unknown(tokens)
        mine = slot != self.nobody
        same = _continued(slot, position)
        expected = self.next[slot, 0]
        runs = Runs.of(~same, position == expected)
        last = torch.ones_like(mine)
        last[:-1] = ~same[1:]
        owner = torch.where(last & mine, slot, self.nobody)

        gap = (runs.first & ~runs.carries & (position != 0)).to(torch.int64)[:, None]
        missed = runs.total(gap, self.missed[slot])

        ids = tokens.ids.clamp(min=-1)
        content = mine & ~torch.isin(ids, self._special)
        events, scores, broken, recent = self._events(hidden, ids, slot, runs, content & (position > 0), content)

        # A sentence goes on until a token that ends it; the one behind begins the next.
        ends = self._ends[ids.clamp(min=0, max=len(self._ends) - 1)] & content
        opened = runs.before(ends.to(torch.int64)[:, None], (self._sentence[slot] < 0).to(torch.int64), 0)[:, 0] > 0
        began = torch.where(runs.first | opened, position, NONE)[:, None]
        carry = torch.where(self._sentence[slot] < 0, NONE, self._sentence[slot])
        began = runs.largest(torch.where(runs.carries[:, None] & ~opened[:, None], NONE, began), carry)
        sentences = Runs.of(runs.first | opened, runs.carries & ~opened)

        where = position[:, None]
        plain_scores = scores[:, self._plain.concept]
        inside = self._plain.inside(tokens.output_position)
        high, total, seen, cond = self._plain.judge(
            plain_scores, inside & content[:, None], runs, sentences, self._high[slot], self._sum[slot], self._seen[slot]
        )
        told = events[:, self._plain.concept] & inside
        cond = torch.where(self._released[self._plain.concept], told, cond)
        chain, reset, matched = self._chains.judge(
            events, where, tokens.output_position, began, runs, self._chain[slot], self._reset[slot]
        )
        true = torch.cat([cond, matched], 1)
        last_true = runs.largest(torch.where(true, where, NONE), self._last_true[slot])
        holds = (last_true >= 0) & (where - last_true <= self._hold)
        given = self.given & mine[:, None]
        facts = ((holds.float() @ self._into) > 0) | given
        degree, degrees = self._degree[slot], None
        if self._soft:
            now = self._plain.degrees(plain_scores, inside & content[:, None], high, total, seen)
            now = torch.where(self._released[self._plain.concept], cond.float(), now)
            now = torch.cat([now, matched.float()], 1)
            degree = runs.latest(now, true, degree)
            degrees = torch.where(given, 1.0, torch.where(holds, torch.maximum(now, degree), now) @ self._into)

        shown = torch.cat([plain_scores, scores[:, self._chains.final]], 1)
        counted = torch.cat([inside & content[:, None], matched], 1)
        key = torch.where(counted, ordered(shown), NONE)
        peak = runs.largest(key, self.peak[slot])
        earlier = runs.before(peak, self.peak[slot])
        peak_at = runs.largest(torch.where((peak > earlier) & counted, where, NONE), self.peak_at[slot])

        sentence = torch.where(ends[:, None], -began - 2, began)  # negative: the next token begins another
        updates = (
            where + 1, missed, runs.total(broken.to(torch.int64)[:, None], self.broken[slot]), sentence, recent,
            high, total, seen, last_true, degree, chain, reset, peak, peak_at,
        )  # fmt: skip
        for state, update in zip(self._state, updates, strict=True):
            kept = state[self.nobody].clone()
            state[owner] = update.to(state.dtype)
            state[self.nobody] = kept
        return Passed(slot, runs, last, owner, facts, degrees)

    def _unknown(self, tokens: Tokens) -> torch.Tensor:
        """Slots, without tokens that come again from somewhere in the middle, as after a preemption where the blocks before
        are in a cache. Who is fed again from the first token begins anew."""
        index = torch.arange(len(tokens.slot), device=self.device)
        start = torch.where(_continued(tokens.slot, tokens.position), 0, index).cummax(0).values
        again = (tokens.position[start] > 0) & (tokens.position < self.next[tokens.slot, 0])
        return torch.where(again, self.nobody, tokens.slot)

    def _events(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        slot: torch.Tensor,
        runs: Runs,
        computed: torch.Tensor,
        content: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Which concepts are there at each token, their scores, where hidden states are not finite, and the last ids."""
        count = len(ids)
        scores = torch.zeros(count, self._count, device=self.device)
        released = torch.zeros(count, self._count, dtype=torch.bool, device=self.device)
        broken = torch.zeros(count, dtype=torch.bool, device=self.device)
        pad = torch.nn.functional.pad
        for scorer, columns, reference in self._scorers:
            found = scorer(hidden)
            broken = broken | (torch.isnan(found).any(1) & computed)
            scores = scores + pad(found, (0, 1))[:, columns]
            if reference:
                released = released | pad(scorer.released(hidden), (0, 1))[:, columns]
        above = torch.where(self._released, released, scores > self._token) & computed[:, None]
        scores = torch.where(computed[:, None], scores, float("nan"))
        if self._words is None:
            return above, scores, broken, torch.full((count, 1), NONE, dtype=torch.int64, device=self.device)
        spelled, recent = self._words(ids, slot, runs, self._ids[slot])
        events = torch.where(self._is_word, spelled & content[:, None], above)
        return events, torch.where(self._is_word, spelled.float(), scores), broken, recent


def _continued(slot: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """bool ``[tokens]``: the token follows the one before it in its request."""
    same = torch.zeros_like(slot, dtype=torch.bool)
    same[1:] = (slot[1:] == slot[:-1]) & (position[1:] == position[:-1] + 1)
    return same


class _Words:
    """Concepts that are words: a token completes one of their spellings."""

    def __init__(self, spellings: Sequence[Sequence[Sequence[int]]], device: torch.device) -> None:
        rows = [(column, ids) for column, several in enumerate(spellings) for ids in several]
        longest = max((len(ids) for _, ids in rows), default=1)
        self.reach = max(longest - 1, 1)
        """Tokens before this one that are remembered."""
        table = torch.full((len(rows), self.reach + 1), -2, dtype=torch.int64)
        into = torch.zeros(len(rows), len(spellings))
        for row, (column, ids) in enumerate(rows):
            table[row, self.reach + 1 - len(ids) :] = torch.tensor(list(ids))
            into[row, column] = 1
        self._table, self._any, self._into = table.to(device), (table == -2).to(device), into.to(device)

    def __call__(
        self, ids: torch.Tensor, slot: torch.Tensor, runs: Runs, carry: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """bool ``[tokens, concepts]``, and the last ids up to each token ``[tokens, reach]``."""
        index = torch.arange(len(ids), device=ids.device)
        columns = []
        for back in range(self.reach, 0, -1):
            source = index - back
            inside = source >= runs.start
            # What lies before this pass: the carry's columns are the last ``reach`` ids, the newest last.
            missing = (runs.start - source - 1).clamp(min=0, max=self.reach - 1)
            old = torch.where(runs.carries[runs.start], carry.gather(1, (self.reach - 1 - missing)[:, None])[:, 0], NONE)
            columns.append(torch.where(inside, ids[source.clamp(min=0)], old))
        history = torch.stack([*columns, ids], 1)
        match = ((history[:, None, :] == self._table) | self._any).all(2)
        return (match.float() @ self._into) > 0, history[:, 1:]


def _scopes(detected: Sequence[Detected], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([d.scope != "output" for d in detected], dtype=torch.bool, device=device),
        torch.tensor([d.scope != "prompt" for d in detected], dtype=torch.bool, device=device),
    )


class _Plain:
    """Propositions that compare a score, or what it has come to, with a threshold."""

    def __init__(self, detected: Sequence[Detected], concept: Sequence[int], device: torch.device) -> None:
        def flag(values: Sequence[bool]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.bool, device=device)

        self.concept = torch.tensor(concept, dtype=torch.int64, device=device)
        self._prompt, self._output = _scopes(detected, device)
        self._threshold = torch.tensor([d.threshold for d in detected], dtype=torch.float64, device=device)
        self._key = ordered(self._threshold.float())
        self._width = torch.tensor([d.width for d in detected], dtype=torch.float64, device=device)
        self._sentence = flag([d.level == "sentence" for d in detected])
        self._each = flag([d.level == "token" or d.aggregate == "any" for d in detected])
        self._mean = flag([d.level != "token" and d.aggregate == "mean" for d in detected])

    def inside(self, output_position: torch.Tensor) -> torch.Tensor:
        """bool ``[tokens, propositions]``: the token is in the scope."""
        return torch.where((output_position < 0)[:, None], self._prompt, self._output)

    def judge(
        self, scores: torch.Tensor, inside: torch.Tensor, runs: Runs, sentences: Runs,
        high: torch.Tensor, total: torch.Tensor, seen: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Largest, sum and number of scores so far, and bool ``[tokens, propositions]``: the threshold is passed."""
        counted = inside & ~torch.isnan(scores)
        key = torch.where(counted, ordered(scores), NONE)
        value, one = torch.where(counted, fixed(scores), 0), counted.to(torch.int64)
        by = self._sentence
        high = torch.where(by, sentences.largest(key, high), runs.largest(key, high))
        total = torch.where(by, sentences.total(value, total), runs.total(value, total))
        seen = torch.where(by, sentences.total(one, seen), runs.total(one, seen))
        mean = total.double() * UNIT / seen.clamp(min=1)
        passed = torch.where(self._mean, (mean > self._threshold) & (seen > 0), high > self._key)
        return high, total, seen, torch.where(self._each, counted & (key > self._key), passed)

    def degrees(
        self, scores: torch.Tensor, inside: torch.Tensor, high: torch.Tensor, total: torch.Tensor, seen: torch.Tensor
    ) -> torch.Tensor:
        """How true each is at this token: float32 ``[tokens, propositions]``, above 1/2 where the threshold is passed.

        Args:
            high, total, seen: largest, sum and number of scores so far.
        """
        mean = total.double() * UNIT / seen.clamp(min=1)
        value = torch.where(self._each, scores.double(), torch.where(self._mean, mean, unordered(high).double()))
        known = torch.where(self._each, inside & ~torch.isnan(scores), seen > 0)
        beyond = value - self._threshold
        # What is certain has no width.
        degree = torch.where(self._width > 0, torch.sigmoid(beyond / self._width.clamp(min=1e-300)), (beyond > 0).double())
        return torch.where(known, degree, 0.0).float()


class _Chains:
    """Propositions that are concepts in order."""

    def __init__(
        self, detected: Sequence[Detected], steps: Sequence[Sequence[int]], resets: Sequence[Sequence[int]],
        concepts: int, device: torch.device,
    ) -> None:  # fmt: skip
        longest = max(map(len, steps), default=1)
        self._longest = longest
        self._prompt, self._output = _scopes(detected, device)
        # Aligned at the end; a step beyond the first is always there, and so is what came before it.
        padded = [[concepts] * (longest - len(s)) + list(s) for s in steps]
        self._step = torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(steps), longest)
        self._free = self._step == concepts
        self.final = torch.tensor([s[-1] for s in steps], dtype=torch.int64, device=device)
        resetting = torch.zeros(concepts, len(steps))
        for column, several in enumerate(resets):
            resetting[list(several), column] = 1
        self._resetting = resetting.to(device)
        self._sentence = torch.tensor([d.within == "sentence" for d in detected], dtype=torch.bool, device=device)
        self.width = len(steps) * max(longest - 1, 1)

    def judge(
        self, events: torch.Tensor, where: torch.Tensor, output_position: torch.Tensor, began: torch.Tensor, runs: Runs,
        chain: torch.Tensor, reset: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Where the latest beginnings of each pattern lie, where it was last broken off, and where it is complete.

        A pattern is there if it is there with the latest possible beginning: after the sentence's first token and after
        whatever breaks it off. ``chain`` holds that beginning for each number of steps done.
        """
        count, patterns = len(events), len(self._step)
        inside = torch.where((output_position < 0)[:, None], self._prompt, self._output)
        broken = ((events.float() @ self._resetting) > 0) & inside
        resets = runs.largest(torch.where(broken, where, NONE), reset)
        before = torch.maximum(runs.before(resets, reset), torch.where(self._sentence, began - 1, NONE))
        there = torch.nn.functional.pad(events, (0, 1))[:, self._step] & inside[:, :, None]
        carry = chain.view(count, max(self._longest - 1, 1), patterns)
        starts = []
        begin = where.expand(count, patterns)  # of the steps done so far, at the token before; of none: this token
        for step in range(self._longest):
            free = self._free[:, step]
            begins = torch.where(there[:, :, step], begin, NONE)
            if step == self._longest - 1:
                matched = there[:, :, step] & (begin > before)
                break
            latest = runs.largest(begins, carry[:, step])
            starts.append(latest)
            begin = torch.where(free, where, runs.before(latest, carry[:, step]))
        kept = torch.stack(starts, 1) if starts else carry
        return kept.reshape(count, -1), resets, matched
