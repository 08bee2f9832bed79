"""The style that a machine can check: pure cores, who may import whom, sizes, one module for each untyped library."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("proxy", "router", "broker", "relay", "xiu", "pi", "topic", "admin", "gateway", "bridge")
PACKAGES = ("pixiu", "cluster", "registry", *ROLES, "node", "ops", "onebox", "tools", "pipeline", "nsqdoor", "comparison")
ROLE_FILES = {"__init__.py", "__main__.py", "options.py", "events.py", "core.py", "service.py"}
IMPURE = {
    "asyncio", "socket", "time", "random", "os", "grpc", "kazoo", "structlog", "lmdb", "rocksdict",
    "threading", "secrets", "subprocess", "aiohttp", "prometheus_client", "selectors", "signal",
}  # fmt: skip
UNTYPED = {
    "fsspec": {"pixiu/objects/store.py"},
    "kazoo": {"pixiu/discovery/kazoo_client.py"},
    "lmdb": {
        "cluster/membership/replica/store.py", "cluster/process/shared_memory.py", "gateway/delivery/signal_table.py",
        "xiu/records/table.py", "pi/store/store.py", "router/replicated/store.py", "topic/storage/lmdb_table.py",
    },
}  # fmt: skip
"""Libraries without types, and the only modules that may import them."""
PURE = "Pure."
"""The word by which a module promises that it imports nothing of `IMPURE`."""
PREPOSITIONS = {"as", "at", "behind", "beside", "between", "by", "for", "from", "in", "of", "on", "to", "until", "up", "with"}
"""A docstring's first line begins with none of them: such a line is a clause to something that only its author sees."""
SDK_ONLY = {"grpc", "google", "kazoo", "xxhash"}
"""What the SDK may need beyond the standard library."""
BANNED_IN_TEXTS: Mapping[str, re.Pattern[str]] = {
    "characters": re.compile(r"\bsigns\b(?! with)"),
    "a listener or port": re.compile(r"\bdoors?\b", re.IGNORECASE),
    "they": re.compile(r"\b(?:he|him|his|himself|she|her)\b"),
    "the number or time": re.compile(r"\bso (?:long|many|much|often)\b"),
    "reported, notified or announced": re.compile(r"\btold\b"),
    "everybody who": re.compile(r"\bwhoever\b", re.IGNORECASE),
    "again, or rebuilt": re.compile(r"\banew\b"),
    "requires": re.compile(r"\bwants a (?:login|token|certificate)"),
    "may be repeated": re.compile(r"\bmay be given again"),
}
"""What to write in a text that users read → what it must not say (docs and comments are free to)."""
QUESTION = re.compile(r"(?:What|Who|Whoever|Whom|Whose|Whether|Which|How|Where|When|Whatever)\b")
"""A docstring's first line begins with a verb or a noun instead. Fields of options are questions that a setting answers."""
BESIDE = ("benchmarks", "scripts", "examples")
"""Folders of programs beside the packages."""
README_LINES = 15
README_COLUMNS = 150
LONG_READMES = {"benchmarks", "examples", "pixiu"}
"""Folders whose README is a page for readers from outside."""
FUNCTION_LINES = 70
FILE_LINES = 700
LONG_FUNCTIONS: dict[str, int] = {}
"""file:function → the lines it may have: only downwards."""
LONG_FILES: dict[str, int] = {}
CLASS_ATTRIBUTES = 25
WIDE_CLASSES: dict[str, int] = {
    "cluster/replication/replica.py:Replica": 37,
    "gateway/clients/clients.py:Clients": 31,
}
"""file:class → the attributes it may have: only downwards."""
RECORD_NAMES = {"record", "records", "data", "head", "heads", "joined"}
"""Names of a record, of a batch or of headers; a number in their index is an offset that `pixiu.wire.record` names."""
OTHER_BYTES = {
    "cluster/links/link.py": "the fields of a datagram's head, a tuple",
    "cluster/links/datagrams/head.py": "a datagram",
    "cluster/replication/storage/entry.py": "an entry of a log",
    "xiu/store/manifest.py": "RocksDB's manifest",
}
"""Modules in which these names hold something else."""


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """Keep the collector from walking the syntax trees, which all stay until the end: more than half of what they take."""
    gc.disable()
    yield
    tree.cache_clear()
    nodes.cache_clear()
    gc.enable()


@cache
def sources() -> tuple[str, ...]:
    """Every module that we wrote, as a path relative to the project."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(str(path.relative_to(ROOT)) for path in found if "wire/v1" not in str(path) and "build" not in path.parts)


@cache
def tree(source: str) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse((ROOT / source).read_text())


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of a module's syntax tree."""
    return tuple(ast.walk(tree(source)))


