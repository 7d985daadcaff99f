"""Duplex sessions: every feed, decision, speech token and sample of every unit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from shared.protocol import DuplexSettings
from tests.golden.compare import PROB_ABS, Trace, clip, image, wave
from tests.golden.driver import Played, run_program
from tests.golden.loaded import load_model
from tests.golden.replay_llm_tts import check_top
from worker.models.contract import Prompt, Unit, UnitResult
from worker.models.minicpmo45 import ops, unit_input
from worker.models.minicpmo45.duplex import Duplex, sampling_of
from worker.models.minicpmo45.model import MiniCpmO45
from worker.models.minicpmo45.window import WindowSettings
from worker.nn.decoder import KvCache
from worker.nn.speech import SpeechHead, SpeechTrace
from worker.nn.speech_request import SpeechRequest

FIRST_WAVE = {
    "duplex_greedy_audio": 0,
    "duplex_greedy_omni": 3,
    "duplex_forced": 0,
    "duplex_window_basic": 5,
    "duplex_window_context": 2,
    "duplex_sampled": 1,
}
"""Number of the source's second that unit 0 hears (README, 4.4)."""

SETTINGS = {
    "decode_mode": "decode_mode",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "listen_prob_scale": "listen_prob_scale",
    "listen_top_k": "listen_top_k",
    "text_repetition_penalty": "text_repetition_penalty",
    "text_repetition_window_size": "text_repetition_window_size",
    "length_penalty": "length_penalty",
    "max_new_speak_tokens_per_chunk": "max_new_speak_tokens_per_chunk",
}
"""Option of the original's generate call, or of its constructor -> setting of ours."""

FIXED_SETTINGS = {
    "force_listen_count": "force_listen_count",
    "tts_temperature": "tts_temperature",
}
"""Option of the original's constructor that no call changes -> setting of ours."""

WINDOW = {
    "sliding_window_mode": "mode",
    "basic_window_high_tokens": "high_tokens",
    "basic_window_low_tokens": "low_tokens",
    "context_max_units": "max_units",
    "context_previous_max_tokens": "previous_max_tokens",
}


MANY_ROWS = 66_000


@dataclasses.dataclass(frozen=True, slots=True)
class Roomy(WindowSettings):
    """A window with the original's marks, whose cache holds more: the original has no bounds."""

    @property
    def n_positions(self) -> int:
        return 16_384


class RecordedDraws:
    """The uniforms that the trace recorded for one unit; greedy sessions have none."""

    def __init__(self, text: Sequence[Sequence[float]], codes: Sequence[float]) -> None:
        self._text = list(text)
        self._codes = list(codes)

    def text(self) -> tuple[float, float]:
        if not self._text:
            return 0.0, 0.0
        first, *second = self._text.pop(0)
        return first, second[0] if second else 0.0

    def codes(self, n: int) -> Sequence[float]:
        return [*self._codes, *[0.0] * n][:n]


def replay(trace: Trace, folder: Path) -> None:
    is_causal = trace.name == "duplex_forced"
    config = trace.given("config")
    unknown = set(config) - set(WINDOW) - set(SETTINGS) - set(FIXED_SETTINGS)
    assert not unknown, f"options without a setting of ours: {unknown}"
    window = {WINDOW[key]: value for key, value in config.items() if key in WINDOW}
    model = load_model(folder, Roomy(**({"mode": "off"} | window)), is_causal=is_causal)
    state = model.new_state(0)
    settings = {
        ours: config[theirs]
        for theirs, ours in (SETTINGS | FIXED_SETTINGS).items()
        if theirs in config
    }
    is_sampled = trace.given("draw") == "uniform"
    if "note" in trace.fields:
        trace.given("note")
    _prepare(trace, folder, model, state, DuplexSettings(**settings))
    state.code_sampling = dataclasses.replace(state.code_sampling, is_greedy=not is_sampled)
    replayed = Session(trace, model, state, settings)
    sounds = _Sounds(trace, folder)
    with mock.patch.object(unit_input, "MAX_PICTURE_ROWS", MANY_ROWS):
        for index in range(len(trace.fields["units"])):
            replayed.play(index, sounds)
    replayed.check_totals()


def _prepare(
    trace: Trace, folder: Path, model: MiniCpmO45, state: Duplex, settings: DuplexSettings
) -> None:
    system = re.fullmatch(
        r"<\|im_start\|>system\n(.*)\n<\|audio_start\|>", trace.given("prepare.prefix"), re.S
    )
    assert system is not None
    n_samples = trace.given("prepare.ref_samples")
    voice = clip(_source(folder), 0, n_samples) if n_samples else np.zeros(0, np.float32)
    model.default_heard = voice
    none = np.zeros(0, np.float32)
    played = run_program(model, model.prepare(state, Prompt(system[1], settings, none, none)))
    feeds = [ran.op.payload for ran in played.of(ops.PREFILL)]
    pieces = [piece for feed in feeds for piece in feed.pieces]
    trace.equal("prepare.feeds", _described(pieces, 0))
    trace.equal("prepare.suffix", model.tokenizer.decode(pieces[-1], skip_special=False))
    trace.equal("prepare.cache_len", state.n_tokens)


