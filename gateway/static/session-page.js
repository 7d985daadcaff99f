// The viewer of one recording, `/s/{id}`.

import { getJson, hideKey, sendJson, serviceUrl, Silence } from "./address.js";
import { applyTranslations, language, onLanguageChange, register, setPlain, setText, t } from "./i18n.js";
import { captionsOf, clock, pieceAt, readRecording } from "./session-model.js";
import { ClipPlayback, ReplayPlayback } from "./session-playback.js";
import { Timeline } from "./session-timeline.js";
import { peaksOf } from "./session-waveform.js";
import { SESSION } from "./texts-session.js";

// Slugs of a failure or an end -> their texts; others are shown as they are.
const WHY = new Set([
  "stopped", "client_gone", "truncated", "worker_lost", "session_timeout", "server_shutdown",
  "slow_reader", "context_full", "model_fault", "engine_fault", "bad_audio", "bad_image",
  "media_full", "internal",
]);
const POLL_MS = 3_000;
const $ = (id) => document.getElementById(id);
const id = decodeURIComponent(location.pathname.split("/").filter(Boolean).at(-1));
const base = `api/sessions/${encodeURIComponent(id)}`;
const urlOf = (path) => serviceUrl(`${base}/assets/${path.split("/").map(encodeURIComponent).join("/")}`);

class Viewer {
  constructor() {
    this.meta = null;
    this.ending = null;
    this.model = null;
    this.playback = null;
    this.captions = [];
    this.shownPiece = -1;
    this.timeline = new Timeline($("timeline"), { seek: (time) => this.playFrom(time), urlOf });
  }

  async open() {
    this.meta = await getJson(base);
    document.querySelector("main").hidden = false;
    this.showMeta();
    await this.showComment();
    const recording = await this.finished();
    $("download").href = serviceUrl(`${base}/download`);
    $("download").hidden = false;
    note(null);
    this.meta = await getJson(base);
    this.ending = recording.end_reason;
    this.showMeta();
    this.showRecording(recording);
  }

  // Waits until the session has ended and its recording has been put together.
  async finished() {
    for (;;) {
      try {
        const recording = await getRecording();
        if (recording) return recording;
        this.meta = await getJson(base);
        note(this.meta.ended_at ? "session.being_made" : "session.still_live");
      } catch (error) {
        if (!(error instanceof Silence)) throw error;
        note("session.silent");
      }
      document.body.dataset.state = "waiting";
      await new Promise((done) => {
        setTimeout(done, POLL_MS);
      });
      await visible();
    }
  }

  showRecording(recording) {
    this.model = readRecording(recording);
    const { replay, video, pieces } = this.model;
    this.playback = replay || video ? new ReplayPlayback(urlOf(video ?? replay), Boolean(video)) : new ClipPlayback(pieces, urlOf);
    $("media").replaceChildren(this.playback.media);
    this.playback.addEventListener("time", () => this.follow());
    this.playback.media.addEventListener("error", () => problem("session.no_media"));
    if (replay || video) {
      this.playback.media.addEventListener("loadedmetadata", () => {
        this.model.length = Math.max(this.model.length, this.playback.media.duration);
        this.drawTimeline();
      });
    }
    if (replay) {
      // A picture only: the recording can be heard without it.
      peaksOf(urlOf(replay)).then((peaks) => {
        this.peaks = peaks;
        this.drawTimeline();
      }, () => {});
    }
    this.draw();
    note(recording.problem ? "session.damaged" : null, { reason: recording.problem });
    document.body.dataset.state = "ready";
  }

  draw() {
    this.captions = captionsOf(this.model.pieces);
    this.showPieces();
    this.drawTimeline();
  }

  // Alone when more is known of the replay: lines that are made anew lose the keyboard's focus.
  drawTimeline() {
    this.timeline.show(this.model);
    if (this.peaks) this.timeline.showPeaks(this.peaks);
    this.follow();
  }

  showPieces() {
    this.shownPiece = -1;
    const lines = this.model.pieces.map((piece, index) => this.line(piece, index));
    if (!lines.length) lines.push(element("li", "none", t("session.nothing")));
    $("pieces").replaceChildren(...lines);
  }

  line(piece, index) {
    const line = document.createElement("li");
    line.className = piece.who;
    const button = document.createElement("button");
    button.type = "button";
    const parts = [
      element("span", "when", this.model.isDuplex ? clock(piece.at) : String(Math.floor(index / 2) + 1)),
      element("span", "who", t(`session.${piece.who}`)),
      element("span", "text", [piece.heard && `${t("session.heard")}: ${piece.heard}`, piece.text].filter(Boolean).join(" ")),
    ];
    if (piece.mark) parts.push(element("span", "mark", t(`session.${piece.mark}`)));
    if (piece.error) parts.push(element("span", "mark failed", why(piece.error)));
    if (piece.timing !== null) parts.push(element("small", "", `${Math.round(piece.timing)} ms`));
    // Words stay apart for who copies or hears them, however they are laid out.
    button.append(...parts.flatMap((part) => [part, " "]));
    button.addEventListener("click", () => this.playFrom(piece.at));
    line.append(button);
    if (!this.model.isDuplex) line.append(...attachments(piece));
    return line;
  }

