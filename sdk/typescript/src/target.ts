/** Targets that a user may give to `connect`. */

import { InvalidArgument } from "./errors.js";
import { parseRegistry, type RegistryAddress } from "./registry.js";

const MAX_ADDRESSES = 64;

/**
 * Read a target: `host:port,host:port`, the gRPC addresses of some proxies, any of which names all others; or `zk://host:port/root`.
 *
 * Throws `InvalidArgument` that names the wrong part.
 */
export function parseTarget(target: string): string[] | RegistryAddress {
  if (target.startsWith("zk://") || target.startsWith("zks://")) {
    return parseRegistry(target);
  }
  if (target.includes("://")) {
    throw new InvalidArgument(`the target '${target}' has an unknown scheme; write 'host:port,host:port' or 'zk://host:port/root'`);
  }
  const found = target.split(",").map((part) => part.trim()).filter((part) => part !== "");
  if (found.length === 0) {
    throw new InvalidArgument(`the target '${target}' names no address; write 'host:port,host:port' or 'zk://host:port/root'`);
  }
  if (found.length > MAX_ADDRESSES) {
    throw new InvalidArgument(`the target names ${found.length} addresses; ${MAX_ADDRESSES} are enough, because the cluster reports the others`);
  }
  for (const address of found) {
    const parts = /^(\[[^[\]/]+\]|[^:[\]/]+):(\d{1,5})$/.exec(address);
    const port = Number(parts?.[2] ?? 0);
    if (port < 1 || port > 65_535) {
      throw new InvalidArgument(`'${address}' in the target '${target}' is not 'host:port' with a port from 1 to 65535`);
    }
  }
  return found;
}