def _source(folder: Path) -> np.ndarray:
    return Trace("audio", folder).take("base_pcm").numpy()


class WatchedSpeech:
    """The speech head, and what its last run went through."""

    def __init__(self, head: SpeechHead) -> None:
        self.head = head
        self.trace = SpeechTrace()

    def speak(self, cache: KvCache, requests: Sequence[SpeechRequest]) -> Any:
        self.trace = SpeechTrace()
        return self.head.speak(cache, requests, self.trace)


class _Sounds:
    """The audio and the frames of each unit."""

    def __init__(self, trace: Trace, folder: Path) -> None:
        self._trace = trace
        self._source = _source(folder)
        self._gains = Trace("audio", folder).given("gains")

    def unit(self, k: int) -> tuple[np.ndarray, tuple[np.ndarray, ...], Any]:
        trace = self._trace
        sizes = trace.fields["units"][k]["frames"]
        limit = trace.given(f"units[{k}].max_slice_nums")
        if "inputs" in trace.fields:
            given = trace.given(f"inputs[{k}]")
            frames = [tuple(frame) for frame in given["frames"]]
            number, limit = given["wave"], given["max_slice_nums"]
        else:
            frames = [(width, height, k) for width, height in sizes]
            number = k + FIRST_WAVE[trace.name]
        trace.equal(f"units[{k}].frames", [list(frame[:2]) for frame in frames])
        n_samples = trace.given(f"units[{k}].samples")
        silent = number is None or not n_samples
        audio = np.zeros(0, np.float32) if silent else wave(self._source, self._gains, number)
        limits = tuple(limit) if isinstance(limit, list) else limit
        return audio, tuple(image(*frame) for frame in frames), limits


