"""``llm-steer generate``: a model's answer, steered; with ``--compare``, next to the one it gives unsteered."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llm_steer.cli.common import (
    Json,
    Output,
    check_range,
    find_model,
    given,
    load_tokenizer,
    loading,
    note,
    output,
    parse_specs,
    quiet_transformers,
    spec_text,
)
from llm_steer.errors import SteerError

if TYPE_CHECKING:
    from rich.text import Text

    from llm_steer.spec import Spec, Steer

DEMO_STEERING = "reflection_cycle:amplitude=7,period=64,leading_space=true"
"""For the embedded default model, which never reflects of its own accord: a wave that is short and strong enough to show
within a hundred tokens. Elsewhere the plugin's defaults apply."""


@dataclass(frozen=True)
class Settings:
    """How both answers are generated."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int
    chat: bool
    system: str | None


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input; left out, a small sum is asked.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A model's folder or Hugging Face id; left out, the embedded default."),
    ] = None,
    steer: Annotated[
        list[str] | None,
        typer.Option(
            "--steer",
            "-s",
            metavar="SPEC",
            help="NAME, NAME:key=value,key=value, NAME:{json}, NAME:@file.yaml or off; may be repeated, applied in order.",
        ),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show the unsteered answer next to the steered one.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 picks the likeliest token (greedy); above 0 samples.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this much probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of sampling, the same for both answers.")] = 0,
    no_chat: Annotated[bool, typer.Option("--no-chat", help="Continue the prompt as plain text: no chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message for the chat template.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (as stored; float32 for the embedded default), float32, bfloat16, float16.")
    ] = "auto",
    json: Json = False,
) -> None:
    """Generate with steering, and show what it did: without --model on an embedded model, with no network."""
    with output(json) as out:
        check_range("--max-new-tokens", max_new_tokens, 1, 1_000_000)
        check_range("--temperature", temperature, 0, 100)
        check_range("--top-p", top_p, 0, 1, above=True)
        check_range("--seed", seed, 0, 2**63 - 1)
        if dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise SteerError("--dtype", dtype, "auto, float32, bfloat16 or float16")
        if system is not None and no_chat:
            raise SteerError("--system", system, "left out with --no-chat: only a chat template has a place for it")
        text = _prompt(prompt)
        spec = parse_specs(steer or [_default_steering(model)])
        settings = Settings(max_new_tokens, temperature, top_p, seed, not no_chat, system)

        engine = Engine(model, device, dtype)
        ids = engine.encode(text, settings)
        show = None if compare or json else out.text
        if show:
            _head(out, engine, text, spec)
        if compare and not json:
            note(f"Generating twice, up to {max_new_tokens} tokens each")
        plain = engine.run(ids, (), settings) if compare else None
        if plain:
            plain = replace(plain, marks=engine.marks(plain, ids, spec))
        steered = engine.run(ids, spec, settings, show)

        if json:
            out.document(
                {
                    "model": engine.label,
                    "prompt": text,
                    "prompt_tokens": len(ids),
                    "steer": [{"name": s.name, **s.params.model_dump(mode="json", exclude_unset=True)} for s in spec],
                    "settings": asdict(settings),
                    "unsteered": plain and plain.document(engine),
                    "steered": steered.document(engine),
                }
            )
            return
        if plain:
            _head(out, engine, text, spec)
            _side_by_side(out, engine, plain, steered)
        else:
            out.text("\n\n")
        _trace(out, engine, steered, spec)


def _prompt(prompt: str | None) -> str:
    if prompt is None:
        text = (resources.files("llm_steer.prompts") / "demo.txt").read_text(encoding="utf-8").strip()
    elif prompt == "-":
        text = sys.stdin.read()
    else:
        text = prompt
    if not text.strip():
        raise SteerError("PROMPT", text, "text that is not empty")
    return text


def _default_steering(model: str | None) -> str:
    from llm_steer import default_model

    return DEMO_STEERING if model in (None, default_model.NAME) else "reflection_cycle"


# -- running -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One answer, and what was done to it."""

    ids: list[int]
    text: str
    seconds: float
    trace: dict[str, Any] | None
    marks: dict[int, float | None]
    """Positions of the tokens that the plugins count (reflection tokens), with the offset each was given."""

    def document(self, engine: Engine) -> dict[str, Any]:
        return {
            "text": self.text,
            "tokens": len(self.ids),
            "token_ids": self.ids,
            "seconds": round(self.seconds, 3),
            "marked": [
                {"position": t, "id": self.ids[t], "token": engine.piece(self.ids[t]), "delta": delta}
                for t, delta in sorted(self.marks.items())
            ],
            "trace": self.trace,
        }


