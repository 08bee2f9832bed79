"""`pixiu topic …` as a person uses it, against processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from pixiu import TopicMessage, connect
from tests.support.forks import fork_pixiu
from tests.support.roles import Roles
from tests.support.waiting import until


class Command:
    """Runs `pixiu topic …` against a cluster."""

    def __init__(self, roles: Roles) -> None:
        self._target = roles.target()

    async def start(self, *words: str, command: str = "topic") -> asyncio.subprocess.Process:
        """Start a command."""
        program = (sys.executable, "-m", "tools.cli.main", command, *words, "--target", self._target)
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, stderr=pipe)

    async def run(self, *words: str, given: str = "", command: str = "topic") -> tuple[int, str, str]:
        """Exit code, output and errors."""
        done = await asyncio.to_thread(fork_pixiu, command, *words, "--target", self._target, given=given)
        return done.returncode, done.stdout, done.stderr

    async def json(self, *words: str, given: str = "") -> Any:
        """The JSON that a command prints."""
        code, out, errors = await self.run(*words, "--json", given=given)
        assert code == 0, errors
        return json.loads(out)


async def test_a_topic_from_its_making_to_its_removal(roles: Roles) -> None:
    await roles.layout(topic=2)
    for partition, name in enumerate(("topic-a", "topic-b")):
        roles.start(name, partition=partition)
    roles.start("admin-a")
    roles.start("proxy-a")
    await roles.running("topic-a", "topic-b", "admin-a", "proxy-a")
    pixiu = Command(roles)

    code, _, errors = await pixiu.run("show", "orders")
    assert (code, "pixiu topic create orders" in errors) == (2, True), errors
    made = await pixiu.json("create", "orders", "--retention", "7d")
    assert (len(made["parts"]), made["retention_s"]) == (2, 604_800)
    altered = await pixiu.json("alter", "orders", "--rate", "50000", "--rate-bytes", "100MB")
    altered = await pixiu.json("alter", "orders", "--read-rate", "70000")
    assert (altered["read_messages_per_s"], altered["read_bytes_per_s"]) == (70_000, 0)
    assert (altered["retention_s"], altered["messages_per_s"], altered["bytes_per_s"]) == (604_800, 50_000, 100_000_000)
    channel = await pixiu.json("channel", "set", "orders", "billing", "--ordered", "--timeout", "5s")
    assert (channel["mode"], channel["timeout_ms"]) == ("ordered", 5_000)
    code, _, errors = await pixiu.run("channel", "set", "orders", "billing", "--from-end")
    assert (code, "pixiu topic seek orders billing --to end" in errors) == (2, True), errors

    written = await pixiu.json("write", "orders", "--split", "=", given="a=1\nb=2\na=3\nno key\n")
    assert written["written"] == 4
    code, out, errors = await pixiu.run("read", "orders", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert sorted((line["key"], line["body"]) for line in lines if line["key"]) == [("a", "1"), ("a", "3"), ("b", "2")]
    assert [line["body"] for line in lines if line["key"] == "a"] == ["1", "3"]

    number = lines[0]["part"]
    split = await pixiu.json("split", "orders", str(number), "--into", "3")
    assert [part["state"] for part in split["parts"] if part["number"] == number] == ["sealed"]
    merged = await pixiu.json("merge", "orders", "3", "4")
    assert merged["parts"][-1]["parents"] == [3, 4]
    code, _, errors = await pixiu.run("move", "orders", str(number))
    assert (code, "only open parts" in errors) == (2, True)

    await pixiu.json("drain-group", "1", "--yes")
    drained = await pixiu.json("show", "orders")
    assert {part["group"] for part in drained["parts"] if part["state"] == "open"} == {0}
    planned = await pixiu.json("rebalance", "--dry-run")
    assert [(group["group"], group["parts"] > 0) for group in planned["groups"]] == [(0, True), (1, False)]
    code, out, errors = await pixiu.run("rebalance", "--yes")
    assert (code, "with the moves" in out) == (0, True), errors

    shown = await pixiu.json("show", "orders")
    assert sum(part["end"] - part["first"] for part in shown["parts"]) == 4
    (lag,) = shown["channels"]
    assert (lag["unacknowledged"], lag["members"]) == (4, 0)
    assert lag["oldest_s"] > 0
    end = next(part["end"] for part in shown["parts"] if part["number"] == number)
    code, out, errors = await pixiu.run("read", "orders", "--from", "@999", "--part", str(number))
    assert (code, out, f"part {number} ends at offset {end}" in errors) == (0, "", True), errors
    assert (await pixiu.json("seek", "orders", "billing", "--to", "end"))["changed"] == 4
    code, out, errors = await pixiu.run("seek", "orders", "billing", "--to", "@999", "--part", str(number))
    assert (code, f"goes on at {number}:{end}, its end, and not at 999" in out) == (0, True), errors
    assert (await pixiu.json("channels", "orders"))["channels"][0]["unacknowledged"] == 0
    assert (await pixiu.json("dead", "orders", "billing"))["dead"] == []
    assert (await pixiu.json("resend", "orders", "billing"))["resent"] == 0

    tail = asyncio.create_task(pixiu.run("tail", "orders", "-n", "1", "--json"))
    while not tail.done():
        await pixiu.json("write", "orders", given="later\n")
    code, out, errors = await tail
    assert (code, json.loads(out)["body"]) == (0, "later"), errors

    await pixiu.json("delete", "orders", "--yes")
    code, _, errors = await pixiu.run("write", "orders", given="x\n")
    assert code == 2, errors
    assert [topic["name"] for topic in (await pixiu.json("list", "--deleted"))["topics"]] == ["orders"]
    await pixiu.json("restore", "orders")
    code, _, errors = await pixiu.run("channel", "remove", "orders", "nosuch")
    assert (code, "no channel nosuch; `pixiu topic channels" in errors) == (2, True), errors
    await pixiu.json("channel", "remove", "orders", "billing", "--yes")
    await pixiu.json("delete", "orders", "--now", "--yes")
    assert (await pixiu.json("list", "--deleted"))["topics"] == []


async def test_topics_with_a_store_and_compacted_ones(roles: Roles, tmp_path: Path) -> None:
    await roles.layout(topic=1)
    roles.start("topic-a", partition=0)
    roles.start("admin-a")
    roles.start("proxy-a")
    await roles.running("topic-a", "admin-a", "proxy-a")
    pixiu = Command(roles)

    code, _, errors = await pixiu.run("create", "apart", "--store", "folder")
    assert (code, "an absolute folder" in errors) == (2, True), errors
    store = tmp_path / "store"
    made = await pixiu.json("create", "apart", "--store", str(store))
    assert made["store"] == str(store)
    written = await pixiu.json("write", "apart", "--level", "stored", given="one\ntwo\nthree\n")
    assert written["written"] == 3
    assert sum(part["store"]["end"] for part in (await pixiu.json("show", "apart"))["parts"]) == 3
    code, out, errors = await pixiu.run("show", "apart")
    assert (code, "stored to" in out) == (0, True), errors
    await pixiu.json("delete", "apart", "--now", "--yes")
    await until(lambda: not any(path.is_file() for path in store.rglob("*")), "nothing is left in the store")
    await pixiu.json("create", "torn")
    code, _, errors = await pixiu.run("write", "torn", given=f"one\n{'x' * 2_000_000}\n")
    assert (code, "stored: 1 messages" in errors) == (2, True), errors
    await pixiu.json("delete", "torn", "--now", "--yes")

    compacted = await pixiu.json("create", "profiles", "--compact", "1d", "--retain-acknowledged")
    assert (compacted["compact_s"], compacted["retain_acknowledged"]) == (86_400, True)
    await pixiu.json("write", "profiles", "--split", "=", given="a=1\nb=2\na=3\nb=\n")
    assert (await pixiu.json("last", "profiles", "a"))["body"] == "3"
    code, _, errors = await pixiu.run("last", "profiles", "b")
    assert (code, "it was deleted" in errors) == (1, True), errors
    await pixiu.json("create", "plain")
    code, _, errors = await pixiu.run("alter", "plain", "--compact", "1d")
    assert (code, "create another topic" in errors) == (2, True), errors
    code, _, errors = await pixiu.run("channel", "set", "profiles", "c", "--filter", "key = 1")
    assert (code, "column 5" in errors) == (2, True), errors
    code, _, errors = await pixiu.run("alter", "profiles", "--store", str(store))
    assert (code, "choose one of them" in errors) == (2, True), errors
    code, _, errors = await pixiu.run("write", "profiles", "--level", "stored", given="x\n")
    assert (code, "it is compacted" in errors) == (2, True), errors
    await pixiu.json("delete", "profiles", "--now", "--yes")
    await follow_files(pixiu, roles.target(), tmp_path / "logs")


async def follow_files(command: Command, target: str, folder: Path) -> None:
    """`pixiu tail`: each line once and in order, through a kill, both kinds of rotation, and positions that were kept too late."""
    folder.mkdir()
    log, positions = folder / "app.log", folder / "positions.json"
    words = [str(folder / "*.log"), "--topic", "lines", "--key", r"user=(\w+)", "--positions", str(positions)]
    lines, found = [f"{number} user=u{number % 3}" for number in range(1_000)], list[TopicMessage]()

    def append(low: int, high: int, path: Path = log) -> None:
        with open(path, "a") as file:
            file.writelines(f"{line}\n" for line in lines[low:high])

    async def once() -> int:
        code, out, errors = await command.run(*words, "--once", "--json", command="tail")
        assert (code, errors) == (0, ""), errors
        return int(json.loads(out)["lines"])

    async def read() -> None:
        async with px.durable_topic("lines").reader() as reader:
            async for message in reader:
                found.append(message)

    async with connect(target) as px:
        await px.topics.create("lines", parts=3)
        reading = asyncio.create_task(read())
        append(0, 300)
        following = await command.start(*words, command="tail")
        append(300, 400)
        try:
            await until(lambda: len(found) == 400, "the lines")
        finally:
            following.kill()
            await following.communicate()
        append(400, 500)
        log.rename(folder / "app.log.1")
        append(500, 600, folder / "app.log.1")
        append(600, 700)
        assert await once() >= 300
        (folder / "app.log.1").unlink()
        append(700, 800)
        shutil.copy(log, folder / "app.log.2")  # as logrotate with copytruncate
        log.write_text("")
        append(800, 900)
        assert await once() >= 200
        before = positions.read_bytes()
        append(900, 1_000)
        assert await once() >= 100
        positions.write_bytes(before)  # as if the process had been killed before it kept them
        assert await once() >= 100
        await until(lambda: len(found) >= 1_000, "all lines")
        reading.cancel()
    assert sorted(each.body.decode() for each in found) == sorted(lines)
    for user in (b"u0", b"u1", b"u2"):
        numbers = [int(each.body.split()[0]) for each in found if each.key == user]
        assert numbers == sorted(numbers)
    assert found[0].headers["file"] == str(log).encode()
    code, _, errors = await command.run(str(log), "--topic", "nosuch", "--positions", str(folder / "p"), command="tail")
    assert (code, "pixiu topic create nosuch" in errors) == (2, True), errors
