/** Messages from their offer until they are resolved, and the receipts of them. */

import { Level } from "../gen/pixiu/wire/v1/level_pb.js";
import { errorOfCode, NotSent, OutcomeUnknown, type PixiuError } from "../errors.js";
import { deferred, type Deferred } from "../rpc/waiting.js";

/** The reason why messages failed; shared by all of a range. */
export interface Failure {
  readonly code: string;
  readonly text: string;
  readonly retryAfterMs: number;
}

export const failureOf = (code: string, text: string, retryAfterMs = 0): Failure => ({ code, text, retryAfterMs });

/** Failures that themselves mean that the message may have been delivered. */
export const PERHAPS: ReadonlySet<string> = new Set(["OUTCOME_UNKNOWN", "DROPPED", "UNDELIVERED", "TOO_OLD"]);
/** Refusals that every attempt of the message gets. */
const ALWAYS: ReadonlySet<string> = new Set(["RECORD_TOO_LARGE", "TOO_MANY_RECEIVERS"]);

/** The failure of a message with an earlier attempt that was not answered: the answer to a later one does not settle it. */
export function inDoubt(why: Failure, advice: string): Failure {
  if (PERHAPS.has(why.code) || ALWAYS.has(why.code)) {
    return why;
  }
  const text = `${why.code}: ${why.text}; an earlier attempt was not answered and may have been delivered: ${advice}`;
  return failureOf(OutcomeUnknown.code, text, why.retryAfterMs);
}

/** What a message that is closed with its client gets. */
export function closedFailure(attempts: number): Failure {
  const text = "the client was closed before it was confirmed";
  return attempts > 0 ? failureOf(OutcomeUnknown.code, `${text}: its outcome is unknown`) : failureOf(NotSent.code, `${text}; it was not sent`);
}

/**
 * Receipt of a message: `await receipt.confirmed()` waits until it is confirmed, and throws its failure.
 *
 * A failed receipt that nobody awaits is reported to the client's `onFailure`, and never as an unhandled rejection.
 */
export class Receipt {
  /** The sender's ID of the message; 0n until it has one. */
  id = 0n;
  /** The failure; undefined if there is none, or the outcome is not known yet. */
  error: PixiuError | undefined;
  #done = false;
  #waiting: Deferred<void> | undefined;

  /** True if the outcome is known. */
  get done(): boolean {
    return this.#done;
  }

  /** True if somebody waits. */
  get awaited(): boolean {
    return this.#waiting !== undefined;
  }

  /** Wait until the message is confirmed. Rejects with its failure. */
  confirmed(): Promise<void> {
    if (!this.#waiting) {
      this.#waiting = deferred();
      if (this.#done) {
        this.#finish();
      }
    }
    return this.#waiting.promise;
  }

  /** Called when the outcome is known. */
  settle(failure: Failure | undefined): void {
    this.error = failure && errorOfCode(failure.code, failure.text, failure.retryAfterMs);
    this.#done = true;
    this.#finish();
  }

  #finish(): void {
    if (this.error) {
      this.#waiting?.reject(this.error);
    } else {
      this.#waiting?.resolve();
    }
  }
}

/** Receipt of a mail. */
export class MailReceipt extends Receipt {
  /** The cluster's ID of the mail; 0n until it is confirmed. */
  msgId = 0n;
  /** How many replicas have it, at least. */
  copies = 0;
  /** Of a mail to several users that failed: inboxes that may not have it. */
  openInboxes: readonly bigint[] = [];
}

/** Receipt of a signal. */
export class SignalReceipt extends Receipt {
  /** Gateways that confirmed delivery: 1 when awaiting returns, more within milliseconds; 0 without `receipt`. */
  gateways = 0;
}

/** Messages that one `flush` waits for. */
export class Group {
  unresolved = 0;
}

/** A message on its way. */
export class Ticket {
  /** Number of the offer, from 1. */
  number = 0;
  deadline = 0;
  /** Attempts that were sent, without those that a proxy refused unseen. */
  attempts = 0;
  /** True if an earlier attempt was sent and not answered. */
  inDoubt = false;
  resolved = false;
  group: Group | undefined;
  readonly size: number;

  constructor(
    readonly record: Buffer,
    readonly key: bigint,
    readonly firstLane: boolean,
    readonly receipt: Receipt,
    /** Called once with the failure, or without one. */
    readonly settled: (failure: Failure | undefined) => void = (failure) => { receipt.settle(failure); },
    readonly level = Level.REPLICATED,
    readonly more: readonly bigint[] = [],
  ) {
    this.size = record.length + 8 * more.length;
  }
}
