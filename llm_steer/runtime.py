"""What every host does in the same way: slots, tracking, and calling the plugins in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar

import torch

from llm_steer.errors import UnsupportedError
from llm_steer.markers import Markers
from llm_steer.plugin import Context, Plugin, Rows, Tokens
from llm_steer.spec import Spec
from llm_steer.tracking import Tracker, sampled_from

_T = TypeVar("_T", Tokens, Rows)


class Runtime:
    """The steered requests of one engine (or of one ``generate`` call).

    Args:
        context: sizes and device.
        markers: think markers and step delimiters of the model's tokenizer.
        declared: what plugins learn of the requests to come, resolved (see ``Context.declared``).
    """

    def __init__(self, context: Context, markers: Markers, declared: Spec = ()) -> None:
        self.context = context
        self._declared = declared
        self.tracker = Tracker(markers, context.num_slots, context.device)
        self._plugins: dict[str, Plugin[Any]] = {}
        self._layers: dict[str, frozenset[int]] = {}
        self._specs: dict[int, Spec] = {}
        self._passes: list[tuple[list[str], torch.Tensor | None]] | None = None
        self._no_ids = torch.empty(0, dtype=torch.int64, device=context.device)

    @property
    def steering(self) -> bool:
        """At least one slot steers. When it is False, hosts do nothing at all."""
        return bool(self._specs)

    @property
    def feedback(self) -> bool:
        """A plugin in use depends on what the model computed."""
        return any(steer.plugin.feedback for spec in self._specs.values() for steer in spec)

    @property
    def plugins(self) -> list[Plugin[Any]]:
        return list(self._plugins.values())

    def steers_any(self, slots: Iterable[int]) -> bool:
        """One of the slots steers."""
        return not self._specs.keys().isdisjoint(slots)

    def plugin(self, cls: type[Plugin[Any]]) -> Plugin[Any]:
        """The engine's instance of a plugin, built when it is first needed."""
        if cls.name not in self._plugins:
            declared = tuple(steer.params for steer in self._declared if steer.plugin is cls)
            self._plugins[cls.name] = cls(replace(self.context, declared=declared))
            self._layers[cls.name] = frozenset(self._plugins[cls.name].layers())
        return self._plugins[cls.name]

    def admit(self, slot: int, spec: Spec, prompt_ids: torch.Tensor, output_ids: torch.Tensor | None = None) -> None:
        """Give a slot to a request: an empty spec frees it.

        Args:
            prompt_ids: int64 ``[prompt_len]``.
            output_ids: int64, what the request generated before it was preempted.
        """
        if not spec:
            self.release(slot)
            return
        self.release(slot)  # if a plugin refuses the request, the slot is free
        params = {steer.name: steer.params for steer in spec}
        for steer in spec:
            self.plugin(steer.plugin)
        for name, plugin in self._plugins.items():
            plugin.admit(slot, params.get(name), prompt_ids)
        self.tracker.admit(slot, prompt_ids, output_ids if output_ids is not None else prompt_ids[:0])
        self._specs[slot] = spec
        self._passes = None

    def resume(self, slot: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """A request that kept its slot is fed again from some earlier position, as after a preemption: plugins go on with
        the state they have.

        Args:
            output_ids: int64, what it has generated; every id is real.
        """
        self.tracker.admit(slot, prompt_ids, output_ids)

    def release(self, slot: int) -> None:
        """The request has left the slot, or does not steer."""
        if self._specs.pop(slot, None):
            self._passes = None
            self.tracker.release(slot)
            for plugin in self._plugins.values():
                plugin.admit(slot, None, self._no_ids)

    def forward(self, ids: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, *, single: bool = False) -> Tokens:
        """Before a forward pass: track its tokens and let plugins see them.

        Args:
            ids, slot, position: int64 ``[num_tokens]``.
            single: every request feeds one token, as in plain decoding: faster. :meth:`logits` is faster again if it is
                given the same two tensors ``slot`` and ``position``.
        """
        tokens = self.tracker.advance(ids, slot, position, single=single)
        for plugin in self._plugins.values():
            plugin.step(tokens)
        return tokens

    @property
    def layers(self) -> list[int]:
        """The decoder layers that plugins asked for, in order."""
        return sorted(set[int]().union(*self._layers.values()))

    def behind(self, layer: int) -> list[Plugin[Any]]:
        """The plugins that asked for a layer, in the order in which they were built."""
        return [plugin for name, plugin in self._plugins.items() if layer in self._layers[name]]

    def residual(self, layer: int, hidden: torch.Tensor, tokens: Tokens) -> None:
        """Behind a layer, outside of graphs: let plugins change the residual stream, in place.

        Args:
            hidden: ``[num_tokens, hidden_size]``.
            tokens: from :meth:`forward`, on the device of ``hidden``.
        """
        for order, members in self._orders():
            part = tokens if members is None else _only(tokens, members.to(hidden.device), self.context.nobody)
            for name in order:
                if layer in self._layers[name]:
                    hidden += self._plugins[name].residual(layer, hidden, part)

    def logits(self, logits: torch.Tensor, slot: torch.Tensor, position: torch.Tensor, *, raw: bool | None = None) -> None:
        """After a forward pass: let plugins change the logits.

        Args:
            logits: float32 ``[num_rows, vocab_size]``.
            slot: int64 ``[num_rows]``.
            position: int64 ``[num_rows]``, position of the token that was fed at the row.
            raw: only the plugins that see raw logits, or only the others: for hosts that call the former before other masks.
        """
        rows = self.tracker.rows(slot, position)
        for order, members in self._orders():
            part = rows if members is None else _only(rows, members, self.context.nobody)
            for name in order:
                if raw is None or self._plugins[name].sees_raw_logits() is raw:
                    self._plugins[name].logits(logits, part)

    def _orders(self) -> list[tuple[list[str], torch.Tensor | None]]:
        """Sequences of plugins to call, each with the slots it is for (None: all).

        A request's plugins act in the order that it gave. One sequence serves all requests unless two of them want the
        same plugins the other way round.
        """
        if self._passes is None:
            given: dict[tuple[str, ...], list[int]] = {}
            for slot, spec in self._specs.items():
                given.setdefault(tuple(steer.name for steer in spec), []).append(slot)
            graph: dict[str, set[str]] = {}
            for names in given:
                for name, before in zip(names, (None, *names), strict=False):
                    graph.setdefault(name, set()).update({before} if before else ())
            try:
                self._passes = [(list(TopologicalSorter(graph).static_order()), None)]
            except CycleError:
                self._passes = []
                for names, slots in given.items():
                    members = torch.zeros(self.context.num_slots, dtype=torch.bool)
                    members[slots] = True
                    self._passes.append((list(names), members.to(self.context.device)))
        return self._passes

    def trace(self, slot: int, output_ids: torch.Tensor) -> dict[str, Any]:
        """What was done to a request that has ended and still owns its slot.

        Args:
            output_ids: int64, everything it generated, on the device.
        """
        count = len(output_ids)
        slots = torch.full((count,), slot, device=self.context.device)
        position = self.tracker.prompt_len[slot] + torch.arange(count, device=self.context.device)
        first = self.tracker.rows(slots[:1], position[:1] - 1)
        tokens = self.tracker.advance(output_ids, slots, position)
        rows = sampled_from(tokens, first)
        return {
            "tokens": count,
            "think_tokens": int((tokens.thinking & (tokens.think_position >= 0)).sum()),
            "replayed": False,
            "plugins": [
                {
                    "name": steer.name,
                    "params": steer.params.shown(),
                    **self.plugin(steer.plugin).finish(slot, tokens, rows),
                }
                for steer in self._specs.get(slot, ())
            ],
        }


def _only(items: _T, members: torch.Tensor, nobody: int) -> _T:
    """Tokens or rows as seen by the plugins of some slots: all others are nobody's."""
    mine = members[items.slot]
    changed = {"slot": torch.where(mine, items.slot, nobody)}
    if isinstance(items, Rows):
        changed["live"] = items.live & mine
    return replace(items, **changed)


def refuse_unknown_prompt(spec: Spec) -> None:
    """For a request whose prompt, or a part of it, comes without token ids.

    Raises:
        UnsupportedError: a plugin goes by them.
    """
    for steer in spec:
        if steer.params.needs_prompt_ids():
            raise UnsupportedError(
                f"{steer.name} goes by the prompt's tokens, such as one that opens a think span, and parts of this prompt "
                "have no ids: give token ids beside embeddings or a cache, count from the output (origin='output', where "
                "the method has it), or turn steering off"
            )


def replay(spec: Spec, markers: Markers, vocab_size: int, prompt_ids: list[int], output_ids: list[int]) -> dict[str, Any]:
    """The trace of one request, from its token ids alone, on the CPU.

    Complete for methods whose effect is a function of token ids; of others (``feedback``) it says what was asked for, and
    ``"measured": False``.
    """
    device = torch.device("cpu")
    runtime = Runtime(Context(num_slots=2, device=device, vocab_size=vocab_size), markers)
    prompt = torch.tensor(prompt_ids, dtype=torch.int64)
    runtime.resume(0, prompt, prompt[:0])
    runtime.admit(0, tuple(steer for steer in spec if not steer.plugin.feedback), prompt)
    trace = runtime.trace(0, torch.tensor(output_ids, dtype=torch.int64))
    replayed = {plugin["name"]: plugin for plugin in trace["plugins"]}
    plugins = [
        replayed.get(steer.name) or {"name": steer.name, "params": steer.params.shown(), "measured": False} for steer in spec
    ]
    return {**trace, "replayed": True, "plugins": plugins}
