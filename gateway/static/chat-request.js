// One question of a chat over `/ws/chat`: a connection per question. Knows the protocol, not the page.

import { decodeSamples } from "./codec.js";
import { LiveSocket } from "./live-socket.js";

const KNOWN = ["queued", "queue_update", "queue_done", "prefill_done", "chunk", "done", "error"];

export class ChatRequest extends LiveSocket {
  // request: the whole question with its history. A chunk has also `audio` (24 kHz or null).
  constructor(request) {
    super("ws/chat", KNOWN);
    this.whenOpen({ ...request, streaming: true, queue_events: true });
  }

  receive(message) {
    if (message.type === "chunk") {
      message.audio = message.audio_data ? decodeSamples(message.audio_data) : null;
    }
    super.receive(message);
  }
}
