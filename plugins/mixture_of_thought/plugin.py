"""The hooks of mixture_of_thought."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

from llm_steer.plugins.mixture_of_thought import answers, prompts
from llm_steer.plugins.mixture_of_thought.asked import max_tokens_of, question_of, seed_of, stops_of
from llm_steer.plugins.mixture_of_thought.modalities import CHECKS, TAGS, Check, Checker
from llm_steer.plugins.mixture_of_thought.params import MixtureOfThoughtParams, Modality
from llm_steer.plugins.mixture_of_thought.said import Answer
from llm_steer.plugins.mixture_of_thought.vote import Pending, Vote, decided, exact, scores, winner

from llm_steer.plugin import Plugin

if TYPE_CHECKING:
    from llm_steer.engines.base import Response

_log = logging.getLogger(__name__)

END = "<end_of_answer>"
MAX_TOKENS = 2048
"""Of each request, if neither the question nor the settings say (the released code's); a server fits it to its model."""
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
        stop, max_tokens = stops_of(request), max_tokens_of(request, MAX_TOKENS)
        bodies = []
        for index, modality in enumerate(params.plan):
            settings = params.of(modality)
            asked = prompts.messages(question, params.answers, modality, examples=params.examples, folder=params.prompts)
            body: dict[str, Any] = {**request, "messages": _behind(history, asked), "stop": [*stop, END]}
            body["max_tokens"] = max_tokens
            for name in _SAMPLING:
                if (value := getattr(settings, name)) is not None:
                    body[name] = value
            if "max_completion_tokens" in body:
                body["max_completion_tokens"] = body["max_tokens"]
            if (seed := seed_of(request, index)) is not None:
                body["seed"] = seed
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
        said = _said(response, options, source=modality == "code")
        check = _checked(cls.checks[modality], response.text, options) if _checks(modality, params) else Check(None, "off")
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
        votes = _votes(readings, params)
        return decided(votes, pending, params.vote) and _is_named(votes, readings, params)

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
            shown = _best(votes, readings, answer).rank
            told["reasoning_of"] = shown
            if _says_another(readings[shown]):
                text = f"This was computed again, and gives another answer. {text}"
            if (response := responses[shown]) is not None:
                text = f"{response.text.strip()}\n\n{text}"
        return text, told


def _best(votes: Sequence[Vote], readings: Sequence[Mapping[str, Any] | None], answer: str) -> Vote:
    """Of the votes for an answer: one whose text says so, one that was verified, the first."""
    mine = [vote for vote in votes if vote.answer == answer]
    return min(mine, key=lambda vote: (_says_another(readings[vote.rank]), not vote.verified, vote.rank))


def _says_another(reading: Mapping[str, Any] | None) -> bool:
    """The vote is for what was computed, not for what the text says."""
    return reading is not None and reading.get("text_answer") is not None


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


def _is_named(votes: Sequence[Vote], readings: Sequence[Mapping[str, Any] | None], params: MixtureOfThoughtParams) -> bool:
    """The winner's name is known. That of a group of free answers is the answer of its first request, in the order in which
    they were asked: whether one before it says the same in other words must be known."""
    if params.answers != "free":
        return True
    answer = winner(votes, params.vote, params.ties)
    first = min((vote.rank for vote in votes if vote.answer == answer), default=0)
    return all(reading is not None for reading in readings[:first])


def _said(response: Response, options: dict[str, str] | None, *, source: bool) -> Answer:
    """What the text answers."""
    truncated = response.finish == "length"
    try:
        if options is None:
            return answers.read_free(response.text, source=source, truncated=truncated)
        return answers.read_choice(response.text, options, source=source, truncated=truncated)
    except Exception:
        _log.exception("a response could not be read, and abstains")
        return Answer(None, "failed")


def _checked(check: Checker, text: str, options: dict[str, str] | None) -> Check:
    """What checking says. A model can write anything: no text ends the batch that it came in."""
    try:
        return check(text, options)
    except Exception as error:
        _log.exception("a response could not be checked, and is judged by its text")
        return Check(None, "failed", notes={"error": f"{type(error).__name__}: {error}"[:200]})


def _judged(said: Answer, check: Check, params: MixtureOfThoughtParams) -> dict[str, Any]:
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


def _weight(modality: Modality, params: MixtureOfThoughtParams, *, verified: bool) -> Fraction:
    return exact(params.of(modality).weight) * (exact(params.agreement) if verified else 1)


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
