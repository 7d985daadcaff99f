// The conversation of the chat page, kept in memory: each question goes out with all of it.

import { ChatRequest } from "./chat-request.js";
import { Thread } from "./chat-view.js";
import { encodeSamples, joinSamples } from "./codec.js";
import { Player } from "./player.js";
import { closedBecause, hasNoEffect, problemOf, saidBy } from "./problems.js";
import { showRecording } from "./recordings.js";
import { byId, showNote, showProblem, showQueue, showState, swapButtons } from "./view.js";

export class Chat {
  constructor({ presets, voices, attachments }) {
    this.presets = presets;
    this.voices = voices;
    this.attachments = attachments;
    this.thread = new Thread(byId("thread"));
    this.player = new Player((owner) => this.showPlaying(owner));
    this.messages = [];
    this.answers = new Set();
    this.turn = null;
  }

  // Takes what stands in the form. Nothing happens while an answer is on its way, or without a question.
  async ask() {
    const text = byId("question").value.trim();
    if (this.turn || (!text && !this.attachments.list.length)) return;
    const turn = { text, attachments: this.attachments.take(), audio: [], answer: "", isOver: false };
    this.turn = turn;
    byId("question").value = "";
    showProblem();
    showNote();
    this.player.stop();
    turn.question = this.thread.addQuestion(text, turn.attachments);
    turn.bubble = this.thread.addAnswer();
    this.state("connecting");
    try {
      // Still within the click, before anything is awaited.
      if (byId("speak").checked) this.player.unlock();
      const request = await this.makeRequest(turn);
      if (!turn.isOver) this.send(turn, request);
    } catch (error) {
      if (!turn.isOver) this.fail(turn, problemOf(error));
    }
  }

  async makeRequest(turn) {
    const voice = await this.voices.samples();
    const system = await this.presets.systemContent(voice);
    turn.message = { role: "user", content: contentOf(turn) };
    const messages = [...this.messages, turn.message];
    const hasVideo = messages.some(({ content }) => content.some(({ type }) => type === "video"));
    return {
      messages: system.length ? [{ role: "system", content: system }, ...messages] : messages,
      generation: { max_new_tokens: byId("max-tokens").valueAsNumber || 256 },
      ...(hasVideo ? { omni_mode: true, image: { max_slice_nums: 1 } } : {}),
      ...(byId("speak").checked ? { tts: makeTts(voice) } : {}),
    };
  }

  send(turn, request) {
    turn.request = new ChatRequest(request);
    const on = (type, handler) => {
      turn.request.addEventListener(type, ({ detail }) => {
        if (!turn.isOver) handler(detail);
      });
    };
    on("queued", showQueue);
    on("queue_update", showQueue);
    on("queue_done", () => this.state("generating"));
    on("prefill_done", () => this.state("generating"));
    on("chunk", (chunk) => this.chunk(turn, chunk));
    on("done", (message) => this.done(turn, message));
    on("error", (message) => this.fail(turn, ...saidBy(message)));
    on("closed", (close) => this.fail(turn, closedBecause(close)));
  }

  chunk(turn, { text_delta: text, audio }) {
    this.state("speaking");
    if (text) {
      turn.answer += text;
      turn.bubble.addText(text);
      this.thread.toEnd();
    }
    if (!audio?.length) return;
    turn.audio.push(audio);
    this.player.play(turn, audio);
  }

  done(turn, { text, ignored = [], recording_session_id: recording }) {
    if (!turn.answer && text) turn.bubble.addText(text);
    turn.answer = text ?? turn.answer;
    if (ignored.length) showNote(hasNoEffect(ignored));
    showRecording(recording, "turnbased");
    this.keep(turn);
    this.finish(turn, "idle");
  }

  // The question and what there is of its answer belong to the conversation from now on.
  keep(turn, { wasStopped = false } = {}) {
    this.messages.push(turn.message, {
      role: "assistant",
      content: [{ type: "text", text: turn.answer }],
    });
    this.answers.add(turn);
    turn.bubble.finish({ wasStopped });
    if (!turn.audio.length) return;
    turn.bubble.offerPlayback(() => this.togglePlayback(turn));
    turn.bubble.showPlaying(this.player.owner === turn);
    this.thread.toEnd();
  }

  // Closing the connection ends the work on the answer.
  stop() {
    const { turn } = this;
    if (!turn) return;
    this.player.stop();
    if (turn.answer) {
      this.keep(turn, { wasStopped: true });
      this.finish(turn, "idle");
    } else this.takeBack(turn, "idle");
  }

  fail(turn, ...messages) {
    showProblem(...messages);
    if (turn.answer) {
      this.keep(turn, { wasStopped: true });
      this.finish(turn, "failed");
    } else this.takeBack(turn, "failed");
  }

  // A question without an answer goes back into the form, to be asked again.
  takeBack(turn, state) {
    turn.question.remove();
    turn.bubble.remove();
    this.attachments.putBack(turn.attachments);
    if (!byId("question").value) byId("question").value = turn.text;
    this.finish(turn, state);
  }

  finish(turn, state) {
    turn.isOver = true;
    turn.request?.close();
    if (this.turn === turn) this.turn = null;
    this.state(state);
  }

  startAnew() {
    this.stop();
    this.player.stop();
    this.attachments.clear();
    this.messages = [];
    this.answers.clear();
    this.thread.clear();
    byId("question").value = "";
    byId("question").focus();
    showProblem();
    showNote();
    showRecording(null);
    this.state("idle");
  }

  togglePlayback(turn) {
    if (this.player.owner === turn) {
      this.player.stop();
      return;
    }
    this.player.unlock();
    this.player.play(turn, joinSamples(turn.audio));
  }

  showPlaying(owner) {
    for (const turn of this.answers) turn.bubble.showPlaying(turn === owner);
  }

  state(name) {
    showState(name, name === "speaking" ? "chat.answering" : undefined);
    const [shown, hidden] = this.turn ? ["stop", "send"] : ["send", "stop"];
    if (byId(shown).hidden) swapButtons(byId(shown), byId(hidden));
  }
}

function contentOf({ text, attachments }) {
  const items = attachments.map(({ kind, data }) => ({ type: kind, data }));
  return text ? [...items, { type: "text", text }] : items;
}

function makeTts(voice) {
  return voice ? { enabled: true, ref_audio_data: encodeSamples(voice) } : { enabled: true };
}
