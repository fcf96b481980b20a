"""The pieces of ``tiny_tokenizer``."""

VOCABULARY = 512
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<think>", "</think>", "\n\n"]
WORDS = ["wait", "Wait", "but", "But", "Alternatively", "Hmm", "so", "the", "is", "a", "one", "two", "three", "four"]
PAD, BOS, EOS, UNK, THINK, END_THINK, BLANK = range(len(SPECIAL))
REFLECTION = [len(SPECIAL) + i for i in range(5)]
"""Ids of the five words of the reference."""
