/** Scenarios in which processes are killed and drained. */

import type { Client, Inbox, Message, Subscription, TopicWriter } from "../src/index.js";
import { check, same, take, until, type Play, type Scenario } from "./play.js";
import { inOrder, load, wholly, writeKeys, writeRow } from "./stores.js";

/** Count things by text until the source ends. */
function counting<T extends { text: () => string }>(source: AsyncIterable<T>, each: (thing: T) => void = () => undefined): Map<string, number> {
  const found = new Map<string, number>();
  void (async () => {
    for await (const thing of source) {
      found.set(thing.text(), (found.get(thing.text()) ?? 0) + 1);
      each(thing);
    }
  })().catch(() => undefined);
  return found;
}

/** Check that all of these came, each once. */
async function eachOnce(found: ReadonlyMap<string, number>, wanted: readonly string[]): Promise<void> {
  await until(() => wanted.every((text) => found.has(text)), "every message").catch(() => undefined);
  same(wanted.filter((text) => !found.has(text)), [], "missing");
  same([...found].filter(([, count]) => count > 1), [], "repeated");
}

/** Send one message after the other while something happens, and a bit longer; returns those that were confirmed. */
async function sendingWhile(send: (text: string) => Promise<unknown>, happens: Promise<unknown>, least = 100): Promise<{ confirmed: string[]; failed: string[] }> {
  const confirmed: string[] = [];
  const failed: string[] = [];
  let over = false;
  const end = happens.finally(() => { over = true; });
  let after = 0;
  for (let number = 0; !over || after < least; number += 1) {
    after += over ? 1 : 0;
    await send(`m${number}`).then(() => confirmed.push(`m${number}`), (error: unknown) => failed.push(`m${number}: ${String(error)}`));
  }
  await end;
  return { confirmed, failed };
}

async function roomOf(play: Play): Promise<{ client: Client; subscription: Subscription; gaps: string[] }> {
  const client = await play.connect({ publishTimeoutMs: 30_000 });
  const gaps: string[] = [];
  const subscription = await client.subscribe({ room: play.seed, onGap: (reason) => { gaps.push(reason); } }).ready();
  return { client, subscription, gaps };
}

/** A proxy is killed or drained while messages are sent. */
async function proxy(play: Play, action: "kill" | "drain"): Promise<void> {
  const { client, subscription } = await roomOf(play);
  const found = counting<Message>(subscription);
  const room = client.room(play.seed);
  await room.send("first");
  const address = client.cluster.proxies[play.seed % client.cluster.proxies.length] ?? "";
  const happens = play.ask(action, "proxy", address).then(() => play.ask("healthy"));
  const { confirmed, failed } = await sendingWhile((text) => room.send(text), happens);
  if (action === "drain") {
    same(failed, [], "failed");
  } else {
    check((client.counters?.streamsDied ?? 0) > 0, "the client did not lose a proxy");
  }
  check(confirmed.length > 0, `nothing was confirmed: ${failed[0] ?? ""}`);
  await eachOnce(found, ["first", ...confirmed]);
}

/** Mail is sent while something happens. */
async function mail(play: Play, happens: (client: Client) => Promise<unknown>, role: string): Promise<void> {
  const client = await play.user(1);
  const inbox: Inbox = await client.inbox().ready();
  const found = counting(inbox, (each) => { each.acknowledge(); });
  const user = client.user(client.uin);
  await user.mail("first");
  const { confirmed, failed } = await sendingWhile((text) => user.mail(text), happens(client), 30);
  same(failed, [], `failed while the ${role} was killed`);
  await eachOnce(found, ["first", ...confirmed]);
}

/**
 * Write rows, one after the other, while the leader of the topic's group is killed, and many more at once. Returns the number of rows that
 * there are.
 */
async function rowsWhileKilled(play: Play, writer: TopicWriter, first: number): Promise<number> {
  let killed = false;
  const killing = play.ask("kill", "topic", "leader").finally(() => { killed = true; });
  let row = first;
  for (; !killed; row += 1) {
    await (await writeRow(writer, row)).confirmed();
  }
  await killing;
  const end = row + 1_000 - (row % 10); // as many of each key
  for (; row <= end; row += 1) {
    await writeRow(writer, row);
  }
  return end;
}

async function topicOf(play: Play): Promise<{ client: Client; name: string }> {
  const client = await play.connect();
  const name = play.topic();
  await client.topics.create(name, { parts: 4 });
  return { client, name };
}

