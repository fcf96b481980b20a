"""The state on a model: how long it lasts, who sees it, and what it takes from the tokenizer."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import pickle
import shutil
import threading
import types
import weakref
from typing import ClassVar

import pytest
import torch
from llm_steer.plugins.vector import ConstantVector
from transformers import LogitsProcessor
from transformers.generation import BaseStreamer

from llm_steer import Params, Plugin, SteerError, steer, unsteer
from llm_steer.artifact import Artifact, Description
from llm_steer.hosts.hf_call import Call, call_of
from support.oracle import Oracle
from support.vocabulary import BLANK, END_THINK, PAD, THINK

WAVE = {"amplitude": 9.0, "period": 7.0}
PROMPT = torch.tensor([[1, 30, 40, THINK, 50]])
GREEDY = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def model(tiny_model, tiny_tokenizer):
    return steer(tiny_model(), "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)


@pytest.fixture
def steered_and_plain(tiny_model):
    """What the model generates with and without steering, from an oracle."""
    plain = tiny_model()
    outputs = plain.generate(PROMPT, **GREEDY, logits_processor=[Oracle(5, [WAVE])]), plain.generate(PROMPT, **GREEDY)
    assert not torch.equal(*outputs)
    return outputs


# -- calls that end early ------------------------------------------------------------------------------------------------


class Raises(BaseStreamer):
    def __init__(self, error: BaseException, after: int) -> None:
        self.error, self.left = error, after

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise self.error

    def end(self):
        raise AssertionError("not reached")


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_whatever_ends_a_call_leaves_nothing(error, after, model, steered_and_plain):
    counters = dict(model.steering.counters)
    with pytest.raises(type(error)):
        model.generate(PROMPT, **GREEDY, streamer=Raises(error, after))
    assert call_of(model.steering) is None
    assert model.steering.counters == counters
    assert torch.equal(model.generate(PROMPT, **GREEDY), steered_and_plain[0])
    assert torch.equal(unsteer(model).generate(PROMPT, **GREEDY), steered_and_plain[1])


def test_calls_inside_calls(model, tiny_model, tiny_tokenizer, steered_and_plain):
    """A logits processor that generates, with the same model and with another steered one."""
    other = steer(tiny_model(), "reflection_cycle", tokenizer=tiny_tokenizer, amplitude=-9, period=5)
    alone = other.generate(PROMPT, **GREEDY)
    inside = []

    class Generates(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] in (5, 11):
                inside.append(model.generate(PROMPT, **GREEDY, steer="off"))
                inside.append(other.generate(PROMPT, **GREEDY))
                inside.append(model.generate(PROMPT, **GREEDY))
            return scores

    assert torch.equal(model.generate(PROMPT, **GREEDY, logits_processor=[Generates()]), steered_and_plain[0])
    steered, plain = steered_and_plain
    assert all(torch.equal(a, b) for a, b in zip(inside, [plain, alone, steered] * 2, strict=True))
    assert len(inside) == 6


def test_two_threads_do_not_mix(model, register):
    """Both stand inside generate at the same time, step by step in turns."""
    asked = [{"amplitude": 9, "period": 7}, {"amplitude": -9, "period": 5}, "off"]
    alone = [model.generate(PROMPT, **GREEDY, steer=item) for item in asked]
    assert len({tuple(ids[0].tolist()) for ids in alone}) == 3
    barrier, results = threading.Barrier(3, timeout=60), {}

    class InTurns(BaseStreamer):
        def put(self, value):
            barrier.wait()

        def end(self):
            pass

    def run(index: int) -> None:
        results[index] = model.generate(PROMPT, **GREEDY, steer=asked[index], streamer=InTurns())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[index], alone[index]) for index in range(3))
    assert model.steering.counters["calls"] == 6


@pytest.mark.parametrize("change", [unsteer, lambda model: steer(model, "off")])
def test_a_model_that_is_unsteered_while_it_generates_says_so(change, model):
    class Changes(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 8:
                change(model)
            return scores

    with pytest.raises(RuntimeError, match="unsteered, or its methods replaced, while generate was running"):
        model.generate(PROMPT, **GREEDY, logits_processor=[Changes()])


# -- copies --------------------------------------------------------------------------------------------------------------


class Push(Plugin[Params]):
    name, Params = "push", Params

    def layers(self):
        return [0]

    def residual(self, layer, hidden, tokens):
        return torch.where(tokens.slot < self.context.nobody, 5.0, 0.0)[:, None] * torch.linspace(-1, 1, hidden.shape[1])


@pytest.mark.parametrize("method", ["reflection_cycle", "push"])
def test_a_deep_copy_is_steered_on_its_own(method, tiny_model, tiny_tokenizer, register):
    register(Push)
    model = steer(tiny_model(), method, tokenizer=tiny_tokenizer)
    first = model.generate(PROMPT, **GREEDY, steer=True)
    twin = copy.deepcopy(model)
    assert twin.steering is not model.steering
    assert twin.generate.__self__ is twin
    assert torch.equal(twin.generate(PROMPT, **GREEDY), first)
    assert model.steering.counters["calls"] == 1
    assert twin.steering.counters["calls"] == 2
    # each has its own weights, its own hooks and its own way back
    other = tiny_model("llama", 7)
    twin.load_state_dict(other.state_dict())
    assert torch.equal(twin.generate(PROMPT, **GREEDY, steer="off"), other.generate(PROMPT, **GREEDY))
    assert torch.equal(model.generate(PROMPT, **GREEDY), first)
    plain = unsteer(model).generate(PROMPT, **GREEDY)
    assert torch.equal(plain, tiny_model().generate(PROMPT, **GREEDY))
    expected = steer(other, method, tokenizer=tiny_tokenizer).generate(PROMPT, **GREEDY)
    assert torch.equal(twin.generate(PROMPT, **GREEDY), expected)
    assert torch.equal(unsteer(twin).generate(PROMPT, **GREEDY), unsteer(other).generate(PROMPT, **GREEDY))
    assert not twin.model.layers[0]._forward_hooks


def test_a_deep_copy_calls_the_methods_that_it_has_of_its_own(tiny_model, tiny_tokenizer):
    model, callers = tiny_model(), []

    def own(self, *args, **kwargs):
        callers.append(self)
        return type(self).generate(self, *args, **kwargs)

    model.generate = types.MethodType(own, model)
    twin = copy.deepcopy(steer(model, "reflection_cycle", tokenizer=tiny_tokenizer))
    twin.generate(PROMPT, **GREEDY)
    unsteer(twin).generate(PROMPT, **GREEDY)
    assert callers == [twin, twin]
    model.generate(PROMPT, **GREEDY)
    assert callers[2] is model


def test_a_deep_copy_does_not_keep_the_model_alive(tiny_model, tiny_tokenizer):
    model = steer(tiny_model(), "reflection_cycle", tokenizer=tiny_tokenizer)
    model.generate(PROMPT, **GREEDY)
    twin, watched = copy.deepcopy(model), weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None
    twin.generate(PROMPT, **GREEDY)


def test_pickling_is_refused(model):
    with pytest.raises(pickle.PicklingError, match=r"unsteer\(model\)"):
        pickle.dumps(model)
    assert torch.equal(pickle.loads(pickle.dumps(unsteer(model))).lm_head.weight, model.lm_head.weight)


# -- what the methods look like ------------------------------------------------------------------------------------------


def test_methods_look_like_the_models_own(model, tiny_model):
    plain = tiny_model()
    assert type(model) is type(plain)
    parameters = dict(inspect.signature(model.generate).parameters)
    parameter = parameters.pop("steer")
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert list(parameters.values()) == list(inspect.signature(plain.generate).parameters.values())
    assert model.generate.__doc__ == plain.generate.__doc__
    assert model.generate.__name__ == "generate"
    prepare = "prepare_inputs_for_generation"
    assert inspect.signature(getattr(model, prepare)) == inspect.signature(getattr(plain, prepare))
    with pytest.raises(ValueError, match="temprature"):  # generate still finds typing errors
        model.generate(PROMPT, temprature=3)
    with pytest.raises(TypeError, match="multiple values"):
        model.generate(PROMPT, inputs=PROMPT)


def test_saving(model, tmp_path, tiny_model):
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert not hasattr(again, "steering")
    assert torch.equal(again.generate(PROMPT, **GREEDY), unsteer(model).generate(PROMPT, **GREEDY))


# -- tokenizers ----------------------------------------------------------------------------------------------------------


def test_the_tokenizer_beside_the_model_is_used(tiny_model, tiny_tokenizer, tmp_path, steered_and_plain):
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model = type(tiny_model()).from_pretrained(tmp_path)
    assert torch.equal(steer(model, "reflection_cycle", **WAVE).generate(PROMPT, **GREEDY), steered_and_plain[0])


def test_without_a_tokenizer_words_are_refused_and_numbers_work(tiny_model, caplog):
    model = tiny_model()
    with pytest.raises(SteerError, match=r"tokenizer: got None; must be the model's tokenizer \(words.*loaded from\)"):
        steer(model, "reflection_cycle")
    assert not hasattr(model, "steering")
    with pytest.raises(SteerError, match=r"tokenizer: .*origin"):
        steer(model, "reflection_cycle", token_ids=[9])
    steer(model, "reflection_cycle", token_ids=[9], origin="output", amplitude=40, period=8)
    result = model.generate(PROMPT, **GREEDY)
    assert result[0, 5:].tolist().count(9) > 3
    with pytest.raises(SteerError, match=r"steer\[0\]\.tokenizer: got None"):
        model.generate(PROMPT, steer=[{"words": ["Wait"]}])


def test_a_tokenizer_that_cannot_be_loaded_is_named(tiny_model, tmp_path, caplog):
    model = tiny_model()
    model.config._name_or_path = str(tmp_path)
    with pytest.raises(SteerError, match=f"tokenizer: .*{tmp_path.name}"):
        steer(model, "reflection_cycle")
    with caplog.at_level(logging.WARNING):
        steer(model, "reflection_cycle", token_ids=[9], origin="output")
    assert "think spans are not seen" in caplog.text


def test_ids_beyond_the_logits_are_refused(tiny_model, tiny_tokenizer):
    with pytest.raises(SteerError, match=r"token_ids: got 512; must be .*511"):
        steer(tiny_model(), "reflection_cycle", tokenizer=tiny_tokenizer, token_ids=[512])


def test_the_vocabulary_is_as_wide_as_the_head(tiny_model, tiny_tokenizer):
    """Wider than the tokenizer, as padded heads are."""
    model = tiny_model()
    model.resize_token_embeddings(520)
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, token_ids=[519], amplitude=90, schedule="constant")
    assert model.generate(PROMPT, **GREEDY)[0, 5:].tolist() == [519] * 16


class Boundaries(Plugin[Params]):
    """Bans the piece that ends a step, behind a step's end."""

    name, Params, needs_boundaries = "boundaries", Params, True

    def __init__(self, context):
        super().__init__(context)
        self.ended = torch.zeros(context.num_slots, dtype=torch.bool)

    def admit(self, slot, params, prompt_ids):
        self.ended[slot] = False

    def step(self, tokens):
        self.ended[tokens.slot] = tokens.boundary

    def logits(self, logits, rows):
        logits[:, BLANK] += torch.where(self.ended[rows.slot] & rows.live, -1e6, 50.0)


