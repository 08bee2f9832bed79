"""Kafka as a target and as a source, by confluent-kafka.

    target   an idempotent producer, or transactions: messages together with their positions, exactly once
    source   partitions are read in order; the topic's writers keep the offsets, Kafka's consumer group shows them; the ID of
             Kafka's topic is in the writers' names, so a topic that was deleted and made again is read from its start

Each connector has one thread, in which all calls of the library are made.

Source: docs/bridges.md, "To Kafka", "From Kafka"; KIP-98, KIP-447.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from bridge.connector import DONE, Item, Outcome, Record, Verdict, away, said
from bridge.connectors.once import Once
from bridge.connectors.secrets import secret_of
from bridge.options import BridgeOptions, SourceOptions, TargetOptions
from cluster.settings.fields import bounded, choice
from pixiu.client.client import Client
from pixiu.errors import ConfigurationError, PixiuError

ASK_S: Final = 10.0
READ_S: Final = 0.5
WHY_S: Final = 1.0
"""Time for the report of a connection that failed, seconds."""
AT_ONCE: Final = 1_000
TAKEN: Final = 16
"""Messages that the library is asked for at one time: it knows no bound in bytes."""
READ_BYTES: Final = 4 << 20
"""Bytes after which a read ends."""
LOOK_S: Final = 60.0
"""Time after which a source looks for new partitions, seconds."""
MAX_MESSAGE_BYTES: Final = 64 << 20
"""Largest message that the producer takes: the limit of Kafka's topic decides."""
LOGIN: Final = "give username, password_file and mechanism, and tls_ca if Kafka uses TLS"
LATER: Final = Outcome(Verdict.AGAIN, "many acknowledgements are not committed yet")
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class _KafkaOptions(BridgeOptions):
    """Options of both ways."""

    servers: str = ""
    """Addresses of Kafka: HOST:PORT,HOST:PORT…."""
    kafka_topic: str = ""
    """Topic at Kafka; it must be there."""
    username: str = ""
    """User name at Kafka. Empty: no login."""
    password_file: str = ""
    """File with the password."""
    mechanism: str = choice("SCRAM-SHA-512", "SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN")
    """Method by which the login is proved."""
    tls_ca: str = ""
    """File of the certificate authority for TLS, or "system". Empty: no TLS."""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (key, allowed values) for every wrong option."""
        yield from super().problems()
        if not self.servers:
            yield "servers", "where Kafka is: HOST:PORT,…"
        if not self.kafka_topic:
            yield "kafka_topic", "the topic at Kafka"


@dataclass(frozen=True, kw_only=True)
class KafkaTargetOptions(_KafkaOptions, TargetOptions):
    """A bridge with kind = "to-kafka"."""

    batch_messages: int = bounded(1_000, 1, 10_000)
    """Most messages that are written at once."""
    in_flight: int = bounded(1, 1, 1)
    """Batches that are written at one time: the messages of one are on their way together."""
    compression: str = choice("lz4", "none", "gzip", "snappy", "lz4", "zstd")
    """Compression of messages on their way and at Kafka."""
    exactly_once: bool = False
    """True: each batch is a transaction that Kafka has once, also after a crash of the bridge or of Kafka. One process at a time
    then runs the bridge, and Kafka's consumers have to read with isolation.level = read_committed."""


@dataclass(frozen=True, kw_only=True)
class KafkaSourceOptions(_KafkaOptions, SourceOptions):
    """A bridge with kind = "from-kafka"."""

    group: str = ""
    """Consumer group at Kafka that shows how far the bridge is. Empty: pixiu-bridge-NAME."""
    from_end: bool = False
    """True: a bridge that has stored nothing yet begins at Kafka's end."""
    read_uncommitted: bool = False
    """True: messages of transactions that were not committed come as well."""


