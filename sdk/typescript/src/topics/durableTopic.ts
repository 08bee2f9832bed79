/** One durable topic: writing, reading, channels. Source: docs/sdk.md, "Durable topics"; docs/topics.md. */

import { Level } from "../gen/pixiu/wire/v1/level_pb.js";
import { TopicLog } from "../gen/pixiu/wire/v1/topic_pb.js";
import { InvalidArgument, Overloaded, RecordTooLarge, Unavailable, UnknownTopic, WrongPartition } from "../errors.js";
import { slotOf } from "../hash.js";
import { progressOf, type Id } from "../ids.js";
import { late, within, type CallOptions } from "../rpc/waiting.js";
import { encodeMessage, HEAD_BYTES, INDEX_BYTES, MAX_BLOCK_BYTES, SLOTS, spans, TopicMessage } from "../wire/block.js";
import type { TopicAdmin, TopicInfo } from "./admin.js";
import { checkName, type TopicMap } from "./map.js";
import { ChannelMember, type ChannelOptions } from "./member.js";
import { TopicReader, type ReaderOptions } from "./reader.js";
import { TopicCore, TopicReceipt, type Offered, type TopicSurroundings } from "./writer.js";

/** Text is sent as UTF-8. */
export type Body = Uint8Array | string;

/** When a message is confirmed: on all replicas in sync, on the leader's disk, in the leader's log, or also in the object store. */
export type TopicLevel = "replicated" | "persisted" | "accepted" | "stored";
const LEVELS: Readonly<Record<TopicLevel, Level>> = {
  replicated: Level.REPLICATED, persisted: Level.PERSISTED, accepted: Level.ACCEPTED, stored: Level.STORED,
};
const MAX_ROUNDS = 10;

/** Options of a message to a durable topic. */
export interface TopicSendOptions {
  /** Messages with the same key stay in order; at most 4,096 bytes. */
  readonly key?: Body;
  /** Named values, at most 64. */
  readonly headers?: Readonly<Record<string, Body>>;
  /** Logical partition, 0 to 65535; default: that of the key, without a key in turn. */
  readonly slot?: number;
  /** When it happened. */
  readonly eventTime?: Date;
  /** From when on channels deliver it, at most a year ahead; readers get it at once. */
  readonly deliverAt?: Date;
  /** Seconds after which channels no longer deliver it. */
  readonly expiresInS?: number;
  /** Goes to members of a channel with this tag, if there are any. */
  readonly tag?: string;
  readonly loadTest?: boolean;
  /** Default: `"replicated"`. */
  readonly level?: TopicLevel;
  /** The application's own number, which rises with every message, for writers with a name. */
  readonly progress?: Id;
}

/** Bytes of a body; text as UTF-8. Throws `InvalidArgument`. */
export function bytesOf(body: Body): Uint8Array {
  if (typeof body === "string") {
    return Buffer.from(body, "utf8");
  }
  if (body instanceof Uint8Array) {
    return body;
  }
  throw new InvalidArgument("a body is a Uint8Array or a string");
}

interface Draft extends Offered {
  readonly size: number;
}

function draftOf(body: Body, given: TopicSendOptions): Draft {
  const { slot, expiresInS, level = "replicated" } = given;
  if (slot !== undefined && (!Number.isInteger(slot) || slot < 0 || slot >= SLOTS)) {
    throw new InvalidArgument(`a slot is from 0 to ${SLOTS - 1}, not ${slot}`);
  }
  if (expiresInS !== undefined && (!Number.isInteger(expiresInS) || expiresInS < 1 || expiresInS > 0xffffffff)) {
    throw new InvalidArgument(`expiresInS is a number of seconds from 1 on, not ${expiresInS}`);
  }
  if (!(level in LEVELS)) {
    throw new InvalidArgument(`a level is one of ${Object.keys(LEVELS).join(", ")}, not ${JSON.stringify(level)}`);
  }
  const micros = (date: Date | undefined): bigint | undefined => (date ? BigInt(date.getTime()) * 1000n : undefined);
  const key = given.key === undefined ? undefined : bytesOf(given.key);
  const encoded = encodeMessage({
    body: bytesOf(body), key, headers: Object.entries(given.headers ?? {}).map(([name, value]) => [name, bytesOf(value)] as const),
    eventTimeUs: micros(given.eventTime), deliverAtUs: micros(given.deliverAt), expiresInS, tag: given.tag, loadTest: given.loadTest ?? false,
  });
  const size = INDEX_BYTES + encoded.data.length;
  if (HEAD_BYTES + size > MAX_BLOCK_BYTES) {
    throw new RecordTooLarge(`a message of ${size} bytes, headers and key included, is above the limit of ${MAX_BLOCK_BYTES - HEAD_BYTES}`);
  }
  return { encoded, key, slot, level: LEVELS[level], progress: progressOf(given.progress ?? 0n), size };
}

