/**
 * A client's connection to one gateway at a time; when that one leaves, it moves to another.
 *
 *     choose ──▶ greet ──▶ serve ──▶ the gateway drains: prepare another one, move to it without a gap
 *       ▲                    │
 *       └──── back-off ◀─────┘ the connection was lost
 *
 * Source: docs/write_a_client.md, "Receive rooms and chat"; docs/promises.md, "Failure rules".
 */

import { status as Status } from "@grpc/grpc-js";
import type { SubscribeReply } from "../gen/pixiu/wire/v1/wire_pb.js";
import {
  errorOfCode, LocalError, LoginReplaced, NotConnected, NotServed, OutcomeUnknown, Overloaded, PixiuError, Unavailable, Unreachable,
} from "../errors.js";
import type { Directory } from "../directory.js";
import type { ClientOptions } from "../options.js";
import { Backoff, Reconnects, Resting, retryAfter } from "../rpc/backoff.js";
import { loginError, type Channels } from "../rpc/channels.js";
import { now, sleep, within, type CallOptions } from "../rpc/waiting.js";
import { GatewayStream, Waiter, type Greeting } from "./gatewayStream.js";

/** Clients of a draining gateway leave it at a random moment within this time. */
const MOVE_JITTER_MS = 1_000;
/**
 * Requests that a draining gateway answers, one after the other, before it is left: a gateway, or a client, that was slow has caught up by
 * then. The first answer may overtake messages that wait beside it.
 */
const ANSWERS = 2;
/** Time for each of these answers; without it messages may be missing. */
const ANSWER_MS = 5_000;
const GONE_EARLY = "the gateway was gone before another one had confirmed";
const ASK_AGAIN_MS = 1_000;
const MAX_ASK_AGAIN_MS = 60_000;
const MAX_NAMES = 1_000;

/** State of a subscription or an inbox. */
export type ConnectionState = "connected" | "reconnecting" | "moved" | "closed";

/** What happened to a connection. */
export interface ConnectionEvent {
  readonly state: ConnectionState;
  /** `"subscription"`, `"inbox"` or `"publisher"`. */
  readonly what: string;
  /** The subscription, inbox or client. */
  readonly source: unknown;
  /** `host:port` of the gateway or proxy; empty: none has answered yet. */
  readonly address: string;
  readonly reason: string;
}

/** What a connection needs of its client. */
export interface ConnectionContext {
  readonly options: ClientOptions;
  readonly channels: Channels;
  readonly directory: Directory;
  readonly onClose: (connection: GatewayConnection) => void;
  readonly event: (event: ConnectionEvent) => void;
}

/** A gateway that is ready to take over, and what it has sent meanwhile. */
interface Prepared {
  readonly stream: GatewayStream;
  readonly held: readonly SubscribeReply[];
}

/** Keeps one client connected to a gateway. */
export abstract class GatewayConnection {
  protected abstract readonly what: string;
  /** Time for which a gateway is still read after the client left it; 0 if nothing undelivered can get lost. */
  protected abstract readonly lingerMs: number;
  protected readonly rooms_ = new Set<bigint>();
  protected readonly topics_ = new Set<string>();
  protected stream: GatewayStream | undefined;
  protected error: PixiuError | undefined;
  protected reason = "";
  protected readonly ending = new AbortController();
  readonly #resting = new Resting();
  readonly #start = Math.floor(Math.random() * 1_000_000);
  #waiters: Waiter[] = [];
  #running: Promise<void> | undefined;
  #answeredAt: number | undefined;
  #confirmed = false;
  #last = "";

  constructor(protected readonly around: ConnectionContext) {}

  protected abstract greeting(): Greeting;
  /** Process the content of a reply. `held`: it arrived before this gateway took over. */
  protected abstract content(stream: GatewayStream, reply: SubscribeReply, held: boolean): Promise<void> | void;
  /** The connection was lost: messages of the time between may be missing. */
  protected abstract lost(): void;
  protected abstract moved(): void;
  /** Two gateways begin to serve (`begins`), or only one does again. */
  protected abstract overlap(begins: boolean): void;
  /** Something changed: wake up whoever waits. */
  protected abstract nudge(): void;
  /** A stream was opened, or is over. */
  protected streamOpened?(stream: GatewayStream): void;
  protected streamOver?(stream: GatewayStream): void;

  /** `host:port` of the gateway that serves now; empty while there is none. */
  get gateway(): string {
    return this.stream?.address ?? "";
  }

  /** True if it was closed. */
  get closed(): boolean {
    return this.ending.signal.aborted;
  }

