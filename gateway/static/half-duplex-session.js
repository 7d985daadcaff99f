// One session of turns over `/ws/half_duplex/{id}`. Knows the protocol, not the page.

import { decodeSamples, encodeSamples } from "./codec.js";
import { LiveSocket } from "./live-socket.js";

const KNOWN = [
  "queued", "queue_update", "queue_done", "prepared", "vad_state", "generating", "chunk",
  "turn_done", "interrupted", "stopped", "timeout", "error",
];

export class HalfDuplexSession extends LiveSocket {
  // A chunk has also `audio` (24 kHz or null).
  constructor() {
    const id = Array.from(crypto.getRandomValues(new Uint8Array(6)), (n) => n.toString(36)).join("");
    super(`ws/half_duplex/hdx_${id}`, KNOWN);
  }

  // systemContent: items {type: "text", text} and {type: "audio", data}; config: see docs.
  prepare({ systemContent, config }) {
    this.whenOpen({ type: "prepare", system_content: systemContent, config });
  }

  // samples: Float32Array at 16 kHz. False: it was dropped.
  sendChunk(samples) {
    if (this.isCongested) return false;
    return this.send({ type: "audio_chunk", audio_base64: encodeSamples(samples) });
  }

  interrupt() {
    this.send({ type: "interrupt" });
  }

  stop() {
    this.send({ type: "stop" });
  }

  receive(message) {
    if (message.type === "chunk") {
      message.audio = message.audio_data ? decodeSamples(message.audio_data) : null;
    }
    super.receive(message);
  }
}
