/**
 * The writer of a durable topic: which block goes to which leader, and what is confirmed.
 *
 *     send ──▶ slot ──▶ part ──▶ queue ──cut──▶ blocks under way ──▶ leader of the group
 *                         ▲                         │ STORED, REPEATED: confirmed
 *                         └──────── children ◀──────┤ SEALED: what is left goes on there, in the order of the writer
 *                                                   └ HOLE, refused, the stream died: again, under the same positions
 *
 * A writer numbers its messages for each part from 1, without a hole. What is not confirmed keeps its position, and is sent again until
 * it is; so nothing is stored twice, whatever dies. A child begins when everything of the parts before it is settled.
 *
 * Source: docs/topics.md, "Writing".
 */

import { randomBytes } from "node:crypto";
import { Level } from "../gen/pixiu/wire/v1/level_pb.js";
import {
  TopicLog, WriteVerdict, type TopicWriteReply, type TopicWriteReplySchema, type TopicWriteRequestSchema, type TopicWriteResult,
} from "../gen/pixiu/wire/v1/topic_pb.js";
import { InvalidArgument, NotConnected, NotSent, OutcomeUnknown, StaleWriter, Unavailable, type PixiuError } from "../errors.js";
import { slotOf, xxh3 } from "../hash.js";
import type { BidiStream, End } from "../rpc/channels.js";
import { Alarm, Changes, now, within } from "../rpc/waiting.js";
import { closedFailure, failureOf, inDoubt, Receipt, type Failure } from "../send/receipt.js";
import { encodeBlock, HEAD_BYTES, INDEX_BYTES, MAX_BLOCK_BYTES, type Encoded } from "../wire/block.js";
import { LeaderLink } from "./leaderLink.js";
import { Resumed, type Stored } from "./resumed.js";
import { isHopeless, refused, type Part, type TopicMap } from "./map.js";
import type { Follower, TopicDirectory } from "./topicDirectory.js";

/** Longest wait of a message for others of its block, while the part has a block under way. */
const LINGER_MS = 5;
const BLOCK_BYTES = 256 << 10;
/** Blocks of a part that may be unanswered; further messages wait, and share a block. */
const MAX_UNDER_WAY = 8;
/** Time after which a leader that owes an answer and is silent is left. */
const STALL_MS = 15_000;
/** Wait before a refused block is sent again, and between questions for a sealed part's children. */
const REFRESH_MS = 200;
const DEFAULT_WINDOW = 1 << 20;
/** Parts whose positions are asked for at once. */
const POSITIONS = 5_000;
const ANOTHER = "another process writes under this writer's name; end it, open the writer again, and go on after its `progress`";
const RESEND = "sending it again may store it twice";
/** Refusals that concern this block alone, and stay. */
const FINAL: ReadonlySet<string> = new Set(["INVALID_ARGUMENT", "RECORD_TOO_LARGE", "CHECKSUM_WRONG", "MALFORMED", "NOT_ALLOWED", "NOT_SERVED"]);

/** Receipt of a message to a durable topic. */
export class TopicReceipt extends Receipt {
  /** Part and offset of the message; undefined until they are known, and for a repetition whose place is known no more. */
  position: { readonly part: number; readonly offset: number } | undefined;
}

/** A message on its way. */
class TopicTicket {
  number = 0;
  at = 0;
  deadline = 0;
  attempts = 0;
  resolved = false;
  readonly size: number;

  constructor(
    readonly receipt: TopicReceipt,
    readonly encoded: Encoded,
    readonly slot: number,
    readonly level: Level,
    /** The application's number; 0n: none. */
    readonly progress: bigint,
  ) {
    this.size = INDEX_BYTES + encoded.data.length;
  }
}

/** A block under way, or to be sent again. */
class SentBlock {
  /** Its number while it is under way; 0n: it is not. */
  request = 0n;
  /** True if it is stored, while one before it is not. */
  done = false;

  constructor(
    readonly first: bigint,
    readonly tickets: readonly TopicTicket[],
    readonly data: Buffer,
  ) {}

  get last(): bigint {
    return this.first + BigInt(this.tickets.length) - 1n;
  }
}

/** Messages of a writer for one part, in order: blocks, the first of which are under way, then messages without a block. */
class PartStream {
  /** Position of the last message before `blocks`. */
  confirmed = 0n;
  /** Position of the last message that is confirmed as replicated: no leader has less. */
  safe = 0n;
  /** True if the part may have messages under positions that this process gave to others. */
  doubtful = false;
  blocks: SentBlock[] = [];
  /** Number of the first blocks that are under way. */
  sent = 0;
  queue: TopicTicket[] = [];
  queueBytes = 0;
  /** True once the part is known to be sealed for this writer: what is left goes to its children. */
  ended = false;
  /** True if the part has something of this writer, or of the parts before it. */
  touched = false;
  restUntil = 0;