  protected checkOpen(): void {
    if (this.closed) {
      throw new NotConnected(`the ${this.what} is closed; make a new one`);
    }
    if (this.error) {
      throw this.error;
    }
  }

  protected start(): void {
    this.#running ??= this.#run();
  }

  /** Wait until the whole cluster has what is wanted. */
  protected async settle(rooms: ReadonlySet<bigint>, topics: ReadonlySet<string>, call: CallOptions): Promise<void> {
    this.checkOpen();
    this.start();
    const ms = call.timeoutMs ?? this.around.options.joinTimeoutMs;
    const waiter = new Waiter(rooms, topics);
    this.#waiters.push(waiter);
    if (this.stream) {
      this.#catchUp(this.stream);
    }
    this.nudge(); // the reader must go on even if the buffer is full
    const late = (): Error =>
      new OutcomeUnknown(
        `the request did not take effect within ${ms / 1000} s (${this.whyLate("did not confirm it")}); ` +
          "the client repeats it until a gateway confirms it",
      );
    try {
      await within(waiter.done, ms, late, call.signal);
    } finally {
      this.#waiters = this.#waiters.filter((each) => each !== waiter);
    }
  }

  protected whyLate(missed: string): string {
    return this.gateway ? `gateway ${this.gateway} ${missed}` : `no gateway: ${this.reason || "none answered yet"}`;
  }

  protected async stop(): Promise<void> {
    if (!this.closed) {
      this.ending.abort();
      this.nudge();
      this.stream?.close();
      await this.#running;
      this.#failWaiters(new NotConnected(`the ${this.what} was closed`));
      this.around.onClose(this);
      if (!this.error) {
        this.#announce("closed");
      }
    }
  }

  #announce(state: ConnectionState, reason = ""): void {
    this.around.event({ state, what: this.what, source: this, address: this.#last, reason });
  }

  async #run(): Promise<void> {
    try {
      await this.#serveForEver();
    } catch (error) {
      this.error = error instanceof PixiuError ? error : new PixiuError(`the ${this.what} failed: ${String(error)}`);
      this.#failWaiters(this.error);
      this.#announce("closed", this.error.message);
      this.nudge();
    }
  }

  async #serveForEver(): Promise<void> {
    const { options, directory } = this.around;
    const giveUp = now() + options.connectTimeoutMs;
    const reconnects = new Reconnects(new Backoff(options.backoffMs, options.maxBackoffMs));
    let served = false;
    while (!this.closed) {
      const address = this.#choose(reconnects.failures);
      this.#answeredAt = undefined;
      this.#confirmed = false;
      if (address) {
        await sleep(this.#resting.left(address, now()), this.ending.signal);
        if (this.closed) {
          return;
        }
        await this.#serveGateway(address, served);
        served ||= this.#answered();
        if (this.#answered() && !this.closed) {
          this.#announce("reconnecting", this.reason);
        }
      } else {
        this.reason = "the cluster has no gateway; start one";
      }
      directory.refresh();
      if (!served && now() >= giveUp) {
        throw new Unreachable(`no gateway accepted the ${this.what} within ${options.connectTimeoutMs / 1000} s (${this.reason})`);
      }
      const lived = this.#answeredAt === undefined ? 0 : now() - this.#answeredAt;
      await sleep(reconnects.lost(lived, this.#confirmed), this.ending.signal);
    }
  }

  #answered(): boolean {
    return this.#answeredAt !== undefined;
  }

  /** Choose a gateway: each connection begins with a random one, and takes the next ones after failures. */
  #choose(failures: number, avoid = ""): string {
    const known = this.around.directory.map.gateways;
    const at = known.length > 0 ? this.#start % known.length : 0;
    const order = [...known.slice(at), ...known.slice(0, at)].filter((address) => address !== avoid);
    const usable = this.#resting.usable(order, now());
    return usable.length > 0 ? (usable[failures % usable.length] ?? "") : "";
  }

