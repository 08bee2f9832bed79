/** Headers: texts by name, as JSON in a record's extension. Source: docs/protocol.md, "Headers". */

import { InvalidArgument } from "../errors.js";

/** Texts by name: at most 64, names of 1 to 128 bytes, together 65,535 bytes of JSON. */
export type Headers = Readonly<Record<string, string>>;

const MAX_HEADERS = 64;
const MAX_NAME_BYTES = 128;
const MAX_BYTES = 65_535;
const NONE: Headers = Object.freeze({});
const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true });

/** Encode headers; empty for none. Throws `InvalidArgument`. */
export function encodeHeaders(headers: Headers | undefined): Uint8Array {
  const names = Object.entries(headers ?? NONE);
  if (names.length === 0) {
    return new Uint8Array();
  }
  if (names.length > MAX_HEADERS) {
    throw new InvalidArgument(`a message has at most ${MAX_HEADERS} headers, not ${names.length}`);
  }
  for (const [name, value] of names) {
    if (typeof value !== "string") {
      throw new InvalidArgument(`the header ${JSON.stringify(name)} is not a text`);
    }
    if (!name || encoder.encode(name).length > MAX_NAME_BYTES) {
      throw new InvalidArgument(`a header's name has 1 to ${MAX_NAME_BYTES} bytes, not ${JSON.stringify(name)}`);
    }
  }
  const made = encoder.encode(JSON.stringify(headers));
  if (made.length > MAX_BYTES) {
    throw new InvalidArgument(`headers have at most ${MAX_BYTES} bytes together, these ${made.length}`);
  }
  return made;
}

/** Decode the headers of an extension; none if it has another format. Never throws. */
export function decodeHeaders(extension: Uint8Array): Headers {
  if (extension[0] !== 0x7b) {
    return NONE;
  }
  try {
    const found: unknown = JSON.parse(decoder.decode(extension));
    if (typeof found === "object" && found !== null) {
      const values = Object.values(found);
      if (values.length <= MAX_HEADERS && values.every((value) => typeof value === "string")) {
        return Object.freeze(found as Record<string, string>);
      }
    }
  } catch {
    // The application's own format.
  }
  return NONE;
}
