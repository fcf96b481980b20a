"""Hugging Face ``generate``, in batches.

Rows of a batch have sampling settings of their own, so drawing is done here: ``generate`` decodes greedily from logits in
which only the drawn token is left. Each row draws by its own random numbers, whatever stands beside it.
"""

from __future__ import annotations

import atexit
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from llm_steer import spec
from llm_steer.api import steer
from llm_steer.engines import voting
from llm_steer.engines.base import Engine, Request, Response, Stream
from llm_steer.engines.common import QueueStream, check, failed, model_identity, prompt_ids, versions, weights_identity
from llm_steer.errors import SteerError, UnsupportedError
from llm_steer.hosts.hf import ATTRIBUTE, check_model
from llm_steer.hosts.hf_layers import decoder_config
from llm_steer.hosts.hf_steering import AS_STEERED

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llm_steer.hosts.hf_steering import Steering

NO_TOKEN = 2**31 - 1

_running: dict[threading.Thread, threading.Event] = {}
"""Threads that generate, and what makes each stop at its next token."""


@atexit.register
def _stop_all() -> None:
    """Python's end would meet the threads inside of torch, which aborts the process."""
    for closed in [*_running.values()]:
        closed.set()
    for thread in [*_running]:
        thread.join()


_draw: ContextVar[_Draw | None] = ContextVar("llm_steer_draw", default=None)


