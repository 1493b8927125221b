"""Makes requests from an OpenAPI document: what its schemas allow, and what is a little beside it."""

import random
from collections.abc import Mapping
from typing import Any

_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 0.5, -0.5, 1e308, -1e-308),
    *("", "x", "\x00", "🦙\ud83e", "null", "0", "a" * 5000, "../..", "{{ 1 / 0 }}"),
    *([], [None], [[]], ["x"] * 40, [0, -1, 2**40], {}, {"": ""}, {"type": "object"}, {"a": {"b": [1]}}),
)
"""Values that a field of another kind may choke on."""

_NUMBERS = (0, 1, 2, 3, -1, 20, 255, 256, 257, 10**6, 2**31 - 1, 2**63)
_TEXTS = ("", "x", "pico", "Some words to say.", "<|im_end|>", "\n", "é🦙", "^a+$", "[0-9]{3}", "json_object")
_MOST_DEPTH = 5


class Generator:
    """Of one document and one seed: the same requests each time."""

    def __init__(self, document: Mapping[str, Any], seed: int, odd: float = 0.15) -> None:
        """`odd`: how many of the values are none that the schema allows."""
        self._document = document
        self._random = random.Random(seed)
        self._odd = odd

    def body_schema(self, path: str) -> dict[str, Any]:
        """Of a POST's JSON body."""
        content = self._document["paths"][path]["post"]["requestBody"]["content"]
        return self._resolved(content["application/json"]["schema"])

    def changed(self, path: str, base: Mapping[str, Any]) -> dict[str, Any]:
        """A body that works, with one to three fields set to something."""
        properties = self._properties(self.body_schema(path))
        names = self._random.sample(sorted(properties), min(len(properties), self._random.randint(1, 3)))
        return {**base, **{name: self.value(properties[name]) for name in names}}

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """Something that fits the schema, for the most part."""
        pick, schema = self._random, self._resolved(schema)
        if pick.random() < self._odd or depth > _MOST_DEPTH:
            return pick.choice(_ODD)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return pick.choice(schema["enum"])
        for several in ("anyOf", "oneOf", "allOf"):
            if several in schema:
                return self.value(pick.choice(schema[several]), depth)
        match schema.get("type"):
            case "string":
                return pick.choice(_TEXTS)
            case "integer":
                return pick.choice([*_NUMBERS, *self._bounds(schema)])
            case "number":
                return pick.choice([*_NUMBERS, 0.1, 0.999, 1e-9, -2.5, *self._bounds(schema)])
            case "boolean":
                return pick.random() < 0.5
            case "null":
                return None
            case "array":
                items = schema.get("items", {})
                return [self.value(items, depth + 1) for _ in range(pick.choice((0, 1, 1, 2, 3)))]
            case "object":
                return self._object(schema, depth)
        return pick.choice(_ODD)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        made = {
            name: self.value(property_, depth + 1)
            for name, property_ in self._properties(schema).items()
            if name in required or self._random.random() < 0.3
        }
        if schema.get("additionalProperties") and self._random.random() < 0.5:
            made[self._random.choice(_TEXTS)] = self._random.choice(_ODD)
        return made

    def _bounds(self, schema: Mapping[str, Any]) -> list[Any]:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "default")
        return [schema[name] for name in names if schema.get(name) is not None]

    def _properties(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        properties: Mapping[str, Any] = schema.get("properties", {})
        return properties

    def _resolved(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        while "$ref" in schema:
            found: Any = self._document
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = found
        return dict(schema)
