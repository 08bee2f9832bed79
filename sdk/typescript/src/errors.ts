/**
 * Errors of the SDK, in one tree; the codes are those of all languages.
 *
 *     PixiuError
 *     ├── InvalidArgument, RecordTooLarge, IdReused, IdTooOld, NotConnected, NotAuthenticated, NotAllowed, …   change the call
 *     ├── RemoteError: Unavailable (Unreachable, NotSent, …), Dropped, Undelivered, Offline, …    the other side
 *     ├── StorageError: DiskFull, StoreDamaged                                                                a disk
 *     └── LimitError: Overloaded (TopicAway), InboxFull, TooManyDevices                                       a bound
 *
 * Source: docs/sdk.md, "Errors".
 */

/** Base of all errors. `code` is stable; the message says what to do. */
export class PixiuError extends Error {
  static readonly code: string = "INTERNAL";
  /** Stable code, for programs. */
  readonly code: string;
  /** Milliseconds after which to try again; 0: not given. */
  readonly retryAfterMs: number;

  constructor(message: string, retryAfterMs = 0, code?: string) {
    super(message);
    this.name = new.target.name;
    this.code = code ?? new.target.code;
    this.retryAfterMs = retryAfterMs;
  }
}

/** The caller is at fault: change the call. */
export class LocalError extends PixiuError {
  static override readonly code: string = "INVALID_ARGUMENT";
}
/** An option is wrong; the message names it. */
export class ConfigurationError extends LocalError {
  static override readonly code = "CONFIGURATION";
}
/** An argument is wrong. */
export class InvalidArgument extends LocalError {}
/** A message is above the limit. */
export class RecordTooLarge extends LocalError {
  static override readonly code = "RECORD_TOO_LARGE";
}
/** Another message was stored under this SnowflakeID. */
export class IdReused extends LocalError {
  static override readonly code = "ID_REUSED";
}
/** The SnowflakeID is older than what the stores remember: the message may have been stored before. */
export class IdTooOld extends LocalError {
  static override readonly code = "TOO_OLD";
}
/** The SnowflakeID's time is in the future: correct the clock. */
export class IdAhead extends LocalError {
  static override readonly code = "ID_AHEAD";
}
/** Used after `close`. */
export class NotConnected extends LocalError {
  static override readonly code = "NOT_CONNECTED";
}
/** Another login of the user took the place of this one. Do not reconnect without asking the user. */
export class LoginReplaced extends LocalError {
  static override readonly code = "LOGIN_REPLACED";
}
/** No login, or one that is refused: get another token. */
export class NotAuthenticated extends LocalError {
  static override readonly code = "UNAUTHENTICATED";
}
/** The login may not do this. */
export class NotAllowed extends LocalError {
  static override readonly code = "NOT_ALLOWED";
}
/** One mail names more than 1,000 receivers. */
export class TooManyReceivers extends LocalError {
  static override readonly code = "TOO_MANY_RECEIVERS";
}
/** The user has no device of this number. */
export class UnknownDevice extends LocalError {
  static override readonly code = "UNKNOWN_DEVICE";
}
/** There is no such durable topic, or no such channel of it. */
export class UnknownTopic extends LocalError {
  static override readonly code = "UNKNOWN_TOPIC";
}
/** There is a topic of this name already; it may be in the bin. */
export class TopicExists extends LocalError {
  static override readonly code = "TOPIC_EXISTS";
}
/** Others use the topic, or a change of it is under way. */
export class TopicInUse extends LocalError {
  static override readonly code = "TOPIC_IN_USE";
}

