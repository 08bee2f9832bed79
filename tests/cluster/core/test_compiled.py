"""Which build runs: compiled modules are used when they are of exactly these sources, for this Python, and all of them."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import sys
from enum import Enum
from pathlib import Path

import pytest

import pixiu.ids
from cluster.core.compiled import (
    FOLDER,
    MODULES,
    ROOT,
    STAMP,
    SUFFIX,
    SWITCH,
    Finder,
    build_of_new_process,
    hashes,
    names,
    plain_because,
    source_of,
    stamp,
)

SERVERS = (
    "proxy",
    "router",
    "broker",
    "relay",
    "xiu",
    "pi",
    "topic",
    "admin",
    "gateway",
    "bridge",
    "registry",
    "onebox",
    "benchmarks",
)


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A tree with two sources and what a build leaves; the other sources are missing at both times."""
    for name in ("pixiu.ids", "gateway.core"):
        path = tmp_path / source_of(name)
        path.parent.mkdir(parents=True)
        path.write_text(f'"""{name}"""\n')
    folder = tmp_path / FOLDER
    folder.mkdir(parents=True)
    (folder / STAMP).write_text(stamp(tmp_path))
    return tmp_path


def test_every_module_that_is_named_exists_and_is_named_once() -> None:
    assert len(set(names())) == len(names())
    assert [name for name in names() if not (ROOT / source_of(name)).is_file()] == []
    assert all(hashes().values())


def test_what_was_compiled_runs_while_its_sources_are_the_same(built: Path) -> None:
    assert plain_because(built) == ""
    assert plain_because(built, loaded=("pixiu", "gateway", "gateway.service")) == ""


def test_a_source_that_changed_makes_all_of_it_plain_and_is_named(built: Path) -> None:
    source = built / source_of("gateway.core")
    before = source.read_text()
    source.write_text(before + "CHANGED = 1\n")
    assert plain_because(built) == "gateway/core.py changed after it was compiled; `make native` compiles again"
    (built / source_of("pixiu.ids")).unlink()
    assert plain_because(built).startswith("gateway/core.py and 1 more changed")
    (built / source_of("pixiu.ids")).write_text('"""pixiu.ids"""\n')
    source.write_text(before)
    assert plain_because(built) == ""


def test_a_module_that_came_to_the_list_was_not_compiled(built: Path) -> None:
    path = built / FOLDER / STAMP
    path.write_text(path.read_text().replace('"gateway.core"', '"gateway.gone"'))
    assert "gateway/core.py changed" in plain_because(built)


def test_plain_python_is_asked_for_or_nothing_was_compiled(built: Path, tmp_path: Path) -> None:
    assert plain_because(built, switch="0") == "PIXIU_COMPILE is not 1"
    assert plain_because(built, switch="1") == ""
    assert plain_because(tmp_path / "elsewhere") == "nothing was compiled"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"python": "x"}', '{"python": "x", "sources": 5}'])
def test_a_damaged_stamp_is_plain(built: Path, text: str) -> None:
    (built / FOLDER / STAMP).write_text(text)
    assert "is damaged" in plain_because(built)


def test_another_python_is_plain(built: Path) -> None:
    path = built / FOLDER / STAMP
    path.write_text(path.read_text().replace(SUFFIX, ".cpython-399-none.so"))
    assert plain_because(built) == "it was compiled for another Python (.cpython-399-none.so); `make native` compiles again"


def test_who_has_imported_one_of_them_as_python_keeps_to_python(built: Path) -> None:
    assert plain_because(built, loaded=("gateway.core",)) == "gateway.core was imported as Python before"


def test_servers_are_compiled_whatever_starts_them_has_imported(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    assert pixiu.ids.__name__ in sys.modules
    assert build_of_new_process(built).name == "compiled"
    monkeypatch.setenv(SWITCH, "0")
    assert build_of_new_process(built).reason == "PIXIU_COMPILE is not 1"
    monkeypatch.delenv(SWITCH)
    assert build_of_new_process(built).name == "plain"


def test_the_finder_finds_what_is_compiled_and_nothing_else(built: Path) -> None:
    finder = Finder(built)
    spec = finder.find_spec("gateway.core", None)
    assert spec is not None
    assert spec.origin == str(built / FOLDER / f"gateway.core{SUFFIX}")
    assert finder.find_spec("gateway.service", None) is None
    assert finder.find_spec("gateway", None) is None
    assert all(finder.find_spec(f"pixiu_native_{package.replace('.', '_')}__mypyc", None) is not None for package in MODULES)


@pytest.mark.parametrize("package", SERVERS)
def test_the_first_import_of_every_package_of_the_servers_decides(package: str) -> None:
    """A module that is imported before would be Python, and with it the whole process."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    ours = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in ours]
    assert next(name for name in imported if name not in ("__future__", "sys")) == "cluster.core.compiled"


@functools.cache
def compiled_trees() -> dict[str, ast.Module]:
    """Compiled module → its syntax tree."""
    return {name: ast.parse((ROOT / source_of(name)).read_text()) for name in names()}


@functools.cache
def compiled_classes() -> dict[str, dict[str, ast.ClassDef]]:
    """Compiled module → name → class."""
    return {
        name: {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        for name, tree in compiled_trees().items()
    }


def interpreted_children(server: str) -> list[str]:
    """Classes of Python that derive from a compiled one which is no protocol."""
    found = []
    for path in sorted((ROOT / server).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if module in compiled_classes():
            continue
        tree = list(ast.walk(ast.parse(path.read_text())))
        known = {
            each.asname or each.name: (node.module, each.name)
            for node in tree
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        for node in (each for each in tree if isinstance(each, ast.ClassDef)):
            for base in node.bases:
                words = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")
                place, name = known.get(words[0], ("", ""))
                if len(words) == 2:
                    place, name = f"{place}.{name}", words[1]
                compiled = compiled_classes().get(str(place), {}).get(name)
                if compiled is not None and "Protocol" not in [ast.unparse(each) for each in compiled.bases]:
                    found.append(f"{module}.{node.name} derives from {place}.{name}")
    return found


@pytest.mark.parametrize("server", [*SERVERS, "cluster", "node", "nsqdoor", "ops", "pipeline", "tools"])
def test_no_class_of_python_derives_from_a_compiled_one(server: str) -> None:
    """Making one of it raises TypeError in the compiled build."""
    assert interpreted_children(server) == []


def test_no_compiled_class_hands_on_arguments_that_it_does_not_know() -> None:
    """Compiled, `super().__init__(**arguments)` passes the dictionary as the first argument."""
    for module, classes in compiled_classes().items():
        calls = [node for kind in classes.values() for node in ast.walk(kind) if isinstance(node, ast.Call)]
        made = [node for node in calls if ast.unparse(node.func) == "super().__init__"]
        assert [ast.unparse(node) for node in made if any(word.arg is None for word in node.keywords)] == [], module


def test_no_compiled_module_asks_whether_a_number_or_text_is_the_same_object() -> None:
    """Compiled, a float is no object, and a text of another module may be a second one."""
    found = []
    for name, tree in compiled_trees().items():
        module = importlib.import_module(name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
                other = node.comparators[0]
                if isinstance(other, ast.Name | ast.Attribute):
                    with contextlib.suppress(NameError, AttributeError):  # a local name
                        value = eval(ast.unparse(other), vars(module))
                        if isinstance(value, int | float | str | bytes) and not isinstance(value, bool | Enum):
                            found.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
