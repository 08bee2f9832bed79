// Listeners that nobody guards, and what was refused.
import { read } from "/page/api.js";
import { count, h, table } from "/page/dom.js";

const COUNTS = [["access_logins", "logins"], ["access_refused", "logins refused"], ["access_denied", "not allowed"], ["access_expired", "expired"],
  ["access_kicked", "kicked"], ["access_revoked", "revoked"], ["links_refused", "datagrams refused"]];

async function show(place) {
  const found = await read("security");
  place.replaceChildren(
    found.insecure.length ? h("ul", { class: "problems" }, found.insecure.map((text) => h("li", {}, `not guarded: ${text}`)))
      : h("p", { class: "good" }, "✓ each listener is guarded, or reached from its own machine alone"),
    table("Since each process began", [
      { name: "process", show: (row) => row.name }, { name: "cluster's port", show: (row) => row.address }, { name: "clients' port", show: (row) => row.client_address },
      ...COUNTS.map(([key, name]) => ({ name, number: true, show: (row) => count(row[key]) })),
    ], found.processes));
}

export default { name: "security", title: "Security", every: 5000, show };
