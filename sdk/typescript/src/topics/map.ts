/** A topic's parts and where they are, as a client knows them. Source: docs/topics.md, "Slots, parts and their lineage". */

import { status as Status } from "@grpc/grpc-js";
import { PartState, type TopicDescription, type TopicRefusal } from "../gen/pixiu/wire/v1/topic_pb.js";
import {
  errorOfCode, InvalidArgument, LimitError, NotAllowed, NotAuthenticated, NotLeader, NotServed, OutcomeUnknown, TopicExists, TopicInUse,
  Unavailable, UnknownTopic, type PixiuError,
} from "../errors.js";
import type { CallError } from "../rpc/channels.js";

/** A contiguous range of slots of a topic, stored together under offsets of its own. */
export interface Part {
  readonly number: number;
  /** The slots [low, high). */
  readonly low: number;
  readonly high: number;
  readonly group: number;
  /** Sealed parts that held its slots before. */
  readonly parents: readonly number[];
  readonly sealed: boolean;
}

/** A channel of a topic. */
export interface ChannelInfo {
  readonly name: string;
  /** True: the messages of a key come one batch after the other. */
  readonly ordered: boolean;
  readonly fromEnd: boolean;
  /** Deliveries before a message goes to the dead letters. */
  readonly maxAttempts: number;
  /** Time for which a member may keep a message. */
  readonly timeoutMs: number;
  readonly filter: string;
}

/** Settings of a topic; 0, empty or false: not set. */
export interface TopicSettingsInfo {
  readonly retentionS: number;
  readonly retentionBytes: number;
  readonly messagesPerS: number;
  readonly bytesPerS: number;
  readonly readMessagesPerS: number;
  readonly readBytesPerS: number;
  readonly retainAcknowledged: boolean;
  /** Seconds for which a tombstone of a compacted topic is kept; 0: it is not compacted. */
  readonly compactS: number;
  readonly store: string;
}

/** One version of a topic's description. */
export class TopicMap {
  readonly name: string;
  readonly id: number;
  readonly version: bigint;
  /** Parts by number, without those that are only planned. */
  readonly parts: ReadonlyMap<number, Part>;
  /** Open parts by their slots. */
  readonly open: readonly Part[];
  /** Client addresses of each group's replicas, the leader first if it is known. */
  readonly groups: ReadonlyMap<number, readonly string[]>;
  readonly channels: ReadonlyMap<string, ChannelInfo>;
  readonly settings: TopicSettingsInfo;
  readonly deleted: boolean;

  constructor(found: TopicDescription) {
    this.name = found.name;
    this.id = found.topic;
    this.version = found.version;
    const parts = found.parts
      .filter((part) => part.state !== PartState.PART_OPENING)
      .map(({ number, low, high, group, parents, state }): Part => ({ number, low, high, group, parents, sealed: state === PartState.PART_SEALED }));
    this.parts = new Map(parts.sort((a, b) => a.number - b.number).map((part) => [part.number, part]));
    this.open = parts.filter((part) => !part.sealed).sort((a, b) => a.low - b.low);
    this.groups = new Map(found.groups.map((group) => [group.group, group.addresses]));
    this.channels = new Map(
      found.channels.map(({ name, ordered, fromEnd, maxAttempts, timeoutMs, filter }) => [
        name, { name, ordered, fromEnd, maxAttempts, timeoutMs, filter },
      ]),
    );
    const settings = found.settings;
    this.settings = {
      retentionS: Number(settings?.retentionS ?? 0),
      retentionBytes: Number(settings?.retentionBytes ?? 0),
      messagesPerS: Number(settings?.messagesPerS ?? 0),
      bytesPerS: Number(settings?.bytesPerS ?? 0),
      readMessagesPerS: Number(settings?.readMessagesPerS ?? 0),
      readBytesPerS: Number(settings?.readBytesPerS ?? 0),
      retainAcknowledged: settings?.retainAcknowledged ?? false,
      compactS: Number(settings?.compact ?? 0),
      store: settings?.store ?? "",
    };
    this.deleted = found.deletedAtMs > 0n;
  }

