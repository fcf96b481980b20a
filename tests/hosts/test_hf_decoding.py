"""Beams, drafts, loops of the caller's own, and what is refused, against a slow oracle; traces."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessor, pipeline
from transformers.generation import BaseStreamer

from llm_steer import Params, Plugin, SteerError, UnsupportedError, steer, unsteer
from support.hf_rows import DONE, GREEDY, NEVER, THINKING, WAVE, batch, check_rows
from support.oracle import delta
from support.vocabulary import END_THINK, EOS, PAD, REFLECTION, THINK

# -- beams ---------------------------------------------------------------------------------------------------------------


def inside_forward(model, prompts, params, beams):
    """The model, with the deltas added to its raw logits by its own forward (which sees whole sequences: no cache)."""
    width, forward = max(map(len, prompts)), type(model).forward

    def steered(input_ids, **kwargs):
        out = forward(model, input_ids=input_ids, **kwargs)
        for row, ids in enumerate(input_ids.tolist()):
            prompt = [t for t in ids[:width] if t != PAD]
            out.logits[row, -1, REFLECTION] += delta(prompt, ids[width:], params[row // beams])
        return out

    steered.__signature__ = inspect.signature(model.forward)
    model.forward = steered
    return model


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 30, "temperature": 0.7}], ids=["search", "sample"])
@pytest.mark.parametrize("cache", [True, False])
def test_beams_are_those_of_a_model_with_steered_logits(cache, options, tiny_model, tiny_tokenizer):
    prompts, own = [THINKING, [1, THINK], [1, 90, THINK]], [WAVE, None, {**WAVE, "amplitude": 4.0}]
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 14, "use_cache": False, **options}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    inputs = batch(*prompts)
    torch.manual_seed(1)
    expected = inside_forward(tiny_model(), prompts, own, 3).generate(**inputs, **options)
    model = steer(tiny_model(), "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)
    torch.manual_seed(1)
    result = model.generate(**inputs, **options | {"use_cache": cache}, steer=[True, None, {"amplitude": 4}])
    assert torch.equal(result.sequences, expected.sequences)
    assert torch.allclose(result.sequences_scores, expected.sequences_scores, atol=1e-4)
    torch.manual_seed(1)
    plain = unsteer(model).generate(**inputs, **options)
    assert torch.equal(result.sequences[2:4, :12], plain.sequences[2:4, :12]) or options.get("do_sample")
    assert not torch.equal(result.sequences[0], plain.sequences[0])


def test_an_output_of_nothing_but_padding_has_a_trace(tiny_model, tiny_tokenizer):
    """As a model writes whose states are NaN."""
    model = tiny_model()
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * float("nan"))
    plain = model.generate(**batch(THINKING), **GREEDY).sequences
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)
    assert torch.equal(model.generate(**batch(THINKING), **GREEDY).sequences, plain)
    (trace,) = model.steering.traces
    assert trace["tokens"] <= 24


def test_unsteered_rows_keep_their_log_probabilities_to_the_bit(model, tiny_model):
    options = {"num_beams": 2, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
    inputs = batch(NEVER, NEVER)
    plain = tiny_model().generate(**inputs, **options)
    mixed = model.generate(**inputs, **options, steer=[None, {"origin": "output", "phase": 0.25}])
    assert torch.equal(mixed.scores[0][:2], plain.scores[0][:2])
    assert not torch.equal(mixed.scores[0][2:], plain.scores[0][2:])
    assert torch.allclose(mixed.scores[0].exp().sum(1), torch.ones(4))


def test_traces_of_beams_belong_to_the_returned_sequences(model):
    result = model.generate(
        **batch(THINKING, [1, THINK]), num_beams=4, num_return_sequences=3, max_new_tokens=14, steer=[True, {"period": 5}]
    )
    own = [WAVE] * 3 + [{**WAVE, "period": 5.0}] * 3
    assert len(model.steering.traces) == 6
    for row, trace in enumerate(model.steering.traces):
        prompt = [THINKING, [1, THINK]][row // 3]
        output = result[row, 5:].tolist()
        output = output[: output.index(EOS) + 1] if EOS in output else output
        found = [t for t, token in enumerate(output) if token in REFLECTION]
        assert trace["tokens"] == len(output)
        assert trace["plugins"][0]["positions"] == found
        assert trace["plugins"][0]["deltas"] == pytest.approx([delta(prompt, output[:t], own[row]) for t in found], abs=1e-5)


# -- drafts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [5, 160])
def test_prompt_lookup_equals_plain_greedy(length, model):
    prompt = [*THINKING, *[60, 61, 62, 7, 8] * 4]
    options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**batch(prompt), **options)
    result = model.generate(**batch(prompt), **options, prompt_lookup_num_tokens=5)
    assert torch.equal(result, expected)
    assert not torch.equal(expected, model.generate(**batch(prompt), **options, steer="off"))


def test_scores_of_drafted_tokens(model):
    prompt = [*THINKING, *[60, 61, 62, 7, 8] * 4]
    check_rows(model.generate(**batch(prompt), **GREEDY, prompt_lookup_num_tokens=4), [prompt], [WAVE])


@pytest.mark.parametrize("assistant", ["plain", "same", "steered"])
def test_an_assistant_changes_nothing(assistant, model, tiny_model, tiny_tokenizer):
    draft = tiny_model("llama", 0 if assistant == "same" else 1)
    if assistant == "steered":
        steer(draft, "reflection_cycle", tokenizer=tiny_tokenizer, amplitude=-5)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**batch(THINKING), **options)
    assert torch.equal(model.generate(**batch(THINKING), **options, assistant_model=draft), expected)
    if assistant == "steered":
        assert draft.steering.counters["calls"] == 0


def test_an_assistant_drafts_with_the_same_steering(model, tiny_model):
    """With the model itself as its assistant, every draft is right: the assistant's logits are steered alike."""
    rejected = []

    class Watch(BaseStreamer):
        def put(self, value):
            rejected.append(value.numel())

        def end(self):
            pass

    assistant = tiny_model()
    assistant.generation_config.update(num_assistant_tokens=4, num_assistant_tokens_schedule="constant")
    assistant.generation_config.assistant_confidence_threshold = 0.0
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "streamer": Watch()}
    model.generate(**batch(THINKING), **options, assistant_model=assistant)
    assert rejected == [5, 5, 5, 5, 5]  # the prompt, then four drafts and one more token each time


