// Microphone and loudspeaker of a live session: one AudioContext at the device's own rate.

import { getJson } from "./address.js";

const RATE = 16000;

const WORKLETS = { capture: "./capture-worklet.js", playback: "./playback-worklet.js" };

export class Microphone {
  // onChunk(samples): so many samples of 16 kHz mono. onLost(): the device is gone.
  static async open(context, { chunkSamples, deviceId, onChunk, onLost }) {
    const microphone = new Microphone();
    microphone.stream = await navigator.mediaDevices.getUserMedia({
      audio: {
        channelCount: 1,
        echoCancellation: true,
        noiseSuppression: true,
        autoGainControl: true,
        ...(deviceId && { deviceId: { exact: deviceId } }),
      },
    });
    try {
      await addWorklet(context, "capture");
    } catch (error) {
      microphone.close();
      throw error;
    }
    microphone.connect(context, chunkSamples, onChunk);
    microphone.stream.getAudioTracks()[0].onended = onLost;
    return microphone;
  }

  connect(context, chunkSamples, onChunk) {
    const source = context.createMediaStreamSource(this.stream);
    this.capture = new AudioWorkletNode(context, "capture", {
      numberOfOutputs: 0,
      processorOptions: { chunkSamples },
    });
    this.capture.port.onmessage = ({ data }) => onChunk(data.samples);
    this.meter = new AnalyserNode(context, { fftSize: 1024 });
    source.connect(this.capture);
    source.connect(this.meter);
  }

  // Muted, the microphone goes on as silence: the model's clock is the stream of chunks.
  set muted(value) {
    this.capture.port.postMessage({ muted: value });
  }

  level() {
    return level(this.meter);
  }

  close() {
    this.stream.getTracks().forEach((track) => track.stop());
  }
}

export class Speaker {
  // onPlayback({bufferedMs, underruns, playing}).
  static async open(context, { delayMs, volume, onPlayback }) {
    await addWorklet(context, "playback");
    const speaker = new Speaker();
    speaker.node = new AudioWorkletNode(context, "playback", {
      numberOfInputs: 0,
      outputChannelCount: [1],
      processorOptions: { delayMs },
    });
    speaker.node.port.onmessage = ({ data }) => onPlayback(data);
    speaker.gain = new GainNode(context, { gain: volume });
    speaker.meter = new AnalyserNode(context, { fftSize: 1024 });
    speaker.node.connect(speaker.gain).connect(speaker.meter).connect(context.destination);
    return speaker;
  }

  // samples: 24 kHz; the array is given away.
  play(samples) {
    this.node.port.postMessage({ samples }, [samples.buffer]);
  }

  endTurn() {
    this.node.port.postMessage({ end: true });
  }

  flush() {
    this.node.port.postMessage({ flush: true });
  }

  set volume(value) {
    this.gain.gain.value = value;
  }

  level() {
    return level(this.meter);
  }
}

export class AudioEngine {
  // Options of Microphone and Speaker, and onStateChange(state): the context's.
  static async open({ onStateChange, ...options }) {
    const engine = new AudioEngine();
    engine.context = new AudioContext({ latencyHint: "interactive" });
    try {
      engine.microphone = await Microphone.open(engine.context, options);
      engine.speaker = await Speaker.open(engine.context, options);
      await engine.context.resume();
    } catch (error) {
      engine.close();
      throw error;
    }
    engine.context.onstatechange = () => onStateChange(engine.context.state);
    return engine;
  }

  resume() {
    return this.context.resume();
  }

  close() {
    this.microphone?.close();
    this.context.onstatechange = null;
    if (this.context.state !== "closed") this.context.close();
  }
}

async function addWorklet(context, name) {
  try {
    await context.audioWorklet.addModule(new URL(WORKLETS[name], import.meta.url));
  } catch (error) {
    // The browser names a file that it did not get; the service may say more, or nothing.
    await getJson("api/frontend_defaults");
    throw error;
  }
}

// 0 (silent) .. 1 (loud), from the root mean square in decibels.
function level(meter) {
  const samples = new Float32Array(meter.fftSize);
  meter.getFloatTimeDomainData(samples);
  const power = samples.reduce((sum, x) => sum + x * x, 0) / samples.length;
  return Math.min(1, Math.max(0, (10 * Math.log10(power + 1e-9) + 55) / 45));
}

// Any audio file that the browser can decode -> 16 kHz mono, cut after `maxS` seconds.
export async function readAudioFile(file, maxS) {
  const context = new OfflineAudioContext(1, 1, RATE);
  const buffer = await context.decodeAudioData(await file.arrayBuffer());
  const mono = new Float32Array(Math.min(buffer.length, maxS * RATE));
  for (let channel = 0; channel < buffer.numberOfChannels; channel += 1) {
    const samples = buffer.getChannelData(channel);
    for (let i = 0; i < mono.length; i += 1) mono[i] += samples[i] / buffer.numberOfChannels;
  }
  return mono;
}
