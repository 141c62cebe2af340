"""Makes the configuration page from the code: options, flags, environment variables and defaults."""

from __future__ import annotations

import ast
import dataclasses
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import griffe
import typer

from weightcast.cli.app import app
from weightcast.config import AdvancedOptions, Target, UpdateConfig
from weightcast.update.arguments import UpdateOptions

ROOT = Path(__file__).parents[1]
PAGE = "reference/configuration.md"
_SPAN = re.compile(r"(`[^`]*`)")

# Options of an update whose flag of `weightcast push` has another name.
FLAGS = {
    "transport": "via",
    "timeout_s": "timeout",
    "wire_dtype": "dtype",
    "url": "to",
}
# Environment variables that the code reads without a flag, and their meaning.
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "Every process. Its GPUs; over `ipc`, an engine must see those of the trainer.",
    "GLOO_SOCKET_IFNAME": "Trainer and engines. torch's network interface for gloo; without it, weightcast takes the "
    "interface of the rendezvous address.",
    "LMDEPLOY_EXECUTOR_BACKEND": "LMDeploy with our launcher. Its own choice of an executor: `uni`, `ray` or `mp`.",
    "NCCL_CUMEM_ENABLE": "Trainer. Must be set for `broadcast` to SGLang over NCCL, to the server's value.",
    "NO_COLOR": "Command line. If set, output has no colours.",
    "PROMETHEUS_MULTIPROC_DIR": "Trainer and engines. The folder of prometheus_client's multiprocess mode.",
    "SGLANG_GRPC_PORT": "SGLang with the plug-in. Must not be set: SGLang's gRPC server could change proven weights.",
    "SGLANG_PLUGINS": "SGLang with the plug-in. Must contain `weightcast`.",
    "SGLANG_RUST_SERVER": "SGLang with the plug-in. Must not be set: the plug-in needs the Python front end.",
    "SGLANG_VLM_CACHE_SIZE_MB": "Trainer. Must be set to 0 to update a stock SGLang that encodes images, and in SGLang "
    "too: no update empties SGLang's cache of encoded images.",
    "VLLM_API_KEY": "vLLM with the plug-in. vLLM's API key, which covers the routes of weightcast too.",
    "VLLM_HOST_IP": "vLLM with the plug-in, on several hosts. vLLM's own variable for a host's address; ranks on other "
    "hosts connect to it.",
    "VLLM_PLUGINS": "vLLM with the plug-in. Not needed; if it is set, it must name `weightcast` beside other plug-ins.",
    "WEIGHTCAST_API_KEY": "Command line and `python -m weightcast.lab.conformance`. The engine's API key.",
    "WEIGHTCAST_DRAFT": "SGLang and LMDeploy with our receiver and a draft model. `update` makes the draft's weights a "
    "part of every update; `keep`, the default, leaves them as they are.",
    "WEIGHTCAST_ENGINE_SECRET": "vLLM with the plug-in, on several hosts. The secret that its API server and ranks "
    "prove to each other, the same on every host; the setting `secret_file` takes precedence.",
    "WEIGHTCAST_REVISION": "Benchmarks. The revision that a result names where there is no git.",
    "WEIGHTCAST_LMDEPLOY_FOLDER": "LMDeploy with our launcher. Set by it for its own processes; not for users.",
    "WEIGHTCAST_SGLANG_FOLDER": "SGLang with the plug-in. Set by the server for its own ranks; not for users.",
    "WEIGHTCAST_STAGING": "SGLang and LMDeploy with our receiver. Where new weights wait: `auto`, `device` or `host`.",
    "XDG_CACHE_HOME": "Demo. The folder below which `weightcast` keeps its model; `~/.cache` by default.",
    "prometheus_multiproc_dir": "The same in lower case, which prometheus_client still reads.",
}


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join(
        [
            "# Configuration",
            "",
            "This page is made from the code of this version.",
            "",
            "An API key or certificate of the environment belongs to the command line. The library reads no",
            "configuration from the environment, except the variables [below](#environment-variables).",
            "",
            "## Options of an update",
            "",
            "Keyword arguments of `WeightUpdater.connect`, and flags of `weightcast push`.",
            "",
            *_options(UpdateOptions),
            "",
            "## Advanced options of an update",
            "",
            "Keys of `advanced={...}`, and names of `--advanced NAME=VALUE`.",
            "",
            *_options(AdvancedOptions),
            "",
            "## Options of a target",
            "",
            "Arguments of `Target`, and flags of the commands that take URLs.",
            "",
            *_options(Target),
            "",
            "## Environment variables",
            "",
            *_table(("variable", "meaning"), [(f"`{name}`", text) for name, text in sorted(VARIABLES.items())]),
            "",
            "The flags in the tables of this page name further variables.",
            "",
            "## Extras of the package",
            "",
            *_table(("extra", "packages"), _extras()),
            "",
            "## Commands",
            "",
            *_commands(),
        ]
    )