def test_a_model_that_drafts_for_itself(model):
    """Early exit calls generate of the same model inside generate."""
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**batch(THINKING), **options)
    assert torch.equal(model.generate(**batch(THINKING), **options, assistant_early_exit=1), expected)
    assert model.steering.counters["calls"] == 2


# -- what is refused -----------------------------------------------------------------------------------------------------


class Watcher(Plugin[Params]):
    """Adds as much as the largest logit it saw one step before: depends on what the model computed."""

    name, Params, feedback = "watcher", Params, True

    def __init__(self, context):
        super().__init__(context)
        self.largest = torch.zeros(context.num_slots)
        self.tokens = torch.zeros(context.num_slots, dtype=torch.int64)

    def admit(self, slot, params, prompt_ids):
        self.largest[slot] = 0
        self.tokens[slot] = 0

    def step(self, tokens):
        self.tokens.index_add_(0, tokens.slot, torch.ones_like(tokens.slot))

    def logits(self, logits, rows):
        added = torch.where(rows.live, self.largest[rows.slot], 0.0)
        self.largest[rows.slot] = logits.amax(1)
        logits[:, 100] += added

    def finish(self, slot, tokens, rows):
        return {"largest": round(float(self.largest[slot]), 4), "tokens": int(self.tokens[slot])}


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"custom_generate": GenerationMixin._sample}],
    ids=lambda options: next(iter(options)),
)
def test_feedback_is_refused_where_rows_are_reordered_or_drafted(options, model, register):
    register(Watcher)
    for asked in ("watcher", [["reflection_cycle", "watcher"]]):
        with pytest.raises(UnsupportedError, match=r"watcher depends on what the model computed.*num_beams=1"):
            model.generate(**batch(THINKING), max_new_tokens=4, **options, steer=asked)
    model.generate(**batch(THINKING), max_new_tokens=4, **options)


def test_feedback_sees_its_rows_and_is_traced_live(model, register):
    register(Watcher)
    inputs, options = batch(THINKING, NEVER), GREEDY | {"eos_token_id": None, "max_new_tokens": 6}
    result = model.generate(**inputs, **options, steer=["watcher", None])
    added = [(s - raw)[:, 100].tolist() for s, raw in zip(result.scores, result.logits, strict=True)]
    expected = [0.0, *[float(raw[0].max()) for raw in result.logits[:-1]]]
    assert [row[0] for row in added] == pytest.approx(expected, abs=1e-5)
    assert [row[1] for row in added] == [0.0] * 6
    trace, nothing = model.steering.traces
    assert nothing is None
    assert trace["replayed"] is False
    largest = round(float(result.logits[-1][0].max()), 4)
    assert trace["plugins"] == [{"name": "watcher", "params": {}, "largest": largest, "tokens": 5 + 5}]


