"""How well concepts are detected in texts that nothing was fitted on, and whether steering towards one raises it.

    python benchmarks/concepts.py MODEL --sae SAE --layer 15 --label Geometry --words triangle,circle,angle \
        --train train.jsonl --test test.jsonl

Detection: AUC over test texts of every kind of concept, beside difference of means, a probe, and plain word match. Concepts
and thresholds come from the training texts (those of the SAE, too, if you trained it so).

Steering: what the model writes (at temperature 1, behind the first tokens of test texts without the label) when the plugin
steers it towards the concept, towards features of the SAE drawn at random, and not at all. The judge is a probe behind a
later layer, over the text alone as the plain model reads it: steering used neither. ``gain``: the judge's mean score above
that of texts that were not steered. ``equal_norm``: above random features at the same strength. ``matched``: above them at
the perplexity (of the plain model) that the concept's texts have, random features' scores interpolated between strengths.
Intervals of 95 % from resampling starts and features. ``beside``: largest difference of the logits of a request that is not
steered in a batch of steered ones.

With ``--journal FOLDER`` hidden states and what was written are kept as they come: a run that was stopped goes on where it
was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llm_steer.eval.testbed.statistics import auc as auc_with_error
from llm_steer.plugins.activation_reasoning.concepts import Concept, Dictionary, direction_concept
from llm_steer.plugins.activation_reasoning.find import Encoded, Example, Method, find, read_examples
from llm_steer.plugins.activation_reasoning.sae import Sae, load_sae
from measuring import in_words, machine, print_json, say, table
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_steer import steer
from llm_steer.artifact import ModelIdentity

METHODS: tuple[Method, ...] = ("single", "top_k", "relational", "tversky", "direction", "probe")
NO_SAE = ("direction", "probe")
START = 8
"""Tokens of a text that the model goes on from."""
RULES = """dictionary: {folder}
rules: ['true -> go']
actions: [{{when: go, steer: {{concept: {concept}, strength: 1.0}}}}]
"""


def some(examples: list[Example], label: str, others: int) -> list[Example]:
    """All texts with the label, and so many without."""
    without = [e for e in examples if label not in e.labels]
    return [e for e in examples if label in e.labels] + without[:others]


class Reader:
    """Hidden states of texts behind two layers: the SAE's, and a later one for the judge."""

    def __init__(self, name: str, layers: tuple[int, int], folder: Path | None) -> None:
        self.name, self.folder = name, folder
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.layers = layers

    def encode(self, examples: list[Example], label: str, length: int) -> tuple[list[Encoded], list[Encoded]]:
        found: tuple[list[Encoded], list[Encoded]] = ([], [])
        for number, example in enumerate(examples):
            states = self._states(example.text, length)
            labels = torch.full((len(states[0]),), label in example.labels)
            for part, hidden in zip(found, states, strict=True):
                # A third calibrates; the test texts are others.
                part.append(Encoded(hidden, {label: labels}, number % 3 == 0))
            if number % 100 == 0:
                say(f"{number} of {len(examples)} texts")
        return found

    def _states(self, text: str, length: int) -> list[torch.Tensor]:
        """Behind both layers ``[tokens, hidden_size]``, without the first token."""
        kept = hashlib.sha256(f"{self.name} {self.layers} {length} {text}".encode()).hexdigest()[:24]
        file = self.folder / f"{kept}.safetensors" if self.folder else None
        if file is not None and file.exists():
            tensors = load_file(file)
            return [tensors["own"], tensors["later"]]
        ids = self.tokenizer(text, truncation=True, max_length=length, return_tensors="pt").input_ids
        with torch.inference_mode():
            states = self.model.get_decoder()(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        own, later = (states[layer + 1][0, 1:].clone() for layer in self.layers)
        if file is not None:
            save_file({"own": own, "later": later}, file)
        return [own, later]

    def judge(self, ids: torch.Tensor, judge: Concept) -> list[tuple[float, float]]:
        """Mean score of the written tokens of each text, and their mean negative log-likelihood in nats.

        Args:
            ids: ``[texts, tokens]``, with ``START`` that were not written.
        """
        with torch.inference_mode():
            result = self.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        logits, written = result.logits[:, START - 1 : -1], ids[:, START:]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), written.flatten(), reduction="none")
        score = judge.score(result.hidden_states[self.layers[1] + 1][:, START:])
        return list(zip(score.mean(1).tolist(), nll.view_as(written).mean(1).tolist(), strict=True))


