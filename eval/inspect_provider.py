"""Inspect AI (0.3) on our engines: its tasks, solvers and scorers, our steering.

    inspect eval TASK --model llm-steer/MODEL -M steer=reflection_cycle:amplitude=5 -M engine=vllm

Inspect imports this module by its entry point ``inspect_ai``; nothing of ours does.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo
from llm_steer.eval.engine import open_engine
from llm_steer.eval.harness import MAX_TOKENS, run_for

from llm_steer.engines.base import Engine, Request, Response, Sampling
from llm_steer.errors import SteerError

GATHER = 0.05
"""Seconds that the first request of a batch waits for others."""
RUN_FIELDS = ("batch_size", "dtype", "device")
"""Model arguments that are fields of :class:`~llm_steer.eval.config.RunConfig`; the others are the engine's own."""
REFUSED = {
    "num_choices": 1, "best_of": 1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False,
    "top_logprobs": 0, "prompt_logprobs": 0, "response_schema": None,
}  # fmt: skip
"""Settings that no engine of ours takes, with the value that changes nothing. To drop any other would change the result."""
STOPS: dict[str, StopReason] = {"stop": "stop", "length": "max_tokens"}
END_THINK = "</think>"


class Together:
    """Requests that coroutines ask one at a time, answered in batches: what has arrived when the engine is free."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: queue.SimpleQueue[tuple[Request, Future[Response]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    async def ask(self, request: Request) -> Response:
        future: Future[Response] = Future()
        self._waiting.put((request, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._waiting.put(None)

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            time.sleep(GATHER)
            batch = [first]
            while not self._waiting.empty():
                if (asked := self._waiting.get()) is None:
                    self._waiting.put(None)  # behind what came before it
                    break
                batch.append(asked)
            self._answer([(request, future) for request, future in batch if future.set_running_or_notify_cancel()])

    def _answer(self, batch: list[tuple[Request, Future[Response]]]) -> None:
        try:
            with self._engine.submit([request for request, _ in batch]) as stream:
                for index, response in stream:
                    batch[index][1].set_result(response)
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)


class Steered(ModelAPI):  # type: ignore[misc]
    """A model that is steered in every request.

    Args:
        model_args: ``steer`` (``none`` if left out), ``engine`` (``hf`` or ``vllm``), ``batch_size``, ``dtype``, ``device``;
            anything else goes to ``from_pretrained`` or ``vllm.LLM``.

    Raises:
        SteerError: naming the argument, its value and what would be valid.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 (Inspect's signature)
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        if base_url:
            raise SteerError("base_url", base_url, "left out: a server is asked by Inspect's own provider openai-api")
        steer: Any = model_args.pop("steer", "none")
        steer = ",".join(map(str, steer)) if isinstance(steer, list) else str(steer)  # Inspect splits at commas
        engine = str(model_args.pop("engine", "hf"))
        fields = {name: model_args.pop(name) for name in RUN_FIELDS if name in model_args}
        self.run, self.method = run_for(model_name, steer, engine, **fields, engine_args=model_args)

    @cached_property
    def together(self) -> Together:
        """Opened with the first request: Inspect also makes instances only to read a model's name off them."""
        engine, _ = open_engine(self.run, [self.method])
        return Together(engine)

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """Answer a chat. The trace of steering is in ``metadata["steering"]``; what the model thought, up to the last
        ``</think>``, is content of its own, so that scorers see the answer."""
        if tools:
            raise SteerError("tools", [tool.name for tool in tools], "left out: these models call none")
        for name, no_change in REFUSED.items():
            if (value := getattr(config, name)) not in (None, no_change):
                raise SteerError(name, value, "left out")
        messages = [{"role": message.role, "content": message.text} for message in input]
        response = await self.together.ask(
            Request(messages, sampling=_sampling(config), steer=self.method.steer, trace=True, logprob=False)
        )
        if response.error:
            raise RuntimeError(response.error)
        return ModelOutput(
            model=self.model_name,
            choices=[
                ChatCompletionChoice(message=_message(response.text), stop_reason=STOPS.get(response.finish, "unknown"))
            ],
            usage=ModelUsage(
                input_tokens=response.prompt_tokens,
                output_tokens=response.tokens,
                total_tokens=response.prompt_tokens + response.tokens,
            ),
            time=response.seconds,
            metadata={"steering": dict(response.steering)} if response.steering else None,
        )

    def max_connections(self) -> int:
        """As many as a batch may hold."""
        return 256

    async def aclose(self) -> None:
        if "together" in vars(self):
            self.together.close()


def _sampling(config: GenerateConfig) -> Sampling:
    return Sampling(
        max_tokens=MAX_TOKENS if config.max_tokens is None else config.max_tokens,
        temperature=1.0 if config.temperature is None else config.temperature,
        top_p=1.0 if config.top_p is None else config.top_p,
        top_k=config.top_k or 0,
        seed=config.seed,
        stop=tuple(config.stop_seqs or ()),
    )


def _message(text: str) -> ChatMessageAssistant:
    thought, closed, answer = text.rpartition(END_THINK)
    if not closed:
        return ChatMessageAssistant(content=text)
    return ChatMessageAssistant(content=[ContentReasoning(reasoning=thought), ContentText(text=answer.strip())])


@modelapi(name="llm-steer")  # type: ignore[untyped-decorator]
def provider() -> type[ModelAPI]:
    """The provider, under the name that comes before the slash of ``--model``."""
    return Steered
