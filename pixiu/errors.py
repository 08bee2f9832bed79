"""Every error that Pixiu raises, in one tree.

    PixiuError
    ├── LocalError             the caller is at fault: change the call
    │   ├── ConfigurationError   an option: names the file, the key and what is allowed
    │   ├── InvalidArgument      an argument
    │   ├── RecordTooLarge       a message above the cluster's limit
    │   ├── IdReused             a SnowflakeID that another message has
    │   ├── IdTooOld             a SnowflakeID older than the window in which repeats are recognized
    │   ├── IdAhead              a SnowflakeID whose time is in the future
    │   ├── NotConnected         used before connect() or after close()
    │   ├── LoginReplaced        another login of the user took the place of this one
    │   ├── NotAuthenticated     no login, or one that is refused: get another token or password
    │   ├── NotAllowed           the login may not do this
    │   ├── TooManyReceivers     one mail names more than 1,000
    │   ├── UnknownDevice        the user has no device of this number
    │   ├── UnknownTopic         there is no such topic, or no such channel of it
    │   ├── TopicExists          there is such a topic already
    │   ├── TopicInUse           others use the topic, or a change of it is under way
    ├── RemoteError            the other side, or the network, is at fault
    │   ├── MalformedData        bytes that do not follow the format
    │   ├── ChecksumWrong        a message was damaged on its way
    │   ├── Unavailable          nobody serves this now: try again later
    │   │   ├── Unreachable          no process of the cluster answers (a ConnectionError)
    │   │   ├── RegistryUnavailable  ZooKeeper cannot be reached (a ConnectionError)
    │   │   │   └── RegistryDenied     ZooKeeper does not let this login do it
    │   │   ├── NotSent              certainly not sent: send again (a ConnectionError)
    │   │   └── OutcomeUnknown       no answer in time, it may have happened or not (a TimeoutError)
    │   ├── NotServed            this proxy, or the whole cluster, does not accept this kind of message
    │   ├── Dropped              not confirmed on the way: it may have been delivered; send it again with the same ID
    │   ├── Undelivered          no gateway confirmed a signal in time: the outcome is unknown (a TimeoutError)
    │   ├── Offline              not delivered: the user has no device online
    │   ├── WrongPartition       sent to a process that does not serve the key
    │   ├── OldSession           a newer session of the device was opened
    │   ├── StaleWriter          an append of a stream that a newer one replaced: open a new one
    │   ├── NotLeader            sent to a replica that does not lead: `leader` names the one that does
    │   ├── TooFewInSync         fewer replicas are in sync than the cluster wants for a replicated write
    │   ├── StaleStream          the leader has changed since: send again everything unconfirmed
    │   ├── NotYet               no such MsgID so far: ask again
    │   ├── Gone                 the message was trimmed, or cut off before it was committed
    │   └── Draining             the process is draining: use another
    ├── StorageError           a disk is at fault
    │   ├── DiskFull             nothing was written: free space, then try again
    │   ├── DiskFailed           what reached the disk is unknown: the process must restart
    │   ├── StoreDamaged         a stored message cannot be read as it was written
    │   ├── LogDamaged           acknowledged entries are missing or broken: repair from a peer
    │   └── StateDamaged         a value of a store's state is broken: repair from a peer
    └── LimitError             a bound was reached
        ├── Overloaded           refused at the edge: try again after `retry_after_ms`
        │   └── TopicAway            the durable topic of a route does not store the message now: try again
        ├── TooManyDevices       a user has eight devices: drop one
        ├── InboxFull            an inbox at its limit that does not drop its oldest
        └── LeaseExpired         a leased number has expired

Each has a `code` (stable, for programs) and a text that says what to do.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple


class PixiuError(Exception):
    """Base of all errors. `code` is stable; `str(error)` describes the problem and what to do about it.

    `retry_after_ms`: milliseconds after which to try again; 0: not given.
    """

    code: ClassVar[str] = "INTERNAL"
    retry_after_ms: int = 0


class Refusal(NamedTuple):
    """An error on its way to the caller: in events of cores, and in replies on the wire."""

    code: str
    text: str
    retry_after_ms: int = 0

    @classmethod
    def of(cls, error: PixiuError) -> Refusal:
        """Return the refusal that reports an error."""
        return cls(error.code, str(error), error.retry_after_ms)


class LocalError(PixiuError):
    """The caller is at fault."""

    code = "INVALID_ARGUMENT"


class ConfigurationError(LocalError):
    """An option is wrong. The text names the file, the key, the value and what is allowed."""

    code = "CONFIGURATION"


class InvalidArgument(LocalError):
    """An argument is wrong."""

    code = "INVALID_ARGUMENT"


class RecordTooLarge(LocalError):
    """A message is above the cluster's limit."""

    code = "RECORD_TOO_LARGE"


