"""Access checks of a gateway for one client: its login, its subscriptions, its messages.

Without a guard nothing is checked, and every client may do everything.

Source: docs/security.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from cluster.access.login_guard import MAX_HOLD_S, LoginGuard, LoginSession
from cluster.access.rules import INBOX, PUBLISH, SUBSCRIBE, Target, of_topic_name, of_user
from cluster.access.tenants.use import QuotaReached
from cluster.mqtt.packets import Connect, Publish, Will
from cluster.mqtt.properties_in_records import extension_for_will
from cluster.mqtt.reason_codes import ReasonCode
from cluster.trust.identity import Credentials, Identity
from cluster.wills.will import MAX_PAYLOAD_BYTES
from pixiu.errors import Draining, InvalidArgument, NotAllowed, NotAuthenticated, Overloaded, PixiuError, RecordTooLarge
from pixiu.placement.big_rooms import VRooms
from pixiu.placement.topic_rooms import TopicRooms
from pixiu.placement.topics import ROOM_PREFIX, USER_PREFIX, Filter, TopicRefusal, destination, parse_filter, user_of_topic


def credentials_of(connect: Connect, address: str, certificate: bytes) -> Credentials:
    """Credentials of an MQTT client: a token, the password of its user name, or a certificate that TLS has verified."""
    secret = (connect.password or b"").decode(errors="replace")
    return Credentials(connect.user_name or "", secret, connect.client_id, address, certificate)


def open_user(guard: LoginGuard, identity: Identity, address: str, client: str, end: Callable[[str], None]) -> LoginSession:
    """Open the session of a user who receives. Raises `NotAllowed` for a service, and what `LoginGuard.open` raises."""
    with guard.refusing(address, client):
        if not identity.uin:
            raise NotAllowed("this login has no UIN: services publish at proxies, only users connect to gateways")
    return guard.open(identity, address, client, end)


def code_of(error: PixiuError) -> ReasonCode:
    """Reason code of the CONNACK for a refused login."""
    for kind, code in _CONNACK_CODES.items():
        if isinstance(error, kind):
            return code
    return ReasonCode.SERVER_UNAVAILABLE


_CONNACK_CODES = {
    QuotaReached: ReasonCode.QUOTA_EXCEEDED,
    RecordTooLarge: ReasonCode.PACKET_TOO_LARGE,  # of a will
    NotAllowed: ReasonCode.NOT_AUTHORISED,
    InvalidArgument: ReasonCode.TOPIC_NAME_INVALID,  # of a will
    NotAuthenticated: ReasonCode.BAD_USER_NAME_OR_PASSWORD,
    Overloaded: ReasonCode.SERVER_BUSY,
    Draining: ReasonCode.USE_ANOTHER_SERVER,
}


def target_of(key: int, topic: str) -> Target:
    """Target of a topic, as access rules name it. `key`: the room or user that the topic stands for."""
    if topic.startswith(ROOM_PREFIX):
        return key
    return of_user(key) if topic.startswith(USER_PREFIX) else topic


def target_of_filter(name: str) -> Target:
    """Target of a filter, as access rules name it: without `$share/GROUP/`, because a group is no right of its own."""
    parsed = parse_filter(name)
    return of_topic_name(parsed.name) if isinstance(parsed, Filter) else name


def may_subscribe(access: LoginSession | None, name: str) -> bool:
    """True if a client may subscribe to a filter: a room, topics, or the messages to a user."""
    return access is None or access.allows(SUBSCRIBE, target_of_filter(name))


def may_read_mail(access: LoginSession | None, uin: int) -> bool:
    """True if a client may read a user's mail."""
    return access is None or access.allows(INBOX, of_user(uin))


def may_publish(access: LoginSession, key: int, message: Publish) -> bool:
    """True if an MQTT client may publish a message."""
    return access.allows(PUBLISH, target_of(key, message.topic))


def will_key(topic: str, topics: TopicRooms, vrooms: VRooms) -> int:
    """Room or user of the topic of a will. Raises `InvalidArgument` if there is none."""
    found = destination(topic)
    if not isinstance(found, TopicRefusal) and topic.startswith(ROOM_PREFIX) and vrooms.is_vroom(found):
        found = TopicRefusal.VROOM
    if isinstance(found, TopicRefusal):
        raise InvalidArgument(f"no room carries the topic of the will: {found.value}")
    return found if topic.startswith((ROOM_PREFIX, USER_PREFIX)) else topics.room(topic)


def check_will(access: LoginSession | None, will: Will, topics: TopicRooms, vrooms: VRooms) -> None:
    """Check the will of a client that connects; callbacks were asked. Raises `NotAllowed` if the client may not publish it,
    `InvalidArgument` for its topic or size, `RecordTooLarge` for its properties."""
    key = will_key(will.topic, topics, vrooms)
    if len(will.payload) > MAX_PAYLOAD_BYTES:
        raise InvalidArgument(f"the payload of a will has at most {MAX_PAYLOAD_BYTES} bytes, this one {len(will.payload)}")
    try:
        extension_for_will(will.properties)
    except InvalidArgument as error:
        raise RecordTooLarge(f"the properties of a will: {error}") from None
    if access is not None:
        access.require(PUBLISH, target_of(key, will.topic))


def foresee_will(access: LoginSession, will: Will, topics: TopicRooms, vrooms: VRooms) -> bool:
    """True if a callback must be asked before a client may connect with this will. Raises `InvalidArgument` for its topic."""
    access.foresee(PUBLISH, target_of(will_key(will.topic, topics, vrooms), will.topic))
    return access.must_ask


def foresee_subscribe(access: LoginSession, uin: int, filters: Iterable[str]) -> bool:
    """True if a callback must be asked before an MQTT client may subscribe to these filters."""
    for name in filters:
        access.foresee(SUBSCRIBE, target_of_filter(name))
        if user_of_topic(name) == uin:
            access.foresee(INBOX, of_user(uin))
    return access.must_ask


def foresee_publish(access: LoginSession, messages: Iterable[tuple[int, Publish]]) -> bool:
    """True if a callback must be asked before an MQTT client may publish these."""
    for key, message in messages:
        access.foresee(PUBLISH, target_of(key, message.topic))
    return access.must_ask


def foresee_stream(access: LoginSession, uin: int, channels: Iterable[str], *, chat: bool, mail: bool) -> bool:
    """True if a callback must be asked before a gRPC subscriber may have these."""
    for action, target in _of_stream(uin, channels, chat=chat, mail=mail):
        access.foresee(action, target)
    return access.must_ask


def pay(access: LoginSession, messages: Sequence[tuple[int, Publish]]) -> float:
    """Charge published messages to the login. Returns the seconds for which to stop reading from the client."""
    return min(access.spend(len(messages), sum(len(message.payload) for _, message in messages)), MAX_HOLD_S)


def check_stream(access: LoginSession | None, uin: int, channels: Iterable[str], *, chat: bool, mail: bool) -> None:
    """Check a gRPC subscription. Raises `NotAllowed` if any of it is forbidden. `channels`: filters."""
    if access is not None:
        for action, target in _of_stream(uin, channels, chat=chat, mail=mail):
            access.require(action, target)


def _of_stream(uin: int, channels: Iterable[str], *, chat: bool, mail: bool) -> Iterator[tuple[str, Target]]:
    """Actions and targets that a gRPC subscriber asks for."""
    for name in channels:
        yield SUBSCRIBE, target_of_filter(name)
    if chat:
        yield SUBSCRIBE, of_user(uin)
    if mail:
        yield INBOX, of_user(uin)
