// What all live pages show. Takes plain values, knows neither session nor audio.
//
// A message to people is a string as it stands (what the service says), or [key, values] of a text.

import { setPlain, setText } from "./i18n.js";

export const byId = (id) => document.getElementById(id);

export function showState(state, key = `state.${state}`, values = undefined) {
  document.body.dataset.state = state;
  setText(byId("state"), key, values);
}

// place: a `queued` or `queue_update` message.
export function showQueue({ position, estimated_wait_s: seconds, state }) {
  const key = state === "starting" ? "state.starting" : "state.queued";
  const wait = seconds > 0 ? formatWait(seconds) : null;
  showState("queued", wait ? `${key}_wait` : key, { position, wait });
}

// Without a message the box goes away.
export function showProblem(...messages) {
  fill(byId("problem"), messages.filter(Boolean));
}

export function showNote(...messages) {
  fill(byId("note"), messages.filter(Boolean));
}

export function showLevel(level) {
  byId("orb").style.setProperty("--level", level.toFixed(3));
}

// A hidden button loses the focus, and the keyboard its place on the page.
export function swapButtons(shown, hidden) {
  const hadFocus = document.activeElement === hidden;
  hidden.hidden = true;
  shown.hidden = false;
  if (hadFocus) shown.focus();
}

// Draws every frame until `next()` is null.
export function drawLevels(next) {
  const draw = () => {
    const level = next();
    if (level === null) return;
    showLevel(level);
    requestAnimationFrame(draw);
  };
  draw();
}

export function isTyping(target) {
  return target.closest("textarea, select, input:not([type=checkbox]):not([type=range])") !== null;
}

export function onKeys(actions) {
  document.addEventListener("keydown", ({ key, target, ctrlKey, metaKey, altKey, repeat }) => {
    if (ctrlKey || metaKey || altKey || repeat || isTyping(target)) return;
    // Capitals too: Caps Lock is no reason not to be heard.
    actions[key.toLowerCase()]?.();
  });
}

function fill(box, messages) {
  box.replaceChildren(...messages.flatMap((message, i) => (i ? [" ", part(message)] : [part(message)])));
  box.hidden = !messages.length;
}

function part(message) {
  const element = document.createElement("span");
  if (typeof message === "string") setPlain(element, message);
  else setText(element, ...message);
  return element;
}

function formatWait(seconds) {
  if (seconds < 90) return ["wait.seconds", { n: Math.round(seconds) }];
  return ["wait.minutes", { n: Math.round(seconds / 60) }];
}
