// Answer -> loudspeaker, with a jitter buffer: a turn starts to play `delayMs` after its first
// samples have come. Audio comes in pieces of a second, once a second, so it is that wait, not the
// amount at hand, that later pieces may be late by. A buffer that runs dry in mid-turn counts as
// an underrun and waits anew.
//
// In:  {samples} 24 kHz mono, {end: true} the turn is complete, {flush: true} drop what is unplayed.
// Out: {bufferedMs, underruns, playing} ten times a second and at each change of `playing`.

import { Resampler } from "./resampler.js";

const RATE = 24000;
const FADE_MS = 8;
const REPORT_EVERY_MS = 100;

class Playback extends AudioWorkletProcessor {
  constructor({ processorOptions }) {
    super();
    this.delay = (processorOptions.delayMs / 1000) * sampleRate;
    this.underruns = 0;
    this.reportIn = 0;
    this.clear();
    this.port.onmessage = ({ data }) => this.receive(data);
  }

  clear() {
    this.queue = [];
    this.offset = 0;
    this.buffered = 0;
    this.startIn = 0;
    this.playing = false;
    this.complete = false;
    this.fadeLeft = 0;
    this.resampler = new Resampler(RATE, sampleRate);
  }

  receive({ samples, end, flush }) {
    if (samples) {
      this.complete = false;
      this.enqueue(this.resampler.push(samples));
    }
    if (end) {
      // What the filter still holds belongs to the turn.
      this.enqueue(this.resampler.push(new Float32Array(this.resampler.half)));
      this.resampler = new Resampler(RATE, sampleRate);
      this.complete = true;
    }
    if (flush) this.startFade();
  }

  enqueue(samples) {
    if (!samples.length) return;
    if (!this.playing && !this.buffered) this.startIn = this.delay;
    this.queue.push(samples);
    this.buffered += samples.length;
  }

  // Cutting at once would click: a few milliseconds fade out, the rest is dropped.
  startFade() {
    if (!this.playing) {
      this.clear();
      this.report();
      return;
    }
    this.fadeTotal = Math.min(this.buffered, Math.round((FADE_MS / 1000) * sampleRate));
    this.fadeLeft = this.fadeTotal;
    if (!this.fadeLeft) this.clear();
  }

  process(_, [channels]) {
    const [out] = channels;
    if (!this.playing && this.buffered) {
      this.startIn -= out.length;
      if (this.startIn <= 0) {
        this.playing = true;
        this.report();
      }
    }
    if (this.playing) this.play(out);
    for (const channel of channels.slice(1)) channel.set(out);
    this.reportIn -= out.length;
    if (this.reportIn <= 0) this.report();
    return true;
  }

  play(out) {
    for (let i = 0; i < out.length; i += 1) {
      if (!this.buffered) {
        this.runDry();
        return;
      }
      const [head] = this.queue;
      out[i] = head[this.offset];
      this.offset += 1;
      this.buffered -= 1;
      if (this.offset === head.length) {
        this.queue.shift();
        this.offset = 0;
      }
      if (this.fadeLeft) {
        out[i] *= this.fadeLeft / this.fadeTotal;
        this.fadeLeft -= 1;
        if (!this.fadeLeft) {
          this.clear();
          this.report();
          return;
        }
      }
    }
  }

  runDry() {
    if (!this.complete) this.underruns += 1;
    this.playing = false;
    this.report();
  }

  report() {
    this.reportIn = (REPORT_EVERY_MS / 1000) * sampleRate;
    const bufferedMs = Math.round((1000 * this.buffered) / sampleRate);
    this.port.postMessage({ bufferedMs, underruns: this.underruns, playing: this.playing });
  }
}

registerProcessor("playback", Playback);
