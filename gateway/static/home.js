// The home page: the apps, how the service is, and what was recorded from this browser.

import { getJson, hideKey, serviceUrl } from "./address.js";
import { applyTranslations, language, onLanguageChange, register, setPlain, setText, t } from "./i18n.js";
import { recentRecordings, recordedTitles, recordingUrl } from "./recordings.js";
import { problemOf } from "./problems.js";
import { HOME } from "./texts-home.js";
import { byId, showProblem } from "./view.js";

const REFRESH_MS = 5000;
const KNOWN_APPS = new Set(["turnbased", "half_duplex_audio", "omni", "audio_duplex"]);

let titles = new Map();

register(HOME);
applyTranslations();
hideKey();

function showApps(apps) {
  byId("apps").replaceChildren(...apps.map(appCard));
  byId("no-apps").hidden = apps.length > 0;
}

function appCard({ app_id: id, name, route }) {
  const item = document.createElement("li");
  const link = document.createElement("a");
  link.className = "card app";
  link.href = serviceUrl(route.replace(/^\//, ""));
  const title = document.createElement("strong");
  link.append(title);
  if (KNOWN_APPS.has(id)) {
    const about = document.createElement("span");
    setText(title, `app.${id}`);
    setText(about, `home.about_${id}`);
    link.append(about);
  } else setPlain(title, name);
  item.append(link);
  return item;
}

function showStatus(status) {
  const ready = status.idle_workers + status.busy_workers;
  const key = ready ? (status.slots_free ? "ready" : "full") : status.loading_workers ? "loading" : "none";
  document.body.dataset.state = { ready: "listening", full: "queued", loading: "queued", none: "failed" }[key];
  setText(byId("state"), `home.service_${key}`);
  byId("f-ready").textContent = `${ready} / ${status.total_workers}`;
  byId("f-slots").textContent = `${status.slots_free} / ${status.slots_total}`;
  byId("f-running").textContent = status.running_tasks.length;
  byId("f-queue").textContent = status.queue_length;
}

async function refresh() {
  if (document.hidden) return;
  try {
    const [{ apps }, status] = await Promise.all([getJson("api/apps"), getJson("status")]);
    showProblem();
    showStatus(status);
    if (JSON.stringify(apps) !== refresh.shown) showApps(apps);
    refresh.shown = JSON.stringify(apps);
  } catch (error) {
    document.body.dataset.state = "failed";
    setText(byId("state"), "home.service_silent");
    showProblem(problemOf(error));
  }
}

function showRecordings() {
  const recordings = recentRecordings();
  byId("no-recordings").hidden = recordings.length > 0;
  byId("recordings").replaceChildren(...recordings.map(({ id, app, at }) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = recordingUrl(id);
    const when = new Date(at).toLocaleString(language(), { dateStyle: "medium", timeStyle: "short" });
    const name = t(`app.${app}`);
    const title = titles.get(id);
    link.textContent = title || `${name}, ${when}`;
    item.append(link);
    if (title) item.append(" ", Object.assign(document.createElement("small"), { textContent: name }));
    return item;
  }));
}

onLanguageChange(showRecordings);
document.addEventListener("visibilitychange", refresh);
showRecordings();
refresh();
setInterval(refresh, REFRESH_MS);
titles = await recordedTitles();
showRecordings();
