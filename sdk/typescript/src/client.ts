/** The client: `await connect("host:port")`. Source: docs/sdk.md. */

import { randomBytes } from "node:crypto";
import { Level } from "./gen/pixiu/wire/v1/level_pb.js";
import { Presence } from "./gen/pixiu/wire/v1/wire_pb.js";
import { Directory, type ClusterMap } from "./directory.js";
import {
  Dropped, InvalidArgument, NotConnected, NotSent, Overloaded, OutcomeUnknown, PixiuError, TooManyReceivers, Unavailable,
} from "./errors.js";
import { loadHash, topicRoom } from "./hash.js";
import { deviceOf, roomOf, uinOf, uinOrService, type Id } from "./ids.js";
import { checkTopic } from "./names.js";
import { optionsOf, type ClientOptions } from "./options.js";
import { Backoff } from "./rpc/backoff.js";
import { CallError, Channels, type TlsOptions, type Token } from "./rpc/channels.js";
import { Changes, late, now, sleep, within, type CallOptions } from "./rpc/waiting.js";
import type { ConnectionContext, ConnectionEvent, GatewayConnection } from "./receive/gatewayConnection.js";
import type { Greeting } from "./receive/gatewayStream.js";
import { Inbox, type InboxOptions } from "./receive/inbox.js";
import { Subscription, type SubscribeOptions } from "./receive/subscription.js";
import { Replies, replyHeaders, whereToReply } from "./requests.js";
import { MailReceipt, Receipt, SignalReceipt, Ticket } from "./send/receipt.js";
import { mailPolicy, MailWriterNumber, roomPolicy, Sender, type SendCounters } from "./send/sender.js";
import { MailShell, PublisherShell, type Surroundings } from "./send/shell.js";
import { Signals } from "./send/signals.js";
import { parseTarget } from "./target.js";
import { TopicAdmin } from "./topics/admin.js";
import { bytesOf, DurableTopic, type Body, type TopicContext } from "./topics/durableTopic.js";
import { TopicDirectory } from "./topics/topicDirectory.js";
import { TopicCore } from "./topics/writer.js";
import { encodeHeaders, type Headers } from "./wire/headers.js";
import { WorkerLease } from "./worker.js";
import { checkDraft, encode, Flag, Kind, sizeOf, typeOf, withTopic, type Draft, type Message } from "./wire/record.js";

const CLOSE_GRACE_MS = 1_000;
/** How long a message that was dropped on the way is sent again. */
const DROPPED_MS = 10_000;
const MAX_RECEIVERS = 1_000;
const MAX_PRESENCE = 1_000;
const PRESENCE_TRIES = 3;
/** Events that wait for a slow iterator; the oldest goes first. */
const MAX_EVENTS = 1_000;

/** Who connects, and options. */
export interface ConnectOptions extends Partial<ClientOptions>, TlsOptions {
  /** The user; default: a service. */
  readonly uin?: Id;
  /** Name for logs and metrics, and of the device for mail, for which it stays the same. Default: a random one. */
  readonly client?: string;
  /** DeviceID of a subscriber, 1 to 2^47-1; default: derived from the client's name. */
  readonly device?: Id;
  /** What kind of device it is, such as "phone". */
  readonly deviceClass?: string;
  /** The login; default: the environment's PIXIU_TOKEN. */
  readonly token?: Token;
  /** Ends the attempt to connect. */
  readonly signal?: AbortSignal;
  /** Called for each message that failed while nobody awaited it. */
  readonly onFailure?: (failure: { readonly id: bigint; readonly error: PixiuError }) => void;
  /** Called with events of connections; must be quick. */
  readonly onConnection?: (event: ConnectionEvent) => void;
}

/** Options of a message. */
export interface SendOptions {
  /** A number for the application, 0 to 63. */
  readonly type?: number;
  /** Texts by name; receivers read them as `message.headers`. */
  readonly headers?: Headers;
  /** Bytes beside the body, instead of headers. */
  readonly extension?: Uint8Array;
  /** Overtake messages of the normal lane. */
  readonly firstLane?: boolean;
  /** Lifetime in whole minutes; default: no limit. */
  readonly lifetimeMinutes?: number;
  /** It belongs to a load test: receivers do not get it unless they ask for such. */
  readonly loadTest?: boolean;
}

