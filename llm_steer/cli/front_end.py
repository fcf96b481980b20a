"""What vLLM's front end will say of ``--steer``, a minute before it is there to say it.

The steering is resolved as it will be there, with the model's configuration and tokenizer, which transformers reads without
the weights. Where vLLM's options or the model are such that vLLM would read something else, nothing is refused: a note says
that vLLM comes to it.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llm_steer.cli.common import note, quiet_transformers
from llm_steer.errors import shorten_text

if TYPE_CHECKING:
    from llm_steer.spec import Spec

MODELSCOPE = "VLLM_USE_MODELSCOPE"
READ_OTHERWISE = ("--config", "--config-format", "--hf-overrides", "--tokenizer-mode")
"""Options of vLLM after which transformers alone reads another configuration or tokenizer."""
OWN_TOKENIZER = ("mistral", "ministral", "mixtral", "pixtral", "voxtral")
"""Beginnings of model types for which vLLM may use mistral-common, whose table of pieces has another hash."""


def read_otherwise(arguments: Sequence[str]) -> str | None:
    """Why vLLM may not read what transformers finds under the model's name; None if it does."""
    if os.environ.get(MODELSCOPE, "").strip().lower() in ("1", "true"):
        return f"{MODELSCOPE} is set"
    return next((name for name in map(_option, arguments) if name in READ_OTHERWISE), None)


def asks_hub(arguments: Sequence[str]) -> bool:
    """A model id means the newest revision of a repository on the Hugging Face hub."""
    return read_otherwise(arguments) is None and "--revision" not in map(_option, arguments)


def check(steers: Spec, model: str, label: str, arguments: Sequence[str]) -> None:
    """Raise for default steering that this model, its tokenizer, the artifacts or rules files do not allow.

    Args:
        steers: as ``--steer`` says it.
        model: what ``from_pretrained`` takes.
        label: what it is called.
        arguments: options of vLLM.

    Raises:
        SteerError: naming the parameter (``rebalance:artifact``), its value, and what would be valid.
    """
    reason = read_otherwise(arguments)
    if reason is None:
        quiet_transformers()
        try:
            config, tokenizer = _load(model, _read(arguments))
            width = int(config.get_text_config(decoder=True).vocab_size)
        except Exception as error:  # models that only vLLM can read, and whatever ends in an error of its own there
            text = " ".join(str(error).split())
            reason = f"transformers cannot read the model: {shorten_text(text or type(error).__name__)}"
    if reason is not None:
        note(f"Not checked before vLLM starts: what --steer says, against {label} ({reason}).")
        return

    from llm_steer.artifact import ModelIdentity, Shelf
    from llm_steer.hosts.vllm import declared
    from llm_steer.spec import resolve
    from llm_steer.tokens import Vocabulary

    vocabulary = None if tokenizer is None else Vocabulary(tokenizer, width)
    hashed = None if str(config.model_type).startswith(OWN_TOKENIZER) else tokenizer
    shelf = Shelf(ModelIdentity.of(config, tokenizer=hashed), declared.folder(), paths=True)
    for steer in steers:
        resolve((steer,), vocabulary, shelf if steer.plugin.steers_hidden_states() else None)


def _load(model: str, options: Namespace) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    # False rather than left out: transformers would ask whoever sits at the terminal.
    trust = options.trust_remote_code
    config = AutoConfig.from_pretrained(
        options.hf_config_path or model,
        revision=options.revision,
        trust_remote_code=trust,
        code_revision=options.code_revision,
    )
    if options.skip_tokenizer_init:
        return config, None
    tokenizer = AutoTokenizer.from_pretrained(
        options.tokenizer or model, revision=options.tokenizer_revision or options.revision, trust_remote_code=trust
    )
    return config, tokenizer


def _read(arguments: Sequence[str]) -> Namespace:
    """Those of vLLM's options that say which configuration and tokenizer it loads."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("tokenizer", "tokenizer-revision", "revision", "code-revision", "hf-config-path"):
        parser.add_argument(f"--{name}")
    for name in ("trust-remote-code", "skip-tokenizer-init"):
        parser.add_argument(f"--{name}", action="store_true")
    named = [(_option(argument), argument) for argument in arguments]
    return parser.parse_known_args([name + argument[len(name) :] for name, argument in named])[0]


def _option(argument: str) -> str:
    """The name of an option, as vLLM understands it: with dashes."""
    return argument.partition("=")[0].replace("_", "-") if argument.startswith("--") else ""
