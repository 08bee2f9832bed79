"""`pixiu bridge check` when a connector's library raises an error of its own; `pixiu bridge status` of several processes."""

from __future__ import annotations

from types import SimpleNamespace

from ops.bridges.commands import ELSEWHERE, _opened, merged


class Wrong:
    """A connector that cannot open."""

    async def open(self) -> None:
        raise ValueError("Invalid subscription filter.")

    async def close(self) -> None:
        raise RuntimeError("it was not open")


async def test_an_error_of_a_library_is_told_for_its_bridge_and_the_others_are_checked() -> None:
    bridges = [
        SimpleNamespace(name=name, options=None, kind=SimpleNamespace(make=lambda *_: Wrong(), of_cluster=False)) for name in "ab"
    ]
    assert await _opened(bridges) == dict.fromkeys("ab", "ValueError: Invalid subscription filter.")


def told(state: str, why: str = "", messages: int = 0) -> dict[str, object]:
    return {"name": "b", "state": state, "why": why, "messages": messages, "bytes": 0, "rejected": 0, "retries": 0, "waiting": 0}


def test_a_bridge_that_each_process_leaves_to_another_is_named() -> None:
    assert "the same file" in str(merged([[told(ELSEWHERE)], [told(ELSEWHERE)]])["b"]["why"])
    for other in (told("running", "", 3), told("opening", "", 3)):
        assert merged([[told(ELSEWHERE)], [other]])["b"] == other
        assert merged([[other], [told(ELSEWHERE)]])["b"] == other
