/** The delivery envelope, which precedes a mail's record. Source: docs/protocol.md, "Delivery envelope". */

import { HEADER_BYTES } from "./record.js";

const ENVELOPE_BYTES = 32;
/** No record follows: entries of the lane up to this InboxSeq that the device has not got are gone. */
export const GAP = 1;
export const REDELIVERED = 2;

/** A decoded envelope with its record, which is empty in a gap marker. */
export interface Delivery {
  readonly msgId: bigint;
  readonly seq: bigint;
  readonly uin: bigint;
  readonly session: number;
  readonly lane: number;
  readonly flags: number;
  readonly record: Buffer;
}

/** The deliveries of a batch; undefined if it is malformed: then none of it can be trusted. */
export function deliveriesOf(data: Buffer, count: number): Delivery[] | undefined {
  const found: Delivery[] = [];
  let at = 0;
  for (let number = 0; number < count; number += 1) {
    const record = at + ENVELOPE_BYTES;
    if (record > data.length) {
      return undefined;
    }
    const flags = data.readUInt8(at + 31);
    let end = record;
    if (!(flags & GAP)) {
      end = record + HEADER_BYTES <= data.length ? record + 4 + data.readUInt32LE(record) : 0;
      if (end < record + HEADER_BYTES || end > data.length) {
        return undefined;
      }
    }
    found.push({
      msgId: data.readBigUInt64LE(at),
      seq: data.readBigUInt64LE(at + 8),
      uin: data.readBigUInt64LE(at + 16),
      session: data.readUInt32LE(at + 24),
      lane: data.readUInt8(at + 30),
      flags,
      record: data.subarray(record, end),
    });
    at = end;
  }
  return at === data.length ? found : undefined;
}
