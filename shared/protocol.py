"""The internal session protocol between gateway and worker.

One WebSocket per session, binary frames only, each one MessagePack map tagged by `type`.
The gateway opens `/session` on the worker with the subprotocol `SUBPROTOCOL`, sends `Open`,
then relays what its dialect translated. The worker answers in order; `Closed` is always its
last message and is sent only after the slot has been cleaned.

    gateway -> worker: Open, Prepare, Input, Pause, Resume, Interrupt, Stop
    worker -> gateway: Opened, Prepared, Result, Paused, Resumed, Interrupted, Stopped,
                       Notice, Failure, Closed

That is mode "duplex". Mode "half_duplex" (turns, found by the worker's voice detector) has
`PrepareTurns` in the place of `Prepare`, and answers `Input` with `Speaking`, `Generating`,
`Delta` and `TurnDone`, not with `Result`. Mode "chat" is one `Ask`, answered by `Prefilled`,
`Delta` and `Answered`; then the worker ends the session.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from shared.errors import BadMessage

SUBPROTOCOL = "omni-session.v1"
SESSION_PATH = "/session"

Mode = Literal["duplex", "half_duplex", "chat"]
RequestType = Literal["omni_duplex", "audio_duplex", "half_duplex_audio", "chat"]


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of every frame; the tag names the kind."""


class DuplexSettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client asked for; None means "not said", so the back end's default applies."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    text_repetition_penalty: float | None = None
    text_repetition_window_size: int | None = None
    length_penalty: float | None = None
    listen_prob_scale: float | None = None
    listen_top_k: int | None = None
    decode_mode: str | None = None
    generate_audio: bool | None = None
    ls_mode: str | None = None
    force_listen_count: int | None = None
    max_new_speak_tokens_per_chunk: int | None = None
    tts_temperature: float | None = None
    max_slice_nums: int | None = None

    def said(self) -> frozenset[str]:
        """Names of the settings the client gave."""
        return frozenset(n for n in self.__struct_fields__ if getattr(self, n) is not None)


# ---- gateway -> worker


class Open(Message, frozen=True, tag="open"):
    session_id: str
    mode: Mode
    request_type: RequestType


class Prepare(Message, frozen=True, tag="prepare"):
    """System prompt and voice. Voices are float32 16 kHz bytes, empty = default voice."""

    system_prompt: str
    settings: DuplexSettings = field(default_factory=DuplexSettings)
    reference_voice: bytes = b""
    tts_reference_voice: bytes = b""
    deferred_finalize: bool = True


class Input(Message, frozen=True, tag="input"):
    """One chunk: float32 16 kHz audio bytes and the JPEG/PNG files of its frames.

    `seq` counts the chunks of a session from 0; each gets exactly one `Result` or `Failure`
    with the same number.
    """

    seq: int
    audio: bytes
    frames: list[bytes] = field(default_factory=list)
    force_listen: bool = False
    max_slice_nums: int | None = None


class Pause(Message, frozen=True, tag="pause"):
    """Hold the session; `timeout_s` None = `duplex.pause_timeout`."""

    timeout_s: float | None = None


class Resume(Message, frozen=True, tag="resume"):
    pass


class Interrupt(Message, frozen=True, tag="interrupt"):
    pass


class Stop(Message, frozen=True, tag="stop"):
    reason: str = "stopped"


# ---- messages with pictures and sound, for turns and chat


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str


class ImagePart(Struct, frozen=True, forbid_unknown_fields=True, tag="image"):
    data: bytes
    """A JPEG, PNG, GIF or WebP file."""


class AudioPart(Struct, frozen=True, forbid_unknown_fields=True, tag="audio"):
    data: bytes
    """float32 16 kHz."""


class VideoPart(Struct, frozen=True, forbid_unknown_fields=True, tag="video"):
    data: bytes
    """A whole file."""
    stack_frames: int = 1
    """Pictures of each second, 1 or more."""


Part = TextPart | ImagePart | AudioPart | VideoPart
Role = Literal["system", "user", "assistant"]


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    role: Role
    parts: list[Part]


class GenerationSettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an answer's text is made; None means "not said", so the back end's default applies."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    length_penalty: float | None = None
    max_input_tokens: int | None = None

    def said(self) -> frozenset[str]:
        """Names of the settings the client gave."""
        return frozenset(n for n in self.__struct_fields__ if getattr(self, n) is not None)


class VadSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """When a turn of the user begins and ends; the defaults are the reference's."""

    threshold: float = 0.7
    """Probability of speech that begins a turn, above 0.05; 0.15 less, if that is not below 0.05,
    keeps it going."""
    min_speech_ms: float = 128.0
    """Shorter turns are dropped."""
    min_silence_ms: float = 500.0
    """Silence that ends a turn; it belongs to the turn."""
    speech_pad_ms: float = 30.0
    """Sound from before the detected begin that belongs to the turn."""


class PrepareTurns(Message, frozen=True, tag="prepare_turns"):
    """System message and settings of a half-duplex session."""

    system: list[Part]
    """Empty = the back end's own line. The first sound in it is also the voice of the answers."""
    vad: VadSettings = field(default_factory=VadSettings)
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    speaks: bool = True
    timeout_s: float = 300.0
    """Length of the session from here on."""


class Ask(Message, frozen=True, tag="ask"):
    """One chat request with its whole history."""

    messages: list[ChatMessage]
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    is_streaming: bool = True
    speaks: bool = False
    voice: bytes = b""
    """float32 16 kHz of the answer's voice; empty = the default voice."""
    max_slice_nums: int | None = None
    use_image_id: bool | None = None
    is_omni: bool = False
    enable_thinking: bool = False
    use_tts_template: bool = False


Command = Open | Prepare | PrepareTurns | Ask | Input | Pause | Resume | Interrupt | Stop

# ---- worker -> gateway


class Opened(Message, frozen=True, tag="opened"):
    slot: int


class Prepared(Message, frozen=True, tag="prepared"):
    prompt_chars: int
    prompt_tokens: int
    ignored: list[str] = field(default_factory=list)
    """Names of the settings this back end cannot honour."""
    voice: str = ""
    languages: list[str] = field(default_factory=list)


class Timings(Struct, frozen=True, forbid_unknown_fields=True):
    """Milliseconds of one unit's stages; their sum may exceed `total_ms` where stages overlap."""

    listen_ms: float = 0.0
    transcribe_ms: float = 0.0
    vision_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    speech_tokens_ms: float = 0.0
    vocode_ms: float = 0.0
    ahead_ms: float = 0.0
    """What was made for this result before its unit was complete; no part of `total_ms`."""
    total_ms: float = 0.0
    """From the unit being complete at the worker to its result being ready."""


class Result(Message, frozen=True, tag="result"):
    """The answer to one chunk."""

    seq: int
    is_listen: bool
    unit_index: int
    """Units completed so far; unchanged when the chunk completed none."""
    text: str = ""
    audio: bytes = b""
    """float32 24 kHz."""
    end_of_turn: bool = False
    interrupted: bool = False
    dropped: bool = False
    heard: str = ""
    """Caption: what the user was heard to say since the last caption."""
    timings: Timings = field(default_factory=Timings)
    n_tokens: int = 0
    n_speech_tokens: int = 0
    kv_tokens: int = 0
    vision_slices: int = 0
    vision_tokens: int = 0


class Speaking(Message, frozen=True, tag="speaking"):
    """The user has begun (or ended) a turn."""

    is_speaking: bool


class Generating(Message, frozen=True, tag="generating"):
    """A turn of the user is being answered."""

    speech_ms: float


class Delta(Message, frozen=True, tag="delta"):
    """A piece of an answer, as soon as it exists: text, sound, or both."""

    index: int
    """From 0 within the answer."""
    text: str = ""
    audio: bytes = b""
    """float32 24 kHz."""


class TurnDone(Message, frozen=True, tag="turn_done"):
    turn_index: int
    """From 1."""
    text: str
    heard: str = ""
    """Caption: what the user was understood to say, where the back end knows it."""
    timings: Timings = field(default_factory=Timings)
    n_tokens: int = 0
    kv_tokens: int = 0


class Prefilled(Message, frozen=True, tag="prefilled"):
    """The messages of a chat request are in the context."""

    n_input_tokens: int


class Answered(Message, frozen=True, tag="answered"):
    """The end of a chat answer: all of its text, and its sound if nothing was streamed."""

    text: str
    n_input_tokens: int
    n_generated_tokens: int
    audio: bytes = b""
    """float32 24 kHz; empty where it went out as `Delta`s."""
    was_cut: bool = False
    """It did not end by itself."""
    ignored: list[str] = field(default_factory=list)
    """What of the request this back end cannot honour."""
    prompt: str = ""
    """The messages as the model read them, with a mark for each picture and clip."""
    timings: Timings = field(default_factory=Timings)


class Paused(Message, frozen=True, tag="paused"):
    timeout_s: float


class Resumed(Message, frozen=True, tag="resumed"):
    pass


class Interrupted(Message, frozen=True, tag="interrupted"):
    pass


