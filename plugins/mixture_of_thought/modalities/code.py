"""A Python program: what it prints."""

from __future__ import annotations

import re

from llm_steer.plugins.mixture_of_thought.modalities.check import Check, named

from llm_steer import sandbox
from llm_steer.errors import UnsupportedError

_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.S)
_TAGGED = re.compile(r"<code>(.*?)(?:<end_of_code>|</code>|<answer>|\Z)", re.S)
_ENDS = re.compile(r"<end_of_code>|</code>|<answer>")
_RESULT = '\nif "result" in globals():\n    print(globals()["result"])\n'
"""Programs in the released prompts leave the answer in this variable."""


def program(text: str) -> str | None:
    """The program in a model's text: what is fenced, else what stands between the tags; None if there is none."""
    text = text.rpartition("</think>")[2]
    blocks: list[str] = [block for block in _FENCED.findall(text) if block.strip()]
    if blocks:
        return max(blocks, key=len)
    # The opening tag is the end of the prompt, so that the text may begin with the program.
    found = _TAGGED.search(text)
    body = found[1] if found else text if _ENDS.search(text) else ""
    body = _ENDS.split(body)[0]
    return body.strip("\n") if re.search(r"\bprint\s*\(|\bdef \w|\bresult\s*=", body) else None


def check(text: str, options: dict[str, str] | None) -> Check:
    code = program(text)
    if code is None:
        return Check(None, "no_program")
    if not sandbox.available():
        return Check(None, "no_sandbox")
    if len(code) > sandbox.LONGEST:
        return Check(None, "too_long")
    try:
        outcome = sandbox.run(code + _RESULT)
    except UnsupportedError as error:  # it does not start on this machine
        return Check(None, "no_sandbox", notes={"error": str(error)})
    notes = {"seconds": round(outcome.seconds, 3)}
    if outcome.status != "ok":
        last = outcome.stderr.strip().rpartition("\n")[2][:200]
        return Check(None, "exception" if outcome.status == "error" else outcome.status, notes=notes | {"error": last})
    lines = outcome.stdout.strip().splitlines()
    if not lines:
        return Check(None, "no_output", notes=notes)
    answer = named(lines[-1].strip()[:200], options)
    return Check(answer, "executed" if answer is not None else "not_an_option", notes=notes)
