/** The inbox of one device of a user: each mail once, until it is acknowledged. Source: docs/mail.md, docs/delivery.md. */

import type { SubscribeReply } from "../gen/pixiu/wire/v1/wire_pb.js";
import { NotAllowed, NotConnected, OutcomeUnknown, Unavailable } from "../errors.js";
import { Alarm, Changes, now, within, type CallOptions } from "../rpc/waiting.js";
import type { Headers } from "../wire/headers.js";
import type { Message } from "../wire/record.js";
import { GatewayConnection, type ConnectionContext } from "./gatewayConnection.js";
import { Waiter, type GatewayStream, type Greeting } from "./gatewayStream.js";
import { MailIntake, type Held, type MailCounters, type MailGap } from "./intake.js";
import { aborted, loadTestOf, passes, type LoadTest } from "./subscription.js";

const CLOSE_GRACE_MS = 1_000;

/** Which mail an inbox takes. */
export interface InboxOptions {
  /** Name of the device, which stays the same; default: the client's name. */
  readonly device?: string;
  /** Default: `"block"`. */
  readonly loadTest?: LoadTest;
  /** Called, in the mail's order, for mail that this device does not get. */
  readonly onGap?: (gap: MailGap) => void;
}

/** A mail. It comes again, to the device's next inbox, until it is acknowledged. */
export class Mail {
  /** Made by an inbox. */
  constructor(
    private readonly inbox: Inbox,
    private readonly held: Held,
    /** The message in it. */
    readonly message: Message,
  ) {}

  /** The cluster's ID of the mail. */
  get msgId(): bigint {
    return this.held.msgId;
  }
  /** Its place in the lane of the inbox. */
  get seq(): bigint {
    return this.held.seq;
  }
  /** The lane: 0 comes before 1. */
  get lane(): number {
    return this.held.lane;
  }
  /** True if it was sent to the device before, and may have arrived. */
  get redelivered(): boolean {
    return this.held.redelivered;
  }
  /** UIN of the sender; 0 for a service. */
  get sender(): bigint {
    return this.message.sender;
  }
  /** Bytes that were sent. */
  get body(): Uint8Array {
    return this.message.body;
  }
  /** Headers; empty if it has none. */
  get headers(): Headers {
    return this.message.headers;
  }

  /** The body as UTF-8. */
  text(): string {
    return this.message.text();
  }

  /** Acknowledge it: it does not come to this device again. Leaves with others within 20 ms; `Inbox.flush` waits for it. */
  acknowledge(): void {
    this.inbox.acknowledge(this.held);
  }
}

/**
 * Mail of one device of a user: `for await (const mail of inbox) { …; mail.acknowledge(); }`. Each lane delivers at most 64 mails ahead
 * of the oldest unacknowledged one.
 */
export class Inbox extends GatewayConnection implements AsyncIterable<Mail>, AsyncDisposable {
  protected override readonly what = "inbox";
  protected override readonly lingerMs = 0;
  readonly #intake: MailIntake;
  readonly #arrived = new Changes();
  readonly #timer = new Alarm(() => { this.#send(); });
  readonly #loadTest: LoadTest;

  /** Made by `Client.inbox`. */
  constructor(
    around: ConnectionContext,
    private readonly given: InboxOptions,
    private readonly who: Omit<Greeting, "chat" | "mail">,
  ) {
    super(around);
    this.#loadTest = loadTestOf(given.loadTest);
    this.#intake = new MailIntake(who.uin);
  }

  /** The user whose mail it receives. */
  get uin(): bigint {
    return this.who.uin;
  }

  /** Totals since the inbox was opened. */
  get counters(): Readonly<MailCounters> {
    return this.#intake.counters;
  }

  /** Number of mails in this process, taken or not, that are not acknowledged. */
  get unacknowledged(): number {
    return this.#intake.held;
  }

  /** Connect, and wait until the cluster delivers to this device. */
  async ready(call: CallOptions = {}): Promise<this> {
    await this.settle(new Set(), new Set(), call);
    return this;
  }

