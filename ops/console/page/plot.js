// A line of values over time, as SVG.

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 56;

function shape(name, attributes) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// points: [ms, value or null], rising: the plot shows the time from the first one to the last.
export function plot(points, label) {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const known = points.filter(([, value]) => value !== null && value !== undefined);
  if (known.length < 2) return svg;
  const end = known[known.length - 1][0];
  const span = end - known[0][0];
  const most = Math.max(...known.map(([, value]) => value)) || 1;
  const x = (ms) => (WIDTH * (1 - (end - ms) / span)).toFixed(1);
  const y = (value) => (HEIGHT - 2 - (HEIGHT - 4) * (value / most)).toFixed(1);
  const line = known.map(([ms, value], index) => `${index ? "L" : "M"}${x(ms)} ${y(value)}`).join("");
  svg.append(
    shape("path", { class: "area", d: `${line}L${x(end)} ${HEIGHT}L${x(known[0][0])} ${HEIGHT}Z` }),
    shape("path", { class: "line", d: line }),
  );
  return svg;
}
