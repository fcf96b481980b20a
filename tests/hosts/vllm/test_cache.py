"""Engine core: ids in stamps, and the keys by which the prefix cache tells steered blocks apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm_steer import Params, Plugin, registry
from llm_steer.hosts.vllm import admission, cache
from llm_steer.plugin import Tokens

BLOCK = 16


class Amount(Params):
    by: float = 1.0
    prompt: bool = False


class _Adds(Plugin[Amount]):
    Params: ClassVar = Amount

    @classmethod
    def first_steered(cls, params: Amount, prompt_len: int) -> int | None:
        return 0 if params.prompt else prompt_len - 1 if params.by else None

    def residual(self, layer: int, hidden: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return 0 * hidden


class Adds(_Adds):
    name = "adds"


class Loop(_Adds):
    name = "loop"
    feedback = True


class Words(Plugin[Amount]):
    name = "words"
    Params: ClassVar = Amount


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = {"adds": Adds, "loop": Loop, "words": Words}
    monkeypatch.setattr(registry, "get", plugins.__getitem__)
    monkeypatch.setattr(registry, "is_plugin", plugins.__contains__)


def identified(plugins: Any, prompt_len: int = 40, name: str = "r1", transfer: Any = None, salt: str | None = None) -> Any:
    arguments = {"other": 1, **({} if plugins is None else {admission.STAMP: {"plugins": plugins}})}
    request = SimpleNamespace(
        request_id=name,
        prompt_token_ids=[0] * prompt_len,
        prompt_embeds=None,
        sampling_params=SimpleNamespace(extra_args=arguments),
        cache_salt=salt,
    )
    cache.identify(request, SimpleNamespace(kv_transfer_config=transfer))
    return request


def keys(request: Any, count: int = 5, others: Any = None) -> list[Any]:
    """The extra keys of the request's blocks."""
    wrapped = cache._around_extra_keys(lambda request, start, end, mm: (others, mm + 1))
    found = [wrapped(request, i * BLOCK, (i + 1) * BLOCK, 7) for i in range(count)]
    assert all(mm == 8 for _, mm in found)
    return [k for k, _ in found]


def test_requests_that_do_not_steer_are_not_touched() -> None:
    for plugins in (None, []):
        request = identified(plugins)
        assert "id" not in (request.sampling_params.extra_args.get(admission.STAMP) or {})
        assert keys(request) == [None] * 5
        assert keys(request, others=(("lora", "a"),)) == [(("lora", "a"),)] * 5


def test_each_request_has_an_id_of_its_own() -> None:
    """Children of ``n`` outputs share their parameters."""
    shared = SimpleNamespace(extra_args={admission.STAMP: {"plugins": [["words", {}]]}})
    requests = [
        SimpleNamespace(request_id=name, prompt_token_ids=[1], prompt_embeds=None, sampling_params=shared, cache_salt=None)
        for name in ("0_a", "1_a")
    ]
    for request in requests:
        cache.identify(request, SimpleNamespace(kv_transfer_config=None))
    ids = [admission.read_stamp(request.sampling_params)["id"] for request in requests]  # type: ignore[index]
    assert ids == ["0_a", "1_a"]
    assert shared.extra_args == {admission.STAMP: {"plugins": [["words", {}]]}}


@given(st.integers(1, 75), st.booleans())
def test_the_key_is_in_the_block_that_is_steered_first(prompt_len: int, prompt: bool) -> None:
    found = keys(identified([["adds", {"prompt": prompt}]], prompt_len))
    first = 0 if prompt else (prompt_len - 1) // BLOCK
    assert [bool(k) for k in found] == [i == first for i in range(5)]


def test_who_shares() -> None:
    def key(plugins: Any, **options: Any) -> Any:
        return keys(identified(plugins, **options))[2]

    base = key([["adds", {"by": 2.0}]])
    assert key([["adds", {"by": 2.0}]], name="r2") == base
    assert key([["adds", {"by": 3.0}]]) != base
    loop = key([["loop", {"by": 2.0}]])
    assert loop != base
    assert key([["loop", {"by": 2.0}]], name="r2") != loop
    assert key([["words", {"by": 2.0}]]) is None
    assert key([["words", {}], ["adds", {"by": 2.0}]]) == base
    assert key([["adds", {"by": 0.0}]]) is None
    assert len(key([["loop", {"by": 2.0}], ["adds", {"by": 2.0}]])) == 2


def test_connectors_get_a_salt_for_the_whole_request() -> None:
    transfer = object()
    salts = [
        identified([["adds", {"by": 2.0}]], transfer=transfer, salt=salt, name=name).cache_salt
        for salt, name in ((None, "a"), (None, "b"), ("mine", "a"))
    ]
    assert salts[0] == salts[1] != salts[2]
    assert identified([["words", {}]], transfer=transfer, salt="mine").cache_salt == "mine"
    assert identified([["adds", {}]], salt="mine").cache_salt == "mine"
    loops = [identified([["loop", {}]], transfer=transfer, name=name).cache_salt for name in "ab"]
    assert loops[0] != loops[1]
