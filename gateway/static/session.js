// One full-duplex session over `/ws/duplex/{id}`. Knows the protocol, not the page.

const KNOWN = new Set([
  "queued", "queue_update", "queue_done", "prepared", "result", "paused", "resumed",
  "interrupted", "stopped", "timeout", "error",
]);

// Chunks that may wait in the browser's own buffer before new ones are dropped.
const MAX_UNSENT_BYTES = 8 * 90000;

export class DuplexSession extends EventTarget {
  // Events: the protocol's message types (detail: the message), and "closed" {code, reason}.
  constructor(base = document.baseURI) {
    super();
    const url = new URL(`ws/duplex/omni_${Date.now().toString(36)}`, base);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.search = "";
    url.hash = "";
    this.sentAt = [];
    this.socket = new WebSocket(url);
    this.socket.onmessage = ({ data }) => this.receive(data);
    this.socket.onclose = ({ code, reason }) => this.emit("closed", { code, reason });
  }

  prepare({ systemPrompt, voice }) {
    const message = { type: "prepare", system_prompt: systemPrompt };
    if (voice) message.ref_audio_base64 = encode(voice);
    this.whenOpen(message);
  }

  // samples: Float32Array at 16 kHz; frame: base64 of a JPEG, or null. False: it was dropped.
  sendChunk(samples, { frame = null, forceListen = false } = {}) {
    if (this.socket.bufferedAmount > MAX_UNSENT_BYTES) return false;
    const message = { type: "audio_chunk", audio_base64: encode(samples) };
    if (frame) message.frame_base64_list = [frame];
    if (forceListen) message.force_listen = true;
    this.sentAt.push(performance.now());
    return this.send(message);
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

  close() {
    this.socket.close();
  }

  send(message) {
    if (this.socket.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  whenOpen(message) {
    if (!this.send(message)) {
      this.socket.addEventListener("open", () => this.send(message), { once: true });
    }
  }

  receive(data) {
    const message = JSON.parse(data);
    if (!KNOWN.has(message.type)) return;
    if (message.type === "result") {
      // Exactly one result answers each chunk, in order.
      const sentAt = this.sentAt.shift();
      message.roundTripMs = sentAt === undefined ? null : performance.now() - sentAt;
      message.audio = message.audio_data ? decode(message.audio_data) : null;
    }
    this.emit(message.type, message);
  }

  emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

// Float32Array -> base64 of its little-endian bytes.
export function encode(samples) {
  return bytesToBase64(new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength));
}

export function bytesToBase64(bytes) {
  const pieces = [];
  for (let at = 0; at < bytes.length; at += 0x8000) {
    pieces.push(String.fromCharCode(...bytes.subarray(at, at + 0x8000)));
  }
  return btoa(pieces.join(""));
}

function decode(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer, 0, bytes.length >> 2);
}
