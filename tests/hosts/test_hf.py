"""Every way in which ``generate`` decodes, against a slow oracle."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, GenerationMixin, LogitsProcessor, pipeline
from transformers.generation import BaseStreamer

from llm_steer import Params, Plugin, SteerError, UnsupportedError, steer, unsteer
from support.oracle import Oracle, delta
from support.vocabulary import END_THINK, EOS, PAD, REFLECTION, THINK

WAVE = {"amplitude": 9.0, "period": 7.0}
THINKING = [1, 30, 40, THINK, 50]
DONE = [1, 30, THINK, 44, END_THINK, 61, 62]
NEVER = [1, 70, 71, 72]
GREEDY = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
GREEDY |= {"output_logits": True}


def batch(*prompts: list[int]) -> dict[str, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def check_rows(result, prompts, params) -> None:
    """Every row's scores are the raw logits plus the oracle's delta, on the reflection tokens and nowhere else."""
    width = result.sequences.shape[1] - len(result.scores)
    others = [i for i in range(result.scores[0].shape[1]) if i not in REFLECTION]
    for row, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        output = result.sequences[row, width:].tolist()
        end = output.index(EOS) + 1 if EOS in output else len(output)
        for t in range(end):
            added = (result.scores[t] - result.logits[t])[row]
            expected = delta(prompt, output[:t], own)
            assert added[REFLECTION].tolist() == pytest.approx([expected] * 5, abs=1e-5), (row, t)
            assert torch.equal(result.scores[t][row, others], result.logits[t][row, others]), (row, t)


@pytest.fixture
def model(tiny_model, tiny_tokenizer):
    return steer(tiny_model(), "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma"])
def test_greedy_is_the_oracle_on_every_architecture(architecture, tiny_model, tiny_tokenizer):
    plain, inputs = tiny_model(architecture), batch(THINKING, [1, 31, 41, THINK, 51])
    expected = plain.generate(**inputs, **GREEDY, logits_processor=[Oracle(5, [WAVE, WAVE])])
    steer(plain, "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)
    result = plain.generate(**inputs, **GREEDY)
    assert torch.equal(result.sequences, expected.sequences)
    check_rows(result, [THINKING, [1, 31, 41, THINK, 51]], [WAVE, WAVE])
    unsteered = unsteer(plain).generate(**inputs, **GREEDY)
    assert not torch.equal(result.sequences, unsteered.sequences)


def test_no_cache_and_no_steering_differ_only_where_the_wave_acts(model):
    """Greedy by hand, one row, no cache, no transformers loop."""
    ids = list(THINKING)
    with torch.no_grad():
        while len(ids) < 29:
            logits = model(torch.tensor([ids])).logits[0, -1]  # a direct call is not steered
            logits[REFLECTION] += delta(THINKING, ids[5:], WAVE)
            ids.append(int(logits.argmax()))
    assert model.generate(**batch(THINKING), max_new_tokens=24, do_sample=False, eos_token_id=None)[0].tolist() == ids


def test_think_spans_that_open_and_close_on_the_way(model):
    """Markers are forced into the output: opened late, closed, opened again, with mixed prompts and padding."""
    prompts = [THINKING, DONE, NEVER, [1, THINK, 9]]
    inputs, marks = batch(*prompts), {2: (1, THINK), 5: (0, END_THINK), 6: (2, THINK), 9: (2, END_THINK), 12: (2, THINK)}

    class Force(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if mark := marks.get(input_ids.shape[1] - 7):
                row, token = mark
                scores = scores.clone()
                scores[row, token] = 1e6
            return scores

    result = model.generate(**inputs, **GREEDY | {"eos_token_id": None, "output_logits": False}, logits_processor=[Force()])
    width = inputs["input_ids"].shape[1]
    acted = set()
    for row, prompt in enumerate(prompts):
        output = result.sequences[row, width:].tolist()
        trace = model.steering.traces[row]["plugins"][0]
        deltas = [delta(prompt, output[:t], WAVE) for t in range(len(output))]
        assert trace["steered_steps"] == sum(d != 0 for d in deltas)
        assert trace["positions"] == [t for t, token in enumerate(output) if token in REFLECTION]
        assert trace["deltas"] == pytest.approx([deltas[t] for t in trace["positions"]], abs=1e-5)
        for t, d in enumerate(deltas):
            alone = model(torch.tensor([prompt + output[:t]])).logits[0, -1, REFLECTION]
            assert torch.allclose(result.scores[t][row, REFLECTION], alone + d, atol=1e-4), (row, t)
        acted.add((row, any(d != 0 for d in deltas), deltas[-1] != 0))
    assert acted == {(0, True, False), (1, True, True), (2, True, False), (3, True, True)}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_row_of_a_padded_batch_equals_its_solo_run(architecture, tiny_model, tiny_tokenizer):
    model = steer(tiny_model(architecture), "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)
    prompts = [[1, THINK], THINKING, [1, *range(60, 75), THINK, 20]]
    together = model.generate(**batch(*prompts), **GREEDY | {"eos_token_id": None})
    check_rows(together, prompts, [WAVE] * 3)
    for row, prompt in enumerate(prompts):
        alone = model.generate(**batch(prompt), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert together.sequences[row, 18:].tolist() == alone[0, len(prompt) :].tolist()


def test_padding_is_inferred_when_there_is_no_mask(model):
    ids = batch(THINKING, [1, THINK])["input_ids"]
    check_rows(model.generate(ids, **GREEDY), [THINKING, [1, THINK]], [WAVE, WAVE])


def test_positions_come_from_the_mask_when_pads_stand_elsewhere(model):
    ids = torch.tensor([[1, 30, PAD, THINK, 50, PAD, PAD]])
    mask = (ids != PAD).long()
    check_rows(model.generate(ids, attention_mask=mask, **GREEDY), [[1, 30, THINK, 50]], [WAVE])


@pytest.mark.parametrize("copies", [1, 3])
def test_sampling_draws_what_the_oracle_draws(copies, tiny_model, tiny_tokenizer):
    model, prompts = tiny_model(), [THINKING, [1, THINK]]
    options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "num_return_sequences": copies}
    options |= {"max_new_tokens": 30}
    torch.manual_seed(5)
    expected = model.generate(**batch(*prompts), **options, logits_processor=[Oracle(5, [WAVE] * 2 * copies)])
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **WAVE)
    torch.manual_seed(5)
    assert torch.equal(model.generate(**batch(*prompts), **options), expected)
    assert len(model.steering.traces) == 2 * copies


# -- rows ----------------------------------------------------------------------------------------------------------------


def test_rows_with_their_own_steering(model, tiny_model):
    prompts = [THINKING, NEVER, [1, THINK], THINKING]
    asked = [{"amplitude": 4}, {"origin": "output", "period": 5}, None, "off"]
    own = [{**WAVE, "amplitude": 4.0}, {**WAVE, "origin": "output", "period": 5.0}, None, None]
    result = model.generate(**batch(*prompts), **GREEDY, steer=asked)
    check_rows(result, prompts, own)
    assert [t is not None for t in model.steering.traces] == [True, True, False, False]
    assert model.steering.traces[0]["plugins"][0]["params"]["amplitude"] == 4


def test_rows_that_are_not_steered_are_bit_identical(model, tiny_model):
    inputs, options = batch(THINKING, THINKING, DONE), GREEDY | {"eos_token_id": None}
    plain = tiny_model().generate(**inputs, **options)
    mixed = model.generate(**inputs, **options, steer=[None, True, "off"])
    assert not torch.equal(plain.sequences[1], mixed.sequences[1])
    for row in (0, 2):
        assert torch.equal(plain.sequences[row], mixed.sequences[row])
        for a, b, raw_a, raw_b in zip(plain.scores, mixed.scores, plain.logits, mixed.logits, strict=True):
            assert torch.equal(a[row], b[row])
            assert torch.equal(raw_a[row], raw_b[row])


@pytest.mark.parametrize(
    ("asked", "per_row"),
    [
        ([{"amplitude": 3}, None], [3.0, 3.0, None, None]),
        ([{"amplitude": 3}, None, {"amplitude": 4}, {}], [3.0, None, 4.0, 9.0]),
    ],
)
def test_a_list_holds_one_for_each_prompt_or_for_each_returned_sequence(asked, per_row, model):
    result = model.generate(
        **batch(THINKING, [1, THINK]), **GREEDY | {"do_sample": True, "top_k": 0}, num_return_sequences=2, steer=asked
    )
    prompts = [THINKING, THINKING, [1, THINK], [1, THINK]]
    check_rows(result, prompts, [a and {**WAVE, "amplitude": a} for a in per_row])


@pytest.mark.parametrize(
    ("options", "count", "valid"),
    [
        ({}, 3, "one for each of the 2 prompts"),
        ({"do_sample": True, "num_return_sequences": 3}, 3, "2 prompts, or one for each of the 6 returned sequences"),
        ({"num_beams": 2, "num_return_sequences": 2}, 4, "one for each of the 2 prompts"),
    ],
)
def test_a_list_of_another_length_is_refused(options, count, valid, model):
    with pytest.raises(SteerError, match=f"steer: got 'a list of {count}'; must be a list with .*{valid}"):
        model.generate(**batch(THINKING, DONE), **options, steer=[True] * count)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ([None, {"amplitude": "7"}], r"steer\[1\]\.amplitude: got '7'"),
        ([{"name": "reflexion_cycle"}], r"steer\[0\].*reflexion_cycle.*reflection_cycle"),
        ([{"words": ["nowhere"]}, None], r"steer\[0\]\.words: got \['nowhere'\]"),
        ([["reflection_cycle", "reflection_cycle"]], r"steer\[0\]\[1\]"),
        ([], r"steer: got \[\]; must be a list with one for each prompt"),
        ({"speed": 1}, r"speed.*a parameter of reflection_cycle"),
        (3.5, "steer: got 3.5"),
    ],
)
def test_bad_requests_name_the_row_and_the_field(asked, message, model):
    with pytest.raises(SteerError, match=message):
        model.generate(**batch(THINKING, DONE), steer=asked)


def test_a_request_for_all_rows(model, tiny_model):
    inputs = batch(THINKING, [1, THINK])
    for asked in ({"amplitude": 3}, '{"amplitude": 3}', {"name": "reflection_cycle", "amplitude": 3}):
        check_rows(model.generate(**inputs, **GREEDY, steer=asked), [THINKING, [1, THINK]], [{**WAVE, "amplitude": 3}] * 2)
    check_rows(model.generate(**inputs, **GREEDY, steer=True), [THINKING, [1, THINK]], [WAVE] * 2)


# -- off -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", ["off", None, False, [None, "off"]])
def test_off_adds_no_processor(asked, model, tiny_model):
    seen = []

    def loop(model, input_ids, logits_processor, **kwargs):
        seen.append([type(p).__name__ for p in logits_processor])
        return GenerationMixin._sample(model, input_ids, logits_processor, **kwargs)

    inputs, options = batch(THINKING, [1, THINK]), {"max_new_tokens": 8, "do_sample": False, "custom_generate": loop}
    result = model.generate(**inputs, **options, steer=asked)
    assert torch.equal(result, tiny_model().generate(**inputs, **options))
    assert model.steering.traces == [None, None]
    model.generate(**inputs, **options)
    assert seen == [[], [], ["SteerProcessor"]]


def test_the_callers_list_of_processors_is_left_alone(model):
    class Ban(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(1, torch.tensor(REFLECTION[:4]), float("-inf"))

    mine = [Ban()]
    result = model.generate(**batch(THINKING), **GREEDY, logits_processor=mine)
    assert len(mine) == 1
    assert torch.isinf(torch.stack(result.scores)[:, 0, REFLECTION[:4]]).all()
    added = [float((s - raw)[0, REFLECTION[4]]) for s, raw in zip(result.scores, result.logits, strict=True)]
    assert added[:4] == pytest.approx([delta(THINKING, [0] * t, WAVE) for t in range(4)], abs=1e-5)
    # by position, as the signature allows
    again = model.generate(batch(THINKING)["input_ids"], None, mine, **GREEDY)
    assert torch.equal(again.sequences, result.sequences)


# -- caches, prefill, inputs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"prefill_chunk_size": 3},
        {"prefill_chunk_size": 50},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "prefill_chunk_size": 4},
    ],
    ids=str,
)
def test_caches_and_prefill_change_nothing(options, model):
    prompts = [[1, *range(60, 70), THINK, 20], THINKING]
    inputs, greedy = batch(*prompts), GREEDY | {"eos_token_id": None}
    expected = model.generate(**inputs, **greedy)
    result = model.generate(**inputs, **greedy, **options)
    check_rows(result, prompts, [WAVE, WAVE])
    assert torch.equal(result.sequences, expected.sequences)


def test_max_length_and_positional_arguments(model):
    inputs = batch(THINKING)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(model.generate(inputs["input_ids"], max_length=17, do_sample=False), expected)
    config = model.generation_config.__class__(max_new_tokens=12, do_sample=False, eos_token_id=EOS, pad_token_id=PAD)
    assert torch.equal(model.generate(inputs["input_ids"], config), expected)


def test_going_on_from_a_cache(model):
    """The second call gets the whole sequence and the cache of all of it but its end."""
    first = model.generate(**batch(THINKING), **GREEDY | {"max_new_tokens": 6, "eos_token_id": None})
    prompt = [*first.sequences[0].tolist(), 80, 81]
    longer = model.generate(torch.tensor([prompt]), **GREEDY | {"eos_token_id": None}, past_key_values=first.past_key_values)
    check_rows(longer, [prompt], [WAVE])
    fresh = model.generate(torch.tensor([prompt]), **GREEDY | {"eos_token_id": None})
    assert torch.equal(longer.sequences, fresh.sequences)

    # Only what is new: the ids in the cache are not known.
    first = model.generate(**batch(THINKING), **GREEDY | {"max_new_tokens": 6, "eos_token_id": None})
    own, new = {**WAVE, "origin": "output"}, torch.tensor([[first.sequences[0, -1], 80, 81]])
    options = {"past_key_values": first.past_key_values, "attention_mask": torch.ones(1, 13), "steer": own}
    rest = model.generate(new, **GREEDY | {"eos_token_id": None}, **options)
    check_rows(rest, [new[0].tolist()], [own])
    whole = torch.cat([first.sequences, new[:, 1:]], 1)
    expected = model.generate(whole, **GREEDY | {"eos_token_id": None}, steer=own)
    assert rest.sequences[0, 3:].tolist() == expected.sequences[0, 13:].tolist()


def test_prompts_given_as_embeddings(model):
    """Their ids are not known: nothing is in a think span, but generated tokens are counted from the right place."""
    own = {**WAVE, "origin": "output"}
    embeds = model.get_input_embeddings()(torch.tensor([THINKING, THINKING]))
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    result = model.generate(inputs_embeds=embeds, attention_mask=mask, **GREEDY | {"eos_token_id": None}, steer=own)
    check_rows(result, [[-1] * 3, [-1] * 5], [own, own])
    by_ids = model.generate(torch.tensor([THINKING]), **GREEDY | {"eos_token_id": None}, steer=own)
    assert result.sequences[1].tolist() == by_ids.sequences[0, 5:].tolist()
    assert model.steering.traces[0]["tokens"] == 24
    check_rows(model.generate(inputs_embeds=embeds, **GREEDY), [[-1] * 5] * 2, [WAVE, WAVE])
    both = model.generate(torch.tensor([THINKING]), inputs_embeds=embeds[:1], **GREEDY)
    check_rows(both, [THINKING], [WAVE])


def test_encoder_decoder_models_are_steered_from_the_decoders_first_token(tiny_tokenizer):
    torch.manual_seed(0)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32, "vocab_size": 512}
    config = BartConfig(**sizes, pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS, decoder_start_token_id=1)
    model = BartForConditionalGeneration(config).eval()
    model.generation_config.forced_eos_token_id = None
    own = {**WAVE, "origin": "output"}
    steer(model, "reflection_cycle", tokenizer=tiny_tokenizer, **own)
    result = model.generate(**batch(THINKING, [1, THINK, 40]), **GREEDY)
    check_rows(result, [[1], [1]], [own, own])
    started = model.generate(
        **batch(THINKING), decoder_input_ids=torch.tensor([[1, THINK, 33]]), **GREEDY, steer={"origin": "think"}
    )
    check_rows(started, [[1, THINK, 33]], [WAVE])
    beams = model.generate(**batch(THINKING), num_beams=2, max_new_tokens=10)
    assert beams.shape[0] == 1


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
    "options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"custom_generate": GenerationMixin._sample}], ids=str
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
