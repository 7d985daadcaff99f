// Samples and bytes as text, the way the wire has them.

// Float32Array -> base64 of its little-endian bytes.
export function encodeSamples(samples) {
  return bytesToBase64(new Uint8Array(samples.buffer, samples.byteOffset, samples.byteLength));
}

// Base64 -> Float32Array; bytes that make no whole sample are left out.
export function decodeSamples(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer, 0, bytes.length >> 2);
}

export function bytesToBase64(bytes) {
  const pieces = [];
  for (let at = 0; at < bytes.length; at += 0x8000) {
    pieces.push(String.fromCharCode(...bytes.subarray(at, at + 0x8000)));
  }
  return btoa(pieces.join(""));
}

export function joinSamples(pieces) {
  const whole = new Float32Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}
