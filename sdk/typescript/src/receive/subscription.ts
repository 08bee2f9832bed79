/** Messages of rooms, topics and of a user, as they are sent. Source: docs/sdk.md, "Subscribing". */

import type { SubscribeReply } from "../gen/pixiu/wire/v1/wire_pb.js";
import { InvalidArgument, NotAllowed } from "../errors.js";
import { roomOf, type Id } from "../ids.js";
import { checkFilter } from "../names.js";
import { Changes, now, type CallOptions } from "../rpc/waiting.js";
import { messagesOf, type Message } from "../wire/record.js";
import { GatewayConnection, type ConnectionContext } from "./gatewayConnection.js";
import type { GatewayStream, Greeting } from "./gatewayStream.js";

/** Which messages of load tests come: `"block"`: none, `"pass"`: they too, `"only"`: nothing else. */
export type LoadTest = "block" | "pass" | "only";

/** Check how load tests are treated. Throws `InvalidArgument`. */
export function loadTestOf(found: string | undefined): LoadTest {
  if (found !== undefined && found !== "block" && found !== "pass" && found !== "only") {
    throw new InvalidArgument(`loadTest is "block", "pass" or "only", not ${JSON.stringify(found)}`);
  }
  return found ?? "block";
}

/** True if a message comes, by its mark. */
export const passes = (wanted: LoadTest, marked: boolean): boolean => wanted === "pass" || marked === (wanted === "only");

/** What a subscription is to. */
export interface SubscribeOptions {
  readonly room?: Id;
  readonly rooms?: Iterable<Id>;
  readonly topic?: string;
  /** Free topics and filters with `+` and `#`. */
  readonly topics?: Iterable<string>;
  /** Messages to the client's own user. */
  readonly chat?: boolean;
  /** Default: `"block"`. */
  readonly loadTest?: LoadTest;
  /** Called when a connection was lost: messages may be missing. */
  readonly onGap?: (reason: string) => void;
  /** Called when this many messages were dropped, because this side was too slow. */
  readonly onDropped?: (count: number) => void;
}

/** Totals of a subscription. */
export interface SubscriptionCounters {
  received: number;
  dropped: number;
  damaged: number;
  loadTestBlocked: number;
  gaps: number;
  moves: number;
}

/** Limit of rooms and topics of a subscription. */
const MAX_NAMES = 100_000;
const MAX_OVERLAP_IDS = 100_000;
/** Messages of the last connection that are recognized when they come again by the next one. */
const MAX_RECENT = 10_000;
const LATE_MS = 10_000;
const REPEATED_MS = 60_000;
/** Signals after which a new generation of known ones begins. */
const SIGNALS = 10_000;

const identity = (message: Message): string => `${message.id} ${message.room}`;

/**
 * Messages of rooms and topics: `for await (const message of subscription)`. It connects when it is iterated or joined, and reconnects
 * by itself. `break` leaves it open; `close` or `await using` ends it.
 */
export class Subscription extends GatewayConnection implements AsyncIterable<Message>, AsyncDisposable {
  readonly counters: SubscriptionCounters = { received: 0, dropped: 0, damaged: 0, loadTestBlocked: 0, gaps: 0, moves: 0 };
  protected override readonly what = "subscription";
  protected override readonly lingerMs = 1_000;
  readonly #given: SubscribeOptions;
  readonly #loadTest: LoadTest;
  readonly #who: Omit<Greeting, "chat" | "mail">;
  #chat: boolean;
  readonly #buffer: { readonly messages: readonly Message[]; readonly bytes: number }[] = [];
  #bufferedBytes = 0;
  #bufferedRecords = 0;
  readonly #arrived = new Changes();
  readonly #space = new Changes();
  #current: readonly Message[] = [];
  #next = 0;
  #taking = false;
  /** Messages that arrived while two gateways deliver; undefined while there is one. */
  #seen: Set<string> | undefined;
  /** Those of the last change of gateway, until `#cameUntil`. */
  #came = new Set<string>();
  #cameUntil = 0;
  #recent: string[][] = [];
  #recentCount = 0;
  #signals = new Set<string>();
  #signalsBefore = new Set<string>();

  /** Made by `Client.subscribe`. */
  constructor(around: ConnectionContext, given: SubscribeOptions, who: Omit<Greeting, "chat" | "mail">) {
    super(around);
    this.#given = given;
    this.#who = who;
    this.#loadTest = loadTestOf(given.loadTest);
    this.#chat = given.chat ?? false;
    const rooms = [...(given.rooms ?? []), ...(given.room === undefined ? [] : [given.room])];
    const topics = [...(given.topics ?? []), ...(given.topic === undefined ? [] : [given.topic])];
    rooms.forEach((room) => this.rooms_.add(roomOf(room)));
    topics.forEach((topic) => this.topics_.add(checkFilter(topic)));
  }

