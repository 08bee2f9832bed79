"""A Kafka that can be killed and started again, where `PIXIU_BENCH_KAFKA` names a folder with its jars."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from comparison.processes import free_port
from comparison.servers import KAFKA, KAFKA_CLUSTER

START_S = 180.0


def is_installed() -> bool:
    """Whether there are Kafka's jars and its client."""
    jars = sorted(Path(os.environ.get(KAFKA, ""), "libs").glob("kafka_*.jar")) if os.environ.get(KAFKA) else []
    return bool(jars) and importlib.util.find_spec("confluent_kafka") is not None


class KafkaServer:
    """One node that is broker and controller.

    Args:
        folder: of its data; empty.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.port, controller, closed = free_port(), free_port(), free_port()
        self._properties = folder / "server.properties"
        self._properties.write_text(
            f"process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:{controller}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller},CLOSED://127.0.0.1:{closed}\n"
            "controller.listener.names=CONTROLLER\n"
            "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,CLOSED:SASL_PLAINTEXT\n"
            "sasl.enabled.mechanisms=PLAIN\nlistener.name.closed.plain.sasl.jaas.config="
            'org.apache.kafka.common.security.plain.PlainLoginModule required user_nobody="nothing";\n'
            f"log.dirs={folder}/logs\noffsets.topic.replication.factor=1\noffsets.topic.num.partitions=1\n"
            "transaction.state.log.replication.factor=1\ntransaction.state.log.min.isr=1\ntransaction.state.log.num.partitions=1\n"
            "auto.create.topics.enable=false\n"
        )
        self.address_with_login = f"127.0.0.1:{closed}"
        """Where nobody gets in without a login."""
        self._java = ["java", "-Xms256m", "-Xmx512m", "-cp", str(Path(os.environ[KAFKA], "libs", "*"))]
        self._run("kafka.tools.StorageTool", "format", "-t", KAFKA_CLUSTER, "-c", str(self._properties))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where it is."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def _run(self, *words: str) -> None:
        subprocess.run([*self._java, *words], capture_output=True, check=True, timeout=START_S)

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [*self._java, "kafka.Kafka", str(self._properties)]
        with open(self.folder / "kafka.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        end = time.monotonic() + START_S
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                assert time.monotonic() < end, (self.folder / "kafka.log").read_text()[-2000:]
                await asyncio.sleep(0.2)
            else:
                writer.close()
                return

    async def kill(self) -> None:
        """End it as a crash does."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def topic(self, name: str, partitions: int, **settings: str) -> None:
        """Make a topic."""
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.address})
        future = admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name]
        await asyncio.to_thread(future.result, START_S)

    async def remove(self, name: str) -> None:
        """Delete a topic."""
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.address})  # whose end would cancel what it asked for
        future = admin.delete_topics([name])[name]
        await asyncio.to_thread(future.result, START_S)

    async def note(self, group: str, name: str, text: str) -> None:
        """Write a text beside the offset 0 of a group in the first partition of a topic."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer({"bootstrap.servers": self.address, "group.id": group, "enable.auto.commit": False})
        place = TopicPartition(name, 0, 0, text)
        await asyncio.to_thread(consumer.commit, offsets=[place], asynchronous=False)
        consumer.close()

    async def write(self, name: str, messages: Sequence[tuple[bytes, bytes]], headers: Sequence[tuple[str, bytes]]) -> None:
        """Write messages, key and value."""
        from confluent_kafka import Producer

        producer = Producer({"bootstrap.servers": self.address, "acks": "all"})
        for key, value in messages:
            producer.produce(name, value, key, headers=list(headers))
        assert not await asyncio.to_thread(producer.flush, START_S)
