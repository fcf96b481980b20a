"""The plugin of examples/third_party_plugin, installed by pip as a package of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_plugin"

ON_HUGGING_FACE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor
from llm_steer import SteerError, registry, steer

class Oracle(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, 4:].tolist()):
            if row != 1 and len(ids) < 20:
                scores[row, list(set(ids))] -= 3.0
        return scores

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=40)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
torch.nn.init.normal_(model.lm_head.weight)
prompts = torch.tensor([[1, 5, 6, 7], [1, 5, 6, 7], [1, 8, 9, 9]])
options = dict(max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
options["attention_mask"] = torch.ones_like(prompts)
plain, expected = model.generate(prompts, **options), model.generate(prompts, **options, logits_processor=[Oracle()])

assert "presence" in registry.names()
steer(model, "presence", penalty=3.0, first=20)
assert torch.equal(model.generate(prompts, **options, steer=[True, None, True]), expected)
assert torch.equal(model.generate(prompts, **options, steer="off"), plain)
assert not torch.equal(plain[0], expected[0])
beams = [model.generate(prompts, **options, num_beams=2, use_cache=cache) for cache in (True, False)]
assert torch.equal(*beams)
try:
    steer(model, "presence", penalty="high")
except SteerError as error:
    assert "penalty: got 'high'" in str(error), error
print("steered by", registry.get("presence").__module__)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site-packages")
    shutil.copytree(EXAMPLE, source)  # a build leaves files beside its sources
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


def test_it_steers_hugging_face_models(installed):
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ON_HUGGING_FACE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "steered by presence_steering" in done.stdout


def test_it_fits_on_a_page():
    code = (EXAMPLE / "presence_steering.py").read_text().splitlines()
    assert len(code) <= 40