function checkNamed(draft: Draft, name: string): void {
  if (draft.progress > 0n && !name) {
    throw new InvalidArgument("progress is kept for writers with a name: topic.writer({ name: … })");
  }
}

/** What a topic needs of its client. */
export interface TopicContext extends TopicSurroundings {
  readonly admin: TopicAdmin;
  /** The client's writer of a topic. Messages with the same key of one client are stored in the order of the calls. */
  readonly writer: (topic: string) => Promise<TopicCore>;
}

/** A durable topic: a log that is stored and replicated. */
export class DurableTopic {
  /** Made by `Client.durableTopic`. */
  constructor(
    private readonly around: TopicContext,
    readonly name: string,
  ) {
    checkName(name);
  }

  /**
   * Write a message, and wait until it is confirmed at its level. `signal` and `timeoutMs` end the wait, and not the message. Rejects with
   * `UnknownTopic`, `NotSent`, `OutcomeUnknown`, and the errors of its arguments.
   */
  async send(body: Body, options: TopicSendOptions & CallOptions = {}): Promise<TopicReceipt> {
    const draft = draftOf(body, options);
    checkNamed(draft, "");
    const core = await this.around.writer(this.name);
    await core.space(draft.size, options.signal);
    const receipt = new TopicReceipt();
    core.offer(receipt, draft);
    await within(receipt.confirmed(), options.timeoutMs, late("the message was not confirmed in time: it may be stored"), options.signal);
    return receipt;
  }

  /**
   * Open a writer, which sends many messages without waiting for each. One with a `name` stores nothing twice over restarts of its program:
   * go on after its `progress`. One process at a time may use a name: the one that opens it last goes on, an earlier one ends with
   * `StaleWriter`.
   */
  async writer(options: { readonly name?: string } = {}): Promise<TopicWriter> {
    const name = options.name === undefined ? "" : checkName(options.name, "topic's writer");
    return new TopicWriter(await (name ? TopicCore.open(this.around, this.name, name) : this.around.writer(this.name)), name);
  }

  /** A reader of everything, without a channel. The cluster keeps nothing of it. */
  reader(options: ReaderOptions = {}): TopicReader {
    return new TopicReader(this.around, this.name, options);
  }

  /** A member of a channel: every channel gets everything, and its members share the work. */
  channel(channel: string, options: ChannelOptions = {}): ChannelMember {
    checkName(channel, "channel");
    return new ChannelMember(this.around, this.name, channel, options, async () => {
      const topic = await this.around.directory.describe(this.name);
      const known = topic.channels.get(channel);
      if (!known) {
        if (options.create === false) {
          throw new UnknownTopic(`the topic ${this.name} has no channel '${channel}': client.topics.setChannel makes it`);
        }
        return (await this.around.admin.setChannel(this.name, channel, options)).version;
      }
      if (options.ordered !== undefined && known.ordered !== options.ordered) {
        throw new InvalidArgument(`the channel ${channel} of ${this.name} is ${known.ordered ? "" : "not "}ordered, which cannot be changed`);
      }
      return topic.version;
    });
  }

