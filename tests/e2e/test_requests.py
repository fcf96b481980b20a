"""One suite for every way in which vLLM runs a model: what each request gets, against the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from e2e import scenarios
from e2e.conftest import Engines
from e2e.engine_client import Engine
from e2e.oracle import Oracle, Result
from e2e.scenarios import CLOSE, OPEN, TURNS, Asked, describe

GREEDY = {"temperature": 0.0, "max_tokens": 20}
SAMPLED = {"temperature": 1.0, "seed": 11, "max_tokens": 20}
TURNING = {**SAMPLED, "logit_bias": TURNS}
WAVE = {"amplitude": 25.0, "period": 9.4}
TALK = [20, 30, 40, 50, 60]
CHUNK = 32


@pytest.fixture(scope="session")
def engine(engines: Engines, llama: Path, runner: str) -> Callable[[], Engine]:
    """The engine of this suite: prompts in chunks, prefix caching."""
    options = {"one_process": runner != "v1-async", "enable_prefix_caching": True, "block_size": 32, "max_num_seqs": 6}
    # Only long prompts come in chunks: on a CPU, vLLM's V1 runner dies of a chunk of a request with a seed.
    options |= {"long_prefill_token_threshold": CHUNK, "max_num_batched_tokens": 256}
    return lambda: engines.get(llama, runner, **options)


@pytest.fixture(scope="session")
def expect(oracle: Callable[[Path], Oracle], llama: Path, runner: str) -> Callable[[Asked], Result]:
    return lambda asked: oracle(llama).generate(asked.prompt, asked.params, asked.steer, runner)


@pytest.fixture(scope="session")
def check(engine: Callable[[], Engine], expect: Callable[[Asked], Result]) -> Callable[..., list[Result]]:
    """Runs requests in one batch, and compares tokens and traces with the oracle's."""

    def run(*batch: Asked) -> list[Result]:
        expected = [expect(asked) for asked in batch]
        got = engine().generate([asked.to_engine() for asked in batch])
        for asked, want, (output,) in zip(batch, expected, got, strict=True):
            assert output["token_ids"] == want.token_ids, describe(asked, want, output)
            check_trace(output["steering"], asked, want)
        return expected

    return run


def check_trace(trace: Any, asked: Asked, want: Result) -> None:
    if asked.steer is None:
        assert trace is None
        return
    assert trace["tokens"] == len(want.token_ids)
    assert trace["think_tokens"] == want.think_tokens, (asked, want)
    (plugin,) = trace["plugins"]
    assert plugin["name"] == "reflection_cycle"
    assert want.steered_steps <= plugin["steered_steps"] <= want.steered_steps + want.crossings
    assert plugin["reflection_tokens"] == len(want.reflection)
    assert plugin["positions"] == [position for position, _ in want.reflection]
    assert plugin["deltas"] == pytest.approx([delta for _, delta in want.reflection], abs=1e-5)


def test_the_runner_is_the_one_that_is_meant(engine: Callable[[], Engine], runner: str) -> None:
    assert (engine().info["v2"], engine().info["async"]) == {
        "v1": (False, False), "v1-async": (False, True), "v2": (True, True),
    }[runner]  # fmt: skip


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_mixed_batch(check: Callable[..., list[Result]], params: dict[str, Any]) -> None:
    """Requests with different waves, and without, in one batch: also more of them than fit in one."""
    check(
        Asked([*TALK, OPEN], params, WAVE),
        Asked([*TALK, OPEN], params),
        Asked([*TALK, OPEN], params, {"schedule": "constant", "amplitude": -100.0, "token_ids": list(range(10, 300))}),
        Asked([70, 80, 90], params, {**WAVE, "origin": "output", "phase": 0.5}),
        Asked([70, 80, 90], params),
        Asked([OPEN], params, {"schedule": "cosine", "amplitude": 40.0, "period": 3.3, "words": ["Hmm", "so"]}),
        Asked([70, 80, 90, 100], params, {"preset": "reference", "amplitude": 30.0, "period": 6.0}),
        Asked([8], params),
    )


