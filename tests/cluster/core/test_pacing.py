"""A loop that rests: what may wait for the end of a rest, what ends it, and when there is none."""

from __future__ import annotations

import asyncio
import selectors
import socket
import time
from collections.abc import Iterator

import pytest

from cluster.core import pacing
from cluster.core.pacing import PacedLoop, PacedSelector, new_loop, pacer_of

NEVER_S = 3600.0
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Three connections: of a patient one, of another, and of one that is not registered."""
    made = [socket.socketpair() for _ in range(3)]
    yield made
    for pair in made:
        for each in pair:
            each.close()


@pytest.fixture
def pacer(monkeypatch: pytest.MonkeyPatch, pairs: list[Pair]) -> Iterator[PacedSelector]:
    """One that rests from its second call on, for an hour; the first connection is patient."""
    monkeypatch.setattr(pacing, "WINDOW_S", NEVER_S)
    made = PacedSelector(NEVER_S)
    made._resting = True
    for reader, _ in pairs[:2]:
        made.register(reader, selectors.EVENT_READ)
    made.be_patient(pairs[0][0])
    assert not made.select(0.001)
    yield made
    made.close()


def ready(pacer: PacedSelector, timeout: float | None = None) -> list[int]:
    return sorted(key.fd for key, _ in pacer.select(timeout))


def test_what_is_patient_waits_for_what_is_not(pacer: PacedSelector, pairs: list[Pair]) -> None:
    (patient, to_patient), (other, to_other), _ = pairs
    to_patient.send(b"x")
    to_other.send(b"x")
    rests = pacer.rests
    assert ready(pacer) == sorted([patient.fileno(), other.fileno()])
    assert pacer.rests == rests + 1


def test_a_timer_ends_a_rest(pacer: PacedSelector, pairs: list[Pair]) -> None:
    (patient, to_patient), _, _ = pairs
    to_patient.send(b"x")
    assert ready(pacer, 0.01) == [patient.fileno()], "what came meanwhile is found"
    assert ready(pacer, 0) == [patient.fileno()], "who does not wait does not rest"


def test_nothing_rests_after_something_for_which_somebody_waits(pacer: PacedSelector, pairs: list[Pair]) -> None:
    (patient, to_patient), _, _ = pairs
    pacer.hurry(time.monotonic() + NEVER_S)
    to_patient.send(b"x")
    rests = pacer.rests
    assert ready(pacer) == [patient.fileno()]
    assert pacer.rests == rests


def test_patience_ends_with_its_socket_and_not_with_its_registration(pacer: PacedSelector, pairs: list[Pair]) -> None:
    patient, to_patient = pairs[0]
    number = patient.fileno()
    pacer.modify(patient, selectors.EVENT_READ | selectors.EVENT_WRITE)
    pacer.unregister(patient)
    pacer.register(patient, selectors.EVENT_READ)
    to_patient.send(b"x")
    assert ready(pacer, 0.01) == [number]
    pacer.unregister(patient)
    patient.close()
    to_patient.close()
    another, to_another = socket.socketpair()
    with another, to_another:
        assert number in (another.fileno(), to_another.fileno()), "its number is given again"
        heir, to_heir = (another, to_another) if another.fileno() == number else (to_another, another)
        pacer.register(heir, selectors.EVENT_READ)
        to_heir.send(b"x")
        assert ready(pacer) == [number], "nobody waits for an hour"
        pacer.unregister(heir)


def test_it_rests_while_it_is_woken_often_and_rests_are_of_use(monkeypatch: pytest.MonkeyPatch, pairs: list[Pair]) -> None:
    monkeypatch.setattr(pacing, "WINDOW_S", 0.0)
    (patient, to_patient), _, _ = pairs
    pacer = PacedSelector(0.002)
    pacer.register(patient, selectors.EVENT_READ)
    pacer.be_patient(patient)
    to_patient.send(b"x")
    for _ in range(2):
        assert ready(pacer) == [patient.fileno()]
    assert pacer.rests == 1, "the first wake-up made it rest, as it was one in no time"
    patient.recv(1)
    assert not ready(pacer, 0.01)
    assert not pacer._resting, "a rest behind which there was nothing to do is the last one"
    monkeypatch.setattr(pacing, "WAKES_PER_S", 1e9)
    to_patient.send(b"x")
    monkeypatch.setattr(pacing, "WINDOW_S", 1e-6)
    for _ in range(5):
        assert ready(pacer) == [patient.fileno()]
    assert not pacer._resting, "who is woken seldom does not"
    pacer.close()


def test_a_paced_loop_is_a_loop(pairs: list[Pair]) -> None:
    (patient, to_patient), _, _ = pairs
    for each in (patient, to_patient):
        each.setblocking(False)

    async def main() -> tuple[bytes, str]:
        loop = asyncio.get_running_loop()
        pacer = pacer_of(loop)
        assert pacer is not None
        pacer.be_patient(patient)
        pacer._resting = True
        received = loop.create_task(loop.sock_recv(patient, 100))
        await asyncio.sleep(0.01)
        await loop.sock_sendall(to_patient, b"hello")
        said = await loop.run_in_executor(None, lambda: "from a thread")
        return await received, said

    with asyncio.Runner(loop_factory=lambda: new_loop(0.005)) as runner:
        assert isinstance(runner.get_loop(), PacedLoop)
        assert runner.run(main()) == (b"hello", "from a thread")
    with asyncio.Runner(loop_factory=lambda: new_loop(0.0)) as runner:
        assert pacer_of(runner.get_loop()) is None
