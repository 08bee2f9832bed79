"""The systems at the other end of a bridge. Each is killed as a crash does, comes back, and says what it has."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from benchmarks.clusters.bridging.judge import Arrived
from comparison.processes import free_port
from onebox.children import DieWithParent
from tests.support.kafka import KafkaServer
from tests.support.waiting import until

MOSQUITTO = "/usr/sbin/mosquitto"
KAFKA_TOPIC = "events"
PARTITIONS = 3
IN_FLIGHT = 1_000
"""Messages that the load has published to a broker of MQTT without a PUBACK."""
BEHIND = 5_000
"""Messages that the load is ahead of a broker of MQTT, which would drop more."""


class End:
    """A system at the other end.

    Args:
        folder: empty.
    """

    kind = ""
    bridge_options = ""
    """Further lines of the bridge's table."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.got: list[Arrived] = []
        """What arrived, in order; for a target."""

    async def start(self) -> None:
        """Start it, or start it again."""

    async def kill(self) -> None:
        """End it as a crash does."""

    async def end(self) -> None:
        """End everything."""
        await self.kill()

    def table(self) -> str:
        """Lines of the bridge's table."""
        return self.bridge_options

    def look(self) -> None:
        """Bring `got` up to date."""

    def pids(self) -> Sequence[int]:
        """Processes whose CPU is shown beside ours."""
        return ()

    async def sent(self) -> None:
        """Wait until everything that was sent is there, and would survive a kill."""

    async def lag(self) -> int:
        """What a bridge from this source has not confirmed."""
        return 0


class Source(ABC):
    """An end that the load sends to."""

    @abstractmethod
    async def send(self, key: str, number: int, body: bytes) -> None:
        """Send a message."""


def numbered(key: bytes | str, body: bytes) -> Arrived:
    """A message as it is judged."""
    return key.decode() if isinstance(key, bytes) else key, int(body)


class Program(End, ABC):
    """An end that is a program."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """The program."""

    async def start(self) -> None:
        """Start it, and wait until it listens."""
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, preexec_fn=DieWithParent(signal.SIGKILL))  # noqa: PLW1509  # a ctypes call only

        async def listens() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return False
            writer.close()
            return True

        await until(listens, "the other end")

    async def kill(self) -> None:
        """End it as a crash does."""
        if self.process is not None:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)

    def pids(self) -> Sequence[int]:
        """The program."""
        return (self.process.pid,) if self.process is not None else ()


class Hook(Program):
    """A webhook."""

    kind = "to-webhook"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file, self._at, self._rest = folder / "got", 0, b""

    def command(self) -> list[str]:
        """The program."""
        return [sys.executable, "-m", "benchmarks.clusters.bridging.hook", str(self.port), str(self._file)]

    def table(self) -> str:
        """Lines of the bridge's table."""
        return f'ordered = true\nurl = "http://127.0.0.1:{self.port}/"\nbatch_messages = 500\nmax_backoff_s = 0.5\n'

    def look(self) -> None:
        """Read what the webhook wrote since."""
        with contextlib.suppress(FileNotFoundError), open(self._file, "rb") as file:
            file.seek(self._at)
            data = file.read()
            self._at += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.got += [numbered(*line.split()) for line in lines]


class Folder(End):
    """A folder of files. Its death: something else is in its place."""

    kind = "to-files"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._place, self._aside = folder / "files", folder / "aside"
        self._seen: set[Path] = set()

    async def start(self) -> None:
        """Bring it back."""
        self._place.unlink(missing_ok=True)
        if self._aside.exists():
            self._aside.rename(self._place)

    async def kill(self) -> None:
        """Put a file in its place."""
        if self._place.exists():
            self._place.rename(self._aside)
        self._place.touch()

    async def end(self) -> None:
        """Nothing runs."""

    def table(self) -> str:
        """Lines of the bridge's table."""
        return f'url = "{self._place}"\nlinger_ms = 200\nbatch_messages = 1000\nmax_backoff_s = 0.5\n'

    def look(self) -> None:
        """Read the files that are new."""
        for path in sorted(set(self._place.rglob("*.jsonl")) - self._seen) if self._place.is_dir() else ():
            self._seen.add(path)
            found = [json.loads(line) for line in path.read_text().splitlines()]
            self.got += [(each["key"], int(each["body"])) for each in found]


