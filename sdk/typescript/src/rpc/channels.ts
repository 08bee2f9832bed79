/** gRPC: connections shared by address, calls and streams, and gRPC's errors in words. */

import { readFileSync } from "node:fs";
import { create, fromBinary, toBinary } from "@bufbuild/protobuf";
import type { DescMessage, DescMethodBiDiStreaming, DescMethodUnary, MessageInitShape, MessageShape } from "@bufbuild/protobuf";
import { Client, credentials, Metadata, status as Status } from "@grpc/grpc-js";
import type { ChannelCredentials, ClientDuplexStream, ServiceError, StatusObject } from "@grpc/grpc-js";
import { ConfigurationError, InvalidArgument, NotAuthenticated, type PixiuError } from "../errors.js";
import { deferred } from "./waiting.js";

/** A token, or a function that returns the current one: it is called for each call and must be quick. */
export type Token = string | (() => string);

/** TLS of the cluster's listeners for clients. */
export interface TlsOptions {
  /** PEM file of the authorities, or "system". Default: the environment's PIXIU_CA; without one there is no TLS. */
  readonly ca?: string | undefined;
  /** PEM file with the client's own certificate and key. Default: PIXIU_CERTIFICATE. */
  readonly certificate?: string | undefined;
}

const MESSAGE_BYTES = 8 << 20;
/** Users of one connection: a listener takes 32 calls at a time of each. */
const MAX_USERS = 24;
const MAX_LOANS = 16;
const MAX_PUSHBACK_MS = 60_000;
const MAX_TOKEN_LENGTH = 8192;
const PUSHBACK = "grpc-retry-pushback-ms";
const CHANNEL_OPTIONS = {
  "grpc.max_send_message_length": MESSAGE_BYTES,
  "grpc.max_receive_message_length": MESSAGE_BYTES,
  "grpc.keepalive_time_ms": 20_000,
  "grpc.keepalive_timeout_ms": 5_000,
  "grpc.initial_reconnect_backoff_ms": 100,
  "grpc.max_reconnect_backoff_ms": 1_000,
  "grpc.use_local_subchannel_pool": 1,
  "grpc.enable_retries": 0,
};
/** Statuses for which trying again is useless. */
const REFUSED: ReadonlySet<Status> = new Set([Status.INVALID_ARGUMENT, Status.UNAUTHENTICATED, Status.PERMISSION_DENIED]);

/** Why a call ended. */
export interface End {
  readonly reason: string;
  /** OK: the other side ended the stream. */
  readonly status: Status;
  /** True if trying again is useless. */
  readonly refused: boolean;
  /** The reason why the login was refused; empty if it was not. */
  readonly login: string;
  readonly retryAfterMs: number;
  readonly metadata: Metadata | undefined;
}

/** A failed call. */
export class CallError extends Error {
  constructor(readonly end: End) {
    super(end.reason);
  }
}

/** The error of a login that was refused, if that is why a call ended. */
export const loginError = (end: Pick<End, "login">): PixiuError | undefined => (end.login ? new NotAuthenticated(end.login) : undefined);

function endOf(found: Pick<StatusObject, "code" | "details" | "metadata">): End {
  const { code, details } = found;
  let reason = `${Status[code]}: ${details}`;
  if (code === Status.OK) {
    reason = "the stream was closed by the other side";
  } else if (details.includes("ECONNREFUSED")) {
    reason = "connection refused: no process listens there";
  } else if (code === Status.UNIMPLEMENTED) {
    reason = "a gRPC server that does not serve this (UNIMPLEMENTED): is it the address of another role?";
  } else if (code === Status.DEADLINE_EXCEEDED) {
    reason = "no answer in time";
  }
  const pushback = Number(found.metadata.get(PUSHBACK)[0] ?? 0);
  return {
    reason,
    status: code,
    refused: REFUSED.has(code),
    login: code === Status.UNAUTHENTICATED ? details || "no login" : "",
    retryAfterMs: pushback > 0 ? Math.min(pushback, MAX_PUSHBACK_MS) : 0,
    metadata: found.metadata,
  };
}

const failed = (reason: string): End => ({ reason, status: Status.UNKNOWN, refused: false, login: "", retryAfterMs: 0, metadata: undefined });

/** Proofs of the worker numbers that a client was lent: each stream that publishes shows them. */
export class Loans {
  readonly #proofs = new Map<string, Uint8Array>();
  version = 0;

