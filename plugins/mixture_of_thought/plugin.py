"""The hooks of mixture_of_thought."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from llm_steer.plugins.mixture_of_thought import answers, prompts
from llm_steer.plugins.mixture_of_thought.modalities import CHECKS, TAGS, Check, Checker
from llm_steer.plugins.mixture_of_thought.params import MixtureOfThoughtParams, Modality
from llm_steer.plugins.mixture_of_thought.vote import Pending, Vote, decided, scores, winner

from llm_steer.errors import SteerError
from llm_steer.plugin import Plugin

if TYPE_CHECKING:
    from llm_steer.engines.base import Response

END = "<end_of_answer>"
MAX_TOKENS = 2048
"""Of each request, if neither the question nor the settings say. The released code's."""
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k")


class MixtureOfThought(Plugin[MixtureOfThoughtParams]):
    """Asks one question in several ways (in words, as a Python program, by a truth table), checks what can be checked, and
    puts the answers to the vote.

    Each way is a request of its own; all run as one batch. Programs run in a sandbox, truth tables are enumerated again:
    what comes out is a signal beside the answer that the text gives. A text that answers nothing abstains.

    After Mixture of Thought (Zheng et al., 2025). There, a model is first trained to reason in the three ways; on a model
    that was not, asking the best way several times (``baseline``) is often as good at the same cost: measure it.
    """

    name = "mixture_of_thought"
    summary = "Asks in words, as a program and by a truth table, verifies, and votes."
    Params: ClassVar[type[MixtureOfThoughtParams]] = MixtureOfThoughtParams
    votes = True

    checks: ClassVar[Mapping[str, Checker]] = CHECKS
    """How a response of each modality is checked; a subclass can put its own here."""

    @classmethod
    def expand(cls, request: Mapping[str, Any], params: MixtureOfThoughtParams) -> list[dict[str, Any]]:
        question = question_of(request["messages"])
        history = request["messages"][:-1]
        options_of(question, params)
        stop = request.get("stop") or []
        stop = [stop] if isinstance(stop, str) else list(stop)
        bodies = []
        for index, modality in enumerate(params.plan):
            settings = params.of(modality)
            asked = prompts.messages(question, params.answers, modality, examples=params.examples, folder=params.prompts)
            body: dict[str, Any] = {**request, "messages": _behind(history, asked), "stop": [*stop, END]}
            body.setdefault("max_tokens", body.get("max_completion_tokens") or MAX_TOKENS)
            for name in _SAMPLING:
                if (value := getattr(settings, name)) is not None:
                    body[name] = value
            if "max_completion_tokens" in body:
                body["max_completion_tokens"] = body["max_tokens"]
            if request.get("seed") is not None:
                body["seed"] = request["seed"] + index
            if settings.steer is not None:
                own = settings.steer if isinstance(settings.steer, str) else json.dumps(settings.steer)
                body["vllm_xargs"] = {**(request.get("vllm_xargs") or {}), "steer": own}
            if params.ties == "logprob":
                body["logprobs"] = True
            bodies.append(body)
        return bodies

    @classmethod
    def read(
        cls, request: Mapping[str, Any], index: int, response: Response, params: MixtureOfThoughtParams
    ) -> dict[str, Any]:
        modality = params.plan[index]
        told: dict[str, Any] = {"modality": modality, "finish": response.finish, "tokens": response.tokens}
        if response.logprob is not None and response.tokens:
            told["logprob"] = response.logprob / response.tokens
        if response.steering is not None:
            told["steering"] = dict(response.steering)
        if response.error is not None:
            return {**told, "answer": None, "reason": "error", "error": response.error}
        if params.preset == "reference":
            return {**told, "answer": answers.reference(response.text, TAGS[modality]), "reason": "reference"}
        options = options_of(question_of(request["messages"]), params)
        truncated = response.finish == "length"
        if options is None:
            said = answers.read_free(response.text, truncated=truncated)
        else:
            said = answers.read_choice(response.text, options, truncated=truncated)
        check = cls.checks[modality](response.text, options) if _checks(modality, params) else Check(None, "off")
        return {**told, **_judged(said, check, params)}

    @classmethod
    def decided(
        cls, request: Mapping[str, Any], readings: Sequence[Mapping[str, Any] | None], params: MixtureOfThoughtParams
    ) -> bool:
        if not params.early:
            return False
        plan = params.plan
        pending = [
            Pending(_weight(modality, params, verified=_checks(modality, params)), _checks(modality, params))
            for modality, reading in zip(plan, readings, strict=True)
            if reading is None
        ]
        return decided(_votes(readings, params), pending, params.vote)

    @classmethod
    def combine(
        cls,
        request: Mapping[str, Any],
        responses: Sequence[Response | None],
        readings: Sequence[Mapping[str, Any] | None],
        params: MixtureOfThoughtParams,
    ) -> tuple[str, dict[str, Any]]:
        question = question_of(request["messages"])
        votes = _votes(readings, params)
        answer = winner(votes, params.vote, params.ties, f"{params.tie_seed}:{question}")
        told = {
            "answer": answer,
            "scores": scores(votes, params.vote),
            "abstained": sum(reading is not None and reading["answer"] is None for reading in readings),
            "aborted": sum(reading is None for reading in readings),
            "requests": [
                dict(reading) if reading is not None else _aborted(modality, response)
                for modality, reading, response in zip(params.plan, readings, responses, strict=True)
            ],
        }
        if answer is None:
            return f"No answer: none of the {len(readings)} responses could be read.", told
        text = f"The final answer is \\boxed{{{answer}}}."
        if params.reply == "reasoning":
            best = min((v for v in votes if v.answer == answer), key=lambda vote: (not vote.verified, vote.rank))
            told["reasoning_of"] = best.rank
            if (response := responses[best.rank]) is not None:
                text = f"{response.text.strip()}\n\n{text}"
        return text, told


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message.

    Raises:
        SteerError: it is not the user's, or holds no text.
    """
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "\n".join(str(part.get("text", "")) for part in content)
    if last.get("role") != "user" or not isinstance(content, str) or not content.strip():
        raise SteerError("messages", content, "ended by a message of the user that asks something, in text")
    return content.strip()


def options_of(question: str, params: MixtureOfThoughtParams) -> dict[str, str] | None:
    """Letters and texts of the options; None for free answers."""
    if params.answers == "free":
        return None
    if params.answers == "choice":
        return answers.options_in(question)
    return answers.THREE if params.answers == "three" else answers.TWO


def _behind(history: Sequence[Mapping[str, Any]], asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with its last message in other words. Templates take one system message, at the beginning."""
    messages = [dict(message) for message in history]
    if len(asked) > 1 and messages and messages[0].get("role") == "system" and isinstance(messages[0]["content"], str):
        messages[0]["content"] += "\n\n" + asked[0]["content"]
        return [*messages, *asked[1:]]
    return [*asked[:-1], *messages, asked[-1]]


