/**
 * The SDK for web pages: rooms and free topics by MQTT 5 over WebSocket, mail and durable topics by the HTTP API of a gateway.
 *
 *     page ──MQTT over WebSocket──▶ gateway.websocket_port     rooms, free topics, messages to the user
 *          ──fetch───────────────▶ gateway.api_port            mail, durable topics, channels
 *
 * Source: docs/sdk_typescript.md, "Browsers"; docs/mqtt.md; docs/http.md.
 */

import mqtt, { type IPublishPacket, type MqttClient } from "mqtt";
import { errorOfCode, InvalidArgument, NotAllowed, NotConnected, OutcomeUnknown, Unavailable, Unreachable } from "./errors.js";
import { checkFilter, checkTopic } from "./names.js";
import { roomOf, uinOf, uinOrService, type Id } from "./ids.js";
import { Backoff } from "./rpc/backoff.js";
import { Changes, within, type CallOptions } from "./rpc/waiting.js";
import type { Headers } from "./wire/headers.js";

export * from "./errors.js";
export type { Id } from "./ids.js";

/** Text is sent as UTF-8. */
export type Body = Uint8Array | string;

/** Where the gateways are, and who connects. */
export interface BrowserOptions {
  /** `wss://host/mqtt`: the WebSocket of gateways; without it there are no rooms. */
  readonly webSocket?: string;
  /** `https://host`: the HTTP API of gateways; without it there is no mail and no durable topic. */
  readonly api?: string;
  readonly uin?: Id;
  /** Name of the device, which stays the same. Default: a random one. */
  readonly client?: string;
  /** The login, or a function that returns the current one. */
  readonly token?: string | (() => string);
  /** Default 10,000. */
  readonly timeoutMs?: number;
}

/** A message of a room, a free topic or to the user. */
export interface PageMessage {
  /** `room/42`, `user/7`, or the free topic's name. */
  readonly destination: string;
  readonly body: Uint8Array;
  readonly headers: Headers;
  text(): string;
}

/** A mail, or a message of a channel, as the HTTP API gives it. */
export interface PageMail {
  /** The cluster's ID of the mail, hex. */
  readonly id: string;
  readonly sender: bigint;
  readonly sentAtMs: number;
  readonly lane: number;
  readonly redelivered: boolean;
  readonly headers: Headers;
  readonly body: Uint8Array;
  text(): string;
  /** Acknowledge it: it does not come to this device again. */
  acknowledge(call?: CallOptions): Promise<void>;
}

/** A message of a channel, the page's until it is acknowledged or its time is over. */
export interface PageChannelMessage {
  readonly part: number;
  readonly offset: number;
  readonly attempts: number;
  readonly key: string | undefined;
  readonly headers: Headers;
  readonly body: Uint8Array;
  text(): string;
  /** False: it is not known to be acknowledged, and may come again. */
  ack(call?: CallOptions): Promise<boolean>;
  /** Give it back; it comes again after a delay, in whole seconds. */
  nack(delayMs?: number, call?: CallOptions): Promise<boolean>;
}

interface WireBody {
  readonly payload?: string;
  readonly payload_base64?: string;
}

const encoder = new TextEncoder();
const decoder = new TextDecoder();
/** Longest wait of one request for mail or messages, seconds. */
const POLL_S = 20;
/** Messages of a subscription that wait; the oldest goes first, and is counted. */
const MAX_WAITING = 50_000;
const CONTENT_TYPE = "application/json";

const bytesOf = (found: WireBody): Uint8Array =>
  found.payload_base64 === undefined
    ? encoder.encode(found.payload ?? "")
    : Uint8Array.from(atob(found.payload_base64), (character) => character.charCodeAt(0));

const bodyOf = (body: Body): WireBody =>
  typeof body === "string" ? { payload: body } : { payload_base64: btoa(Array.from(body, (byte) => String.fromCharCode(byte)).join("")) };

