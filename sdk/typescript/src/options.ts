/** Options of a client, their defaults and checks. Source: docs/sdk.md, "Options". */

import { ConfigurationError } from "./errors.js";

/** Options of a client; each has a default. Times are milliseconds. */
export interface ClientOptions {
  /** How long `connect` tries to reach the cluster. */
  readonly connectTimeoutMs: number;
  /** How long a message may stay unresolved; then it fails as `NotSent` or `OutcomeUnknown`. */
  readonly publishTimeoutMs: number;
  /** How long a mail may stay unconfirmed while it is sent again. */
  readonly mailTimeoutMs: number;
  /** How long a message to a durable topic may stay unconfirmed while it is sent again. */
  readonly topicTimeoutMs: number;
  /** How long `join`, `leave` and `flush` wait for the cluster's confirmation. */
  readonly joinTimeoutMs: number;
  /** Limit of unresolved messages in bytes, of each of: messages, mail, the writer of a topic. A `send` beyond it waits. */
  readonly queueBytes: number;
  /** Limit of unresolved messages in number. */
  readonly queueRecords: number;
  /** Largest batch, in bytes; a larger record is sent alone. */
  readonly batchBytes: number;
  /** Largest batch, in records. */
  readonly batchRecords: number;
  /** Limit of what is under way to one proxy, in bytes, until the proxy sends its own limit. */
  readonly windowBytes: number;
  /** Limit of what is under way to one proxy, in records. */
  readonly windowRecords: number;
  /** A subscription's buffer, in bytes; when it is full the client stops reading. */
  readonly receiveBytes: number;
  /** A subscription's buffer, in messages. */
  readonly receiveRecords: number;
  /** Interval at which proxies are asked for the cluster's processes. */
  readonly refreshIntervalMs: number;
  /** The first wait after a failed connection; it doubles, and each is shortened by a random part. */
  readonly backoffMs: number;
  /** The longest wait after failed connections. */
  readonly maxBackoffMs: number;
  /** Largest message, in bytes: a larger one is refused before it is sent. */
  readonly maxRecordBytes: number;
}

const DEFAULTS: ClientOptions = {
  connectTimeoutMs: 5_000,
  publishTimeoutMs: 10_000,
  mailTimeoutMs: 60_000,
  topicTimeoutMs: 60_000,
  joinTimeoutMs: 10_000,
  queueBytes: 8 << 20,
  queueRecords: 100_000,
  batchBytes: 256 << 10,
  batchRecords: 1_000,
  windowBytes: 1 << 20,
  windowRecords: 20_000,
  receiveBytes: 8 << 20,
  receiveRecords: 50_000,
  refreshIntervalMs: 60_000,
  backoffMs: 100,
  maxBackoffMs: 5_000,
  maxRecordBytes: 1 << 20,
};

/** Fill in the defaults. Throws `ConfigurationError` that names the option at fault. */
export function optionsOf(given: Readonly<Record<string, unknown>>): ClientOptions {
  const found: Record<string, number> = { ...DEFAULTS };
  for (const name of Object.keys(DEFAULTS)) {
    const value = given[name];
    if (value === undefined) {
      continue;
    }
    if (typeof value !== "number" || !Number.isFinite(value) || value <= 0) {
      throw new ConfigurationError(`${name} is a number above 0, not ${JSON.stringify(value)}`);
    }
    found[name] = value;
  }
  return found as unknown as ClientOptions;
}
