/** Waits between failed attempts, with jitter; and servers that asked to be left alone. Times are milliseconds. */

const MAX_DOUBLINGS = 32;
/** Lifetime after which a connection counts as a success. */
const PROVEN_MS = 10_000;
/** Share by which the wait that a server named is extended at most. */
const RETRY_JITTER = 0.25;

/** The wait that a server named, with jitter, because it refused many together. */
export const retryAfter = (ms: number): number => ms * (1 + RETRY_JITTER * Math.random());

/** Waits double from `firstMs` to `maxMs`, and each is shortened by up to a half, at random. */
export class Backoff {
  failures = 0;

  constructor(
    private readonly firstMs: number,
    private readonly maxMs: number,
  ) {}

  /** Count a failure; the wait before the next attempt. */
  next(): number {
    this.failures += 1;
    return this.after(this.failures);
  }

  /** Note a success. */
  reset(): void {
    this.failures = 0;
  }

  /** The wait after this many failures in a row. */
  after(failures: number): number {
    const longest = Math.min(this.firstMs * 2 ** Math.min(failures - 1, MAX_DOUBLINGS), this.maxMs);
    return longest * (0.5 + 0.5 * Math.random());
  }
}

/** Waits before a lost connection is made again: they grow until one has proved itself. */
export class Reconnects {
  failures = 0;

  constructor(private readonly backoff: Backoff) {}

  /** Note the end of a connection that lived `livedMs` since its first answer; `confirmed`: it had confirmed all requests. */
  lost(livedMs: number, confirmed: boolean): number {
    this.failures = confirmed && livedMs >= PROVEN_MS ? 1 : this.failures + 1;
    return this.backoff.after(this.failures);
  }
}

/** Addresses of servers that asked to be left alone for a time: others are used first. */
export class Resting {
  readonly #until = new Map<string, number>();

  /** Note the time that a server named; 0: it may be asked at once. */
  refused(address: string, ms: number, now: number): void {
    for (const [each, until] of this.#until) {
      if (until <= now || each === address) {
        this.#until.delete(each);
      }
    }
    if (ms > 0) {
      this.#until.set(address, now + ms);
    }
  }

  /** Milliseconds for which an address must be left alone. */
  left(address: string, now: number): number {
    return Math.max((this.#until.get(address) ?? now) - now, 0);
  }

  /** The addresses that may be used now, in their order; if there are none, the one that may be used first. */
  usable(addresses: readonly string[], now: number): string[] {
    const rested = addresses.filter((address) => this.left(address, now) === 0);
    return rested.length > 0 ? rested : [...addresses].sort((a, b) => this.left(a, now) - this.left(b, now)).slice(0, 1);
  }
}
