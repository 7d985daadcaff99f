// The written side of the chat page: bubbles, their attachments, their play buttons.

import { setAttribute, setText } from "./i18n.js";

export class Thread {
  constructor(box) {
    this.box = box;
    this.empty = box.querySelector(".empty");
  }

  clear() {
    for (const media of this.box.querySelectorAll("[src^='blob:']")) URL.revokeObjectURL(media.src);
    this.box.replaceChildren(this.empty);
  }

  addQuestion(text, attachments) {
    const bubble = this.append("you");
    bubble.text.textContent = text;
    bubble.text.hidden = !text;
    bubble.element.append(...attachments.map(showMedia));
    this.toEnd();
    return bubble;
  }

  addAnswer() {
    const bubble = this.append("assistant");
    bubble.element.setAttribute("aria-busy", "true");
    this.toEnd();
    return bubble;
  }

  append(side) {
    this.empty.remove();
    const bubble = new Bubble(side);
    this.box.append(bubble.element);
    return bubble;
  }

  toEnd() {
    this.box.scrollTop = this.box.scrollHeight;
  }
}

class Bubble {
  constructor(side) {
    this.element = document.createElement("article");
    this.element.className = `bubble ${side}`;
    setAttribute(this.element, "data-who", `captions.${side}`);
    setAttribute(this.element, "aria-label", `captions.${side}`);
    this.text = document.createElement("p");
    this.element.append(this.text);
  }

  addText(text) {
    this.text.append(text);
  }

  // onPlay(): the button was pressed.
  offerPlayback(onPlay) {
    this.playButton = document.createElement("button");
    this.playButton.type = "button";
    this.playButton.className = "quiet play";
    this.playButton.addEventListener("click", onPlay);
    this.showPlaying(false);
    this.element.append(this.playButton);
  }

  showPlaying(isPlaying) {
    if (!this.playButton) return;
    setText(this.playButton, isPlaying ? "chat.stop_playing" : "chat.play");
    this.playButton.setAttribute("aria-pressed", String(isPlaying));
  }

  finish({ wasStopped }) {
    this.element.removeAttribute("aria-busy");
    if (!wasStopped) return;
    this.element.classList.add("cut");
    setAttribute(this.element, "data-cut", "chat.stopped");
  }

  remove() {
    this.element.remove();
  }
}

// attachments with a button to take each of them away; onRemove(attachment).
export function showAttachments(box, attachments, onRemove) {
  box.hidden = !attachments.length;
  box.replaceChildren(...attachments.map((attachment) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.className = "quiet";
    setText(button, "chat.remove", { name: attachment.name });
    button.addEventListener("click", () => onRemove(attachment));
    item.append(showMedia(attachment), button);
    return item;
  }));
}

function showMedia({ kind, name, url }) {
  const element = document.createElement(kind === "image" ? "img" : kind);
  element.src = url;
  if (kind === "image") element.alt = name;
  else {
    element.controls = true;
    element.setAttribute("aria-label", name);
  }
  return element;
}