@cache
def imports(source: str) -> tuple[str, ...]:
    """Every dotted name that a module imports."""
    found: list[str] = []
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return tuple(found)


@cache
def tops(source: str) -> set[str]:
    """The top-level packages that a module imports."""
    return {name.split(".")[0] for name in imports(source)}


def says_pure(source: str) -> bool:
    """Whether a module's docstring calls it pure: the word `Pure.` ends its first paragraph."""
    return PURE in (ast.get_docstring(tree(source)) or "").split("\n\n")[0]


def test_cores_and_modules_that_say_so_are_pure() -> None:
    by_name = {f"{role}/{name}" for role in ROLES for name in ("core.py", "events.py")}
    wrong = {
        source: sorted(found)
        for source in sources()
        if (source in by_name or says_pure(source)) and (found := tops(source) & IMPURE)
    }
    assert not wrong


@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_the_same_five_files(role: str) -> None:
    assert {path.name for path in (ROOT / role).glob("*.py")} >= ROLE_FILES


@pytest.mark.parametrize("role", ROLES)
def test_every_role_names_its_parts_alike(role: str) -> None:
    named = {
        name: {node.name for node in tree(f"{role}/{name}").body if isinstance(node, ast.ClassDef)}
        for name in ("core.py", "options.py", "service.py")
    }
    assert "Core" in named["core.py"]
    assert "Options" in named["options.py"]
    assert "Service" in named["service.py"]


@pytest.mark.parametrize("role", ROLES)
def test_roles_never_import_each_other(role: str) -> None:
    others = set(ROLES) - {role}
    for source in sources():
        if source.startswith(f"{role}/"):
            assert not tops(source) & others, source


def test_imports_go_downwards_only() -> None:
    """The SDK below the servers' kernel, the kernel below what writes to the registry, that below roles and operators' commands."""
    outside, roles = {"node", "ops", "onebox", "tools", "pipeline", "nsqdoor"}, set(ROLES)
    above = {
        "pixiu": {"cluster", "registry", *roles, *outside},
        "cluster": {"registry", *roles, *outside},
        "registry": {*roles, *outside},
        "tools": {"registry", *roles, *outside - {"tools"}},
        "onebox": {"ops", "node", *roles},
        "ops": {"node", *roles},
        "node": {*roles, *outside - {"node"}},
        "nsqdoor": {*roles, *outside - {"nsqdoor", "tools"}},
        **dict.fromkeys(roles, outside),
    }
    wrong = {source for source in sources() if tops(source) & above.get(source.split("/")[0], set())}
    assert not wrong


def test_no_server_has_a_client_inside() -> None:
    """A gateway publishes by links, whatever the QoS: it imports nothing of the SDK's client, nor does any other server. Its HTTP
    API is a client on behalf of its callers, with their logins; a bridge, and a proxy's writer of routed topics, with their own."""
    servers = ("cluster", "registry", "node", *ROLES)
    clients = {source for source in sources() if any(name.startswith("pixiu.client") for name in imports(source))}
    assert not {
        source
        for source in clients
        if source.split("/")[0] in servers and not source.startswith(("gateway/http/", "bridge/", "proxy/routed/"))
    }


def test_no_server_has_anything_of_its_process_alone() -> None:
    """Several roles run in one process: each passes on its own certificates and login. Only programs and the SDK have one."""
    alone = {f"{module}.{name}" for module in ("tls", "login", "logins") for name in ("own", "use")}
    for source in sources():
        if source.split("/")[0] in {"cluster", "registry", "node", *ROLES}:
            assert not {".".join(name.split(".")[-2:]) for name in imports(source)} & alone, source
            used = {ast.unparse(node) for node in nodes(source) if isinstance(node, ast.Attribute)}
            assert not used & alone, source


def test_the_pipeline_is_a_client() -> None:
    """It imports the SDK, and no server's package; nobody imports it, and nobody else PySpark."""
    servers = {"cluster", "registry", "ops", "onebox", *ROLES}
    for source in sources():
        if source.startswith("pipeline/"):
            assert not tops(source) & servers, source
        else:
            assert not tops(source) & {"pipeline", "pyspark"}, source


def test_nothing_needs_the_comparison() -> None:
    """It starts clusters as a user would; no process of one imports it, and it imports no role."""
    for source in sources():
        assert source.startswith("comparison/") or "comparison" not in tops(source), source
        assert not source.startswith("comparison/") or not tops(source) & set(ROLES), source


def test_tools_use_of_the_kernel_only_mqtt() -> None:
    """They run where the packages of servers are not installed."""
    for source in sources():
        if source.startswith("tools/"):
            assert {name.split(".")[1] for name in imports(source) if name.startswith("cluster.")} <= {"mqtt"}, source


