"""Transcripts of connections: text that a person can read, and a test can play.

    C> CONNECT v5 id=a clean {RECEIVE_MAXIMUM=2}     the client sends a packet
    S> CONNACK SUCCESS {TOPIC_ALIAS_MAXIMUM=64}      it gets one
    ! accept 1                                       the shell calls the session
    E> publish a qos=1 "x"                           the shell gets an effect

Lines with S> and E> are what the lines before them led to, in order. `PIXIU_TRANSCRIPTS=write` writes them as they are found.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from cluster.mqtt import codec
from cluster.mqtt.events import (
    Close,
    CloseReason,
    Connected,
    DropMessages,
    Effect,
    ForgetMessage,
    Kept,
    KeptAcknowledged,
    KeptReceived,
    PublishMessages,
    Send,
    SendMail,
    SendMessages,
    SharedAcknowledged,
    SubscribeFilters,
    UnsubscribeFilters,
    Wanted,
)
from cluster.mqtt.mail import Mails
from cluster.mqtt.outbound import Delivery, KeptDelivery, OutboundCounters
from cluster.mqtt.packets import (
    MQTT_3_1,
    MQTT_3_1_1,
    MQTT_5,
    Auth,
    Connack,
    Connect,
    Dialect,
    Disconnect,
    Packet,
    Pingreq,
    Properties,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    Side,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
    Will,
)
from cluster.mqtt.properties import RULES, Form, Property
from cluster.mqtt.properties_in_records import extension_for, origin_of
from cluster.mqtt.reason_codes import ReasonCode
from cluster.mqtt.server import ServerSession
from cluster.mqtt.terms import SessionLimits
from pixiu.placement.topics import TopicRefusal, resolve
from pixiu.wire.record import Flag, Kind, encode, with_topic

DIALECTS = {"v3.1": MQTT_3_1, "v3.1.1": MQTT_3_1_1, "v5": MQTT_5}
ANSWERS: dict[str, type[Puback | Pubrec | Pubrel | Pubcomp]] = {
    "PUBACK": Puback,
    "PUBREC": Pubrec,
    "PUBREL": Pubrel,
    "PUBCOMP": Pubcomp,
}
Words = dict[str, str]


def play(text: str) -> list[str]:
    """The lines of a transcript with what the session says now."""
    said = [line for line in text.splitlines() if not line.startswith(("S>", "E>"))]
    return list(Player().play(said))


class Player:
    """Plays one connection."""

    def __init__(self) -> None:
        self._now, self._limits = 0.0, SessionLimits()
        self._admits: ReasonCode | None = ReasonCode.SUCCESS
        self._session: ServerSession | None = None
        self._dialect: Dialect = MQTT_3_1_1
        self._decoder: codec.Decoder | None = None
        self.counters = OutboundCounters()

    @property
    def session(self) -> ServerSession:
        """The session; made at the first use, with the limits that were set before."""
        if self._session is None:
            self._session = ServerSession(
                self._now, "assigned", self._limits, lambda connect: self._admits, counters=self.counters
            )  # fmt: skip
        return self._session

    def play(self, lines: list[str]) -> Iterator[str]:
        """Return each line, and what it led to."""
        for line in lines:
            yield line
            if line.startswith("C>"):
                yield from self._shown(self.session.receive(self._bytes(line[3:]), self._now))
            elif line.startswith("!"):
                yield from self._shown(self._call(shlex.split(line[2:])))

    def _bytes(self, line: str) -> bytes:
        if line.startswith("BYTES "):
            if " v5 " in line:
                self._dialect = MQTT_5
            return bytes.fromhex(line[6:].replace("v5 ", ""))
        packet = read(line)
        if isinstance(packet, Connect):
            self._dialect = packet.dialect
        return codec.encode(packet, self._dialect)

    def _call(self, words: list[str]) -> list[Effect]:
        name, found = words[0], _words(words[1:])
        if name == "limits":
            self._limits = SessionLimits(**{key: int(value) for key, value in found.items()})
            return []
        if name == "admit":
            self._admits = None if words[1] == "later" else ReasonCode[words[1]]
            return []
        if name == "session":
            filters = [one.rsplit(":", 1) for one in found.get("filters", "").split(",") if one]
            wanted = tuple(Wanted(text, int(qos), retain_handling=2, kept=True) for text, qos in filters)
            return self.session.admitted(ReasonCode.SUCCESS, self._now, Kept("present" in found, int(found["expiry"]), wanted))
        if name == "kept":
            message = KeptDelivery(int(words[1]), _delivery(words[2], found), "dup" in found, "released" in found)
            return self.session.deliver_kept([message], self._now, anew="anew" in found)
        if name == "stored":
            return self.session.kept_released(int(words[1]), self._now)
        if name == "left_out":
            return [KeptAcknowledged(self.session.left_out())]
        if name == "at":
            self._now = float(words[1])
            return self.session.timeout(self._now)
        if name == "confirm":
            codes = [_code(word) for word in words[2:]]
            return self.session.subscription_confirmed(int(words[1]), self._now, codes or None)
        if name == "accept":
            return self.session.publish_accepted([int(word) for word in words[1:]], self._now)
        if name == "refuse":
            return self.session.publish_refused(int(words[1]), ReasonCode[words[2]], words[3], self._now)
        if name == "close":
            return self.session.close(CloseReason[words[1]], words[2], self._now, found.get("server", ""))
        if name == "mail":
            bodies = [word.encode() for word in words[2:]]
            return self.session.deliver_mail("user/7", [Mails(1, int(words[1]), bodies, False)], self._now)
        assert name == "deliver", name
        return self.session.deliver([_delivery(words[1], found)], self._now, int(self._now * 1000))

    def _shown(self, effects: list[Effect]) -> Iterator[str]:
        for effect in effects:
            if isinstance(effect, Send | SendMessages):
                yield from self._packets(effect.data)
            elif isinstance(effect, SendMail):
                yield from self._packets(b"".join(effect.packets))
            elif isinstance(effect, PublishMessages):
                for _, message in effect.messages:
                    yield f"E> publish {show(message)[8:]}"
            elif isinstance(effect, SubscribeFilters):
                yield " ".join(["E> subscribe", *(f"{one.filter}:{one.qos}" for one in effect.filters)])
            elif isinstance(effect, UnsubscribeFilters):
                yield f"E> unsubscribe {' '.join(effect.filters)}"
                if effect.answer:
                    yield "E> when it is stored:"
                    yield from self._packets(effect.answer)
            elif isinstance(effect, KeptAcknowledged):
                yield f"E> acknowledged {effect.packet_ids}"
            elif isinstance(effect, KeptReceived):
                yield f"E> store that {effect.packet_id} was received"
            elif isinstance(effect, ForgetMessage):
                yield f"E> store that {effect.packet_id} was released, then:"
                yield from self._packets(effect.answer)
            elif isinstance(effect, DropMessages):
                yield f"E> drop {effect.reason.name}"
            elif isinstance(effect, SharedAcknowledged):
                yield f"E> shared acknowledged {effect.numbers}"
            elif isinstance(effect, Close):
                ends = f", expiry {effect.expiry_s}" if effect.expiry_s >= 0 else ""
                yield f"E> close {effect.reason.name}" + ("" if effect.publish_will else ", no will") + ends
            elif isinstance(effect, Connected):
                yield f"E> connected {effect.client_id} window={effect.terms.window}"
            else:
                yield f"E> {effect}"
        while self.session.has_outgoing:
            yield from self._packets(self.session.outgoing(1, self._now, int(self._now * 1000)))

    def _packets(self, data: bytes) -> Iterator[str]:
        if self._decoder is None:
            self._decoder = codec.Decoder(Side.CLIENT, dialect=self._dialect)
        for packet in self._decoder.feed(data):
            yield f"S> {show(packet)}"
        assert self._decoder.error is None, "a packet that a client would refuse"


def _delivery(topic: str, found: Words) -> Delivery:
    qos, properties = int(found.get("qos", "0")), _properties(found.get("properties", ""))
    room = resolve(topic)
    assert not isinstance(room, TopicRefusal), f"no room carries {topic}"
    record = encode(
        Kind.ROOM, room, with_topic(topic, found.get("payload", "x").encode()), 1, flags=Flag.TO_ROOM | Flag.TOPIC,
        origin=origin_of(qos, retain=False), extension=extension_for(properties, 0),
    )  # fmt: skip
    identifiers = tuple(int(one) for one in found.get("ids", "").split(",") if one)
    return Delivery(record, topic.encode(), qos, "retain" in found, identifiers, 0, int(found.get("shared", "0")))


def _words(words: list[str]) -> Words:
    return {key: value for key, _, value in (word.partition("=") for word in words)}


def _code(word: str) -> int:
    return int(word, 0) if word[0].isdigit() else ReasonCode[word]


def _properties(text: str) -> Properties | None:
    found: dict[int, object] = {}
    for word in shlex.split(text):
        name, _, value = word.partition("=")
        which = Property[name]
        rule = RULES[which]
        one: object = value
        if rule.form is Form.PAIR:
            one = tuple(value.split(":", 1))
        elif rule.form is Form.BINARY:
            one = value.encode()
        elif rule.form is not Form.TEXT:
            one = int(value)
        found[which] = one if rule.times == 1 else (*found.get(which, ()), one)  # type: ignore[misc]
    return found or None


def read(line: str) -> Packet:
    """A packet of a client from its line."""
    fields, _, rest = line.partition("{")
    properties = _properties(rest.rstrip("}"))
    kind, *words = shlex.split(fields)
    found = _words(words)
    number = int(found.get("#", "0"))
    if kind == "CONNECT":
        will = None
        if "will" in found:
            topic, payload = found["will"].split(":")
            will = Will(topic, payload.encode())
        dialect = next(dialect for name, dialect in DIALECTS.items() if name in found)
        keep_alive = int(found.get("keep", "0"))
        return Connect(found["id"], "clean" in found, keep_alive, found.get("user"), None, will, dialect, properties)
    if kind == "PUBLISH":
        topic = "" if words[0] == '""' else words[0]
        body = found.get("payload", "x").encode()
        return Publish(topic, body, int(found.get("qos", "0")), "retain" in found, "dup" in found, number, properties)
    if kind == "SUBSCRIBE":
        filters = [word.rsplit(":", 1) for word in words if "#=" not in word]
        return Subscribe(number, tuple((name, int(options, 0)) for name, options in filters), False, properties)
    if kind == "UNSUBSCRIBE":
        return Unsubscribe(number, tuple(word for word in words if "#=" not in word), False, properties)
    codes = [ReasonCode[word] for word in words if re.fullmatch("[A-Z_0-9]+", word)]
    code = codes[0] if codes else ReasonCode.SUCCESS
    if kind in ANSWERS:
        answer: Packet = ANSWERS[kind](number, code, properties)
        return answer
    if kind == "AUTH":
        return Auth(code, properties)
    return Pingreq() if kind == "PINGREQ" else Disconnect(code, properties)


def show(packet: Packet) -> str:
    """The line of a packet."""
    words = [type(packet).__name__.upper()]
    if isinstance(packet, Publish):
        words += [packet.topic or '""', f"qos={packet.qos}", f'"{packet.payload.decode()}"']
        words += [name for name in ("retain", "dup") if getattr(packet, name)]
    if isinstance(packet, Connack) and not any(packet.code == code for code in ReasonCode):
        words.append(str(packet.code))
    elif isinstance(packet, Connack | Disconnect | Auth) or getattr(packet, "code", None):
        words.append(ReasonCode(getattr(packet, "code", None) or 0).name)
    if isinstance(packet, Suback | Unsuback):
        words += [str(code) if code < 3 else f"{code:#x}" for code in packet.codes]
    words += ["present"] if getattr(packet, "session_present", False) else []
    number = getattr(packet, "packet_id", None)
    if number:
        words.append(f"#={number}")
    properties = getattr(packet, "properties", None)
    if properties:
        shown = [f"{Property(which).name}={_value(value)}" for which, value in properties.items()]
        words.append("{" + " ".join(shown) + "}")
    return " ".join(words)


def _value(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode()
    return f"'{value}'" if isinstance(value, str) and " " in value else str(value)
