"""A small sparse autoencoder of one's own: top-k, or batch-top-k that is saved as JumpReLU.

``python -m llm_steer.plugins.activation_reasoning.train_sae MODEL --layer 15 --text corpus.txt --out sae/`` writes a folder
in the layout of SAELens. It is for experiments on a CPU: a million tokens and a few thousand features, not more.
Top-k after Gao et al. (2024), batch-top-k with its threshold after Bussmann et al. (2024). ``--trainer sae-lens`` has
SAELens (6 or newer, ``pip install sae-lens``) train the same on the same rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from llm_steer.errors import MissingDependencyError, SteerError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OUTLIER = 6.0
"""Tokens whose norm is above that many medians are attention sinks, and left out."""
WARMUP = 100
DEAD = 200
"""Steps without ever being active after which a feature counts as dead."""


def hidden_states(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], layer: int, max_length: int = 256
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Token ids and hidden states float32 ``[tokens, hidden_size]`` behind a layer, one text after the other.

    The first token is an attention sink in most models: it is in there, and callers leave it out.
    """
    for text in texts:
        ids = tokenizer(text, truncation=True, max_length=max_length, return_tensors="pt").input_ids.to(model.device)
        if ids.shape[1] < 2:
            continue
        with torch.inference_mode():
            states = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        # The last entry is behind the final norm; a steered layer is never that one.
        yield ids[0].tolist(), states[layer + 1][0].float().cpu()