  /** The next mail, of the first lane that has any; undefined once the inbox is closed. Rejects with the error that ended it. */
  async next(signal?: AbortSignal): Promise<Mail | undefined> {
    while (!this.closed) {
      const held = this.#intake.take(Date.now());
      if (!held) {
        if (this.error) {
          throw this.error;
        }
        this.start();
        await aborted(this.#arrived.wait(), signal);
      } else if (held.gap) {
        this.given.onGap?.(held.gap);
        this.acknowledge(held);
      } else if (held.message && !passes(this.#loadTest, held.message.loadTest)) {
        this.#intake.counters.loadTestBlocked += 1;
        this.acknowledge(held);
      } else if (held.message) {
        return new Mail(this, held, held.message);
      }
    }
    return undefined;
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Mail, void, undefined> {
    for (let mail = await this.next(); mail; mail = await this.next()) {
      yield mail;
    }
  }

  /** Acknowledge a mail; called by `Mail.acknowledge`. Throws `NotConnected` once the inbox is closed. */
  acknowledge(held: Held): void {
    if (held.acknowledged) {
      return;
    }
    if (this.closed) {
      throw new NotConnected("the inbox is closed: the mail is not acknowledged, and comes again to the device's next inbox");
    }
    this.#intake.acknowledge(held, now());
    this.#timer.set(this.#intake.nextDeadline());
  }

  /**
   * Wait until a gateway has all acknowledgements. Rejects with `OutcomeUnknown` when the connection was lost meanwhile: mail whose
   * acknowledgement was lost comes again, and is acknowledged by itself.
   */
  async flush(call: CallOptions = {}): Promise<void> {
    this.checkOpen();
    this.start();
    const ms = call.timeoutMs ?? this.around.options.joinTimeoutMs;
    const late = (): Error => new OutcomeUnknown(`no gateway took the acknowledgements within ${ms / 1000} s (${this.whyLate("did not answer")})`);
    const ending = new AbortController();
    const signals = call.signal ? [call.signal, ending.signal] : [ending.signal];
    try {
      await within(this.#flush(AbortSignal.any(signals)), ms, late, call.signal);
    } finally {
      ending.abort();
    }
  }

  /** Send the last acknowledgements (at most a second) and stop. Mail that is not acknowledged is delivered again. */
  async close(): Promise<void> {
    if (!this.closed && this.stream && !this.error) {
      await this.flush({ timeoutMs: CLOSE_GRACE_MS }).catch(() => undefined);
    }
    this.#timer.cancel();
    await this.stop();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  async #flush(signal: AbortSignal): Promise<void> {
    while (!this.stream) {
      if (this.error) {
        throw this.error;
      }
      await aborted(this.#arrived.wait(), signal);
    }
    this.#send();
    const text = "the connection was lost before the gateway confirmed the acknowledgements: what it did not get is delivered again";
    const waiter = new Waiter(new Set(), new Set(), new OutcomeUnknown(text));
    this.stream.acknowledge([], waiter);
    await aborted(waiter.done, signal);
  }

  #send(): void {
    this.#timer.cancel();
    for (const [stream, ranges] of this.#intake.acknowledgements()) {
      stream.acknowledge(ranges);
    }
  }

  // --- called by the connection

  protected override greeting(): Greeting {
    return { ...this.who, chat: false, mail: true };
  }

  protected override streamOpened(stream: GatewayStream): void {
    this.#intake.opened(stream);
  }

  protected override streamOver(stream: GatewayStream): void {
    this.#intake.closed(stream);
  }

  protected override overlap(): void {
    // Mail is known by its MsgID: two gateways need no more.
  }

  protected override lost(): void {
    this.#intake.counters.reconnects += 1;
  }

  protected override moved(): void {
    this.#intake.counters.moves += 1;
  }

  protected override nudge(): void {
    this.#arrived.notify();
  }

  protected override content(stream: GatewayStream, reply: SubscribeReply): void {
    this.nudge();
    if (reply.revokedTopics.length > 0) {
      throw new NotAllowed(`the permission to read this inbox has ended${reply.errorText ? `: ${reply.errorText}` : ""}`);
    }
    if (reply.mailCount > 0) {
      const data = Buffer.from(reply.mail.buffer, reply.mail.byteOffset, reply.mail.length);
      const sound = this.#intake.arrived(stream, data, reply.mailCount, now());
      this.#timer.set(this.#intake.nextDeadline());
      this.nudge();
      if (!sound) {
        throw new Unavailable(`mail that gateway ${stream.address} sent was damaged on the way; it is asked for again`);
      }
    }
  }
}
