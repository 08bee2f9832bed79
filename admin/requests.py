"""Changes of topics as messages of clients, and as the core's. Pure.

Source: docs/topics.md, "Administration".
"""

from __future__ import annotations

from typing import Any

from admin import events as ev
from pixiu.discovery.topics import SETTINGS
from pixiu.errors import InvalidArgument
from pixiu.wire.v1 import topic_pb2


def change_of(message: topic_pb2.TopicChange) -> ev.Change:
    """The change in a message. Raises `InvalidArgument` if there is none, or an unknown one."""
    match message.WhichOneof("change"):
        case "create":
            made = message.create
            return ev.CreateTopic(parts=made.parts, if_missing=made.if_missing, **_settings(made.settings))
        case "alter":
            return ev.AlterTopic(**_settings(message.alter))
        case "delete":
            return ev.DeleteTopic(message.delete.force, message.delete.now)
        case "restore":
            return ev.RestoreTopic()
        case "set_channel":
            channel = message.set_channel
            return ev.SetChannel(
                channel.name,
                channel.ordered,
                channel.from_end,
                channel.max_attempts,
                channel.timeout_ms,
                channel.filter,
            )
        case "remove_channel":
            return ev.RemoveChannel(message.remove_channel)
        case "resize":
            wanted = message.resize
            return ev.Resize(tuple(wanted.parts), tuple(wanted.bounds), tuple(wanted.groups))
    raise InvalidArgument("the change of a topic is empty, or of a newer version than this cluster")


def _settings(found: topic_pb2.TopicSettings) -> dict[str, Any]:
    return {name: getattr(found, name) if name == "store" else int(getattr(found, name)) for name in SETTINGS}
