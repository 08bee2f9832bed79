"""What is asked for, what is missing, who comes when, and a real run beside one peer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from comparison import command as command_module
from comparison import servers, suite
from comparison.cases import CASES, Case
from comparison.command import compare, plan
from comparison.report import missing_lines
from comparison.results import Results, Sample
from comparison.servers import PEERS, mosquitto, version_in
from comparison.suite import Target, load_command, measure, order, theirs
from pixiu.errors import InvalidArgument, Unavailable
from tools.cli.main import application
from tools.load import bench


def test_everything_is_planned_unless_something_is_named() -> None:
    assert plan([], [], 3, 1.0) == (list(CASES.values()), ["pixiu", *PEERS])
    assert plan(["rooms", "connections"], ["redis", "nats"], 1, 1.0) == (
        [CASES["connections"], CASES["rooms"]],
        ["pixiu", "nats", "redis"],
    )


@pytest.mark.parametrize(
    ("cases", "names", "rounds", "seconds", "text"),
    [
        (["room"], [], 3, 1.0, "--case room: one of idle, "),
        ([], ["pulsar"], 3, 1.0, "--server pulsar: one of pixiu, mosquitto, "),
        ([], [], 0, 1.0, "--rounds 0"),
        ([], [], 3, 0.1, "--for 0.1"),
        ([], [], 3, float("nan"), "--for nan"),
    ],
)
def test_what_cannot_be_done_is_said(cases: list[str], names: list[str], rounds: int, seconds: float, text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        compare(cases, names, rounds, seconds, "", False)
    assert str(refused.value).startswith(text)


def test_a_peer_that_is_missing_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(servers, "installed", lambda name: None if name == "mosquitto" else f"/usr/bin/{name}")
    monkeypatch.setattr(servers, "RABBITMQ", tmp_path / "rabbitmq-server")
    monkeypatch.delenv(servers.KAFKA, raising=False)
    assert missing_lines([peer for peer in PEERS.values() if peer.name.startswith("kafka")])[0].endswith(servers.GET_KAFKA)
    assert missing_lines([peer for peer in PEERS.values() if not peer.name.startswith("kafka")]) == [
        *(
            f"{name} is not installed and is left out; to have it: apt-get install mosquitto"
            for name in ("mosquitto", "mosquitto-nodelay")
        ),
        *(
            f"{name} is not installed and is left out; to have it: apt-get install rabbitmq-server"
            for name in ("rabbitmq", "rabbitmq-amqp", "rabbitmq-quorum")
        ),
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "failures", "code"),
    [(0.0, 0.0, [], 0), (0.0, 1.0, [], 0), (1.0, 0.0, [], 1), (0.0, 0.0, ["round 1: nats: it broke"], 1)],
)
def test_the_exit_code_is_of_our_losses_and_of_servers_that_broke(
    ours: float, theirs: float, failures: list[str], code: int,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """And not of peers that are not installed, which JSON names with what installs them."""

    async def run(cases: Sequence[Case], names: Sequence[str], *_: object) -> tuple[Results, list[str]]:
        assert (list(cases), list(names)) == ([CASES["rooms"]], ["pixiu", "nats"])
        return {"rooms": {"pixiu": [Sample(1, lost=ours)], "nats": [Sample(1, lost=theirs)]}}, failures

    monkeypatch.setattr(command_module, "run", run)
    monkeypatch.setattr(servers.Peer, "version", lambda _: "1.0")
    monkeypatch.setattr(servers, "installed", lambda name: "/usr/bin/nats-server" if name == "nats-server" else None)
    monkeypatch.setattr(servers, "RABBITMQ", tmp_path / "rabbitmq-server")
    assert compare(["rooms"], ["nats", "redis"], 1, 1.0, "", True) == code
    said = capsys.readouterr()
    assert json.loads(said.out)["not_installed"] == {"redis": "apt-get install redis-server"}
    assert json.loads(said.out)["failures"] == failures
    assert said.err == "redis is not installed and is left out; to have it: apt-get install redis-server\n"
    assert compare(["rooms"], ["nats"], 1, 1.0, "separate", False) == code
    shown = capsys.readouterr().out
    assert "100 rooms of 10" in shown
    assert ", separate), nats 1.0" in shown


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("mosquitto version 2.0.11\n\nmosquitto is an MQTT v5.0 broker.", "2.0.11"),
        ("nats-server: v2.9.10", "2.9.10"),
        ("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64", "7.0.15"),
        ("3.10.8-1.1+deb12u1", "3.10.8"),
        ("command not found", ""),
    ],
)
def test_versions_are_read_from_what_servers_say(said: str, version: str) -> None:
    assert version_in(said) == version


def test_each_round_begins_with_another_server() -> None:
    assert [order(["a", "b", "c"], number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert order([], 5) == []


def test_mail_is_sent_by_the_sdk_where_there_are_proxies() -> None:
    target = Target("pixiu", 1883, dict, proxies="127.0.0.1:7002")
    assert load_command(CASES["mail"], target, 1.0)[1:] == [
        "-m",
        "comparison.mail_load",
        "mail",
        "1883",
        "mqtt",
        "1.0",
        "127.0.0.1:7002",
    ]
    assert load_command(CASES["rooms"], target, 1.0)[1:] == ["-m", "comparison.load", "rooms", "1883", "mqtt", "room/{}", "1.0"]


def test_cases_that_peers_leave_out_exist_and_times_are_not_always_of_the_first_in_a_window() -> None:
    assert all(peer.cases is None or peer.cases < set(CASES) for peer in PEERS.values())
    assert all(case.timed_every == 1 or case.window % case.timed_every for case in CASES.values())
    assert all(case.groups == 1 for case in CASES.values() if case.kind == "messages" and (case.qos or case.rate))


async def test_a_server_that_fails_is_left_out_of_its_round_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def start(peer: servers.Peer) -> AsyncIterator[Target]:
        yield Target(peer.name, 0, dict)

    async def work(case: Case, target: Target, seconds: float) -> Sample:
        if (target.name, case.name) == ("nats", "rooms"):
            raise Unavailable("the load broke")
        return Sample(per_cpu=5)

    monkeypatch.setattr(suite, "theirs", start)
    monkeypatch.setattr(suite, "measure", work)
    said: list[str] = []
    cases = [CASES["fanout-100"], CASES["rooms"], CASES["pair-qos0"]]
    results, failures = await suite.run(cases, ["nats", "redis"], 2, 1.0, "", said.append)
    assert failures == ["round 1: nats: the load broke", "round 2: nats: the load broke"]
    assert {case: {name: [one.round for one in rounds] for name, rounds in found.items()} for case, found in results.items()} == {
        "fanout-100": {"nats": [1, 2], "redis": [1, 2]}, "rooms": {"redis": [1, 2]}, "pair-qos0": {"redis": [1, 2]},
    }  # fmt: skip
    assert said[0] == "round 1/2, nats: fan-out to 100, 100 bytes, window 32"


async def test_rest_and_each_case_of_mail_have_a_server_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    @contextlib.asynccontextmanager
    async def ours(name: str, switch: str, kind: str, layout: str) -> AsyncIterator[Target]:
        assert layout == "separate"
        started.append(f"{kind}:")
        yield Target(name, 0, dict)

    @contextlib.asynccontextmanager
    async def start(peer: servers.Peer) -> AsyncIterator[Target]:
        started.append(f"{peer.name}:")
        yield Target(peer.name, 0, dict)

    async def work(case: Case, target: Target, seconds: float) -> Sample:
        started.append(case.name)
        return Sample()

    monkeypatch.setattr(suite, "builds", lambda: [("pixiu", "0")])
    monkeypatch.setattr(suite, "ours", ours)
    monkeypatch.setattr(suite, "theirs", start)
    monkeypatch.setattr(suite, "measure", work)
    cases = [CASES[name] for name in ("idle", "connections", "rooms", "mail", "mail-1")]
    await suite.run(cases, ["pixiu", "nats", "jetstream"], 1, 1.0, "separate", lambda _: None)
    assert " ".join(started) == (
        "idle: idle mail: mail mail: mail-1 connections: connections rooms "
        "nats: idle nats: mail nats: mail-1 nats: connections rooms jetstream: mail jetstream: mail-1"
    )


def command(*words: str) -> tuple[int, str]:
    """`pixiu bench` with these words: exit code, and what it said."""
    result = CliRunner().invoke(application(["bench"]), ["bench", *words])
    return result.exit_code, result.output


def test_options_of_the_other_command_are_refused() -> None:
    assert command("--peers", "--rate", "5") == (2, "pixiu: --rate: not with --peers\n")
    assert command("--rounds", "2") == (2, "pixiu: --rounds: only with --peers\n")
    assert command("--layout", "separate") == (2, "pixiu: --layout: only with --peers\n")
    assert command("--peers", "--layout", "round") == (2, "pixiu: --layout round: one of nodes, separate, small\n")


def test_the_sdk_alone_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [entry.value for entry in entry_points(group=bench.BENCH_GROUP, name="peers")] == ["comparison.command:compare"]
    monkeypatch.setattr(bench, "entry_points", lambda **_: ())
    code, said = command("--peers")
    assert code == 2
    assert "pip install 'pixiu-sdk[onebox]'" in said


def test_mosquitto_is_started_as_shipped_and_with_nodelay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In this order, so that the first one is what readers see first."""
    monkeypatch.setattr(servers, "server", lambda *_: contextlib.nullcontext(1))
    written = {}
    for name in list(PEERS)[:2]:
        with PEERS[name].start(tmp_path / name):
            written[name] = "set_tcp_nodelay true\n" in (tmp_path / name / "mosquitto.conf").read_text()
    assert written == {"mosquitto": False, "mosquitto-nodelay": True}


