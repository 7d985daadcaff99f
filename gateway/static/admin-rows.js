// Tables whose rows stay what they are while their cells change: a button that has the keyboard's
// focus keeps it, and a screen reader its place.

import { t } from "./i18n.js";

export class Rows {
  // columns: [{ title: key, cell: (item) => string | Node, live?: bool }]; a cell that is a Node
  // is made once per row, and again only when `version(item)` changes.
  // keyOf: what tells one item from another. empty: key of what stands there without items.
  constructor(box, { columns, keyOf, empty }) {
    this.box = box;
    this.columns = columns;
    this.keyOf = keyOf;
    this.empty = empty;
    this.rows = new Map();
    this.items = null;
  }

  show(items) {
    this.items = items;
    if (!items.length) {
      this.say(t(this.empty));
      return;
    }
    if (!this.body) this.build();
    const keys = new Set(items.map(this.keyOf));
    for (const [key, row] of this.rows) {
      if (!keys.has(key)) {
        row.remove();
        this.rows.delete(key);
      }
    }
    items.forEach((item, at) => {
      const row = this.fill(item);
      if (this.body.children[at] !== row) this.body.insertBefore(row, this.body.children[at] ?? null);
    });
  }

  // A sentence in place of the table.
  say(text) {
    this.body = null;
    this.rows.clear();
    if (this.box.textContent === text && this.box.querySelector(".none")) return;
    const line = document.createElement("p");
    line.className = "none";
    line.textContent = text;
    this.box.replaceChildren(line);
  }

  // Everything anew, for another language.
  again() {
    this.body = null;
    this.rows.clear();
    if (this.items) this.show(this.items);
  }

  build() {
    const table = document.createElement("table");
    table.setAttribute("aria-labelledby", this.box.parentElement.getAttribute("aria-labelledby"));
    const head = table.createTHead().insertRow();
    for (const { title } of this.columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = t(title);
      head.append(cell);
    }
    this.body = table.createTBody();
    this.rows.clear();
    this.box.replaceChildren(table);
  }

  fill(item) {
    const key = this.keyOf(item);
    let row = this.rows.get(key);
    if (!row) {
      row = document.createElement("tr");
      for (const { title } of this.columns) row.insertCell().dataset.title = t(title);
      this.rows.set(key, row);
    }
    this.columns.forEach(({ cell }, at) => {
      const target = row.cells[at];
      const content = cell(item, target);
      if (typeof content === "string") {
        if (target.textContent !== content) target.textContent = content;
      } else if (content) {
        target.replaceChildren(content);
      }
    });
    return row;
  }
}

// A cell's button, made at the first sight of its row. `label` names it for those who cannot see
// the row; `act` gets the item as it was then.
export function button(target, { text, label, act, kind = "" }) {
  if (target.firstElementChild) return null;
  const element = document.createElement("button");
  element.type = "button";
  element.className = kind;
  element.textContent = text;
  element.setAttribute("aria-label", label);
  element.addEventListener("click", () => act(element));
  return element;
}

export function link(target, { text, href }) {
  if (target.firstElementChild) return null;
  const element = document.createElement("a");
  element.href = href;
  element.textContent = text;
  return element;
}
