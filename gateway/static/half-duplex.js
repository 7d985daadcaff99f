// The half-duplex page: speak, pause, hear the answer.

import { hideKey } from "./address.js";
import { applyTranslations, register } from "./i18n.js";
import { findHurdle } from "./problems.js";
import { mountRecording } from "./recordings.js";
import { Settings } from "./settings.js";
import { TURNS } from "./texts-half-duplex.js";
import { Turns } from "./turns.js";
import { byId, onKeys, showProblem } from "./view.js";

register(TURNS);
applyTranslations();

const settings = new Settings("half_duplex_audio");
const turns = new Turns(settings);
hideKey();
mountRecording();
showProblem(findHurdle());
settings.load();

for (const id of ["threshold", "silence"]) {
  const show = () => {
    byId(`${id}-value`).textContent = byId(id).value;
  };
  byId(id).addEventListener("input", show);
  show();
}
byId("start").addEventListener("click", () => turns.start());
byId("stop").addEventListener("click", () => turns.stop());
byId("interrupt").addEventListener("click", () => turns.interrupt());
byId("mute").addEventListener("click", () => turns.toggleMute());
byId("volume").addEventListener("input", ({ target }) => {
  if (turns.audio) turns.audio.speaker.volume = Number(target.value);
});
onKeys({ escape: () => turns.interrupt(), m: () => turns.toggleMute() });
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) turns.audio?.resume();
});
// Leaving the page gives the place on the worker and the microphone back at once.
window.addEventListener("pagehide", () => turns.stop());
