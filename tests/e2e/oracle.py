"""What steering must do, written a second time: plain Python over the logits of a Hugging Face model.

Nothing here imports llm_steer. Draws are vLLM's own, so that sampled tokens can be compared too.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = ("wait", "Wait", "but", "But", "Alternatively")


@dataclass
class Span:
    """Where a sequence stands: a think span opened by the prompt or by the model, ended, opened again."""

    open_id: int
    close_id: int
    prompt_len: int
    inside: bool = False
    start: int | None = None
    """Index among the generated tokens of the first token of the span."""
    ended: bool = False
    seen: int = 0

    def feed(self, token: int) -> None:
        generated = self.seen - self.prompt_len
        self.seen += 1
        if token == self.open_id and not self.inside:
            self.inside, self.start = True, max(generated + 1, 0)
        elif token == self.close_id:
            self.inside = False
            self.ended = self.ended or generated >= 0


def complete(steer: Mapping[str, Any], *, has_markers: bool = True) -> dict[str, Any]:
    """With what follows from the preset and from the tokenizer."""
    steer = dict(steer)
    if steer.get("preset") == "reference":
        steer = {"origin": "output", "window": [[0, 8192]], **steer}
    if steer.get("origin", "auto") == "auto":
        steer["origin"] = "think" if has_markers else "output"
    return steer


def ids_of(steer: Mapping[str, Any], pieces: Mapping[str, int]) -> list[int]:
    """The reflection tokens."""
    if "words" not in steer and not steer.get("token_ids"):
        return [pieces[word] for word in WORDS if word in pieces]
    return [*steer.get("token_ids", ()), *(pieces[word] for word in steer.get("words", ()))]


def wave(steer: Mapping[str, Any], t: float) -> float:
    """The offset at ``t``."""
    kind = steer.get("schedule", "triangular")
    amplitude, period, phase = (steer.get(k, d) for k, d in (("amplitude", 5.0), ("period", 1200.0), ("phase", 0.0)))
    if kind == "constant":
        return amplitude
    if kind == "silver":
        k = int(t) % 64 + 1
        zeros = 0
        while k % 2 == 0:
            k, zeros = k // 2, zeros + 1
        return amplitude * 2.0 ** (zeros - 2)
    if kind == "cosine":
        return amplitude * math.cos(2 * math.pi * ((t / period + phase) % 1.0))
    if kind == "linear_decay":
        return amplitude * (1 - 2 * min(max(t / period + phase, 0.0), 1.0))
    if kind == "piecewise":
        points = steer["points"]
        return float(np.interp(t, [p[0] for p in points], [p[1] for p in points]))
    # Up to the top at a quarter of the period, down to the bottom at three quarters, and back.
    u = (t / period + phase) % 1.0
    if u < 0.25:
        return amplitude * 4 * u
    if u < 0.75:
        return amplitude * (2 - 4 * u)
    return amplitude * (4 * u - 4)


def offset(steer: Mapping[str, Any], span: Span, count: int) -> float | None:
    """What is added to the reflection tokens of the token that ``count`` others were generated before; None: nothing."""
    origin, after = steer["origin"], steer.get("after_end", "off")
    if span.ended and after == "off":
        return None
    begun = steer.get("start_position", 0)
    if span.ended and after == "restart":
        if not span.inside or span.start is None:
            return None
        t = count - span.start
    elif origin == "think":
        if span.start is None or (not span.inside and after != "continue"):
            return None
        t = count - span.start + begun
    else:
        t = count + begun
    window = steer.get("window")
    if window and not any(start <= t < end for start, end in window):
        return None
    return wave(steer, t)


@dataclass
class Result:
    token_ids: list[int]
    gap: float
    """The closest decision: a mismatch with a gap below 1e-4 is a near-tie, not an error of steering."""
    deltas: list[float | None] = field(default_factory=list)
    steered_steps: int = 0
    """Steps with an offset, not counting those where the wave crosses zero: there rounding decides."""
    crossings: int = 0
    reflection: list[tuple[int, float]] = field(default_factory=list)
    """Output position and offset of each reflection token."""
    ended_at: int | None = None
    reopened: bool = False
    think_tokens: int = 0


class Oracle:
    """One model, and the tokens that any host must generate with it.

    Args:
        folder: the model.
    """

    def __init__(self, folder: Path | str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.pieces = self.tokenizer.get_vocab()
        self.open_id, self.close_id = self.pieces.get("<think>", -1), self.pieces.get("</think>", -1)
        eos = self.model.generation_config.eos_token_id
        self.eos_ids = set(eos if isinstance(eos, list) else [eos])

    @torch.inference_mode()
    def generate(
        self,
        prompt: Sequence[int],
        params: Mapping[str, Any],
        steer: Mapping[str, Any] | None,
        runner: str = "v1",
        change: Callable[[torch.Tensor, list[int]], None] | None = None,
        pushes: Sequence[Push] = (),
    ) -> Result:
        """One output.

        Args:
            params: the fields of vLLM's ``SamplingParams``.
            steer: parameters of reflection_cycle, or None.
            runner: whose seeded draw to make.
            change: what another method does to the logits, in place, after so many generated tokens.
            pushes: what is added to hidden states.
        """
        draw = Draw(params, runner)
        if steer is not None:
            steer = complete(steer, has_markers=self.close_id >= 0)
        span = Span(self.open_id, self.close_id, len(prompt))
        for token in prompt:
            span.feed(token)
        ids = ids_of(steer, self.pieces) if steer is not None else []
        result = Result([], math.inf)
        fed, cache = torch.tensor([list(prompt)]), None
        stops = set() if params.get("ignore_eos") else set(self.eos_ids)
        stops |= set(params.get("stop_token_ids", ()))
        for count in range(params.get("max_tokens", 16)):
            start = len(prompt) + count - fed.shape[1]
            with contextlib.ExitStack() as hooks:
                for push in pushes:
                    hooks.enter_context(self._pushed(push, start - len(prompt)))
                out = self.model(input_ids=fed, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits = out.logits[0, -1].float()
            for push in pushes:
                push.see(logits, count)
            if count < params.get("min_tokens", 0):
                for stop in {*self.eos_ids, *params.get("stop_token_ids", ())}:
                    logits[stop] = -math.inf
            for token, bias in (params.get("logit_bias") or {}).items():
                logits[int(token)] += bias
            if "allowed_token_ids" in params:
                mask = torch.full_like(logits, -math.inf)
                mask[params["allowed_token_ids"]] = 0
                logits = logits + mask
            if change is not None:
                change(logits, result.token_ids)
            delta = offset(steer, span, count) if steer is not None else None
            if delta is not None:
                logits[sorted(set(ids))] += delta
            token, gap = draw(logits, len(prompt) + count - 1)
            result.gap = min(result.gap, gap)
            result.token_ids.append(token)
            result.deltas.append(delta)
            result.steered_steps += delta is not None and abs(delta) > 1e-9
            result.crossings += delta is not None and abs(delta) <= 1e-9
            if token in ids:
                result.reflection.append((count, delta or 0.0))
            was_ended, was_inside = span.ended, span.inside
            span.feed(token)
            result.think_tokens += span.inside and (was_inside or token != self.open_id)
            if span.ended and not was_ended:
                result.ended_at = count
            result.reopened |= span.ended and span.inside
            if token in stops:
                break
            fed = torch.tensor([[token]])
        return result

    def _pushed(self, push: Push, start: int) -> Any:
        """While a forward pass runs whose first token is generated token ``start`` (negative in the prompt)."""

        def hook(_module: Any, _inputs: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output
            added = torch.stack([push.at(start + i, row) for i, row in enumerate(hidden[0])])
            return (hidden + added, *output[1:]) if isinstance(output, tuple) else hidden + added

        layer = decoder_layers(self.model)[push.layer]
        return contextlib.closing(_Handle(layer.register_forward_hook(hook)))


class _Handle:
    def __init__(self, handle: Any) -> None:
        self.close = handle.remove


def decoder_layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    return max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)


class Push:
    """What the toy method ``push`` does, once more."""

    def __init__(self, strength: float = 1.0, seed: int = 0, positions: str = "output", layer: int = 0) -> None:
        self.layer, self.strength, self.seed, self.positions = layer, strength, seed, positions

    def at(self, count: int, hidden: torch.Tensor) -> torch.Tensor:
        """What is added to generated token ``count`` with this hidden state; the last token of the prompt is -1."""
        if self.positions == "output" and count < -1:
            return torch.zeros_like(hidden)
        return self.strength * _direction(self.seed, len(hidden))

    def see(self, logits: torch.Tensor, count: int) -> None:
        """The logits that generated token ``count`` will be drawn from."""


class Thermostat(Push):
    """What the toy method ``thermostat`` does, once more."""

    def __init__(self, gain: float = 50.0, target: float = 0.5, seed: int = 0, layer: int = 0) -> None:
        super().__init__(seed=seed, layer=layer)
        self.gain, self.target = gain, target
        self.coefficients: list[float] = []
        self.mean = 0.0

    def at(self, count: int, hidden: torch.Tensor) -> torch.Tensor:
        return (self.coefficients[count] if count >= 0 else 0.0) * _direction(self.seed, len(hidden))

    def see(self, logits: torch.Tensor, count: int) -> None:
        confidence = float(logits.softmax(-1).max())
        self.mean = confidence if count == 0 else 0.75 * self.mean + 0.25 * confidence
        self.coefficients.append(self.gain * (self.mean - self.target))


class Damp(Push):
    """What the toy method ``damp`` does, once more."""

    def at(self, count: int, hidden: torch.Tensor) -> torch.Tensor:
        return -0.5 * hidden


def _direction(seed: int, size: int) -> torch.Tensor:
    vector = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return vector / vector.norm()


class Draw:
    """vLLM's choice of a token: greedy, or the seeded draw of one of its two model runners on a CPU."""

    def __init__(self, params: Mapping[str, Any], runner: str) -> None:
        self.temperature = params.get("temperature", 1.0)
        self.top_k, self.top_p = params.get("top_k", 0), params.get("top_p", 1.0)
        self.seed = params.get("seed")
        self.v2 = runner == "v2"
        self.generator = torch.Generator()
        if self.seed is not None:
            self.generator.manual_seed(self.seed)

    def __call__(self, logits: torch.Tensor, position: int) -> tuple[int, float]:
        """The token, and how far behind the second best was.

        Args:
            logits: ``[vocab]``, before temperature.
            position: of the token that was fed.
        """
        scores = logits.double()
        if self.temperature:
            assert self.seed is not None
            scores = self._truncated(logits / self.temperature).double()
            if self.v2:
                noise = v2_noise(self.seed, position, len(logits))
            else:
                noise = v1_noise(int(torch.randint(0, 2**31, (1,), generator=self.generator)), len(logits))
            scores += torch.from_numpy(noise)
        best = torch.topk(scores, 2)
        return int(best.indices[0]), float(best.values[0] - best.values[1])

    def _truncated(self, logits: torch.Tensor) -> torch.Tensor:
        if not self.top_k and self.top_p == 1.0:
            return logits
        values, order = logits.sort()
        if self.top_k:
            values[: len(values) - self.top_k] = -math.inf
        if self.top_p < 1.0:
            below = values.softmax(-1).cumsum(-1) <= 1 - self.top_p
            below[-1] = False
            values[below] = -math.inf
        return torch.empty_like(logits).scatter_(0, order, values)