  constructor(readonly part: Part) {}

  get busy(): boolean {
    return this.blocks.length > 0 || this.queue.length > 0;
  }

  /** True if a block whose positions the part has is in it, unless others had used the positions. */
  mayHave(block: SentBlock): boolean {
    return !this.doubtful || block.tickets.every((ticket) => ticket.attempts > 1);
  }

  /** Number of the first message that is not confirmed; Infinity: all are. */
  get firstNumber(): number {
    return (this.blocks[0]?.tickets[0] ?? this.queue[0])?.number ?? Infinity;
  }

  *tickets(): Generator<TopicTicket> {
    for (const block of this.blocks) {
      yield* block.tickets;
    }
    yield* this.queue;
  }

  requeue(tickets: readonly TopicTicket[]): void {
    this.queue = [...tickets, ...this.queue];
    this.queueBytes += tickets.reduce((size, ticket) => size + ticket.size, 0);
  }

  /** Put what is in blocks, none of which is under way, back to the queue, to be sent under other positions. */
  dissolve(): void {
    const tickets = this.blocks.filter((block) => !block.done).flatMap((block) => block.tickets);
    this.blocks = [];
    for (const ticket of tickets) {
      ticket.attempts = 0;
    }
    this.requeue(tickets);
  }
}

/** The stream to a group's leader. */
class GroupStream {
  stream: BidiStream<typeof TopicWriteRequestSchema, typeof TopicWriteReplySchema> | undefined;
  /** Number of its stream; 0: there is none. */
  number = 0;
  open = false;
  draining = false;
  windowBytes = 0;
  /** Bytes of blocks that are not answered. */
  underWay = 0;
  progressAt = 0;
  /** Parts with something to send or to be answered, in order of turns. */
  readonly busy = new Map<number, PartStream>();

  constructor(
    readonly group: number,
    readonly link: LeaderLink,
  ) {}
}

/** Totals of a topic writer. */
export interface TopicCounters {
  offered: number;
  confirmed: number;
  failed: number;
  blocks: number;
  /** Blocks that were sent again. */
  resent: number;
  /** Sealed parts whose rest went to their children. */
  followed: number;
  streamsOpened: number;
  streamsDied: number;
}

/** A message as it is offered. */
export interface Offered {
  readonly encoded: Encoded;
  readonly key: Uint8Array | undefined;
  readonly slot: number | undefined;
  readonly level: Level;
  readonly progress: bigint;
}

function littleEndian(number: bigint): Buffer {
  const bytes = Buffer.alloc(8);
  bytes.writeBigUInt64LE(number);
  return bytes;
}

/** What a writer needs of its client. */
export interface TopicSurroundings {
  readonly client: string;
  readonly directory: TopicDirectory;
  /** Writers, members and readers that are open; they end with the client. */
  readonly users: Set<{ close: () => Promise<void> }>;
  readonly failed: (error: PixiuError) => void;
}

/** Writes the messages of one client to one topic. */
export class TopicCore {
  readonly counters: TopicCounters = {
    offered: 0, confirmed: 0, failed: 0, blocks: 0, resent: 0, followed: 0, streamsOpened: 0, streamsDied: 0,
  };
  readonly #writer: bigint;
  /** Of a writer with a name: when it was opened, and what it had stored then. */
  #epoch = 0n;
  #resumed: Resumed | undefined;
  /** Of the last message that was offered. */
  #progress = 0n;
  readonly #touched = new Set<number>();
  readonly #groups = new Map<number, GroupStream>();
  readonly #streams = new Map<number, PartStream>();
  /** Busy streams of sealed parts, which those of their children wait for. */
  readonly #older = new Map<number, PartStream>();
  readonly #requests = new Map<bigint, { readonly stream: PartStream; readonly block: SentBlock }>();
  readonly #changes = new Changes();
  readonly #alarm = new Alarm(() => { this.#tick(); });
  readonly #follower: Follower;
  #topic!: TopicMap;
  #numbers = 0;
  #spread = Math.floor(Math.random() * 65_536);
  #spreadLeft = 0;
  #unresolved = 0;
  #unresolvedBytes = 0;
  #waiting = 0;
  #failed: Failure | undefined;
  #refreshAt = Infinity;
  #lastReason = "";
  #closed = false;

