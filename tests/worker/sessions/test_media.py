"""Media checks: what is refused, and that nothing else than a typed error comes out."""

import contextlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shared.errors import BadAudio, BadImage, BadMessage
from shared.protocol import Input
from worker.sessions.media import MediaDecoder, decode_chunk, decode_image, decode_voice

AUDIO = np.zeros(4, "<f4").tobytes()


def file(kind: str = "JPEG", size: tuple[int, int] = (4, 2), mode: str = "RGB", **fields) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size).save(out, kind, **fields)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_becomes_rgb_rows(kind):
    assert decode_image(file(kind)).shape == (2, 4, 3)


@pytest.mark.parametrize(
    ("kind", "mode"), [("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "P"), ("PNG", "RGBA"), ("PNG", "1")]
)
def test_every_colour_mode_becomes_rgb(kind, mode):
    assert decode_image(file(kind, mode=mode)).shape == (2, 4, 3)


def test_a_truncated_image_is_refused():
    data = file(size=(64, 64))

    with pytest.raises(BadImage):
        decode_image(data[: len(data) // 2])


@pytest.mark.parametrize("data", [b"", b"not an image", file("GIF"), file("BMP")])
def test_other_files_are_refused(data):
    with pytest.raises(BadImage, match="no readable JPEG or PNG"):
        decode_image(data)


def test_too_many_pixels_are_refused_before_they_are_decoded():
    header_only = file("PNG", size=(3000, 3000), mode="1")[:100]

    with pytest.raises(BadImage, match="3000x3000"):
        decode_image(header_only, max_pixels=1000)


def test_the_frames_of_a_chunk_share_the_pixel_limit(monkeypatch):
    monkeypatch.setattr("worker.sessions.media.MAX_IMAGE_PIXELS", 15)

    with pytest.raises(BadImage, match="at most 7 pixels are left"):
        decode_chunk(Input(0, AUDIO, [file(), file()]))


def test_exif_orientation_is_applied():
    exif = Image.Exif()
    exif[0x0112] = 6

    assert decode_image(file(exif=exif.tobytes())).shape == (4, 2, 3)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data:UserWarning")
def test_damaged_exif_does_not_spoil_an_image():
    data = file(exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff garbage")

    assert decode_image(data).shape == (2, 4, 3)


@settings(max_examples=150)
@given(st.sampled_from([file(size=(16, 16)), file("PNG", size=(16, 16))]), st.data())
def test_damage_gives_pixels_or_a_typed_error_and_nothing_else(good, data):
    at = data.draw(st.integers(0, len(good) - 1))
    junk = data.draw(st.binary(min_size=1, max_size=8))
    with contextlib.suppress(BadImage):
        decode_image(good[:at] + junk + good[at + len(junk) :])


def test_a_chunk_carries_its_settings():
    chunk = decode_chunk(Input(3, AUDIO, [file()], force_listen=True, max_slice_nums=2))

    assert (chunk.seq, len(chunk.audio), len(chunk.frames)) == (3, 4, 1)
    assert (chunk.force_listen, chunk.max_slice_nums) == (True, 2)


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        (b"", "empty"),
        (b"12345", "multiple of 4"),
        (np.array([np.nan], "<f4").tobytes(), "not finite"),
        (np.array([1e9], "<f4").tobytes(), "peaks"),
        (bytes(4 * 16_000 * 31), "at most 30 s"),
    ],
)
def test_bad_audio_is_refused(audio, words):
    with pytest.raises(BadAudio, match=words):
        decode_chunk(Input(0, audio))


def test_too_many_frames_are_refused():
    with pytest.raises(BadImage, match="17 frames"):
        decode_chunk(Input(0, AUDIO, [b"x"] * 17))


def test_an_impossible_slice_count_is_refused():
    with pytest.raises(BadMessage, match="max_slice_nums is 0"):
        decode_chunk(Input(0, AUDIO, max_slice_nums=0))


def test_a_long_reference_voice_is_refused():
    with pytest.raises(BadAudio, match="at most 60 s"):
        decode_voice(bytes(4 * 16_000 * 61))


async def test_images_are_decoded_beside_the_loop():
    media = MediaDecoder(1)
    try:
        chunk = await media.chunk(Input(0, AUDIO, [file()]))
        voice = await media.voice(b"")
    finally:
        media.close()

    assert chunk.frames[0].shape == (2, 4, 3)
    assert len(voice) == 0
