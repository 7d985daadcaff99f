// The tables of the administration page: workers, queue, live sessions, recordings.

import { Rows, button, link } from "./admin-rows.js";
import { language, t } from "./i18n.js";

// cancel(ticketId) and remove(sessionId, title): what the buttons in the rows do.
export function makeTables({ cancel, remove }) {
  const box = (id) => document.getElementById(id);
  return {
    workers: new Rows(box("workers"), { columns: WORKERS, keyOf: (w) => w.worker_id, empty: "admin.no_workers" }),
    queue: new Rows(box("queue"), {
      columns: [
        { title: "admin.place", cell: (item) => String(item.position) },
        { title: "admin.kind", cell: (item) => t(`admin.kind_${item.request_type}`) },
        { title: "admin.session", cell: (item) => item.session_id ?? "–" },
        { title: "admin.waited", cell: (item) => duration(item.wait_elapsed_s) },
        { title: "admin.expected", cell: (item) => duration(item.estimated_wait_s) },
        {
          title: "admin.action",
          cell: (item, target) => button(target, {
            text: t("admin.cancel"),
            label: t("admin.cancel_one", { id: item.session_id ?? item.ticket_id }),
            act: () => cancel(item.ticket_id),
          }),
        },
      ],
      keyOf: (item) => item.ticket_id,
      empty: "admin.no_queue",
    }),
    sessions: new Rows(box("sessions"), {
      columns: [
        { title: "admin.session", cell: (item) => item.session_id },
        { title: "admin.worker", cell: (item) => item.worker_id ?? "–" },
        { title: "admin.active", cell: (item) => moment(item.last_active) },
      ],
      keyOf: (item) => item.session_id,
      empty: "admin.no_sessions",
    }),
    recordings: new Rows(box("recordings"), {
      columns: [
        {
          title: "admin.recording",
          cell: (item, target) => link(target, {
            text: item.title || item.session_id,
            href: `s/${encodeURIComponent(item.session_id)}`,
          }),
        },
        { title: "admin.kind", cell: (item) => t(`admin.kind_${item.app_type}`) },
        { title: "admin.created", cell: (item) => moment(item.created_at) },
        { title: "admin.length", cell: (item) => (item.is_live ? t("admin.live") : duration(item.duration_s)) },
        { title: "admin.size", cell: (item) => size(item.n_bytes) },
        {
          title: "admin.action",
          cell: (item, target) => recordingButton(item, target, remove),
        },
      ],
      keyOf: (item) => item.session_id,
      empty: "admin.no_recordings",
    }),
  };
}

const WORKERS = [
  { title: "admin.worker", cell: (w) => `${w.worker_id} (${w.host}:${w.port})` },
  { title: "admin.worker_state", cell: (w) => t(`admin.status_${w.status}`) },
  { title: "admin.slots", cell: (w) => `${w.slots_free} / ${w.slots_total}` },
  { title: "admin.stage", cell: stage },
  { title: "admin.compiled", cell: (w) => compiled(w.compile) },
  { title: "admin.served", cell: (w) => String(w.total_requests) },
  { title: "admin.mean", cell: (w) => (w.avg_inference_time_ms ? `${Math.round(w.avg_inference_time_ms)} ms` : "–") },
  { title: "admin.seen", cell: (w) => moment(w.last_heartbeat) },
];

// A start's stage with a bar; a worker that is ready has none.
function stage(worker, target) {
  if (worker.status !== "loading" || !worker.stage) return "–";
  let bar = target.querySelector("progress");
  if (!bar) {
    bar = document.createElement("progress");
    target.replaceChildren(document.createElement("span"), bar);
  }
  const left = worker.eta_s === null ? "" : `, ${t("admin.left", { time: duration(worker.eta_s) })}`;
  target.firstElementChild.textContent = `${worker.stage}${left}`;
  bar.value = worker.stage_progress;
  bar.setAttribute("aria-label", `${worker.worker_id}: ${worker.stage}`);
  return null;
}

function compiled(report) {
  if (!report) return "–";
  if (report.error) return t("admin.unreachable");
  if (!report.state) return t("admin.cache_none");
  const words = [t(`admin.cache_${report.state}`), t("admin.graphs", { n: report.graphs, m: report.captures })];
  if (report.recompiles_after_idle) words.push(t("admin.recompiles", { n: report.recompiles_after_idle }));
  if (report.degraded) words.push(t("admin.degraded", { reason: report.reason }));
  return words.join(", ");
}

// What is still being recorded cannot be deleted; when it has ended the button appears.
function recordingButton(item, target, remove) {
  if (item.is_live) return "–";
  if (!target.firstElementChild) target.replaceChildren();
  return button(target, {
    text: t("admin.delete"),
    label: t("admin.delete_one", { title: item.title || item.session_id }),
    act: () => remove(item.session_id, item.title || item.session_id),
    kind: "danger",
  });
}

// Seconds as "40 s", "3 min 5 s", "2 h 10 min".
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

function moment(iso) {
  if (!iso) return "–";
  const date = new Date(iso);
  const isToday = date.toDateString() === new Date().toDateString();
  const style = isToday ? { timeStyle: "medium" } : { dateStyle: "short", timeStyle: "short" };
  return new Intl.DateTimeFormat(language(), style).format(date);
}

function size(bytes) {
  if (bytes >= 1e9) return `${(bytes / 1e9).toFixed(1)} GB`;
  if (bytes >= 1e6) return `${(bytes / 1e6).toFixed(1)} MB`;
  return `${Math.ceil(bytes / 1e3)} kB`;
}
