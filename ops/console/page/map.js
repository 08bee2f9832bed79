// Roles × partitions × replicas, what is wrong, and an hour of what flows.
import { read } from "/page/api.js";
import { count, h, seconds, table } from "/page/dom.js";
import { plot } from "/page/plot.js";

const HOUR = 3_600_000;
const WHAT = [["in_per_s", "in, a second"], ["out_per_s", "out, a second"], ["drops_per_s", "dropped, a second"],
  ["p99_s", "p99"], ["behind", "entries behind"], ["lag_s", "loop late"]];
const ADDED = new Set(["in_per_s", "out_per_s", "drops_per_s"]);
let fields = [];
let moments = [];
let asked = 0;
let chosen = "in_per_s";

async function follow() {
  if (performance.now() - asked < 4900 && moments.length) return;
  asked = performance.now();
  const found = await read("series", { since: moments.length ? moments[moments.length - 1][0] : 0 });
  fields = found.fields;
  moments = [...moments, ...found.moments];
  const oldest = moments.length ? moments[moments.length - 1][0] - HOUR : 0;
  moments = moments.filter(([at]) => at >= oldest);
}

function cards() {
  const at = fields.indexOf(chosen);
  const roles = new Map();
  for (const [ms, points] of moments) {
    const values = new Map();
    for (const point of points) {
      const [role, value] = [point[0], point[at]];
      if (value === null) continue;
      const before = values.get(role);
      values.set(role, before === undefined ? value : ADDED.has(chosen) ? before + value : Math.max(before, value));
    }
    for (const [role, value] of values) {
      if (!roles.has(role)) roles.set(role, []);
      roles.get(role).push([ms, value]);
    }
  }
  const shown = (value) => (chosen.endsWith("_s") && !chosen.endsWith("per_s") ? seconds(value) : count(value));
  const label = WHAT.find(([key]) => key === chosen)[1];
  return [...roles].map(([role, points]) => {
    const last = points[points.length - 1][1];
    const most = Math.max(...points.map(([, value]) => value));
    return h("section", { class: "card" }, h("h3", {}, role, h("span", {}, shown(last))),
      plot(points, `${role}: ${label} in the last hour, now ${shown(last)}, at most ${shown(most)}`),
      h("span", { class: "faint" }, `at most ${shown(most)}`));
  });
}

function replica(process, leader) {
  const found = process.replication;
  const said = [`${process.replica}`];
  const marks = [];
  if (found) {
    const lag = leader?.replication.lag[found.member];
    if (found.state === "Leading") marks.push(h("strong", {}, " leads"));
    else said.push(found.state.toLowerCase());
    said.push((leader ?? process).replication.in_sync.includes(found.member) ? "in sync" : "not in sync");
    if (lag) said.push(`lag ${count(lag)}`);
    if (found.may_not_lead) said.push(`may not lead: ${found.may_not_lead}`);
  } else if (process.state !== "Running") said.push(process.state);
  if (process.problem) said.push(process.problem);
  const well = process.healthy && !process.problem && !(found && found.degraded);
  return h("span", { class: well ? "replica" : "replica unwell", title: process.address }, `${said[0]}`, ...marks,
    said.length > 1 ? ` ${said.slice(1).join(", ")}` : "");
}

function partitions(status) {
  const rows = new Map();
  for (const process of status.processes) {
    const key = `${process.role}/${process.partition}`;
    if (!rows.has(key)) rows.set(key, []);
    rows.get(key).push(process);
  }
  return [...rows.values()].map((found) => {
    const leads = found.filter((process) => process.replication?.state === "Leading");
    const leader = leads.sort((a, b) => b.replication.epoch - a.replication.epoch)[0];
    const layout = status.layout[found[0].role];
    return { role: found[0].role, partition: found[0].partition, wanted: layout?.replicas ?? "", found, leader };
  });
}

function controls(draw) {
  const select = h("select", { id: "what", onchange: (event) => { chosen = event.target.value; draw(); } },
    WHAT.map(([key, text]) => h("option", { value: key, selected: key === chosen }, text)));
  return h("p", {}, h("label", { for: "what" }, "Show "), select, " by role");
}

async function show(place, { again }) {
  const [status] = await Promise.all([read("map"), follow()]);
  const verdict = status.healthy ? h("p", { class: "good" }, "✓ healthy")
    : h("p", { class: "bad" }, `✗ not healthy: ${status.problems.length} problem${status.problems.length === 1 ? "" : "s"}`);
  const problems = status.problems.length ? h("ul", { class: "problems", id: "problems" }, status.problems.map((text) => h("li", {}, text))) : "";
  const state = h("div", { id: "state" }, verdict, problems, status.doublings.map((one) =>
    h("p", { class: "warn" }, `doubling of ${one.role}: ${one.n} → ${one.next}, ${one.phase || "no tool is at work"}`)),
  h("h2", {}, "Partitions and replicas"),
  table("Each partition with its replicas", [
    { name: "role", show: (row) => row.role },
    { name: "partition", number: true, show: (row) => (row.partition < 0 ? "" : row.partition) },
    { name: "wanted", number: true, show: (row) => row.wanted },
    { name: "replicas", show: (row) => h("span", { class: "replicas" }, row.found.map((process) => replica(process, row.leader))) },
    { name: "committed", number: true, show: (row) => count(row.leader?.replication.committed) },
  ], partitions(status)));
  const draw = () => document.getElementById("hour")?.replaceChildren(...cards());
  if (again) document.getElementById("state")?.replaceWith(state);
  else {
    place.replaceChildren(state, h("h2", {}, "The last hour"), controls(draw), h("div", { id: "hour", class: "cards" }),
      h("p", { class: "faint" }, `${status.registry}, layout version ${status.layout.version}, protocol ${status.protocol}`));
  }
  draw();
}

export default { name: "map", title: "Map", every: 2000, show };
