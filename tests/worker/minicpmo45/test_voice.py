"""Reference voices: features, limits, and the wiring of the two ONNX networks.

The published ONNX files are not at hand in tests. Tiny graphs with the same inputs and outputs
stand for them: they show that the right numbers reach a real session, not what the real ones say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.errors import BadAudio, ModelLoadError
from worker.models.minicpmo45 import voice
from worker.models.minicpmo45.voice import (
    VoiceEncoder,
    fbank,
    fitted,
    neutral_voice,
    prompt_mel24k,
    resampled_24k,
)

RATE_HZ = 16_000


def tone(seconds: float, hz: float = 300.0, rate_hz: int = RATE_HZ) -> NDArray[np.float32]:
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    return (0.3 * np.sin(2 * math.pi * hz * time)).astype(np.float32)


class StubSession:
    """Remembers what it was fed, and gives what it was told."""

    def __init__(self, names: Sequence[str], result: NDArray[Any] | None = None) -> None:
        self.names = names
        self.result = result
        self.fed: list[Mapping[str, NDArray[Any]]] = []

    def get_inputs(self) -> Sequence[Any]:
        return [SimpleNamespace(name=name) for name in self.names]

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]
    ) -> Sequence[Any]:
        assert output_names is None
        self.fed.append(input_feed)
        if self.result is not None:
            return [self.result]
        n_frames = input_feed[self.names[0]].shape[2]
        return [np.arange(-(-n_frames // 4), dtype=np.int32)[None]]


def stubs() -> tuple[StubSession, StubSession, VoiceEncoder]:
    tokenizer = StubSession(["feats", "feats_length"])
    speaker = StubSession(["input"], np.linspace(0, 1, 192, dtype=np.float64)[None])
    return tokenizer, speaker, VoiceEncoder(tokenizer, speaker)


# ---- encoder


def test_a_clip_becomes_codes_and_twice_as_many_mel_frames_and_a_speaker() -> None:
    tokenizer, speaker, encoder = stubs()

    features = encoder.encode(tone(2.02))

    (fed,) = tokenizer.fed
    assert fed["feats"].shape == (1, 128, 202)
    assert fed["feats"].dtype == np.float32
    assert fed["feats_length"].dtype == np.int32
    assert fed["feats_length"].tolist() == [202]
    assert features.codes.tolist() == list(range(51))
    assert features.codes.dtype == torch.int64
    assert features.mel24k.shape == (102, 80)
    (fed,) = speaker.fed
    assert fed["input"].shape == (1, 200, 80)
    assert np.abs(fed["input"].mean(axis=1)).max() < 1e-4
    assert features.speaker.shape == (192,)
    assert features.speaker.dtype == torch.float32
    assert features.cut_from_s is None


def test_of_a_long_clip_the_first_17_s_are_used_and_it_says_so() -> None:
    tokenizer, _, encoder = stubs()

    features = encoder.encode(tone(20.5))

    assert tokenizer.fed[0]["feats"].shape == (1, 128, 1700)
    assert features.mel24k.shape == (850, 80)
    assert features.cut_from_s == 20.5
    assert 850 + 150 <= 1000  # what the speech decoder has room for


def test_the_same_clip_is_encoded_once() -> None:
    tokenizer, _, encoder = stubs()

    first = encoder.encode(tone(2))

    assert encoder.encode(tone(2)) is first
    assert encoder.encode(tone(2, hz=301)) is not first
    assert len(tokenizer.fed) == 2


def test_the_oldest_unused_voice_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice, "N_CACHED", 2)
    tokenizer, _, encoder = stubs()
    for hz in (300, 400, 300, 500):  # 400 is the one that was not used again
        encoder.encode(tone(1, hz))

    encoder.encode(tone(1, 300))
    assert len(tokenizer.fed) == 3
    encoder.encode(tone(1, 400))
    assert len(tokenizer.fed) == 4


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (np.zeros(0, np.float32), r"0\.00 s"),
        (tone(0.9), r"0\.90 s, must be 1 to 60 s"),
        (tone(60.5), r"60\.50 s, must be 1 to 60 s"),
        (np.zeros(32_000, np.float32), "silent"),
        (1e-4 * tone(2), "silent"),
        (np.full(32_000, np.nan, np.float32), "not finite"),
        (np.full(32_000, np.inf, np.float32), "not finite"),
    ],
)
def test_a_clip_that_can_be_no_voice_is_refused(samples: NDArray[np.float32], reason: str) -> None:
    tokenizer, _, encoder = stubs()

    with pytest.raises(BadAudio, match=reason):
        encoder.encode(samples)
    assert not tokenizer.fed


def test_a_clip_without_codes_is_refused() -> None:
    tokenizer, _, encoder = stubs()
    tokenizer.result = np.zeros((1, 0), np.int32)

    with pytest.raises(BadAudio, match="no speech"):
        encoder.encode(tone(2))


# ---- asset folders


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """Encode a protobuf message; a field is its number and an integer, a text or a message."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


FLOAT, INT32 = 1, 6
Dims = Sequence[int | str]


def value_info(name: str, kind: int, dims: Dims) -> bytes:
    shape = message(*((1, message((1 if isinstance(d, int) else 2, d))) for d in dims))
    return message((1, name), (2, message((1, message((1, kind), (2, shape))))))


def node(kind: str, inputs: Sequence[str], output: str, **attributes: int | Sequence[int]) -> bytes:
    encoded = [
        message((1, name), (3, value), (20, 2))
        if isinstance(value, int)
        else message((1, name), *((8, each) for each in value), (20, 7))
        for name, value in attributes.items()
    ]
    return message(
        *((1, name) for name in inputs), (2, output), (4, kind), *((5, a) for a in encoded)
    )


