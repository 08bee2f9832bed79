// Clients of all gateways, those with the most work first.
import { change, read } from "/page/api.js";
import { count, form, h, say, sure, table } from "/page/dom.js";

const SORTS = [["backlog", "bytes that wait"], ["inflight", "unacknowledged"], ["dropped", "dropped"]];
const LIMIT = 50;

async function show(place, { query, session, go }) {
  const sort = query.sort || "backlog";
  const offset = Number(query.offset || 0);
  const found = await read("clients", { ...query, sort, offset, limit: LIMIT });
  const turn = (words) => go("clients", { ...query, ...words });
  const kick = async (client) => {
    const who = client.client ? `the client ${client.client}` : `user ${client.user}`;
    if (!await sure(`End the sessions of ${who}?`, "Kick")) return;
    try {
      await change("clients/kick", client.client ? { client: client.client } : { user: client.user });
      say(`all gateways were notified to end the sessions of ${who}`);
    } catch (error) { say(error.message, true); }
  };
  const columns = [
    { name: "client", text: true, show: (row) => row.client },
    { name: "user", number: true, show: (row) => (row.user ? h("a", { href: `#inbox?uin=${row.user}` }, row.user) : "") },
    { name: "address", show: (row) => row.address },
    { name: "gateway", show: (row) => row.gateway },
    { name: "protocol", show: (row) => row.protocol },
    { name: "bytes that wait", number: true, sort: "backlog", sorted: sort === "backlog", show: (row) => count(row.backlog) },
    { name: "unacknowledged", number: true, sort: "inflight", sorted: sort === "inflight", show: (row) => count(row.inflight) },
    { name: "dropped", number: true, sort: "dropped", sorted: sort === "dropped", show: (row) => count(row.dropped) },
    { name: "not read from", show: (row) => Object.entries(row.held_s).map(([why, s]) => `${why} ${s.toFixed(1)} s`).join(", ") },
    { name: "", show: (row) => h("button", { type: "button", disabled: !session.may_change || !(row.client || row.user), "aria-label": `Kick ${row.client || row.user}`,
      onclick: () => kick(row) }, "Kick") },
  ];
  const last = Math.min(offset + LIMIT, found.matching, 1000);
  place.replaceChildren(
    form([
      { name: "client", label: "Client ID contains", value: query.client }, { name: "user", label: "UIN", value: query.user, max: 19 },
      { name: "address", label: "Address begins with", value: query.address },
      { name: "sort", label: "Most", value: sort, options: SORTS },
    ], "Search", (values) => go("clients", values)),
    h("p", {}, `${count(found.matching)} of ${count(found.connections)} clients`, found.silent.length
      ? h("span", { class: "bad" }, `; gateways that do not answer: ${found.silent.join(", ")}`) : ""),
    table("Clients", columns, found.sessions, (by) => turn({ sort: by, offset: 0 })),
    h("p", {}, h("button", { type: "button", disabled: offset === 0, onclick: () => turn({ offset: Math.max(offset - LIMIT, 0) }) }, "Previous"),
      ` ${count(offset + 1)} to ${count(last)} `,
      h("button", { type: "button", disabled: offset + LIMIT >= Math.min(found.matching, 1000), onclick: () => turn({ offset: offset + LIMIT }) }, "Next")),
    h("p", { class: "faint" }, "The first 1,000 are shown; search for others."));
}

export default { name: "clients", title: "Clients", every: 0, show };
