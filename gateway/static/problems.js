// What can go wrong on the way to a live session, as messages that say what to do.

import { Refusal, Silence } from "./address.js";
import { CameraRefused } from "./camera.js";

const NAMES = {
  NotAllowedError: "problem.not_allowed",
  NotFoundError: "problem.not_found",
  NotReadableError: "problem.not_readable",
  OverconstrainedError: "problem.device_gone",
  EncodingError: "problem.encoding",
};

const OF_CAMERA = {
  NotAllowedError: "problem.camera_not_allowed",
  NotFoundError: "problem.camera_not_found",
  NotReadableError: "problem.camera_not_readable",
  OverconstrainedError: "problem.camera_gone",
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

// error: what the browser raised, or a request to the service.
export function problemOf(error) {
  if (error instanceof Silence) return ["problem.silent"];
  if (error instanceof Refusal && error.status === 401) return ["advice.unauthorized"];
  const known = (error instanceof CameraRefused ? OF_CAMERA : NAMES)[error.name];
  return known ? [known] : ["problem.cannot_start", { why: error.message }];
}

// message: an `error` of the service. Its sentence and, where we know one, a piece of advice.
export function saidBy({ error, slug }) {
  const sentence = /[.!?。！？]$/.test(error) ? error : `${error}.`;
  return ADVISED.has(slug) ? [sentence, [`advice.${slug}`]] : [sentence];
}

// names: what the service says that it has no use for, in its own words where we have none.
export function hasNoEffect(names) {
  return ["ignored", { names: names.map((name) => [MEANT.has(name) ? `ignored.${name}` : name]) }];
}

// A connection that ended without a word.
export function closedBecause({ code, reason }) {
  if (reason) return ["problem.closed", { why: reason }];
  return code === 1006 ? ["problem.connection_lost"] : ["problem.closed_code", { code }];
}