/** Options of a mail. */
export interface MailOptions extends Omit<SendOptions, "firstLane"> {
  /** Further receivers, at most 1,000 in all; the body is stored once. */
  readonly to?: Iterable<Id>;
  /** 0 is delivered before 1, the default. */
  readonly lane?: 0 | 1;
  /** When it is confirmed: on all replicas in sync (the default), on both leaders' disks, in both leaders' logs. */
  readonly level?: "replicated" | "persisted" | "accepted";
}

/** Presence of one user. */
export interface UserPresence {
  readonly uin: bigint;
  /** Devices that are connected now. */
  readonly devices: number;
  readonly online: boolean;
}

/** Connect to a cluster. `target`: `host:port,host:port` of some proxies, or `zk://host:port/root`; default: the environment's PIXIU_TARGET. */
export async function connect(target?: string, options: ConnectOptions = {}): Promise<Client> {
  const client = new Client(target ?? process.env.PIXIU_TARGET ?? "", options);
  try {
    await client.start(options.signal);
  } catch (error) {
    await client.close();
    throw error;
  }
  return client;
}

/** A client of a cluster; `close` it, or use `await using`. */
export class Client implements AsyncDisposable {
  /** The user; 0n: a service. */
  readonly uin: bigint;
  readonly name: string;
  readonly options: ClientOptions;
  /** Durable topics of the cluster. */
  readonly topics: TopicAdmin;
  readonly #given: ConnectOptions;
  readonly #greeting: Omit<Greeting, "chat" | "mail">;
  readonly #channels: Channels;
  readonly #directory: Directory;
  readonly #topicDirectory: TopicDirectory;
  readonly #topicContext: TopicContext;
  readonly #topicWriters = new Map<string, Promise<TopicCore>>();
  readonly #users = new Set<{ close: () => Promise<void> }>();
  readonly #connections = new Set<GatewayConnection & { close: () => Promise<void> }>();
  readonly #surroundings: Surroundings;
  readonly #listeners = new Set<(event: ConnectionEvent | undefined) => void>();
  readonly #ending = new AbortController();
  readonly #lease: WorkerLease;
  #closing: Promise<void> | undefined;
  /** Messages that were sent before there was a number for their IDs. */
  readonly #early: { readonly draft: Draft; readonly receipt: Receipt }[] = [];
  #publisher: PublisherShell | undefined;
  #mails: MailShell | undefined;
  #signals: Signals | undefined;
  #replies: Replies | undefined;

  /** Use `connect`. Throws `InvalidArgument`, `ConfigurationError`. */
  constructor(target: string, given: ConnectOptions) {
    const parsed = parseTarget(target);
    this.#given = given;
    this.options = optionsOf({ ...given });
    this.uin = uinOrService(given.uin ?? 0n);
    this.name = given.client ?? `node-${randomBytes(6).toString("hex")}`;
    if (Buffer.byteLength(this.name) > 128) {
      throw new InvalidArgument("a client's name has at most 128 bytes");
    }
    this.#greeting = { uin: this.uin, client: this.name, device: deviceOf(given.device ?? 0n), deviceClass: given.deviceClass ?? "" };
    this.#channels = new Channels(given, given.token);
    this.#directory = new Directory(parsed, this.options, this.#channels, (map) => { this.#onMap(map); });
    const proxies = (): readonly string[] => this.#directory.map.proxies;
    this.#lease = new WorkerLease(this.name, this.options, this.#channels, proxies);
    this.#topicDirectory = new TopicDirectory(this.#channels, this.options, proxies);
    this.topics = new TopicAdmin(this.#topicDirectory);
    const failed = (id: bigint, error: PixiuError): void => { given.onFailure?.({ id, error }); };
    this.#topicContext = {
      client: this.name, directory: this.#topicDirectory, users: this.#users, admin: this.topics,
      failed: (error) => { failed(0n, error); },
      writer: (topic) => this.#topicWriter(topic),
    };
    this.#surroundings = {
      client: this.name, channels: this.#channels, refresh: () => { this.#directory.refresh(); }, failed,
      event: (state, address, reason) => { this.#tell({ state, what: "publisher", source: this, address, reason }); },
    };
  }