def test_the_sdk_needs_few_packages() -> None:
    import sys

    for source in sources():
        if source.startswith("pixiu/"):
            optional = {"fsspec"} if source == "pixiu/objects/store.py" else set()  # Spark and servers, if there is a store
            assert tops(source) - {"pixiu", "__future__"} <= SDK_ONLY | optional | set(sys.stdlib_module_names), source


@pytest.mark.parametrize("library", sorted(UNTYPED))
def test_an_untyped_library_is_imported_in_one_module(library: str) -> None:
    assert {source for source in sources() if library in tops(source)} <= UNTYPED[library]


def test_nothing_is_unpickled() -> None:
    for source in sources():
        assert not tops(source) & {"pickle", "marshal", "shelve", "dill"}, source


def functions(source: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a module, methods and nested ones too."""
    yield from (node for node in nodes(source) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def literal_offsets(source: str) -> Iterator[str]:
    """Subscripts of a record by numbers of a header from the kind on; smaller ones are of a topic's length or a trailer."""
    for node in nodes(source):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in RECORD_NAMES:
            numbers = [each.value for each in ast.walk(node.slice) if isinstance(each, ast.Constant)]
            if any(isinstance(number, int) and 4 <= number <= 40 for number in numbers):
                yield f"{source}:{node.lineno}: {ast.unparse(node)}"


def test_no_number_indexes_a_record() -> None:
    outside = [source for source in sources() if not source.startswith("pixiu/wire/")]
    wrong = [found for source in outside if source not in OTHER_BYTES for found in literal_offsets(source)]
    assert not wrong, "name the offset as pixiu/wire/record.py does:\n" + "\n".join(wrong)
    assert all(any(literal_offsets(source)) for source in OTHER_BYTES), "an exception is no longer needed"


def test_functions_and_files_stay_small() -> None:
    long: list[str] = []
    for source in sources():
        lines = len((ROOT / source).read_text().splitlines())
        if lines > LONG_FILES.get(source, FILE_LINES):
            long.append(f"{source}: {lines} lines")
        for node in functions(source):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > LONG_FUNCTIONS.get(f"{source}:{node.name}", FUNCTION_LINES):
                long.append(f"{source}:{node.name}: {length} lines")
    assert not long


def test_public_things_are_documented() -> None:
    bare: list[str] = []
    for source in sources():
        module = tree(source)
        if source.endswith("__init__.py") and not module.body:
            continue
        if not ast.get_docstring(module):
            bare.append(source)
        for node in module.body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if not node.name.startswith("_") and not ast.get_docstring(node):
                bare.append(f"{source}:{node.name}")
    assert not bare


def test_docstrings_say_what_a_thing_is() -> None:
    """What is public in a module or class: no relative clause ("Of a relay."), no "See the module."."""
    vague: list[str] = []
    for source in sources():
        left = list(tree(source).body)
        while left:
            node = left.pop()
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            left += node.body if isinstance(node, ast.ClassDef) else []
            first = (ast.get_docstring(node) or "Undocumented").split()
            if first[0].rstrip(":").lower() in PREPOSITIONS or first[:3] == ["See", "the", "module."]:
                vague.append(f"{source}:{node.lineno} {node.name}")
    assert not vague


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of what users may read: errors, logs, help, docstrings of commands and of the options' fields."""
    fields = source.endswith(("options.py", "clients.py"))
    unread: set[int] = set()
    for node in nodes(source):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        command = not isinstance(node, ast.Module) and any("guarded" in ast.dump(each) for each in node.decorator_list)
        for number, statement in enumerate(node.body):
            is_field = fields and number > 0 and isinstance(node, ast.ClassDef)
            if isinstance(statement, ast.Expr) and not command and not is_field:
                unread.add(id(statement.value))
    for found in nodes(source):
        if isinstance(found, ast.Constant) and isinstance(found.value, str) and " " in found.value and id(found) not in unread:
            yield found.lineno, found.value


def test_users_read_plain_words() -> None:
    wrong = [
        f"{source}:{line}: {match[0]!r}: write {better}"
        for source in sources()
        for line, text in texts(source)
        for better, banned in BANNED_IN_TEXTS.items()
        if (match := banned.search(text))
    ]
    assert not wrong, "\n".join(wrong)


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    wrong = [
        f"{source}:{statement.lineno}: {text.splitlines()[0]}"
        for source in sources()
        if Path(source).name not in ("options.py", "clients.py")
        for node in nodes(source)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        and isinstance(text := statement.value.value, str) and QUESTION.match(text.strip())
    ]  # fmt: skip
    assert not wrong, "\n".join(wrong)


@cache
def folders() -> tuple[Path, ...]:
    """Every folder with modules, the product's and the others'."""
    found = {path.parent for name in (*PACKAGES, *BESIDE) for path in (ROOT / name).rglob("*.py")}
    return tuple(sorted(folder for folder in found if "v1" not in folder.parts and "build" not in folder.parts))


def test_a_folder_has_a_readme_of_what_is_there() -> None:
    """What is in the folder, what it may import, where to start; the modules and folders that it names exist."""
    wrong: list[str] = []
    for folder in folders():
        name = folder.relative_to(ROOT)
        page = folder / "README.md"
        text = page.read_text() if page.exists() else ""
        if not text or (len(text.splitlines()) > README_LINES and str(name) not in LONG_READMES):
            wrong.append(f"{name}: a README.md of at most {README_LINES} lines")
        if any(len(line) >= README_COLUMNS and not line.startswith("|") for line in text.splitlines()):
            wrong.append(f"{name}/README.md: lines of less than {README_COLUMNS} characters")
        for named in re.findall(r"`([a-z_0-9/]+(?:\.py|/))`", text):
            if not (folder / named).exists() and not (ROOT / named).exists():
                wrong.append(f"{name}/README.md: {named} does not exist")
    assert not wrong, "\n".join(wrong)


def attributes(found: ast.ClassDef) -> set[str]:
    """Names of what a class's objects hold: its fields, and what its methods assign to `self`."""
    fields = {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and "Final" not in ast.dump(node.annotation)
    }
    assigned = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name) and node.value.id == "self"
    }  # fmt: skip
    return fields | assigned


