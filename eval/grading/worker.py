"""The process that runs math-verify: a JSON line in (a list of gold and answer), a JSON line out.

It is another program, so whatever it does to hostile input (minutes of arithmetic, gigabytes) ends with it: it has little
memory, steps back for generation, and the system itself kills it when an answer takes too much CPU time, also if nobody is
left to. Wall-clock time would make verdicts depend on what else the machine does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from typing import Any

MEMORY = 4 * 2**30


def equal(gold: str, answer: str) -> bool:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Its units are any text, and letters such as m and h, which may be variables; ours have been taken off already.
    normalization = NormalizationConfig(malformed_operators=True, nits=True, units=False)
    latex = LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)
    config = (latex, ExprExtractionConfig())
    # Bare golds often parse to nothing. Time is kept outside: their own alarms would be the one that kills us.
    parsed = [parse(f"\\boxed{{{text}}}", config, parsing_timeout=None) for text in (gold, answer)]
    if not all(parsed):
        return bool(verify(*parsed, timeout_seconds=None))
    gold_, answer_ = parsed[0][0], parsed[1][0]
    if not _may_hold(gold_) or not _may_hold(answer_):
        return False
    same = _same_number(gold_, answer_)
    return bool(verify(*parsed, timeout_seconds=None)) if same is None else same


def _may_hold(x: Any) -> bool:
    """Whether no equation between constants in it is wrong: math-verify takes 5 = 6 for 6."""
    import sympy

    equations = x.atoms(sympy.Equality) if isinstance(x, sympy.Basic) else ()
    return all(_same_number(equation.lhs, equation.rhs) is not False for equation in equations)


def _same_number(gold: Any, answer: Any) -> bool | None:
    r"""Whether two constants are the same, exactly or to 30 digits; None where they are no constants, or have no size.

    For math-verify ``i`` is a variable, so that ``e^{i\pi}`` is not -1, 10^400 is 10^400 + 1, and 3.1415926 is pi. Here
    decimals are exact.
    """
    import sympy

    values = [
        x.subs({s: sympy.I for s in x.free_symbols if s.name == "i"}) for x in (gold, answer) if isinstance(x, sympy.Expr)
    ]
    values = [x.xreplace({f: sympy.Rational(str(f)) for f in x.atoms(sympy.Float)}) for x in values]
    if len(values) < 2 or any(value.free_symbols or not value.is_finite for value in values):
        return None
    if (difference := (values[0] - values[1]).doit()).is_Rational:
        return bool(difference == 0)
    distance, size = (abs(sympy.N(x, 40)) for x in (difference, values[0]))
    return bool(distance <= sympy.Float("1e-30") * max(size, 1))


def main(seconds: int) -> None:
    logging.disable(logging.CRITICAL)
    if hasattr(os, "nice"):
        os.nice(10)
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):
        pass
    # Its signal's default action ends the process, inside C code too.
    timer = (lambda s: signal.setitimer(signal.ITIMER_PROF, s)) if hasattr(signal, "setitimer") else (lambda _: None)
    equal("1", "1")  # the libraries are loaded before the clock runs
    out, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        timer(seconds)
        try:
            result: bool | str = equal(*json.loads(line))
        except (Exception, RecursionError, MemoryError) as error:
            result = type(error).__name__
        timer(0)
        print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
