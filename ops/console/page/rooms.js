// The hottest rooms and users, and retained messages.
import { read } from "/page/api.js";
import { count, form, h, table, time } from "/page/dom.js";

async function show(place, { query, go }) {
  const [hot, kept] = await Promise.all([
    read("rooms"),
    read("retained", { filter: query.filter, after: query.after }).catch((error) => ({ retained: [], next: "", problem: error.message })),
  ]);
  const columns = (what) => [{ name: what, show: (row) => (what === "user" ? h("a", { href: `#inbox?uin=${row.key}` }, row.key) : row.key) },
    { name: "messages a second", number: true, show: (row) => count(row.per_s) }];
  place.replaceChildren(
    h("h2", {}, "Hot now"), h("p", { class: "faint" }, "Sampled: one message of each batch. It shows what is hot, and is no count."),
    table("Rooms", columns("room"), hot.rooms), table("Users", columns("user"), hot.users),
    h("h2", {}, "Retained messages"),
    form([{ name: "filter", label: "Topic or filter", value: query.filter || "#" }], "Search", (values) => go("rooms", values)),
    kept.problem ? h("p", { class: "warn" }, kept.problem) : null,
    table("Retained messages, without what they say", [
      { name: "topic", text: true, show: (row) => row.topic }, { name: "bytes", number: true, show: (row) => count(row.bytes) },
      { name: "QoS", number: true, show: (row) => row.qos }, { name: "published", show: (row) => time(row.published_ms) },
      { name: "expires", show: (row) => time(row.expires_at_ms) },
    ], kept.retained),
    kept.next ? h("button", { type: "button", onclick: () => go("rooms", { filter: query.filter || "#", after: kept.next }) }, "Next") : "");
}

export default { name: "rooms", title: "Rooms", every: 0, show };