  private constructor(
    private readonly around: TopicSurroundings,
    private readonly name: string,
    writer: string,
  ) {
    this.#writer = writer ? xxh3(Buffer.from(writer)) : (randomBytes(8).readBigUInt64LE() >> 1n) | 1n;
    this.#follower = {
      onTopic: (topic) => { this.#setTopic(topic); },
      onEnd: (error) => { this.#fail(failureOf(error.code, error.message)); },
    };
  }

  /**
   * Find the topic; a writer with a name learns what it has stored. Rejects with `UnknownTopic`, `NotAllowed`, `Unavailable`, and
   * `StaleWriter` when somebody else opens the name at the same time.
   */
  static async open(around: TopicSurroundings, name: string, writer = ""): Promise<TopicCore> {
    const core = new TopicCore(around, name, writer);
    core.#topic = await around.directory.follow(name, core.#follower);
    try {
      if (writer) {
        await core.#resume(core.#topic);
      }
      core.#setTopic(await around.directory.topic(name)); // it may have changed meanwhile
    } catch (error) {
      around.directory.leave(name, core.#follower);
      throw error;
    }
    around.users.add(core);
    return core;
  }

  /** Learn what the writer has stored, and shut out those who have opened it before. */
  async #resume(topic: TopicMap): Promise<void> {
    const ask = (group: number, parts: number[], epoch: bigint) =>
      this.around.directory.askLeader(this.name, group, TopicLog.method.positions, { topic: topic.id, writer: this.#writer, parts, epoch });
    const groups = new Map<number, number[]>();
    for (const { number, group } of topic.parts.values()) {
      groups.set(group, [...(groups.get(group) ?? []), number]);
    }
    let epoch = BigInt(Date.now()) * 1000n;
    for (const group of groups.keys()) {
      const known = (await ask(group, [], 0n)).epoch;
      epoch = known >= epoch ? known + 1n : epoch;
    }
    const stored = new Map<number, Stored>();
    for (const [group, parts] of groups) {
      for (let start = 0; start < parts.length; start += POSITIONS) {
        const asked = parts.slice(start, start + POSITIONS);
        const { positions } = await ask(group, asked, epoch);
        if (positions.length !== asked.length) {
          throw new Unavailable(`topic group ${group} answered for ${positions.length} of ${asked.length} parts`);
        }
        positions.forEach(({ here, position, progress, inherited }, at) => {
          if (here) {
            stored.set(asked[at] ?? 0, { position, progress, inherited: new Map(inherited.map((each) => [each.part, each.progress])) });
          }
        });
      }
    }
    this.#epoch = epoch;
    this.#resumed = new Resumed(topic.open, topic.parts, stored);
  }

  /** The progress of a writer with a name when it opened; 0n: none. */
  get resumedAt(): bigint {
    return this.#resumed?.progress ?? 0n;
  }

  get #options() {
    return this.around.directory.options;
  }

  /** True if nothing more is taken, because the topic is gone. */
  get over(): boolean {
    return this.#closed || this.#failed !== undefined;
  }

  #hasSpace(size: number): boolean {
    const { queueRecords, queueBytes } = this.#options;
    return this.#unresolved === 0 || (this.#unresolved < queueRecords && this.#unresolvedBytes + size <= queueBytes);
  }

  /** True if a message of `size` bytes may be offered now. */
  hasSpace(size: number): boolean {
    return this.#waiting === 0 && this.#hasSpace(size);
  }

  /** Wait until a message of `size` bytes may be offered. */
  async space(size: number, signal?: AbortSignal): Promise<void> {
    if (this.hasSpace(size)) {
      return;
    }
    this.#waiting += 1;
    try {
      while (!this.over && !this.#hasSpace(size)) {
        await within(this.#changes.wait(), undefined, () => new Error(), signal);
      }
    } finally {
      this.#waiting -= 1;
    }
  }

  /** Take a message. Throws the error that ended the writer. */
  offer(receipt: TopicReceipt, { encoded, key, slot, level, progress }: Offered): void {
    if (this.#closed) {
      throw new NotConnected("the client is closed: connect again");
    }
    if (this.#failed) {
      receipt.settle(this.#failed);
      throw receipt.error as PixiuError;
    }
    const place = slot ?? (key ? slotOf(key) : progress > 0n ? slotOf(littleEndian(progress)) : this.#spreadSlot());
    if (this.#resumed && (progress > 0n || this.#progress > 0n)) {
      if (progress <= this.#progress) {
        throw new InvalidArgument(`progress rises with every message; ${progress} follows ${this.#progress}`);
      }
      this.#progress = progress;
      if (progress <= this.#resumed.of(place)) {
        receipt.settle(undefined); // it is stored
        return;
      }
    }
    const ticket = new TopicTicket(receipt, encoded, place, level, progress);
    const at = now();
    this.counters.offered += 1;
    ticket.number = this.counters.offered;
    ticket.at = at;
    ticket.deadline = at + this.#options.topicTimeoutMs;
    this.#spreadLeft -= ticket.size;
    this.#unresolved += 1;
    this.#unresolvedBytes += ticket.size;
    const stream = this.#streamOf(ticket.slot);
    stream.queue.push(ticket);
    stream.queueBytes += ticket.size;
    this.#wanted(this.#busy(stream), at);
    this.#arm(at);
  }

  /** Wait until everything offered so far is resolved. */
  async finished(signal?: AbortSignal): Promise<void> {
    while (this.#unresolved > 0) {
      await within(this.#changes.wait(), undefined, () => new Error(), signal);
    }
  }

  /** End the streams; unresolved messages fail. */
  async close(): Promise<void> {
    if (!this.#closed) {
      this.#closed = true;
      this.#alarm.cancel();
      this.around.users.delete(this);
      this.around.directory.leave(this.name, this.#follower);
      this.#giveUp((ticket) => closedFailure(ticket.attempts));
      await Promise.resolve();
    }
  }

  // --- parts and slots

  /** A slot for a message without a key: in turn by blocks, over all open parts. */
  #spreadSlot(): number {
    const { open } = this.#topic;
    if (this.#spreadLeft <= 0) {
      this.#spread += 1;
      this.#spreadLeft = BLOCK_BYTES;
    }
    const part = open[this.#spread % Math.max(1, open.length)];
    const turn = Math.floor(this.#spread / Math.max(1, open.length));
    return part ? part.low + ((turn * 40_503) % (part.high - part.low)) : 0;
  }

  #streamOf(slot: number): PartStream {
    const part = this.#topic.openPart(slot);
    let stream = this.#streams.get(part.number);
    if (!stream) {
      stream = new PartStream(part);
      if (this.#resumed) {
        stream.confirmed = stream.safe = this.#resumed.in(part.number).position;
        stream.doubtful = true;
        stream.touched = this.#isTouched(part.number);
      }
      this.#streams.set(part.number, stream);
    }
    return stream;
  }

  /** True if something of the writer is known to be in a part, or for each of its slots in the parts before it. */
  #isTouched(number: number): boolean {
    const part = this.#topic.parts.get(number);
    if (!part || !this.#resumed || this.#touched.has(number)) {
      return this.#touched.has(number);
    }
    const known = this.#resumed.in(number).position > 0n || this.#resumed.covers(part.low, part.high);
    return known || (part.parents.length > 0 && part.parents.every((parent) => this.#isTouched(parent)));
  }

  /**
   * Number of the first message of another part that has none of a writer with a name. Later ones wait until it is confirmed: so what is
   * missing in such a part after a restart is later than all that is stored.
   */
  #barrier(stream: PartStream): number {
    const named = this.#resumed !== undefined && this.#progress > 0n;
    const untouched = named ? [...this.#streams.values()].filter((each) => !each.touched && each !== stream) : [];
    return Math.min(...untouched.map((each) => each.firstNumber));
  }

  #busy(stream: PartStream): GroupStream {
    const { group } = stream.part;
    let found = this.#groups.get(group);
    if (!found) {
      const link = new LeaderLink(this.#options.backoffMs, this.#options.maxBackoffMs);
      link.setAddresses(this.#topic.groups.get(group) ?? []);
      found = new GroupStream(group, link);
      this.#groups.set(group, found);
    }
    found.busy.set(stream.part.number, stream);
    return found;
  }

  /** True while a part before this one is not settled. */
  #isBlocked(stream: PartStream): boolean {
    for (const older of this.#older.values()) {
      if (older.busy && older.part.number < stream.part.number && older.part.low < stream.part.high && stream.part.low < older.part.high) {
        return true;
      }
    }
    return false;
  }

  // --- sending

  #pump(group: GroupStream): void {
    const at = now();
    while (group.open && !group.draining && group.stream && !group.stream.full && !this.#closed) {
      const found = this.#nextBlock(group, at);
      if (!found) {
        break;
      }
      const { stream, block } = found;
      if (group.underWay > 0 && group.underWay + block.data.length > group.windowBytes) {
        break;
      }
      if (group.underWay === 0) {
        group.progressAt = at;
      }
      group.busy.delete(stream.part.number);
      group.busy.set(stream.part.number, stream); // the others first next time
      this.counters.blocks += 1;
      this.counters.resent += (block.tickets[0]?.attempts ?? 0) > 0 ? 1 : 0;
      for (const ticket of block.tickets) {
        ticket.attempts += 1;
      }
      this.#numbers += 1;
      block.request = BigInt(this.#numbers);
      this.#requests.set(block.request, { stream, block });
      stream.sent += 1;
      group.underWay += block.data.length;
      group.stream.write({
        request: block.request, block: block.data, level: block.tickets[0]?.level ?? Level.REPLICATED, epoch: this.#epoch,
      });
    }
  }

  #nextBlock(group: GroupStream, at: number): { stream: PartStream; block: SentBlock } | undefined {
    for (const [number, stream] of [...group.busy]) {
      if (!stream.busy) {
        group.busy.delete(number);
        continue;
      }
      if (stream.ended || at < stream.restUntil || stream.sent >= MAX_UNDER_WAY || this.#isBlocked(stream)) {
        continue;
      }
      const block = stream.blocks[stream.sent] ?? (this.#mayCut(stream, at) ? this.#cut(stream) : undefined);
      if (block) {
        return { stream, block };
      }
    }
    return undefined;
  }

  #mayCut(stream: PartStream, at: number): boolean {
    const first = stream.queue[0];
    return first !== undefined && (stream.sent === 0 || stream.queueBytes >= BLOCK_BYTES || at >= first.at + LINGER_MS);
  }

  /** Make a block of the first messages of a queue. */
  #cut(stream: PartStream): SentBlock | undefined {
    const taken: TopicTicket[] = [];
    const barrier = this.#barrier(stream);
    let size = HEAD_BYTES;
    let count = 0;
    for (const ticket of stream.queue) {
      if (!ticket.resolved) {
        if (ticket.number > barrier || size + ticket.size > MAX_BLOCK_BYTES || (taken[0] && ticket.level !== taken[0].level)) {
          break;
        }
        taken.push(ticket);
        size += ticket.size;
      }
      stream.queueBytes -= ticket.size;
      count += 1;
    }
    stream.queue.splice(0, count);
    if (taken.length === 0) {
      return undefined;
    }
    const first = (stream.blocks.at(-1)?.last ?? stream.confirmed) + 1n;
    const whole = this.#resumed && stream.queue.length === 0; // then the part has everything up to the last message
    const progress = whole ? this.#progress : (taken.at(-1)?.progress ?? 0n);
    const head = { topic: this.#topic.id, part: stream.part.number, writer: this.#writer, first, progress };
    const block = new SentBlock(first, taken, encodeBlock(taken, head));
    stream.blocks.push(block);
    return block;
  }

  // --- streams

  /** Open a stream if there is something to send and none is open. */
  #wanted(group: GroupStream, at: number): void {
    if (group.number > 0) {
      this.#pump(group);
      return;
    }
    const useful = [...group.busy.values()].some((stream) => stream.busy && !stream.ended);
    if (!useful || at < group.link.restUntil || this.#closed) {
      return;
    }
    const address = group.link.address();
    if (!address) {
      group.link.failed(at);
      this.around.directory.refresh(this.name);
      return;
    }
    this.#numbers += 1;
    const number = this.#numbers;
    this.counters.streamsOpened += 1;
    group.number = number;
    group.progressAt = at;
    group.stream = this.around.directory.channels.stream(address, TopicLog.method.write, {
      reply: (reply) => { this.#take(group, number, reply); },
      ended: (end) => { this.#over(group, number, end); },
      drained: () => { this.#pump(group); },
    });
    group.stream.write({ client: this.around.client });
  }

  #over(group: GroupStream, number: number, end: End): void {
    if (group.number !== number) {
      return;
    }
    if (end.refused && !group.open) {
      this.#fail(end.login ? failureOf("UNAUTHENTICATED", end.login) : failureOf("NOT_ALLOWED", end.reason));
      return;
    }
    this.counters.streamsDied += 1;
    this.#lastReason = end.reason;
    this.#leave(group, now());
    this.#arm(now());
  }

  #leave(group: GroupStream, at: number, leader = "", retryAfterMs = 0): void {
    group.stream?.cancel();
    group.stream = undefined;
    group.number = 0;
    group.open = group.draining = false;
    for (const stream of group.busy.values()) {
      this.#unsend(stream, 0);
    }
    group.underWay = 0;
    group.link.failed(at, leader, retryAfterMs);
    if (!leader) {
      this.around.directory.refresh(this.name);
    }
    this.#wanted(group, at);
  }

  #take(group: GroupStream, number: number, reply: TopicWriteReply): void {
    if (group.number !== number || this.#closed) {
      return;
    }
    const at = now();
    if (!group.open) {
      group.open = true;
      group.windowBytes = reply.windowBytes || DEFAULT_WINDOW;
      group.progressAt = at;
      group.link.answered();
    }
    for (const result of reply.results) {
      const found = this.#requests.get(result.request);
      this.#requests.delete(result.request);
      if (!found) {
        continue; // of a block that was sent again since
      }
      group.underWay -= found.block.data.length;
      group.progressAt = at;
      found.block.request = 0n;
      if (!found.block.done) {
        this.#answered(group, found.stream, found.block, result, at);
      }
      if (group.number !== number) {
        break; // it does not lead, and everything is sent again
      }
    }
    if (group.number === number && reply.draining) {
      group.draining = true;
      this.around.directory.refresh(this.name);
    }
    if (group.number === number && reply.end) {
      const error = refused(reply.end, this.name);
      if (isHopeless(error)) {
        this.#fail(failureOf(error.code, error.message, error.retryAfterMs));
        return;
      }
      this.counters.streamsDied += 1;
      this.#lastReason = `${reply.end.code}: ${reply.end.text}`;
      this.#leave(group, at, reply.end.leader, reply.end.retryAfterMs);
    } else if (group.number === number && group.draining && group.underWay === 0) {
      this.#leave(group, at);
    }
    for (const each of this.#groups.values()) {
      this.#wanted(each, at); // what waited for this may go on
    }
    this.#changes.notify();
    this.#arm(at);
  }

  #answered(group: GroupStream, stream: PartStream, block: SentBlock, result: TopicWriteResult, at: number): void {
    switch (result.verdict) {
      case WriteVerdict.WRITE_STORED:
        this.#stored(stream, block, Number(result.base));
        return;
      case WriteVerdict.WRITE_REPEATED:
        if (stream.mayHave(block)) {
          this.#stored(stream, block, Number(result.base));
        } else {
          this.#renumber(stream, result.position);
        }
        return;
      case WriteVerdict.WRITE_HOLE:
        if (result.position < stream.safe) {
          this.#lastReason = "a replica that no longer leads answered";
          this.#leave(group, at);
        } else {
          this.#catchUp(stream, result.position);
        }
        return;
      case WriteVerdict.WRITE_SEALED:
        this.#sealed(stream, result.position, at);
        return;
      case WriteVerdict.WRITE_NOT_HERE:
        if (!this.#topic.parts.has(stream.part.number)) {
          this.#sealed(stream, stream.confirmed, at);
          return;
        }
        break;
      default:
    }
    this.#refused(group, stream, block, result, at);
  }

  #sealed(stream: PartStream, position: bigint, at: number): void {
    this.#catchUp(stream, position > stream.confirmed ? position : stream.confirmed);
    if (this.#failed) {
      return;
    }
    this.#unsend(stream, 0);
    stream.dissolve();
    stream.ended = true;
    this.#older.set(stream.part.number, stream);
    this.around.directory.refresh(this.name, true);
    this.#learned(at);
  }

  #refused(group: GroupStream, stream: PartStream, block: SentBlock, result: TopicWriteResult, at: number): void {
    const { refusal } = result;
    const code = refusal?.code ?? (WriteVerdict[result.verdict] || "REFUSED");
    this.#lastReason = refusal ? `${code}: ${refusal.text}` : code;
    if (refusal && FINAL.has(code)) {
      const failure = failureOf(code, refusal.text);
      const unsure = block.tickets.some((ticket) => ticket.attempts > 1);
      for (const ticket of block.tickets) {
        this.#settle(ticket, unsure ? inDoubt(failure, RESEND) : failure);
      }
      const from = stream.blocks.indexOf(block);
      this.#unsend(stream, from); // those after it move up
      const after = stream.blocks.splice(from).flatMap((each) => (each === block ? [] : each.tickets));
      for (const ticket of after) {
        ticket.attempts = 0;
      }
      stream.requeue(after);
      return;
    }
    if (refusal && code === StaleWriter.code) {
      const refused = stream.blocks.slice(stream.blocks.indexOf(block)).flatMap((each) => each.tickets);
      this.#fail(failureOf(code, refusal.text), new Set(refused.filter((ticket) => ticket.attempts === 1)));
      return;
    }
    if (refusal && (code === "NOT_LEADER" || code === "DRAINING")) {
      this.#leave(group, at, refusal.leader, refusal.retryAfterMs);
      return;
    }
    this.#unsend(stream, stream.blocks.indexOf(block));
    stream.restUntil = at + Math.max(refusal?.retryAfterMs ?? 0, REFRESH_MS * (0.5 + 0.5 * Math.random()));
    if (result.verdict === WriteVerdict.WRITE_NOT_HERE || result.verdict === WriteVerdict.WRITE_FULL) {
      this.around.directory.refresh(this.name, true);
    }
  }

  #stored(stream: PartStream, block: SentBlock, base: number, advance = true): void {
    block.done = true;
    block.tickets.forEach((ticket, number) => {
      if (base >= 0) {
        ticket.receipt.position = { part: stream.part.number, offset: base + number };
      }
      this.#settle(ticket, undefined);
    });
    if (advance) {
      this.#advance(stream);
    }
  }

  #advance(stream: PartStream): void {
    for (let block = stream.blocks[0]; block?.done === true; block = stream.blocks[0]) {
      stream.blocks.shift();
      stream.confirmed = block.last;
      const level = block.tickets[0]?.level ?? Level.REPLICATED;
      if (level === Level.REPLICATED || level === Level.STORED) {
        stream.safe = block.last;
      }
      stream.sent = Math.max(0, stream.sent - 1);
      stream.touched = true;
      if (this.#resumed) {
        this.#touched.add(stream.part.number);
      }
    }
  }

