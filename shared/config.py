"""`config.json`: every setting, its default and its bounds. Loading is explicit; nothing is global.

Priority: command line > `config.json` > the defaults here. Unknown keys stop the start with the
nearest valid name; keys that the reference has retired are accepted with a notice, and so are
reference keys whose feature this version does not have yet.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from shared.errors import ConfigError
from shared.limits import IDLE_TIMEOUT_S

COMPILE_MODULES = ("llm", "tts", "vpm", "resampler", "apm", "flow", "vocoder", "heads")
"""What `compile.modules` may name: parts of the large model."""

COMPILE_ENCODERS = frozenset({"vpm", "resampler", "apm"})
"""What `compile.encoders` switches off together."""

RETIRED_KEYS = frozenset({"service.eta_streaming_s"})

PENDING_KEYS: Mapping[str, str] = {
    "model.attn_implementation": "the implementation chooses by device",
    "audio.chat_vocoder": "answers are spoken with token2wav",
}
"""Accepted keys without an effect so far, with what is missing; a value other than the default
brings one start-up notice."""

LARGE_MODEL_ONLY = "it belongs to the large model"

CASCADE_IGNORES: Mapping[str, str] = {
    "audio.enabled": "the embedded back end always speaks; clients may ask for text alone",
    "audio.ref_audio_path": "the embedded back end has one fixed voice",
    **dict.fromkeys(
        (
            "model.model_path",
            "model.pt_path",
            "model.random_weights",
            "audio.n_timesteps",
            "duplex.sliding_window_mode",
            "duplex.basic_window_high_tokens",
            "duplex.basic_window_low_tokens",
            "duplex.context_max_units",
            "duplex.context_previous_max_tokens",
            "duplex.max_context_tokens",
            "compile.modules",
            "compile.encoders",
            "compile.cuda_graphs",
            "compile.shape_profile",
        ),
        LARGE_MODEL_ONLY,
    ),
}
"""The same for keys that only the cascade has no use for; all of `compat` are as well."""


ExpectedSeconds = Annotated[float, Field(gt=0, le=86_400)]
"""How long a session of one kind is expected to last; a day at most."""


FilledString = Annotated[str, Field(min_length=1)]
"""An empty path would be the current folder."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelConfig(Section):
    """Which model is served and where its weights are."""

    backend: Literal["auto", "minicpmo45", "cascade"] = "auto"
    model_path: FilledString | None = None
    """Hugging Face directory or id of MiniCPM-o 4.5; null = the embedded cascade."""
    pt_path: FilledString | None = None
    """Tensors (torch file) that replace those of the same name."""
    random_weights: bool = False
    """Build the model at full size without a checkpoint (benchmarks, precompile)."""
    attn_implementation: Literal["auto", "flash_attention_2", "sdpa", "eager"] = "auto"


class AudioConfig(Section):
    """Voices and playback."""

    enabled: bool = True
    """false = the large model answers in text only and needs no token2wav files."""
    n_timesteps: int = Field(5, ge=1, le=16)
    """Steps in which the large model's voice is made: more is slower and finer."""
    ref_audio_path: str | None = None
    """Default voice of sessions that bring none; null = the one that is shipped."""
    playback_delay_ms: int = Field(200, ge=0, le=2000)
    chat_vocoder: Literal["token2wav", "cosyvoice2"] = "token2wav"


