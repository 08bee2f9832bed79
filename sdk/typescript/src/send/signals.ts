/**
 * Signals: three copies by three proxies, repeated until a gateway confirms delivery.
 *
 *     offer ─▶ copies 0, 1, 2 ─▶ accepted: one copy is with a broker   ─▶ resolved without a receipt
 *                   ▲            │
 *                   │            └─ delivered: a gateway confirms it   ─▶ resolved with a receipt; further gateways are counted
 *                   └── 200 ms without it, three times, then Undelivered
 *
 * Source: docs/write_a_client.md, "Send to rooms and users"; docs/protocol.md, "Publisher.Publish".
 */

import { NotConnected, Overloaded, Undelivered } from "../errors.js";
import type { ClientOptions } from "../options.js";
import { Alarm, now } from "../rpc/waiting.js";
import { failureOf, PERHAPS, Ticket, type Failure, type SignalReceipt } from "./receipt.js";
import { roomPolicy, Sender } from "./sender.js";
import { PublisherShell, type Surroundings } from "./shell.js";

const COPIES = 3;
const REPEAT_AFTER_MS = 200;
const REPEATS = 3;
/** Signals of a client whose outcome is not known; more are refused as `Overloaded`. */
const MAX_UNRESOLVED = 10_000;
/** Delivered signals whose further gateways are counted. */
const MAX_COUNTED = 10_000;
/** Failures for which sending again does not help. */
const LASTING: ReadonlySet<string> = new Set(["INVALID_ARGUMENT", "RECORD_TOO_LARGE"]);

interface Signal {
  readonly record: Buffer;
  readonly key: bigint;
  readonly firstLane: boolean;
  readonly wantsReceipt: boolean;
  readonly receipt: SignalReceipt;
  readonly gateways: Set<bigint>;
  tries: number;
  openCopies: number;
  accepted: boolean;
  due: number;
  failure: Failure | undefined;
  resolved: boolean;
}

/** All signals of one client. */
export class Signals {
  readonly #shells: PublisherShell[];
  /** Unresolved signals with a receipt, in the order in which they are due. */
  readonly #awaited = new Map<bigint, Signal>();
  /** Signals with a receipt whose gateways are counted; the oldest goes first. */
  readonly #counted = new Map<bigint, Signal>();
  readonly #alarm = new Alarm(() => { this.#tick(); });
  readonly #begin = Math.floor(Math.random() * 1_000_000);
  #unresolved = 0;
  #closed = false;

