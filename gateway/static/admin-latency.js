// How long units take: quantiles per interval out of the gateway's metrics, and their chart.

import { t } from "./i18n.js";

const HISTOGRAM = "omni_gateway_result_seconds";
const MAX_POINTS = 60;
const DEADLINE_MS = 1000;

// Cumulative counts of the histogram's buckets: [[upper bound in s, count], …], the last one
// of them infinite. Empty if the text has no such histogram.
export function bucketsOf(text) {
  const buckets = [];
  for (const line of text.split("\n")) {
    const found = line.match(new RegExp(`^${HISTOGRAM}_bucket\\{le="([^"]+)"\\} (\\S+)`));
    if (found) buckets.push([found[1] === "+Inf" ? Infinity : Number(found[1]), Number(found[2])]);
  }
  return buckets;
}

// The quantiles in ms of what was counted between two readings; null when nothing was.
// Inside a bucket the values count as spread evenly, beyond the last bound as that bound.
export function quantilesBetween(before, after, shares) {
  const counts = after.map(([bound, count], i) => [bound, count - (before[i]?.[1] ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  // Fewer than before: the gateway was started anew.
  if (!(total > 0) || counts.some(([, count]) => count < 0)) return null;
  return shares.map((share) => 1000 * quantile(counts, share * total));
}

function quantile(counts, rank) {
  let [lower, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= rank) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (rank - below)) / (count - below);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}

export class LatencyChart {
  constructor(box, now) {
    this.box = box;
    this.now = now;
    this.before = null;
    this.points = [];
    this.draw();
  }

  // text: a reading of the metrics.
  add(text) {
    const after = bucketsOf(text);
    if (this.before) {
      this.points.push(quantilesBetween(this.before, after, [0.5, 0.95]));
      if (this.points.length > MAX_POINTS) this.points.shift();
    }
    this.before = after;
    this.draw();
  }

  draw() {
    const newest = this.points.at(-1);
    const known = this.points.filter(Boolean);
    const words = newest ? t("admin.latency_now", { p50: Math.round(newest[0]), p95: Math.round(newest[1]) }) : t("admin.latency_none");
    if (this.now.textContent !== words) this.now.textContent = words;
    this.box.setAttribute("aria-label", `${t("admin.latency")}: ${words}`);
    const top = Math.max(DEADLINE_MS / 4, ...known.map(([, p95]) => p95)) * 1.1;
    this.box.replaceChildren(chart(this.points, top), scale(top));
  }
}

function chart(points, top) {
  const svg = make("svg", { viewBox: `0 0 ${MAX_POINTS - 1} 100`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const y = (ms) => 100 - (100 * ms) / top;
  if (DEADLINE_MS < top) svg.append(make("path", { class: "deadline", d: `M0 ${y(DEADLINE_MS)}H${MAX_POINTS - 1}` }));
  for (const [i, name] of [[1, "p95"], [0, "p50"]]) svg.append(make("path", { class: name, d: line(points, i, y) }));
  return svg;
}

// One stroke per stretch of readings that had units; the newest one is at the right.
function line(points, i, y) {
  const first = MAX_POINTS - points.length;
  let path = "";
  points.forEach((point, at) => {
    if (!point) return;
    const x = first + at;
    // A stretch of one reading would have no length.
    path += points[at - 1] ? `L${x} ${y(point[i])}` : `M${x - 0.4} ${y(point[i])}L${x} ${y(point[i])}`;
  });
  return path;
}

function scale(top) {
  const list = document.createElement("span");
  list.className = "scale";
  list.textContent = `${Math.round(top)} ms`;
  list.setAttribute("aria-hidden", "true");
  return list;
}

function make(name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}