class HFEngine(Engine):
    """A transformers model in this process. One batch runs at a time, in a thread of its own.

    A model that is not steered yet is steered with ``"off"``: its own ``generate`` gives what it gave before. What it is
    steered with is the engine's default. The sampling defaults in the model's generation config are not used.

    Args:
        model: decoder-only.
        batch_size: rows of one call of ``generate``.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, batch_size: int = 16) -> None:
        check_model(model)
        if model.config.is_encoder_decoder:
            raise SteerError("model", type(model).__name__, "decoder-only")
        if batch_size < 1:
            raise SteerError("batch_size", batch_size, "at least 1")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self._lock = threading.Lock()
        self._limit = getattr(decoder_config(model), "max_position_embeddings", None) or 2**31

    @property
    def _steering(self) -> Steering:
        if getattr(self.model, ATTRIBUTE, None) is None:  # never steered, or no longer
            steer(self.model, "off", tokenizer=self.tokenizer)
        return getattr(self.model, ATTRIBUTE)  # type: ignore[no-any-return]

    def submit(self, requests: Sequence[Request]) -> Stream:
        check(requests)
        return voting.submit(self._start, requests)

    def identity(self) -> dict[str, Any]:
        return {
            "engine": "hf",
            "model": self.model.config._name_or_path or type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "steering": spec.to_wire(self._steering.spec),
            **model_identity(self.model.config, self.tokenizer),
            **weights_identity(self.model.config._name_or_path),
            **versions("transformers"),
        }

    # ------------------------------------------------------------------------------------------------------------------

    def _start(self, requests: Sequence[Request]) -> Stream:
        aborted: set[int] = set()
        closed = threading.Event()
        stream = QueueStream(len(requests), aborted.add, closed.set)
        rows: list[_Row] = []
        for index, request in enumerate(requests):
            try:
                rows.append(self._row(index, request, stream, lambda i: i in aborted or closed.is_set()))
            except (SteerError, UnsupportedError) as error:
                stream.put((index, failed(error)))
        # Whether a row may end at the end-of-sequence token is a setting of the whole call.
        batches = [
            alike[i : i + self.batch_size]
            for ignores in (False, True)
            if (alike := [row for row in rows if row.request.sampling.ignore_eos is ignores])
            for i in range(0, len(alike), self.batch_size)
        ]

        def work() -> None:
            try:
                with self._lock:
                    for batch in batches:
                        self._run(batch)
            except BaseException as error:
                stream.put(error)
            finally:
                _running.pop(thread)

        thread = threading.Thread(target=work, name="llm-steer-hf", daemon=True)
        _running[thread] = closed
        thread.start()
        return stream

    def _row(self, index: int, request: Request, stream: QueueStream, aborted: Callable[[int], bool]) -> _Row:
        asked = AS_STEERED if request.steer is None else request.steer
        # A list is one for each row: several plugins of one row are a list in it.
        asked = [*asked] if isinstance(asked, tuple) else asked
        self._steering.request([asked] if isinstance(asked, list) else asked)
        ids = prompt_ids(request, self.tokenizer)
        if len(ids) >= self._limit:
            raise SteerError("prompt", f"{len(ids)} tokens", f"shorter than the model's {self._limit} positions")
        most = min(request.sampling.max_tokens, self._limit - len(ids))
        return _Row(index, request, asked, ids, most, self.tokenizer, stream, aborted)

    def _run(self, batch: Sequence[_Row]) -> None:
        batch = [row for row in batch if not row.give_up()]
        if not batch:
            return
        try:
            self._generate(batch)
        except (SteerError, UnsupportedError) as error:
            open_rows = [row for row in batch if not row.sent]
            if len(batch) == 1:
                batch[0].send(failed(error))
            else:  # one of them is to blame
                for row in open_rows:
                    row.reset()
                    self._run([row])

    def _generate(self, batch: Sequence[_Row]) -> None:
        width = max(len(row.prompt) for row in batch)
        eos = [] if batch[0].request.sampling.ignore_eos else _listed(self.model.generation_config.eos_token_id)
        pad = next((id for id in (self.tokenizer.pad_token_id, *eos, 0) if id is not None), 0)
        ids = torch.full((len(batch), width), pad)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(batch):
            ids[i, width - len(row.prompt) :] = torch.tensor(row.prompt)
            mask[i, width - len(row.prompt) :] = 1
        model: Any = self.model
        device = model.get_input_embeddings().weight.device
        raw = _Raw()
        draw = _Draw(batch, raw)
        config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            max_new_tokens=max(row.most for row in batch),
            eos_token_id=eos or None,
            pad_token_id=pad,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            min_length=0,
            num_beams=1,
            temperature=1.0,
            top_k=50,  # the default: a greedy call ignores it, but would warn of another
            top_p=1.0,
        )
        if not eos:  # else the model's own would be filled in
            config.eos_token_id = NO_TOKEN
        for row in batch:
            row.began = time.perf_counter()
        with _drawing(self.model, draw):
            model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                generation_config=config,
                logits_processor=LogitsProcessorList([raw]),
                stopping_criteria=StoppingCriteriaList([_Stop(batch, frozenset(eos))]),
                steer=[row.asked for row in batch],
            )
        traced = [row for row in batch if row.request.trace]
        traces = self._steering.traces if traced else []
        for i, row in enumerate(batch):
            if not row.sent:
                row.finish(traces[i] if row.request.trace else None)


@dataclass(eq=False)
class _Row:
    """One request on its way."""

    index: int
    request: Request
    asked: Any
    prompt: list[int]
    most: int
    """Tokens it may generate."""
    tokenizer: PreTrainedTokenizerBase
    stream: QueueStream
    aborted: Callable[[int], bool]
    began: float = 0.0
    sent: bool = False
    ids: list[int] = field(default_factory=list)
    logprob: float = 0.0
    end: Literal["stop", "length", "abort"] | None = None
    ended: float = 0.0
    text: str | None = None
    """Set where a stop string ended it."""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As before its first token."""
        self.ids, self.logprob, self.end, self.text = [], 0.0, None, None
        self.random = random.Random(self.request.sampling.seed)

    def give_up(self) -> bool:
        """Answer a request that was aborted before it began."""
        if self.aborted(self.index):
            self.send(Response(finish="abort", prompt_tokens=len(self.prompt)))
        return self.sent

    def push(self, token: int, logprob: float) -> None:
        self.ids.append(token)
        self.logprob += logprob

    def check(self, eos: frozenset[int]) -> None:
        """Whether its last token is the last one."""
        if self.aborted(self.index):
            self.end = "abort"
        elif self.ids[-1] in eos or self._stopped():
            self.end = "stop"
        elif len(self.ids) >= self.most:
            self.end = "length"
        if self.end:
            self.ended = time.perf_counter()
            if not self.request.trace:
                self.finish(None)

    def finish(self, trace: Any) -> None:
        text = self.text if self.text is not None else self._decode(self.ids)
        self.send(
            Response(
                text=text,
                finish=self.end or "length",
                prompt_tokens=len(self.prompt),
                tokens=len(self.ids),
                token_ids=self.ids,
                logprob=self.logprob,
                steering=trace,
                seconds=(self.ended or time.perf_counter()) - self.began,
            )
        )

    def send(self, response: Response) -> None:
        self.sent = True
        self.stream.put((self.index, response))

    def _stopped(self) -> bool:
        stop = self.request.sampling.stop
        if not stop:
            return False
        # A stop string begins at most so many tokens before its last one, which may be part of a character.
        tail = self._decode(self.ids[-max(map(len, stop)) - 4 :])
        if not any(text in tail for text in stop):
            return False
        text = self._decode(self.ids)
        places = [place for s in stop if (place := text.find(s)) >= 0]
        if not places:
            return False
        self.text = text[: min(places)]
        return True

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class _Raw(LogitsProcessor):
    """Keeps the logits as they are before steering."""

    scores: torch.Tensor

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.scores = scores
        return scores


