"""Every way in which ``generate`` is called, against a slow oracle."""

from __future__ import annotations

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, GenerationMixin, LogitsProcessor

from llm_steer import SteerError, UnsupportedError, steer, unsteer
from support.hf_rows import DONE, GREEDY, NEVER, THINKING, WAVE, batch, check_rows
from support.oracle import Oracle, delta
from support.vocabulary import END_THINK, EOS, PAD, REFLECTION, THINK


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
    with pytest.raises(UnsupportedError, match=r"reflection_cycle goes by the prompt's tokens.*origin='output'"):
        model.generate(inputs_embeds=embeds, **GREEDY)  # in a think span, for all that is known
    model.generate(inputs_embeds=embeds, **GREEDY, steer=["off", own])
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
