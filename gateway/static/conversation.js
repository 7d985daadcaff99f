// One full-duplex conversation: ties session, audio, camera and view together.

import { Camera } from "./camera.js";
import { DuplexSession } from "./duplex-session.js";
import { setText } from "./i18n.js";
import { LiveConversation } from "./live-conversation.js";
import { problemOf } from "./problems.js";
import { Timeline } from "./timeline.js";
import { byId, showProblem } from "./view.js";

const CHUNK_SAMPLES = 16000;

// Slices of a picture: as a whole, or in more detail.
const SLICES = { normal: 1, hd: 2 };

export class Conversation extends LiveConversation {
  // app: "omni" or "audio_duplex".
  constructor(app, settings) {
    super(settings, CHUNK_SAMPLES);
    this.app = app;
    this.timeline = new Timeline();
    this.camera = new Camera(byId("preview"));
    this.reset();
  }

  reset() {
    super.reset();
    this.paused = false;
    this.forceListen = false;
    this.sending = Promise.resolve();
  }

  showControls() {
    super.showControls();
    const { running, live, paused } = this;
    byId("interrupt").disabled = !live || paused;
    byId("pause").disabled = !live;
    setText(byId("pause"), paused ? "button.resume" : "button.pause");
    const hint = matchMedia("(hover: hover)").matches ? "duplex.hint_keys" : "duplex.hint_talk";
    setText(byId("hint"), running ? hint : "duplex.hint_idle");
  }

  get usesCamera() {
    return this.app === "omni" && byId("camera").checked;
  }

  get maxSliceNums() {
    return byId("hd").checked ? SLICES.hd : SLICES.normal;
  }

  async gather() {
    const voice = await this.settings.voices.samples();
    if (this.usesCamera) await this.startCamera();
    return { systemPrompt: this.settings.prompt, voice };
  }

  // What cannot be had is switched off, so that the next start does without.
  async startCamera() {
    try {
      await this.camera.start(this.settings.camera.deviceId);
    } catch (error) {
      byId("camera").checked = false;
      throw error;
    }
  }

  givenUp() {
    if (!this.running) this.camera.stop();
  }

  clearView() {
    this.timeline.reset();
  }

  open({ systemPrompt, voice }) {
    const session = new DuplexSession(this.app);
    const on = this.attend(session, ["result", "resumed"]);
    on("result", (result) => this.result(result));
    on("paused", () => this.pausedChanged(true));
    on("resumed", () => this.pausedChanged(false));
    on("timeout", ({ reason }) => this.fail(["problem.ended", { why: reason }]));
    session.prepare({ systemPrompt, voice, maxSliceNums: this.usesCamera ? this.maxSliceNums : null });
  }

  prepared(message) {
    this.goLive(message, this.app);
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

  async toggleCamera(wanted) {
    if (!this.running) return;
    try {
      if (wanted) await this.startCamera();
      if (!wanted || !this.running) this.camera.stop();
    } catch (error) {
      showProblem(problemOf(error));
    }
  }

  playbackChanged(report) {
    this.timeline.showPlayback(report);
    if (!this.live || this.paused) return;
    this.state(report.playing ? "speaking" : "listening");
  }

  finish(state) {
    super.finish(state);
    this.camera.stop();
  }

  level() {
    const speaking = document.body.dataset.state === "speaking";
    if (this.paused || (this.muted && !speaking)) return 0;
    return speaking ? this.audio.speaker.level() : this.audio.microphone.level();
  }
}
