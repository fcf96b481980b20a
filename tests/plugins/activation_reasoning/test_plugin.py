"""The plugin on Hugging Face models, against greedy decoding by hand."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from ar_model import CHAIN, GREEDY, OTHER, PROMPT, states
from llm_steer.plugins.activation_reasoning import ActivationReasoning, ActivationReasoningParams
from llm_steer.plugins.activation_reasoning.concepts import LEVELS, Dictionary, direction_concept

from llm_steer import SteerError, UnsupportedError, spec, steer
from llm_steer.artifact import ModelIdentity, load
from llm_steer.markers import Markers
from llm_steer.plugin import Context, Rows
from llm_steer.runtime import Runtime


@pytest.fixture(autouse=True)
def _registered(register):
    register(ActivationReasoning)


def by_hand(model, direction, prompt: list[int], steps: int, strength: float, decay: float, duration: int, layer: int = 0):
    """No cache, no plugin: the whole sequence again for each token, hidden states changed where they should be."""
    threshold = None
    h = states(model, PROMPT)[1:] @ direction
    top, next_ = h.topk(2).values.tolist()
    threshold = (top + next_) / 2
    ids = list(prompt)

    def hook(_, __, output):
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        detected = [t for t in range(1, hidden.shape[1]) if float(seen[t] @ direction) > threshold]
        if not detected:
            return
        start = max(detected[0], len(prompt) - 1)
        for t in range(start, min(start + duration, hidden.shape[1])):
            dose = torch.tensor(strength * decay ** (t - start), dtype=torch.float16).float()
            hidden[0, t] += dose * hidden[0, t].norm() * direction

    while len(ids) < len(prompt) + steps:
        seen = states(model, ids)
        handle = model.model.layers[layer].register_forward_hook(hook)
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        handle.remove()
    return ids


def test_greedy_is_what_it_is_by_hand(model, direction, write, tiny_tokenizer):
    expected = by_hand(model, direction, PROMPT, 10, -0.8, 0.75, 4)
    plain = model.generate(torch.tensor([PROMPT]), **GREEDY)[0].tolist()
    assert expected != plain
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(CHAIN))
    assert model.generate(torch.tensor([PROMPT]), **GREEDY)[0].tolist() == expected
    (part,) = model.steering.traces[0]["plugins"]
    moment = part["moments"][0]
    assert moment["position"] == 4
    assert moment["detected"] == ["c33"]
    assert moment["concluded"] == ["a", "b", "c"]
    assert [step["rules"] for step in moment["proofs"]["c"]] == [[], ["c33 -> a"], ["a -> b"], ["b and not late -> c"]]
    assert moment["actions"] == [], "the prompt before its last token is not steered"
    acts = {"number": 0, "kind": "steer", "when": "c", "concept": "c33"}
    assert [(m["position"], m["actions"]) for m in part["moments"][1:3]] == [(5, [acts]), (9, [])]
    assert part["propositions"][0]["at"] == 4
    assert part["missed_tokens"] is False
    json.dumps(part)


def test_a_later_layer_is_steered_by_what_an_earlier_one_shows(model, direction, write, tiny_tokenizer):
    expected = by_hand(model, direction, PROMPT, 10, 1.5, 1.0, 3, layer=1)
    rules = write("actions: [{when: c33, steer: {concept: c33, strength: 1.5, layers: [1]}, duration: 3}]")
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=rules)
    assert model.generate(torch.tensor([PROMPT]), **GREEDY)[0].tolist() == expected


def test_rows_of_a_batch_are_each_as_alone_and_unsteered_ones_untouched(model, direction, write, tiny_tokenizer):
    ids = torch.tensor([PROMPT, [0, 0, *OTHER], PROMPT, [0, *PROMPT[:5]]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    plain = model.generate(**inputs, **options)
    strong = write("actions: [{when: c33, steer: {concept: c33, strength: 1.9}}]", "strong.yaml")
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(CHAIN))
    result = model.generate(**inputs, **options, steer=[True, True, "off", {"rules": strong}])
    traces = model.steering.traces
    moments = traces[1]["plugins"][0]["moments"]
    quiet = moments[0]["position"] - len(OTHER) + 1 if moments else 10
    for step in range(10):  # not steered, and as long as nothing is detected: the same bits
        assert torch.equal(result.logits[step][2], plain.logits[step][2])
        assert step >= quiet or torch.equal(result.logits[step][1], plain.logits[step][1])
    assert quiet > 0
    assert result.sequences[0].tolist() == by_hand(model, direction, PROMPT, 10, -0.8, 0.75, 4)
    assert result.sequences[3, 1:].tolist() == by_hand(model, direction, PROMPT[:5], 10, 1.9, 1.0, 99)
    assert traces[2] is None


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_prompts_in_portions_change_nothing(chunk, model, write, tiny_tokenizer):
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(CHAIN))
    whole = model.generate(torch.tensor([PROMPT]), **GREEDY)
    trace = model.steering.traces[0]["plugins"]
    parts = model.generate(torch.tensor([PROMPT]), **GREEDY, prefill_chunk_size=chunk)
    assert torch.equal(parts, whole)
    again = model.steering.traces[0]["plugins"]
    assert again[0]["moments"] == trace[0]["moments"]


def test_a_proposition_that_ends_takes_its_action_back(model, direction, write, tiny_tokenizer):
    rules = write(
        "propositions: {c33: {hold: 2}}\nactions: [{when: c33, steer: {concept: c33, strength: -0.8, decay: 0.75}}]"
    )
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=rules)
    out = model.generate(torch.tensor([PROMPT]), **GREEDY)[0].tolist()
    moments = model.steering.traces[0]["plugins"][0]["moments"]
    assert (moments[0]["position"], moments[0]["detected"]) == (4, ["c33"])
    if moments[1]["ended"]:  # 4, 5 and 6 are steered
        assert moments[1]["position"] == 7
        assert out == by_hand(model, direction, PROMPT, 10, -0.8, 0.75, 2)


def test_strength_zero_only_watches(model, write, tiny_tokenizer):
    plain = model.generate(torch.tensor([PROMPT]), **GREEDY)
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(CHAIN), strength=0.0)
    assert torch.equal(model.generate(torch.tensor([PROMPT]), **GREEDY), plain)
    assert model.steering.traces[0]["plugins"][0]["moments"][0]["concluded"] == ["a", "b", "c"]


def test_tokens_are_forced_forbidden_and_the_output_is_stopped(model, write, tiny_tokenizer):
    plain = model.generate(torch.tensor([PROMPT]), **GREEDY)[0, len(PROMPT) :].tolist()
    first = tiny_tokenizer.convert_ids_to_tokens(plain[0])

    def run(text, prompt=PROMPT, **options):
        steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(text))
        return model.generate(torch.tensor([prompt]), **{**GREEDY, **options})[0, len(prompt) :].tolist()

    w70, w71 = tiny_tokenizer.convert_tokens_to_ids(["w70", "w71"])
    forced = run("actions: [{when: c33, force: [w70, w71]}]")
    assert forced[0] in (w70, w71)
    assert forced[1] not in (w70, w71)
    assert set(run("actions: [{when: c33, force: [w70, w71], duration: 3}]")[:3]) <= {w70, w71}
    assert plain[0] not in run(f"actions: [{{when: c33, forbid: [{first}]}}]")
    assert run("actions: [{when: c33, stop: true}]", eos_token_id=2) == [2]
    assert run("actions: [{when: nothing, stop: true}]\nconcepts: {nothing: {words: [w400]}}") == plain
    # The higher priority acts, then the first.
    assert run("actions: [{when: c33, force: [w70]}, {when: c33, force: [w71], priority: 1}]")[0] == w71
    assert run("actions: [{when: c33, force: [w70]}, {when: c33, force: [w71]}]")[0] == w70
    assert run("actions: [{when: c33, force: [w70]}, {when: c33, forbid: [w70], priority: 1}]")[0] != w70


def test_a_contradiction_takes_actions_back_unless_the_file_says_otherwise(model, write, tiny_tokenizer):
    text = "rules: [c33 -> a, a and b -> false]\nactions: [{when: a, force: [w70]}]\n"
    w70 = tiny_tokenizer.convert_tokens_to_ids("w70")
    for extra, facts, acts in (("", [], True), ("", ["b"], False), ("on_contradiction: ignore\n", ["b"], True)):
        rules = write(text + extra + "concepts: {b: {words: [w400]}}")
        steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=rules, facts=facts)
        assert (int(model.generate(torch.tensor([PROMPT]), **GREEDY)[0, len(PROMPT)]) == w70) == acts
        assert bool(model.steering.traces[0]["plugins"][0]["moments"][-1]["contradiction"]) == bool(facts)


@pytest.mark.parametrize("norm", ["product", "goedel"])
def test_degrees_of_truth_steer_by_degrees(norm, model, direction, folder, write, tiny_tokenizer):
    """Greedy decoding by hand, each token's dose the strength times how true the formula is there."""
    dictionary = Dictionary.from_artifact(load(folder / "dictionary", "activation_reasoning"))
    (concept,) = dictionary.concepts
    identity = ModelIdentity.of(model.config, architecture=type(model).__name__, tokenizer=tiny_tokenizer)
    scores = states(model, PROMPT)[1:] @ direction
    high, wide, low = concept.thresholds["token"], float(scores.std()), float(scores.median())
    rules = write(f"""truth: {norm}
propositions:
  sure: {{concept: c33, hold: 0}}
  likely: {{concept: c33, hold: 0, threshold: {low!r}}}
rules: [sure and likely -> a, a -> b, likely and not sure -> c]
actions:
  - {{when: b, steer: {{concept: c33, strength: -1.5}}, above: 0.2}}
  - {{when: c, forbid: [w70]}}
""")
    with pytest.raises(SteerError, match=f"'c33'; must be one whose dictionary has widths for truth: {norm}"):
        steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=rules)
    shutil.rmtree(folder / "dictionary")
    wider = replace(concept, widths=dict.fromkeys(LEVELS, wide))
    Dictionary((wider,), 0).to_artifact(identity, {}).save(folder / "dictionary")

    def levels(ids):
        x = (states(model, ids) @ direction).double()
        sure, likely = torch.sigmoid((x - high) / wide), torch.sigmoid((x - low) / wide)
        a = sure * likely if norm == "product" else torch.minimum(sure, likely)
        c = likely * (1 - sure) if norm == "product" else torch.minimum(likely, 1 - sure)
        rows = zip(*(part.tolist() for part in (sure, likely, a, c)), strict=True)
        return [dict(zip(("sure", "likely", "a", "c"), row, strict=True)) for row in rows]

    ids = list(PROMPT)
    w70 = tiny_tokenizer.convert_tokens_to_ids("w70")
    for _ in range(10):
        known = levels(ids)

        def hook(_, __, hidden, known=known):
            for t in range(len(PROMPT) - 1, hidden.shape[1]):
                if known[t]["a"] > 0.2:
                    dose = torch.tensor(-1.5 * known[t]["a"], dtype=torch.float16).float()
                    hidden[0, t] += dose * hidden[0, t].norm() * direction

        handle = model.model.layers[0].register_forward_hook(hook)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        handle.remove()
        if known[-1]["c"] > 0.5:
            logits[w70] = float("-inf")
        ids.append(int(logits.argmax()))
    plain = model.generate(torch.tensor([PROMPT]), **GREEDY)[0].tolist()
    assert ids != plain
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=rules)
    for chunk in (None, 2):
        options = {"prefill_chunk_size": chunk} if chunk else {}
        assert model.generate(torch.tensor([PROMPT]), **GREEDY, **options)[0].tolist() == ids
    (part,) = model.steering.traces[0]["plugins"]
    assert part["truth"] == norm
    known, proofs = levels(ids), {}
    for moment in part["moments"]:
        here = {name: level for name, level in known[moment["position"]].items() if name in moment["degrees"]}
        assert {"sure", "likely", "a"} <= here.keys()
        assert {name: moment["degrees"][name] for name in here} == pytest.approx(here, abs=1e-3)
        assert moment["degrees"]["b"] == moment["degrees"]["a"]
        proofs |= moment["proofs"]
    assert [step["rules"] for step in proofs["b"]][-2:] == [["sure and likely -> a"], ["a -> b"]]
    json.dumps(part)


