// The page's one conversation: ties session, audio, camera and view together.

import { AudioEngine, readVoice } from "./audio.js";
import { Camera } from "./camera.js";
import { DuplexSession } from "./session.js";
import { Captions, Timeline, showControls, showLevel, showNote, showProblem, showState } from "./view.js";

const DEFAULT_DELAY_MS = 200;

const STATE_TEXTS = {
  idle: "Ready to start",
  connecting: "Connecting",
  preparing: "Starting the session",
  listening: "Listening",
  speaking: "Speaking",
  paused: "Paused",
  ended: "Session ended",
  failed: "Stopped by a problem",
};

const ADVICE = {
  unauthorized: "Open this page with your key: add ?api_key=… to its address.",
  forbidden_origin: "Open the page from the service's own address.",
  queue_full: "Try again in a minute.",
  no_worker: "Look at the service's log, or try again in a minute.",
  worker_lost: "Press Start to begin a new session.",
  slow_reader: "The network is too slow for live audio.",
};

const PROBLEMS = {
  NotAllowedError: "The browser may not use the microphone or camera. Allow it in the address bar, then start again.",
  NotFoundError: "No microphone or camera was found. Connect one, then start again.",
  NotReadableError: "The microphone or camera is in use by another program. Close that one, then start again.",
  EncodingError: "The voice sample is no audio file that this browser can read. Choose another one.",
};

const $ = (id) => document.getElementById(id);

class Conversation {
  constructor() {
    this.captions = new Captions();
    this.timeline = new Timeline();
    this.camera = new Camera($("preview"));
    this.muted = false;
    this.reset();
  }

  reset() {
    this.attempt = null;
    this.session = null;
    this.audio = null;
    this.running = false;
    this.live = false;
    this.paused = false;
    this.turnOpen = false;
    this.forceListen = false;
    this.discarding = false;
    this.complained = false;
    this.sending = Promise.resolve();
  }

  state(name, text = STATE_TEXTS[name]) {
    showState(name, text);
    showControls(this);
  }

  async start() {
    const hurdle = findHurdle();
    showProblem(hurdle);
    showNote(null);
    if (hurdle) return;
    const attempt = {};
    this.attempt = attempt;
    this.running = true;
    this.state("connecting");
    try {
      const voiceFile = $("voice").files[0];
      const voice = voiceFile ? await readVoice(voiceFile) : null;
      if ($("camera").checked) await this.camera.start();
      const audio = await AudioEngine.open({
        delayMs: await playbackDelay(),
        volume: Number($("volume").value),
        onChunk: (samples) => this.sendChunk(samples),
        onPlayback: (report) => this.playbackChanged(report),
        onStateChange: (state) => this.audioStateChanged(state),
        onLost: () => this.fail("The microphone was disconnected. Connect it and start again."),
      });
      if (this.attempt !== attempt) {
        // Stop was pressed while the browser asked for permission.
        audio.close();
        if (!this.running) this.camera.stop();
        return;
      }
      this.audio = audio;
      audio.muted = this.muted;
      this.captions.clear();
      this.timeline.reset();
      this.open($("prompt").value, voice);
      this.drawLevels();
    } catch (error) {
      if (this.attempt !== attempt) {
        if (!this.running) this.camera.stop();
        return;
      }
      this.fail(PROBLEMS[error.name] ?? `The session cannot start: ${error.message}`);
    }
  }