/** The other side, or the network, is at fault. */
export class RemoteError extends PixiuError {
  static override readonly code: string = "REMOTE";
}
/** Bytes that do not follow the format. */
export class MalformedData extends RemoteError {
  static override readonly code = "MALFORMED";
}
/** A message was damaged on its way: send it again. */
export class ChecksumWrong extends RemoteError {
  static override readonly code = "CHECKSUM_WRONG";
}
/** Nobody serves this now: try again later. */
export class Unavailable extends RemoteError {
  static override readonly code: string = "UNAVAILABLE";
}
/** No process of the cluster answers at the known addresses, which the message lists. */
export class Unreachable extends Unavailable {
  static override readonly code = "UNREACHABLE";
}
/** ZooKeeper cannot be reached. */
export class RegistryUnavailable extends Unavailable {
  static override readonly code: string = "REGISTRY_UNAVAILABLE";
}
/** ZooKeeper does not let this client read. */
export class RegistryDenied extends RegistryUnavailable {
  static override readonly code = "REGISTRY_DENIED";
}
/** Certainly not sent: sending again delivers it once. */
export class NotSent extends Unavailable {
  static override readonly code = "NOT_SENT";
}
/** Nobody confirmed it in time: it may have happened or not. */
export class OutcomeUnknown extends Unavailable {
  static override readonly code = "OUTCOME_UNKNOWN";
}
/** The cluster does not accept this kind of message. */
export class NotServed extends RemoteError {
  static override readonly code = "NOT_SERVED";
}
/** A broker or relay did not confirm the message: it may have been delivered. */
export class Dropped extends RemoteError {
  static override readonly code = "DROPPED";
}
/** No gateway confirmed a signal in time: it may have been delivered. */
export class Undelivered extends RemoteError {
  static override readonly code = "UNDELIVERED";
}
/** The user has no device online: nobody received the message. */
export class Offline extends RemoteError {
  static override readonly code = "OFFLINE";
}
/** Sent to a process that does not serve the key. */
export class WrongPartition extends RemoteError {
  static override readonly code = "WRONG_PARTITION";
}
/** A newer stream of this writer is open. */
export class StaleWriter extends RemoteError {
  static override readonly code = "STALE_WRITER";
}
/** Sent to a replica that does not lead. */
export class NotLeader extends RemoteError {
  static override readonly code = "NOT_LEADER";
  /** `host:port` of the leader; empty: not known. */
  leader = "";
}
/** Fewer replicas are in sync than a replicated write needs. */
export class TooFewInSync extends RemoteError {
  static override readonly code = "TOO_FEW_IN_SYNC";
}
/** The leader has changed since the stream was opened. */
export class StaleStream extends RemoteError {
  static override readonly code = "STALE_STREAM";
}
/** The message no longer exists. */
export class Gone extends RemoteError {
  static override readonly code = "GONE";
}
/** The process is draining. */
export class Draining extends RemoteError {
  static override readonly code = "DRAINING";
}

/** A disk is at fault. */
export class StorageError extends PixiuError {
  static override readonly code: string = "STORAGE";
}
/** Nothing was written: free space, then try again. */
export class DiskFull extends StorageError {
  static override readonly code = "DISK_FULL";
}
/** A stored message cannot be read as it was written. */
export class StoreDamaged extends StorageError {
  static override readonly code = "STORE_DAMAGED";
}

/** A bound was reached. */
export class LimitError extends PixiuError {
  static override readonly code: string = "LIMIT";
}
/** Refused for now: try again after `retryAfterMs`. */
export class Overloaded extends LimitError {
  static override readonly code: string = "OVERLOADED";
}
/** The durable topic of a route does not store the message now: try again. */
export class TopicAway extends Overloaded {
  static override readonly code = "TOPIC_AWAY";
}
/** A user has eight devices: drop one. */
export class TooManyDevices extends LimitError {
  static override readonly code = "TOO_MANY_DEVICES";
}
/** An inbox is at its limit, and does not drop its oldest mail. */
export class InboxFull extends LimitError {
  static override readonly code = "INBOX_FULL";
}

const KINDS: ReadonlyMap<string, typeof PixiuError> = new Map(
  [
    ConfigurationError, InvalidArgument, RecordTooLarge, IdReused, IdTooOld, IdAhead, NotConnected, LoginReplaced, NotAuthenticated,
    NotAllowed, TooManyReceivers, UnknownDevice, UnknownTopic, TopicExists, TopicInUse, RemoteError, MalformedData, ChecksumWrong,
    Unavailable, Unreachable, RegistryUnavailable, RegistryDenied, NotSent, OutcomeUnknown, NotServed, Dropped, Undelivered, Offline, WrongPartition, StaleWriter, NotLeader,
    TooFewInSync, StaleStream, Gone, Draining, StorageError, DiskFull, StoreDamaged, LimitError, Overloaded, TopicAway, TooManyDevices,
    InboxFull,
  ].map((kind) => [kind.code, kind]),
);

/** The error that a peer reported by its code; an unknown code becomes a `RemoteError` with that code. */
export function errorOfCode(code: string, text: string, retryAfterMs = 0): PixiuError {
  const kind = KINDS.get(code);
  return kind ? new kind(text, retryAfterMs) : new RemoteError(`${code}: ${text}`, retryAfterMs, code);
}