def detection(
    options: argparse.Namespace, reader: Reader, figures: dict[str, float]
) -> tuple[Sae, dict[str, Concept], Concept]:
    sae = load_sae(options.sae, reader.model.config.hidden_size)
    train, test = (some(read_examples(path), options.label, options.others) for path in (options.train, options.test))
    fitted, judged = reader.encode(train, options.label, options.length)
    seen, later = reader.encode(test, options.label, options.length)
    label = torch.tensor([bool(e.labelled[options.label].any()) for e in seen])
    figures["test_texts"], figures["test_positives"] = float(len(seen)), float(label.sum())

    def note(name: str, value: torch.Tensor) -> None:
        estimate = auc_with_error(value[label].tolist(), value[~label].tolist())
        figures[f"auc.{name}"], figures[f"auc.{name}_error"] = estimate.value, estimate.error

    concepts = {}
    for method in METHODS:
        concept = find(options.label, fitted, method, None if method in NO_SAE else sae)
        concepts[method] = concept
        scores = [concept.score(e.hidden) for e in seen]
        for level, values in (("max", [s.max() for s in scores]), ("mean", [s.mean() for s in scores])):
            value = torch.stack(values)
            note(f"{method}.{level}", value)
            hits = value > concept.thresholds[level]
            both = hits[label].float().mean() + (~hits)[~label].float().mean()
            figures[f"balanced_accuracy.{method}.{level}"] = float(both) / 2
    words = [word.lower() for word in options.words.split(",")]
    note("words", torch.tensor([float(sum(word in e.text.lower() for word in words)) for e in test]))
    judge = find(options.label, judged, "probe")
    note("judge.mean", torch.stack([judge.score(e.hidden).mean() for e in later]))
    return sae, concepts, judge


Texts = list[tuple[float, float]]
"""Score and mean negative log-likelihood of each text."""


