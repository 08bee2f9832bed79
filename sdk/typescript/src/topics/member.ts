/**
 * A member of a channel: gets messages, each one until it is acknowledged, and shares the work with the other members.
 *
 *     leader ──messages──▶ held ──ack, nack──▶ to report ──one report for each part and turn──▶ leader ──committed──▶ outcome
 *                           └── the stream died: nothing of it counts any more, and all of it comes again
 *
 * Source: docs/topics.md, "Channels".
 */

import {
  LoadTest as WireLoadTest, TopicLog, type ConsumeReply, type ConsumeReplySchema, type ConsumeRequestSchema, type ReportResult,
} from "../gen/pixiu/wire/v1/topic_pb.js";
import { InvalidArgument, MalformedData, NotAllowed, NotAuthenticated, NotConnected, type PixiuError } from "../errors.js";
import type { BidiStream, End } from "../rpc/channels.js";
import { Alarm, Changes, deferred, now, within, type CallOptions, type Deferred } from "../rpc/waiting.js";
import { aborted, loadTestOf, type LoadTest } from "../receive/subscription.js";
import { spans, TopicMessage, type Origin } from "../wire/block.js";
import { LeaderLink } from "./leaderLink.js";
import { isHopeless, refused, type TopicMap } from "./map.js";
import type { Follower } from "./topicDirectory.js";
import type { TopicSurroundings } from "./writer.js";

const MAX_CREDIT = 10_000;
const MAX_DELAY_MS = 30 * 24 * 3_600_000;
/** Refusals after which a report is made again. */
const AGAIN: ReadonlySet<string> = new Set(["OUTCOME_UNKNOWN", "OVERLOADED", "TOO_FEW_IN_SYNC", "UNAVAILABLE"]);
const REPORT_AGAIN_MS = 200;
/** Reports of a stream that are not answered; what is to be reported waits, and shares a report. */
const MAX_REPORTS = 100;
/** Rejected messages of a report; others are in the next one, because each has a text. */
const MAX_REJECTED = 500;
const REJOIN_SOON_MS = 2_000;
/** Time after which a group that was left is joined again: a seek may have gone back into its sealed parts. */
const REJOIN_MS = 60_000;
/** A message that waits in the member is kept by a report at this share of the channel's time-out. */
const TOUCH_SHARE = 3;
const CLOSE_GRACE_MS = 1_000;

/** How a member joins its channel. */
export interface ChannelOptions {
  /** Messages that the member may have and has not reported; default 100. */
  readonly credit?: number;
  /** Gets messages with this tag; default: an untagged member. */
  readonly tag?: string;
  /** Default: `"block"`. */
  readonly loadTest?: LoadTest;
  /** Make the channel if it is missing, with the options after this one; they do not change one that is there. Default: true. */
  readonly create?: boolean;
  /** True: the messages of a key come one batch after the other. Default: as the channel is; false if it is made now. */
  readonly ordered?: boolean;
  /** Begin with what is stored from now on; default: with everything that is kept. */
  readonly fromEnd?: boolean;
  /** Deliveries before a message goes to the dead letters; default: the cluster's. */
  readonly maxAttempts?: number;
  /** Time for which a member may keep a message; default: the cluster's. */
  readonly timeoutMs?: number;
  /** Which messages the channel gets, such as `headers["region"] == "eu"`; default: all. */
  readonly filter?: string;
}

/** A delay in ms, a reason for a rejection, or undefined for an acknowledgement. */
type How = number | string | undefined;

/** Messages of one part that a member has. */
class PartHeld {
  readonly unreported = new Map<number, ChannelMessage>();
  toReport = new Map<number, { readonly how: How; readonly message: ChannelMessage }>();
  readonly touched = new Set<number>();
  readonly reporting = new Map<bigint, ReadonlyMap<number, { readonly how: How; readonly message: ChannelMessage }>>();

  get due(): boolean {
    return this.toReport.size > 0 || this.touched.size > 0;
  }
}

/** The stream to a group's leader. */
class MemberStream {
  stream: BidiStream<typeof ConsumeRequestSchema, typeof ConsumeReplySchema> | undefined;
  /** 0: there is none. */
  number = 0;
  answered = false;
  /** As the leader knows it. */
  credit = 0;
  restUntil = 0;
  readonly parts = new Map<number, PartHeld>();

  constructor(readonly link: LeaderLink) {}

  get underWay(): number {
    return [...this.parts.values()].reduce((count, held) => count + held.reporting.size, 0);
  }
}

