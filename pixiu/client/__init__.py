"""The SDK: publish to rooms, topics and users, subscribe to them. Users import it as `pixiu`."""

from pixiu.client.client import Client, ClientStats, connect
from pixiu.client.destination import Room, Topic, User
from pixiu.client.directory import ClusterMap
from pixiu.client.inbox import Inbox
from pixiu.client.inbox_core import GapReason, MailGap, MailIntakeCounters
from pixiu.client.inbox_mail import Mail
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
from pixiu.client.sync import SyncClient, SyncRoom, SyncSubscription, SyncUser, connect_sync
from pixiu.client.sync_mail import SyncInbox, SyncMailReceipt, SyncMailWriter
from pixiu.client.sync_receipt import SyncReceipt
from pixiu.wire.levels import Triple

__all__ = [
    "Client",
    "ClientOptions",
    "ClientStats",
    "ClusterMap",
    "GapReason",
    "Inbox",
    "InboxView",
    "Mail",
    "MailCounters",
    "MailGap",
    "MailIntakeCounters",
    "MailReceipt",
    "MailWriter",
    "Message",
    "Receipt",
    "Room",
    "SignalReceipt",
    "Subscription",
    "SubscriptionCounters",
    "SyncClient",
    "SyncInbox",
    "SyncMailReceipt",
    "SyncMailWriter",
    "SyncReceipt",
    "SyncRoom",
    "SyncSubscription",
    "SyncUser",
    "Topic",
    "Triple",
    "User",
    "UserPresence",
    "connect",
    "connect_sync",
]