def test_contradictions_by_degrees_and_rules_of_requests(model, write, tiny_tokenizer):
    there = tiny_tokenizer.convert_ids_to_tokens(PROMPT[4])
    words = f"truth: product\nconcepts: {{b: {{words: [{there}]}}, never: {{words: [w400]}}}}\n"
    text = words + "rules: [b -> a, a and key -> false]\nactions: [{when: a, force: [w70]}]\n"
    w70 = tiny_tokenizer.convert_tokens_to_ids("w70")
    rules = write(text + "propositions: {key: {concept: never}}\n")
    for facts, acts in (([], True), (["key"], False)):
        steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=rules, facts=facts)
        first = int(model.generate(torch.tensor([PROMPT]), **GREEDY)[0, len(PROMPT)])
        assert (first == w70) == acts
        moment = next(m for m in model.steering.traces[0]["plugins"][0]["moments"] if m["position"] == 4)
        assert moment["degrees"] == ({"a": 1.0, "b": 1.0} if acts else {"a": 1.0, "b": 1.0, "key": 1.0})
        assert bool(moment["contradiction"]) == (not acts)
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=rules)
    out = model.generate(torch.tensor([PROMPT, PROMPT]), **GREEDY, steer=[{"extra_rules": ["a -> false"]}, True])
    assert [row == w70 for row in out[:, len(PROMPT)].tolist()] == [False, True]
    from llm_steer.tokens import Vocabulary

    declared = ActivationReasoningParams(rules=rules, allow_rules=4)
    with pytest.raises(SteerError, match="allow_rules: got 4; must be 0 where a file has truth: product"):
        declared.resolve(Vocabulary(tiny_tokenizer, 512), model.steering.shelf)