class Engine:
    """A model in this process, on the Hugging Face host."""

    def __init__(self, model: str | None, device: str, dtype: str) -> None:
        source, self.label = find_model(model, "--model")
        quiet_transformers()
        self.device = _device(device)
        # The embedded default is small, and on a CPU float32 is the faster one.
        embedded = self.label != model
        self.tokenizer = load_tokenizer(source, self.label, "--model")
        with loading(self.label, "--model"):
            self.model = _load(source, "float32" if embedded and dtype == "auto" else dtype).to(self.device).eval()

    def encode(self, prompt: str, settings: Settings) -> list[int]:
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise SteerError("PROMPT", prompt, f"text in UTF-8 ({error.reason} at character {error.start})") from error
        if settings.chat and self.tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            if settings.system is not None:
                messages.insert(0, {"role": "system", "content": settings.system})
            with loading(self.label, "--model"):
                rendered = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            ids = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        else:
            if settings.system is not None:
                raise SteerError("--system", settings.system, "left out: this model has no chat template")
            if settings.chat:
                note("This model has no chat template: the prompt is continued as plain text (--no-chat says so).")
            ids = self.tokenizer(prompt)["input_ids"]
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if limit and len(ids) + settings.max_new_tokens > limit:
            raise SteerError(
                "--max-new-tokens",
                settings.max_new_tokens,
                f"at most {max(limit - len(ids), 0)}: the prompt has {len(ids)} of the model's {limit} positions",
            )
        return list(ids)

    def run(
        self, prompt_ids: list[int], spec: Spec, settings: Settings, show: Callable[[str], None] | None = None
    ) -> Answer:
        """Generate once.

        Args:
            spec: what to steer with; nothing if empty.
            show: gets the text piece by piece.
        """
        import torch

        from llm_steer import steering

        if settings.temperature == 0:
            sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        else:
            sampling = {"do_sample": True, "temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0}
        input_ids = torch.tensor([prompt_ids], device=self.device)
        arguments = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "max_new_tokens": settings.max_new_tokens,
            "streamer": self._streamer(show) if show else None,
            "pad_token_id": self._pad(),
            **sampling,
        }
        torch.manual_seed(settings.seed)
        start = time.perf_counter()
        trace: dict[str, Any] | None = None
        if spec:
            asked = [{"name": s.name, **s.params.model_dump(exclude_unset=True)} for s in spec]
            with steering(self.model, asked, tokenizer=self.tokenizer) as model:
                result = model.generate(**arguments)
                trace = model.steering.traces[0]
        else:
            result = self.model.generate(**arguments)
        seconds = time.perf_counter() - start
        ids = result[0, len(prompt_ids) :].tolist()
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Answer(ids, text, seconds, trace, _marks(trace, len(ids)))

    def marks(self, answer: Answer, prompt_ids: list[int], spec: Spec) -> dict[int, float | None]:
        """The tokens of an unsteered answer that ``spec`` would have moved, by replaying it from its ids."""
        from llm_steer.runtime import replay
        from llm_steer.spec import resolve
        from llm_steer.tokens import Vocabulary

        spec = tuple(steer for steer in spec if not (steer.plugin.feedback or steer.plugin.steers_hidden_states()))
        if not spec:
            return {}
        width = int(self.model.config.get_text_config(decoder=True).vocab_size)
        vocabulary = Vocabulary(self.tokenizer, width)
        markers = vocabulary.markers(boundaries=any(steer.plugin.needs_boundaries for steer in spec))
        trace = replay(resolve(spec, vocabulary), markers, width, prompt_ids, answer.ids)
        return dict.fromkeys(_marks(trace, len(answer.ids)))

    def piece(self, token: int) -> str:
        text: str = self.tokenizer.decode([token])
        return text

    def _pad(self) -> int | None:
        pad: int | None = self.tokenizer.pad_token_id
        end: int | None = self.tokenizer.eos_token_id
        return pad if pad is not None else end

    def _streamer(self, show: Callable[[str], None]) -> Any:
        from transformers import TextStreamer

        class Streamer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        return Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)


def _load(source: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype if dtype == "auto" else getattr(torch, dtype))


def _device(asked: str) -> str:
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=asked)
    except Exception as error:  # torch raises AssertionError, RuntimeError or NotImplementedError, by device
        raise SteerError("--device", asked, f"a device of this machine ({str(error).splitlines()[0]})") from error
    return asked


