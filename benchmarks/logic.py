"""What reasoning costs: shared rules bit-packed over requests, rules of each request's own, and detection over SAE widths.

python benchmarks/logic.py            # 1,000 shared rules x 256 requests, derivation depth 8
python benchmarks/logic.py --quick --json
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from llm_steer.plugins.activation_reasoning.concepts import Dictionary, feature_concept
from llm_steer.plugins.activation_reasoning.logic import RuleSet
from llm_steer.plugins.activation_reasoning.logic.closed import derive
from llm_steer.plugins.activation_reasoning.logic.reasoner import PackedReasoner, SlotLimits, SlotReasoner
from llm_steer.plugins.activation_reasoning.logic.schedule import schedule
from llm_steer.plugins.activation_reasoning.sae import Features
from llm_steer.plugins.activation_reasoning.scoring import Scorer
from measuring import Summary, in_words, machine, print_json, say, table

CPU = torch.device("cpu")


def rules(count: int, depth: int, rng: random.Random) -> list[str]:
    """Rules of two or three conditions in ``depth`` layers of atoms, a tenth of them negated."""
    width = max(count // depth, 1)
    texts = []
    for index in range(count):
        layer = min(index // width, depth - 1)
        names = [f"x{layer}_{rng.randrange(width)}" for _ in range(rng.randint(2, 3))]
        body = " and ".join(("not " if rng.random() < 0.1 else "") + name for name in dict.fromkeys(names))
        texts.append(f"{body} -> x{layer + 1}_{index % width}")
    return texts


def timed(run: Callable[[], object], repeats: int) -> Summary:
    run()
    values = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        values.append((time.perf_counter() - start) * 1e3)
    return Summary.of(values)


def shared(count: int, requests: int, depth: int, repeats: int, figures: dict[str, float]) -> None:
    rng = random.Random(0)
    built = RuleSet.read(rules(count, depth, rng))
    plan = schedule(built.program)
    facts = [literal for literal in plan.inputs if literal.atom.startswith("x0_")]
    wanted = [literal for literal in plan.outputs if literal.atom.startswith(f"x{depth}_")]
    reasoner = PackedReasoner(plan, facts, wanted, CPU)
    given = torch.rand(requests, len(facts), generator=torch.Generator().manual_seed(0)) < 0.6
    note(figures, "shared_ms", timed(lambda: reasoner(given), repeats))
    figures["shared.passes"] = plan.passes
    known, _ = reasoner(given)
    row = {literal.atom for literal, true in zip(facts, given[0].tolist(), strict=True) if true}
    true = derive(built.program, row)
    agree = [literal.atom in true for literal in wanted] == known[0].tolist()
    figures["shared.agrees_with_plain_python"] = float(agree)
    start = time.perf_counter()
    derive(built.program, row)
    figures["plain_python_one_request_ms"] = (time.perf_counter() - start) * 1e3


def own(requests: int, repeats: int, figures: dict[str, float]) -> None:
    """32 rules, depth 5, different for each request."""
    limits = SlotLimits(nodes=64, gates=64, width=3, passes=8)
    reasoner = SlotReasoner(limits, requests + 1, CPU)
    for slot in range(requests):
        texts = rules(32, 5, random.Random(slot))
        reasoner.write(slot, schedule(RuleSet.read(texts).program))
    facts = torch.rand(requests, limits.nodes) < 0.3
    slots = torch.arange(requests)
    note(figures, "per_request_ms", timed(lambda: reasoner(facts, slots), repeats))
    start = time.perf_counter()
    built = schedule(RuleSet.read(rules(32, 5, random.Random(1))).program)
    reasoner.write(0, built)
    figures["per_request.admission_ms"] = (time.perf_counter() - start) * 1e3


def detection(hidden: int, widths: list[int], tokens: int, repeats: int, figures: dict[str, float]) -> None:
    """Sixteen concepts of five features each: rows only, and the whole code as a top-k SAE needs it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator)
    for width in widths:
        rows = torch.randn(width, hidden, generator=generator) / hidden**0.5
        whole = Features(rows, torch.ones(width), torch.zeros(width), torch.ones(width))
        concepts = []
        for index in range(16):
            chosen = torch.randint(width, (5,), generator=generator)
            part = Features(*(tensor[chosen].clone() for tensor in (whole.rows, whole.scale, whole.bias, whole.gate)))
            concepts.append(feature_concept(f"c{index}", part, part.rows, [1.0] * 5, {}, indices=chosen.tolist()))
        names = [concept.name for concept in concepts]
        for kind, all_, k in (("rows", None, 0), ("top_k", whole, 32)):
            dictionary = Dictionary(tuple(concepts), 0, "none", all_, k)
            scorer = Scorer(dictionary, names, CPU)
            note(figures, f"detect.{kind}.{width}_ms", timed(lambda scorer=scorer: scorer(x), repeats))  # type: ignore[misc]
            parts = [*vars(scorer).values(), *(vars(all_).values() if all_ else ())]
            held = [part for part in parts if isinstance(part, torch.Tensor)]
            figures[f"detect.{kind}.{width}_mb"] = sum(t.numel() * t.element_size() for t in held) / 1e6
        say(f"width {width} done")


def note(figures: dict[str, float], name: str, summary: Summary) -> None:
    figures[name] = summary.median
    figures[f"{name}_q1"], figures[f"{name}_q3"], figures[f"{name}_best"] = summary.low, summary.high, summary.best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--widths", type=int, nargs="+", default=[2304, 16384, 131072])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="few repeats, small widths")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.widths = min(options.repeats, 5), [w for w in options.widths if w <= 2304]
    figures: dict[str, float] = {}
    with torch.inference_mode():
        shared(options.rules, options.requests, options.depth, options.repeats, figures)
        own(options.requests, max(options.repeats // 4, 3), figures)
        detection(options.hidden, options.widths, options.requests, max(options.repeats // 4, 3), figures)
    setup = {**machine(), "threads": torch.get_num_threads()}
    if options.json:
        print_json("logic", setup, figures)
        return
    print(in_words(setup))
    print(f"{options.rules} shared rules x {options.requests} requests, depth {options.depth}; ms a step")
    print(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))


if __name__ == "__main__":
    main()