class Stopped(Message, frozen=True, tag="stopped"):
    pass


class Notice(Message, frozen=True, tag="notice"):
    """Something the client should know that ends nothing (dropped input, with its count)."""

    slug: str
    message: str
    count: int = 0


class Failure(Message, frozen=True, tag="failure"):
    """A typed error. `close_code` None: the session goes on. `seq`: the chunk it answers."""

    slug: str
    message: str
    close_code: int | None = None
    seq: int | None = None


class Closed(Message, frozen=True, tag="closed"):
    """Last message of a session; its slot is clean and free."""

    reason: str


Event = (
    Opened
    | Prepared
    | Result
    | Speaking
    | Generating
    | Delta
    | TurnDone
    | Prefilled
    | Answered
    | Paused
    | Resumed
    | Interrupted
    | Stopped
    | Notice
    | Failure
    | Closed
)

_command_decoder = msgspec.msgpack.Decoder(Command)
_event_decoder = msgspec.msgpack.Decoder(Event)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(frame: bytes) -> Command:
    """Raises BadMessage when the frame is no command of this protocol version."""
    try:
        return _command_decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise BadMessage(f"not a session command: {error}") from error


def decode_event(frame: bytes) -> Event:
    """Raises BadMessage when the frame is no event of this protocol version."""
    try:
        return _event_decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise BadMessage(f"not a session event: {error}") from error


# ---- worker /health and /api/compile, read by the gateway and by start scripts


CacheState = Literal["warm", "cold", "stale", "damaged", "disabled"]
"""How a worker found the compile cache; `disabled` = it compiles nothing."""


class CompileSummary(Struct, frozen=True):
    """The part of `/health` about compiling."""

    state: CacheState | None
    """None: not looked at yet."""
    degraded: bool
    """Something that should be compiled or captured is not: it is right, but slower."""
    fingerprint: str = ""


class StaleReason(Struct, frozen=True):
    """One field in which the nearest cache differs from what this worker needs."""

    name: str
    here: Any
    there: Any


class RegionReport(Struct, frozen=True):
    """One compiled region."""

    graphs: int
    hits: int
    """Of them, those that the cache had."""
    seconds: float
    """Time of the calls that made graphs."""
    fallbacks: int
    """Calls after the start that met no graph and ran eagerly."""


class CapturedStage(Struct, frozen=True):
    """One stage of the model's work on the device, since the start."""

    runs: int
    replays: int
    """Runs that replayed a captured graph."""
    captures: int


class CompileStatus(Struct, frozen=True):
    """Body of the worker's `GET /api/compile`. Counts are of this process."""

    state: CacheState | None = None
    degraded: bool = False
    fingerprint: str = ""
    stale_fields: list[StaleReason] = []
    graphs: int = 0
    """Compiled graphs in use."""
    fx_hits: int = 0
    """Of them, those that the cache had; the elapsed time tells whether they were whole."""
    fx_misses: int = 0
    new_files: int = 0
    """Files that the compiler has written, at the last look."""
    recompiles_after_idle: int = 0
    eager_fallbacks: int = 0
    graph_breaks: int = 0
    captured_replays: int = 0
    stage_runs: int = 0
    captures: int = 0
    graph_pool_bytes: int = 0
    stage_seconds: dict[str, float] = {}
    """Stages of the worker's start; the running one as far as it is."""
    regions: dict[str, RegionReport] = {}
    stages: dict[str, CapturedStage] = {}
    fallback_reasons: dict[str, str] = {}
    """By region: the guard that the first call without a graph failed."""
    reason: str = ""
    """Why `degraded`, or why the cache counts as damaged."""


class StageReport(Struct, frozen=True):
    """One of the stages that a worker goes through before it is ready."""

    name: str
    elapsed_s: float
    done: bool
    note: str = ""


class WorkerHealth(Struct, frozen=True):
    """Body of the worker's `GET /health`; the first eight fields are the reference's own."""

    status: Literal["healthy", "initializing", "error"]
    worker_status: str
    """`loading`, `idle`, `duplex_active`, `busy_chat`, `busy_half_duplex`, `draining`, `error`."""
    gpu_id: int | None
    model_loaded: bool
    current_session_id: str | None
    total_requests: int
    avg_inference_time_ms: float
    kv_cache_length: int
    slots_total: int
    slots_free: int
    backend: str
    stage: str | None
    stage_progress: float
    stage_elapsed_s: float
    eta_s: float | None
    stages: list[StageReport]
    reason: str = ""
    pid: int = 0
    compile: CompileSummary | None = None
