/**
 * Reads a durable topic without a channel.
 *
 *     start ──▶ parts of the topic, each from an offset or a time
 *     part 1 ──sealed, read to its end──▶ finished ──▶ its children, once all of their parents are
 *
 * Source: docs/topics.md, "Reading".
 */

import { TopicLog, type TopicReadReply } from "../gen/pixiu/wire/v1/topic_pb.js";
import { InvalidArgument, MalformedData, NotConnected, PixiuError, Unavailable } from "../errors.js";
import { Backoff } from "../rpc/backoff.js";
import { Changes, now, sleep } from "../rpc/waiting.js";
import { aborted, passes, type LoadTest } from "../receive/subscription.js";
import { baseOf, storedMessages, type TopicMessage } from "../wire/block.js";
import type { Part, TopicMap } from "./map.js";
import type { Follower } from "./topicDirectory.js";
import type { TopicSurroundings } from "./writer.js";

/** Parts that are read at a time; others wait until one of them is finished. */
const MAX_READ = 256;
/** Lists of messages that wait for the application. */
const BUFFER_BATCHES = 8;
const READ_BYTES = 1 << 20;
const LEAST_READ_BYTES = 64 << 10;
const UNDER_WAY_BYTES = 16 << 20;
const WAIT_MS = 10_000;
/** How long a part may have no leader. */
const UNREADABLE_MS = 60_000;

/** Messages of a part that are missing: retention dropped them, or nobody can read them. */
export interface TopicGap {
  readonly part: number;
  /** Offsets [low, high). */
  readonly low: number;
  readonly high: number;
}

/** {part: offset of the next message}; JSON can have it. */
export type ReaderPosition = Readonly<Record<string, number>>;

/** Where a reader begins, and what it gets. */
export interface ReaderOptions {
  /** Default: `"earliest"`. A `Date`: the first block that was stored then or later. */
  readonly start?: "earliest" | "latest" | Date | ReaderPosition;
  /** Default: `"block"`. */
  readonly loadTest?: LoadTest;
  /** Called for messages that are missing. */
  readonly onGap?: (gap: TopicGap) => void;
}

type Where = { readonly case: "offset"; readonly value: bigint } | { readonly case: "timeUs"; readonly value: bigint } | { readonly case: "end"; readonly value: true };
const at = (offset: number): Where => ({ case: "offset", value: BigInt(offset) });

/** A part as a reader has it. */
interface PartRead {
  part: Part;
  where: Where;
  /** Offset of the next message that the application gets; undefined: not known yet. */
  next: number | undefined;
  /** True if it begins with whatever is kept: what was dropped before is no gap. */
  first: boolean;
  finished: boolean;
  reading: boolean;
}

interface Batch {
  readonly part: number;
  readonly messages: readonly TopicMessage[];
  /** Offset after them. */
  readonly next: number;
  readonly gap: TopicGap | undefined;
  readonly finished: boolean;
}

/** Reads a topic: `for await (const message of reader)`. Messages of a key come in order. `DurableTopic.reader` makes one. */
export class TopicReader implements AsyncIterable<TopicMessage>, AsyncDisposable {
  readonly #parts = new Map<number, PartRead>();
  /** Parts that were read before. */
  readonly #before = new Set<number>();
  readonly #changed = new Changes();
  readonly #ending = new AbortController();
  readonly #tasks = new Set<Promise<void>>();
  readonly #batches: Batch[] = [];
  readonly #follower: Follower;
  #topic: TopicMap | undefined;
  #opening: Promise<void> | undefined;
  #batch: Batch | undefined;
  #taken = 0;
  #error: PixiuError | undefined;

  /** Made by `DurableTopic.reader`. */
  constructor(
    private readonly around: TopicSurroundings,
    private readonly name: string,
    private readonly given: ReaderOptions,
  ) {
    this.#follower = { onTopic: (topic) => { this.#onTopic(topic); }, onEnd: (error) => { this.#fail(error); } };
  }

  /** Find the topic and begin to read; iterating does it. Rejects with `UnknownTopic`, `NotAllowed`, `Unavailable`. */
  async open(): Promise<this> {
    this.#opening ??= this.#open();
    await this.#opening;
    return this;
  }

