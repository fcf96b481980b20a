"""Microseconds a decode step of reflection_cycle's logits path, against a per-request Python closure.

    python benchmarks/logits.py [--quick] [--json]

*Ours* is everything that runs in a host at each step: following the tokens (``Runtime.forward``) and changing the logits
(``Runtime.logits``) of the whole batch. The *closure* is written from the description of CyclicReflex's released code
(a logits processor of vLLM's old engine): for each request copy the output ids to a tuple, search it for ``</think>``,
add the offset to five logits, one after the other. Both change the same float32 logits in the same way; that is checked
before anything is timed.

The two are timed in turns, each for about as long as the other: many steps of the one, few of the other. A last comparison
has each step start from logits that were just written and caches that are cold, as behind a forward pass on a CPU: there,
ours mostly waits for memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measuring import Summary, in_words, machine, print_json, say, table

from llm_steer import spec
from llm_steer.markers import Markers
from llm_steer.plugin import Context
from llm_steer.runtime import Runtime

VOCABULARY = 151_936
"""Width of the logits of R1-Distill-Qwen, in rows of float32."""
THINK_OPEN, THINK_CLOSE = 151_648, 151_649
REFLECTION = [11489, 14190, 8088, 3983, 92014]
"""wait, Wait, but, But, Alternatively on that model."""
AMPLITUDE, PERIOD = 5.0, 1200
PROMPT = 64
LENGTH = 8192
GOAL = 50.0
FLAT = 1.25
"""Flat in sequence length: the slowest length takes at most this many times as long as the fastest."""

Closure = Callable[[list[int], torch.Tensor], torch.Tensor]
Clock = Callable[[], float]


def closure() -> Closure:
    """What the released code does for one request at one step."""

    def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        past = tuple(output_ids)
        if THINK_CLOSE in past:
            return logits
        t = len(past)
        u = t % PERIOD / PERIOD
        if u <= 0.25:
            delta = 4 * AMPLITUDE * u
        elif u <= 0.75:
            delta = AMPLITUDE - 4 * AMPLITUDE * (u - 0.25)
        else:
            delta = -AMPLITUDE + 4 * AMPLITUDE * (u - 0.75)
        for token in REFLECTION:
            logits[token] += delta
        return logits

    return process


class Batch:
    """Requests that have generated ``length`` tokens, all still thinking, known to both sides.

    Args:
        steered: how many of them steer; all of them if left out.
    """

    def __init__(self, size: int, length: int, width: int = VOCABULARY, steered: int | None = None) -> None:
        generator = torch.Generator().manual_seed(size * 100_003 + length)
        self.size = size
        self.logits = torch.zeros(size, width)
        self._draw = lambda count: torch.randint(1000, 3000, (count,), generator=generator)
        self._closures = [closure() for _ in range(size)]
        context = Context(num_slots=size + 1, device=torch.device("cpu"), vocab_size=width)
        self.runtime = Runtime(context, Markers(((THINK_OPEN,),), ((THINK_CLOSE,),)))
        fields = {"amplitude": AMPLITUDE, "period": PERIOD, "token_ids": REFLECTION, "words": [], "origin": "think"}
        steer = spec.parse({"name": "reflection_cycle", **fields})
        prompt = torch.cat([self._draw(PROMPT - 1), torch.tensor([THINK_OPEN])])
        self.outputs: list[list[int]] = []
        for slot in range(size):
            output = self._draw(length)
            self.outputs.append(output.tolist())
            if steered is None or slot < steered:
                self.runtime.admit(slot, steer, prompt)
                # All that was generated but the last token, which the first step feeds.
                known = torch.arange(length - 1)
                self.runtime.forward(output[:-1], torch.full_like(known, slot), PROMPT + known)
        slots = torch.arange(size)
        self._slots = slots if steered is None else torch.where(slots < steered, slots, context.nobody)
        self._ids = torch.tensor([output[-1] for output in self.outputs])
        self._positions = torch.full((size,), PROMPT + length - 1)

    def ours(self) -> None:
        """One step, as a host calls it: before the forward pass and after it."""
        self.runtime.forward(self._ids, self._slots, self._positions, single=True)
        self.runtime.logits(self.logits, self._slots, self._positions)

    def closures(self) -> None:
        """One step, as vLLM calls per-request processors: row by row."""
        for row, process in enumerate(self._closures):
            process(self.outputs[row], self.logits[row])

    def sampled(self) -> None:
        """Everyone generates one more token."""
        self._ids = self._draw(self.size)
        self._positions = self._positions + 1
        for output, token in zip(self.outputs, self._ids.tolist(), strict=True):
            output.append(token)


@dataclass(frozen=True)
class Cell:
    """Both sides at one batch size and length."""

    ours: Summary
    closure: Summary
    ratio: Summary
    """Of the two sides of each repeat."""


def check(size: int = 8, length: int = 500) -> None:
    """Both sides do the same."""
    batch = Batch(size, length)
    for _ in range(3):
        batch.logits.zero_()
        batch.ours()
        ours = batch.logits.clone()
        batch.logits.zero_()
        batch.closures()
        torch.testing.assert_close(ours, batch.logits, rtol=0, atol=1e-5)
        if not ours.any():
            raise AssertionError("nothing was steered")
        batch.sampled()


def microseconds(batch: Batch, step: Callable[[], None], steps: int, clock: Clock, *, cold: bool = False) -> float:
    """Mean over consecutive steps; what lies between them is not timed."""
    total = 0.0
    for _ in range(steps):
        if cold:
            batch.logits.zero_()
        start = clock()
        step()
        total += clock() - start
        batch.sampled()
    return total / steps * 1e6


def measure(batch: Batch, repeats: int, clock: Clock, *, cold: bool = False) -> Cell:
    """Both sides in turns, the one first that was second before."""
    sides = [batch.ours, batch.closures]
    warm_up = [microseconds(batch, step, 3, clock, cold=cold) for step in sides]
    steps = [1 if cold else min(50, max(1, round(max(warm_up) / own))) for own in warm_up]
    times: list[list[float]] = [[], []]
    for repeat in range(repeats):
        for side in (0, 1) if repeat % 2 else (1, 0):
            times[side].append(microseconds(batch, sides[side], steps[side], clock, cold=cold))
    ratio = [c / o for o, c in zip(*times, strict=True)]
    return Cell(*map(Summary.of, (*times, ratio)))


def measure_lengths(size: int, lengths: list[int], repeats: int, clock: Clock) -> dict[int, Summary]:
    """Our side alone, the lengths in turns."""
    batches = {length: Batch(size, length) for length in lengths}
    logits = next(iter(batches.values())).logits
    for batch in batches.values():
        batch.logits = logits
    times: dict[int, list[float]] = {length: [] for length in lengths}
    for repeat in range(-1, repeats):
        for length, batch in batches.items():
            elapsed = microseconds(batch, batch.ours, 20, clock)
            if repeat >= 0:
                times[length].append(elapsed)
    return {length: Summary.of(values) for length, values in times.items()}


def measure_sparse(size: int, repeats: int, clock: Clock) -> Summary:
    """One request of the batch steers."""
    batch = Batch(size, 1024, steered=1)
    return Summary.of([microseconds(batch, batch.ours, 20, clock) for _ in range(repeats)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats and lengths: under a minute")
    parser.add_argument("--json", action="store_true", help="figures by name on stdout instead of tables")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--length", type=int, default=LENGTH, help="output length of the comparison (default 8192)")
    parser.add_argument("--repeats", type=int, help="of each comparison (default 40; 8 with --quick)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default 1)")
    parser.add_argument(
        "--clock",
        choices=("cpu", "wall"),
        help="cpu: time that the calling thread ran, blind to what else the machine does (default with one thread)",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    repeats = arguments.repeats or (8 if arguments.quick else 40)
    clock_name = arguments.clock or ("cpu" if arguments.threads == 1 else "wall")
    clock = time.thread_time if clock_name == "cpu" else time.perf_counter
    setup = {**machine(), "threads": arguments.threads, "clock": clock_name, "repeats": repeats, "vocabulary": VOCABULARY}

    say("checking that both sides do the same")
    check()
    cells = {}
    for size in arguments.batches:
        say(f"batch {size}, output length {arguments.length}")
        cells[size] = measure(Batch(size, arguments.length), repeats, clock)
    largest = max(arguments.batches)
    say(f"batch {largest}, caches cold")
    cold = measure(Batch(largest, arguments.length), repeats, clock, cold=True)
    lengths = [128, 2048, 32768] if arguments.quick else [128, 512, 2048, 8192, 32768]
    say(f"batch {largest}, output lengths {', '.join(map(str, lengths))}")
    by_length = measure_lengths(largest, lengths, repeats, clock)
    say(f"batch {largest} of which one steers")
    sparse = measure_sparse(largest, repeats, clock)

    medians = [summary.median for summary in by_length.values()]
    flatness = max(medians) / min(medians)
    figures: dict[str, float | int | bool] = {}
    for where, cell in {**{f"batch_{size}": cell for size, cell in cells.items()}, f"batch_{largest}.cold": cold}.items():
        for name, summary in (("ours_us", cell.ours), ("closure_us", cell.closure), ("ratio", cell.ratio)):
            figures[f"{where}.{name}"] = round(summary.median, 2)
            figures[f"{where}.{name}_q1"] = round(summary.low, 2)
            figures[f"{where}.{name}_q3"] = round(summary.high, 2)
    for length, summary in by_length.items():
        figures[f"length_{length}.ours_us"] = round(summary.median, 2)
    figures["flatness"] = round(flatness, 3)
    figures["one_steers.ours_us"] = round(sparse.median, 2)
    figures["repeats"] = repeats
    figures["met.ratio"] = cells[largest].ratio.median >= GOAL
    figures["met.flat"] = flatness <= FLAT
    if arguments.json:
        print_json("logits", setup, figures)
        return

    print(in_words(setup))
    print(f"\nMicroseconds a step at output length {arguments.length}: median [quartiles] of {repeats}; ratio of each pair")
    labelled = [*((str(size), cell) for size, cell in cells.items()), (f"{largest}, caches cold", cold)]
    rows = [[label, _cell(c.ours), _cell(c.closure), _cell(c.ratio, 1)] for label, c in labelled]
    print(table(["batch", "ours", "closure", "ratio"], rows))
    print(f"\nMicroseconds a step of ours at batch {largest}, by output length")
    print(table(["length", "ours", "best"], [[str(n), _cell(s), f"{s.best:.0f}"] for n, s in by_length.items()]))
    ratio = cells[largest].ratio.median
    print(f"\nbatch {largest} of which one request steers: {_cell(sparse)} us")
    print(f"slowest length over fastest: {flatness:.2f}, {_verdict(flatness <= FLAT)} (at most {FLAT})")
    print(f"ratio at batch {largest}: {ratio:.0f}, {_verdict(ratio >= GOAL)} (at least {GOAL:.0f})")


def _cell(summary: Summary, digits: int = 0) -> str:
    return f"{summary.median:.{digits}f} [{summary.low:.{digits}f}-{summary.high:.{digits}f}]"


def _verdict(good: bool) -> str:
    return "met" if good else "not met"


if __name__ == "__main__":
    main()
