"""rebalance in ``model.generate``: against plain hooks and the rules in plain Python, and whatever stands beside a row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from llm_steer.plugins.rebalance import Rebalance
from llm_steer.plugins.rebalance.control import PRESETS

from llm_steer import SteerError, UnsupportedError, steer, unsteer
from llm_steer.artifact import DESCRIPTION, TENSORS, Artifact, Description, ModelIdentity
from llm_steer.hosts.hf_layers import find_layers
from support.rebalance_rules import Sequence
from support.vocabulary import BLANK, END_THINK, PAD, THINK

NEW = 40
OPTIONS = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW, "return_dict_in_generate": True}
OPTIONS |= {"output_logits": True}
PROMPTS = [[1, 30, THINK, 50], [1, THINK, 44, END_THINK, 20], [1, 31, 41, THINK, 9, 12, 13, BLANK]]
CONSTANTS = {"q25c": 0.1, "q75c": 0.3, "q25v": 1e-4, "q75v": 1e-3, "low": -1.0, "floor": -2.0, "ceiling": 0.5}
VECTOR = 6 * torch.randn(32, generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def plugin(register):
    register(Rebalance)


@pytest.fixture
def model(tiny_model):
    model = tiny_model()
    with torch.no_grad():  # a head that likes blank lines, so that there are steps
        head = model.lm_head.weight
        head[BLANK] *= 3 * head.norm(dim=1).mean() / head[BLANK].norm()
    return model


@pytest.fixture
def artifact(model, tiny_tokenizer) -> Artifact:
    identity = ModelIdentity.of(model.config, architecture=type(model).__name__, dtype=model.dtype, tokenizer=tiny_tokenizer)
    description = Description(
        method="rebalance",
        model=identity,
        layer=1,
        site="before",
        positions="delimiter",
        sign="towards_overthinking",
        constants=CONSTANTS,
    )
    return Artifact(description, {"vector": VECTOR})


@pytest.fixture
def folder(artifact, tmp_path: Path) -> str:
    return str(artifact.save(tmp_path / "a"))


def batch(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def thinks(ids: list[int]) -> bool:
    marks = [token for token in ids if token in (THINK, END_THINK)]
    return bool(marks) and marks[-1] == THINK


def by_hand(model, prompt: list[int], initial: float = -1.0, **fields) -> tuple[list[int], torch.Tensor, Sequence]:
    """Greedy, one row, no cache: plain hooks add what the rules say."""
    ids, logits, rules = list(prompt), [], Sequence(CONSTANTS, initial, **fields)

    def push(module, args, output):
        added = torch.zeros(len(ids))
        added[len(prompt) - 1 :] = torch.tensor(rules.added)
        return output + added[:, None] * VECTOR

    handle = find_layers(model)[0].register_forward_hook(push)
    for _ in range(NEW):
        rules.feed(ids[-1] == BLANK, thinks(ids))
        with torch.no_grad():
            logits.append(model(torch.tensor([ids])).logits[0, -1])
        rules.last = logits[-1].double().softmax(0).max().item()
        ids.append(int(logits[-1].argmax()))
    handle.remove()
    return ids, torch.stack(logits), rules


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"mode": "paper", "window": 3, "initial": 0.5}, {"paper": True, "window": 3, "initial": 0.5}),
        ({"scope": "output"}, {"everywhere": True}),
    ],
    ids=["reference", "paper", "everywhere"],
)
def test_rows_of_a_batch_equal_plain_hooks(ours, theirs, model, tiny_tokenizer, folder):
    expected = [by_hand(model, prompt, **theirs) for prompt in PROMPTS]
    plain = model.generate(**batch(PROMPTS), **OPTIONS)
    steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=folder, **ours)
    result = model.generate(**batch(PROMPTS), **OPTIONS)
    for row, (prompt, (ids, logits, rules)) in enumerate(zip(PROMPTS, expected, strict=True)):
        assert result.sequences[row, -NEW:].tolist() == ids[len(prompt) :]
        assert torch.allclose(torch.stack([step[row] for step in result.logits]), logits, atol=1e-4)
        trace = model.steering.traces[row]["plugins"][0]
        at = [i for i, value in enumerate(rules.added) if value]
        assert trace["positions"] == [i - 1 for i in at]
        assert trace["coefficients"] == pytest.approx([rules.added[i] for i in at], abs=1e-5)
        assert trace["confidences"] == pytest.approx(rules.history, abs=1e-5)
        assert trace["params"]["artifact"].startswith("sha256:")
        assert trace["params"]["warnings"] == []
    steered = [trace["plugins"][0]["steered_steps"] for trace in model.steering.traces]
    assert min(steered[0], steered[2]) >= 3
    assert model.steering.traces[2]["plugins"][0]["positions"][0] == -1  # the prompt ends with a delimiter
    assert [torch.equal(plain.sequences[i], result.sequences[i]) for i in (0, 2)] == [False, False]
    if "scope" not in ours:  # the second never thinks: it is followed, and not steered
        assert torch.equal(plain.sequences[1], result.sequences[1])
        assert steered[1] == 0


def test_batch_equals_solo_in_any_order(model, tiny_tokenizer, folder):
    steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=folder)
    solo = [model.generate(**batch([prompt]), **OPTIONS).sequences[0, len(prompt) :] for prompt in PROMPTS]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        together = model.generate(**batch([PROMPTS[i] for i in order]), **OPTIONS).sequences[:, -NEW:]
        assert all(torch.equal(row, solo[i]) for row, i in zip(together, order, strict=True))


@pytest.mark.parametrize(
    "options", [{"use_cache": False}, {"prefill_chunk_size": 2}, {"cache_implementation": "static"}], ids=str
)
def test_caches_and_prefill_change_nothing(options, model, tiny_tokenizer, folder):
    """Without a cache everything is fed again each time: each position keeps the coefficient that it had."""
    steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=folder)
    expected = model.generate(**batch(PROMPTS), **OPTIONS)
    traces = model.steering.traces
    assert torch.equal(model.generate(**batch(PROMPTS), **OPTIONS, **options).sequences, expected.sequences)
    for ours, theirs in zip(model.steering.traces, traces, strict=True):
        ours, theirs = ours["plugins"][0], theirs["plugins"][0]
        assert ours["positions"] == theirs["positions"]
        assert ours["coefficients"] == pytest.approx(theirs["coefficients"], abs=1e-4)


def test_rows_with_their_own_strength_beside_rows_that_do_not_steer(model, tiny_tokenizer, folder):
    plain = model.generate(**batch(PROMPTS), **OPTIONS)
    steer(model, "off", tokenizer=tiny_tokenizer)
    ours = {"name": "rebalance", "artifact": folder}
    mixed = model.generate(**batch(PROMPTS), **OPTIONS, steer=[{**ours, "strength": 2.0}, None, ours])
    for row in (0, 2):
        alone = model.generate(**batch(PROMPTS), **OPTIONS, steer={**ours, "strength": 2.0 - row / 2})
        assert torch.equal(mixed.sequences[row], alone.sequences[row])
    assert all(torch.equal(a[1], b[1]) for a, b in zip(plain.logits, mixed.logits, strict=True))
    assert torch.equal(unsteer(model).generate(**batch(PROMPTS), **OPTIONS).sequences, plain.sequences)


def test_strength_0_steers_nothing(model, tiny_tokenizer, folder):
    plain = model.generate(**batch(PROMPTS), **OPTIONS)
    steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=folder, strength=0)
    result = model.generate(**batch(PROMPTS), **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, result.logits, strict=True))
    assert [trace["plugins"][0]["steered_steps"] for trace in model.steering.traces] == [0, 0, 0]


def test_sampled_rows_have_their_own_state(model, tiny_tokenizer, folder):
    """Copies of one prompt that were drawn differently: each trace is that of its own tokens."""
    steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=folder)
    torch.manual_seed(0)
    options = OPTIONS | {"do_sample": True, "num_return_sequences": 3}
    result = model.generate(**batch(PROMPTS[:1]), **options)
    for row, trace in enumerate(model.steering.traces):
        rules = Sequence(CONSTANTS, -1.0)
        ids = result.sequences[row].tolist()
        for t in range(NEW):
            rules.feed(ids[3 + t] == BLANK, thinks(ids[: 4 + t]))
            rules.last = result.logits[t][row].double().softmax(0).max().item()
        assert trace["plugins"][0]["confidences"] == pytest.approx(rules.history, abs=1e-5)
        assert trace["plugins"][0]["coefficients"] == pytest.approx([x for x in rules.added if x], abs=1e-4)
    assert len({tuple(row.tolist()) for row in result.sequences}) == 3


def test_beams_and_drafts_are_refused(model, tiny_tokenizer, folder):
    steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=folder)
    for options in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(UnsupportedError, match="rebalance depends on what the model computed"):
            model.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4, **options)


def test_another_checkpoint_is_traced(model, tiny_tokenizer, artifact, tmp_path):
    other = artifact.description.model.model_copy(update={"id": "someone/model", "dtype": "bfloat16"})
    folder = Artifact(artifact.description.model_copy(update={"model": other}), artifact.tensors).save(tmp_path / "b")
    steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=str(folder))
    model.generate(**batch(PROMPTS[:1]), **OPTIONS)
    warnings = model.steering.traces[0]["plugins"][0]["params"]["warnings"]
    assert warnings == ["made for id 'someone/model', used with ''", "made for dtype 'bfloat16', used with 'float32'"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "Qwen2ForCausalLM"}, "architecture: got 'Qwen2ForCausalLM'"),
        ({"hidden_size": 33}, "hidden_size: got 33; must be this model's: 32"),
        ({"num_layers": 3}, "num_layers: got 3"),
        ({"tokenizer": "another"}, "tokenizer: got 'another'"),
    ],
)
def test_another_models_artifact_is_refused(change, message, model, tiny_tokenizer, artifact, tmp_path):
    made_for = artifact.description.model.model_copy(update=change)
    folder = Artifact(artifact.description.model_copy(update={"model": made_for}), artifact.tensors).save(tmp_path / "b")
    with pytest.raises(SteerError, match=message):
        steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=str(folder))
    assert not hasattr(model, "steering")


@pytest.mark.parametrize(
    ("description", "vector", "message"),
    [
        ({"layer": 0}, VECTOR, "layer 0, before"),
        ({"layer": 3}, VECTOR, "layer: got 3; must be between 0 and 2"),
        ({"layer": 2, "site": "after"}, VECTOR, "layer: got 2; must be between 0 and 1"),
        ({"sign": "none"}, VECTOR, "towards_overthinking or away_from_overthinking"),
        ({"method": "other"}, VECTOR, "made for rebalance, but it is for other"),
        ({"constants": {}}, VECTOR, "one with the constants q25c, q75c"),
        ({"constants": {**CONSTANTS, "more": 1.0}}, VECTOR, "one with the constants q25c, q75c"),
        ({"constants": {**CONSTANTS, "q25c": 0.9}}, VECTOR, "0 <= q25c < q75c < 1"),
        ({"constants": {**CONSTANTS, "low": 0.5}}, VECTOR, "low and floor below 0"),
        ({"relative_dose": 30.0}, VECTOR, "strength: got 1.0; must be between -0.1667 and 0.1667 .at most 10 times"),
        ({}, 1e6 * VECTOR, "strength: got 1.0; must be between .* .at most 10000 added to an element"),
        ({}, VECTOR[:-1], "one with a tensor 'vector' of 32 numbers"),
        ({}, VECTOR * float("nan"), "finite"),
    ],
)
def test_artifacts_that_make_no_sense(description, vector, message, model, tiny_tokenizer, artifact, tmp_path):
    folder = Artifact(artifact.description.model_copy(update=description), {"vector": vector}).save(tmp_path / "b")
    with pytest.raises(SteerError, match=message):
        steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=str(folder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "qwen3"}, "mode: got 'qwen3'; must be 'auto', 'reference' or 'paper'"),
        ({"strength": 1e9}, "strength"),
        ({"strength": float("nan")}, "strength"),
        ({"window": 4}, "window: got 4; must be left out with mode='reference'"),
        ({"layers": [1]}, "layers: got .1.; must be left out: this artifact is for 0"),
        ({"artifact": "unknown"}, "artifact: got 'unknown'"),
        ({"artifact": ""}, "artifact"),
        ({"artifact": 5}, "artifact"),
    ],
)
def test_bad_requests(fields, message, model, tiny_tokenizer, folder):
    steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=folder)
    for apply in (
        lambda: model.generate(**batch(PROMPTS), **OPTIONS, steer=fields),
        lambda: steer(model, "rebalance", tokenizer=tiny_tokenizer, **{"artifact": folder, **fields}),
    ):
        with pytest.raises(SteerError, match=message):
            apply()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("file", [DESCRIPTION, TENSORS])
def test_artifacts_with_flipped_bits(file, seed, model, tiny_tokenizer, folder):
    """Whatever a damaged file holds, it is refused with a reason; unless what the description says still makes sense."""
    generator = torch.Generator().manual_seed(seed)
    path = Path(folder) / file
    data = bytearray(path.read_bytes())
    for _ in range(3):
        at, bit = (int(torch.randint(n, (1,), generator=generator)) for n in (len(data), 8))
        data[at] ^= 1 << bit
    path.write_bytes(data[: len(data) - seed % 3])
    try:
        steer(model, "rebalance", tokenizer=tiny_tokenizer, artifact=folder)
        refusal = ""
    except SteerError as error:
        refusal = str(error)
    assert "artifact" in refusal or (file == DESCRIPTION and json.loads(data)["sha256"])


def test_presets_are_those_of_their_models():
    for preset in PRESETS.values():
        assert 0 < preset.layer < preset.num_layers
