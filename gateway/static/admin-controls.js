// What the administration page shows beside its tables: counts, app switches, waiting times.

import { setText, t } from "./i18n.js";

const COUNTS = [
  "idle_workers", "busy_workers", "loading_workers", "error_workers", "offline_workers",
  "slots_free", "sessions", "queue_length",
];
const OF_ALL = { slots_free: "slots_total", queue_length: "max_queue_size", idle_workers: "total_workers" };
const BAD = new Set(["error_workers", "offline_workers"]);

// status: the body of `GET /status`.
export function showService(list, status) {
  for (const name of COUNTS) {
    let figure = list.querySelector(`[data-name=${name}]`);
    if (!figure) {
      figure = document.createElement("div");
      figure.dataset.name = name;
      figure.append(document.createElement("dt"), document.createElement("dd"));
      list.append(figure);
    }
    const whole = OF_ALL[name] ? ` / ${status[OF_ALL[name]]}` : "";
    figure.firstElementChild.textContent = t(`admin.${name}`);
    figure.lastElementChild.textContent = `${status[name]}${whole}`;
    figure.classList.toggle("bad", BAD.has(name) && status[name] > 0);
  }
}

export class AppSwitches {
  // change(appId, enabled): asks the service; what `show` gets afterwards is what holds.
  constructor(box, change) {
    this.box = box;
    this.change = change;
    this.apps = [];
  }

  show(apps) {
    this.apps = apps;
    for (const { app_id: id, name, enabled } of apps) {
      const input = document.getElementById(`app-${id}`) ?? this.add(id);
      input.checked = enabled;
      // The pages have names of their own for the apps they know.
      const [key, known] = [`app.${id}`, t(`app.${id}`)];
      input.nextElementSibling.textContent = known === key ? name : known;
    }
  }

  add(id) {
    const label = document.createElement("label");
    label.className = "switch";
    const input = document.createElement("input");
    Object.assign(input, { id: `app-${id}`, type: "checkbox" });
    input.setAttribute("role", "switch");
    input.addEventListener("change", () => this.change(id, input.checked));
    label.append(input, document.createElement("span"));
    this.box.append(label);
    return input;
  }

  again() {
    this.show(this.apps);
  }
}

const ETA_FIELDS = ["eta_chat_s", "eta_half_duplex_s", "eta_audio_duplex_s", "eta_omni_duplex_s", "ema_alpha"];

export class EtaForm {
  // save(values): called with numbers by field name.
  constructor(form, box, save) {
    this.form = form;
    this.box = box;
    this.report = null;
    this.isEdited = false;
    for (const name of ETA_FIELDS) box.append(this.makeField(name));
    form.addEventListener("input", () => {
      this.isEdited = true;
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      save(Object.fromEntries(ETA_FIELDS.map((name) => [name, this.input(name).valueAsNumber])));
    });
  }

  makeField(name) {
    const field = document.createElement("p");
    const label = document.createElement("label");
    label.htmlFor = `eta-${name}`;
    setText(label, `admin.${name}`);
    const input = document.createElement("input");
    const bounds = name === "ema_alpha" ? { min: "0.01", max: "1", step: "0.01" } : { min: "0.1", max: "86400", step: "0.1" };
    Object.assign(input, { id: `eta-${name}`, type: "number", required: true, ...bounds });
    const learned = document.createElement("small");
    learned.id = `eta-${name}-learned`;
    input.setAttribute("aria-describedby", learned.id);
    field.append(label, input, learned);
    return field;
  }

  input(name) {
    return this.box.querySelector(`#eta-${name}`);
  }

  // report: the body of `GET /api/config/eta`. What is being edited is left alone.
  show(report) {
    this.report = report;
    for (const name of ETA_FIELDS) {
      const input = this.input(name);
      if (!this.isEdited) input.value = report.config[name];
      input.nextElementSibling.textContent = this.learned(name);
    }
  }

  learned(name) {
    const kind = name.replace(/^eta_|_s$/g, "");
    const seconds = this.report[`ema_${kind}_s`];
    if (name === "ema_alpha" || seconds === null || seconds === undefined) return "";
    return t("admin.learned", { s: Math.round(seconds), n: this.report[`ema_${kind}_samples`] });
  }

  // The edit is over: the service's own values may be shown again.
  release() {
    this.isEdited = false;
  }

  again() {
    if (this.report) this.show(this.report);
  }
}
