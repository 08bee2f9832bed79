"""Specifications of options: bounds and choices beside each dataclass field, and the conversion of TOML values and of text.

A field's type is the kind of its value: bool, int, float, str, Path, Literal[…], tuple[int, int], tuple[int, …] or
tuple[str, …]. `bounded` and `choice` restrict it. The docstring under a field is its help text.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pixiu.errors import ConfigurationError

MAX_TEXT = 4096
"""Maximum characters of one text option."""
MAX_LIST = 1024
"""Maximum items of one list option."""
SHOWN = 120
"""Characters of a wrong value that an error shows."""

Number = TypeVar("Number", int, float)


def bounded(default: Number, low: Number, high: Number) -> Number:
    """Declare a number from `low` to `high`, inclusive. For the right side of a dataclass field."""
    field: Any = dataclasses.field(default=default, metadata={"low": low, "high": high})
    return field  # type: ignore[no-any-return]


def choice(default: str, *allowed: str) -> str:
    """Declare a choice of one text. For the right side of a dataclass field."""
    field: Any = dataclasses.field(default=default, metadata={"allowed": allowed})
    return field  # type: ignore[no-any-return]


def choices(default: tuple[str, ...], *allowed: str) -> tuple[str, ...]:
    """Declare a choice of several texts, at least one, none twice. For the right side of a dataclass field."""
    field: Any = dataclasses.field(default=default, metadata={"allowed": allowed})
    return field  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Spec:
    """Specification of one option."""

    key: str
    hint: Any
    default: Any
    low: float | None
    high: float | None
    allowed: tuple[str, ...]

    def describe(self) -> str:
        """Describe the allowed values, as an error names them after «must be»."""
        if self.hint is bool:
            return "true or false"
        if self.hint in (int, float):
            kind = "an integer" if self.hint is int else "a number"
            return kind if self.low is None else f"{kind} from {self.low} to {self.high}"
        allowed = ", ".join(self.allowed)
        if get_origin(self.hint) is tuple:
            items = get_args(self.hint)
            if items[-1] is not ...:
                return f"a list of {len(items)} integers"
            if self.allowed:
                return f"a list, without repetition, of at least one of: {allowed}"
            return f"a list of {'integers' if items[0] is int else 'texts'}, at most {MAX_LIST}"
        if self.allowed:
            return f"one of: {allowed}"
        return f"a text of at most {MAX_TEXT} characters without control characters"

    def problem(self, value: Any) -> str | None:
        """Return the requirement that the value does not meet; None if it is valid."""
        return None if self._is_allowed(value) else self.describe()

    def _is_allowed(self, value: Any) -> bool:
        hint = self.hint
        if hint is bool:
            return isinstance(value, bool)
        if hint is int or hint is float:
            if isinstance(value, bool) or not isinstance(value, int if hint is int else (int, float)) or value != value:
                return False
            return self.low is None or self.high is None or self.low <= value <= self.high
        if get_origin(hint) is tuple:
            return self._is_allowed_tuple(value)
        if hint is Path:
            value = str(value) if isinstance(value, Path) else value
        return _is_text(value) and (not self.allowed or value in self.allowed)

    def _is_allowed_tuple(self, value: Any) -> bool:
        items = get_args(self.hint)
        if not isinstance(value, tuple) or len(value) > MAX_LIST or (items[-1] is not ... and len(value) != len(items)):
            return False
        if items[0] is int:
            return all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        if not all(_is_text(item) for item in value):
            return False
        return not self.allowed or (0 < len(set(value)) == len(value) and set(value) <= set(self.allowed))

    def convert(self, raw: Any) -> Any:
        """Convert a value from TOML. Raises ValueError (with the allowed values) if it is not allowed."""
        value: Any = tuple(raw) if isinstance(raw, list) and get_origin(self.hint) is tuple else raw
        if self.hint is float and isinstance(raw, int) and not isinstance(raw, bool):
            value = float(raw)
        problem = self.problem(value)
        if problem is not None:
            raise ValueError(problem)
        return Path(value) if self.hint is Path else value

    def convert_text(self, text: str) -> Any:
        """Convert a text from the environment or the command line; lists are `a,b` or `[a, b]`. Raises as `convert`."""
        return self.convert(self._parse(text))

    def _parse(self, text: str) -> Any:
        try:
            if self.hint is bool:
                return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), text)
            if self.hint is int:
                return int(text)
            if self.hint is float:
                return float(text)
            if get_origin(self.hint) is tuple:
                inner = text.strip().removeprefix("[").removesuffix("]")
                items = [item.strip().strip("\"'") for item in inner.split(",")] if inner.strip() else []
                return [int(item) for item in items] if get_args(self.hint)[0] is int else items
        except ValueError:
            return text
        return text


def specs(options_type: type) -> Mapping[str, Spec]:
    """Return every option of a dataclass by its key, in order. Raises TypeError for an unsupported field type."""
    hints = get_type_hints(options_type)
    found: dict[str, Spec] = {}
    for field in dataclasses.fields(options_type):
        hint, allowed = hints[field.name], tuple(field.metadata.get("allowed", ()))
        if get_origin(hint) is Literal:
            hint, allowed = str, tuple(str(value) for value in get_args(hint))
        if hint not in (bool, int, float, str, Path) and get_origin(hint) is not tuple:
            raise TypeError(f"{options_type.__name__}.{field.name}: options have no type {hint}")
        default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        found[field.name] = Spec(field.name, hint, default, field.metadata.get("low"), field.metadata.get("high"), allowed)
    return found


def field_problems(options: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, allowed values) for every field that violates its own type, bounds or choices."""
    for key, spec in specs(type(options)).items():
        problem = spec.problem(getattr(options, key))
        if problem is not None:
            yield key, problem


def show(value: Any) -> str:
    """Format a value for an error: one line, bounded, control characters escaped."""
    text = (
        json.dumps(value, default=str, ensure_ascii=False) if not isinstance(value, tuple) else json.dumps(list(value), default=str)
    )
    text = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Report an unknown name, with the nearest known name and all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    guess = f" Did you mean {near[0]}?" if near else ""
    return f"there is no {what} {show(name)}.{guess} Known: {', '.join(names)}"


def field_docs(options_type: type) -> dict[str, str]:
    """Return the docstring under each field, of the class and its bases, as one line each; empty if the source is unavailable."""
    docs: dict[str, str] = {}
    for base in reversed(options_type.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if tree.body and isinstance(tree.body[0], ast.ClassDef) else []
        for node, after in pairwise(body):
            if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
                docs[node.target.id] = " ".join(after.value.value.split())
    return docs


def toml_value(value: Any) -> str:
    """Format a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return json.dumps(str(value))


def render_table(table: str, options_type: type, keys: Iterable[str] | None = None) -> str:
    """Render one TOML table with every option, or these, at its default, below its help text and its allowed values."""
    docs = field_docs(options_type)
    lines = [f"[{table}]"]
    found = specs(options_type)
    for key, spec in found.items() if keys is None else ((key, found[key]) for key in keys):
        if spec.default is dataclasses.MISSING:
            raise ConfigurationError(f"[{table}] {key} has no default: every option needs one")
        text = f"{docs.get(key, '')} ({spec.describe()})".strip()
        lines += [f"# {line}" for line in textwrap.wrap(text, 110)]
        lines += [f"{key} = {toml_value(spec.default)}", ""]
    return "\n".join(lines)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()
