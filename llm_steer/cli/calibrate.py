"""``llm-steer calibrate``: make the artifact of a method from a model's own outputs."""

from __future__ import annotations

import hashlib
import json as jsonlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from llm_steer.cli.common import (
    Json,
    Output,
    check_range,
    find_model,
    load_tokenizer,
    loading,
    note,
    output,
    quiet_transformers,
)
from llm_steer.errors import MissingDependencyError, SteerError

app = typer.Typer(help="Make the artifact of a method from a model's own outputs.", no_args_is_help=True)

PROBLEM = ("problem", "question", "prompt")
"""Keys under which a line of the data may hold its problem; ``messages`` holds a chat."""

Model = Annotated[str, typer.Argument(help="A model's folder or Hugging Face id; default for the embedded one.")]
Out = Annotated[Path, typer.Option(help="Folder for the artifact, the report and the outputs; a stopped run goes on there.")]


@app.command("rebalance")
def rebalance(
    model: Model,
    data: Annotated[Path, typer.Option(help="JSON lines with a problem each (problem, question, prompt or messages).")],
    out: Out,
    limit: Annotated[int, typer.Option(help="Problems to use, from the first on.")] = 500,
    mode: Annotated[
        str, typer.Option(help="reference or paper: what confidence and the two kinds of steps are.")
    ] = "reference",
    states: Annotated[
        str,
        typer.Option(help="delimiter, where the vector is added, or first, the token behind: where it is learnt."),
    ] = "delimiter",
    system: Annotated[str | None, typer.Option(help="System message for the chat template.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an output.")] = 16_000,
    temperature: Annotated[float, typer.Option(help="As the model will be used; 0 is greedy.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="As the model will be used.")] = 0.95,
    layer: Annotated[int | None, typer.Option(help="Steer behind this layer, instead of choosing.")] = None,
    batch_size: Annotated[int, typer.Option(help="Outputs generated together.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    engine: Annotated[
        str, typer.Option(help="hf or vllm: what generates. Hidden states are read with transformers all the same.")
    ] = "hf",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16, float16.")] = "auto",
    json: Json = False,
) -> None:
    """Generate, measure confidence, choose a layer, and write vector, thresholds and a report with a picture."""
    with output(json) as shown:
        check_range("--limit", limit, 1, 10_000_000)
        check_range("--max-tokens", max_tokens, 1, 1_000_000)
        check_range("--temperature", temperature, 0, 100)
        check_range("--top-p", top_p, 0, 1, above=True)
        check_range("--batch-size", batch_size, 1, 100_000)
        check_range("--seed", seed, 0, 2**62)
        if mode not in ("reference", "paper"):
            raise SteerError("--mode", mode, "reference or paper")
        if states not in ("first", "delimiter"):
            raise SteerError("--states", states, "first or delimiter")
        if engine not in ("hf", "vllm"):
            raise SteerError("--engine", engine, "hf or vllm")
        if dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise SteerError("--dtype", dtype, "auto, float32, bfloat16 or float16")
        chats = read_problems(data, limit, system)
        source, label = find_model(model, "MODEL")
        quiet_transformers()

        from llm_steer.artifact import ModelIdentity
        from llm_steer.cli.generate import _device, _load
        from llm_steer.plugins.rebalance import calibrate, collect_vllm
        from llm_steer.plugins.rebalance.picture import draw

        tokenizer = load_tokenizer(source, label, "MODEL")
        with loading(label, "MODEL"):
            loaded = _load(source, dtype).eval()
        identity = ModelIdentity.of(
            loaded.config, architecture=type(loaded).__name__, dtype=loaded.dtype, tokenizer=tokenizer
        )
        if layer is not None:
            check_range("--layer", layer, 0, identity.num_layers - 1)
        prompts = encode(tokenizer, chats, label)
        settings = calibrate.Settings(
            data=hashlib.sha256(data.read_bytes() + repr(system).encode()).hexdigest(),
            model=hashlib.sha256((identity.model_dump_json() + engine.removeprefix("hf")).encode()).hexdigest(),
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            batch_size=batch_size,
        )
        progress = Progress()
        if engine == "vllm":  # before this process takes the device
            with collect_vllm.source(source, tokenizer, dtype=dtype) as generate:
                calibrate.collect_outputs(
                    generate, prompts, out, settings, lambda done: progress("generating with vLLM", done, len(prompts))
                )
        loaded.to(_device(device))
        options: Any = {"mode": mode, "states": states, "layer": layer, "progress": progress}
        report = calibrate.run(loaded, tokenizer, prompts, out, settings, **options)
        try:
            draw(report, out / "report.png")
        except MissingDependencyError as error:
            note(str(error))
        if json:
            shown.document({"out": str(out), **report})
        else:
            show(shown, out, report)


@app.command("published")
def published(
    vector: Annotated[Path, typer.Argument(help="The authors' file, steer_vector_layer*_conf_mixed.pt.")],
    preset: Annotated[str, typer.Option(help="The model that it is for: r1-distill-qwen-1.5b, -7b, qwq-32b or qwen3-14b.")],
    out: Annotated[Path, typer.Option(help="Folder for the artifact.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(help="The model's folder or id: its tokenizer is noted, and checked later."),
    ] = None,
    json: Json = False,
) -> None:
    """Turn a vector that ReBalance's authors published into an artifact, with the constants of their code."""
    with output(json) as shown:
        from llm_steer.plugins.rebalance.published import read

        loaded = None
        if tokenizer is not None:
            source, label = find_model(tokenizer, "--tokenizer", tokenizer_only=True)
            quiet_transformers()
            loaded = load_tokenizer(source, label, "--tokenizer")
        artifact = read(vector, preset, loaded)
        artifact.save(out)
        document = {"out": str(out), "artifact": artifact.content_hash, "layer": artifact.description.layer}
        if json:
            shown.document(document)
        else:
            shown.console.print(f"{out}: before layer {document['layer']}, sha256:{document['artifact']}")


def read_problems(path: Path, limit: int, system: str | None) -> list[list[dict[str, str]]]:
    """The chats of the first lines of a file.

    Raises:
        SteerError: naming the line.
    """
    chats: list[list[dict[str, str]]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if len(chats) == limit:
                    break
                if line.strip():
                    chats.append(_chat(line.strip(), number, system))
    except (OSError, UnicodeDecodeError) as error:
        raise SteerError("--data", str(path), f"a readable file of JSON lines ({error})") from error
    if not chats:
        raise SteerError("--data", str(path), "a file with at least one problem")
    return chats


def _chat(line: str, number: int, system: str | None) -> list[dict[str, str]]:
    where = f"--data, line {number}"
    try:
        record = jsonlib.loads(line)
    except (ValueError, RecursionError) as error:
        raise SteerError(where, line, f"JSON ({error})") from error
    if isinstance(record, dict) and isinstance(messages := record.get("messages"), list):
        chat = [dict(message) for message in messages if isinstance(message, dict)]
        if len(chat) != len(messages) or not all(isinstance(m.get("content"), str) for m in chat):
            raise SteerError(where, messages, "messages with role and content")
    else:
        texts = [record[key] for key in PROBLEM if isinstance(record.get(key), str)] if isinstance(record, dict) else []
        if not texts:
            raise SteerError(where, record, f"an object with one of {', '.join(PROBLEM)}, messages")
        chat = [{"role": "user", "content": texts[0]}]
    return [{"role": "system", "content": system}, *chat] if system is not None else chat


def encode(tokenizer: Any, chats: list[list[dict[str, str]]], label: str) -> list[list[int]]:
    """Prompts as token ids; plain text where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        texts = ["\n\n".join(message["content"] for message in chat) for chat in chats]
        return [tokenizer(text)["input_ids"] for text in texts]
    with loading(label, "MODEL"):
        texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


@dataclass
class Progress:
    """A bar for each stage, on standard error, where somebody watches."""

    bars: dict[str, Any] = field(default_factory=dict)

    def __call__(self, stage: str, done: int, total: int) -> None:
        from tqdm import tqdm

        if stage not in self.bars:
            self.bars[stage] = tqdm(desc=stage, total=total, file=sys.stderr, disable=None)
        self.bars[stage].update(done)
        if self.bars[stage].n >= total:
            self.bars[stage].close()


def show(out: Output, folder: Path, report: dict[str, Any]) -> None:
    """The report in a terminal."""
    constants, held_out = report["constants"], report["held_out"]
    area = "not measured" if held_out["auc"] is None else f"AUC {held_out['auc']:.3f} ± {held_out['error']:.3f}"
    lines = (
        ("artifact", f"{folder} (sha256:{report['artifact'][:12]}…)"),
        ("steps", f"{report['steps']} behind a delimiter, of {report['problems']} problems: {report['over']} over-thinking, "
                  f"{report['under']} under-thinking, the rest neither"),
        ("layer", f"behind {report['layer']}, " + (_plus(report, "r2", "R²") if report["layer"] < len(report["r2"])
                  else "as asked")),
        ("vector", f"norm {report['norm']:.4g}, {report['relative_dose']:.2f} of the stream's; the floor adds "
                   f"{report['floor_dose']:.2f} of it"),
        ("thresholds", "  ".join(f"{name} {constants[name]:.4g}" for name in ("q25c", "q75c", "q25v", "q75v"))),
        ("amplitudes", "  ".join(f"{name} {constants[name]:.3g}" for name in ("low", "floor", "ceiling"))),
        ("held out", f"{area}: {held_out['over']} over-thinking, {held_out['under']} under-thinking steps"),
    )  # fmt: skip
    for name, value in (*lines, *(("note", text) for text in report["notes"])):
        out.console.print(f"{name:<11}{value}", soft_wrap=True)


def _plus(report: dict[str, Any], name: str, shown: str) -> str:
    value, error = report[name][report["layer"]], report[f"{name}_error"][report["layer"]]
    return f"{shown} not measured" if value is None else f"{shown} {value:.3f} ± {error:.3f}"