  /** A leader has the writer's messages up to a position, and what it got does not follow: go on after it. */
  #catchUp(stream: PartStream, position: bigint): void {
    this.#unsend(stream, 0);
    for (const block of stream.blocks) {
      if (block.last > position || !(block.done || stream.mayHave(block))) {
        break;
      }
      this.#stored(stream, block, -1, false);
    }
    this.#advance(stream);
    if (stream.confirmed !== position) {
      this.#renumber(stream, position);
    }
  }

  /**
   * Give everything that is not confirmed other positions: what was confirmed at a lower level is lost. A writer with a name ends where the
   * leader has more: another process stored that, perhaps the same rows.
   */
  #renumber(stream: PartStream, position: bigint): void {
    this.#unsend(stream, 0);
    if (this.#resumed && position > stream.confirmed) {
      this.#fail(failureOf(InvalidArgument.code, ANOTHER));
      return;
    }
    stream.dissolve();
    stream.confirmed = position;
    stream.doubtful = true;
  }

  /** Blocks from this one on are not under way any more; late answers to them are passed over. */
  #unsend(stream: PartStream, first: number): void {
    const group = this.#groups.get(stream.part.group);
    for (const block of stream.blocks.slice(first, stream.sent)) {
      if (this.#requests.delete(block.request) && group) {
        group.underWay = Math.max(0, group.underWay - block.data.length);
      }
      block.request = 0n;
    }
    stream.sent = Math.min(stream.sent, first);
  }

  // --- the topic

  #setTopic(topic: TopicMap): void {
    if (this.#closed) {
      return;
    }
    if (topic.replaces(this.#topic)) {
      this.#fail(failureOf("UNKNOWN_TOPIC", topic.gone().message));
    } else {
      this.#topic = topic;
      this.#learned(now());
      this.#arm(now());
    }
  }

  /** The topic has changed, as far as is known. */
  #learned(at: number): void {
    for (const [number, group] of this.#groups) {
      group.link.setAddresses(this.#topic.groups.get(number) ?? []);
    }
    const open = new Set(this.#topic.open.map((part) => part.number));
    for (const [number, stream] of [...this.#streams]) {
      if (!open.has(number)) {
        if (stream.busy) {
          this.#older.set(number, stream);
        } else {
          this.#streams.delete(number);
        }
      }
    }
    this.#follow(at);
    for (const group of this.#groups.values()) {
      this.#wanted(group, at);
    }
  }

  /** Give what sealed parts did not take to the parts that follow them, once these are known. */
  #follow(at: number): void {
    for (const stream of [...this.#older.values()].filter((each) => each.ended)) {
      const known = this.#topic.parts.get(stream.part.number);
      if (known && !known.sealed) {
        this.#refreshAt = Math.min(this.#refreshAt, at + REFRESH_MS);
        continue;
      }
      this.counters.followed += stream.queue.length > 0 ? 1 : 0;
      const moved = new Map<PartStream, TopicTicket[]>();
      for (const ticket of stream.queue.filter((each) => !each.resolved)) {
        ticket.attempts = 0; // none of it is stored
        const child = this.#streamOf(ticket.slot);
        moved.set(child, [...(moved.get(child) ?? []), ticket]);
      }
      stream.queue = [];
      stream.queueBytes = 0;
      for (const [child, tickets] of moved) {
        child.queue = [...child.queue, ...tickets].sort((a, b) => a.number - b.number);
        child.queueBytes = child.queue.reduce((size, ticket) => size + ticket.size, 0);
        this.#busy(child);
      }
    }
    this.#tidy();
  }

  /** Forget sealed parts that are settled: those that follow them may go on. */
  #tidy(): void {
    for (const [number, stream] of [...this.#older]) {
      const known = this.#topic.parts.get(number);
      if (!stream.busy && (!known || known.sealed)) {
        this.#older.delete(number);
        this.#streams.delete(number);
      }
    }
  }

  // --- time

  #arm(at: number): void {
    if (this.#closed) {
      return;
    }
    let due = this.#refreshAt;
    for (const group of this.#groups.values()) {
      if (group.number > 0 && (!group.open || group.underWay > 0)) {
        due = Math.min(due, group.progressAt + STALL_MS);
      }
      for (const stream of group.busy.values()) {
        for (const ticket of stream.tickets()) {
          if (!ticket.resolved) {
            due = Math.min(due, ticket.deadline);
            break;
          }
        }
        if (stream.busy && group.number === 0) {
          due = Math.min(due, Math.max(group.link.restUntil, at));
        }
        if (stream.restUntil > at) {
          due = Math.min(due, stream.restUntil);
        } else if (stream.queue[0] && stream.queue[0].at + LINGER_MS > at) {
          due = Math.min(due, stream.queue[0].at + LINGER_MS);
        }
      }
    }
    this.#alarm.set(due);
  }

  #tick(): void {
    const at = now();
    this.#tidy();
    if (at >= this.#refreshAt) {
      this.#refreshAt = Infinity;
      if ([...this.#older.values()].some((stream) => stream.ended)) {
        this.#refreshAt = at + REFRESH_MS;
        this.around.directory.refresh(this.name, true);
      }
    }
    for (const group of [...this.#groups.values()]) {
      for (const stream of group.busy.values()) {
        this.#expire(stream, at);
      }
      if (group.number > 0 && (!group.open || group.underWay > 0) && at >= group.progressAt + STALL_MS) {
        this.counters.streamsDied += 1;
        this.#lastReason = `no answer for ${STALL_MS / 1000} s`;
        this.#leave(group, at);
      }
      this.#wanted(group, at);
    }
    this.#changes.notify();
    this.#arm(at);
  }

  /** Give up messages whose time is over; one that was sent keeps its position. */
  #expire(stream: PartStream, at: number): void {
    const because = this.#lastReason ? ` (last failure: ${this.#lastReason})` : "";
    for (const ticket of stream.tickets()) {
      if (ticket.resolved) {
        continue;
      }
      if (ticket.deadline > at) {
        break; // later ones have later deadlines
      }
      this.#settle(
        ticket,
        ticket.attempts > 0
          ? failureOf(OutcomeUnknown.code, `no leader confirmed the message in time${because}: it may be stored; ${RESEND}`)
          : failureOf(NotSent.code, `the message was not sent in time: no leader took it${because}; check \`pixiu status\`, then send again`),
      );
    }
    const left = stream.queue.filter((ticket) => !ticket.resolved);
    stream.queueBytes = left.reduce((size, ticket) => size + ticket.size, 0);
    stream.queue = left;
  }

  // --- ends

  #settle(ticket: TopicTicket, failure: Failure | undefined): void {
    if (ticket.resolved) {
      return;
    }
    ticket.resolved = true;
    this.#unresolved -= 1;
    this.#unresolvedBytes -= ticket.size;
    if (failure) {
      this.counters.failed += 1;
    } else {
      this.counters.confirmed += 1;
    }
    ticket.receipt.settle(failure);
    if (ticket.receipt.error && !ticket.receipt.awaited) {
      this.around.failed(ticket.receipt.error);
    }
  }

  /** End the writer. `never`: messages that were sent, and are not stored. */
  #fail(failure: Failure, never: ReadonlySet<TopicTicket> = new Set()): void {
    this.#failed = failure;
    this.#alarm.cancel();
    this.around.users.delete(this);
    this.around.directory.leave(this.name, this.#follower);
    this.#giveUp((ticket) => (ticket.attempts > 0 && !never.has(ticket) ? inDoubt(failure, RESEND) : failure));
  }

  #giveUp(why: (ticket: TopicTicket) => Failure): void {
    for (const stream of this.#streams.values()) {
      for (const ticket of stream.tickets()) {
        this.#settle(ticket, why(ticket));
      }
    }
    for (const group of this.#groups.values()) {
      group.number = 0;
      group.stream?.cancel();
    }
    this.#streams.clear();
    this.#older.clear();
    this.#groups.clear();
    this.#requests.clear();
    this.#changes.notify();
  }
}
