/**
 * The record: the one form of a message from its publisher to its subscribers. All numbers are little-endian.
 *
 *     0 u32 size of what follows | 4 u8 kind | 5 u8 flags | 6 u8 type, its top two bits the lane | 7 u8 extension version
 *     8 u16 extension length | 10 u16 lifetime, minutes | 12 u32 CRC-32 of extension and body | 16 u64 SnowflakeID
 *     24 u64 RoomID or UIN | 32 u64 sender's UIN | 40 extension, body, with flag 1 the trace trailer
 *
 * Source: docs/protocol.md, "Record".
 */

import { crc32 } from "node:zlib";
import { InvalidArgument, MalformedData, RecordTooLarge } from "../errors.js";
import { snowflakeTimeMs } from "../ids.js";
import { decodeHeaders, type Headers } from "./headers.js";

export const HEADER_BYTES = 40;
export const Kind = { ROOM: 1, SIGNAL: 2, CHAT: 3, MAIL: 4 } as const;
export const Flag = { TRACED: 1, LOAD_TEST: 2, TO_ROOM: 4, TOPIC: 16, DERIVED_ID: 32 } as const;
export const LANES = 4;
const STAMP_BYTES = 24;
const TYPE_BITS = 6;

/** A message before it has an ID. */
export interface Draft {
  readonly kind: number;
  readonly flags: number;
  /** RoomID or UIN. */
  readonly key: bigint;
  readonly body: Uint8Array;
  /** The application's type and the lane. */
  readonly type: number;
  readonly lifetimeMinutes: number;
  readonly extension: Uint8Array;
}

/** Bytes of a draft's record. */
export const sizeOf = (draft: Draft): number => HEADER_BYTES + draft.extension.length + draft.body.length;

/** The type byte of an application's type in a lane, 0 first. Throws `InvalidArgument`. */
export function typeOf(type: number, firstLane: boolean): number {
  if (!Number.isInteger(type) || type < 0 || type >= 1 << TYPE_BITS) {
    throw new InvalidArgument(`a type is from 0 to 63, not ${type}`);
  }
  return (firstLane ? 0 : 1 << TYPE_BITS) | type;
}

/** Check the limits of a draft. Throws `RecordTooLarge`, `InvalidArgument`. */
export function checkDraft(draft: Draft, limit: number): Draft {
  if (sizeOf(draft) > limit) {
    throw new RecordTooLarge(`a record of ${sizeOf(draft)} bytes is above the limit of ${limit}; send a reference to the content instead`);
  }
  if (draft.extension.length > 0xffff) {
    throw new InvalidArgument(`an extension has at most 65535 bytes, this one ${draft.extension.length}`);
  }
  return draft;
}

/** Encode a record. */
export function encode(draft: Draft, id: bigint, sender: bigint): Buffer {
  const record = Buffer.allocUnsafe(sizeOf(draft));
  record.writeUInt32LE(record.length - 4, 0);
  record[4] = draft.kind;
  record[5] = draft.flags;
  record[6] = draft.type;
  record[7] = draft.extension.length > 0 ? 1 : 0;
  record.writeUInt16LE(draft.extension.length, 8);
  record.writeUInt16LE(draft.lifetimeMinutes, 10);
  record.writeBigUInt64LE(id, 16);
  record.writeBigUInt64LE(draft.key, 24);
  record.writeBigUInt64LE(sender, 32);
  record.set(draft.extension, HEADER_BYTES);
  record.set(draft.body, HEADER_BYTES + draft.extension.length);
  record.writeUInt32LE(crc32(record.subarray(HEADER_BYTES)), 12);
  return record;
}

/** A body that begins with a topic's name, for flag TOPIC. */
export function withTopic(topic: string, body: Uint8Array): Buffer {
  const name = Buffer.from(topic, "utf8");
  const size = Buffer.allocUnsafe(2);
  size.writeUInt16BE(name.length);
  return Buffer.concat([size, name, body]);
}

