"""Films of a request: pictures second by second, sound, and what is refused."""

from __future__ import annotations

import contextlib
import http.server
import io
import math
import struct
import threading
from pathlib import Path

import av
import numpy as np
import pytest

from shared.errors import BadImage, BadMessage
from tests.media import write_clip
from worker.models.contract import Video
from worker.sessions import video
from worker.sessions.media import MediaAccount, MediaBudget
from worker.sessions.video import decode_video


def account() -> MediaAccount:
    return MediaAccount(MediaBudget(1))


def decode(data: bytes, stack_frames: int = 1, **options) -> Video:
    return decode_video(data, stack_frames, account(), **options)


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> bytes:
    """Three seconds: red, blue, red, with a tone."""
    path = tmp_path_factory.mktemp("clips") / "clip.mp4"
    write_clip(path, seconds=3)
    return path.read_bytes()


def film(seconds: float, rate: int = 10, size: tuple[int, int] = (64, 32), kind="mp4") -> bytes:
    """A silent film; its left half is white, its right half black."""
    out = io.BytesIO()
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        picture = np.zeros((size[1], size[0], 3), np.uint8)
        picture[:, : size[0] // 2] = 255
        for _ in range(round(seconds * rate)):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return out.getvalue()


def sound_only() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), "fltp", "mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


def colours(decoded: Video) -> list[str]:
    return [
        "red" if frame[..., 0].mean() > frame[..., 2].mean() else "blue"
        for second in decoded.seconds
        for frame in second
    ]


def test_a_film_gives_a_picture_and_the_sound_of_each_second(clip):
    decoded = decode(clip)

    assert [len(second) for second in decoded.seconds] == [1, 1, 1]
    assert colours(decoded) == ["red", "blue", "red"]
    assert decoded.seconds[0][0].shape == (256, 1024, 3)
    assert decoded.seconds[0][0].dtype == np.uint8
    # Whole seconds: the codec's last block is no fourth one.
    assert decoded.samples.shape == (48_000,)
    assert 0.1 < np.abs(decoded.samples).max() < 0.5


def test_more_pictures_of_a_second_are_spread_evenly_in_it(clip):
    decoded = decode(clip, stack_frames=2)

    assert [len(second) for second in decoded.seconds] == [2, 2, 2]
    assert colours(decoded) == ["red", "red", "blue", "blue", "red", "red"]


def test_all_pictures_together_keep_the_limit_of_pixels(clip):
    decoded = decode(clip, max_pixels=30_000)
    sizes = [frame.shape[0] * frame.shape[1] for second in decoded.seconds for frame in second]

    assert len(sizes) == 3
    assert 20_000 < sum(sizes) <= 30_000


def test_a_silent_film_has_no_samples():
    decoded = decode(film(1.5))

    assert [len(second) for second in decoded.seconds] == [1, 1]
    assert decoded.samples.size == 0


@pytest.mark.parametrize("kind", ["matroska", "avi", "mpegts"])
def test_other_containers_are_read(kind):
    assert len(decode(film(2, kind=kind)).seconds) == 2


def rotated(data: bytes) -> bytes:
    """The file with a note that its picture is to be turned by a quarter clockwise."""
    at = data.index(b"tkhd") + 4 + 40
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    return data[:at] + matrix + data[at + len(matrix) :]


def test_the_picture_of_a_phone_is_turned_upright():
    """White on the left, turned clockwise, is white at the top."""
    (frame,) = decode(rotated(film(0.5))).seconds[0]

    assert frame.shape == (64, 32, 3)
    assert frame[:32].mean() > 200
    assert frame[32:].mean() < 50


@pytest.mark.parametrize("stack_frames", [0, -1, 9])
def test_an_impossible_number_of_pictures_is_refused(clip, stack_frames):
    with pytest.raises(BadMessage, match="expected 1 to 8"):
        decode(clip, stack_frames)


def test_a_long_film_is_refused_before_it_is_decoded(monkeypatch):
    data = film(3)
    monkeypatch.setattr(video, "MAX_VIDEO_S", 2.0)
    monkeypatch.setattr(video._Reader, "read", None)

    with pytest.raises(BadImage, match=r"video is 3\.0 s long, at most 2 s"):
        decode(data)


def test_a_long_film_that_says_it_is_short_is_refused(monkeypatch):
    data = film(3)
    made = video._Reader.__init__

    def believe(self, *args):
        made(self, *args)
        monkeypatch.setattr(video, "MAX_VIDEO_S", 2.0)

    monkeypatch.setattr(video._Reader, "__init__", believe)

    with pytest.raises(BadImage, match="at most 2 s"):
        decode(data)


def with_sound(n_samples: int, rate: int) -> bytes:
    """A film of half a second that says so, with one block of sound."""
    out = io.BytesIO()
    with av.open(out, "w", format="avi") as container:
        picture = container.add_stream("mpeg4", rate=10)
        picture.width, picture.height, picture.pix_fmt = 64, 32, "yuv420p"
        sound = container.add_stream("pcm_u8", rate=rate, layout="mono")
        for _ in range(5):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 64, 3), np.uint8), format="rgb24")
            container.mux(picture.encode(frame))
        container.mux(picture.encode(None))
        block = av.AudioFrame.from_ndarray(np.full((1, n_samples), 128, np.uint8), "u8", "mono")
        block.sample_rate = rate
        container.mux(sound.encode(block))
        container.mux(sound.encode(None))
    return out.getvalue()


