"""Full duplex: a prompt, then one unit a second, each with its decision to listen or to speak.

A unit's context is `<unit>`, its frames, its second of audio, the decision. What closes a unit
(terminator, `</unit>`) is fed together with the next one, which saves one pass over the weights;
where the window has to be cut it is fed at once, after the result has gone out.

Follows the duplex algorithm of MiniCPM-o 4.5; `shared.config.Compat` names the quirks that may be
chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor

from shared.errors import BadMessage
from shared.protocol import DuplexSettings
from worker.engine.contract import Emit, Op, Program
from worker.models.contract import PreparedInfo, Prompt, Unit, UnitResult
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.costs import Costs
from worker.models.minicpmo45.draws import Draws, SeededDraws
from worker.models.minicpmo45.feeding import feed, n_rows
from worker.models.minicpmo45.ops import Choice, Fed, Piece
from worker.models.minicpmo45.speaking import NO_SAMPLES, CodeBuffer
from worker.models.minicpmo45.unit_input import TakenIn, take_in
from worker.models.minicpmo45.unit_voice import speak
from worker.models.minicpmo45.window import MAX_UNIT_TOKENS, KeptUnit, Window
from worker.nn.code_sampling import CodeSampling
from worker.nn.mel import StreamingMel
from worker.nn.text_sampling import DuplexSampling

if TYPE_CHECKING:
    from worker.models.minicpmo45.model import MiniCpmO45

DEFAULT_SYSTEM_PROMPT: Final = "Streaming Omni Conversation."
CARRIED_WORDS_MARKER: Final = "\n\nprevious: "
MAX_UNIT_CHARS: Final = 28
"""A unit's text ends before it has this many characters: about what one second can say."""
MAX_NEW_TOKENS: Final = 20
"""Unless the client says otherwise: one less is decoded, the last is what closes the unit."""
MOST_NEW_TOKENS: Final = 64
"""Whatever the client says. Words end at `MAX_UNIT_CHARS`, but control tokens have no characters,
and a unit has to stay below `MAX_UNIT_TOKENS`."""
MAX_SAID: Final = 4096
"""Ids that the text penalty may look back at."""
MAX_PROMPT_SHARE: Final = 0.5
"""Largest part of the window that the prompt may take."""
PREPARE_S: Final = 1.0
"""A prompt's ops are to run within this time: no sooner than the units that are due already."""
CHATTER: Final = "Hello, I am here."
MAX_CHATTER_WORDS: Final = 10
"""About what one second can say, and short enough for all of a unit's script to be decoded."""
IGNORED: Final = frozenset({"ls_mode"})
"""Settings that mean nothing to this model; named in `prepared.ignored`."""


@dataclass(slots=True)
class Duplex:
    """All state of one session besides what its slot's caches hold."""

    slot: int
    window: Window
    draws: Draws
    mel: StreamingMel = field(default_factory=StreamingMel)
    settings: DuplexSettings = field(default_factory=DuplexSettings)
    sampling: DuplexSampling = field(default_factory=DuplexSampling)
    code_sampling: CodeSampling = field(default_factory=CodeSampling)
    script: Iterator[int] | None = None
    """Decided ids are replaced by these, as long as there are any: benchmarks on random weights,
    replays, a warm-up that is sure to speak."""
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
    return Duplex(slot, Window(model.window, model.n_positions), SeededDraws(seed))


def talkative_state(model: MiniCpmO45, slot: int) -> Duplex:
    """Return a session that says `CHATTER` in every unit; every third one ends the turn."""
    ids = model.tokenizer.ids
    unit_begin = (ids.speak, *model.tokenizer.encode(CHATTER)[:MAX_CHATTER_WORDS])
    goes_on, ends = (*unit_begin, ids.chunk_eos), (*unit_begin, ids.turn_eos, ids.chunk_eos)
    state = new_state(model, slot, seed=0)
    state.script = itertools.cycle((*goes_on, *goes_on, *ends))
    return state


# ---- prompt


