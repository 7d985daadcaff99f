// The full-duplex page: with a camera as /omni, without one as /audio_duplex.

import { hideKey } from "./address.js";
import { Conversation } from "./conversation.js";
import { applyTranslations, register, setText } from "./i18n.js";
import { findHurdle } from "./problems.js";
import { mountRecording } from "./recordings.js";
import { Settings } from "./settings.js";
import { DUPLEX } from "./texts-duplex.js";
import { byId, onKeys, showProblem } from "./view.js";

const app = location.pathname.endsWith("/audio_duplex") ? "audio_duplex" : "omni";

register(DUPLEX);
for (const element of document.querySelectorAll("[data-needs-camera]")) {
  element.hidden = app === "audio_duplex";
}
setText(byId("app-name"), `app.${app}`);
setText(document.querySelector("title"), `duplex.title_${app}`);
applyTranslations();

const settings = new Settings(app);
const conversation = new Conversation(app, settings);
hideKey();
mountRecording();
showProblem(findHurdle());
settings.load();

byId("start").addEventListener("click", () => conversation.start());
byId("stop").addEventListener("click", () => conversation.stop());
byId("interrupt").addEventListener("click", () => conversation.interrupt());
byId("pause").addEventListener("click", () => conversation.togglePause());
byId("mute").addEventListener("click", () => conversation.toggleMute());
byId("camera").addEventListener("change", ({ target }) => conversation.toggleCamera(target.checked));
byId("camera-device").addEventListener("change", () => conversation.toggleCamera(byId("camera").checked));
byId("volume").addEventListener("input", ({ target }) => {
  if (conversation.audio) conversation.audio.speaker.volume = Number(target.value);
});
onKeys({
  escape: () => conversation.interrupt(),
  p: () => conversation.togglePause(),
  m: () => conversation.toggleMute(),
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) conversation.audio?.resume();
});
// Leaving the page gives the place on the worker, microphone and camera back at once.
window.addEventListener("pagehide", () => conversation.stop());
