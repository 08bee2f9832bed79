// Probes: the share that arrived, in total, by day and by path, and the times of hops.
import { read } from "/page/api.js";
import { count, h, seconds, table, time } from "/page/dom.js";
import { plot } from "/page/plot.js";

const percent = (share) => (share === null ? "" : `${(100 * share).toFixed(4)} %`);

function quantile(hop, share) {
  const buckets = Object.entries(hop.buckets).map(([bound, number]) => [bound === "+Inf" ? Infinity : Number(bound), number]).sort((a, b) => a[0] - b[0]);
  const wanted = hop.count * share;
  let [lower, below] = [0, 0];
  for (const [bound, number] of buckets) {
    if (number >= wanted) return bound === Infinity ? `> ${seconds(lower)}` : seconds(number > below ? lower + (bound - lower) * (wanted - below) / (number - below) : bound);
    [lower, below] = [bound, number];
  }
  return "";
}

async function show(place) {
  const found = await read("paths");
  const days = found.hours.map((hour) => [hour.hour_s * 1000, hour.share === null ? null : 100 * hour.share]);
  place.replaceChildren(
    h("p", {}, h("strong", { id: "share" }, percent(found.total.share)), ` of ${count(found.total.arrived + found.total.failed)} probes arrived in ${found.days.length} of 30 days, as of ${time(found.at_s * 1000)}`),
    found.alarms.length ? h("ul", { class: "problems" }, found.alarms.map((text) => h("li", {}, text))) : h("p", { class: "good" }, "✓ no path raises an alarm"),
    days.length > 1 ? h("div", { class: "card" }, h("h3", {}, "Availability by hour, from 0 % to the best hour"), plot(days, `availability by hour, ${percent(found.total.share)} in total`)) : "",
    table("By day", [
      { name: "day", show: (row) => time(row.day_s * 1000).slice(0, 10) }, { name: "arrived", number: true, show: (row) => count(row.arrived) },
      { name: "failed", number: true, show: (row) => count(row.failed) }, { name: "share", number: true, show: (row) => percent(row.share) },
    ], [...found.days].reverse()),
    table("Hops: from publisher to subscriber, and inside each process", [
      { name: "hop", show: (row) => row.hop }, { name: "probes", number: true, show: (row) => count(row.count) },
      { name: "mean", number: true, show: (row) => seconds(row.count ? row.sum_s / row.count : null) },
      { name: "p50", number: true, show: (row) => quantile(row, 0.5) }, { name: "p99", number: true, show: (row) => quantile(row, 0.99) },
    ], found.hops),
    table("By path, the worst first", [
      { name: "path", show: (row) => row.path }, { name: "arrived", number: true, show: (row) => count(row.arrived) },
      { name: "failed", number: true, show: (row) => count(row.failed) }, { name: "share", number: true, show: (row) => percent(row.share) },
    ], found.paths.slice(0, 200)));
}

export default { name: "paths", title: "Paths", every: 10_000, show };
