"""The wire's classes as JSON schemas, for the OpenAPI document of whoever mounts the weight routes.

Each schema stands by itself: the document belongs to another application, whose components are not ours to fill.
"""

from __future__ import annotations

from typing import Any

import msgspec

_PREFIX = "#/components/schemas/"


def schema_of(kind: Any) -> dict[str, Any]:
    """JSON schema of a msgspec type, without references."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template=_PREFIX + "{name}")
    found: dict[str, Any] = _inline(schema, components)
    return found


def json_content(description: str, *kinds: Any) -> dict[str, Any]:
    """An OpenAPI response or request body that carries one of the types."""
    schemas = [schema_of(kind) for kind in kinds]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _inline(part: Any, components: dict[str, Any]) -> Any:
    if isinstance(part, list):
        return [_inline(entry, components) for entry in part]
    if not isinstance(part, dict):
        return part
    reference = part.get("$ref")
    if isinstance(reference, str):
        return _inline(components[reference.removeprefix(_PREFIX)], components)
    found: dict[str, Any] = {key: _inline(value, components) for key, value in part.items() if key != "discriminator"}
    pattern = found.get("pattern")
    if isinstance(pattern, str):
        # Python's end of a string; JSON schema has ECMA's expressions, where $ means the same.
        found["pattern"] = pattern.replace(r"\Z", "$")
    return found
