/**
 * The block: messages of one writer for one part of a durable topic, as they are sent, stored and read.
 *
 *     0 u16 "PB" | 2 u8 version | 3 u8 joined flags | 4 u32 size | 8 u32 CRC-32 from 12 on | 12 u32 topic | 16 u32 part
 *     20 u32 count | 24 u64 writer | 32 u64 position of the first message | 40 u64 progress | 48 index, messages
 *
 * The index has 8 bytes a message: u32 end, u16 slot, u8 flags, u8 0. A stored block follows a stamp of 32 bytes: u32 size, u32 CRC,
 * u64 offset of the first message, u64 Unix µs of storing, u64 sender.
 *
 * Source: docs/topics.md, "Blocks".
 */

import { crc32 } from "node:zlib";
import { InvalidArgument, MalformedData } from "../errors.js";

export const HEAD_BYTES = 48;
export const INDEX_BYTES = 8;
export const MAX_BLOCK_BYTES = 1 << 20;
export const SLOTS = 65_536;
const STAMP_BYTES = 32;
const MAGIC = 0x4250;
const HOLE = 2;
const MAX_HEADERS = 64;
const F = { LOAD_TEST: 1, TAG: 2, DELIVER_AT: 4, EXPIRES: 8, KEY: 16, HEADERS: 32, EVENT_TIME: 64 } as const;

/** A message of a topic before it is in a block. */
export interface TopicDraft {
  readonly body: Uint8Array;
  readonly key: Uint8Array | undefined;
  readonly headers: readonly (readonly [string, Uint8Array])[];
  readonly eventTimeUs: bigint | undefined;
  readonly deliverAtUs: bigint | undefined;
  readonly expiresInS: number | undefined;
  readonly tag: string | undefined;
  readonly loadTest: boolean;
}

/** A message as a block holds it, without its slot. */
export interface Encoded {
  readonly flags: number;
  readonly data: Buffer;
}

const u64 = (value: bigint): Buffer => {
  const made = Buffer.allocUnsafe(8);
  made.writeBigUInt64LE(value);
  return made;
};

/** Encode one message. Throws `InvalidArgument` for a field out of range. */
export function encodeMessage(message: TopicDraft): Encoded {
  let flags = message.loadTest ? F.LOAD_TEST : 0;
  const parts: Uint8Array[] = [];
  if (message.eventTimeUs !== undefined) {
    flags |= F.EVENT_TIME;
    parts.push(u64(message.eventTimeUs));
  }
  if (message.deliverAtUs !== undefined) {
    flags |= F.DELIVER_AT;
    parts.push(u64(message.deliverAtUs));
  }
  if (message.expiresInS !== undefined) {
    const seconds = Buffer.allocUnsafe(4);
    seconds.writeUInt32LE(message.expiresInS);
    flags |= F.EXPIRES;
    parts.push(seconds);
  }
  if (message.tag !== undefined) {
    const tag = Buffer.from(message.tag, "utf8");
    if (tag.length < 1 || tag.length > 100) {
      throw new InvalidArgument(`a tag has 1 to 100 bytes, this one ${tag.length}`);
    }
    flags |= F.TAG;
    parts.push(Buffer.from([tag.length]), tag);
  }
  if (message.key !== undefined) {
    if (message.key.length > 4096) {
      throw new InvalidArgument(`a key has at most 4096 bytes, this one ${message.key.length}`);
    }
    const size = Buffer.allocUnsafe(2);
    size.writeUInt16LE(message.key.length);
    flags |= F.KEY;
    parts.push(size, message.key);
  }
  if (message.headers.length > 0) {
    if (message.headers.length > MAX_HEADERS) {
      throw new InvalidArgument(`a message has at most ${MAX_HEADERS} headers, this one ${message.headers.length}`);
    }
    flags |= F.HEADERS;
    parts.push(Buffer.from([message.headers.length]));
    for (const [name, value] of message.headers) {
      const encoded = Buffer.from(name, "utf8");
      if (encoded.length < 1 || encoded.length > 255 || value.length > 0xffff) {
        throw new InvalidArgument(`the header ${JSON.stringify(name)}: a name has 1 to 255 bytes, a value at most 65535`);
      }
      const head = Buffer.allocUnsafe(3);
      head[0] = encoded.length;
      head.writeUInt16LE(value.length, 1);
      parts.push(head, encoded, value);
    }
  }
  parts.push(message.body);
  return { flags, data: Buffer.concat(parts) };
}

