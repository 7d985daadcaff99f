// A WebSocket of JSON messages as an EventTarget: what all live sessions have in common.

import { socketUrl } from "./address.js";

// Bytes that may wait in the browser's own buffer before new audio is dropped: about 8 s.
const MAX_UNSENT_BYTES = 8 * 90000;

export class LiveSocket extends EventTarget {
  // Events: the message types of `known` (detail: the message), and "closed" {code, reason}.
  constructor(path, known) {
    super();
    this.known = new Set(known);
    this.socket = new WebSocket(socketUrl(path));
    this.socket.onmessage = ({ data }) => this.receive(JSON.parse(data));
    this.socket.onclose = ({ code, reason }) => this.emit("closed", { code, reason });
  }

  get isCongested() {
    return this.socket.bufferedAmount > MAX_UNSENT_BYTES;
  }

  // False: the socket is not open, the message was not sent.
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

  close() {
    this.socket.close();
  }

  receive(message) {
    if (this.known.has(message.type)) this.emit(message.type, message);
  }

  emit(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}
