// The administration page: asks the gateway every few seconds and shows what it says.

import { hideKey } from "./address.js";
import { ApiError, get, hasKey, rememberKey, send } from "./admin-api.js";
import { AppSwitches, EtaForm, showService } from "./admin-controls.js";
import { LatencyChart } from "./admin-latency.js";
import { makeTables } from "./admin-tables.js";
import { applyTranslations, onLanguageChange, register, setPlain, setText, t } from "./i18n.js";
import { ADMIN } from "./texts-admin.js";

const REFRESH_MS = 3_000;
const SLOW_EVERY = 5;
const $ = (id) => document.getElementById(id);

class Administration {
  constructor() {
    this.round = 0;
    this.changes = 0;
    this.timer = null;
    this.pending = null;
    this.chart = new LatencyChart($("latency"), $("latency-now"));
    this.tables = makeTables({
      cancel: (ticket) => this.act("DELETE", `api/queue/${encodeURIComponent(ticket)}`),
      remove: (id, title) => this.remove(id, title),
    });
    this.apps = new AppSwitches($("apps"), (id, enabled) => this.act("PUT", `api/admin/apps/${id}`, { enabled }));
    this.eta = new EtaForm($("eta"), $("eta-fields"), (values) => this.saveEta(values));
  }

  // One look at everything; what hardly changes is asked for less often. A call during a look
  // gets that one, or if it wants all, one of its own after it.
  async refresh({ all = false } = {}) {
    if (all) await this.pending;
    const slow = all || this.round % SLOW_EVERY === 0;
    this.pending ??= this.look(slow).finally(() => {
      this.pending = null;
    });
    return this.pending;
  }

  hold() {
    clearTimeout(this.timer);
  }

  async look(slow) {
    this.hold();
    this.round += 1;
    const began = this.changes;
    // Asks for one part of the page and shows it, unless it was asked for before the operator
    // changed something: that would look as if nothing had been changed.
    const part = async (name, ask, show) => {
      try {
        const content = await ask();
        if (began === this.changes) show(content);
        return null;
      } catch (error) {
        return this.forgive(name, error);
      }
    };
    const parts = [
      part("status", () => get("status"), (status) => showService($("service"), status)),
      part("workers", askForWorkers, (workers) => this.tables.workers.show(workers)),
      part("queue", () => get("api/queue"), ({ items }) => this.tables.queue.show(items)),
      part("sessions", () => get("sessions"), ({ sessions }) => this.tables.sessions.show(sessions)),
      part("latency", () => get("metrics"), (text) => this.chart.add(text)),
    ];
    if (slow) {
      parts.push(part("apps", () => get("api/admin/apps"), ({ apps }) => this.apps.show(apps)));
      parts.push(part("eta", () => get("api/config/eta"), (report) => this.eta.show(report)));
      parts.push(part("recordings", () => get("api/recordings"), (list) => this.tables.recordings.show(list)));
    }
    const errors = (await Promise.all(parts)).filter(Boolean);
    this.conclude(errors);
    if (!document.hidden) this.timer = setTimeout(() => this.refresh(), REFRESH_MS);
  }

  // A part that this service does not have says so and is no error.
  forgive(name, error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.needsKey) this.tables[name]?.say(t("admin.key_needed"));
    if (error.status !== 404) return error;
    this.tables[name]?.say(t("admin.absent"));
    return null;
  }

  conclude(errors) {
    const refused = errors.some(({ needsKey }) => needsKey);
    this.askForKey(refused);
    const other = errors.find(({ needsKey }) => !needsKey);
    if (other) showProblem(other.status ? other.message : t("admin.silent"));
    else showProblem(refused && hasKey() ? t("admin.key_refused") : null);
    document.body.dataset.state = refused ? "locked" : other ? "failed" : "ready";
    this.showState();
  }

  showState() {
    const state = document.hidden ? "held" : document.body.dataset.state;
    setText($("state"), `admin.state_${state}`);
  }

  askForKey(needed) {
    if ($("key-form").hidden === !needed) return;
    $("key-form").hidden = !needed;
    if (needed) $("key").focus();
  }

  // A change the operator has asked for; the page shows at once what came of it.
  async act(method, path, body) {
    let problem = null;
    this.changes += 1;
    try {
      await send(method, path, body);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      problem = error;
    }
    this.changes += 1;
    await this.refresh({ all: true });
    if (problem?.needsKey) this.askForKey(true);
    else if (problem) showProblem(problem.message);
    return !problem;
  }

  async remove(id, title) {
    if (confirm(t("admin.confirm_delete", { title }))) {
      await this.act("DELETE", `api/recordings/${encodeURIComponent(id)}`);
    }
  }

  async saveEta(values) {
    this.eta.release();
    setPlain($("eta-saved"), "");
    const saved = await this.act("PUT", "api/config/eta", values);
    if (saved) setText($("eta-saved"), "admin.saved");
  }

  translate() {
    for (const table of Object.values(this.tables)) table.again();
    this.apps.again();
    this.eta.again();
    this.chart.draw();
    this.refresh({ all: true });
  }
}

async function askForWorkers() {
  const [{ workers }, compile] = await Promise.all([get("workers"), get("api/compile")]);
  const compiled = new Map(compile.workers.map((row) => [row.worker_id, row]));
  return workers.map((worker) => ({ ...worker, compile: compiled.get(worker.worker_id) }));
}

function showProblem(text) {
  // The same text again would be read out again.
  if (text && $("problem").textContent !== text) setPlain($("problem"), text);
  $("problem").hidden = !text;
}

register(ADMIN);
hideKey();
applyTranslations();
const administration = new Administration();
onLanguageChange(() => administration.translate());
document.addEventListener("visibilitychange", () => {
  administration.showState();
  if (document.hidden) administration.hold();
  else administration.refresh();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  rememberKey($("key").value.trim());
  $("key").value = "";
  administration.refresh({ all: true });
});
await administration.refresh({ all: true });
