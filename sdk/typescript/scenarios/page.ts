/** Plays the client of web pages: `node build/scenarios/page.js PROXY WEBSOCKET API`. Ends with 0 if all of it holds. */

import { connectPage, InvalidArgument, UnknownTopic, type PageChannelMessage, type PageMail } from "../src/browser.js";
import { connect } from "../src/index.js";
import { check, fails, limit, same, take } from "./play.js";

const [, , proxy = "", webSocket = "", api = ""] = process.argv;

/** The first thing of an iteration, within the limit; leaves the loop. */
async function first<T>(iteration: (call: { signal: AbortSignal }) => AsyncIterable<T>): Promise<T> {
  for await (const found of iteration({ signal: limit() })) {
    return found;
  }
  throw new Error("the iteration ended");
}

const px = await connect(proxy, { uin: 7 });
const page = await connectPage({ webSocket, api, uin: 8n, client: "page" });

const rooms = await page.subscribe({ rooms: [42n], topics: ["weather/+"], chat: true });
await px.room(42).send("from node", { headers: { kind: "test" } });
await page.publish({ room: 42n }, new TextEncoder().encode("from the page"));
await px.topic("weather/north").send("rain");
await px.user(8).chat("to you");
const found = await take(rooms, 4);
same(found.map((each) => `${each.destination}: ${each.text()}`).sort(), ["room/42: from node", "room/42: from the page", "user/8: to you", "weather/north: rain"], "messages");
same(found.find((each) => each.text() === "from node")?.headers, { kind: "test" }, "headers");
await fails(InvalidArgument, () => page.publish({ room: 0 }, "x"));
await rooms.close();
same(await rooms.next(), undefined, "a message after the end");

const big = (1n << 62n) + 1n; // no double has it
const sender = await connect(proxy, { uin: big });
await sender.user(8).mail("to the page");
const mail: PageMail = await first((call) => page.inbox("page", call));
same([mail.text(), mail.sender], ["to the page", big], "mail");
await mail.acknowledge();
await page.mail([8n, big], "to us both", { idempotencyKey: "once" });
await page.mail([8n, big], "to us both", { idempotencyKey: "once" });
const again = await first((call) => page.inbox("page", call));
same(again.text(), "to us both", "mail");
await again.acknowledge();

await px.topics.create("page-orders", { parts: 2 });
await px.topics.setChannel("page-orders", "billing");
await page.write("page-orders", "order", { key: "k" });
const message: PageChannelMessage = await first((call) => page.channel("page-orders", "billing", call));
same([message.key, message.text(), message.attempts], ["k", "order", 1], "message");
check(await message.ack(), "the acknowledgement did not count");
await fails(UnknownTopic, () => page.write("no-such-topic", "x"));

await page.close();
await Promise.all([px.close(), sender.close()]);
process.stdout.write("ok\n");