  constructor(
    private readonly around: Surroundings,
    options: ClientOptions,
    proxies: readonly string[],
  ) {
    this.#shells = Array.from({ length: COPIES }, (_, copy) => {
      const core = new Sender(roomPolicy(options), this.#order(proxies, copy));
      return new PublisherShell({ ...around, failed: () => undefined, event: () => undefined }, core, copy, (ids, gateways) => {
        ids.forEach((id, index) => { this.#delivered(id, gateways[index] ?? 0n); });
      });
    });
  }

  /** Send a signal. Throws `Overloaded` when too many are unresolved. */
  send(record: Buffer, id: bigint, key: bigint, firstLane: boolean, wantsReceipt: boolean, receipt: SignalReceipt): void {
    if (this.#closed) {
      throw new NotConnected("the client is closed: connect again");
    }
    if (this.#unresolved >= MAX_UNRESOLVED) {
      throw new Overloaded(`${this.#unresolved} signals are not confirmed: await some of them first`);
    }
    receipt.id = id;
    this.#unresolved += 1;
    this.#sendCopies({
      record, key, firstLane, wantsReceipt, receipt, gateways: new Set(), tries: 0, openCopies: 0, accepted: false, due: 0,
      failure: undefined, resolved: false,
    });
  }

  /** Pass on a change of the cluster's proxies. */
  setProxies(addresses: readonly string[]): void {
    this.#shells.forEach((shell, copy) => { shell.setProxies(this.#order(addresses, copy)); });
  }

  /** End the streams; signals that wait for a receipt fail. */
  async close(graceMs: number): Promise<void> {
    this.#closed = true;
    this.#alarm.cancel();
    for (const signal of [...this.#awaited.values()]) {
      this.#resolve(signal, failureOf(Undelivered.code, "the client was closed before a gateway confirmed the signal"));
    }
    await Promise.all(this.#shells.map((shell) => shell.close(graceMs)));
  }

  /** Proxies of a copy: turned, so that the copies of one key go to different ones. */
  #order(proxies: readonly string[], copy: number): string[] {
    const at = (this.#begin + copy) % proxies.length;
    return [...proxies.slice(at), ...proxies.slice(0, at)];
  }

  #sendCopies(signal: Signal): void {
    signal.tries += 1;
    signal.openCopies += COPIES;
    if (signal.wantsReceipt) {
      const { id } = signal.receipt;
      signal.due = now() + REPEAT_AFTER_MS;
      this.#awaited.delete(id);
      this.#awaited.set(id, signal);
      this.#counted.set(id, signal);
      const oldest = this.#counted.keys().next();
      if (this.#counted.size > MAX_COUNTED && oldest.done !== true) {
        this.#counted.delete(oldest.value);
      }
      this.#arm();
    }
    for (const shell of this.#shells) {
      const done = (failure: Failure | undefined): void => { this.#copyDone(signal, failure); };
      shell.offer(new Ticket(signal.record, signal.key, signal.firstLane, signal.receipt, done));
    }
  }

  #copyDone(signal: Signal, failure: Failure | undefined): void {
    signal.openCopies -= 1;
    if (signal.resolved) {
      return;
    }
    if (!failure) {
      signal.accepted = true;
      if (!signal.wantsReceipt) {
        this.#resolve(signal, undefined);
      }
      return;
    }
    if (!signal.failure || !PERHAPS.has(signal.failure.code)) {
      signal.failure = failure;
    }
    if (signal.openCopies === 0 && !signal.accepted && (!signal.wantsReceipt || LASTING.has(signal.failure.code))) {
      this.#resolve(signal, signal.failure);
    }
  }

  #delivered(id: bigint, gateway: bigint): void {
    const signal = this.#counted.get(id);
    if (signal && !signal.gateways.has(gateway)) {
      signal.gateways.add(gateway);
      signal.receipt.gateways = signal.gateways.size;
      if (!signal.resolved) {
        this.#resolve(signal, undefined);
      }
    }
  }

  #tick(): void {
    const at = now();
    for (const signal of [...this.#awaited.values()]) {
      if (signal.due > at) {
        break;
      }
      if (signal.tries > REPEATS) {
        const why = signal.accepted ? "brokers have it" : `no broker confirmed it${signal.failure ? ` (${signal.failure.text})` : ""}`;
        const text =
          `no gateway confirmed the signal, sent ${signal.tries} times in ${signal.tries * REPEAT_AFTER_MS} ms; ${why}. ` +
          "Perhaps the room is empty; the outcome is unknown, and sending it again may deliver it twice";
        this.#resolve(signal, failureOf(Undelivered.code, text));
      } else {
        this.#sendCopies(signal);
      }
    }
    this.#arm();
  }

  #arm(): void {
    const next = this.#awaited.values().next();
    this.#alarm.set(next.done === true ? Infinity : next.value.due);
  }

  #resolve(signal: Signal, failure: Failure | undefined): void {
    signal.resolved = true;
    this.#unresolved -= 1;
    this.#awaited.delete(signal.receipt.id);
    if (failure) {
      this.#counted.delete(signal.receipt.id);
    }
    signal.receipt.settle(failure);
    if (signal.receipt.error && !signal.receipt.awaited) {
      this.around.failed(signal.receipt.id, signal.receipt.error);
    }
  }
}
