/** What a scenario has: a cluster, numbers of its own, clients that end with it, and the harness. Source: sdk/scenarios.md. */

import { createServer } from "node:net";
import { connect, type Client, type ConnectOptions } from "../src/index.js";

/** A scenario does not hold. */
export class Failed extends Error {}
/** The SDK does not have what the scenario needs. */
export class Lacks extends Error {}

/** Check a condition. */
export function check(condition: boolean, why: string): asserts condition {
  if (!condition) {
    throw new Failed(why);
  }
}

/** Check that two values are equal, as JSON. */
export function same(found: unknown, wanted: unknown, what: string): void {
  const text = (value: unknown): string =>
    value === undefined ? "nothing" : JSON.stringify(value, (_, each: unknown) => (typeof each === "bigint" ? `${each}n` : each));
  check(text(found) === text(wanted), `${what}: ${text(found).slice(0, 300)}, not ${text(wanted).slice(0, 300)}`);
}

/** Check that a call fails with an error of this kind; returns it. */
export async function fails(kind: abstract new (...fields: never[]) => Error, call: () => unknown): Promise<Error> {
  try {
    await call();
  } catch (error) {
    check(error instanceof kind, `failed with ${String(error)}, not ${kind.name}`);
    return error;
  }
  throw new Failed(`did not fail with ${kind.name}`);
}

/** Time for each condition. */
export const LIMIT_MS = 60_000;

/** A signal that aborts after the limit. */
export const limit = (): AbortSignal => AbortSignal.timeout(LIMIT_MS);

/** Take `count` things of a source, within the limit. */
export async function take<T>(source: { next: (signal?: AbortSignal) => Promise<T | undefined> }, count: number): Promise<T[]> {
  const found: T[] = [];
  const signal = limit();
  while (found.length < count) {
    let next: T | undefined;
    try {
      next = await source.next(signal);
    } catch (error) {
      throw signal.aborted ? new Failed(`${found.length} of ${count} came in ${LIMIT_MS / 1000} s`) : error;
    }
    check(next !== undefined, `it ended after ${found.length} of ${count}`);
    found.push(next);
  }
  return found;
}

/** Wait until a condition holds. */
export async function until(condition: () => boolean | Promise<boolean>, what: string, limitMs = LIMIT_MS): Promise<void> {
  const end = performance.now() + limitMs;
  while (!(await condition())) {
    check(performance.now() < end, `${what} did not come`);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}

/** A port on which nobody listens. */
export async function closedPort(): Promise<string> {
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  const address = server.address();
  await new Promise((resolve) => server.close(resolve));
  return `127.0.0.1:${typeof address === "object" && address ? address.port : 0}`;
}

/** One play of a scenario. */
export class Play {
  readonly #clients: Client[] = [];

  constructor(
    readonly target: string,
    /** Rooms and users from here to 999 above are the scenario's. */
    readonly seed: number,
    readonly ask: (...words: string[]) => Promise<string>,
  ) {}

  /** A client that ends with the scenario. */
  async connect(options: ConnectOptions = {}, target = this.target): Promise<Client> {
    const client = await connect(target, options);
    this.#clients.push(client);
    return client;
  }

  /** A client of a user. */
  user(number: number, options: ConnectOptions = {}): Promise<Client> {
    return this.connect({ uin: this.seed + number, client: `device-${this.seed}-${number}`, ...options });
  }

  /** The name of a durable topic of the scenario. */
  topic(name = "topic"): string {
    return `s${this.seed}-${name}`;
  }

  /** Close everything. */
  async close(): Promise<void> {
    await Promise.all(this.#clients.map((client) => client.close()));
  }
}

export type Scenario = (play: Play) => Promise<void>;
