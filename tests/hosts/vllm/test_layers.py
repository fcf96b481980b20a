"""Residual hooks as a part of a layer, without vLLM: what is added where, and what a graph reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llm_steer import Plugin
from llm_steer.errors import UnsupportedError
from llm_steer.hosts.vllm import layers
from llm_steer.hosts.vllm.layers import TokenBuffer, find_layers, steer_behind
from llm_steer.plugin import Context, Tokens

CPU = torch.device("cpu")
NOBODY, SIZE = 3, 8
CONTEXT = Context(NOBODY + 1, CPU, 16, num_layers=2, hidden_size=4)


def tokens(slots: list[int]) -> Tokens:
    count = len(slots)
    numbers = [torch.arange(count) + 10 * i for i in range(4)]
    flags = [torch.arange(count) % (i + 2) == 0 for i in range(3)]
    return Tokens(
        ids=numbers[0],
        slot=torch.tensor(slots, dtype=torch.int64),
        position=numbers[1],
        output_position=numbers[2],
        thinking=flags[0],
        think_position=numbers[3],
        think_ended=flags[1],
        boundary=flags[2],
    )


def test_the_buffer_holds_the_last_pass_and_nobody_behind_it() -> None:
    buffer = TokenBuffer(SIZE, NOBODY, CPU)
    assert buffer.first(SIZE).slot.tolist() == [NOBODY] * SIZE
    for slots in ([0, 1, 2, 0, 1], [2], [1, 1, 0], []):
        given = tokens(slots)
        buffer.fill(given)
        held = buffer.first(SIZE)
        for name, value in vars(given).items():
            assert torch.equal(getattr(held, name)[: len(slots)], value), name
        assert held.slot[len(slots) :].tolist() == [NOBODY] * (SIZE - len(slots))
    buffer.fill(tokens([0, 1]))
    buffer.clear()
    assert buffer.first(SIZE).slot.tolist() == [NOBODY] * SIZE


class Adds(Plugin[Any]):
    name = "adds"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.table = torch.zeros(context.num_slots)
        self.seen: list[torch.Tensor] = []

    def residual(self, layer: int, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.seen.append(hidden.clone())
        return self.table[tokens.slot][:, None].to(hidden.dtype).expand_as(hidden)


class Layer(torch.nn.Module):
    """Returns what layers of vLLM return."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        x = x * self.weight
        return {"tensor": x, "pair": (x, 10 * x), "none": (x, None), "single": (x,), "batch": x[None]}[self.shape]


class CohereDecoderLayer(Layer):
    pass


@pytest.mark.parametrize(
    ("make", "stream"),
    [
        (lambda: Layer("tensor"), 1.0),
        (lambda: Layer("pair"), 11.0),
        (lambda: Layer("none"), 1.0),
        (lambda: Layer("single"), 1.0),
        (lambda: Layer("batch"), 1.0),
        (lambda: CohereDecoderLayer("pair"), 1.0),
    ],
)
def test_what_is_read_and_where_it_is_added(make: Callable[[], Layer], stream: float) -> None:
    first, second = Adds(CONTEXT), Adds(CONTEXT)
    buffer = TokenBuffer(SIZE, NOBODY, CPU)
    layer, plain, x = make(), make(), torch.randn(5, 4)
    steer_behind(layer, 0, [first, second], buffer)
    assert isinstance(layer, type(plain))
    assert list(layer.state_dict()) == list(plain.state_dict())
    before, idle = plain(x), layer(x)
    buffer.fill(tokens([0, 1, 0]))
    first.table[0], second.table[1] = 2.0, -1.0
    after = layer(x)
    added = torch.tensor([2.0, -1.0, 2.0, 0.0, 0.0])[:, None].expand(5, 4)
    if isinstance(before, tuple):
        assert all(a is b if b is None else torch.equal(a, b) for a, b in zip(after[1:], before[1:], strict=True))
        before, idle, after = before[0], idle[0], after[0]
    assert torch.equal(idle, before)
    assert after.shape == before.shape
    assert torch.allclose((after - before).view(5, 4), added, atol=1e-6)
    assert torch.allclose(first.seen[-1], stream * x, atol=1e-6)
    first_added = torch.tensor([2.0, 0.0, 2.0, 0.0, 0.0])[:, None]
    assert torch.allclose(second.seen[-1], stream * x + first_added, atol=1e-6)


def test_a_compiled_layer_goes_on_reading_what_is_filled_in_place() -> None:
    plugin, buffer, layer = Adds(CONTEXT), TokenBuffer(SIZE, NOBODY, CPU), Layer("pair")
    steer_behind(layer, 1, [plugin], buffer)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(4, 4)
    assert torch.equal(compiled(x)[0], x)
    plugin.table[1] = 3.0
    buffer.fill(tokens([1, 0]))
    assert torch.equal(compiled(x)[0], x + torch.tensor([3.0, 0.0, 0.0, 0.0])[:, None])


class TestFindLayers:
    def model(self, **lists: int) -> torch.nn.Module:
        model = torch.nn.Module()
        for path, count in lists.items():
            owner = model
            *parents, last = path.split("__")
            for part in parents:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.add_module(last, torch.nn.ModuleList(Layer("pair") for _ in range(count)))
        return model

    @pytest.mark.parametrize(
        ("lists", "path"),
        [
            ({"model__layers": 3}, "model.layers"),
            ({"transformer__h": 3, "other": 2}, "transformer.h"),
            ({"model__layers": 3, "vision_tower__layers": 3}, "model.layers"),
            ({"decoder__layers": 3, "encoder__layers": 3}, "decoder.layers"),
        ],
    )
    def test_found(self, lists: dict[str, int], path: str) -> None:
        model = self.model(**lists)
        assert find_layers(model, 3) is model.get_submodule(path)

    def test_lists_inside_layers_are_others(self) -> None:
        model = self.model(model__layers=3)
        for layer in model.get_submodule("model.layers"):
            layer.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
        assert find_layers(model, 3) is model.get_submodule("model.layers")

    def test_a_wrapper_says_where_its_language_model_is(self) -> None:
        model = self.model(language__model__layers=3, tower__layers=3)
        model.get_language_model = lambda: model.language  # type: ignore[method-assign, assignment]
        assert find_layers(model, 3) is model.get_submodule("language.model.layers")

    @pytest.mark.parametrize("lists", [{}, {"model__layers": 2}, {"model__layers": 3, "model__others": 3}])
    def test_not_found(self, lists: dict[str, int]) -> None:
        with pytest.raises(UnsupportedError, match="3 decoder layers"):
            find_layers(self.model(**lists), 3)

    def test_placeholders(self) -> None:
        missing = type("PPMissingLayer", (torch.nn.Identity,), {})
        assert layers.is_elsewhere(missing())
        assert not layers.is_elsewhere(Layer("pair"))
