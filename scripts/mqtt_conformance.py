"""Keep the table of MQTT's normative statements: complete, and with tests that exist.

    python scripts/mqtt_conformance.py           rewrite the tests of all rows in docs/mqtt_conformance.md
    python scripts/mqtt_conformance.py --check   report what is wrong; exit code 1 if anything is

A test names the statement that it checks: `MQTT-3.1.2-24` or `test_mqtt_3_1_2_24_…` for MQTT 3.1.1, `MQTT5-3.1.2-22` or
`test_mqtt5_3_1_2_22_…` for MQTT 5, in its name, its docstring, a comment, the name of a parameter, or a transcript. Rows whose test
names no statement have it by hand, as `path::function`; rows without a test say why not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "mqtt_conformance.md"
SEARCHED: Final = ("cluster", "gateway", "relay", "router", "e2e", "sim", "clients")
"""Folders of tests/ whose files may name statements."""
COUNTS: Final = {
    "3.1.1": (
        "1.5.3:3 2.2.2:2 2.3.1:7 3.1.0:2 3.1.2:24 3.1.3:11 3.1.4:5 3.2.0:1 3.2.2:6 3.3.1:12 3.3.2:3 3.3.4:1 3.3.5:2 3.6.1:1 "
        "3.8.1:1 3.8.3:4 3.8.4:6 3.9.3:2 3.10.1:1 3.10.3:2 3.10.4:6 3.12.4:1 3.14.1:1 3.14.4:3 4.1.0:2 4.3.1:1 4.3.2:2 4.3.3:2 "
        "4.4.0:1 4.5.0:2 4.6.0:6 4.7.1:3 4.7.2:1 4.7.3:4 4.8.0:2 6.0.0:4 7.0.0:2 7.1.1:1 7.1.2:1"
    ),
    "5": (
        "1.5.4:3 1.5.5:1 1.5.7:1 2.1.3:1 2.2.1:6 2.2.2:1 3.1.0:2 3.1.2:30 3.1.3:12 3.1.4:6 3.2.0:2 3.2.2:22 3.3.1:13 3.3.2:20 "
        "3.3.4:10 3.4.2:3 3.5.2:3 3.6.1:1 3.6.2:3 3.7.2:3 3.8.1:1 3.8.3:5 3.8.4:8 3.9.2:2 3.9.3:2 3.10.1:1 3.10.3:2 3.10.4:6 "
        "3.11.2:2 3.11.3:2 3.12.4:1 3.14.0:1 3.14.1:1 3.14.2:4 3.14.4:3 3.15.1:1 3.15.2:3 4.1.0:2 4.2:1 4.3.1:1 4.3.2:5 4.3.3:13 "
        "4.4.0:2 4.5.0:2 4.6.0:6 4.7.0:1 4.7.1:2 4.7.2:1 4.7.3:4 4.8.2:6 4.9.0:3 4.12.0:7 4.12.1:2 4.13.1:1 4.13.2:1 6.0.0:4"
    ),
}
"""Version → statements of each section; they are numbered from 1."""
ABSENT: Final = {"5": {"2.2.1-1"}}
"""Numbers that a version does not use."""
MENTION: Final = re.compile(r"MQTT(5?)-(\d+(?:\.\d+)+-\d+)|test_mqtt(5?)_(\d+(?:_\d+){2,3})_")
ROW: Final = re.compile(r"^\| (\d+(?:\.\d+)+-\d+) \| (.+?) \| (.+?) \|$", re.MULTILINE)
NOT_TESTED: Final = "not tested"
CLIENTS: Final = "of clients"
REASONS: Final = ("departs: ", "does not apply: ")
MAX_SHOWN: Final = 2
"""Most tests in one row."""


@dataclass(frozen=True)
class Test:
    """A test: a file, and a function in it, or empty where a file as a whole has the statement."""

    path: str
    function: str

    def __str__(self) -> str:
        return f"`{self.path}::{self.function}`" if self.function else f"`{self.path}`"


def statements(version: str) -> list[str]:
    """The numbers of all statements of a version."""
    sections = (found.split(":") for found in COUNTS[version].split())
    numbers = [f"{section}-{number}" for section, count in sections for number in range(1, int(count) + 1)]
    return [number for number in numbers if number not in ABSENT.get(version, ())]


@cache
def functions(path: Path) -> tuple[tuple[int, int, str], ...]:
    """First line, last line and name of each function of a module, decorators included."""
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return tuple(
        (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno or node.lineno, node.name)
        for node in found
    )


def mentions(path: Path) -> Iterator[tuple[str, str, Test]]:
    """Version, number and test of each statement that a file names."""
    text = path.read_text()
    for found in MENTION.finditer(text):
        version = "5" if found[1] or found[3] else "3.1.1"
        function = ""
        if path.suffix == ".py":
            line = text.count("\n", 0, found.start()) + 1
            function = next((name for first, last, name in functions(path) if first <= line <= last and "test" in name), "")
        test = Test(str(path.relative_to(ROOT)), function)
        if found[2]:
            yield version, found[2], test
            continue
        words = found[4].split("_")
        known = statements(version)
        for parts in (4, 3):  # a name may go on with a number
            number = f"{'.'.join(words[: parts - 1])}-{words[parts - 1]}" if len(words) >= parts else ""
            if number in known:
                yield version, number, test
                break


def named_tests() -> dict[tuple[str, str], list[Test]]:
    """(version, number) → tests that name the statement."""
    found: dict[tuple[str, str], dict[Test, None]] = {}
    for folder in SEARCHED:
        for path in sorted((ROOT / "tests" / folder).rglob("*")):
            if path.suffix in (".py", ".txt") and "__pycache__" not in path.parts:
                for version, number, test in mentions(path):
                    found.setdefault((version, number), {})[test] = None
    return {key: list(tests) for key, tests in found.items()}


def versions(page: str) -> Iterator[tuple[str, str]]:
    """Each version with its part of the page."""
    for part in page.split("\n## ")[1:]:
        title = part.split("\n", 1)[0]
        version = next((version for version in COUNTS if title == f"MQTT {version}"), None)
        if version is not None:
            yield version, part


def rewritten(page: str) -> str:
    """The page with the tests that name statements in place of `not tested`, and of what such tests were."""
    tests = named_tests()
    for version, part in versions(page):

        def row(found: re.Match[str], version: str = version) -> str:
            number, demand, shown = found.groups()
            by_name = tests.get((version, number))
            if by_name:
                shown = ", ".join(map(str, by_name[:MAX_SHOWN]))
            elif all_missing(shown):
                shown = NOT_TESTED
            return f"| {number} | {demand} | {shown} |"

        page = page.replace(part, ROW.sub(row, part))
    return re.sub(r"<!-- summary -->.*?<!-- end -->", f"<!-- summary -->\n{summary(page)}\n<!-- end -->", page, flags=re.DOTALL)


def summary(page: str) -> str:
    """Table of numbers of statements."""
    lines = ["| version | statements | with a test | of clients alone | departed from, or not applicable | not tested |"]
    lines.append("|---|---|---|---|---|---|")
    for version, part in versions(page):
        shown = [found[3] for found in ROW.finditer(part)]
        clients, untested = shown.count(CLIENTS), shown.count(NOT_TESTED)
        reasons = sum(text.startswith(REASONS) for text in shown)
        tested = len(shown) - clients - untested - reasons
        lines.append(f"| {version} | {len(shown)} | {tested} | {clients} | {reasons} | {untested} |")
    return "\n".join(lines)


def tests_of(shown: str) -> list[Test]:
    """Tests in the last column of a row."""
    return [Test(path, function) for path, function in re.findall(r"`(tests/[^`:]+)(?:::(\w+))?`", shown)]


def is_there(test: Test) -> bool:
    """True if a test exists."""
    path = ROOT / test.path
    return path.is_file() and (not test.function or test.function in {name for _, _, name in functions(path)})


def all_missing(shown: str) -> bool:
    """True if a row names tests, and none exists."""
    tests = tests_of(shown)
    return bool(tests) and not any(map(is_there, tests))


def problems(page: str) -> list[str]:
    """What is wrong with the page."""
    found: list[str] = []
    by_name = named_tests()
    for version, part in versions(page):
        rows = {row[1]: row[3] for row in ROW.finditer(part)}
        known = statements(version)
        found += [f"MQTT {version}: {number} has no row" for number in known if number not in rows]
        found += [f"MQTT {version}: {number} is no statement" for number in rows if number not in known]
        for number, shown in rows.items():
            tests = tests_of(shown)
            found += [f"MQTT {version}: {number}: {test} does not exist" for test in tests if not is_there(test)]
            if not tests and shown not in (NOT_TESTED, CLIENTS) and not shown.startswith(REASONS):
                found.append(f"MQTT {version}: {number}: name a test, or say {NOT_TESTED!r}, {CLIENTS!r}, or begin with {REASONS}")
            if shown == NOT_TESTED and (version, number) in by_name:
                found.append(
                    f"MQTT {version}: {number} is tested by {by_name[version, number][0]}: run scripts/mqtt_conformance.py"
                )
    unknown = sorted(key for key in by_name if key[1] not in statements(key[0]))
    return found + [f"{by_name[key][0]} names MQTT {key[0]} {key[1]}, which is no statement" for key in unknown]


def main() -> int:
    """Rewrite or check the page. Returns the exit code."""
    page = PAGE.read_text()
    if "--check" not in sys.argv:
        PAGE.write_text(rewritten(page))
        return 0
    found = problems(page)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
