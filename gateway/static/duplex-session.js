// One full-duplex session over `/ws/duplex/{id}`. Knows the protocol, not the page.

import { decodeSamples, encodeSamples } from "./codec.js";
import { LiveSocket } from "./live-socket.js";

const KNOWN = [
  "queued", "queue_update", "queue_done", "prepared", "result", "paused", "resumed",
  "interrupted", "stopped", "timeout", "error",
];

// What the server tells apart by the session's id.
const PREFIX = { omni: "omni", audio_duplex: "adx" };

export class DuplexSession extends LiveSocket {
  // app: "omni" or "audio_duplex". A result has also `roundTripMs` and `audio` (24 kHz or null).
  constructor(app) {
    super(`ws/duplex/${PREFIX[app]}_${Date.now().toString(36)}`, KNOWN);
    this.sentAt = [];
  }

  // voice: Float32Array at 16 kHz, or null. maxSliceNums: null without a camera.
  prepare({ systemPrompt, voice, maxSliceNums }) {
    const message = { type: "prepare", system_prompt: systemPrompt };
    if (maxSliceNums !== null) message.max_slice_nums = maxSliceNums;
    if (voice) message.ref_audio_base64 = encodeSamples(voice);
    this.whenOpen(message);
  }

  // samples: Float32Array at 16 kHz; frame: base64 of a JPEG, or null. False: it was dropped.
  sendChunk(samples, { frame = null, maxSliceNums = 1, forceListen = false } = {}) {
    if (this.isCongested) return false;
    const message = { type: "audio_chunk", audio_base64: encodeSamples(samples) };
    if (frame) Object.assign(message, { frame_base64_list: [frame], max_slice_nums: maxSliceNums });
    if (forceListen) message.force_listen = true;
    const sent = this.send(message);
    if (sent) this.sentAt.push(performance.now());
    return sent;
  }

  pause() {
    this.send({ type: "pause" });
  }

  resume() {
    this.send({ type: "resume" });
  }

  interrupt() {
    this.send({ type: "interrupt" });
  }

  stop() {
    this.send({ type: "stop" });
  }

  receive(message) {
    if (message.type === "result") {
      // Exactly one result answers each chunk, in order.
      const sentAt = this.sentAt.shift();
      message.roundTripMs = sentAt === undefined ? null : performance.now() - sentAt;
      message.audio = message.audio_data ? decodeSamples(message.audio_data) : null;
    }
    super.receive(message);
  }
}
