"""steer, unsteer and steering."""

from __future__ import annotations

import contextlib
import pkgutil

import pytest
import torch
from transformers import GenerationMixin

import llm_steer
from llm_steer import Params, Plugin, SteerError, UnsupportedError, steer, steering, unsteer
from support.oracle import Oracle
from support.vocabulary import THINK

PROMPT = torch.tensor([[1, 30, 40, THINK, 50]])
GREEDY = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
WAVE, OTHER = {"amplitude": 9.0, "period": 7.0}, {"amplitude": -9.0, "period": 5.0}


@pytest.fixture
def model(tiny_model):
    return tiny_model()


def outputs(model, params: dict | None) -> torch.Tensor:
    """What a model should generate, by the oracle."""
    processors = [Oracle(5, [params])] if params else []
    return type(model).generate(model, PROMPT, **GREEDY, logits_processor=processors)


@pytest.fixture
def expected(tiny_model):
    """By amplitude; all differ."""
    found = {p and p["amplitude"]: outputs(tiny_model(), p) for p in (None, WAVE, OTHER)}
    assert len({tuple(ids[0].tolist()) for ids in found.values()}) == 3
    return found


def check(model, amplitude: float | None, expected) -> None:
    assert torch.equal(model.generate(PROMPT, **GREEDY), expected[amplitude])


def test_steer_returns_the_same_model_and_unsteer_restores_it(model, tiny_tokenizer, expected):
    before, kind = dict(model.__dict__), type(model)
    assert steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE) is model
    check(model, 9.0, expected)
    assert unsteer(model) is model
    check(model, None, expected)
    assert model.__dict__ == before
    assert type(model) is kind
    assert unsteer(model) is model
    assert model.__dict__ == before


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("reflection_cycle", WAVE),
        (["reflection_cycle"], WAVE),
        ({"name": "reflection_cycle", **WAVE}, {}),
        ([{"name": "reflection_cycle", **WAVE}], {}),
        ('{"name": "reflection_cycle", "amplitude": 9, "period": 7}', {}),
    ],
)
def test_ways_to_name_a_method(method, params, model, tiny_tokenizer, expected):
    check(steer(model, method, tokenizer=tiny_tokenizer, **params), 9.0, expected)
    assert [(s.name, s.params.amplitude) for s in model.steering.spec] == [("reflection_cycle", 9.0)]


def test_steering_a_steered_model_replaces_it(model, tiny_tokenizer, expected):
    before = dict(model.__dict__)
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)
    first = model.steering
    check(model, 9.0, expected)
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **OTHER)
    check(model, -9.0, expected)
    assert model.steering.counters["calls"] == 1
    assert first.counters["calls"] == 1
    unsteer(model)
    check(model, None, expected)
    assert model.__dict__ == before


def test_steering_restores_what_was_there(model, tiny_tokenizer, expected):
    with steering(model, "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE) as same:
        assert same is model
        check(model, 9.0, expected)
        outer = model.steering
        with steering(model, "reflection_cycle", tokenizer=tiny_tokenizer, **OTHER):
            check(model, -9.0, expected)
        assert model.steering is outer
        check(model, 9.0, expected)
        with contextlib.suppress(KeyboardInterrupt), steering(model, "off", tokenizer=tiny_tokenizer):
            check(model, None, expected)
            raise KeyboardInterrupt
        check(model, 9.0, expected)
        assert outer.counters["calls"] == 3
    check(model, None, expected)
    assert not hasattr(model, "steering")
    with steering(model, "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE):
        unsteer(model)
    check(model, None, expected)


def test_steer_off_leaves_it_to_the_calls(model, tiny_tokenizer, expected):
    steer(model, "off", tokenizer=tiny_tokenizer)
    check(model, None, expected)
    own = {"name": "reflection_cycle", **WAVE}
    assert torch.equal(model.generate(PROMPT, **GREEDY, steer=own), expected[9.0])
    for asked in (True, WAVE):  # there is no default that they could mean
        with pytest.raises(SteerError, match="reflection_cycle"):
            model.generate(PROMPT, steer=asked)


class Add(Plugin[Params]):
    name, Params = "add", Params

    def logits(self, logits, rows):
        logits[:, 100] += torch.where(rows.live, 60.0, 0.0)


class Double(Plugin[Params]):
    name, Params = "double", Params

    def logits(self, logits, rows):
        logits *= torch.where(rows.live, 2.0, 1.0)[:, None]


def test_several_methods_act_in_the_order_given(model, tiny_tokenizer, register):
    register(Add), register(Double)
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for methods, added in ((["add", "double"], 120.0), (["double", "add"], 60.0)):
        steer(model, methods, tokenizer=tiny_tokenizer)
        result = model.generate(PROMPT, **options)
        assert float((result.scores[0] - 2 * result.logits[0])[0, 100]) == pytest.approx(added, abs=1e-4)
        assert [p["name"] for p in model.steering.traces[0]["plugins"]] == methods
    result = model.generate(PROMPT, **options, steer=[["add", "reflection_cycle"]])
    assert float((result.scores[0] - result.logits[0])[0, 100]) == pytest.approx(60.0, abs=1e-4)


@pytest.mark.parametrize(
    ("method", "params", "message"),
    [
        ("reflexion", {}, r"steer: got 'reflexion'.*reflection_cycle"),
        ("reflection_cycle", {"amplitude": 1000}, r"amplitude: got 1000"),
        ("reflection_cycle", {"amplitude": float("nan")}, r"amplitude: got nan"),
        ("reflection_cycle", {"amplitud": 5}, r"amplitud: got 5; must be a parameter of reflection_cycle"),
        ("off", {"amplitude": 5}, r"amplitude: got 5; must be left out when steer is off"),
        (["reflection_cycle", {"name": "reflection_cycle"}], {}, r"steer\[1\]"),
        (["add", "reflection_cycle"], {"amplitude": 5}, r"amplitude: got 5; must be inside a mapping"),
        (7, {}, r"steer: got 7"),
    ],
)
def test_bad_requests_leave_the_model_as_it_was(method, params, message, model, tiny_tokenizer, register):
    register(Add)
    before = dict(model.__dict__)
    with pytest.raises(SteerError, match=message):
        steer(model, method, tokenizer=tiny_tokenizer, **params)
    assert model.__dict__ == before
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer)
    current = model.steering
    with pytest.raises(SteerError, match=message):
        steer(model, method, tokenizer=tiny_tokenizer, **params)
    assert model.steering is current


def test_what_cannot_be_steered(model, tiny_tokenizer):
    class Wrapper(torch.nn.Module):
        get_base_model = None

    class Compiled(torch.nn.Module):
        _orig_mod = model

    for other, hint in (
        (Wrapper(), r"'Wrapper'.*model\.get_base_model\(\)"),
        (Compiled(), "before it is compiled"),
        (model.model, "a transformers model that can generate"),
        ("model", "a transformers model that can generate"),
    ):
        with pytest.raises(SteerError, match=f"model: got .*{hint}"):
            steer(other, "reflection_cycle", tokenizer=tiny_tokenizer)
        with pytest.raises(SteerError, match="model: got "):
            unsteer(other)


def test_methods_that_the_model_has_of_its_own(model, tiny_tokenizer, expected):
    """Another tool has put a generate on the instance: it is called, and is there again afterwards."""
    calls = []

    def own(*args, **kwargs):
        calls.append(kwargs)
        return GenerationMixin.generate(model, *args, **kwargs)

    model.generate = own
    before = dict(model.__dict__)
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)
    check(model, 9.0, expected)
    assert len(calls) == 1
    assert "steer" not in calls[0]
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **OTHER)
    check(model, -9.0, expected)
    unsteer(model)
    assert model.__dict__ == before
    check(model, None, expected)


