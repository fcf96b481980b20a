"""Other harnesses on our engines. Here lm-evaluation-harness (0.4.13): its tasks, its prompts and its grading, our steering;
Inspect AI is in ``inspect_provider.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llm_steer.eval.config import RunConfig
from llm_steer.eval.methods import Method, parse_methods, split

from llm_steer.engines.base import Engine, Request, Sampling
from llm_steer.errors import SteerError, UnsupportedError

MAX_TOKENS = 2048
"""Where a task does not say."""


def run_for(model: str, steer: str, engine: str, **fields: Any) -> tuple[RunConfig, Method]:
    """What another harness, which brings its own tasks, runs on.

    Args:
        steer: ``none``, or ``NAME:key=value,key=value``.
        fields: of :class:`~llm_steer.eval.config.RunConfig`.

    Raises:
        SteerError: several methods, one that is no plugin, another engine.
    """
    if engine not in ("hf", "vllm"):
        raise SteerError("engine", engine, "hf or vllm")
    (method, *others) = parse_methods(split(steer))
    if others or method.loop:
        raise SteerError("steer", steer, "one method that steers, or none")
    config: dict[str, Any] = {"model": model, "tasks": ["-"], "out": "-", "engine": engine, **fields}
    return RunConfig(**config), method


def evaluate(
    engine: Engine,
    tokenizer: Any,
    steer: Any,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    seed: int = 0,
    include_path: str | None = None,
    chat: bool = True,
) -> dict[str, dict[str, Any]]:
    """Run tasks.

    Args:
        tokenizer: writes few-shot chats as one prompt; needed if ``chat``.
        steer: as ``Request.steer``.

    Returns:
        Metrics by task, JSON types.

    Raises:
        SteerError: no task has one of the names.
        UnsupportedError: a task scores given texts in place of generating.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise SteerError("--tasks", unknown[0], "a task of lm-evaluation-harness: see lm-eval ls tasks")
    model = model_class()(engine, tokenizer, steer, seed)
    found = lm_eval.simple_evaluate(
        model=model, tasks=[*tasks], limit=limit, task_manager=manager, apply_chat_template=chat, log_samples=False
    )
    return {
        task: {
            name: float(value) if isinstance(value, float) else value  # NumPy's floats too
            for name, value in metrics.items()
            if isinstance(value, int | float | str)
        }
        for task, metrics in found["results"].items()
    }


def model_class() -> type[Any]:
    """The harness's model, registered there as ``llm-steer``; 0.4.13 finds models only where they are imported."""
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    class Steered(LM):  # type: ignore[misc]
        """Generates with an engine."""

        def __init__(self, engine: Engine, tokenizer: Any, steer: Any, seed: int = 0) -> None:
            super().__init__()
            self.engine, self.tokenizer, self.steer, self.seed = engine, tokenizer, steer, seed

        @property
        def tokenizer_name(self) -> str:
            return str(self.engine.identity()["model"])

        def chat_template(self, chat_template: bool | str = False) -> str:
            return str(self.tokenizer.chat_template or "") if chat_template else ""

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return str(
                self.tokenizer.apply_chat_template(
                    chat_history,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=not add_generation_prompt,
                )
            )

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            responses = self.engine.run([self._request(n, *r.args) for n, r in enumerate(requests)])
            if failed := [r.error for r in responses if r.error]:
                raise UnsupportedError(f"{len(failed)} requests got no answer. The first error: {failed[0]}")
            for request, response in zip(requests, responses, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, response.text)
            return [response.text for response in responses]

        def _request(self, number: int, prompt: str, arguments: dict[str, Any]) -> Request:
            until = arguments.get("until") or ()
            temperature = float(arguments.get("temperature", 0.0)) if arguments.get("do_sample", True) else 0.0
            sampling = Sampling(
                max_tokens=int(arguments.get("max_gen_toks") or arguments.get("max_new_tokens") or MAX_TOKENS),
                temperature=temperature,
                top_p=float(arguments.get("top_p", 1.0)),
                seed=self.seed + number,
                stop=(until,) if isinstance(until, str) else tuple(until),
            )
            # Special tokens are in the text already where a chat template wrote it.
            ids = self.tokenizer(prompt, add_special_tokens=not self._templated(prompt))["input_ids"]
            return Request(prompt=ids, sampling=sampling, steer=self.steer)

        def _templated(self, prompt: str) -> bool:
            return any(token and prompt.startswith(token) for token in (self.tokenizer.bos_token,))

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            raise UnsupportedError(
                "this task scores given texts, where nothing is generated and nothing steered; use one that generates"
            )

        loglikelihood_rolling = loglikelihood

    try:
        return register_model("llm-steer")(Steered)  # type: ignore[no-any-return]
    except (AssertionError, ValueError):  # registered by an earlier call
        return Steered
