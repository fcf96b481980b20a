"""PrOntoQA with rules: the model by itself, activation_reasoning, and the solver without a model.

    python benchmarks/ontology.py MODEL --count 100

``forced`` has the verdict force the answer, so it is the solver with the propositions that were detected: it is to be read
beside ``solver`` (parse, then solve), which needs no model at all. Concepts are words here, so detection is a string match.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from llm_steer.eval.logic_tasks import CLASSES, LogicProblem, parse_then_solve, prontoqa, rules_text
from llm_steer.eval.testbed.statistics import mean
from measuring import in_words, machine, print_json, say, table
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_steer import steer, unsteer


def ask(model: Any, tokenizer: Any, problem: LogicProblem, answers: dict[str, int]) -> tuple[str, str]:
    """The likelier of the two answers, and the first token of greedy text."""
    ids = tokenizer(f"{problem.prompt}\nAnswer:", return_tensors="pt").input_ids
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    logits = out.logits[0][0]
    return max(answers, key=lambda name: float(logits[answers[name]])), tokenizer.decode(out.sequences[0, -1]).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--solver-count", type=int, default=2000)
    parser.add_argument("--quick", action="store_true", help="two questions of each kind: shows that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.count, options.solver_count = 2, 50
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    answers = {name: tokenizer.encode(f" {name}", add_special_tokens=False)[0] for name in ("True", "False")}
    figures: dict[str, float] = {}
    for hops in (1, 3, 5):
        many = prontoqa(options.solver_count, hops)
        note(figures, f"{hops}.solver", [parse_then_solve(p) == p.answer for p in many])
        problems = many[: options.count]
        base, forced, shuffled, hits = [], [], [], [0, 0, 0]
        for number, problem in enumerate(problems):
            other = problems[number - 1].rules
            base.append(ask(model, tokenizer, problem, answers)[0] == problem.answer)
            for rules, into in ((None, forced), (other, shuffled)):
                steer(model, "activation_reasoning", tokenizer=tokenizer, rules=rules_text(problem, rules))
                into.append(ask(model, tokenizer, problem, answers)[1] == problem.answer)
                if rules is None:
                    (part,) = model.steering.traces[0]["plugins"]
                    found = {fact for moment in part["moments"] for fact in moment["detected"]}
                    gold = {rule for rule in problem.rules if "->" not in rule and rule.split("(")[0] in CLASSES}
                    hits = [hits[0] + len(found & gold), hits[1] + len(found), hits[2] + len(gold)]
                unsteer(model)
        note(figures, f"{hops}.model", base)
        note(figures, f"{hops}.forced", forced)
        note(figures, f"{hops}.shuffled_rules", shuffled)
        figures[f"{hops}.propositions_f1"] = 2 * hits[0] / max(hits[1] + hits[2], 1)
        own = {name: value for name, value in figures.items() if name.startswith(f"{hops}.")}
        say(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in own.items()]))
    setup = {**machine(), "problems": options.count, "solver_problems": options.solver_count}
    if options.json:
        print_json("ontology", setup, figures)
        return
    print(in_words(setup))
    print(table(["figure", "value"], [[name, f"{value:.3f}"] for name, value in figures.items()]))


def note(figures: dict[str, float], name: str, right: list[bool]) -> None:
    estimate = mean(right)
    figures[name], figures[f"{name}_error"] = estimate.value, estimate.error


if __name__ == "__main__":
    main()
