/** Promises and timers: waits that a signal ends, and one timer for a deadline that moves. */

import { OutcomeUnknown } from "../errors.js";

/** Monotonic milliseconds. */
export const now = (): number => performance.now();

/** A promise with the functions that settle it. */
export interface Deferred<T> {
  readonly promise: Promise<T>;
  readonly resolve: (value: T) => void;
  readonly reject: (error: unknown) => void;
}

/** Make a promise that is settled from outside. */
export function deferred<T = void>(): Deferred<T> {
  let resolve!: (value: T) => void;
  let reject!: (error: unknown) => void;
  const promise = new Promise<T>((yes, no) => {
    resolve = yes;
    reject = no;
  });
  return { promise, resolve, reject };
}

/** Wait; returns early when the signal aborts. */
export function sleep(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) {
      resolve();
      return;
    }
    const done = (): void => {
      clearTimeout(timer);
      signal.removeEventListener("abort", done);
      resolve();
    };
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", done);
  });
}

/** Times and aborts of one call. */
export interface CallOptions {
  /** Ends the wait: the call rejects with the signal's reason. What was sent is not called back. */
  readonly signal?: AbortSignal | undefined;
  /** Milliseconds; the call's own default if it is left out. */
  readonly timeoutMs?: number | undefined;
}

/** Wait for a promise, at most `ms`. Rejects with `late()` after it, and with the signal's reason when that aborts. */
export async function within<T>(promise: Promise<T>, ms: number | undefined, late: () => Error, signal?: AbortSignal): Promise<T> {
  signal?.throwIfAborted();
  const cut = deferred<never>();
  const abort = (): void => {
    cut.reject(signal?.reason);
  };
  const timer = ms === undefined ? undefined : setTimeout(() => { cut.reject(late()); }, ms);
  signal?.addEventListener("abort", abort, { once: true });
  try {
    return await Promise.race([promise, cut.promise]);
  } finally {
    clearTimeout(timer);
    signal?.removeEventListener("abort", abort);
  }
}

/** The error of a wait that was too long. */
export const late = (text: string) => (): Error => new OutcomeUnknown(text);

/** Waiters for something to change. */
export class Changes {
  #waiting: Deferred<void>[] = [];

  /** Wait for the next change. */
  wait(): Promise<void> {
    const waiter = deferred();
    this.#waiting.push(waiter);
    return waiter.promise;
  }

  /** Wait for the next change, at most `ms`. */
  async waitAtMost(ms: number): Promise<void> {
    const waiter = deferred();
    this.#waiting.push(waiter);
    const timer = setTimeout(waiter.resolve, ms);
    await waiter.promise;
    clearTimeout(timer);
    this.#waiting = this.#waiting.filter((each) => each !== waiter);
  }

  /** Wake up all that wait. */
  notify(): void {
    const waiting = this.#waiting;
    this.#waiting = [];
    for (const waiter of waiting) {
      waiter.resolve();
    }
  }
}

/** Calls `due` at a time that may be moved; `Infinity`: not at all. */
export class Alarm {
  #timer: NodeJS.Timeout | undefined;
  #at = Infinity;

  constructor(private readonly due: () => void) {}

  /** Set the time, monotonic milliseconds. */
  set(at: number): void {
    if (at === this.#at) {
      return;
    }
    this.cancel();
    this.#at = at;
    if (at !== Infinity) {
      this.#timer = setTimeout(() => {
        this.#at = Infinity;
        this.due();
      }, Math.max(1, Math.ceil(at - now())));
    }
  }

  /** Forget the time. */
  cancel(): void {
    clearTimeout(this.#timer);
    this.#at = Infinity;
  }
}
