"""What asking in three ways costs in wall-clock time, against asking in one: requests that run together share their steps.

    python benchmarks/mixture_wall.py [--quick] [--json] [--model DIR] [--repeats N]

Eight questions in vLLM, each as one request and as three (mixture_of_thought without early decision and checks), every
request generating the same number of tokens (``ignore_eos``). The two sides take turns; the ratio of a turn's times and the
median over turns with its 95 % bootstrap interval are what counts. Goal: at most 1.6 with the test bed's model on two cores.
``--model default`` takes the embedded default model instead.

On a CPU a step takes longer the more requests it has: the ratio shows how much of its cost is the same for any number.
A GPU was not measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from llm_steer.eval.testbed import MODELS
from measuring import Summary, bootstrap_interval, in_words, machine, print_json, say, table

from llm_steer import default_model
from llm_steer.engines import Engine, Request, Sampling

MODALITIES = ("natural", "code", "table")
QUESTIONS = 8
GOAL = 1.6


def questions() -> list[str]:
    """All of one length."""
    return [f"n = {20 + i}; o = n + 27; p = o + 3; q = p - 46; r = q - 7; r = ?" for i in range(QUESTIONS)]


def seconds(engine: Engine, prompts: Path, modalities: list[str], tokens: int) -> float:
    """Wall-clock time of all questions."""
    steer = {
        "name": "mixture_of_thought",
        "prompts": str(prompts),
        "modalities": modalities,
        "early": False,
        "execute": False,
        "verify": False,
    }
    requests = [
        Request(
            messages=[{"role": "user", "content": question}],
            sampling=Sampling(max_tokens=tokens, ignore_eos=True, seed=i),
            steer=steer,
        )
        for i, question in enumerate(questions())
    ]
    began = time.perf_counter()
    responses = engine.run(requests)
    took = time.perf_counter() - began
    generated = [response.tokens for response in responses]
    if generated != [tokens * len(modalities)] * QUESTIONS:
        raise RuntimeError(f"{generated} tokens generated, {next((r.error for r in responses if r.error), 'no error')}")
    return took


def measure(llm: Any, tokens: int, repeats: int) -> tuple[dict[str, Any], str]:
    """Figures by name, and the table."""
    engine = Engine.from_vllm(llm)
    with TemporaryDirectory() as folder:
        prompts = Path(folder)
        (prompts / "three").mkdir()
        for modality in MODALITIES:  # nothing but the question: requests of one length
            (prompts / "three" / f"{modality}.txt").write_text("[[question]]")
        sides = {"one": ["natural"], "three": list(MODALITIES)}
        for modalities in sides.values():
            seconds(engine, prompts, modalities, 8)
        took: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(repeats):
            for name in sides if turn % 2 else reversed(sides):
                took[name].append(seconds(engine, prompts, sides[name], tokens))
            say(f"turn {turn + 1} of {repeats}: {took['three'][-1] / took['one'][-1]:.2f}")
    ratios = [three / one for one, three in zip(took["one"], took["three"], strict=True)]
    low, high = bootstrap_interval(ratios)
    ratio = statistics.median(ratios)
    figures: dict[str, Any] = {"ratio": ratio, "ratio_low": low, "ratio_high": high, "met": ratio <= GOAL}
    rows = []
    for name, values in took.items():
        summary = Summary.of(values)
        figures |= {f"{name}.seconds": summary.median, f"{name}.best": summary.best, f"{name}.q1": summary.low}
        figures |= {f"{name}.q3": summary.high}
        requests = QUESTIONS * len(sides[name])
        rows.append(
            [f"{requests} requests", f"{summary.median:.2f} [{summary.low:.2f}-{summary.high:.2f}]", f"{summary.best:.2f}"]
        )
    head = [f"{tokens} tokens each, {repeats} turns", "seconds", "best"]
    return figures, f"{table(head, rows)}\n\nratio {ratio:.2f} [{low:.2f}-{high:.2f}], goal at most {GOAL}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one turn of few tokens: shows that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", help="folder, or 'default' (the test bed's arithmetic)")
    parser.add_argument("--tokens", type=int, help="of each request (128)")
    parser.add_argument("--repeats", type=int, help="turns (20)")
    options = parser.parse_args()
    tokens = options.tokens or (16 if options.quick else 128)
    repeats = options.repeats or (2 if options.quick else 20)
    model = options.model or str(MODELS / "arithmetic")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the figures
    from vllm import LLM

    llm = LLM(
        str(default_model.ensure()) if model == default_model.NAME else model,
        max_model_len=1024,
        max_num_seqs=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
    )
    setup = {**machine(), "model": Path(model).name, "tokens": tokens, "questions": QUESTIONS}
    figures, text = measure(llm, tokens, repeats)
    if options.json:
        print_json("mixture_wall", setup, figures)
    else:
        print(f"{in_words(setup)}\n\n{text}")
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