class Mosquitto(Program):
    """A broker of MQTT. Its file has the session of the judge, or of the bridge, before it is killed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (folder / "mosquitto.conf").write_text(
            f"user root\nlistener {self.port} 127.0.0.1\nallow_anonymous true\npersistence true\n"
            f"persistence_location {folder}/\nmax_queued_messages 0\nmax_inflight_messages 0\nautosave_interval 0\n"
        )
        self._client = paho.Client(
            CallbackAPIVersion.VERSION2, "judge", protocol=paho.MQTTv311, clean_session=False, manual_ack=False
        )
        self._client.reconnect_delay_set(1, 1)
        self._client.max_inflight_messages_set(IN_FLIGHT)
        self._client.on_message = lambda _client, _data, message: self.got.append(
            numbered(message.topic.rpartition("/")[2], bytes(message.payload))
        )
        self._begun = False

    def command(self) -> list[str]:
        """The program."""
        return [MOSQUITTO, "-c", str(self.folder / "mosquitto.conf")]

    def table(self) -> str:
        """Lines of the bridge's table."""
        return f'host = "127.0.0.1"\nbroker_port = {self.port}\n'

    async def start(self) -> None:
        """Start it, and connect to it as the judge."""
        await super().start()
        if not self._begun:
            self._begun = True
            self._client.connect("127.0.0.1", self.port)
            self._client.loop_start()
        await until(self._client.is_connected, "the judge's connection")

    async def saved(self) -> None:
        """Have it write its file."""
        assert self.process is not None
        file, before = self.folder / "mosquitto.db", time.time_ns()
        self.process.send_signal(signal.SIGUSR1)
        await until(lambda: file.exists() and file.stat().st_mtime_ns >= before, "the broker's file")

    async def end(self) -> None:
        """End everything."""
        self._client.disconnect()
        await asyncio.to_thread(self._client.loop_stop)
        await self.kill()


class MosquittoTarget(Mosquitto):
    """A broker at which the judge subscribes. It writes to the judge before it confirms to the bridge."""

    kind = "to-mqtt"

    def table(self) -> str:
        """Lines of the bridge's table."""
        return super().table() + 'ordered = true\nto = "devices/{key}"\nbatch_messages = 500\nmax_backoff_s = 0.5\n'

    async def start(self) -> None:
        """Start it; the judge's subscription is in its file from then on."""
        first = not self._begun
        await super().start()
        if first:
            done = threading.Event()
            self._client.on_subscribe = lambda *_: done.set()
            self._client.subscribe("devices/#", 1)
            await asyncio.to_thread(done.wait)
            await self.saved()


