"""The SDK: publish to rooms and topics, subscribe to them. Users import it as `pixiu`."""

from pixiu.client.client import Client, ClientStats, Room, Topic, connect
from pixiu.client.directory import ClusterMap
from pixiu.client.message import Message
from pixiu.client.options import ClientOptions
from pixiu.client.signalling import SignalReceipt
from pixiu.client.streams import Receipt
from pixiu.client.subscriber import Subscription, SubscriptionCounters
from pixiu.client.sync import SyncClient, SyncReceipt, SyncRoom, SyncSubscription, connect_sync

__all__ = [
    "Client",
    "ClientOptions",
    "ClientStats",
    "ClusterMap",
    "Message",
    "Receipt",
    "Room",
    "SignalReceipt",
    "Subscription",
    "SubscriptionCounters",
    "SyncClient",
    "SyncReceipt",
    "SyncRoom",
    "SyncSubscription",
    "Topic",
    "connect",
    "connect_sync",
]
