"""The evaluator agrees with Python on what it runs, and refuses everything else without harm."""

from __future__ import annotations

import time

import pytest
from llm_steer.eval.testbed.evaluator import MAX_TEXT, Refused, run

GOOD = [
    "answer = 1 + 2 * 3 - 4",
    "a = True\nb = not a or False\nanswer = a and b",
    "answer = [x for x in (1, 2, 3) if x > 1 and x != 3]",
    "rows = [a for a in (0, 1) for b in (0, 1) if (not a or b) and (a)]\nanswer = all(rows)",
    "answer = sum(x * y for x in range(3) for y in range(4))",
    "answer = 'yes' if any([0, None, 1]) else 'no'",
    "x = 3\nif x > 2:\n    answer = len([1, 2])\nelse:\n    answer = 0",
    "answer = -3 <= -2 < 5 == 5",
    "x = 5\nanswer = [x for x in (1, 2)]",
    "x = 5\ny = [x for x in (1, 2)]\nanswer = x",
    "answer = 0 or '' or 7",
    "r = [[1, 2], [3]]\nanswer = r == [[1, 2], [3]] and [1, 2] < [1, 3] and r != [[1, 2], 3]",
    "answer = sum([1, 2, True]) + sum([]) + len(range(1, 9, 3))",
    "answer = [all([]), any([]), all('ab'), len('abc')]",
]
BAD = [
    "import os",
    "__import__('os').system('true')",
    "answer = ().__class__.__bases__",
    "answer = open('/etc/passwd')",
    "answer = eval('1')",
    "exec('1')",
    "while True:\n    pass",
    "for i in range(9):\n    pass",
    "def f():\n    return f()\nf()",
    "answer = (lambda: 1)()",
    "answer = 9 ** 9 ** 9",
    "answer = 10 ** 100",
    "answer = 1 << 10000",
    "answer = 'a' * 10000000",
    "answer = [0] * 10000000",
    "answer = range(10 ** 9)",
    "answer = range(1000000000)",
    "answer = [1 for a in range(4000) for b in range(4000) for c in range(4000)]",
    "answer = sum(1 for a in range(4000) for b in range(4000))",
    "x = 999999999\ny = x * x * x",
    "answer = f'{1}'",
    "answer = {1: 2}",
    "answer = x",
    "answer = 1 / 0",
    "answer = 'a' < 1",
    "answer = sum('abc')",
    "answer = all(1)",
    "answer = range(1, 2, 0)",
    "answer = print(1)",
    "answer = len(obj=1)",
    "a.b = 1",
    "a[0] = 1",
    "a, b = 1, 2",
    "a = b = 1",
    "answer = [x async for x in y]",
    "answer = (yield)",
    "answer = [(y := 1) for _ in (1, 2)]",
    "answer = 1j",
    "answer = b'x'",
    "answer = ...",
    "answer = 1.5",
    "del answer",
    "answer = 1\x00",
    "answer = " + "(" * 300 + "1" + ")" * 300,
    "answer = " + "not " * 900 + "1",
    "answer = " + "[" * 80 + "]" * 80,
    "answer = " + "9" * 3000,
    "#" * (MAX_TEXT + 1),
    "answer = 'x",
    "\ud800",
    # Lists that share their parts are small and have no end.
    "a = [0, 0]\nb = [0, 0]\n" + "a = [a, a]\nb = [b, b]\n" * 60 + "answer = a == b",
    "a = [0, 0]\n" + "a = [a, a]\n" * 60 + "answer = a != [a, a]",
    "a = [0, 0]\n" + "a = [a, a]\n" * 60 + "answer = a < a",
    "a = [[range(4000) for x in range(4000)], 1]\nanswer = 1",
    "r = range(4000)\na = [r for x in r]\nb = [r for x in r]\nanswer = [a == b for x in r]",
    "r = range(4000)\nanswer = sum([r for x in range(4000)], [])",
    "r = range(4000)\nanswer = [sum(r) for x in r]",
    "r = range(4000)\nanswer = [all(r) or len(r) or any(r) for x in r]",
    "answer = sum([[1]], [])",
    "answer = sum([1], 2)",
    "answer = sum(['a'])",
]


@pytest.mark.parametrize("program", GOOD)
def test_agrees_with_python(program: str) -> None:
    names: dict[str, object] = {}
    exec(program, {}, names)
    assert run(program)["answer"] == names["answer"]


@pytest.mark.parametrize("program", BAD, ids=range(len(BAD)))
def test_refuses(program: str) -> None:
    started = time.monotonic()
    with pytest.raises(Refused):
        run(program)
    assert time.monotonic() - started < 5
