"""Structural tags: free text in which a trigger starts a tag, inside which JSON follows a schema. The shapes are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from llguidance import StructTag


def tags_to_lark(value: Mapping[str, Any], special: Mapping[str, int]) -> str:
    """A grammar of one `structural_tag` object, of the older shape (structures, triggers) or the newer (format).

    `special` holds the ids of special tokens, which a text is not made of: a trigger may be one. Raises ValueError.
    """
    if value.get("type") != "structural_tag":
        raise ValueError("type must be 'structural_tag'")
    tags = list(_newer(value["format"]) if "format" in value else _older(value))
    if not tags:
        raise ValueError("there are no tags")
    plain = [tag for tag in tags if tag.trigger not in special]
    if plain and len(plain) != len(tags):
        raise ValueError("triggers must all be special tokens, or all plain text")
    return StructTag.to_grammar(tags, assume_special=not plain)


def _older(value: Mapping[str, Any]) -> Iterator[StructTag]:
    if unknown := value.keys() - {"type", "structures", "triggers"}:
        raise ValueError(f"unknown key(s): {', '.join(sorted(unknown))}")
    for structure in _list(value, "structures"):
        yield _tag(structure, structure.get("schema"), _list(value, "triggers"))


def _newer(form: Any) -> Iterator[StructTag]:
    if not isinstance(form, dict) or form.get("type") != "triggered_tags":
        raise ValueError("format.type must be 'triggered_tags'; other formats are not supported")
    if unknown := form.keys() - {"type", "triggers", "tags"}:
        raise ValueError(f"unsupported key(s) of format: {', '.join(sorted(unknown))}")
    for tag in _list(form, "tags"):
        content = tag.get("content")
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise ValueError("each tag's content.type must be 'json_schema'; others are not supported")
        yield _tag(tag, content.get("json_schema"), _list(form, "triggers"))


def _tag(tag: Mapping[str, Any], schema: Any, triggers: list[Any]) -> StructTag:
    begin, end = tag.get("begin"), tag.get("end")
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, dict):
        raise ValueError("each tag needs begin and end, which are strings, and a schema, which is an object")
    trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
    if trigger is None:
        raise ValueError(f"no trigger starts the tag that begins with {begin!r}")
    return StructTag(trigger=trigger, begin=begin, grammar=schema, end=end)


def _list(value: Mapping[str, Any], key: str) -> list[Any]:
    found = value.get(key)
    if not isinstance(found, list) or (key != "triggers" and not all(isinstance(item, dict) for item in found)):
        raise ValueError(f"{key} must be a list of {'strings' if key == 'triggers' else 'objects'}")
    return found
