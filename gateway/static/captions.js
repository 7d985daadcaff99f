// The written conversation: bubbles of both sides.

import { setAttribute } from "./i18n.js";

export class Captions {
  constructor(box) {
    this.box = box;
    this.empty = box.querySelector(".empty");
    this.open = null;
    // The bubble after which the present turn stands.
    this.before = null;
  }

  clear() {
    this.box.replaceChildren(this.empty);
    this.open = null;
    this.before = null;
  }

  beginTurn() {
    this.open = null;
    this.before = this.box.querySelector(".bubble:last-of-type");
  }

  // Text of one side; what follows without a change of sides goes on in the same bubble.
  add(who, text) {
    if (this.open?.dataset.side !== who) this.start(who);
    this.open.append(needsSpace(who, this.open.textContent, text) ? ` ${text}` : text);
    this.box.scrollTop = this.box.scrollHeight;
  }

  // What the user was understood to say, where it becomes known after the answer: it stands above it.
  addQuestion(text) {
    const bubble = makeBubble("you");
    bubble.append(text);
    this.empty.remove();
    if (this.before) this.before.after(bubble);
    else this.box.prepend(bubble);
    this.box.scrollTop = this.box.scrollHeight;
  }

  start(who) {
    this.empty.remove();
    this.open = makeBubble(who);
    this.box.append(this.open);
  }

  endTurn({ interrupted = false } = {}) {
    if (interrupted && this.open?.dataset.side === "assistant") {
      this.open.classList.add("cut");
      setAttribute(this.open, "data-cut", "captions.cut");
    }
    this.open = null;
  }
}

function makeBubble(who) {
  const bubble = document.createElement("p");
  bubble.className = `bubble ${who}`;
  bubble.dataset.side = who;
  setAttribute(bubble, "data-who", `captions.${who}`);
  return bubble;
}

// Captions of the user are whole phrases. The assistant's pieces bring their own spaces, except
// where a new sentence begins. Chinese has none.
function needsSpace(who, before, after) {
  if (!before || /^\p{Script=Han}/u.test(after)) return false;
  return who === "you" || (/[.!?…]$/.test(before) && /^[\p{L}\p{N}]/u.test(after));
}
