// What can go wrong on the way to a live session, as messages that say what to do.

import { t } from "./i18n.js";

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

const MEANT = new Set(["max_slice_nums", "image_content", "reference_voice"]);

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

// names: what the service says that it has no use for, in its own words where we have none.
export function hasNoEffect(names) {
  const words = names.map((name) => (MEANT.has(name) ? t(`ignored.${name}`) : name));
  return ["ignored", { names: words.join(", ") }];
}

// A connection that ended without a word.
export function closedBecause({ code, reason }) {
  if (reason) return ["problem.closed", { why: reason }];
  return code === 1006 ? ["problem.connection_lost"] : ["problem.closed_code", { code }];
}
