/** One Subscribe stream to one gateway: the requests sent on it, and those that the gateway has confirmed. */

import type { MessageInitShape } from "@bufbuild/protobuf";
import { status as Status } from "@grpc/grpc-js";
import { Subscriber, type SubscribeReply, type SubscribeReplySchema, type SubscribeRequestSchema } from "../gen/pixiu/wire/v1/wire_pb.js";
import { errorOfCode, Overloaded, type PixiuError } from "../errors.js";
import type { BidiStream, Channels, End } from "../rpc/channels.js";
import { Changes, deferred, type Deferred } from "../rpc/waiting.js";

/** Limit of rooms, topics and acknowledgements in one request, unless the gateway announces less. */
const MAX_NAMES = 1_000;
/** Limit of requests under way on one stream. */
const MAX_UNCONFIRMED = 10_000;
/** Replies that wait to be read before the stream is paused. */
const MAX_READ_AHEAD = 16;

/** InboxSeqs of a lane to acknowledge, both included. */
export interface SeqRange {
  readonly lane: number;
  readonly first: bigint;
  readonly last: bigint;
}

/** A `join` or `leave` that waits until the whole cluster has it, or a wait for acknowledgements. */
export class Waiter {
  waitsFor = new Set<bigint>();
  settled = false;
  readonly #done: Deferred<void> = deferred();

  /** `lost`: error if its stream ends; undefined: the next stream answers it. */
  constructor(
    readonly rooms: ReadonlySet<bigint>,
    readonly topics: ReadonlySet<string>,
    readonly lost?: PixiuError,
  ) {
    this.#done.promise.catch(() => undefined);
  }

  get done(): Promise<void> {
    return this.#done.promise;
  }

  /** End the wait: the request has taken effect, or was refused. */
  finish(error?: PixiuError): void {
    this.settled = true;
    if (error) {
      this.#done.reject(error);
    } else {
      this.#done.resolve();
    }
  }
}

/** How a stream introduces its client. */
export interface Greeting {
  readonly uin: bigint;
  readonly client: string;
  readonly chat: boolean;
  readonly mail: boolean;
  readonly device: bigint;
  readonly deviceClass: string;
}

type Request = MessageInitShape<typeof SubscribeRequestSchema>;

/** Wraps one call. */
export class GatewayStream {
  rooms = new Set<bigint>();
  topics = new Set<string>();
  draining = false;
  /** True if a request was refused for now and will be repeated. */
  lacking = false;
  maxNames = MAX_NAMES;
  /** Why the stream ended; undefined: it did not. */
  end: End | undefined;
  readonly #stream: BidiStream<typeof SubscribeRequestSchema, typeof SubscribeReplySchema>;
  readonly #requests = new Map<bigint, { rooms: ReadonlySet<bigint>; topics: ReadonlySet<string> }>();
  readonly #replies: SubscribeReply[] = [];
  readonly #arrived = new Changes();
  readonly #outgoing: Request[] = [];
  #waiters: Waiter[] = [];
  #lastRequest = 0n;
  #greeted = false;
  #reading: Promise<SubscribeReply | undefined> | undefined;

