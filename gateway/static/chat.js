// The chat page: a question with pictures, sound or films, an answer in writing and aloud.

import { hideKey } from "./address.js";
import { Attachments, Recorder, TooLarge, UnknownKind } from "./attachments.js";
import { Chat } from "./chat-conversation.js";
import { showAttachments } from "./chat-view.js";
import { applyTranslations, register, setText, t } from "./i18n.js";
import { PresetChoice } from "./presets.js";
import { findHurdle, problemOf } from "./problems.js";
import { mountRecording } from "./recordings.js";
import { CHAT } from "./texts-chat.js";
import { byId, showProblem } from "./view.js";
import { VoiceChoice } from "./voices.js";

register(CHAT);
applyTranslations();
hideKey();
mountRecording();

const voices = new VoiceChoice(byId("voice-choice"), byId("voice-row"), byId("voice"));
const presets = new PresetChoice(byId("preset"), "turnbased", byId("prompt"), voices);
const attachments = new Attachments((list) => {
  showAttachments(byId("attachments"), list, (attachment) => attachments.remove(attachment));
});
const chat = new Chat({ presets, voices, attachments });
let recorder = null;

Promise.allSettled([presets.load(), voices.load()]).then((parts) => {
  for (const { reason } of parts) {
    if (reason) console.info("a part of the settings is missing:", reason.message);
  }
});

async function addFiles(files) {
  for (const file of files) {
    try {
      await attachments.addFile(file);
    } catch (error) {
      showProblem(fileProblem(error, file.name));
    }
  }
}

function addRecording(samples) {
  const name = t("chat.recording_name");
  try {
    attachments.addRecording(samples, name);
  } catch (error) {
    showProblem(fileProblem(error, name));
  }
}

function fileProblem(error, name) {
  if (error instanceof TooLarge) return ["chat.too_large", { name }];
  if (error instanceof UnknownKind) return ["chat.unknown_kind", { name }];
  return ["chat.unreadable", { name }];
}

async function toggleRecording() {
  const button = byId("record");
  if (recorder) {
    const samples = recorder.finish();
    recorder = null;
    showRecordingState(false);
    if (samples.length) addRecording(samples);
    return;
  }
  const hurdle = findHurdle();
  if (hurdle) {
    showProblem(hurdle);
    return;
  }
  button.disabled = true;
  try {
    showProblem();
    recorder = await Recorder.open(toggleRecording);
    showRecordingState(true);
  } catch (error) {
    showProblem(problemOf(error));
  } finally {
    button.disabled = false;
  }
}

function showRecordingState(isRecording) {
  setText(byId("record"), isRecording ? "chat.finish_recording" : "chat.record");
  byId("record").setAttribute("aria-pressed", String(isRecording));
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  chat.ask();
});
byId("question").addEventListener("keydown", (event) => {
  // Enter that chooses a word in an input method is not meant for us.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  chat.ask();
});
byId("question").addEventListener("paste", ({ clipboardData }) => addFiles(clipboardData.files));
byId("files").addEventListener("change", async ({ target }) => {
  await addFiles([...target.files]);
  target.value = "";
});
byId("attach").addEventListener("click", () => byId("files").click());
byId("record").addEventListener("click", toggleRecording);
byId("stop").addEventListener("click", () => chat.stop());
byId("new-chat").addEventListener("click", () => chat.startAnew());
window.addEventListener("pagehide", () => chat.stop());
