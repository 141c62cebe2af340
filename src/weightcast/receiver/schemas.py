"""JSON schemas of the wire's classes, for the OpenAPI document of the application that mounts the weight routes.

Each schema is complete, without references: the document's components belong to that application.
"""

from __future__ import annotations

from typing import Any

import msgspec

_PREFIX = "#/components/schemas/"


def schema_of(kind: Any) -> dict[str, Any]:
    """Returns the JSON schema of a msgspec type, without references."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template=_PREFIX + "{name}")
    found: dict[str, Any] = _inline(schema, components)
    return found


def json_content(description: str, *kinds: Any) -> dict[str, Any]:
    """Returns an OpenAPI response or request body whose content is one of the types."""
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
        # JSON schema has ECMAScript's regular expressions, in which $ means Python's \Z.
        found["pattern"] = pattern.replace(r"\Z", "$")
    return found
