"""A type name has one meaning in the package: one module defines it, as a class or as an alias."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "weightcast"
CAMEL_CASE = re.compile(r"_?[A-Z]\w*[a-z]\w*")


def type_names(text: str) -> Iterator[str]:
    """The classes of a module, and the aliases at its top; a variable of types such as ``T`` is local to a module."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp()):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                pass
            case _:
                continue
        if CAMEL_CASE.fullmatch(name):
            yield name


def names_in_two(modules: Mapping[str, str]) -> dict[str, list[str]]:
    """The type names that two modules define, and the modules."""
    found: dict[str, list[str]] = {}
    for module, text in modules.items():
        for name in set(type_names(text)):
            found.setdefault(name, []).append(module)
    return {name: sorted(where) for name, where in sorted(found.items()) if len(where) > 1}


def test_name_that_two_modules_define_is_found():
    modules = {
        "a": "class Job:\n    class _Row: ...\nSay = Callable[[str], None]\nT = TypeVar('T')\nTABLE = dict[str, int]",
        "b": "class Job: ...\nclass _Row: ...\nSay: TypeAlias = 'str'\nT = TypeVar('T')\nTABLE = dict[str, int]",
        "c": "Say = str | int\nEveryone = [1]\nclass Everyone: ...",
    }
    assert names_in_two(modules) == {"Job": ["a", "b"], "Say": ["a", "b", "c"], "_Row": ["a", "b"]}


def test_type_name_is_defined_once_in_the_package():
    modules = {str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")}
    assert names_in_two(modules) == {}
