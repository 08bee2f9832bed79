/** Runs a `Sender`: its streams, its timer, and callers that wait for space. */

import type { DescMessage, DescMethodBiDiStreaming, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import { Mailer, type MailReplySchema, type MailRequestSchema } from "../gen/pixiu/wire/v1/mail_pb.js";
import { Publisher, type PublishReplySchema, type PublishRequestSchema } from "../gen/pixiu/wire/v1/wire_pb.js";
import { NotConnected, type PixiuError } from "../errors.js";
import type { BidiStream, Channels, End } from "../rpc/channels.js";
import { Alarm, Changes, now, within } from "../rpc/waiting.js";
import { failureOf, MailReceipt, type Ticket } from "./receipt.js";
import type { Batch, Effect, Outcome, Sender } from "./sender.js";

/** What happens to the streams of a sender. */
export type StreamEvent = "connected" | "reconnecting" | "moved";

/** What a shell needs of its client. */
export interface Surroundings {
  readonly client: string;
  readonly channels: Channels;
  /** Ask for the cluster's proxies again. */
  readonly refresh: () => void;
  /** A message failed that nobody awaited. */
  readonly failed: (id: bigint, error: PixiuError) => void;
  readonly event: (event: StreamEvent, address: string, reason: string) => void;
}

interface Running<I extends DescMessage, O extends DescMessage> {
  readonly address: string;
  readonly number: number;
  readonly worker: number;
  readonly generation: number;
  stream: BidiStream<I, O>;
  loans: number;
  answered: boolean;
  draining: boolean;
}

/** Runs one `Sender`; a subclass speaks the protocol. */
export abstract class SenderShell<I extends DescMessage, O extends DescMessage> {
  readonly #streams = new Map<number, Running<I, O>>();
  readonly #changes = new Changes();
  readonly #alarm = new Alarm(() => { this.#apply(this.core.tick(now())); });
  #closed = false;
  #waiting = 0;

  constructor(
    protected readonly around: Surroundings,
    readonly core: Sender,
    private readonly method: DescMethodBiDiStreaming<I, O>,
  ) {}

  protected abstract hello(stream: { readonly worker: number; readonly generation: number }, loans: Uint8Array[]): MessageInitShape<I>;
  protected abstract request(batch: Batch, loans: Uint8Array[]): MessageInitShape<I>;
  /** Give the core a reply; true in the end if the proxy is draining. */
  protected abstract heard(number: number, reply: MessageShape<O>): { effects: Effect[]; draining: boolean };

  /** Hand a message to the core. */
  offer(ticket: Ticket, timeoutMs?: number): void {
    if (this.#closed) {
      throw new NotConnected("the client is closed: connect again");
    }
    this.#apply(this.core.offer(ticket, now(), timeoutMs));
  }

  /** True if a record of `size` bytes may be offered now: nobody waits for space, and there is some. */
  hasSpace(size: number): boolean {
    return this.#waiting === 0 && this.core.hasSpace(size);
  }

  /** Wait until a record of `size` bytes may be offered, in the order of the calls. */
  async space(size: number, signal?: AbortSignal): Promise<void> {
    if (this.hasSpace(size)) {
      return;
    }
    this.#waiting += 1;
    try {
      while (!this.#closed && !this.core.hasSpace(size)) {
        await within(this.#changes.wait(), undefined, () => new Error(), signal);
      }
    } finally {
      this.#waiting -= 1;
    }
  }

  /** Wait until everything offered so far is resolved. */
  async flush(signal?: AbortSignal): Promise<void> {
    const group = this.core.closeGroup();
    while (group && !this.core.groupDone(group)) {
      await within(this.#changes.wait(), undefined, () => new Error(), signal);
    }
  }

  /** Pass on a change of the cluster's proxies. */
  setProxies(addresses: readonly string[]): void {
    if (!this.#closed) {
      this.#apply(this.core.setProxies(addresses, now()));
    }
  }

  /** End the streams; unresolved messages fail. Waits at most `graceMs` for the proxies to take the end. */
  async close(graceMs: number): Promise<void> {
    this.#closed = true;
    this.#alarm.cancel();
    const streams = [...this.#streams.values()];
    for (const each of streams) {
      each.stream.halfClose();
    }
    await within(Promise.all(streams.map((each) => each.stream.closed)), graceMs, () => new Error()).catch(() => undefined);
    this.#apply(this.core.abandon());
    for (const each of streams) {
      each.stream.cancel();
    }
    this.#streams.clear();
    this.#changes.notify();
  }

  #apply(effects: readonly Effect[]): void {
    for (const effect of effects) {
      switch (effect.do) {
        case "open":
          this.#open(effect);
          break;
        case "write":
          this.#pump(effect.stream);
          break;
        case "close":
          this.#streams.get(effect.stream)?.stream.cancel();
          this.#streams.delete(effect.stream);
          break;
        case "refresh":
          this.around.refresh();
          break;
        case "settle":
          effect.ticket.settled(effect.failure);
          if (effect.failure && !effect.ticket.receipt.awaited && effect.ticket.receipt.error) {
            this.around.failed(effect.ticket.receipt.id, effect.ticket.receipt.error);
          }
          break;
      }
    }
    this.#changes.notify();
    if (!this.#closed) {
      this.#alarm.set(this.core.nextDeadline());
    }
  }

  #open(effect: Extract<Effect, { do: "open" }>): void {
    if (this.#closed) {
      return;
    }
    const number = effect.stream;
    const stream = this.around.channels.stream(effect.address, this.method, {
      reply: (reply) => { this.#take(number, reply); },
      ended: (end) => { this.#over(number, end); },
      drained: () => { this.#pump(number); },
    });
    const { address, worker, generation } = effect;
    const running = { address, number, worker, generation, stream, loans: 0, answered: false, draining: false };
    this.#streams.set(number, running);
    stream.write(this.hello(effect, this.#loans(running)));
  }

  /** The proofs to show, if there are new ones. */
  #loans(running: Running<I, O>): Uint8Array[] {
    const { loans } = this.around.channels;
    if (running.loans === loans.version) {
      return [];
    }
    running.loans = loans.version;
    return loans.all();
  }

  #pump(number: number): void {
    const running = this.#streams.get(number);
    // A proxy that refuses the stream has taken nothing before its first answer, and its status has the reason.
    while (running?.answered === true && !running.stream.full && !this.#closed) {
      const batch = this.core.nextBatch(number, now());
      if (!batch) {
        break;
      }
      running.stream.write(this.request(batch, this.#loans(running)));
    }
    if (!this.#closed) {
      this.#alarm.set(this.core.nextDeadline());
    }
  }

  #take(number: number, reply: MessageShape<O>): void {
    const running = this.#streams.get(number);
    if (!running) {
      return;
    }
    const first = !running.answered;
    running.answered = true;
    if (first) {
      this.around.event("connected", running.address, "");
    }
    const { effects, draining } = this.heard(number, reply);
    if (draining && !running.draining) {
      running.draining = true;
      this.around.event("moved", running.address, "the proxy is draining: other proxies take new messages");
    }
    this.#apply(effects);
    if (first) {
      this.#pump(number);
    }
  }

  #over(number: number, end: End): void {
    const running = this.#streams.get(number);
    this.#streams.delete(number);
    if (!running || this.#closed) {
      return;
    }
    if (running.answered && !running.draining) {
      this.around.event("reconnecting", running.address, end.reason);
    }
    this.#apply(this.core.streamDied(number, now(), end.reason, running.answered ? "" : end.login));
  }
}

/** Publishes to rooms, topics and users, and copies of signals. */
export class PublisherShell extends SenderShell<typeof PublishRequestSchema, typeof PublishReplySchema> {
  constructor(
    around: Surroundings,
    core: Sender,
    private readonly copy = 0,
    /** Called with the signals that gateways delivered; asks for that. */
    private readonly delivered?: (ids: readonly bigint[], gateways: readonly bigint[]) => void,
  ) {
    super(around, core, Publisher.method.publish);
  }

  protected override hello(_stream: unknown, loans: Uint8Array[]): MessageInitShape<typeof PublishRequestSchema> {
    return { hello: { client: this.around.client }, loans };
  }

  protected override request(batch: Batch, loans: Uint8Array[]): MessageInitShape<typeof PublishRequestSchema> {
    const signal = this.delivered ? { copy: this.copy, receipt: true } : {};
    return { batch: batch.data, count: batch.count, position: BigInt(batch.position), more: batch.more, loans, ...signal };
  }

  protected override heard(number: number, reply: MessageShape<typeof PublishReplySchema>): { effects: Effect[]; draining: boolean } {
    if (reply.delivered.length > 0) {
      this.delivered?.(reply.delivered, reply.gateways);
    }
    const outcomes = reply.failures.map((each): Outcome => ({
      position: Number(each.first),
      count: Number(each.last - each.first) + 1,
      failure: failureOf(each.code, each.text, each.retryAfterMs),
    }));
    const { draining, windowBytes, maxBatchBytes: batchBytes, maxBatchRecords: batchRecords } = reply;
    const found = { upTo: Number(reply.upTo), outcomes, windowBytes, draining, batchBytes, batchRecords };
    return { effects: this.core.reply(number, now(), found), draining };
  }
}

/** Sends mail. */
export class MailShell extends SenderShell<typeof MailRequestSchema, typeof MailReplySchema> {
  constructor(around: Surroundings, core: Sender) {
    super(around, core, Mailer.method.send);
  }

  protected override hello(
    stream: { readonly worker: number; readonly generation: number },
    loans: Uint8Array[],
  ): MessageInitShape<typeof MailRequestSchema> {
    return { hello: { client: this.around.client, worker: stream.worker, generation: stream.generation }, loans };
  }

  protected override request(batch: Batch, loans: Uint8Array[]): MessageInitShape<typeof MailRequestSchema> {
    const more = batch.receivers.map(({ index, uins }) => ({ index, uins: [...uins] }));
    return { batch: batch.data, count: batch.count, position: BigInt(batch.position), level: batch.level, more, loans };
  }

  protected override heard(number: number, reply: MessageShape<typeof MailReplySchema>): { effects: Effect[]; draining: boolean } {
    const outcomes = reply.results.map((each): Outcome => ({
      position: Number(each.position),
      count: each.count,
      failure: each.code ? failureOf(each.code, each.text) : undefined,
      learn: (ticket, index) => {
        if (ticket.receipt instanceof MailReceipt) {
          ticket.receipt.msgId = each.msgIds[index] ?? 0n;
          ticket.receipt.copies = each.copies;
          ticket.receipt.openInboxes = each.open;
        }
      },
    }));
    const { draining, windowBytes, maxBatchBytes: batchBytes, maxBatchRecords: batchRecords } = reply;
    const found = { outcomes, windowBytes, draining, batchBytes, batchRecords, taken: Number(reply.taken) };
    const effects = this.core.reply(number, now(), found);
    if (reply.end) {
      const { code, text, retryAfterMs } = reply.end;
      effects.push(...this.core.streamDied(number, now(), `${code}: ${text}`, "", failureOf(code, text, retryAfterMs)));
    }
    return { effects, draining };
  }
}