def _marks(trace: dict[str, Any] | None, length: int) -> dict[int, float | None]:
    """Positions and offsets that the plugins of a trace report."""
    marks: dict[int, float | None] = {}
    for plugin in (trace or {}).get("plugins", []):
        positions = plugin.get("positions", [])
        deltas = plugin.get("deltas", [None] * len(positions))
        marks.update((t, delta) for t, delta in zip(positions, deltas, strict=False) if 0 <= t < length)
    return marks


# -- showing -------------------------------------------------------------------------------------------------------------

MOST_ROWS = 16
"""Marked tokens to list in a terminal; --json has them all."""


def _head(out: Output, engine: Engine, prompt: str, spec: Spec) -> None:
    from rich.text import Text

    console = out.console
    steering = " ".join(spec_text(s.name, given(s.params)) for s in spec) or "off"
    for name, value in (("model", engine.label), ("steer", steering), ("prompt", prompt)):
        console.print(Text.assemble((f"{name:<7}", "dim"), value))
    console.print()


def _side_by_side(out: Output, engine: Engine, plain: Answer, steered: Answer) -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if out.unicode else box.ASCII2, expand=True, pad_edge=False)
    for name, answer in (("unsteered", plain), ("steered", steered)):
        table.add_column(f"{name}  ({len(answer.ids)} tokens, {len(answer.marks)} marked)", ratio=1, overflow="fold")
    table.add_row(*(marked(answer, engine, out.unicode) for answer in (plain, steered)))
    out.console.print(table)


def marked(answer: Answer, engine: Engine, unicode: bool) -> Text:
    """The answer's text with its marked tokens between brackets, and in colour where there is any."""
    from rich.text import Text

    opening, closing = ("«", "»") if unicode else ("[", "]")
    ids = answer.ids

    def upto(end: int) -> str:
        return str(engine.tokenizer.decode(ids[:end], skip_special_tokens=True))

    text, done = Text(), 0
    for position in sorted(answer.marks):
        before, after = upto(position), upto(position + 1)
        token = after[len(before) :]
        word = token.lstrip()
        text.append(after[done : len(before)] + token[: len(token) - len(word)])
        text.append(f"{opening}{word}{closing}", "bold yellow")
        done = len(after)
    text.append(answer.text[done:])
    return text


def _trace(out: Output, engine: Engine, answer: Answer, spec: Spec) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out.console
    speed = len(answer.ids) / answer.seconds if answer.seconds else 0.0
    if answer.trace is None:
        console.print(f"Not steered. {len(answer.ids)} tokens, {speed:.1f} a second.", style="dim")
        return
    thinking = f", {answer.trace['think_tokens']} of them thinking" if answer.trace.get("think_tokens") else ""
    console.print(Text.assemble(("Trace  ", "bold"), f"{len(answer.ids)} tokens{thinking}, {speed:.1f} a second"))
    for steer, plugin in zip(spec, answer.trace["plugins"], strict=True):
        counts = [f"{value} {key.replace('_', ' ')}" for key, value in plugin.items() if type(value) in (int, float)]
        console.print(Text(f"{plugin['name']}: {', '.join(counts)}"))
        _wave(out, steer, answer, plugin)
    if not answer.marks:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("position", justify="right")
    table.add_column("token")
    table.add_column("delta", justify="right")
    shown = sorted(answer.marks.items())
    for t, delta in shown[:MOST_ROWS]:
        style = "" if not delta else "green" if delta > 0 else "red"
        table.add_row(str(t), Text(repr(engine.piece(answer.ids[t]))), Text("" if delta is None else f"{delta:+.3f}", style))
    console.print(table)
    if len(shown) > MOST_ROWS:
        console.print(f"and {len(shown) - MOST_ROWS} more (--json lists all)", style="dim")


def _wave(out: Output, steer: Steer, answer: Answer, plugin: dict[str, Any]) -> None:
    """The curve over this answer, with pointers at its marked tokens, for plugins that can draw one."""
    preview = getattr(steer.plugin, "preview", None)
    # A wave that starts with the think span does not lie over the answer's tokens.
    if preview is None or len(answer.ids) < 2 or (answer.trace or {}).get("think_tokens"):
        return
    from llm_steer.cli.draw import curve

    drawn = preview(steer.params, len(answer.ids))
    marks = [drawn["t"][t] for t in plugin.get("positions", []) if t < len(answer.ids)]
    console = out.console
    console.print(
        curve(drawn["t"], drawn["delta"], width=min(console.width, 100), height=7, marks=marks, unicode=out.unicode)
    )
