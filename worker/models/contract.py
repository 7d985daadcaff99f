"""What every back end gives to the sessions: states, programs, and the stages of its start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from shared.protocol import DuplexSettings, GenerationSettings, Timings
from worker.engine.contract import OpRunner, Program

Progress = Callable[[float, str], None]
"""Called with the share of a stage that is done (0..1) and a short note."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a session is prepared with. Voices: float32 16 kHz samples, empty = default."""

    system_prompt: str
    settings: DuplexSettings
    reference_voice: NDArray[np.float32]
    tts_reference_voice: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PreparedInfo:
    """Value of a `prepare` program."""

    prompt_chars: int
    prompt_tokens: int
    ignored: tuple[str, ...] = ()
    voice: str = ""
    languages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unit:
    """One tick of the duplex clock."""

    index: int
    """0-based within the session."""
    audio: NDArray[np.float32]
    """16 kHz, exactly `DuplexModel.unit_samples` long (a unit of frames alone: empty)."""
    frames: tuple[NDArray[np.uint8], ...] = ()
    """RGB images `[H, W, 3]`, oldest first."""
    force_listen: bool = False
    max_slice_nums: int | tuple[int, ...] | None = None
    """Most tiles of every frame, or of each; None = as the session was prepared."""
    arrived_at: float = 0.0
    """Engine clock when the unit was complete."""
    deadline: float = 0.0
    """Engine clock by which its result has to be out."""


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What a unit program emits, exactly once."""

    is_listen: bool
    text: str = ""
    audio: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """24 kHz samples, at most about one second."""
    end_of_turn: bool = False
    interrupted: bool = False
    heard: str = ""
    timings: Timings = field(default_factory=Timings)
    n_tokens: int = 0
    n_speech_tokens: int = 0
    kv_tokens: int = 0
    vision_slices: int = 0
    vision_tokens: int = 0


class DuplexModel(OpRunner, Protocol):
    """A back end that can hold full-duplex sessions. It keeps no session state itself."""

    name: str
    unit_samples: int
    round_span_s: float
    """Of the engine's scheduler: whose ops gain by being batched has them run in rounds."""

    # Stages of the start, in this order, all on the thread that calls them.
    def load_model(self, progress: Progress) -> None:
        """Read or convert the weights. Raises ModelLoadError."""

    def init_unified(self, n_slots: int, progress: Progress) -> None:
        """Allocate the caches of `n_slots` sessions and everything that serving needs."""

    def apply_torch_compile(self, progress: Progress) -> str:
        """Compile the regions that the configuration names; returns a note for the log."""

    # Sessions. `state` is opaque to the callers; dropping it after `end` is the reset.
    def new_state(self, slot: int) -> Any: ...

    def prepare(self, state: Any, prompt: Prompt) -> Program:
        """Program that prefills the prompt; its value is a `PreparedInfo`. May be run again."""

    def unit(self, state: Any, unit: Unit) -> Program:
        """Program of one unit: emits one `UnitResult`, then may go on with deferred work."""

    def interrupt(self, state: Any) -> None:
        """Drop what is being said; the next unit's result says so. Quick, between ops."""

    def end(self, state: Any) -> None:
        """Clean the slot (caches to a state nobody can see). Called once no program is left."""


# ---- turns and chat


@dataclass(frozen=True, slots=True)
class Picture:
    pixels: NDArray[np.uint8]
    """RGB `[H, W, 3]`."""


@dataclass(frozen=True, slots=True)
class Clip:
    samples: NDArray[np.float32]
    """16 kHz mono, of any length."""


@dataclass(frozen=True, slots=True)
class Video:
    """A film: the frames of each of its seconds, then that second of sound."""

    seconds: tuple[tuple[NDArray[np.uint8], ...], ...]
    """Frames `[H, W, 3]` of every second; there may be none."""
    samples: NDArray[np.float32]
    """16 kHz mono; empty for a silent film."""


MessagePart = str | Picture | Clip | Video


@dataclass(frozen=True, slots=True)
class TurnMessage:
    """One message of a conversation."""

    role: str
    """system, user or assistant."""
    parts: tuple[MessagePart, ...]


@dataclass(frozen=True, slots=True)
class ChatQuestion:
    """What a chat request asks; settings that are not said are the back end's own."""

    messages: tuple[TurnMessage, ...]
    generation: GenerationSettings
    is_streaming: bool = True
    speaks: bool = False
    voice: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """16 kHz; empty = the default voice."""
    max_slice_nums: int | None = None
    use_image_id: bool | None = None
    is_omni: bool = False
    enable_thinking: bool = False
    use_tts_template: bool = False


@dataclass(frozen=True, slots=True)
class TurnPrompt:
    """What a session of turns is prepared with."""

    system: tuple[MessagePart, ...]
    """Empty = the back end's own line; the first `Clip` is also the voice of the answers."""
    generation: GenerationSettings
    speaks: bool = True


@dataclass(frozen=True, slots=True)
class Taken:
    """Emitted by a chat program once its messages are in the context."""

    n_input_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Emitted as soon as a piece of an answer exists: text, sound, or both."""

    text: str = ""
    audio: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """24 kHz."""


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """Value of a program that answers."""

    text: str
    n_input_tokens: int
    """Length of the context when the answer began."""
    n_generated_tokens: int
    audio: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """24 kHz, where nothing was emitted."""
    was_cut: bool = False
    heard: str = ""
    ignored: tuple[str, ...] = ()
    """What of the request the back end could not honour."""
    prompt: str = ""
    timings: Timings = field(default_factory=Timings)


class TurnModel(Protocol):
    """A back end that also answers whole turns: chat requests, and sessions of half-duplex turns.

    States are as those of `DuplexModel`: `end` takes any of them. Closing a program stops what it
    does, for good and at once.
    """

    def chat_state(self, slot: int) -> Any: ...

    def chat(self, state: Any, question: ChatQuestion) -> Program:
        """Program that emits `Taken`, then `Piece`s if it streams; its value is a `WholeAnswer`.

        Raises BadMessage, BadImage, BadAudio, VoiceUnavailable inside the program.
        """

    def turn_state(self, slot: int) -> Any: ...

    def prepare_turns(self, state: Any, prompt: TurnPrompt) -> Program:
        """Program that starts the conversation anew; its value is a `PreparedInfo`."""

    def detect_speech(self, state: Any, samples: NDArray[np.float32]) -> Program:
        """Program of one op: its value is the probability of speech of each whole window of
        `voice_activity.VAD_WINDOW` samples, `[n]`; what is left over waits in the state."""

    def turn(self, state: Any, samples: NDArray[np.float32]) -> Program:
        """Program that answers what was said: emits `Piece`s; its value is a `WholeAnswer`.

        Closed in the middle, the next turn is answered all the same. Whether the conversation holds
        what had been said so far, or only the question, is the back end's decision: a large model
        knows that it was cut off, a small one holds on to what it was saying.
        """


class Model(DuplexModel, TurnModel, Protocol):
    """A back end as a worker serves it: sessions of every mode, beside each other."""


@runtime_checkable
class CanTalk(Protocol):
    """A back end that can be made to speak, so that a start is sure to have spoken once."""

    def talkative_state(self, slot: int) -> Any:
        """Return a state as of `new_state` whose every unit speaks, whatever it hears."""
