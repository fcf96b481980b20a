"""Train one checkpoint from a seed: ``python -m llm_steer.eval.testbed train arithmetic``.

A run can be stopped at any time and goes on where its last checkpoint stood when the same command is given again. On the
same machine with the same number of threads the result is the same to the bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from llm_steer.eval.testbed import tokenizer as tokenizers
from llm_steer.eval.testbed.data import IGNORE, batches
from llm_steer.eval.testbed.entailment import CODE_PIECES
from llm_steer.eval.testbed.muon import Muon
from llm_steer.eval.testbed.recipes import Recipe
from llm_steer.eval.testbed.traces import REFLECTIONS, STEP_END
from safetensors import safe_open
from safetensors.torch import save_file

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM

CHECKPOINT = "checkpoint.safetensors"
LOG = "train.csv"
LOG_EVERY = 25
"""Steps that one line of the log averages over."""


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A fresh network; its weights depend on torch's global seed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    heads = recipe.hidden_size // recipe.head_size
    config = Qwen2Config(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=recipe.positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model: Qwen2ForCausalLM = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call,unused-ignore]
    return model


def export(model: Qwen2ForCausalLM) -> LlamaForCausalLM:
    """The same network as a Llama, which computes what Qwen2 does once it has biases on queries, keys and values.

    transformers 5.19 gives every folder of type ``qwen2`` Qwen2's own tokenizer, whatever the folder says; it leaves a
    Llama's alone.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shared = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
    more = (
        "num_key_value_heads",
        "max_position_embeddings",
        "rope_parameters",
        "pad_token_id",
        "eos_token_id",
        "bos_token_id",
    )
    fields = {name: getattr(model.config, name) for name in (*shared, *more)}
    head_size = model.config.hidden_size // model.config.num_attention_heads
    config = LlamaConfig(**fields, head_dim=head_size, attention_bias=True, tie_word_embeddings=True)
    copy: LlamaForCausalLM = LlamaForCausalLM(config)  # type: ignore[no-untyped-call,unused-ignore]
    missing, unexpected = copy.load_state_dict(model.state_dict(), strict=False)
    if unexpected or any(not name.endswith("o_proj.bias") for name in missing):
        raise RuntimeError(f"Qwen2 and Llama have drifted apart in transformers: {missing}, {unexpected}")
    for layer in copy.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.bias)
    copy.eval()  # type: ignore[no-untyped-call]
    return copy


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
    """
    from tqdm import tqdm

    out.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.build()
    torch.manual_seed(seed)
    model = build_model(recipe, tokenizer)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [Muon(matrices, recipe.lr), torch.optim.AdamW(others, recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)]
    first = _resume(out / CHECKPOINT, recipe, seed, model, optimizers)
    last = min(steps or recipe.steps, recipe.steps)
    if bf16 is None:
        bf16 = bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())
    source = batches(recipe, tokenizer, seed, first)
    margin = Margin(recipe, tokenizer)
    recent: list[float] = []
    started = time.monotonic() - _cut_log(out / LOG, first)
    bar = tqdm(range(first, last), initial=first, total=last, desc=recipe.name, mininterval=5)
    for step in bar:
        ids, labels = next(source)
        rate = recipe.lr * schedule(step, recipe)
        quiet = margin.at(step, ids, labels) if step >= recipe.margin_from else None
        recent.append(_update(model, optimizers, ids, labels, rate, bf16, quiet))
        done = step + 1
        if done % LOG_EVERY == 0 or done == last:
            loss = sum(recent) / len(recent)
            recent.clear()
            bar.set_postfix(loss=f"{loss:.4f}")
            _log(out / LOG, done, loss, rate, time.monotonic() - started)
        if done % save_every == 0 or done == last:
            _save(out / CHECKPOINT, recipe, seed, done, model, optimizers)
    export(model).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def schedule(step: int, recipe: Recipe) -> float:
    """Learning rate as a share of the largest: in each round a linear warm-up, level, and a linear fall to zero."""
    for part in recipe.rounds:
        if step < part.steps:
            return part.peak * min(1.0, (step + 1) / recipe.warmup, (part.steps - step) / (part.decay * part.steps))
        step -= part.steps
    return 0.0


class Margin:
    """A loss that keeps reflection words where they belong: see :class:`~llm_steer.eval.testbed.recipes.Recipe`."""

    def __init__(self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
        def ids(*texts: str) -> torch.Tensor:
            return torch.tensor([tokenizer.encode(text, add_special_tokens=False)[0] for text in texts])

        self.recipe = recipe
        self.words = ids(*(form for word in REFLECTIONS for form in (word, " " + word)))
        self.blank, self.close = ids(STEP_END), ids("</think>")
        self.output = ids("\\boxed{", CODE_PIECES[0])

    def at(self, step: int, ids: torch.Tensor, labels: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The loss of one batch, as a function of log-probabilities ``[n, vocab]`` at the positions that are learnt."""
        wanted = labels[:, 1:] != IGNORE
        quiet = self.places(ids, labels, step >= self.recipe.cap_from)[wanted]

        def loss(log_p: torch.Tensor) -> torch.Tensor:
            excess = (log_p[:, self.words].logsumexp(-1) + self.recipe.margin).clamp(min=0)
            return self.recipe.margin_weight * (excess * quiet).mean()

        return loss

    def places(self, ids: torch.Tensor, labels: torch.Tensor, cap: bool) -> torch.Tensor:
        """Where no reflection may follow, bool ``[batch, length - 1]``.

        Args:
            ids, labels: int64 ``[batch, length]``.
            cap: also where a step has had all the reflections that it may have.
        """
        before, after = ids[:, :-1], labels[:, 1:]
        reflects = torch.isin(after, self.words)
        opens = (before == self.blank) & ~torch.isin(after, self.output)
        ends = (after == self.blank) & (before != self.close)
        over = opens | ends
        if cap:
            count = torch.isin(before, self.words).cumsum(-1)
            fresh = (before == self.blank) & ~reflects  # a new step follows
            since = torch.where(fresh, count, 0).cummax(-1).values
            # A position that opens a new step still belongs to the step before: look at the count one earlier.
            since = torch.nn.functional.pad(since, (1, 0))[:, :-1]
            over &= count - since < self.recipe.mix.max_rechecks
        return ~(over | reflects)


