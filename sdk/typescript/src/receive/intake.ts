/**
 * The core of receiving mail: each mail goes to the application once, and its acknowledgement back to the gateway. No I/O.
 *
 *     envelopes ──▶ new? ──▶ lane's queue ──▶ taken by the application ──▶ acknowledged ──▶ ranges to the gateway
 *                    │ no: the application has it, or will                     ▲
 *                    └── acknowledged before: its acknowledgement was lost ────┘ sent again
 *
 * A mail is identified by its MsgID, regardless of the gateway, connection or session that delivers it.
 *
 * Source: docs/delivery.md; docs/write_a_client.md, "Receive mail".
 */

import { deliveriesOf, GAP, REDELIVERED, type Delivery } from "../wire/envelope.js";
import { LANES, Message } from "../wire/record.js";
import type { GatewayStream, SeqRange } from "./gatewayStream.js";

const WINDOW = 64;
/** Limit of unacknowledged mail of one lane: what is above it, and what follows it, is not taken and comes again. */
const MAX_HELD = 4 * WINDOW;
/** Acknowledged MsgIDs of one lane that are recognized when they arrive again. */
const REMEMBERED = 4096;
const ACKNOWLEDGE_AFTER_MS = 20;
const ACKNOWLEDGE_AT = WINDOW / 2;
const MAX_DAMAGED = 3;

/** Why mail is missing: the inbox dropped it, the cluster has it no more, its lifetime is over, or it came damaged several times. */
export type GapReason = "dropped" | "gone" | "expired" | "damaged";

/** Mail of one lane that this device does not get. */
export interface MailGap {
  readonly lane: number;
  /** InboxSeq of the missing mail; with `"dropped"`, everything up to here that this device did not have yet is missing. */
  readonly upTo: bigint;
  readonly reason: GapReason;
  /** 0n: several, or not known. */
  readonly msgId: bigint;
}

/** A mail, or a gap, that is not acknowledged yet. */
export interface Held {
  readonly lane: number;
  readonly key: bigint;
  readonly msgId: bigint;
  readonly seq: bigint;
  readonly redelivered: boolean;
  readonly seqs: Set<bigint>;
  readonly message: Message | undefined;
  gap: MailGap | undefined;
  stream: GatewayStream;
  acknowledged: boolean;
}

/** Totals of one inbox. */
export interface MailCounters {
  received: number;
  /** Mail that arrived again; the application got it once. */
  repeated: number;
  acknowledged: number;
  gaps: number;
  damaged: number;
  loadTestBlocked: number;
  reconnects: number;
  moves: number;
}

class Lane {
  queue: Held[] = [];
  readonly held = new Map<bigint, Held>();
  readonly done = new Set<bigint>();
  readonly damaged = new Map<bigint, number>();
  /** InboxSeq up to which everything has arrived in this process, or was reported as a gap. */
  highest = 0n;
  /** The mail that was not taken: nothing more is taken until it arrives again. */
  left: { readonly seq: bigint; readonly stream: GatewayStream; readonly session: number } | undefined;
}

/** The core of an inbox. */
export class MailIntake {
  readonly counters: MailCounters = {
    received: 0, repeated: 0, acknowledged: 0, gaps: 0, damaged: 0, loadTestBlocked: 0, reconnects: 0, moves: 0,
  };
  readonly #lanes = Array.from({ length: LANES }, () => new Lane());
  readonly #due = new Map<GatewayStream, Map<number, Set<bigint>>>();
  #dueCount = 0;
  #dueAt = Infinity;

  constructor(private readonly uin: bigint) {}

  /** Take a batch of envelopes. False: it was damaged; leave the stream, and another one sends again what was not taken. */
  arrived(stream: GatewayStream, data: Buffer, count: number, now: number): boolean {
    const deliveries = deliveriesOf(data, count);
    if (!deliveries) {
      this.counters.damaged += 1;
      return false;
    }
    return deliveries.every((delivery) => this.#takeIn(stream, delivery, now));
  }

  #takeIn(stream: GatewayStream, delivery: Delivery, now: number): boolean {
    const lane = this.#lanes[delivery.lane];
    if (!lane || delivery.uin !== this.uin) {
      return true;
    }
    const key = delivery.msgId || -delivery.seq;
    const held = lane.held.get(key);
    if (held) {
      this.counters.repeated += 1;
      held.stream = stream;
      held.seqs.add(delivery.seq);
    } else if (lane.done.has(key)) {
      this.counters.repeated += 1;
      this.#acknowledgeTo(stream, delivery.lane, [delivery.seq], now);
    } else if (delivery.flags & GAP && !delivery.msgId && delivery.seq <= lane.highest) {
      this.#acknowledgeTo(stream, delivery.lane, [delivery.seq], now); // everything up to there has arrived already
    } else if (!this.#leaves(lane, stream, delivery)) {
      return this.#hold(lane, stream, delivery, key);
    }
    return true;
  }

