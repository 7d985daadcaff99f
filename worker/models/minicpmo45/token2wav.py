"""Speech tokens to sound: the flow and a vocoder of `assets/token2wav`, for many speakers at once.

The files come in two generations (minicpmo-utils up to 1.0.6, and 1.0.7), told apart by what is
there. The newer one has a causal vocoder with a configuration file; of the older one the sizes
follow from the tensors. Both have the same flow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import ModelLoadError
from worker.compile.compiler import Compiler
from worker.models.minicpmo45.checkpoint import (
    CheckedTensors,
    Entry,
    entry_of,
    first_line,
    read_torch,
)
from worker.models.minicpmo45.layout import Shapes, check_tensors
from worker.models.minicpmo45.voice import MAX_USED_S, SILENT_CODE, VoiceFeatures
from worker.models.minicpmo45.voice_config import read_flow_config, read_hift_config
from worker.models.minicpmo45.voice_layout import flow_shapes, hift_shapes
from worker.models.minicpmo45.voice_stages import VoiceStages
from worker.models.minicpmo45.weights import RandomTensors, fill
from worker.nn.causal_vocoder import CausalVocoder
from worker.nn.conformer import FRAMES_PER_TOKEN, Trim
from worker.nn.flow import Flow, FlowCache, FlowConfig, FlowVoice, flow_weights
from worker.nn.hift import Hift, HiftConfig, hift_weights, legacy_config
from worker.nn.legacy_vocoder import LegacyVocoder
from worker.nn.transfer import ints, to_device
from worker.nn.vocoder import SavedRow, Vocoder

MAX_PROMPT_FRAMES = 2 * 25 * MAX_USED_S
"""Of a voice; a longer one is cut. Rows take 0.7 MB (fp32, 5 steps) per frame."""


@dataclass(frozen=True, slots=True)
class SavedTurn:
    """What a row holds, copied."""

    flow: tuple[Tensor, ...]
    vocoder: SavedRow


class Token2Wav:
    """Nets and caches; a row is one speaker. Everything is fp32, on one device."""

    def __init__(self, flow: Flow, hift: Hift, original: Hift | None = None) -> None:
        """
        Args:
            hift: the net that streams; it says which generation this is.
            original: the legacy net for whole utterances that comes with a causal one.
        """
        self.flow = flow
        self.hift = hift
        self.is_causal = hift.config.is_causal
        self.max_prompt_frames = MAX_PROMPT_FRAMES
        self._original = original
        self._source_noise: Tensor | None = None
        self._cache: FlowCache | None = None
        self._vocoder: Vocoder | None = None
        self._stages: VoiceStages | None = None

    @property
    def device(self) -> torch.device:
        return self.flow.mu.weight.device

    @property
    def cache(self) -> FlowCache:
        assert self._cache is not None, "allocate() comes before any turn"
        return self._cache

    @property
    def vocoder(self) -> Vocoder:
        assert self._vocoder is not None, "allocate() comes before any turn"
        return self._vocoder

    def set_noise(self, flow: Tensor, source: Tensor | None = None) -> None:
        """Replace the random tables, which come from fixed seeds, by given ones.

        Call it before `allocate` and `set_voice`.

        Args:
            flow: what every mel starts from, `[1, 80, F]`, used periodically.
            source: of the vocoder, `[N, 9]`, used periodically; None = as before.
        """
        self.flow.noise = flow.to(self.device)
        if source is not None:
            self._source_noise = source.to(self.device)

    def allocate(self, n_rows: int, max_prompt_frames: int = MAX_PROMPT_FRAMES) -> None:
        """Make the caches of `n_rows` speakers; `declare` follows, if there are to be stages.

        Args:
            max_prompt_frames: longest voice (50 frames a second); longer ones are cut.
        """
        self.max_prompt_frames = max_prompt_frames
        self._cache = FlowCache.allocate(
            self.flow.config, n_rows, max_prompt_frames, device=self.device
        )
        self._vocoder = self._make_vocoder(n_rows)
        self._stages = None

    def declare(self, compiler: Compiler) -> None:
        """Declare what streams as stages and regions; without a plan a CPU works without stages."""
        if compiler.uses_stages(self.device):
            self._stages = VoiceStages(self.flow, self.cache, self.vocoder, compiler)

    def _make_vocoder(self, n_rows: int) -> Vocoder:
        options: dict[str, Any] = {"device": self.device, "noise": self._source_noise}
        if not self.is_causal:
            return LegacyVocoder(self.hift, n_rows, **options)
        original = None
        if self._original is not None:
            original = LegacyVocoder(self._original, 0, device=self.device)
        return CausalVocoder(self.hift, n_rows, original=original, **options)

    @torch.inference_mode()
    def set_voice(self, features: VoiceFeatures) -> FlowVoice:
        """Run a voice's prompt; the value is where each turn in this voice begins.

        The look-ahead behind the prompt is silence in the older generation, the prompt's own
        beginning in the newer one, as each was made.
        """
        codes, mel = self._prompt(features)
        n_ahead = self.flow.config.encoder.n_lookahead
        ahead = codes[:n_ahead] if self.is_causal else torch.full_like(codes[:1], SILENT_CODE)
        ahead = ahead.repeat(-(-n_ahead // len(ahead)))[:n_ahead]  # a prompt may be shorter
        return self.flow.set_voice(codes, mel, features.speaker.to(self.device), ahead)

    def _prompt(self, features: VoiceFeatures) -> tuple[Tensor, Tensor]:
        n_codes = min(len(features.codes), self.max_prompt_frames // FRAMES_PER_TOKEN)
        return (
            features.codes[:n_codes].to(self.device),
            features.mel24k[: FRAMES_PER_TOKEN * n_codes].to(self.device),
        )

    @torch.inference_mode()
    def start_turn(self, rows: Sequence[int], voice: FlowVoice) -> None:
        """Begin a turn in some rows, whatever they held before."""
        for row in rows:
            self.flow.start_turn(self.cache, row, voice)
            self.vocoder.start_turn(row)

    @torch.inference_mode()
    def stream(
        self, rows: Sequence[int], codes: Sequence[Sequence[int]], is_last: bool
    ) -> list[NDArray[np.float32]]:
        """Return the next samples of each row, 24 kHz.

        Args:
            rows: none twice; each has begun a turn.
            codes: the same number for each row, the three looked ahead at included: those come
                again with the next call. Of a turn's last call all come out.
            is_last: whether the turn ends here.
        """
        if self._stages is not None:
            n_ahead = 0 if is_last else self.flow.config.encoder.n_lookahead
            n_frames = FRAMES_PER_TOKEN * (len(codes[0]) - n_ahead)
            silences = self.vocoder.book(rows, n_frames, is_last)
            made = self._stages.chunk(rows, codes, is_last).cpu().numpy()
            return [one[n:] for one, n in zip(made, silences, strict=True)]
        tokens = to_device(np.array(codes, dtype=np.int64), self.device)
        mel = self.flow.chunk(self.cache, ints(rows, self.device), tokens, is_last)
        samples = self.vocoder.chunk(rows, mel, is_last)
        ends = np.cumsum([len(one) for one in samples])[:-1]
        # One copy to the host for all rows.
        return np.split(torch.cat(samples).cpu().numpy(), ends)

    @torch.inference_mode()
    def whole(self, codes: Sequence[int], features: VoiceFeatures) -> NDArray[np.float32]:
        """Return the samples of a complete utterance, made at once; needs no row."""
        prompt, mel = self._prompt(features)
        tokens = torch.tensor(list(codes), device=self.device)
        made = self.flow.whole(tokens, prompt, mel, features.speaker.to(self.device))
        vocoder = self._vocoder or self._make_vocoder(0)
        return vocoder.whole(made[None])[0].cpu().numpy()

    def poison(self, row: int) -> None:
        """Make the row unreadable: a call that still looked at it would give NaN."""
        self.cache.poison(row)
        self.vocoder.poison(row)

    def save(self, row: int) -> SavedTurn:
        """Return copies of all that the row holds."""
        return SavedTurn(self.cache.save(row), self.vocoder.save(row))

    def restore(self, row: int, saved: SavedTurn) -> None:
        """Put back what `save` gave, into this row or another."""
        self.cache.restore(row, saved.flow)
        self.vocoder.restore(row, saved.vocoder)


def random_token2wav(
    n_timesteps: int = 5,
    device: torch.device | str = "cpu",
    seed: int = 0,
    is_causal: bool = False,
    flow: FlowConfig | None = None,
    hift: HiftConfig | None = None,
) -> Token2Wav:
    """Return nets with random weights, made on the device.

    Args:
        flow, hift: sizes; None = the published ones.
    """
    flow = dataclasses.replace(flow or FlowConfig(), n_timesteps=n_timesteps)
    hift = hift or HiftConfig(is_causal=is_causal)
    constants = {
        "pos_bias_u": 0.0,
        "pos_bias_v": 0.0,
        "f0_predictor.classifier.bias": 120.0,  # Hz: a voice's
        "conv_post.bias": -4.0,  # log of the magnitudes: not too loud
    }

    def tensors(shapes: Shapes) -> RandomTensors:
        return RandomTensors(shapes, device, torch.float32, seed, constants)

    return Token2Wav(
        build_flow(tensors(flow_shapes(flow)), flow, device),
        build_hift(tensors(hift_shapes(hift)), hift, device),
    )


def build_flow(source: Mapping[str, Tensor], config: FlowConfig, device: Any) -> Flow:
    return fill(lambda: Flow(config), flow_weights(source, config)).to(device)


def build_hift(source: Mapping[str, Tensor], config: HiftConfig, device: Any) -> Hift:
    return fill(lambda: Hift(config), hift_weights(source, config)).to(device)


# ---- files


def read_token2wav(
    folder: Path,
    n_timesteps: int = 5,
    device: torch.device | str = "cpu",
    trim: Trim = "intended",
) -> Token2Wav:
    """Read an asset folder of either generation.

    Args:
        trim: how the encoder's cache is cut in turns of more than some seconds; "packed" repeats
            a mistake of the older generation.

    Raises:
        ModelLoadError: a file is missing or damaged, or its tensors are not those that its
            configuration asks for.
    """
    is_causal = find_generation(folder)
    flow_config = read_flow_config(folder / "flow.yaml", n_timesteps, trim)
    flow: Mapping[str, Tensor] = read_tensors(folder / "flow.pt", device)
    check(folder / "flow.pt", flow, flow_shapes(flow_config), "flow.yaml")
    hift = read_tensors(folder / "hift.pt", device)
    original = None
    if is_causal:
        config = read_hift_config(folder / "config.yaml")
        check(folder / "hift.pt", hift, hift_shapes(config), "config.yaml")
        path = folder / "hift_original.pt"
        original = read_legacy(path, read_tensors(path, device), device)
        net = build_hift(CheckedTensors(folder / "hift.pt", hift), config, device)
    else:
        net = read_legacy(folder / "hift.pt", hift, device)
    flow = CheckedTensors(folder / "flow.pt", flow)
    return Token2Wav(build_flow(flow, flow_config, device), net, original)


def find_generation(folder: Path) -> bool:
    """Return whether the folder is of the newer generation.

    Raises:
        ModelLoadError: it is of neither, with the names of the files that are missing.
    """
    newer = [name for name in ("config.yaml", "hift_original.pt") if (folder / name).is_file()]
    needed = ["flow.yaml", "flow.pt", "hift.pt"]
    if newer:  # one of them alone is a damaged folder, not an older one
        needed += ["config.yaml", "hift_original.pt"]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        verb = "makes" if len(missing) == 1 else "make"
        raise ModelLoadError(
            f"{folder} lacks {', '.join(missing)}, which {verb} the voice; download the "
            "checkpoint again, or set audio.enabled to false for answers in text only"
        )
    return bool(newer)


def read_tensors(path: Path, device: torch.device | str) -> dict[str, Tensor]:
    """Return the tensors of a torch file on the device, without the prefix that some have."""
    return {
        name.removeprefix("generator."): tensor.to(device) if tensor.is_floating_point() else tensor
        for name, tensor in read_torch(path).items()
    }


def read_legacy(path: Path, tensors: Mapping[str, Tensor], device: torch.device | str) -> Hift:
    """Build a legacy net, whose sizes follow from its tensors."""
    try:
        config = legacy_config(tensors)
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise ModelLoadError(
            f"{path} is no vocoder of the older kind ({first_line(error)}); download the "
            "checkpoint again"
        ) from error
    check(path, tensors, hift_shapes(config), "the sizes of its first layers")
    return build_hift(CheckedTensors(path, tensors), config, device)


def check(path: Path, tensors: Mapping[str, Tensor], expected: Shapes, by: str) -> None:
    entries: dict[str, Entry] = {name: entry_of(path, t) for name, t in tensors.items()}
    check_tensors(entries, expected, lambda _: False, by)
