"""Generation through ``llm-steer eval`` over a bare ``LLM.generate`` of the same requests, in one vLLM engine.

    python benchmarks/eval_overhead.py [--quick] [--json] [--model MODEL] [--problems 512] [--max-tokens 256] [--pairs 14]

Both sides get the same prompts, sampling and seeds, in turns, in alternating order. The bare side only generates; the other
one also takes each answer as it comes, writes it to disk, and has math-verify grade it in a niced process. The figure is the
median over pairs of the ratio of tokens a second, with a 95 % interval by bootstrap. Goal: at least 0.95.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import bootstrap_interval, in_words, machine, print_json, say, table

GOAL = 0.95

TASK = """
name: sums
title: Sums
grader: math
generated: {task: arithmetic, levels: [6], count: %d}
sampling: {max_tokens: %d, temperature: 1.0, top_p: 1.0}
"""


class Sides:
    """The two ways of generating, in one engine."""

    def __init__(self, model: str, problems: int, max_tokens: int, folder: Path) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        from llm_steer.engines.base import Engine

        # As eval does: a seeded request whose prompt is cut into chunks ends vLLM's CPU worker.
        whole_prompts = {"enable_chunked_prefill": False} if current_platform.is_cpu() else {}
        self.llm = LLM(model, enforce_eager=True, max_model_len=1024, seed=0, **whole_prompts)
        self.engine = Engine.from_vllm(self.llm)
        self.model, self.folder = model, folder
        self.task = folder / "sums.yaml"
        self.task.write_text(TASK % (problems, max_tokens))
        self.count = 0

    def config(self) -> Any:
        from llm_steer.eval.config import RunConfig

        self.count += 1
        return RunConfig(model=self.model, tasks=[str(self.task)], out=str(self.folder / f"run{self.count}"))

    def through_eval(self) -> tuple[int, float]:
        """Tokens and seconds."""
        from llm_steer.eval.run import run
        from llm_steer.eval.store import Folder

        config = self.config()
        began = time.perf_counter()
        outcome = run(config, self.engine, tokenizer=self.llm.get_tokenizer())
        seconds = time.perf_counter() - began
        assert outcome.complete, outcome.failed[:1]
        rows = list(Folder(Path(config.out)).results())
        # Until the last answer was there: what remains to be graded then is not generation.
        began_at = Folder(Path(config.out)).sessions()[0]["began"]
        return sum(row["tokens"] for row in rows), min(seconds, max(row["at"] for row in rows) - began_at)

    def bare(self) -> tuple[int, float]:
        """Tokens and seconds."""
        from llm_steer.eval.methods import parse_methods
        from llm_steer.eval.run import Description, load_tasks
        from vllm import SamplingParams

        config = self.config()
        attempts = Description(config, parse_methods(["none"]), load_tasks(config), {}).attempts()
        began = time.perf_counter()
        tokenizer = self.llm.get_tokenizer()
        prompts, params = [], []
        for attempt in attempts:
            request = attempt.request
            text = tokenizer.apply_chat_template([*request.messages], tokenize=False, add_generation_prompt=True)
            prompts.append({"prompt_token_ids": tokenizer(text, add_special_tokens=False)["input_ids"]})
            s = request.sampling
            params.append(
                SamplingParams(max_tokens=s.max_tokens, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k, seed=s.seed)
            )
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return sum(len(o.outputs[0].token_ids) for o in outputs), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the testbed's, if left out")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=14)
    parser.add_argument("--quick", action="store_true", help="shows that it runs, not what it costs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.problems, options.max_tokens, options.pairs = 16, 32, 2
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the figures

    from llm_steer.eval.testbed import MODELS

    model = options.model or str(MODELS / "arithmetic")
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(model, options.problems, options.max_tokens, Path(folder))
        sides.bare()
        sides.through_eval()
        ratios, speeds = [], []
        for pair in range(options.pairs):
            order = [("eval", sides.through_eval), ("bare", sides.bare)]
            speed = {}
            for name, run in order if pair % 2 else order[::-1]:
                tokens, seconds = run()
                speed[name] = tokens / seconds
            speeds.append(speed)
            ratios.append(speed["eval"] / speed["bare"])
            say(f"  pair {pair + 1} of {options.pairs}: {ratios[-1]:.3f}")
        # Left to the interpreter's end, the engine would be waited for before it is told to stop: the temporary folder
        # registered its own clean-up ahead of multiprocessing's.
        sides.llm.llm_engine.engine_core.shutdown()
    low, high = bootstrap_interval(ratios)
    figures = {
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "eval_tokens_per_second": statistics.median(s["eval"] for s in speeds),
        "bare_tokens_per_second": statistics.median(s["bare"] for s in speeds),
        "met": statistics.median(ratios) >= GOAL,
    }
    setup = {**machine(), "model": Path(model).name, "problems": options.problems, "pairs": options.pairs}
    if options.json:
        print_json("eval_overhead", setup, figures)
        return
    print(in_words(setup))
    cells = [
        f"{figures['ratio']:.3f} [{low:.3f}-{high:.3f}]",
        *(f"{figures[f'{s}_tokens_per_second']:.0f}" for s in ("eval", "bare")),
    ]
    print(table(["", "ratio", "eval, tokens/s", "bare, tokens/s"], [["eval / bare", *cells]]))


if __name__ == "__main__":
    main()
