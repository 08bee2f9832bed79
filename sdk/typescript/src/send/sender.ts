/**
 * The confirmed sender's decisions, for messages and mail: choice of proxies, batches, windows, and repeats. No I/O.
 *
 *     ticket ── offer ──▶ queue of a proxy ── nextBatch ──▶ in flight (positions, window) ── reply ──▶ resolved
 *                             ▲                                       │
 *                             └────────── the stream died ────────────┘   same IDs, same order, another stream
 *
 * One invariant keeps the order of a key: all unresolved messages of a key are with one proxy. The proxy of a key is key modulo proxies,
 * or another one while that one is down. A key whose choice changes while messages of it are unresolved stays pinned to the proxy that
 * has them. A writer of mail keeps the order of all its messages: they are with one proxy, whatever their keys.
 *
 * Source: docs/write_a_client.md, "Send to rooms and users", "Send mail"; docs/sdk.md, "Errors".
 */

import { Level } from "../gen/pixiu/wire/v1/level_pb.js";
import { NotAuthenticated, NotSent, OutcomeUnknown } from "../errors.js";
import type { ClientOptions } from "../options.js";
import { Backoff } from "../rpc/backoff.js";
import { closedFailure, failureOf, Group, inDoubt, type Failure, type Ticket } from "./receipt.js";

/** Answers that the stores give only after they have looked for the mail. */
const LOOKED: ReadonlySet<string> = new Set(["ID_REUSED", "INBOX_FULL", "TOO_OLD"]);
/** Reasons for the end of a stream that would end any other stream too. */
const HOPELESS: ReadonlySet<string> = new Set(["INVALID_ARGUMENT", "MALFORMED", "NOT_ALLOWED", "NOT_SERVED"]);
/** Reasons for the end of a stream that another proxy may not have. */
const ELSEWHERE: ReadonlySet<string> = new Set(["DRAINING", "OVERLOADED"]);
const MAX_WINDOW_BYTES = 64 << 20;
/** Time for which a proxy that announced its end is not used even if it is still listed. */
const DRAINED_PAUSE_MS = 5_000;

/** Number and generation of a writer of mail: each of its streams has a higher generation than those before. */
export class MailWriterNumber {
  worker = -1;
  generation = 0;
  #stale = 0;

  constructor(private readonly held: () => number) {}

  /** True if another number is held than when the last stream began. */
  changed(): boolean {
    return this.held() !== this.worker;
  }

