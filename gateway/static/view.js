// What the page shows. Takes plain values, knows neither session nor audio.

const MAX_BARS = 60;
const DEADLINE_MS = 1000;
const MEDIAN_OVER = 30;

const IDLE_HINT = "Press Start and talk. You can interrupt at any time.";
const RUNNING_HINT = matchMedia("(hover: hover)").matches
  ? "Keys: Esc interrupts, P pauses, M mutes."
  : "Just talk. You can interrupt at any time.";

const $ = (id) => document.getElementById(id);

export function showState(state, text) {
  document.body.dataset.state = state;
  if ($("state").textContent !== text) $("state").textContent = text;
}

export function showProblem(text) {
  $("problem").textContent = text ?? "";
  $("problem").hidden = !text;
}

export function showNote(text) {
  $("note").textContent = text ?? "";
  $("note").hidden = !text;
}

export function showLevel(level) {
  $("orb").style.setProperty("--level", level.toFixed(3));
}

export function showControls({ running, live, paused, muted }) {
  const pressed = document.activeElement;
  $("start").hidden = running;
  $("stop").hidden = !running;
  // A hidden button loses the focus, and the keyboard its place on the page.
  if (pressed === $("start") || pressed === $("stop")) $(running ? "stop" : "start").focus();
  $("interrupt").disabled = !live || paused;
  $("pause").disabled = !live;
  $("pause").textContent = paused ? "Resume" : "Pause";
  $("mute").disabled = !running;
  $("mute").setAttribute("aria-pressed", String(muted));
  $("hint").textContent = running ? RUNNING_HINT : IDLE_HINT;
}

export class Captions {
  constructor() {
    this.box = $("captions");
    this.empty = this.box.querySelector(".empty");
    this.open = null;
  }

  clear() {
    this.box.replaceChildren(this.empty);
    this.open = null;
  }

  // Text of one side; what follows without a change of sides goes on in the same bubble.
  add(who, text) {
    if (this.open?.dataset.side !== who) this.start(who);
    this.open.append(needsSpace(who, this.open.textContent, text) ? ` ${text}` : text);
    this.box.scrollTop = this.box.scrollHeight;
  }

  start(who) {
    this.empty.remove();
    this.open = document.createElement("p");
    this.open.className = `bubble ${who}`;
    this.open.dataset.side = who;
    this.open.dataset.who = who === "you" ? "You" : "Assistant";
    this.box.append(this.open);
  }

  endTurn({ interrupted = false } = {}) {
    if (interrupted && this.open?.dataset.side === "assistant") this.open.classList.add("cut");
    this.open = null;
  }
}

// Captions of the user are whole phrases. The assistant's pieces bring their own spaces, except
// where a new sentence begins.
function needsSpace(who, before, after) {
  if (!before) return false;
  return who === "you" || (/[.!?…]$/.test(before) && /^[\p{L}\p{N}]/u.test(after));
}

export class Timeline {
  constructor() {
    this.list = $("timeline");
    this.reset();
  }

  reset() {
    this.list.replaceChildren();
    this.unitTimes = [];
    this.trips = [];
    this.counts = { units: 0, dropped: 0 };
    for (const id of ["f-unit", "f-median", "f-trip", "f-context"]) $(id).textContent = "–";
    this.showCounts();
    this.list.setAttribute("aria-label", "No units yet");
    this.showPlayback({ bufferedMs: 0, underruns: 0 });
  }

  // A chunk that never left: the connection takes less than the microphone gives.
  drop() {
    this.counts.dropped += 1;
    this.showCounts();
  }

  showCounts() {
    $("f-units").textContent = this.counts.units;
    $("f-dropped").textContent = this.counts.dropped;
  }

  // result: a session's result message.
  add(result) {
    const ms = result.wall_clock_ms ?? result.roundTripMs ?? 0;
    const kind = result.dropped ? "lost" : result.interrupted ? "cut" : result.is_listen ? "listen" : "speak";
    const bar = document.createElement("li");
    bar.className = kind;
    bar.style.setProperty("--share", String(Math.min(1, ms / DEADLINE_MS)));
    bar.title = `${kind}, ${Math.round(ms)} ms`;
    this.list.append(bar);
    if (this.list.children.length > MAX_BARS) this.list.firstElementChild.remove();
    this.counts.units += 1;
    this.counts.dropped += result.dropped ? 1 : 0;
    remember(this.unitTimes, ms);
    if (result.roundTripMs !== null) remember(this.trips, result.roundTripMs);
    this.showFigures(kind, ms, result.kv_cache_length);
  }

  showFigures(kind, ms, contextTokens) {
    $("f-unit").textContent = `${Math.round(ms)} ms`;
    $("f-median").textContent = `${Math.round(median(this.unitTimes))} ms`;
    $("f-trip").textContent = this.trips.length ? `${Math.round(median(this.trips))} ms` : "–";
    $("f-context").textContent = contextTokens ?? "–";
    this.showCounts();
    this.list.setAttribute("aria-label", `${this.counts.units} units, the last one: ${kind}, ${Math.round(ms)} ms`);
  }

  showPlayback({ bufferedMs, underruns }) {
    $("f-buffer").textContent = `${bufferedMs} ms`;
    $("f-underruns").textContent = underruns;
  }
}

function remember(values, value) {
  values.push(value);
  if (values.length > MEDIAN_OVER) values.shift();
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}
