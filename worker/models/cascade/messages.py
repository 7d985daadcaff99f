"""Messages with sound and pictures -> text: the language model of this back end knows nothing else.

Sound is transcribed. Of pictures and films only the text in them is read, so the model is told
what it is: what a picture shows, or that there is no text in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from worker.engine.contract import Op, Program
from worker.models.cascade.answer import Costs
from worker.models.cascade.reading import READ_TEXT, ReadRequest, cut_text
from worker.models.contract import MessagePart, Picture, Video

if TYPE_CHECKING:
    from worker.models.cascade.model import CascadeModel

SECONDS_PER_FRAME: Final = 5
MAX_VIDEO_FRAMES: Final = 4
"""Of a film, one picture for every `SECONDS_PER_FRAME` is read, at most so many: 0.3 s each."""

REFERENCE_VOICE: Final = "reference_voice"
"""Named as ignored for sound in a system message: there is one voice."""
IMAGE_CONTENT: Final = "image_content"
"""Named as ignored for a picture (or film) without text: this back end cannot see."""

NO_SPEECH: Final = "The recording has no speech in it."


@dataclass(slots=True)
class Read:
    """What a message says to a model of text."""

    texts: list[str] = field(default_factory=list)
    """What was written and said, in order."""
    notes: list[str] = field(default_factory=list)
    """What the message shows besides; it stands before the texts."""
    transcripts: list[str] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        return "\n\n".join(filter(None, [*self.notes, "\n".join(filter(None, self.texts))]))

    @property
    def heard(self) -> str:
        return " ".join(self.transcripts)


@dataclass(frozen=True, slots=True)
class Reading:
    """Programs that read the messages of one slot, one at a time."""

    model: CascadeModel
    slot: int
    clock: Callable[[], float]
    costs: Costs
    deadline: float

    def read(self, role: str, parts: Sequence[MessagePart]) -> Program:
        """Program whose value is the `Read` message."""
        found = Read()
        for part in parts:
            if isinstance(part, str):
                found.texts.append(part)
            elif isinstance(part, Picture):
                yield from self._look(found, "picture", [part.pixels])
            elif isinstance(part, Video):
                yield from self._look(found, "video", frames_of(part))
                if part.samples.size:
                    yield from self._listen(found, part.samples)
            elif role == "system":
                found.ignored.add(REFERENCE_VOICE)
            else:
                yield from self._listen(found, part.samples, NO_SPEECH)
        return found

    def _listen(self, found: Read, samples: NDArray[np.float32], without: str = "") -> Program:
        with self.costs.timed("transcribe_ms", self.clock):
            transcriber = self.model.transcriber
            heard = yield from transcriber.transcribe(self.slot, samples, self.deadline)
        if heard:
            found.texts.append(heard)
            found.transcripts.append(heard)
        elif without:
            found.notes.append(without)

    def _look(self, found: Read, name: str, frames: Sequence[NDArray[np.uint8]]) -> Program:
        seen: list[str] = []
        for frame in frames:
            with self.costs.timed("vision_ms", self.clock):
                text = yield Op(READ_TEXT, ReadRequest(frame), deadline=self.deadline)
            if text and text not in seen:
                seen.append(text)
        if seen:
            found.notes.append(f"The {name} shows this text:\n" + cut_text("\n".join(seen)))
        else:
            found.notes.append(f"The {name} shows no text.")
            found.ignored.add(IMAGE_CONTENT)


def text_length(parts: Sequence[MessagePart]) -> int:
    """Return the number of characters that are there before anything is read."""
    return sum(len(part) for part in parts if isinstance(part, str))


def frames_of(video: Video) -> list[NDArray[np.uint8]]:
    """Return the pictures that are read of a film: the middle ones of equal stretches of it."""
    frames = [seconds[len(seconds) // 2] for seconds in video.seconds if seconds]
    n = min(MAX_VIDEO_FRAMES, math.ceil(len(frames) / SECONDS_PER_FRAME))
    return [frames[(2 * index + 1) * len(frames) // (2 * n)] for index in range(n)]