def test_boundaries_are_tabulated_for_plugins_that_read_them(tiny_model, tiny_tokenizer, register):
    register(Boundaries)
    model = steer(tiny_model(), "boundaries", tokenizer=tiny_tokenizer)
    output = model.generate(PROMPT, **GREEDY)[0, 5:].tolist()
    assert [token == BLANK for token in output] == [True, False] * 8
    with pytest.raises(SteerError, match=r"tokenizer: .*boundaries are found in decoded text"):
        steer(tiny_model(), "boundaries")


def test_markers_are_those_of_the_tokenizer(model):
    ended = torch.tensor([[1, THINK, 30, END_THINK, 40], [PAD, PAD, 1, THINK, 7]])
    model.generate(ended, attention_mask=(ended != PAD).long(), **GREEDY)
    closed, opened = model.steering.traces
    assert closed["think_tokens"] == 0
    assert opened["think_tokens"] > 0


def test_repr(model):
    assert repr(model.steering).startswith("Steering(reflection_cycle: ReflectionCycleParams(amplitude=9.0, period=7.0")
    assert repr(steer(model, "off").steering) == "Steering(off)"
    assert isinstance(Call.runtime, type(None))


# -- what plugins are built with -----------------------------------------------------------------------------------------


class SizedParams(Params):
    length: int = 0


