"""What imports bring with them: measured in a fresh interpreter, by module, never by time."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CORE = ("plugin", "tracking", "tokens", "spec", "runtime", "slots", "registry", "errors", "formats")


def loaded_by(code: str) -> set[str]:
    """Names of all modules that are loaded after ``code`` has run."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


def below(package: str, modules: set[str]) -> set[str]:
    return {name for name in modules if name == package or name.startswith(f"{package}.")}


@pytest.fixture(scope="module")
def nothing() -> set[str]:
    """What an interpreter has anyway (site packages may start something)."""
    return loaded_by("")


def test_the_package_alone_loads_nothing_of_weight(nothing):
    added = loaded_by("import llm_steer; llm_steer.__version__; dir(llm_steer)") - nothing
    assert below("llm_steer", added) == {"llm_steer"}
    for heavy in ("torch", "transformers", "tokenizers", "vllm", "pydantic", "numpy", "yaml", "typer", "rich"):
        assert not below(heavy, added), heavy


def test_the_core_and_a_plugin_load_no_engine_and_no_model(nothing):
    code = f"""
import llm_steer.{", llm_steer.".join(CORE)}
from llm_steer import registry, spec
assert registry.is_plugin("reflection_cycle") and not spec.parse("off")
assert "llm_steer.plugins" not in sys.modules, "a plugin is loaded when it is named"
assert spec.parse("reflection_cycle", {{"amplitude": 3}})
"""
    added = loaded_by(code) - nothing
    assert "llm_steer.plugins.reflection_cycle.plugin" in added
    for heavy in ("vllm", "transformers", "tokenizers", "accelerate", "matplotlib", "rich", "typer"):
        assert not below(heavy, added), heavy
    for part in ("llm_steer.hosts", "llm_steer.cli", "llm_steer.engines", "llm_steer.eval"):
        assert not below(part, added), part


def test_names_load_their_home_on_first_use(nothing):
    added = loaded_by("from llm_steer import Plugin, SteerError, Params") - nothing
    assert not below("torch", added)
    assert not below("transformers", added)