class ServiceConfig(Section):
    """Processes, ports, queue."""

    bind: str = "127.0.0.1"
    gateway_port: int = Field(8006, ge=0, le=65535)
    worker_base_port: int = Field(22400, ge=1, le=65535)
    """Worker i listens on this port + i, on loopback."""
    max_queue_size: int = Field(1000, ge=0)
    request_timeout: float = Field(300.0, gt=0)
    compile: Literal["auto"] | bool = "auto"
    """"auto" = compile with a GPU, stay eager on a CPU."""
    data_dir: str = "data"
    sessions_per_worker: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    cpu_workers: int = Field(1, ge=1, le=64)
    """Workers that are started on a machine without GPU, or for the cascade."""
    stuck_after_s: float = Field(30.0, gt=0)
    """A compute thread without progress for this long makes its worker unhealthy."""
    drain_timeout_s: float = Field(300.0, ge=0)
    """How long the sessions of a worker that retires may go on before they are told to end."""
    eta_chat_s: ExpectedSeconds = 15.0
    eta_half_duplex_s: ExpectedSeconds = 180.0
    eta_audio_duplex_s: ExpectedSeconds = 120.0
    eta_omni_duplex_s: ExpectedSeconds = 90.0
    eta_ema_alpha: float = Field(0.3, gt=0, le=1)
    eta_ema_min_samples: int = Field(3, ge=1)

    @field_validator("bind")
    @classmethod
    def _is_an_address(cls, bind: str) -> str:
        # A name is looked up by the socket; only "localhost" means the same everywhere.
        if bind != "localhost":
            ipaddress.ip_address(bind)
        return bind


class DuplexConfig(Section):
    """Limits of full-duplex sessions."""

    pause_timeout: float = Field(60.0, gt=0)
    """Seconds a paused session keeps its slot."""
    max_session_s: float = Field(0.0, ge=0)
    """0 = no limit."""
    idle_timeout_s: float = Field(IDLE_TIMEOUT_S, gt=0)
    """A session without valid input for this long is closed."""
    sliding_window_mode: Literal["off", "basic", "context"] = "basic"
    """What of a long session the large model keeps: all up to `max_context_tokens`; whole units
    between two sizes; or a number of units and the words of earlier ones."""
    basic_window_high_tokens: int = Field(4000, ge=256, le=32_768)
    basic_window_low_tokens: int = Field(3500, ge=128)
    context_max_units: int = Field(24, ge=1, le=512)
    context_previous_max_tokens: int = Field(500, ge=0, le=8192)
    max_context_tokens: int = Field(8192, ge=1024, le=40_960)
    """Mode `off`: a session ends when its context is full. Mode `context`: size of the context."""

    @model_validator(mode="after")
    def _low_is_below_high(self) -> DuplexConfig:
        if self.basic_window_low_tokens >= self.basic_window_high_tokens:
            raise ValueError("basic_window_low_tokens must be below basic_window_high_tokens")
        return self


class Compat(Section):
    """Quirks of the original that the large model may be asked to repeat.

    True = as the original does it; ARCHITECTURE.md has the reasons. The defaults are ours.
    """

    listen_settings_act_on_im_end: bool = False
    """`listen_prob_scale` and `listen_top_k` look at `<|im_end|>` instead of `<|listen|>`."""
    penalty_divides_negative_logits: bool = True
    """The text penalty divides negative logits too, which raises them. Shapes what is said."""
    turn_end_then_listen_is_silent: bool = False
    """`<|turn_eos|>` and then `<|listen|>` in one unit drops the unit's text and voice."""
    interrupt_keeps_speech_cache: bool = False
    """After a barge-in the speech head goes on from the old turn's positions."""
    voice_through_int16: bool = False
    """Samples are rounded to 16 bit on the way."""
    short_chunks_start_with_silence: bool = True
    """A non-final unit with less than one second of voice is filled up in front."""
    long_clips_hear_padding: bool = False
    """Of a clip of more than 30 s, the last piece hears as much padding as sound."""
    answer_strips_character_set: bool = False
    """Chat answers lose id 0 and all trailing characters of the set `<|tseo_>`."""
    window_registers_retokenised_text: bool = False
    """Half-duplex: a round of the window counts re-tokenised text, not what the cache holds."""
    short_clips_hear_padding: bool = False
    """Of several clips in a request, the shorter ones hear the padding behind their end."""

    @classmethod
    def reference(cls) -> Compat:
        """Every quirk as the original has it."""
        return cls(**dict.fromkeys(cls.model_fields, True))