def _checks(modality: Modality, params: MixtureOfThoughtParams) -> bool:
    """Responses of this modality may be verified."""
    return params.preset != "reference" and (
        (modality == "code" and params.execute) or (modality == "table" and params.verify)
    )


def _judged(said: answers.Answer, check: Check, params: MixtureOfThoughtParams) -> dict[str, Any]:
    """One answer out of what the text says and what was computed."""
    agrees = None if check.answer is None else said.value is not None and _same(said.value, check.answer)
    answer, reason = said.value, said.reason
    if agrees is False and params.disagreement == "verified":
        answer, reason = check.answer, check.reason
    elif agrees is False and params.disagreement == "abstain":
        answer, reason = None, "disagreement"
    told: dict[str, Any] = {"answer": answer, "reason": reason, "verified": bool(agrees and check.sound)}
    if check.reason not in ("off", "not_checked"):
        told["check"] = {"answer": check.answer, "reason": check.reason, "agrees": agrees, **check.notes}
        if answer != said.value:
            told["text_answer"] = said.value
    return told


def _same(one: str, other: str) -> bool:
    return len(set(answers.groups([one, other]))) == 1


def _weight(modality: Modality, params: MixtureOfThoughtParams, *, verified: bool) -> float:
    return params.of(modality).weight * (params.agreement if verified else 1.0)


def _votes(readings: Sequence[Mapping[str, Any] | None], params: MixtureOfThoughtParams) -> list[Vote]:
    cast = [(i, r) for i, r in enumerate(readings) if r is not None and r["answer"] is not None]
    named = [reading["answer"] for _, reading in cast]
    if params.answers == "free":
        named = answers.groups(named)
    return [
        Vote(
            answer,
            _weight(reading["modality"], params, verified=reading.get("verified", False)),
            reading.get("verified", False),
            index,
            reading.get("logprob"),
        )
        for answer, (index, reading) in zip(named, cast, strict=True)
    ]


def _aborted(modality: Modality, response: Response | None) -> dict[str, Any]:
    return {"modality": modality, "finish": "abort", "tokens": response.tokens if response else 0, "answer": None,
            "reason": "aborted"}  # fmt: skip
