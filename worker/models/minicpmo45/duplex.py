"""Full duplex: a prompt, then one unit a second, each with its decision to listen or to speak.

A unit's context is `<unit>`, its frames, its second of audio, the decision. What closes a unit
(terminator, `</unit>`) is fed together with the next one, which saves one pass over the weights;
where the window has to be cut it is fed at once, after the result has gone out.

Follows the duplex algorithm of MiniCPM-o 4.5; `compat.py` names the quirks that may be chosen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import BadImage, BadMessage
from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from shared.protocol import DuplexSettings, Timings
from worker.engine.contract import Emit, Op, Program
from worker.models.contract import PreparedInfo, Prompt, Unit, UnitResult
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.draws import Draws, SeededDraws
from worker.models.minicpmo45.feeding import feed, n_rows
from worker.models.minicpmo45.images import plan_slices
from worker.models.minicpmo45.ops import Choice, Fed, Piece, PreparedInput
from worker.models.minicpmo45.speaking import NO_SAMPLES, CodeBuffer, through_int16
from worker.models.minicpmo45.window import MAX_UNIT_TOKENS, KeptUnit, Window
from worker.nn.code_sampling import CodeSampling
from worker.nn.mel import FRAMES_PER_S, StreamingMel
from worker.nn.speech import SpeechRequest
from worker.nn.text_sampling import DuplexSampling

if TYPE_CHECKING:
    from worker.models.minicpmo45.model import MiniCpmO45

DEFAULT_SYSTEM_PROMPT: Final = "Streaming Omni Conversation."
CARRIED_WORDS_MARKER: Final = "\n\nprevious: "
MAX_UNIT_CHARS: Final = 28
"""A unit's text ends before it has this many characters: about what one second can say."""
MAX_NEW_TOKENS: Final = 20
SPEECH_STEPS: Final = 26
"""Draws of speech tokens in a unit; the last one's token is never used, so 25 = one second."""
MAX_SAID: Final = 4096
"""Ids that the text penalty may look back at."""
MAX_UNIT_SLICES: Final = 14
"""Of all frames of a unit: 66 positions each, so that a unit stays below `MAX_UNIT_TOKENS`."""
MAX_PROMPT_SHARE: Final = 0.5
"""Largest part of the window that the prompt may take."""
IGNORED: Final = frozenset({"ls_mode"})
"""Settings that mean nothing to this model; named in `prepared.ignored`."""


@dataclass(slots=True)
class Duplex:
    """All state of one session besides what its slot's caches hold."""

    slot: int
    window: Window
    draws: Draws
    clock: Callable[[], float] = time.monotonic
    """The engine's."""
    mel: StreamingMel = field(default_factory=StreamingMel)
    settings: DuplexSettings = field(default_factory=DuplexSettings)
    sampling: DuplexSampling = field(default_factory=DuplexSampling)
    code_sampling: CodeSampling = field(default_factory=CodeSampling)
    script: Iterator[int] | None = None
    """Decided ids are replaced by these, as long as there are any: benchmarks on random weights,
    replays."""
    n_tokens: int = 0
    """Filled positions of the context."""
    pending: tuple[int, ...] = ()
    """Tokens that belong to the context and are fed with the next unit."""
    audio_past: int = 0
    """Frames in the audio encoder's cache."""
    n_units: int = 0
    turn_is_open: bool = False
    spoke_last: bool = False
    """The last unit said something, which the client may still be playing."""
    said: list[int] = field(default_factory=list)
    """Ids of the session that the text penalty may look at, latest last."""
    speech_position: int = 0
    """Filled positions of the speech head's cache; 0 at the start of a turn."""
    codes: CodeBuffer = field(default_factory=CodeBuffer)
    voice: Any = None
    turn_is_fresh: bool = True
    """The vocoder has not made anything of this turn yet."""
    interrupt_asked: bool = False

    @property
    def context_tokens(self) -> int:
        return self.n_tokens + len(self.pending)

    def reset_speech(self, keeps_position: bool = False) -> None:
        """What is said next starts from the voice alone."""
        self.codes = CodeBuffer()
        self.turn_is_fresh = True
        if not keeps_position:
            self.speech_position = 0