class MosquittoSource(Mosquitto, Source):
    """A broker to which the judge publishes. What it has confirmed is in its file before it is killed."""

    kind = "from-mqtt"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._open: deque[Any] = deque()

    def table(self) -> str:
        """Lines of the bridge's table."""
        return super().table() + 'filters = ["devices/#"]\n'

    async def send(self, key: str, number: int, body: bytes) -> None:
        """Publish, with a window."""
        self._open.append(self._client.publish(f"devices/{key}", body, qos=1))
        if len(self._open) >= IN_FLIGHT:
            await self.sent(IN_FLIGHT // 2)

    async def sent(self, most: int = 0) -> None:
        """Wait for the PUBACKs."""
        while len(self._open) > most:
            await until(self._open.popleft().is_published, "a PUBACK")

    async def kill(self) -> None:
        """End it once its file has what it confirmed."""
        if self.process is not None and self.process.poll() is None:
            await self.saved()
        await super().kill()


class Kafka(End):
    """A Kafka of one node."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = KafkaServer(folder / "kafka")
        self._begun = False

    def table(self) -> str:
        """Lines of the bridge's table."""
        return f'servers = "{self.server.address}"\nkafka_topic = "{KAFKA_TOPIC}"\n'

    async def start(self) -> None:
        """Start it; the first time with a topic."""
        await self.server.start()
        if not self._begun:
            self._begun = True
            await self.server.topic(KAFKA_TOPIC, PARTITIONS)

    async def kill(self) -> None:
        """End it as a crash does."""
        await self.server.kill()

    def pids(self) -> Sequence[int]:
        """The broker."""
        return (self.server.pid,)


class KafkaTarget(Kafka):
    """A Kafka from whose topic the judge reads what is committed."""

    kind = "to-kafka"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._ends = threading.Event()
        self._reader: threading.Thread | None = None

    def table(self) -> str:
        """Lines of the bridge's table."""
        return super().table() + f"ordered = true\nmax_backoff_s = 0.5\n{self.bridge_options}"

    async def start(self) -> None:
        """Start it, and read."""
        await super().start()
        if self._reader is None:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()

    def _read(self) -> None:
        import confluent_kafka as kafka

        config = {"bootstrap.servers": self.server.address, "group.id": "judge", "isolation.level": "read_committed",
                  "enable.auto.commit": False, "reconnect.backoff.max.ms": 500, "log_level": 0}  # fmt: skip
        consumer = kafka.Consumer(config)
        consumer.assign([kafka.TopicPartition(KAFKA_TOPIC, number, 0) for number in range(PARTITIONS)])
        while not self._ends.is_set():
            for message in consumer.consume(1_000, 0.1):
                if message.error() is None:
                    self.got.append(numbered(message.key(), message.value()))
        consumer.close()

    async def end(self) -> None:
        """End everything."""
        self._ends.set()
        if self._reader is not None:
            await asyncio.to_thread(self._reader.join)
        await self.kill()


class KafkaOnce(KafkaTarget):
    """The same, with transactions."""

    bridge_options = "exactly_once = true\n"


class KafkaSource(Kafka, Source):
    """A Kafka into which the judge writes."""

    kind = "from-kafka"
    group = "pixiu-bridge-b"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._producer: Any = None

    async def send(self, key: str, number: int, body: bytes) -> None:
        """Produce, idempotently: the load itself neither loses nor repeats."""
        if self._producer is None:
            import confluent_kafka as kafka

            self._producer = kafka.Producer(
                {"bootstrap.servers": self.server.address, "enable.idempotence": True, "message.timeout.ms": 300_000,
                 "reconnect.backoff.max.ms": 500, "linger.ms": 5, "log_level": 0}
            )  # fmt: skip
        while True:
            try:
                self._producer.produce(KAFKA_TOPIC, body, key)
                break
            except BufferError:
                await asyncio.sleep(0.01)
                self._producer.poll(0)
        self._producer.poll(0)

    async def sent(self) -> None:
        """Wait until Kafka has everything."""
        left = await asyncio.to_thread(self._producer.flush, 300.0)
        assert not left, f"Kafka did not take {left} messages"

    async def lag(self) -> int:
        """By the bridge's consumer group."""
        return await asyncio.to_thread(self._lag)

    def _lag(self) -> int:
        import confluent_kafka as kafka

        consumer = kafka.Consumer({"bootstrap.servers": self.server.address, "group.id": self.group, "log_level": 0})
        places = [kafka.TopicPartition(KAFKA_TOPIC, number) for number in range(PARTITIONS)]
        committed = {each.partition: max(each.offset, 0) for each in consumer.committed(places, timeout=30)}
        ends = {each.partition: consumer.get_watermark_offsets(each, timeout=30)[1] for each in places}
        consumer.close()
        return sum(ends[each] - committed[each] for each in ends)


ENDS: dict[str, Callable[[Path], End]] = {
    "to-webhook": Hook, "to-files": Folder, "to-mqtt": MosquittoTarget, "from-mqtt": MosquittoSource, "to-kafka": KafkaTarget,
    "to-kafka-once": KafkaOnce, "from-kafka": KafkaSource,
}  # fmt: skip