/** Make a block. `first`: position of its first message in the writer's stream to the part. */
export function encodeBlock(
  messages: readonly { readonly slot: number; readonly encoded: Encoded }[],
  head: { readonly topic: number; readonly part: number; readonly writer: bigint; readonly first: bigint; readonly progress?: bigint },
): Buffer {
  const start = HEAD_BYTES + INDEX_BYTES * messages.length;
  const block = Buffer.alloc(start + messages.reduce((size, each) => size + each.encoded.data.length, 0));
  let end = 0;
  let joined = 0;
  messages.forEach(({ slot, encoded }, number) => {
    block.set(encoded.data, start + end);
    end += encoded.data.length;
    joined |= encoded.flags;
    const at = HEAD_BYTES + INDEX_BYTES * number;
    block.writeUInt32LE(end, at);
    block.writeUInt16LE(slot, at + 4);
    block[at + 6] = encoded.flags;
  });
  block.writeUInt16LE(MAGIC, 0);
  block[2] = 1;
  block[3] = joined;
  block.writeUInt32LE(block.length, 4);
  block.writeUInt32LE(head.topic, 12);
  block.writeUInt32LE(head.part, 16);
  block.writeUInt32LE(messages.length, 20);
  block.writeBigUInt64LE(head.writer, 24);
  block.writeBigUInt64LE(head.first, 32);
  block.writeBigUInt64LE(head.progress ?? 0n, 40);
  block.writeUInt32LE(crc32(block.subarray(12)), 8);
  return block;
}

/** Fields that the messages of a stored block have in common. */
export interface Origin {
  readonly topic: string;
  readonly part: number;
  /** Unix µs of storing. */
  readonly timeUs: number;
  readonly sender: bigint;
  readonly writer: bigint;
}

/** A message of a durable topic. */
export class TopicMessage {
  /** Name of the topic. */
  readonly topic: string;
  /** Number of the part that stored it. */
  readonly part: number;
  /** Offset in its part. */
  readonly offset: number;
  /** Logical partition, 0 to 65535: messages of one stay in order. */
  readonly slot: number;
  /** UIN of the writer's login; 0 for a service. */
  readonly sender: bigint;
  /** ID of the writer. */
  readonly writer: bigint;
  /** Unix µs of storing. */
  readonly timeUs: number;
  /** Unix µs at which it happened, as its writer says; undefined if it does not. */
  readonly eventTimeUs: number | undefined;
  readonly tag: string | undefined;
  readonly key: Uint8Array | undefined;
  readonly headers: ReadonlyMap<string, Uint8Array>;
  readonly body: Uint8Array;
  readonly loadTest: boolean;

  /** Throws `MalformedData` if the fields do not fit in [at, end). */
  constructor(origin: Origin, offset: number, data: Buffer, at: number, end: number, slot: number, flags: number) {
    this.topic = origin.topic;
    this.part = origin.part;
    this.offset = offset;
    this.slot = slot;
    this.sender = origin.sender;
    this.writer = origin.writer;
    this.timeUs = origin.timeUs;
    this.loadTest = (flags & F.LOAD_TEST) !== 0;
    const headers = new Map<string, Uint8Array>();
    try {
      if (flags & F.EVENT_TIME) {
        this.eventTimeUs = Number(data.readBigUInt64LE(at));
        at += 8;
      }
      at += (flags & F.DELIVER_AT ? 8 : 0) + (flags & F.EXPIRES ? 4 : 0);
      if (flags & F.TAG) {
        this.tag = data.toString("utf8", at + 1, at + 1 + data.readUInt8(at));
        at += 1 + data.readUInt8(at);
      }
      if (flags & F.KEY) {
        const size = data.readUInt16LE(at);
        this.key = data.subarray(at + 2, at + 2 + size);
        at += 2 + size;
      }
      if (flags & F.HEADERS) {
        let left = data.readUInt8(at);
        at += 1;
        for (; left > 0; left -= 1) {
          const name = data.readUInt8(at);
          const value = data.readUInt16LE(at + 1);
          headers.set(data.toString("utf8", at + 3, at + 3 + name), data.subarray(at + 3 + name, at + 3 + name + value));
          at += 3 + name + value;
        }
      }
    } catch {
      at = end + 1;
    }
    if (at > end) {
      throw new MalformedData(`the message at ${origin.part}:${offset} was damaged on its way`);
    }
    this.headers = headers;
    this.body = data.subarray(at, end);
  }

