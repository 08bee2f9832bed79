"""The description of the HTTP API, and what it says of requests and answers."""

from __future__ import annotations

import json
from typing import Any, Final

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from gateway.http.api import DESCRIPTION

OPENAPI: Final[dict[str, Any]] = json.loads(DESCRIPTION)


def problem(schema: dict[str, Any], found: object) -> str:
    """What about a value is not as a schema of the description says; empty if nothing is."""
    errors = Draft202012Validator({**schema, "components": OPENAPI["components"]}).iter_errors(found)
    return "; ".join(str(error.message) for error in errors)


def template_of(path: str) -> str:
    """The path of the description that a request's path fits; empty: none."""
    words = path.split("/")
    for template in OPENAPI["paths"]:
        wanted = template.split("/")
        if len(wanted) == len(words) and all(a == b or a.startswith("{") for a, b in zip(wanted, words, strict=True)):
            return str(template)
    return ""


def schema_of_answer(method: str, path: str, status: int) -> dict[str, Any]:
    """The schema of an answer in JSON. Fails if there is no such route or status."""
    described = OPENAPI["paths"][template_of(path)][method.lower()]["responses"][str(status)]
    if "$ref" in described:
        described = OPENAPI["components"]["responses"][described["$ref"].rpartition("/")[2]]
    found: dict[str, Any] = described["content"]["application/json"]["schema"]
    return found