def test_a_file_that_detects_nothing_steers_all_the_same(model, direction, write, tiny_tokenizer):
    rules = write("rules: ['true -> go']\nactions: [{when: go, steer: {concept: c33, strength: 0.9}}]")
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=rules)
    ids = list(PROMPT)
    for _ in range(10):

        def hook(_, __, hidden):
            dose = torch.tensor(0.9, dtype=torch.float16).float()
            last = hidden[0, len(PROMPT) - 1 :]
            hidden[0, len(PROMPT) - 1 :] = last + dose * last.norm(dim=1, keepdim=True) * direction

        handle = model.model.layers[0].register_forward_hook(hook)
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        handle.remove()
    assert model.generate(torch.tensor([PROMPT]), **GREEDY)[0].tolist() == ids


def test_facts_of_closed_semantics_are_positive(model, write, tiny_tokenizer):
    with pytest.raises(SteerError, match=r"facts: got 'not b'"):
        steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(CHAIN), facts=["not b"])


def test_rules_and_facts_of_one_request(model, write, tiny_tokenizer):
    rules = write("rules: [c33 -> a]\nactions: [{when: goal, force: [w70]}]\nconcepts: {goal: {words: [w400]}}")
    w70 = tiny_tokenizer.convert_tokens_to_ids("w70")
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=rules)
    ids = torch.tensor([PROMPT, PROMPT, PROMPT])
    out = model.generate(
        ids, **GREEDY, steer=[True, {"extra_rules": ["a -> goal"]}, {"extra_rules": ["a and key -> goal"], "facts": ["key"]}]
    )
    assert [row == w70 for row in out[:, len(PROMPT)].tolist()] == [False, True, True]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("actions: [{when: c34, stop: true}]", r"got 'c34'; must be a concept .*did you mean 'c33'"),
        ("actions: [{when: c33, steer: {concept: c33, strength: 1, layers: [7]}}]", "between 0 and 1 in this model"),
        ("actions: [{when: c33, force: [' ']}]", "visible character"),
        ("detection: reference", "whole SAE"),
        ("rules:\n  - c33 -> b\n  - c33 and nosuch -> b", r"line 4, column 5: got 'nosuch'; must be a concept"),
        (
            "actions:\n  - {when: c33, steer: {concept: gone, strength: 1}}",
            r"line 3, column 34: got 'gone'; must be",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(text, what, model, write, tiny_tokenizer):
    with pytest.raises(SteerError, match=what):
        steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(text))


