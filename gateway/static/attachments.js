// What goes along with a question: pictures, sound, films. Each is {kind, name, data (base64), url}.

import { Microphone, readAudioFile } from "./audio.js";
import { bytesToBase64, encodeSamples, joinSamples } from "./codec.js";

const MAX_AUDIO_S = 120;
const PIECE_SAMPLES = 1600;

// Characters of base64 in one question and all that was sent before, which goes along with it; the
// service takes frames of 128 MiB.
const MAX_TOTAL = 120 * 1024 * 1024;

export class TooLarge extends Error {}
export class UnknownKind extends Error {}

export class Attachments {
  // onChange(list) after each change.
  constructor(onChange) {
    this.list = [];
    this.sent = 0;
    this.onChange = onChange;
  }

  // Raises TooLarge, UnknownKind, or what the browser says about a file that it cannot read.
  async addFile(file) {
    const kind = file.type.split("/")[0];
    if (!["image", "audio", "video"].includes(kind)) throw new UnknownKind(file.name);
    const data = kind === "audio"
      ? encodeSamples(await readAudioFile(file, MAX_AUDIO_S))
      : bytesToBase64(new Uint8Array(await file.arrayBuffer()));
    this.add({ kind, name: file.name, data, url: URL.createObjectURL(file) });
  }

  // samples: 16 kHz mono.
  addRecording(samples, name) {
    const url = URL.createObjectURL(waveFile(samples, 16000));
    this.add({ kind: "audio", name, data: encodeSamples(samples), url });
  }

  add(attachment) {
    if (this.sent + sizeOf(this.list) + attachment.data.length > MAX_TOTAL) {
      URL.revokeObjectURL(attachment.url);
      throw new TooLarge(attachment.name);
    }
    this.list.push(attachment);
    this.onChange(this.list);
  }

  remove(attachment) {
    URL.revokeObjectURL(attachment.url);
    this.list = this.list.filter((other) => other !== attachment);
    this.onChange(this.list);
  }

  // Hands all of them over and is empty then.
  take() {
    const taken = this.list;
    this.sent += sizeOf(taken);
    this.list = [];
    this.onChange(this.list);
    return taken;
  }

  // A new conversation: nothing goes along any more.
  clear() {
    for (const { url } of this.list) URL.revokeObjectURL(url);
    this.list = [];
    this.sent = 0;
    this.onChange(this.list);
  }

  // After a question that failed they are back for the next try.
  putBack(list) {
    this.sent -= sizeOf(list);
    this.list = [...list, ...this.list];
    this.onChange(this.list);
  }
}

function sizeOf(list) {
  return list.reduce((sum, { data }) => sum + data.length, 0);
}

// A spoken message: from `open` to `finish`.
export class Recorder {
  static async open(onLost) {
    const recorder = new Recorder();
    recorder.pieces = [];
    recorder.context = new AudioContext();
    try {
      recorder.microphone = await Microphone.open(recorder.context, {
        chunkSamples: PIECE_SAMPLES,
        deviceId: "",
        onChunk: (samples) => recorder.take(samples),
        onLost,
      });
      await recorder.context.resume();
    } catch (error) {
      recorder.context.close();
      throw error;
    }
    return recorder;
  }

  take(samples) {
    if (this.pieces.length * PIECE_SAMPLES < MAX_AUDIO_S * 16000) this.pieces.push(samples);
  }

  // Everything that was said, 16 kHz mono.
  finish() {
    this.microphone.close();
    this.context.close();
    return joinSamples(this.pieces);
  }
}

// A WAV file of 16 bit samples, for the browser's own player.
export function waveFile(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, word) => [...word].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((x, i) => view.setInt16(44 + 2 * i, 32767 * Math.max(-1, Math.min(1, x)), true));
  return new Blob([view], { type: "audio/wav" });
}