  /** Begin a stream. After others were stale, leap over whoever uses the number with a higher generation. */
  begin(): void {
    this.worker = this.held();
    const since2020 = Math.floor((Date.now() - 1_577_836_800_000) / 1000);
    this.generation = Math.max(this.generation + 1, since2020) + 2 ** Math.min(this.#stale, 20) - 1;
  }

  /** Note the code with which a stream ended; empty: it was answered. */
  ended(code: string): void {
    this.#stale = code === "STALE_WRITER" ? this.#stale + 1 : 0;
  }
}

/** Rules of one sender. */
export interface Policy {
  readonly options: ClientOptions;
  readonly noun: string;
  /** Time for which a message may be unresolved. */
  readonly timeoutMs: number;
  /** Time after which a silent proxy that owes an answer is left for another one. */
  readonly stallMs: number;
  readonly maxBackoffMs: number;
  /** Consequence of sending a message again whose outcome is unknown. */
  readonly advice: string;
  /** Code of an outcome that resolves nothing: the message is sent again, through another stream. */
  readonly again: string;
  /** Code with which a proxy that alone had a message reports that it reached nobody. */
  readonly unsent: string;
  /** All messages go through one stream of this writer, in order; undefined: a stream to each proxy, and only each key in order. */
  readonly writer: MailWriterNumber | undefined;
}

/** Rules of messages to rooms, topics and users: a silent proxy is left early enough for one more attempt. */
export const roomPolicy = (options: ClientOptions): Policy => ({
  options, noun: "message", timeoutMs: options.publishTimeoutMs, stallMs: options.publishTimeoutMs / 2, maxBackoffMs: options.maxBackoffMs,
  advice: "sending it again may deliver it twice", again: "DRAINING", unsent: "UNAVAILABLE", writer: undefined,
});

/** Rules of mail. */
export const mailPolicy = (options: ClientOptions, writer: MailWriterNumber): Policy => ({
  options, noun: "mail", timeoutMs: options.mailTimeoutMs, stallMs: 30_000, maxBackoffMs: Math.min(1_000, options.maxBackoffMs),
  advice: "it may be in the inbox", again: "OUTCOME_UNKNOWN", unsent: "", writer,
});

/** Outcome of consecutive messages, as a proxy reports it. */
export interface Outcome {
  readonly position: number;
  readonly count: number;
  readonly failure: Failure | undefined;
  /** Called with a ticket and its index, before it is settled. */
  readonly learn?: (ticket: Ticket, index: number) => void;
}

/** What the shell has to do, in this order. */
export type Effect =
  | { readonly do: "open"; readonly address: string; readonly stream: number; readonly worker: number; readonly generation: number }
  | { readonly do: "close"; readonly stream: number }
  | { readonly do: "write"; readonly stream: number }
  | { readonly do: "settle"; readonly ticket: Ticket; readonly failure: Failure | undefined }
  | { readonly do: "refresh" };

/** Records that are sent together on a stream. */
export interface Batch {
  readonly data: Buffer;
  readonly count: number;
  /** Position of the first record in the stream, from 1. */
  readonly position: number;
  /** True if the next batch follows at once. */
  readonly more: boolean;
  readonly level: Level;
  /** Further receivers of records, by index. */
  readonly receivers: readonly { readonly index: number; readonly uins: readonly bigint[] }[];
}

type State = "idle" | "open" | "draining" | "down";

/** One proxy, with or without a stream. */
class Proxy {
  state: State = "idle";
  listed = true;
  stream = 0;
  first: Ticket[] = [];
  normal: Ticket[] = [];
  /** Messages sent on the stream and not answered, by position, in order. */
  readonly inFlight = new Map<number, Ticket>();
  sent = 0;
  upTo = 0;
  taken = 0;
  /** Positions that the draining proxy refused without handling: they go to another one. */
  readonly refused = new Set<number>();
  heard = false;
  batches = 0;
  windowBytes = 0;
  batchBytes = 0;
  batchRecords = 0;
  inFlightBytes = 0;
  progressAt = 0;
  restUntil = 0;
  deaths = 0;
  /** Lower bound of the deadlines of all tickets here. */
  earliest = 0;

  constructor(readonly address: string) {}

  /** All unresolved tickets, in the order in which they are to be sent again. */
  *tickets(): Generator<Ticket> {
    for (const ticket of this.inFlight.values()) {
      if (!ticket.resolved) {
        yield ticket;
      }
    }
    yield* this.first;
    yield* this.normal;
  }

  busy(): boolean {
    return this.inFlight.size > 0 || this.first.length > 0 || this.normal.length > 0;
  }

  requeue(): void {
    const again = [...this.inFlight.values()].filter((ticket) => !ticket.resolved);
    this.first = [...again.filter((ticket) => ticket.firstLane), ...this.first];
    this.normal = [...again.filter((ticket) => !ticket.firstLane), ...this.normal];
    this.inFlight.clear();
    this.refused.clear();
    this.inFlightBytes = 0;
  }

  /** Put what was sent on a stream that is over back into the queues. `answered`: none of it was taken. */
  takeBack(answered: boolean): void {
    for (const [position, ticket] of this.inFlight) {
      if (!answered && !this.refused.has(position)) {
        ticket.inDoubt = true;
      } else if (!ticket.inDoubt) {
        ticket.attempts = 0;
      }
    }
    this.requeue();
  }

