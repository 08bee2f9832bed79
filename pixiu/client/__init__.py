"""The SDK: publish to rooms, topics and users, and subscribe to them. Users import it as `pixiu`."""

from pixiu.client.awaited import SendFailure
from pixiu.client.client import Client, ClientStats, connect
from pixiu.client.connection_events import ConnectionEvent, ConnectionEventStream, ConnectionState
from pixiu.client.destination import Room, Topic, User
from pixiu.client.directory import ClusterMap
from pixiu.client.inbox import Inbox
from pixiu.client.inbox_core import GapReason, MailGap, MailIntakeCounters
from pixiu.client.inbox_mail import Mail
from pixiu.client.inbox_pages import DeadLetterEntry, DeviceState, Entry, Lane
from pixiu.client.inbox_view import InboxView
from pixiu.client.mail import MailCounters
from pixiu.client.mail_receipt import MailReceipt
from pixiu.client.mail_writer import MailWriter
from pixiu.client.message import Message
from pixiu.client.options import ClientOptions
from pixiu.client.presence import UserPresence
from pixiu.client.signalling import SignalReceipt
from pixiu.client.streams import Receipt
from pixiu.client.subscriber import Subscription, SubscriptionCounters
from pixiu.client.sync import (
    SyncClient,
    SyncConnectionEvents,
    SyncRoom,
    SyncSubscription,
    SyncTopic,
    SyncUser,
    SyncWriter,
    connect_sync,
)
from pixiu.client.sync_mail import SyncInbox, SyncMailReceipt, SyncMailWriter
from pixiu.client.sync_receipt import SyncReceipt, SyncSignalReceipt
from pixiu.client.sync_view import SyncInboxView
from pixiu.client.writer import Writer
from pixiu.wire.levels import Triple

__all__ = [
    "Client",
    "ClientOptions",
    "ClientStats",
    "ClusterMap",
    "ConnectionEvent",
    "ConnectionEventStream",
    "ConnectionState",
    "DeadLetterEntry",
    "DeviceState",
    "Entry",
    "GapReason",
    "Inbox",
    "InboxView",
    "Lane",
    "Mail",
    "MailCounters",
    "MailGap",
    "MailIntakeCounters",
    "MailReceipt",
    "MailWriter",
    "Message",
    "Receipt",
    "Room",
    "SendFailure",
    "SignalReceipt",
    "Subscription",
    "SubscriptionCounters",
    "SyncClient",
    "SyncConnectionEvents",
    "SyncInbox",
    "SyncInboxView",
    "SyncMailReceipt",
    "SyncMailWriter",
    "SyncReceipt",
    "SyncRoom",
    "SyncSignalReceipt",
    "SyncSubscription",
    "SyncTopic",
    "SyncUser",
    "SyncWriter",
    "Topic",
    "Triple",
    "User",
    "UserPresence",
    "Writer",
    "connect",
    "connect_sync",
]
