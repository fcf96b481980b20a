"""A vLLM ``LLM`` object in this process: requests enter its engine one by one, and leave it as they finish."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

from llm_steer.engines import voting
from llm_steer.engines.base import Engine, Request, Response, Stream
from llm_steer.engines.common import check, failed, model_identity, prompt_ids, versions, weights_identity
from llm_steer.errors import SteerError, UnsupportedError

_numbers = itertools.count()


class VLLMEngine(Engine):
    """Requests of several streams share the engine. Whoever waits for a response runs the engine's steps."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        self._engine = llm.llm_engine
        self._config = self._engine.model_config
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()

    def submit(self, requests: Sequence[Request]) -> Stream:
        check(requests)
        return voting.submit(self._start, requests)

    def identity(self) -> dict[str, Any]:
        from llm_steer.hosts.vllm.declared import DEFAULTS

        return {
            "engine": "vllm",
            "model": self._config.model,
            "dtype": str(self._config.dtype).removeprefix("torch."),
            "quantization": self._config.quantization,
            "steering": list(getattr(self._config, DEFAULTS, ())),
            **model_identity(self._config.hf_config, self.tokenizer),
            **weights_identity(self._config.model),
            **versions(*_distribution()),
        }

    # ------------------------------------------------------------------------------------------------------------------

    def _start(self, requests: Sequence[Request]) -> _Stream:
        from vllm.exceptions import VLLMValidationError

        stream = _Stream(self, len(requests))
        for index, request in enumerate(requests):
            try:
                self._add(index, request, stream)
            except (ValueError, UnsupportedError, VLLMValidationError) as error:
                stream.ready.append((index, failed(error)))
        return stream

    def _add(self, index: int, request: Request, stream: _Stream) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        ids = prompt_ids(request, self.tokenizer)
        room = self._config.max_model_len - len(ids)
        if room < 1:
            raise SteerError("prompt", f"{len(ids)} tokens", f"shorter than max_model_len={self._config.max_model_len}")
        sampling = request.sampling
        extra: dict[str, Any] = {} if request.steer is None else {"steer": request.steer}
        params = SamplingParams(
            max_tokens=min(sampling.max_tokens, room),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=sampling.seed,
            stop=list(sampling.stop),
            ignore_eos=sampling.ignore_eos,
            logprobs=0 if request.logprob else None,
            output_kind=RequestOutputKind.FINAL_ONLY,  # vLLM builds no output of a request that nobody reads
            extra_args=extra or None,
        )
        running = _Running(index, len(ids), request.trace, stream)
        name = f"llm-steer-{next(_numbers)}"
        with self._lock:
            self._engine.add_request(name, {"prompt_token_ids": ids}, params)
            self._running[name] = running
            stream.names[index] = name

    def pump(self, stream: _Stream) -> None:
        """Run the engine until it has something for a stream."""
        while not stream.ready:
            with self._lock:
                if stream.ready:
                    return
                for output in self._engine.step():
                    if (running := self._running.get(output.request_id)) is None:
                        continue
                    del self._running[output.request_id]
                    running.end(output)

    def abort(self, names: Sequence[str]) -> None:
        with self._lock:
            names = [name for name in names if name in self._running]
            for name in names:
                self._running.pop(name).end(self._so_far(name))
            if names:
                self._engine.abort_request(names)

    def _so_far(self, name: str) -> Any:
        """vLLM's output of a request that is about to be aborted: it makes none by itself."""
        from vllm.v1.engine import FinishReason

        processor = self._engine.output_processor
        (internal,) = processor.external_req_ids[name]
        return processor.request_states[internal].make_request_output([], None, FinishReason.ABORT, None)


class _Running:
    """A request in the engine."""

    def __init__(self, index: int, prompt_tokens: int, trace: bool, stream: _Stream) -> None:
        self.index, self.prompt_tokens, self.trace, self.stream = index, prompt_tokens, trace, stream
        self.began = time.perf_counter()

    def end(self, output: Any) -> None:
        (whole,) = output.outputs
        finish: Any = whole.finish_reason if whole.finish_reason in ("stop", "length", "abort") else "error"
        response = Response(
            text=whole.text,
            finish=finish,
            prompt_tokens=self.prompt_tokens,
            tokens=len(whole.token_ids),
            token_ids=list(whole.token_ids),
            logprob=whole.cumulative_logprob,
            steering=whole.steering if self.trace else None,
            seconds=time.perf_counter() - self.began,
            error=f"vLLM ended the request: {whole.finish_reason}" if finish == "error" else None,
        )
        self.stream.ready.append((self.index, response))


class _Stream(Stream):
    def __init__(self, engine: VLLMEngine, count: int) -> None:
        self.ready: deque[tuple[int, Response]] = deque()
        self.names: dict[int, str] = {}
        self._engine = engine
        self._left = count

    def __next__(self) -> tuple[int, Response]:
        if not self._left:
            raise StopIteration
        self._engine.pump(self)
        self._left -= 1
        return self.ready.popleft()

    def abort(self, index: int) -> None:
        if index in self.names:
            self._engine.abort([self.names[index]])

    def close(self) -> None:
        self._left = 0
        self._engine.abort(list(self.names.values()))


@cache
def _distribution() -> list[str]:
    """Names under which vLLM is installed: that of its CPU build is another one."""
    from importlib.metadata import packages_distributions

    return packages_distributions().get("vllm", [])[:1]
