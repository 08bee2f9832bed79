/**
 * The SnowflakeID worker number: lent by a proxy, renewed before it expires, and given back at the end. It has a stream of its own, so
 * that it outlives the streams of messages.
 *
 * Source: docs/write_a_client.md, "A worker number"; docs/identifiers.md.
 */

import { Publisher, type PublishReply, type PublishRequestSchema, type PublishReplySchema } from "./gen/pixiu/wire/v1/wire_pb.js";
import { NotConnected, NotSent, type PixiuError } from "./errors.js";
import { SnowflakeGenerator, WORKERS } from "./ids.js";
import type { ClientOptions } from "./options.js";
import { Backoff, Resting, retryAfter } from "./rpc/backoff.js";
import { loginError, type BidiStream, type Channels, type End } from "./rpc/channels.js";
import { Changes, deferred, now, sleep, within } from "./rpc/waiting.js";

const RENEW_RETRY_MS = 5_000;
/** A number with less time left than this is no longer used. */
const MIN_LEFT_MS = 50;

/** Holds a worker number from its first use, and makes SnowflakeIDs with it. */
export class WorkerLease {
  readonly #generator = new SnowflakeGenerator(Date.now);
  readonly #changed = new Changes();
  readonly #resting = new Resting();
  readonly #ending = new AbortController();
  #running: Promise<void> | undefined;
  #stream: BidiStream<typeof PublishRequestSchema, typeof PublishReplySchema> | undefined;
  #login: PixiuError | undefined;
  #reason = "no proxy answered";
  #refused = "";
  #fromMs = 0;
  #lent = 0;

  constructor(
    private readonly client: string,
    private readonly options: ClientOptions,
    private readonly channels: Channels,
    private readonly proxies: () => readonly string[],
  ) {}

  /** The current number; meaningless before `ready`. */
  get worker(): number {
    return this.#generator.worker;
  }

  /** True if an ID can be made now, without waiting. */
  usable(): boolean {
    return this.#generator.usable(MIN_LEFT_MS);
  }

  /** The next ID. Throws `NotSent`; ask `usable` or `ready` before. */
  next(): bigint {
    return this.#generator.next();
  }

  /** Wait until an ID can be made. Rejects with `NotSent` after `publishTimeoutMs`, `NotAuthenticated` for a refused login. */
  async ready(signal?: AbortSignal): Promise<void> {
    if (this.usable()) {
      return;
    }
    this.#running ??= this.#hold();
    this.#login = undefined;
    const deadline = now() + this.options.publishTimeoutMs;
    while (!this.usable()) {
      if (this.#ending.signal.aborted) {
        throw new NotConnected("the client is closed: connect again");
      }
      const late = (): Error =>
        new NotSent(
          `no proxy lent a worker number for message IDs within ${this.options.publishTimeoutMs / 1000} s (${this.#reason}); ` +
            "check the proxies, and that this machine's clock is right",
        );
      await within(this.#changed.wait(), deadline - now(), late, signal);
      if (this.#login) {
        throw this.#login as PixiuError;
      }
    }
  }

  /** Give the number back, waiting at most `graceMs` for the proxy to take it. */
  async close(graceMs: number): Promise<void> {
    const stream = this.#stream;
    this.#ending.abort();
    this.#changed.notify();
    if (stream && this.#generator.untilMs) {
      const lastUsedMs = Math.min(Math.max(this.#generator.lastUsedMs, this.#fromMs), this.#generator.untilMs - 1);
      stream.write({ lastUsedMs: BigInt(lastUsedMs) });
      stream.halfClose();
      await within(stream.closed, graceMs, () => new Error()).catch(() => undefined);
    }
    stream?.cancel();
    await this.#running;
  }

  async #hold(): Promise<void> {
    const { signal } = this.#ending;
    const backoff = new Backoff(this.options.backoffMs, this.options.maxBackoffMs);
    while (!signal.aborted) {
      const proxies = this.#resting.usable(this.proxies(), now());
      let at = Math.floor(Math.random() * proxies.length);
      if (proxies.length > 1 && proxies[at] === this.#refused) {
        at = (at + 1) % proxies.length;
      }
      const address = proxies[at] ?? "";
      await sleep(this.#resting.left(address, now()), signal);
      if (this.#ending.signal.aborted) {
        return;
      }
      const before = this.#lent;
      const end = await this.#serve(address);
      if (signal.aborted) {
        return;
      }
      this.#resting.refused(address, retryAfter(end.retryAfterMs), now());
      this.#refused = address;
      this.#reason = `${address}: ${end.reason}`;
      this.#login = loginError(end);
      if (this.#login) {
        this.#changed.notify();
      }
      if (this.#lent > before) {
        backoff.reset();
      }
      await sleep(backoff.next(), signal);
    }
  }

  /** Hold a number at one proxy until the stream ends or the proxy is leaving. */
  async #serve(address: string): Promise<Pick<End, "reason" | "login" | "retryAfterMs">> {
    const over = deferred<Pick<End, "reason" | "login" | "retryAfterMs">>();
    const generator = this.#generator;
    let timer: NodeJS.Timeout | undefined;
    let waiting = false;
    const stream = this.channels.stream(address, Publisher.method.publish, {
      reply: (reply) => {
        if (this.#take(reply)) {
          waiting = false;
          arm();
        }
        if (reply.draining) {
          over.resolve({ reason: "the proxy is draining", login: "", retryAfterMs: 0 }); // the number stays ours until it expires
        }
      },
      ended: (end) => { over.resolve(end); },
    });
    const arm = (): void => {
      clearTimeout(timer);
      const left = generator.untilMs - Math.max(Date.now(), this.#fromMs);
      timer = setTimeout(() => {
        if (waiting && !this.usable()) {
          over.resolve({ reason: "it answered, but lent no worker number", login: "", retryAfterMs: 0 });
          return;
        }
        waiting = true;
        stream.write({ renewWorker: true });
        arm();
      }, Math.max(left / 2, Math.min(RENEW_RETRY_MS, this.options.publishTimeoutMs / 4)));
    };
    const held = generator.untilMs > 0 ? { returnedWorker: generator.worker, returnedUntilMs: BigInt(generator.untilMs) } : {};
    stream.write({ hello: { client: this.client, lendWorker: true, ...held } });
    waiting = true;
    arm();
    this.#stream = stream;
    try {
      const closed = stream.closed.then(() => ({ reason: "the client was closed", login: "", retryAfterMs: 0 }));
      return await Promise.race([over.promise, closed]);
    } finally {
      clearTimeout(timer);
      if (!this.#ending.signal.aborted) {
        this.#stream = undefined;
        stream.cancel();
      }
    }
  }

  #take(reply: PublishReply): boolean {
    const failure = reply.failures[0];
    if (failure) {
      this.#reason = `${failure.code}: ${failure.text}`;
    }
    const fromMs = Number(reply.workerFromMs);
    const untilMs = Number(reply.workerUntilMs);
    if (untilMs === 0 || reply.worker >= WORKERS || fromMs >= untilMs) {
      return false;
    }
    if (reply.worker === this.#generator.worker && untilMs < this.#generator.untilMs) {
      return false; // an older answer than the one in use
    }
    this.channels.loans.add(reply.worker, fromMs, reply.loan);
    this.#generator.lease(reply.worker, fromMs, untilMs);
    this.#fromMs = fromMs;
    this.#lent += 1;
    this.#changed.notify();
    return true;
  }
}