def test_a_row_that_has_ended_is_nobodys(model, register):
    """While other rows go on, what is fed behind a row's end must not reach its state."""
    register(Watcher)

    class EndFirst(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 7:
                scores = scores.clone()
                scores[0, EOS] = 1e6
            return scores

    model.generate(
        **batch(THINKING, THINKING), max_new_tokens=9, do_sample=False, steer="watcher", logits_processor=[EndFirst()]
    )
    first, second = (trace["plugins"][0] for trace in model.steering.traces)
    assert model.steering.traces[0]["tokens"] == 3
    assert first["tokens"] == 5 + 2  # as alone: the end itself would not be fed
    assert second["tokens"] == 5 + 8


def test_continuous_batching_is_refused(model, tiny_tokenizer):
    with pytest.raises(UnsupportedError, match=r"continuous batching .* use generate, .* unsteer\(model\)"):
        model.generate_batch([THINKING], max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="continuous batching"):
        model.generate(torch.tensor([THINKING]), cache_implementation="paged", max_new_tokens=2)


def test_what_rewrites_prompts_or_ids_is_refused(model, tiny_model, tiny_tokenizer):
    with pytest.raises(UnsupportedError, match="token healing"):
        model.generate(**batch(THINKING), token_healing=True, tokenizer=tiny_tokenizer)
    with pytest.raises(UnsupportedError, match="assistant with a tokenizer of its own"):
        model.generate(
            **batch(THINKING), assistant_model=tiny_model(), tokenizer=tiny_tokenizer, assistant_tokenizer=tiny_tokenizer
        )


def test_a_loop_with_rows_of_its_own_is_refused(model):
    def doubled(model, input_ids, logits_processor, **kwargs):
        return logits_processor(input_ids.repeat(2, 1), torch.zeros(2, 512))

    with pytest.raises(UnsupportedError, match="lays out its rows"):
        model.generate(**batch(THINKING), custom_generate=doubled)


# -- custom loops, pipelines, streamers ----------------------------------------------------------------------------------


def test_custom_loops_are_steered(model):
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**batch(THINKING, NEVER), **options)
    assert torch.equal(
        model.generate(**batch(THINKING, NEVER), **options, custom_generate=GenerationMixin._sample), expected
    )

    def without_preparation(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        while not stopping_criteria(input_ids, None).all():
            logits = logits_processor(input_ids, model(input_ids).logits[:, -1])
            input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], 1)
        return input_ids

    greedy = model.generate(**batch(THINKING), **options)
    assert torch.equal(model.generate(**batch(THINKING), **options, custom_generate=without_preparation), greedy)
    # a loop may return anything
    assert model.generate(**batch(THINKING), custom_generate=lambda *args, **kwargs: "text") == "text"
    assert model.steering.traces == []


def test_any_sequences_a_loop_asks_about(model):
    """Rows that share nothing with those of the call before, shorter and longer ones, far beyond what is remembered."""
    generator = torch.Generator().manual_seed(3)

    def asks(model, input_ids, logits_processor, **kwargs):
        kept = torch.randint(5, 512, (2, 400), generator=generator)
        kept[:, ::40] = torch.tensor([[THINK, THINK]]).T
        kept[1, 333] = END_THINK
        for _ in range(40):
            if torch.rand(1, generator=generator) < 0.3:
                kept = kept.clone()
                first = int(torch.randint(0, 400, (1,), generator=generator))
                kept[:, first:] = torch.randint(5, 512, (2, 400 - first), generator=generator)
                kept[0, first] = THINK
            length = int(torch.randint(0, 401, (1,), generator=generator))
            ids = torch.cat([input_ids, kept[:, :length]], 1)
            scores = logits_processor(ids, torch.zeros(2, 512))
            # a loop of its own may add up log-probabilities, so the mass is kept: compare differences
            added = (scores[:, REFLECTION[0]] - scores[:, 0]).tolist()
            assert added == pytest.approx(
                [delta(p, kept[i, :length].tolist(), WAVE) for i, p in enumerate(prompts)], abs=1e-4
            )
            moved.append(any(added))
        return input_ids

    moved, prompts = [], [NEVER, THINKING[:4]]
    model.generate(**batch(*prompts), max_new_tokens=500, custom_generate=asks)
    assert len(moved) == 40
    assert sum(moved) > 10


def test_a_row_that_is_not_steered_may_hold_nothing_but_infinities(model):
    def asks(model, input_ids, logits_processor, **kwargs):
        scores = torch.full((2, 512), float("-inf"))
        scores[1] = 0.0
        return logits_processor(input_ids, scores)

    result = model.generate(**batch(NEVER, NEVER), custom_generate=asks, steer=[None, {"origin": "output", "phase": 0.25}])
    assert torch.equal(result[0], torch.full((512,), float("-inf")))
    assert float(result[1].logsumexp(0)) == pytest.approx(float(torch.zeros(512).logsumexp(0)), abs=1e-5)
    assert len(result[1].unique()) == 2


