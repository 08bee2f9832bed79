"""Worker numbers: time ranges that never overlap, whatever happens to processes and answers (docs/identifiers.md)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

import registry.leases
from gateway.numbers import GatewayNumbers
from onebox.embedded import EmbeddedZooKeeper
from pixiu.discovery import paths
from pixiu.discovery.operations import Stat
from pixiu.discovery.zookeeper import ZooKeeper
from pixiu.errors import InvalidArgument, LeaseExpired, Overloaded, RegistryUnavailable
from pixiu.ids import WORKERS, SnowflakeGenerator, snowflake_time_ms, snowflake_worker
from registry.leases import MAX_AHEAD_MS, RANGE_MS, WORKERS_TO_LEND, WorkerLease, WorkerLeases
from tests.support.clock import Clock
from tests.support.clock_steps import IN_2018_MS, STEPS_MS
from tests.support.waiting import until
from tests.support.zookeeper import connected

START_MS = 1_751_958_000_000


@pytest.fixture
def clock() -> Clock:
    return Clock(START_MS)


def process(
    zookeeper: ZooKeeper, root: str, clock: Callable[[], int], name: str = "p", workers: int = 4096, **more: object
) -> WorkerLeases:
    return WorkerLeases(zookeeper, root, name, clock_ms=clock, workers=workers, **more)  # type: ignore[arg-type]


async def stored(zookeeper: ZooKeeper, root: str, worker: int) -> dict[str, object]:
    value = json.loads((await zookeeper.get(paths.worker(root, worker)))[0])
    assert isinstance(value, dict)
    return value


async def test_a_lease_is_a_day_of_one_number_and_is_written_persistently(zookeeper: ZooKeeper, root: str, clock: Clock) -> None:
    lease = await process(zookeeper, root, clock, "proxy-7").acquire()
    assert (lease.from_ms, lease.until_ms) == (START_MS, START_MS + RANGE_MS)
    written = await stored(zookeeper, root, lease.worker)
    assert written["until_ms"] == lease.until_ms
    assert str(written["holder"]).startswith("proxy-7/")
    stat = await zookeeper.exists(paths.worker(root, lease.worker))
    assert stat is not None
    assert stat.ephemeral_owner == 0


async def test_under_contention_every_number_is_given_once(zookeeper_server: EmbeddedZooKeeper, root: str, clock: Clock) -> None:
    sessions = [await connected(zookeeper_server) for _ in range(3)]
    holders = [process(session, root, clock, workers=30) for session in sessions]
    leases = await asyncio.gather(*(holder.acquire() for _ in range(10) for holder in holders))
    assert sorted(lease.worker for lease in leases) == list(range(30))
    with pytest.raises(Overloaded, match="30"):
        await holders[0].acquire()
    clock.now += RANGE_MS
    again = await asyncio.gather(*(holder.acquire() for _ in range(10) for holder in holders))
    assert sorted(lease.worker for lease in again) == list(range(30))
    assert {lease.from_ms for lease in again} == {START_MS + RANGE_MS}
    for session in sessions:
        await session.close()


async def test_a_successor_starts_after_the_last_time_that_was_used(zookeeper: ZooKeeper, root: str, clock: Clock) -> None:
    first, second = (process(zookeeper, root, clock, workers=1) for _ in range(2))
    generator = SnowflakeGenerator(clock)
    lease = await first.acquire()
    generator.lease(lease.worker, lease.from_ms, lease.until_ms)
    made = {generator.next() for _ in range(3_000)}
    assert generator.last_used_ms > clock.now
    assert await first.release(lease.worker, generator.last_used_ms)
    assert first.leases == []
    successor = await second.acquire()
    assert successor.worker == lease.worker
    assert successor.from_ms == generator.last_used_ms + 1
    other = SnowflakeGenerator(clock)
    other.lease(successor.worker, successor.from_ms, successor.until_ms)
    assert not made & {other.next() for _ in range(3_000)}


async def test_a_number_whose_time_ends_within_a_second_is_taken_from_there_and_a_later_one_not(
    zookeeper: ZooKeeper, root: str, clock: Clock
) -> None:
    first, second = (process(zookeeper, root, clock, workers=1) for _ in range(2))
    lease = await first.acquire()
    clock.now = lease.until_ms - MAX_AHEAD_MS - 1
    with pytest.raises(Overloaded):
        await second.acquire()
    clock.now += 1
    assert (await second.acquire()).from_ms == lease.until_ms


async def test_a_release_never_writes_a_time_outside_its_lease(zookeeper: ZooKeeper, root: str, clock: Clock) -> None:
    leases = process(zookeeper, root, clock)
    for last_used, end in ((0, START_MS), (START_MS + 5, START_MS + 6), (START_MS + 2 * RANGE_MS, START_MS + RANGE_MS)):
        lease = await leases.acquire()
        await leases.release(lease.worker, last_used)
        assert (await stored(zookeeper, root, lease.worker))["until_ms"] == end
    with pytest.raises(InvalidArgument):
        await leases.release(4000, 0)


async def test_renewing_extends_the_same_range_and_never_shortens_it(zookeeper: ZooKeeper, root: str, clock: Clock) -> None:
    leases = process(zookeeper, root, clock)
    lease = await leases.acquire()
    clock.now += 3_600_000
    renewed = await leases.renew(lease.worker)
    assert renewed == WorkerLease(lease.worker, lease.from_ms, lease.until_ms + 3_600_000)
    clock.now -= 7_200_000
    assert await leases.renew(lease.worker) == renewed
    assert (await stored(zookeeper, root, lease.worker))["until_ms"] == renewed.until_ms


async def test_a_number_that_another_took_cannot_be_renewed(zookeeper: ZooKeeper, root: str, clock: Clock) -> None:
    first, second = (process(zookeeper, root, clock, workers=1) for _ in range(2))
    lease = await first.acquire()
    clock.now += RANGE_MS
    await second.acquire()
    with pytest.raises(LeaseExpired, match="acquire another"):
        await first.renew(lease.worker)
    assert first.leases == []
    with pytest.raises(InvalidArgument):
        await first.renew(lease.worker)


async def test_a_renewal_whose_answer_was_lost_is_recognised_as_its_own(
    zookeeper: ZooKeeper, root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = process(zookeeper, root, clock)
    lease = await leases.acquire()
    set_node = zookeeper.set

    async def lose(path: str, data: bytes, version: int = -1) -> Stat:
        await set_node(path, data, version)
        raise RegistryUnavailable("the answer was lost")

    monkeypatch.setattr(zookeeper, "set", lose)
    clock.now += 1_000
    with pytest.raises(RegistryUnavailable):
        await leases.renew(lease.worker)
    monkeypatch.undo()
    clock.now += 1_000
    assert (await leases.renew(lease.worker)).until_ms == START_MS + 2_000 + RANGE_MS
    assert await leases.release(lease.worker, START_MS)
    assert (await stored(zookeeper, root, lease.worker))["until_ms"] == START_MS + 1


async def test_leases_are_renewed_by_themselves_and_losses_are_told(zookeeper: ZooKeeper, root: str, clock: Clock) -> None:
    renewed: list[WorkerLease] = []
    lost: list[WorkerLease] = []
    leases = process(zookeeper, root, clock, renew_interval_s=0.05, on_renewed=renewed.append, on_lost=lost.append)
    kept, taken = await leases.acquire(), await leases.acquire()
    clock.now += 1_000
    await zookeeper.set(paths.worker(root, taken.worker), b'{"holder":"thief","until_ms":9999999999999}')
    leases.start()
    await until(lambda: lost and renewed)
    assert lost == [taken]
    assert renewed[0] == WorkerLease(kept.worker, kept.from_ms, kept.until_ms + 1_000)
    await leases.close()


class Log:
    """Events that were logged."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def warning(self, event: str, **fields: object) -> None:
        """See `gateway.numbers.Log`."""
        self.events.append(event)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("step_ms", [*STEPS_MS, 0])
