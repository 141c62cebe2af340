"""Imports the peers' own code, from the folder that ``fetch.py`` fills or from installed packages.

Only the one file that holds a peer's packing is loaded, not its engine: that file needs torch and nothing else. Nothing
of it is kept in this repository.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("WEIGHTCAST_PEERS", Path(__file__).parent.parent / ".peers"))

PACKED = "vllm/distributed/weight_transfer/packed_tensor.py"
SGLANG_BUCKET = "sglang/srt/weight_sync/tensor_bucket.py"
LMDEPLOY_BUCKET = "lmdeploy/utils.py"


class NotHere(Exception):
    """Raised if a peer's code is not on this machine."""


def _file(path: str) -> Path:
    for folder in (FOLDER, *(Path(item) for item in sys.path if item)):
        if (folder / path).is_file():
            return folder / path
    raise NotHere(f"{path.split('/')[0]} is not installed and not in {FOLDER.name}: run benchmarks/peers/fetch.py")


@cache
def module(path: str) -> Any:
    """One file of a peer as a module of its own, its package left alone.

    Raises:
        NotHere: It is not here, or what it imports is not.
    """
    name = "peer_" + path.removesuffix(".py").replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, _file(path))
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded
    try:
        spec.loader.exec_module(loaded)
    except ImportError as error:
        raise NotHere(f"{path} cannot be imported: {error}") from error
    return loaded


@cache
def classes(path: str, names: tuple[str, ...]) -> Any:
    """Some classes of a file whose other parts import too much.

    Raises:
        NotHere: As ``module``.
    """
    import torch

    text = _file(path).read_text()
    wanted = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name in names]
    if len(wanted) != len(names):
        raise NotHere(f"{path} has no {', '.join(names)}")
    # The module gets an importable name, since its instances are pickled between processes.
    name = "peer_" + path.removesuffix(".py").replace("/", "_")
    loaded = types.ModuleType(name)
    sys.modules[name] = loaded
    space = vars(loaded)
    space.update(torch=torch, dataclass=importlib.import_module("dataclasses").dataclass, List=list, Tuple=tuple)
    exec(compile(ast.Module(body=list(wanted), type_ignores=[]), path, "exec"), space)
    return loaded


def package(name: str) -> Any:
    """An installed package, or one in the folder.

    Raises:
        NotHere: It is neither.
    """
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotHere(f"{name} cannot be imported: {error}") from error


def versions() -> dict[str, str]:
    """Returns the peers' versions that ``fetch.py`` recorded."""
    written = FOLDER / "versions.json"
    return dict(json.loads(written.read_text())) if written.is_file() else {}
