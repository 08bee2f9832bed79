/** The cluster's proxies and gateways, asked of the proxies; a registry names the first ones. Source: docs/write_a_client.md, "Connect". */

import { status as Status } from "@grpc/grpc-js";
import { Publisher, type ClusterReply } from "./gen/pixiu/wire/v1/wire_pb.js";
import { Unreachable } from "./errors.js";
import type { ClientOptions } from "./options.js";
import { readProxies, type RegistryAddress } from "./registry.js";
import { CallError, loginError, type Channels } from "./rpc/channels.js";
import { Changes, now, sleep } from "./rpc/waiting.js";

const FETCH_TIMEOUT_MS = 2_000;
/** Limit of proxies asked in one round. */
const MAX_TRIES = 16;
const MIN_REFRESH_MS = 500;

/** Addresses (`host:port`, gRPC) in the order of their registration. */
export interface ClusterMap {
  /** The last list that was not empty. */
  readonly proxies: readonly string[];
  readonly gateways: readonly string[];
}

/** Asks proxies: those given, and those that they named. Keeps the last answer when none answers. */
export class Directory {
  map: ClusterMap;
  readonly #wanted = new Changes();
  readonly #ending = new AbortController();
  #seeds: readonly string[];
  #hurry = false;
  #keeping: Promise<void> | undefined;

  constructor(
    private readonly target: readonly string[] | RegistryAddress,
    private readonly options: ClientOptions,
    private readonly channels: Channels,
    private readonly onChange: (map: ClusterMap) => void,
  ) {
    this.#seeds = "root" in target ? [] : target;
    this.map = { proxies: this.#seeds, gateways: [] };
    this.#ending.signal.addEventListener("abort", () => { this.#wanted.notify(); });
  }

  /** Ask until a proxy answers. Rejects with `NotAuthenticated` at once, `Unreachable` after `connectTimeoutMs`. */
  async start(signal?: AbortSignal): Promise<void> {
    const deadline = now() + this.options.connectTimeoutMs;
    await this.#readSeeds(signal);
    for (;;) {
      const failures = await this.#ask(deadline, signal);
      if (!failures) {
        break;
      }
      for (const failure of failures.values()) {
        const login = loginError(failure.end);
        if (login) {
          throw login;
        }
      }
      const hopeless = [...failures.values()].every((failure) => failure.end.status === Status.UNIMPLEMENTED);
      if (hopeless || now() + this.options.backoffMs >= deadline) {
        const tried = [...failures].map(([address, failure]) => `${address}: ${failure.message}`).join("; ");
        throw new Unreachable(
          `no proxy answered${hopeless ? "" : ` within ${this.options.connectTimeoutMs / 1000} s`} (${tried}). ` +
            "Start a cluster (`pixiu up`), or give the gRPC addresses of its proxies",
        );
      }
      await sleep(this.options.backoffMs, signal ?? this.#ending.signal);
      signal?.throwIfAborted();
    }
    this.#keeping = this.#keep();
  }

  /** Read the proxies from the registry, if the target names one. */
  async #readSeeds(signal: AbortSignal | undefined): Promise<void> {
    if ("root" in this.target) {
      this.#seeds = await readProxies(this.target, this.options.connectTimeoutMs, signal);
    }
  }

  /** Ask again soon, because something failed. */
  refresh(): void {
    this.#hurry = true;
    this.#wanted.notify();
  }

  /** Stop asking. */
  async close(): Promise<void> {
    this.#ending.abort();
    await this.#keeping;
  }

  async #keep(): Promise<void> {
    const { signal } = this.#ending;
    while (!signal.aborted) {
      if (!this.#hurry) {
        await this.#wanted.waitAtMost(this.options.refreshIntervalMs);
      }
      if (this.#hurry) {
        await sleep(Math.random() * MIN_REFRESH_MS, signal); // all clients of a proxy that died ask the others
      }
      this.#hurry = false;
      if (!signal.aborted && (await this.#ask(now() + FETCH_TIMEOUT_MS * MAX_TRIES, signal))) {
        this.#hurry = true;
        await this.#readSeeds(signal).catch(() => undefined); // all proxies may have been replaced
      }
      await sleep(MIN_REFRESH_MS, signal);
    }
  }

  /** Ask in one round; undefined when a proxy answered, else why each did not. */
  async #ask(deadline: number, signal: AbortSignal | undefined): Promise<Map<string, CallError> | undefined> {
    const failures = new Map<string, CallError>();
    for (const address of [...new Set([...this.map.proxies.slice(0, MAX_TRIES / 2), ...this.#seeds])].slice(0, MAX_TRIES)) {
      const left = Math.max(deadline - now(), 1);
      try {
        this.#learn(await this.channels.unary(address, Publisher.method.cluster, {}, Math.min(left, FETCH_TIMEOUT_MS), signal));
        return undefined;
      } catch (error) {
        if (error instanceof CallError) {
          failures.set(address, error);
        } else if (this.#ending.signal.aborted) {
          return undefined;
        } else {
          throw error;
        }
      }
    }
    return failures;
  }

  #learn(reply: ClusterReply): void {
    const of = (role: string): string[] => [
      ...new Set(reply.members.filter((member) => member.role === role && member.grpcAddress).map((member) => member.grpcAddress)),
    ];
    const proxies = of("proxy");
    // A proxy that has just registered may not see itself yet: keep the last ones then.
    const found = { proxies: proxies.length > 0 ? proxies : this.map.proxies, gateways: of("gateway") };
    if (JSON.stringify(found) !== JSON.stringify(this.map)) {
      this.map = found;
      this.onChange(found);
    }
  }
}