class Session:
    """Plays units one after the other and checks each."""

    def __init__(
        self, trace: Trace, model: MiniCpmO45, state: Duplex, settings: dict[str, Any]
    ) -> None:
        self.trace, self.model, self.state = trace, model, state
        self.settings = settings
        self.speech = WatchedSpeech(model.parts.speech)
        model.parts = dataclasses.replace(model.parts, speech=self.speech)
        self.total: list[int] = []
        self.decided: list[int] = []
        self.schema = ""

    def play(self, k: int, sounds: _Sounds) -> None:
        trace, state, model = self.trace, self.state, self.model
        at = f"units[{k}]"
        options = trace.given(f"{at}.options")
        self._set_options(options)
        scripted = trace.given(f"{at}.scripted")
        state.script = iter(scripted) if scripted else None
        tts = trace.fields["units"][k].get("tts") or {}
        uniforms = trace.fields["units"][k].get("text_uniforms") or []
        state.draws = RecordedDraws(uniforms, tts.get("uniforms") or [])
        audio, frames, limits = sounds.unit(k)
        forced = bool(options.get("force_listen_override"))
        before, n_before, start_pos = state.pending, state.context_tokens, state.speech_position
        unit = Unit(k, audio, frames, forced, limits)
        played = run_program(model, model.unit(state, unit))
        (result,) = played.emitted
        self._check_feeds(k, played, before, n_before, forced)
        self._check_decision(k, played, result, scripted)
        self._check_speech(k, played, result, start_pos)
        self._check_state(k)

    def _set_options(self, options: dict[str, Any]) -> None:
        unknown = set(options) - set(SETTINGS) - {"force_listen_override"}
        assert not unknown, f"options without a setting of ours: {unknown}"
        given = {SETTINGS[key]: value for key, value in options.items() if key in SETTINGS}
        settings = DuplexSettings(**(self.settings | given))
        self.state.settings = settings
        self.state.sampling = sampling_of(settings)

    # ---- what entered the language model

    def _check_feeds(
        self, k: int, played: Played, before: tuple[int, ...], n_before: int, forced: bool
    ) -> None:
        trace, at, ids = self.trace, f"units[{k}]", self.model.tokenizer.ids
        steps = [ran.op.payload.token for ran in played.of(ops.DECODE)]
        prefills = [ran.op.payload for ran in played.of(ops.PREFILL)]
        rows = [piece for feed in prefills[: self._n_unit_feeds(prefills)] for piece in feed.pieces]
        assert tuple(rows[0][: len(before)]) == before, "what closed the last unit comes first"
        rows[0] = rows[0][len(before) :]
        trace.equal(f"{at}.prefill_ok", True)
        self._same_rows(f"{at}.prefill_feeds", rows, n_before)
        n_prefill = n_before + sum(map(len, rows))
        trace.equal(f"{at}.cache_prefill", n_prefill)
        closing = self._closing(played)
        said = [*steps, *closing[:-2]]
        self._same_rows(f"{at}.generate_feeds", [tuple(said)], n_prefill)
        trace.equal(f"{at}.cache_generate", n_prefill + len(said))
        self._same_rows(f"{at}.finalize_feeds", [closing[-2:]], n_prefill + len(said))
        trace.equal(f"{at}.terminator", closing[-2])
        trace.equal(f"{at}.cache_finalize", self.state.context_tokens)
        self.total += [*said, *closing[-2:]]
        self.decided += [token for token in steps if token != ids.speak]
        self.schema += self._schema(rows, [*said, *closing[-2:]])

    def _n_unit_feeds(self, prefills: list[ops.Feed]) -> int:
        """Feeds after the unit's own belong to the window; they are not recorded there."""
        ids = self.model.tokenizer.ids
        for index, feed in enumerate(prefills):
            tokens = [token for piece in feed.pieces if isinstance(piece, tuple) for token in piece]
            if index and tokens[-1:] in ([ids.unit_end], [ids.im_end]):
                return index
        return len(prefills)

    def _closing(self, played: Played) -> tuple[int, ...]:
        """The tokens that close the unit: still pending, or fed already for the window's sake."""
        if self.state.pending:
            return self.state.pending
        prefills = [ran.op.payload for ran in played.of(ops.PREFILL)]
        return tuple(prefills[self._n_unit_feeds(prefills)].pieces[0])

    def _same_rows(self, path: str, rows: list[Any], start: int) -> None:
        """Merged calls are fine: compare what stands at each position."""
        theirs = _positions(self.trace.expected(path))
        ours = _positions(_described(rows, start))
        if ours != theirs:
            self.trace.fail(f"{path}: {ours}, expected {theirs}")

    def _schema(self, rows: list[Any], tokens: list[int]) -> str:
        ids, text, last = self.model.tokenizer.ids, "", None
        names = {ids.image_start: "img", ids.slice_start: "img"}
        for piece in rows:
            if isinstance(piece, Tensor):
                text += f"[{names.get(last, 'audio')}_embed_{len(piece)}]"
            else:
                text += self.model.tokenizer.decode(piece, skip_special=False)
                last = piece[-1] if piece else last
        return text + self.model.tokenizer.decode(tokens, skip_special=False)

    # ---- what was decided

    def _check_decision(
        self, k: int, played: Played, result: UnitResult, scripted: list[int] | None
    ) -> None:
        trace, at, ids = self.trace, f"units[{k}]", self.model.tokenizer.ids
        prefills = played.of(ops.PREFILL)
        unit_feed = prefills[self._n_unit_feeds([ran.op.payload for ran in prefills]) - 1]
        decodes = played.of(ops.DECODE)
        trace.equal(f"{at}.unit", k)
        if trace.expected(f"{at}.pending"):
            trace.check(f"u{k:02d}.pending_logits", unit_feed.logits)
        decided = trace.expected(f"{at}.decoded")
        chosen = [ran.result.token for ran in (unit_feed, *decodes)]
        chosen = [token for token in chosen if token is not None]
        if scripted is not None:
            n_left = len(list(self.state.script or ()))
            chosen = scripted[: len(scripted) - n_left]
        if chosen != decided:
            trace.fail(f"{at}.decoded: {chosen}, expected {decided}")
        if trace.has(f"u{k:02d}.decision_logits"):
            logits = torch.stack([ran.logits for ran in (unit_feed, *decodes)])
            trace.check(f"u{k:02d}.decision_logits", logits[: len(decided)])
        listens = result.is_listen
        words = [ran.op.payload.token for ran in decodes[1:]]
        trace.equal(f"{at}.ids_to_tts", words)
        if trace.has(f"u{k:02d}.tts_hidden"):
            hidden = torch.stack([ran.result.hidden for ran in decodes[1:]])
            trace.check(f"u{k:02d}.tts_hidden", hidden)
        trace.equal(f"{at}.text", result.text)
        trace.equal(f"{at}.is_listen", listens)
        trace.equal(f"{at}.end_of_turn", result.end_of_turn)
        trace.equal(f"{at}.current_time", self.state.n_units)
        trace.equal(f"{at}.n_tokens", len(words))
        last = decodes[-1].op.payload.token if decodes else None
        silent = listens and last == ids.turn_eos and bool(words)
        trace.equal(f"{at}.quirk_turn_eos_then_listen", silent)
        if "min_decision_gap" in trace.fields["units"][k]:
            trace.given(f"{at}.min_decision_gap")
        if "text_uniforms" in trace.fields["units"][k]:
            trace.given(f"{at}.text_uniforms")

    # ---- what was spoken

    def _check_speech(self, k: int, played: Played, result: UnitResult, start_pos: int) -> None:
        trace, at = self.trace, f"units[{k}]"
        spoken = played.of(ops.SPEAK)
        codes = list(spoken[0].result.codes) if spoken else []
        trace.equal(f"{at}.n_tts_tokens", len(codes))
        if spoken:
            request = spoken[0].op.payload
            trace.equal(f"{at}.tts.start_pos", request.start)
            trace.equal(f"{at}.tts.min_new", request.min_new)
            trace.equal(f"{at}.tts.codes", codes)
            trace.given(f"{at}.tts.uniforms")
            if "min_margin" in trace.fields["units"][k]["tts"]:
                trace.given(f"{at}.tts.min_margin")
            self._check_draws(k, request)
        calls = [ran.op.payload for ran in played.of(ops.VOCODE)]
        trace.equal(
            f"{at}.token2wav_calls", [{"n": len(c.codes), "last": c.is_last} for c in calls]
        )
        # The original fills a unit without sound with one second of zeros.
        trace.equal(f"{at}.samples_out", len(result.audio) or 24_000)
        if trace.has(f"u{k:02d}.wav_i16"):
            trace.check_wave(f"u{k:02d}.wav_i16", result.audio, scale=32768.0)
        kept = trace.expected(f"{at}.quirk_barge_in_keeps_tts_state")
        if kept and self.state.speech_position != start_pos:
            trace.fail(f"{at}: the barge-in moved the speech position")

    def _check_draws(self, k: int, request: Any) -> None:
        """The draws of the unit, the discarded last one among them, and their probabilities."""
        trace, at, name = self.trace, f"units[{k}]", f"u{k:02d}"
        if trace.has(f"{name}.tts_cond"):
            rows = self.speech.head.inputs([request], request.n_inputs)[0]
            trace.check(f"{name}.tts_cond", rows)
        drawn = [int(codes[0]) for codes in self.speech.trace.drawn]
        end_code = self.speech.head.config.end_code
        n_drawn = drawn.index(end_code) + 1 if end_code in drawn else len(drawn)
        trace.equal(f"{at}.tts.draws", drawn[:n_drawn])
        if trace.has(f"{name}.tts_prob_top"):
            ours = torch.cat(self.speech.trace.probabilities[:n_drawn])
            check_top(trace, f"{name}.tts_prob_top", ours, PROB_ABS)

    # ---- what is kept

    def _check_state(self, k: int) -> None:
        trace, state, at = self.trace, self.state, f"units[{k}]"
        trace.equal(f"{at}.turn_ended", not state.turn_is_open)
        trace.equal(f"{at}.token2wav_buffer", len(state.codes.waiting))
        trace.equal(f"{at}.generated_tokens_len", len(state.said))
        trace.equal(f"{at}.tts_start_pos_after", state.speech_position)
        trace.equal(f"{at}.tts_kv_after", state.speech_position)
        window = state.window
        carried = window.previous[len(window.marker) :]
        trace.equal(
            f"{at}.window",
            {
                "units": [unit.index for unit in window.units],
                "unit_lengths": [unit.n_tokens for unit in window.units],
                "preserve": window.n_preserved,
                "offset": window.n_dropped_tokens,
                "previous_ids": list(window.previous),
                "previous_text": self.model.tokenizer.decode(carried),
                "previous_len": len(window.previous),
            },
        )

    def check_totals(self) -> None:
        trace = self.trace
        trace.equal("total_ids", self.total)
        trace.equal("generated_tokens", self.state.said)
        trace.equal("schema", self.schema)
        trace.equal("res_text", self.model.tokenizer.decode(self.decided, skip_special=False))


def _described(pieces: Sequence[Any], start: int) -> list[dict[str, Any]]:
    """Pieces as the traces describe feeds."""
    feeds: list[dict[str, Any]] = []
    for piece in pieces:
        if not len(piece):
            continue
        key, value = ("embeds", len(piece)) if isinstance(piece, Tensor) else ("ids", list(piece))
        feeds.append({"at": start, key: value})
        start += len(piece)
    return feeds


def _positions(feeds: Sequence[dict[str, Any]]) -> list[Any]:
    """What stands at each position: an id, or "row" for an embedding; the first position first."""

    def rows() -> Iterator[Any]:
        for feed in feeds:
            yield from feed["ids"] if "ids" in feed else ["row"] * feed["embeds"]

    return [feeds[0]["at"] if feeds else None, *rows()]