class Calls:
    """The library's objects of one connector, and the thread that calls them.

    Args:
        options: of the bridge.
    """

    def __init__(self, options: _KafkaOptions) -> None:
        try:
            import confluent_kafka
        except ModuleNotFoundError:
            raise ConfigurationError("a bridge of Kafka needs confluent-kafka: pip install 'pixiu-cluster[bridge]'") from None
        self.library: Any = confluent_kafka
        self._options = options
        self._thread = ThreadPoolExecutor(1, "pixiu-kafka")
        self._admin: Any = None
        self.trouble = ""
        """Last report of the library on its connections."""

    async def call(self, what: Callable[[], Found]) -> Found:
        """Call something in the thread. Raises `Unavailable`, `ConfigurationError` in place of the library's errors."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, what)
        except PixiuError:
            raise
        except Exception as error:
            raise self.error_of(error) from error

    def close(self) -> None:
        """End the thread once it has done what it does."""
        self._thread.shutdown(wait=False)

    def config(self) -> dict[str, Any]:
        """The library's configuration of the connection."""
        options = self._options
        sasl, tls = bool(options.username), bool(options.tls_ca)
        found: dict[str, Any] = {
            "bootstrap.servers": options.servers, "client.id": "pixiu-bridge", "error_cb": self._trouble,
            "allow.auto.create.topics": False, "security.protocol": f"{'SASL_' * sasl}{'SSL' if tls else 'PLAINTEXT'}",
            "reconnect.backoff.max.ms": 2000, "log_level": 0,
        }  # fmt: skip
        if tls and options.tls_ca != "system":
            found["ssl.ca.location"] = options.tls_ca
        if sasl:
            password = secret_of(options.password_file, "password_file")
            found |= {"sasl.mechanism": options.mechanism, "sasl.username": options.username, "sasl.password": password}
        return found

    def partitions(self, client: Any) -> int:
        """The number of partitions of Kafka's topic. Raises `ConfigurationError` if it is not there."""
        topic = self._options.kafka_topic
        try:
            found = client.list_topics(topic, timeout=ASK_S).topics[topic]
        except self.library.KafkaException:
            client.poll(WHY_S)  # only this reports what is wrong with the connection
            raise
        if found.error is not None:
            errors = self.library.KafkaError
            if found.error.code() in (errors.UNKNOWN_TOPIC_OR_PART, errors._UNKNOWN_TOPIC):
                raise ConfigurationError(
                    f"Kafka has no topic {topic}: create it there (kafka-topics.sh --create --topic {topic} --bootstrap-server "
                    f"{self._options.servers}), or change kafka_topic"
                )
            raise self.error_of(self.library.KafkaException(found.error))
        return len(found.partitions)

    def topic_id(self) -> str:
        """The ID of Kafka's topic, which another one of this name does not have. Empty: this Kafka knows none."""
        from confluent_kafka import TopicCollection
        from confluent_kafka.admin import AdminClient

        topic = self._options.kafka_topic
        if self._admin is None:
            self._admin = AdminClient(self.config())
        asked = self._admin.describe_topics(TopicCollection([topic]), request_timeout=ASK_S)
        found = str(asked[topic].result(ASK_S).topic_id or "")
        return "" if set(found) <= set("A=") else found

    def _trouble(self, error: Any) -> None:
        if error.code() != self.library.KafkaError._ALL_BROKERS_DOWN:  # which says nothing of why
            self.trouble = said(error.str())

    def error_of(self, error: Exception) -> PixiuError:
        """The error that says what to do."""
        errors, found = self.library.KafkaError, error.args[0] if error.args else error
        code = found.code() if isinstance(found, errors) else 0
        text = said(found.str() if isinstance(found, errors) else error)
        denied = (
            errors.TOPIC_AUTHORIZATION_FAILED, errors.GROUP_AUTHORIZATION_FAILED, errors.CLUSTER_AUTHORIZATION_FAILED,
            errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        )  # fmt: skip
        if code in denied:
            return ConfigurationError(
                f"Kafka does not allow it: {text}; allow it to the user {self._options.username or 'ANONYMOUS'}"
            )
        if code in (errors._AUTHENTICATION, errors.SASL_AUTHENTICATION_FAILED) or "security.protocol" in self.trouble:
            return ConfigurationError(f"Kafka needs a login, or another one: {LOGIN} ({self.trouble or text})")
        if "uthentication" in self.trouble:
            return ConfigurationError(f"Kafka refuses the login: {LOGIN} ({self.trouble})")
        if code in (errors._FENCED, errors.INVALID_PRODUCER_EPOCH, errors.PRODUCER_FENCED):
            return away("another process has taken the bridge over")
        more = f" ({self.trouble})" if self.trouble else ""
        if not self._options.username and code in (errors._TRANSPORT, errors._ALL_BROKERS_DOWN):
            more += f"; if it runs there, it needs a login or TLS: {LOGIN}"  # its listener ends other connections without a word
        return away(f"Kafka at {self._options.servers}: {text}{more}")


