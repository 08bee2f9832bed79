"""Every error that Pixiu raises, in one tree.

    PixiuError
    ├── LocalError             the caller is at fault: change the call
    │   ├── ConfigurationError   an option: names the file, the key and what is allowed
    │   ├── InvalidArgument      an argument
    │   ├── RecordTooLarge       a message above the cluster's limit
    │   ├── IdReused             a SnowflakeID that another message has
    │   ├── IdTooOld             a SnowflakeID older than the window in which repeats are recognized
    │   ├── IdAhead              a SnowflakeID of a time that has not come
    │   ├── NotConnected         used before connect() or after close()
    │   ├── LoginReplaced        another login of the user took the place of this one
    │   ├── NotAuthenticated     no login, or one that is refused: get another token or password
    │   ├── NotAllowed           the login may not do this
    │   ├── TooManyReceivers     one mail names more than 1,000
    │   ├── UnknownDevice        the user has no device of this number
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
    │   ├── Offline              nobody took it: the user has no device online
    │   ├── WrongPartition       sent to a process that does not serve the key
    │   ├── OldSession           a newer session of the device was opened
    │   ├── StaleWriter          an append of a stream that a newer one replaced: open a new one
    │   ├── NotLeader            sent to a replica that does not lead: `leader` says who does
    │   ├── TooFewInSync         fewer replicas are in sync than the cluster wants for a replicated write
    │   ├── StaleStream          the leader has changed since: send again what is not confirmed
    │   ├── NotYet               no such MsgID so far: ask again
    │   ├── Gone                 the message was trimmed, or cut off before it was committed
    │   └── Draining             the process is draining: use another
    ├── StorageError           a disk is at fault
    │   ├── DiskFull             nothing was written: free space, then try again
    │   ├── DiskFailed           what was written is unknown: the process must start again
    │   ├── StoreDamaged         a stored message cannot be read as it was written
    │   ├── LogDamaged           acknowledged entries are missing or broken: repair from a peer
    │   └── StateDamaged         a value behind the log is broken: repair from a peer
    └── LimitError             a bound was reached
        ├── Overloaded           refused at the edge: try again after `retry_after_ms`
        ├── TooManyDevices       a user has eight devices: drop one
        ├── InboxFull            an inbox at its limit that does not drop its oldest
        └── LeaseExpired         a leased number has expired

Each has a `code` (stable, for programs) and a text that says what to do.
"""

from __future__ import annotations

from typing import ClassVar


class PixiuError(Exception):
    """Base of all errors. `code` is stable; `str(error)` says what happened and what to do."""

    code: ClassVar[str] = "INTERNAL"


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
    """The SnowflakeID is older than the window in which repeats are recognized. Whether it was stored before is unknown."""

    code = "TOO_OLD"


class IdAhead(LocalError):
    """The SnowflakeID's time has not come: correct the sender's clock."""

    code = "ID_AHEAD"


class NotConnected(LocalError):
    """The client is not connected."""

    code = "NOT_CONNECTED"


class LoginReplaced(LocalError):
    """Another login of the user took the place of this one, by the cluster's login policy. Do not try again by yourself: the
    two would replace each other for ever."""

    code = "LOGIN_REPLACED"


class NotAuthenticated(LocalError):
    """The cluster requires a login, and there is none, or one that it refuses: get another token or password."""

    code = "UNAUTHENTICATED"


class NotAllowed(LocalError):
    """The login may not do this. Trying again changes nothing until an operator changes the rules."""

    code = "NOT_ALLOWED"


class TooManyReceivers(LocalError):
    """One mail names more receivers than the limit."""

    code = "TOO_MANY_RECEIVERS"


class UnknownDevice(LocalError):
    """The user has no device of this number, or it was dropped: add it by its client ID."""

    code = "UNKNOWN_DEVICE"


class RemoteError(PixiuError):
    """The other side or the network is at fault."""

    code = "REMOTE"


class MalformedData(RemoteError):
    """Bytes that do not follow the format."""

    code = "MALFORMED"


class ChecksumWrong(RemoteError):
    """A message's CRC does not fit its body: it was damaged on its way. Send it again."""

    code = "CHECKSUM_WRONG"


class Unavailable(RemoteError):
    """Nobody serves this now. Its subclasses say whether something may have happened: `NotSent`, `OutcomeUnknown`."""

    code = "UNAVAILABLE"


class Unreachable(Unavailable, ConnectionError):
    """No process of the cluster answers at the addresses that are known. The text names them."""

    code = "UNREACHABLE"


class NotSent(Unavailable, ConnectionError):
    """The message has certainly not been delivered and will not be: no process took it. Sending it again delivers it once."""

    code = "NOT_SENT"


class OutcomeUnknown(Unavailable, TimeoutError):
    """Nobody confirmed it in time: it may have happened or not. Mail is stored once if it is sent again with the same ID
    (`MailWriter.resend`). `open_inboxes`: of a mail to several users those whose inboxes have it not, as far as is known."""

    code = "OUTCOME_UNKNOWN"
    open_inboxes: tuple[int, ...] = ()