class Sized(Plugin[SizedParams]):
    """Remembers its context and how far it saw."""

    name, Params = "sized", SizedParams
    built: ClassVar[list] = []

    def __init__(self, context):
        super().__init__(context)
        self.built.append(self)
        self.furthest = 0

    def step(self, tokens):
        self.furthest = max(self.furthest, int(tokens.position.max()))


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"max_new_tokens": 7}, 12),
        ({"max_length": 15}, 20),  # 15 columns, and as many more as a default would be allowed
        ({}, 25),
        ({"max_new_tokens": 7, "num_return_sequences": 2, "do_sample": True}, 12),
    ],
    ids=str,
)
def test_the_longest_sequence_of_a_call(options, longest, tiny_model, tiny_tokenizer, register):
    register(Sized)
    model = steer(tiny_model(), "sized", tokenizer=tiny_tokenizer)
    Sized.built.clear()
    ids = model.generate(PROMPT, **{"eos_token_id": None, **options})
    plugin = Sized.built[-1]
    assert plugin.context.max_positions == longest
    assert plugin.furthest == ids.shape[1] - 2 < longest


def test_plugins_learn_what_the_rows_ask_for(tiny_model, tiny_tokenizer, register):
    register(Sized)
    model = steer(tiny_model(), "sized", tokenizer=tiny_tokenizer, length=4)
    Sized.built.clear()
    asked = [{"length": 5}, None, True, {"name": "reflection_cycle"}]
    model.generate(PROMPT.repeat(4, 1), max_new_tokens=2, eos_token_id=None, steer=asked)
    context = Sized.built[-1].context
    assert [params.length for params in context.declared] == [5, 4]
    assert (context.num_slots, context.hidden_size, context.num_layers) == (5, 32, 2)
    assert context.shelf is model.steering.shelf
    assert context.shelf.model.architecture == "LlamaForCausalLM"
    assert context.shelf.model.tokenizer is not None


def test_an_artifact_is_found_again_in_every_call(tiny_model, tiny_tokenizer, tmp_path, register):
    """Its files may go once the model is steered with it."""
    register(ConstantVector)
    model = steer(tiny_model(), "off", tokenizer=tiny_tokenizer)
    description = Description(method="m", model=model.steering.shelf.model, layer=0, site="after", positions="all")
    folder = Artifact(description, {"vector": torch.linspace(-9, 9, 32)}).save(tmp_path / "a")
    plain = model.generate(PROMPT, **GREEDY)
    steer(model, "constant_vector", tokenizer=tiny_tokenizer, artifact=str(folder))
    steered = model.generate(PROMPT, **GREEDY)
    assert not torch.equal(plain, steered)
    shutil.rmtree(folder)
    assert torch.equal(model.generate(PROMPT, **GREEDY), steered)
    again = copy.deepcopy(model)
    assert torch.equal(again.generate(PROMPT, **GREEDY), steered)
    with pytest.raises(SteerError, match="artifact: got"):
        steer(model, "constant_vector", tokenizer=tiny_tokenizer, artifact=str(folder))
