// Microphone, loudspeaker and their levels: one AudioContext at the device's own rate.

const CHUNK_SAMPLES = 16000;
const VOICE_RATE = 16000;
const MAX_VOICE_S = 60;

export class AudioEngine {
  // onChunk(samples): one second of 16 kHz mono. onPlayback({bufferedMs, underruns, playing}).
  // onStateChange(state): the context's. onLost(): the microphone is gone.
  static async open({ delayMs, volume, onChunk, onPlayback, onStateChange, onLost }) {
    const engine = new AudioEngine();
    engine.context = new AudioContext({ latencyHint: "interactive" });
    try {
      engine.microphone = await navigator.mediaDevices.getUserMedia({
        audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
      });
      await engine.context.audioWorklet.addModule("static/capture-worklet.js");
      await engine.context.audioWorklet.addModule("static/playback-worklet.js");
      await engine.context.resume();
    } catch (error) {
      engine.close();
      throw error;
    }
    engine.connect(delayMs, volume, onChunk, onPlayback);
    engine.microphone.getAudioTracks()[0].onended = onLost;
    engine.context.onstatechange = () => onStateChange(engine.context.state);
    return engine;
  }

  connect(delayMs, volume, onChunk, onPlayback) {
    const { context } = this;
    const source = context.createMediaStreamSource(this.microphone);
    this.capture = new AudioWorkletNode(context, "capture", {
      numberOfOutputs: 0,
      processorOptions: { chunkSamples: CHUNK_SAMPLES },
    });
    this.capture.port.onmessage = ({ data }) => onChunk(data.samples);
    this.playback = new AudioWorkletNode(context, "playback", {
      numberOfInputs: 0,
      outputChannelCount: [1],
      processorOptions: { delayMs },
    });
    this.playback.port.onmessage = ({ data }) => onPlayback(data);
    this.gain = new GainNode(context, { gain: volume });
    this.inputMeter = new AnalyserNode(context, { fftSize: 1024 });
    this.outputMeter = new AnalyserNode(context, { fftSize: 1024 });
    source.connect(this.capture);
    source.connect(this.inputMeter);
    this.playback.connect(this.gain).connect(this.outputMeter).connect(context.destination);
  }

  play(samples) {
    this.playback.port.postMessage({ samples }, [samples.buffer]);
  }

  endTurn() {
    this.playback.port.postMessage({ end: true });
  }

  flush() {
    this.playback.port.postMessage({ flush: true });
  }

  set volume(value) {
    this.gain.gain.value = value;
  }

  // Muted, the microphone goes on as silence: the model's clock is the stream of chunks.
  set muted(value) {
    this.capture.port.postMessage({ muted: value });
  }

  resume() {
    return this.context.resume();
  }

  inputLevel() {
    return level(this.inputMeter);
  }

  outputLevel() {
    return level(this.outputMeter);
  }

  close() {
    this.microphone?.getTracks().forEach((track) => track.stop());
    if (this.context) {
      this.context.onstatechange = null;
      if (this.context.state !== "closed") this.context.close();
    }
  }
}

// 0 (silent) .. 1 (loud), from the root mean square in decibels.
function level(meter) {
  const samples = new Float32Array(meter.fftSize);
  meter.getFloatTimeDomainData(samples);
  const power = samples.reduce((sum, x) => sum + x * x, 0) / samples.length;
  return Math.min(1, Math.max(0, (10 * Math.log10(power + 1e-9) + 55) / 45));
}

// Any audio file the browser can decode -> 16 kHz mono, at most a minute.
export async function readVoice(file) {
  const context = new OfflineAudioContext(1, 1, VOICE_RATE);
  const buffer = await context.decodeAudioData(await file.arrayBuffer());
  const mono = new Float32Array(Math.min(buffer.length, MAX_VOICE_S * VOICE_RATE));
  for (let channel = 0; channel < buffer.numberOfChannels; channel += 1) {
    const samples = buffer.getChannelData(channel);
    for (let i = 0; i < mono.length; i += 1) mono[i] += samples[i] / buffer.numberOfChannels;
  }
  return mono;
}
