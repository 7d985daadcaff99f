// The peaks of a replay's two channels, to be drawn.

const MAX_BYTES = 80_000_000;
const PX_PER_S = 10;
const MAX_PX = 8_000;

// url: a WAV of 16-bit PCM. null: it is too large to be fetched for a picture, or of another kind.
// Peaks are between 0 and 1, at equal distances.
export async function peaksOf(url) {
  const head = await fetch(url, { method: "HEAD" });
  if (!head.ok || Number(head.headers.get("content-length")) > MAX_BYTES) return null;
  const reply = await fetch(url);
  if (!reply.ok) return null;
  const view = new DataView(await reply.arrayBuffer());
  const wav = parse(view);
  return wav && { left: peaks(view, wav, 0), right: peaks(view, wav, wav.channels - 1) };
}

function parse(view) {
  if (view.byteLength < 12 || tag(view, 0) !== "RIFF" || tag(view, 8) !== "WAVE") return null;
  let format = null;
  for (let at = 12; at + 8 <= view.byteLength; at += 8 + size(view, at) + (size(view, at) % 2)) {
    if (tag(view, at) === "fmt ") {
      format = { channels: view.getUint16(at + 10, true), rate: view.getUint32(at + 12, true), bits: view.getUint16(at + 22, true) };
    }
    if (tag(view, at) === "data" && format?.bits === 16) {
      const bytes = Math.min(size(view, at), view.byteLength - at - 8);
      return { ...format, start: at + 8, frames: Math.floor(bytes / 2 / format.channels) };
    }
  }
  return null;
}

function tag(view, at) {
  return String.fromCharCode(...[0, 1, 2, 3].map((i) => view.getUint8(at + i)));
}

function size(view, at) {
  return view.getUint32(at + 4, true);
}

function peaks(view, { channels, rate, start, frames }, channel) {
  const n = Math.max(1, Math.min(MAX_PX, Math.round((frames / rate) * PX_PER_S)));
  const samples = new Int16Array(view.buffer.slice(start, start + 2 * channels * frames));
  const found = new Float32Array(n);
  for (let i = 0; i < frames; i += 1) {
    const x = Math.min(n - 1, Math.floor((i * n) / frames));
    found[x] = Math.max(found[x], Math.abs(samples[i * channels + channel]) / 32768);
  }
  return found;
}
