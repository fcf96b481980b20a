"""Small tokenizers of every convention, trained here on a few lines."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, PythonBackend
from transformers.convert_slow_tokenizer import bytes_to_unicode

WORDS = ("wait", "Wait", "but", "But", "Alternatively", "café", "Hmm", "наоборот", "等等")
MARKERS = ("<think>", "</think>")

# Every word inside a line and at its start, and markers between all sorts of neighbours, so that odd pieces are learned.
_AROUND = ["", "\n", "\n\n", ".\n", ">", "<", ".", '"', "(", "a", " ", "x>\n"]
CORPUS = [
    *[f"{word}\n{word}, {word}.\n\n{word} {word.upper()} ({word})" for word in WORDS for _ in range(8)],
    *[f"{before}<{slash}think>{after}" for slash in ("", "/") for before in _AROUND for after in _AROUND],
    *[f"{before}</{before}>{before}\n" for before in ("b", "p", "li", ".", "\n") for _ in range(5)],
    "the answer is 4.\n\nThinking about it, I think so.\n",
] * 2


def _finished(tokenizer: Tokenizer, added: tuple[str, ...], **names: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@cache
def byte_level(*added: str, add_prefix_space: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2's and Qwen's convention."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=430, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer, added)


def _sentencepiece_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\n+"), "isolated"), pre_tokenizers.Metaspace(prepend_scheme="never")]
    )
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=460, show_progress=False, special_tokens=special, limit_alphabet=60)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = None
    return tokenizer


@cache
def llama(*added: str) -> PreTrainedTokenizerFast:
    """SentencePiece BPE with byte fallback; a space is put before a text, and dropped when it is decoded."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer, added, unk_token="<unk>")


@cache
def gemma(*added: str) -> PreTrainedTokenizerFast:
    """SentencePiece BPE that neither adds a space nor drops one."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(tokenizer, added, unk_token="<unk>")


@cache
def unigram(*added: str) -> PreTrainedTokenizerFast:
    """SentencePiece's unigram model behind Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=170, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>", max_piece_length=14
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _finished(tokenizer, added, unk_token="<unk>")


@cache
def word_level(*added: str) -> PreTrainedTokenizerFast:
    """Whole words, joined by spaces when they are decoded."""
    vocabulary = ["<unk>", "a", "the", "answer", ".", *WORDS, *MARKERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finished(tokenizer, added, unk_token="<unk>")


class Slow(PythonBackend):
    """A tokenizer in Python, without the tokenizers library: pieces are two characters or one."""

    def __init__(self, **names: Any) -> None:
        text = "\n".join(CORPUS)
        pairs = Counter(text[i : i + 2] for i in range(len(text) - 1))
        self._pieces = ["<unk>", *sorted(set(text)), *sorted(pair for pair, count in pairs.items() if count > 150)]
        self._id_of = {piece: i for i, piece in enumerate(self._pieces)}
        super().__init__(unk_token="<unk>", **names)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def get_vocab(self) -> dict[str, int]:
        return {**self._id_of, **self.get_added_vocab()}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        pieces = []
        while text:
            length = 2 if text[:2] in self._id_of else 1
            pieces.append(text[:length])
            text = text[length:]
        return pieces

    def _convert_token_to_id(self, token: str) -> int:
        return self._id_of.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return self._pieces[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


@cache
def slow(*added: str) -> Slow:
    tokenizer = Slow()
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return tokenizer


class OfBytes:
    """What tokenizers over tiktoken's files are like: the keys of the vocabulary are bytes, and none are told apart."""

    def __init__(self) -> None:
        self._inner = byte_level()
        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        self._vocabulary = {bytes(byte_of[c] for c in piece): i for piece, i in self._inner.get_vocab().items()}
        self.encode, self.decode, self.batch_decode = self._inner.encode, self._inner.decode, self._inner.batch_decode

    def get_vocab(self) -> dict[bytes, int]:
        return self._vocabulary

    def __len__(self) -> int:
        return len(self._vocabulary)


class Discreet:
    """What Mistral's own tokenizers are like: raw texts for keys, control tokens decode to nothing, none are told apart."""

    def __init__(self) -> None:
        self._inner = byte_level(*MARKERS)
        self.encode = self._inner.encode

    def get_vocab(self) -> dict[str, int]:
        return {self._inner.decode([i]): i for i in reversed(range(len(self)))}

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        control = self._inner.get_added_vocab().values()
        return self._inner.decode([i for i in ids if i not in control], **kwargs)

    def batch_decode(self, batch: list[list[int]], **kwargs: Any) -> list[str]:
        return [self.decode(ids, **kwargs) for ids in batch]

    def __len__(self) -> int:
        return len(self._inner)


@cache
def of_bytes() -> OfBytes:
    return OfBytes()
