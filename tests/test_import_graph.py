"""The import graph of the product has few rooms and no circle, its page is up to date, and the script finds what is wrong."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("import_graph", ROOT / "scripts/import_graph.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GRAPH = script()


def written(root: Path, **modules: str) -> dict[str, set[str]]:
    for name, text in modules.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found: dict[str, set[str]] = GRAPH.graph_of_modules(root)
    return found


@pytest.mark.slow
def test_the_product_keeps_the_rules_and_the_page_shows_it() -> None:
    imports = GRAPH.graph_of_modules()
    assert GRAPH.broken(imports) == []
    assert (ROOT / GRAPH.PAGE).read_text() == GRAPH.page(imports), "python scripts/import_graph.py"


def test_every_form_of_import_is_an_arrow(tmp_path: Path) -> None:
    text = "import pi.a\nfrom pi import b\nfrom pi.c import thing\ndef f():\n    from pixiu import ids\n"
    imports = written(tmp_path, pi__core=text, pi__a="", pi__b="", pi__c="", pixiu__ids="")
    assert imports["pi.core"] == {"pi.a", "pi.b", "pi.c", "pixiu.ids"}
    assert GRAPH.graph_of_rooms(imports) == {"pi": {"pixiu.ids"}, "pixiu.ids": set()}


def test_a_circle_of_modules_is_found_unless_it_is_known_and_a_known_one_that_is_gone_is_named(tmp_path: Path) -> None:
    imports = written(tmp_path, pi__a="import pi.b", pi__b="import pi.c", pi__c="import pi.a", pi__d="import pi.a")
    assert GRAPH.broken(imports, ()) == ["a circle of modules: pi.a, pi.b, pi.c"]
    assert GRAPH.broken(imports, (frozenset({"pi.a", "pi.b", "pi.c"}),)) == []
    gone = frozenset({"pi.a", "pi.d"})
    assert GRAPH.broken(imports, (frozenset({"pi.a", "pi.b", "pi.c"}), gone)) == [
        "the circle of pi.a, pi.d is gone or smaller: say so in KNOWN_CIRCLES"
    ]


def test_a_circle_of_rooms_is_found_although_no_modules_make_one(tmp_path: Path) -> None:
    imports = written(tmp_path, pi__a="import xiu.a", xiu__a="", xiu__b="import pi.b", pi__b="")
    assert GRAPH.broken(imports, ()) == ["a circle of rooms: pi, xiu"]


def test_too_many_rooms_are_counted(tmp_path: Path) -> None:
    imports = written(tmp_path, **{f"pixiu__m{number}": "" for number in range(GRAPH.MAX_ROOMS + 1)})
    assert GRAPH.broken(imports, ()) == [
        f"{GRAPH.MAX_ROOMS + 1} rooms, and {GRAPH.MAX_ROOMS} is the most: put a module where it belongs"
    ]