  #open(address: string): GatewayStream {
    const stream = new GatewayStream(address, this.around.channels, this.greeting());
    this.streamOpened?.(stream);
    return stream;
  }

  /** Serve from one gateway, and from those it hands over to, until a connection is lost. */
  async #serveGateway(address: string, reconnect: boolean): Promise<void> {
    let stream = this.#open(address);
    let why = "";
    try {
      this.#catchUp(stream);
      await within(stream.read(), this.around.options.connectTimeoutMs, () => new Unavailable("no answer in time"), this.ending.signal);
      if (!stream.end || stream.end.status === Status.OK) {
        this.#answeredAt = now();
        if (reconnect) {
          this.lost();
        }
        this.stream = stream;
        this.#last = address;
        this.#announce("connected");
        this.#catchUp(stream); // names that were asked for meanwhile
        for (let next = await this.#serve(stream); next; next = await this.#serve(stream)) {
          this.#end(stream);
          stream = this.stream = next;
          this.#catchUp(stream);
        }
      }
    } catch (error) {
      if (this.closed) {
        return;
      }
      if (!(error instanceof Unavailable)) {
        throw error;
      }
      why = error.message;
    } finally {
      this.stream = undefined;
      this.#confirmed = stream.settled && !stream.lacking;
      this.#end(stream);
    }
    const { end } = stream;
    this.#resting.refused(stream.address, end?.retryAfterMs ?? 0, now());
    this.reason = `${stream.address}: ${why || (end?.reason ?? "")}`;
    if (end?.refused === true && !why) {
      throw loginError(end) ?? new Unavailable(`the gateway refused the ${this.what} (${this.reason})`);
    }
  }

  /** Close a stream. The next stream answers the waiting callers; those it cannot answer fail now. */
  #end(stream: GatewayStream): void {
    for (const waiter of stream.close()) {
      if (waiter.lost) {
        waiter.finish(waiter.lost);
      } else {
        this.#waiters.push(waiter);
      }
    }
    this.streamOver?.(stream);
  }

  #catchUp(stream: GatewayStream): void {
    const waiters = this.#waiters.filter((waiter) => !waiter.settled);
    this.#waiters = [];
    try {
      stream.reconcile(this.rooms_, this.topics_, waiters);
    } catch (error) {
      waiters.forEach((waiter) => { waiter.finish(error as PixiuError); });
    }
  }

  /** Deliver what a gateway sends. Returns the stream to continue with, undefined when this one ended. */
  async #serve(stream: GatewayStream): Promise<GatewayStream | undefined> {
    let successor: Promise<{ prepared: Prepared | undefined }> | undefined;
    const ending = new AbortController();
    let ended = false;
    let used = false;
    try {
      for (;;) {
        if (stream.draining && !successor) {
          this.overlap(true);
          successor = this.#prepare(stream.address, AbortSignal.any([ending.signal, this.ending.signal])).then((prepared) => ({ prepared }));
        }
        const reading = ended ? undefined : stream.read().then((reply) => ({ reply }));
        const found = await Promise.race([...(successor ? [successor] : []), ...(reading ? [reading] : [])]);
        if (this.closed) {
          return undefined;
        }
        if ("prepared" in found) {
          if (found.prepared) {
            used = true;
            try {
              const missing = ended ? GONE_EARLY : await this.#readRest(stream);
              await this.#move(found.prepared, stream.address, missing);
            } catch (error) {
              this.#end(found.prepared.stream);
              throw error;
            }
            return found.prepared.stream;
          }
          if (ended) {
            return undefined;
          }
          // No other gateway is available: stay until this one ends.
          stream.draining = false;
          successor = undefined;
          this.overlap(false);
          continue;
        }
        stream.take();
        // The end of a gateway that is leaving is no failure; nor is LOGIN_REPLACED: the device's other connection is the successor.
        const over = found.reply === undefined || (successor !== undefined && found.reply.errorCode === LoginReplaced.code);
        if (over && !successor) {
          return undefined;
        }
        if (over) {
          ended = true;
        } else if (found.reply) {
          await this.#take(stream, found.reply, false);
        }
      }
    } finally {
      this.overlap(false);
      ending.abort();
      if (successor && !used) {
        const { prepared } = await successor;
        if (prepared) {
          this.#end(prepared.stream);
        }
      }
    }
  }

  /**
   * Deliver what the old gateway still sends; replies of the new one are held, so that the order is kept. Returns why messages may be
   * missing; empty: none are.
   */
  async #readRest(stream: GatewayStream): Promise<string> {
    if (this.lingerMs === 0 || !(await this.#readFor(stream, this.lingerMs))) {
      return "";
    }
    for (let count = 0; count < ANSWERS; count += 1) {
      const answer = new Waiter(new Set(), new Set(), new NotConnected("the gateway was left"));
      stream.acknowledge([], answer);
      if (!(await this.#readFor(stream, ANSWER_MS, answer))) {
        return "";
      }
      if (!answer.settled) {
        return `the draining gateway ${stream.address} did not answer within ${ANSWER_MS / 1000} s`;
      }
    }
    return "";
  }

  /** Deliver what a gateway that is leaving sends, for a time, or until it has answered. False at its end. */
  async #readFor(stream: GatewayStream, ms: number, answer?: Waiter): Promise<boolean> {
    const until = now() + ms;
    while (now() < until && answer?.settled !== true) {
      const reading = stream.read().then((reply) => ({ reply }));
      const found = await within(reading, until - now(), () => new Unavailable("read"), this.ending.signal).catch(() => undefined);
      if (this.closed) {
        return false;
      }
      if (found) {
        const { reply } = found;
        if (!reply || reply.errorCode === LoginReplaced.code) {
          return false;
        }
        stream.take();
        await this.#take(stream, reply, false);
      }
    }
    return true;
  }

  /** Join everything at another gateway while the old one still delivers. Replies that arrive meanwhile are held. */
  async #prepare(avoid: string, signal: AbortSignal): Promise<Prepared | undefined> {
    const { options, directory } = this.around;
    await sleep(MOVE_JITTER_MS * Math.random(), signal);
    directory.refresh();
    const address = this.#choose(0, avoid);
    if (!address || signal.aborted) {
      return undefined;
    }
    const stream = this.#open(address);
    const held: SubscribeReply[] = [];
    const deadline = now() + options.joinTimeoutMs;
    let size = 0;
    try {
      stream.reconcile(this.rooms_, this.topics_, []);
      while (!stream.settled && size < options.receiveBytes) {
        const reply = await within(stream.read(), deadline - now(), () => new Unavailable("no answer in time"), signal);
        stream.take();
        if (!reply || reply.errorCode || reply.draining) {
          throw new Unavailable("it refused");
        }
        stream.confirmed(reply.request);
        held.push(reply);
        size += reply.batch.length + reply.mail.length;
      }
      return { stream, held };
    } catch {
      this.#end(stream);
      return undefined;
    }
  }

  /** `missing`: why more may be missing than what came from the old gateway. */
  async #move(prepared: Prepared, old: string, missing: string): Promise<void> {
    this.#last = prepared.stream.address;
    this.moved();
    this.#announce("moved", `the previous gateway, ${old}, is draining`);
    if (missing) {
      this.reason = missing;
      this.lost();
    }
    for (const reply of prepared.held) {
      await this.#take(prepared.stream, reply, true);
    }
  }

  async #take(stream: GatewayStream, reply: SubscribeReply, held: boolean): Promise<void> {
    if (reply.uin) {
      stream.maxNames = Math.min(reply.maxNames || MAX_NAMES, MAX_NAMES);
    }
    stream.draining ||= reply.draining;
    if (reply.errorCode) {
      this.#refused(stream, reply);
    } else if (reply.request) {
      stream.confirmed(reply.request);
    }
    await this.content(stream, reply, held);
  }

  /** Handle a refusal. Waiting callers get the error; else an error of ours ends the connection, and any other tries another gateway. */
  #refused(stream: GatewayStream, reply: SubscribeReply): void {
    const retryAfterMs = Number(reply.retryAfterMs);
    const { rooms, topics, told } = stream.refused(reply.request, reply.errorCode, reply.errorText, retryAfterMs);
    for (const waiter of told) {
      waiter.rooms.forEach((room) => rooms.has(room) && this.rooms_.delete(room));
      waiter.topics.forEach((topic) => topics.has(topic) && this.topics_.delete(topic));
    }
    const wanted = [...rooms].some((room) => this.rooms_.has(room)) || [...topics].some((topic) => this.topics_.has(topic));
    if (told.length > 0 && !wanted) {
      return;
    }
    if (reply.errorCode === Overloaded.code && wanted) {
      this.#askAgain(stream, Math.min(retryAfterMs || ASK_AGAIN_MS, MAX_ASK_AGAIN_MS));
      return;
    }
    const text = `gateway ${stream.address} refused: ${reply.errorText}`;
    const error = errorOfCode(reply.errorCode, text);
    throw error instanceof LocalError || error instanceof NotServed ? error : new Unavailable(text);
  }

  /** Join again later, because joins overload the gateway; another stream with all rooms would load it more. */
  #askAgain(stream: GatewayStream, ms: number): void {
    if (!stream.lacking) {
      stream.lacking = true;
      void sleep(retryAfter(ms), this.ending.signal).then(() => {
        stream.lacking = false;
        if (this.stream === stream) {
          this.#catchUp(stream);
        }
      });
    }
  }

  #failWaiters(error: PixiuError): void {
    const waiters = this.#waiters;
    this.#waiters = [];
    waiters.forEach((waiter) => { waiter.finish(error); });
  }
}
