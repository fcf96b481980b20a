"""Run the small Python programs that the model writes, and nothing else.

A program is a text from a language model: it may be wrong, endless or hostile. It isn't given to ``exec``; its syntax tree
is walked, node by node, with a whitelist of node types, a budget of steps, and bounds on the size of everything. There are
no attributes, no imports, no definitions, and the only calls are to ``all``, ``any``, ``len``, ``sum`` and ``range``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

MAX_TEXT = 4_000
"""Characters of a program."""
MAX_STEPS = 50_000
"""Nodes that may be evaluated, and items that comparisons and calls may look at."""
MAX_ITEMS = 4_096
"""Items of a list, tuple or range."""
MAX_NUMBER = 10**9
MAX_DEPTH = 40


class Refused(ValueError):
    """The program isn't one that this evaluator runs."""


_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}
_CALLS: dict[str, Callable[..., Any]] = {"all": all, "any": any, "len": len, "sum": sum, "range": range}
"""``sum`` adds integers only: with lists its time would grow with the square of their number."""


def run(program: str) -> dict[str, Any]:
    """Run a program. Returns its variables: integers, booleans, strings, None, and lists and tuples of them.

    Raises:
        Refused: it isn't Python, uses what is not allowed, exceeds a bound, or fails while it runs.
    """
    if len(program) > MAX_TEXT:
        raise Refused(f"a program of more than {MAX_TEXT} characters")
    try:
        tree = ast.parse(program)
        _check_depth(tree)
        machine = _Machine()
        for statement in tree.body:
            machine.execute(statement)
    except Refused:
        raise
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    return machine.names


def _check_depth(tree: ast.AST) -> None:
    layer: list[ast.AST] = [tree]
    for _ in range(MAX_DEPTH):
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]
        if not layer:
            return
    raise Refused(f"nested more than {MAX_DEPTH} deep")


class _Machine:
    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.steps = 0

    def execute(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = self.value(value)
            case ast.If(test=test, body=body, orelse=orelse):
                for statement in body if self.value(test) else orelse:
                    self.execute(statement)
            case ast.Pass():
                pass
            case _:
                raise Refused(f"a statement of type {type(node).__name__}")

    def _charge(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise Refused(f"more than {MAX_STEPS} steps")

    def _charge_items(self, value: Any) -> None:
        """Charge what a comparison may look at. A list that holds itself twice, and so on, is small and has no end."""
        unseen = [value]
        while unseen:
            if isinstance(item := unseen.pop(), list):
                self._charge(len(item))
                unseen.extend(item)

    def value(self, node: ast.expr) -> Any:
        self._charge(1)
        match node:
            case ast.Constant(value=bool() | int() | str() | None as constant):
                return self._bounded(constant)
            case ast.Name(id=name):
                if name not in self.names:
                    raise Refused(f"an unknown name, {name[:40]}")
                return self.names[name]
            case ast.BoolOp(op=op, values=values):
                result: Any = None
                for part in values:
                    result = self.value(part)
                    if bool(result) != isinstance(op, ast.And):
                        break
                return result
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.value(operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._bounded(-self._integer(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return self._bounded(_BINARY[type(op)](self._integer(left), self._integer(right)))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._compare(self.value(left), ops, comparators)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self.value(test) else orelse)
            case ast.Tuple(elts=items) | ast.List(elts=items):
                return self._bounded([self.value(item) for item in items])
            case ast.ListComp(elt=item, generators=generators) | ast.GeneratorExp(elt=item, generators=generators):
                return self._comprehension(item, generators)
            case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _CALLS:
                return self._call(name, [self.value(argument) for argument in arguments])
            case _:
                raise Refused(f"an expression of type {type(node).__name__}")

    def _integer(self, node: ast.expr) -> int:
        value = self.value(node)
        if not isinstance(value, int):
            raise Refused(f"arithmetic on {type(value).__name__}")
        return value

    def _compare(self, left: Any, ops: list[ast.cmpop], comparators: list[ast.expr]) -> bool:
        for op, node in zip(ops, comparators, strict=True):
            right = self.value(node)
            if type(op) not in _COMPARE:
                raise Refused(f"a comparison of type {type(op).__name__}")
            self._charge_items(left)
            self._charge_items(right)
            if not _COMPARE[type(op)](left, right):
                return False
            left = right
        return True

    def _call(self, name: str, arguments: list[Any]) -> Any:
        if name == "sum" and not (len(arguments) == 1 and all(isinstance(item, int) for item in arguments[0])):
            raise Refused("a sum of anything but one list of integers")
        result = range(*arguments) if name == "range" else _CALLS[name](*arguments)
        for items in (*arguments, result):
            if isinstance(items, list | range):
                self._charge(len(items))
        return list(self._bounded(result)) if isinstance(result, range) else self._bounded(result)

    def _comprehension(self, item: ast.expr, generators: list[ast.comprehension]) -> list[Any]:
        outer = dict(self.names)
        found: list[Any] = []
        for _ in self._loops(generators):
            found.append(self.value(item))
            self._bounded(found)
        self.names = outer  # the loop variables of a comprehension stay inside it
        return found

    def _loops(self, generators: list[ast.comprehension]) -> Iterator[None]:
        if not generators:
            yield
            return
        first, *rest = generators
        if not isinstance(first.target, ast.Name) or first.is_async:
            raise Refused("a loop over anything but one name")
        items = self.value(first.iter)
        if not isinstance(items, list):
            raise Refused("a loop over what is no list")
        for value in items:
            self.names[first.target.id] = value
            if all(self.value(condition) for condition in first.ifs):
                yield from self._loops(rest)

    def _bounded(self, value: Any) -> Any:
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise Refused(f"a number beyond {MAX_NUMBER}")
        if isinstance(value, list | str | range) and len(value) > MAX_ITEMS:
            raise Refused(f"more than {MAX_ITEMS} items")
        return value