  /** The body as UTF-8. */
  text(): string {
    return Buffer.from(this.body.buffer, this.body.byteOffset, this.body.length).toString("utf8");
  }

  /** The key as UTF-8; undefined if it has none. */
  keyText(): string | undefined {
    return this.key && Buffer.from(this.key.buffer, this.key.byteOffset, this.key.length).toString("utf8");
  }
}

/** Messages of a delivery to a channel's member. Throws `MalformedData`. */
export function spans(index: Buffer, data: Buffer): { at: number; end: number; slot: number; flags: number }[] {
  const found = [];
  let at = 0;
  for (let place = 0; place + INDEX_BYTES <= index.length; place += INDEX_BYTES) {
    const end = index.readUInt32LE(place);
    if (end < at || end > data.length) {
      throw new MalformedData("the index of a delivery does not fit its messages");
    }
    found.push({ at, end, slot: index.readUInt16LE(place + 4), flags: index.readUInt8(place + 6) });
    at = end;
  }
  return found;
}

/** Offset of the first message of stored blocks; undefined if there is none. */
export function baseOf(blocks: Buffer): number | undefined {
  return blocks.length >= STAMP_BYTES ? Number(blocks.readBigUInt64LE(8)) : undefined;
}

/** Messages of stored blocks from an offset on. Throws `MalformedData`. */
export function storedMessages(topic: string, part: number, blocks: Buffer, low: number): TopicMessage[] {
  const found: TopicMessage[] = [];
  for (let at = 0; at < blocks.length; ) {
    const begin = at + STAMP_BYTES;
    const size = begin + HEAD_BYTES <= blocks.length ? blocks.readUInt32LE(at) : 0;
    const block = blocks.subarray(begin, begin + size);
    if (size < HEAD_BYTES + INDEX_BYTES || block.length !== size || block.readUInt16LE(0) !== MAGIC || block.readUInt32LE(4) !== size) {
      throw new MalformedData(`blocks of part ${part} of ${topic} were damaged on the way`);
    }
    const stamp = crc32(block.subarray(8, 12), crc32(blocks.subarray(at + 8, begin)));
    if (stamp !== blocks.readUInt32LE(at + 4) || crc32(block.subarray(12)) !== block.readUInt32LE(8)) {
      throw new MalformedData(`a block of part ${part} of ${topic} has a wrong CRC: it was damaged on the way`);
    }
    const base = Number(blocks.readBigUInt64LE(at + 8));
    if (block.readUInt8(2) !== HOLE) {
      const origin: Origin = {
        topic,
        part,
        timeUs: Number(blocks.readBigUInt64LE(at + 16)),
        sender: blocks.readBigUInt64LE(at + 24),
        writer: block.readBigUInt64LE(24),
      };
      const count = block.readUInt32LE(20);
      const start = HEAD_BYTES + INDEX_BYTES * count;
      if (start > size) {
        throw new MalformedData(`the index of a block of part ${part} of ${topic} does not fit`);
      }
      spans(block.subarray(HEAD_BYTES, start), block.subarray(start)).forEach((span, number) => {
        if (base + number >= low) {
          found.push(new TopicMessage(origin, base + number, block, start + span.at, start + span.end, span.slot, span.flags));
        }
      });
    }
    at = begin + size;
  }
  return found;
}
