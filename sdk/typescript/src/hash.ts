/** xxh3-64, which places keys and topics. Source: docs/topics.md, "Slots, parts and their lineage"; docs/routing.md. */

import { createXXHash3 } from "hash-wasm";

type Hasher = Awaited<ReturnType<typeof createXXHash3>>;
let hasher: Hasher | undefined;

/** Load the hash; `connect` does it. */
export async function loadHash(): Promise<void> {
  hasher ??= await createXXHash3();
}

/** xxh3-64 of bytes. */
export function xxh3(data: Uint8Array): bigint {
  if (!hasher) {
    throw new Error("loadHash was not awaited");
  }
  return BigInt(`0x${hasher.init().update(data).digest()}`);
}

/** The slot of a key: xxh3-64 modulo 65,536. */
export const slotOf = (key: Uint8Array): number => Number(xxh3(key) & 0xffffn);

/** The room that carries a free topic unless the cluster has rules: a hash of its first level. */
export function topicRoom(topic: string): bigint {
  const first = topic.split("/", 1)[0] ?? "";
  return (1n << 62n) | (xxh3(Buffer.from(first, "utf8")) >> 2n);
}