def test_a_fact_that_is_none_is_named(model, write, tiny_tokenizer):
    with pytest.raises(SteerError, match=r"facts\[1\], line 1, column \d+: got 'a or b'"):
        steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(CHAIN), facts=["c33", "a or b"])


@pytest.mark.parametrize("text", ["semantics: open\nrules: []\n", "semantics: open\nrules: ['true']\n", "rules: []\n"])
def test_a_file_that_says_nothing(text, model, write, tiny_tokenizer):
    before = model.generate(torch.tensor([PROMPT]), **GREEDY)
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(text), allow_rules=4)
    assert torch.equal(model.generate(torch.tensor([PROMPT]), **GREEDY), before)


def test_a_dictionary_of_another_width_is_refused(tiny_tokenizer, model, folder, tmp_path):
    identity = ModelIdentity(architecture="LlamaForCausalLM", hidden_size=48, num_layers=2)
    dictionary = Dictionary((direction_concept("x", torch.ones(48), 0.0, dict.fromkeys(LEVELS, 1.0)),), 0)
    dictionary.to_artifact(identity, {}).save(tmp_path / "wide")
    (tmp_path / "f.yaml").write_text(f"dictionary: {tmp_path}/wide\nactions: [{{when: x, log: true}}]")
    with pytest.raises(SteerError, match="hidden_size: got 48; must be this model's: 32"):
        steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=str(tmp_path / "f.yaml"))