/** A message that a channel's member has until it is acknowledged, refused or taken back. */
export class ChannelMessage extends TopicMessage {
  /** Deliveries, this one included: 1 the first time. */
  readonly attempts: number;
  /** Called when a report of it is answered. */
  outcome: Deferred<boolean> | undefined;

  /** Made by a member. */
  constructor(
    private readonly member: ChannelMember,
    readonly streamNumber: number,
    attempts: number,
    ...fields: ConstructorParameters<typeof TopicMessage>
  ) {
    super(...fields);
    this.attempts = attempts;
  }

  /**
   * Acknowledge the message, and wait until that is committed: then the channel never delivers it again. False: it is no longer this
   * member's, because its time was over, or its leader changed. It comes again, to whomever, unless another member has dealt with it, or
   * the leader ended between the commit and its answer. So false is no reason to undo what was done. Rejects with `NotConnected` when the
   * member is closed.
   */
  ack(call: CallOptions = {}): Promise<boolean> {
    return this.member.report(this, undefined, call);
  }

  /** Acknowledge without waiting; `ChannelMember.flush` waits for all. */
  ackSoon(): void {
    this.member.reportSoon(this, undefined);
  }

  /** Give the message back: it is delivered again after `delayMs`, or goes to the dead letters if its attempts are used up. As `ack`. */
  nack(delayMs = 0, call: CallOptions = {}): Promise<boolean> {
    if (!(delayMs >= 0 && delayMs <= MAX_DELAY_MS)) {
      throw new InvalidArgument(`a delay is from 0 to ${MAX_DELAY_MS} ms, not ${delayMs}`);
    }
    return this.member.report(this, Math.ceil(delayMs), call);
  }

  /** Send the message to the channel's dead letters, because no attempt can succeed. `reason`: a sentence, of which 256 bytes are kept. */
  reject(reason: string, call: CallOptions = {}): Promise<boolean> {
    return this.member.report(this, reason, call);
  }

  /** Ask for the channel's whole time-out again, because handling the message takes long. */
  touch(): void {
    this.member.touch(this);
  }
}

/**
 * A member of a channel: `for await (const message of member) { …; await message.ack(); }`. It joins the leaders of all groups that hold
 * the topic's parts, also those that come later, and joins again by itself. `DurableTopic.channel` makes one; it has to be closed,
 * because it keeps its messages from the other members.
 */
export class ChannelMember implements AsyncIterable<ChannelMessage>, AsyncDisposable {
  readonly #groups = new Map<number, MemberStream>();
  readonly #finished = new Set<number>();
  readonly #waiting: ChannelMessage[] = [];
  readonly #arrived = new Changes();
  readonly #alarm = new Alarm(() => { this.#tick(); });
  readonly #follower: Follower;
  readonly #credit: number;
  readonly #loadTest: WireLoadTest;
  #topic: TopicMap | undefined;
  #opening: Promise<void> | undefined;
  #toucher: NodeJS.Timeout | undefined;
  #rejoinAt = Infinity;
  #numbers = 0;
  #error: PixiuError | undefined;
  #closed = false;

