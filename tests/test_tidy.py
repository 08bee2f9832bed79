"""The style that a machine can check: pure cores, who may import whom, sizes, one module for each untyped library."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("proxy", "router", "broker", "relay", "xiu", "pi", "gateway")
PACKAGES = ("pixiu", "registry", *ROLES)
ROLE_FILES = {"__init__.py", "__main__.py", "options.py", "events.py", "core.py", "service.py"}
IMPURE = {
    "asyncio", "socket", "time", "random", "os", "grpc", "kazoo", "structlog", "lmdb", "rocksdict",
    "threading", "secrets", "subprocess", "aiohttp", "prometheus_client", "selectors", "signal",
}  # fmt: skip
PURE_MODULES = {
    "gateway/presence.py", "gateway/rooms.py", "gateway/signals.py", "proxy/signals.py",
    "gateway/patient.py", "proxy/big_rooms.py", "proxy/limits.py",
    "gateway/admission.py", "gateway/rates.py", "gateway/connections.py",
    "pixiu/vrooms.py", "pixiu/token_bucket.py", "pixiu/weights.py", "pixiu/links/quality.py",
    "gateway/mail.py", "gateway/mail_lane.py", "gateway/mail_queue.py", "pixiu/mqtt/mail.py",
    "gateway/traces.py", "pixiu/trace.py", "pixiu/probing.py",
    "gateway/feedback.py", "gateway/devices.py", "gateway/reports.py", "relay/chat.py", "proxy/chat.py", "proxy/destinations.py",
    "pixiu/devices.py", "pixiu/hybridclock.py", "pixiu/addressed.py", "broker/addressed.py",
    "pixiu/replicas/core.py", "pixiu/replicas/events.py", "pixiu/replicas/forwards.py",
    "pixiu/replicas/healing.py", "pixiu/replicas/contact.py", "pixiu/replicas/state.py", "pixiu/replicas/subscribers.py",
    "pixiu/digest.py", "pixiu/healing.py", "pixiu/vanished.py",
    "pixiu/partition.py", "pixiu/record.py", "pixiu/routing.py", "pixiu/softstore.py", "pixiu/notices.py",
    "pixiu/links/head.py", "pixiu/links/sequence.py", "pixiu/links/window.py", "pixiu/links/liveness.py", "pixiu/links/link.py",
    "pixiu/discovery/node.py", "pixiu/discovery/view.py", "pixiu/discovery/paths.py",
    "pixiu/mqtt/codec.py", "pixiu/mqtt/server.py", "pixiu/mqtt/client.py", "pixiu/mqtt/topics.py",
    "pixiu/mqtt/decoder.py", "pixiu/mqtt/packets.py", "pixiu/mqtt/events.py",
    "pixiu/client/publisher.py", "pixiu/client/events.py", "pixiu/client/signals.py", "pixiu/client/message.py",
    "pixiu/replication/core.py", "pixiu/replication/leader.py", "pixiu/replication/follower.py", "pixiu/replication/insync.py",
    "pixiu/replication/context.py", "pixiu/replication/events.py", "pixiu/replication/messages.py", "pixiu/replication/model.py",
    "pixiu/replication/options.py", "pixiu/replication/states.py", "pixiu/replication/entry.py", "pixiu/replication/wire.py",
    "pixiu/replication/machine.py",
    "xiu/state.py", "xiu/block.py", "xiu/batch.py", "xiu/reading.py", "xiu/retention.py",
    "pi/operations.py", "pi/keys.py", "pi/inbox.py", "pi/table.py", "pi/caches.py", "pi/state.py", "pi/expiry.py",
    "proxy/mail.py", "proxy/mail_events.py", "proxy/mail_parcels.py", "proxy/mail_state.py", "pixiu/mailing.py",
    "pixiu/client/mail.py", "pixiu/client/mail_intake.py", "pixiu/dead_letters.py",
    "pixiu/replay/log.py", "pixiu/replay/plan.py", "pixiu/replay/ledger.py",
    "pixiu/cursor.py", "pixiu/envelope.py",
    "proxy/mail_notices.py", "relay/mail_devices.py", "relay/mail_answers.py", "pixiu/stores/operations.py",
    "relay/delivery/events.py", "relay/delivery/limits.py", "relay/delivery/pacing.py", "relay/delivery/saving.py",
    "relay/delivery/session.py", "relay/delivery/states.py", "relay/delivery/table.py", "relay/delivery/window.py",
}  # fmt: skip
UNTYPED = {
    "kazoo": {"pixiu/discovery/zookeeper.py"},
    "lmdb": {
        "pixiu/replicas/store.py", "pixiu/runtime/shared_memory.py", "gateway/signal_table.py", "xiu/table.py", "pi/store.py",
    },
}  # fmt: skip
"""Libraries without types, and the only modules that may import them."""
SDK_ONLY = {"grpc", "google", "kazoo", "xxhash", "typer", "rich"}
"""What the SDK may need beyond the standard library."""
SDK_PACKAGES = ("pixiu/client", "pixiu/discovery", "pixiu/wire", "pixiu/mqtt")
FUNCTION_LINES = 70
FILE_LINES = 600
LONG_FUNCTIONS: dict[str, int] = {}
"""file:function → the lines it may have: only downwards."""
LONG_FILES: dict[str, int] = {}


def sources() -> list[str]:
    """Every module that we wrote, as a path relative to the project."""
    found = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return [str(path.relative_to(ROOT)) for path in found if "wire/v1" not in str(path)]


@cache
def tree(source: str) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse((ROOT / source).read_text())


def imports(source: str) -> Iterator[str]:
    """Every dotted name that a module imports."""
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tops(source: str) -> set[str]:
    """The top-level packages that a module imports."""
    return {name.split(".")[0] for name in imports(source)}


@pytest.mark.parametrize(
    "source", sorted({*PURE_MODULES, *(f"{role}/{name}" for role in ROLES for name in ("core.py", "events.py"))})
)
def test_a_core_is_pure(source: str) -> None:
    assert not tops(source) & IMPURE


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


def test_what_is_shared_imports_no_role_and_no_writer_of_the_registry() -> None:
    for source in sources():
        if source.startswith("pixiu/"):
            assert not tops(source) & {*ROLES, "registry"}, source
        if source.startswith("registry/"):
            assert not tops(source) & set(ROLES), source


def test_the_sdk_needs_few_packages() -> None:
    import sys

    for source in sources():
        if source.startswith(SDK_PACKAGES) or (source.count("/") == 1 and source.startswith("pixiu/")):
            assert tops(source) - {"pixiu", "__future__"} <= SDK_ONLY | set(sys.stdlib_module_names), source


@pytest.mark.parametrize("library", sorted(UNTYPED))
def test_an_untyped_library_is_imported_in_one_module(library: str) -> None:
    assert {source for source in sources() if library in tops(source)} <= UNTYPED[library]


def test_nothing_is_unpickled() -> None:
    for source in sources():
        assert not tops(source) & {"pickle", "marshal", "shelve", "dill"}, source


@pytest.mark.parametrize("source", sources())
def test_functions_and_files_stay_small(source: str) -> None:
    lines = len((ROOT / source).read_text().splitlines())
    assert lines <= LONG_FILES.get(source, FILE_LINES)
    for node in ast.walk(tree(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= LONG_FUNCTIONS.get(f"{source}:{node.name}", FUNCTION_LINES), node.name


@pytest.mark.parametrize("source", sources())
def test_public_things_are_documented(source: str) -> None:
    module = tree(source)
    if source.endswith("__init__.py") and not module.body:
        return
    assert ast.get_docstring(module), "the module has no docstring"
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


def test_the_ratchets_have_no_slack() -> None:
    for source, allowed in LONG_FILES.items():
        assert len((ROOT / source).read_text().splitlines()) > FILE_LINES, f"{source} no longer needs its {allowed} lines"
    for name in LONG_FUNCTIONS:
        source, function = name.split(":")
        found = [n for n in ast.walk(tree(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == function]
        assert any((n.end_lineno or 0) - n.lineno + 1 > FUNCTION_LINES for n in found), f"{name} is short again"
