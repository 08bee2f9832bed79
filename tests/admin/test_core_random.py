"""Whatever is lost, late or dies: in the end registry and groups agree, and no part opened before its parents were sealed."""

from __future__ import annotations

import os

import pytest

from admin import balancer, core, steps
from admin import events as ev
from pixiu.discovery.topics import PartState, TopicNode
from pixiu.placement.slots import SLOTS
from tests.admin.world import World

RUNS = int(os.environ.get("PIXIU_ADMIN_RUNS", "60"))
NAMES = ("orders", "events", "logs")


def any_resize(world: World, node: TopicNode) -> ev.Change:
    parts = sorted((part for part in node.parts if part.state is PartState.OPEN), key=lambda part: part.low)
    if not parts:
        return ev.AlterTopic()
    at = world.random.randrange(len(parts))
    first = parts[at]
    match world.random.randrange(3):
        case 0:
            bounds = sorted({world.random.randrange(first.low, first.high) for _ in range(2)} - {first.low})
            return ev.Resize((first.number,), tuple(bounds))
        case 1:
            return ev.Resize(tuple(part.number for part in parts[at : at + 2]))
        case _:
            return ev.Resize((first.number,), (), (world.random.randrange(len(world.groups)),))


def any_change(world: World) -> tuple[str, ev.Change]:
    draw, name = world.random, world.random.choice(NAMES)
    node = world.nodes().get(name)
    if node is None or draw.random() < 0.1:
        return name, ev.CreateTopic(parts=draw.randrange(5), if_missing=draw.random() < 0.3, messages_per_s=draw.randrange(2))
    match draw.randrange(8):
        case 0:
            some = {key: draw.randrange(3) for key in ("retention_s", "retention_bytes", "messages_per_s", "bytes_per_s")}
            return name, ev.AlterTopic(**some, store=draw.choice(("", "/store")))
        case 1:
            return name, ev.DeleteTopic(force=draw.random() < 0.7, now=draw.random() < 0.3)
        case 2:
            return name, ev.RestoreTopic()
        case 3 | 4:
            return name, ev.SetChannel(draw.choice("abc"), from_end=draw.random() < 0.5, max_attempts=draw.randrange(1, 4))
        case 5:
            return name, ev.RemoveChannel(draw.choice("abc"))
        case _:
            return name, any_resize(world, node)


def play(seed: int) -> World:
    world = World(seed)
    draw = world.random
    died = 0
    for _ in range(400):
        match draw.randrange(20):
            case 0:
                world.request(*any_change(world))
            case 1:
                world.pass_time(draw.choice((0.1, 1.0, 10.0, 100_000.0) if draw.random() < 0.1 else (0.1, 1.0)))
            case 2 if draw.random() < 0.3:
                died += 1
                world.elect()
            case 3 if draw.random() < 0.3:
                group = draw.choice(world.groups)
                group.up = not group.up
                world.step(ev.GroupsChanged(range(3), [each.number for each in world.groups if each.up]))
            case 4 if world.registry.nodes:
                node = draw.choice(list(world.nodes().values()))
                world.write_block(node, draw.choice(node.parts).number, draw.randrange(3))
            case _ if world.pending:
                world.happen(draw.randrange(len(world.pending)), arrives=draw.random() < 0.9)
        world.check_order()
    world.settle()
    return world


@pytest.mark.parametrize("seed", range(RUNS))
def test_registry_and_groups_agree_in_the_end(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:
        monkeypatch.setattr(steps, "MAX_WRITERS", 1)  # of which a part with several has several entries
        monkeypatch.setattr(core, "LOAD_S", 1.0)  # parts move by load all the time
        monkeypatch.setattr(balancer, "REST_S", 1.0)
        monkeypatch.setattr(balancer, "HOUR_S", 20.0)
    world = play(seed)
    world.check_order()
    world.check_agreement()
    world.pass_time(100.0)
    world.settle()
    assert not world.core.strays()
    assert not world.core.counters.entries_refused
    for node in world.nodes().values():
        opened = sorted((part.low, part.high) for part in node.parts if part.state is PartState.OPEN)
        assert sum(high - low for low, high in opened) == SLOTS


def test_all_clients_of_the_last_admin_are_answered() -> None:
    for seed in range(10):
        world = World(seed)
        for _ in range(30):
            world.request(*any_change(world))
            while world.pending and world.random.random() < 0.8:
                world.happen(world.random.randrange(len(world.pending)), arrives=world.random.random() < 0.9)
        world.settle()
        assert world.answers.keys() == world.asked.keys()
        refused = [answer.refusal.text for answer in world.answers.values() if answer.refusal is not None]
        assert len(refused) < len(world.answers)
        assert not [text for text in refused if "refuses" in text]