class CompileConfig(Section):
    """What is compiled and captured, and where the results are kept.

    Whether anything is compiled at all says `service.compile`.
    """

    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """"max-autotune" also tries out kernels. "reduce-overhead" is read as "default", which
    captures graphs as well."""
    dynamic: bool = True
    """false = no compiled graph serves several sizes."""
    modules: Literal["all"] | tuple[str, ...] = "all"
    """Out of `COMPILE_MODULES`."""
    encoders: bool = True
    """false = `COMPILE_ENCODERS` stay eager, whatever `modules` says."""
    cuda_graphs: bool = True
    """false = compiled, but nothing is captured."""
    cache_dir: FilledString | None = None
    """Shared by all workers; null = `TORCHINDUCTOR_CACHE_DIR`, else `torch_compile_cache`."""
    warmup_video: FilledString | None = None
    """What is played at the start; null = the shipped clip."""
    shape_profile: FilledString | None = None
    """File that collects which sizes real traffic has, for the next start; null = none."""
    on_cold: Literal["compile", "eager"] = "compile"
    """What a worker does that finds no cache that fits."""
    on_recompile: Literal["eager", "fail"] = "eager"
    """What a call does, after the start, that fits no compiled graph."""

    @field_validator("mode")
    @classmethod
    def _without_alias(cls, mode: str) -> str:
        return "default" if mode == "reduce-overhead" else mode

    @field_validator("modules", mode="before")
    @classmethod
    def _are_known(cls, modules: Any) -> Any:
        if not isinstance(modules, list | tuple):
            if modules == "all":
                return modules
            raise ValueError(f'expected "all" or a list of {", ".join(COMPILE_MODULES)}')
        if not modules:
            raise ValueError("the list is empty; to compile nothing, set service.compile to false")
        for name in modules:
            if name not in COMPILE_MODULES:
                close = difflib.get_close_matches(str(name), COMPILE_MODULES, n=1, cutoff=0.5)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise ValueError(
                    f"there is no module {name!r}{hint} (valid: {', '.join(COMPILE_MODULES)})"
                )
        # In one order and once each: the plan is part of what a cache is found by.
        return tuple(name for name in COMPILE_MODULES if name in modules)

    @property
    def chosen_modules(self) -> tuple[str, ...]:
        """What is compiled, after both switches."""
        named = COMPILE_MODULES if self.modules == "all" else self.modules
        return tuple(name for name in named if self.encoders or name not in COMPILE_ENCODERS)


class RecordingConfig(Section):
    """Recording of sessions."""

    enabled: bool = True
    session_retention_days: int = Field(-1, ge=-1, le=36_500)
    """Older recordings are removed; 0 or -1 = none for its age."""
    max_storage_gb: float = Field(-1, ge=-1)
    """Of all recordings together; beyond it the oldest are removed. 0 or -1 = no limit."""
    max_queue_mb: int = Field(256, ge=1)
    """What waits for the disk; a session that finds no room in it is not recorded any further."""


