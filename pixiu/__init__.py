"""Pixiu: a distributed, partitioned publish/subscribe cluster.

    async with pixiu.connect("127.0.0.1:7002") as px:
        await px.room(42).send(b"hello")

The names below come from `pixiu.client` and `pixiu.errors`. Each is imported on first use, so that a server or a command that
needs none of them does not load them.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from pixiu.version import __version__

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when gRPC is imported: else it prints what peers send as it comes, unbounded

if TYPE_CHECKING:
    from pixiu.client.client import Client, ClientStats, connect
    from pixiu.client.connection_events import ConnectionEvent, ConnectionEventStream, ConnectionState
    from pixiu.client.destination import Room, Topic, User
    from pixiu.client.directory import ClusterMap
    from pixiu.client.inbox.core import GapReason, MailGap, MailIntakeCounters
    from pixiu.client.inbox.inbox import Inbox
    from pixiu.client.inbox.mail import Mail
    from pixiu.client.mail.receipt import MailReceipt
    from pixiu.client.mail.writer import MailWriter
    from pixiu.client.messages.message import Message
    from pixiu.client.options import ClientOptions
    from pixiu.client.presence import UserPresence
    from pixiu.client.receive.subscriber import Subscription, SubscriptionCounters
    from pixiu.client.send.awaited import SendFailure
    from pixiu.client.send.events import SendCounters
    from pixiu.client.send.signalling import SignalReceipt
    from pixiu.client.send.streams import Receipt
    from pixiu.client.stores.pages import DeadLetterEntry, DeviceState, InboxEntry, Lane
    from pixiu.client.stores.view import InboxView
    from pixiu.client.sync.client import (
        SyncClient,
        SyncConnectionEvents,
        SyncRoom,
        SyncSubscription,
        SyncTopic,
        SyncUser,
        SyncWriter,
        connect_sync,
    )
    from pixiu.client.sync.mail import SyncInbox, SyncMailReceipt, SyncMailWriter
    from pixiu.client.sync.receipts import SyncReceipt, SyncSignalReceipt
    from pixiu.client.sync.topics import (
        SyncChannelMember,
        SyncChannelMessage,
        SyncDurableTopic,
        SyncTopicReader,
        SyncTopicReceipt,
        SyncTopics,
        SyncTopicWriter,
    )
    from pixiu.client.sync.view import SyncInboxView
    from pixiu.client.topics.durable_topic import DurableTopic
    from pixiu.client.topics.reading.member import ChannelMember, ChannelMessage
    from pixiu.client.topics.reading.reader import TopicGap, TopicReader
    from pixiu.client.topics.reading.received import TopicMessage
    from pixiu.client.topics.topic_admin import ChannelPartInfo, DeadMessage, TopicInfo, Topics
    from pixiu.client.topics.topic_map import ChannelInfo
    from pixiu.client.topics.writing.writer import TopicWriter
    from pixiu.client.topics.writing.writer_shell import TopicReceipt
    from pixiu.client.writer import Writer
    from pixiu.errors import (
        ChecksumWrong,
        ConfigurationError,
        DiskFull,
        Dropped,
        IdAhead,
        IdReused,
        IdTooOld,
        InboxFull,
        InvalidArgument,
        LimitError,
        LocalError,
        LoginReplaced,
        MalformedData,
        NotAllowed,
        NotAuthenticated,
        NotConnected,
        NotSent,
        NotServed,
        Offline,
        OutcomeUnknown,
        Overloaded,
        PixiuError,
        RecordTooLarge,
        RegistryDenied,
        RegistryUnavailable,
        RemoteError,
        StaleWriter,
        TooFewInSync,
        TooManyDevices,
        TooManyReceivers,
        TopicAway,
        TopicExists,
        TopicInUse,
        Unavailable,
        Undelivered,
        UnknownDevice,
        UnknownTopic,
        Unreachable,
    )
    from pixiu.wire.levels import Triple

__all__ = [
    "ChannelInfo",
    "ChannelMember",
    "ChannelMessage",
    "ChannelPartInfo",
    "ChecksumWrong",
    "Client",
    "ClientOptions",
    "ClientStats",
    "ClusterMap",
    "ConfigurationError",
    "ConnectionEvent",
    "ConnectionEventStream",
    "ConnectionState",
    "DeadLetterEntry",
    "DeadMessage",
    "DeviceState",
    "DiskFull",
    "Dropped",
    "DurableTopic",
    "GapReason",
    "IdAhead",
    "IdReused",
    "IdTooOld",
    "Inbox",
    "InboxEntry",
    "InboxFull",
    "InboxView",
    "InvalidArgument",
    "Lane",
    "LimitError",
    "LocalError",
    "LoginReplaced",
    "Mail",
    "MailGap",
    "MailIntakeCounters",
    "MailReceipt",
    "MailWriter",
    "MalformedData",
    "Message",
    "NotAllowed",
    "NotAuthenticated",
    "NotConnected",
    "NotSent",
    "NotServed",
    "Offline",
    "OutcomeUnknown",
    "Overloaded",
    "PixiuError",
    "Receipt",
    "RecordTooLarge",
    "RegistryDenied",
    "RegistryUnavailable",
    "RemoteError",
    "Room",
    "SendCounters",
    "SendFailure",
    "SignalReceipt",
    "StaleWriter",
    "Subscription",
    "SubscriptionCounters",
    "SyncChannelMember",
    "SyncChannelMessage",
    "SyncClient",
    "SyncConnectionEvents",
    "SyncDurableTopic",
    "SyncInbox",
    "SyncInboxView",
    "SyncMailReceipt",
    "SyncMailWriter",
    "SyncReceipt",
    "SyncRoom",
    "SyncSignalReceipt",
    "SyncSubscription",
    "SyncTopic",
    "SyncTopicReader",
    "SyncTopicReceipt",
    "SyncTopicWriter",
    "SyncTopics",
    "SyncUser",
    "SyncWriter",
    "TooFewInSync",
    "TooManyDevices",
    "TooManyReceivers",
    "Topic",
    "TopicAway",
    "TopicExists",
    "TopicGap",
    "TopicInUse",
    "TopicInfo",
    "TopicMessage",
    "TopicReader",
    "TopicReceipt",
    "TopicWriter",
    "Topics",
    "Triple",
    "Unavailable",
    "Undelivered",
    "UnknownDevice",
    "UnknownTopic",
    "Unreachable",
    "User",
    "UserPresence",
    "Writer",
    "__version__",
    "connect",
    "connect_sync",
]

if not TYPE_CHECKING:  # type checkers would accept any misspelt name because of it

    def __getattr__(name: str) -> Any:
        # The import system finds the package `pixiu.client` and the module `pixiu.errors` by itself.
        if name not in __all__:
            raise AttributeError(f"module 'pixiu' has no attribute {name!r}")
        for module in ("pixiu.client", "pixiu.errors"):
            found = getattr(importlib.import_module(module), name, None)
            if found is not None:
                globals()[name] = found
                return found
        raise AttributeError(f"module 'pixiu' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted(__all__)