/** A message as a subscriber or an inbox gets it. */
export class Message {
  /** RoomID; for a free topic that of the room which carries it; 0 for a message to a user. */
  readonly room: bigint;
  /** UIN of the user it was sent to; 0 for a message to a room or topic. */
  readonly user: bigint;
  /** Name of the free topic; undefined for a message to a room or user. */
  readonly topic: string | undefined;
  /** UIN of the sender; 0 for a service. */
  readonly sender: bigint;
  /** The sender's SnowflakeID of the message. */
  readonly id: bigint;
  /** The application's type, 0 to 63. */
  readonly type: number;
  /** The lane: 0 overtakes 1. */
  readonly lane: number;
  /** Bytes that were sent. */
  readonly body: Uint8Array;
  /** Bytes beside the body: its headers, encoded, or another format. */
  readonly extension: Uint8Array;
  /** Lifetime in minutes; 0: none. */
  readonly lifetimeMinutes: number;
  /** True if it was sent as a signal. */
  readonly signal: boolean;
  /** True if it belongs to a load test. */
  readonly loadTest: boolean;
  /** Unix milliseconds of sending; 0 if its ID holds no time. */
  readonly sentAtMs: number;

  /** Decode one whole record. Throws `MalformedData` when lengths, the CRC or the topic's name are wrong. */
  constructor(record: Buffer) {
    if (record.length < HEADER_BYTES) {
      throw new MalformedData(`a record has at least ${HEADER_BYTES} bytes, this one ${record.length}`);
    }
    const kind = record.readUInt8(4);
    const flags = record.readUInt8(5);
    const type = record.readUInt8(6);
    let start = HEADER_BYTES + record.readUInt16LE(8);
    const end = flags & Flag.TRACED ? record.length - 1 - STAMP_BYTES * record.readUInt8(record.length - 1) : record.length;
    if (start > end || crc32(record.subarray(HEADER_BYTES, end)) !== record.readUInt32LE(12)) {
      throw new MalformedData("the record's lengths or its CRC are wrong: it was damaged on the way");
    }
    this.extension = record.subarray(HEADER_BYTES, start);
    if (flags & Flag.TOPIC) {
      const name = start + 2;
      start = name <= end ? name + record.readUInt16BE(start) : end + 1;
      if (start > end) {
        throw new MalformedData("the topic's name does not fit into the record");
      }
      this.topic = record.toString("utf8", name, start);
    }
    const key = record.readBigUInt64LE(24);
    const toUser = kind !== Kind.ROOM && !(flags & Flag.TO_ROOM);
    this.room = toUser ? 0n : key;
    this.user = toUser ? key : 0n;
    this.sender = record.readBigUInt64LE(32);
    this.id = record.readBigUInt64LE(16);
    this.type = type & ((1 << TYPE_BITS) - 1);
    this.lane = type >> TYPE_BITS;
    this.body = record.subarray(start, end);
    this.lifetimeMinutes = record.readUInt16LE(10);
    this.signal = kind === Kind.SIGNAL;
    this.loadTest = (flags & Flag.LOAD_TEST) !== 0;
    this.sentAtMs = flags & Flag.DERIVED_ID ? 0 : snowflakeTimeMs(this.id);
  }

  /** Where it was sent, as an MQTT topic: `room/42`, `user/7`, or the free topic's name. */
  get destination(): string {
    return this.topic ?? (this.user ? `user/${this.user}` : `room/${this.room}`);
  }

  /** Headers; empty if it has none. Decoded at each access. */
  get headers(): Headers {
    return decodeHeaders(this.extension);
  }

  /** The body as UTF-8. */
  text(): string {
    return Buffer.from(this.body.buffer, this.body.byteOffset, this.body.length).toString("utf8");
  }

  /** True if its lifetime is over at a time, Unix milliseconds. */
  isOver(nowMs: number): boolean {
    return this.lifetimeMinutes > 0 && this.sentAtMs > 0 && nowMs >= this.sentAtMs + this.lifetimeMinutes * 60_000;
  }
}

/** Split a batch of `count` records; undefined if it is malformed. */
export function split(batch: Buffer, count: number): Buffer[] | undefined {
  const found: Buffer[] = [];
  let at = 0;
  for (let number = 0; number < count; number += 1) {
    const end = at + HEADER_BYTES <= batch.length ? at + 4 + batch.readUInt32LE(at) : 0;
    if (end < at + HEADER_BYTES || end > batch.length) {
      return undefined;
    }
    found.push(batch.subarray(at, end));
    at = end;
  }
  return at === batch.length ? found : undefined;
}

/** Messages of a batch, and how many damaged ones were left out. */
export function messagesOf(batch: Buffer, count: number): { messages: Message[]; damaged: number } {
  const messages: Message[] = [];
  let damaged = 0;
  for (const record of split(batch, count) ?? []) {
    try {
      messages.push(new Message(record));
    } catch {
      damaged += 1;
    }
  }
  return { messages, damaged: count > 0 && messages.length + damaged === 0 ? count : damaged };
}