  /** Called by `connect`. */
  async start(signal: AbortSignal | undefined): Promise<void> {
    await loadHash();
    await this.#directory.start(signal);
  }

  /** Proxies and gateways of the cluster, as known last. */
  get cluster(): ClusterMap {
    return this.#directory.map;
  }

  // --- sending

  /** A room to send to. */
  room(id: Id): Room {
    return new Room(this, Kind.ROOM, roomOf(id), undefined);
  }

  /** A free topic to send to. It is not stored. */
  topic(name: string): Destination {
    return new Destination(this, Kind.ROOM, topicRoom(checkTopic(name)), name);
  }

  /** A user to send chat, signals and mail to. */
  user(uin: Id): User {
    return new User(this, uinOf(uin));
  }

  /** A durable topic, which is stored and replicated. */
  durableTopic(name: string): DurableTopic {
    this.#checkOpen();
    return new DurableTopic(this.#topicContext, name);
  }

  // --- receiving

  /** Subscribe to rooms, free topics, and to messages of the client's user. It connects when it is iterated, or by `ready`. */
  subscribe(options: SubscribeOptions): Subscription {
    this.#checkOpen();
    if (options.chat === true && this.uin === 0n) {
      throw new InvalidArgument("messages to a user need a user: connect(target, { uin: … })");
    }
    return this.#opened(new Subscription(this.#context(), options, this.#greeting));
  }

  /** The inbox of a device of the client's user. */
  inbox(options: InboxOptions = {}): Inbox {
    this.#checkOpen();
    if (this.uin === 0n) {
      throw new InvalidArgument("mail belongs to a user: connect(target, { uin: … })");
    }
    const device = options.device ?? this.#given.client ?? "";
    if (!device && this.#greeting.device === 0n) {
      throw new InvalidArgument("mail is kept for a device, which needs a name that stays the same: inbox({ device: … })");
    }
    const greeting = options.device === undefined ? this.#greeting : { ...this.#greeting, client: options.device, device: 0n };
    return this.#opened(new Inbox(this.#context(), options, greeting));
  }

  /** Who is online, in the order of `uins`. Rejects with `Unavailable` when no proxy can answer. */
  async presence(uins: Iterable<Id>, call: CallOptions = {}): Promise<UserPresence[]> {
    this.#checkOpen();
    const wanted = [...uins].map(uinOf);
    const found: UserPresence[] = [];
    for (let start = 0; start < wanted.length; start += MAX_PRESENCE) {
      const reply = await this.#askPresence(wanted.slice(start, start + MAX_PRESENCE), call);
      found.push(...reply.map(({ uin, devices }) => ({ uin, devices, online: devices > 0 })));
    }
    return found;
  }

  async #askPresence(uins: bigint[], call: CallOptions): Promise<readonly { uin: bigint; devices: number }[]> {
    const failures: string[] = [];
    for (const address of this.#directory.map.proxies.slice(0, PRESENCE_TRIES)) {
      try {
        const ms = call.timeoutMs ?? this.options.publishTimeoutMs;
        return (await this.#channels.unary(address, Presence.method.query, { uins }, ms, call.signal)).users;
      } catch (error) {
        if (!(error instanceof CallError)) {
          throw error;
        }
        failures.push(`${address}: ${error.message}`);
        if (error.end.refused) {
          break;
        }
      }
    }
    throw new Unavailable(`no proxy could answer who is online (${failures.join("; ") || "the cluster has no proxy"}); try again`);
  }

  /** Events of all connections from now on, until the client is closed or the loop is left. An iterator that lags loses the oldest. */
  async *connectionEvents(): AsyncGenerator<ConnectionEvent, void, undefined> {
    const events: ConnectionEvent[] = [];
    const changes = new Changes();
    let closed = false;
    const listen = (event: ConnectionEvent | undefined): void => {
      if (event) {
        events.push(event);
        events.splice(0, Math.max(0, events.length - MAX_EVENTS));
      } else {
        closed = true;
      }
      changes.notify();
    };
    this.#listeners.add(listen);
    try {
      for (;;) {
        for (let event = events.shift(); event; event = events.shift()) {
          yield event;
        }
        if (closed || this.closed) {
          return;
        }
        await changes.wait();
      }
    } finally {
      this.#listeners.delete(listen);
    }
  }

  /**
   * Answer a request that a subscription of the client received, and wait until the answer is accepted; options and errors as for
   * `Destination.send`. Rejects with `InvalidArgument` if the message asks for no reply.
   */
  reply(message: Message, body: Body, options: SendOptions & CallOptions = {}): Promise<Receipt> {
    return failing(() => {
      const { room, id } = whereToReply(message);
      return this.room(room).send(body, { loadTest: message.loadTest, ...options, headers: replyHeaders(id, options) });
    });
  }

  // --- the end

  /** True if the client was closed. */
  get closed(): boolean {
    return this.#ending.signal.aborted;
  }

  /** Totals of messages to rooms, topics and users. */
  get counters(): Readonly<SendCounters> | undefined {
    return this.#publisher?.core.counters;
  }

  /** Wait until all messages, without mail and durable topics, that were sent so far are resolved. */
  async flush(call: CallOptions = {}): Promise<void> {
    this.#checkOpen();
    await within(this.#publisher?.flush(call.signal) ?? Promise.resolve(), call.timeoutMs, late("not all messages are resolved"), call.signal);
  }

  /** Close everything that belongs to the client: unresolved messages fail, and nothing is left running. */
  close(): Promise<void> {
    this.#closing ??= this.#close();
    return this.#closing;
  }

  async #close(): Promise<void> {
    this.#ending.abort();
    this.#failEarly(new NotSent("the client was closed before it was confirmed; it was not sent"));
    await Promise.all([...this.#connections].map((connection) => connection.close()));
    await Promise.all([...this.#users].map((user) => user.close()));
    await Promise.all([this.#publisher?.close(CLOSE_GRACE_MS), this.#mails?.close(CLOSE_GRACE_MS), this.#signals?.close(CLOSE_GRACE_MS)]);
    await this.#lease.close(CLOSE_GRACE_MS);
    await this.#topicDirectory.close();
    await this.#directory.close();
    this.#channels.close();
    if (this.#publisher) {
      this.#tell({ state: "closed", what: "publisher", source: this, address: "", reason: "" });
    }
    this.#listeners.forEach((listen) => { listen(undefined); });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  // --- called by destinations

  /** Send a draft and wait until it is confirmed; again, with the same ID, while it is refused for now or dropped. */
  async send(draft: Draft, call: CallOptions): Promise<Receipt> {
    this.#checkOpen();
    call.signal?.throwIfAborted();
    const timeoutMs = call.timeoutMs ?? this.options.publishTimeoutMs;
    const begin = now();
    const deadline = begin + timeoutMs;
    const tooLate = late(`the message was not confirmed within ${timeoutMs / 1000} s; it may have been delivered`);
    await within(this.#lease.ready(call.signal), timeoutMs, tooLate, call.signal);
    this.#checkOpen();
    const publisher = this.#publish();
    await within(publisher.space(sizeOf(draft), call.signal), deadline - now(), tooLate, call.signal);
    if (!this.#lease.usable()) {
      await this.#lease.ready(call.signal);
    }
    this.#offerEarly();
    const id = this.#lease.next();
    const record = encode(draft, id, this.uin);
    const backoff = new Backoff(this.options.backoffMs, this.options.maxBackoffMs);
    for (;;) {
      const receipt = new Receipt();
      receipt.id = id;
      publisher.offer(new Ticket(record, draft.key, draft.type < 64, receipt), Math.max(1, deadline - now()));
      try {
        await within(receipt.confirmed(), deadline - now() + CLOSE_GRACE_MS, tooLate, call.signal);
        return receipt;
      } catch (error) {
        const again = error instanceof Dropped && now() < begin + DROPPED_MS;
        const wait = again ? backoff.next() : error instanceof Overloaded ? error.retryAfterMs : 0;
        if (wait === 0 || now() + wait >= deadline || this.closed) {
          throw error;
        }
        await sleep(wait, call.signal ? AbortSignal.any([call.signal, this.#ending.signal]) : this.#ending.signal);
        call.signal?.throwIfAborted();
        this.#checkOpen();
      }
    }
  }

  /** Send a request by `send`, and wait for its reply. */
  async request(
    options: SendOptions & CallOptions,
    send: (options: SendOptions & CallOptions) => Promise<Receipt>,
  ): Promise<Message> {
    this.#checkOpen();
    const timeoutMs = options.timeoutMs ?? this.options.publishTimeoutMs;
    const deadline = now() + timeoutMs;
    if (!this.#replies || this.#replies.over) {
      this.#replies = new Replies((room) => this.subscribe({ room, loadTest: "pass" }));
    }
    const replies = this.#replies;
    await replies.ready({ timeoutMs, signal: options.signal });
    const tooLate = late(`the request was accepted, but nobody replied within ${timeoutMs / 1000} s`);
    return replies.expect(
      options,
      (headers) => send({ ...options, headers, timeoutMs: Math.max(1, deadline - now()) }),
      (reply) => within(reply, Math.max(0, deadline - now()), tooLate, options.signal),
    );
  }

  /** Queue a draft, waiting for space and for a number for its ID. */
  async submit(draft: Draft, signal?: AbortSignal): Promise<Receipt> {
    this.#checkOpen();
    await this.#lease.ready(signal);
    await this.#publish().space(sizeOf(draft), signal);
    await this.#lease.ready(signal);
    this.#checkOpen();
    this.#offerEarly();
    return this.#offer(draft, new Receipt());
  }

  /** Queue a draft now. Throws `Overloaded`. */
  submitSoon(draft: Draft): Receipt {
    this.#checkOpen();
    const publisher = this.#publish();
    if (this.#lease.usable()) {
      this.#offerEarly();
      if (!publisher.hasSpace(sizeOf(draft))) {
        throw new Overloaded(`${publisher.core.unresolved} messages are not confirmed: await send, which waits for space`);
      }
      return this.#offer(draft, new Receipt());
    }
    const bytes = this.#early.reduce((sum, each) => sum + sizeOf(each.draft), sizeOf(draft));
    if (this.#early.length > 0 && (this.#early.length >= this.options.queueRecords || bytes > this.options.queueBytes)) {
      throw new Overloaded(`${this.#early.length} messages wait for a number for their IDs: await send, which waits for it`);
    }
    const receipt = new Receipt();
    this.#early.push({ draft, receipt });
    if (this.#early.length === 1) {
      void this.#lease.ready().then(
        () => { this.#offerEarly(); },
        (error: unknown) => { this.#failEarly(error instanceof PixiuError ? error : new NotSent(String(error))); },
      );
    }
    return receipt;
  }

  /** Offer what was sent before there was a number for its ID, in the order of the calls. */
  #offerEarly(): void {
    for (const { draft, receipt } of this.closed ? [] : this.#early.splice(0)) {
      this.#offer(draft, receipt);
    }
  }

  #failEarly(error: PixiuError): void {
    for (const { receipt } of this.#early.splice(0)) {
      receipt.settle({ code: error.code, text: error.message, retryAfterMs: error.retryAfterMs });
      if (!receipt.awaited) {
        this.#given.onFailure?.({ id: 0n, error });
      }
    }
  }

  #offer(draft: Draft, receipt: Receipt): Receipt {
    receipt.id = this.#lease.next();
    this.#publish().offer(new Ticket(encode(draft, receipt.id, this.uin), draft.key, draft.type < 64, receipt));
    return receipt;
  }

  /** Send a signal. */
  async signal(draft: Draft, wantsReceipt: boolean, call: CallOptions): Promise<SignalReceipt> {
    this.#checkOpen();
    call.signal?.throwIfAborted();
    await this.#lease.ready(call.signal);
    this.#checkOpen();
    this.#signals ??= new Signals(this.#surroundings, this.options, this.#directory.map.proxies);
    const receipt = new SignalReceipt();
    const id = this.#lease.next();
    const signal = { ...draft, kind: Kind.SIGNAL };
    this.#signals.send(encode(signal, id, this.uin), id, draft.key, draft.type < 64, wantsReceipt, receipt);
    await within(receipt.confirmed(), call.timeoutMs, late("the signal was not confirmed in time"), call.signal);
    return receipt;
  }

  /** Send a mail, and wait until it is confirmed. */
  async mail(draft: Draft, level: Level, more: readonly bigint[], call: CallOptions): Promise<MailReceipt> {
    const receipt = await this.mailSubmit(draft, level, more, call.signal, call.timeoutMs);
    await within(receipt.confirmed(), call.timeoutMs, late("the mail was not confirmed in time: it may be in the inbox"), call.signal);
    return receipt;
  }

  /** Queue a mail, waiting for space. */
  async mailSubmit(draft: Draft, level: Level, more: readonly bigint[], signal?: AbortSignal, timeoutMs?: number): Promise<MailReceipt> {
    this.#checkOpen();
    signal?.throwIfAborted();
    await this.#lease.ready(signal);
    this.#mails ??= new MailShell(
      this.#surroundings,
      new Sender(mailPolicy(this.options, new MailWriterNumber(() => this.#lease.worker)), this.#directory.map.proxies, randomBytes(2).readUInt16LE()),
    );
    await this.#mails.space(sizeOf(draft), signal);
    await this.#lease.ready(signal);
    this.#checkOpen();
    const receipt = new MailReceipt();
    receipt.id = this.#lease.next();
    // One queue: a stream keeps the order of all lanes and receivers.
    const settled = (failure: Parameters<Receipt["settle"]>[0]): void => { receipt.settle(failure); };
    this.#mails.offer(new Ticket(encode(draft, receipt.id, this.uin), 0n, false, receipt, settled, level, more), timeoutMs);
    return receipt;
  }

  // --- inside

  #checkOpen(): void {
    if (this.closed) {
      throw new NotConnected("the client is closed: connect again");
    }
  }

  #publish(): PublisherShell {
    this.#publisher ??= new PublisherShell(this.#surroundings, new Sender(roomPolicy(this.options), this.#directory.map.proxies));
    return this.#publisher;
  }

  async #topicWriter(topic: string): Promise<TopicCore> {
    this.#checkOpen();
    const known = await this.#topicWriters.get(topic);
    if (known && !known.over) {
      return known;
    }
    const opening = this.#topicWriters.get(topic);
    if (opening && (await opening) !== known) {
      return opening; // somebody else opened it meanwhile
    }
    const opened = TopicCore.open(this.#topicContext, topic);
    this.#topicWriters.set(topic, opened);
    opened.catch(() => { this.#topicWriters.delete(topic); });
    return opened;
  }

  #context(): ConnectionContext {
    return {
      options: this.options, channels: this.#channels, directory: this.#directory,
      onClose: (connection) => { this.#connections.delete(connection as GatewayConnection & { close: () => Promise<void> }); },
      event: (event) => { this.#tell(event); },
    };
  }

  #opened<T extends GatewayConnection & { close: () => Promise<void> }>(connection: T): T {
    this.#connections.add(connection);
    return connection;
  }

  #tell(event: ConnectionEvent): void {
    this.#given.onConnection?.(event);
    this.#listeners.forEach((listen) => { listen(event); });
  }

  #onMap(map: ClusterMap): void {
    this.#publisher?.setProxies(map.proxies);
    this.#mails?.setProxies(map.proxies);
    this.#signals?.setProxies(map.proxies);
  }
}

/** Make the draft of a message. Throws `InvalidArgument`, `RecordTooLarge`. */
function draftOf(kind: number, key: bigint, topic: string | undefined, body: Body, given: SendOptions, limit: number): Draft {
  if (given.extension && given.headers) {
    throw new InvalidArgument("give headers or an extension, not both: headers are the extension");
  }
  const minutes = given.lifetimeMinutes ?? 0;
  if (!Number.isInteger(minutes) || minutes < 0 || minutes > 0xffff) {
    throw new InvalidArgument(`a lifetime is from 0 to 65535 whole minutes, not ${minutes}`);
  }
  const flags = (kind === Kind.ROOM ? Flag.TO_ROOM : 0) | (topic === undefined ? 0 : Flag.TOPIC) | (given.loadTest === true ? Flag.LOAD_TEST : 0);
  return checkDraft(
    {
      kind, flags, key, body: topic === undefined ? bytesOf(body) : withTopic(topic, bytesOf(body)), lifetimeMinutes: minutes,
      type: typeOf(given.type ?? 0, given.firstLane ?? false), extension: given.extension ?? encodeHeaders(given.headers),
    },
    limit,
  );
}

/** A room, a free topic or a user's devices to send to. */
export class Destination {
  /** Made by the client. */
  constructor(
    protected readonly client: Client,
    private readonly kind: number,
    protected readonly key: bigint,
    private readonly topic: string | undefined,
  ) {}

  protected draft(body: Body, options: SendOptions): Draft {
    return draftOf(this.kind, this.key, this.topic, body, options, this.client.options.maxRecordBytes);
  }

  /**
   * Send a message, and wait until the cluster has accepted it. A message that is refused for now, or was dropped on the way, is sent
   * again with the same ID. Rejects with `NotSent`, `OutcomeUnknown`, `Overloaded`, `Dropped`, `Offline`, and errors of its arguments.
   */
  send(body: Body, options: SendOptions & CallOptions = {}): Promise<Receipt> {
    return failing(() => this.client.send(this.draft(body, options), options));
  }

  /**
   * Queue a message now; messages to one destination leave in the order of the calls. `receipt.confirmed()` waits for the confirmation. Throws
   * `Overloaded` when too much is unresolved.
   */
  sendSoon(body: Body, options: SendOptions = {}): Receipt {
    return this.client.submitSoon(this.draft(body, options));
  }

  /**
   * Send a message, and wait for the first reply that a subscriber sends by `client.reply`. Both are ordinary messages: real time, and either
   * may be lost. Rejects with `OutcomeUnknown` when no reply came within `timeoutMs`, and as `send`.
   */
  request(body: Body, options: SendOptions & CallOptions = {}): Promise<Message> {
    return this.client.request(options, (more) => this.send(body, more));
  }

  /** A writer, which sends many messages without waiting for each. */
  writer(): Writer {
    return new Writer((body, options, signal) => this.client.submit(this.draft(body, options), signal));
  }
}

/** A room to send messages and signals to. */
export class Room extends Destination {
  /** The RoomID. */
  get id(): bigint {
    return this.key;
  }

  /**
   * Send a signal: three copies by three proxies, delivered once, in no order. With `receipt` it waits until a gateway has delivered it to
   * a client, else until a broker has it. Rejects with `Undelivered`, and the errors of `send`.
   */
  signal(body: Body, options: SendOptions & CallOptions & { readonly receipt?: boolean } = {}): Promise<SignalReceipt> {
    return failing(() => this.client.signal(this.draft(body, options), options.receipt ?? false, options));
  }
}

/** A user to send chat, signals and mail to. */
export class User {
  readonly #chat: Destination;

  /** Made by the client. */
  constructor(
    private readonly client: Client,
    readonly uin: bigint,
  ) {
    this.#chat = new Destination(client, Kind.CHAT, uin, undefined);
  }

  /** Send to the user's devices that are online and take messages. Rejects with `Offline` when there is none. */
  chat(body: Body, options: SendOptions & CallOptions = {}): Promise<Receipt> {
    return this.#chat.send(body, options);
  }

  /** Send a request to the user's devices; see `Destination.request`. */
  request(body: Body, options: SendOptions & CallOptions = {}): Promise<Message> {
    return this.#chat.request(body, options);
  }

  /** Queue a message to the user's devices now; see `Destination.sendSoon`. */
  chatSoon(body: Body, options: SendOptions = {}): Receipt {
    return this.#chat.sendSoon(body, options);
  }

  /** Send a signal to the user's devices; see `Room.signal`. */
  signal(body: Body, options: SendOptions & CallOptions & { readonly receipt?: boolean } = {}): Promise<SignalReceipt> {
    return failing(() => this.client.signal(draftOf(Kind.CHAT, this.uin, undefined, body, options, this.client.options.maxRecordBytes), options.receipt ?? false, options));
  }

  /**
   * Send a mail, and wait until it is stored. The inbox keeps it until it is acknowledged or expires. `signal` and `timeoutMs` end the wait.
   * Rejects with `OutcomeUnknown`, `NotSent`, `InboxFull`, `DiskFull`, `Overloaded`, and errors of its arguments.
   */
  mail(body: Body, options: MailOptions & CallOptions = {}): Promise<MailReceipt> {
    return failing(() => {
      const { draft, level, more } = this.#mailOf(body, options);
      return this.client.mail(draft, level, more, options);
    });
  }

  /** Queue a mail, waiting while the queue is full. All mail of a client keeps its order. */
  mailSubmit(body: Body, options: MailOptions & Pick<CallOptions, "signal"> = {}): Promise<MailReceipt> {
    return failing(() => {
      const { draft, level, more } = this.#mailOf(body, options);
      return this.client.mailSubmit(draft, level, more, options.signal);
    });
  }

  #mailOf(body: Body, options: MailOptions): { draft: Draft; level: Level; more: bigint[] } {
    const { lane = 1, level = "replicated", to = [] } = options;
    const levels: Readonly<Record<string, Level>> = { replicated: Level.REPLICATED, persisted: Level.PERSISTED, accepted: Level.ACCEPTED };
    const number = levels[level];
    if (number === undefined) {
      throw new InvalidArgument(`a level is one of ${Object.keys(levels).join(", ")}, not ${JSON.stringify(level)}`);
    }
    if ((lane as number) !== 0 && (lane as number) !== 1) {
      throw new InvalidArgument(`a lane is 0 (first) or 1, not ${String(lane)}`);
    }
    const receivers = new Set([this.uin, ...[...to].map(uinOf)]);
    if (receivers.size > MAX_RECEIVERS) {
      throw new TooManyReceivers(`${receivers.size} receivers; one mail has at most ${MAX_RECEIVERS}: send several`);
    }
    const draft = draftOf(Kind.MAIL, this.uin, undefined, body, { ...options, firstLane: lane === 0 }, this.client.options.maxRecordBytes);
    return { draft, level: number, more: [...receivers].slice(1) };
  }
}

/** Sends many messages without waiting for each; `finished` waits for all. */
export class Writer implements AsyncDisposable {
  readonly #receipts = new Set<Receipt>();
  #failure: PixiuError | undefined;

  /** Made by destinations. */
  constructor(private readonly submit: (body: Body, options: SendOptions, signal: AbortSignal | undefined) => Promise<Receipt>) {}

  /** Queue a message, waiting while the queue is full. Resolves to its receipt. */
  async send(body: Body, options: SendOptions & Pick<CallOptions, "signal"> = {}): Promise<Receipt> {
    const receipt = await this.submit(body, options, options.signal);
    this.#receipts.add(receipt);
    void receipt
      .confirmed()
      .catch(() => { this.#failure ??= receipt.error; })
      .finally(() => this.#receipts.delete(receipt));
    return receipt;
  }

  /** Wait until everything that was sent is confirmed. Rejects with the first failure since the last call. */
  async finished(signal?: AbortSignal): Promise<void> {
    await within(Promise.allSettled([...this.#receipts].map((receipt) => receipt.confirmed())), undefined, () => new OutcomeUnknown(""), signal);
    const failure = this.#failure;
    this.#failure = undefined;
    if (failure) {
      throw failure;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.finished();
  }
}

/** Turn errors of arguments into rejections. */
async function failing<T>(call: () => Promise<T>): Promise<T> {
  return call();
}
