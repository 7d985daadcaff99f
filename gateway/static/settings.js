// The settings that all live pages share: preset, prompt, voice, volume, devices.

import { DeviceChoice } from "./devices.js";
import { PresetChoice } from "./presets.js";
import { byId } from "./view.js";
import { VoiceChoice } from "./voices.js";

export class Settings {
  // mode: the service's name of the mode whose presets are offered.
  constructor(mode) {
    this.voices = new VoiceChoice(byId("voice-choice"), byId("voice-row"), byId("voice"));
    this.presets = new PresetChoice(byId("preset"), mode, byId("prompt"), this.voices);
    this.microphone = new DeviceChoice(byId("microphone"), "audioinput");
    this.camera = byId("camera-device") ? new DeviceChoice(byId("camera-device"), "videoinput") : null;
  }

  // The page works without what cannot be loaded; an older service may not have it.
  async load() {
    const parts = [this.presets.load(), this.voices.load(), this.refreshDevices()];
    for (const { reason } of await Promise.allSettled(parts)) {
      if (reason) console.info("a part of the settings is missing:", reason.message);
    }
  }

  // Names of devices are known once one of them has been used.
  async refreshDevices() {
    await Promise.all([this.microphone.refresh(), this.camera?.refresh()]);
  }

  get prompt() {
    return byId("prompt").value;
  }

  get volume() {
    return Number(byId("volume").value);
  }
}