@dataclass(frozen=True, slots=True)
class TakenIn:
    """A unit's input as the language model sees it."""

    pieces: tuple[Piece, ...]
    n_slices: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What a unit's decode came to."""

    is_listen: bool
    was_interrupted: bool = False
    words: tuple[int, ...] = ()
    """What the speech head is given."""
    states: tuple[Tensor, ...] = ()
    """Hidden state of each word, `[D]`."""
    ends_turn: bool = False


def new_state(model: MiniCpmO45, slot: int, seed: int) -> Duplex:
    return Duplex(slot, Window(model.window, model.n_positions), SeededDraws(seed), model.clock)


# ---- prompt


def prepare(model: MiniCpmO45, state: Duplex, prompt: Prompt) -> Program:
    """Feed the prompt and learn the voice; the session starts anew.

    Raises:
        BadMessage: the prompt leaves too little room for a conversation.
        VoiceUnavailable: the client brought a voice, and the files that encode it are missing.
    """
    ids = model.tokenizer.ids
    system = prompt.system_prompt or DEFAULT_SYSTEM_PROMPT
    prefix = model.tokenizer.encode(f"<|im_start|>system\n{system}\n<|audio_start|>")
    suffix = (ids.audio_end, ids.im_end)
    heard = prompt.reference_voice if prompt.reference_voice.size else model.default_heard
    pieces: list[Piece] = [tuple(prefix)]
    if heard.size:
        pieces.append((yield Op(ops.ENCODE_CLIP, ops.ClipRequest(heard, is_chunked=True))))
    pieces.append(suffix)
    n_prompt = n_rows(pieces)
    limit = int(MAX_PROMPT_SHARE * (model.n_positions - MAX_UNIT_TOKENS))
    if n_prompt > limit:
        raise BadMessage(f"prompt and voice have {n_prompt} tokens, at most {limit}: shorten them")
    brought = [v for v in (prompt.tts_reference_voice, prompt.reference_voice) if v.size]
    voice = yield from model.learn_voice(brought[0] if brought else None)
    _start_anew(model, state, prompt.settings)
    state.voice = voice
    yield from feed(state.slot, 0, pieces, state.clock())
    state.n_tokens = n_prompt
    state.window.n_prefix, state.window.suffix = n_prompt - len(suffix), suffix
    return PreparedInfo(
        prompt_chars=len(prompt.system_prompt),
        prompt_tokens=n_prompt,
        ignored=tuple(sorted(prompt.settings.said() & IGNORED)),
        voice="client" if brought else model.voice_name,
        languages=("en", "zh"),
    )


def _start_anew(model: MiniCpmO45, state: Duplex, settings: DuplexSettings) -> None:
    state.window = Window(model.window, model.n_positions)
    state.window.marker = tuple(model.tokenizer.encode(CARRIED_WORDS_MARKER))
    state.mel = StreamingMel()
    state.settings, state.sampling = settings, sampling_of(settings)
    state.code_sampling = model.code_sampling
    if settings.tts_temperature is not None:
        state.code_sampling = replace(model.code_sampling, temperature=settings.tts_temperature)
    state.n_tokens, state.pending, state.audio_past, state.n_units = 0, (), 0, 0
    state.turn_is_open = state.spoke_last = state.interrupt_asked = False
    state.said = []
    state.reset_speech()


def sampling_of(settings: DuplexSettings) -> DuplexSampling:
    """The model's defaults, and what the client said on top of them."""
    said = {
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "repetition_penalty": settings.text_repetition_penalty,
        "window": settings.text_repetition_window_size,
        "length_penalty": settings.length_penalty,
        "listen_prob_scale": settings.listen_prob_scale,
        "listen_top_k": settings.listen_top_k,
    }
    given: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    # A temperature of zero means the most likely token, as everywhere.
    is_greedy = settings.decode_mode == "greedy" or given.get("temperature") == 0
    return replace(DuplexSampling(), is_greedy=is_greedy, **given)


# ---- one unit


