"""constant_vector and random_vector on a tiny model, against a plain hook that knows every sequence in advance."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llm_steer.plugins.vector import ConstantVector, RandomVector
from llm_steer.plugins.vector.plugin import random_direction

from llm_steer import SteerError, steer, unsteer
from llm_steer.artifact import Artifact, Description, ModelIdentity
from llm_steer.hosts.hf_layers import find_layers
from support.vocabulary import BLANK, END_THINK, PAD, THINK

GREEDY = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
PROMPTS = [[1, 30, THINK, 50, BLANK], [1, THINK, 44, END_THINK, 20], [1, 31, 41, BLANK, 51, THINK, 9]]


@pytest.fixture(autouse=True)
def plugins(register):
    register(ConstantVector)
    register(RandomVector)


def identity(model, tokenizer) -> ModelIdentity:
    return ModelIdentity.of(model.config, architecture=type(model).__name__, dtype=model.dtype, tokenizer=tokenizer)


@pytest.fixture
def folder(tiny_model, tiny_tokenizer, tmp_path: Path) -> str:
    description = Description(
        method="rebalance", model=identity(tiny_model(), tiny_tokenizer), layer=1, site="before", positions="delimiter"
    )
    vector = torch.randn(32, generator=torch.Generator().manual_seed(3))
    return str(Artifact(description, {"vector": vector}).save(tmp_path / "a"))


def batch(prompts: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def steered_at(ids: list[int], prompt_len: int, positions: str) -> list[bool]:
    """Which tokens are steered, by the rules in words."""
    acts, thinking = [], False
    for index, token in enumerate(ids):
        thinking = (thinking or token == THINK) and token != END_THINK
        late = index >= prompt_len - 1
        acts.append(
            {
                "all": True,
                "output": late,
                "think": late and thinking,
                "delimiters": late and thinking and token == BLANK,
                "output_delimiters": late and token == BLANK,
            }[positions]
        )
    return acts


def reference(model, prompt: list[int], positions: str, added: torch.Tensor, layers: list[int]) -> tuple[list[int], list]:
    """Greedy, one row, no cache: the vector is added by plain hooks."""
    ids, logits = list(prompt), []

    def push(module, args, output):
        acts = torch.tensor(steered_at(ids, len(prompt), positions), dtype=torch.float32)
        return output + acts[:, None] * added

    handles = [find_layers(model)[layer].register_forward_hook(push) for layer in layers]
    for _ in range(12):
        with torch.no_grad():
            logits.append(model(torch.tensor([ids])).logits[0, -1])
        ids.append(int(logits[-1].argmax()))
    for handle in handles:
        handle.remove()
    return ids, logits


@pytest.fixture
def model(tiny_model):
    model = tiny_model()
    with torch.no_grad():  # a head that likes blank lines, so that there are delimiters
        direction = model.lm_head.weight.norm(dim=1).mean()
        model.lm_head.weight[BLANK] *= 3 * direction / model.lm_head.weight[BLANK].norm()
    return model


@pytest.mark.parametrize("positions", ["all", "output", "think", "delimiters", "output_delimiters"])
def test_rows_of_a_batch_equal_plain_hooks(positions, model, tiny_tokenizer, folder):
    added = 4.0 * torch.randn(32, generator=torch.Generator().manual_seed(3))
    expected = [reference(model, prompt, positions, added, [0]) for prompt in PROMPTS]
    plain = [reference(model, prompt, positions, 0 * added, [0]) for prompt in PROMPTS]
    steer(model, "constant_vector", tokenizer=tiny_tokenizer, artifact=folder, coefficient=4, positions=positions)
    options = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    result = model.generate(**batch(PROMPTS), **options)
    for row, (prompt, (ids, logits)) in enumerate(zip(PROMPTS, expected, strict=True)):
        assert result.sequences[row, -12:].tolist() == ids[len(prompt) :]
        assert torch.allclose(torch.stack([step[row] for step in result.logits]), torch.stack(logits), atol=1e-4)
        trace = model.steering.traces[row]["plugins"][0]
        assert trace["steered_tokens"] == sum(steered_at(ids, len(prompt), positions)[len(prompt) : -1])
        assert trace["params"]["artifact"].startswith("sha256:")
        assert trace["params"]["warnings"] == []
    changed = [a[0] != b[0] for a, b in zip(expected, plain, strict=True)]
    assert any(changed)
    if positions == "think":
        assert not changed[1]


def test_several_layers_and_rows_with_their_own_vectors(model, tiny_tokenizer, folder):
    added = torch.randn(32, generator=torch.Generator().manual_seed(3))
    other = 6.0 * random_direction(5, 32)
    expected = [
        reference(model, PROMPTS[0], "output", 3 * added, [0, 1])[0],
        reference(model, PROMPTS[1], "output", 0 * added, [])[0],
        reference(model, PROMPTS[2], "all", 2 * other, [1])[0],
    ]
    steer(model, "off", tokenizer=tiny_tokenizer)
    ours = [
        {"name": "constant_vector", "artifact": folder, "layers": [0, 1], "coefficient": 3.0},
        None,
        {"name": "random_vector", "seed": 5, "norm": 6.0, "layers": [1], "coefficient": 2.0, "positions": "all"},
    ]
    result = model.generate(**batch(PROMPTS), **GREEDY, steer=ours)
    assert [row[-12:] for row in result.tolist()] == [ids[-12:] for ids in expected]
    plain = unsteer(model).generate(**batch(PROMPTS), **GREEDY)
    assert torch.equal(plain[1], result[1])
    assert not torch.equal(plain[0], result[0])


def test_a_random_vector_has_the_artifacts_norm_and_layer(model, tiny_tokenizer, folder):
    steer(model, "random_vector", tokenizer=tiny_tokenizer, artifact=folder, seed=7)
    model.generate(**batch(PROMPTS[:1]), **GREEDY)
    params = model.steering.traces[0]["plugins"][0]["params"]
    norm = torch.randn(32, generator=torch.Generator().manual_seed(3)).norm().item()
    assert params["norm"] == pytest.approx(norm)
    assert params["layers"] == [0]
    assert random_direction(7, 32).norm().item() == pytest.approx(1.0)
    assert abs(float(random_direction(7, 4096) @ random_direction(8, 4096))) < 0.1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coefficient": 1e3}, "coefficient: got 1000.0; must be between -"),
        ({"coefficient": float("nan")}, "coefficient"),
        ({"layers": [2]}, "layers: got 2; must be between 0 and 1 in this model"),
        ({"layers": [-1]}, "layers"),
        ({"positions": "prompt"}, "positions"),
        ({"artifact": "nowhere"}, "artifact: got 'nowhere'"),
        ({"artifact": "sha256:00"}, "the content hash of an artifact that lies here"),
    ],
)
def test_bad_requests(fields, message, model, tiny_tokenizer, folder):
    """The vector of the first case has a known dose of a third of the stream's norm."""
    from llm_steer.artifact import load

    artifact = load(folder, None)
    dosed = Artifact(artifact.description.model_copy(update={"relative_dose": 1 / 3}), artifact.tensors)
    dosed.save(Path(folder))
    with pytest.raises(SteerError, match=message):
        steer(model, "constant_vector", tokenizer=tiny_tokenizer, **{"artifact": folder, **fields})
