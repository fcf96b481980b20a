"""What ``step`` is shown: every fed token of every row, with its slot and position, whatever way it is fed."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from transformers import LogitsProcessor

from llm_steer import Params, Plugin, steer
from support.vocabulary import EOS, PAD, THINK

NOBODY = "nobody"


class RecorderParams(Params):
    mark: int = 0


class Recorder(Plugin[RecorderParams]):
    """Keeps what its hooks are given."""

    name, Params = "recorder", RecorderParams
    passes: ClassVar[list[list[tuple]]] = []
    rows: ClassVar[list[list[tuple]]] = []
    admitted: ClassVar[list[tuple]] = []

    def admit(self, slot, params, prompt_ids):
        self.admitted.append((slot, params and params.mark, prompt_ids.tolist()))

    def step(self, tokens):
        assert tokens.position.min() >= 0  # padding, too, has a position that a table can be read at
        nobody = self.context.nobody
        self.passes.append(
            [
                (NOBODY,) if slot == nobody else (slot, token, position, output)
                for slot, token, position, output in zip(
                    *(x.tolist() for x in (tokens.slot, tokens.ids, tokens.position, tokens.output_position)), strict=True
                )
            ]
        )

    def logits(self, logits, rows):
        self.rows.append(list(zip(rows.slot.tolist(), rows.output_position.tolist(), rows.live.tolist(), strict=True)))


@pytest.fixture
def recorder(register):
    Recorder.passes, Recorder.rows, Recorder.admitted = [], [], []
    return register(Recorder)


@pytest.fixture
def model(recorder, tiny_model, tiny_tokenizer):
    model = steer(tiny_model(), "recorder", tokenizer=tiny_tokenizer)
    Recorder.admitted.clear()
    return model


SHORT, LONG = [1, THINK], [1, 30, 40, THINK, 50]
IDS = torch.tensor([[PAD] * 3 + SHORT, LONG])
MASK = (IDS != PAD).long()
GREEDY = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}


def expected_token(row: int, prompt: list[int], output: list[int], position: int) -> tuple:
    sequence = prompt + output
    return (row, sequence[position], position, position - len(prompt))


def prompt_pass(first: int = 0, stop: int = 5) -> list[tuple]:
    rows = [[(NOBODY,)] * 3 + [expected_token(0, SHORT, [], i) for i in range(2)]]
    rows.append([expected_token(1, LONG, [], i) for i in range(5)])
    return [token for row in rows for token in row[first:stop]]


def decode_passes(outputs: list[list[int]], count: int) -> list[list[tuple]]:
    return [[expected_token(0, SHORT, outputs[0], 2 + t), expected_token(1, LONG, outputs[1], 5 + t)] for t in range(count)]


def test_admission(model):
    model.generate(IDS, attention_mask=MASK, **GREEDY, steer=[{"mark": 3}, True])
    assert Recorder.admitted == [(0, 3, SHORT), (1, 0, LONG)]


def test_padded_prompts_then_one_token_for_each_row(model):
    result = model.generate(IDS, attention_mask=MASK, **GREEDY)
    outputs = result[:, 5:].tolist()
    assert Recorder.passes == [prompt_pass(), *decode_passes(outputs, 3)]
    assert Recorder.rows == [[(0, t, True), (1, t, True)] for t in range(4)]


def test_prompts_in_chunks(model):
    result = model.generate(IDS, attention_mask=MASK, **GREEDY, prefill_chunk_size=2)
    chunks = [prompt_pass(0, 2), prompt_pass(2, 4), prompt_pass(4, 5)]
    assert Recorder.passes == chunks + decode_passes(result[:, 5:].tolist(), 3)


def test_without_cache_everything_comes_again(model):
    outputs = model.generate(IDS, attention_mask=MASK, **GREEDY, use_cache=False)[:, 5:].tolist()
    for t, seen in enumerate(Recorder.passes):
        short = [(NOBODY,)] * 3 + [expected_token(0, SHORT, outputs[0], i) for i in range(2 + t)]
        assert seen == short + [expected_token(1, LONG, outputs[1], i) for i in range(5 + t)]
    assert len(Recorder.passes) == 4


def test_rows_that_are_not_steered_are_nobodys(model):
    outputs = model.generate(IDS, attention_mask=MASK, **GREEDY, steer=["off", True])[:, 5:].tolist()
    assert Recorder.admitted == [(1, 0, LONG)]
    prompt = [(NOBODY,)] * 5 + prompt_pass()[5:]
    decoded = [[(NOBODY,), second] for _, second in decode_passes(outputs, 3)]
    assert Recorder.passes == [prompt, *decoded]
    assert [row[0][2] for row in Recorder.rows] == [False] * 4
    assert [row[1] for row in Recorder.rows] == [(1, t, True) for t in range(4)]


def test_what_follows_the_end_of_a_row_is_nobodys(model):
    class EndFirst(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, EOS] = -1e6
            if input_ids.shape[1] == 6:
                scores[0, EOS] = 1e6
            return scores

    options = {**GREEDY, "eos_token_id": EOS, "logits_processor": [EndFirst()]}
    outputs = model.generate(IDS, attention_mask=MASK, **options)[:, 5:].tolist()
    assert outputs[0][1:] == [EOS, PAD, PAD]
    first, *later = decode_passes(outputs, 3)
    assert Recorder.passes == [prompt_pass(), first, *([(NOBODY,), second] for _, second in later)]
    assert [rows[0][2] for rows in Recorder.rows] == [True, True, False, False]
    assert [rows[1] for rows in Recorder.rows] == [(1, t, True) for t in range(4)]


def test_an_end_token_in_the_prompt_ends_nothing(model):
    prompt = [1, EOS, 30, EOS]
    model.generate(torch.tensor([prompt, prompt]), **GREEDY | {"eos_token_id": EOS, "min_new_tokens": 4})
    assert len(Recorder.passes) == 4
    assert all((NOBODY,) not in seen for seen in Recorder.passes)


def test_embedded_prompts_have_positions_but_no_ids(model):
    embeds = model.get_input_embeddings()(IDS)
    outputs = model.generate(inputs_embeds=embeds, attention_mask=MASK, **GREEDY).tolist()
    prompt = [token if token == (NOBODY,) else (token[0], -1, *token[2:]) for token in prompt_pass()]
    assert Recorder.passes == [prompt, *decode_passes(outputs, 3)]
    assert Recorder.admitted == [(0, 0, [-1] * 2), (1, 0, [-1] * 5)]


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 2, "prefill_chunk_size": 2}], ids=str)
def test_beams_are_shown_from_their_beginning_each_time(options, model):
    """A plugin that gathers in ``step`` may rely on it: admitted anew, then all tokens of the sequence, once."""
    model.generate(IDS, attention_mask=MASK, **GREEDY, **options)
    beams = options["num_beams"]
    whole = [seen for seen in Recorder.passes if len(seen) >= 2 * beams * 5]
    # before and after each of the four forward passes; in chunks, no pass holds the whole prompts before the first logits
    assert len(whole) == (7 if "prefill_chunk_size" in options else 8)
    admitted = [slot for slot, mark, _ in Recorder.admitted if mark is not None]
    assert admitted == list(range(2 * beams)) * 8  # at first, and before all passes but the one over the prompts
    for seen in whole:
        width = len(seen) // (2 * beams)
        for row in range(2 * beams):
            tokens, prompt = seen[row * width : (row + 1) * width], SHORT if row < beams else LONG
            pads = 5 - len(prompt)
            assert tokens[:pads] == [(NOBODY,)] * pads
            assert [t[1] for t in tokens[pads:5]] == prompt
            assert [t[0] for t in tokens[pads:]] == [row] * (width - pads)
            assert [t[2] for t in tokens[pads:]] == list(range(width - pads))
            assert [t[3] for t in tokens[pads:]] == list(range(-len(prompt), width - 5))


def test_drafts_are_shown_from_their_beginning_each_time(model):
    prompt = [*LONG, *[60, 61, 62] * 4]
    result = model.generate(torch.tensor([prompt]), **GREEDY | {"max_new_tokens": 12}, prompt_lookup_num_tokens=3)
    plain = model.generate(torch.tensor([prompt]), **GREEDY | {"max_new_tokens": 12}, steer="off")
    assert torch.equal(result, plain)
    for seen in Recorder.passes:
        assert [t[2] for t in seen] == list(range(len(seen)))
        assert [t[1] for t in seen[: len(prompt)]] == prompt
    assert max(map(len, Recorder.passes)) > len(prompt) + 2
