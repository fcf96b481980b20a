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


@pytest.mark.parametrize("module", CORE)
def test_no_part_of_the_core_loads_an_engine_or_a_model(module, nothing):
    added = loaded_by(f"import llm_steer.{module}") - nothing
    for heavy in ("vllm", "transformers", "tokenizers", "accelerate", "matplotlib", "rich", "typer"):
        assert not below(heavy, added), heavy
    assert not below("llm_steer.hosts", added)
    assert not below("llm_steer.cli", added)


def test_a_plugin_is_only_loaded_when_it_is_named(nothing):
    code = (
        "from llm_steer import registry, spec; registry.names(); registry.is_plugin('reflection_cycle'); spec.parse('off')"
    )
    assert not below("llm_steer.plugins", loaded_by(code))
    added = loaded_by("from llm_steer import spec; spec.parse('reflection_cycle', {'amplitude': 3})") - nothing
    assert "llm_steer.plugins.reflection_cycle.plugin" in added
    for heavy in ("vllm", "transformers", "tokenizers"):
        assert not below(heavy, added), heavy


def test_names_load_their_home_on_first_use(nothing):
    added = loaded_by("from llm_steer import Plugin, SteerError, Params") - nothing
    assert not below("torch", added)
    assert not below("transformers", added)


def test_steering_loads_no_model_of_transformers(nothing):
    added = loaded_by("from llm_steer import steer, unsteer, steering") - nothing
    assert not below("vllm", added)
    assert not below("transformers.models", added)
