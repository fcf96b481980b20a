"""Never silently unsteered: what cannot be steered is refused with a reason, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e import residual
from e2e.conftest import Engines
from e2e.engine_client import V2_SYNC, Engine, EngineError
from e2e.oracle import Oracle, Push
from e2e.scenarios import OPEN, Asked

PROMPT = [20, 30, 40, OPEN]
GREEDY = {"temperature": 0.0, "max_tokens": 6}
WAVE = {"amplitude": 25.0, "period": 9.4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def steered(**extra_args: Any) -> dict[str, Any]:
    return {"prompt_token_ids": PROMPT, "params": {**GREEDY, "extra_args": extra_args}}


def refused(engine: Engine, request: dict[str, Any]) -> str:
    with pytest.raises(EngineError) as error:
        engine.generate([request])
    assert error.value.kind in ("VLLMValidationError", "ValueError")
    return error.value.message


def test_without_the_general_plugin(engines: Engines, llama: Path, oracle: Callable[[Path], Oracle]) -> None:
    """``VLLM_PLUGINS`` names others: vLLM still loads the logits processor, which refuses every steering key."""
    engine = engines.get(llama, one_process=True, env={"VLLM_PLUGINS": "another"})
    for request in (
        steered(steer="reflection_cycle"),
        steered(steer="off"),
        steered(steer_amplitude=3),
        steered(Steer="reflection_cycle"),
        steered(llm_steer={"plugins": []}),
    ):
        assert "VLLM_PLUGINS" in refused(engine, request)
    assert engine.one(PROMPT, **GREEDY)["token_ids"] == oracle(llama).generate(PROMPT, GREEDY, None).token_ids


def test_past_the_front_end(engines: Engines, llama: Path, oracle: Callable[[Path], Oracle]) -> None:
    """Requests that the engine core gets without the front end are turned away there; it serves the next one."""
    engine = engines.get(llama, one_process=True)
    for extra_args in ({"steer": "reflection_cycle"}, {"steer_amplitude": 3}, {"STEER": "x"}):
        with pytest.raises(EngineError, match="did not come through") as error:
            engine.call("add_to_core", prompt_token_ids=PROMPT, **GREEDY, extra_args=extra_args)
        assert next(iter(extra_args)) in error.value.message
    engine.broken = False
    engine.call("add_to_core", prompt_token_ids=PROMPT, **GREEDY)
    asked = Asked(PROMPT, GREEDY, WAVE)
    ((output,),) = engine.generate([asked.to_engine()])
    assert output["token_ids"] == oracle(llama).generate(PROMPT, GREEDY, WAVE).token_ids


def test_bad_values_offline(engines: Engines, llama: Path) -> None:
    engine = engines.get(llama, one_process=True)
    for extra_args, words in (
        ({"steer": "reflection_cicle"}, ("steer", "reflection_cicle", "reflection_cycle")),
        ({"steer": "reflection_cycle", "steer_amplitude": 1e9}, ("steer_amplitude", "100")),
        ({"steer": "reflection_cycle", "steer_token_ids": [512]}, ("token_ids", "512", "511")),
        ({"steer": "reflection_cycle", "steer_words": ["two words"]}, ("words", "two words")),
        ({"steer": {"name": "reflection_cycle", "amplitud": 1}}, ("amplitud", "amplitude")),
        ({"llm_steer": {"plugins": [["reflection_cycle", {}]]}}, ("llm_steer", "left out")),
        ({"steer_amplitude": 3}, ("steer_amplitude", "no default")),
    ):
        message = refused(engine, steered(**extra_args))
        assert all(word in message for word in words), message


@pytest.fixture(scope="module")
def by_default(engines: Engines, llama: Path) -> Callable[[], Engine]:
    options = {"logits_processors": ["reflection_cycle:amplitude=25,period=9.4"], "one_process": True}
    return lambda: engines.get(llama, **options)


def test_a_default_for_every_request(
    by_default: Callable[[], Engine], llama: Path, oracle: Callable[[Path], Oracle]
) -> None:
    """``LLM(model, logits_processors=["reflection_cycle:..."])``; a request changes fields of it, or turns it off."""
    engine = by_default()
    assert not engine.info["processors"]

    def want(steer: dict[str, Any] | None) -> list[int]:
        return oracle(llama).generate(PROMPT, GREEDY, steer).token_ids

    plain = {"prompt_token_ids": PROMPT, "params": GREEDY}
    got = engine.generate([plain, steered(steer="off"), steered(steer_period=4.5), steered(steer={"origin": "output"})])
    assert [o["token_ids"] for (o,) in got] == [
        want(WAVE),
        want(None),
        want({**WAVE, "period": 4.5}),
        want({**WAVE, "origin": "output"}),
    ]
    assert [bool(o["steering"]) for (o,) in got] == [True, False, True, True]
    ((off,),) = engine.generate([plain], unsteered=True)
    assert off["token_ids"] == want(None)


def test_beam_search_offline(by_default: Callable[[], Engine], llama: Path) -> None:
    engine = by_default()
    prompts = [{"prompt_token_ids": PROMPT}]
    with pytest.raises(EngineError, match="beam search") as error:
        engine.call("beam_search", prompts=prompts, beam_width=2, max_tokens=4)
    assert "unsteered" in error.value.message
    (beams,) = engine.call("beam_search", prompts=prompts, beam_width=2, max_tokens=4, unsteered=True)
    assert len(beams) == 2


def test_past_the_front_end_under_a_default(by_default: Callable[[], Engine]) -> None:
    engine = by_default()
    with pytest.raises(EngineError, match="did not come through"):
        engine.call("add_to_core", prompt_token_ids=PROMPT, **GREEDY)
    engine.broken = False
    assert engine.one(PROMPT, **GREEDY)["steering"]


@pytest.mark.parametrize(
    ("processors", "words"),
    [
        (["reflection_cycle:amplitude=1e9"], ("amplitude", "100")),
        (["reflection_cycle:amplitud=5"], ("amplitud", "amplitude")),
        (["reflection_cycle", "reflection_cycle:period=3"], ("reflection_cycle", "once")),
        (["reflection_cicle"], ("reflection_cicle",)),
    ],
)
def test_bad_defaults_stop_the_start(engines: Engines, llama: Path, processors: list[str], words: tuple[str, ...]) -> None:
    engines.close()
    with pytest.raises(EngineError) as error:
        engines.get(llama, one_process=True, logits_processors=processors)
    assert all(word in error.value.message for word in words), error.value.message


def test_speculative_decoding_on_v1(engines: Engines, llama: Path, oracle: Callable[[Path], Oracle]) -> None:
    """vLLM drops logits processors there without a word: steering is refused, the rest goes on."""
    engines.close()
    with pytest.raises(EngineError, match="speculative") as error:
        engines.get(llama, one_process=True, speculative_config=NGRAM, logits_processors=["reflection_cycle"])
    assert "--speculative-config" in error.value.message
    engine = engines.get(llama, one_process=True, speculative_config=NGRAM)
    assert "speculative" in refused(engine, steered(steer="reflection_cycle"))
    repeating = [20, 21, 22] * 6
    params = {**GREEDY, "max_tokens": 12}
    assert engine.one(repeating, **params)["token_ids"] == oracle(llama).generate(repeating, params, None).token_ids


def test_hidden_states_that_were_not_declared(
    engines: Engines, llama: Path, oracle: Callable[[Path], Oracle], tmp_path: Path
) -> None:
    engine = engines.get(llama, one_process=True, env={"PYTHONPATH": str(residual.install(tmp_path))})
    for steer in ("push", {"name": "thermostat", "gain": 3.0}, ["reflection_cycle", {"name": "push"}]):
        message = refused(engine, steered(steer=steer))
        assert "start the engine with --logits-processor" in message
    assert engine.one(PROMPT, **GREEDY)["token_ids"] == oracle(llama).generate(PROMPT, GREEDY, None).token_ids


def test_what_was_declared_bounds_what_may_be_asked(
    engines: Engines, llama: Path, oracle: Callable[[Path], Oracle], tmp_path: Path
) -> None:
    """A declared method steers by default; other layers than the declared ones would need another model."""
    toys = {"PYTHONPATH": str(residual.install(tmp_path))}
    named = ['push:{"layers": [1], "strength": 60.0, "positions": "all"}']
    engine = engines.get(llama, one_process=True, env=toys, logits_processors=named)

    def want(**push: Any) -> list[int]:
        pushes = [Push(**{"layer": 1, "positions": "all", "strength": 60.0, **push})] if push else []
        return oracle(llama).generate(PROMPT, GREEDY, None, pushes=pushes).token_ids

    assert "not declared" in refused(engine, steered(steer_layers=[0]))
    plain = {"prompt_token_ids": PROMPT, "params": GREEDY}
    got = engine.generate([plain, steered(steer="off"), steered(steer_strength=-60.0), steered(steer_seed=3)])
    tokens = [o["token_ids"] for (o,) in got]
    assert tokens == [want(strength=60.0), want(), want(strength=-60.0), want(seed=3)]
    assert len(set(map(tuple, tokens))) == 4


def test_closed_loops_and_drafts(engines: Engines, llama: Path, tmp_path: Path) -> None:
    """A closed loop is refused under speculative decoding, on Model Runner V2 too."""
    engines.close()
    drafts = {**NGRAM, "method": "ngram_gpu"}
    toys = {"PYTHONPATH": str(residual.install(tmp_path))}
    with pytest.raises(EngineError, match="--speculative-config"):
        engines.get(
            llama,
            V2_SYNC,
            one_process=True,
            env=toys,
            speculative_config=drafts,
            logits_processors=["thermostat:gain=3"],
        )


def test_closed_loops_and_sharded_sampling(engines: Engines, llama: Path, tmp_path: Path) -> None:
    """Where each rank samples for some requests only, no rank sees all logits."""
    engines.close()
    toys = {"PYTHONPATH": str(residual.install(tmp_path))}
    sharded = {"enable_batch_sharded_sampling": True, "tensor_parallel_size": 2}
    with pytest.raises(EngineError, match="--enable-batch-sharded-sampling"):
        engines.get(llama, V2_SYNC, env=toys, logits_processors=["thermostat:gain=3"], **sharded)
