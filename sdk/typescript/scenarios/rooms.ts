/** Scenarios of connecting, rooms, signals, chat, subscriptions and presence. */

import {
  connect, InvalidArgument, NotAuthenticated, NotConnected, Offline, OutcomeUnknown, RecordTooLarge, Undelivered, Unreachable, type Client,
  type Message, type SubscribeOptions, type Subscription,
} from "../src/index.js";
import { check, closedPort, fails, Lacks, same, take, until, type Play, type Scenario } from "./play.js";

const texts = (messages: readonly Message[]): string[] => messages.map((message) => message.text());
const numbers = (count: number): string[] => Array.from({ length: count }, (_, number) => String(number));

/** Messages of a subscription up to the one with this text, without it. */
async function upTo(subscription: Subscription, last: string): Promise<Message[]> {
  const found: Message[] = [];
  for (;;) {
    const [message] = await take(subscription, 1);
    if (message === undefined || message.text() === last) {
      return found;
    }
    found.push(message);
  }
}

async function sendAndGet(play: Play, options: Parameters<Play["connect"]>[0] = {}): Promise<void> {
  const client = await play.connect(options);
  const subscription = await client.subscribe({ room: play.seed }).ready();
  await client.room(play.seed).send("hello");
  same(texts(await take(subscription, 1)), ["hello"], "messages");
}

/** Answer requests with their body, doubled. */
async function answering(client: Client, to: SubscribeOptions): Promise<void> {
  const subscription = await client.subscribe(to).ready();
  void (async () => {
    for await (const message of subscription) {
      if (message.headers["reply-to"]) {
        await client.reply(message, message.text() + message.text());
      }
    }
  })();
}

