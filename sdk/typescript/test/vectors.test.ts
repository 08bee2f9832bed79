/** The codec against the vectors that all languages share, and names and IDs. */

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { InvalidArgument } from "../src/errors.js";
import { loadHash, slotOf, topicRoom } from "../src/hash.js";
import { roomOf, snowflake, SnowflakeGenerator, snowflakeTimeMs } from "../src/ids.js";
import { checkFilter } from "../src/names.js";
import { parseTarget } from "../src/target.js";
import { encodeBlock, encodeMessage, storedMessages } from "../src/wire/block.js";
import { deliveriesOf } from "../src/wire/envelope.js";
import { decodeHeaders, encodeHeaders } from "../src/wire/headers.js";
import { encode, Message, split } from "../src/wire/record.js";

interface Vectors {
  readonly records: readonly {
    name: string; kind: number; flags: number; type: number; lifetime_min: number; snowflake_id: string; key: string; sender: string;
    extension: string; body: string; record: string;
  }[];
  readonly batch: { count: number; bytes: string };
  readonly snowflake_ids: readonly { time_ms: string; worker: number; sequence: number; id: string }[];
  readonly mqtt_topics: readonly { topic: string; room?: string; user?: string }[];
  readonly slots: readonly { key: string; slot: number }[];
  readonly envelopes: readonly { msg_id: string; seq: string; uin: string; session: number; lane: number; flags: number; bytes: string }[];
  readonly blocks: readonly {
    topic: number; part: number; writer: string; first: string; progress: string; block: string; stored_at_4096: string;
    messages: readonly {
      body: string; slot: number; key: string | null; tag: string | null; headers: [string, string][]; load_test: boolean;
      event_at_us: string | null; expires_in_s: number | null; deliver_at_us: string | null;
    }[];
  }[];
}

const vectors = JSON.parse(readFileSync(new URL("../../../../proto/vectors.json", import.meta.url), "utf8")) as Vectors;
const hex = (text: string): Buffer => Buffer.from(text, "hex");
const TRACED = 1;
const TOPIC = 16;

void test("records are encoded and decoded as in the vectors", () => {
  for (const each of vectors.records) {
    const bytes = hex(each.record);
    const message = new Message(bytes);
    assert.equal(message.id, BigInt(each.snowflake_id), each.name);
    assert.equal(message.room || message.user, BigInt(each.key), each.name);
    assert.equal(message.sender, BigInt(each.sender), each.name);
    assert.equal(Buffer.from(message.extension).toString("hex"), each.extension, each.name);
    assert.ok(each.body.endsWith(Buffer.from(message.body).toString("hex")), each.name);
    assert.equal(message.topic !== undefined, (each.flags & TOPIC) !== 0, each.name);
    if (!(each.flags & TRACED)) {
      const { kind, flags, type } = each;
      const draft = { kind, flags, type, key: BigInt(each.key), body: hex(each.body), lifetimeMinutes: each.lifetime_min, extension: hex(each.extension) };
      assert.equal(encode(draft, BigInt(each.snowflake_id), BigInt(each.sender)).toString("hex"), each.record, each.name);
    }
  }
  assert.equal(split(hex(vectors.batch.bytes), vectors.batch.count)?.length, vectors.batch.count);
  assert.equal(split(hex(vectors.batch.bytes).subarray(1), vectors.batch.count), undefined);
});

void test("a record whose body, extension or CRC is damaged is refused", () => {
  const record = hex(vectors.records[0]?.record ?? "");
  for (let at = 12; at < record.length; at += 1) {
    const damaged = Buffer.from(record);
    damaged[at] = damaged.readUInt8(at) ^ 1;
    if (at < 16 || at >= 40) {
      assert.throws(() => new Message(damaged), `byte ${at}`);
    }
  }
});

void test("SnowflakeIDs, rooms of topics, and slots are those of the vectors", async () => {
  await loadHash();
  for (const { time_ms: timeMs, worker, sequence, id } of vectors.snowflake_ids) {
    assert.equal(snowflake(Number(timeMs), worker, sequence), BigInt(id));
    assert.equal(snowflakeTimeMs(BigInt(id)), Number(timeMs));
  }
  for (const { topic, room } of vectors.mqtt_topics) {
    if (room !== undefined && !topic.startsWith("room/")) {
      assert.equal(topicRoom(checkFilter(topic)), BigInt(room), topic);
    } else {
      assert.throws(() => checkFilter(topic), InvalidArgument, topic);
    }
  }
  for (const { key, slot } of vectors.slots) {
    assert.equal(slotOf(hex(key)), slot);
  }
});

