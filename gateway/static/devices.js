// Which microphone or camera is used. Browsers name devices only after a permission.

import { setText } from "./i18n.js";
import { keep, recall } from "./storage.js";

export class DeviceChoice {
  // kind: "audioinput" or "videoinput".
  constructor(select, kind) {
    this.select = select;
    this.kind = kind;
    select.addEventListener("change", () => keep(kind, select.value));
    navigator.mediaDevices?.addEventListener("devicechange", () => this.refresh());
  }

  // "" = the browser's choice.
  get deviceId() {
    return this.select.value;
  }

  async refresh() {
    const found = (await navigator.mediaDevices?.enumerateDevices()) ?? [];
    const named = found.filter(({ kind, deviceId, label }) => kind === this.kind && deviceId && label);
    const wanted = this.select.value || recall(this.kind, "");
    this.select.replaceChildren(makeDefault(), ...named.map(makeOption));
    if (named.some(({ deviceId }) => deviceId === wanted)) this.select.value = wanted;
  }
}

function makeDefault() {
  const option = new Option("", "");
  setText(option, "settings.device_default");
  return option;
}

function makeOption({ label, deviceId }) {
  return new Option(label, deviceId);
}
