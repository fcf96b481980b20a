"""Every hook is checked against vLLM's source before it is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llm_steer.hosts.vllm import compat
from llm_steer.hosts.vllm.compat import Hook

SOURCE = """
def alone(args, app): return (args, app)

class Owner:
    def method(self, request, *, extra=None): return ("method", request)
    @classmethod
    def make(cls, request): return (cls.__name__, request)
    @staticmethod
    def plain(request): return request
    async def later(self, prompt): return prompt
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module of some other vLLM."""
    (tmp_path / "other_vllm.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    compat.check.cache_clear()
    yield "other_vllm"
    sys.modules.pop("other_vllm", None)
    compat.check.cache_clear()


@pytest.mark.parametrize(
    ("name", "parameters", "problem"),
    [
        ("alone", ("args", "app"), None),
        ("Owner.method", ("self", "request", "extra"), None),
        ("Owner.later", ("self", "prompt"), None),
        ("Owner.method", ("self", "params"), "params"),
        ("Owner.gone", ("self",), "gone does not exist"),
        ("Gone.method", ("self",), "Gone does not exist"),
        ("Owner.method.inner", ("self",), "inner does not exist"),
    ],
)
def test_check(module: str, name: str, parameters: tuple[str, ...], problem: str | None) -> None:
    found = compat.check(Hook(module, name, parameters, ""))
    assert found is None if problem is None else problem in str(found)
    assert module not in sys.modules, "the source is read, not run"


def test_check_runs_no_package_around_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "loud_vllm" / "v1"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    (inner / "core.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert compat.check(Hook("loud_vllm.v1.core", "alone", ("args",), "")) is None
    for gone in ("loud_vllm.v2.core", "loud_vllm.v1.core.inner"):
        assert "does not exist" in str(compat.check(Hook(gone, "alone", (), "")))


def test_check_of_a_module_that_is_gone() -> None:
    compat.check.cache_clear()
    assert "does not exist" in str(compat.check(Hook("no_such_vllm", "f", (), "")))
    assert "does not exist" in str(compat.check(Hook("no_such_vllm.inner", "f", (), "")))


def test_install_wraps_once_and_keeps_the_kind(module: str) -> None:
    def around(original: Any) -> Any:
        return lambda *args, **kwargs: ("wrapped", original(*args, **kwargs))

    for name in ("Owner.method", "Owner.make", "Owner.plain", "alone"):
        hook = Hook(module, name, (), "")
        assert not compat.installed(hook)
        assert compat.install(hook, around)
        assert compat.install(hook, around)
        assert compat.installed(hook)
    other: Any = importlib.import_module(module)
    assert other.Owner().method(1) == ("wrapped", ("method", 1))
    assert other.Owner.make(1) == ("wrapped", ("Owner", 1))
    assert other.Owner.plain(1) == ("wrapped", 1)
    assert other.alone(1, app=2) == ("wrapped", (1, 2))


def test_a_changed_place_is_left_alone(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = []
    monkeypatch.setattr(compat, "logger", lambda: SimpleNamespace(warning=lambda *args: warnings.append(args)))
    hook = Hook(module, "Owner.method", ("self", "renamed"), "")
    assert not compat.install(hook, lambda original: lambda *_: None)
    assert not compat.installed(hook)
    assert "renamed" in str(warnings)
    other: Any = importlib.import_module(module)
    assert other.Owner().method(1) == ("method", 1)


def config(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(runner_type="generate", is_diffusion=False),
        "parallel_config": SimpleNamespace(prefill_context_parallel_size=1),
        "speculative_config": None,
        "use_v2_model_runner": False,
    }
    return SimpleNamespace(**{**parts, **changes})


def test_a_changed_place_refuses_steering_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Hook("no_such_vllm", "EngineCore.moved", ("self",), "")
    monkeypatch.setattr(compat, "FRONT_END", (changed,))
    compat.check.cache_clear()
    reasons = compat.refusals(config())
    assert "no_such_vllm:EngineCore.moved" in reasons[0]
    assert "doctor" in reasons[0]


class TestInstalledVllm:
    """The vLLM that is installed has every place as we know it."""

    @pytest.fixture(autouse=True)
    def _vllm(self) -> None:
        pytest.importorskip("vllm")
        compat.check.cache_clear()

    def test_every_hook(self) -> None:
        assert [row for row in compat.report() if not row["active"]] == []

    def test_refusals(self) -> None:
        assert compat.refusals(config()) == []
        assert "--speculative-config" in compat.refusals(config(speculative_config=object()))[0]
        assert compat.refusals(config(speculative_config=object(), use_v2_model_runner=True)) == []
        parallel = SimpleNamespace(prefill_context_parallel_size=2)
        assert "prefill context" in compat.refusals(config(parallel_config=parallel))[0]
        pooling = SimpleNamespace(runner_type="pooling", is_diffusion=False)
        assert "pooling" in compat.refusals(config(model_config=pooling))[0]


def steering_config(**changes: Any) -> Any:
    """With all that residual hooks and closed loops ask for."""
    parallel = {
        "use_ubatching": False,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "enable_batch_sharded_sampling": None,
        **changes.pop("parallel", {}),
    }
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(is_encoder_decoder=False, get_total_num_hidden_layers=lambda: 8),
        "parallel_config": SimpleNamespace(**parallel),
        "cache_config": SimpleNamespace(kv_sharing_fast_prefill=False),
        "compilation_config": SimpleNamespace(pass_config=SimpleNamespace(enable_sp=False)),
        "kv_transfer_config": None,
        "speculative_config": None,
    }
    return SimpleNamespace(**{**parts, **changes})


def transfer(role: str, **changes: Any) -> Any:
    about = {"kv_role": role, "kv_connector": "OffloadingConnector", "kv_connector_extra_config": {}, **changes}
    return SimpleNamespace(**about)


def test_what_residual_hooks_refuse() -> None:
    assert compat.residual_refusals(steering_config()) == []
    assert compat.residual_refusals(steering_config(kv_transfer_config=transfer("kv_both"))) == []
    inner = {"connectors": [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "HF3FSKVConnector"}]}
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": inner}
    half = {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_producer"}]}
    split = {"kv_connector": "MultiConnector", "kv_connector_extra_config": half}
    for changes, word in (
        ({"parallel": {"use_ubatching": True}}, "--enable-dbo"),
        ({"cache_config": SimpleNamespace(kv_sharing_fast_prefill=True)}, "--kv-sharing-fast-prefill"),
        ({"compilation_config": SimpleNamespace(pass_config=SimpleNamespace(enable_sp=True))}, "enable_sp"),
        ({"kv_transfer_config": transfer("kv_producer")}, "different engines"),
        ({"kv_transfer_config": transfer("kv_consumer")}, "different engines"),
        ({"kv_transfer_config": transfer("kv_both", kv_connector="LMCacheConnectorV1")}, "LMCacheConnectorV1 finds keys"),
        ({"kv_transfer_config": transfer("kv_both", **multi)}, "HF3FSKVConnector finds keys"),
        ({"kv_transfer_config": transfer("kv_both", **split)}, "different engines"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder"),
    ):
        (reason,) = compat.residual_refusals(steering_config(**changes))
        assert word in reason


def test_what_closed_loops_refuse() -> None:
    assert compat.feedback_refusals(steering_config(), [0, 7]) == []
    (reason,) = compat.feedback_refusals(steering_config(speculative_config=object()), [0])
    assert "--speculative-config" in reason
    (reason,) = compat.feedback_refusals(steering_config(parallel={"enable_batch_sharded_sampling": True}), [0])
    assert "batch-sharded" in reason


def test_a_closed_loop_on_a_pipeline_rank_that_sees_no_logits() -> None:
    pytest.importorskip("vllm")
    config = steering_config(parallel={"pipeline_parallel_size": 2})
    assert compat.feedback_refusals(config, [4, 7]) == []
    (reason,) = compat.feedback_refusals(config, [3, 5])
    assert "[3]" in reason
    assert "from 4 on" in reason
