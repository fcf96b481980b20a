"""Entry point of the group ``vllm.general_plugins``: vLLM calls :func:`register` once in every process it starts."""

from __future__ import annotations

import sys
from typing import Any

WORKER_BASE = "vllm.v1.worker.worker_base"
"""Imported before plugins are loaded in processes that only run a worker."""


def register() -> None:
    """Install the hooks of this process. Light, and safe to call again.

    In a front end everything hangs on ``EngineArgs.create_model_config``, whose module is loaded already and which runs
    before the rest is built; an engine core, which may hold the worker too, and a worker have hooks of their own.
    """
    from llm_steer.hosts.vllm import admission, compat

    compat.install(compat.CONFIG, admission.around_create_model_config)
    if compat.CORE.module in sys.modules:
        install_core()
    elif WORKER_BASE in sys.modules:
        install_worker()


def install_core() -> None:
    """The hooks of an engine core."""
    from llm_steer.hosts.vllm import admission, cache, compat

    compat.install(compat.CORE, admission.around_preprocess_add_request)
    cache.install()
    install_worker()


def install_worker() -> None:
    """The hook of a worker; those of its model runner follow when there is one."""
    from llm_steer.hosts.vllm import artifacts, compat, trace, worker

    if compat.install(compat.WORKER, worker.around_load_model):
        owner: Any = sys.modules[compat.WORKER.module]
        for method in (artifacts.llm_steer_artifacts, trace.llm_steer_traces):
            setattr(owner.Worker, method.__name__, method)
