// Microphone -> chunks of 16 kHz mono. The context runs at the device's own rate, since not every
// browser joins a microphone to a context of another rate; the conversion happens here.

import { Resampler } from "./resampler.js";

const RATE = 16000;

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.resampler = new Resampler(sampleRate, RATE);
    this.chunk = new Float32Array(processorOptions.chunkSamples);
    this.filled = 0;
    this.muted = false;
    this.port.onmessage = ({ data }) => {
      this.muted = data.muted;
    };
  }

  process([channels]) {
    const frames = channels[0]?.length ?? 128;
    const mono = new Float32Array(frames);
    if (!this.muted) {
      for (const channel of channels) {
        for (let i = 0; i < frames; i += 1) mono[i] += channel[i] / channels.length;
      }
    }
    this.append(this.resampler.push(mono));
    return true;
  }

  append(samples) {
    let at = 0;
    while (at < samples.length) {
      const piece = samples.subarray(at, at + this.chunk.length - this.filled);
      this.chunk.set(piece, this.filled);
      this.filled += piece.length;
      at += piece.length;
      if (this.filled === this.chunk.length) this.send();
    }
  }

  send() {
    const samples = this.chunk;
    this.chunk = new Float32Array(samples.length);
    this.filled = 0;
    this.port.postMessage({ samples }, [samples.buffer]);
  }
}

registerProcessor("capture", Capture);
