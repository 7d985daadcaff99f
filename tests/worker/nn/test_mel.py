"""Log-mel features: of clips against transformers, of streams against recomputing the buffer."""

import pickle

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from worker.nn.mel import CLIP_SAMPLES, StreamingMel, clip_mel, mel_filters


def noise(n_samples, seed=0):
    return np.random.default_rng(seed).standard_normal(n_samples).astype(np.float32) * 0.1


# ---- clips


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("n_samples", [1, 8000, 16_159, CLIP_SAMPLES - 300, CLIP_SAMPLES])
def test_a_clip_has_the_features_of_the_padded_window(n_samples, n_mels):
    """The loudest frame lies behind the last one kept: the floor must know it all the same."""
    samples = noise(n_samples) * 1e-3
    samples[-50:] = 1.0

    mel, lens = clip_mel(samples, n_mels)

    extract = WhisperFeatureExtractor(feature_size=n_mels)
    theirs = extract(samples, sampling_rate=16_000, return_tensors="pt")["input_features"]
    n_frames = -(-n_samples // 160)
    assert lens == (n_frames,)
    torch.testing.assert_close(mel, theirs[..., :n_frames], rtol=0, atol=1e-4)


def test_a_long_clip_becomes_padded_rows_with_floors_of_their_own():
    samples = noise(2 * CLIP_SAMPLES + 20_001)
    samples[CLIP_SAMPLES:] *= 1e-3

    mel, lens = clip_mel(samples)

    assert mel.shape == (3, 80, 3000)
    assert lens == (3000, 3000, 126)
    torch.testing.assert_close(mel[1:2], clip_mel(samples[CLIP_SAMPLES : 2 * CLIP_SAMPLES])[0])
    torch.testing.assert_close(mel[2:, :, :126], clip_mel(samples[2 * CLIP_SAMPLES :])[0])
    assert not mel[2, :, 126:].any()


def test_a_clip_without_samples_is_refused():
    with pytest.raises(ValueError, match="without samples"):
        clip_mel(np.zeros(0, np.float32))


# ---- streams


class Recomputing:
    """The reference's way: all features of a buffer of up to 30 s, for every second."""

    def __init__(self):
        self.waiting = np.zeros(560, np.float32)
        self.buffer = np.zeros(0, np.float32)
        self.base = self.emitted = 0

    def push(self, samples):
        self.waiting = np.concatenate((self.waiting, samples))
        n = 16_000 if len(self.buffer) else 16_480
        self.buffer = np.concatenate((self.buffer, self.waiting[:n]))
        self.waiting = self.waiting[n:]
        if len(self.buffer) >= CLIP_SAMPLES:
            self.buffer = self.buffer[160_000:]
            self.base += 1000
        window = torch.hann_window(400)
        spectrum = torch.stft(
            torch.from_numpy(self.buffer), 400, 160, window=window, return_complex=True
        )
        power = spectrum[:, :-1].abs() ** 2
        log_mel = (torch.from_numpy(mel_filters(80)) @ power).clamp(min=1e-10).log10()
        floor = log_mel.max() - 8.0 if len(self.buffer) >= 80_000 else torch.tensor(-10.0)
        mel = (torch.maximum(log_mel, floor) + 4.0) / 4.0
        first, last = max(0, self.emitted - 2), self.emitted + 102
        self.emitted += 100
        return mel[:, first - self.base : last - self.base]


def seconds(n_units, click_at=()):
    """Quiet seconds of changing level, with clicks at positions of the padded stream."""
    stream = noise(n_units * 16_000, seed=3) * 0.01
    gains = np.random.default_rng(4).choice([1e-4, 0.01, 1.0], n_units).astype(np.float32)
    stream *= np.repeat(gains, 16_000)
    for position in click_at:
        stream[position - 560] = 100.0
    return stream.reshape(n_units, 16_000)


@pytest.mark.parametrize(
    "click_at",
    [
        (),
        (700,),  # in the first second: gone with the first slide
        (160_100,),  # reflected, and so louder, while the buffer starts at 160000
        (320_030,),
        (16_480 + 16_000 * 5 - 30,),  # reflected at the buffer's end, in one second only
        (700, 160_100, 320_030, 480_210),
    ],
)
def test_a_stream_equals_recomputing_its_buffer(click_at):
    ours, theirs = StreamingMel(), Recomputing()

    for unit, samples in enumerate(seconds(52, click_at)):
        mel = ours.push(samples)

        expected = theirs.push(samples)
        assert mel.shape == (80, 102 if unit == 0 else 104)
        torch.testing.assert_close(mel, expected, rtol=0, atol=2e-5, msg=f"second {unit}")
        assert ours.buffer_samples == len(theirs.buffer)
        assert ours.base_frames == theirs.base
        assert (ours.n_units, ours.emitted_frames) == (unit + 1, theirs.emitted)
        assert ours.dynamic_floor == (len(theirs.buffer) >= 80_000) == (unit >= 4)


def test_a_stream_before_its_first_second_holds_nothing():
    mel = StreamingMel()

    assert mel.buffer_samples == mel.base_frames == mel.emitted_frames == 0
    assert not mel.dynamic_floor


def test_a_stream_with_128_mels_has_them():
    assert StreamingMel(128).push(noise(16_000)).shape == (128, 102)


@pytest.mark.parametrize(
    "samples", [np.zeros(15_999, np.float32), np.zeros(16_001, np.float32), np.zeros(16_000)]
)
def test_anything_but_a_second_of_float32_is_refused(samples):
    with pytest.raises(ValueError, match="must be float32"):
        StreamingMel().push(samples)


@pytest.mark.parametrize("after", [0, 1, 12, 29])
def test_a_copy_goes_on_like_the_original_whatever_that_one_did(after):
    """Save and restore: the original hears other things meanwhile, and its buffer slides."""
    heard = seconds(40, (200_000,))
    uninterrupted, stream = StreamingMel(), StreamingMel()
    for samples in heard[:after]:
        uninterrupted.push(samples)
        stream.push(samples)

    saved = stream.copy()
    for _ in range(12):
        stream.push(np.zeros(16_000, np.float32))

    for samples in heard[after:]:
        assert torch.equal(saved.push(samples), uninterrupted.push(samples))


def test_a_stream_does_not_grow():
    stream = StreamingMel()
    sizes = []

    for samples in seconds(90):
        stream.push(samples)
        sizes.append(len(pickle.dumps(stream)))

    assert max(sizes) < 17_000
    assert max(sizes[60:]) - max(sizes[30:60]) < 32


def test_what_was_emitted_is_not_changed_by_what_follows():
    stream = StreamingMel()
    emitted = [stream.push(samples) for samples in seconds(6)]
    kept = [mel.clone() for mel in emitted]

    stream.push(noise(16_000) * 9)

    assert all(torch.equal(a, b) for a, b in zip(emitted, kept, strict=True))
