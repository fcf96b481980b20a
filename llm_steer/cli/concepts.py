"""``llm-steer concepts``: dictionaries of activation_reasoning."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import typer

from llm_steer.cli.common import Json, find_model, note, output
from llm_steer.errors import SteerError

app = typer.Typer(no_args_is_help=True, help="Find the concepts that activation_reasoning detects.")

METHODS = ("single", "top_k", "relational", "tversky", "direction", "probe")


@app.command("find")
def find(
    model: Annotated[str, typer.Argument(help="A folder, a Hugging Face model id, or default.")],
    data: Annotated[Path, typer.Option(help='JSON lines {"text": ..., "labels": [...]}, or with "spans".')],
    layer: Annotated[int, typer.Option(help="Decoder layer behind which hidden states are read.")],
    out: Annotated[Path, typer.Option(help="Folder of the dictionary that is written.")],
    sae: Annotated[
        Path | None,
        typer.Option(
            help="An SAE of that layer (SAELens, sparsify, Gemma Scope): a folder, or OWNER/REPO/FOLDER of the hub."
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help=f"{', '.join(METHODS)}; top_k with an SAE, else direction.")] = None,
    top_k: Annotated[int, typer.Option(help="Features of a top_k or tversky concept.")] = 5,
    alpha: Annotated[float, typer.Option(help="tversky: weight of active features that are not the concept's.")] = 0.5,
    beta: Annotated[float, typer.Option(help="tversky: weight of the concept's features that are not active.")] = 0.5,
    concept: Annotated[list[str] | None, typer.Option(help="A label to find; all labels if left out. Repeatable.")] = None,
    whole: Annotated[bool, typer.Option(help="Keep the whole SAE: what a top-k SAE's features need to be exact.")] = False,
    json: Json = False,
) -> None:
    """Find concepts in labelled texts and write a dictionary, with thresholds and AUC from held-out texts."""
    with output(json) as terminal:
        if method is not None and method not in METHODS:
            raise SteerError("--method", method, f"one of {', '.join(METHODS)}")
        chosen = method or ("top_k" if sae else "direction")
        report = search(model, data, layer, out, sae, chosen, top_k, concept, whole, (alpha, beta))
        if json:
            terminal.document(report)
            return
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in ("concept", "kind", "features", "AUC, balanced: token", "text (max)", "text (mean)"):
            table.add_column(column)
        for row in report["concepts"]:
            told = row["report"]
            levels = ("token", "max", "mean")
            figures = [f"{told[f'{level}/auc']:.3f}, {told[f'{level}/balanced_accuracy']:.3f}" for level in levels]
            table.add_row(row["name"], row["kind"], ", ".join(map(str, row["features"])) or "-", *figures)
        terminal.console.print(table)
        note(f"Written to {out}; figures are of {report['held_out']} held-out texts")


def search(
    model_name: str, data: Path, layer: int, out: Path, sae_folder: Path | None, method: Any, top_k: int,
    names: list[str] | None, whole: bool, weights: tuple[float, float] = (0.5, 0.5),
) -> dict[str, Any]:  # fmt: skip
    """What the command does; its JSON document."""
    from llm_steer.plugins.activation_reasoning.concepts import METHOD, Dictionary, Tversky
    from llm_steer.plugins.activation_reasoning.find import Encoded, labels_of_tokens, read_examples
    from llm_steer.plugins.activation_reasoning.find import find as find_concept

    examples = read_examples(data)
    known = sorted({label for example in examples for label in example.labels})
    wanted = names or known
    for name in wanted:
        if name not in known:
            raise SteerError("--concept", name, f"a label of the data: {', '.join(known[:20])}")
    if not wanted:
        raise SteerError("--data", str(data), "texts with labels")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llm_steer.artifact import ModelIdentity
    from llm_steer.hosts.hf_layers import decoder_config
    from llm_steer.plugins.activation_reasoning.sae import load_sae, normalized

    path, _ = find_model(model_name, "MODEL")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    config = decoder_config(model)
    if not 0 <= layer < config.num_hidden_layers - 1:
        valid = f"between 0 and {config.num_hidden_layers - 2}: the last layer's output is not seen without the final norm"
        raise SteerError("--layer", layer, valid)
    sae = load_sae(sae_folder, config.hidden_size) if sae_folder else None
    if whole and (sae is None or sae.architecture != "topk"):
        raise SteerError("--whole", True, "used with a top-k SAE")
    encoded = []
    for example in examples:
        tokens = tokenizer(example.text, truncation=True, max_length=512, return_offsets_mapping=True, return_tensors="pt")
        offsets = [tuple(pair) for pair in tokens.pop("offset_mapping")[0].tolist()]
        if len(offsets) < 2:
            continue
        with torch.inference_mode():
            hidden = model(input_ids=tokens.input_ids, output_hidden_states=True, use_cache=False).hidden_states[layer + 1][
                0
            ]
        hidden = normalized(hidden.float(), sae.normalize if sae else "none")[1:].clone()
        labels = {name: torch.tensor(labels_of_tokens(example, name, offsets)[1:]) for name in wanted}
        encoded.append(Encoded(hidden, labels, example.held_out))
    concepts = [find_concept(name, encoded, method, sae, top_k, Tversky(*weights)) for name in wanted]
    dictionary = Dictionary.of(concepts, layer, sae, whole)
    identity = ModelIdentity.of(model.config, architecture=type(model).__name__, dtype=model.dtype, tokenizer=tokenizer)
    calibration = {"data_sha256": hashlib.sha256(data.read_bytes()).hexdigest(), "texts": len(encoded), "method": method}
    artifact = dictionary.to_artifact(identity, calibration)
    artifact.save(out)
    return {
        "method": METHOD,
        "out": str(out),
        "layer": layer,
        "content_hash": artifact.content_hash,
        "texts": len(encoded),
        "held_out": sum(e.held_out for e in encoded),
        "concepts": [
            {"name": c.name, "kind": c.kind, "features": list(c.indices), "thresholds": c.thresholds, "widths": c.widths,
             "report": c.report}
            for c in concepts
        ],
    }  # fmt: skip