  playFrom(time) {
    // Refused when the browser wants another gesture first, or when another jump came between.
    this.playback.playFrom(time).catch(({ name }) => {
      if (name !== "AbortError") problem("session.no_media");
    });
  }

  // Shows what is heard at this moment.
  follow() {
    const { time } = this.playback;
    this.timeline.moveTo(time);
    const current = this.captions.filter(({ from, until }) => from <= time && time < until);
    const text = current.map(({ who, text: said }) => `${t(`session.${who}`)}: ${said}`).join("\n");
    if ($("caption").textContent !== text) $("caption").textContent = text;
    this.markPiece(pieceAt(this.model.pieces, time));
  }

  markPiece(index) {
    if (index === this.shownPiece || !this.model.pieces.length) return;
    const lines = $("pieces").children;
    lines[this.shownPiece]?.firstElementChild.removeAttribute("aria-current");
    this.shownPiece = index;
    lines[index].firstElementChild.setAttribute("aria-current", "true");
    if (!this.playback.media.paused) keepInSight($("pieces"), lines[index]);
  }

  showMeta() {
    const { title, app_type: kind, created_at: created, duration_s: length, worker_id: worker, config } = this.meta;
    if (title) setPlain($("title"), title);
    document.title = `${$("title").textContent} – Omni Duplex`;
    const facts = {
      kind: t(`session.kind_${kind}`),
      created: created && new Intl.DateTimeFormat(language(), { dateStyle: "medium", timeStyle: "short" }).format(new Date(created)),
      length: typeof length === "number" ? clock(length) : null,
      worker,
      // A log that was cut off, not a turn.
      ending: this.ending === "interrupted" ? t("session.why_cut_off") : this.ending && why(this.ending),
      id,
    };
    const known = Object.entries(facts).filter(([, value]) => value !== null && value !== undefined && value !== "");
    $("meta").replaceChildren(...known.map(([name, value]) => {
      const fact = document.createElement("div");
      fact.append(element("dt", "", t(`session.${name}`)), element("dd", "", String(value)));
      return fact;
    }));
    $("config").textContent = JSON.stringify(config ?? {}, null, 2);
  }

  async showComment() {
    $("comment").value = (await getJson(`${base}/comment`)).comment;
  }

  async saveComment() {
    try {
      await sendJson("POST", `${base}/comment`, { comment: $("comment").value });
      setText($("comment-state"), "session.saved");
    } catch (error) {
      setPlain($("comment-state"), error.message);
    }
  }

  translate() {
    if (!this.meta) return;
    this.showMeta();
    if (this.model) this.draw();
  }
}

const REFUSALS = { 401: "session.locked", 404: "session.unknown" };

// The recording; null until it has been put together.
async function getRecording() {
  try {
    return await getJson(`${base}/recording`);
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

function why(slug) {
  return WHY.has(slug) ? t(`session.why_${slug}`) : slug;
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((done) => {
    document.addEventListener("visibilitychange", done, { once: true });
  });
}

function attachments({ pictures, videos, text }) {
  const images = pictures.map((path) => {
    const image = document.createElement("img");
    Object.assign(image, { src: urlOf(path), alt: t("session.picture", { text }), loading: "lazy" });
    return image;
  });
  const clips = videos.map((path) => {
    const video = document.createElement("video");
    Object.assign(video, { src: urlOf(path), controls: true, preload: "metadata", playsInline: true });
    video.setAttribute("aria-label", t("session.attached_video"));
    return video;
  });
  return [...images, ...clips];
}

// Scrolls a list, and not the page with it.
function keepInSight(list, line) {
  const top = line.offsetTop - list.offsetTop;
  if (top < list.scrollTop || top + line.offsetHeight > list.scrollTop + list.clientHeight) {
    list.scrollTop = top - list.clientHeight / 3;
  }
}

function element(tag, className, text) {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function problem(key, values) {
  setText($("problem"), key, values);
  $("problem").hidden = false;
}

// null: there is nothing to be said.
function note(key, values) {
  if (key) setText($("note"), key, values);
  $("note").hidden = !key;
}

register(SESSION);
hideKey();
applyTranslations();
const viewer = new Viewer();
onLanguageChange(() => viewer.translate());
$("comment-form").addEventListener("submit", (event) => {
  event.preventDefault();
  viewer.saveComment();
});
try {
  await viewer.open();
} catch (error) {
  document.body.dataset.state = "failed";
  note(null);
  if (error instanceof Silence) problem("problem.silent");
  else if (REFUSALS[error.status]) problem(REFUSALS[error.status], { id });
  else problem("session.failed", { why: error.message });
}