  /** The last message of a key of a compacted topic; undefined: there is none, or the key was deleted by a message without a body. */
  async last(key: Body, { slot, signal }: { readonly slot?: number; readonly signal?: AbortSignal } = {}): Promise<TopicMessage | undefined> {
    const wanted = bytesOf(key);
    const at = slot ?? slotOf(wanted);
    let topic: TopicMap = await this.around.directory.topic(this.name);
    for (let round = 0; round < MAX_ROUNDS; round += 1) {
      let changed = false;
      for (let part = topic.open.find((each) => each.low <= at && at < each.high); part && !changed; part = topic.parent(part, at)) {
        try {
          const request = { topic: this.name, part: part.number, key: wanted };
          const reply = await this.around.directory.askLeader(this.name, part.group, TopicLog.method.last, request, { signal });
          changed = reply.sealed && !part.sealed; // its children may have a newer one
          if (!changed && reply.known) {
            const found = reply.message;
            const data = Buffer.from(found?.data ?? []);
            const [span] = found ? spans(Buffer.from(found.index), data) : [];
            const origin = { topic: this.name, part: part.number, timeUs: Number(found?.timeUs ?? 0), sender: found?.sender ?? 0n, writer: found?.writer ?? 0n };
            return span && new TopicMessage(origin, Number(found?.base), data, span.at, span.end, span.slot, span.flags);
          }
        } catch (error) {
          if (!(error instanceof WrongPartition)) {
            throw error;
          }
          changed = true;
        }
      }
      if (!changed) {
        return undefined;
      }
      topic = await this.around.directory.describe(this.name, topic.version, signal);
    }
    throw new Unavailable(`the parts of topic ${this.name} change all the time; try again`);
  }

  /** Describe the topic. Rejects with `UnknownTopic`. */
  describe(): Promise<TopicInfo> {
    return this.around.admin.describe(this.name);
  }
}

/** Writes many messages without waiting for each. Messages with the same key, or slot, are stored in the order of the calls. */
export class TopicWriter implements AsyncDisposable {
  readonly #receipts = new Set<TopicReceipt>();
  #failure: TopicReceipt | undefined;

  /** Made by `DurableTopic.writer`. */
  constructor(
    private readonly core: TopicCore,
    readonly name: string,
  ) {}

  /**
   * The number up to which everything was stored when a writer with a name opened; 0n: begin with the first message. Later ones may be
   * stored in part: the writer knows which, and passes over them.
   */
  get progress(): bigint {
    return this.core.resumedAt;
  }

  /** Queue a message, waiting while the queue is full. Resolves to its receipt. */
  async send(body: Body, options: TopicSendOptions & Pick<CallOptions, "signal"> = {}): Promise<TopicReceipt> {
    const draft = draftOf(body, options);
    checkNamed(draft, this.name);
    await this.core.space(draft.size, options.signal);
    return this.#offer(draft);
  }

  /** Queue a message now. Throws `Overloaded` when too much is unconfirmed. */
  sendSoon(body: Body, options: TopicSendOptions = {}): TopicReceipt {
    const draft = draftOf(body, options);
    checkNamed(draft, this.name);
    if (!this.core.hasSpace(draft.size)) {
      throw new Overloaded("too many messages are not confirmed: await send, which waits for space");
    }
    return this.#offer(draft);
  }

  #offer(draft: Draft): TopicReceipt {
    const receipt = new TopicReceipt();
    this.core.offer(receipt, draft);
    this.#receipts.add(receipt);
    void receipt
      .confirmed()
      .catch(() => { this.#failure ??= receipt; })
      .finally(() => this.#receipts.delete(receipt));
    return receipt;
  }

  /** Wait until everything that this writer sent is confirmed. Rejects with the first failure since the last call. */
  async finished(signal?: AbortSignal): Promise<void> {
    await within(Promise.allSettled([...this.#receipts].map((receipt) => receipt.confirmed())), undefined, () => new Error(), signal);
    const failure = this.#failure?.error;
    this.#failure = undefined;
    if (failure) {
      throw failure;
    }
  }

  /** Wait until everything is confirmed, as `finished`, and end a writer with a name. */
  async close(): Promise<void> {
    try {
      await this.finished();
    } finally {
      if (this.name) {
        await this.core.close();
      }
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }
}