class KafkaTarget:
    """Writes to a topic of Kafka.

    Args:
        name: of the bridge.
        options: of it.
        client: of the process. None: it is only opened, to see whether it opens, and begins no transactions: these would end
            those of a bridge that runs.
    """

    def __init__(self, name: str, options: KafkaTargetOptions, client: Client | None = None) -> None:
        self._options, self._client = options, client
        self._with_transactions = options.exactly_once and client is not None
        self._identity = f"pixiu-bridge-{name}"
        self._channel = options.channel or f"bridge-{name}"
        self._calls: Calls | None = None
        self._producer: Any = None
        self._group: Any = None
        self._once = Once()
        self._settled: list[tuple[int, int]] = []
        """Positions that the thread is to forget."""

    async def open(self) -> None:
        """Connect; with transactions end what a former process left, and learn what it wrote. Raises `Unavailable`,
        `ConfigurationError`."""
        self._calls = calls = Calls(self._options)
        config = calls.config() | {
            "enable.idempotence": True, "acks": "all", "linger.ms": 5, "compression.type": self._options.compression,
            "message.timeout.ms": int(self._options.timeout_s * 1000), "message.max.bytes": MAX_MESSAGE_BYTES,
            "partitioner": "murmur2_random",
        }  # fmt: skip
        if self._with_transactions:
            config |= {"transactional.id": self._identity, "transaction.timeout.ms": int(self._options.timeout_s * 1000)}
        await calls.call(partial(self._open, calls, config))
        await self._look()

    async def _look(self) -> None:
        """Forget positions that are acknowledged: a process that was killed, or a leader, may have left its answer unsaid."""
        if self._client is not None and self._once.written:
            self._once.settled(await self._client.topics.acknowledged(self._options.topic, self._channel, self._once.written))

    def _open(self, calls: Calls, config: dict[str, Any]) -> None:
        self._producer = calls.library.Producer(config)
        calls.partitions(self._producer)
        if not self._with_transactions:
            return
        self._producer.init_transactions(self._options.timeout_s)
        self._group = calls.library.Consumer(
            calls.config() | {"group.id": self._identity, "isolation.level": "read_committed", "enable.auto.commit": False}
        )
        (found,) = self._group.committed([self._place(calls)], timeout=ASK_S)
        self._once = Once(found.metadata or "")

    def _place(self, calls: Calls, state: str = "") -> Any:
        return calls.library.TopicPartition(self._options.kafka_topic, 0, 0, state)

    async def write(self, batch: Sequence[Item]) -> Sequence[Outcome]:
        """Write messages, and wait until Kafka has confirmed them. Raises `Unavailable`."""
        calls = self._calls
        assert calls is not None
        if not self._options.exactly_once:
            return await calls.call(partial(self._write, calls, batch))
        outcomes = await calls.call(partial(self._write_once, calls, batch))
        if all(each is LATER for each in outcomes):
            await self._look()
        return outcomes

    def _write(self, calls: Calls, batch: Sequence[Item]) -> list[Outcome]:
        errors: list[Any] = [ValueError] * len(batch)

        def delivered(at: int, error: Any, _message: Any) -> None:
            errors[at] = error

        for at, item in enumerate(batch):
            millis = (item.event_time_us or item.time_us) // 1000
            headers = list(item.headers.items()) or None
            try:
                self._producer.produce(
                    self._options.kafka_topic, item.body, item.key, timestamp=millis, headers=headers,
                    on_delivery=partial(delivered, at),
                )  # fmt: skip
            except calls.library.KafkaException as error:
                errors[at] = error.args[0]
            except BufferError:
                raise away("the producer's queue is full") from None
            self._producer.poll(0)
        self._producer.flush(self._options.timeout_s)
        return [self._outcome(calls, error) for error in errors]

    def _outcome(self, calls: Calls, error: Any) -> Outcome:
        if error is None:
            return DONE
        if error is ValueError:
            raise away("Kafka does not confirm in time")
        kinds = calls.library.KafkaError
        if error.code() in (kinds.MSG_SIZE_TOO_LARGE, kinds.INVALID_MSG_SIZE):
            why = "it is larger than Kafka's topic takes: raise its max.message.bytes, then resend the dead letters"
            return Outcome(Verdict.SPLIT, why)
        if error.code() in (kinds.INVALID_RECORD, kinds.INVALID_TIMESTAMP):
            return Outcome(Verdict.SPLIT, f"Kafka refuses the message: {said(error.str())}")
        raise calls.error_of(calls.library.KafkaException(error))

    def _write_once(self, calls: Calls, batch: Sequence[Item]) -> list[Outcome]:
        """Write what Kafka does not have in one transaction, with the positions of all that is not settled."""
        settled, self._settled = self._settled, []
        self._once.settled(settled)
        fresh = [item for item in batch if not self._once.has(item.position)]
        wanted = set(self._once.fitting(item.position for item in fresh))
        now = [item for item in fresh if item.position in wanted]
        if not now:
            return [DONE if self._once.has(item.position) else LATER for item in batch]
        self._producer.begin_transaction()
        outcomes = self._write(calls, now)
        wrong = next((each for each in outcomes if each.verdict is not Verdict.DONE), None)
        if wrong is not None:
            self._producer.abort_transaction(self._options.timeout_s)
            return [DONE if self._once.has(item.position) else wrong for item in batch]
        place = self._place(calls, self._once.with_(wanted))
        self._producer.send_offsets_to_transaction([place], self._group.consumer_group_metadata(), self._options.timeout_s)
        self._producer.commit_transaction(self._options.timeout_s)
        self._once.wrote(wanted)
        return [DONE if self._once.has(item.position) else LATER for item in batch]

    def settled(self, batch: Sequence[Item]) -> None:
        """Forget the positions of messages that never come again."""
        if self._options.exactly_once:
            self._settled += [item.position for item in batch]

    async def close(self) -> None:
        """Disconnect. What is on its way is dropped; Kafka ends an open transaction when the bridge opens it again."""
        calls, producer, group = self._calls, self._producer, self._group
        self._calls = self._producer = self._group = None
        if calls is None:
            return

        def end() -> None:
            if producer is not None:
                producer.purge()
                producer.flush(1.0)
            if group is not None:
                group.close()

        try:
            await calls.call(end)
        finally:
            calls.close()


