// Prepared prompts of a mode, and the system message that is made of one.

import { getJson } from "./address.js";
import { decodeSamples, encodeSamples } from "./codec.js";
import { setText } from "./i18n.js";

export class PresetChoice {
  // mode: the service's name of it; prompt: the text field; voices: a VoiceChoice.
  constructor(select, mode, prompt, voices) {
    this.select = select;
    this.mode = mode;
    this.prompt = prompt;
    this.voices = voices;
    this.presets = [];
    this.preset = null;
    select.replaceChildren(new Option("", ""));
    setText(select.firstElementChild, "settings.preset_none");
    select.addEventListener("change", () => this.choose(select.value));
  }

  async load() {
    this.presets = (await getJson("api/presets"))[this.mode] ?? [];
    for (const { id, name, description } of this.presets) {
      const option = new Option(name, id);
      option.title = description ?? "";
      this.select.append(option);
    }
  }

  choose(id) {
    this.preset = this.presets.find((preset) => preset.id === id) ?? null;
    if (!this.preset) {
      this.voices.offerPresets(null);
      return;
    }
    this.prompt.value = promptOf(this.preset);
    const { preset } = this;
    this.voices.offerPresets(hasVoice(preset) ? async () => (await this.audioOf(preset))[0] ?? null : null);
  }

  // Samples at 16 kHz of each of the preset's sounds, in order.
  async audioOf(preset) {
    const answer = await getJson(`api/presets/${this.mode}/${encodeURIComponent(preset.id)}/audio`);
    const sounds = answer.system_content_audio ?? (answer.ref_audio ? [answer.ref_audio] : []);
    return sounds.filter(({ data }) => data).map(({ data }) => decodeSamples(data));
  }

  // Items of the system message. voice: samples at 16 kHz or null. A preset keeps the order of its
  // texts and sounds as long as its text is untouched; the voice takes the place of its first sound.
  async systemContent(voice) {
    const text = this.prompt.value.trim();
    const untouched = this.preset?.system_content && text === promptOf(this.preset).trim();
    if (!untouched) return [...(text ? [{ type: "text", text }] : []), ...(voice ? [audioItem(voice)] : [])];
    const sounds = this.voices.isPresets ? await this.audioOf(this.preset) : voice ? [voice] : [];
    const items = this.preset.system_content.flatMap((item) => {
      if (item.type === "text") return [{ type: "text", text: item.text }];
      return sounds.length ? [audioItem(sounds.shift())] : [];
    });
    return [...items, ...sounds.map(audioItem)];
  }
}

function promptOf({ system_prompt: prompt, system_content: items }) {
  return prompt ?? items.filter(({ type }) => type === "text").map(({ text }) => text).join("\n");
}

function hasVoice({ ref_audio: voice, system_content: items }) {
  return Boolean(voice) || Boolean(items?.some(({ type }) => type === "audio"));
}

function audioItem(samples) {
  return { type: "audio", data: encodeSamples(samples) };
}
