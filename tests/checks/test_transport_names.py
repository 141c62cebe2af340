"""The names of transports stay in the transports' own files: other code reads their registrations."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from weightcast.config import TransportName
from weightcast.transports import registry

SOURCE = Path(__file__).parents[2] / "src" / "weightcast"
NAMES = frozenset(spec.name for spec in registry.TRANSPORTS)
# Files that may compare names: each transport's own, the registration, and a file that compares vLLM's backends, one of
# which has the name of a transport.
MAY_COMPARE = {
    *(f"transports/{spec.name.replace('-', '_')}.py" for spec in registry.TRANSPORTS if spec.offered_as is None),
    "transports/registry.py",
    "transports/spec.py",
    "adapters/vllm/server_info.py",
}
# Methods that find a value in a list, a set or a dictionary.
FINDS = frozenset({"remove", "discard", "index", "count", "startswith", "endswith", "__eq__", "__contains__"})


def constants_of(tree: ast.Module) -> dict[str, ast.expr]:
    """Values of the names that a module assigns at its top level."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def named_in(value: ast.expr, constants: dict[str, ast.expr]) -> set[str]:
    """Names of transports that an operand consists of, also through a constant of the module."""
    if isinstance(value, ast.Name):
        known = {name: other for name, other in constants.items() if name != value.id}
        return named_in(constants[value.id], known) if value.id in constants else set()
    if isinstance(value, ast.Constant):
        return {value.value} & NAMES if isinstance(value.value, str) else set()
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        return set().union(*(named_in(item, constants) for item in value.elts))
    if isinstance(value, ast.Dict):
        return set().union(*(named_in(key, constants) for key in value.keys if key is not None))
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):  # frozenset({...}), tuple([...])
        return set().union(*(named_in(item, constants) for item in value.args))
    return set()


def comparisons(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each comparison with the name of a transport."""
    tree = ast.parse(text)
    constants = constants_of(tree)
    for node in ast.walk(tree):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FINDS:
            operands = node.args
        yield from ((operand.lineno, name) for operand in operands for name in sorted(named_in(operand, constants)))


@pytest.mark.parametrize(
    "text",
    [
        'if via == "ipc": pass',
        'if "disk" in info.transports: pass',
        'WITHOUT = ("disk", "checkpoint-engine")\nif name not in WITHOUT: pass',
        'WITHOUT: frozenset[str] = frozenset({"disk"})\nif name in WITHOUT: pass',
        'WAYS = {"broadcast": 1}\nif name in WAYS: pass',
        'match via:\n    case "broadcast": pass',
        'transports.remove("ipc")',
    ],
)
def test_a_comparison_with_a_name_is_found(text: str) -> None:
    assert list(comparisons(text))


@pytest.mark.parametrize("text", ['transports = ("ipc", "broadcast")', 'if via == "auto": pass', 'connect(via="ipc")'])
def test_a_name_that_is_only_passed_on_is_no_comparison(text: str) -> None:
    assert not list(comparisons(text))


def test_no_code_outside_a_transport_compares_its_name() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line} compares {name!r}"
        for path in sorted(SOURCE.rglob("*.py"))
        if str(path.relative_to(SOURCE)) not in MAY_COMPARE
        for line, name in comparisons(path.read_text())
    ]
    assert found == []


def test_files_that_may_compare_names_exist() -> None:
    assert [path for path in sorted(MAY_COMPARE) if not (SOURCE / path).is_file()] == []


def test_names_that_a_caller_may_write_are_the_registered_ones() -> None:
    assert set(get_args(TransportName)) == NAMES | {"auto"}
