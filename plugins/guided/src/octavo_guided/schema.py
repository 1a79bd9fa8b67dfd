"""JSON schemas as trees: closing objects, and finding the part that an error is about."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import llguidance

_SEARCH_S = 0.5  # an error message must not cost more than what it is about
_NAMED = ("properties", "patternProperties", "$defs", "definitions")  # hold schemas by name
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
_OBJECT_WORDS = {"properties", "patternProperties", "required", "minProperties", "maxProperties"}


def close_objects(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in each object that does not mention them."""
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for path, part in _parts(schema):
        holder = closed
        for step in path[:-1]:
            holder[step] = holder[step].copy() if holder[step] is schema.get(step) else holder[step]
            holder = holder[step]
        holder[path[-1]] = close_objects(part)
    types = schema.get("type")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    if (is_object or (types is None and _OBJECT_WORDS & schema.keys())) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def locate(schema: Any, message: str) -> str:
    """A JSON pointer to the innermost part of a schema that alone gives the same error; empty for the whole."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    pointer, part, end = "#", schema, time.monotonic() + _SEARCH_S
    while isinstance(part, dict):
        for path, inner in _parts(part):
            if time.monotonic() > end:
                return "" if pointer == "#" else pointer
            if error_of({**definitions, **inner} if isinstance(inner, dict) else inner) == message:
                pointer = "/".join([pointer, *(str(step).replace("~", "~0").replace("/", "~1") for step in path)])
                part = inner
                break
        else:
            break
    return "" if pointer == "#" else pointer


def error_of(schema: Any) -> str:
    """What is wrong with a schema; empty for none."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return llguidance.LLMatcher.validate_grammar(grammar)
    except (ValueError, RecursionError) as error:
        return str(error)


def _parts(schema: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The schemas directly inside one, each with its path."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from (((key, name), inner) for name, inner in value.items())
        elif key in _LISTED and isinstance(value, list):
            yield from (((key, i), inner) for i, inner in enumerate(value))
        elif key in _SINGLE:
            yield (key,), value
