// One half-duplex conversation: the service hears when a turn ends, then answers it.

import { AudioEngine } from "./audio.js";
import { Captions } from "./captions.js";
import { frontendDefaults } from "./defaults.js";
import { HalfDuplexSession } from "./half-duplex-session.js";
import { setText } from "./i18n.js";
import { closedBecause, findHurdle, hasNoEffect, problemOf, saidBy } from "./problems.js";
import { showRecording } from "./recordings.js";
import {
  byId, drawLevels, showLevel, showNote, showProblem, showQueue, showState, swapButtons,
} from "./view.js";

const CHUNK_SAMPLES = 8000;
const DEFAULT_DELAY_MS = 200;

// How long the room may still ring after an answer; the microphone would hear the assistant.
const ECHO_MS = 800;

// Chunks not sent until one of silence says that somebody is still there: an answer may play for
// longer than the service waits for a client.
const SIGN_OF_LIFE_EVERY = 60;

export class Turns {
  constructor(settings) {
    this.settings = settings;
    this.captions = new Captions(byId("captions"));
    this.muted = false;
    this.reset();
  }

  reset() {
    this.attempt = null;
    this.session = null;
    this.audio = null;
    this.running = false;
    this.live = false;
    this.phase = "listening";
    this.discarding = false;
    this.complained = false;
    this.playing = false;
    // The microphone is not sent while this holds.
    this.deaf = false;
    this.held = 0;
    this.waitingForEcho = false;
    this.turnOpen = false;
    this.askedAt = null;
    clearTimeout(this.echoTimer);
    clearInterval(this.clock);
  }

  async start() {
    const hurdle = findHurdle();
    showProblem(hurdle);
    showNote();
    if (hurdle) return;
    const attempt = {};
    this.attempt = attempt;
    this.running = true;
    this.state("connecting");
    try {
      const voice = await this.settings.voices.samples();
      const systemContent = await this.settings.presets.systemContent(voice);
      const audio = await this.openAudio();
      if (this.attempt !== attempt) {
        // Stop was pressed while the browser asked for permission.
        audio.close();
        return;
      }
      this.audio = audio;
      audio.microphone.muted = this.muted;
      this.settings.refreshDevices();
      this.captions.clear();
      this.showFigures({ turns: 0, speech: "–", first: "–", left: "–" });
      showRecording(null);
      this.open(systemContent);
      drawLevels(() => (this.audio === audio ? this.level() : null));
    } catch (error) {
      if (this.attempt === attempt) this.fail(problemOf(error));
    }
  }

  async openAudio() {
    const { playback_delay_ms: delayMs } = await frontendDefaults();
    return AudioEngine.open({
      chunkSamples: CHUNK_SAMPLES,
      deviceId: this.settings.microphone.deviceId,
      delayMs: delayMs ?? DEFAULT_DELAY_MS,
      volume: this.settings.volume,
      onChunk: (samples) => this.sendChunk(samples),
      onPlayback: (report) => this.playbackChanged(report),
      onStateChange: (state) => this.audioStateChanged(state),
      onLost: () => this.fail(["problem.microphone_lost"]),
    });
  }

  open(systemContent) {
    const session = new HalfDuplexSession();
    this.session = session;
    const on = (type, handler) => {
      session.addEventListener(type, ({ detail }) => {
        if (this.session === session) handler(detail);
      });
    };
    on("queued", showQueue);
    on("queue_update", showQueue);
    on("queue_done", () => this.state("preparing"));
    on("prepared", (message) => this.prepared(message));
    on("vad_state", ({ speaking }) => this.enter(speaking ? "hearing" : "listening"));
    on("generating", (message) => this.generating(message));
    on("chunk", (chunk) => this.chunk(chunk));
    on("turn_done", (turn) => this.turnDone(turn));
    on("stopped", () => this.finish("ended"));
    on("timeout", (message) => this.timeout(message));
    // An error that did not end the session does not explain its end later.
    for (const type of ["prepared", "vad_state", "chunk"]) on(type, () => { this.complained = false; });
    on("error", (message) => this.error(message));
    on("closed", (close) => this.closed(close));
    session.prepare({ systemContent, config: readConfig() });
  }

  prepared({ ignored = [], recording_session_id: recording, timeout_s: timeoutS }) {
    this.live = true;
    if (ignored.length) showNote(hasNoEffect(ignored));
    showRecording(recording, "half_duplex_audio");
    this.enter("listening");
    if (timeoutS > 0) this.countDown(performance.now() + 1000 * timeoutS);
  }

  countDown(endsAt) {
    const show = () => {
      const left = Math.max(0, Math.round((endsAt - performance.now()) / 1000));
      this.showFigures({ left: `${Math.floor(left / 60)}:${String(left % 60).padStart(2, "0")}` });
    };
    show();
    this.clock = setInterval(show, 1000);
  }