def test_a_little_sound_that_would_last_for_hours_is_not_resampled(monkeypatch):
    """20 kB would become 1.3 GB, 1 MB would be the end of the worker."""

    class Resampler:
        def __init__(self, **_):
            pass

        def resample(self, frame):
            raise AssertionError("it takes the memory")

    monkeypatch.setattr(av, "AudioResampler", Resampler)

    with pytest.raises(BadImage, match="at most 60 s"):
        decode(with_sound(20_000, 1))


def image_film(side: int) -> bytes:
    """One PNG picture, whose size the decoder alone finds out."""
    out = io.BytesIO()
    with av.open(out, "w", format="avi") as container:
        stream = container.add_stream("png", rate=10)
        stream.width, stream.height, stream.pix_fmt = side, side, "gray"
        picture = np.zeros((side, side), np.uint8)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="gray")))
        container.mux(stream.encode(None))
    return out.getvalue()


def test_a_picture_beyond_the_limit_is_refused_before_there_is_room_for_it(monkeypatch):
    """A few hundred kB of PNG hold 256 megapixels."""
    taken = []
    monkeypatch.setattr(video._Reader, "_take", lambda *_: taken.append(1))

    with pytest.raises(BadImage):
        decode(image_film(8000))
    assert taken == []


def test_a_size_that_the_file_tells_is_told(monkeypatch):
    monkeypatch.setattr(video, "MAX_IMAGE_PIXELS", 1000)

    with pytest.raises(BadImage, match="64x32, at most 1000 pixels"):
        decode(film(0.5))


def test_a_film_of_too_many_pictures_says_how_many_may_be(monkeypatch):
    monkeypatch.setattr(video, "_MAX_FRAMES", 4)

    with pytest.raises(BadImage, match="more than 4 pictures"):
        decode(film(0.5))


def test_a_film_longer_than_it_says_names_the_pixels_it_had(monkeypatch):
    data = film(3)
    made = video._Reader.__init__

    def believe(self, container, stack_frames, account, max_pixels):
        made(self, container, stack_frames, account, max_pixels)
        self._max_frame_pixels = max_pixels

    monkeypatch.setattr(video._Reader, "__init__", believe)

    with pytest.raises(BadImage, match="more than the 5000 pixels"):
        decode(data, max_pixels=5000)


@pytest.mark.parametrize("data", [b"", b"no film", bytes(1000), sound_only()])
def test_other_files_are_refused(data):
    with pytest.raises(BadImage, match="video"):
        decode(data)


def test_a_file_that_breaks_off_is_refused(clip):
    with pytest.raises(BadImage, match="damaged"):
        decode(clip[: len(clip) // 2])


def test_damage_gives_pictures_or_a_typed_error_and_nothing_else():
    good = film(1)
    random = np.random.default_rng(7)
    for _ in range(60):
        data = bytearray(good)
        for at in random.integers(0, len(data), 8):
            data[at] = random.integers(256)
        with contextlib.suppress(BadImage):
            decode(bytes(data))


def test_a_playlist_makes_nobody_read_other_files_and_addresses(tmp_path: Path):
    (tmp_path / "secret.ts").write_bytes(film(1, kind="mpegts"))
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        for target in (
            f"file://{tmp_path}/secret.ts",
            f"http://127.0.0.1:{server.server_port}/x.ts",
        ):
            head = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n"
            for playlist in (
                f"{head}{target}\n#EXT-X-ENDLIST\n",
                f"ffconcat version 1.0\nfile '{target}'\n",
            ):
                with pytest.raises(BadImage):
                    decode(playlist.encode())
        server.shutdown()
        thread.join()

    assert asked == []


def test_decoding_stops_when_nobody_waits(clip):
    waits = account()
    waits.is_closed = True

    with pytest.raises(BadImage, match="nobody waits"):
        decode_video(clip, 1, waits)


def test_decoding_stops_in_the_middle_when_nobody_waits_any_more(clip, monkeypatch):
    waits, taken = account(), []
    monkeypatch.setattr(video._Reader, "_take", lambda self, frame, at_s: taken.append(at_s))
    decoded = video._Reader._decoded

    def leave(self):
        for number, item in enumerate(decoded(self)):
            waits.is_closed = number == 5
            yield item
            assert number < 5, "it decodes on"

    monkeypatch.setattr(video._Reader, "_decoded", leave)

    with pytest.raises(BadImage, match="nobody waits"):
        decode_video(clip, 1, waits)
    assert len(taken) <= 5


def test_pictures_are_counted_until_they_are_gone(clip):
    budget = MediaBudget(1)
    decoded = decode_video(clip, 1, MediaAccount(budget))

    assert budget.total == 3 * 3 * 256 * 1024
    del decoded
    assert budget.total == 0


def test_a_picture_is_not_stretched():
    (frame,) = decode(film(0.5, size=(1920, 640)), max_pixels=3_000_000).seconds[0]

    assert frame.shape[1] == 1024
    assert math.isclose(frame.shape[1] / frame.shape[0], 3.0, rel_tol=0.01)
