"""Words, markers and step delimiters against what the tokenizers themselves decode."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import core_tokenizers
from core_oracles import CPU, facts, long, spelled, states, token_of
from core_tokenizers import MARKERS, WORDS
from llm_steer import SteerError
from llm_steer.markers import SpelledMarker
from llm_steer.tokens import Vocabulary
from llm_steer.tracking import Tracker

R1 = Path(__file__).parents[2] / "shared" / "data" / "tokenizers" / "deepseek-r1-distill-qwen"

KINDS = ["byte_level", "byte_level_prefix", "llama", "gemma", "unigram", "word_level", "slow", "of_bytes"]
ANY_TEXT = [kind for kind in KINDS if kind != "word_level"]
"""Those that can spell any text."""


def tokenizer_of(kind: str, *added: str):
    if kind == "byte_level_prefix":
        return core_tokenizers.byte_level(*added, add_prefix_space=True)
    return getattr(core_tokenizers, kind)(*added)


@cache
def vocabulary_of(kind: str, *added: str, **kwargs) -> Vocabulary:
    tokenizer = tokenizer_of(kind, *added)
    return Vocabulary(tokenizer, kwargs.pop("size", len(tokenizer)), **kwargs)


def text_behind_text(tokenizer, token: int) -> str:
    """What an id adds to a text, by decoding."""
    before = tokenizer.encode("a", add_special_tokens=False)
    return tokenizer.decode([*before, token])[len(tokenizer.decode(before)) :]


# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_is_the_one_piece_that_decodes_to_it(kind):
    tokenizer = tokenizer_of(kind, *(() if kind == "of_bytes" else ("Wait!", "ｗａｉｔ")))
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    spells: dict[str, set[int]] = {}
    for i in range(len(tokenizer)):
        spells.setdefault(text_behind_text(tokenizer, i), set()).add(i)
        if kind == "word_level":  # where a word's place does not show in its piece
            spells.setdefault(tokenizer.decode([i]), set()).add(i)
    forms = [f for w in (*WORDS, "Wait!", "ｗａｉｔ", "nothing", "wai", "Ġwait", "▁wait", "Ã©", "é") for f in (w, f" {w}")]
    for form in forms:
        token = vocabulary.piece(form)
        assert (token in spells[form]) if form in spells else (token is None), form
    assert any(vocabulary.piece(form) is not None for form in forms)


if_r1 = pytest.mark.skipif(not R1.is_dir(), reason="needs the R1-Distill-Qwen tokenizer in ../shared/data")


@pytest.fixture(scope="module")
def r1() -> Vocabulary:
    from transformers import AutoTokenizer

    return Vocabulary(AutoTokenizer.from_pretrained(R1), 152_064)


@if_r1
def test_the_words_of_the_reference_on_r1_distill_qwen(r1):
    words = ["wait", "Wait", "but", "But", "Alternatively"]
    bare = r1.words(words)
    assert bare.ids == [11489, 14190, 8088, 3983, 92014]
    assert bare.skipped == []
    both = r1.words(words, leading_space=True)
    assert both.ids == [11489, 3783, 14190, 13824, 8088, 714, 3983, 1988, 92014, 38478]
    assert [form for form, _ in both.matched][:4] == ["wait", " wait", "Wait", " Wait"]
    assert r1.words(["Hmm"], leading_space=True).ids == [80022, 88190]


@if_r1
def test_a_word_of_two_pieces_on_r1_distill_qwen(r1):
    skip = r1.words(["alternatively"], leading_space=True)
    assert skip.matched == [(" alternatively", 68387)]
    assert skip.skipped == ["alternatively"]
    assert skip.first_pieces == []
    first = r1.words(["alternatively"], multi_piece="first")
    pieces = r1.tokenizer.encode("\nalternatively", add_special_tokens=False)[1:]
    assert len(pieces) == 2
    assert first.ids == pieces[:1]
    assert first.first_pieces == [("alternatively", pieces[0])]
    assert first.skipped == []


@if_r1
def test_markers_and_delimiters_on_r1_distill_qwen(r1):
    markers = r1.markers(boundaries=True)
    assert (markers.openers, markers.closers) == (((151648,),), ((151649,),))
    assert r1.has_think_markers
    assert r1.marker("</think>") == ((151649,),)
    assert markers.blank_line is not None
    assert {271, 382} <= set(r1.step_delimiters)  # "\n\n", ".\n\n"
    assert markers.blank_line.shape == (152_064,)
    decoded = r1.tokenizer.batch_decode([[i] for i in range(0, 151_000, 7)])
    assert markers.blank_line[:151_000:7].tolist() == ["\n\n" in text for text in decoded]


@if_r1
def test_non_ascii_words_on_r1_distill_qwen(r1):
    """The character é alone spells a single byte there, which is not é."""
    assert r1.tokenizer.decode([r1.piece("é")]) == "é"
    assert r1.tokenizer.decode([r1.piece("等等")]) == "等等"


# ----------------------------------------------------------------------------------------------------------------------


def test_forms_are_tried_in_order_and_ids_are_there_once():
    vocabulary = vocabulary_of("byte_level")
    match = vocabulary.words(["but", "But", "but"], leading_space=True, ignore_case=True)
    assert [form for form, _ in match.matched] == [
        form for form in ("but", " but", "But", " But", "BUT", " BUT") if form not in match.skipped
    ]
    assert {"but", " but"} <= {form for form, _ in match.matched}
    assert match.ids == list(dict.fromkeys(match.ids))
    assert match.ids == [token for _, token in match.matched]
    spelled_out = vocabulary.words(["but", " but", "But", " But", "BUT", " BUT"])
    assert set(spelled_out.ids) == set(match.ids)


def test_a_word_with_a_space_keeps_it_in_every_case():
    vocabulary = vocabulary_of("byte_level")
    match = vocabulary.words([" wait"], ignore_case=True, leading_space=True)
    assert [form for form, _ in match.matched] + match.skipped == [" wait", " Wait", " WAIT"]


@pytest.mark.parametrize("kind", ANY_TEXT)
def test_the_first_piece_is_what_the_text_begins_with(kind):
    vocabulary = vocabulary_of(kind)
    words = ["nothing", "whereas", "thinking"]
    skipped = vocabulary.words(words, leading_space=True)
    assert skipped.ids == []
    assert len(skipped.skipped) == 6
    first = vocabulary.words(words, leading_space=True, multi_piece="first")
    assert first.first_pieces
    for form, token in first.first_pieces:
        text = vocabulary.tokenizer.decode([token])
        assert form.strip().startswith(text.strip())
        assert text.strip(), "a mere space begins every word"
    assert {form for form, _ in first.first_pieces} | set(first.skipped) == {f for w in words for f in (w, f" {w}")}
    assert first.matched == first.first_pieces


def test_words_that_begin_with_the_same_piece_give_its_id_once():
    vocabulary = vocabulary_of("byte_level")
    match = vocabulary.words(["waits", "waiting"], multi_piece="first")
    assert match.first_pieces == [("waits", match.ids[0]), ("waiting", match.ids[0])]
    assert len(match.ids) == 1


@pytest.mark.parametrize("word", ["", " ", "\n", "\t  "])
def test_a_word_needs_a_visible_character(word):
    with pytest.raises(SteerError, match=r"^words: got .*; must be words with at least one visible character"):
        vocabulary_of("byte_level").words(["wait", word])


def test_ids_beyond_the_logits_are_refused():
    vocabulary = vocabulary_of("byte_level", size=300)
    beyond = max(vocabulary.pieces.values())
    with pytest.raises(
        SteerError, match=rf"^ids: got {beyond}; must be a token id between 0 and 299, the width of the logits"
    ):
        vocabulary.check_ids([1, beyond], "ids")
    with pytest.raises(SteerError, match=r"got -1;"):
        vocabulary.check_ids([-1], "ids")
    vocabulary.check_ids([0, 299], "ids")
    word = next(w for w in WORDS if (vocabulary.piece(w) or 0) >= 300)
    with pytest.raises(SteerError, match=rf"^words \('{word}'\): got {vocabulary.piece(word)}; .* between 0 and 299"):
        vocabulary.words([word])


def test_logits_wider_or_narrower_than_the_tokenizer():
    for size in (300, 1000):
        markers = vocabulary_of("byte_level", size=size).markers(boundaries=True)
        assert markers.blank_line is not None
        assert markers.blank_line.shape == (size,)


# ----------------------------------------------------------------------------------------------------------------------


@cache
def tracker_of(vocabulary: Vocabulary) -> Tracker:
    return Tracker(vocabulary.markers(boundaries=True), 2, CPU)


def follow(vocabulary: Vocabulary, ids: list[int], prompt_len: int = 0) -> list[tuple[int, bool, int, bool]]:
    tracker = tracker_of(vocabulary)
    tracker.admit(0, long(*ids[:prompt_len]), long())
    output = ids[prompt_len:]
    return facts(tracker.advance(long(*output), long(*[0] * len(output)), prompt_len + torch.arange(len(output))))


def check_against_the_text(vocabulary: Vocabulary, ids: list[int], prompt_len: int = 0) -> None:
    """The think state is what a search of the decoded text says."""
    before = vocabulary.tokenizer.encode("a", add_special_tokens=False)

    def text_of(part) -> str:
        return vocabulary.tokenizer.decode([*before, *part])

    of = states(ids, prompt_len, spelled(vocabulary.think_open, text_of), spelled(vocabulary.think_close, text_of))
    expected = [token_of(of[p], p, prompt_len) for p in range(prompt_len, len(ids))]
    assert follow(vocabulary, ids, prompt_len) == expected, text_of(ids)


SNIPPETS = [
    *MARKERS,
    *MARKERS,
    "\n",
    "\n\n",
    " ",
    ".",
    "(",
    ")",
    '"',
    ">",
    "<",
    "</",
    "/",
    "think",
    "th",
    "a",
    "x>",
    "Wait",
    "4",
]
TEXT = st.lists(st.sampled_from(SNIPPETS), min_size=1, max_size=9).map("".join)


@pytest.mark.parametrize("kind", ANY_TEXT)
def test_a_marker_is_found_between_any_neighbours(kind):
    """Exhaustive over what can stand before and behind, where pieces may swallow a part of the marker."""
    vocabulary = vocabulary_of(kind)
    assert isinstance(vocabulary.markers().closers, SpelledMarker)
    around = ["", "\n", "\n\n", ".\n", ">", "<", ".", '"', "(", "a", " ", "x>\n", "</", "/", "think"]
    found = 0
    for marker in MARKERS:
        for before in around:
            for after in around:
                ids = vocabulary.tokenizer.encode(f"4 {before}{marker}{after} 4", add_special_tokens=False)
                _, thinking, since, ended = follow(vocabulary, ids)[-1]
                assert (thinking, since >= 0, ended) == (marker == "<think>", marker == "<think>", marker == "</think>")
                found += 1
    assert found == 450


@pytest.mark.parametrize("kind", ANY_TEXT)
@given(text=TEXT, share=st.floats(0, 1))
@example(text="<think>\n</think>\n\n<think>", share=0.2)
@settings(max_examples=40, deadline=None)
def test_the_think_state_is_that_of_the_text(kind, text, share):
    vocabulary = vocabulary_of(kind)
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False)
    check_against_the_text(vocabulary, ids, int(share * len(ids)))


@pytest.mark.parametrize("kind", ["byte_level", "slow", "gemma", "of_bytes"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_think_state_is_that_of_the_text_for_ids_no_tokenizer_would_write(kind, data):
    """A model may spell a marker with any pieces."""
    vocabulary = vocabulary_of(kind)
    texts = {i: text_behind_text(vocabulary.tokenizer, i) for i in range(len(vocabulary.tokenizer))}
    useful = [i for i, text in texts.items() if text and text.isascii() and set(text) <= set("<>/think\n.")]
    whole = "".join(data.draw(st.lists(st.sampled_from(["<think>", "</think>", ".", "<", "\n"]), min_size=1, max_size=5)))
    ids: list[int] = []
    while whole:
        ids.append(data.draw(st.sampled_from([i for i in useful if whole.startswith(texts[i])])))
        whole = whole[len(texts[ids[-1]]) :]
    ids[0:0] = data.draw(st.lists(st.sampled_from(useful), max_size=3))
    # Where one piece holds the ends of two markers, the order of the two is not kept.
    if not any(text.count(">") > 1 for text in map(texts.get, ids)):
        check_against_the_text(vocabulary, ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "of_bytes"])
def test_an_added_marker_is_one_id_and_no_other_spelling(kind):
    vocabulary = vocabulary_of(kind, *MARKERS)
    opener, closer = (vocabulary.tokenizer.convert_tokens_to_ids(marker) for marker in MARKERS)
    markers = vocabulary.markers()
    assert (markers.openers, markers.closers) == (((opener,),), ((closer,),))
    assert vocabulary.has_think_markers
    assert vocabulary.marker("<think>") == ((opener,),)


def test_markers_that_decode_to_nothing():
    tokenizer = core_tokenizers.Discreet()
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    assert vocabulary.has_think_markers
    ids = tokenizer.encode("4 <think>\nWait</think>4", add_special_tokens=False)
    trail = [(thinking, ended) for _, thinking, _, ended in follow(vocabulary, ids)]
    assert list(dict.fromkeys(trail)) == [(False, False), (True, False), (False, True)]
    assert vocabulary.words(["Wait"], leading_space=True).ids == [tokenizer.get_vocab()[w] for w in ("Wait", " Wait")]
    assert tokenizer.decode([vocabulary.piece("é") or 0]) == "é"


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "of_bytes"])
def test_other_markers(kind):
    """Also of other scripts, in pieces that are no whole characters."""
    markers = ("◁think▷", "◁/think▷")
    vocabulary = vocabulary_of(kind, think_markers=markers)
    ids = vocabulary.tokenizer.encode("4 ◁think▷\nWait◁/think▷4", add_special_tokens=False)
    trail = [(thinking, ended) for _, thinking, _, ended in follow(vocabulary, ids)]
    assert list(dict.fromkeys(trail)) == [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize("kind", ANY_TEXT)
def test_step_delimiters_are_those_of_the_text(kind):
    vocabulary = vocabulary_of(kind, *(() if kind == "of_bytes" else (".\n\n",)))
    tokenizer = vocabulary.tokenizer
    texts = [text_behind_text(tokenizer, i) for i in range(len(tokenizer))]
    assert vocabulary.step_delimiters == [i for i, text in enumerate(texts) if "\n\n" in text]
    assert vocabulary.step_delimiters or kind == "of_bytes"
    markers = vocabulary.markers(boundaries=True)
    assert markers.ends_in_newline is not None
    assert markers.starts_with_newline is not None
    assert markers.ends_in_newline.tolist() == [text.endswith("\n") for text in texts]
    assert markers.starts_with_newline.tolist() == [text.startswith("\n") for text in texts]


@pytest.mark.parametrize("kind", ANY_TEXT)
@given(parts=st.lists(st.sampled_from(["\n", "\n\n", "Wait", ". ", " ", "x", ".\n\n"]), min_size=1, max_size=10))
@settings(max_examples=25, deadline=None)
def test_every_blank_line_of_a_text_is_a_boundary(kind, parts):
    """Of one token or of two, at the token that completes it; "\\n\\n\\n" as three tokens completes two."""
    vocabulary = vocabulary_of(kind)
    ids = vocabulary.tokenizer.encode("".join(parts), add_special_tokens=False)
    tracker = tracker_of(vocabulary)
    tracker.admit(0, long(), long())
    seen = tracker.advance(long(*ids), long(*[0] * len(ids)), torch.arange(len(ids))).boundary.tolist()
    texts = [text_behind_text(vocabulary.tokenizer, i) for i in ids]
    for n, text in enumerate(texts):
        reaches_back = texts[n - 1][-1:] if n else ""
        assert seen[n] == ("\n\n" in reaches_back + text)
    if "\n\n" in "".join(texts):
        assert any(seen)


def test_markers_without_boundaries_take_no_table():
    markers = vocabulary_of("byte_level", *MARKERS).markers()
    assert markers.blank_line is markers.ends_in_newline is markers.starts_with_newline is None


def test_words_of_a_whole_sentencepiece_model(tmp_path):
    """The sentencepiece library's own model, without the tokenizers library in between."""
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(line.replace("\n", " ") for line in core_tokenizers.CORPUS), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(tmp_path / "m"), vocab_size=420, byte_fallback=True, minloglevel=2,
        user_defined_symbols=["<think>"], hard_vocab_limit=False,
    )  # fmt: skip
    from transformers import SentencePieceBackend

    tokenizer = SentencePieceBackend(vocab_file=str(tmp_path / "m.model"), unk_token="<unk>")
    vocabulary = Vocabulary(tokenizer, len(tokenizer))
    inside = vocabulary.words(["Wait"], leading_space=True)
    assert (" Wait", tokenizer.convert_tokens_to_ids("▁Wait")) in inside.matched
    ids = tokenizer.encode("4. <think> Wait</think> 4", add_special_tokens=False)
    assert [facts_[1] for facts_ in follow(vocabulary, ids)][-1] is False
    assert any(thinking for _, thinking, *_ in follow(vocabulary, ids))
    assert follow(vocabulary, ids)[-1][3]