def test_a_tool_that_wraps_the_steered_generate_has_to_go_first(model, tiny_tokenizer, expected):
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)
    inner = model.generate
    model.generate = lambda *args, **kwargs: inner(*args, **kwargs)
    check(model, 9.0, expected)
    with pytest.raises(RuntimeError, match=r"model\.generate was replaced after the model was steered"):
        unsteer(model)
    model.generate = inner
    unsteer(model)
    check(model, None, expected)


def test_refused_methods_say_what_to_do_and_off_still_works(model, tiny_tokenizer, register, expected):
    class Feedback(Add):
        name, feedback = "feedback", True

    register(Feedback)
    steer(model, "feedback", tokenizer=tiny_tokenizer)
    with pytest.raises(UnsupportedError, match=r'feedback.*pass steer="off"'):
        model.generate(PROMPT, num_beams=2)
    assert model.generate(PROMPT, num_beams=2, steer="off", max_new_tokens=3).shape == (1, 8)


def test_no_module_is_named_like_a_function():
    """Importing llm_steer.steer, were there such a module, would put it in the place of the function."""
    modules = {module.name for module in pkgutil.iter_modules(llm_steer.__path__)}
    assert modules.isdisjoint(llm_steer.__all__)
    assert "api" in modules


def test_exports():
    assert {"steer", "unsteer", "steering"} <= set(dir(llm_steer))


@pytest.mark.parametrize("nothing", [None, [], ""])
def test_steering_with_nothing_is_a_mistake(nothing, model):
    with pytest.raises(SteerError, match=r"method: got .* must be the name of a plugin"):
        steer(model, nothing)
    assert "generate" not in vars(model)


def test_a_tokenizers_name_is_no_tokenizer(model):
    with pytest.raises(SteerError, match="tokenizer: got 'nope'"):
        steer(model, "reflection_cycle", tokenizer="nope")


@pytest.mark.parametrize(
    "call",
    [
        lambda model: steer(model, "reflection_cycle"),
        lambda model: unsteer(model),
        lambda model: steering(model, "reflection_cycle").__enter__(),
    ],
    ids=["steer", "unsteer", "steering"],
)
@pytest.mark.parametrize("given", [5, "x", None, torch.nn.Linear(1, 1)], ids=["int", "str", "None", "module"])
def test_what_is_no_model_is_named(call, given):
    with pytest.raises(SteerError, match="a transformers model that can generate") as error:
        call(given)
    assert (error.value.field, error.value.value) == ("model", type(given).__name__)


@pytest.mark.parametrize("given", [5, "x", object()])
def test_what_is_no_tokenizer_is_named(model, given):
    with pytest.raises(SteerError, match="a Hugging Face tokenizer") as error:
        steer(model, "reflection_cycle", tokenizer=given)
    assert error.value.field == "tokenizer"
    assert not hasattr(model, "steering")