  sendChunk(samples) {
    if (!this.live) return;
    this.held = this.deaf ? this.held + 1 : 0;
    if (!this.deaf) this.session.sendChunk(samples);
    else if (this.held % SIGN_OF_LIFE_EVERY === 0) this.session.sendChunk(new Float32Array(samples.length));
  }

  // What the service does. What is heard of it comes later and is shown first.
  enter(phase) {
    this.phase = phase;
    if (this.live) this.state(this.playing ? "speaking" : phase);
  }

  generating({ speech_duration_ms: speechMs }) {
    this.discarding = false;
    this.turnOpen = true;
    this.askedAt = performance.now();
    this.captions.beginTurn();
    this.showFigures({ speech: `${(speechMs / 1000).toFixed(1)} s`, first: "–" });
    this.enter("generating");
  }

  chunk({ text_delta: text, audio }) {
    if (this.discarding) return;
    if (text) this.captions.add("assistant", text);
    if (!audio?.length) return;
    if (this.askedAt !== null) this.showFigures({ first: `${Math.round(performance.now() - this.askedAt)} ms` });
    this.askedAt = null;
    this.hold();
    this.audio.speaker.play(audio);
  }

  turnDone({ turn_index: turns, heard }) {
    if (heard) this.captions.addQuestion(heard.trim());
    this.captions.endTurn();
    this.showFigures({ turns });
    this.turnOpen = false;
    if (!this.discarding) this.audio.speaker.endTurn();
    this.discarding = false;
    this.enter("listening");
  }

  playbackChanged({ playing, bufferedMs }) {
    this.playing = playing;
    if (!this.live) return;
    this.state(playing ? "speaking" : this.phase);
    if (!this.deaf) return;
    if (playing || bufferedMs || this.turnOpen) {
      this.hold();
      return;
    }
    if (this.waitingForEcho) return;
    this.waitingForEcho = true;
    this.echoTimer = setTimeout(() => this.hearAgain(), ECHO_MS);
  }

  hold() {
    clearTimeout(this.echoTimer);
    this.waitingForEcho = false;
    this.deaf = true;
  }

  hearAgain() {
    clearTimeout(this.echoTimer);
    this.deaf = false;
    this.waitingForEcho = false;
  }

  interrupt() {
    if (!this.live || (!this.turnOpen && !this.playing)) return;
    this.audio.speaker.flush();
    this.captions.endTurn({ interrupted: true });
    this.discarding = this.turnOpen;
    this.session.interrupt();
    this.hearAgain();
  }

  toggleMute() {
    if (!this.running) return;
    this.muted = !this.muted;
    if (this.audio) this.audio.microphone.muted = this.muted;
    this.showControls();
  }

  audioStateChanged(state) {
    if (state === "running") showNote();
    else if (this.live) showNote(["suspended"]);
  }

  stop() {
    if (!this.running) return;
    if (this.live) this.session.stop();
    else this.session?.close();
    this.finish("ended");
  }

  timeout({ reason, elapsed_s: seconds }) {
    this.complained = true;
    this.fail(reason ? ["problem.ended", { why: reason }] : ["turns.timeout", { n: Math.round(seconds) }]);
  }

  error(message) {
    showProblem(...saidBy(message));
    this.complained = true;
    // The service would wait for a better `prepare`; the page has no other one to send.
    if (!this.live) this.finish("failed");
  }

  closed(close) {
    // The service has said more in an error just before, if it could.
    if (!this.complained) showProblem(closedBecause(close));
    this.finish("failed");
  }

  fail(message) {
    showProblem(message);
    this.finish("failed");
  }

  finish(state) {
    const { session, audio } = this;
    this.reset();
    this.captions.endTurn();
    audio?.close();
    if (state === "failed") session?.close();
    showLevel(0);
    this.state(state);
  }

  state(name) {
    showState(name);
    this.showControls();
  }

  showControls() {
    const { running, live, muted } = this;
    const [shown, hidden] = running ? ["stop", "start"] : ["start", "stop"];
    if (byId(shown).hidden) swapButtons(byId(shown), byId(hidden));
    byId("interrupt").disabled = !live || (!this.turnOpen && !this.playing);
    byId("mute").disabled = !running;
    byId("mute").setAttribute("aria-pressed", String(muted));
    setText(byId("hint"), running ? "turns.hint_talk" : "turns.hint_idle");
  }

  showFigures(values) {
    for (const [name, value] of Object.entries(values)) byId(`f-${name}`).textContent = value;
  }

  level() {
    if (document.body.dataset.state === "speaking") return this.audio.speaker.level();
    return this.muted || this.deaf ? 0 : this.audio.microphone.level();
  }
}

function readConfig() {
  return {
    vad: {
      threshold: Number(byId("threshold").value),
      min_silence_duration_ms: Number(byId("silence").value),
    },
    generation: { max_new_tokens: byId("max-tokens").valueAsNumber || 256 },
    tts: { enabled: byId("speech").checked },
  };
}