def test_beams_are_refused(model, write, tiny_tokenizer):
    steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(CHAIN))
    with pytest.raises(UnsupportedError, match="depends on what the model computed"):
        model.generate(torch.tensor([PROMPT]), num_beams=2, max_new_tokens=3)


def test_a_mask_by_others_wins_and_rows_of_others_stay(write, model, tiny_tokenizer):
    steering = steer(model, "activation_reasoning", tokenizer=tiny_tokenizer,
                     rules=write("actions: [{when: c33, force: [w70]}]")).steering  # fmt: skip
    (resolved,) = steering._resolved
    context = Context(3, torch.device("cpu"), 512, 2, 32, 64, shelf=steering.shelf)
    runtime = Runtime(context, Markers(), declared=(resolved,))
    runtime.admit(0, (resolved,), torch.tensor(PROMPT))
    tokens = runtime.forward(torch.tensor(PROMPT), torch.zeros(6, dtype=torch.int64), torch.arange(6))
    runtime.residual(0, states(model, PROMPT).clone(), tokens)
    w70 = tiny_tokenizer.convert_tokens_to_ids("w70")
    logits = torch.randn(2, 512)
    logits[0, w70] = float("-inf")
    before = logits.clone()
    live = torch.tensor([True, False])
    zero = torch.zeros(2, dtype=torch.int64)
    rows = Rows(torch.tensor([0, 2]), zero, live, zero, live, live)
    plugin = runtime.plugin(ActivationReasoning)
    plugin.logits(logits, rows)
    assert torch.equal(logits, before), "nothing would be left: the other mask wins"
    logits[0, w70] = 0.0
    plugin.logits(logits, rows)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [w70]
    assert torch.equal(logits[1], before[1])