  begin(stream: number, windowBytes: number, now: number): void {
    this.stream = stream;
    this.progressAt = now;
    this.sent = this.upTo = this.taken = this.batches = this.inFlightBytes = 0;
    this.heard = false;
    this.windowBytes = windowBytes;
    this.batchBytes = this.batchRecords = 0;
  }
}

/** Totals of a sender. */
export interface SendCounters {
  offered: number;
  confirmed: number;
  failed: number;
  /** Messages sent again, with the same SnowflakeID. */
  resent: number;
  batches: number;
  streamsOpened: number;
  streamsDied: number;
}

/** Decides for one publisher or writer. The shell calls it, and performs the returned effects in order. */
export class Sender {
  readonly counters: SendCounters = { offered: 0, confirmed: 0, failed: 0, resent: 0, batches: 0, streamsOpened: 0, streamsDied: 0 };
  unresolved = 0;
  unresolvedBytes = 0;
  readonly #backoff: Backoff;
  readonly #proxies = new Map<string, Proxy>();
  readonly #byStream = new Map<number, Proxy>();
  readonly #pins = new Map<bigint, { proxy: Proxy; count: number }>();
  readonly #loginsRefused = new Set<string>();
  readonly #groups: Group[] = [new Group()];
  #listed: Proxy[];
  #usable: Proxy[];
  /** Proxy of a writer's stream. */
  #current: Proxy;
  #nextStream = 1;
  #restUntil = 0;
  #lastReason = "";
  #login: Failure = failureOf(NotAuthenticated.code, "");
  #effects: Effect[] = [];

  /** `begin`, modulo the number of proxies, is the one of a writer's first stream. There is at least one proxy. */
  constructor(private readonly policy: Policy, proxies: readonly string[], begin = 0) {
    this.#backoff = new Backoff(policy.options.backoffMs, policy.maxBackoffMs);
    this.#listed = proxies.map((address) => this.#proxy(address));
    this.#usable = [...this.#listed];
    this.#current = this.#listed[begin % this.#listed.length] as Proxy;
  }

  #proxy(address: string): Proxy {
    let found = this.#proxies.get(address);
    if (!found) {
      found = new Proxy(address);
      this.#proxies.set(address, found);
    }
    return found;
  }