def unit(model: MiniCpmO45, state: Duplex, unit: Unit) -> Program:
    """One second: take in, decide, speak, close.

    A unit that fails leaves the context as it was before, and the voice at a fresh start.

    Raises:
        BadImage: the frames have more slices than a unit can hold.
        ContextFull: there is no window and no room.
    """
    costs = Costs(state.clock)
    before = state.n_tokens, state.pending, state.turn_is_open
    n_before = state.context_tokens
    state.window.check_room(n_before)
    is_done = False
    try:
        taken = yield from _take_in(model, state, unit, costs)
        decision = yield from _decide(model, state, unit, taken, costs)
        samples, n_codes = NO_SAMPLES, 0
        if (
            not decision.is_listen
            and model.has_voice
            and state.settings.generate_audio is not False
        ):
            samples, n_codes = yield from _speak(model, state, decision, unit.deadline, costs)
        if not decision.is_listen and state.interrupt_asked:
            _close_turn(model, state)
            decision, samples = Decision(is_listen=True, was_interrupted=True), NO_SAMPLES
        is_done = True
    finally:
        if not is_done:
            state.n_tokens, state.pending, state.turn_is_open = before
            # How far the vocoder came is not known.
            state.reset_speech()
    if decision.was_interrupted:
        state.interrupt_asked = False
    state.spoke_last = not decision.is_listen
    words = () if decision.is_listen else decision.words
    carried = tuple(word for word in words if not model.tokenizer.is_special(word))
    state.window.add(KeptUnit(state.n_units - 1, state.context_tokens - n_before, carried))
    yield Emit(
        UnitResult(
            is_listen=decision.is_listen,
            text=model.tokenizer.decode(words),
            audio=samples,
            end_of_turn=decision.ends_turn and not decision.is_listen,
            interrupted=decision.was_interrupted,
            timings=costs.timings(),
            n_tokens=len(words),
            n_speech_tokens=n_codes,
            kv_tokens=state.context_tokens,
            vision_slices=taken.n_slices,
            vision_tokens=taken.n_slices * model.n_image_tokens,
        )
    )
    yield from trim(state, unit.deadline)