async def test_a_gateway_makes_ids_after_every_step_of_the_clock(
    zookeeper: ZooKeeper, root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, step_ms: int, taken: bool
) -> None:
    monkeypatch.setattr(registry.leases, "LOOK_S", 0.01)
    log = Log()
    gateway = GatewayNumbers(zookeeper, root, "gateway-1", pytest.fail, log, clock)
    await gateway.acquire()
    first = gateway.next_snowflake()
    clock.now += step_ms
    over = step_ms > RANGE_MS
    if over:
        with pytest.raises(LeaseExpired):
            gateway.next_snowflake()
        assert "cannot publish" in gateway.problem
        assert log.events == ["worker_number_over"]
    if taken:  # by a process that finds its time over
        data = b'{"holder":"thief","until_ms":9999999999999}'
        await zookeeper.set(paths.worker(root, snowflake_worker(first)), data)
    await until(lambda: not gateway.problem)
    second = gateway.next_snowflake()
    if over:
        assert (snowflake_worker(first) == snowflake_worker(second)) is not taken
        assert log.events == ["worker_number_over", *(["worker_number_lost"] if taken else []), "worker_number_back"]
    assert second != first
    await gateway.release()


async def test_a_gateway_that_starts_before_2020_says_so_and_goes_on_when_the_clock_is_set(
    zookeeper: ZooKeeper, root: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry.leases, "LOOK_S", 0.01)
    clock.now = IN_2018_MS
    gateway = GatewayNumbers(zookeeper, root, "gateway-1", pytest.fail, Log(), clock)
    await gateway.acquire()
    with pytest.raises(LeaseExpired, match="before 2020"):
        gateway.next_snowflake()
    assert "before 2020: set it" in gateway.problem
    clock.now = START_MS
    await until(lambda: not gateway.problem)
    assert snowflake_time_ms(gateway.next_snowflake()) == START_MS
    await gateway.release()


async def test_renewals_go_on_after_an_outage(own_server: EmbeddedZooKeeper, root: str, clock: Clock) -> None:
    session = await connected(own_server)
    renewed: list[WorkerLease] = []
    leases = process(session, root, clock, renew_interval_s=0.05, on_renewed=renewed.append)
    lease = await leases.acquire()
    own_server.kill()
    await until(lambda: not session.connected)
    leases.start()
    assert await leases.release(lease.worker, 0) is False
    clock.now += 1
    await asyncio.to_thread(own_server.start)
    await until(lambda: session.connected)
    lease = await leases.acquire()
    clock.now += 1_000
    await until(lambda: renewed and renewed[-1].until_ms == lease.until_ms + 1_000)
    await leases.close()
    await session.close()


async def test_a_lease_that_cannot_be_read_is_nobodys_to_take(zookeeper: ZooKeeper, root: str, clock: Clock) -> None:
    await zookeeper.create(paths.worker(root, 0), b"nonsense", make_parents=True)
    with pytest.raises(Overloaded):
        await process(zookeeper, root, clock, workers=1).acquire()


async def test_when_proxies_have_lent_all_of_theirs_a_gateway_still_gets_one(zookeeper: ZooKeeper, root: str, clock: Clock) -> None:
    proxies = process(zookeeper, root, clock, "proxy", workers=2)
    for _ in range(2):
        await proxies.acquire()
    with pytest.raises(Overloaded):
        await proxies.acquire()
    assert (await process(zookeeper, root, clock, "gateway", workers=3).acquire()).worker == 2
    assert WORKERS_TO_LEND < WORKERS
