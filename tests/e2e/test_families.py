"""Every family of decoders: what is added behind a layer, and the stream that is read there, are Hugging Face's."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import residual, scenarios, tiny
from e2e.conftest import Engines
from e2e.oracle import Damp, Oracle, Push

PARAMS = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


@pytest.mark.parametrize("architecture", tiny.FAMILIES)
def test_the_stream_is_hugging_faces(
    engines: Engines,
    tiny_folder: Callable[[str], Path],
    oracle: Callable[[Path], Oracle],
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
) -> None:
    folder = tiny_folder(architecture)
    toys = residual.install(tmp_path_factory.mktemp("toys"))
    named = ['push:{"layers": [0, 1], "strength": 0.0}', "damp"]
    engine = engines.get(folder, one_process=True, logits_processors=named, env={"PYTHONPATH": str(toys)})
    rng = random.Random(architecture)
    strength = 80.0 if architecture in tiny.POST_NORM else 40.0
    kinds = ((), ("push",), ("damp",), ("push", "damp"), ("push at the end",))
    requests, wanted, names = [], [], []
    for _ in range(3):
        prompt = scenarios.words(rng, rng.randint(4, 20))
        for kind in kinds:
            steer, pushes = [], []
            for name in kind:
                if name == "damp":
                    steer.append({"name": "damp"})
                    pushes.append(Damp())
                else:
                    layer = 1 if name == "push at the end" else 0
                    push = {"strength": strength, "seed": 2, "positions": "all"}
                    steer.append({"name": "push", "layers": [layer], **push})
                    pushes.append(Push(**push, layer=layer))
            requests.append({"prompt_token_ids": prompt, "params": {**PARAMS, "extra_args": {"steer": steer or "off"}}})
            wanted.append(oracle(folder).generate(prompt, PARAMS, None, pushes=pushes))
            names.append(kind)
    got = engine.generate(requests)
    for kind, want, (output,) in zip(names, wanted, got, strict=True):
        assert output["token_ids"] == want.token_ids, (kind, want, output)
    for i in range(0, len(kinds) * 3, len(kinds)):
        assert len({tuple(w.token_ids) for w in wanted[i : i + len(kinds)]}) >= len(kinds) - 1, "they differ"
