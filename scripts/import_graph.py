"""Draw who imports whom: one Markdown page of the product's packages and folders, and the rules that they must keep.

A family is what lies directly in a folder: a module, or a folder with everything in it. The families of the root are the packages.

    python scripts/import_graph.py           writes docs/import_graph.md
    python scripts/import_graph.py --check   says what breaks a rule or is not up to date, exit code 1

The rules: no circle between packages, none between the families of a folder, at most `MAX_MODULES` modules in a folder. Imports for
types and in functions count.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/import_graph.md"
ROLES = ("proxy", "router", "broker", "relay", "xiu", "pi", "topic", "admin", "gateway", "bridge")
PACKAGES = ("pixiu", "cluster", "registry", *ROLES, "node", "ops", "onebox", "tools", "nsqdoor", "pipeline")
GENERATED = {"cluster.wire.v1", "pixiu.wire.v1"}
"""The folders of generated modules, which have as many as there are protocols."""
MAX_MODULES = 15
"""Modules in a folder, `__init__` not counted; more ask for folders inside."""

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


def folders(imports: Graph) -> list[str]:
    """Return the folders that have modules or folders, by their dotted names; the root is ""."""
    return sorted({"", *(name.rsplit(".", depth)[0] for name in imports for depth in range(1, name.count(".") + 1))})


def sizes(imports: Graph) -> Counter[str]:
    """Return the number of modules directly in each folder."""
    inner = set(folders(imports))
    return Counter(name.rpartition(".")[0] for name in imports if name not in inner and "." in name)


def family_of(module: str, folder: str) -> str | None:
    """Return the family of a folder that a module belongs to; None for a module outside it."""
    if not folder:
        return module.partition(".")[0]
    if module == folder:
        return f"{folder}.__init__"
    inside = module.removeprefix(f"{folder}.")
    return None if inside == module else f"{folder}.{inside.partition('.')[0]}"


def graph_of_families(imports: Graph, folder: str = "") -> dict[str, set[str]]:
    """Return the families of a folder that each of its families imports."""
    found: dict[str, set[str]] = {}
    for module, others in imports.items():
        own = family_of(module, folder)
        if own is not None:
            found.setdefault(own, set()).update(filter(None, (family_of(other, folder) for other in others)))
    return {family: others - {family} for family, others in found.items()}


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


def broken(imports: Graph) -> list[str]:
    """Describe the broken rules, each in a sentence."""
    found = [
        f"a circle in {folder or 'the root'}: {', '.join(sorted(circle))}"
        for folder in folders(imports)
        for circle in circles(graph_of_families(imports, folder))
    ]
    found += [
        f"{folder} has {count} modules, and {MAX_MODULES} is the most: make folders inside"
        for folder, count in sorted(sizes(imports).items())
        if count > MAX_MODULES and folder not in GENERATED
    ]
    return found


def floors(graph: Graph) -> list[list[str]]:
    """Return the nodes by height, the top first: each imports only from floors below its own. Nodes in a circle share the lowest
    place."""
    height: dict[str, int] = {}

    def high(node: str, above: frozenset[str]) -> int:
        if node not in height:
            below = [high(other, above | {node}) for other in graph[node] if other not in above]
            height[node] = 1 + max(below, default=-1)
        return height[node]

    for node in sorted(graph):
        high(node, frozenset({node}))
    return [sorted(node for node in graph if height[node] == floor) for floor in range(max(height.values()), -1, -1)]


def reduced(graph: Graph) -> dict[str, set[str]]:
    """Drop the arrows that a longer path implies."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for other in graph[waiting.pop()] - found:
                found.add(other)
                waiting.append(other)
        return found

    below = {node: reached(node) for node in graph}
    return {
        node: {other for other in others if not any(other in below[each] for each in others - {other})}
        for node, others in graph.items()
    }


def page(imports: Graph) -> str:
    """Return the Markdown page."""
    packages = graph_of_families(imports)
    inner = set(folders(imports))
    count = sizes(imports)
    largest = max((size, folder) for folder, size in count.items() if folder not in GENERATED)
    lines = [
        "# Import graph",
        "",
        "Drawn by `scripts/import_graph.py`; do not edit. Packages import each other in one direction, and so do the families of a",
        "folder: its modules, and its folders with everything in them.",
        f"{sum(count.values())} modules are in {len(count)} folders; `{largest[1]}` has {largest[0]} of {MAX_MODULES} allowed.",
        "",
        "The picture leaves out every arrow that a longer way implies; the tables have them all, the top floor first.",
        "",
        "```mermaid",
        "graph TD",
    ]
    for package, others in sorted(reduced(packages).items()):
        lines += [f"    {package} --> {other}" for other in sorted(others)]
    lines += ["```", "", "| package | imports |", "| --- | --- |"]
    for names in floors(packages):
        lines += [f"| `{name}` | {', '.join(f'`{other}`' for other in sorted(packages[name]))} |" for name in names]
    lines += [
        "",
        "## Families by folder",
        "",
        "What ends with a slash is a folder.",
        "",
        "| folder | top to bottom |",
        "| --- | --- |",
    ]
    for folder in sorted(inner - {""}):
        families = graph_of_families(imports, folder)
        if any(name in inner for name in families):
            rows = [
                ", ".join(f"`{name.rpartition('.')[2]}{'/' * (name in inner)}`" for name in names if not name.endswith(".__init__"))
                for names in floors(families)
            ]
            lines.append(f"| `{folder}` | {'; '.join(filter(None, rows))} |")
    return "\n".join(lines) + "\n"


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
