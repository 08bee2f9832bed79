"""What processes watch and read: whatever is missed is found, and nothing grows with the cluster that need not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from cluster.listeners.link_table import MAY_SAY
from cluster.process.interests import SEES
from pixiu.discovery import paths
from pixiu.discovery.node import Node, NodeState
from pixiu.discovery.reader import RESUME_S, Read
from pixiu.discovery.view import Layout, RoleLayout
from tests.support.for_each import for_each
from tests.support.registry_model import Registrar, RegistryModel, SimulatedProcess
from tests.support.zookeeper import make_node

ROOT = "/test"
LAYOUT = Layout(1, {role: RoleLayout(16, 16, 3) for role in paths.PARTITIONED_ROLES}, "a" * 16)


def cluster_of(gateways: int) -> tuple[RegistryModel, Registrar]:
    """300 processes and these gateways."""
    model = RegistryModel()
    registrar = Registrar(model, ROOT)
    model.write(paths.layout(ROOT), LAYOUT.to_json())
    for role in paths.PARTITIONED_ROLES:
        for number in range(52):
            registrar.register(make_node(role, number % 16, port=7000 + number, state=NodeState.RUNNING))
    for role, count in (("proxy", 40), ("gateway", gateways)):
        for number in range(count):
            registrar.register(make_node(role, port=7000 + number, state=NodeState.RUNNING))
    return model, registrar


def seen(process: SimulatedProcess) -> set[tuple[str, int, NodeState]]:
    return {(node.role, node.endpoint, node.state) for node in process.found.nodes}


def there(registrar: Registrar, roles: tuple[str, ...]) -> set[tuple[str, int, NodeState]]:
    return {(node.role, node.endpoint, node.state) for node in registrar.paths.values() if node.role in roles}


def test_whoever_may_say_something_is_seen() -> None:
    for kind, receivers in MAY_SAY.items():
        # Notices of a layout answer what was sent: whoever gets one has a link to the sender.
        for receiver, senders in receivers.items() if kind != "layout_notice" else ():
            assert set(senders) <= set(SEES[receiver]), receiver


@pytest.mark.parametrize("gateways", [1_000, 5_000])
@pytest.mark.slow
def test_a_large_cluster_costs_a_process_little_at_rest_and_when_zookeepers_leader_changes(gateways: int) -> None:
    model, registrar = cluster_of(gateways)
    random = Random(gateways)
    processes = {role: SimulatedProcess(model, ROOT, roles, random) for role, roles in SEES.items()}
    moments = []
    for role, process in processes.items():
        process.reader.begin(0.0)
        now = process.run_until(0.0, 30.0)
        assert seen(process) == there(registrar, SEES[role])
        assert len(process.watches) <= 10
        process.reads.clear()
        now = process.run_until(now, now + 600.0)
        assert len(process.reads) <= 600, f"{role} reads {len(process.reads) / 600:.2f} a second at rest"
        process.reads.clear()
        process.lose_connection()
        process.connect(now)
        process.run_until(now, now + RESUME_S)
        assert len(process.watches) <= 10
        # A poll may fall into that time: it compares 30 more.
        assert len(process.reads) <= 20 + 40 * (len(process.reads) > 20)
        moments += [moment - now for moment in process.reads]
    assert max(moments) - min(moments) >= RESUME_S / 2


def test_one_gateway_that_leaves_and_comes_again_costs_three_reads_and_a_gateway_none() -> None:
    model, registrar = cluster_of(100)
    broker, gateway = (SimulatedProcess(model, ROOT, SEES[role], Random(1)) for role in ("broker", "gateway"))
    for process in (broker, gateway):
        process.reader.begin(0.0)
        process.run(0.0)
        process.reads.clear()
    path, node = next((path, node) for path, node in registrar.paths.items() if node.role == "gateway")
    registrar.set(path, replace(node, state=NodeState.DRAINING))
    broker.run(1.0)
    registrar.expire(path)
    broker.run(2.0)
    path = registrar.register(replace(node, state=NodeState.INIT))
    broker.run(3.0)
    registrar.set(path, node)
    for process in (broker, gateway):
        process.run(4.0)
    assert (len(broker.reads), len(gateway.reads)) == (3, 0)
    assert seen(broker) == there(registrar, SEES["broker"])


def test_what_was_missed_without_a_connection_is_found_by_the_marker_and_only_that_role_is_read() -> None:
    model, registrar = cluster_of(200)
    process = SimulatedProcess(model, ROOT, SEES["broker"], Random(2), poll_interval_s=1e6)
    process.reader.begin(0.0)
    process.run(0.0)
    process.reads.clear()
    process.lose_connection()
    path, node = next((path, node) for path, node in registrar.paths.items() if node.role == "router")
    registrar.set(path, replace(node, state=NodeState.DRAINING))
    late = registrar.register(make_node("router", 3, port=9999))
    process.connect(10.0)
    process.run_until(10.0, 60.0)
    assert late in registrar.paths
    assert seen(process) == there(registrar, SEES["broker"])
    # Layout and five markers; 17 directories, one of them listed, and 52 routers, of which one has changed and one is new.
    assert len(process.reads) == 6 + 17 + 1 + 52 + 2


def test_a_read_that_failed_is_asked_again_and_no_other() -> None:
    model, registrar = cluster_of(10)
    process = SimulatedProcess(model, ROOT, SEES["xiu"], Random(3))
    process.reader.begin(0.0)
    failed = 0
    while reads := process.reader.take(0.0):
        for number, read in enumerate(reads):
            if number % 3 == failed % 3 and failed < 40:
                failed += 1
                process.reader.failed(read)
                assert process.reader.scan() is None
            else:
                process.answer(read, 0.0)
    assert failed == 40
    process.run(0.0)
    assert seen(process) == there(registrar, SEES["xiu"])
    # Every read was done once: layout, markers, roles, partitions, nodes.
    assert len(process.reads) == 1 + 2 + 2 + 32 + 104


@for_each("seed", range(8))
def test_whatever_happens_the_view_is_the_registry_in_the_end(seed: int) -> None:
    random = Random(seed)
    model = RegistryModel()
    registrar = Registrar(model, ROOT)
    roles = ("proxy", "gateway", "router")
    process = SimulatedProcess(model, ROOT, roles, random, poll_interval_s=60.0)
    process.reader.begin(0.0)
    now, connected = 0.0, True
    in_flight: dict[Read, Callable[[], None]] = {}
    for step in range(400):
        now += random.random()
        match random.randrange(8):
            case 0 | 1:
                role = random.choice(roles)
                registrar.register(make_node(role, random.randrange(4) if role == "router" else -1, port=7000 + step))
            case 2 | 3 if registrar.paths:
                path = random.choice(list(registrar.paths))
                registrar.set(path, replace(registrar.paths[path], state=random.choice(list(NodeState))))
            case 4 if registrar.paths:
                registrar.expire(random.choice(list(registrar.paths)))
            case 5 if connected and random.random() < 0.3:
                connected = False
                process.lose_connection()
            case 5 | 6 if not connected:
                connected = True
                process.connect(now)
                in_flight.clear()
            case _:
                if connected and random.random() < 0.3:
                    process.reader.poll_within(0.0, now)
        if not connected:
            for read in in_flight:
                process.reader.failed(read)
            in_flight.clear()
            continue
        if not in_flight:
            in_flight = {read: process.ask(read, now) for read in process.reader.take(now)}
        # Some answers are late: what happened since they were made was told before.
        for read in list(in_flight)[: random.randint(0, len(in_flight))]:
            in_flight.pop(read)()
    if not connected:
        process.connect(now)
    for answer in in_flight.values():
        answer()
    process.run_until(now, now + 300.0)
    assert seen(process) == there(registrar, roles)
    assert {type(node) for node in process.found.nodes} <= {Node}
