// The units of a session as bars, the figures below them, and one unit's stages on demand.

import { onLanguageChange, setAttribute, setText, t } from "./i18n.js";
import { byId } from "./view.js";

const MAX_BARS = 60;
const DEADLINE_MS = 1000;
const MEDIAN_OVER = 30;

// Field of a result -> the text of its stage; those that are null were not measured.
const STAGES = [
  ["cost_llm_ms", "unit.llm"],
  ["cost_tts_prep_ms", "unit.tts_prep"],
  ["cost_tts_ms", "unit.tts"],
  ["cost_token2wav_ms", "unit.token2wav"],
  ["cost_all_ms", "unit.all"],
  ["wall_clock_ms", "unit.wall"],
  ["roundTripMs", "unit.trip"],
];
const COUNTS = [
  ["n_tokens", "unit.tokens"],
  ["n_tts_tokens", "unit.tts_tokens"],
  ["vision_slices", "unit.slices"],
];

export class Timeline {
  constructor() {
    this.list = byId("timeline");
    this.detail = byId("unit-detail");
    this.results = new WeakMap();
    this.made = 0;
    this.list.addEventListener("pointerover", ({ target }) => this.select(target.closest("li")));
    this.list.addEventListener("focus", () => this.select(this.selected ?? this.list.lastElementChild));
    this.list.addEventListener("keydown", (event) => this.walk(event));
    onLanguageChange(() => this.select(this.selected));
    this.reset();
  }

  reset() {
    this.list.replaceChildren();
    this.select(null);
    this.unitTimes = [];
    this.trips = [];
    this.counts = { units: 0, dropped: 0 };
    for (const id of ["f-unit", "f-median", "f-trip", "f-context"]) byId(id).textContent = "–";
    this.showCounts();
    this.showPlayback({ bufferedMs: 0, underruns: 0 });
  }

  // A chunk that never left: the connection takes less than the microphone gives.
  drop() {
    this.counts.dropped += 1;
    this.showCounts();
  }

  showCounts() {
    byId("f-units").textContent = this.counts.units;
    byId("f-dropped").textContent = this.counts.dropped;
  }

  // result: a session's result message.
  add(result) {
    const ms = result.wall_clock_ms ?? result.roundTripMs ?? 0;
    const kind = result.dropped ? "lost" : result.interrupted ? "cut" : result.is_listen ? "listen" : "speak";
    this.counts.units += 1;
    this.counts.dropped += result.dropped ? 1 : 0;
    this.append(kind, ms, result);
    remember(this.unitTimes, ms);
    if (result.roundTripMs !== null) remember(this.trips, result.roundTripMs);
    byId("f-unit").textContent = milliseconds(ms);
    byId("f-median").textContent = milliseconds(median(this.unitTimes));
    byId("f-trip").textContent = this.trips.length ? milliseconds(median(this.trips)) : "–";
    byId("f-context").textContent = result.kv_cache_length ?? "–";
    this.showCounts();
  }

  append(kind, ms, result) {
    const bar = document.createElement("li");
    this.made += 1;
    bar.id = `unit-${this.made}`;
    bar.className = kind;
    bar.setAttribute("role", "option");
    bar.setAttribute("aria-selected", "false");
    setAttribute(bar, "aria-label", `unit.${kind}`);
    bar.style.setProperty("--share", String(Math.min(1, ms / DEADLINE_MS)));
    this.results.set(bar, { number: this.counts.units, kind, result });
    this.list.append(bar);
    if (this.list.children.length <= MAX_BARS) return;
    if (this.selected === this.list.firstElementChild) this.select(null);
    this.list.firstElementChild.remove();
  }

  walk(event) {
    const last = this.list.lastElementChild;
    const to = {
      ArrowLeft: this.selected?.previousElementSibling ?? this.selected,
      ArrowRight: this.selected?.nextElementSibling ?? this.selected,
      Home: this.list.firstElementChild,
      End: last,
    }[event.key];
    if (!to) return;
    event.preventDefault();
    this.select(to);
  }

  select(bar) {
    if (bar === null && this.selected === null) return;
    this.selected?.setAttribute("aria-selected", "false");
    this.selected = bar ?? null;
    if (!bar) {
      this.list.removeAttribute("aria-activedescendant");
      setText(this.detail, "unit.hint");
      return;
    }
    bar.setAttribute("aria-selected", "true");
    this.list.setAttribute("aria-activedescendant", bar.id);
    const { number, kind, result } = this.results.get(bar);
    setText(this.detail, "unit.detail", { number, kind: t(`unit.${kind}`), stages: describe(result) });
  }

  showPlayback({ bufferedMs, underruns }) {
    byId("f-buffer").textContent = milliseconds(bufferedMs);
    byId("f-underruns").textContent = underruns;
  }
}

function describe(result) {
  const times = STAGES.filter(([field]) => Number.isFinite(result[field]))
    .map(([field, key]) => `${t(key)} ${milliseconds(result[field])}`);
  const counts = COUNTS.filter(([field]) => result[field] > 0)
    .map(([field, key]) => `${t(key)} ${result[field]}`);
  return [...times, ...counts].join(" · ");
}

function milliseconds(value) {
  return `${Math.round(value)} ms`;
}

function remember(values, value) {
  values.push(value);
  if (values.length > MEDIAN_OVER) values.shift();
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}