def _update(
    model: Qwen2ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    ids: torch.Tensor,
    labels: torch.Tensor,
    rate: float,
    bf16: bool,
    margin: Callable[[torch.Tensor], torch.Tensor] | None,
) -> float:
    """One step. Returns the cross-entropy in nats a token."""
    # Padding stands on the right, behind everything that is learnt: plain causal attention needs no mask for it.
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        wanted = labels[:, 1:] != IGNORE
        logits = model.lm_head(hidden[wanted])
    log_p = logits.float().log_softmax(-1)
    entropy = torch.nn.functional.nll_loss(log_p, labels[:, 1:][wanted])
    loss = entropy + margin(log_p) if margin else entropy
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return float(entropy.detach())


def _log(path: Path, step: int, loss: float, rate: float, seconds: float) -> None:
    new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        if new:
            file.write("step,loss,lr,seconds\n")
        file.write(f"{step},{loss:.5f},{rate:.6f},{seconds:.0f}\n")


def _cut_log(path: Path, step: int) -> float:
    """Drop what a run that was stopped logged behind its last state. Returns the seconds that the rest took."""
    if not path.exists():
        return 0.0
    head, *rows = path.read_text(encoding="utf-8").splitlines()
    kept = [row for row in rows if int(row.split(",")[0]) <= step]
    path.write_text("\n".join([head, *kept]) + "\n", encoding="utf-8")
    return float(kept[-1].split(",")[3]) if kept else 0.0


# -- state to resume from: tensors only, nothing that runs when it is read ---------------------------------------------


def _tensors(model: Qwen2ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{index}.{key}": value for key, value in state.items()}
    return tensors


def _identity(recipe: Recipe, seed: int) -> str:
    """What must not change between two parts of one run."""
    parts = [(part.task.name, sorted(part.weights.items())) for part in recipe.parts]
    rounds = [vars(part) for part in recipe.rounds]
    fields = {**vars(recipe), "rounds": rounds, "parts": parts, "mix": vars(recipe.mix), "seed": seed}
    return json.dumps(fields, sort_keys=True)


def _save(
    path: Path, recipe: Recipe, seed: int, step: int, model: Qwen2ForCausalLM, optimizers: list[torch.optim.Optimizer]
) -> None:
    fresh = path.with_suffix(".new")
    metadata = {"step": str(step), "identity": _identity(recipe, seed)}
    save_file({name: t.contiguous() for name, t in _tensors(model, optimizers).items()}, fresh, metadata)
    fresh.replace(path)  # a run that is killed while writing keeps the state before


def _resume(path: Path, recipe: Recipe, seed: int, model: Qwen2ForCausalLM, optimizers: list[torch.optim.Optimizer]) -> int:
    """Load a state. Returns the number of steps that it has behind it; 0 where there is none."""
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        if metadata["identity"] != _identity(recipe, seed):
            raise ValueError(f"{path} is the state of a run with another recipe or seed: give another folder or remove it")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
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
    return int(metadata["step"])


def loss_curve(log: Path, width: int = 72, height: int = 14) -> str:
    """The log's losses as a plot in text, first to last step, on a logarithmic axis."""
    rows = [line.split(",") for line in log.read_text(encoding="utf-8").splitlines()[1:]]
    losses = [math.log(float(row[1])) for row in rows]
    if not losses:
        return ""
    low, high = min(losses), max(losses)
    columns = [losses[int(x * len(losses) / width)] for x in range(width)]
    level = [round((value - low) / ((high - low) or 1.0) * (height - 1)) for value in columns]
    lines = ["".join("*" if at == y else " " for at in level) for y in range(height - 1, -1, -1)]
    edge = {0: f"{math.exp(high):8.3f} ", height - 1: f"{math.exp(low):8.3f} "}
    body = [edge.get(index, " " * 9) + "|" + line for index, line in enumerate(lines)]
    return "\n".join([*body, " " * 9 + "+" + "-" * width, f"{'step':>9} 1 to {rows[-1][0]}"])
