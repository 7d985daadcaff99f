// Spoken answers, 24 kHz: played piece by piece as they come, or whole from a button. It needs no
// worklet, so that a chat has a voice on pages without HTTPS too.

const RATE = 24000;

export class Player {
  // onChange(owner): what is being played now belongs to it; null = silence.
  constructor(onChange) {
    this.onChange = onChange;
    this.context = null;
    this.sources = new Set();
    this.owner = null;
    this.endsAt = 0;
  }

  // Within a click: browsers let a page make sound only after one.
  unlock() {
    this.context ??= new AudioContext({ sampleRate: RATE });
    this.context.resume();
  }

  // Another owner's sound stops; pieces of the same one follow each other without a gap.
  play(owner, samples) {
    if (this.owner !== owner) this.stop();
    const buffer = this.context.createBuffer(1, samples.length, RATE);
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(this.context, { buffer });
    source.connect(this.context.destination);
    this.endsAt = Math.max(this.endsAt, this.context.currentTime);
    source.start(this.endsAt);
    this.endsAt += buffer.duration;
    this.sources.add(source);
    source.onended = () => this.ended(source);
    this.setOwner(owner);
  }

  stop() {
    for (const source of this.sources) {
      source.onended = null;
      source.stop();
    }
    this.sources.clear();
    this.endsAt = 0;
    this.setOwner(null);
  }

  ended(source) {
    this.sources.delete(source);
    if (!this.sources.size) this.setOwner(null);
  }

  setOwner(owner) {
    if (this.owner === owner) return;
    this.owner = owner;
    this.onChange(owner);
  }
}