def is_record(found: ast.ClassDef) -> bool:
    """True for a frozen dataclass, such as options: its fields are those of a file or a message, and no method changes them."""
    return any("frozen=True" in ast.unparse(decorator) for decorator in found.decorator_list)


def test_classes_have_few_attributes() -> None:
    found = {
        f"{source}:{node.name}": len(attributes(node))
        for source in sources()
        for node in nodes(source)
        if isinstance(node, ast.ClassDef) and not is_record(node)
    }
    assert {name: number for name, number in found.items() if number > CLASS_ATTRIBUTES} == WIDE_CLASSES


def test_the_ratchets_have_no_slack() -> None:
    for source, allowed in LONG_FILES.items():
        assert len((ROOT / source).read_text().splitlines()) > FILE_LINES, f"{source} no longer needs its {allowed} lines"
    for name in LONG_FUNCTIONS:
        source, function = name.split(":")
        found = [node for node in functions(source) if node.name == function]
        assert any((n.end_lineno or 0) - n.lineno + 1 > FUNCTION_LINES for n in found), f"{name} is short again"


def test_sources_are_those_that_a_reader_of_the_repository_can_see() -> None:
    """Articles by the short names of docs/sources.md, what was designed by a page of docs/."""
    unseen = re.compile(r"\bDESIGN\b|\bseed 00\d|\bSTYLE\b")
    folders = (*PACKAGES, "tests", "scripts", "benchmarks")
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")) if path.name != "test_tidy.py"]
    assert [str(path.relative_to(ROOT)) for path in found if unseen.search(path.read_text())] == []


def test_pages_that_sources_name_exist() -> None:
    named = {name for source in sources() for name in re.findall(r"docs/[a-z_/0-9-]+\.md", (ROOT / source).read_text())}
    assert {name for name in named if not (ROOT / name).exists()} == set()


@cache
def headings(page: str) -> frozenset[str]:
    """The headings of a page, without those in its snippets."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r"^#+ (?:\d+\. )?(.+)$", text, re.MULTILINE))


def test_sections_that_sources_name_exist() -> None:
    """`docs/page.md, "Section"`, also over several lines and with several sections."""
    named = re.compile(r'(docs/[a-z_]+\.md)((?:,\s+"[A-Z][^"]+"(?: \d+(?: and \d+)?)?)+)')
    wrong = {
        f"{source}: {page}, {section}"
        for source in sources()
        for page, sections in named.findall((ROOT / source).read_text())
        for section in re.findall(r'"([^"]+)"', sections)
        if " ".join(section.split()) not in headings(page)
    }
    assert wrong == set()


def test_the_index_of_decisions_is_what_the_records_say() -> None:
    """Number, title, date and status stand in the record; docs/decisions/README.md has them by topic, each once."""
    folder = ROOT / "docs/decisions"
    records = set()
    for path in folder.glob("0*.md"):
        title, _, status = path.read_text().split("\n")[:3]
        number, text = title.removeprefix("# ").split(". ", 1)
        assert path.name.startswith(f"{int(number):04}-"), path.name
        date, state = status.rstrip(".").split(", ", 1)
        records.add(f"| [{number}]({path.name}) | {text} | {date} | {state} |")
    index = [line for line in (folder / "README.md").read_text().split("\n") if line.startswith("| [")]
    assert len(index) == len(set(index))
    assert set(index) == records