  /** Add the proof of a number that was lent or extended; an empty one is ignored. */
  add(worker: number, fromMs: number, proof: Uint8Array): void {
    if (proof.length === 0) {
      return;
    }
    const key = `${worker} ${fromMs}`;
    this.#proofs.delete(key);
    const oldest = this.#proofs.keys().next();
    if (this.#proofs.size >= MAX_LOANS && oldest.done !== true) {
      this.#proofs.delete(oldest.value);
    }
    this.#proofs.set(key, proof);
    this.version += 1;
  }

  /** All proofs, the newest last. */
  all(): Uint8Array[] {
    return [...this.#proofs.values()];
  }
}

function pemOf(path: string, name: string): Buffer {
  try {
    return readFileSync(path);
  } catch (error) {
    throw new ConfigurationError(`${name}, ${path}: cannot be read: ${(error as Error).message}`);
  }
}

function credentialsOf(tls: TlsOptions): ChannelCredentials {
  const ca = tls.ca ?? process.env.PIXIU_CA ?? "";
  const certificate = tls.certificate ?? process.env.PIXIU_CERTIFICATE ?? "";
  if (!ca) {
    if (certificate) {
      throw new ConfigurationError("a certificate needs TLS: set ca, or PIXIU_CA, to the authority of the cluster");
    }
    return credentials.createInsecure();
  }
  const own = certificate ? pemOf(certificate, "PIXIU_CERTIFICATE") : null;
  try {
    return credentials.createSsl(ca === "system" ? null : pemOf(ca, "PIXIU_CA"), own, own);
  } catch (error) {
    throw new ConfigurationError(`${ca}: is not a PEM file that TLS can use: ${(error as Error).message}`);
  }
}

function checkedToken(token: string): string {
  const trimmed = token.trim();
  if (trimmed.length > MAX_TOKEN_LENGTH || !/^[\x20-\x7e]*$/.test(trimmed)) {
    throw new InvalidArgument(`a token is a text of at most ${MAX_TOKEN_LENGTH} ASCII characters`);
  }
  return trimmed;
}

interface Shared {
  readonly address: string;
  readonly client: Client;
  users: number;
}

/** Connections to the addresses in use, each closed when its last user releases it. */
export class Channels {
  readonly loans = new Loans();
  readonly #credentials: ChannelCredentials;
  readonly #token: () => string;
  readonly #newest = new Map<string, Shared>();
  readonly #open = new Set<Shared>();

  /** Throws `ConfigurationError` for a file that cannot be used, `InvalidArgument` for something that is no token. */
  constructor(tls: TlsOptions, token: Token | undefined) {
    this.#credentials = credentialsOf(tls);
    const given = token ?? process.env.PIXIU_TOKEN ?? "";
    if (typeof given === "function") {
      this.#token = () => checkedToken(given());
    } else {
      const fixed = checkedToken(given);
      this.#token = () => fixed;
    }
  }

  #acquire(address: string): Shared {
    let shared = this.#newest.get(address);
    if (!shared || shared.users >= MAX_USERS) {
      shared = { address, client: new Client(address, this.#credentials, CHANNEL_OPTIONS), users: 0 };
      this.#newest.set(address, shared);
      this.#open.add(shared);
    }
    shared.users += 1;
    return shared;
  }

  #release(shared: Shared): void {
    shared.users -= 1;
    if (shared.users === 0 && this.#open.delete(shared)) {
      if (this.#newest.get(shared.address) === shared) {
        this.#newest.delete(shared.address);
      }
      shared.client.close();
    }
  }

  #metadata(): Metadata {
    const metadata = new Metadata();
    let token: string;
    try {
      token = this.#token();
    } catch (error) {
      throw new CallError(failed(`the function that gives the token failed: ${String(error)}`));
    }
    if (token) {
      metadata.set("authorization", `Bearer ${token}`);
    }
    return metadata;
  }

