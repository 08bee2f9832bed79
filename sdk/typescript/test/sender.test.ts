/** The sender against simulated proxies that die, drain and answer late. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { optionsOf } from "../src/options.js";
import { Receipt, Ticket, type Failure } from "../src/send/receipt.js";
import { mailPolicy, MailWriterNumber, roomPolicy, Sender, type Effect } from "../src/send/sender.js";

const PROXIES = ["a:1", "b:1", "c:1"];

/** Numbers in [0, 1), the same for the same seed. */
function numbers(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return state / 2 ** 32;
  };
}

/** One simulated cluster: each open stream keeps what it was sent and has not answered. */
class World {
  now = 0;
  /** Key → texts in the order in which they were delivered, repeats of an ID left out. */
  readonly delivered = new Map<bigint, string[]>();
  readonly outcomes = new Map<string, Failure | undefined>();
  readonly #seen = new Set<string>();
  readonly #streams = new Map<number, { waiting: { position: number; key: bigint; text: string }[]; draining: boolean }>();
  readonly generations: number[] = [];

  constructor(readonly sender: Sender, private readonly random: () => number) {}

  get streams(): number[] {
    return [...this.#streams.keys()];
  }

  apply(effects: readonly Effect[]): void {
    for (const effect of effects) {
      if (effect.do === "open") {
        this.#streams.set(effect.stream, { waiting: [], draining: false });
        this.generations.push(effect.generation);
      } else if (effect.do === "close") {
        this.#streams.delete(effect.stream);
      } else if (effect.do === "settle") {
        effect.ticket.settled(effect.failure);
      }
    }
  }

  offer(key: bigint, text: string): void {
    const record = Buffer.from(`${key} ${text}\n`);
    const settled = (failure: Failure | undefined): void => {
      assert.ok(!this.outcomes.has(text), `${text} was settled twice`);
      this.outcomes.set(text, failure);
    };
    this.apply(this.sender.offer(new Ticket(record, key, false, new Receipt(), settled), this.now, undefined));
  }

  /** Something happens to a random stream. */
  step(): void {
    this.now += 20;
    this.apply(this.sender.tick(this.now));
    const { streams } = this;
    const number = streams[Math.floor(this.random() * streams.length)];
    const stream = number === undefined ? undefined : this.#streams.get(number);
    if (number === undefined || !stream) {
      return;
    }
    for (let batch = this.sender.nextBatch(number, this.now); batch; batch = this.sender.nextBatch(number, this.now)) {
      batch.data.toString().trimEnd().split("\n").forEach((line, at) => {
        const [key = "0", text = ""] = line.split(" ");
        stream.waiting.push({ position: (batch?.position ?? 0) + at, key: BigInt(key), text });
      });
    }
    const luck = this.random();
    const handled = stream.waiting.splice(0, Math.floor(this.random() * (stream.waiting.length + 1)));
    for (const { key, text } of handled) {
      if (!this.#seen.has(text)) {
        this.#seen.add(text);
        this.delivered.set(key, [...(this.delivered.get(key) ?? []), text]);
      }
    }
    if (luck < 0.05) {
      this.apply(this.sender.streamDied(number, this.now, "it was killed")); // what it handled was not answered
      this.#streams.delete(number);
      return;
    }
    stream.draining ||= luck > 0.97;
    const last = handled.at(-1)?.position ?? 0;
    const count = handled.length;
    const found = this.sender.unresolved > 0 && count > 0 ? { upTo: last, outcomes: [{ position: last - count + 1, count, failure: undefined }] } : {};
    this.apply(this.sender.reply(number, this.now, { ...found, draining: stream.draining }));
  }
}

for (const kind of ["messages", "mail"]) {
  void test(`${kind} keep the order of each key, and each is settled once, while proxies die and drain`, (context) => {
    let resent = 0;
    for (let seed = 1; seed <= 50; seed += 1) {
      const random = numbers(seed);
      context.mock.method(Math, "random", random);
      const options = optionsOf({ publishTimeoutMs: 3_600_000, mailTimeoutMs: 3_600_000 });
      const policy = kind === "mail" ? mailPolicy(options, new MailWriterNumber(() => 7)) : roomPolicy(options);
      const world = new World(new Sender({ ...policy, stallMs: 3_600_000 }, PROXIES), random);
      const wanted = new Map<bigint, string[]>();
      for (let number = 0; number < 300; number += 1) {
        const key = BigInt(Math.floor(random() * 5));
        wanted.set(key, [...(wanted.get(key) ?? []), String(number)]);
        world.offer(key, String(number));
        world.step();
      }
      for (let steps = 0; world.sender.unresolved > 0; steps += 1) {
        assert.ok(steps < 100_000, `seed ${seed}: ${world.sender.unresolved} messages were never settled`);
        world.step();
      }
      for (const [key, texts] of wanted) {
        assert.deepEqual(world.delivered.get(key), texts, `seed ${seed}, key ${key}`);
      }
      assert.equal([...world.outcomes.values()].filter((failure) => failure).length, 0, `seed ${seed}`);
      assert.equal(world.sender.unresolvedBytes, 0);
      if (kind === "mail") {
        assert.deepEqual(world.generations, [...new Set(world.generations)].sort((a, b) => a - b), `seed ${seed}: generations rise`);
      }
      resent += world.sender.counters.resent;
      context.mock.restoreAll();
    }
    assert.ok(resent > 100, `only ${resent} were sent again`);
  });
}

void test("a refusal after an attempt that was not answered leaves the outcome unknown, a first one does not", () => {
  const sender = new Sender(roomPolicy(optionsOf({})), ["a:1"]);
  const world = new World(sender, () => 0.5);
  world.offer(1n, "doubtful");
  const [first = 0] = world.streams;
  assert.equal(sender.nextBatch(first, 0)?.count, 1);
  world.apply(sender.streamDied(first, 0, "it was killed"));
  world.offer(1n, "fresh");
  world.now = 1_000;
  world.apply(sender.tick(world.now));
  const second = world.streams.at(-1) ?? 0;
  assert.equal(sender.nextBatch(second, world.now)?.count, 2);
  const failure = { code: "OVERLOADED", text: "too much", retryAfterMs: 5 };
  world.apply(sender.reply(second, world.now, { upTo: 2, outcomes: [{ position: 1, count: 2, failure }] }));
  assert.deepEqual(["doubtful", "fresh"].map((text) => world.outcomes.get(text)?.code), ["OUTCOME_UNKNOWN", "OVERLOADED"]);
});

void test("a message that nobody took is not sent, one that somebody took is in doubt, when their time is over", () => {
  const sender = new Sender(roomPolicy(optionsOf({ publishTimeoutMs: 100 })), ["a:1"]);
  const world = new World(sender, () => 0.5);
  world.offer(1n, "taken");
  assert.equal(sender.nextBatch(world.streams[0] ?? 0, 0)?.count, 1);
  world.offer(1n, "waits");
  world.apply(sender.tick(101));
  assert.deepEqual(["taken", "waits"].map((text) => world.outcomes.get(text)?.code), ["OUTCOME_UNKNOWN", "NOT_SENT"]);
});
