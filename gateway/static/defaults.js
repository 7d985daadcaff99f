// What the service tells every page: `playback_delay_ms`, and `default_lang` where one is set.

import { serviceUrl } from "./address.js";

let asked = null;

// One request per page; {} if the service does not answer.
export function frontendDefaults() {
  asked ??= ask();
  return asked;
}

async function ask() {
  try {
    const reply = await fetch(serviceUrl("api/frontend_defaults"));
    return reply.ok ? await reply.json() : {};
  } catch {
    return {};
  }
}
