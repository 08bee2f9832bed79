"""The import graph of the product has no circle and no large folder, its page is up to date, and the script finds what is wrong.

"May import" in each folder's README is checked by `test_a_folder_imports_what_its_readme_allows`, which is slow: `make quick`
leaves it out, `make check` runs it.
"""

from __future__ import annotations

import importlib.util
import re
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
    assert GRAPH.graph_of_families(imports) == {"pi": {"pixiu"}, "pixiu": set()}


def test_a_circle_of_modules_is_found(tmp_path: Path) -> None:
    imports = written(tmp_path, pi__a="import pi.b", pi__b="import pi.c", pi__c="import pi.a", pi__d="import pi.a")
    assert GRAPH.broken(imports) == ["a circle in pi: pi.a, pi.b, pi.c"]


def test_a_circle_of_packages_is_found_although_no_modules_make_one(tmp_path: Path) -> None:
    imports = written(tmp_path, pi__a="import xiu.a", xiu__a="", xiu__b="import pi.b", pi__b="")
    assert GRAPH.broken(imports) == ["a circle in the root: pi, xiu"]


def test_a_circle_of_a_folder_and_a_module_beside_it_is_found(tmp_path: Path) -> None:
    imports = written(tmp_path, pi__store__a="import pi.core", pi__store__b="", pi__core="import pi.store.b")
    assert GRAPH.broken(imports) == ["a circle in pi: pi.core, pi.store"]


def test_a_folder_with_too_many_modules_is_found(tmp_path: Path) -> None:
    imports = written(tmp_path, **{f"pixiu__m{number}": "" for number in range(GRAPH.MAX_MODULES + 1)})
    assert GRAPH.broken(imports) == [
        f"pixiu has {GRAPH.MAX_MODULES + 1} modules, and {GRAPH.MAX_MODULES} is the most: make folders inside"
    ]


def allowed(folder: Path) -> set[str]:
    """What the README of a folder says that it may import, as dotted names."""
    said = re.search(r"May import (.*?)\.(?:\n|$)", (folder / "README.md").read_text(), re.DOTALL)
    return {name.removesuffix(".py").strip("/").replace("/", ".") for name in re.findall(r"`(.*?)`", said[1])} if said else set()


@pytest.mark.slow
def test_a_folder_imports_what_its_readme_allows() -> None:
    imports = GRAPH.graph_of_modules()
    wrong = []
    for folder in GRAPH.folders(imports):
        if folder and folder not in {*GRAPH.GENERATED, "pixiu"}:
            mine = allowed(ROOT / folder.replace(".", "/")) | {folder}
            for module in (name for name in imports if name == folder or name.startswith(f"{folder}.")):
                outside = {
                    other for other in imports[module] if not any(other == name or other.startswith(f"{name}.") for name in mine)
                }
                wrong += [f"{folder}/README.md does not allow {module} to import {other}" for other in sorted(outside)]
    assert wrong == []
