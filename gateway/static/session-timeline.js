// The recording on one axis: both sides' sound, the camera's frames, what was said.

import { t } from "./i18n.js";
import { captionsOf, clock } from "./session-model.js";

const PX_PER_S = 20;
const MAX_PX = 16_000;
const FRAME_PX = 56;
const TICKS_S = [5, 10, 30, 60, 300, 600, 1800];
const MIN_TICK_PX = 80;
const TICK_LABEL_PX = 40;

export class Timeline {
  // seek(time): called when somebody points at a moment. urlOf(path): where an asset is.
  constructor(box, { seek, urlOf }) {
    this.box = box;
    this.urlOf = urlOf;
    this.head = element("i", "head");
    box.addEventListener("click", (event) => {
      const { left, width } = box.getBoundingClientRect();
      seek((this.length * (event.clientX - left)) / width);
    });
  }

  show({ pieces, length }) {
    this.length = length || 1;
    const px = Math.min(MAX_PX, Math.max(this.box.parentElement.clientWidth, length * PX_PER_S));
    this.box.style.width = `${px}px`;
    const tracks = [this.ticks(px)];
    tracks.push(this.blocks("you", pieces.filter(({ hasUserAudio }) => hasUserAudio)));
    tracks.push(this.blocks("assistant", pieces.filter(({ hasVoice }) => hasVoice)));
    if (pieces.some(({ pictures }) => pictures.length)) tracks.push(this.frames(pieces, px));
    tracks.push(this.words(pieces));
    this.box.replaceChildren(...tracks, this.head);
    this.moveTo(0);
  }

  // The sound of both sides as it looks; replaces the plain blocks.
  showPeaks({ left, right }) {
    for (const [who, peaks] of [["you", left], ["assistant", right]]) {
      const track = this.box.querySelector(`.track.${who}`);
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [peaks.length, 40];
      const context = canvas.getContext("2d");
      context.fillStyle = getComputedStyle(track).getPropertyValue("--block");
      peaks.forEach((peak, x) => {
        const height = Math.max(1, peak * canvas.height);
        context.fillRect(x, (canvas.height - height) / 2, 1, height);
      });
      track.classList.add("drawn");
      track.append(canvas);
    }
  }

  moveTo(time) {
    this.head.style.left = this.share(time);
    const scroller = this.box.parentElement;
    const x = (this.box.clientWidth * time) / this.length;
    if (x < scroller.scrollLeft || x > scroller.scrollLeft + scroller.clientWidth - 40) {
      scroller.scrollLeft = Math.max(0, x - 40);
    }
  }

  share(time) {
    return `${(100 * time) / this.length}%`;
  }

  place(node, at, length) {
    node.style.left = this.share(at);
    if (length) node.style.width = this.share(length);
    return node;
  }

  ticks(px) {
    const track = element("div", "track ticks");
    const step = TICKS_S.find((s) => (px * s) / this.length >= MIN_TICK_PX) ?? 3600;
    // A label at the very end would be cut off.
    const end = this.length * (1 - TICK_LABEL_PX / px);
    for (let at = 0; at < end; at += step) {
      track.append(this.place(element("span", "", clock(at)), at));
    }
    return track;
  }

  // Neighbours become one block: a long recording would have thousands.
  blocks(who, pieces) {
    const track = this.track(who, t(`session.${who}`));
    let [from, until] = [0, 0];
    const flush = () => {
      if (until > from) track.append(this.place(element("b", "block"), from, until - from));
    };
    for (const { at, length } of pieces) {
      if (at - until > 0.01) {
        flush();
        from = at;
      }
      until = at + length;
    }
    flush();
    return track;
  }

  frames(pieces, px) {
    const track = this.track("frames", t("session.frames"));
    let free = 0;
    for (const { at, pictures } of pieces) {
      const x = (px * at) / this.length;
      if (!pictures.length || x < free) continue;
      free = x + FRAME_PX;
      const image = document.createElement("img");
      image.loading = "lazy";
      image.alt = t("session.frame_at", { time: clock(at) });
      image.src = this.urlOf(pictures[0]);
      track.append(this.place(image, at));
    }
    return track;
  }

  words(pieces) {
    const track = this.track("words", t("session.captions"));
    for (const { from, until, who, text } of wholeCaptions(captionsOf(pieces))) {
      const word = this.place(element("span", who, text), from, until - from);
      word.title = text;
      track.append(word);
    }
    return track;
  }

  track(kind, label) {
    const track = element("div", `track ${kind}`);
    track.append(element("small", "name", label));
    return track;
  }
}

// Captions that grow second by second, each as one with its last text.
function wholeCaptions(captions) {
  const whole = [];
  for (const caption of captions) {
    const last = whole.at(-1);
    if (last?.who === caption.who && caption.text.startsWith(last.text)) {
      Object.assign(last, { until: caption.until, text: caption.text });
    } else {
      whole.push({ ...caption });
    }
  }
  return whole;
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}
