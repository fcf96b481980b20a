"""Entry point of the group ``vllm.general_plugins``: vLLM calls :func:`register` once in every process it starts."""

from __future__ import annotations

import sys


def register() -> None:
    """Install the hooks of this process. Light, and safe to call again.

    In a front end everything hangs on ``EngineArgs.create_model_config``, whose module is loaded already and which runs
    before the rest is built; an engine core only needs its own hook; a worker loads the logits processor by itself.
    """
    from llm_steer.hosts.vllm import admission, compat

    compat.install(compat.CONFIG, admission.around_create_model_config)
    if compat.CORE.module in sys.modules:
        compat.install(compat.CORE, admission.around_preprocess_add_request)
