/** Scenarios of mail and durable topics. */

import {
  InvalidArgument, StaleWriter, TopicExists, UnknownTopic, type ChannelMember, type ChannelMessage, type Client, type Mail, type TopicMessage,
  type TopicReceipt, type TopicWriter,
} from "../src/index.js";
import { check, fails, limit, same, take, until, type Play, type Scenario } from "./play.js";

const numbers = (count: number): string[] => Array.from({ length: count }, (_, number) => String(number));

/** Take and acknowledge mail; returns the texts. */
async function read(inbox: { next: (signal?: AbortSignal) => Promise<Mail | undefined> }, count: number): Promise<string[]> {
  const found = await take(inbox, count);
  found.forEach((mail) => { mail.acknowledge(); });
  return found.map((mail) => mail.text());
}

/** Take and acknowledge messages of a channel; returns the texts. */
async function handle(member: ChannelMember, count: number): Promise<string[]> {
  const found = await take(member, count);
  for (const message of found) {
    check(await message.ack(), `the acknowledgement of ${message.text()} did not count`);
  }
  return found.map((message) => message.text());
}

/** A client, and a topic with some messages. */
async function topicOf(play: Play, messages: readonly string[], parts = 2): Promise<{ client: Client; name: string }> {
  const client = await play.connect();
  const name = play.topic();
  await client.topics.create(name, { parts });
  const writer = await client.durableTopic(name).writer();
  for (const text of messages) {
    await writer.send(text, { key: text });
  }
  await writer.finished();
  return { client, name };
}

/** Check that the messages of each key have rising numbers: `KEY NUMBER`. */
export function inOrder(messages: readonly TopicMessage[], keys: number, each: number): void {
  const byKey = new Map<string, string[]>();
  for (const message of messages) {
    const key = message.keyText() ?? "";
    byKey.set(key, [...(byKey.get(key) ?? []), message.text()]);
  }
  same(byKey.size, keys, "keys");
  for (const [key, texts] of byKey) {
    same(texts, numbers(each), `messages of ${key}`);
  }
}

/** Write numbered messages of some keys. */
export async function writeKeys(client: Client, name: string, keys: number, from: number, to: number): Promise<void> {
  const writer = await client.durableTopic(name).writer();
  for (let number = from; number < to; number += 1) {
    for (let key = 0; key < keys; key += 1) {
      await writer.send(String(number), { key: `key-${key}` });
    }
  }
  await writer.finished();
}

/** Write rows from `first` to before `end` under ten keys by a writer with a name. Returns its progress when it opened. */
export async function load(client: Client, name: string, end: number, first = 1): Promise<number> {
  await using writer = await client.durableTopic(name).writer({ name: "loader" });
  for (let row = first; row < end; row += 1) {
    await writeRow(writer, row);
  }
  return Number(writer.progress);
}

/** Write a row, 1 or more, under one of ten keys. Returns its receipt once there is space for the next one. */
export function writeRow(writer: TopicWriter, row: number): Promise<TopicReceipt> {
  return writer.send(String(Math.floor((row - 1) / 10)), { key: `key-${row % 10}`, progress: writer.name ? row : 0 });
}

/** Check that a topic has numbered messages of ten keys, each once, and nothing else. */
export async function wholly(client: Client, name: string, each: number): Promise<void> {
  const reader = client.durableTopic(name).reader();
  inOrder(await take(reader, 10 * each), 10, each);
  await client.durableTopic(name).send("end");
  same((await take(reader, 1))[0]?.text(), "end", "the next message");
}