void test("envelopes are decoded as in the vectors", () => {
  for (const each of vectors.envelopes) {
    const [found, ...more] = deliveriesOf(hex(each.bytes), 1) ?? [];
    assert.deepEqual([found?.msgId, found?.seq, found?.uin, found?.session, found?.lane, found?.flags, more.length],
      [BigInt(each.msg_id), BigInt(each.seq), BigInt(each.uin), each.session, each.lane, each.flags, 0]);
    assert.equal(deliveriesOf(hex(each.bytes).subarray(0, -1), 1), undefined);
  }
});

void test("blocks are encoded and decoded as in the vectors", () => {
  for (const each of vectors.blocks) {
    const messages = each.messages.map((message) => ({
      slot: message.slot,
      encoded: encodeMessage({
        body: hex(message.body), key: message.key === null ? undefined : hex(message.key), tag: message.tag ?? undefined,
        headers: message.headers.map(([name, value]) => [name, hex(value)] as const), loadTest: message.load_test,
        eventTimeUs: message.event_at_us === null ? undefined : BigInt(message.event_at_us),
        deliverAtUs: message.deliver_at_us === null ? undefined : BigInt(message.deliver_at_us), expiresInS: message.expires_in_s ?? undefined,
      }),
    }));
    const { topic, part } = each;
    const head = { topic, part, writer: BigInt(each.writer), first: BigInt(each.first), progress: BigInt(each.progress) };
    assert.equal(encodeBlock(messages, head).toString("hex"), each.block);
    const stored = hex(each.stored_at_4096);
    const found = storedMessages("t", part, stored, 0);
    assert.deepEqual(found.map((message) => Buffer.from(message.body).toString("hex")), each.messages.map((message) => message.body));
    assert.deepEqual(found.map((message) => (message.key ? Buffer.from(message.key).toString("hex") : null)), each.messages.map((message) => message.key));
    assert.deepEqual(found.map((message) => message.offset), each.messages.map((_, number) => 4096 + number));
    assert.equal(storedMessages("t", part, stored, 4097).length, each.messages.length - 1);
    stored[stored.length - 1] = stored.readUInt8(stored.length - 1) ^ 1;
    assert.throws(() => storedMessages("t", part, stored, 0));
  }
});

void test("headers keep their texts, and other extensions are none", () => {
  const headers = { a: "1", größe: "groß" };
  assert.deepEqual(decodeHeaders(encodeHeaders(headers)), headers);
  assert.deepEqual(decodeHeaders(Buffer.from('{"a": 1}')), {});
  assert.deepEqual(decodeHeaders(Buffer.from("no json")), {});
  assert.throws(() => encodeHeaders({ "": "x" }), InvalidArgument);
});

void test("IDs rise, also within a millisecond and when the clock goes back", () => {
  let clock = 1_750_000_000_000;
  const generator = new SnowflakeGenerator(() => clock);
  generator.lease(7, clock - 1_000, clock + 60_000);
  let last = generator.next();
  for (let number = 0; number < 5_000; number += 1) {
    clock -= number % 100 === 0 ? 10 : 0;
    const next = generator.next();
    assert.ok(next > last);
    last = next;
  }
  clock += 120_000;
  assert.equal(generator.usable(), false);
  assert.throws(() => generator.next());
});

void test("targets and IDs that are wrong are refused with a reason", () => {
  assert.deepEqual(parseTarget("a:1, [::1]:2"), ["a:1", "[::1]:2"]);
  assert.deepEqual(parseTarget("zk://a:1,b/r/s"), { hosts: [{ host: "a", port: 1 }, { host: "b", port: 2181 }], root: "/r/s" });
  for (const target of ["", "host", "host:0", "http://x", "host:70000", "::1:80", "zk://", "zk://h:0/r", "zk://h//r", "zks://h/r"]) {
    assert.throws(() => parseTarget(target), InvalidArgument, target);
  }
  for (const room of [0, -1, 1.5, 2 ** 53, 1n << 62n]) {
    assert.throws(() => roomOf(room), InvalidArgument, String(room));
  }
});
