"""``llm-steer lm-eval``: lm-evaluation-harness with a steered model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from llm_steer.cli.common import Json, output
from llm_steer.errors import MissingDependencyError


def lm_eval(
    model: Annotated[str, typer.Argument(help="A model's folder or Hugging Face id.")],
    tasks: Annotated[str, typer.Option(help="lm-evaluation-harness's tasks, with commas between them.")],
    steer: Annotated[str, typer.Option("--steer", "-s", help="none, or NAME:key=value,key=value.")] = "none",
    engine: Annotated[str, typer.Option(help="hf or vllm.")] = "hf",
    limit: Annotated[int | None, typer.Option(help="Only the first so many documents of each task.")] = None,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Rows at a time on Hugging Face.")] = 16,
    include_path: Annotated[str | None, typer.Option(help="Folder with further task files.")] = None,
    chat: Annotated[bool, typer.Option(help="Put prompts into the chat template.")] = True,
    json: Json = False,
) -> None:
    """Run tasks of lm-evaluation-harness that generate text, steered."""
    if find_spec("lm_eval") is None:
        raise MissingDependencyError("lm-eval", "lm-eval", "llm-steer lm-eval")
    with output(json) as out:
        from llm_steer.eval.engine import open_engine
        from llm_steer.eval.harness import evaluate, run_for

        config, method = run_for(model, steer, engine, batch_size=batch_size)
        opened, tokenizer = open_engine(config, [method])
        found = evaluate(
            opened, tokenizer, method.steer, tasks.split(","), limit=limit, seed=seed, include_path=include_path, chat=chat
        )
        if json:
            out.document(found)
        else:
            for task, metrics in found.items():
                for name, value in metrics.items():
                    out.text(f"{task}  {name}  {value}\n")
