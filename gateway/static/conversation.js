// One full-duplex conversation: ties session, audio, camera and view together.

import { AudioEngine } from "./audio.js";
import { Camera } from "./camera.js";
import { Captions } from "./captions.js";
import { frontendDefaults } from "./defaults.js";
import { DuplexSession } from "./duplex-session.js";
import { setText } from "./i18n.js";
import { closedBecause, findHurdle, hasNoEffect, problemOf, saidBy } from "./problems.js";
import { showRecording } from "./recordings.js";
import { Timeline } from "./timeline.js";
import {
  byId, drawLevels, showLevel, showNote, showProblem, showQueue, showState, swapButtons,
} from "./view.js";

const CHUNK_SAMPLES = 16000;
const DEFAULT_DELAY_MS = 200;

// Slices of a picture: as a whole, or in more detail.
const SLICES = { normal: 1, hd: 2 };

export class Conversation {
  // app: "omni" or "audio_duplex".
  constructor(app, settings) {
    this.app = app;
    this.settings = settings;
    this.captions = new Captions(byId("captions"));
    this.timeline = new Timeline();
    this.camera = new Camera(byId("preview"));
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

  state(name) {
    showState(name);
    this.showControls();
  }

  showControls() {
    const { running, live, paused, muted } = this;
    const [shown, hidden] = running ? ["stop", "start"] : ["start", "stop"];
    if (byId(shown).hidden) swapButtons(byId(shown), byId(hidden));
    byId("interrupt").disabled = !live || paused;
    byId("pause").disabled = !live;
    setText(byId("pause"), paused ? "button.resume" : "button.pause");
    byId("mute").disabled = !running;
    byId("mute").setAttribute("aria-pressed", String(muted));
    const hint = matchMedia("(hover: hover)").matches ? "duplex.hint_keys" : "duplex.hint_talk";
    setText(byId("hint"), running ? hint : "duplex.hint_idle");
  }

  get usesCamera() {
    return this.app === "omni" && byId("camera").checked;
  }

  get maxSliceNums() {
    return byId("hd").checked ? SLICES.hd : SLICES.normal;
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
      if (this.usesCamera) await this.camera.start(this.settings.camera.deviceId);
      const audio = await this.openAudio();
      if (this.attempt !== attempt) {
        // Stop was pressed while the browser asked for permission.
        audio.close();
        if (!this.running) this.camera.stop();
        return;
      }
      this.audio = audio;
      audio.microphone.muted = this.muted;
      this.settings.refreshDevices();
      this.captions.clear();
      this.timeline.reset();
      showRecording(null);
      this.open(this.settings.prompt, voice);
      drawLevels(() => (this.audio === audio ? this.level() : null));
    } catch (error) {
      if (this.attempt !== attempt) {
        if (!this.running) this.camera.stop();
        return;
      }
      this.fail(problemOf(error));
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

  open(systemPrompt, voice) {
    const session = new DuplexSession(this.app);
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
    on("result", (result) => this.result(result));
    // An error that did not end the session does not explain its end later.
    for (const type of ["prepared", "result", "resumed"]) on(type, () => { this.complained = false; });
    on("paused", () => this.pausedChanged(true));
    on("resumed", () => this.pausedChanged(false));
    on("stopped", () => this.finish("ended"));
    on("timeout", ({ reason }) => this.fail(["problem.ended", { why: reason }]));
    on("error", (message) => this.error(message));
    on("closed", (close) => this.closed(close));
    session.prepare({ systemPrompt, voice, maxSliceNums: this.usesCamera ? this.maxSliceNums : null });
  }

  prepared({ ignored = [], recording_session_id: recording }) {
    this.live = true;
    if (ignored.length) showNote(hasNoEffect(ignored));
    showRecording(recording, this.app);
    this.state("listening");
  }

  sendChunk(samples) {
    if (!this.live || this.paused) return;
    // The picture takes a moment to encode; the chain keeps the chunks in order meanwhile.
    this.sending = this.sending.then(async () => {
      const frame = await this.camera.snapshot();
      const { forceListen, maxSliceNums } = this;
      this.forceListen = false;
      const sent = this.session?.sendChunk(samples, { frame, maxSliceNums, forceListen });
      if (sent === false) this.timeline.drop();
    });
  }

  result(result) {
    this.timeline.add(result);
    if (result.interrupted) this.audio.speaker.flush();
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
    if (result.audio?.length) this.audio.speaker.play(result.audio);
    if (result.end_of_turn) this.endTurn();
  }

  endTurn({ interrupted = false } = {}) {
    this.turnOpen = false;
    this.captions.endTurn({ interrupted });
    if (!interrupted) this.audio.speaker.endTurn();
  }

  interrupt() {
    if (!this.live || this.paused) return;
    this.audio.speaker.flush();
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
    if (this.audio) this.audio.microphone.muted = this.muted;
    this.showControls();
  }

  async toggleCamera(wanted) {
    if (!this.running) return;
    try {
      if (wanted) await this.camera.start(this.settings.camera.deviceId);
      if (!wanted || !this.running) this.camera.stop();
    } catch (error) {
      byId("camera").checked = false;
      showProblem(problemOf(error));
    }
  }

  playbackChanged(report) {
    this.timeline.showPlayback(report);
    if (!this.live || this.paused) return;
    this.state(report.playing ? "speaking" : "listening");
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
    this.camera.stop();
    audio?.close();
    if (state === "failed") session?.close();
    showLevel(0);
    this.state(state);
  }

  level() {
    const speaking = document.body.dataset.state === "speaking";
    if (this.paused || (this.muted && !speaking)) return 0;
    return speaking ? this.audio.speaker.level() : this.audio.microphone.level();
  }
}