export const HARM: Record<string, Scenario> = {
  "reconnect/gateway_killed": async (play) => {
    const { client, subscription, gaps } = await roomOf(play);
    await play.ask("kill", "gateway", subscription.gateway);
    await until(() => gaps.length > 0 && subscription.gateway !== "", "a gap, and another gateway");
    await subscription.ready({ timeoutMs: 60_000 });
    await client.room(play.seed).send("after");
    same((await take(subscription, 1))[0]?.text(), "after", "message");
    await play.ask("healthy");
  },
  "reconnect/gateway_drained": async (play) => {
    const { client, subscription, gaps } = await roomOf(play);
    const found = counting<Message>(subscription);
    const before = subscription.gateway;
    const happens = play.ask("drain", "gateway", before).then(() => until(() => subscription.counters.moves > 0, "the move")).then(() => play.ask("healthy"));
    const { confirmed, failed } = await sendingWhile((text) => client.room(play.seed).send(text), happens);
    same(failed, [], "failed");
    await eachOnce(found, confirmed);
    same(gaps, [], "gaps");
  },
  "reconnect/proxy_killed": (play) => proxy(play, "kill"),
  "reconnect/proxy_drained": (play) => proxy(play, "drain"),
  "reconnect/inbox_gateway_killed": async (play) => {
    const client = await play.user(1);
    const inbox = await client.inbox().ready();
    const user = client.user(client.uin);
    const texts = Array.from({ length: 40 }, (_, number) => `m${number}`);
    for (const text of texts.slice(0, 20)) {
      await user.mail(text);
    }
    const first = await take(inbox, 20);
    first.slice(0, 10).forEach((each) => { each.acknowledge(); });
    await inbox.flush();
    await play.ask("kill", "gateway", inbox.gateway);
    for (const text of texts.slice(20)) {
      await user.mail(text);
    }
    const rest = await take(inbox, 20);
    same([...first, ...rest].map((each) => each.text()), texts, "mail");
    [...first, ...rest].forEach((each) => { each.acknowledge(); });
    await play.ask("healthy");
  },
  "reconnect/mail_proxy_killed": (play) =>
    mail(play, (client) => play.ask("kill", "proxy", client.cluster.proxies[0] ?? "").then(() => play.ask("healthy")), "proxy"),
  "reconnect/mail_leader_killed": (play) => mail(play, () => play.ask("kill", "pi", "leader").then(() => play.ask("healthy")), "leader of Pi"),
  "reconnect/topic_writer": async (play) => {
    const { client, name } = await topicOf(play);
    const writer = await client.durableTopic(name).writer();
    const rows = await rowsWhileKilled(play, writer, 1);
    await writer.finished();
    await play.ask("healthy");
    await wholly(client, name, rows / 10);
  },
  "reconnect/named_writer": async (play) => {
    const { client, name } = await topicOf(play);
    await load(client, name, 51);
    const writer = await client.durableTopic(name).writer({ name: "loader" });
    const rows = await rowsWhileKilled(play, writer, 51);
    await writer.close();
    await load(await play.connect(), name, rows + 1_001);
    await play.ask("healthy");
    await wholly(client, name, rows / 10 + 100);
  },
  "reconnect/topic_reader": async (play) => {
    const { client, name } = await topicOf(play);
    const reader = await client.durableTopic(name).reader().open();
    await writeKeys(client, name, 10, 0, 20);
    const before = await take(reader, 200);
    await play.ask("kill", "topic", "leader");
    await writeKeys(client, name, 10, 20, 40);
    inOrder([...before, ...(await take(reader, 200))], 10, 40);
    await play.ask("healthy");
  },
  "reconnect/channel_member": async (play) => {
    const { client, name } = await topicOf(play);
    const member = await client.durableTopic(name).channel("work").open();
    const came = new Set<string>();
    const handling = (async () => {
      for await (const message of member) {
        came.add(`${message.keyText() ?? ""} ${message.text()}`);
        await message.ack(); // false of one whose answer the leader's end took: it may be acknowledged
      }
    })();
    await writeKeys(client, name, 10, 0, 20);
    await play.ask("kill", "topic", "leader");
    await writeKeys(client, name, 10, 20, 40);
    await until(() => came.size === 400, "every message").catch(() => undefined);
    same(came.size, 400, "messages");
    const acknowledged = async (): Promise<boolean> =>
      (await client.topics.channelState(name, "work")).every((part) => part.unacknowledged === 0);
    await until(acknowledged, "every acknowledgement");
    await member.close();
    await handling;
    await play.ask("healthy");
  },
};
