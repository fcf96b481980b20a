"""Train one checkpoint from a seed: ``python -m llm_steer.eval.testbed train arithmetic``.

A run can be stopped at any time and goes on where its last state stood when the same command is given again. On the
same machine with the same number of threads the result is the same to the bit.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from llm_steer.eval.testbed import tokenizer as tokenizers
from llm_steer.eval.testbed.card import card
from llm_steer.eval.testbed.data import IGNORE, batches
from llm_steer.eval.testbed.muon import Muon
from llm_steer.eval.testbed.recipes import Recipe
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llm_steer.errors import SteerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

CARD = "README.md"
STATE = "state"
"""What a run goes on from, as safetensors. Not named so: vLLM takes every file of that name in a folder for weights."""
LOG = "train.csv"
LOG_HEAD = "step,loss,lr,seconds,cpu_seconds"
LOG_EVERY = 25
"""Steps that one line of the log averages over."""
SOURCES = (
    "arithmetic.py", "data.py", "entailment.py", "evaluator.py", "grading.py", "logic_words.py", "muon.py", "ontology.py",
    "problem.py", "propositions.py", "tokenizer.py", "traces.py", "train.py", "vocabulary.py", "words.py",
)  # fmt: skip
"""Code that a checkpoint depends on, besides its recipe."""


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A fresh network; its weights depend on torch's global seed. Qwen3, not Qwen2: transformers 5.19 gives every folder of
    type ``qwen2`` Qwen2's own tokenizer, whatever the folder says."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads = recipe.hidden_size // recipe.head_size
    config = Qwen3Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=recipe.head_size,
        max_position_embeddings=recipe.positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model: Qwen3ForCausalLM = Qwen3ForCausalLM(config)  # type: ignore[no-untyped-call,unused-ignore]
    return model


def fingerprint(recipe: Recipe, seed: int) -> str:
    """SHA-256 of everything that decides a checkpoint: the recipe, the seed and the code."""
    parts = [(part.task.name, sorted(part.weights.items()), vars(part.mix)) for part in recipe.parts]
    fields = {**vars(recipe), "parts": parts, "seed": seed}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def train(
    recipe: Recipe, out: Path, *, seed: int = 0, steps: int | None = None, save_every: int = 200, bf16: bool | None = None
) -> Path:
    """Train a checkpoint, or go on with one.

    Args:
        out: folder for the model; the log and the state to resume from stand beside it.
        seed: decides the first weights and every batch.
        steps: stop after so many steps of the run in all; the whole run when left out. The schedule doesn't change.
        save_every: steps between two states to resume from.
        bf16: multiply in bfloat16; where the CPU can when left out.

    Returns:
        The folder that holds the model.

    Raises:
        SteerError: the folder holds a state or a log that is damaged, or of a run with another recipe, seed or code; or
            its run is past ``steps``.
    """
    from tqdm import tqdm

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.build()
    identity = fingerprint(recipe, seed)
    torch.manual_seed(seed)
    model = build_model(recipe, tokenizer)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [Muon(matrices, recipe.lr), torch.optim.AdamW(others, recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)]
    first, spent, recent = _resume(out / STATE, identity, model, optimizers)
    last = min(steps or recipe.steps, recipe.steps)
    if last < first:
        raise SteerError("steps", last, f"at least {first}: so many steps are behind the run in {out}")
    if bf16 is None:
        bf16 = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
    source = batches(recipe, tokenizer, seed, first)
    _cut_log(out / LOG, first)
    started = time.monotonic() - spent[0], time.process_time() - spent[1]
    bar = tqdm(range(first, last), initial=first, total=last, desc=recipe.name, mininterval=5)
    for step in bar:
        ids, labels = next(source)
        rate = recipe.lr * schedule(step, recipe)
        recent.append(_update(model, optimizers, ids, labels, rate, bf16))
        done = step + 1
        spent = time.monotonic() - started[0], time.process_time() - started[1]
        if done % LOG_EVERY == 0 or done == last:
            loss = sum(recent) / len(recent)
            bar.set_postfix(loss=f"{loss:.4f}")
            _log(out / LOG, done, loss, rate, *spent)
        if done % LOG_EVERY == 0:
            recent.clear()
        if done % save_every == 0 or done == last:
            _save(out / STATE, identity, done, spent, recent, model, optimizers)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    if last == recipe.steps:
        (out / CARD).write_text(card(recipe, seed, identity, (out / LOG).read_text(encoding="utf-8")), encoding="utf-8")
    return out


def schedule(step: int, recipe: Recipe) -> float:
    """Learning rate as a share of the largest: a linear warm-up, level, and a linear fall to zero."""
    return min(1.0, (step + 1) / recipe.warmup, (recipe.steps - step) / (recipe.decay * recipe.steps))


def _update(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    ids: torch.Tensor,
    labels: torch.Tensor,
    rate: float,
    bf16: bool,
) -> float:
    """One step. Returns the cross-entropy in nats a token."""
    # Padding stands on the right, behind everything that is learnt: plain causal attention needs no mask for it.
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        wanted = labels[:, 1:] != IGNORE
        logits = model.lm_head(hidden[wanted])
    loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][wanted])
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _log(path: Path, step: int, loss: float, rate: float, seconds: float, cpu_seconds: float) -> None:
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if new:
            file.write(f"{LOG_HEAD}\n")
        file.write(f"{step},{loss:.5f},{rate:.6f},{seconds:.0f},{cpu_seconds:.0f}\n")


def _cut_log(path: Path, step: int) -> None:
    """Leave what an unbroken run would have logged by this step: a run that was stopped logged its last step, too, or went
    past its last state."""
    wanted = range(LOG_EVERY, step + 1, LOG_EVERY)
    if not path.exists() and not wanted:
        return
    try:
        head, *rows = path.read_text(encoding="utf-8").splitlines()
        known = {int(row.partition(",")[0]): row for row in rows}
        if head != LOG_HEAD or any(row.count(",") != LOG_HEAD.count(",") for row in rows):
            raise ValueError
        kept = [known[number] for number in wanted]
    except (OSError, ValueError, KeyError) as error:
        valid = f"the log of the run in {path.parent}, whole up to step {step}; without it the run has to begin anew"
        raise SteerError("log", str(path), valid) from error
    path.write_text("\n".join([head, *kept]) + "\n", encoding="utf-8")


# -- state to resume from: tensors only, nothing that runs when it is read ---------------------------------------------

RECENT = "recent"
"""Losses since the last line of the log, float64."""


def _tensors(model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{index}.{key}": value for key, value in state.items()}
    return tensors


def _digest(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _save(
    path: Path,
    identity: str,
    step: int,
    spent: tuple[float, float],
    recent: list[float],
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
) -> None:
    fresh = path.with_suffix(".new")
    tensors = {**_tensors(model, optimizers), RECENT: torch.tensor(recent, dtype=torch.float64)}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {"step": str(step), "identity": identity, "seconds": str(spent[0]), "cpu_seconds": str(spent[1])}
    save_file(tensors, fresh, {**metadata, "sha256": _digest(metadata, tensors)})
    fresh.replace(path)  # a run that is killed while writing keeps the state before


def _resume(
    path: Path, identity: str, model: Qwen3ForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, tuple[float, float], list[float]]:
    """Load a state, if there is one. Returns the number of steps that it has behind it, the seconds by the clock and of the
    processor that they took, and the losses that were not logged yet."""
    if not path.exists():
        return 0, (0.0, 0.0), []
    try:
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        raise SteerError("state", str(path), f"a state of a run, whole ({error}); without it the run begins anew") from error
    if metadata.pop("sha256", None) != _digest(metadata, tensors):
        raise SteerError("state", str(path), "a state of a run, as it was written; without it the run begins anew")
    if metadata["identity"] != identity:
        valid = "the state of a run with this recipe, seed and code: give another folder or remove it"
        raise SteerError("state", str(path), valid)
    recent = tensors.pop(RECENT).tolist()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[f"model.{name}"])
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            kind, *rest = name.split(".")
            if kind == "optimizer" and int(rest[0]) == number:
                state.setdefault(int(rest[1]), {})[rest[2]] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return int(metadata["step"]), (float(metadata["seconds"]), float(metadata["cpu_seconds"])), recent
