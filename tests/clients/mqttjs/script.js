// The script of tests/clients/script.py for MQTT.js, in Node and in a browser: play(mqtt, {url, version, options}).
"use strict";
const WAIT_MS = 10_000, QUIET_MS = 500;
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const expect = (got, wanted) => {
  const [a, b] = [got, wanted].map((value) => JSON.stringify(value));
  if (a !== b) throw new Error(`${a}, not ${b}`);
};

async function play(mqtt, where) {
  const prefix = `clients/${Array.from(crypto.getRandomValues(new Uint8Array(6)), (each) => each.toString(16).padStart(2, "0")).join("")}`;
  let number = 0;
  const name = () => `${prefix.replace("/", "-")}-${++number}`;

  class Client {
    messages = [];
    async connect({ will, keep = false, clientId = name() } = {}) {
      const five = where.version === "5";
      this.client = mqtt.connect(where.url, {
        clientId, protocolVersion: five ? 5 : 4, reconnectPeriod: 0, connectTimeout: WAIT_MS, will, clean: !keep,
        properties: five && keep ? { sessionExpiryInterval: 3600 } : undefined, ...where.options,
      });
      this.client.on("message", (topic, payload, packet) =>
        this.messages.push({ topic, payload: payload.toString(), qos: packet.qos, retain: packet.retain }));
      await new Promise((done, failed) => {
        this.client.on("connect", (packet) => { this.present = packet.sessionPresent; done(); });
        this.client.on("error", failed);
        this.client.on("close", () => failed(new Error("it was closed")));
      });
      return this;
    }
    async subscribe(topic, qos) {
      const granted = await this.client.subscribeAsync(topic, { qos });
      if (granted.some((each) => each.qos >= 0x80)) throw new Error(`SUBACK ${JSON.stringify(granted)}`);
    }
    publish(topic, payload, qos, retain = false) { return this.client.publishAsync(topic, payload, { qos, retain }); }
    async next() {
      for (const end = Date.now() + WAIT_MS; Date.now() < end; await sleep(10)) if (this.messages.length) return this.messages.shift();
      throw new Error("no message");
    }
    async nothing() {
      await sleep(QUIET_MS);
      if (this.messages.length) throw new Error(`one message too many: ${JSON.stringify(this.messages)}`);
    }
    cut() { this.client.stream.destroy(); }
    disconnect() { return this.client.endAsync(); }
  }
  const open = (will) => new Client().connect({ will });
  const close = (...clients) => Promise.all(clients.map((client) => client.disconnect()));

  async function qos(level) {
    const topic = `${prefix}/qos${level}`, receiver = await open(), sender = await open(), got = [];
    await receiver.subscribe(topic, level);
    for (let each = 0; each < 5; each++) await sender.publish(topic, `${each}`, level);
    for (let each = 0; each < 5; each++) got.push(await receiver.next());
    expect(got.map((message) => [message.payload, message.qos]), [0, 1, 2, 3, 4].map((each) => [`${each}`, level]));
    await receiver.nothing();
    await close(receiver, sender);
  }
  const checks = {
    async connect() { await close(await open()); },
    qos0: () => qos(0), qos1: () => qos(1), qos2: () => qos(2),
    async wildcard() {
      const one = await open(), all = await open(), sender = await open();
      await one.subscribe(`${prefix}/w/+/c`, 0);
      await all.subscribe(`${prefix}/w/#`, 0);
      await sender.publish(`${prefix}/w/b/c`, "both", 1);
      await sender.publish(`${prefix}/w/b/d`, "one", 1);
      expect((await one.next()).topic, `${prefix}/w/b/c`);
      expect([(await all.next()).payload, (await all.next()).payload], ["both", "one"]);
      await one.nothing();
      await close(one, all, sender);
    },
    async retained() {
      const topic = `${prefix}/retained`, sender = await open(), first = await open(), second = await open();
      await sender.publish(topic, "kept", 1, true);
      await first.subscribe(topic, 1);
      const got = await first.next();
      expect([got.payload, got.retain], ["kept", true]);
      await sender.publish(topic, "", 1, true);
      expect((await first.next()).retain, false);
      await second.subscribe(topic, 1);
      await second.nothing();
      await close(sender, first, second);
    },
    async will() {
      const topic = `${prefix}/will`, watcher = await open();
      await watcher.subscribe(topic, 1);
      await close(await open({ topic, payload: "left", qos: 1, retain: false }));
      (await open({ topic, payload: "cut", qos: 1, retain: false })).cut();
      expect((await watcher.next()).payload, "cut");
      await watcher.nothing();
      await close(watcher);
    },
    async shared() {
      const topic = `${prefix}/shared`, members = [await open(), await open()], sender = await open(), wanted = [];
      for (const member of members) await member.subscribe(`$share/g/${topic}`, 1);
      for (let each = 0; each < 10; each++) { await sender.publish(topic, `${each}`, 1); wanted.push(`${each}`); }
      const got = () => members.flatMap((member) => member.messages.map((message) => message.payload));
      for (const end = Date.now() + WAIT_MS; Date.now() < end && got().length < 10; await sleep(10));
      await sleep(QUIET_MS);
      expect(got().sort(), wanted.sort());
      await close(...members, sender);
    },
    async resume() {
      const base = `${prefix}/resume`, clientId = name(), sender = await open(), got = { 1: [], 2: [] };
      const first = await new Client().connect({ keep: true, clientId });
      for (const level of [1, 2]) await first.subscribe(`${base}/${level}`, level);
      await close(first);
      for (let each = 0; each < 5; each++) for (const level of [1, 2]) await sender.publish(`${base}/${level}`, `${each}`, level);
      const again = await new Client().connect({ keep: true, clientId });
      expect(again.present, true);
      for (let each = 0; each < 10; each++) {
        const message = await again.next();
        expect(message.topic, `${base}/${message.qos}`);
        got[message.qos].push(message.payload);
      }
      const wanted = ["0", "1", "2", "3", "4"];
      expect(got, { 1: wanted, 2: wanted });
      await again.nothing();
      await close(again, sender);
    },
  };
  const found = {};
  for (const [check, run] of Object.entries(checks)) {
    const late = sleep(3 * WAIT_MS).then(() => { throw new Error("no end in time"); });
    late.catch(() => {});
    try { await Promise.race([run(), late]); found[check] = "ok"; } catch (error) { found[check] = `${error.message}`.slice(0, 200); }
  }
  return found;
}
if (typeof module === "object") module.exports = { play };