export const STORES: Record<string, Scenario> = {
  "inbox/send_receive": async (play) => {
    const [receiver, sender] = [await play.user(1), await play.user(2)];
    const inbox = await receiver.inbox().ready();
    const receipt = await sender.user(receiver.uin).mail("hello");
    check(receipt.msgId > 0n && receipt.copies >= 1, `MsgID ${receipt.msgId}, ${receipt.copies} copies`);
    const [mail] = await take(inbox, 1);
    mail?.acknowledge();
    same([mail?.msgId, mail?.sender, mail?.text()], [receipt.msgId, sender.uin, "hello"], "mail");
  },
  "inbox/waits": async (play) => {
    const [receiver, sender] = [await play.user(1), await play.connect()];
    const inbox = await receiver.inbox().ready(); // the device is known from now on
    await inbox.close();
    await sender.user(receiver.uin).mail("waits");
    same(await read(receiver.inbox(), 1), ["waits"], "mail");
  },
  "inbox/order": async (play) => {
    const [receiver, sender] = [await play.user(1), await play.connect()];
    const inbox = await receiver.inbox().ready();
    const receipts = [];
    for (const text of numbers(200)) {
      receipts.push(await sender.user(receiver.uin).mailSubmit(text));
    }
    const found: string[] = [];
    while (found.length < 200) {
      found.push(...(await read(inbox, 1)));
    }
    await Promise.all(receipts.map((receipt) => receipt.confirmed()));
    same(found, numbers(200), "mail");
  },
  "inbox/ack_survives_reconnect": async (play) => {
    const [receiver, sender] = [await play.user(1), await play.connect()];
    const inbox = await receiver.inbox().ready();
    await sender.user(receiver.uin).mail("first");
    same(await read(inbox, 1), ["first"], "mail");
    await inbox.flush();
    await inbox.close();
    const again = await receiver.inbox().ready();
    await sender.user(receiver.uin).mail("second");
    same(await read(again, 1), ["second"], "mail of the next connection");
  },
  "inbox/unacknowledged_comes_again": async (play) => {
    const [receiver, sender] = [await play.user(1), await play.connect()];
    const inbox = await receiver.inbox().ready();
    await sender.user(receiver.uin).mail("again");
    await take(inbox, 1);
    await inbox.close();
    same(await read(await receiver.inbox().ready(), 1), ["again"], "mail");
  },
  "inbox/two_devices": async (play) => {
    const client = await play.user(1);
    const [phone, desk] = [client.inbox({ device: "phone" }), client.inbox({ device: "desk" })];
    await Promise.all([phone.ready(), desk.ready()]);
    await client.user(client.uin).mail("both");
    same(await read(phone, 1), ["both"], "mail of the first device");
    await phone.flush();
    same(await read(desk, 1), ["both"], "mail of the second device");
  },
  "inbox/many_receivers": async (play) => {
    const users = [await play.user(1), await play.user(2), await play.user(3)];
    const inboxes = await Promise.all(users.map((user) => user.inbox().ready()));
    const [first, ...more] = users.map((user) => user.uin);
    await users[0]?.user(first ?? 0n).mail("all", { to: more });
    for (const inbox of inboxes) {
      same(await read(inbox, 1), ["all"], "mail");
    }
  },
  "inbox/lanes": async (play) => {
    const client = await play.user(1);
    const inbox = await client.inbox().ready();
    await client.user(client.uin).mail("normal", { lane: 1 });
    await client.user(client.uin).mail("first", { lane: 0 });
    const found = await take(inbox, 2);
    found.forEach((mail) => { mail.acknowledge(); });
    same(found.map((mail) => `${mail.text()} ${mail.lane}`).sort(), ["first 0", "normal 1"], "lanes");
  },
  "interop/mail": async (play) => {
    const client = await play.user(1);
    const inbox = await client.inbox().ready();
    const other = play.seed + 2;
    await client.user(other).mail("from-typescript");
    same(await play.ask("inbox", String(other), "device", "1"), "from-typescript", "mail of Python");
    await play.ask("mail", String(client.uin), "from-python");
    same(await read(inbox, 1), ["from-python"], "mail");
  },

  "topics/create_describe_delete": async (play) => {
    const client = await play.connect();
    const name = play.topic();
    await client.topics.create(name, { parts: 4 });
    same((await client.topics.describe(name)).parts.length, 4, "parts");
    same((await client.topics.list(name)).map((topic) => topic.name), [name], "listed");
    await client.topics.delete(name, { now: true });
    same((await client.topics.list(name)).map((topic) => topic.name), [], "listed after it was deleted");
  },
  "topics/exists": async (play) => {
    const client = await play.connect();
    await client.topics.create(play.topic());
    await fails(TopicExists, () => client.topics.create(play.topic()));
  },
  "topics/unknown": async (play) => {
    const client = await play.connect();
    await fails(UnknownTopic, () => client.durableTopic(play.topic("none")).send("x"));
  },
  "topics/positions": async (play) => {
    const { client, name } = await topicOf(play, []);
    const { position } = await client.durableTopic(name).send("here", { key: "k" });
    check(position !== undefined, "the receipt has no position");
    const [message] = await take(client.durableTopic(name).reader(), 1);
    same([message?.part, message?.offset, message?.text()], [position.part, position.offset, "here"], "message");
  },
  "topics/key_order": async (play) => {
    const { client, name } = await topicOf(play, [], 4);
    await writeKeys(client, name, 10, 0, 30);
    inOrder(await take(client.durableTopic(name).reader(), 300), 10, 30);
  },
  "topics/reader_latest": async (play) => {
    const { client, name } = await topicOf(play, ["before"]);
    const reader = await client.durableTopic(name).reader({ start: "latest" }).open();
    await client.durableTopic(name).send("after");
    same((await take(reader, 1))[0]?.text(), "after", "message");
  },
  "topics/reader_position": async (play) => {
    const { client, name } = await topicOf(play, numbers(20));
    const first = client.durableTopic(name).reader();
    const before = await take(first, 8);
    const second = client.durableTopic(name).reader({ start: first.position });
    const after = await take(second, 12);
    same([...before, ...after].map((message) => Number(message.text())).sort((a, b) => a - b).join(), numbers(20).join(), "messages");
  },
  "topics/channel_ack": async (play) => {
    const { client, name } = await topicOf(play, numbers(5));
    const first = client.durableTopic(name).channel("work");
    same((await handle(first, 5)).sort(), numbers(5), "messages");
    await first.close();
    const second = await client.durableTopic(name).channel("work").open();
    await client.durableTopic(name).send("new");
    same(await handle(second, 1), ["new"], "messages of the next member");
  },
  "topics/channel_unacknowledged": async (play) => {
    const { client, name } = await topicOf(play, numbers(3));
    const first = client.durableTopic(name).channel("work");
    await take(first, 3);
    await first.close();
    const again = await take(client.durableTopic(name).channel("work"), 3);
    check(again.every((message) => message.attempts > 1), `attempts ${again.map((message) => message.attempts).join()}`);
  },
  "topics/channel_shared": async (play) => {
    const { client, name } = await topicOf(play, []);
    const members = await Promise.all([1, 2].map(() => client.durableTopic(name).channel("work", { credit: 4 }).open()));
    const found: string[] = [];
    const counts = members.map(() => 0);
    const handling = members.map(async (member, at) => {
      for await (const message of member) {
        found.push(message.text());
        counts[at] = (counts[at] ?? 0) + 1;
        check(await message.ack(), "an acknowledgement did not count");
      }
    });
    const state = async (): Promise<number> => (await client.topics.channelState(name, "work")).reduce((most, part) => Math.max(most, part.members.length), 0);
    const signal = limit();
    while ((await state()) < 2) {
      signal.throwIfAborted();
    }
    await writeKeys(client, name, 10, 0, 20);
    await until(() => found.length >= 200, "all messages");
    await Promise.all(members.map((member) => member.close()));
    await Promise.all(handling);
    same(found.length, 200, "messages");
    check(counts.every((count) => count > 0), `one member got all: ${counts.join()}`);
  },
  "topics/channels_independent": async (play) => {
    const { client, name } = await topicOf(play, numbers(10));
    for (const channel of ["one", "two"]) {
      same((await handle(client.durableTopic(name).channel(channel), 10)).sort(), numbers(10), `messages of ${channel}`);
    }
  },
  "topics/channel_nack": async (play) => {
    const { client, name } = await topicOf(play, ["again"]);
    const member = client.durableTopic(name).channel("work");
    const [message] = await take(member, 1);
    check((await message?.nack()) === true, "the refusal did not count");
    same((await take(member, 1)).map((each) => [each.text(), each.attempts]), [["again", 2]], "messages");
  },
  "topics/channel_reject_to_dead_letters": async (play) => {
    const { client, name } = await topicOf(play, ["bad"]);
    const member = client.durableTopic(name).channel("work");
    const [message] = await take(member, 1);
    check((await message?.reject("it is bad")) === true, "the rejection did not count");
    const dead = await client.topics.deadLetters(name, "work");
    same(dead.map((letter) => [letter.message?.text(), letter.reason]), [["bad", "it is bad"]], "dead letters");
    await client.durableTopic(name).send("good", { key: "bad" });
    same(await handle(member, 1), ["good"], "messages");
    same(await client.topics.resend(name, "work"), 1, "resent");
    same(await handle(member, 1), ["bad"], "messages after the resend");
  },
  "topics/channel_attempts_used_up": async (play) => {
    const { client, name } = await topicOf(play, ["twice"]);
    const member = client.durableTopic(name).channel("work", { maxAttempts: 2 });
    for (const attempts of [1, 2]) {
      const [message]: ChannelMessage[] = await take(member, 1);
      same(message?.attempts, attempts, "attempts");
      await message?.nack();
    }
    const signal = limit();
    while ((await client.topics.deadLetters(name, "work")).length === 0) {
      signal.throwIfAborted();
    }
    same((await client.topics.deadLetters(name, "work")).map((letter) => letter.message?.text()), ["twice"], "dead letters");
  },
  "topics/compacted_last": async (play) => {
    const client = await play.connect();
    const name = play.topic();
    await client.topics.create(name, { parts: 2, compactS: 86_400 });
    const topic = client.durableTopic(name);
    await topic.send("old", { key: "user-7" });
    await topic.send("new", { key: "user-7" });
    same((await topic.last("user-7"))?.text(), "new", "last");
    await topic.send("", { key: "user-7" });
    same(await topic.last("user-7"), undefined, "last after it was deleted");
  },
  "topics/resized": async (play) => {
    const { client, name } = await topicOf(play, [], 1);
    await writeKeys(client, name, 10, 0, 10);
    const writing = writeKeys(client, name, 10, 10, 40);
    await client.topics.resize(name, [1], { bounds: [32_768] });
    await writing;
    await writeKeys(client, name, 10, 40, 50);
    inOrder(await take(client.durableTopic(name).reader(), 500), 10, 50);
  },
  "topics/writer_resumes": async (play) => {
    const { client, name } = await topicOf(play, [], 4);
    same(await load(client, name, 301), 0, "progress of a new writer");
    const again = await play.connect();
    const progress = await load(again, name, 401); // all rows again, of which those that are stored are passed over
    check(progress > 0 && progress <= 300, `progress ${progress} of 300`);
    await load(again, name, 501, progress + 1);
    await wholly(client, name, 50);
  },
  "topics/writer_stale": async (play) => {
    const { client, name } = await topicOf(play, []);
    const write = async (writer: TopicWriter, row: number): Promise<void> => {
      await (await writer.send(String(row), { key: "k", progress: row })).confirmed();
    };
    const first = await client.durableTopic(name).writer({ name: "loader" });
    await write(first, 1);
    const second = await (await play.connect()).durableTopic(name).writer({ name: "loader" });
    await write(second, 2);
    await fails(StaleWriter, () => write(first, 3));
    await fails(StaleWriter, () => write(first, 4));
    await write(second, 5);
    await second.close();
    await fails(StaleWriter, () => first.close());
    same((await take(client.durableTopic(name).reader(), 3)).map((message) => message.text()), ["1", "2", "5"], "messages");
  },
  "topics/writer_taken_over": async (play) => {
    const { client, name } = await topicOf(play, [], 4);
    const first = await client.durableTopic(name).writer({ name: "loader" });
    const rows = Array.from({ length: 2_000 }, (_, number) => number + 1);
    const receipts = rows.map((row) => first.sendSoon(String(Math.floor((row - 1) / 10)), { key: `key-${row % 10}`, progress: row }));
    await receipts[200]?.confirmed();
    await load(await play.connect(), name, 3_001);
    await Promise.allSettled(receipts.map((receipt) => receipt.confirmed()));
    await wholly(client, name, 300);
  },
  "topics/writer_progress": async (play) => {
    const { client, name } = await topicOf(play, []);
    const topic = client.durableTopic(name);
    const writer = await topic.writer({ name: "loader" });
    await writer.send("2", { progress: 2 });
    for (const progress of [1, 2, 0]) {
      await fails(InvalidArgument, () => writer.send("x", { progress }));
    }
    await writer.close();
    await fails(InvalidArgument, async () => (await topic.writer()).send("x", { progress: 3 }));
    await fails(InvalidArgument, () => topic.send("x", { progress: 3 }));
  },
  "interop/topics": async (play) => {
    const { client, name } = await topicOf(play, []);
    await client.durableTopic(name).send("from-typescript", { key: "ts" });
    same(await play.ask("read", name, "1"), "ts=from-typescript", "Python read");
    await play.ask("write", name, "py", "from-python");
    const found = (await take(client.durableTopic(name).reader(), 2)).map((message) => `${message.keyText() ?? ""}=${message.text()}`);
    same(found.sort(), ["py=from-python", "ts=from-typescript"], "messages");
  },
};
