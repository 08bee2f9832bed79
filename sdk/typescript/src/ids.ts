/** The identifiers of Pixiu, 64 bits wide and so `bigint`, and the generator of SnowflakeIDs. Source: docs/identifiers.md. */

import { InvalidArgument, NotSent } from "./errors.js";

/** An ID as callers may give it: a `number` has to be a safe integer. */
export type Id = bigint | number;

export const SNOWFLAKE_EPOCH_MS = 1_577_836_800_000;
export const WORKERS = 4096;
export const MAX_ID = (1n << 63n) - 1n;
export const MAX_ROOM = (1n << 62n) - 1n;
const MAX_DEVICE = (1n << 47n) - 1n;
const SEQUENCES = 1024;

function within(id: Id, lowest: bigint, highest: bigint, what: string, range: string): bigint {
  const number = typeof id === "bigint" ? id : Number.isSafeInteger(id) ? BigInt(id) : -1n;
  if (number < lowest || number > highest) {
    throw new InvalidArgument(`${what} is from ${range}, not ${id}`);
  }
  return number;
}

/** Check a RoomID. Throws `InvalidArgument`. */
export const roomOf = (id: Id): bigint => within(id, 1n, MAX_ROOM, "a RoomID", "1 to 2^62-1");
/** Check a UIN. Throws `InvalidArgument`. */
export const uinOf = (id: Id): bigint => within(id, 1n, MAX_ID, "a UIN", "1 to 2^63-1");
/** Check the UIN of a client; 0: a service. Throws `InvalidArgument`. */
export const uinOrService = (id: Id): bigint => within(id, 0n, MAX_ID, "a UIN", "0 to 2^63-1");
/** Check a DeviceID; 0: derived from the client's name. Throws `InvalidArgument`. */
export const deviceOf = (id: Id): bigint => within(id, 0n, MAX_DEVICE, "a DeviceID", "1 to 2^47-1");
/** Check the progress of a message; 0: none. Throws `InvalidArgument`. */
export const progressOf = (number: Id): bigint => within(number, 0n, (1n << 64n) - 1n, "progress", "1 to 2^64-1, or 0 for none");

/** A SnowflakeID: 41 bits of ms since 2020-01-01, 12 bits worker, 10 bits sequence. */
export function snowflake(timeMs: number, worker: number, sequence: number): bigint {
  return (BigInt(timeMs - SNOWFLAKE_EPOCH_MS) << 22n) | BigInt(worker * SEQUENCES + sequence);
}

/** The Unix milliseconds in a SnowflakeID. */
export const snowflakeTimeMs = (id: bigint): number => Number(id >> 22n) + SNOWFLAKE_EPOCH_MS;

/**
 * Makes SnowflakeIDs with a worker number that is lent for a range of time. Its clock never goes back.
 *
 * Source: docs/identifiers.md.
 */
export class SnowflakeGenerator {
  worker = 0;
  untilMs = 0;
  lastUsedMs = 0;
  #sequence = 0;

  constructor(private readonly clockMs: () => number) {}

  /** True if an ID can be made now, and for `spareMs` more. */
  usable(spareMs = 0): boolean {
    const at = Math.max(this.clockMs(), this.lastUsedMs);
    return at >= SNOWFLAKE_EPOCH_MS && at < this.untilMs - spareMs;
  }

  /** Use a worker number for times in [fromMs, untilMs), Unix milliseconds. */
  lease(worker: number, fromMs: number, untilMs: number): void {
    if (worker !== this.worker || fromMs > this.lastUsedMs) {
      this.lastUsedMs = worker !== this.worker ? Math.max(fromMs - 1, 0) : Math.max(this.lastUsedMs, fromMs - 1);
      this.#sequence = SEQUENCES - 1;
    }
    this.worker = worker;
    this.untilMs = untilMs;
  }

  /** The next ID. Throws `NotSent` when the time of the worker number is over; ask `usable` before. */
  next(): bigint {
    let at = this.clockMs();
    let sequence = 0;
    if (at <= this.lastUsedMs) {
      at = this.lastUsedMs;
      sequence = this.#sequence + 1;
      if (sequence >= SEQUENCES) {
        at += 1;
        sequence = 0;
      }
    }
    if (at < SNOWFLAKE_EPOCH_MS || at >= this.untilMs) {
      throw new NotSent("the worker number for message IDs is over; check that this machine's clock is right");
    }
    this.lastUsedMs = at;
    this.#sequence = sequence;
    return snowflake(at, this.worker, sequence);
  }
}