def _options(owner: type) -> Iterator[str]:
    flags = {parameter.name: parameter for parameter in _commands_by_name()["push"].params}
    rows: list[tuple[str, ...]] = []
    described = attributes_of(owner)
    defaults = {field.name: field for field in dataclasses.fields(Target if owner is Target else UpdateConfig)}
    for name in owner.__annotations__:
        flag = flags.get(FLAGS.get(name, name)) if owner is not AdvancedOptions else None
        shown = f"`{flag.opts[0]}`" if flag is not None else "-"
        rows.append(
            (
                f"`{name}`",
                f"`--advanced {name}=`" if owner is AdvancedOptions else shown,
                f"`{flag.envvar}`" if flag is not None and getattr(flag, "envvar", None) else "-",
                _default_of(defaults[name]) if name in defaults else "`None`",
                described[name],
            )
        )
    return _table(("option", "flag", "environment", "default", "meaning"), rows)


def attributes_of(owner: type) -> dict[str, str]:
    """Descriptions of a class's attributes, from its docstring."""
    docstring = griffe.Docstring(owner.__doc__ or "")
    for section in docstring.parse("google"):
        if section.kind is griffe.DocstringSectionKind.attributes:
            return {item.name: " ".join(item.description.replace("``", "`").split()) for item in section.value}
    return {}


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    if field.name.endswith("_bytes") and isinstance(field.default, int):
        return f"{field.default >> 20} MiB"
    return f"`{field.default!r}`"


def _commands_by_name() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        found |= {f"{name} {sub}": command for sub, command in inner.items()} if inner else {name: command}
    return found


def _commands() -> Iterator[str]:
    for name, command in _commands_by_name().items():
        yield f"### weightcast {name}"
        yield ""
        yield " ".join((command.help or "").partition("\n\n")[0].replace("\b", "").split())
        yield ""
        rows: list[tuple[str, ...]] = []
        for parameter in command.params:
            label = parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar
            values = parameter.metavar if parameter.param_type_name == "option" else None
            default = "required" if parameter.required else _shown(parameter.default)
            rows.append(
                (
                    f"`{label}`" + (f" `{values}`" if values else ""),
                    f"`{parameter.envvar}`" if getattr(parameter, "envvar", None) else "-",
                    default,
                    " ".join((getattr(parameter, "help", None) or "").split()),
                )
            )
        yield from _table(("argument or flag", "environment", "default", "meaning"), rows)
        yield ""


def _shown(default: object) -> str:
    if default is None or default == () or default == []:
        return "-"
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default}`"


def _extras() -> list[tuple[str, ...]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return [(f"`{name}`", ", ".join(f"`{package}`" for package in packages)) for name, packages in extras.items()]


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield _row(header)
    yield _row(tuple("---" for _ in header))
    yield from table_rows(rows)


def table_rows(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yields each row as Markdown."""
    yield from map(_row, rows)


def _row(cells: tuple[str, ...]) -> str:
    """Joins cells; a bar inside of code does not separate cells, and any other one is escaped."""
    escaped = (
        "".join(part if part.startswith("`") else part.replace("|", r"\|") for part in _SPAN.split(c)) for c in cells
    )
    return "| " + " | ".join(escaped) + " |"


def variables_read(folder: Path) -> set[str]:
    """Names of the environment variables that the modules of a package read by a constant, own or imported."""
    found: set[str] = set()
    trees = {path: ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    for tree in trees.values():
        constants = _constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                there = _constants(trees.get(folder.parent.joinpath(*node.module.split(".")).with_suffix(".py")))
                constants |= {name.asname or name.name: there[name.name] for name in node.names if name.name in there}
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
                found |= _named(node.left, constants)
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
                found |= _named(node.slice, constants)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("environ.get", "getenv")):
                found |= _named(node.args[0], constants)
    return found


def _constants(tree: ast.Module | None) -> dict[str, object]:
    """The constants of a module by name."""
    return {
        target.id: node.value.value
        for node in (tree.body if tree else ())
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _named(node: ast.AST, constants: dict[str, object]) -> set[str]:
    value = node.value if isinstance(node, ast.Constant) else constants.get(getattr(node, "id", ""))
    return {value} if isinstance(value, str) else set()
