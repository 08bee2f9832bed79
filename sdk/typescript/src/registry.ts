/**
 * Reads the proxies of a cluster from its registry in ZooKeeper: once when a client connects, and again when no proxy answers. Everything
 * else the client asks of proxies. Reading is all that it does, so four requests of ZooKeeper's protocol are enough.
 *
 *     i32 size | connect: i32 0, i64 0, i32 time-out, i64 session, buffer password        | i32 time-out, …
 *     i32 size | i32 xid, i32 type (8 getChildren, 4 getData), string path, u8 watch      | i32 xid, i64 zxid, i32 error, body
 *
 * Source: docs/registry.md; docs/protocol.md.
 */

import { readFileSync, statSync } from "node:fs";
import { connect, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { ConfigurationError, InvalidArgument, RegistryDenied, RegistryUnavailable, Unreachable } from "./errors.js";
import { deferred, within, type Deferred } from "./rpc/waiting.js";

const DEFAULT_PORT = 2181;
const DEFAULT_ROOT = "/pubsub";
const MAX_HOSTS = 9;
const MAX_REPLY_BYTES = 4 << 20;
const SESSION_MS = 10_000;
const GET_DATA = 4;
const GET_CHILDREN = 8;
const CLOSE = -11;
const AUTH = 100;
const AUTH_XID = -4;
const MAX_CREDENTIALS_BYTES = 65_536;
const NO_NODE = -101;
const DENIED: ReadonlySet<number> = new Set([-102, -115]);

/** ZooKeeper's servers, and the root above all nodes. */
export interface RegistryAddress {
  readonly hosts: readonly { readonly host: string; readonly port: number }[];
  readonly root: string;
}

/** Read `zk://host:port,host:port/root`. Throws `InvalidArgument`. */
export function parseRegistry(target: string): RegistryAddress {
  if (target.startsWith("zks://")) {
    throw new InvalidArgument("this SDK reads no registry by TLS: give the gRPC addresses of proxies, 'host:port,host:port'");
  }
  const parts = /^zk:\/\/([^/]+)((?:\/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)\/?$/.exec(target);
  const servers = (parts?.[1] ?? "").split(",");
  const hosts = servers.map((server) => {
    const found = /^(\[[^[\]]+\]|[^:[\]\s@]+)(?::(\d{1,5}))?$/.exec(server);
    const port = Number(found?.[2] ?? DEFAULT_PORT);
    if (!found || port < 1 || port > 65_535) {
      throw new InvalidArgument(`the registry's address '${target}' is wrong; an example: zk://10.0.0.1:2181,10.0.0.2:2181/pubsub`);
    }
    return { host: (found[1] ?? "").replace(/^\[|\]$/g, ""), port };
  });
  if (hosts.length > MAX_HOSTS) {
    throw new InvalidArgument(`the registry's address names ${hosts.length} servers; at most ${MAX_HOSTS} are allowed`);
  }
  return { hosts, root: parts?.[2] === undefined || parts[2] === "" ? DEFAULT_ROOT : parts[2] };
}

const text = (value: string): Buffer => {
  const bytes = Buffer.from(value, "utf8");
  const size = Buffer.allocUnsafe(4);
  size.writeInt32BE(bytes.length);
  return Buffer.concat([size, bytes]);
};

const integers = (...values: number[]): Buffer => {
  const made = Buffer.allocUnsafe(4 * values.length);
  values.forEach((value, at) => made.writeInt32BE(value, 4 * at));
  return made;
};

/**
 * Logins at the registry, `role:password` each: from the file that PIXIU_CLUSTER_REGISTRY_CREDENTIALS_FILE names, else from the one that an
 * embedded ZooKeeper of the same user has left; none if there is no file. Throws `ConfigurationError`.
 */
function loginsOf({ hosts }: RegistryAddress): string[] {
  const uid = process.getuid?.() ?? -1;
  const runtime = process.env.XDG_RUNTIME_DIR;
  const folder = runtime === undefined || runtime === "" ? join(tmpdir(), `pixiu-${uid}`) : join(runtime, "pixiu");
  const named = process.env.PIXIU_CLUSTER_REGISTRY_CREDENTIALS_FILE ?? "";
  const file = named || join(folder, `registry-${hosts.map(({ host, port }) => `${host}:${port}`).join()}`);
  let found: string;
  try {
    const { mode, uid: owner } = statSync(file);
    if (!named && owner !== uid) {
      return [];
    }
    if (mode & 0o077) {
      throw new ConfigurationError(`registry credentials ${file}: others may read or change it: chmod 600 ${file}`);
    }
    found = readFileSync(file, "utf8").slice(0, MAX_CREDENTIALS_BYTES);
  } catch (error) {
    if (!named && (error as { code?: string }).code === "ENOENT") {
      return [];
    }
    throw error instanceof ConfigurationError ? error : new ConfigurationError(`registry credentials ${file}: cannot be read: ${(error as Error).message}`);
  }
  const lines = found.split("\n").map((line) => line.trim()).filter((line) => line !== "" && !line.startsWith("#"));
  return lines.map((line) => line.replace(/\s+/, ":"));
}

/** One connection to one server. Replies come in the order of the requests. */
class Session {
  readonly #waiting: Deferred<Buffer>[] = [];
  #received = Buffer.alloc(0);
  #xid = 0;

  constructor(private readonly socket: Socket) {
    socket.on("data", (data) => {
      this.#received = Buffer.concat([this.#received, data]);
      while (this.#received.length >= 4) {
        const size = this.#received.readInt32BE(0);
        if (size < 0 || size > MAX_REPLY_BYTES) {
          socket.destroy(new Error("its answer is not ZooKeeper's"));
          return;
        }
        if (this.#received.length < 4 + size) {
          return;
        }
        this.#waiting.shift()?.resolve(this.#received.subarray(4, 4 + size));
        this.#received = this.#received.subarray(4 + size);
      }
    });
    const end = (why: string): void => {
      this.#waiting.splice(0).forEach((waiter) => { waiter.reject(new RegistryUnavailable(why)); });
    };
    socket.on("error", (error) => { end(error.message); });
    socket.on("close", () => { end("the server closed the connection"); });
  }

  #ask(...parts: Buffer[]): Promise<Buffer> {
    const body = Buffer.concat(parts);
    const waiter = deferred<Buffer>();
    this.#waiting.push(waiter);
    this.socket.write(Buffer.concat([integers(body.length), body]));
    return waiter.promise;
  }

  async open(logins: readonly string[]): Promise<void> {
    await this.#ask(integers(0, 0, 0, SESSION_MS, 0, 0), text("\0".repeat(16)), Buffer.from([0]));
    for (const login of logins) {
      const reply = await this.#ask(integers(AUTH_XID, AUTH, 0), text("digest"), text(login));
      if (reply.readInt32BE(12) !== 0) {
        throw new RegistryDenied("ZooKeeper refused the login of this program");
      }
    }
  }

  /** The body of an answer; undefined: there is no such node. */
  async read(type: number, path: string): Promise<Buffer | undefined> {
    this.#xid += 1;
    const reply = await this.#ask(integers(this.#xid, type), text(path), Buffer.from([0]));
    const error = reply.readInt32BE(12);
    if (error === 0) {
      return reply.subarray(16);
    }
    if (error === NO_NODE) {
      return undefined;
    }
    const kind = DENIED.has(error) ? RegistryDenied : RegistryUnavailable;
    throw new kind(`ZooKeeper refused to read ${path} (${error}); name the file of its passwords in PIXIU_CLUSTER_REGISTRY_CREDENTIALS_FILE, or give addresses of proxies`);
  }

  close(): void {
    if (this.socket.readyState === "open") {
      this.socket.end(integers(8, 0, CLOSE));
      this.socket.destroySoon();
    } else {
      this.socket.destroy();
    }
  }
}

/** Where a Running process serves clients; undefined: it does not. */
function clientAddress(data: Buffer): string | undefined {
  try {
    const node = JSON.parse(data.toString("utf8")) as Readonly<Record<string, unknown>>;
    const host = typeof node.client_host === "string" && node.client_host !== "" ? node.client_host : node.host;
    const port = node.client_port;
    if (node.state !== "Running" || typeof host !== "string" || typeof port !== "number" || port < 1) {
      return undefined;
    }
    return host.includes(":") ? `[${host}]:${port}` : `${host}:${port}`;
  } catch {
    return undefined;
  }
}

async function proxiesOf(session: Session, root: string, logins: readonly string[]): Promise<string[]> {
  await session.open(logins);
  const listed = await session.read(GET_CHILDREN, `${root}/proxy`);
  const names: string[] = [];
  for (let at = 4, left = listed?.readInt32BE(0) ?? 0; listed && left > 0; left -= 1) {
    const size = listed.readInt32BE(at);
    names.push(listed.toString("utf8", at + 4, at + 4 + size));
    at += 4 + size;
  }
  const found: string[] = [];
  for (const name of names.filter((each) => /^n\d{10}$/.test(each)).sort()) {
    const data = await session.read(GET_DATA, `${root}/proxy/${name}`);
    const address = data && clientAddress(data.subarray(4, 4 + data.readInt32BE(0)));
    if (address) {
      found.push(address);
    }
  }
  return found;
}

/**
 * Read the addresses of the Running proxies. Rejects with `RegistryUnavailable` when no server answers within `timeoutMs`, `RegistryDenied`
 * for one that refuses the login, and `Unreachable` when no proxy is registered.
 */
export async function readProxies(address: RegistryAddress, timeoutMs: number, signal?: AbortSignal): Promise<string[]> {
  const logins = loginsOf(address);
  const failures: string[] = [];
  for (const { host, port } of address.hosts) {
    const socket = connect({ host, port });
    const session = new Session(socket);
    try {
      const late = (): Error => new RegistryUnavailable("no answer in time");
      const found = await within(proxiesOf(session, address.root, logins), timeoutMs / address.hosts.length, late, signal);
      if (found.length === 0) {
        throw new Unreachable(`ZooKeeper answers, but no Running proxy is registered below ${address.root}; start one, or check the root in the target`);
      }
      return found;
    } catch (error) {
      if (!(error instanceof RegistryUnavailable) || error instanceof RegistryDenied) {
        throw error;
      }
      failures.push(`${host}:${port}: ${error.message}`);
    } finally {
      session.close();
    }
  }
  throw new RegistryUnavailable(`ZooKeeper cannot be reached (${failures.join("; ")})`);
}