class NotServed(RemoteError):
    """This proxy, or the whole cluster, does not accept this kind of message. Trying again changes nothing."""

    code = "NOT_SERVED"


class RegistryUnavailable(Unavailable, ConnectionError):
    """ZooKeeper cannot be reached. The text names the address."""

    code = "REGISTRY_UNAVAILABLE"


class RegistryDenied(RegistryUnavailable):
    """ZooKeeper does not let this login do it, or wants one. The text says what to do."""

    code = "REGISTRY_DENIED"


class Dropped(RemoteError):
    """A broker or relay did not confirm a message: it was lost on the way, or may have been delivered. Sent again with the same
    ID it is delivered once."""

    code = "DROPPED"


class Undelivered(RemoteError, TimeoutError):
    """No gateway confirmed in time that it delivered a signal."""

    code = "UNDELIVERED"


class Offline(RemoteError):
    """The user has no device online that takes messages; nobody got it, and it is not kept."""

    code = "OFFLINE"


class WrongPartition(RemoteError):
    """The process does not serve this key."""

    code = "WRONG_PARTITION"

    def __init__(self, text: str, key: int = 0) -> None:
        super().__init__(text)
        self.key = key


class OldSession(RemoteError):
    """A newer session of the device was opened: this one may neither read nor acknowledge."""

    code = "OLD_SESSION"


class StaleWriter(RemoteError):
    """The stream of appends was opened in another epoch, or its writer has opened a newer one. Open a new stream with a
    higher generation and send everything unconfirmed again, in order."""

    code = "STALE_WRITER"


class NotLeader(RemoteError):
    """The replica does not lead its partition. `leader`: host:port of the one that does; empty when nobody is known to."""

    code = "NOT_LEADER"

    def __init__(self, text: str, leader: str = "") -> None:
        super().__init__(text)
        self.leader = leader


class TooFewInSync(RemoteError):
    """Too few replicas are in sync for a write at level replicated. Nothing was written."""

    code = "TOO_FEW_IN_SYNC"


class StaleStream(RemoteError):
    """The stream was opened in an earlier epoch of the leader: send again what is not confirmed, in order."""

    code = "STALE_STREAM"


class NotYet(RemoteError):
    """No message has this MsgID so far. Ask again soon."""

    code = "NOT_YET"


class Gone(RemoteError):
    """The message is not there any more, or never was committed. It does not come back."""

    code = "GONE"


class Draining(RemoteError):
    """The process is draining: use another one."""

    code = "DRAINING"


class StorageError(PixiuError):
    """A disk is at fault."""

    code = "STORAGE"


class DiskFull(StorageError):
    """There is no space. Nothing was written; the same call works when there is some."""

    code = "DISK_FULL"


class DiskFailed(StorageError):
    """Writing or syncing failed. What is on the disk is unknown: nothing more is written by this process."""

    code = "DISK_FAILED"


class StoreDamaged(StorageError):
    """A stored message is not as it was written. Nothing of it is given out; the text says what to do."""

    code = "STORE_DAMAGED"


class LogDamaged(StorageError):
    """A log's entry is missing or broken. The text says which. `last`: the last counter of its segment; 0: not known."""

    code = "LOG_DAMAGED"

    def __init__(self, text: str, last: int = 0) -> None:
        super().__init__(text)
        self.last = last


class StateDamaged(StorageError):
    """A value of a store's state is broken. The text says which."""

    code = "STATE_DAMAGED"


class LimitError(PixiuError):
    """A bound was reached."""

    code = "LIMIT"


class Overloaded(LimitError):
    """Refused at the edge."""

    code = "OVERLOADED"

    def __init__(self, text: str, retry_after_ms: int = 0) -> None:
        super().__init__(text)
        self.retry_after_ms = retry_after_ms


class TooManyDevices(LimitError):
    """The user has as many devices as are allowed: drop one first."""

    code = "TOO_MANY_DEVICES"


class InboxFull(LimitError):
    """The inbox is at its limit, and full inboxes are to be refused: acknowledge first."""

    code = "INBOX_FULL"
    open_inboxes: tuple[int, ...] = ()
    """Of a mail to several users: whose inboxes did not take it. The others have it."""


class LeaseExpired(LimitError):
    """A leased number has expired."""

    code = "LEASE_EXPIRED"


def all_errors() -> list[type[PixiuError]]:
    """Every class of the tree."""
    found: list[type[PixiuError]] = []
    todo: list[type[PixiuError]] = [PixiuError]
    while todo:
        error = todo.pop()
        found.append(error)
        todo.extend(error.__subclasses__())
    return found


def error_of_code(code: str, text: str, retry_after_ms: int = 0) -> PixiuError:
    """The error that a peer reported by its code; an unknown code becomes `RemoteError`."""
    if code == Overloaded.code:
        return Overloaded(text, retry_after_ms)
    for error in all_errors():
        if error.code == code and error is not LocalError:
            return error(text)
    return RemoteError(f"{code}: {text}")