  constructor(
    readonly address: string,
    channels: Channels,
    greeting: Greeting,
  ) {
    this.#stream = channels.stream(address, Subscriber.method.subscribe, {
      reply: (reply) => {
        this.#replies.push(reply);
        if (this.#replies.length > MAX_READ_AHEAD) {
          this.#stream.pause();
        }
        if (!this.#greeted) {
          this.#greeted = true;
          this.#flush();
        }
        this.#arrived.notify();
      },
      ended: (end) => {
        this.end = end;
        this.#arrived.notify();
      },
    });
    const answered = greeting.chat || greeting.mail; // like a join
    if (answered) {
      this.#lastRequest = 1n;
      this.#requests.set(1n, { rooms: new Set(), topics: new Set() });
    }
    this.#stream.write({ hello: greeting, request: this.#lastRequest });
  }

  /** Join what is wanted and was not asked for yet, and leave what is not wanted; `waiters` wait for the answers. Throws `Overloaded`. */
  reconcile(rooms: ReadonlySet<bigint>, topics: ReadonlySet<string>, waiters: readonly Waiter[]): void {
    if (this.#requests.size >= MAX_UNCONFIRMED) {
      throw new Overloaded(`gateway ${this.address} has not confirmed ${MAX_UNCONFIRMED} requests yet: await each join and leave`);
    }
    const missing = <T>(of: ReadonlySet<T>, from: ReadonlySet<T>): T[] => [...of].filter((each) => !from.has(each));
    for (const [leaveRooms, leaveTopics] of this.#parts(missing(this.rooms, rooms), missing(this.topics, topics))) {
      this.#ask({ leaveRooms, leaveTopics }, [], []);
    }
    for (const [joinRooms, joinTopics] of this.#parts(missing(rooms, this.rooms), missing(topics, this.topics))) {
      this.#ask({ joinRooms, joinTopics }, joinRooms, joinTopics);
    }
    this.rooms = new Set(rooms);
    this.topics = new Set(topics);
    for (const waiter of waiters) {
      // A name that was asked for before may not be confirmed yet: wait for everything that is under way.
      waiter.waitsFor = new Set(this.#requests.keys());
      if (waiter.waitsFor.size > 0) {
        this.#waiters.push(waiter);
      } else {
        waiter.finish();
      }
    }
    this.#flush();
  }

  /** Acknowledge mail. `waiter` waits until the gateway has this and everything before it. */
  acknowledge(ranges: readonly SeqRange[], waiter?: Waiter): void {
    for (let start = 0; start < ranges.length; start += this.maxNames) {
      this.#outgoing.push({ mailAcknowledgements: ranges.slice(start, start + this.maxNames) });
    }
    if (waiter) {
      this.#ask({}, [], []);
      waiter.waitsFor = new Set([this.#lastRequest]);
      this.#waiters.push(waiter);
    }
    this.#flush();
  }

  #ask(request: Request, rooms: readonly bigint[], topics: readonly string[]): void {
    this.#lastRequest += 1n;
    this.#requests.set(this.#lastRequest, { rooms: new Set(rooms), topics: new Set(topics) });
    this.#outgoing.push({ ...request, request: this.#lastRequest });
  }

  /** Write what waits; nothing after the hello until the gateway has answered it. */
  #flush(): void {
    if (this.#greeted) {
      for (const request of this.#outgoing.splice(0)) {
        this.#stream.write(request);
      }
    }
  }

  #parts(rooms: bigint[], topics: string[]): [bigint[], string[]][] {
    const found: [bigint[], string[]][] = [];
    for (let start = 0; start < rooms.length; start += this.maxNames) {
      found.push([rooms.slice(start, start + this.maxNames), []]);
    }
    const last = found.at(-1);
    const beside = last ? this.maxNames - last[0].length : 0;
    if (last) {
      last[1] = topics.slice(0, beside); // do not split what fits into one request
    }
    for (let start = beside; start < topics.length; start += this.maxNames) {
      found.push([[], topics.slice(start, start + this.maxNames)]);
    }
    return found;
  }

  /** True if the gateway has confirmed every request. */
  get settled(): boolean {
    return this.#requests.size === 0;
  }

  /** True if somebody waits for a confirmation. */
  get awaited(): boolean {
    return this.#waiters.length > 0;
  }

  /** Handle a confirmation. */
  confirmed(request: bigint): void {
    if (this.#requests.delete(request)) {
      this.#waiters = this.#waiters.filter((waiter) => {
        waiter.waitsFor.delete(request);
        if (waiter.waitsFor.size === 0) {
          waiter.finish();
        }
        return waiter.waitsFor.size > 0;
      });
    }
  }

  /** Handle a refused request (0: all). Returns its names, and the waiters that got the error. */
  refused(request: bigint, code: string, text: string, retryAfterMs: number): { rooms: Set<bigint>; topics: Set<string>; told: Waiter[] } {
    const rooms = new Set<bigint>();
    const topics = new Set<string>();
    const told: Waiter[] = [];
    for (const number of request ? [request] : [...this.#requests.keys()]) {
      const asked = this.#requests.get(number);
      if (!asked) {
        continue;
      }
      this.#requests.delete(number);
      asked.rooms.forEach((room) => rooms.add(room));
      asked.topics.forEach((topic) => topics.add(topic));
      this.#waiters = this.#waiters.filter((waiter) => {
        if (waiter.waitsFor.has(number)) {
          waiter.finish(errorOfCode(code, text, retryAfterMs));
          told.push(waiter);
        }
        return !waiter.settled;
      });
    }
    rooms.forEach((room) => this.rooms.delete(room));
    topics.forEach((topic) => this.topics.delete(topic));
    return { rooms, topics, told };
  }

  /** The next reply, undefined at the end. The same promise until `take`. */
  read(): Promise<SubscribeReply | undefined> {
    this.#reading ??= this.#next();
    return this.#reading;
  }

  /** The result of `read` was taken: the next call reads on. */
  take(): void {
    this.#reading = undefined;
  }

  async #next(): Promise<SubscribeReply | undefined> {
    while (this.#replies.length === 0 && !this.end) {
      await this.#arrived.wait();
    }
    const reply = this.#replies.shift();
    if (this.#replies.length <= MAX_READ_AHEAD / 2) {
      this.#stream.resume();
    }
    return reply;
  }

  /** End the stream. Returns the waiters that are left: the next stream answers them. */
  close(): Waiter[] {
    this.#stream.cancel();
    this.end ??= { reason: "the client closed it", status: Status.OK, refused: false, login: "", retryAfterMs: 0, metadata: undefined };
    this.#arrived.notify();
    this.#requests.clear();
    const left = this.#waiters.filter((waiter) => !waiter.settled);
    this.#waiters = [];
    return left;
  }
}
