/**
 * Requests and replies: an ordinary message whose headers name the room for the reply, and a message that is sent there.
 *
 * Source: docs/protocol.md, "Headers"; docs/sdk.md, "Request and reply".
 */

import { randomBytes } from "node:crypto";
import { InvalidArgument, NotSent, OutcomeUnknown, Overloaded } from "./errors.js";
import { deferred, type CallOptions, type Deferred } from "./rpc/waiting.js";
import type { Subscription } from "./receive/subscription.js";
import type { Headers } from "./wire/headers.js";
import type { Message } from "./wire/record.js";

/** The header that names the room for the reply. */
const REPLY_TO = "reply-to";
/** The header that identifies a request; the reply repeats it. */
const REQUEST_ID = "request-id";
/** Requests of a client that wait for their reply. */
const MAX_REQUESTS = 10_000;
/** A client takes a random room below it. */
const REPLY_ROOMS = 1n << 61n;

interface Given {
  readonly headers?: Headers;
  readonly extension?: Uint8Array;
}

/** The room for the reply to a message, and the request's ID. Throws `InvalidArgument` if the message asks for none. */
export function whereToReply(message: Message): { room: bigint; id: string } {
  const id = message.headers[REQUEST_ID] ?? "";
  const room = /^room\/([0-9]{1,19})$/.exec(message.headers[REPLY_TO] ?? "")?.[1];
  if (!id || room === undefined) {
    throw new InvalidArgument("the message asks for no reply: it is not a request");
  }
  return { room: BigInt(room), id };
}

/** The headers of a reply: those of the application, and its own. Throws `InvalidArgument`. */
export function replyHeaders(id: string, given: Given): Headers {
  if (given.extension) {
    throw new InvalidArgument("a request and its reply have headers of their own: give headers, not an extension");
  }
  return { ...given.headers, [REQUEST_ID]: id };
}

/** The replies to one client's requests: they are sent to a room of its own, which it joins with the first request. */
export class Replies {
  readonly room = (randomBytes(8).readBigUInt64LE() % (REPLY_ROOMS - 1n)) + 1n;
  readonly #subscription: Subscription;
  readonly #waiting = new Map<string, Deferred<Message>>();
  #over = false;

  constructor(subscribe: (room: bigint) => Subscription) {
    this.#subscription = subscribe(this.room);
    void this.#read();
  }

  /** True if replies no longer arrive: make another object. */
  get over(): boolean {
    return this.#over;
  }

  /** Wait until replies can arrive. */
  async ready(call: CallOptions): Promise<void> {
    try {
      await this.#subscription.ready(call);
    } catch (error) {
      throw error instanceof OutcomeUnknown ? new NotSent(`the request was not sent: no gateway takes its reply: ${error.message}`) : error;
    }
  }

  /** Expect a reply while `send` sends the request with these headers, and `wait` waits. Throws `InvalidArgument`, `Overloaded`. */
  async expect(given: Given, send: (headers: Headers) => Promise<unknown>, wait: (reply: Promise<Message>) => Promise<Message>): Promise<Message> {
    if (REPLY_TO in (given.headers ?? {}) || REQUEST_ID in (given.headers ?? {})) {
      throw new InvalidArgument(`the headers '${REPLY_TO}' and '${REQUEST_ID}' are a request's own`);
    }
    if (this.#waiting.size >= MAX_REQUESTS) {
      throw new Overloaded(`${MAX_REQUESTS} requests wait for their replies`);
    }
    const id = randomBytes(8).toString("hex");
    const reply = deferred<Message>();
    reply.promise.catch(() => undefined);
    this.#waiting.set(id, reply);
    try {
      await send({ [REPLY_TO]: `room/${this.room}`, ...replyHeaders(id, given) });
      return await wait(reply.promise);
    } finally {
      this.#waiting.delete(id);
    }
  }

  async #read(): Promise<void> {
    let why: unknown = new OutcomeUnknown("the client was closed before the reply came");
    try {
      for await (const message of this.#subscription) {
        if (message.room === this.room) {
          this.#waiting.get(message.headers[REQUEST_ID] ?? "")?.resolve(message); // the first reply counts
        }
      }
    } catch (error) {
      why = error;
    }
    this.#over = true;
    this.#waiting.forEach((reply) => { reply.reject(why); });
  }
}
