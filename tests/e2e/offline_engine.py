"""Child process of ``test_offline_engine.py``: the engine client over a vLLM ``LLM``. Prints one JSON document."""

from __future__ import annotations

import json
import sys
from typing import Any

from e2e.engine_client import ENGINE_ARGS
from llm_steer.engines.base import Engine, Request, Response, Sampling


def request_of(fields: dict[str, Any]) -> Request:
    sampling = Sampling(**{**fields.pop("sampling", {}), "stop": tuple(fields.pop("stop", ()))})
    return Request(sampling=sampling, **fields)


def shown(response: Response) -> dict[str, Any]:
    fields = dict(vars(response))
    del fields["cause"]  # the exception itself, which JSON has no word for
    fields["token_ids"] = list(response.token_ids) if response.token_ids is not None else None
    return fields


def main(folder: str, requests: list[dict[str, Any]]) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(model=folder, **ENGINE_ARGS)
    engine = Engine.from_vllm(llm)
    together = [shown(r) for r in engine.run([request_of(dict(r)) for r in requests])]
    alone = [shown(engine.run([request_of(dict(r))])[0]) for r in requests]

    endless = Request(prompt=[20, 30], sampling=Sampling(max_tokens=200, temperature=0.0, ignore_eos=True))
    short = Request(prompt=[40, 50], sampling=Sampling(max_tokens=3, ignore_eos=True))
    order, aborted = [], []
    with engine.submit([endless, short, endless]) as stream, engine.submit([short]) as other:
        for index, response in stream:
            order.append([index, response.finish, response.tokens])
            aborted += [shown(response)] if response.finish == "abort" else []
            stream.abort(0)
            stream.abort(2)
        order.append([3, next(other)[1].finish, 0])
    with engine.submit([endless] * 4):
        pass
    left = llm.llm_engine.has_unfinished_requests()
    return {
        "together": together,
        "alone": alone,
        "order": order,
        "aborted": aborted,
        "unaborted": shown(engine.run([endless])[0]),
        "left": left,
        "identity": engine.identity(),
    }


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr
    result = main(sys.argv[1], json.loads(sys.argv[2]))
    out.write("\nRESULT " + json.dumps(result) + "\n")
    out.flush()
