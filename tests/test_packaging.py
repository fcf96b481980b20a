"""What an installation holds: everything that the folders hold."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"llm_steer": "llm_steer", **{name: f"llm_steer.{name}" for name in ("plugins", "prompts", "eval")}}


def test_every_folder_with_code_is_a_package_of_the_distribution():
    found = set()
    for folder, package in FOLDERS.items():
        for file in (ROOT / folder).rglob("*.py"):
            found.add(".".join([package, *file.parent.relative_to(ROOT / folder).parts]))
    assert found | {"llm_steer.prompts"} == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_file_beside_the_code_is_installed():
    data = {
        (ROOT / folder / part.replace(".", "/")).resolve()
        for folder, package in FOLDERS.items()
        for name, _ in PROJECT["tool"]["setuptools"]["package-data"].items()
        if name == package or name.startswith(package + ".")
        for part in [name.removeprefix(package).lstrip(".")]
    }
    for folder, package in FOLDERS.items():
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and file.suffix not in (".py", ".pyc") and "__pycache__" not in file.parts:
                owners = [parent for parent in file.parents if parent in data]
                assert any(_covers(owner, file, folder, package) for owner in owners), f"{file} is not in package-data"


def _covers(owner: Path, file: Path, folder: str, package: str) -> bool:
    name = ".".join([package, *owner.relative_to(ROOT / folder).parts])
    patterns = PROJECT["tool"]["setuptools"]["package-data"].get(name, [])
    relative = file.relative_to(owner)
    return any(relative.full_match(p) if hasattr(relative, "full_match") else _matches(relative, p) for p in patterns)


def _matches(path: Path, pattern: str) -> bool:
    """``**/`` at the start, for Python before 3.13."""
    rest = pattern.removeprefix("**/")
    return path.match(rest) and (pattern != rest or len(path.parts) == len(Path(pattern).parts))