class SecurityConfig(Section):
    """Who may use the service."""

    api_keys: tuple[str, ...] = ()
    """Empty = no key is asked for (loopback only)."""
    admin_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    """Browser origins besides the service's own, such as "https://example.org"; "*" = any."""
    max_sessions_per_client: int = Field(0, ge=0)
    """0 = no limit."""

    @field_validator("api_keys", "admin_keys")
    @classmethod
    def _can_be_sent(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        for number, key in enumerate(keys, 1):
            if not key.strip():
                raise ValueError(f"key {number} is blank, which no key may be")
            if any("\ud800" <= char <= "\udfff" for char in key):
                raise ValueError(f"key {number} holds half a character: no client could send it")
        return keys


class Config(Section):
    model: ModelConfig = ModelConfig()
    audio: AudioConfig = AudioConfig()
    service: ServiceConfig = ServiceConfig()
    duplex: DuplexConfig = DuplexConfig()
    compat: Compat = Compat()
    compile: CompileConfig = CompileConfig()
    recording: RecordingConfig = RecordingConfig()
    security: SecurityConfig = SecurityConfig()

    @property
    def backend(self) -> Literal["minicpmo45", "cascade"]:
        """The back end that `model.backend: "auto"` resolves to."""
        if self.model.backend != "auto":
            return self.model.backend
        wants_big = self.model.model_path is not None or self.model.random_weights
        return "minicpmo45" if wants_big else "cascade"


def is_loopback(host: str) -> bool:
    """Whether an address or host name means this machine and nothing else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    config: Config
    source: Path | None
    notices: tuple[str, ...]
    """Sentences for the start-up log: retired keys, keys without effect."""


def load_config(path: Path | None, overrides: Mapping[str, Any] | None = None) -> LoadedConfig:
    """Load a configuration file and lay the command line's values over it.

    Args:
        path: a JSON file; None = defaults only.
        overrides: dotted key -> value, such as `{"service.gateway_port": 9000}`; values of
            None are skipped.

    Raises:
        ConfigError: the file is missing, no JSON object, or a key or value is invalid; the
            text names the key, the value and what was expected.
    """
    raw = _read(path) if path else {}
    notices = _drop_retired(raw)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            section, _, key = dotted.partition(".")
            raw.setdefault(section, {})[key] = value
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        name = path.name if path else "configuration"
        raise ConfigError(_explain(name, error)) from error
    notices += [
        f"{dotted} is accepted but has no effect: {missing}"
        for dotted, missing in _ignored(config).items()
        if _value(config, dotted) != _value(Config(), dotted)
    ]
    return LoadedConfig(config, path, tuple(notices))


def _ignored(config: Config) -> dict[str, str]:
    """Return the keys that have no effect on this configuration's back end, with the reason."""
    ignored = dict(PENDING_KEYS)
    if config.backend == "cascade":
        quirks = (f"compat.{name}" for name in Compat.model_fields)
        return {**ignored, **CASCADE_IGNORES, **dict.fromkeys(quirks, LARGE_MODEL_ONLY)}
    if config.model.random_weights:
        ignored["model.model_path"] = "model.random_weights is set"
    return ignored


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # Bad JSON, bad UTF-8, a number with thousands of digits, a key that stands there twice.
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(raw).__name__}")
    return raw


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError: of two values of one key, the first would be lost without a word."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there more than once")
    return found


def _drop_retired(raw: dict[str, Any]) -> list[str]:
    notices = []
    for dotted in sorted(RETIRED_KEYS):
        section, _, key = dotted.partition(".")
        if isinstance(raw.get(section), dict) and key in raw[section]:
            del raw[section][key]
            notices.append(f"{dotted} is retired and has no effect; remove it")
    return notices


def _value(config: Config, dotted: str) -> Any:
    section, _, key = dotted.partition(".")
    return getattr(getattr(config, section), key)


def _explain(name: str, error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        dotted = ".".join(location)
        if item["type"] == "extra_forbidden":
            lines.append(f"{name}: unknown key {dotted}{_nearest(location)}")
        else:
            # The last parts of a union's location name its members, not keys of the file.
            key = ".".join(location[:2])
            # Whatever stands in the place of a key may be one.
            is_hidden = isinstance(item["input"], dict) or location[0] == "security"
            value = "" if is_hidden else f" is {item['input']!r}"
            text = item["msg"].removeprefix("Value error, ").replace("tuple", "list")
            lines.append(f"{name}: {key}{value}: {text}")
    return "\n".join(dict.fromkeys(lines))


def _nearest(location: list[str]) -> str:
    fields = Config.model_fields
    if len(location) > 1:
        section = fields[location[0]].annotation
        assert section is not None
        valid = [f"{location[0]}.{key}" for key in section.model_fields]
    else:
        valid = list(fields)
    close = difflib.get_close_matches(".".join(location), valid, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{hint} (valid: {', '.join(valid)})"