  open(systemPrompt, voice) {
    const session = new DuplexSession();
    this.session = session;
    const on = (type, handler) => {
      session.addEventListener(type, ({ detail }) => {
        if (this.session === session) handler(detail);
      });
    };
    on("queued", (place) => this.showQueue(place));
    on("queue_update", (place) => this.showQueue(place));
    on("queue_done", () => this.state("preparing"));
    on("prepared", (message) => this.prepared(message));
    on("result", (result) => this.result(result));
    // An error that did not end the session does not explain its end later.
    for (const type of ["prepared", "result", "resumed"]) on(type, () => { this.complained = false; });
    on("paused", () => this.pausedChanged(true));
    on("resumed", () => this.pausedChanged(false));
    on("stopped", () => this.finish("ended"));
    on("timeout", ({ reason }) => this.fail(`The session ended: ${reason}`));
    on("error", (message) => this.error(message));
    on("closed", (close) => this.closed(close));
    session.prepare({ systemPrompt, voice });
  }

  showQueue({ position, estimated_wait_s: seconds, state }) {
    const wait = seconds > 0 ? `, about ${formatWait(seconds)}` : "";
    if (state === "starting") this.state("queued", `The service is starting${wait}`);
    else this.state("queued", `Place ${position} in the queue${wait}`);
  }

  prepared({ ignored = [] }) {
    this.live = true;
    if (ignored.length) showNote(`This server does not use: ${ignored.join(", ")}.`);
    this.state("listening");
  }

  sendChunk(samples) {
    if (!this.live || this.paused) return;
    // The picture takes a moment to encode; the chain keeps the chunks in order meanwhile.
    this.sending = this.sending.then(async () => {
      const frame = await this.camera.snapshot();
      const forceListen = this.forceListen;
      this.forceListen = false;
      if (this.session?.sendChunk(samples, { frame, forceListen }) === false) this.timeline.drop();
    });
  }

  result(result) {
    this.timeline.add(result);
    if (result.interrupted) this.flush();
    if (result.is_listen) {
      if (this.turnOpen) this.endTurn({ interrupted: result.interrupted });
      this.discarding = false;
    }
    if (result.heard) this.captions.add("you", result.heard.trim());
    if (result.is_listen) return;
    // After the Interrupt button the rest of the turn is still on its way; nobody wants it.
    if (this.discarding) {
      if (result.end_of_turn) this.discarding = false;
      return;
    }
    this.turnOpen = true;
    if (result.text) this.captions.add("assistant", result.text);
    if (result.audio?.length) this.audio.play(result.audio);
    if (result.end_of_turn) this.endTurn();
  }

  endTurn({ interrupted = false } = {}) {
    this.turnOpen = false;
    this.captions.endTurn({ interrupted });
    if (!interrupted) this.audio.endTurn();
  }

  flush() {
    this.audio.flush();
  }

  interrupt() {
    if (!this.live || this.paused) return;
    this.flush();
    this.discarding = this.turnOpen;
    if (this.turnOpen) this.captions.endTurn({ interrupted: true });
    this.turnOpen = false;
    this.forceListen = true;
    this.session.interrupt();
  }

  togglePause() {
    if (!this.live) return;
    if (this.paused) this.session.resume();
    else this.session.pause();
  }

  pausedChanged(paused) {
    this.paused = paused;
    this.state(paused ? "paused" : "listening");
  }

  toggleMute() {
    if (!this.running) return;
    this.muted = !this.muted;
    if (this.audio) this.audio.muted = this.muted;
    showControls(this);
  }

  async toggleCamera(wanted) {
    if (!this.running) return;
    try {
      if (wanted) await this.camera.start();
      if (!wanted || !this.running) this.camera.stop();
    } catch (error) {
      $("camera").checked = false;
      showProblem(PROBLEMS[error.name] ?? `The camera cannot be used: ${error.message}`);
    }
  }

  playbackChanged(report) {
    this.timeline.showPlayback(report);
    if (!this.live || this.paused) return;
    this.state(report.playing ? "speaking" : "listening");
  }

  audioStateChanged(state) {
    if (state === "running") showNote(null);
    else if (this.live) showNote("The browser has suspended the audio. Come back to this page to go on.");
  }

  stop() {
    if (!this.running) return;
    if (this.live) this.session.stop();
    else this.session?.close();
    this.finish("ended");
  }

