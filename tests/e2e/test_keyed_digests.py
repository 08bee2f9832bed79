"""Digests with the keys of a ring: gateways, routers and brokers compare by them, also while the key is changed."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pixiu
import pixiu.testing
from tests.support.forks import fork_pixiu
from tests.support.waiting import until

WAIT_S = 60.0


def page(http: str, path: str) -> str:
    with urllib.request.urlopen(http + path, timeout=WAIT_S) as answer:
        return str(answer.read().decode())


def pullers(target: str) -> list[str]:
    """The pages of routers and brokers."""
    said = json.loads(fork_pixiu("status", "--json", "--target", target).stdout)  # also of one that is not healthy for a moment
    return [one["http"] for one in said["processes"] if one["role"] in ("router", "broker")]


def counted(http: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in page(http, "/metrics").splitlines() if line.split("{")[0].endswith(name))


async def test_digests_are_compared_by_keys_before_within_and_after_a_change_of_the_ring(tmp_path: Path) -> None:
    def key(name: str, data: bytes) -> None:
        (tmp_path / "new").write_bytes(data)
        (tmp_path / "new").chmod(0o600)
        (tmp_path / "new").rename(tmp_path / name)

    key("1.key", b"the first key of a ring")
    with pixiu.testing.cluster(settings={"cluster.key_dir": str(tmp_path)}) as cluster:
        async with pixiu.connect(cluster.target) as px, px.subscribe(rooms=range(1, 40)) as messages:
            found = pullers(cluster.target)
            shown: set[str] = set()

            def digests() -> set[str]:
                return {json.loads(page(http, "/health"))["service"]["members_digest"] for http in found}

            def change(step: str) -> None:
                if step == "accepted":
                    key("2.next", b"the second key of a ring")
                elif step == "used":
                    (tmp_path / "2.next").rename(tmp_path / "2.key")
                elif step == "dropped":
                    (tmp_path / "1.key").unlink()

            for step in ("as it is", "accepted", "used", "dropped"):
                change(step)
                if step == "used":
                    await until(lambda: not digests() & shown, "digests by the new key")  # noqa: B023
                shown |= digests()
                before = [counted(http, "digests_equal_total") for http in found]
                for http, was in zip(found, before, strict=True):
                    await until(lambda: counted(http, "digests_equal_total") > was, step)  # noqa: B023
                await px.room(7).send(step.encode())
                async with asyncio.timeout(WAIT_S):
                    assert (await anext(messages)).payload == step.encode()
            assert all(counted(http, "healing_malformed_total") == 0 for http in found)
