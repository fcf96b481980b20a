"""What every host does in the same way: slots, tracking, and calling the plugins in order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from llm_steer.plugin import Context, Plugin, Tokens
from llm_steer.spec import Spec
from llm_steer.tracking import Markers, Tracker, sampled_from


class Runtime:
    """The steered requests of one engine (or of one ``generate`` call).

    Args:
        context: sizes and device.
        markers: think markers and step delimiters of the model's tokenizer.
    """

    def __init__(self, context: Context, markers: Markers) -> None:
        self.context = context
        self.tracker = Tracker(markers, context.num_slots, context.device)
        self._plugins: dict[str, Plugin[Any]] = {}
        self._specs: dict[int, Spec] = {}
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
            self._plugins[cls.name] = cls(self.context)
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
        params = {steer.name: steer.params for steer in spec}
        for steer in spec:
            self.plugin(steer.plugin)
        # The order of a spec is the order of action; a plugin that is new here goes to the end.
        self._specs[slot] = spec
        self.tracker.admit(slot, prompt_ids, output_ids if output_ids is not None else prompt_ids[:0])
        for name, plugin in self._plugins.items():
            plugin.admit(slot, params.get(name), prompt_ids)

    def release(self, slot: int) -> None:
        """The request has left the slot, or does not steer."""
        if self._specs.pop(slot, None):
            self.tracker.release(slot)
            for plugin in self._plugins.values():
                plugin.admit(slot, None, self._no_ids)

    def forward(self, ids: torch.Tensor, slot: torch.Tensor, position: torch.Tensor) -> Tokens:
        """Before a forward pass: track its tokens and let plugins see them. All int64 ``[num_tokens]``."""
        tokens = self.tracker.advance(ids, slot, position)
        for plugin in self._plugins.values():
            plugin.step(tokens)
        return tokens

    def logits(self, logits: torch.Tensor, slot: torch.Tensor, position: torch.Tensor) -> None:
        """After a forward pass: let plugins change the logits.

        Args:
            logits: float32 ``[num_rows, vocab_size]``.
            slot: int64 ``[num_rows]``.
            position: int64 ``[num_rows]``, position of the token that was fed at the row.
        """
        rows = self.tracker.rows(slot, position)
        for plugin in self._plugins.values():
            plugin.logits(logits, rows)


def replay(spec: Spec, markers: Markers, vocab_size: int, prompt_ids: list[int], output_ids: list[int]) -> dict[str, Any]:
    """The trace of one request, from its token ids alone, on the CPU.

    Right for methods whose effect is a function of token ids (``feedback`` unset); the trace says that it was replayed.
    """
    device = torch.device("cpu")
    runtime = Runtime(Context(num_slots=2, device=device, vocab_size=vocab_size), markers)
    prompt = torch.tensor(prompt_ids, dtype=torch.int64)
    output = torch.tensor(output_ids, dtype=torch.int64)
    runtime.admit(0, spec, prompt)
    slot = torch.zeros(len(output), dtype=torch.int64)
    first = runtime.tracker.rows(slot[:1], torch.full((min(1, len(output)),), len(prompt) - 1))
    tokens = runtime.tracker.advance(output, slot, len(prompt) + torch.arange(len(output)))
    rows = sampled_from(tokens, first)
    return {
        "tokens": len(output),
        "think_tokens": int((tokens.thinking & (tokens.think_position >= 0)).sum()),
        "replayed": True,
        "plugins": [
            {
                "name": steer.name,
                "params": steer.params.model_dump(mode="json", exclude_unset=True),
                **runtime.plugin(steer.plugin).finish(0, tokens, rows),
            }
            for steer in spec
        ],
    }
