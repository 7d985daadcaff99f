// The language of the pages: English or Chinese.
//
// A page registers its texts, `register({ en: { key: text }, zh: { key: text } })`, then calls
// `applyTranslations()`. In HTML `data-i18n="key"` is an element's text and
// `data-i18n-attr="aria-label:key; title:key"` its attributes; `{name}` in a text stands for a value.
// What a script shows goes through `setText` and `setAttribute`, so that it changes too when the
// language does. `data-language-switch` makes a button the switch.
//
// `?lang=` wins, then the last choice on this browser, then the service's default (`--lang`), then
// the browser's own language.

import { frontendDefaults } from "./defaults.js";
import { COMMON } from "./texts-common.js";

const STORE = "omni.lang";
const LANGUAGES = ["en", "zh"];

const texts = { en: {}, zh: {} };
const listeners = new Set();
let current = "en";

export function register(dictionaries) {
  for (const code of LANGUAGES) Object.assign(texts[code], dictionaries[code]);
}

export function language() {
  return current;
}

// The text of a key in the present language; values: what its {names} stand for. A value may be a
// text of its own, [key, values], or a list of such, so that it too changes with the language.
export function t(key, values = {}) {
  const text = texts[current][key] ?? texts.en[key] ?? key;
  return text.replace(/\{(\w+)\}/g, (whole, name) => said(values[name] ?? whole));
}

function said(value) {
  if (!Array.isArray(value)) return String(value);
  return Array.isArray(value[0]) ? value.map(said).join(", ") : t(...value);
}

export function setText(element, key, values) {
  const text = t(key, values);
  // A live region that gets the same text again would be read out again.
  if (element.dataset.i18n === key && element.textContent === text) return;
  element.dataset.i18n = key;
  if (values) element.dataset.i18nValues = JSON.stringify(values);
  else delete element.dataset.i18nValues;
  element.textContent = text;
}

// A text that is the same in every language: a name, or what the service says.
export function setPlain(element, text) {
  delete element.dataset.i18n;
  delete element.dataset.i18nValues;
  element.textContent = text;
}

export function setAttribute(element, attribute, key) {
  const others = attributesOf(element).filter(([name]) => name !== attribute);
  element.dataset.i18nAttr = [...others, [attribute, key]].map((pair) => pair.join(":")).join("; ");
  element.setAttribute(attribute, t(key));
}

export function applyTranslations(root = document) {
  for (const element of root.querySelectorAll("[data-i18n]")) {
    const values = JSON.parse(element.dataset.i18nValues ?? "{}");
    element.textContent = t(element.dataset.i18n, values);
  }
  for (const element of root.querySelectorAll("[data-i18n-attr]")) {
    for (const [attribute, key] of attributesOf(element)) element.setAttribute(attribute, t(key));
  }
  for (const button of root.querySelectorAll("[data-language-switch]")) mountSwitch(button);
}

// Changes the page at once and remembers the choice.
export function setLanguage(code) {
  if (!LANGUAGES.includes(code)) return;
  use(code);
  remember(code);
  applyTranslations();
  for (const listener of listeners) listener(code);
}

export function onLanguageChange(listener) {
  listeners.add(listener);
}

function attributesOf(element) {
  return (element.dataset.i18nAttr ?? "")
    .split(";")
    .map((pair) => pair.split(":").map((word) => word.trim()))
    .filter((pair) => pair.length === 2);
}

function mountSwitch(button) {
  const other = current === "zh" ? "en" : "zh";
  button.textContent = other === "zh" ? "中文" : "English";
  button.lang = other;
  button.onclick = () => setLanguage(other);
}

function use(code) {
  current = code;
  document.documentElement.lang = code === "zh" ? "zh-CN" : "en";
}

// Storage may be switched off: then the choice holds for this page only.
function remember(code) {
  try {
    localStorage.setItem(STORE, code);
  } catch (error) {
    console.info("the language is not remembered:", error.message);
  }
}

function remembered() {
  try {
    return localStorage.getItem(STORE);
  } catch {
    return null;
  }
}

async function firstLanguage() {
  const asked = new URLSearchParams(location.search).get("lang")?.slice(0, 2).toLowerCase();
  if (LANGUAGES.includes(asked)) {
    remember(asked);
    return asked;
  }
  const last = remembered();
  if (LANGUAGES.includes(last)) return last;
  const { default_lang: served } = await frontendDefaults();
  if (LANGUAGES.includes(served)) return served;
  return navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

register(COMMON);
use(await firstLanguage());
