"""What steering hidden states costs: three engines side by side, in turns. Run by ``vllm_throughput.py --hidden``.

*Vanilla* is vLLM without our entry points; *one layer* has residual hooks behind one decoder layer, *all layers* behind
every one. In each round, for each condition, every engine decodes a block of 32 steps: nobody steers, or all requests do,
with 1, 8 or 64 distinct configurations in the batch, by an open loop (``random_vector``, seeds differ) or a closed one
(``rebalance``, which steers one layer; where all are, an open loop steers each of them beside it). Vanilla always runs the
same. The engines take turns within a block, two steps each, so that what else the machine does hits all of them alike: whole
blocks, one after the other, differed by as much as what is to be seen. Each engine is checked to steer the layers that it
should.

The figure of a round is the median over turns of vanilla's time over this one's; what is reported, the median over rounds
with a 95 % interval by bootstrap. The cost must not grow with the number of configurations: the time (in vanilla's) with the
most over that with one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from measuring import bootstrap_interval, in_words, print_json, say, table

GOALS = {"one_layer": 0.97, "all_layers": 0.93}
PLAIN: dict[str, list[dict[str, Any]]] = {"plain": [{}]}
"""What vanilla is asked for."""
TURN = 2
"""Steps that an engine decodes before it is the next one's turn."""
FLAT = 1.03
"""Time with the most configurations over that with one, at most."""


def artifact(model: str, folder: Path, layer: int) -> str:
    """A closed loop with a random vector, for this model."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    from llm_steer.artifact import Artifact, Description, ModelIdentity

    identity = ModelIdentity.of(AutoConfig.from_pretrained(model), tokenizer=AutoTokenizer.from_pretrained(model))
    vector = torch.randn(identity.hidden_size, generator=torch.Generator().manual_seed(0))
    constants = {"q25c": 0.3, "q75c": 0.7, "q25v": 1e-3, "q75v": 1e-2, "low": -1.0, "floor": -2.0, "ceiling": 0.5}
    about = Description(
        method="rebalance",
        model=identity,
        layer=layer,
        site="after",
        positions="delimiter",
        sign="towards_overthinking",
        constants=constants,
    )
    return str(Artifact(about, {"vector": vector / vector.norm()}).save(folder / "loop"))


def conditions(counts: list[int], layers: list[int]) -> dict[str, list[dict[str, Any]]]:
    """What the requests of a block ask for, in turn."""
    found: dict[str, list[dict[str, Any]]] = {"idle": [{"steer": "off"}]}
    for count in counts:
        vectors = [{"name": "random_vector", "seed": i, "norm": 1.0, "layers": layers} for i in range(count)]
        loops = [{"name": "rebalance", "strength": 1.0 + i / 100} for i in range(count)]
        found[f"open_{count}"] = [{"steer": vector} for vector in vectors]
        pairs = zip(vectors, loops, strict=True)
        found[f"closed_{count}"] = [{"steer": loop if len(layers) == 1 else [vector, loop]} for vector, loop in pairs]
    return found


class Child:
    """An engine in a process of its own, which waits while the others run."""

    def __init__(self, job: dict[str, Any], environment: dict[str, str]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("vllm_throughput.py")), "--serve", json.dumps(job)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=sys.stderr)
        self._read()

    def begin(self, condition: str) -> None:
        """Read the prompts of a fresh batch; the one before is dropped."""
        self._ask(condition)

    def turn(self) -> float:
        """Seconds of the next decode steps."""
        return self._ask(TURN)

    def _ask(self, what: str | int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> float:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine's process failed (exit status {self._process.wait()})")
        return float(json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def steered_layers(model: Any) -> list[int]:
    """Indices of the decoder layers that have a residual hook."""
    return sorted(vars(module)["_llm_steer"][0] for module in model.modules() if "_llm_steer" in vars(module))


def serve(engine_class: Any, job: dict[str, Any]) -> None:
    """In the child's process."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM writes to stdout
    engine = engine_class(job)
    (found,) = engine._llm.apply_model(steered_layers)
    if found != job["layers"]:
        raise AssertionError(f"layers {found} are steered, not {job['layers']}")
    for asked in job["asked"].values():
        engine.block(job["batch"], asked=asked)
    replies.write("0\n")
    replies.flush()
    for line in sys.stdin:
        seconds = 0.0
        match json.loads(line):
            case str(condition):
                engine.drop()
                engine.begin(job["batch"], job["asked"][condition])
            case int(steps):
                seconds = engine.steps(job["batch"], steps)["seconds"]
        replies.write(f"{seconds}\n")
        replies.flush()


