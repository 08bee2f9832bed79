"""Draw who imports whom: one Markdown page of the product's rooms, and the rules that it must keep.

A room is a package, without the packages in it, or a module beside the packages of `pixiu/`.

    python scripts/import_graph.py           writes docs/import_graph.md
    python scripts/import_graph.py --check   says what breaks a rule or is not up to date, exit code 1

The rules: at most `MAX_ROOMS` rooms, no circle between rooms, none between modules. Imports for types and in functions count.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/import_graph.md"
PACKAGES = ("pixiu", "cluster", "registry", "proxy", "router", "broker", "relay", "xiu", "pi", "gateway", "pipeline")
LOOSE = "pixiu"
"""The package whose modules are rooms of their own; elsewhere modules belong to their package."""
GENERATED = "pixiu.wire.v1"
"""Generated package, which belongs to the package above it."""
MAX_ROOMS = 31
KNOWN_CIRCLES: tuple[frozenset[str], ...] = ()
"""Circles of modules that are still to be removed: a ratchet, nothing may be added. Remove a circle from here when it is gone."""

Graph = Mapping[str, set[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return every module of the product by its dotted name; a package is named as its `__init__`."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module, known: Set[str]) -> Iterator[str]:
    """Yield the known modules that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from {name if name in known else node.module for name in inner} & known


def graph_of_modules(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the imports of each module."""
    paths = modules(root)
    return {name: set(imported(ast.parse(path.read_text()), paths.keys())) - {name} for name, path in paths.items()}


def room_of(module: str, packages: set[str]) -> str:
    """Return the room that a module belongs to."""
    if module == GENERATED or module.startswith(f"{GENERATED}."):
        return GENERATED.rpartition(".")[0]
    parent = module.rpartition(".")[0]
    return module if module in packages or parent == LOOSE else parent


def graph_of_rooms(imports: Graph) -> dict[str, set[str]]:
    """Return the rooms that each room's modules import. Packages that hold nothing but packages are not rooms."""
    packages = {module.rpartition(".")[0] for module in imports} | set(PACKAGES)
    rooms: dict[str, set[str]] = {}
    for module, others in imports.items():
        empty = (
            module in packages and not others and not any(name.rpartition(".")[0] == module for name in imports.keys() - packages)
        )
        if empty:
            continue
        own = room_of(module, packages)
        rooms.setdefault(own, set()).update(room_of(other, packages) for other in others)
    return {room: others - {room} for room, others in rooms.items()}


def circles(graph: Graph) -> list[frozenset[str]]:
    """Return the sets of two or more nodes that reach each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(frozenset(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def broken(imports: Graph, known: tuple[frozenset[str], ...] = KNOWN_CIRCLES) -> list[str]:
    """Describe the broken rules, each in a sentence."""
    rooms = graph_of_rooms(imports)
    found = [f"a circle of rooms: {', '.join(sorted(circle))}" for circle in circles(rooms)]
    if len(rooms) > MAX_ROOMS:
        found.append(f"{len(rooms)} rooms, and {MAX_ROOMS} is the most: put a module where it belongs")
    now = circles(imports)
    found += [f"a circle of modules: {', '.join(sorted(circle))}" for circle in now if not any(circle <= old for old in known)]
    found += [
        f"the circle of {', '.join(sorted(old))} is gone or smaller: say so in KNOWN_CIRCLES" for old in known if old not in now
    ]
    return found


def floors(rooms: Graph) -> list[list[str]]:
    """Return the rooms by height, the top first: each imports only from floors below its own. Rooms in a circle share the lowest
    place."""
    height: dict[str, int] = {}

    def high(room: str, above: frozenset[str]) -> int:
        if room not in height:
            below = [high(other, above | {room}) for other in rooms[room] if other not in above]
            height[room] = 1 + max(below, default=-1)
        return height[room]

    for room in sorted(rooms):
        high(room, frozenset({room}))
    return [sorted(room for room in rooms if height[room] == floor) for floor in range(max(height.values()), -1, -1)]


def reduced(rooms: Graph) -> dict[str, set[str]]:
    """Drop the arrows that a longer path implies."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for other in rooms[waiting.pop()] - found:
                found.add(other)
                waiting.append(other)
        return found

    below = {room: reached(room) for room in rooms}
    return {
        room: {other for other in others if not any(other in below[each] for each in others - {other})}
        for room, others in rooms.items()
    }


def page(imports: Graph) -> str:
    """Return the Markdown page."""
    rooms = graph_of_rooms(imports)
    lines = [
        "# Import graph",
        "",
        "Drawn by `scripts/import_graph.py`; do not edit. A room is a package, or a module beside the packages of `pixiu/`.",
        f"There are {len(rooms)} rooms ({MAX_ROOMS} at most) and {sum(map(len, rooms.values()))} arrows between them.",
        "",
        "The picture leaves out every arrow that a longer way implies; the table has them all, the top floor first.",
        "",
        "```mermaid",
        "graph TD",
    ]
    for room, others in sorted(reduced(rooms).items()):
        lines += [f"    {room.replace('.', '_')}[{room}] --> {other.replace('.', '_')}[{other}]" for other in sorted(others)]
    lines += ["```", "", "| floor | room | imports |", "| ---: | --- | --- |"]
    for floor, names in enumerate(reversed(floors(rooms))):
        lines += [f"| {floor} | `{room}` | {', '.join(f'`{other}`' for other in sorted(rooms[room]))} |" for room in names]
    return "\n".join(lines[: -len(rooms)] + lines[-len(rooms) :][::-1]) + "\n"


def main() -> int:
    """Run the command. Returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what breaks a rule or is not up to date")
    imports = graph_of_modules()
    text, path = page(imports), ROOT / PAGE
    if not parser.parse_args().check:
        path.write_text(text)
        return 0
    problems = broken(imports)
    if not path.exists() or path.read_text() != text:
        problems.append(f"{PAGE} is not up to date: python scripts/import_graph.py")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
