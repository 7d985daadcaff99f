"""What both streaming vocoders share: rows, windows and the delay.

A vocoder serves many speakers at once: each has a row in static caches. A chunk's window is the
row's cached past followed by the new mel frames, so every chunk of F frames has the same shape; a
turn younger than the cached past begins inside the window (`Hift`, `start`). The same sum gives
the silence in front of a turn: what lies before its begin comes out as zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from worker.nn.hift import Hift
from worker.nn.transfer import ints

DELAY_FRAMES = 8
"""Mel frames (160 ms) that a chunk holds back until the next one."""


@dataclass(frozen=True, slots=True)
class SavedRow:
    """What a row holds, copied; only what the turn has reached so far."""

    tensors: dict[str, Tensor]
    n_received: int
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Reach:
    """What is known without asking the device: mel frames that rows of a call have received."""

    least: int
    most: int


class Vocoder(ABC):
    """A net and its caches. One row = one speaker's stream of turns."""

    past_frames: int
    """Mel frames before a chunk that belong to its window."""

    def __init__(
        self, hift: Hift, n_rows: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.hift = hift
        self.mel = torch.zeros(
            n_rows, hift.config.n_mels, self.past_frames, dtype=dtype, device=device
        )
        """The last mel frames of each row, newest at the end."""
        self.received = torch.zeros(n_rows, dtype=torch.int64, device=device)
        """Mel frames of the turn so far; `_n_received` is the host's copy."""
        self._n_received = [0] * n_rows
        self._has_ended = [False] * n_rows

    @abstractmethod
    def _streams(self) -> dict[str, Tensor]:
        """Caches besides the mel, by name, `[rows, ...]`; those in time end at the newest."""

    @abstractmethod
    def _live(self, row: int) -> dict[str, int]:
        """How much of the end of each cache in time the turn has reached: mel frames, samples."""

    @abstractmethod
    def _decode(self, rows: Tensor, window: Tensor, reach: Reach, is_last: bool) -> Tensor:
        """Decode a window `[B, n_mels, past + F]` and renew the caches other than the mel.

        Returns:
            `[B, n]`: from the first held-back frame on; `[F * hop]` of it unless `is_last`.
        """

    @abstractmethod
    def whole(self, mel: Tensor) -> Tensor:
        """Return the samples `[B, F * hop]` of complete utterances `[B, n_mels, F]`."""

    def start_turn(self, row: int) -> None:
        """Forget the row's past: its next chunk is the first of a turn."""
        self.received[row] = 0
        self._n_received[row] = 0
        self._has_ended[row] = False

    def chunk(self, rows: Sequence[int], mel: Tensor, is_last: bool) -> list[Tensor]:
        """Feed each row its next mel frames; return the samples `[n]` of each, fp32.

        A chunk gives F frames of samples: the first of a turn begins with `DELAY_FRAMES` of
        silence, the last gives what was held back besides. A turn of one chunk has neither.

        Args:
            rows: cache rows, none twice. They need not have come equally far.
            mel: `[B, n_mels, F]`; a turn's first chunk has at least `DELAY_FRAMES`, if it is not
                its last.
            is_last: whether the turn ends here; the row then needs `start_turn`.
        """
        assert mel.shape[0] == len(rows)
        received = [self._n_received[row] for row in rows]
        silences = self.book(rows, mel.shape[2], is_last)
        index = ints(rows, self.mel.device)
        samples = self.advance(index, mel, is_last, Reach(min(received), max(received)))
        return [one[n:] for one, n in zip(samples, silences, strict=True)]

    def book(self, rows: Sequence[int], n_frames: int, is_last: bool) -> list[int]:
        """Note on the host that rows go on by a chunk; `advance` has to follow.

        Returns:
            Samples at the begin of each row's chunk that are to be dropped: those of the delay, if
            its turn is of one chunk.
        """
        is_first = [self._n_received[row] == 0 for row in rows]
        assert len(set(rows)) == len(rows)
        assert not any(self._has_ended[row] for row in rows)
        assert is_last or n_frames >= DELAY_FRAMES or not any(is_first)
        for row in rows:
            self._n_received[row] += n_frames
            self._has_ended[row] = is_last
        silence = DELAY_FRAMES * self.hift.config.hop if is_last else 0
        return [silence if first else 0 for first in is_first]

    def advance(
        self, rows: Tensor, mel: Tensor, is_last: bool, reach: Reach | None = None
    ) -> Tensor:
        """Feed rows their next mel frames on the device alone; return samples `[B, n]`, fp32.

        Args:
            rows: int64 `[B]`, none twice.
            mel: `[B, n_mels, F]`.
            reach: saves work that no row of the call needs. None = rows may be anywhere: all sizes
                then follow from B, F and `is_last`.

        Returns:
            F frames of samples, if `is_last` those held back besides.
        """
        window = torch.cat((self.mel.index_select(0, rows), mel.to(self.mel.dtype)), dim=2)
        samples = self._decode(rows, window, reach or Reach(0, self.past_frames), is_last)
        self.mel.index_copy_(0, rows, window[:, :, -self.past_frames :])
        received = self.received.index_select(0, rows)
        self.received.index_copy_(0, rows, received + mel.shape[2])
        return samples

    def poison(self, row: int) -> None:
        """Make the row unreadable: a turn that still looked at its past would give NaN."""
        for tensor in (self.mel, *self._streams().values()):
            tensor[row] = torch.nan

    def save(self, row: int) -> SavedRow:
        """Return a copy of what the row's turn has left: `[1, ...]` each."""
        live = self._live(row)
        tensors = {
            name: tensor[row : row + 1, ..., tensor.shape[-1] - live.get(name, tensor.shape[-1]) :]
            for name, tensor in {"mel": self.mel, **self._streams()}.items()
        }
        return SavedRow(
            {name: tensor.clone() for name, tensor in tensors.items()},
            self._n_received[row],
            self._has_ended[row],
        )

    def restore(self, row: int, saved: SavedRow) -> None:
        """Put a copy back, into this row or another."""
        streams = {"mel": self.mel, **self._streams()}
        for name, tensor in saved.tensors.items():
            target = streams[name]
            target[row : row + 1, ..., target.shape[-1] - tensor.shape[-1] :] = tensor
        self.received[row] = saved.n_received
        self._n_received[row] = saved.n_received
        self._has_ended[row] = saved.has_ended

    def _skip(self, reach: Reach) -> int:
        """How many frames of the past no row has reached: they need no computing."""
        return max(0, self.past_frames - reach.most)

    def _start(self, rows: Tensor, reach: Reach, offset: int) -> Tensor | None:
        """Return where turns begin in a window without its first `offset` frames: `[B]`.

        None if all begin at its first frame or before.
        """
        if self.past_frames - reach.least <= offset:
            return None
        return (self.past_frames - offset - self.received.index_select(0, rows)).clamp(min=0)

    def _from_held_back(self, samples: Tensor, skip: int) -> Tensor:
        """Cut samples of a window without its first `skip` frames to the held-back frames on."""
        lead = (self.past_frames - DELAY_FRAMES - skip) * self.hift.config.hop
        return samples[:, lead:] if lead >= 0 else functional.pad(samples, (-lead, 0))


def noise_at(table: Tensor, first: Tensor | int, n: int) -> Tensor:
    """Return `n` rows of a periodic noise table `[N, H]` from position `first` on.

    `[n, H]`, or `[B, n, H]` for positions `[B]`; they may be negative.
    """
    begin = first[:, None] if isinstance(first, Tensor) else first
    return table[(begin + torch.arange(n, device=table.device)) % table.shape[0]]
