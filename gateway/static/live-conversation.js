// What both live pages do alike: microphone and playback, one session, and how it ends.

import { AudioEngine } from "./audio.js";
import { Captions } from "./captions.js";
import { frontendDefaults } from "./defaults.js";
import { closedBecause, findHurdle, hasNoEffect, problemOf, saidBy } from "./problems.js";
import { showRecording } from "./recordings.js";
import {
  byId, drawLevels, showLevel, showNote, showProblem, showQueue, showState, swapButtons,
} from "./view.js";

const DEFAULT_DELAY_MS = 200;

// A page's own part: gather() and open(), clearView(), prepared(), sendChunk(), playbackChanged(),
// level(), and where there is more to give back, givenUp() and finish().
export class LiveConversation {
  constructor(settings, chunkSamples) {
    this.settings = settings;
    this.chunkSamples = chunkSamples;
    this.captions = new Captions(byId("captions"));
    this.muted = false;
  }

  reset() {
    this.attempt = null;
    this.session = null;
    this.audio = null;
    this.running = false;
    this.live = false;
    this.turnOpen = false;
    this.discarding = false;
    this.complained = false;
  }

  state(name) {
    showState(name);
    this.showControls();
  }

  showControls() {
    const [shown, hidden] = this.running ? ["stop", "start"] : ["start", "stop"];
    if (byId(shown).hidden) swapButtons(byId(shown), byId(hidden));
    byId("mute").disabled = !this.running;
    byId("mute").setAttribute("aria-pressed", String(this.muted));
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
      const gathered = await this.gather();
      const audio = await this.openAudio();
      if (this.attempt !== attempt) {
        // Stop was pressed while the browser asked for permission.
        audio.close();
        this.givenUp();
        return;
      }
      this.audio = audio;
      audio.microphone.muted = this.muted;
      this.settings.refreshDevices();
      this.captions.clear();
      this.clearView();
      showRecording(null);
      this.open(gathered);
      drawLevels(() => (this.audio === audio ? this.level() : null));
    } catch (error) {
      if (this.attempt === attempt) this.fail(problemOf(error));
      else this.givenUp();
    }
  }

  // A start came to nothing; another one may be under way.
  givenUp() {}

  async openAudio() {
    const { playback_delay_ms: delayMs } = await frontendDefaults();
    return AudioEngine.open({
      chunkSamples: this.chunkSamples,
      deviceId: this.settings.microphone.deviceId,
      delayMs: delayMs ?? DEFAULT_DELAY_MS,
      volume: this.settings.volume,
      onChunk: (samples) => this.sendChunk(samples),
      onPlayback: (report) => this.playbackChanged(report),
      onStateChange: (state) => this.audioStateChanged(state),
      onLost: () => this.fail(["problem.microphone_lost"]),
    });
  }

  // Make a session the conversation's own; returns what adds handlers for its other messages.
  // goodNews: messages after which an earlier error no longer explains the end.
  attend(session, goodNews) {
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
    for (const type of ["prepared", ...goodNews]) on(type, () => { this.complained = false; });
    on("stopped", () => this.finish("ended"));
    on("error", (message) => this.error(message));
    on("closed", (close) => this.closed(close));
    return on;
  }

  // The session has begun.
  goLive({ ignored = [], recording_session_id: recording }, app) {
    this.live = true;
    if (ignored.length) showNote(hasNoEffect(ignored));
    showRecording(recording, app);
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
}