def test_think_span_opened_by_the_prompt(check: Callable[..., list[Result]]) -> None:
    (result,) = check(Asked([*TALK, OPEN, 33], {**GREEDY, "max_tokens": 12}, WAVE))
    assert result.deltas[0] == 0.0
    assert result.steered_steps == 11


def test_think_span_closed_in_the_prompt(check: Callable[..., list[Result]]) -> None:
    (result,) = check(Asked([OPEN, *TALK, CLOSE, 33], {**GREEDY, "max_tokens": 8}, WAVE))
    assert result.deltas == [None] * 8


def test_think_span_opened_by_the_model(check: Callable[..., list[Result]]) -> None:
    """Made to open it after 4 tokens by an offset on the marker, or by itself."""
    opens = {"schedule": "piecewise", "points": [[3, -100], [4, 100], [5, -100]], "origin": "output", "token_ids": [OPEN]}
    sampled = {**SAMPLED, "logit_bias": {OPEN: 9.0}, "max_tokens": 14}
    by_output, *by_think = check(
        Asked(TALK, {**GREEDY, "max_tokens": 10}, opens),
        *(Asked(TALK, {**sampled, "seed": seed}, WAVE) for seed in range(4)),
    )
    assert by_output.token_ids[4] == OPEN
    assert any(r.deltas[0] is None and r.steered_steps > 0 for r in by_think)


@pytest.mark.parametrize("after_end", ["off", "restart", "continue"])
@pytest.mark.parametrize("origin", ["think", "output"])
def test_after_the_end_marker(check: Callable[..., list[Result]], origin: str, after_end: str, runner: str) -> None:
    """Spans end in the middle of the output and some open again."""
    rng = random.Random(f"{origin} {after_end}")
    count = 5 if runner == "v2" else 12
    steer = {**WAVE, "origin": origin, "after_end": after_end}
    bias = {OPEN: 9.0, CLOSE: 9.0}
    sampled = {**SAMPLED, "max_tokens": 18, "logit_bias": bias}
    results = check(*(Asked([*scenarios.words(rng, 5), OPEN], {**sampled, "seed": seed}, steer) for seed in range(count)))
    ended = [r for r in results if r.ended_at is not None and 0 < r.ended_at < len(r.token_ids) - 2]
    assert ended
    assert any(r.reopened for r in results)
    after = [d for r in ended for d in r.deltas[r.ended_at + 1 :]]
    assert all(d is None for d in after) == (after_end == "off")


def test_steering_may_end_the_span_that_it_depends_on(check: Callable[..., list[Result]]) -> None:
    (result,) = check(
        Asked([*TALK, OPEN], {**GREEDY, "max_tokens": 9}, {"schedule": "constant", "amplitude": 100.0, "token_ids": [CLOSE]})
    )
    assert result.token_ids[0] == CLOSE
    assert result.deltas == [100.0] + [None] * 8


def test_long_prompts_in_chunks(check: Callable[..., list[Result]], runner: str) -> None:
    """Prompts of several chunks beside running requests; think markers anywhere in them."""
    rng = random.Random(3)
    prompts = [scenarios.words(rng, length) for length in (3 * CHUNK, 2 * CHUNK + 5, CHUNK + 1, 4)]
    prompts[0][10] = OPEN
    prompts[1][CHUNK - 1] = OPEN
    prompts[2][0], prompts[2][CHUNK] = OPEN, CLOSE
    params = {**GREEDY, "max_tokens": 8}
    check(*(Asked(p, params, WAVE) for p in prompts), *(Asked(p, params) for p in prompts[:2]))


@pytest.mark.parametrize("first", ["steered", "unsteered"])
def test_a_prefix_in_the_cache(check: Callable[..., list[Result]], first: str) -> None:
    """The prompt is in the cache from a request that steered, or did not: logits steering leaves no mark there."""
    rng = random.Random(first)
    prompt = [*scenarios.words(rng, 40), OPEN, *scenarios.words(rng, 30)]
    params = {**GREEDY, "max_tokens": 6}
    steered, unsteered = Asked(prompt, params, WAVE), Asked(prompt, params)
    (one,) = check(steered if first == "steered" else unsteered)
    check(steered)
    check(unsteered)
    check(Asked([*prompt, *one.token_ids, 20], params, WAVE))


