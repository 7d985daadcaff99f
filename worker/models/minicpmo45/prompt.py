"""From messages to the rows that the language model is fed.

A message is a list of parts: text, pictures, audio clips, video. In the rendered text each picture
and clip has a mark; the text between marks is tokenised as it stands, marks become special tokens
around embeddings. Layouts follow the MiniCPM-o 4.5 reference (chat template, placeholders); its
cut of long prompts is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import BadAudio, BadMessage
from shared.limits import INPUT_SAMPLE_RATE_HZ
from worker.engine.contract import Op, Program
from worker.models.contract import Clip, MessagePart, Picture, TurnMessage, Video
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.images import image_layout, plan_slices
from worker.models.minicpmo45.ops import Piece
from worker.nn.mel import CLIP_SAMPLES, HOP

if TYPE_CHECKING:
    from worker.models.minicpmo45.model import MiniCpmO45

IMAGE_MARK: Final = "<image>./</image>"
AUDIO_MARK: Final = "<audio>./</audio>"
_MARKS: Final = re.compile(f"({re.escape(IMAGE_MARK)}|{re.escape(AUDIO_MARK)})")

MIN_CLIP_SAMPLES: Final = 1600
"""Shorter clips are filled up with silence: below 0.08 s the encoder has nothing to pool."""
GROUP_ROWS: Final = 10
"""Rows of one second, which has its own start and end where audio comes in groups."""
MAX_SLICES_PER_OP: Final = 8
"""Of about 1.3 ms each on an H200: nobody waits long behind a chat with many pictures."""


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """How pictures and clips of a prompt are laid out."""

    max_slice_nums: int
    use_image_id: bool
    is_clip_chunked: bool
    """Whether a frame of audio sees its own second and the past only (chat), or the whole clip."""
    has_audio_groups: bool = False
    """Every second of a clip has its own start and end token."""


# ---- text


def flatten(parts: Sequence[MessagePart]) -> Iterator[str | Picture | Clip]:
    """Yield parts with every video taken apart: frames of a second, then its audio."""
    for part in parts:
        if not isinstance(part, Video):
            yield part
            continue
        n_heard = -(-len(part.samples) // INPUT_SAMPLE_RATE_HZ)
        for index in range(max(len(part.seconds), n_heard)):
            frames = part.seconds[index] if index < len(part.seconds) else ()
            yield from map(Picture, frames)
            start = index * INPUT_SAMPLE_RATE_HZ
            heard = part.samples[start : start + INPUT_SAMPLE_RATE_HZ]
            if heard.size:
                yield Clip(heard)


def content(parts: Sequence[MessagePart], is_omni: bool) -> str:
    """Return a message's text with a mark for each picture and clip.

    Args:
        is_omni: parts follow each other directly; else each stands on its own line.

    Raises:
        BadMessage: a text contains a mark, so that pictures would land in the wrong places.
    """
    texts = []
    for part in flatten(parts):
        if isinstance(part, str):
            found = _MARKS.search(part)
            if found:
                raise BadMessage(f"a message contains the text {found[0]}, which is reserved")
            texts.append(part)
        else:
            texts.append(IMAGE_MARK if isinstance(part, Picture) else AUDIO_MARK)
    return ("" if is_omni else "\n").join(texts)


def media_of(messages: Sequence[TurnMessage]) -> tuple[Picture | Clip, ...]:
    """Return pictures and clips in the order of their marks."""
    return tuple(
        part for message in messages for part in flatten(message.parts) if not isinstance(part, str)
    )


def has_audio(messages: Sequence[TurnMessage]) -> bool:
    return any(isinstance(part, Clip) for part in media_of(messages))


def rendered(messages: Sequence[TurnMessage], is_omni: bool) -> list[Mapping[str, str]]:
    """Return messages as the chat template takes them."""
    return [{"role": m.role, "content": content(m.parts, is_omni)} for m in messages]


# ---- rows


def audio_rows(model: MiniCpmO45, n_samples: int) -> int:
    """Return the embeddings of a clip of 16 kHz samples, which is encoded in pieces."""
    pieces = [CLIP_SAMPLES] * (n_samples // CLIP_SAMPLES) + [n_samples % CLIP_SAMPLES]
    return sum(model.config.audio.n_embeddings(-(-n // HOP)) for n in pieces if n)


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt before its pictures and clips are encoded: ids, and which medium comes between."""

    items: tuple[tuple[int, ...] | Picture | Clip, ...]
    n_rows: int
    """Rows of the whole prompt."""


def lay_out(
    model: MiniCpmO45, text: str, media: Sequence[Picture | Clip], options: MediaOptions
) -> Layout:
    """Tokenise a rendered text and count its rows. `<|listen|>` in it is left out.

    Raises:
        BadMessage: marks and media do not agree.
        BadImage: a picture that cannot be sliced.
        BadAudio: a clip without samples.
    """
    items: list[tuple[int, ...] | Picture | Clip] = []
    waiting = iter(media)
    n_rows, n_pictures = 0, 0
    for text_or_mark in _MARKS.split(text):
        if not _MARKS.fullmatch(text_or_mark):
            ids = encoded(model, text_or_mark)
            items.append(ids)
            n_rows += len(ids)
            continue
        medium = next(waiting, None)
        if not isinstance(medium, Picture if text_or_mark == IMAGE_MARK else Clip):
            raise BadMessage("the chat template has moved or dropped a picture or an audio clip")
        items.append(medium)
        if isinstance(medium, Picture):
            n_rows += len(_picture_ids(model, medium, n_pictures, options))
            n_pictures += 1
        else:
            n_rows += _clip_rows(model, medium, options)
    if next(waiting, None) is not None:
        raise BadMessage("the chat template has dropped a picture or an audio clip")
    return Layout(tuple(items), n_rows)