export const ROOMS: Record<string, Scenario> = {
  "connect/proxies": async (play) => {
    const all = (await play.connect()).cluster;
    const one = (await play.connect({}, all.proxies[0])).cluster;
    check(one.proxies.length > 0 && one.gateways.length > 0, `it knows ${JSON.stringify(one)}`);
    same([...one.proxies].sort(), [...all.proxies].sort(), "proxies");
    same([...one.gateways].sort(), [...all.gateways].sort(), "gateways");
  },
  "connect/registry": async (play) => {
    if (!play.target.startsWith("zk://")) {
      throw new Lacks("targets of a registry by TLS, or the target is none of a registry");
    }
    const { cluster } = await play.connect();
    const one = (await play.connect({}, cluster.proxies[0])).cluster;
    same([...one.proxies].sort(), [...cluster.proxies].sort(), "proxies");
    same([...one.gateways].sort(), [...cluster.gateways].sort(), "gateways");
  },
  "connect/dead_address_first": async (play) => {
    const client = await play.connect({}, `${await closedPort()},${(await play.connect()).cluster.proxies[0] ?? ""}`);
    await client.room(play.seed).send("hello");
  },
  "connect/unreachable": async () => {
    const addresses = [await closedPort(), await closedPort()];
    const error = await fails(Unreachable, () => connect(addresses.join(), { connectTimeoutMs: 1_000 }));
    check(addresses.every((address) => error.message.includes(address)), `the error is '${error.message}'`);
  },
  "connect/bad_target": async () => {
    for (const target of ["http://x", "host", "host:0"]) {
      await fails(InvalidArgument, () => connect(target));
    }
  },
  "connect/closed": async (play) => {
    const client = await play.connect();
    await client.close();
    await fails(NotConnected, () => client.room(play.seed).send("late"));
    await fails(NotConnected, () => client.subscribe({ room: play.seed }));
  },
  "connect/nothing_left": async (play) => {
    const before = process.getActiveResourcesInfo();
    const client = await connect(play.target, { uin: play.seed, client: "left" });
    const subscription = await client.subscribe({ room: play.seed }).ready();
    const inbox = await client.inbox().ready();
    await client.room(play.seed).send("hello");
    await take(subscription, 1);
    await client.user(play.seed).mail("hello");
    (await take(inbox, 1))[0]?.acknowledge();
    await client.close();
    const count = (kind: string, found: readonly string[]): number => found.filter((each) => each === kind).length;
    const kinds = ["Timeout", "TCPSocketWrap", "TLSWrap", "Immediate"];
    const left = (): string[] => kinds.filter((kind) => count(kind, process.getActiveResourcesInfo()) > count(kind, before) + (kind === "Timeout" ? 1 : 0));
    await until(() => left().length === 0, "the end of everything", 5_000); // the wait itself has one timer
  },
  "publish/confirmed": async (play) => {
    const receiver = await play.connect();
    const sender = await play.user(1);
    const subscription = await receiver.subscribe({ room: play.seed }).ready();
    await sender.room(play.seed).send("hello");
    const [message] = await take(subscription, 1);
    same([message?.room, message?.sender, message?.text()], [BigInt(play.seed), sender.uin, "hello"], "room, sender, body");
  },
  "publish/order": async (play) => {
    const client = await play.connect();
    const subscription = await client.subscribe({ room: play.seed }).ready();
    const room = client.room(play.seed);
    const receipts = numbers(500).map((text) => room.sendSoon(text));
    await Promise.all(receipts.map((receipt) => receipt.confirmed()));
    await room.send("last");
    same(texts(await upTo(subscription, "last")), numbers(500), "messages");
  },
  "publish/backpressure": async (play) => {
    const client = await play.connect({ queueBytes: 64 << 10 });
    const writer = client.room(play.seed).writer();
    const body = new Uint8Array(1024);
    for (let number = 0; number < 5_000; number += 1) {
      await writer.send(body);
    }
    await writer.finished();
    same(client.counters?.confirmed, 5_000, "confirmed");
  },
  "publish/too_large": async (play) => {
    const client = await play.connect({ maxRecordBytes: 1_000 });
    await fails(RecordTooLarge, () => client.room(play.seed).send(new Uint8Array(1_000)));
    same(client.counters, undefined, "a stream to a proxy");
  },
  "publish/bad_room": async (play) => {
    const client = await play.connect();
    await fails(InvalidArgument, () => client.room(0).send("x"));
    await fails(InvalidArgument, () => client.room(1n << 62n).send("x"));
  },
  "publish/headers": async (play) => {
    const client = await play.connect();
    const subscription = await client.subscribe({ room: play.seed }).ready();
    const headers = { "content-type": "application/json", größe: "groß" };
    await client.room(play.seed).send("{}", { headers });
    same((await take(subscription, 1))[0]?.headers, headers, "headers");
  },
  "publish/deadline": async (play) => {
    const client = await play.connect();
    await fails(Error, () => client.room(play.seed).send("late", { signal: AbortSignal.abort() }));
    await client.room(play.seed).send("in time");
  },
  "publish/load_test": async (play) => {
    const client = await play.connect();
    const room = client.room(play.seed);
    const passes = await client.subscribe({ room: play.seed, loadTest: "pass" }).ready();
    const blocks = await client.subscribe({ room: play.seed }).ready();
    await room.send("marked", { loadTest: true });
    await room.send("plain");
    same(texts(await take(passes, 2)), ["marked", "plain"], "passed");
    same(texts(await take(blocks, 1)), ["plain"], "by default");
  },
  "signal/confirmed": async (play) => {
    const client = await play.connect();
    const subscription = await client.subscribe({ room: play.seed }).ready();
    await client.room(play.seed).signal("signal");
    same(texts(await take(subscription, 1)), ["signal"], "signals");
    await client.room(play.seed).send("end");
    same(texts(await upTo(subscription, "end")), [], "more signals");
  },
  "signal/receipt": async (play) => {
    const client = await play.connect();
    const subscription = await client.subscribe({ room: play.seed }).ready();
    const receipt = await client.room(play.seed).signal("signal", { receipt: true });
    check(receipt.gateways >= 1, `${receipt.gateways} gateways`);
    await client.room(play.seed).send("end");
    same((await upTo(subscription, "end")).map((message) => [message.text(), message.signal]), [["signal", true]], "signals");
  },
  "signal/undelivered": async (play) => {
    const client = await play.connect();
    await fails(Undelivered, () => client.room(play.seed + 1).signal("signal", { receipt: true }));
  },
  "chat/delivered": async (play) => {
    const receiver = await play.user(1);
    const sender = await play.user(2);
    const subscription = await receiver.subscribe({ chat: true }).ready();
    await sender.user(receiver.uin).chat("to you");
    const [message] = await take(subscription, 1);
    same([message?.user, message?.room, message?.sender, message?.text()], [receiver.uin, 0n, sender.uin, "to you"], "message");
  },
  "chat/offline": async (play) => {
    const client = await play.connect();
    await fails(Offline, () => client.user(play.seed + 9).chat("nobody"));
  },
  "subscribe/from_now": async (play) => {
    const client = await play.connect();
    await client.room(play.seed).send("before");
    const subscription = await client.subscribe({ room: play.seed }).ready();
    await client.room(play.seed).send("after 1");
    await client.room(play.seed).send("after 2");
    same(texts(await take(subscription, 2)), ["after 1", "after 2"], "messages");
  },
  "subscribe/several_rooms": async (play) => {
    const client = await play.connect();
    const subscription = await client.subscribe({ rooms: [1, 2, 3].map((number) => play.seed + number) }).ready();
    for (const number of [4, 1, 2, 3]) {
      await client.room(play.seed + number).send(String(number));
    }
    same(texts(await take(subscription, 3)).sort(), ["1", "2", "3"], "messages");
    await client.room(play.seed + 1).send("end");
    same(texts(await upTo(subscription, "end")), [], "more messages");
  },
  "subscribe/join_leave": async (play) => {
    const client = await play.connect();
    const [here, there] = [client.room(play.seed + 1), client.room(play.seed + 2)];
    const subscription = await client.subscribe({ room: here.id }).ready();
    await there.send("not joined");
    await subscription.join({ rooms: [there.id] });
    await there.send("joined");
    same(texts(await take(subscription, 1)), ["joined"], "after the join");
    await subscription.leave({ rooms: [there.id] });
    await there.send("left");
    await here.send("end");
    same(texts(await upTo(subscription, "end")), [], "after leaving");
  },
  "subscribe/free_topic": async (play) => {
    const client = await play.connect();
    const [mine, other] = [`t${play.seed}/mine`, `t${play.seed}/other`];
    const subscription = await client.subscribe({ topic: mine }).ready();
    await client.topic(other).send("other");
    await client.topic(mine).send("mine");
    const [message] = await take(subscription, 1);
    same([message?.topic, message?.text()], [mine, "mine"], "message");
  },
  "subscribe/two_clients": async (play) => {
    const clients = [await play.connect(), await play.connect()];
    const subscriptions = await Promise.all(clients.map((client) => client.subscribe({ room: play.seed }).ready()));
    for (const text of numbers(20)) {
      await clients[0]?.room(play.seed).send(text);
    }
    for (const subscription of subscriptions) {
      same(texts(await take(subscription, 20)), numbers(20), "messages");
    }
  },
  "subscribe/close": async (play) => {
    const client = await play.connect();
    const subscription = await client.subscribe({ room: play.seed }).ready();
    const iterating = (async () => {
      let count = 0;
      for await (const message of subscription) {
        count += message.body.length;
      }
      return count;
    })();
    await subscription.close();
    same(await iterating, 0, "bytes");
  },
  "request/reply": async (play) => {
    const [client, other] = [await play.connect(), await play.connect()];
    await answering(other, { room: play.seed });
    const replies = await Promise.all(numbers(50).map((text) => client.room(play.seed).request(text, { headers: { n: text } })));
    same(texts(replies), numbers(50).map((text) => text + text), "replies");
  },
  "request/user": async (play) => {
    const [client, phone] = [await play.connect(), await play.user(1)];
    await answering(phone, { chat: true });
    same((await client.user(phone.uin).request("ab")).text(), "abab", "reply");
  },
  "request/unanswered": async (play) => {
    const client = await play.connect();
    const subscription = await client.subscribe({ room: play.seed }).ready();
    await fails(OutcomeUnknown, () => client.room(play.seed).request("anybody", { timeoutMs: 1_000 }));
    const [asked] = await take(subscription, 1);
    check(asked !== undefined, "the request did not come");
    await client.reply(asked, "late");
    await answering(client, { room: play.seed + 1 });
    same((await client.room(play.seed + 1).request("x")).text(), "xx", "the next reply");
  },
  "request/no_request": async (play) => {
    const client = await play.connect();
    const subscription = await client.subscribe({ room: play.seed }).ready();
    await client.room(play.seed).send("plain", { headers: { "request-id": "1" } });
    const [message] = await take(subscription, 1);
    check(message !== undefined, "the message did not come");
    await fails(InvalidArgument, () => client.reply(message, "x"));
  },
  "interop/requests": async (play) => {
    const client = await play.connect();
    await play.ask("answer", String(play.seed), "python");
    same((await client.room(play.seed).request("typescript")).text(), "python", "reply of Python");
    await answering(client, { room: play.seed + 1 });
    same(await play.ask("request", String(play.seed + 1), "ab"), "abab", "reply to Python");
  },
  "presence/online": async (play) => {
    const client = await play.user(1);
    await client.subscribe({ chat: true }).ready();
    const found = await client.presence([play.seed + 1, play.seed + 2]);
    same(found.map((user) => [user.online, user.devices]), [[true, 1], [false, 0]], "presence");
  },
  "events/states": async (play) => {
    const states: string[] = [];
    const client = await play.connect({ onConnection: (event) => { states.push(`${event.what} ${event.state}`); } });
    const subscription = await client.subscribe({ room: play.seed }).ready();
    await until(() => states.includes("subscription connected"), "the event 'connected'");
    await subscription.close();
    same(states.at(-1), "subscription closed", "the last event");
  },
  "interop/rooms": async (play) => {
    const client = await play.connect();
    await play.ask("listen", String(play.seed));
    const subscription = await client.subscribe({ room: play.seed + 1 }).ready();
    await client.room(play.seed).send("from-typescript");
    same(await play.ask("heard", "1"), "from-typescript", "Python heard");
    await play.ask("publish", String(play.seed + 1), "from-python");
    same(texts(await take(subscription, 1)), ["from-python"], "messages");
  },
  "secure/tls_and_token": (play) => sendAndGet(play),
  "secure/wrong_token": async (play) => {
    await fails(NotAuthenticated, () => connect(play.target, { token: "wrong" }));
  },
  "secure/no_tls": async (play) => {
    await fails(Unreachable, () => connect(play.target, { ca: "", certificate: "", connectTimeoutMs: 2_000 }));
  },
  "secure/token_function": async (play) => {
    let calls = 0;
    const token = (): string => {
      calls += 1;
      return process.env.PIXIU_TOKEN ?? "";
    };
    await sendAndGet(play, { token });
    check(calls > 0, "the function was not called");
  },
};