class Costs:
    """Milliseconds of a unit's stages."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = self._last_at = clock()
        self._stages: dict[str, float] = {}

    def add(self, stage: str) -> None:
        """Book the time since the last call under a field of `Timings`."""
        now = self._clock()
        self._stages[stage] = self._stages.get(stage, 0.0) + 1000 * (now - self._last_at)
        self._last_at = now

    def timings(self) -> Timings:
        total_ms = 1000 * (self._clock() - self._began_at)
        return Timings(**self._stages, total_ms=total_ms)


def _take_in(model: MiniCpmO45, state: Duplex, unit: Unit, costs: Costs) -> Program:
    """Encode frames and audio; nothing is fed yet."""
    ids = model.tokenizer.ids
    limits = _slice_limits(unit, state.settings)
    _check_slices(unit, limits, model)
    samples = unit.audio if unit.audio.size else None
    request = ops.InputRequest(state.mel, samples, unit.frames, limits)
    prepared: PreparedInput = yield Op(ops.PREPARE_INPUT, request, deadline=unit.deadline)
    slices = [piece for frame in prepared.slices for piece in frame]
    pieces: list[Piece] = []
    if slices:
        encoded: Tensor = yield Op(ops.ENCODE_IMAGES, tuple(slices), deadline=unit.deadline)
        index = 0
        for frame in prepared.slices:
            for position in range(len(frame)):
                begin = ids.image_start if position == 0 else ids.slice_start
                end = ids.image_end if position == 0 else ids.slice_end
                pieces += [(begin,), encoded[index], (end,)]
                index += 1
    costs.add("vision_ms")
    if prepared.mel is not None:
        n_frames = prepared.mel.shape[-1]
        if model.config.audio.reset_due(state.audio_past, n_frames):
            state.audio_past = 0
        is_first = state.mel.emitted_frames <= FRAMES_PER_S
        heard = ops.AudioRequest(state.slot, state.audio_past, prepared.mel, is_first)
        pieces.append((yield Op(ops.ENCODE_AUDIO, heard, (n_frames, is_first), unit.deadline)))
        state.audio_past += model.config.audio.stream_frames(n_frames, is_first)
    costs.add("listen_ms")
    return TakenIn(tuple(pieces), len(slices))


def _slice_limits(unit: Unit, settings: DuplexSettings) -> tuple[int, ...]:
    limit = unit.max_slice_nums
    if limit is None:
        limit = settings.max_slice_nums if settings.max_slice_nums is not None else 1
    if isinstance(limit, int):
        return (limit,) * len(unit.frames)
    # Frames beyond the list's end are taken as they are.
    return (*limit, *(1 for _ in unit.frames))[: len(unit.frames)]


def _check_slices(unit: Unit, limits: tuple[int, ...], model: MiniCpmO45) -> None:
    """Raises BadImage before anything of the unit is used: too many slices, impossible sizes."""
    n_slices = 0
    for frame, limit in zip(unit.frames, limits, strict=True):
        grid = plan_slices(frame.shape[1], frame.shape[0], limit, model.config.slices).grid
        n_slices += 1 + (math.prod(grid) if grid else 0)
    if n_slices > MAX_UNIT_SLICES:
        raise BadImage(
            f"the frames of one unit have {n_slices} slices, at most {MAX_UNIT_SLICES}: "
            "send fewer frames or a lower max_slice_nums"
        )


def _decide(model: MiniCpmO45, state: Duplex, unit: Unit, taken: TakenIn, costs: Costs) -> Program:
    """Feed the unit, then decode up to its end; its closing tokens are pending afterwards."""
    ids = model.tokenizer.ids
    asked = unit.force_listen or state.interrupt_asked
    forced = asked or state.n_units < (state.settings.force_listen_count or 0)
    pieces = [(*state.pending, ids.unit_start), *taken.pieces]
    choice = None if forced else _choice(state)
    fed: Fed = yield from feed(state.slot, state.n_tokens, pieces, unit.deadline, choice)
    state.n_tokens += n_rows(pieces)
    state.pending = ()
    state.n_units += 1
    costs.add("prefill_ms")
    if not forced:
        decision = yield from _decode(model, state, fed, unit.deadline)
        costs.add("decode_ms")
        return decision
    state.pending = (ids.listen, ids.unit_end)
    was_interrupted = asked and (state.turn_is_open or state.interrupt_asked)
    if asked and state.turn_is_open:
        _close_turn(model, state)
    return Decision(is_listen=True, was_interrupted=was_interrupted)


def _decode(model: MiniCpmO45, state: Duplex, fed: Fed, deadline: float) -> Program:
    ids = model.tokenizer.ids
    n_steps = state.settings.max_new_speak_tokens_per_chunk or MAX_NEW_TOKENS
    words: list[int] = []
    states: list[Tensor] = []
    ends_turn = False
    terminator = ids.chunk_eos
    for step in range(n_steps - 1):
        token = _decided(model, state, fed)
        if token == ids.listen and state.turn_is_open:
            token = ids.tts_bos
        if token in (ids.listen, ids.chunk_eos, ids.chunk_tts_eos):
            terminator = token
            break
        state.turn_is_open = True
        if step > 0 and len(model.tokenizer.decode((*words, token))) >= MAX_UNIT_CHARS:
            break
        choice = _choice(state) if step < n_steps - 2 else None
        request = ops.Step(state.slot, state.n_tokens, token, choice)
        fed = yield Op(ops.DECODE, request, deadline=deadline)
        state.n_tokens += 1
        ends_turn = token == ids.turn_eos
        state.turn_is_open = not ends_turn
        # The first one, normally `<|speak|>`, is not for the speech head.
        if step > 0:
            words.append(token)
            states.append(fed.hidden)
        if state.interrupt_asked:
            break
    state.pending = (terminator, ids.unit_end)
    is_listen = terminator == ids.listen
    if is_listen and ends_turn and words and not model.compat.turn_end_then_listen_is_silent:
        is_listen = False
    return Decision(is_listen, False, tuple(words), tuple(states), ends_turn)


def _choice(state: Duplex) -> Choice:
    recent = np.array(state.said[-state.sampling.window :], np.int64)
    return Choice(state.sampling, state.draws.text(), recent)


def _decided(model: MiniCpmO45, state: Duplex, fed: Fed) -> int:
    """The id that counts: the sampler's, which is remembered, or the script's."""
    scripted = next(state.script, None) if state.script is not None else None
    if scripted is not None:
        return scripted
    assert fed.token is not None, "a choice was asked for"
    if fed.token != model.tokenizer.ids.chunk_eos and not fed.is_direct:
        state.said.append(fed.token)
        del state.said[:-MAX_SAID]
    return fed.token


def _close_turn(model: MiniCpmO45, state: Duplex) -> None:
    """The client cut us off: the turn ends for the model as well, and so does the voice."""
    if state.turn_is_open:
        state.pending = (model.tokenizer.ids.turn_eos, *state.pending)
        state.turn_is_open = False
    state.reset_speech(keeps_position=model.compat.interrupt_keeps_speech_cache)


# ---- voice


def _speak(
    model: MiniCpmO45, state: Duplex, decision: Decision, deadline: float, costs: Costs
) -> Program:
    """Say the words of a unit; the value is its samples (24 kHz) and the number of codes."""
    n_rows_needed = len(decision.words) + 1 + SPEECH_STEPS
    if state.speech_position + n_rows_needed > model.n_speech_positions:
        yield from _make_room(model, state, deadline)
    may_end = decision.ends_turn or state.speech_position == 0
    request = SpeechRequest(
        slot=state.slot,
        start=state.speech_position,
        text_ids=decision.words,
        hidden=torch.stack(decision.states) if decision.states else None,
        max_new=SPEECH_STEPS,
        min_new=0 if may_end else SPEECH_STEPS,
        draws=tuple(state.draws.codes(SPEECH_STEPS)),
        sampling=state.code_sampling,
        drops_last=True,
        normalize=True,
    )
    spoken: ops.Spoken = yield Op(ops.SPEAK, request, deadline=deadline)
    state.speech_position += len(decision.words) + 1 + len(spoken.codes)
    costs.add("speech_tokens_ms")
    parts: list[NDArray[np.float32]] = []
    state.codes.push(spoken.codes)
    for codes, is_last in state.codes.take(decision.ends_turn):
        if state.interrupt_asked:
            break
        if state.turn_is_fresh:
            yield Op(ops.START_TURN, ops.TurnRequest(state.slot, state.voice), deadline=deadline)
            state.turn_is_fresh = False
        vocode = ops.VocodeRequest(state.slot, codes, is_last)
        parts.append((yield Op(ops.VOCODE, vocode, (len(codes), is_last), deadline)))
    if decision.ends_turn:
        state.reset_speech()
    samples = np.concatenate(parts) if parts else NO_SAMPLES
    costs.add("vocode_ms")
    return _as_played(model, samples, decision.ends_turn), len(spoken.codes)


def _make_room(model: MiniCpmO45, state: Duplex, deadline: float) -> Program:
    """A turn has outgrown the speech head's cache: its newer half moves to the front."""
    n_kept = model.n_speech_positions // 2
    move = ops.MoveRequest(
        state.slot, state.speech_position - n_kept, state.speech_position, 0, "speech"
    )
    yield Op(ops.MOVE, move, deadline=deadline)
    state.speech_position = n_kept