def test_states_that_are_not_finite_steer_nothing(write, model, tiny_tokenizer):
    steering = steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(CHAIN)).steering
    (resolved,) = steering._resolved
    runtime = Runtime(Context(2, torch.device("cpu"), 512, 2, 32, 64, shelf=steering.shelf), Markers(), declared=(resolved,))
    runtime.admit(0, (resolved,), torch.tensor(PROMPT))
    hidden = states(model, PROMPT).clone()
    hidden[2:4] = float("nan")
    hidden[5] = float("inf")
    tokens = runtime.forward(torch.tensor(PROMPT), torch.zeros(6, dtype=torch.int64), torch.arange(6))
    delta = runtime.plugin(ActivationReasoning).residual(0, hidden, tokens)
    assert torch.equal(delta, torch.zeros_like(delta))
    assert runtime.plugin(ActivationReasoning).finish(0, tokens, None)["broken_tokens"] == 3


def test_resolving_twice_is_resolving_once(write, model, tiny_tokenizer):
    steering = steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(CHAIN)).steering
    (resolved,) = steering._resolved
    assert spec.resolve((resolved,), None) == (resolved,)
    assert spec.from_wire(json.loads(json.dumps(spec.to_wire((resolved,))))) == (resolved,)


def test_unresolved_parameters_never_reach_a_batch():
    context = Context(2, torch.device("cpu"), 512, 2, 32, 64, declared=(ActivationReasoningParams(rules="x"),))
    with pytest.raises(ValueError, match="not resolved"):
        ActivationReasoning(context)


def test_the_layer_hook_is_one_graph(write, model, tiny_tokenizer):
    """Traced whole, with state changed in place, it does what it does without: no branch on data, no wait."""
    text = """
concepts: {w: {words: [w25, w26 w27]}, other: {words: [w28]}}
propositions:
  pair: {pattern: [w, other], within: scope}
  c33: {level: sentence}
  lasting: {concept: c33, level: global, aggregate: mean}
rules: [c33 -> a, pair and not a -> b, lasting -> c, a -> d, d -> a]
actions:
  - {when: a or c, steer: {concept: c33, strength: -0.8, decay: 0.75, layers: [0, 1]}, duration: 4}
  - {when: b, forbid: [w70]}
"""
    steering = steer(model, "activation_reasoning", tokenizer=tiny_tokenizer, rules=write(text)).steering
    (resolved,) = steering._resolved
    context = Context(3, torch.device("cpu"), 512, 2, 32, 64, shelf=steering.shelf)
    plain, traced = (Runtime(context, Markers(), declared=(resolved,)) for _ in range(2))
    hook = torch.compile(traced.plugin(ActivationReasoning).residual, fullgraph=True, backend="eager")
    hidden = states(model, PROMPT)
    for runtime in (plain, traced):
        for slot in (0, 1):
            runtime.admit(slot, (resolved,), torch.tensor(PROMPT[:4]))
    slots, positions = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2, 0, 1, 2])
    with torch.inference_mode():
        for turn in range(4):
            ids, at = torch.tensor([*PROMPT[turn : turn + 3], 33, 34, 25]), positions + 3 * turn
            tokens = [runtime.forward(ids, slots, at) for runtime in (plain, traced)]
            for layer in (0, 1):
                expected = plain.plugin(ActivationReasoning).residual(layer, hidden + turn, tokens[0])
                found = (traced.plugin(ActivationReasoning).residual if layer else hook)(layer, hidden + turn, tokens[1])
                assert torch.equal(found, expected)
                assert (found.abs().sum() > 0) == (turn in (1, 2)), turn  # the prompts end in turn 1; 4 tokens are steered