  /** The rooms that are wanted. */
  get rooms(): ReadonlySet<bigint> {
    return this.rooms_;
  }

  /** The topics and filters that are wanted. */
  get topics(): ReadonlySet<string> {
    return this.topics_;
  }

  /** Connect, and wait until everything wanted has been joined: what is sent from then on arrives. */
  async ready(call: CallOptions = {}): Promise<this> {
    if (this.rooms_.size + this.topics_.size === 0 && !this.#chat) {
      throw new InvalidArgument("nothing is subscribed to: give a room, a topic or chat, or join some first");
    }
    await this.settle(this.rooms_, this.topics_, call);
    return this;
  }

  /**
   * Join rooms and topics; resolves when the whole cluster knows. Rejects with the gateway's refusal, or `OutcomeUnknown` after
   * `timeoutMs`: then they stay wanted and are joined once a gateway answers.
   */
  async join(names: { readonly rooms?: Iterable<Id>; readonly topics?: Iterable<string> }, call: CallOptions = {}): Promise<void> {
    const [rooms, topics] = checked(names);
    if (this.rooms_.size + rooms.size + this.topics_.size + topics.size > MAX_NAMES) {
      throw new InvalidArgument(`a subscription has at most ${MAX_NAMES} rooms and topics; use several`);
    }
    rooms.forEach((room) => this.rooms_.add(room));
    topics.forEach((topic) => this.topics_.add(topic));
    await this.settle(rooms, topics, call);
  }

  /** Leave rooms and topics; resolves when the whole cluster knows. Rejects as `join`. */
  async leave(names: { readonly rooms?: Iterable<Id>; readonly topics?: Iterable<string> }, call: CallOptions = {}): Promise<void> {
    const [rooms, topics] = checked(names);
    rooms.forEach((room) => this.rooms_.delete(room));
    topics.forEach((topic) => this.topics_.delete(topic));
    await this.settle(rooms, topics, call);
  }

  /** The next message; undefined once the subscription is closed. Rejects with the error that ended it, or the signal's reason. */
  async next(signal?: AbortSignal): Promise<Message | undefined> {
    while (this.#next >= this.#current.length) {
      const batch = await this.nextBatch(signal);
      if (!batch) {
        return undefined;
      }
      this.#current = batch;
      this.#next = 0;
    }
    this.#next += 1;
    return this.#current[this.#next - 1];
  }