def measure(job: dict[str, Any], environment: dict[str, str], counts: list[int], rounds: int, turns: int) -> dict[str, Any]:
    """Time over vanilla's, the median over the turns of each block: engine, condition, round."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(job["model"]).get_text_config()
    every = list(range(text.num_hidden_layers))
    middle = every[len(every) // 2]
    with tempfile.TemporaryDirectory() as folder:
        loop = artifact(job["model"], Path(folder), middle)
        children: dict[str, Child] = {}
        for name, layers in (("vanilla", []), ("one_layer", [middle]), ("all_layers", every)):
            vector = {"norm": 1.0, "layers": layers}
            named = [f"random_vector:{json.dumps(vector)}", f"rebalance:artifact={loop}"] if layers else []
            asked = conditions(counts, layers)
            say(f"engine {name}")
            whole = {**job, "declared": named, "asked": asked if layers else PLAIN, "layers": layers, "hide": not layers}
            children[name] = Child(whole, environment)
        costs = take_turns(children, asked, rounds, turns)
        for child in children.values():
            child.close()
    return costs


def take_turns(children: dict[str, Any], asked: Iterable[str], rounds: int, turns: int) -> dict[str, dict[str, list[float]]]:
    """Let the engines decode blocks. The order alternates, of conditions between rounds, of engines between turns."""
    names, asked = list(children), list(asked)
    costs: dict[str, dict[str, list[float]]] = {n: {condition: [] for condition in asked} for n in names if n != "vanilla"}
    for number in range(rounds):
        for condition in asked if number % 2 else asked[::-1]:
            for name, child in children.items():
                child.begin(condition if name != "vanilla" else "plain")
            taken: dict[str, list[float]] = {name: [] for name in names}
            for turn in range(turns):
                for name in names if turn % 2 else names[::-1]:
                    taken[name].append(children[name].turn())
            for name, found in costs.items():
                ratios = [own / base for own, base in zip(taken[name], taken["vanilla"], strict=True)]
                found[condition].append(statistics.median(ratios))
        say(f"  round {number + 1} of {rounds}")
    return costs


def summarise(costs: dict[str, dict[str, list[float]]], counts: list[int]) -> dict[str, Any]:
    """Figures by name.

    Args:
        costs: time over vanilla's: engine, condition, round.
    """
    figures: dict[str, Any] = {}
    for name, goal in GOALS.items():
        for condition, times in costs[name].items():
            ratios = [1 / cost for cost in times]
            low, high = bootstrap_interval(ratios)
            verdict = "met" if low >= goal else "not met" if high < goal or high - low <= 1 - goal else "unresolved"
            key = f"{name}.{condition}"
            figures |= {f"{key}.ratio": round(statistics.median(ratios), 4), f"{key}.verdict": verdict}
            figures |= {f"{key}.ratio_low": round(low, 4), f"{key}.ratio_high": round(high, 4)}
        for kind in ("open", "closed"):
            first, last = costs[name][f"{kind}_{counts[0]}"], costs[name][f"{kind}_{counts[-1]}"]
            growth = [b / a for a, b in zip(first, last, strict=True)]
            low, high = bootstrap_interval(growth)
            key = f"{name}.{kind}_growth"
            figures |= {key: round(statistics.median(growth), 4), f"{key}_low": round(low, 4), f"{key}_high": round(high, 4)}
            figures[f"{key}_verdict"] = "flat" if high <= FLAT else "grows" if low > FLAT else "unresolved"
    return figures


def report(figures: dict[str, Any], setup: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json("vllm_hidden", setup, figures)
        return
    print(in_words(setup))
    print("\nThroughput over that of vLLM without the plugin, median [95 % interval]")
    rows = []
    for key in (k.removesuffix(".ratio") for k in figures if k.endswith(".ratio")):
        engine, condition = key.split(".")
        low, high = figures[f"{key}.ratio_low"], figures[f"{key}.ratio_high"]
        rows.append([engine, condition, f"{figures[f'{key}.ratio']:.3f} [{low:.3f}-{high:.3f}]", figures[f"{key}.verdict"]])
    print(table(["engine", "requests", "ratio", "verdict"], rows))
    print("goal: lower ends at least " + ", ".join(f"{goal} ({name})" for name, goal in GOALS.items()))
    print(f"\nTime with the most configurations over that with one; flat: at most {FLAT}")
    rows = [
        [
            key.removesuffix("_growth"),
            f"{figures[key]:.3f} [{figures[f'{key}_low']:.3f}-{figures[f'{key}_high']:.3f}]",
            figures[f"{key}_verdict"],
        ]
        for key in figures
        if key.endswith("_growth")
    ]
    print(table(["requests", "growth", "verdict"], rows))