  /** Make a call. Rejects with `CallError`, and with the signal's reason when that aborts. */
  async unary<I extends DescMessage, O extends DescMessage>(
    address: string,
    method: DescMethodUnary<I, O>,
    request: MessageInitShape<I>,
    timeoutMs: number,
    signal?: AbortSignal,
  ): Promise<MessageShape<O>> {
    signal?.throwIfAborted();
    const metadata = this.#metadata();
    const shared = this.#acquire(address);
    const answer = deferred<MessageShape<O>>();
    const call = shared.client.makeUnaryRequest(
      `/${method.parent.typeName}/${method.name}`,
      (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
      (bytes: Buffer) => fromBinary(method.output, bytes),
      create(method.input, request),
      metadata,
      { deadline: Date.now() + timeoutMs },
      (error: ServiceError | null, reply?: MessageShape<O>) => {
        if (error || reply === undefined) {
          answer.reject(error ? new CallError(endOf(error)) : new CallError(failed("no answer")));
        } else {
          answer.resolve(reply);
        }
      },
    );
    const abort = (): void => {
      answer.reject(signal?.reason);
      call.cancel();
    };
    signal?.addEventListener("abort", abort, { once: true });
    try {
      return await answer.promise;
    } finally {
      signal?.removeEventListener("abort", abort);
      this.#release(shared);
    }
  }

  /** Open a stream. Its end is reported once, after everything that arrived, unless it was cancelled. */
  stream<I extends DescMessage, O extends DescMessage>(
    address: string,
    method: DescMethodBiDiStreaming<I, O>,
    handlers: StreamHandlers<MessageShape<O>>,
  ): BidiStream<I, O> {
    let metadata: Metadata;
    try {
      metadata = this.#metadata();
    } catch (error) {
      return new BidiStream<I, O>(method, undefined, handlers, error instanceof CallError ? error.end : failed(String(error)), () => undefined);
    }
    const shared = this.#acquire(address);
    const call = shared.client.makeBidiStreamRequest(
      `/${method.parent.typeName}/${method.name}`,
      (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
      (bytes: Buffer) => fromBinary(method.output, bytes),
      metadata,
    );
    return new BidiStream<I, O>(method, call, handlers, undefined, () => { this.#release(shared); });
  }

  /** Close all connections, even those in use. */
  close(): void {
    for (const shared of this.#open) {
      shared.client.close();
    }
    this.#open.clear();
    this.#newest.clear();
  }
}

/** What a stream reports. */
export interface StreamHandlers<Reply> {
  readonly reply: (message: Reply) => void;
  readonly ended: (end: End) => void;
  /** More may be written. */
  readonly drained?: () => void;
}

/** One bidirectional stream. */
export class BidiStream<I extends DescMessage, O extends DescMessage> {
  /** True while gRPC has no space for more. */
  full = false;
  #over = false;
  #readAll = false;
  #status: StatusObject | undefined;
  readonly #closed = deferred();

  constructor(
    private readonly method: DescMethodBiDiStreaming<I, O>,
    private readonly call: ClientDuplexStream<MessageShape<I>, MessageShape<O>> | undefined,
    private readonly handlers: StreamHandlers<MessageShape<O>>,
    why: End | undefined,
    private readonly release: () => void,
  ) {
    if (!call) {
      queueMicrotask(() => { this.#end(why ?? failed("the call was not made")); });
      return;
    }
    call.on("data", (message: MessageShape<O>) => {
      if (!this.#over) {
        handlers.reply(message);
      }
    });
    call.on("drain", () => {
      this.full = false;
      if (!this.#over) {
        handlers.drained?.();
      }
    });
    call.on("error", () => undefined); // the status says it too
    call.on("status", (found: StatusObject) => {
      this.#status = found;
      this.#maybeEnd();
    });
    call.on("end", () => {
      this.#readAll = true;
      this.#maybeEnd();
    });
  }

  /** Resolves when the stream is over, and its connection released. */
  get closed(): Promise<void> {
    return this.#closed.promise;
  }

  /** Write a message; nothing happens after the end. */
  write(message: MessageInitShape<I>): void {
    if (!this.#over && this.call?.writable) {
      this.full = !this.call.write(create(this.method.input, message));
    }
  }

  /** Finish writing. */
  halfClose(): void {
    if (!this.#over) {
      this.call?.end();
    }
  }

  /** Read nothing more for now. */
  pause(): void {
    this.call?.pause();
  }

  /** Read on. */
  resume(): void {
    this.call?.resume();
  }

  /** End the stream; nothing is reported any more. */
  cancel(): void {
    if (!this.#over) {
      this.#over = true;
      this.call?.cancel();
      this.call?.resume();
      this.release();
      this.#closed.resolve();
    }
  }

  #maybeEnd(): void {
    if (this.#status && this.#readAll) {
      this.#end(endOf(this.#status));
    }
  }

  #end(end: End): void {
    if (!this.#over) {
      this.#over = true;
      this.release();
      this.handlers.ended(end);
      this.#closed.resolve();
    }
  }
}
