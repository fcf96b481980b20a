"""Artifacts at run time, under ``/v1/steer/artifacts``: what requests may name, and what workers hold of it.

Names are those of the operator's folder (:data:`~llm_steer.hosts.vllm.declared.FOLDER`); the front end turns them into
content hashes, and workers read by hash when a request first needs one. Nothing is kept in a front end: several of them in
front of one engine say the same.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from llm_steer.artifact import HASH
from llm_steer.bank import VectorBank
from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.hosts.vllm import declared

PATH = "/v1/steer/artifacts"
LOAD, UNLOAD = f"{PATH}/load", f"{PATH}/unload"


async def answer(method: str, path: str, body: bytes, client: Any, front_end: Any) -> tuple[int, Any] | None:
    """Status and JSON; None for what is not here.

    Args:
        client: vLLM's engine client.
        front_end: the :class:`~llm_steer.hosts.vllm.admission.Admission` of this process.

    Raises:
        SteerError: no such artifact.
        UnsupportedError: it is in use.
    """
    if (method, path) == ("GET", PATH):
        return 200, {"artifacts": await asyncio.to_thread(_listed, front_end.shelf), "held": await _held(client)}
    if method == "POST" and path in (LOAD, UNLOAD):
        name = _name(body)
        if front_end.shelf is None:
            raise UnsupportedError(
                f"no artifacts can be used here: start the engine with a plugin that does, and {declared.FOLDER}"
            )
        artifact, warnings = front_end.shelf.find(name, None)
        key = HASH + artifact.content_hash
        said = await client.collective_rpc(METHOD, args=("load" if path == LOAD else "unload", key))
        if problem := next((text for text in said if isinstance(text, str)), None):
            raise UnsupportedError(problem)
        return 200, {"name": name, "hash": key, "method": artifact.description.method, "warnings": warnings}
    return None


def _listed(shelf: Any) -> list[dict[str, Any]]:
    rows = []
    for name in shelf.names() if shelf is not None else ():
        try:
            artifact, warnings = shelf.find(name, None)
            if "vector" in artifact.tensors:
                artifact.vector()  # refused if it is of another size
        except SteerError as error:
            rows.append({"name": name, "refused": str(error)})
            continue
        about = artifact.description
        rows.append(
            {
                "name": name,
                "hash": HASH + artifact.content_hash,
                "method": about.method,
                "layer": about.layer,
                "site": about.site,
                "warnings": warnings,
            }
        )
    return rows


async def _held(client: Any) -> dict[str, int]:
    """Keys of the vectors on the device, with how many requests use each; rank 0 speaks for all."""
    held: dict[str, int] = (await client.collective_rpc(METHOD, args=("held", "")))[0]
    return held


def _name(body: bytes) -> str:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        request = None
    name = request.get("name") if isinstance(request, dict) else None
    if not isinstance(name, str) or set(request) != {"name"}:
        raise SteerError("body", body.decode(errors="replace"), '{"name": ...}, the name of an artifact')
    return name


# -- worker --------------------------------------------------------------------------------------------------------------

METHOD = "llm_steer_artifacts"
"""Of vLLM's worker, for ``collective_rpc``."""


def llm_steer_artifacts(worker: Any, action: str, key: str) -> Any:
    """Load or unload a vector in the banks of this worker's plugins, or say what they hold.

    Returns:
        What went wrong, as a text, or None; for ``"held"`` a mapping. An exception would be logged as the worker's.
    """
    steering = worker.model_runner.llm_steer
    steering.forget()  # what ended does not use anything
    plugins = steering.plugins
    banks = [plugin.bank for plugin in plugins if isinstance(getattr(plugin, "bank", None), VectorBank)]
    held: dict[str, int] = {}
    try:
        for bank in banks:
            if action == "load":
                bank.load(key, lambda: _vector(plugins[0].context.shelf, key))
            elif action == "unload":
                bank.unload(key)
            for name, count in bank.loaded.items():
                held[name] = held.get(name, 0) + count
    except (SteerError, UnsupportedError) as error:
        return str(error)
    return held if action == "held" else None


def _vector(shelf: Any, key: str) -> Any:
    return shelf.open(key, None).vector()
