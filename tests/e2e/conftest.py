"""Fixtures of the end-to-end tests. One engine runs at a time, and serves all tests in a row that want the same one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from e2e import tiny
from e2e.engine_client import RUNNERS, SHIMS, Child, Engine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


class Engines:
    """Starts engines; the one before is closed first."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._count = 0
        self._key: Any = None
        self._current: Child | None = None

    def get(self, model: Path, runner: str = "v1", *, hidden: bool = False, **options: Any) -> Engine:
        """An engine with these options: the current one if it has them.

        Args:
            runner: one of ``engine_client.SHIMS``.
            hidden: without the plugin.
            options: of ``Engine``.
        """
        shim = (*SHIMS[runner], *(("hide",) if hidden else ()))
        key = (model, shim, sorted(options.items(), key=lambda item: item[0]))
        if self._key != key or self._current is None or self._current.broken or self._current.process.poll() is not None:
            self.start(lambda log: Engine(model, log, shim=shim, **options))
            self._key = key
        assert isinstance(self._current, Engine)
        return self._current

    def start(self, make: Callable[[Path], Any]) -> Any:
        """Any other child, made with a file for its log."""
        self.close()
        self._count += 1
        self._current = make(self._logs / f"{self._count}.log")
        return self._current

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
        self._current = self._key = None


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    running = Engines(tmp_path_factory.mktemp("engines"))
    yield running
    running.close()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model of an architecture."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda architecture: tiny.build(architecture, folder / architecture))


@pytest.fixture(scope="session")
def llama(tiny_folder: Callable[[str], Path]) -> Path:
    return tiny_folder("llama")


@pytest.fixture(scope="session")
def oracle() -> Callable[[Path], Any]:
    """The oracle of a model."""
    import torch

    from e2e.oracle import Oracle

    torch.set_num_threads(1)
    return cache(Oracle)


@pytest.fixture(scope="session", params=list(RUNNERS))
def runner(request: pytest.FixtureRequest) -> str:
    """Each of the ways in which vLLM runs a model on this machine."""
    return str(request.param)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the embedded default model."""
    from llm_steer import default_model
    from llm_steer.errors import MissingDependencyError, UnsupportedError

    try:
        return default_model.ensure()
    except (MissingDependencyError, UnsupportedError) as error:
        pytest.skip(str(error))