/** Connect a page. Rejects with `Unreachable`, `NotAuthenticated`, `InvalidArgument`. */
export async function connectPage(options: BrowserOptions, call: CallOptions = {}): Promise<PageClient> {
  if (options.webSocket === undefined && options.api === undefined) {
    throw new InvalidArgument("give webSocket, api, or both");
  }
  const client = new PageClient(options);
  try {
    await client.start(call);
  } catch (error) {
    await client.close();
    throw error;
  }
  return client;
}

/** A page's client; `close` it. */
export class PageClient {
  readonly #options: BrowserOptions;
  readonly #name: string;
  readonly #uin: bigint;
  readonly #ending = new AbortController();
  readonly #subscriptions = new Set<PageSubscription>();
  readonly #backoff = new Backoff(100, 5_000);
  #mqtt: MqttClient | undefined;

  /** Use `connectPage`. */
  constructor(options: BrowserOptions) {
    this.#options = options;
    this.#name = options.client ?? `page-${crypto.randomUUID()}`;
    this.#uin = uinOrService(options.uin ?? 0n);
  }

  /** Called by `connectPage`. */
  async start(call: CallOptions): Promise<void> {
    if (this.#options.webSocket === undefined) {
      return;
    }
    const client = mqtt.connect(this.#options.webSocket, {
      protocolVersion: 5, clean: true, clientId: this.#name, resubscribe: false, reconnectPeriod: 100, keepalive: 30,
      ...(this.#uin || this.#options.token ? { username: this.#uin ? String(this.#uin) : "service" } : {}),
      transformWsUrl: (url, _, given) => {
        const token = this.#token(); // each connection asks for the current one
        if (token) {
          given.options.password = token;
        }
        return url;
      },
    });
    this.#mqtt = client;
    client.on("close", () => { client.options.reconnectPeriod = this.#backoff.next(); });
    client.on("message", (topic, payload, packet) => { this.#subscriptions.forEach((each) => { each.arrived(topic, payload, packet); }); });
    client.on("error", () => undefined); // it connects again; the first time `start` says why it cannot
    let first = true;
    client.on("connect", () => {
      this.#backoff.reset();
      if (!first) {
        this.#subscriptions.forEach((each) => { void each.again(); });
      }
      first = false;
    });
    const connected = new Promise<void>((resolve, reject) => {
      client.once("connect", () => { resolve(); });
      client.once("error", (error) => {
        const code = (error as { code?: unknown }).code;
        reject(code === 0x86 || code === 0x87 ? errorOfCode("UNAUTHENTICATED", error.message) : new Unreachable(`${this.#options.webSocket ?? ""}: ${error.message}`));
      });
    });
    const late = (): Error => new Unreachable(`no gateway answered at ${this.#options.webSocket ?? ""}`);
    await within(connected, call.timeoutMs ?? this.#options.timeoutMs ?? 10_000, late, call.signal);
  }

  #token(): string {
    const { token = "" } = this.#options;
    return typeof token === "string" ? token : token();
  }

  #connection(): MqttClient {
    if (this.#ending.signal.aborted) {
      throw new NotConnected("the client is closed: connect again");
    }
    if (!this.#mqtt) {
      throw new InvalidArgument("rooms and free topics need the option webSocket");
    }
    return this.#mqtt;
  }

  // --- rooms and free topics, by MQTT

  /** Publish to a room, a free topic, or the devices of a user; resolves when the brokers have it. */
  async publish(to: { readonly room: Id } | { readonly topic: string } | { readonly user: Id }, body: Body, given: { readonly headers?: Headers } & CallOptions = {}): Promise<void> {
    const topic = "room" in to ? `room/${roomOf(to.room)}` : "user" in to ? `user/${uinOf(to.user)}` : checkTopic(to.topic);
    const payload = typeof body === "string" ? body : (body as Buffer); // MQTT.js takes any Uint8Array
    const properties = given.headers ? { properties: { userProperties: { ...given.headers } } } : {};
    const sent = this.#connection().publishAsync(topic, payload, { qos: 1, ...properties });
    const late = (): Error => new OutcomeUnknown("no gateway confirmed the message in time: it may be delivered");
    await within(sent, given.timeoutMs ?? this.#options.timeoutMs ?? 10_000, late, given.signal).catch((error: unknown) => {
      const code = (error as { code?: unknown }).code;
      const text = error instanceof Error ? error.message : String(error);
      throw code === 0x87 ? new NotAllowed(text) : code === 0x10 ? errorOfCode("OFFLINE", text) : typeof code === "number" ? new Unavailable(text) : error;
    });
  }

  /** Subscribe; resolves when the whole cluster knows: what is sent from then on arrives. `onGap`: the connection was lost. */
  async subscribe(
    to: { readonly rooms?: Iterable<Id>; readonly topics?: Iterable<string>; readonly chat?: boolean; readonly onGap?: () => void },
    call: CallOptions = {},
  ): Promise<PageSubscription> {
    const filters = [...(to.rooms ?? [])].map((room) => `room/${roomOf(room)}`).concat([...(to.topics ?? [])].map(checkFilter));
    if (to.chat === true) {
      filters.push(`user/${uinOf(this.#uin)}`);
    }
    if (filters.length === 0) {
      throw new InvalidArgument("nothing is subscribed to: give rooms, topics or chat");
    }
    const subscription = new PageSubscription(this.#connection(), filters, to.onGap, (each) => this.#subscriptions.delete(each));
    this.#subscriptions.add(subscription);
    try {
      const late = (): Error => new OutcomeUnknown("the subscription did not take effect in time");
      await within(subscription.join(), call.timeoutMs ?? this.#options.timeoutMs ?? 10_000, late, call.signal);
    } catch (error) {
      await subscription.close();
      throw error;
    }
    return subscription;
  }

  // --- mail and durable topics, by HTTP

  /** Send a mail; resolves to its ID when it is stored. Give a key to send it again after an unknown outcome: it is stored once. */
  async mail(to: Id | readonly Id[], body: Body, given: { readonly headers?: Headers; readonly lane?: 0 | 1; readonly idempotencyKey?: string } & CallOptions = {}): Promise<string> {
    const uins = (typeof to === "object" ? to : [to]).map(uinOf);
    const { headers, lane } = given;
    const rest = JSON.stringify({ ...bodyOf(body), headers, lane }).slice(1); // UINs have 64 bits, which JSON.stringify refuses
    return (await this.#ask<{ id: string }>("POST", "/v1/mail", `{"to":[${uins.join()}],${rest}`, given, given.idempotencyKey)).id;
  }

  /** Mail of this device as it comes, until the client is closed or the loop is left. It comes again until it is acknowledged. */
  async *inbox(device: string, call: Pick<CallOptions, "signal"> = {}): AsyncGenerator<PageMail, void, undefined> {
    const given = new Set<string>();
    const query = `device=${encodeURIComponent(device)}&wait=${POLL_S}`;
    type Found = WireBody & { id: string; sender: string; sent_at_ms: number; lane: number; redelivered: boolean; headers: Headers };
    for await (const { mails } of this.#poll<{ mails: readonly Found[] }>("GET", `/v1/inbox?${query}`, undefined, call)) {
      for (const mail of mails) {
        if (!given.has(mail.id)) {
          given.add(mail.id);
          const body = bytesOf(mail);
          const acknowledge = async (options: CallOptions = {}): Promise<void> => {
            await this.#ask("POST", "/v1/inbox/ack", JSON.stringify({ device, ids: [mail.id] }), options);
          };
          const { id, lane, redelivered, headers } = mail;
          yield { id, lane, redelivered, headers, sender: BigInt(mail.sender), sentAtMs: mail.sent_at_ms, body, text: () => decoder.decode(body), acknowledge };
        }
      }
    }
  }

  /** Write to a durable topic; resolves to its place when it is stored. */
  async write(topic: string, body: Body, given: { readonly key?: string; readonly headers?: Headers; readonly idempotencyKey?: string } & CallOptions = {}): Promise<{ readonly part: number; readonly offset: number }> {
    const { key, headers } = given;
    const text = JSON.stringify({ ...bodyOf(body), key, headers });
    return this.#ask("POST", `/v1/topics/${encodeURIComponent(topic)}/messages`, text, given, given.idempotencyKey);
  }

  /** Messages of a channel as they come, until the client is closed or the loop is left. */
  async *channel(topic: string, channel: string, call: Pick<CallOptions, "signal"> = {}): AsyncGenerator<PageChannelMessage, void, undefined> {
    const path = `/v1/channels/${encodeURIComponent(topic)}/${encodeURIComponent(channel)}`;
    const report = async (text: string, options: CallOptions): Promise<boolean> =>
      (await this.#ask<{ late: readonly string[] }>("POST", `${path}/ack`, text, options)).late.length === 0;
    type Found = WireBody & { token: string; part: number; offset: number; attempts: number; key: string | null; headers: Headers };
    for await (const { messages } of this.#poll<{ messages: readonly Found[] }>("POST", `${path}/fetch`, JSON.stringify({ wait: POLL_S }), call)) {
      for (const { token, part, offset, attempts, key, headers, ...found } of messages) {
        const body = bytesOf(found);
        yield {
          part, offset, attempts, key: key ?? undefined, headers, body, text: () => decoder.decode(body),
          ack: (options = {}) => report(JSON.stringify({ acks: [token] }), options),
          nack: (delayMs = 0, options = {}) => report(JSON.stringify({ nacks: [token], delay_s: Math.ceil(delayMs / 1000) }), options),
        };
      }
    }
  }

  /** Ask for more again and again; waits between failures that may pass. */
  async *#poll<T>(method: string, path: string, body: string | undefined, call: Pick<CallOptions, "signal">): AsyncGenerator<T, void, undefined> {
    const backoff = new Backoff(100, 5_000);
    while (!this.#ending.signal.aborted) {
      try {
        const found = await this.#ask<T>(method, path, body, { ...call, timeoutMs: (POLL_S + 10) * 1000 });
        backoff.reset();
        yield found;
      } catch (error) {
        call.signal?.throwIfAborted();
        if (this.#ending.signal.aborted) {
          return;
        }
        if (!(error instanceof Unavailable || errorMayPass(error))) {
          throw error;
        }
        await new Promise((resolve) => setTimeout(resolve, backoff.next()));
      }
    }
  }

  async #ask<T>(method: string, path: string, body: string | undefined, call: CallOptions, idempotencyKey?: string): Promise<T> {
    if (this.#options.api === undefined) {
      throw new InvalidArgument("mail and durable topics need the option api");
    }
    const token = this.#token();
    const url = new URL(path, this.#options.api);
    if (!token && this.#uin) {
      url.searchParams.set("user", String(this.#uin));
    }
    const signals = [this.#ending.signal, AbortSignal.timeout(call.timeoutMs ?? this.#options.timeoutMs ?? 10_000), ...(call.signal ? [call.signal] : [])];
    let answer: Response;
    let text: string;
    try {
      answer = await fetch(url, {
        method, body: body ?? null, signal: AbortSignal.any(signals),
        headers: {
          ...(body === undefined ? {} : { "Content-Type": CONTENT_TYPE }),
          ...(token ? { Authorization: `Bearer ${token}` } : {}),
          ...(idempotencyKey === undefined ? {} : { "Idempotency-Key": idempotencyKey }),
        },
      });
      text = await answer.text();
    } catch (error) {
      call.signal?.throwIfAborted();
      if (this.#ending.signal.aborted) {
        throw new NotConnected("the client is closed: connect again");
      }
      throw new OutcomeUnknown(`${this.#options.api}: no answer: ${String(error)}`);
    }
    if (!answer.ok) {
      const { error } = JSON.parse(text) as { error: { code: string; text: string; retry_after_s?: number } };
      throw errorOfCode(error.code, error.text, (error.retry_after_s ?? 0) * 1000);
    }
    // A UIN has 64 bits, of which JSON.parse loses some: keep it as text.
    return JSON.parse(text.replace(/([{,]\s*"sender"\s*:\s*)(\d+)/g, '$1"$2"')) as T;
  }

  /** End the connection, and what iterates. */
  async close(): Promise<void> {
    this.#ending.abort();
    await Promise.all([...this.#subscriptions].map((each) => each.close()));
    await this.#mqtt?.endAsync(true).catch(() => undefined);
  }
}

const errorMayPass = (error: unknown): boolean => ["OVERLOADED", "DRAINING", "LIMIT"].includes((error as { code?: string }).code ?? "");

/** Messages of a page's rooms and topics: `for await (const message of subscription)`. */
export class PageSubscription implements AsyncIterable<PageMessage> {
  /** Messages that were dropped because the page did not take them. */
  dropped = 0;
  readonly #waiting: PageMessage[] = [];
  readonly #arrived = new Changes();
  #closed = false;

  /** Made by `PageClient.subscribe`. */
  constructor(
    private readonly client: MqttClient,
    private readonly filters: readonly string[],
    private readonly onGap: (() => void) | undefined,
    private readonly over: (subscription: PageSubscription) => void,
  ) {}

  /** Subscribe; called by the client. */
  async join(): Promise<void> {
    for (const granted of await this.client.subscribeAsync([...this.filters], { qos: 1 })) {
      if (granted.qos >= 0x80) {
        throw new NotAllowed(`${granted.topic} was refused with 0x${granted.qos.toString(16)}`);
      }
    }
  }

  /** Subscribe again, on a new connection. */
  async again(): Promise<void> {
    await this.join().catch(() => undefined); // the connection was lost again, which leads here once more
    this.onGap?.();
  }

  /** Take a message, if it is of this subscription. */
  arrived(topic: string, payload: Uint8Array, packet: IPublishPacket): void {
    if (this.#closed || !this.filters.some((filter) => matches(filter, topic))) {
      return;
    }
    if (this.#waiting.length >= MAX_WAITING) {
      this.#waiting.shift();
      this.dropped += 1;
    }
    const headers: Record<string, string> = {};
    for (const [name, value] of Object.entries(packet.properties?.userProperties ?? {})) {
      headers[name] = Array.isArray(value) ? value.join() : value;
    }
    this.#waiting.push({ destination: topic, body: payload, headers, text: () => decoder.decode(payload) });
    this.#arrived.notify();
  }

  /** The next message; undefined once it is closed. */
  async next(signal?: AbortSignal): Promise<PageMessage | undefined> {
    while (this.#waiting.length === 0 && !this.#closed) {
      await within(this.#arrived.wait(), undefined, () => new Error(), signal);
    }
    return this.#closed ? undefined : this.#waiting.shift();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<PageMessage, void, undefined> {
    for (let message = await this.next(); message; message = await this.next()) {
      yield message;
    }
  }

  /** Leave; an iteration that waits ends. */
  async close(): Promise<void> {
    if (!this.#closed) {
      this.#closed = true;
      this.over(this);
      this.#arrived.notify();
      if (this.client.connected) {
        await this.client.unsubscribeAsync([...this.filters]).catch(() => undefined);
      }
    }
  }
}

/** True if a filter of MQTT matches a topic. */
export function matches(filter: string, topic: string): boolean {
  if (!/[+#]/.test(filter)) {
    return filter === topic;
  }
  if (/^(room|user)\/|^\$/.test(topic)) {
    return false; // wildcards match free topics alone
  }
  const levels = topic.split("/");
  const wanted = filter.split("/");
  const rest = wanted.at(-1) === "#";
  const fixed = rest ? wanted.slice(0, -1) : wanted;
  return (rest ? levels.length >= fixed.length : levels.length === fixed.length) && fixed.every((level, at) => level === "+" || level === levels[at]);
}
