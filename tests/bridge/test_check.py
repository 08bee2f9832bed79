"""`pixiu bridge check` when a connector's library raises an error of its own."""

from __future__ import annotations

from types import SimpleNamespace

from ops.bridges.commands import _opened


class Wrong:
    """A connector that cannot open."""

    async def open(self) -> None:
        raise ValueError("Invalid subscription filter.")

    async def close(self) -> None:
        raise RuntimeError("it was not open")


async def test_an_error_of_a_library_is_told_for_its_bridge_and_the_others_are_checked() -> None:
    bridges = [SimpleNamespace(name=name, options=None, kind=SimpleNamespace(make=lambda *_: Wrong())) for name in "ab"]
    assert await _opened(bridges) == dict.fromkeys("ab", "ValueError: Invalid subscription filter.")
