"""The host's own logic is tested without an engine, and most of it without vLLM."""

from importlib.util import find_spec

import pytest

from llm_steer.hosts.vllm import compat


@pytest.fixture(autouse=True)
def _no_refusals_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM is not installed there is nothing to hook into, which is not what these tests are about."""
    if find_spec("vllm") is None:
        monkeypatch.setattr(compat, "refusals", lambda config: [])