  #take(): Effect[] {
    const effects = this.#effects;
    this.#effects = [];
    return effects;
  }

  // --- queries of the shell

  /** True if a record of `size` bytes fits into the queue. */
  hasSpace(size: number): boolean {
    const { queueRecords, queueBytes } = this.policy.options;
    return this.unresolved === 0 || (this.unresolved < queueRecords && this.unresolvedBytes + size <= queueBytes);
  }

  /** Time at which `tick` is due; `Infinity`: not before another event. */
  nextDeadline(): number {
    let found = Infinity;
    for (const proxy of this.#proxies.values()) {
      if (proxy.state === "down") {
        found = Math.min(found, proxy.restUntil);
      }
      if (proxy.busy()) {
        found = Math.min(found, proxy.earliest);
        if (proxy.state === "open" || proxy.state === "draining") {
          found = Math.min(found, proxy.progressAt + this.policy.stallMs);
        } else if (proxy.state === "idle") {
          found = Math.min(found, this.#restUntil);
        }
      }
    }
    return found;
  }

  /** End the current flush group. The last group with unresolved messages so far; undefined if all are resolved. */
  closeGroup(): Group | undefined {
    const last = this.#groups.at(-1);
    if (last && last.unresolved > 0) {
      this.#groups.push(new Group());
    }
    return this.unresolved > 0 ? this.#groups.at(-2) : undefined;
  }

  /** True if a group and all before it are resolved. */
  groupDone(group: Group): boolean {
    while (this.#groups.length > 1 && this.#groups[0]?.unresolved === 0) {
      this.#groups.shift();
    }
    return !this.#groups.includes(group);
  }

  // --- events

  /** Queue a message. */
  offer(ticket: Ticket, now: number, timeoutMs: number | undefined): Effect[] {
    const { writer } = this.policy;
    if (writer && this.#current.state === "open" && writer.changed()) {
      // Another holder of the old number may use it as a writer from now on.
      this.#current.takeBack(false);
      this.#leave(this.#current, now, 0);
    }
    const group = this.#groups.at(-1) as Group;
    group.unresolved += 1;
    ticket.group = group;
    ticket.deadline = now + (timeoutMs ?? this.policy.timeoutMs);
    this.counters.offered += 1;
    ticket.number = this.counters.offered;
    this.unresolved += 1;
    this.unresolvedBytes += ticket.size;
    const proxy = this.#route(ticket.key);
    const queue = ticket.firstLane ? proxy.first : proxy.normal;
    if (!proxy.busy()) {
      proxy.progressAt = now;
      proxy.earliest = ticket.deadline;
    } else {
      proxy.earliest = Math.min(proxy.earliest, ticket.deadline);
    }
    queue.push(ticket);
    if (queue.length === 1) {
      this.#wanted(proxy, now);
    }
    return this.#take();
  }

  /** Take the next batch for a stream: lane 0 first, within the window; undefined when nothing may leave. */
  nextBatch(stream: number, now: number): Batch | undefined {
    const proxy = this.#byStream.get(stream);
    if (proxy?.state !== "open") {
      return undefined;
    }
    const { options } = this.policy;
    const underWay = proxy.inFlight.size;
    const room = proxy.windowBytes - proxy.inFlightBytes;
    const longest = Math.min(proxy.batchBytes || options.batchBytes, options.batchBytes);
    const most = proxy.batchRecords || options.batchRecords;
    const slots = Math.min(options.batchRecords, options.windowRecords - underWay);
    const taken: Ticket[] = [];
    const receivers: { index: number; uins: readonly bigint[] }[] = [];
    let size = 0;
    let records = 0;
    let level = Level.REPLICATED;
    let full = false;
    for (const queue of [proxy.first, proxy.normal]) {
      let count = 0;
      for (const ticket of queue) {
        const grown = size + ticket.size;
        records += 1 + ticket.more.length;
        // A message that is larger than a batch or the window goes alone.
        full ||=
          taken.length >= slots ||
          (taken.length > 0 && (grown > longest || records > most || ticket.level !== level)) ||
          (grown > room && (taken.length > 0 || underWay > 0));
        if (full) {
          break;
        }
        size = grown;
        level = ticket.level;
        if (ticket.more.length > 0) {
          receivers.push({ index: taken.length, uins: ticket.more });
        }
        this.counters.resent += ticket.attempts > 0 ? 1 : 0;
        ticket.attempts += 1;
        taken.push(ticket);
        count += 1;
      }
      queue.splice(0, count);
    }
    if (taken.length === 0) {
      return undefined;
    }
    if (underWay === 0) {
      proxy.progressAt = now;
    }
    const position = proxy.sent + 1;
    for (const ticket of taken) {
      proxy.sent += 1;
      proxy.inFlight.set(proxy.sent, ticket);
    }
    proxy.inFlightBytes += size;
    proxy.batches += 1;
    this.counters.batches += 1;
    const next = proxy.first[0] ?? proxy.normal[0];
    const more = next !== undefined && proxy.inFlight.size < options.windowRecords && proxy.inFlightBytes + next.size <= proxy.windowBytes;
    return { data: Buffer.concat(taken.map((ticket) => ticket.record)), count: taken.length, position, more, level, receivers };
  }

  /**
   * Process a proxy's reply: messages up to `upTo` are confirmed, but those with other `outcomes`; the proxy has those up to `taken`.
   * Late replies are ignored; an impossible one ends the stream.
   */
  reply(
    stream: number,
    now: number,
    found: {
      readonly upTo?: number;
      readonly outcomes?: readonly Outcome[];
      readonly windowBytes?: number;
      readonly draining?: boolean;
      readonly batchBytes?: number;
      readonly batchRecords?: number;
      readonly taken?: number;
    },
  ): Effect[] {
    const proxy = this.#byStream.get(stream);
    if (!proxy) {
      return [];
    }
    const { upTo = 0, outcomes = [], taken = 0 } = found;
    this.#loginsRefused.delete(proxy.address);
    if (found.windowBytes) {
      proxy.windowBytes = Math.min(found.windowBytes, MAX_WINDOW_BYTES);
      proxy.batchBytes = found.batchBytes ?? 0;
      proxy.batchRecords = found.batchRecords ?? 0;
    }
    if (upTo > proxy.sent || outcomes.some((outcome) => outcome.position + outcome.count - 1 > proxy.sent)) {
      return this.streamDied(stream, now, "it answered for messages that it was never sent");
    }
    if (outcomes.length > 0 || upTo > proxy.upTo || taken > proxy.taken) {
      const before = this.unresolved;
      this.#resolve(proxy, outcomes);
      this.#confirm(proxy, upTo);
      proxy.progressAt = now;
      if (this.unresolved < before) {
        if (this.policy.writer && (proxy.deaths > 0 || !proxy.heard)) {
          this.policy.writer.ended("");
        }
        proxy.deaths = 0;
      }
      proxy.taken = Math.max(proxy.taken, taken);
      proxy.heard = true;
    }
    if ((found.draining === true || proxy.refused.size > 0) && proxy.state === "open") {
      proxy.state = "draining";
      this.#rethink();
      this.#effects.push({ do: "refresh" });
    }
    if (proxy.state === "draining") {
      this.#finishDrain(proxy, now);
    } else if (proxy.first.length > 0 || proxy.normal.length > 0) {
      this.#effects.push({ do: "write", stream });
    }
    return this.#take();
  }

  /**
   * Handle the end of a stream. Its unresolved messages go to another one, in order and before newer ones. `login`: why the proxy refused
   * the login; when all proxies have, messages that wait for them fail. `end`: the reason that the proxy gave for a writer's stream.
   */
  streamDied(stream: number, now: number, reason: string, login = "", end?: Failure): Effect[] {
    const proxy = this.#byStream.get(stream);
    if (!proxy) {
      return [];
    }
    this.counters.streamsDied += 1;
    this.#lastReason = `${proxy.address}: ${reason}`;
    proxy.deaths += 1;
    let rest = this.#backoff.after(proxy.deaths);
    let hopeless = false;
    if (end && this.policy.writer) {
      this.policy.writer.ended(end.code);
      this.#restUntil = now + end.retryAfterMs;
      hopeless = HOPELESS.has(end.code);
      if (!ELSEWHERE.has(end.code) && proxy.deaths === 1) {
        rest = 0;
      }
    }
    // A reason answers what was sent on the stream only if it is about the stream itself, or about its first and only batch.
    const answered = hopeless && !proxy.heard && (proxy.batches <= 1 || end?.code === "NOT_SERVED");
    proxy.takeBack(answered || login !== "");
    if (end && hopeless) {
      this.#giveUp(proxy, end);
    }
    this.#leave(proxy, now, rest);
    this.#effects.push({ do: "refresh" });
    if (login) {
      this.#loginsRefused.add(proxy.address);
      this.#login = failureOf(NotAuthenticated.code, login);
      if (this.#nobodyTakesTheLogin()) {
        for (const each of this.#proxies.values()) {
          if (this.#loginsRefused.has(each.address)) {
            this.#giveUp(each, this.#login);
          }
        }
      }
    }
    return this.#take();
  }

  /** Set the cluster's proxies, in the order of their registration. An empty list changes nothing. */
  setProxies(addresses: readonly string[], now: number): Effect[] {
    const unique = [...new Set(addresses)];
    if (unique.length === 0 || unique.join() === this.#listed.map((proxy) => proxy.address).join()) {
      return [];
    }
    const listed = unique.map((address) => this.#proxy(address));
    const left = this.#listed.filter((proxy) => !listed.includes(proxy));
    this.#listed = listed;
    for (const proxy of listed) {
      proxy.listed = true;
    }
    for (const proxy of left) {
      proxy.listed = false;
      proxy.restUntil = now + DRAINED_PAUSE_MS;
      if (proxy.state === "open") {
        proxy.state = "draining";
      } else if (proxy.state === "idle") {
        proxy.state = "down";
      }
    }
    this.#rethink();
    for (const proxy of left) {
      if (proxy.state === "draining") {
        this.#finishDrain(proxy, now);
      } else {
        this.#moveAll(proxy, now);
      }
    }
    this.#rehome(now);
    return this.#take();
  }

  /** Expire messages, leave silent streams, and end back-offs. */
  tick(now: number): Effect[] {
    for (const proxy of [...this.#proxies.values()]) {
      if (proxy.busy() && now >= proxy.earliest) {
        this.#expire(proxy, now);
      }
      const serving = proxy.state === "open" || proxy.state === "draining";
      if (serving && proxy.busy() && now >= proxy.progressAt + this.policy.stallMs) {
        const before = this.#take();
        this.#effects = [...before, ...this.streamDied(proxy.stream, now, `no answer for ${this.policy.stallMs / 1000} s`)];
      } else if (proxy.state === "draining") {
        this.#finishDrain(proxy, now);
      }
    }
    const rested = [...this.#proxies.values()].filter((proxy) => proxy.state === "down" && now >= proxy.restUntil);
    for (const proxy of rested) {
      if (proxy.listed) {
        proxy.state = "idle";
      } else if (!proxy.busy()) {
        this.#proxies.delete(proxy.address);
      } else {
        proxy.restUntil = now + this.policy.options.maxBackoffMs;
      }
    }
    if (rested.length > 0) {
      this.#rethink();
    }
    this.#rehome(now);
    return this.#take();
  }

  /** Fail everything unresolved and end every stream, because the client closes. */
  abandon(): Effect[] {
    for (const proxy of this.#proxies.values()) {
      proxy.requeue();
      for (const ticket of [...proxy.first, ...proxy.normal]) {
        this.#settle(ticket, closedFailure(ticket.attempts));
      }
      proxy.first = [];
      proxy.normal = [];
    }
    for (const stream of this.#byStream.keys()) {
      this.#effects.push({ do: "close", stream });
    }
    this.#byStream.clear();
    return this.#take();
  }

  // --- inside

  #nobodyTakesTheLogin(): boolean {
    return this.#loginsRefused.size > 0 && this.#listed.every((proxy) => this.#loginsRefused.has(proxy.address));
  }

  #giveUp(proxy: Proxy, why: Failure): void {
    for (const ticket of [...proxy.first, ...proxy.normal]) {
      this.#settle(ticket, ticket.inDoubt ? inDoubt(why, this.policy.advice) : why);
    }
    proxy.first = [];
    proxy.normal = [];
  }

  /** End a proxy's stream; what waits for it goes to those that now serve it. Without a rest that may be the same one. */
  #leave(proxy: Proxy, now: number, rest: number): void {
    this.#byStream.delete(proxy.stream);
    proxy.state = rest === 0 && proxy.listed ? "idle" : "down";
    proxy.restUntil = now + rest;
    this.#effects.push({ do: "close", stream: proxy.stream });
    this.#moveAll(proxy, now);
  }

  #plainRoute(key: bigint): Proxy {
    const proxy = this.#listed[Number(key % BigInt(this.#listed.length))] as Proxy;
    if (proxy.state === "idle" || proxy.state === "open" || this.#usable.length === 0) {
      return proxy;
    }
    return this.#usable[Number(key % BigInt(this.#usable.length))] as Proxy;
  }

  #route(key: bigint): Proxy {
    if (this.policy.writer) {
      return this.#writersRoute();
    }
    const pin = this.#pins.get(key);
    if (pin) {
      pin.count += 1;
      return pin.proxy;
    }
    return this.#plainRoute(key);
  }

  /** The proxy of a writer's stream: the same as long as it is up or none is, then the next one that can be used. */
  #writersRoute(): Proxy {
    if (this.#current.state === "down") {
      const begin = this.#listed.indexOf(this.#current) + 1;
      const order = [...this.#listed.slice(begin), ...this.#listed.slice(0, begin)];
      this.#current = order.find((each) => this.#usable.includes(each)) ?? (order.at(-1) as Proxy);
    }
    return this.#current;
  }

  /** Handle a change in the choice of proxies: pin every key whose unresolved messages are not where new ones would go. */
  #rethink(): void {
    this.#usable = this.#listed.filter((proxy) => proxy.state === "idle" || proxy.state === "open");
    this.#pins.clear();
    if (this.policy.writer) {
      return;
    }
    for (const proxy of this.#proxies.values()) {
      const counts = new Map<bigint, number>();
      for (const ticket of proxy.tickets()) {
        counts.set(ticket.key, (counts.get(ticket.key) ?? 0) + 1);
      }
      for (const [key, count] of counts) {
        if (this.#plainRoute(key) !== proxy) {
          this.#pins.set(key, { proxy, count });
        }
      }
    }
  }

  #wanted(proxy: Proxy, now: number): void {
    if (proxy.state === "open") {
      this.#effects.push({ do: "write", stream: proxy.stream });
      return;
    }
    if (proxy.state !== "idle" || now < this.#restUntil) {
      return;
    }
    const { writer } = this.policy;
    proxy.state = "open";
    proxy.begin(this.#nextStream, this.policy.options.windowBytes, now);
    this.#nextStream += 1;
    this.#byStream.set(proxy.stream, proxy);
    this.counters.streamsOpened += 1;
    writer?.begin();
    const numbers = { worker: writer?.worker ?? 0, generation: writer?.generation ?? 0 };
    this.#effects.push({ do: "open", address: proxy.address, stream: proxy.stream, ...numbers });
  }

  /** Move everything that a proxy has to those that now serve its keys, before their own messages of the same lane. */
  #moveAll(source: Proxy, now: number): void {
    const moving = [...source.first, ...source.normal];
    source.first = [];
    source.normal = [];
    this.#rethink();
    const targets = new Map<Proxy, Ticket[]>();
    for (const ticket of moving) {
      const target = this.#route(ticket.key);
      const moved = targets.get(target);
      if (moved) {
        moved.push(ticket);
      } else {
        targets.set(target, [ticket]);
      }
    }
    for (const [target, tickets] of targets) {
      const earliest = tickets.reduce((least, ticket) => Math.min(least, ticket.deadline), Infinity);
      if (target.busy()) {
        target.earliest = Math.min(target.earliest, earliest);
      } else {
        target.progressAt = now;
        target.earliest = earliest;
      }
      target.first = [...tickets.filter((ticket) => ticket.firstLane), ...target.first];
      target.normal = [...tickets.filter((ticket) => !ticket.firstLane), ...target.normal];
      this.#wanted(target, now);
    }
  }

  /** Move what waits with proxies that are down, because a proxy became usable. */
  #rehome(now: number): void {
    if (this.#usable.length === 0) {
      return;
    }
    for (const proxy of [...this.#proxies.values()]) {
      if (proxy.state === "down" && proxy.busy()) {
        this.#moveAll(proxy, now);
      } else if (proxy.state === "idle" && proxy.busy()) {
        this.#wanted(proxy, now);
      }
    }
  }

  #finishDrain(proxy: Proxy, now: number): void {
    for (const [position, ticket] of proxy.inFlight) {
      if (!ticket.resolved && !proxy.refused.has(position)) {
        return;
      }
    }
    proxy.takeBack(false);
    this.#leave(proxy, now, DRAINED_PAUSE_MS);
    if (this.policy.writer) {
      this.#effects.push({ do: "refresh" });
    }
  }

  /** Resolve messages in flight that have an outcome of their own. */
  #resolve(proxy: Proxy, outcomes: readonly Outcome[]): void {
    for (const outcome of outcomes) {
      const { failure } = outcome;
      for (let index = 0; index < outcome.count; index += 1) {
        const position = outcome.position + index;
        const ticket = proxy.inFlight.get(position);
        if (!ticket) {
          continue;
        }
        outcome.learn?.(ticket, index);
        if (failure?.code === this.policy.again) {
          if (!this.policy.writer) {
            ticket.attempts = ticket.inDoubt ? 1 : 0; // the proxy refused it unseen
            proxy.refused.add(position);
          }
          continue;
        }
        proxy.inFlight.delete(position);
        proxy.inFlightBytes -= ticket.size;
        if (!ticket.resolved) {
          this.#settle(ticket, failure && this.#failureOf(ticket, failure));
        }
      }
    }
  }

  /** Resolve what is in flight up to a position, without a failure. */
  #confirm(proxy: Proxy, upTo: number): void {
    for (let position = proxy.upTo + 1; position <= upTo; position += 1) {
      const ticket = proxy.refused.has(position) ? undefined : proxy.inFlight.get(position);
      if (ticket) {
        proxy.inFlight.delete(position);
        proxy.inFlightBytes -= ticket.size;
        if (!ticket.resolved) {
          this.#settle(ticket, undefined);
        }
      }
    }
    proxy.upTo = Math.max(proxy.upTo, upTo);
  }

  /** The failure of a message that a proxy answered. */
  #failureOf(ticket: Ticket, why: Failure): Failure {
    if (ticket.inDoubt && !LOOKED.has(why.code)) {
      return inDoubt(why, this.policy.advice);
    }
    if (!ticket.inDoubt && why.code === this.policy.unsent) {
      return failureOf(NotSent.code, why.text); // the only proxy that ever had it passed it on to nobody
    }
    return why;
  }

  #settle(ticket: Ticket, failure: Failure | undefined): void {
    ticket.resolved = true;
    this.unresolved -= 1;
    this.unresolvedBytes -= ticket.size;
    if (ticket.group) {
      ticket.group.unresolved -= 1;
      ticket.group = undefined;
    }
    if (failure) {
      this.counters.failed += 1;
    } else {
      this.counters.confirmed += 1;
    }
    this.#effects.push({ do: "settle", ticket, failure });
    const pin = this.#pins.get(ticket.key);
    if (pin) {
      pin.count -= 1;
      if (pin.count === 0) {
        this.#pins.delete(ticket.key);
      }
    }
  }

  #expire(proxy: Proxy, now: number): void {
    const { noun, advice } = this.policy;
    const because = this.#lastReason ? ` (last failure: ${this.#lastReason})` : "";
    const never = this.#nobodyTakesTheLogin()
      ? this.#login
      : failureOf(NotSent.code, `the ${noun} was not sent within its time: no proxy took it${because}; check that a proxy runs, then send again`);
    const text = `no proxy confirmed the ${noun} within its time${because}: its outcome is unknown, it may have been delivered; ${advice}`;
    const unknown = failureOf(OutcomeUnknown.code, text);
    let earliest = Infinity;
    for (const [position, ticket] of proxy.inFlight) {
      if (!ticket.resolved && ticket.deadline <= now) {
        this.#settle(ticket, unknown);
      }
      if (ticket.resolved && this.policy.writer) {
        proxy.inFlight.delete(position);
        proxy.inFlightBytes -= ticket.size;
      } else if (!ticket.resolved) {
        earliest = Math.min(earliest, ticket.deadline);
      }
    }
    const waiting = (ticket: Ticket): boolean => {
      if (ticket.deadline <= now) {
        this.#settle(ticket, ticket.attempts > 0 ? unknown : never);
        return false;
      }
      earliest = Math.min(earliest, ticket.deadline);
      return true;
    };
    proxy.first = proxy.first.filter(waiting);
    proxy.normal = proxy.normal.filter(waiting);
    proxy.earliest = earliest === Infinity ? now + this.policy.timeoutMs : earliest;
  }
}