class IdReused(LocalError):
    """Another message was stored under this SnowflakeID: its CRC differs."""

    code = "ID_REUSED"


class IdTooOld(LocalError):
    """The SnowflakeID is older than the window in which repeats are recognized. The message may or may not have been stored
    before."""

    code = "TOO_OLD"


class IdAhead(LocalError):
    """The SnowflakeID's time is in the future: correct the sender's clock."""

    code = "ID_AHEAD"


class NotConnected(LocalError):
    """The client is not connected."""

    code = "NOT_CONNECTED"


class LoginReplaced(LocalError):
    """Another login of the user replaced this one, under the cluster's login policy. Do not reconnect automatically: the two logins
    would replace each other for ever."""

    code = "LOGIN_REPLACED"


class NotAuthenticated(LocalError):
    """The cluster requires a login, and there is none or it was refused: get another token or password."""

    code = "UNAUTHENTICATED"


class NotAllowed(LocalError):
    """The login may not do this. Trying again is useless until an operator changes the rules."""

    code = "NOT_ALLOWED"


class TooManyReceivers(LocalError):
    """One mail names more receivers than the limit."""

    code = "TOO_MANY_RECEIVERS"


class UnknownDevice(LocalError):
    """The user has no device of this number, or it was dropped: add it by its client ID."""

    code = "UNKNOWN_DEVICE"


class UnknownTopic(LocalError):
    """There is no topic of this name, or no such channel or part of it."""

    code = "UNKNOWN_TOPIC"


class TopicExists(LocalError):
    """There is a topic of this name already; it may be in the bin."""

    code = "TOPIC_EXISTS"


class TopicInUse(LocalError):
    """The topic has members, or the part is being changed: the text says which."""

    code = "TOPIC_IN_USE"


class RemoteError(PixiuError):
    """The other side or the network is at fault."""

    code = "REMOTE"


class MalformedData(RemoteError):
    """Bytes that do not follow the format."""

    code = "MALFORMED"


class ChecksumWrong(RemoteError):
    """A message's CRC does not match its body: it was damaged on its way. Send it again."""

    code = "CHECKSUM_WRONG"


class Unavailable(RemoteError):
    """Nobody serves this now. The subclasses `NotSent` and `OutcomeUnknown` tell apart what certainly did not happen and what may
    have."""

    code = "UNAVAILABLE"


class Unreachable(Unavailable, ConnectionError):
    """No process of the cluster answers at the known addresses. The text lists them."""

    code = "UNREACHABLE"


class NotSent(Unavailable, ConnectionError):
    """The message has certainly not been delivered and will not be, because no process took it. Sending it again delivers it
    once."""

    code = "NOT_SENT"


class OutcomeUnknown(Unavailable, TimeoutError):
    """Nobody confirmed it in time: it may have happened or not. Mail that is sent again with the same ID is stored once
    (`MailWriter.resend`). `open_inboxes`: for a mail to several users, those whose inboxes do not have it, as far as is known."""

    code = "OUTCOME_UNKNOWN"
    open_inboxes: tuple[int, ...] = ()


class NotServed(RemoteError):
    """This proxy, or the whole cluster, does not accept this kind of message. Trying again is useless."""

    code = "NOT_SERVED"


class RegistryUnavailable(Unavailable, ConnectionError):
    """ZooKeeper cannot be reached. The text contains the address."""

    code = "REGISTRY_UNAVAILABLE"


class RegistryDenied(RegistryUnavailable):
    """ZooKeeper requires a login, or does not allow this one to do it. The text explains what to do."""

    code = "REGISTRY_DENIED"


class Dropped(RemoteError):
    """A broker or relay did not confirm a message: it was lost on the way, or it was delivered. Sending it again with the same ID
    delivers it once."""

    code = "DROPPED"


class Undelivered(RemoteError, TimeoutError):
    """No gateway confirmed in time that it had delivered a signal."""

    code = "UNDELIVERED"