@pytest.mark.process
@pytest.mark.skipif(not PEERS["mosquitto"].found, reason=f"no mosquitto: {PEERS['mosquitto'].install}")
async def test_a_load_measures_a_real_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PEERS["mosquitto"].start is mosquitto
    async with theirs(PEERS["mosquitto"]) as target:
        monkeypatch.setattr(suite, "SETTLE_S", 0.0)
        found = await measure(CASES["idle"], target, 0.2)
        assert (found.processes, found.deliveries) == (1, 0)
        assert found.memory_bytes > 0
        assert 0 < found.start_s < 60
        for name in ("pair-qos1-64", "mail-1"):
            found = await measure(CASES[name], target, 0.2)
            assert found.deliveries == found.published > 0
            assert (found.lost, found.repeated, found.disordered) == (0, 0, 0)
            assert 0 < found.p50_ms <= found.p99_ms
            assert found.per_cpu > 0


@pytest.mark.process
@pytest.mark.skipif(not PEERS["jetstream"].found, reason=f"no nats-server: {PEERS['jetstream'].install}")
async def test_mail_is_measured_by_a_peers_own_protocol() -> None:
    async with theirs(PEERS["jetstream"]) as target:
        found = await measure(CASES["mail"], target, 0.2)
    assert found.deliveries == found.published > 0
    assert (found.lost, found.repeated, found.disordered) == (0, 0, 0)
