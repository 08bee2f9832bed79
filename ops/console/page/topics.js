// Durable topics: parts with their lineage, channels with their lags, messages, dead letters.
import { change, read } from "/page/api.js";
import { count, form, h, say, seconds, sure, table, time } from "/page/dom.js";

async function list(place, { query, go }) {
  const found = await read("topics", { prefix: query.prefix, after: query.after, deleted: query.deleted === "true" ? 1 : "" });
  place.replaceChildren(
    form([{ name: "prefix", label: "Name begins with", value: query.prefix },
      { name: "deleted", label: "with those in the bin", type: "checkbox", value: query.deleted === "true" }], "Search", (values) => go("topics", values)),
    table("Topics", [
      { name: "name", show: (row) => h("a", { href: `#topics?name=${encodeURIComponent(row.name)}` }, row.name) },
      { name: "parts", number: true, show: (row) => row.open }, { name: "sealed", number: true, show: (row) => row.sealed },
      { name: "channels", show: (row) => row.channels.join(", ") }, { name: "kept", show: (row) => (row.retention_s ? seconds(row.retention_s) : "for ever") },
      { name: "state", show: (row) => (row.deleted_at_ms ? "in the bin" : "") },
    ], found.topics),
    found.next ? h("button", { type: "button", onclick: () => go("topics", { ...query, after: found.next }) }, "Next") : "");
}

async function one(place, context) {
  const { query, session } = context;
  const topic = await read("topic", { name: query.name });
  const below = h("div", {});
  const act = async (path, body, question, button, said) => {
    if (!await sure(question, button)) return;
    try { say(said(await change(path, { name: topic.name, ...body }))); await one(place, context); } catch (error) { say(error.message, true); }
  };
  const dead = async (channel) => {
    const found = await read("topic/dead", { name: topic.name, channel });
    below.replaceChildren(table(`Dead letters of ${channel}, without what they say`, [
      { name: "part", number: true, show: (row) => row.part }, { name: "offset", number: true, show: (row) => row.offset },
      { name: "attempts", number: true, show: (row) => row.attempts }, { name: "reason", text: true, show: (row) => row.reason },
      { name: "given up", show: (row) => time(row.at_us / 1000) }, { name: "bytes", number: true, show: (row) => count(row.bytes) },
      { name: "", show: (row) => h("button", { type: "button", disabled: !session.may_change, "aria-label": `Resend ${row.part}:${row.offset}`,
        onclick: () => act("topic/resend", { channel, part: row.part, offsets: [row.offset] }, `Deliver ${row.part}:${row.offset} again?`, "Resend",
          (said) => `delivered again: ${said.resent}`) }, "Resend") },
    ], found.dead));
  };
  const seek = (channel) => below.replaceChildren(h("h2", {}, `Move channel ${channel}`), form([
    { name: "to", label: "To: start, end, a time ago such as 2h, a date, or @OFFSET of one part", value: "1h", size: 24 },
    { name: "part", label: "Part (empty: all)", size: 8, max: 10 }, { name: "force", label: "although it has members", type: "checkbox" },
  ], "Move", ({ to, part, force }) => act("topic/seek", { channel, to, part: Number(part || 0), force }, `Move channel ${channel} of ${topic.name} to ${to}?`, "Move",
    (said) => `moved; ${count(said.changed)} messages are concerned`)));
  place.replaceChildren(h("p", {}, h("a", { href: "#topics" }, "All topics")), h("h2", {}, topic.name),
    topic.problems.length ? h("ul", { class: "problems" }, topic.problems.map((text) => h("li", {}, text))) : "",
    table("Channels", [
      { name: "channel", show: (row) => row.name }, { name: "mode", show: (row) => row.mode }, { name: "lag", number: true, show: (row) => count(row.unacknowledged) },
      { name: "oldest", number: true, show: (row) => (row.unacknowledged ? seconds(row.oldest_s) : "") }, { name: "with members", number: true, show: (row) => count(row.with_members) },
      { name: "dead", number: true, show: (row) => count(row.dead) }, { name: "members", number: true, show: (row) => row.members },
      { name: "filter", text: true, show: (row) => row.filter },
      { name: "", show: (row) => h("span", {}, h("button", { type: "button", "aria-label": `Dead letters of ${row.name}`, onclick: () => dead(row.name).catch((error) => say(error.message, true)) }, "Dead letters"), " ",
        h("button", { type: "button", disabled: !session.may_change, "aria-label": `Resend all of ${row.name}`, onclick: () => act("topic/resend", { channel: row.name }, `Deliver all dead letters of ${row.name} again?`, "Resend", (said) => `delivered again: ${said.resent}`) }, "Resend all"), " ",
        h("button", { type: "button", disabled: !session.may_change, "aria-label": `Move ${row.name}`, onclick: () => seek(row.name) }, "Move")) },
    ], topic.channels),
    below,
    table("Parts", [
      { name: "part", number: true, show: (row) => row.number }, { name: "slots", show: (row) => `${row.low}-${row.high - 1}` },
      { name: "group", number: true, show: (row) => row.group }, { name: "state", show: (row) => row.state },
      { name: "first", number: true, show: (row) => count(row.first) }, { name: "end", number: true, show: (row) => count(row.end) },
      { name: "after", show: (row) => row.parents.join(", ") }, { name: "stored to", number: true, show: (row) => count(row.store?.end) },
    ], topic.parts),
    ...(session.may_change ? peek(topic) : [h("p", { class: "faint" }, "What messages say is shown to operators.")]));
}

function peek(topic) {
  const found = h("div", { id: "messages" });
  return [h("h2", {}, "Messages"), form([
    { name: "from", label: "From: start, a time ago such as 10m, a date, @OFFSET of a part", value: "start", size: 24 },
    { name: "part", label: "Part (empty: all)", size: 8, max: 10 },
    { name: "filter", label: "Filter, as of a channel", size: 40, max: 4096 },
  ], "Look", async (values) => {
    try {
      const said = await read("topic/messages", { name: topic.name, ...values });
      found.replaceChildren(table("Messages", [
        { name: "place", show: (row) => `${row.part}:${row.offset}` }, { name: "stored", show: (row) => time(row.time_us / 1000) },
        { name: "key", text: true, show: (row) => row.key ?? "" }, { name: "headers", text: true, show: (row) => Object.entries(row.headers).map(([name, value]) => `${name}: ${value}`).join("\n") },
        { name: "body", text: true, show: (row) => row.body.slice(0, 2000) },
      ], said.messages), said.late ? h("p", { class: "warn" }, "The filter selected no more in 10 s: begin later, or in one part.") : "");
    } catch (error) { say(error.message, true); }
  }), found];
}

export default { name: "topics", title: "Topics", every: 0, show: (place, context) => (context.query.name ? one : list)(place, context) };
