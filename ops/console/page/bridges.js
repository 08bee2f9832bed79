// Bridges between durable topics and other systems.
import { change, read } from "/page/api.js";
import { count, h, say, sure, table } from "/page/dom.js";

async function show(place, context) {
  const found = await read("bridges");
  const act = async (path, name, question, button) => {
    if (!await sure(question, button)) return;
    try { const said = await change(`bridges/${path}`, { name }); say(`paused: ${said.paused.join(", ") || "none"}`); await show(place, context); } catch (error) { say(error.message, true); }
  };
  const may = context.session.may_change;
  place.replaceChildren(
    ...found.silent.map((text) => h("p", { class: "bad" }, text)),
    table("Bridges", [
      { name: "bridge", show: (row) => row.name }, { name: "kind", show: (row) => row.kind }, { name: "topic", show: (row) => row.topic },
      { name: "state", show: (row) => h("span", { class: row.why ? "bad" : null }, row.state) }, { name: "messages", number: true, show: (row) => count(row.messages) },
      { name: "dead letters", number: true, show: (row) => count(row.rejected) }, { name: "retries", number: true, show: (row) => count(row.retries) },
      { name: "waiting", number: true, show: (row) => count(row.waiting) }, { name: "why", text: true, show: (row) => row.why },
      { name: "", show: (row) => (row.state === "paused"
        ? h("button", { type: "button", disabled: !may, "aria-label": `Resume ${row.name}`, onclick: () => act("resume", row.name, `Let the bridge ${row.name} go on?`, "Resume") }, "Resume")
        : h("button", { type: "button", disabled: !may, "aria-label": `Pause ${row.name}`, onclick: () => act("pause", row.name, `Pause the bridge ${row.name}?`, "Pause") }, "Pause")) },
    ], found.bridges),
    found.bridges.length ? "" : h("p", { class: "faint" }, "No process runs bridges: python -m bridge --config FILE"),
    ...found.warnings.map((text) => h("p", { class: "faint" }, text)));
}

export default { name: "bridges", title: "Bridges", every: 0, show };