def model(nodes: Sequence[bytes], inputs: Sequence[bytes], output: bytes) -> bytes:
    graph = message(
        *((1, each) for each in nodes), (2, "g"), *((11, each) for each in inputs), (12, output)
    )
    return message((1, 8), (8, message((2, 13))), (7, graph))


def write_networks(folder: Path) -> None:
    """A tokenizer that gives the loudest bin of every fourth frame plus the clip's length, and a
    speaker that is the mean over time of the features."""
    tokenizer = model(
        [
            node("MaxPool", ["feats"], "pooled", kernel_shape=[4], strides=[4]),
            node("ReduceMax", ["pooled"], "loudest", axes=[1], keepdims=0),
            node("Cast", ["loudest"], "whole", to=INT32),
            node("Add", ["whole", "feats_length"], "codes"),
        ],
        [value_info("feats", FLOAT, [1, 128, "t"]), value_info("feats_length", INT32, [1])],
        value_info("codes", INT32, [1, "n"]),
    )
    speaker = model(
        [node("ReduceMean", ["input"], "output", axes=[1], keepdims=0)],
        [value_info("input", FLOAT, [1, "t", 80])],
        value_info("output", FLOAT, [1, 80]),
    )
    (folder / voice.TOKENIZER_FILE).write_bytes(tokenizer)
    (folder / voice.SPEAKER_FILE).write_bytes(speaker)


def test_the_networks_of_an_asset_folder_run(tmp_path: Path) -> None:
    write_networks(tmp_path)

    encoder = VoiceEncoder.for_assets(tmp_path)

    assert encoder is not None
    features = encoder.encode(tone(2))
    assert features.codes.tolist() == [201] * 50  # loudest bin 1.x, and 200 frames
    assert features.mel24k.shape == (100, 80)
    assert features.speaker.abs().max() < 1e-3  # a mean of what has lost its mean


@pytest.mark.parametrize("missing", [voice.TOKENIZER_FILE, voice.SPEAKER_FILE])
def test_without_one_of_the_networks_there_is_no_encoder(tmp_path: Path, missing: str) -> None:
    write_networks(tmp_path)
    (tmp_path / missing).unlink()

    assert VoiceEncoder.for_assets(tmp_path) is None


def test_a_damaged_network_is_a_load_error_that_names_the_file(tmp_path: Path) -> None:
    write_networks(tmp_path)
    (tmp_path / voice.SPEAKER_FILE).write_bytes(b"not a graph")

    with pytest.raises(ModelLoadError, match=r"campplus\.onnx cannot be loaded"):
        VoiceEncoder.for_assets(tmp_path)


# ---- neutral voice


def test_the_neutral_voice_is_silence_and_always_the_same() -> None:
    one, two = neutral_voice(30), neutral_voice(30)

    assert one.codes.tolist() == [4218] * 30
    assert one.codes.dtype == torch.int64
    assert one.mel24k.shape == (60, 80)
    assert one.mel24k.isfinite().all()
    assert one.mel24k.max() < -10
    assert float(one.speaker.norm()) == pytest.approx(1.0)
    for name in ("codes", "mel24k", "speaker"):
        assert torch.equal(getattr(one, name), getattr(two, name))


# ---- features


def test_resampling_keeps_a_tone_and_the_length() -> None:
    ours = resampled_24k(torch.from_numpy(tone(0.5, 1000.0)))

    theirs = torch.from_numpy(tone(0.5, 1000.0, 24_000))
    assert ours.shape == theirs.shape
    inner = slice(200, -200)  # the ends see silence around the clip
    torch.testing.assert_close(ours[inner], theirs[inner], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("n", "expected"), [(16_000, 24_000), (16_001, 24_002), (7, 11)])
def test_resampling_gives_three_samples_for_two(n: int, expected: int) -> None:
    assert resampled_24k(torch.zeros(n)).shape == (expected,)


def test_resampling_makes_no_images_above_8_khz() -> None:
    noise = torch.randn(16_000, generator=torch.Generator().manual_seed(0))

    power = torch.fft.rfft(resampled_24k(noise)).abs().square()

    hz = torch.arange(len(power))  # one second: a bin is 1 Hz
    assert power[hz > 8300].mean() < 1e-5 * power[hz < 7000].mean()


def test_a_mel_is_cut_or_its_last_frame_repeated() -> None:
    mel = torch.arange(6.0).view(3, 2)

    assert fitted(mel, 2).tolist() == [[0, 1], [2, 3]]
    assert fitted(mel, 5).tolist() == [[0, 1], [2, 3], [4, 5], [4, 5], [4, 5]]


def test_the_mel_of_a_tone_is_loudest_at_its_pitch() -> None:
    mel = prompt_mel24k(torch.from_numpy(tone(1, 1000.0, 24_000)))

    assert mel.shape == (80, 50)
    # Slaney's scale is linear to 1 kHz, which is mel 15 of 45.2 at 8 kHz.
    assert abs(int(mel[:, 25].argmax()) - 81 * 15 / 45.2) <= 1.5


def test_filter_bank_features_are_of_whole_frames_and_ignore_an_offset() -> None:
    samples = torch.from_numpy(tone(1))

    features = fbank(samples)

    assert features.shape == (98, 80)
    # Quiet bins hold the rounding noise of the samples; the loud ones say what is meant.
    loud = features > features.max() - 12
    shifted = fbank(samples + 0.25)
    assert (features - shifted)[loud].abs().max() < 1e-2


def test_filter_bank_features_of_silence_are_finite() -> None:
    assert fbank(torch.zeros(1600)).isfinite().all()
