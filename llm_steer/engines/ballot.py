"""One chat request that a plugin answers by several: who is asked what, what came back, what it adds up to.

Knows no engine and no method: an engine and the HTTP server run it, the plugin's hooks decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_steer import registry, spec
from llm_steer.engines.base import Response
from llm_steer.errors import SteerError
from llm_steer.formats import from_json
from llm_steer.plugin import Params, Plugin


class Ballot:
    """The responses to one chat request.

    Args:
        request: OpenAI body, without steering.
        local: plugins that steer the requests are those that are installed here: one that is not is refused before any runs.

    Raises:
        SteerError: the plugin cannot answer this request.
    """

    def __init__(self, voter: Voter, request: Mapping[str, Any], *, local: bool = True) -> None:
        self.voter = voter
        self.request = request
        try:
            self.bodies = voter.plugin.expand(request, voter.params)
        except SteerError as error:
            label = voter.label if error.field in voter.plugin.Params.model_fields else ""
            raise SteerError(f"{label}{error.field}", error.value, error.valid) from error
        for body in self.bodies:
            own = (body.get("vllm_xargs") or {}).get(spec.PREFIX)
            if own is not None and voter_of(own) is not None:
                raise SteerError(f"{voter.label}{spec.PREFIX}", own, f"plugins that do not vote, inside {voter.plugin.name}")
            if own is not None and local:
                try:
                    spec.parse(own)
                except SteerError as error:
                    if error.valid != "given":  # the engine's default may hold what is not given
                        raise SteerError(f"{voter.label}{error.field}", error.value, error.valid) from error
        self.responses: list[Response | None] = [None] * len(self.bodies)
        self.readings: list[dict[str, Any] | None] = [None] * len(self.bodies)

    def read(self, index: int, response: Response) -> dict[str, Any]:
        """What a response says. Changes nothing, for use in threads; :meth:`put` then."""
        return self.voter.plugin.read(self.request, index, response, self.voter.params)

    def put(self, index: int, response: Response, reading: dict[str, Any] | None) -> None:
        """Note a response; ``reading`` is None if it was aborted."""
        self.responses[index], self.readings[index] = response, reading

    @property
    def decided(self) -> bool:
        """What has not come makes no difference."""
        return self.voter.plugin.decided(self.request, self.readings, self.voter.params)

    @property
    def missing(self) -> list[int]:
        return [index for index, response in enumerate(self.responses) if response is None]

    def result(self) -> Response:
        """One response in place of all: tokens are summed, :attr:`Response.steering` holds the votes."""
        came = [response for response in self.responses if response is not None]
        if came and all(response.error is not None for response in came):
            return Response(finish="error", error=came[0].error, cause=came[0].cause)
        voter = self.voter
        text, told = voter.plugin.combine(self.request, self.responses, self.readings, voter.params)
        params = voter.params.shown()
        cut = [response.finish == "length" for response in came if response.finish not in ("error", "abort")]
        return Response(
            text=text,
            finish="length" if cut and all(cut) else "stop",
            prompt_tokens=sum(response.prompt_tokens for response in came),
            tokens=sum(response.tokens for response in came),
            steering={"plugins": [{"name": voter.plugin.name, "params": params, **told}]},
        )


@dataclass(frozen=True)
class Voter:
    """A plugin that votes, with the parameters of one request."""

    plugin: type[Plugin[Any]]
    params: Params
    rest: Any
    """What steers each of the requests: the other plugins, in the caller's words, or ``"off"``."""
    label: str = ""
    given: frozenset[str] = frozenset()
    """Names of the parameters that the caller gave; the others are defaults."""


def voter_of(
    steer: Any, fields: Mapping[str, Any] | None = None, defaults: spec.Spec = (), *, prefix: str = ""
) -> Voter | None:
    """The plugin that votes in what a caller asked for; None if none does.

    Args:
        steer: as in ``llm_steer.steer(model, ...)``, or JSON of it. Plugins that are not installed here are not looked at.
        fields: parameters that stand beside a single plugin's name, as HTTP carries them.
        defaults: plugins that vote, with parameters over which the caller's are merged.
        prefix: how the caller spells ``fields`` in errors.

    Raises:
        SteerError: bad parameters of a plugin that votes, or two of them.
    """
    if isinstance(steer, str) and steer.lstrip()[:1] in ("{", "["):
        try:
            steer = from_json(steer, spec.PREFIX)
        except SteerError:
            return None  # the engine says so
    several = isinstance(steer, list | tuple)
    items = list(steer) if several else [steer]
    voters = [i for i, item in enumerate(items) if _votes(item)]
    if not voters:
        return None
    if len(voters) > 1:
        raise SteerError(f"{spec.PREFIX}[{voters[1]}]", items[voters[1]], "the only plugin in the list that votes")
    if len(items) > 1 and fields:
        name, value = next(iter(fields.items()))
        raise SteerError(f"{prefix}{name}", value, 'inside a mapping {"name": ..., parameters} when several plugins steer')
    own = items[voters[0]]
    (parsed,) = spec.parse(own, fields, defaults, prefix=prefix)
    rest: Sequence[Any] = [item for i, item in enumerate(items) if i != voters[0]]
    given = frozenset(fields or ()) | frozenset(own if isinstance(own, Mapping) else ())
    return Voter(parsed.plugin, parsed.params, rest or spec.OFF, parsed.label, given)


def _votes(item: Any) -> bool:
    name = item.get("name") if isinstance(item, Mapping) else item
    return isinstance(name, str) and registry.is_plugin(name) and registry.get(name).votes