def training_set(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows to train on: without first tokens and attention sinks."""
    rows = torch.cat([state[1:] for state in states])
    norm = rows.norm(dim=1)
    return rows[norm < OUTLIER * norm.median()]


@dataclass(frozen=True)
class Result:
    """A trained SAE with how well it does on rows that it was not trained on."""

    tensors: dict[str, torch.Tensor]
    explained: float
    """Share of the variance that the reconstruction explains."""
    active: float
    """Features active at a token, on average."""
    alive: int
    """Features that were active at all."""
    seconds: float


def train(
    rows: torch.Tensor, width: int, k: int, steps: int, architecture: Literal["topk", "jumprelu"] = "jumprelu",
    batch: int = 512, lr: float = 1e-3, seed: int = 0,
) -> Result:  # fmt: skip
    """Train on rows of hidden states, a tenth of which only measure.

    Args:
        rows: float32 ``[tokens, hidden_size]``.
        k: features active at a token; with jumprelu, on average.
    """
    began = time.monotonic()
    generator = torch.Generator().manual_seed(seed)
    held_out, rows = _parts(rows, batch, generator)
    size = rows.shape[1]
    # Trained on rows of about unit variance; the scale goes into the weights at the end.
    scale = float((rows - rows.mean(0)).norm(dim=1).mean()) / size**0.5
    decoder = torch.nn.functional.normalize(torch.randn(width, size, generator=generator), dim=1)
    parameters = {
        "W_enc": decoder.T.clone(), "b_enc": torch.zeros(width), "W_dec": decoder.clone(), "b_dec": rows.mean(0) / scale
    }  # fmt: skip
    for tensor in parameters.values():
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(parameters.values(), lr=lr, betas=(0.9, 0.999))
    threshold, idle = 0.0, torch.zeros(width)
    for step in range(steps):
        for group in optimizer.param_groups:
            rise, fall = min(1.0, (step + 1) / WARMUP), min(1.0, (steps - step) / (0.2 * steps))
            group["lr"] = lr * rise * fall
        x = rows[torch.randint(len(rows), (batch,), generator=generator)] / scale
        pre = torch.relu((x - parameters["b_dec"]) @ parameters["W_enc"] + parameters["b_enc"])
        if architecture == "topk":
            code = _keep(pre, k)
        else:
            code = _keep(pre.flatten()[None], k * batch).view_as(pre)
            active = code.detach()[code.detach() > 0]
            if len(active):
                threshold += (1.0 if not step else 0.01) * (float(active.min()) - threshold)
        error = code @ parameters["W_dec"] + parameters["b_dec"] - x
        loss = error.square().mean()
        idle = torch.where(code.detach().sum(0) > 0, 0.0, idle + 1)
        dead = idle > DEAD
        if bool(dead.any()):  # dead features learn what the others leave over
            rest = _keep(torch.where(dead, pre, 0.0), min(2 * k, int(dead.sum())))
            loss = loss + (rest @ parameters["W_dec"] + error.detach()).square().mean() / 32
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), 1.0)
        optimizer.step()
        with torch.no_grad():
            parameters["W_dec"].copy_(torch.nn.functional.normalize(parameters["W_dec"], dim=1))
        if sys.stderr.isatty() and step % 100 == 0:
            print(f"step {step} loss {float(loss):.4f}", file=sys.stderr)
    tensors = {name: tensor.detach().clone() for name, tensor in parameters.items()}
    # x / s encodes to code / s: with biases times s, codes and reconstructions are in the units of x.
    tensors["b_enc"] *= scale
    tensors["b_dec"] *= scale
    if architecture == "jumprelu":
        tensors["threshold"] = torch.full((width,), threshold * scale)
    code = encode(tensors, held_out, k)
    figures = measured(held_out, code, code @ tensors["W_dec"] + tensors["b_dec"])
    return Result(tensors, *figures, time.monotonic() - began)


def measured(rows: torch.Tensor, code: torch.Tensor, again: torch.Tensor) -> tuple[float, float, int]:
    """Share of the variance that is explained, features active at a token, and features active at all."""
    explained = 1 - float((rows - again).square().sum() / (rows - rows.mean(0)).square().sum())
    active = (code > 0).float()
    return explained, float(active.sum(1).mean()), int((active.sum(0) > 0).sum())


def _parts(rows: torch.Tensor, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A tenth that only measures, and what is left to train on."""
    if len(rows) < 2 * batch:
        raise SteerError("--text", f"{len(rows)} tokens", f"at least {2 * batch} tokens")
    rows = rows[torch.randperm(len(rows), generator=generator)]
    return rows[: len(rows) // 10], rows[len(rows) // 10 :]


def train_with_saelens(
    rows: torch.Tensor, width: int, k: int, steps: int, architecture: Literal["topk", "jumprelu"], folder: Path,
    metadata: dict[str, Any], batch: int = 512, lr: float = 1e-3, seed: int = 0,
) -> tuple[float, float, int, float]:  # fmt: skip
    """As :func:`train`, by SAELens, which writes the folder.

    Returns:
        What :class:`Result` says of it, as our own loader reads it.
    """
    try:
        import sae_lens
        from sae_lens.config import SAETrainerConfig
        from sae_lens.training.sae_trainer import SAETrainer
    except ImportError as error:
        raise MissingDependencyError("sae-lens", "sae", "--trainer sae-lens") from error
    from .sae import load_sae

    began = time.monotonic()
    generator = torch.Generator().manual_seed(seed)
    held_out, rows = _parts(rows, batch, generator)
    torch.manual_seed(seed)
    common = {"d_in": rows.shape[1], "d_sae": width, "k": k, "normalize_activations": "expected_average_only_in"}
    if architecture == "topk":
        sae = sae_lens.TopKTrainingSAE(sae_lens.TopKTrainingSAEConfig(**common))
    else:
        sae = sae_lens.BatchTopKTrainingSAE(sae_lens.BatchTopKTrainingSAEConfig(**common))
    for name, value in metadata.items():
        sae.cfg.metadata[name] = value

    def batches() -> Iterator[torch.Tensor]:
        while True:
            yield rows[torch.randint(len(rows), (batch,), generator=generator)]

    config = SAETrainerConfig(
        total_training_samples=steps * batch, train_batch_size_samples=batch, lr=lr, lr_end=lr / 10,
        lr_warm_up_steps=WARMUP, lr_decay_steps=steps // 5, dead_feature_window=DEAD, n_batches_for_norm_estimate=20,
    )  # fmt: skip
    SAETrainer(config, sae, batches()).fit()
    sae.save_inference_model(folder)
    own = load_sae(folder, rows.shape[1])
    code = own.encode(held_out)
    return *measured(held_out, code, own.decode(code)), time.monotonic() - began


def encode(tensors: dict[str, torch.Tensor], x: torch.Tensor, k: int) -> torch.Tensor:
    """The whole code."""
    pre = torch.relu((x - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_enc"])
    if "threshold" in tensors:
        return torch.where(pre > tensors["threshold"], pre, 0.0)
    return _keep(pre, k)


def save(result: Result, folder: Path, k: int, layer: int, model: str) -> None:
    """Write a folder that SAELens reads, too."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in result.tensors.items()}, folder / "sae_weights.safetensors")
    size, width = result.tensors["W_enc"].shape
    jump = "threshold" in result.tensors
    config: dict[str, Any] = {
        "architecture": "jumprelu" if jump else "topk", "d_in": size, "d_sae": width, "dtype": "float32", "device": "cpu",
        "apply_b_dec_to_input": True, "normalize_activations": "none", "reshape_activations": "none",
        "metadata": hook(layer, model),
    }  # fmt: skip
    if not jump:
        config |= {"k": k, "rescale_acts_by_decoder_norm": False}
    (folder / "cfg.json").write_text(json.dumps(config, indent=2) + "\n")


def hook(layer: int, model: str) -> dict[str, Any]:
    """Where an SAE belongs, in SAELens' words."""
    return {"hook_name": f"blocks.{layer}.hook_resid_post", "model_name": model}


def _keep(x: torch.Tensor, k: int) -> torch.Tensor:
    top = x.topk(k, dim=1)
    return torch.zeros_like(x).scatter(1, top.indices, top.values)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("model")
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--text", type=Path, required=True, help="a text a line")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trainer", choices=("own", "sae-lens"), default="own")
    parser.add_argument("--architecture", choices=("topk", "jumprelu"), default="jumprelu")
    parser.add_argument("--width", type=int, default=2304)
    parser.add_argument("--k", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tokens", type=int, default=100_000, help="at most that many")
    options = parser.parse_args(arguments)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    states, count = [], 0
    for _, state in hidden_states(model, tokenizer, options.text.read_text(encoding="utf-8").split("\n"), options.layer):
        states.append(state)
        count += len(state)
        if count >= options.tokens:
            break
    rows, where = training_set(states), hook(options.layer, Path(options.model).name)
    shape = (options.width, options.k, options.steps, options.architecture)
    if options.trainer == "own":
        result = train(rows, *shape)
        save(result, options.out, options.k, options.layer, Path(options.model).name)
        explained, active, alive, seconds = result.explained, result.active, result.alive, result.seconds
    else:
        explained, active, alive, seconds = train_with_saelens(rows, *shape, options.out, where)
    print(
        json.dumps(
            {"tokens": count, "explained": round(explained, 4), "active": round(active, 1), "alive": alive,
             "width": options.width, "seconds": round(seconds, 1)}
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