def v1_noise(seed: int, size: int) -> np.ndarray:
    """Gumbel noise of the V1 runner's CPU sampler (``fused_gumbel_argmax``): SplitMix64 over seed and token."""

    def mixed(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    key = mixed(np.array([seed], dtype=np.uint64))
    bits = mixed(key + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    return -np.log(-np.log((bits.astype(np.float64) + 0.5) * 2.0**-53))


def v2_noise(seed: int, position: int, size: int) -> np.ndarray:
    """Gumbel noise of Model Runner V2 (``gumbel_sample``): Murmur3 over seed, position and token, in float32."""
    token = np.arange(size, dtype=np.uint32)

    def rotated(x: np.ndarray, by: int) -> np.ndarray:
        return (x << np.uint32(by)) | (x >> np.uint32(32 - by))

    def mix(h: np.ndarray, key: np.ndarray) -> np.ndarray:
        h = h ^ (rotated(key * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593))
        return rotated(h, 13) * np.uint32(5) + np.uint32(0xE6546B64)

    h = np.zeros(size, dtype=np.uint32)
    for word in (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF, position & 0xFFFFFFFF):
        h = mix(h, np.full(size, word, dtype=np.uint32))
    h = mix(h, token) ^ np.uint32(16)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    u = ((h ^ (h >> np.uint32(16))).astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-u))
