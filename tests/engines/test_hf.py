"""The Hugging Face engine against plain ``generate``, one request at a time."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from llm_steer import SteerError, steer, unsteer
from llm_steer.engines.base import Engine, Request, Sampling
from support.oracle import Oracle
from support.vocabulary import EOS, THINK

WAVE = {"name": "reflection_cycle", "amplitude": 30.0, "period": 9.0}


@pytest.fixture
def model(tiny_model: Any) -> Any:
    return tiny_model()


@pytest.fixture
def engine(model: Any, tiny_tokenizer: Any) -> Engine:
    return Engine.from_hf(model, tiny_tokenizer, batch_size=4)


def ask(prompt: list[int], steer: Any = None, trace: bool = False, **sampling: Any) -> Request:
    return Request(prompt=prompt, steer=steer, trace=trace, sampling=Sampling(**{"max_tokens": 12, **sampling}))


PROMPTS = [[20, 30, 40, THINK], [9, THINK], [70, 80, 90, 100, 110, THINK], [8, 8, THINK], [33, THINK, 12]]


def test_greedy_is_generate(engine: Engine, tiny_model: Any) -> None:
    """Steered rows beside unsteered ones, in batches of unequal prompts."""
    from transformers import LogitsProcessorList

    plain = tiny_model()
    specs: list[Any] = [None, WAVE, "off", WAVE, None]
    responses = engine.run([ask(p, s, temperature=0, trace=True) for p, s in zip(PROMPTS, specs, strict=True)])
    for prompt, spec, response in zip(PROMPTS, specs, responses, strict=True):
        wave = {k: v for k, v in WAVE.items() if k != "name"} if spec == WAVE else None
        want = plain.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            logits_processor=LogitsProcessorList([Oracle(len(prompt), [wave])]),
        )
        assert response.token_ids == want[0, len(prompt) :].tolist()
        assert response.tokens == len(response.token_ids)
        assert response.prompt_tokens == len(prompt)
        assert (response.steering is None) == (wave is None)
        if response.steering:
            assert response.steering["tokens"] == response.tokens


def test_logprob_is_that_of_the_unsteered_model(engine: Engine, tiny_model: Any) -> None:
    for spec in (None, WAVE):
        (response,) = engine.run([ask(PROMPTS[0], spec, temperature=0.7, seed=3)])
        ids = torch.tensor([PROMPTS[0] + list(response.token_ids or ())])
        with torch.no_grad():
            logprobs = tiny_model()(ids).logits.log_softmax(-1)
        at = range(len(PROMPTS[0]) - 1, ids.shape[1] - 1)
        want = sum(float(logprobs[0, i, ids[0, i + 1]]) for i in at)
        assert response.logprob == pytest.approx(want, abs=1e-3)


def test_a_seed_means_the_same_beside_others(engine: Engine) -> None:
    requests = [
        ask(PROMPTS[i % 5], WAVE if i % 2 else None, temperature=1.0, top_p=0.95, top_k=50, seed=i) for i in range(9)
    ]
    alone = [engine.run([request])[0].token_ids for request in requests]
    assert [r.token_ids for r in engine.run(requests)] == alone
    assert [r.token_ids for r in engine.run(requests[::-1])] == alone[::-1]
    assert len({tuple(ids or ()) for ids in alone}) == 9


def test_without_a_seed_samples_differ(engine: Engine) -> None:
    responses = engine.run([ask(PROMPTS[0], temperature=1.0) for _ in range(6)])
    assert len({tuple(r.token_ids or ()) for r in responses}) > 1


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 8, "top_p": 0.8}])
def test_draws_follow_the_distribution(engine: Engine, tiny_model: Any, sampling: dict[str, Any]) -> None:
    """Of the first token, against transformers' own truncation."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    count = 400
    prompt = PROMPTS[2]
    engine.batch_size = count  # type: ignore[attr-defined]
    responses = engine.run([ask(prompt, max_tokens=1, seed=i, **{"temperature": 1.0, **sampling}) for i in range(count)])
    drawn = torch.bincount(torch.tensor([r.token_ids[0] for r in responses]), minlength=512) / count  # type: ignore[index]
    with torch.no_grad():
        scores = tiny_model()(torch.tensor([prompt])).logits[:, -1].float()
    scores = TemperatureLogitsWarper(sampling.get("temperature", 1.0))(None, scores)
    if "top_k" in sampling:
        scores = TopKLogitsWarper(sampling["top_k"])(None, scores)
    if "top_p" in sampling:
        scores = TopPLogitsWarper(sampling["top_p"])(None, scores)
    want = scores.softmax(-1)[0]
    assert not drawn[want == 0].any()
    assert float((drawn - want).abs().sum()) / 2 < 0.15 if (want > 0).sum() < 50 else True
    assert float((drawn - want).abs().max()) < 0.08


def test_ends(engine: Engine, tiny_tokenizer: Any) -> None:
    """By length, a stop string, the end-of-sequence token; each row for its own reason."""
    whole = engine.run([ask(PROMPTS[0], temperature=0, max_tokens=20, ignore_eos=True)])[0]
    text, ids = whole.text, list(whole.token_ids or ())
    stop = tiny_tokenizer.decode(ids[4:6])
    cut, short, full = engine.run(
        [
            ask(PROMPTS[0], temperature=0, max_tokens=20, ignore_eos=True, stop=(stop,)),
            ask(PROMPTS[0], temperature=0, max_tokens=3, ignore_eos=True),
            ask(PROMPTS[0], temperature=0, max_tokens=20, ignore_eos=True, stop=("nowhere",)),
        ]
    )
    assert (cut.finish, short.finish, full.finish) == ("stop", "length", "length")
    assert cut.text == text[: text.index(stop)]
    assert cut.tokens <= 6
    assert short.token_ids == ids[:3]
    assert full.token_ids == ids
    for seed in range(200):
        sampled = engine.run([ask(PROMPTS[0], temperature=3.0, max_tokens=400, seed=seed)])[0]
        if sampled.finish == "stop":
            assert list(sampled.token_ids or ()).index(EOS) == sampled.tokens - 1
            break
    else:
        pytest.fail("no answer ended")