def test_pipeline(model, tiny_tokenizer):
    pipe = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    prompt = "w30 <think> w50"
    ids = tiny_tokenizer(prompt, return_tensors="pt").input_ids
    expected = {
        asked: tiny_tokenizer.decode(
            model.generate(ids, max_new_tokens=12, do_sample=False, steer=asked)[0, 3:], skip_special_tokens=True
        )
        for asked in (True, "off")
    }
    assert pipe(prompt, **options)[0]["generated_text"] == expected[True]
    assert pipe(prompt, **options, steer="off")[0]["generated_text"] == expected["off"]
    assert expected[True] != expected["off"]
    several = pipe([prompt, "w31 w32", prompt], batch_size=3, **options)
    assert [s[0]["generated_text"] for s in several][::2] == [expected[True]] * 2


def test_streamers_see_what_is_returned(model):
    class Keep(BaseStreamer):
        def __init__(self):
            self.ids = []

        def put(self, value):
            self.ids += value.flatten().tolist()

        def end(self):
            self.ids.append("end")

    keep = Keep()
    result = model.generate(**batch(THINKING), max_new_tokens=12, do_sample=False, streamer=keep)
    assert keep.ids == [*result[0].tolist(), "end"]


def test_guidance_is_followed_by_the_wave(model):
    """Classifier-free guidance makes log-probabilities of its own before the wave is added."""
    result = model.generate(**batch(THINKING), **GREEDY | {"max_new_tokens": 6}, guidance_scale=1.5)
    plain = model.generate(**batch(THINKING), **GREEDY | {"max_new_tokens": 1}, guidance_scale=1.5, steer="off")
    assert torch.equal(result.scores[0], plain.scores[0])  # the wave begins at 0
    output = result.sequences[0, 5:].tolist()
    for t in range(6):
        again = model.generate(
            torch.tensor([THINKING + output[:t]]),
            **GREEDY | {"max_new_tokens": 1},
            guidance_scale=1.5,
            steer="off",
            negative_prompt_ids=torch.tensor([[*THINKING[-1:], *output[:t]]]),
        )
        added = (result.scores[t] - again.scores[0])[0]
        assert added[REFLECTION].tolist() == pytest.approx([delta(THINKING, output[:t], WAVE)] * 5, abs=1e-3)


# -- traces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [PAD, 20], ids=["pad", "end token as pad"])
@pytest.mark.parametrize("eos", [20, [20, 21], torch.tensor([21, 20])], ids=["int", "list", "tensor"])
def test_traces_end_with_the_first_end_token(eos, pad, model):
    class EndAt(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, 20:22] = -1e6
            if (row := input_ids.shape[1] - 7) in (0, 2):
                scores[row // 2, 20] = 1e7
            return scores

    options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": eos, "pad_token_id": pad}
    model.generate(**batch(THINKING, DONE, THINKING), **options, logits_processor=[EndAt()])
    assert [trace["tokens"] for trace in model.steering.traces] == [1, 3, 9]
    assert [trace["think_tokens"] for trace in model.steering.traces] == [1, 0, 9]


def test_traces_without_end_token_and_after_a_stop_string(model, tiny_tokenizer):
    model.generate(**batch(THINKING, NEVER), max_new_tokens=9, do_sample=False, eos_token_id=None)
    assert [trace["tokens"] for trace in model.steering.traces] == [9, 9]

    class Stop(torch.nn.Module):
        def forward(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= 8, input_ids.shape[1] >= 12])

    model.generate(**batch(THINKING, [1, 70, THINK, 71, 72]), max_new_tokens=20, do_sample=False, stopping_criteria=[Stop()])
    lengths = [trace["tokens"] for trace in model.steering.traces]
    assert lengths == [3, 7]  # pads behind the end are not output


def test_counters(model):
    model.generate(**batch(THINKING, NEVER), max_new_tokens=5, do_sample=False, eos_token_id=None, steer=[True, None])
    model.generate(**batch(THINKING), max_new_tokens=5, do_sample=True, eos_token_id=None, num_return_sequences=3)
    model.generate(**batch(THINKING), max_new_tokens=5, steer="off")
    with pytest.raises(SteerError):
        model.generate(**batch(THINKING), steer="nothing")
    assert model.steering.counters == {"calls": 3, "sequences": 6, "steered_sequences": 4, "steered_tokens": 20}
