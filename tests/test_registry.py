"""Plugins by name, from entry points that may be anything."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
from llm_steer.plugins.reflection_cycle import ReflectionCycle

from llm_steer import Params, Plugin, SteerError, registry


class Good(Plugin[Params]):
    name = "good"


class Nameless(Plugin[Params]):
    pass


class WithName(Params):
    name: str = "x"


class Clash(Plugin[WithName]):
    name = "clash"
    Params = WithName


class NoParams(Plugin[Params]):
    name = "no_params"
    Params = dict  # type: ignore[assignment]


@pytest.fixture
def installed(monkeypatch):
    """Replace the entry points; both caches are emptied before and after."""
    module = ModuleType("third_party")
    for thing in (Good, Nameless, Clash, NoParams):
        setattr(module, thing.__name__, thing)
    module.function = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "third_party", module)

    def install(**points: str) -> None:
        install_all([*points.items()])

    def install_all(points: list[tuple[str, str]]) -> None:
        found = [EntryPoint(name, value, registry.GROUP) for name, value in points]
        monkeypatch.setattr(registry, "entry_points", lambda group: found if group == registry.GROUP else [])
        registry._entry_points.cache_clear()
        registry.get.cache_clear()

    install.all = install_all  # type: ignore[attr-defined]
    yield install
    monkeypatch.undo()
    registry._entry_points.cache_clear()
    registry.get.cache_clear()


def test_the_built_in_plugin_is_found_by_its_entry_point():
    assert "reflection_cycle" in registry.names()
    assert registry.is_plugin("reflection_cycle")
    assert not registry.is_plugin("Reflection_Cycle")
    assert registry.get("reflection_cycle") is ReflectionCycle


def test_names_are_sorted_and_classes_imported_on_use(installed):
    installed(good="third_party:Good", absent="not_there:Plugin")
    assert registry.names() == ["absent", "good"]
    assert registry.get("good") is Good


def test_an_unknown_name_is_told_what_there_is(installed):
    installed(good="third_party:Good", other="third_party:Good")
    with pytest.raises(SteerError) as caught:
        registry.get("Goood")
    assert str(caught.value) == "steer: got 'Goood'; must be one of good, other (did you mean 'good'?)"
    with pytest.raises(SteerError, match=r"^steer: got 'zzz'; must be one of good, other$"):
        registry.get("zzz")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("not_there:Plugin", r"'broken' \(not_there:Plugin\) cannot be imported: No module named 'not_there'"),
        ("third_party:Missing", r"'broken' \(third_party:Missing\) cannot be imported: .*Missing"),
        ("third_party:function", "third_party:function is registered as the steering plugin 'broken', but is no Plugin"),
        (
            "third_party:Good",
            "third_party:Good is registered as the steering plugin 'broken', but is no Plugin of that name",
        ),
        ("third_party:Nameless", "third_party:Nameless is registered as the steering plugin 'broken', but is no Plugin of"),
    ],
)
def test_a_broken_entry_point_says_which_package_it_is(installed, value, message):
    installed(broken=value)
    with pytest.raises(RuntimeError, match=message):
        registry.get("broken")


def test_parameters_that_could_not_be_asked_for(installed):
    installed(clash="third_party:Clash", no_params="third_party:NoParams")
    with pytest.raises(RuntimeError, match=r"Clash\.Params must not have a field 'name'"):
        registry.get("clash")
    with pytest.raises(RuntimeError, match=r"NoParams\.Params must be a subclass of llm_steer\.Params"):
        registry.get("no_params")


def test_one_name_is_one_plugin(installed):
    installed.all([("good", "third_party:Good"), ("good", "third_party:Good")])  # seen twice
    assert registry.get("good") is Good
    installed.all([("good", "third_party:Good"), ("good", "elsewhere:Good")])
    with pytest.raises(
        RuntimeError, match="two packages register a steering plugin 'good': third_party:Good and elsewhere:Good"
    ):
        registry.names()