def prepare(model: MiniCpmO45, state: Duplex, prompt: Prompt) -> Program:
    """Feed the prompt and learn the voice; the session starts anew.

    Raises:
        BadMessage: the prompt leaves too little room for a conversation.
        VoiceUnavailable: the client brought a voice, and the files that encode it are missing.
    """
    ids, deadline = model.tokenizer.ids, model.clock() + PREPARE_S
    system = prompt.system_prompt or DEFAULT_SYSTEM_PROMPT
    prefix = model.tokenizer.encode(f"<|im_start|>system\n{system}\n<|audio_start|>")
    suffix = (ids.audio_end, ids.im_end)
    heard = prompt.reference_voice if prompt.reference_voice.size else model.default_heard
    pieces: list[Piece] = [tuple(prefix)]
    if heard.size:
        clip = ops.ClipRequest(heard, is_chunked=True)
        pieces.append((yield Op(ops.ENCODE_CLIP, clip, deadline=deadline)))
    pieces.append(suffix)
    n_prompt = n_rows(pieces)
    limit = int(MAX_PROMPT_SHARE * (model.n_positions - MAX_UNIT_TOKENS))
    if n_prompt > limit:
        raise BadMessage(f"prompt and voice have {n_prompt} tokens, at most {limit}: shorten them")
    own_voice = None
    if wants_voice(prompt.settings):
        brought = (prompt.tts_reference_voice, prompt.reference_voice)
        own_voice = next((voice for voice in brought if voice.size), None)
    voice = yield from model.learn_voice(own_voice, deadline)
    _start_anew(model, state, prompt.settings)
    state.voice = voice
    yield from feed(state.slot, 0, pieces, deadline)
    state.n_tokens = n_prompt
    state.window.n_prefix, state.window.suffix = n_prompt - len(suffix), suffix
    return PreparedInfo(
        prompt_chars=len(prompt.system_prompt),
        prompt_tokens=n_prompt,
        ignored=_ignored(model, prompt.settings),
        voice="client" if own_voice is not None and model.has_voice else model.voice_name,
        languages=("en", "zh"),
    )


def _ignored(model: MiniCpmO45, settings: DuplexSettings) -> tuple[str, ...]:
    """Return the settings that have no effect."""
    names = set(IGNORED)
    if not model.has_voice:
        names |= {"tts_temperature"} | ({"generate_audio"} if settings.generate_audio else set())
    return tuple(sorted(settings.said() & names))


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


def wants_voice(settings: DuplexSettings) -> bool:
    return settings.generate_audio is not False


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
    costs = Costs(model.clock)
    before = state.n_tokens, state.pending, state.turn_is_open, tuple(state.said)
    n_before = state.context_tokens
    state.window.check_room(n_before)
    is_done = False
    try:
        taken = yield from take_in(model, state, unit, costs)
        decision = yield from _decide(model, state, unit, taken, costs)
        samples, n_codes = NO_SAMPLES, 0
        if (
            not (decision.is_listen or state.interrupt_asked)
            and model.has_voice
            and wants_voice(state.settings)
        ):
            samples, n_codes = yield from speak(model, state, decision, unit.deadline, costs)
        if state.interrupt_asked:
            state.interrupt_asked = False
            _close_turn(model, state)
            decision, samples = Decision(is_listen=True, was_interrupted=True), NO_SAMPLES
        is_done = True
    finally:
        if not is_done:
            state.n_tokens, state.pending, state.turn_is_open, said = before
            state.said = list(said)
            # How far the vocoder came is not known.
            state.reset_speech()
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
    was_interrupted = asked and state.turn_is_open
    if was_interrupted:
        _close_turn(model, state)
    return Decision(is_listen=True, was_interrupted=was_interrupted)


def _decode(model: MiniCpmO45, state: Duplex, fed: Fed, deadline: float) -> Program:
    ids = model.tokenizer.ids
    asked = state.settings.max_new_speak_tokens_per_chunk
    n_steps = MAX_NEW_TOKENS if asked is None else min(asked, MOST_NEW_TOKENS)
    was_open = state.turn_is_open
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
    if ends_turn and (words or was_open) and not model.compat.turn_end_then_listen_is_silent:
        is_listen = False
    return Decision(is_listen, False, tuple(words), tuple(states), ends_turn)


def _choice(state: Duplex) -> Choice:
    n = state.sampling.window
    recent = np.array(state.said[-n:] if n else [], np.int64)
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


# ---- window


def trim(state: Duplex, deadline: float) -> Program:
    """Cut the context if it is due; what closes the last unit is fed before."""
    window = state.window
    if not window.is_due(state.context_tokens):
        return
    yield from feed(state.slot, state.n_tokens, [state.pending], deadline)
    n_tokens, state.pending = state.context_tokens, ()
    trimmed, cut = window.cut(n_tokens)
    # If one of the ops fails, nobody knows what the context holds behind the prompt's prefix.
    state.window, state.n_tokens, state.pending = window.emptied(), window.n_prefix, window.suffix
    yield Op(
        ops.MOVE, ops.MoveRequest(state.slot, cut.start, n_tokens, cut.target), deadline=deadline
    )
    if cut.rewritten:
        yield from feed(state.slot, cut.rewritten_at, [cut.rewritten], deadline)
    state.window, state.n_tokens, state.pending = trimmed, n_tokens + cut.target - cut.start, ()


def interrupt(state: Duplex) -> None:
    """The client wants silence: what is being said is dropped, the next result listens."""
    if state.turn_is_open or state.spoke_last:
        state.interrupt_asked = True
