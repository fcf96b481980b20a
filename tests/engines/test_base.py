"""What an engine is made from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_steer.engines.base import Engine, Request
from llm_steer.engines.common import weights_identity
from llm_steer.errors import SteerError


@pytest.mark.parametrize(
    ("make", "field", "shown", "valid"),
    [
        (lambda model, _: Engine.from_vllm(5), "llm", "5", "vllm.LLM"),
        (lambda model, _: Engine.from_vllm("http://localhost:8000"), "llm", "localhost", "from_url"),
        (lambda model, _: Engine.from_vllm(model), "llm", "LlamaForCausalLM", "vllm.LLM"),
        (lambda _, tokenizer: Engine.from_hf(5, tokenizer), "model", "int", "transformers model"),  # type: ignore[arg-type]
        (lambda model, _: Engine.from_hf(model, "x"), "tokenizer", "'x'", "AutoTokenizer"),  # type: ignore[arg-type]
        (lambda model, tokenizer: Engine.from_hf(tokenizer, model), "tokenizer", "LlamaForCausalLM", "AutoTokenizer"),
        (lambda *_: Engine.from_url(5), "urls", "5", "a list"),  # type: ignore[arg-type]
        (lambda *_: Engine.from_url([5]), "urls", "5", "a list"),  # type: ignore[list-item]
        (lambda *_: Engine.from_url(None), "urls", "None", "a list"),  # type: ignore[arg-type]
        (lambda *_: Engine.from_url(()), "urls", "()", "a list"),
    ],
)
def test_what_no_engine_is_made_from_is_named(
    make: Callable[[Any, Any], Engine], field: str, shown: str, valid: str, tiny_model: Any, tiny_tokenizer: Any
) -> None:
    with pytest.raises(SteerError) as error:
        make(tiny_model(), tiny_tokenizer)
    assert error.value.field == field
    assert shown in str(error.value)
    assert valid in error.value.valid


@pytest.mark.parametrize("requests", [["hi"], [Request(prompt="hi"), {"prompt": "hi"}], [None]])
def test_a_batch_holds_requests(requests):
    class Deaf(Engine):
        def submit(self, requests):
            raise AssertionError("nothing is started")

        def identity(self):
            return {}

    with pytest.raises(SteerError, match=rf"requests\[{len(requests) - 1}\]: got .*; must be a Request"):
        Deaf().run(requests)


@pytest.mark.parametrize("size", [1000, 5 << 20])
def test_weights_changed_in_place_are_others(tmp_path: Path, size: int) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    before = weights_identity(tmp_path)
    assert weights_identity(tmp_path) == before
    file.write_bytes(bytes([1]) * size)
    assert weights_identity(tmp_path).keys() == before.keys() == {"weights"}
    assert weights_identity(tmp_path) != before
    assert weights_identity("owner/on-the-hub") == weights_identity("") == {}
