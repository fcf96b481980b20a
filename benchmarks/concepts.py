"""How well concepts are detected in texts that nothing was fitted on, and whether steering towards one raises it.

    python benchmarks/concepts.py MODEL --sae SAE --layer 15 --label Geometry --words triangle,circle,angle \
        --train train.jsonl --test test.jsonl

Detection: AUC over test texts of every kind of concept, beside difference of means, a probe, and plain word match. Concepts
and thresholds come from the training texts (those of the SAE, too, if you trained it so). Steering: the mean score, by a
probe behind a later layer over the text alone, of what the model writes when it is steered towards the concept, towards
features drawn at random, and not at all; each with the perplexity of what it wrote under the model as it is.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path
from typing import Any

import torch
from llm_steer.plugins.activation_reasoning.concepts import unit
from llm_steer.plugins.activation_reasoning.find import Encoded, Example, auc, find, read_examples, word_auc
from llm_steer.plugins.activation_reasoning.sae import load_sae
from measuring import in_words, machine, print_json, say, table
from transformers import AutoModelForCausalLM, AutoTokenizer

METHODS = ("single", "top_k", "relational", "direction", "probe")
STARTS = ("Here is a problem:", "Let us consider", "Find the value of", "The question is", "We are given", "Suppose that")


def some(examples: list[Example], label: str, others: int) -> list[Example]:
    """All texts with the label, and so many without."""
    without = [e for e in examples if label not in e.labels]
    return [e for e in examples if label in e.labels] + without[:others]


class Reader:
    """Hidden states of texts behind two layers: the SAE's, and a later one for the judge."""

    def __init__(self, name: str, layers: tuple[int, int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.layers = layers

    def encode(self, examples: list[Example], label: str, length: int) -> tuple[list[Encoded], list[Encoded]]:
        found: tuple[list[Encoded], list[Encoded]] = ([], [])
        for number, example in enumerate(examples):
            ids = self.tokenizer(example.text, truncation=True, max_length=length, return_tensors="pt").input_ids
            if ids.shape[1] < 3:
                continue
            with torch.inference_mode():
                states = self.model.get_decoder()(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
            labels = torch.full((ids.shape[1] - 1,), label in example.labels)
            for part, layer in zip(found, self.layers, strict=True):
                # A third calibrates; the test texts are others.
                part.append(Encoded(states[layer + 1][0, 1:].clone(), {label: labels}, number % 3 == 0))
            if number % 100 == 0:
                say(f"{number} of {len(examples)} texts")
        return found

    def write(self, start: str, vector: torch.Tensor | None, strength: float, count: int) -> list[int]:
        """Greedy text, with ``strength`` times the hidden state's norm added along ``vector`` at generated tokens."""
        ids = self.tokenizer(start, return_tensors="pt").input_ids
        prompt = ids.shape[1]

        def hook(_: Any, __: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            if vector is not None:
                hidden[:, -1] += strength * hidden[:, -1].norm(dim=-1, keepdim=True) * vector
            return output

        handle = self.model.get_decoder().layers[self.layers[0]].register_forward_hook(hook)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        handle.remove()
        written: list[int] = out[0].tolist()
        assert len(written) > prompt
        return written

    def judge(self, ids: list[int], start: int, score: Any) -> tuple[float, float]:
        """Mean score of the written tokens, and their mean negative log-likelihood in nats."""
        with torch.inference_mode():
            result = self.model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        nll = torch.nn.functional.cross_entropy(result.logits[0, start - 1 : -1], torch.tensor(ids[start:]))
        return float(score(result.hidden_states[self.layers[1] + 1][0, start:]).mean()), float(nll)


def detection(options: argparse.Namespace, reader: Reader, figures: dict[str, float]) -> tuple[Any, Any, Any]:
    sae = load_sae(options.sae, reader.model.config.hidden_size)
    train, test = (some(read_examples(path), options.label, options.others) for path in (options.train, options.test))
    fitted, judged = reader.encode(train, options.label, options.length)
    seen, _ = reader.encode(test, options.label, options.length)
    label = torch.tensor([bool(e.labelled[options.label].any()) for e in seen])
    figures["test_texts"], figures["test_positives"] = float(len(seen)), float(label.sum())
    concepts = {}
    for method in METHODS:
        concept = find(options.label, fitted, method, None if method in ("direction", "probe") else sae)
        concepts[method] = concept
        scores = [concept.score(e.hidden) for e in seen]
        for level, values in (("max", [s.max() for s in scores]), ("mean", [s.mean() for s in scores])):
            value = torch.stack(values)
            figures[f"auc.{method}.{level}"] = auc(value, label)
            hits = value > concept.thresholds[level]
            both = hits[label].float().mean() + (~hits)[~label].float().mean()
            figures[f"balanced_accuracy.{method}.{level}"] = float(both) / 2
    figures["auc.words"] = word_auc([e for e in test if e.text], options.label, options.words.split(","))
    return sae, concepts, find(options.label, judged, "probe")


def steering(
    options: argparse.Namespace, reader: Reader, sae: Any, concepts: Any, judge: Any, figures: dict[str, float]
) -> None:
    rng = random.Random(0)
    random_features = [unit(sae.decoder[rng.randrange(sae.width)]) for _ in range(options.randoms)]
    arms: dict[str, list[torch.Tensor | None]] = {
        "none": [None],
        "concept": [concepts["top_k"].steer],
        "direction": [concepts["direction"].steer],
        "random": [*random_features],
    }
    for strength in options.strengths:
        for arm, vectors in arms.items():
            if arm == "none" and strength != options.strengths[0]:
                continue
            found = []
            for vector in vectors:
                for start in STARTS:
                    ids = reader.write(start, vector, strength, options.tokens)
                    found.append(reader.judge(ids, len(reader.tokenizer(start).input_ids), judge.score))
            name = arm if arm == "none" else f"{arm}.{strength:g}"
            figures[f"steer.{name}.score"] = sum(s for s, _ in found) / len(found)
            figures[f"steer.{name}.perplexity"] = math.exp(sum(n for _, n in found) / len(found))
            say(f"{name}: score {figures[f'steer.{name}.score']:.3f} perplexity {figures[f'steer.{name}.perplexity']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--sae", type=Path, required=True)
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--judge-layer", type=int)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--label", required=True)
    parser.add_argument("--words", default="", help="for the word match, with commas between")
    parser.add_argument("--others", type=int, default=10_000, help="texts without the label, at most")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.2, 0.4])
    parser.add_argument("--randoms", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few and short texts: shows that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.others, options.length, options.tokens, options.strengths, options.randoms = 20, 32, 4, [0.2], 1
    reader = Reader(options.model, (options.layer, options.judge_layer or options.layer + 6))
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
