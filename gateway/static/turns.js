// One half-duplex conversation: the service hears when a turn ends, then answers it.

import { HalfDuplexSession } from "./half-duplex-session.js";
import { setText } from "./i18n.js";
import { LiveConversation } from "./live-conversation.js";
import { byId } from "./view.js";

const CHUNK_SAMPLES = 8000;

// How long the room may still ring after an answer; the microphone would hear the assistant.
const ECHO_MS = 800;

// Chunks not sent until one of silence says that somebody is still there: an answer may play for
// longer than the service waits for a client.
const SIGN_OF_LIFE_EVERY = 60;

export class Turns extends LiveConversation {
  constructor(settings) {
    super(settings, CHUNK_SAMPLES);
    this.reset();
  }

  reset() {
    super.reset();
    this.phase = "listening";
    this.playing = false;
    // The microphone is not sent while this holds.
    this.deaf = false;
    this.held = 0;
    this.waitingForEcho = false;
    this.askedAt = null;
    clearTimeout(this.echoTimer);
    clearInterval(this.clock);
  }

  async gather() {
    const voice = await this.settings.voices.samples();
    return this.settings.presets.systemContent(voice);
  }

  clearView() {
    this.showFigures({ turns: 0, speech: "–", first: "–", left: "–" });
  }

  open(systemContent) {
    const session = new HalfDuplexSession();
    const on = this.attend(session, ["vad_state", "chunk"]);
    on("vad_state", ({ speaking }) => this.enter(speaking ? "hearing" : "listening"));
    on("generating", (message) => this.generating(message));
    on("chunk", (chunk) => this.chunk(chunk));
    on("turn_done", (turn) => this.turnDone(turn));
    on("timeout", (message) => this.timeout(message));
    session.prepare({ systemContent, config: readConfig() });
  }

  prepared(message) {
    this.goLive(message, "half_duplex_audio");
    this.enter("listening");
    if (message.timeout_s > 0) this.countDown(performance.now() + 1000 * message.timeout_s);
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

  timeout({ reason, elapsed_s: seconds }) {
    this.complained = true;
    this.fail(reason ? ["problem.ended", { why: reason }] : ["turns.timeout", { n: Math.round(seconds) }]);
  }

  showControls() {
    super.showControls();
    byId("interrupt").disabled = !this.live || (!this.turnOpen && !this.playing);
    setText(byId("hint"), this.running ? "turns.hint_talk" : "turns.hint_idle");
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
