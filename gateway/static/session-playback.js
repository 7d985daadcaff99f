// Plays a recording: its merged replay, or where there is none its clips one after the other.

import { t } from "./i18n.js";

// Events: "time", while it plays and after a jump.
class Playback extends EventTarget {
  constructor(media) {
    super();
    this.media = media;
    media.controls = true;
    media.preload = "metadata";
    media.setAttribute("aria-label", t("session.replay"));
    media.addEventListener("play", () => this.follow());
    for (const name of ["seeked", "pause", "timeupdate"]) media.addEventListener(name, () => this.tell());
  }

  follow() {
    this.tell();
    if (!this.media.paused) requestAnimationFrame(() => this.follow());
  }

  tell() {
    this.dispatchEvent(new Event("time"));
  }
}

export class ReplayPlayback extends Playback {
  constructor(url, isVideo) {
    super(document.createElement(isVideo ? "video" : "audio"));
    this.media.src = url;
    if (isVideo) this.media.playsInline = true;
  }

  get time() {
    return this.media.currentTime;
  }

  playFrom(time) {
    this.media.currentTime = time;
    return this.media.play();
  }
}

export class ClipPlayback extends Playback {
  // pieces: those of the recording; urlOf(path): where a clip is.
  constructor(pieces, urlOf) {
    super(document.createElement("audio"));
    this.clips = pieces.flatMap(({ at, clips }) => clips.map((path) => ({ at, url: urlOf(path) })));
    this.current = 0;
    this.media.addEventListener("ended", () => this.playClip(this.current + 1));
    if (this.clips.length) this.media.src = this.clips[0].url;
  }

  get time() {
    return this.clips.length ? this.clips[this.current].at + this.media.currentTime : 0;
  }

  playFrom(time) {
    const first = this.clips.findIndex(({ at }) => at >= time - 1e-6);
    return this.playClip(first);
  }

  async playClip(index) {
    if (!this.clips[index]) return;
    this.current = index;
    this.media.src = this.clips[index].url;
    await this.media.play();
  }
}
