// A small client of MQTT 3.1.1 over WebSocket: QoS 0, whole packets only.

const CONNECT = 1, CONNACK = 2, PUBLISH = 3, SUBSCRIBE = 8, SUBACK = 9, PINGREQ = 12, DISCONNECT = 14;
const KEEP_ALIVE_S = 30;
const REFUSALS = ["", "the protocol's version", "the client ID", "the server is not available", "the user or password is wrong", "not allowed"];
const encoder = new TextEncoder();
const decoder = new TextDecoder();

export function packet(kind, flags, ...parts) {
  const body = parts.flatMap((part) => [...part]);
  const length = [];
  let left = body.length;
  do { length.push((left % 128) | (left > 127 ? 128 : 0)); left = Math.floor(left / 128); } while (left);
  return new Uint8Array([(kind << 4) | flags, ...length, ...body]);
}

export function text(value) {
  const bytes = encoder.encode(value);
  if (bytes.length > 65535) throw new Error("a text has at most 65,535 bytes");
  return [bytes.length >> 8, bytes.length & 255, ...bytes];
}

// The first packet in bytes: {kind, flags, body, size}; null if it is not whole.
export function parse(bytes) {
  let [length, shift, at] = [0, 1, 1];
  for (;;) {
    if (at >= bytes.length) return null;
    const byte = bytes[at++];
    length += (byte & 127) * shift;
    if (byte < 128) break;
    shift *= 128;
    if (shift > 2097152) throw new Error("the gateway sent a packet that is no MQTT");
  }
  if (bytes.length < at + length) return null;
  return { kind: bytes[0] >> 4, flags: bytes[0] & 15, body: bytes.subarray(at, at + length), size: at + length };
}

export class Client {
  // on: {open(), message(topic, payload), subscribed(granted), closed(why)}
  constructor(url, { client, user, password }, on) {
    this.on = on;
    this.bytes = new Uint8Array();
    this.why = "the connection ended";
    this.next = 1;
    this.socket = new WebSocket(url, "mqtt");
    this.socket.binaryType = "arraybuffer";
    this.socket.onopen = () => {
      const flags = 2 | (user ? 128 : 0) | (password ? 64 : 0);
      this.send(packet(CONNECT, 0, text("MQTT"), [4, flags, 0, KEEP_ALIVE_S], text(client), user ? text(user) : [], password ? text(password) : []));
      this.timer = setInterval(() => this.send(packet(PINGREQ, 0)), KEEP_ALIVE_S * 500);
    };
    this.socket.onmessage = (event) => this.take(new Uint8Array(event.data));
    this.socket.onclose = () => { clearInterval(this.timer); on.closed(this.why); };
  }

  send(bytes) { if (this.socket.readyState === WebSocket.OPEN) this.socket.send(bytes); }

  take(more) {
    const bytes = new Uint8Array(this.bytes.length + more.length);
    bytes.set(this.bytes);
    bytes.set(more, this.bytes.length);
    this.bytes = bytes;
    for (let found = parse(this.bytes); found; found = parse(this.bytes)) {
      this.bytes = this.bytes.subarray(found.size);
      this.got(found);
    }
  }

  got({ kind, flags, body }) {
    if (kind === CONNACK) {
      if (body[1]) { this.why = `refused: ${REFUSALS[body[1]] ?? body[1]}`; this.socket.close(); } else this.on.open();
    } else if (kind === SUBACK) this.on.subscribed(body[2]);
    else if (kind === PUBLISH) {
      const size = (body[0] << 8) | body[1];
      const start = 2 + size + (flags & 6 ? 2 : 0);
      this.on.message(decoder.decode(body.subarray(2, 2 + size)), decoder.decode(body.subarray(start)));
    }
  }

  subscribe(filter) { this.send(packet(SUBSCRIBE, 2, [0, this.next++ & 255 || 1], text(filter), [0])); }
  publish(topic, payload, retain) { this.send(packet(PUBLISH, retain ? 1 : 0, text(topic), encoder.encode(payload))); }
  close() { this.why = "closed"; this.send(packet(DISCONNECT, 0)); this.socket.close(); }
}
