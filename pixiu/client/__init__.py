"""The SDK: publish to rooms, topics and users, and subscribe to them. Users import it as `pixiu`, which finds its names here."""

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
from pixiu.wire.levels import Triple
