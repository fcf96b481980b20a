"""SAEs of the Hugging Face hub: the few files of one folder, through its cache.

SAELens keeps each SAE in a folder of a repository (``cfg.json``, ``sae_weights.safetensors``), sparsify one for each hook
point (``cfg.json``, ``sae.safetensors``), Gemma Scope ``params.npz``. Names are the repository's and the folder's; SAELens'
table of releases has them as ``repo_id`` and ``path``.
"""

from __future__ import annotations

import re
from pathlib import Path

from llm_steer.errors import SteerError

FILES = ("cfg.json", "sae_weights.safetensors", "sae.safetensors", "params.npz")
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:/(?P<folder>[\w./=-]+?))?/?(?:@(?P<revision>[\w.-]+))?")


def is_hub_name(text: str) -> bool:
    """``OWNER/REPO``, ``OWNER/REPO/FOLDER``, each with or without ``@REVISION`` (a branch, tag or commit)."""
    match = _NAME.fullmatch(text)
    return match is not None and ".." not in text.split("/")


def download(name: str) -> Path:
    """The folder of an SAE, in the hub's cache.

    Raises:
        SteerError: it is neither on the hub nor in its cache, or the hub cannot be reached.
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    from huggingface_hub import snapshot_download

    folder = match["folder"] or ""
    patterns = [f"{folder}/{file}" if folder else file for file in FILES]
    try:
        cache = Path(snapshot_download(match["repo"], revision=match["revision"], allow_patterns=patterns))
    except (OSError, ValueError, RuntimeError) as error:  # of the hub: not found, offline, no connection
        reason = str(error).strip().split("\n")[0]
        valid = f"a folder here, or an SAE of the Hugging Face hub that can be reached or is in its cache ({reason})"
        raise SteerError("sae", name, valid) from error
    if not (cache / folder).is_dir():
        raise SteerError("sae", name, f"the name of a folder of {match['repo']} with {', '.join(FILES[:-1])} or {FILES[-1]}")
    return cache / folder
