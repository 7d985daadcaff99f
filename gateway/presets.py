"""Presets: what a conversation may begin with, read from YAML files."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.voice_files import VoiceClip, VoiceFile
from shared.errors import VoiceUnreadable
from shared.limits import MAX_PROMPT_CHARS

log = logging.getLogger(__name__)

MODES = ("audio_duplex", "half_duplex_audio", "omni", "turnbased")
DUPLEX_MODES = frozenset({"audio_duplex", "omni"})
VALID_ID = re.compile(r"[A-Za-z0-9_-]+")

Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARS)]


class BadPreset(Exception):
    """A file that is no preset; the text says why."""


class VoiceChoice(BaseModel):
    """`path`: a sound file below the assets; None = the default voice. `name`: None = the file's"""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str | None = None
    name: str | None = None


class TextItem(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: Prompt


class AudioItem(VoiceChoice):
    type: Literal["audio"]


class PresetFile(BaseModel):
    """What every file has; keys that nobody here knows go to the pages as they are."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    order: int = 999


class DuplexPreset(PresetFile):
    system_prompt: Prompt
    ref_audio: VoiceChoice = VoiceChoice()


class TurnPreset(PresetFile):
    system_content: Annotated[
        list[Annotated[TextItem | AudioItem, Field(discriminator="type")]], Field(min_length=1)
    ]


@dataclass(frozen=True, slots=True)
class NamedVoice:
    file: VoiceFile
    name: str

    async def clip(self) -> VoiceClip:
        """Return the sound, or none of it: the preset can still be used for its words."""
        try:
            return replace(await self.file.read(), name=self.name)
        except (FileNotFoundError, VoiceUnreadable):
            return VoiceClip(self.name, 0, "")


class Preset:
    """One preset with its voices, in the order of its audio items."""

    def __init__(self, preset_id: str, file: DuplexPreset | TurnPreset, voices: list[NamedVoice]):
        self.id = preset_id
        self.order = file.order
        self._file = file
        self._voices = voices

    async def row(self) -> dict[str, Any]:
        """Return the preset in the wire's shape, without sound."""
        voices = [
            {**(await voice.clip()).row, "data": None, "path": voice.file.shown_path}
            for voice in self._voices
        ]
        row = {"id": self.id, **self._file.model_dump()}
        if isinstance(self._file, DuplexPreset):
            return {**row, "ref_audio": voices[0]}
        rest = iter(voices)
        content = [
            {"type": "text", "text": item.text}
            if isinstance(item, TextItem)
            else {"type": "audio", **next(rest)}
            for item in self._file.system_content
        ]
        return {**row, "system_content": content}

    async def audio(self) -> dict[str, Any]:
        """Return the preset's sound: of a file that cannot be read, `data` is None."""
        clips = [await voice.clip() for voice in self._voices]
        rows = [{**clip.row, "data": clip.data or None} for clip in clips]
        if isinstance(self._file, DuplexPreset):
            return {"ref_audio": rows[0]}
        return {"system_content_audio": rows} if rows else {}


class Presets:
    """All presets, by mode and in their order; read once.

    A file that is no preset is logged and left out, the others are there.

    Args:
        assets: the folder with `presets/<mode>/<id>.yaml`, below which the voices' paths begin.
        default_voice: the voice of presets that name none.
    """

    def __init__(self, assets: Path, default_voice: VoiceFile) -> None:
        self._assets = assets.resolve()
        self._default_voice = default_voice
        self._files: dict[Path, VoiceFile] = {}
        self.by_mode = {mode: self._load(mode) for mode in MODES}

    def find(self, mode: str, preset_id: str) -> Preset | None:
        return next((one for one in self.by_mode.get(mode, []) if one.id == preset_id), None)

    def _load(self, mode: str) -> list[Preset]:
        found = []
        for path in sorted((self._assets / "presets" / mode).glob("*.yaml")):
            try:
                found.append(self._read(mode, path))
            except BadPreset as error:
                log.error("preset left out path=%s reason=%s", path, error)
        return sorted(found, key=lambda preset: preset.order)

    def _read(self, mode: str, path: Path) -> Preset:
        if not VALID_ID.fullmatch(path.stem):
            raise BadPreset("a preset's file name consists of letters, digits, '_' and '-'")
        raw = _read_yaml(path)
        if raw.pop("id", path.stem) != path.stem:
            raise BadPreset("id is not the file's name; leave it out")
        kind = DuplexPreset if mode in DUPLEX_MODES else TurnPreset
        try:
            file = kind.model_validate(raw)
        except ValidationError as error:
            raise BadPreset("; ".join(_explain(error))) from error
        return Preset(path.stem, file, [self._voice(one) for one in _choices(file)])

    def _voice(self, choice: VoiceChoice) -> NamedVoice:
        if choice.path is None:
            return NamedVoice(self._default_voice, choice.name or self._default_voice.name)
        path = (self._assets / choice.path).resolve()
        if not path.is_relative_to(self._assets) or not path.is_file():
            raise BadPreset(f"there is no file {choice.path} below {self._assets}")
        file = self._files.setdefault(path, VoiceFile(path, choice.path))
        return NamedVoice(file, choice.name or file.name)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.load(path.read_bytes(), Loader=yaml.CSafeLoader)
        # Dates and the like have no place in an answer.
        json.dumps(raw, allow_nan=False)
    except (OSError, yaml.YAMLError, UnicodeError, TypeError, ValueError, RecursionError) as error:
        raise BadPreset(" ".join(str(error).split())) from error
    if not isinstance(raw, dict):
        raise BadPreset(f"expected keys and values, got {type(raw).__name__}")
    return raw


def _choices(file: DuplexPreset | TurnPreset) -> Iterator[VoiceChoice]:
    if isinstance(file, DuplexPreset):
        yield file.ref_audio
    else:
        yield from (item for item in file.system_content if isinstance(item, AudioItem))


def _explain(error: ValidationError) -> Iterator[str]:
    for item in error.errors():
        yield f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