class Offline(RemoteError):
    """The user has no device online that takes messages. Nobody received the message, and it is not kept."""

    code = "OFFLINE"


class WrongPartition(RemoteError):
    """The process does not serve this key."""

    code = "WRONG_PARTITION"

    def __init__(self, text: str, key: int = 0) -> None:
        super().__init__(text)
        self.key = key


class OldSession(RemoteError):
    """A newer session of the device was opened: this one may no longer read or acknowledge."""

    code = "OLD_SESSION"


class StaleWriter(RemoteError):
    """The stream of appends was opened in another epoch, or its writer has opened a newer one. Open a new stream with a higher
    generation and send everything unconfirmed again, in order."""

    code = "STALE_WRITER"


class NotLeader(RemoteError):
    """The replica does not lead its partition. `leader`: host:port of the leader; empty when it is not known."""

    code = "NOT_LEADER"

    def __init__(self, text: str, leader: str = "") -> None:
        super().__init__(text)
        self.leader = leader


class TooFewInSync(RemoteError):
    """Too few replicas are in sync for a write at level replicated. Nothing was written."""

    code = "TOO_FEW_IN_SYNC"


class StaleStream(RemoteError):
    """The stream was opened in an earlier epoch of the leader: send everything unconfirmed again, in order."""

    code = "STALE_STREAM"


class NotYet(RemoteError):
    """No message has this MsgID so far. Ask again soon."""

    code = "NOT_YET"


class Gone(RemoteError):
    """The message no longer exists, or was never committed. It will not come back."""

    code = "GONE"


class Draining(RemoteError):
    """The process is draining: use another one."""

    code = "DRAINING"


class StorageError(PixiuError):
    """A disk is at fault."""

    code = "STORAGE"


class DiskFull(StorageError):
    """The disk is full. Nothing was written; the same call works once there is space."""

    code = "DISK_FULL"


class DiskFailed(StorageError):
    """Writing or syncing failed. The state of the disk is unknown, so this process writes nothing more."""

    code = "DISK_FAILED"


class StoreDamaged(StorageError):
    """A stored message differs from what was written. None of it is returned; the text explains what to do."""

    code = "STORE_DAMAGED"


class LogDamaged(StorageError):
    """A log entry is missing or broken. The text names it. `last`: the last counter of its segment; 0: not known."""

    code = "LOG_DAMAGED"

    def __init__(self, text: str, last: int = 0) -> None:
        super().__init__(text)
        self.last = last


class StateDamaged(StorageError):
    """A value of a store's state is broken. The text names it."""

    code = "STATE_DAMAGED"


class LimitError(PixiuError):
    """A bound was reached."""

    code = "LIMIT"


class Overloaded(LimitError):
    """The request was refused at the edge of the cluster."""

    code = "OVERLOADED"

    def __init__(self, text: str, retry_after_ms: int = 0) -> None:
        super().__init__(text)
        self.retry_after_ms = retry_after_ms


class TopicAway(Overloaded):
    """A route stores the message in a durable topic, which does not take it now. Nothing is acknowledged that is not stored.
    Sending it again with the same ID stores it once, as long as the proxy remembers it."""

    code = "TOPIC_AWAY"


class TooManyDevices(LimitError):
    """The user has as many devices as allowed: drop one first."""

    code = "TOO_MANY_DEVICES"


class InboxFull(LimitError):
    """The inbox is full, and the cluster refuses mail to full inboxes: acknowledge some first."""

    code = "INBOX_FULL"
    open_inboxes: tuple[int, ...] = ()
    """For a mail to several users: those whose inboxes did not take it. The others have it."""


class LeaseExpired(LimitError):
    """A leased number has expired."""

    code = "LEASE_EXPIRED"


def all_errors() -> list[type[PixiuError]]:
    """Return every class of the tree."""
    found: list[type[PixiuError]] = []
    todo: list[type[PixiuError]] = [PixiuError]
    while todo:
        error = todo.pop()
        found.append(error)
        todo.extend(error.__subclasses__())
    return found


def error_of_code(code: str, text: str, retry_after_ms: int = 0) -> PixiuError:
    """Build the error that a peer reported by its code; an unknown code becomes `RemoteError`."""
    kinds = [error for error in all_errors() if error.code == code and error is not LocalError]
    found = kinds[0](text) if kinds else RemoteError(f"{code}: {text}")
    found.retry_after_ms = retry_after_ms
    return found