def test_every_child_of_n_has_its_own_trace(engine: Callable[[], Engine], expect: Callable[[Asked], Result]) -> None:
    """vLLM gives child i the seed + i."""
    asked = Asked([*TALK, OPEN], {**TURNING, "max_tokens": 12}, WAVE)
    request = asked.to_engine()
    request["params"]["n"] = 3
    (outputs,) = engine().generate([request])
    assert len({tuple(o["token_ids"]) for o in outputs}) == 3
    for index, output in enumerate(outputs):
        child = Asked(asked.prompt, {**asked.params, "seed": SAMPLED["seed"] + index}, WAVE)
        want = expect(child)
        assert output["token_ids"] == want.token_ids, describe(child, want, output)
        check_trace(output["steering"], child, want)


def test_beside_other_logits_processing(check: Callable[..., list[Result]]) -> None:
    """A ban by ``allowed_token_ids`` or ``min_tokens`` wins, a ``logit_bias`` adds up."""
    steers_end = {"schedule": "constant", "amplitude": 100.0, "token_ids": [2, 20], "origin": "output"}
    params = {**GREEDY, "max_tokens": 6}
    banned, biased, kept, ended = check(
        Asked(TALK, {**params, "allowed_token_ids": [30, 31, 32]}, steers_end),
        Asked(TALK, {**params, "logit_bias": {20: -100.0, 2: -100.0}}, steers_end),
        Asked(TALK, {**params, "min_tokens": 4, "logit_bias": {20: -100.0}}, steers_end),
        Asked(TALK, {**params, "logit_bias": {20: -100.0}}, {**steers_end, "amplitude": 99.0, "token_ids": [2]}),
    )
    assert not {2, 20} & set(banned.token_ids)
    assert len(biased.token_ids) == 6
    assert kept.token_ids[4:] == [2]
    assert ended.token_ids == [2]


def test_stop_strings_and_ids(
    engine: Callable[[], Engine], expect: Callable[[Asked], Result], oracle: Callable[[Path], Oracle], llama: Path
) -> None:
    """What ends a request early ends its trace there too."""
    asked = Asked([*TALK, OPEN], {**GREEDY, "max_tokens": 16}, WAVE)
    tokens = expect(asked).token_ids
    stop = next(t for t in tokens[3:] if t not in tokens[:3])
    count = tokens.index(stop) + 1
    text = oracle(llama).tokenizer.convert_ids_to_tokens(stop)
    for field in ({"stop": [text]}, {"stop_token_ids": [stop]}):
        ((output,),) = engine().generate([Asked(asked.prompt, {**asked.params, **field}, WAVE).to_engine()])
        assert output["token_ids"] == tokens[:count]
        assert output["finish_reason"] == "stop"
        assert output["steering"]["tokens"] == count


def test_structured_outputs(engine: Callable[[], Engine]) -> None:
    """A grammar's mask wins over steering."""
    pushed = {"schedule": "constant", "amplitude": 100.0, "token_ids": [50], "origin": "output"}
    asked = Asked(TALK, {**GREEDY, "max_tokens": 4, "choices": ["w1", "w2"]}, pushed)
    try:
        ((output,),) = engine().generate([asked.to_engine()])
    except Exception as error:
        pytest.skip(f"no grammar for this tokenizer: {error}")
    assert 50 not in output["token_ids"]


def test_random_requests(check: Callable[..., list[Result]], runner: str) -> None:
    rng = random.Random(20)
    count = 16 if runner == "v2" else 150
    results = check(*(scenarios.asked(rng, tokens=14, longest=20) for _ in range(count)))
    assert sum(r.steered_steps > 0 for r in results) > count / 4
    assert sum(r.ended_at is not None for r in results) > count / 8