  /** True if there is no space for a mail; its lane then waits for it, so that the order is kept. */
  #leaves(lane: Lane, stream: GatewayStream, delivery: Delivery): boolean {
    const { left } = lane;
    if (left && (left.stream !== stream || left.session !== delivery.session || delivery.seq <= left.seq)) {
      lane.left = undefined;
    }
    if (!lane.left && lane.held.size >= MAX_HELD) {
      lane.left = { seq: delivery.seq, stream, session: delivery.session };
    }
    return lane.left !== undefined;
  }

  #hold(lane: Lane, stream: GatewayStream, delivery: Delivery, key: bigint): boolean {
    let message: Message | undefined;
    let reason: GapReason | undefined;
    if (delivery.flags & GAP) {
      reason = delivery.msgId ? "gone" : "dropped";
    } else {
      try {
        message = new Message(delivery.record);
      } catch {
        this.counters.damaged += 1;
        const times = (lane.damaged.get(key) ?? 0) + 1;
        if (times <= MAX_DAMAGED) {
          lane.damaged.set(key, times);
          return false;
        }
        reason = "damaged";
      }
    }
    lane.damaged.delete(key);
    const { lane: number, msgId, seq } = delivery;
    const held: Held = {
      lane: number, key, msgId, seq, redelivered: (delivery.flags & REDELIVERED) !== 0, seqs: new Set([seq]), message,
      gap: reason && { lane: number, upTo: seq, reason, msgId }, stream, acknowledged: false,
    };
    this.counters.received += message ? 1 : 0;
    lane.held.set(key, held);
    lane.queue.push(held);
    lane.highest = seq > lane.highest ? seq : lane.highest;
    return true;
  }

  /** The next mail or gap, the first lane first. `nowMs`: Unix milliseconds; mail whose lifetime is over is a gap. */
  take(nowMs: number): Held | undefined {
    for (const lane of this.#lanes) {
      const held = lane.queue.shift();
      if (held) {
        if (held.message?.isOver(nowMs) === true) {
          held.gap = { lane: held.lane, upTo: held.seq, reason: "expired", msgId: held.msgId };
        }
        this.counters.gaps += held.gap ? 1 : 0;
        return held;
      }
    }
    return undefined;
  }

  /** Acknowledge a mail for the application. */
  acknowledge(held: Held, now: number): void {
    const lane = this.#lanes[held.lane];
    if (held.acknowledged || !lane) {
      return;
    }
    held.acknowledged = true;
    lane.held.delete(held.key);
    const oldest = lane.done.values().next();
    if (lane.done.size >= REMEMBERED && oldest.done !== true) {
      lane.done.delete(oldest.value);
    }
    lane.done.add(held.key);
    this.counters.acknowledged += held.gap ? 0 : 1;
    this.#acknowledgeTo(held.stream, held.lane, held.seqs, now);
  }

  /** Number of mails and gaps here that are not acknowledged. */
  get held(): number {
    return this.#lanes.reduce((count, lane) => count + lane.held.size, 0);
  }

  /** Add a stream that may deliver mail and take acknowledgements. */
  opened(stream: GatewayStream): void {
    this.#due.set(stream, new Map());
  }

  /** Remove a stream that has ended: mail whose acknowledgement it had not taken arrives again, and is acknowledged there. */
  closed(stream: GatewayStream): void {
    for (const seqs of this.#due.get(stream)?.values() ?? []) {
      this.#dueCount -= seqs.size;
    }
    this.#due.delete(stream);
    this.#dueAt = this.#dueCount > 0 ? this.#dueAt : Infinity;
  }

  #acknowledgeTo(stream: GatewayStream, lane: number, seqs: Iterable<bigint>, now: number): void {
    const lanes = this.#due.get(stream);
    if (!lanes) {
      return;
    }
    const due = lanes.get(lane) ?? new Set();
    lanes.set(lane, due);
    const before = due.size;
    for (const seq of seqs) {
      due.add(seq);
    }
    this.#dueCount += due.size - before;
    this.#dueAt = this.#dueAt === Infinity ? now + ACKNOWLEDGE_AFTER_MS : this.#dueAt;
  }

  /** Time at which acknowledgements are due; `Infinity` if there are none. */
  nextDeadline(): number {
    return this.#dueCount >= ACKNOWLEDGE_AT ? 0 : this.#dueAt;
  }

  /** Take all acknowledgements that are due. They count as sent. */
  acknowledgements(): [GatewayStream, SeqRange[]][] {
    const found: [GatewayStream, SeqRange[]][] = [];
    for (const [stream, lanes] of this.#due) {
      const ranges = [...lanes].flatMap(([lane, seqs]) => rangesOf(lane, seqs));
      if (ranges.length > 0) {
        found.push([stream, ranges]);
      }
      lanes.clear();
    }
    this.#dueCount = 0;
    this.#dueAt = Infinity;
    return found;
  }
}

function rangesOf(lane: number, seqs: ReadonlySet<bigint>): SeqRange[] {
  const found: { lane: number; first: bigint; last: bigint }[] = [];
  for (const seq of [...seqs].sort((a, b) => (a < b ? -1 : 1))) {
    const before = found.at(-1);
    if (before?.last === seq - 1n) {
      before.last = seq;
    } else {
      found.push({ lane, first: seq, last: seq });
    }
  }
  return found;
}
