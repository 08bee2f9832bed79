"""The alert rules of deploy/, evaluated on pages of real processes: by a small evaluator, and by promtool where it is installed.

A page is what a process gave at one moment. Two moments of one process, a minute apart, make what `increase` and `rate` see.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from pixiu.discovery.node import Node
from tests.support.waiting import until
from tools.cli.http import fetch, samples

RULES = Path(__file__).resolve().parents[2] / "deploy/prometheus/alerts.yml"
STEP_S = 60.0
"""Between two moments."""

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Moment = Mapping[str, bytes | None]
"""Process → its page; None: it did not answer."""

_RULE = re.compile(r"^ +- alert: (\w+)\n +expr: (>-\n(?: {10,}\S.*\n)+|.+\n)", re.MULTILINE)
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|=~|!=|==|<=|>=|[{}()\[\],=<>]|[\w.:]+)')
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "==": lambda one, other: one == other,
    "!=": lambda one, other: one != other,
    ">": lambda one, other: one > other,
    "<": lambda one, other: one < other,
}


def rules() -> dict[str, str]:
    """Alert → its expression."""
    return {name: " ".join(text.strip().removeprefix(">-").strip("'").split()) for name, text in _RULE.findall(RULES.read_text())}


def firing(*moments: Moment) -> set[str]:
    """The alerts whose condition is true now, the last moment being now. promtool, where it is, says the same."""
    series = _series(moments)
    found = _true_now(series)
    _check_by_promtool(series, found)
    return found


def _true_now(series: Mapping[Labels, Sequence[float]]) -> set[str]:
    return {name for name, text in rules().items() if evaluate(text, series)}


def evaluate(text: str, series: Mapping[Labels, Sequence[float]]) -> Vector:
    """What an expression gives now, of the forms that the rules use. Raises ValueError for others."""
    parser = _Parser(text, series)
    found = parser.comparison()
    while parser.tokens[:1] == ["or"]:
        del parser.tokens[0]
        found = parser.comparison() | found
    if parser.tokens:
        raise ValueError(f"{text}: {parser.tokens[0]!r} is not understood")
    return found


class _Parser:
    """Reads and evaluates: comparison := value op number, several joined by `or`; value := selector, function or aggregation."""

    def __init__(self, text: str, series: Mapping[Labels, Sequence[float]]) -> None:
        self.tokens = _TOKEN.findall(text)
        self._series = series

    def comparison(self) -> Vector:
        vector = self.value()
        if not self.tokens or self.tokens[0] not in _COMPARE:
            return vector
        holds, bound = _COMPARE[self.tokens.pop(0)], float(self.tokens.pop(0))
        return {labels: value for labels, value in vector.items() if holds(value, bound)}

    def value(self) -> Vector:
        word = self.tokens[0]
        if word in ("sum", "max"):
            return self._aggregation(self.tokens.pop(0))
        if word in ("increase", "rate"):
            self._take(word, "(")
            there = {labels: [one for one in values if not math.isnan(one)] for labels, values in self._selected().items()}
            selected = {labels: values for labels, values in there.items() if len(values) > 1}
            grown = {_nameless(labels): _increase(values) for labels, values in selected.items()}
            if len(grown) != len(selected):
                raise ValueError(f"{word}: two series differ in their names alone")
            self._take("[", None, "]", ")")
            return grown if word == "increase" else {labels: value / STEP_S for labels, value in grown.items()}
        if word == "histogram_quantile":
            self._take(word, "(")
            quantile = float(self.tokens.pop(0))
            self._take(",")
            vector = self.value()
            self._take(")")
            return _quantiles(quantile, vector)
        return {labels: values[-1] for labels, values in self._selected().items() if not math.isnan(values[-1])}

    def _take(self, *tokens: str | None) -> None:
        for wanted in tokens:
            found = self.tokens.pop(0)
            if wanted is not None and found != wanted:
                raise ValueError(f"{found!r} where {wanted!r} should be")

    def _selected(self) -> Mapping[Labels, Sequence[float]]:
        wants: list[tuple[str, str, str]] = []
        if self.tokens[0] != "{":
            wants.append(("__name__", "=", self.tokens.pop(0)))
        if self.tokens and self.tokens[0] == "{":
            self._take("{")
            while self.tokens[0] != "}":
                name, how, text = self.tokens.pop(0), self.tokens.pop(0), self.tokens.pop(0)
                wants.append((name, how, json.loads(text)))
                if self.tokens[0] == ",":
                    self._take(",")
            self._take("}")
        return {labels: values for labels, values in self._series.items() if _matches(dict(labels), wants)}

    def _aggregation(self, how: str) -> Vector:
        self._take("by", "(")
        names: list[str] = []
        while self.tokens[0] != ")":
            names.append(self.tokens.pop(0))
            if self.tokens[0] == ",":
                self._take(",")
        self._take(")", "(")
        vector = self.value()
        self._take(")")
        groups: dict[Labels, list[float]] = {}
        for labels, value in vector.items():
            groups.setdefault(frozenset(one for one in labels if one[0] in names), []).append(value)
        return {labels: sum(values) if how == "sum" else max(values) for labels, values in groups.items()}


def _matches(labels: Mapping[str, str], wants: Iterable[tuple[str, str, str]]) -> bool:
    for name, how, text in wants:
        value = labels.get(name, "")
        if not {"=": value == text, "!=": value != text, "=~": bool(re.fullmatch(text, value))}[how]:
            return False
    return True


def _nameless(labels: Labels) -> Labels:
    return frozenset(one for one in labels if one[0] != "__name__")


def _increase(values: Sequence[float]) -> float:
    return sum(max(after - before, 0.0) for before, after in pairwise(values))


def _quantiles(quantile: float, vector: Vector) -> Vector:
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, value in vector.items():
        bound = float(dict(labels)["le"].replace("+Inf", "inf"))
        groups.setdefault(frozenset(one for one in labels if one[0] != "le"), []).append((bound, value))
    found: Vector = {}
    for labels, buckets in groups.items():
        buckets.sort()
        wanted = buckets[-1][1] * quantile
        if not wanted:
            continue
        at = next(index for index, (_, count) in enumerate(buckets) if count >= wanted)
        lower, below = buckets[at - 1] if at else (0.0, 0.0)
        upper, count = buckets[at]
        found[labels] = lower if math.isinf(upper) else lower + (upper - lower) * (wanted - below) / (count - below)
    return found


def _series(moments: Sequence[Moment]) -> dict[Labels, list[float]]:
    """Every series with its value at each moment, NaN where it has none; `up` as Prometheus makes it."""
    found: dict[Labels, list[float]] = {}
    for at, moment in enumerate(moments):
        for process, page in moment.items():
            own = [("up", {}, float(page is not None)), *samples(page or b"")]
            for name, labels, value in own:
                key = frozenset({**labels, "__name__": name, "job": "pixiu", "instance": process}.items())
                found.setdefault(key, [math.nan] * len(moments))[at] = value
    return {labels: values for labels, values in found.items() if dict(labels)["__name__"].startswith(("pixiu_", "up"))}


def _check_by_promtool(series: Mapping[Labels, Sequence[float]], expected: set[str]) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        return
    used = {labels: values for labels, values in series.items() if not all(map(math.isnan, values))}
    moments = max(map(len, used.values()))
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": _written(labels), "values": " ".join(_points(values))} for labels, values in used.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f"count({text}) > bool 0",
                        "eval_time": f"{moments - 1}m",
                        "exp_samples": [{"labels": "{}", "value": 1}] if name in expected else [],
                    }
                    for name, text in rules().items()
                ],
            }
        ],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
        json.dump(tests, file)
        file.flush()
        done = subprocess.run([promtool, "test", "rules", file.name], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _points(values: Sequence[float]) -> list[str]:
    """As Prometheus has them: a series that ends with its process is marked as stale."""
    there = [not math.isnan(value) for value in values]
    return [repr(value) if there[at] else "stale" if any(there[:at]) else "_" for at, value in enumerate(values)]


def _written(labels: Labels) -> str:
    said = ",".join(f"{name}={json.dumps(value)}" for name, value in sorted(labels) if name != "__name__")
    return f"{dict(labels)['__name__']}{{{said}}}"


async def moment(**nodes: Node) -> Moment:
    """What these processes' /metrics say now; None of one that does not answer, as when Prometheus scrapes."""

    async def page(node: Node) -> bytes | None:
        try:
            status, body = await fetch(node.host, node.http_port, "/metrics")
        except OSError:
            return None
        return body if status == 200 else None

    pages = await asyncio.gather(*(page(node) for node in nodes.values()))
    return dict(zip(nodes, pages, strict=True))


async def until_firing(before: Moment, nodes: Mapping[str, Node], *wanted: str) -> set[str]:
    """Wait until each of these alerts has fired. Returns all that did."""
    found: set[str] = set()

    async def fire() -> bool:
        now = await moment(**nodes)
        found.update(_true_now(_series((before, now))))
        if set(wanted) <= found:
            firing(before, now)
            return True
        return False

    await until(fire, lambda: f"{set(wanted) - found} firing")
    return found
