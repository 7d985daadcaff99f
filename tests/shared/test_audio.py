"""Bytes to samples and back; everything that is no audio is refused."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shared import audio
from shared.errors import BadAudio


@given(st.binary(max_size=200))
def test_base64_is_that_of_the_standard_library(data):
    text = base64.b64encode(data).decode()

    assert audio.encode_base64(data) == text
    assert audio.decode_base64(text) == data


@given(hnp.arrays(np.float32, st.integers(0, 200), elements=st.floats(-1, 1, width=32)))
def test_samples_survive_the_wire(samples):
    text = audio.encode_base64(audio.samples_to_f32(samples))

    assert np.array_equal(audio.samples_from_f32(audio.decode_base64(text)), samples)


@pytest.mark.parametrize(
    "text",
    [
        "A",
        "AAA",
        "A A=",
        "\u00e4AAA",
        "AAAA\n",
        "====",
        "AA=A",
        "AAAAA===",
        "AAAAA=",
        "-_AA",
        "\ud800AAA",
        "AAAA\x00",
    ],
)
def test_bad_base64_is_bad_audio(text):
    with pytest.raises(BadAudio, match="base64"):
        audio.decode_base64(text)


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 5, 4097])
def test_an_odd_number_of_bytes_is_bad_audio(n_bytes):
    with pytest.raises(BadAudio, match="multiple of 4"):
        audio.samples_from_f32(b"\x00" * n_bytes)
    with pytest.raises(BadAudio, match="multiple of 4"):
        audio.check_f32_length(b"\x00" * n_bytes, 30.0, 16_000)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_bad_audio(value):
    with pytest.raises(BadAudio, match="finite"):
        audio.samples_from_f32(np.float32([0, value]).tobytes())


def test_16_bit_values_sent_as_floats_are_bad_audio():
    with pytest.raises(BadAudio, match=r"\[-1, 1\]"):
        audio.samples_from_f32(np.float32([12000.0]).tobytes())


def test_a_chunk_above_the_limit_is_bad_audio():
    audio.check_f32_length(b"\x00" * (4 * 16_000), 1.0, 16_000)
    with pytest.raises(BadAudio, match=r"at most 1 s"):
        audio.check_f32_length(b"\x00" * (4 * 16_001), 1.0, 16_000)


def test_a_wav_file_is_read_back(tmp_path):
    samples = np.sin(np.arange(2400) / 10).astype(np.float32)
    audio.write_wav(tmp_path / "a.wav", samples, 24_000)

    read, rate = audio.read_wav(tmp_path / "a.wav")

    assert rate == 24_000
    assert np.abs(read - samples).max() < 1e-3


def test_a_file_that_is_no_wav_is_bad_audio(tmp_path):
    (tmp_path / "a.wav").write_bytes(b"RIFFxxxx")

    with pytest.raises(BadAudio, match="not a WAV"):
        audio.read_wav(tmp_path / "a.wav")