  /** Made by `DurableTopic.channel`. */
  constructor(
    private readonly around: TopicSurroundings,
    private readonly name: string,
    private readonly channel: string,
    private readonly given: ChannelOptions,
    private readonly prepare: () => Promise<bigint>,
  ) {
    this.#credit = given.credit ?? 100;
    if (!Number.isInteger(this.#credit) || this.#credit < 1 || this.#credit > MAX_CREDIT) {
      throw new InvalidArgument(`credit is from 1 to ${MAX_CREDIT}, not ${this.#credit}`);
    }
    const kinds = { block: WireLoadTest.BLOCK, pass: WireLoadTest.PASS, only: WireLoadTest.ONLY };
    this.#loadTest = kinds[loadTestOf(given.loadTest)];
    this.#follower = { onTopic: (topic) => { this.#setTopic(topic); }, onEnd: (error) => { this.#fail(error); } };
  }

  /** Find the topic, make the channel if it is missing, and join; iterating does it. */
  async open(): Promise<this> {
    this.#opening ??= this.#open();
    await this.#opening;
    return this;
  }

  async #open(): Promise<void> {
    const version = await this.prepare();
    const topic = await this.around.directory.follow(this.name, this.#follower, version);
    if (this.#closed) {
      this.around.directory.leave(this.name, this.#follower);
      throw new NotConnected("the member is closed: open another one");
    }
    this.#topic = topic;
    this.around.users.add(this);
    const timeoutMs = topic.channels.get(this.channel)?.timeoutMs ?? 0;
    if (timeoutMs > 0) {
      this.#toucher = setInterval(() => { this.#waiting.forEach((message) => { this.touch(message); }); }, timeoutMs / TOUCH_SHARE);
    }
    this.#setTopic(topic);
  }

  /** The next message; undefined once the member is closed. Rejects with the error that ended the member, or the signal's reason. */
  async next(signal?: AbortSignal): Promise<ChannelMessage | undefined> {
    await aborted(this.open(), signal);
    while (!this.#closed) {
      for (let message = this.#waiting.shift(); message; message = this.#waiting.shift()) {
        if (this.#heldOf(message)) {
          return message;
        }
      }
      if (this.#error) {
        throw this.#error;
      }
      await aborted(this.#arrived.wait(), signal);
    }
    return undefined;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<ChannelMessage, void, undefined> {
    for (let message = await this.next(); message; message = await this.next()) {
      yield message;
    }
  }

  /** Wait until everything that was reported is answered. */
  async flush(call: CallOptions = {}): Promise<void> {
    const late = (): Error => new NotConnected("no leader answered the reports in time: what they did not get comes again");
    const until = now() + (call.timeoutMs ?? this.around.directory.options.joinTimeoutMs);
    while (!this.#closed && [...this.#groups.values()].some((stream) => [...stream.parts.values()].some((held) => held.reporting.size + held.toReport.size > 0))) {
      await within(this.#arrived.wait(), until - now(), late, call.signal);
    }
  }

  /** Send the last reports (at most a second) and leave. What is not acknowledged comes again, to whomever. */
  async close(): Promise<void> {
    if (this.#closed) {
      return;
    }
    this.around.users.delete(this);
    if (this.#topic && !this.#error) {
      await this.flush({ timeoutMs: CLOSE_GRACE_MS }).catch(() => undefined);
    }
    this.#closed = true;
    this.around.directory.leave(this.name, this.#follower);
    clearInterval(this.#toucher);
    this.#alarm.cancel();
    const streams = [...this.#groups.values()].map(({ stream }) => stream);
    for (const stream of streams) {
      stream?.halfClose(); // the leader gives the rest to others at once
    }
    await within(Promise.all(streams.map((stream) => stream?.closed ?? Promise.resolve())), CLOSE_GRACE_MS, () => new Error()).catch(() => undefined);
    for (const stream of this.#groups.values()) {
      this.#void(stream);
    }
    this.#groups.clear();
    this.#waiting.length = 0;
    this.#arrived.notify();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // --- reports

  #heldOf(message: ChannelMessage): { stream: MemberStream; held: PartHeld } | undefined {
    for (const stream of this.#groups.values()) {
      const held = stream.number === message.streamNumber ? stream.parts.get(message.part) : undefined;
      if (held?.unreported.get(message.offset) === message) {
        return { stream, held };
      }
    }
    return undefined;
  }

  /** Report a message, and wait for the answer; called by messages. */
  async report(message: ChannelMessage, how: How, call: CallOptions): Promise<boolean> {
    if (this.#closed) {
      throw new NotConnected("the member is closed: the message comes again, to whomever");
    }
    if (!this.reportSoon(message, how)) {
      return false;
    }
    message.outcome = deferred();
    const late = (): Error => new NotConnected("no leader answered the report in time: the message may come again");
    return within(message.outcome.promise, call.timeoutMs, late, call.signal);
  }

  /** Report a message; false: it is no longer this member's, or was reported. */
  reportSoon(message: ChannelMessage, how: How): boolean {
    const found = this.#heldOf(message);
    if (!found) {
      return false;
    }
    found.held.unreported.delete(message.offset);
    found.held.touched.delete(message.offset);
    found.held.toReport.set(message.offset, { how, message });
    queueMicrotask(() => { this.#pump(found.stream); });
    return true;
  }

  /** Ask for more time for a message; called by messages. */
  touch(message: ChannelMessage): void {
    const found = this.#heldOf(message);
    if (found) {
      found.held.touched.add(message.offset);
      queueMicrotask(() => { this.#pump(found.stream); });
    }
  }

  #pump(stream: MemberStream): void {
    if (!stream.answered || !stream.stream || this.#closed) {
      return;
    }
    const share = this.#share();
    const credit = stream.credit !== share ? share : 0;
    stream.credit = share;
    const reports = [];
    if (now() >= stream.restUntil) {
      stream.restUntil = 0;
      let free = MAX_REPORTS - stream.underWay;
      for (const [part, held] of stream.parts) {
        if (held.due && free > 0) {
          reports.push(this.#reportOf(part, held));
          free -= 1;
        }
      }
    }
    if (credit > 0 || reports.length > 0) {
      stream.stream.write({ credit, reports });
    }
    this.#arm();
  }

  #reportOf(part: number, held: PartHeld) {
    this.#numbers += 1;
    const request = BigInt(this.#numbers);
    const texts = [...held.toReport].filter(([, { how }]) => typeof how === "string");
    const left = new Map(texts.slice(MAX_REJECTED));
    const now = new Map([...held.toReport].filter(([offset]) => !left.has(offset)).sort(([a], [b]) => a - b));
    const acknowledged: bigint[] = [];
    const refused: bigint[] = [];
    const rejected: { offset: bigint; reason: string }[] = [];
    for (const [offset, { how }] of now) {
      const at = BigInt(offset);
      if (typeof how === "string") {
        rejected.push({ offset: at, reason: how });
      } else if (typeof how === "number") {
        refused.push(at, BigInt(how));
      } else if (acknowledged.at(-1) === at) {
        acknowledged[acknowledged.length - 1] = at + 1n;
      } else {
        acknowledged.push(at, at + 1n);
      }
    }
    const touched = [...held.touched].map(BigInt);
    held.touched.clear();
    held.toReport = left;
    if (now.size > 0) {
      held.reporting.set(request, now);
    }
    return { request, part, acknowledged, refused, touched, rejected };
  }

  #reported(stream: MemberStream, result: ReportResult): void {
    const held = stream.parts.get(result.part);
    const found = held?.reporting.get(result.request);
    if (!held || !found) {
      return;
    }
    held.reporting.delete(result.request);
    if (result.refusal && AGAIN.has(result.refusal.code)) {
      found.forEach((report, offset) => held.toReport.set(offset, report));
      stream.restUntil = now() + Math.max(REPORT_AGAIN_MS, result.refusal.retryAfterMs);
      return;
    }
    const counted = new Set(result.refused.map(Number));
    for (let at = 0; at + 1 < result.acknowledged.length; at += 2) {
      for (let offset = Number(result.acknowledged[at]); offset < Number(result.acknowledged[at + 1]); offset += 1) {
        counted.add(offset);
      }
    }
    found.forEach(({ message }, offset) => message.outcome?.resolve(counted.has(offset)));
  }

  // --- streams

  #setTopic(topic: TopicMap): void {
    if (!this.#topic || this.#closed || topic.version < this.#topic.version) {
      return;
    }
    if (topic.replaces(this.#topic)) {
      this.#fail(topic.gone());
      return;
    }
    this.#topic = topic;
    const wanted = new Set([...topic.parts.values()].filter((part) => !this.#finished.has(part.number)).map((part) => part.group));
    for (const [group, stream] of [...this.#groups]) {
      const busy = [...stream.parts.values()].some((held) => held.unreported.size + held.toReport.size + held.reporting.size > 0);
      if (!wanted.has(group) && !busy) {
        this.#groups.delete(group);
        stream.stream?.cancel();
        this.#rejoinAt = Math.min(this.#rejoinAt, now() + REJOIN_MS * (0.75 + 0.5 * Math.random()));
      }
    }
    const { backoffMs, maxBackoffMs } = this.around.directory.options;
    for (const group of wanted) {
      if (!this.#groups.has(group)) {
        this.#groups.set(group, new MemberStream(new LeaderLink(backoffMs, maxBackoffMs)));
      }
    }
    for (const [group, stream] of this.#groups) {
      stream.link.setAddresses(topic.groups.get(group) ?? []);
    }
    this.#connect();
    for (const stream of this.#groups.values()) {
      this.#pump(stream);
    }
    this.#arm();
  }

  #share(): number {
    return Math.max(1, Math.ceil(this.#credit / Math.max(1, this.#groups.size)));
  }

  #connect(): void {
    for (const stream of this.#groups.values()) {
      if (stream.number > 0 || now() < stream.link.restUntil || this.#closed) {
        continue;
      }
      const address = stream.link.address();
      if (!address) {
        stream.link.failed(now());
        this.around.directory.refresh(this.name);
        continue;
      }
      this.#numbers += 1;
      const number = this.#numbers;
      stream.number = number;
      stream.credit = this.#share();
      stream.stream = this.around.directory.channels.stream(address, TopicLog.method.consume, {
        reply: (reply) => { this.#take(stream, number, reply); },
        ended: (end) => { this.#over(stream, number, end); },
      });
      stream.stream.write({
        hello: {
          topic: this.name, channel: this.channel, member: this.around.client, credit: stream.credit, tag: this.given.tag ?? "",
          loadTest: this.#loadTest, filter: this.given.filter ?? "",
        },
      });
    }
  }

  /** Forget what a stream delivered: it comes again, to whomever. */
  #void(stream: MemberStream): void {
    for (const held of stream.parts.values()) {
      for (const reports of [held.toReport, ...held.reporting.values()]) {
        reports.forEach(({ message }) => message.outcome?.resolve(false));
      }
    }
    stream.stream?.cancel();
    stream.stream = undefined;
    stream.number = 0;
    stream.answered = false;
    stream.restUntil = 0;
    stream.parts.clear();
    this.#arrived.notify();
  }

  #over(stream: MemberStream, number: number, end: End): void {
    if (stream.number !== number || this.#closed) {
      return;
    }
    if (end.refused && !stream.answered) {
      this.#fail(end.login ? new NotAuthenticated(end.login) : new NotAllowed(end.reason));
      return;
    }
    this.#leave(stream);
  }

  #leave(stream: MemberStream, leader = "", retryAfterMs = 0): void {
    this.#void(stream);
    stream.link.failed(now(), leader, retryAfterMs);
    if (!leader) {
      this.around.directory.refresh(this.name);
    }
    this.#connect();
    this.#arm();
  }

  #take(stream: MemberStream, number: number, reply: ConsumeReply): void {
    if (stream.number !== number || this.#closed) {
      return;
    }
    if (!stream.answered) {
      stream.answered = true;
      stream.link.answered();
    }
    try {
      this.#deliver(stream, number, reply);
    } catch (error) {
      if (!(error instanceof MalformedData)) {
        throw error;
      }
      this.#leave(stream);
      return;
    }
    for (const result of reply.results) {
      this.#reported(stream, result);
    }
    if (reply.finishedParts.length > 0) {
      reply.finishedParts.forEach((part) => this.#finished.add(part));
      const known = this.#topic?.parts;
      // The parts that follow them may be in the same group: they may not be known yet.
      this.around.directory.refresh(this.name, reply.finishedParts.some((part) => known?.get(part)?.sealed === false));
      if (this.#topic) {
        this.#setTopic(this.#topic);
      }
    }
    if (reply.rejoin) {
      this.#rejoinAt = Math.min(this.#rejoinAt, now() + REJOIN_SOON_MS * Math.random());
    }
    this.#arrived.notify();
    if (reply.end) {
      const error = refused(reply.end, this.name);
      if (isHopeless(error)) {
        this.#fail(error);
      } else {
        this.#leave(stream, reply.end.leader, reply.end.retryAfterMs);
      }
    } else if (reply.draining) {
      this.around.directory.refresh(this.name);
    }
    this.#pump(stream);
  }

  #deliver(stream: MemberStream, number: number, reply: ConsumeReply): void {
    for (const delivery of reply.deliveries) {
      const { part } = delivery;
      this.#finished.delete(part); // a seek went back
      const held = stream.parts.get(part) ?? new PartHeld();
      stream.parts.set(part, held);
      const data = Buffer.from(delivery.data.buffer, delivery.data.byteOffset, delivery.data.length);
      const index = Buffer.from(delivery.index.buffer, delivery.index.byteOffset, delivery.index.length);
      const origin: Origin = { topic: this.name, part, timeUs: Number(delivery.timeUs), sender: delivery.sender, writer: delivery.writer };
      spans(index, data).forEach(({ at, end, slot, flags }, place) => {
        const attempts = delivery.attempts[place] ?? 1;
        const offset = Number(delivery.base) + place;
        const message = new ChannelMessage(this, number, attempts, origin, offset, data, at, end, slot, flags);
        held.unreported.set(offset, message);
        this.#waiting.push(message);
      });
    }
  }

  // --- time and ends

  #arm(): void {
    if (this.#closed) {
      return;
    }
    let due = this.#rejoinAt;
    for (const stream of this.#groups.values()) {
      if (stream.number === 0) {
        due = Math.min(due, stream.link.restUntil);
      } else if (stream.restUntil > 0) {
        due = Math.min(due, stream.restUntil);
      }
    }
    this.#alarm.set(due);
  }

  #tick(): void {
    if (now() >= this.#rejoinAt && this.#topic) {
      this.#rejoinAt = Infinity;
      const known = this.#topic.parts;
      for (const part of [...this.#finished]) {
        if (!this.#groups.has(known.get(part)?.group ?? -1)) {
          this.#finished.delete(part);
        }
      }
      this.#setTopic(this.#topic);
    }
    this.#connect();
    for (const stream of this.#groups.values()) {
      this.#pump(stream);
    }
    this.#arm();
  }

  #fail(error: PixiuError): void {
    this.#error ??= error;
    this.#alarm.cancel();
    for (const stream of this.#groups.values()) {
      this.#void(stream);
    }
    this.#groups.clear();
    this.#arrived.notify();
  }
}