  error({ error, slug }) {
    const sentence = /[.!?]$/.test(error) ? error : `${error}.`;
    showProblem(ADVICE[slug] ? `${sentence} ${ADVICE[slug]}` : sentence);
    this.complained = true;
    // The service would wait for a better `prepare`; the page has no other one to send.
    if (!this.live) this.finish("failed");
  }

  closed({ code, reason }) {
    // The service has said more in an error just before, if it could.
    if (!this.complained) {
      const why = reason || (code === 1006 ? "the connection was lost" : `code ${code}`);
      showProblem(`The session ended: ${why}. Press Start for a new one.`);
    }
    this.finish("failed");
  }

  fail(text) {
    showProblem(text);
    this.finish("failed");
  }

  finish(state) {
    const { session, audio } = this;
    this.reset();
    this.captions.endTurn();
    this.camera.stop();
    audio?.close();
    if (state === "failed") session?.close();
    showLevel(0);
    this.state(state);
  }

  drawLevels() {
    const { audio } = this;
    const draw = () => {
      if (this.audio !== audio) return;
      const speaking = document.body.dataset.state === "speaking";
      const silent = this.paused || (this.muted && !speaking);
      showLevel(silent ? 0 : speaking ? audio.outputLevel() : audio.inputLevel());
      requestAnimationFrame(draw);
    };
    draw();
  }
}

// Why this browser cannot hold a conversation here; null if it can.
function findHurdle() {
  if (!window.isSecureContext) {
    return "Browsers give a page the microphone only over HTTPS or on this machine itself. "
      + `Open https://${location.host}/ (the service offers it when started with --public) `
      + "or, on the machine where the service runs, http://127.0.0.1:"
      + `${location.port || "80"}/.`;
  }
  if (!navigator.mediaDevices?.getUserMedia || !window.AudioWorkletNode) {
    return "This browser is too old for live audio: it lacks getUserMedia or AudioWorklet.";
  }
  return null;
}

async function playbackDelay() {
  const reply = await fetch("api/frontend_defaults");
  if (!reply.ok) return DEFAULT_DELAY_MS;
  const { playback_delay_ms: delay } = await reply.json();
  return Number.isFinite(delay) ? delay : DEFAULT_DELAY_MS;
}

function formatWait(seconds) {
  return seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

// The key has become a cookie by now; the address bar and the history need not keep it.
function hideKey() {
  const address = new URL(location.href);
  address.searchParams.delete("api_key");
  address.searchParams.delete("token");
  if (address.href !== location.href) history.replaceState(null, "", address);
}

function isTyping(target) {
  return target.closest("textarea, input:not([type=checkbox]):not([type=range])") !== null;
}

const conversation = new Conversation();
hideKey();
showProblem(findHurdle());

$("start").addEventListener("click", () => conversation.start());
$("stop").addEventListener("click", () => conversation.stop());
$("interrupt").addEventListener("click", () => conversation.interrupt());
$("pause").addEventListener("click", () => conversation.togglePause());
$("mute").addEventListener("click", () => conversation.toggleMute());
$("camera").addEventListener("change", ({ target }) => conversation.toggleCamera(target.checked));
$("volume").addEventListener("input", ({ target }) => {
  if (conversation.audio) conversation.audio.volume = Number(target.value);
});
document.addEventListener("keydown", ({ key, target, ctrlKey, metaKey, altKey, repeat }) => {
  if (ctrlKey || metaKey || altKey || repeat || isTyping(target)) return;
  // Capitals too: Caps Lock is no reason not to be heard.
  if (key === "Escape") conversation.interrupt();
  if (key.toLowerCase() === "p") conversation.togglePause();
  if (key.toLowerCase() === "m") conversation.toggleMute();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) conversation.audio?.resume();
});
// Leaving the page gives the place on the worker, microphone and camera back at once.
window.addEventListener("pagehide", () => conversation.stop());