def test_chat_template(engine: Engine, tiny_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "so the w7"}]
    by_chat = engine.chat(messages, max_tokens=5, temperature=0)
    by_prompt = engine.run([ask(tiny_tokenizer.encode("so the w7 <think>"), max_tokens=5, temperature=0)])[0]
    assert by_chat.token_ids == by_prompt.token_ids


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"messages": "x", "steer": "nope"}, "steer"),
        ({"messages": "x", "steer": {"name": "reflection_cycle", "amplitude": float("nan")}}, "steer.amplitude"),
        ({"messages": "x", "steer": {"name": "mixture_of_thought", "n": -1}}, "steer.n"),
        ({"messages": "x", "bogus": 1}, "bogus"),
        ({"messages": 5}, "requests[0].messages"),
    ],
)
def test_one_question_that_is_refused_raises(engine: Engine, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(SteerError) as error:
        engine.chat(**arguments)
    assert error.value.field == field


def test_an_engine_outlives_the_steering_of_its_model(engine: Engine, model: Any) -> None:
    before = engine.run([ask(PROMPTS[0], temperature=0), ask(PROMPTS[0], WAVE, temperature=0)])
    unsteer(model)
    after = engine.run([ask(PROMPTS[0], temperature=0), ask(PROMPTS[0], WAVE, temperature=0)])
    assert [r.token_ids for r in after] == [r.token_ids for r in before]


def test_bad_requests_come_back_alone(engine: Engine) -> None:
    good, unknown, wrong, long_, word = engine.run(
        [
            ask(PROMPTS[0]),
            ask(PROMPTS[0], "nonsense"),
            ask(PROMPTS[0], {**WAVE, "amplitude": 1e9}),
            ask([5] * 2000),
            ask(PROMPTS[0], [{**WAVE, "words": ["not-a-piece"]}]),
        ]
    )
    assert good.error is None
    assert good.tokens
    for response, part in ((unknown, "nonsense"), (wrong, "amplitude"), (long_, "1024"), (word, "not-a-piece")):
        assert response.finish == "error"
        assert response.text == ""
        assert part in (response.error or "")


def test_abort(engine: Engine) -> None:
    requests = [ask(PROMPTS[i % 5], max_tokens=900, ignore_eos=True) for i in range(3)]
    requests += [ask(PROMPTS[0], max_tokens=3, ignore_eos=True)]
    finishes = {}
    with engine.submit([*requests, *requests]) as stream:
        for index, response in stream:
            finishes[index] = response
            for other in (0, 1, 2, 4, 5, 6):
                stream.abort(other)
    assert {i for i, r in finishes.items() if r.finish == "abort"} == {0, 1, 2, 4, 5, 6}
    assert all(r.tokens == len(r.token_ids or ()) < 900 for r in finishes.values())


def test_closing_stops_the_model(engine: Engine) -> None:
    with engine.submit([ask(PROMPTS[0], max_tokens=900, ignore_eos=True) for _ in range(8)]) as stream:
        pass
    assert list(stream) == []
    assert engine.run([ask(PROMPTS[0], max_tokens=2)])[0].tokens <= 2  # waits for the batch that was running


UNFINISHED = """
from llm_steer.eval.testbed import MODELS, sampling
from llm_steer.engines.base import Engine, Request, Sampling

engine = Engine.from_hf(*sampling.load(MODELS / "arithmetic"))
forever = Sampling(max_tokens=900, ignore_eos=True)
stream = engine.submit([Request(prompt="a = 12; b = a + 7; c = ?", sampling=forever) for _ in range(256)])
stream.abort(5)
raise SystemExit(3)
"""


def test_a_process_ends_in_order_while_its_model_generates() -> None:
    done = subprocess.run([sys.executable, "-c", UNFINISHED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr


def test_the_model_s_own_steering_is_the_default(model: Any, tiny_tokenizer: Any) -> None:
    fields = {k: v for k, v in WAVE.items() if k != "name"}
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **fields)
    engine = Engine.from_hf(model, tiny_tokenizer)
    default, named, off = engine.run([ask(PROMPTS[0], s, temperature=0) for s in (None, WAVE, "off")])
    assert default.token_ids == named.token_ids != off.token_ids
    assert engine.identity()["steering"][0][0] == "reflection_cycle"
    unsteer(model)


def test_identity(engine: Engine, tiny_model: Any, tiny_tokenizer: Any) -> None:
    same = Engine.from_hf(tiny_model(), tiny_tokenizer).identity()
    assert engine.identity() == same
    assert {"engine", "model", "config", "tokenizer", "chat_template", "dtype", "torch", "llm_steer"} <= set(same)
    other = Engine.from_hf(tiny_model("qwen2"), tiny_tokenizer).identity()
    assert other["config"] != same["config"]
    assert other["tokenizer"] == same["tokenizer"]


def test_an_error_of_the_model_is_raised(engine: Engine, model: Any) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    model.forward = broken
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.run([ask(PROMPTS[0])])


def test_what_is_no_decoder(tiny_tokenizer: Any, tiny_model: Any) -> None:
    with pytest.raises(SteerError, match="model"):
        Engine.from_hf(object(), tiny_tokenizer)  # type: ignore[arg-type]
    with pytest.raises(SteerError, match="batch_size"):
        Engine.from_hf(tiny_model(), tiny_tokenizer, batch_size=0)