class _Draw(LogitsProcessor):
    """Draws each row's token from the finished logits, and leaves no other."""

    def __init__(self, rows: Sequence[_Row], raw: _Raw) -> None:
        self.rows, self.raw = rows, raw
        samplings = [row.request.sampling for row in rows]
        self.temperature = torch.tensor([s.temperature for s in samplings], dtype=torch.float64)
        self.top_k = torch.tensor([s.top_k or 2**31 for s in samplings])
        self.top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64)
        self.greedy = self.temperature == 0
        self.truncates = bool((self.top_k < 2**31).any() or (self.top_p < 1).any())

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens = self._tokens(scores)
        raw = self.raw.scores
        drawn = tokens.to(raw.device)[:, None]
        logprobs = raw.gather(1, drawn)[:, 0] - raw.logsumexp(1)
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if row.end is None:
                row.push(token, logprob)
        only = torch.full_like(scores, -torch.inf)
        return only.scatter_(1, tokens.to(scores.device)[:, None], 0.0)  # type: ignore[return-value]

    def _tokens(self, scores: torch.Tensor) -> torch.Tensor:
        """int64 ``[rows]``."""
        best = scores.argmax(1).cpu()
        if bool(self.greedy.all()):
            return best
        logits = scores.double().cpu() / torch.where(self.greedy, 1.0, self.temperature)[:, None]
        probabilities = logits.softmax(1)
        if self.truncates:
            probabilities = self._truncated(probabilities)
        cumulative = probabilities.cumsum(1)
        # Each row's own number in [0, 1): rows that have ended draw no more.
        points = torch.tensor([0.0 if row.end else row.random.random() for row in self.rows], dtype=torch.float64)
        drawn = torch.searchsorted(cumulative, (points * cumulative[:, -1])[:, None], right=True)[:, 0]
        return torch.where(self.greedy, best, drawn.clamp(max=scores.shape[1] - 1))

    def _truncated(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Only the ``top_k`` most likely, and of these the fewest that hold ``top_p``."""
        ordered, order = probabilities.sort(dim=1, descending=True, stable=True)
        rank = torch.arange(probabilities.shape[1])
        ordered = torch.where(rank < self.top_k[:, None], ordered, 0.0)
        ordered = ordered / ordered.sum(1, keepdim=True)
        ordered = torch.where(ordered.cumsum(1) - ordered < self.top_p[:, None], ordered, 0.0)
        return torch.zeros_like(probabilities).scatter_(1, order, ordered)


class _Stop(StoppingCriteria):
    """Ends each row for its own reasons, and hands it over."""

    def __init__(self, rows: Sequence[_Row], eos: frozenset[int]) -> None:
        self.rows = rows
        self.eos_token_id = eos
        """Its presence has ``generate`` pad rows that have ended."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.BoolTensor:
        for row in self.rows:
            if row.end is None:
                row.check(self.eos_token_id)
        return torch.tensor([row.end is not None for row in self.rows], device=input_ids.device)  # type: ignore[return-value]


@contextmanager
def _drawing(model: PreTrainedModel, draw: _Draw) -> Iterator[None]:
    """Have ``draw`` follow all other processors, the steering one included, which puts itself behind those of the caller."""
    name = "_get_logits_processor"
    original = getattr(model, name)

    def get(*args: Any, **kwargs: Any) -> Any:
        processors = original(*args, **kwargs)
        ours = _draw.get()  # generate of another thread does not draw with it
        return LogitsProcessorList([*processors, ours]) if ours is not None else processors

    token = _draw.set(draw)
    model.__dict__[name] = get
    try:
        yield
    finally:
        del model.__dict__[name]
        _draw.reset(token)


def _listed(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