class KafkaSource:
    """Reads a topic of Kafka: each partition of a topic ID is a stream, and a position is the offset of the next message.

    Args:
        name: of the bridge.
        options: of it.
    """

    def __init__(self, name: str, options: KafkaSourceOptions) -> None:
        self._options = options
        self._group = options.group or f"pixiu-bridge-{name}"
        self._calls: Calls | None = None
        self._consumer: Any = None
        self._partitions = 0
        self._topic_id = ""
        self._last: dict[int, int] = {}
        """Partition → offset that was read last."""
        self._look_at = 0.0
        self.note = ""

    async def open(self) -> Sequence[str]:
        """Connect. Raises `Unavailable`, `ConfigurationError`."""
        self._calls = calls = Calls(self._options)
        isolation = "read_uncommitted" if self._options.read_uncommitted else "read_committed"
        config = calls.config() | {
            "group.id": self._group, "enable.auto.commit": False, "isolation.level": isolation,
            "auto.offset.reset": "latest" if self._options.from_end else "earliest", "queued.max.messages.kbytes": 16_384,
        }  # fmt: skip

        def connect() -> None:
            self._consumer = calls.library.Consumer(config)
            self._partitions = calls.partitions(self._consumer)
            self._topic_id = calls.topic_id()

        await calls.call(connect)
        self._look_at = time.monotonic() + LOOK_S
        return [self._stream(number) for number in range(self._partitions)]

    def _stream(self, partition: int) -> str:
        return f"{self._topic_id}.{partition}"

    async def resume(self, after: Mapping[str, int]) -> None:
        """Continue after what the topic has, or what the consumer group has confirmed, if that is more."""
        calls = self._calls
        assert calls is not None
        place = calls.library.TopicPartition

        def assign() -> None:
            asked = [place(self._options.kafka_topic, number) for number in range(self._partitions)]
            group = self._consumer.committed(asked, timeout=ASK_S)
            committed = {each.partition: each.offset for each in group if (each.metadata or "") == self._topic_id}
            places = []
            for number in range(self._partitions):
                offset = max(after[self._stream(number)], committed.get(number, -1))
                self._check(number, offset)
                places.append(place(self._options.kafka_topic, number, offset if offset > 0 else self._beginning(calls)))
            self._consumer.assign(places)

        await calls.call(assign)

    def _check(self, partition: int, offset: int) -> None:
        """See that Kafka still has what follows an offset. Raises `ConfigurationError` if it ends before it."""
        if offset <= 0:
            return
        topic = self._options.kafka_topic
        place = self._calls.library.TopicPartition(topic, partition) if self._calls else None
        low, high = self._consumer.get_watermark_offsets(place, timeout=ASK_S)
        if offset > high:
            raise ConfigurationError(
                f"partition {partition} of Kafka's topic {topic} ends at {high}, and {offset} were read: Kafka has lost messages "
                "and numbers others alike; give the bridge another name, and it reads all that is there"
            )
        if offset < low:
            self.note = (
                f"Kafka has removed {low - offset} messages of partition {partition} before they were read: raise its retention"
            )

    def _beginning(self, calls: Calls) -> int:
        begin: int = calls.library.OFFSET_END if self._options.from_end else calls.library.OFFSET_BEGINNING
        return begin

    def _look(self, calls: Calls) -> None:
        """Find out whether Kafka's topic is another one, or has new partitions. Raises `Unavailable`."""
        topic = self._options.kafka_topic
        if calls.topic_id() != self._topic_id:
            where = "end" if self._options.from_end else "start"
            raise away(f"Kafka's topic {topic} was deleted and made again: the bridge begins at the {where} of the new one")
        if calls.partitions(self._consumer) != self._partitions:
            raise away(f"Kafka's topic {topic} has new partitions: the bridge begins again with them")

    async def read(self) -> Sequence[Record]:
        """Wait for messages. Raises `Unavailable`."""
        calls = self._calls
        assert calls is not None
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            await calls.call(partial(self._look, calls))
        messages = await calls.call(self._consume)
        found = list[Record]()
        for message in messages:
            error = message.error()
            if error is None:
                partition, offset = message.partition(), message.offset()
                if offset <= self._last.get(partition, -1):  # the library has begun again: with another topic of this name, or not
                    await calls.call(partial(self._look, calls))
                    raise away(f"the offsets of Kafka's topic {self._options.kafka_topic} went back: the bridge begins again")
                self._last[partition] = offset
                found.append(record_of(message, self._stream(partition)))
            elif error.code() != calls.library.KafkaError._PARTITION_EOF:
                await calls.call(partial(self._look, calls))  # it knows why, if the topic is gone
                raise calls.error_of(calls.library.KafkaException(error))
        return found

    def _consume(self) -> list[Any]:
        """Wait for messages, and take those that are there, up to a number and a size."""
        found: list[Any] = self._consumer.consume(TAKEN, READ_S)
        size, taken = 0, found
        while taken and len(found) < AT_ONCE and size < READ_BYTES:
            size += sum(len(each) for each in taken)
            taken = self._consumer.consume(TAKEN, 0)
            found += taken
        return found

    async def confirm(self, records: Sequence[Record]) -> None:
        """Let the consumer group show what is stored."""
        calls = self._calls
        assert calls is not None
        last = {record.stream: record.progress for record in records}
        place = calls.library.TopicPartition
        places = [
            place(self._options.kafka_topic, int(stream.rpartition(".")[2]), offset, self._topic_id)
            for stream, offset in last.items()
        ]
        await calls.call(lambda: self._consumer.commit(offsets=places, asynchronous=True))

    async def close(self) -> None:
        """Disconnect."""
        calls, consumer = self._calls, self._consumer
        self._calls = self._consumer = None
        if calls is None:
            return
        try:
            if consumer is not None:
                await calls.call(consumer.close)
        finally:
            calls.close()


def record_of(message: Any, stream: str) -> Record:
    """A message of Kafka. A tombstone has no body; of headers with one name the last one counts."""
    kind, millis = message.timestamp()
    return Record(
        message.value() or b"", message.key(), {name: value or b"" for name, value in message.headers() or ()},
        millis * 1000 if kind and millis >= 0 else None, stream, message.offset() + 1,
    )  # fmt: skip