def encoded(model: MiniCpmO45, text: str) -> tuple[int, ...]:
    """Return the ids of a text without `<|listen|>`, which only full duplex may say."""
    return tuple(i for i in model.tokenizer.encode(text) if i != model.tokenizer.ids.listen)


def _picture_ids(
    model: MiniCpmO45, picture: Picture, index: int, options: MediaOptions
) -> tuple[int, ...]:
    """Return a picture's ids, one `<unk>` for each row of its slices."""
    height, width, _ = picture.pixels.shape
    plan = plan_slices(width, height, options.max_slice_nums, model.config.slices)
    image_id = index if options.use_image_id else None
    return tuple(model.tokenizer.encode(image_layout(plan.grid, image_id, model.n_image_tokens)))


def _clip_rows(model: MiniCpmO45, clip: Clip, options: MediaOptions) -> int:
    if not clip.samples.size:
        raise BadAudio("an audio clip has no samples")
    n = audio_rows(model, len(_filled_up(clip)))
    n_groups = -(-n // GROUP_ROWS) if options.has_audio_groups else 1
    return n + 2 * n_groups


# ---- embeddings


def embed(model: MiniCpmO45, layout: Layout, options: MediaOptions, deadline: float) -> Program:
    """Encode a layout's pictures and clips; the value is its pieces, in order."""
    pieces: list[Piece] = []
    n_pictures = 0
    padded_frames = _longest_frames(layout) if model.compat.short_clips_hear_padding else 0
    for item in layout.items:
        if isinstance(item, tuple):
            pieces.append(item)
        elif isinstance(item, Picture):
            pieces += yield from _embed_picture(model, item, n_pictures, options, deadline)
            n_pictures += 1
        else:
            pieces += yield from _embed_clip(model, item, padded_frames, options, deadline)
    return tuple(piece for piece in pieces if len(piece))


def _embed_picture(
    model: MiniCpmO45, picture: Picture, index: int, options: MediaOptions, deadline: float
) -> Program:
    request = ops.InputRequest(None, None, (picture.pixels,), (options.max_slice_nums,))
    prepared: ops.PreparedInput = yield Op(ops.PREPARE_INPUT, request, deadline=deadline)
    slices = prepared.slices[0]
    embeddings: list[Tensor] = []
    for first in range(0, len(slices), MAX_SLICES_PER_OP):
        batch = slices[first : first + MAX_SLICES_PER_OP]
        embeddings += yield Op(ops.ENCODE_IMAGES, batch, deadline=deadline)
    return list(filled(_picture_ids(model, picture, index, options), embeddings, model))


def filled(ids: Sequence[int], embeddings: Sequence[Tensor], model: MiniCpmO45) -> Iterator[Piece]:
    """Yield ids with each run of placeholders replaced by the next embeddings `[n, D]`."""
    waiting = iter(embeddings)
    start = position = 0
    while position < len(ids):
        if ids[position] != model.tokenizer.ids.unk:
            position += 1
            continue
        rows = next(waiting)
        yield tuple(ids[start:position])
        yield rows
        start = position = position + len(rows)
    yield tuple(ids[start:])


def _longest_frames(layout: Layout) -> int:
    """Return the mel frames of the longest piece of all clips."""
    clips = [len(_filled_up(item)) for item in layout.items if isinstance(item, Clip)]
    return -(-min(max(clips, default=0), CLIP_SAMPLES) // HOP)


def _filled_up(clip: Clip) -> NDArray[np.float32]:
    return np.pad(clip.samples, (0, max(0, MIN_CLIP_SAMPLES - len(clip.samples))))


def _embed_clip(
    model: MiniCpmO45, clip: Clip, padded_frames: int, options: MediaOptions, deadline: float
) -> Program:
    """Encode a clip in ops of at most 30 s, which is what the encoder holds."""
    samples = _filled_up(clip)
    if len(samples) > CLIP_SAMPLES and model.compat.long_clips_hear_padding:
        padded_frames = CLIP_SAMPLES // HOP
    heard: list[Tensor] = []
    for first in range(0, len(samples), CLIP_SAMPLES):
        part = samples[first : first + CLIP_SAMPLES]
        request = ops.ClipRequest(part, options.is_clip_chunked, padded_frames)
        heard.append((yield Op(ops.ENCODE_CLIP, request, deadline=deadline)))
    start, end = (model.tokenizer.ids.audio_start,), (model.tokenizer.ids.audio_end,)
    if not options.has_audio_groups:
        return [start, *heard, end]
    pieces: list[Piece] = []
    for rows in heard:
        for first in range(0, len(rows), GROUP_ROWS):
            pieces += [start, rows[first : first + GROUP_ROWS], end]
    return pieces
