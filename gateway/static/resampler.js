// Continuous band-limited resampling. It keeps history between calls, so that a stream cut into
// pieces comes out as if it had been converted whole: no clicks at the seams.

const ZERO_CROSSINGS = 16;
const PHASES = 256;
const ROLLOFF = 0.94;

export class Resampler {
  // Rates in Hz.
  constructor(inputRate, outputRate) {
    this.step = inputRate / outputRate;
    const cutoff = ROLLOFF * Math.min(1, outputRate / inputRate);
    this.half = Math.ceil(ZERO_CROSSINGS / cutoff);
    this.filters = makeFilters(this.half, cutoff);
    // The first output sample lies on the first input sample: half a filter of zeros before it.
    this.history = new Float32Array(this.half);
    this.position = this.half;
  }

  // Takes a Float32Array of any length, returns the samples that are complete by now.
  push(input) {
    const samples = new Float32Array(this.history.length + input.length);
    samples.set(this.history);
    samples.set(input, this.history.length);
    const last = samples.length - this.half - 1;
    const count = Math.max(0, Math.floor((last - this.position) / this.step) + 1);
    const output = new Float32Array(count);
    let position = this.position;
    for (let i = 0; i < count; i += 1, position += this.step) {
      output[i] = this.at(samples, position);
    }
    const kept = Math.max(0, Math.floor(position) - this.half);
    this.history = samples.slice(Math.min(kept, samples.length));
    this.position = position - Math.min(kept, samples.length);
    return output;
  }

  at(samples, position) {
    const whole = Math.floor(position);
    const filter = this.filters[Math.round((position - whole) * PHASES)];
    const start = whole - this.half + 1;
    let sum = 0;
    for (let k = 0; k < filter.length; k += 1) sum += filter[k] * samples[start + k];
    return sum;
  }
}

// One filter per fraction of a sample: a windowed sinc whose taps sum to 1.
function makeFilters(half, cutoff) {
  return Array.from({ length: PHASES + 1 }, (_, phase) => {
    const taps = new Float32Array(2 * half);
    let sum = 0;
    for (let k = 0; k < taps.length; k += 1) {
      const x = k - half + 1 - phase / PHASES;
      const window = 0.5 + 0.5 * Math.cos((Math.PI * x) / (half + 1));
      const angle = Math.PI * cutoff * x;
      taps[k] = (angle === 0 ? 1 : Math.sin(angle) / angle) * window;
      sum += taps[k];
    }
    return taps.map((tap) => tap / sum);
  });
}
