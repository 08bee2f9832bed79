// Doublings under way, and the plan of the next one with its forecast.
import { read } from "/page/api.js";
import { count, form, h, say, table } from "/page/dom.js";

const ROLES = ["router", "broker", "relay", "xiu", "pi"];
const mib = (bytes) => (bytes === null ? "" : `${count(Math.round(bytes / (1 << 20)))} MiB`);

function plan(found) {
  if (!found.load) return [h("p", { class: "warn" }, `doubling ${found.doubling} of ${found.role} is under way: ${found.from} → ${found.to}`)];
  return [h("p", {}, `${found.role}: ${found.from} → ${found.to} partitions, ${found.replicas} replica(s) each; pause to expect: ${found.pause_s ? `${(found.pause_s * 1000).toFixed(0)} ms for each key that moves` : "none"}`),
    found.problems.length ? h("ul", { class: "problems" }, found.problems.map((text) => h("li", {}, text))) : h("p", { class: "good" }, "✓ nothing is missing"),
    ...found.warnings.map((text) => h("p", { class: "warn" }, text)),
    table("Load now and then, a second", [
      { name: "partition", number: true, show: (row) => row.partition }, { name: "now", number: true, show: (row) => count(row.per_s) },
      { name: "stays", number: true, show: (row) => count(row.stays_per_s) }, { name: "goes", number: true, show: (row) => count(row.goes_per_s) },
      { name: "to", number: true, show: (row) => row.child }, { name: "hottest", show: (row) => (row.hottest_per_s ? `${row.hottest} with ${count(row.hottest_per_s)}/s` : "") },
    ], found.load),
    table("Machines", [
      { name: "machine", show: (row) => row.host }, { name: "memory left", number: true, show: (row) => mib(row.memory_free_bytes) }, { name: "memory wanted", number: true, show: (row) => mib(row.memory_wanted_bytes) },
      { name: "disk left", number: true, show: (row) => mib(row.disk_free_bytes) }, { name: "disk wanted", number: true, show: (row) => mib(row.disk_wanted_bytes) }, { name: "new replicas", number: true, show: (row) => row.replicas },
    ], found.machines),
    h("p", { class: "faint" }, `\`pixiu double ${found.role}\` carries it out.`)];
}

async function show(place, { again }) {
  const found = await read("growth");
  const roles = Object.entries(found.layout).filter(([name]) => name !== "version").map(([role, layout]) => ({ role, ...layout }));
  const state = h("div", { id: "state" },
    found.doublings.length ? table("Doublings under way", [
      { name: "role", show: (row) => row.role }, { name: "partitions", show: (row) => `${row.n} → ${row.next}` }, { name: "phase", show: (row) => row.phase || "no tool is at work" },
      { name: "by", show: (row) => row.operator }, { name: "partitions' phases", show: (row) => Object.entries(row.partitions).map(([p, phase]) => `${p} ${phase}`).join(", ") },
    ], found.doublings) : h("p", {}, "No doubling is under way."),
    table("Layout", [
      { name: "role", show: (row) => row.role }, { name: "partitions", number: true, show: (row) => row.n }, { name: "replicas", number: true, show: (row) => row.replicas },
    ], roles));
  if (again) { document.getElementById("state")?.replaceWith(state); return; }
  const below = h("div", {});
  place.replaceChildren(state, h("h2", {}, "What would a doubling do?"), form([
    { name: "role", label: "Role", options: ROLES.map((role) => [role, role]) },
  ], "Plan", async ({ role }) => {
    try { below.replaceChildren(...plan(await read("growth/plan", { role }))); } catch (error) { say(error.message, true); }
  }), below, h("h2", {}, "Are the groups of topics even?"), moves());
}

function moves() {
  const below = h("div", {});
  return h("div", {}, h("button", { type: "button", onclick: async () => {
    try {
      const found = await read("growth/moves");
      below.replaceChildren(
        table("Groups, loads in thousandths of a core", [
          { name: "group", number: true, show: (row) => row.group }, { name: "open parts", number: true, show: (row) => row.parts },
          { name: "load", number: true, show: (row) => row.load.toFixed(0) }, { name: "with the moves", number: true, show: (row) => row.after.toFixed(0) },
        ], found.groups),
        table("Moves", [
          { name: "topic", show: (row) => row.topic }, { name: "part", number: true, show: (row) => row.part }, { name: "from", number: true, show: (row) => row.source }, { name: "to", number: true, show: (row) => row.target },
        ], found.moves), h("p", { class: "faint" }, "`pixiu topic rebalance` makes them."));
    } catch (error) { say(error.message, true); }
  } }, "Plan moves"), below);
}

export default { name: "growth", title: "Growth", every: 3000, show };
