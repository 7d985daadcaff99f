// The link to a recorded session: shown on the page, and remembered for the home page.

import { getJson, serviceUrl } from "./address.js";
import { setText } from "./i18n.js";
import { keep, recall } from "./storage.js";
import { byId } from "./view.js";

const MAX_REMEMBERED = 20;
const STORE = "recordings";

// Newest first: {id, app, at (ms since 1970)}.
export function recentRecordings() {
  return recall(STORE, []);
}

// What the service calls them, by id. Those that it has no longer are forgotten here too.
export async function recordedTitles() {
  const titles = new Map();
  await Promise.all(recentRecordings().map(async ({ id }) => {
    try {
      titles.set(id, (await getJson(`api/sessions/${encodeURIComponent(id)}`)).title);
    } catch (error) {
      if (error.status === 404) keep(STORE, recentRecordings().filter((recording) => recording.id !== id));
      else console.info("a recording's title is missing:", error.message);
    }
  }));
  return titles;
}

export function recordingUrl(id) {
  return serviceUrl(`s/${encodeURIComponent(id)}`);
}

// id: `recording_session_id` of the service; without one the box goes away.
export function showRecording(id, app) {
  byId("recording").hidden = !id;
  if (!id) return;
  const others = recentRecordings().filter((recording) => recording.id !== id);
  keep(STORE, [{ id, app, at: Date.now() }, ...others].slice(0, MAX_REMEMBERED));
  byId("recording-link").href = recordingUrl(id);
  setText(byId("recording-copy"), "recording.copy");
}

export function mountRecording() {
  const link = byId("recording-link");
  byId("recording-share").hidden = !navigator.share;
  byId("recording-share").addEventListener("click", () => {
    // Closing the system's dialogue is no failure.
    navigator.share({ url: link.href }).catch(() => undefined);
  });
  byId("recording-copy").addEventListener("click", async ({ target }) => {
    await copy(link.href);
    setText(target, "recording.copied");
  });
}

// The clipboard is for secure pages; others select a field and copy it, as browsers always could.
async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
