"""Requests whose outputs arrive in any portions, each followed by drafts that are rejected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from core_oracles import Ids, long
from llm_steer.runtime import Runtime


def in_portions(
    runtime: Runtime, requests: Sequence[tuple[Any, Ids, Ids]], ids: st.SearchStrategy[int], data: st.DataObject
) -> Iterator[list[int]]:
    """Feed them to a runtime that has admitted them to slots 0, 1, ...; after each pass, how much of each output is fed.

    Args:
        requests: anything, prompt and output of each.
        ids: what drafts are drawn from.
    """
    done = [0] * len(requests)
    while any(n < len(output) for n, (_, _, output) in zip(done, requests, strict=True)):
        fed = []
        for slot, (_, prompt, output) in enumerate(requests):
            part = list(output[done[slot] : done[slot] + data.draw(st.integers(0, 4))])
            drafts = data.draw(st.lists(ids, max_size=3))  # rejected: overwritten by what is fed next
            fed += [(token, slot, len(prompt) + done[slot] + n) for n, token in enumerate([*part, *drafts])]
            done[slot] += len(part)
        if fed:
            runtime.forward(*(long(*column) for column in zip(*fed, strict=True)))
        yield done