  /** The part that takes what is written to a slot. Throws `Unavailable` if the description has none. */
  openPart(slot: number): Part {
    const found = this.open.find((part) => part.low <= slot && slot < part.high);
    if (!found) {
      throw new Unavailable(`the description of topic ${this.name} has no open part for slot ${slot}; try again`);
    }
    return found;
  }

  /** The parts that took over the slots of a sealed part. */
  children(number: number): Part[] {
    return [...this.parts.values()].filter((part) => part.parents.includes(number));
  }

  /** The part that held a slot before this one; undefined if there was none, or it is gone. */
  parent(part: Part, slot: number): Part | undefined {
    return part.parents.map((each) => this.parts.get(each)).find((each) => each && each.low <= slot && slot < each.high);
  }

  /** True if the other topic is gone: this one was deleted, or has only the same name. */
  replaces(other: TopicMap): boolean {
    return this.id !== other.id || this.deleted;
  }

  /** The error for those who used the topic that this one replaces. */
  gone(): PixiuError {
    const back = this.deleted ? `; \`pixiu topic restore ${this.name}\` brings it back within a day` : "";
    return new UnknownTopic(`the topic ${this.name} was deleted${back}`);
  }
}

/** Check the name of a topic or channel. Throws `InvalidArgument`. */
export function checkName(name: string, what = "topic"): string {
  if (typeof name !== "string" || !/^[A-Za-z0-9._-]{1,128}$/.test(name)) {
    throw new InvalidArgument(`the name of a durable ${what} is 1 to 128 of A-Z a-z 0-9 . _ -, not ${JSON.stringify(name)}`);
  }
  return name;
}

/** The error for a topic that is not there. */
function unknown(name: string, text: string): PixiuError {
  const hint = `there is no topic '${name}': \`pixiu topic create ${name}\` makes it, or \`px.topics.create("${name}")\``;
  return new UnknownTopic(text.includes("pixiu topic") ? text : text ? `${text} (${hint})` : hint);
}

/** The error of a refusal. */
export function refused(found: Pick<TopicRefusal, "code" | "text" | "retryAfterMs" | "leader">, name: string): PixiuError {
  if (found.code === UnknownTopic.code || found.code === "NOT_FOUND") {
    return unknown(name, found.text);
  }
  const error = errorOfCode(found.code, found.text, found.retryAfterMs);
  if (error instanceof NotLeader) {
    error.leader = found.leader;
  }
  return error;
}

const KINDS: ReadonlyMap<Status, new (text: string) => PixiuError> = new Map<Status, new (text: string) => PixiuError>([
  [Status.INVALID_ARGUMENT, InvalidArgument],
  [Status.ALREADY_EXISTS, TopicExists],
  [Status.FAILED_PRECONDITION, TopicInUse],
  [Status.OUT_OF_RANGE, LimitError],
  [Status.PERMISSION_DENIED, NotAllowed],
  [Status.UNAUTHENTICATED, NotAuthenticated],
  [Status.RESOURCE_EXHAUSTED, LimitError],
]);

/** The error of a call that failed. `final`: every proxy answers alike. */
export function errorOfCall(error: CallError, name: string): { error: PixiuError; final: boolean } {
  const { status, reason } = error.end;
  const details = reason.replace(/^[A-Z_]+: /, "");
  if (status === Status.NOT_FOUND) {
    return { error: unknown(name, details), final: true };
  }
  if (status === Status.UNIMPLEMENTED) {
    return { error: new NotServed("this proxy serves no durable topics: it is of an older version, or the address of another role"), final: false };
  }
  const kind = KINDS.get(status);
  if (kind) {
    return { error: new kind(details), final: status !== Status.RESOURCE_EXHAUSTED };
  }
  const unsure = status === Status.DEADLINE_EXCEEDED || status === Status.ABORTED || status === Status.CANCELLED;
  return { error: unsure ? new OutcomeUnknown(reason) : new Unavailable(reason), final: false };
}

/** True if another stream is useless after this error. */
export function isHopeless(error: PixiuError): boolean {
  const kinds = [NotAllowed, NotAuthenticated, InvalidArgument, NotServed, LimitError, UnknownTopic];
  return kinds.some((kind) => error instanceof kind) && error.code !== "OVERLOADED";
}