  /** {part: offset of the next message}: everything before was returned. `start` of another reader takes it. */
  get position(): ReaderPosition {
    const found: Record<string, number> = {};
    for (const [number, each] of this.#parts) {
      if (each.next !== undefined || each.part.parents.every((parent) => this.#isDone(parent))) {
        found[number] = each.next ?? 0;
      }
    }
    return found;
  }

  /** The next message; undefined once the reader is closed. Rejects with the error that ended the reader, or the signal's reason. */
  async next(signal?: AbortSignal): Promise<TopicMessage | undefined> {
    await aborted(this.open(), signal);
    while (!this.#ending.signal.aborted) {
      const message = this.#batch?.messages[this.#taken];
      if (message && this.#batch) {
        this.#taken += 1;
        const part = this.#parts.get(message.part);
        if (part) {
          part.next = message.offset + 1;
        }
        if (this.#taken === this.#batch.messages.length) {
          this.#done(this.#batch);
        }
        return message;
      }
      const batch = this.#batches.shift();
      if (batch) {
        this.#changed.notify(); // there is space
        this.#batch = batch;
        this.#taken = 0;
        if (batch.gap) {
          this.given.onGap?.(batch.gap);
        }
        if (batch.messages.length === 0) {
          this.#done(batch);
        }
      } else if (this.#error) {
        throw this.#error;
      } else {
        await aborted(this.#changed.wait(), signal);
      }
    }
    return undefined;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<TopicMessage, void, undefined> {
    for (let message = await this.next(); message; message = await this.next()) {
      yield message;
    }
  }

  /** Stop reading. */
  async close(): Promise<void> {
    if (!this.#ending.signal.aborted) {
      this.#ending.abort(new NotConnected("the reader is closed: open another one"));
      this.around.users.delete(this);
      this.around.directory.leave(this.name, this.#follower);
      this.#changed.notify();
      await Promise.all(this.#tasks);
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // --- parts

  async #open(): Promise<void> {
    const topic = await this.around.directory.follow(this.name, this.#follower);
    try {
      this.#beginAt(topic);
      const unplaced = [...this.#parts.values()].filter((each) => each.where.case !== "offset");
      await Promise.all(unplaced.map(async (each) => {
        const reply = await this.#ask(each, each.where, 1, 0);
        const base = each.where.case === "end" ? undefined : baseOf(Buffer.from(reply.blocks));
        each.next = base ?? Number(reply.next);
        each.where = at(each.next);
      }));
      this.#ending.signal.throwIfAborted();
    } catch (error) {
      this.around.directory.leave(this.name, this.#follower);
      throw error;
    }
    this.#topic = topic;
    this.around.users.add(this);
    this.#onTopic(await this.around.directory.topic(this.name));
  }

  #beginAt(topic: TopicMap): void {
    const { start = "earliest" } = this.given;
    if (start === "earliest" || start === "latest" || start instanceof Date) {
      const where: Where =
        start === "earliest" ? at(0) : start === "latest" ? { case: "end", value: true } : { case: "timeUs", value: BigInt(start.getTime()) * 1000n };
      for (const part of topic.parts.values()) {
        if (start === "latest" && part.sealed) {
          this.#before.add(part.number);
        } else {
          this.#add(part, where, undefined, start === "earliest");
        }
      }
      return;
    }
    const offsets = new Map(Object.entries(start).map(([part, offset]) => [Number(part), offset]));
    for (const [number, offset] of offsets) {
      if (!Number.isInteger(number) || !Number.isSafeInteger(offset) || offset < 0) {
        throw new InvalidArgument("a position is {part: offset}, as `reader.position` gives it");
      }
    }
    if (offsets.size > 0 && ![...offsets.keys()].some((number) => topic.parts.has(number))) {
      throw new InvalidArgument(`the topic ${this.name} has no part of this position: it is of another topic, or too old`);
    }
    const todo = [...offsets.keys()].flatMap((number) => topic.parts.get(number)?.parents ?? []);
    for (let number = todo.pop(); number !== undefined; number = todo.pop()) {
      const part = topic.parts.get(number);
      if (part && !this.#before.has(number) && !offsets.has(number)) {
        this.#before.add(number);
        todo.push(...part.parents);
      }
    }
    for (const [number, offset] of offsets) {
      const part = topic.parts.get(number);
      if (part) {
        this.#add(part, at(offset), offset, false);
      }
    }
  }

  #add(part: Part, where: Where, next: number | undefined, first: boolean): void {
    this.#parts.set(part.number, { part, where, next, first, finished: false, reading: false });
  }

  #onTopic(topic: TopicMap): void {
    if (!this.#topic || this.#ending.signal.aborted) {
      return;
    }
    if (topic.replaces(this.#topic)) {
      this.#fail(topic.gone());
      return;
    }
    this.#topic = topic;
    for (const [number, part] of topic.parts) {
      const known = this.#parts.get(number);
      if (known) {
        known.part = part;
      } else if (!this.#before.has(number)) {
        this.#add(part, at(0), undefined, false);
      }
    }
    this.#begin();
  }

  /** True if a part was read, or is kept no more. */
  #isDone(number: number): boolean {
    return this.#parts.get(number)?.finished ?? true;
  }

  #begin(): void {
    for (const each of this.#parts.values()) {
      const ready = !each.reading && !each.finished && each.part.parents.every((parent) => this.#isDone(parent));
      if (ready && this.#tasks.size < MAX_READ) {
        each.reading = true;
        const task = this.#read(each).finally(() => this.#tasks.delete(task));
        this.#tasks.add(task);
      }
    }
  }

  /** The application has a batch. */
  #done(batch: Batch): void {
    const each = this.#parts.get(batch.part);
    if (!each) {
      return;
    }
    each.next = batch.next;
    if (batch.finished) {
      each.finished = true;
      each.reading = false;
      // Forget finished parts whose children are all being read, or were.
      for (const [number, known] of this.#parts) {
        const children = this.#topic?.children(number) ?? [];
        const begun = (child: Part): boolean => this.#before.has(child.number) || child.parents.every((parent) => this.#isDone(parent));
        if (known.finished && children.length > 0 && children.every(begun)) {
          this.#parts.delete(number);
          this.#before.add(number);
        }
      }
      this.#begin();
    }
  }

  // --- reading

  #fail(error: PixiuError): void {
    this.#error ??= error;
    this.#changed.notify();
  }

  /** Read one part until it is finished. */
  async #read(each: PartRead): Promise<void> {
    const { signal } = this.#ending;
    const backoff = new Backoff(this.around.directory.options.backoffMs, 1_000);
    let where = each.where.case === "offset" ? Number(each.where.value) : 0;
    try {
      for (let finished = false; !finished && !signal.aborted; ) {
        while (this.#batches.length >= BUFFER_BATCHES && !signal.aborted) {
          await this.#changed.wait();
        }
        const began = now();
        const limit = Math.min(READ_BYTES, Math.max(LEAST_READ_BYTES, Math.floor(UNDER_WAY_BYTES / Math.max(1, this.#tasks.size))));
        const reply = await this.#ask(each, at(where), limit, WAIT_MS);
        const before = where;
        where = Math.max(Number(reply.next), where);
        finished = reply.sealed && where >= Number(reply.committedEnd);
        this.#take(each, before, where, finished, reply);
        if (where === before && !finished && now() < began + WAIT_MS / 2) {
          await sleep(backoff.next(), signal); // a leader that does not wait
        }
      }
      this.around.directory.refresh(this.name);
    } catch (error) {
      if (!signal.aborted) {
        this.#fail(error instanceof PixiuError ? error : new Unavailable(String(error)));
      }
    }
  }

  #ask(each: PartRead, start: Where, maxBytes: number, waitMs: number): Promise<TopicReadReply> {
    const request = { topic: this.name, part: each.part.number, start, maxBytes, waitMs };
    const times = { callMs: WAIT_MS + 5_000, limitMs: WAIT_MS + UNREADABLE_MS, signal: this.#ending.signal };
    return this.around.directory.askLeader(this.name, each.part.group, TopicLog.method.read, request, times);
  }

  #take(each: PartRead, low: number, next: number, finished: boolean, reply: TopicReadReply): void {
    const part = each.part.number;
    const blocks = Buffer.from(reply.blocks.buffer, reply.blocks.byteOffset, reply.blocks.length);
    let messages: TopicMessage[];
    try {
      messages = storedMessages(this.name, part, blocks, low).filter((message) => passes(this.given.loadTest ?? "block", message.loadTest));
    } catch (error) {
      throw error instanceof MalformedData ? new Unavailable(error.message) : error;
    }
    let gap: TopicGap | undefined;
    if (reply.gapHigh > reply.gapLow && !(each.first && reply.gapHigh <= reply.first)) {
      gap = { part, low: Number(reply.gapLow), high: Number(reply.gapHigh) };
    }
    each.first = false;
    if (messages.length > 0 || gap || finished || next !== low) {
      this.#batches.push({ part, messages, next, gap, finished });
      this.#changed.notify();
    }
  }
}
