// Whose voice the assistant has: the default, the preset's, an uploaded one, or a file's.

import { getJson } from "./address.js";
import { readAudioFile } from "./audio.js";
import { decodeSamples } from "./codec.js";
import { setText } from "./i18n.js";

const MAX_VOICE_S = 60;

export class VoiceChoice {
  constructor(select, fileRow, fileInput) {
    this.select = select;
    this.fileRow = fileRow;
    this.fileInput = fileInput;
    this.presetVoice = null;
    this.select.replaceChildren(
      makeOption("", "settings.voice_default"),
      makeOption("file", "settings.voice_file"),
    );
    this.select.addEventListener("change", () => this.showFileRow());
    this.fileInput.addEventListener("change", () => {
      if (this.fileInput.files.length) this.choose("file");
    });
    this.showFileRow();
  }

  // Adds the voices that people have uploaded to the service.
  async load() {
    const { ref_audios: voices } = await getJson("api/assets/ref_audio");
    const options = voices.map(({ id, name }) => new Option(name, `id:${id}`));
    this.select.lastElementChild.before(...options);
  }

  get isPresets() {
    return this.select.value === "preset";
  }

  // read(): resolves to samples at 16 kHz. null: the preset has no voice of its own.
  offerPresets(read) {
    this.presetVoice = read;
    this.select.querySelector("[value=preset]")?.remove();
    if (read) {
      this.select.firstElementChild.after(makeOption("preset", "settings.voice_preset"));
      this.choose("preset");
    }
    this.showFileRow();
  }

  // Float32Array at 16 kHz; null for the default voice. Raises what the browser or the service says.
  async samples() {
    const { value } = this.select;
    if (value === "preset") return this.presetVoice();
    if (value === "file") return this.fromFile();
    if (!value) return null;
    const voice = await getJson(`api/assets/ref_audio/${encodeURIComponent(value.slice(3))}/audio`);
    return decodeSamples(voice.data);
  }

  async fromFile() {
    const [file] = this.fileInput.files;
    return file ? readAudioFile(file, MAX_VOICE_S) : null;
  }

  choose(value) {
    this.select.value = value;
    this.showFileRow();
  }

  showFileRow() {
    this.fileRow.hidden = this.select.value !== "file";
  }
}

function makeOption(value, key) {
  const option = new Option("", value);
  setText(option, key);
  return option;
}