  /** The messages that arrived together next, at least one; undefined once the subscription is closed. Rejects as `next`. */
  async nextBatch(signal?: AbortSignal): Promise<readonly Message[] | undefined> {
    if (this.rooms_.size + this.topics_.size === 0 && !this.#chat) {
      throw new InvalidArgument("nothing is subscribed to: give a room, a topic or chat, or join some first");
    }
    if (!this.closed) {
      this.start();
    }
    if (this.#taking) {
      throw new InvalidArgument("this subscription is iterated already: make one for each");
    }
    this.#taking = true;
    try {
      while (this.#buffer.length === 0 || this.closed) {
        if (this.error) {
          throw this.error;
        }
        if (this.closed) {
          return undefined;
        }
        await aborted(this.#arrived.wait(), signal);
      }
    } finally {
      this.#taking = false;
    }
    const { messages, bytes } = this.#buffer.shift() ?? { messages: [], bytes: 0 };
    this.#bufferedBytes -= bytes;
    this.#bufferedRecords -= messages.length;
    this.#space.notify();
    return messages;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Message, void, undefined> {
    for (let message = await this.next(); message; message = await this.next()) {
      yield message;
    }
  }

  /** Leave everything and stop. An iteration that waits ends. */
  async close(): Promise<void> {
    await this.stop();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // --- called by the connection

  protected override greeting(): Greeting {
    return { ...this.#who, chat: this.#chat, mail: false };
  }

  protected override overlap(begins: boolean): void {
    if (!begins && this.#seen && this.#seen.size > 0) {
      this.#came = this.#seen;
      this.#cameUntil = now() + LATE_MS;
    }
    this.#seen = begins ? new Set() : undefined;
  }

  protected override lost(): void {
    this.#recent.flat().forEach((id) => this.#came.add(id));
    this.#cameUntil = now() + REPEATED_MS;
    this.counters.gaps += 1;
    this.#given.onGap?.(this.reason);
  }

  protected override moved(): void {
    this.counters.moves += 1;
  }

  protected override nudge(): void {
    this.#space.notify();
    this.#arrived.notify();
  }

  protected override async content(stream: GatewayStream, reply: SubscribeReply, held: boolean): Promise<void> {
    if (reply.revokedRooms.length + reply.revokedTopics.length > 0) {
      this.#revoked(stream, reply);
    }
    if (reply.dropped) {
      this.#dropped(Number(reply.dropped));
    }
    if (reply.count > 0) {
      if (this.#came.size > 0 && now() >= this.#cameUntil) {
        this.#came = new Set();
      }
      await this.#deliver(reply, held ? (this.#seen ?? this.#came) : this.#came, held);
    }
  }

  #dropped(count: number): void {
    this.counters.dropped += count;
    this.#given.onDropped?.(count);
  }

  /** Forget what is no longer allowed: the next gateway is not asked for it. Throws `NotAllowed` if nothing is left. */
  #revoked(stream: GatewayStream, reply: SubscribeReply): void {
    for (const room of reply.revokedRooms) {
      this.rooms_.delete(room);
      stream.rooms.delete(room);
    }
    for (const topic of reply.revokedTopics) {
      this.topics_.delete(topic);
      stream.topics.delete(topic);
      this.#chat &&= topic !== `user/${this.#who.uin}`;
    }
    const names = [...reply.revokedRooms.map((room) => `room/${room}`), ...reply.revokedTopics].slice(0, 10).join(", ");
    const text = `the permission to subscribe to ${names} has ended${reply.errorText ? `: ${reply.errorText}` : ""}`;
    if (this.rooms_.size + this.topics_.size === 0 && !this.#chat) {
      throw new NotAllowed(text);
    }
    this.#given.onGap?.(text);
  }

  async #deliver(reply: SubscribeReply, repeated: ReadonlySet<string>, held: boolean): Promise<void> {
    const found = messagesOf(Buffer.from(reply.batch.buffer, reply.batch.byteOffset, reply.batch.length), reply.count);
    this.counters.damaged += found.damaged;
    const messages = found.messages.filter((message) => {
      if (repeated.has(identity(message)) || (message.signal && !this.#isNewSignal(message))) {
        return false;
      }
      const wanted = passes(this.#loadTest, message.loadTest);
      this.counters.loadTestBlocked += wanted ? 0 : 1;
      return wanted;
    });
    if (messages.length === 0) {
      return;
    }
    const came = messages.map(identity);
    if (this.#seen && !held && this.#seen.size < MAX_OVERLAP_IDS) {
      came.forEach((id) => this.#seen?.add(id));
    }
    this.#recent.push(came);
    this.#recentCount += came.length;
    while (this.#recentCount > MAX_RECENT && this.#recent.length > 1) {
      this.#recentCount -= this.#recent.shift()?.length ?? 0;
    }
    this.counters.received += messages.length;
    const bytes = reply.batch.length;
    while (this.#full(messages.length, bytes, 1) && !this.closed) {
      // Who awaits a confirmation may be the one that should empty the buffer: reading then continues and drops the oldest.
      if (this.stream?.awaited === true) {
        if (!this.#full(messages.length, bytes, 2)) {
          break;
        }
        const oldest = this.#buffer.shift();
        this.#bufferedBytes -= oldest?.bytes ?? 0;
        this.#bufferedRecords -= oldest?.messages.length ?? 0;
        this.#dropped(oldest?.messages.length ?? 0);
      } else {
        await this.#space.wait();
      }
    }
    this.#buffer.push({ messages, bytes });
    this.#bufferedBytes += bytes;
    this.#bufferedRecords += messages.length;
    this.#arrived.notify();
  }

  #full(records: number, bytes: number, times: number): boolean {
    const { receiveBytes, receiveRecords } = this.around.options;
    const over = this.#bufferedBytes + bytes > times * receiveBytes || this.#bufferedRecords + records > times * receiveRecords;
    return over && this.#buffer.length > 0;
  }

  /** True if a signal has not arrived before: its three copies come one by one. */
  #isNewSignal(message: Message): boolean {
    const id = identity(message);
    if (this.#signals.has(id) || this.#signalsBefore.has(id)) {
      return false;
    }
    if (this.#signals.size >= SIGNALS) {
      this.#signalsBefore = this.#signals;
      this.#signals = new Set();
    }
    this.#signals.add(id);
    return true;
  }
}

/** Wait for a promise; rejects with the signal's reason when that aborts. */
export async function aborted<T>(promise: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  if (!signal) {
    return promise;
  }
  signal.throwIfAborted();
  let abort = (): void => undefined;
  const cut = new Promise<never>((_, reject) => {
    abort = () => { reject(signal.reason as Error); };
    signal.addEventListener("abort", abort, { once: true });
  });
  try {
    return await Promise.race([promise, cut]);
  } finally {
    signal.removeEventListener("abort", abort);
  }
}

function checked(names: { readonly rooms?: Iterable<Id>; readonly topics?: Iterable<string> }): [Set<bigint>, Set<string>] {
  if (typeof names.topics === "string" || typeof names.rooms === "string") {
    throw new InvalidArgument("rooms and topics are lists: { rooms: [42] }, { topics: ['weather'] }");
  }
  return [new Set([...(names.rooms ?? [])].map(roomOf)), new Set([...(names.topics ?? [])].map(checkFilter))];
}