class Steering:
    """What is written under steering, arm by arm, through the plugin.

    Args:
        vectors: concepts by name, for the directions in which they steer.
        folder: for the dictionary and rules files.
    """

    def __init__(self, options: argparse.Namespace, reader: Reader, vectors: Sequence[Concept], folder: Path) -> None:
        self.options, self.reader, self.folder = options, reader, folder
        identity = ModelIdentity.of(reader.model.config, dtype=torch.float32, tokenizer=reader.tokenizer)
        Dictionary(tuple(vectors), options.layer).to_artifact(identity, {}).save(folder / "vectors")
        for vector in vectors:
            (folder / f"{vector.name}.yaml").write_text(RULES.format(folder=folder / "vectors", concept=vector.name))
        steer(reader.model, "off", tokenizer=reader.tokenizer)
        self.journal = options.journal / "written.jsonl" if options.journal else None
        self.known: dict[str, Texts] = {}
        if self.journal is not None and self.journal.exists():
            for line in self.journal.read_text().splitlines():
                row = json.loads(line)
                self.known[row["cell"]] = [(score, nll) for score, nll in row["texts"]]

    def asked(self, name: str, strength: float) -> Any:
        if not strength:
            return "off"
        return {"name": "activation_reasoning", "rules": str(self.folder / f"{name}.yaml"), "strength": strength}

    def cell(self, name: str, strength: float, starts: torch.Tensor, judge: Concept) -> Texts:
        """Texts behind ``starts`` ``[texts, START]``, with ``strength`` times the hidden state's norm towards a concept."""
        cell = f"{name} {strength:g} {len(starts)}x{self.options.tokens} {self.options.label} {self.options.layer}"
        if cell not in self.known:
            torch.manual_seed(random.Random(cell).getrandbits(32))
            ids = self.reader.model.generate(
                starts, attention_mask=torch.ones_like(starts), max_new_tokens=self.options.tokens, do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0,
                steer=[self.asked(name, strength)] * len(starts),
            )  # fmt: skip
            self.known[cell] = self.reader.judge(ids, judge)
            if self.journal is not None:
                with self.journal.open("a") as file:
                    file.write(json.dumps({"cell": cell, "texts": self.known[cell]}) + "\n")
            say(f"{cell}: score {_mean(self.known[cell], 0):.3f} nll {_mean(self.known[cell], 1):.3f}")
        return self.known[cell]

    def beside(self, name: str, strength: float, starts: torch.Tensor) -> float:
        """Largest difference of the logits of a request that is not steered, with steered ones beside it and without."""

        def logits(others: Any) -> torch.Tensor:
            out = self.reader.model.generate(
                starts, attention_mask=torch.ones_like(starts), max_new_tokens=self.options.tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0, steer=["off", *[others] * (len(starts) - 1)],
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            return torch.stack([step[0] for step in out.logits])

        return float((logits(self.asked(name, strength)) - logits("off")).abs().max())


def _mean(texts: Texts, part: int) -> float:
    return sum(text[part] for text in texts) / len(texts)


def steering(
    options: argparse.Namespace, reader: Reader, sae: Sae, concepts: Mapping[str, Concept], judge: Concept,
    figures: dict[str, float],
) -> None:  # fmt: skip
    rng = random.Random(0)
    free = [index for index in range(sae.width) if index not in concepts["top_k"].indices]
    thresholds = concepts["top_k"].thresholds
    arms = {"concept": concepts["top_k"].steer, "direction": concepts["direction"].steer}
    names = [f"random{number}" for number in range(options.randoms)]
    arms |= {name: sae.decoder[index] for name, index in zip(names, rng.sample(free, options.randoms), strict=True)}
    vectors = [direction_concept(name, vector, 0.0, thresholds) for name, vector in arms.items()]
    texts = [e.text for e in read_examples(options.test) if options.label not in e.labels]
    tokens = [reader.tokenizer(text).input_ids for text in texts]
    starts = torch.tensor([ids[:START] for ids in tokens if len(ids) >= START][: options.texts])
    strengths = [0.0, *options.strengths]
    with tempfile.TemporaryDirectory() as folder:
        bench = Steering(options, reader, vectors, Path(folder))
        plain = bench.cell("none", 0.0, starts, judge)
        found = {
            name: np.array([plain, *(bench.cell(name, strength, starts, judge) for strength in options.strengths)])
            for name in arms
        }
        figures["steer.beside"] = bench.beside("concept", max(options.strengths), starts[:4])
    drawn = np.stack([found[name] for name in names])
    figures["steer.none.score"], figures["steer.none.perplexity"] = _mean(plain, 0), math.exp(_mean(plain, 1))
    for at, strength in enumerate(strengths):
        if not at:
            continue
        for arm in ("concept", "direction"):
            figures[f"steer.{arm}.{strength:g}.perplexity"] = float(np.exp(found[arm][at, :, 1].mean()))
            for what, (value, low, high) in compared(found[arm], drawn, at).items():
                name = f"steer.{arm}.{strength:g}.{what}"
                figures[name], figures[f"{name}_low"], figures[f"{name}_high"] = value, low, high
        figures[f"steer.random.{strength:g}.perplexity"] = float(np.exp(drawn[:, at, :, 1].mean()))
        figures[f"steer.random.{strength:g}.gain"] = float((drawn[:, at, :, 0] - drawn[:, 0, :, 0]).mean())


def compared(
    own: NDArray[np.float64], drawn: NDArray[np.float64], at: int, rounds: int = 2000
) -> dict[str, tuple[float, float, float]]:
    """Estimates with their intervals.

    Args:
        own: ``[strengths, texts, 2]``, score and nll; the first strength is 0.
        drawn: ``[features, strengths, texts, 2]``, of random ones.
        at: strength in question.
    """
    rng = np.random.default_rng(0)

    def estimates(one: NDArray[np.float64], others: NDArray[np.float64]) -> tuple[float, float, float]:
        score, nll = one.mean(1).T  # by strength
        curve = others.mean((0, 2))  # [strengths, 2]
        curve = curve[curve[:, 1].argsort()]
        level = np.interp(nll[at], curve[:, 1], curve[:, 0]) if nll[at] <= curve[-1, 1] else np.nan
        return score[at] - score[0], score[at] - others[:, at, :, 0].mean(), score[at] - level

    point = estimates(own, drawn)
    rows = []
    for _ in range(rounds):
        texts, features = rng.integers(own.shape[1], size=own.shape[1]), rng.integers(len(drawn), size=len(drawn))
        rows.append(estimates(own[:, texts], drawn[features][:, :, texts]))
    found = {}
    for i, name in enumerate(("gain", "equal_norm", "matched")):
        values = np.array([row[i] for row in rows])
        # No interval where resampling leaves the perplexities that random features come to.
        if not np.isnan(point[i]) and np.isnan(values).mean() < 0.025:
            found[name] = (float(point[i]), *map(float, np.nanquantile(values, (0.025, 0.975))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--sae", required=True)
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--judge-layer", type=int)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--words", default="", help="for the word match, with commas between")
    parser.add_argument("--others", type=int, default=10_000, help="texts without the label, at most")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24, help="that are written")
    parser.add_argument("--texts", type=int, default=24, help="that are written at each strength")
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4, 0.6])
    parser.add_argument("--randoms", type=int, default=6, help="features drawn at random")
    parser.add_argument("--journal", type=Path, help="folder in which states and figures are kept")
    parser.add_argument("--quick", action="store_true", help="few and short texts: shows that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.others, options.length, options.tokens, options.texts = 20, 32, 4, 4
        options.strengths, options.randoms = [0.2, 0.4], 2
    if options.journal:
        options.journal.mkdir(parents=True, exist_ok=True)
    reader = Reader(options.model, (options.layer, options.judge_layer or options.layer + 6), options.journal)
    figures: dict[str, float] = {}
    sae, concepts, judge = detection(options, reader, figures)
    say(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))
    steering(options, reader, sae, concepts, judge, figures)
    setup = {**machine(), "label": options.label, "layer": options.layer}
    if options.json:
        print_json("concepts", setup, figures)
        return
    print(in_words(setup))
    print(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))


if __name__ == "__main__":
    main()
