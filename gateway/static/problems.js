// What can go wrong on the way to a live session, as messages that say what to do.

const NAMES = {
  NotAllowedError: "problem.not_allowed",
  NotFoundError: "problem.not_found",
  NotReadableError: "problem.not_readable",
  OverconstrainedError: "problem.device_gone",
  EncodingError: "problem.encoding",
};

const ADVISED = new Set([
  "unauthorized", "forbidden_origin", "queue_full", "no_worker", "worker_lost", "slow_reader",
]);

// Why this browser cannot use a microphone here; null if it can.
export function findHurdle() {
  if (!window.isSecureContext) {
    const page = location.pathname;
    return ["problem.insecure", {
      https: `https://${location.host}${page}`,
      local: `http://127.0.0.1:${location.port || "80"}${page}`,
    }];
  }
  if (!navigator.mediaDevices?.getUserMedia || !window.AudioWorkletNode) return ["problem.old"];
  return null;
}

// error: what the browser raised.
export function problemOf(error) {
  return NAMES[error.name] ? [NAMES[error.name]] : ["problem.cannot_start", { why: error.message }];
}

// message: an `error` of the service. Its sentence and, where we know one, a piece of advice.
export function saidBy({ error, slug }) {
  const sentence = /[.!?。！？]$/.test(error) ? error : `${error}.`;
  return ADVISED.has(slug) ? [sentence, [`advice.${slug}`]] : [sentence];
}

// A connection that ended without a word.
export function closedBecause({ code, reason }) {
  if (reason) return ["problem.closed", { why: reason }];
  return code === 1006 ? ["problem.connection_lost"] : ["problem.closed_code", { code }];
}