def _as_played(
    model: MiniCpmO45, samples: NDArray[np.float32], ends_turn: bool
) -> NDArray[np.float32]:
    n_missing = OUTPUT_SAMPLE_RATE_HZ - len(samples)
    if model.compat.voice_through_int16:
        samples = through_int16(samples)
    if n_missing > 0 and not ends_turn and model.compat.short_chunks_start_with_silence:
        samples = np.concatenate([np.zeros(n_missing, np.float32), samples])
    return samples


# ---- window


def trim(state: Duplex, deadline: float) -> Program:
    """Cut the context if it is due; what closes the last unit is fed before."""
    window = state.window
    if not window.is_due(state.context_tokens):
        return
    yield from feed(state.slot, state.n_tokens, [state.pending], deadline)
    state.n_tokens, state.pending = state.context_tokens, ()
    cut = window.cut(state.n_tokens)
    move = ops.MoveRequest(state.slot, cut.start, state.n_tokens, cut.target)
    yield Op(ops.MOVE, move, deadline=deadline)
    if cut.rewritten:
        again = ops.Feed(state.slot, cut.rewritten_at, (cut.rewritten,))
        yield Op(ops.PREFILL, again, again.bucket, deadline)
    state.n_tokens += cut.target - cut.start


def interrupt(state: Duplex) -> None:
    """The client wants silence: what is being said is dropped, the next result listens."""
    if state.turn_is_open or state.spoke_last:
        state.interrupt_asked = True
