"""What messages become: text, marks, rows, and the ops that encode pictures and clips."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.config import Compat
from shared.errors import BadAudio, BadImage, BadMessage
from tests.fakes.turn_model import TOKENIZER, TurnModel
from tests.golden.driver import run_program
from worker.models.contract import Clip, Picture, TurnMessage, Video
from worker.models.minicpmo45 import ops, prompt
from worker.models.minicpmo45.feeding import n_rows
from worker.models.minicpmo45.prompt import MediaOptions

OPTIONS = MediaOptions(max_slice_nums=4, use_image_id=True, is_clip_chunked=True)
IDS = TOKENIZER.ids


def picture(width=448, height=448):
    return Picture(np.zeros((height, width, 3), np.uint8))


def clip(seconds):
    return Clip(np.zeros(int(16_000 * seconds), np.float32))


def pieces_of(parts, options=OPTIONS, model=None, is_omni=True):
    """Return the pieces of one message's content, and what was run for them."""
    model = model or TurnModel()
    text = prompt.content(parts, is_omni)
    layout = prompt.lay_out(
        model, text, prompt.media_of([TurnMessage("user", tuple(parts))]), options
    )
    played = run_program(model, prompt.embed(model, layout, options, 0.0))
    assert n_rows(played.value) == layout.n_rows
    return played


def shown(pieces):
    """Ids as text; `[n]` for n rows of embeddings."""
    texts = (
        TOKENIZER.decode(p, skip_special=False) if isinstance(p, tuple) else f"[{len(p)}]"
        for p in pieces
    )
    return "".join(texts)


def test_parts_stand_on_lines_of_their_own():
    parts = ["look:", picture(), clip(1)]

    assert prompt.content(parts, is_omni=False) == "look:\n<image>./</image>\n<audio>./</audio>"


def test_parts_of_omni_messages_follow_each_other():
    assert prompt.content(["a", picture(), "b"], is_omni=True) == "a<image>./</image>b"


@pytest.mark.parametrize("mark", ["<image>./</image>", "<audio>./</audio>"])
def test_a_text_with_a_mark_is_refused(mark):
    with pytest.raises(BadMessage, match="reserved"):
        prompt.content([f"see {mark}"], is_omni=True)


def test_a_video_is_frames_and_sound_second_by_second():
    frames = [np.full((14, 14, 3), i, np.uint8) for i in range(3)]
    video = Video(((frames[0], frames[1]), (frames[2],)), np.arange(40_000, dtype=np.float32))

    parts = list(prompt.flatten(["film", video]))

    assert [type(part) for part in parts[1:]] == [Picture, Picture, Clip, Picture, Clip, Clip]
    assert parts[4].pixels is frames[2]
    assert [(p.samples[0], len(p.samples)) for p in parts if isinstance(p, Clip)] == [
        (0.0, 16_000),
        (16_000.0, 16_000),
        (32_000.0, 8_000),
    ]


def test_a_silent_video_has_frames_only():
    video = Video(((np.zeros((14, 14, 3), np.uint8),),) * 2, np.zeros(0, np.float32))

    assert [type(part) for part in prompt.flatten([video])] == [Picture, Picture]


def test_a_picture_is_its_number_and_its_slices_row_by_row():
    played = pieces_of([picture(), "x", picture(1000, 1000)])

    tiles = "<slice>[4]</slice><slice>[4]</slice>"
    assert shown(played.value) == (
        "<image_id>0</image_id><image>[4]</image>x"
        f"<image_id>1</image_id><image>[4]</image>{tiles}\n{tiles}"
    )


def test_rows_of_slices_are_in_the_order_of_the_tiles():
    rows = [p for p in pieces_of([picture(1000, 1000)]).value if isinstance(p, torch.Tensor)]

    assert torch.cat(rows)[:, 1].tolist() == list(range(20))


def test_pictures_without_numbers():
    options = MediaOptions(max_slice_nums=1, use_image_id=False, is_clip_chunked=True)

    assert shown(pieces_of([picture(1000, 1000)], options).value) == "<image>[4]</image>"


def test_many_slices_are_encoded_in_batches():
    options = MediaOptions(max_slice_nums=20, use_image_id=False, is_clip_chunked=True)
    model = TurnModel()

    played = pieces_of([picture(448 * 5, 448 * 4)], options, model)

    batches = [len(ran.op.payload) for ran in played.of(ops.ENCODE_IMAGES)]
    assert batches == [8, 8, 5]


def test_a_clip_is_one_run_between_start_and_end():
    played = pieces_of(["say ", clip(2.5), "!"])

    assert shown(played.value) == "say <|audio_start|>[25]<|audio_end|>!"
    assert played.of(ops.ENCODE_CLIP)[0].op.payload.is_chunked


def test_a_clip_in_groups_has_start_and_end_for_each_second():
    options = MediaOptions(1, use_image_id=False, is_clip_chunked=False, has_audio_groups=True)

    played = pieces_of([clip(2.5)], options)

    group = "<|audio_start|>[{}]<|audio_end|>"
    assert shown(played.value) == group.format(10) * 2 + group.format(5)
    assert not played.of(ops.ENCODE_CLIP)[0].op.payload.is_chunked


@pytest.mark.parametrize("seconds", [0.01, 0.1, 1, 7.3, 30, 31.25, 61])
def test_rows_are_counted_before_anything_is_encoded(seconds):
    assert len(pieces_of([clip(seconds)]).value) >= 3  # `pieces_of` compares the counts


def test_a_clip_too_short_to_be_heard_is_filled_up():
    request = pieces_of([clip(0.01)]).of(ops.ENCODE_CLIP)[0].op.payload

    assert len(request.samples) == prompt.MIN_CLIP_SAMPLES


def test_a_clip_without_samples_is_refused():
    with pytest.raises(BadAudio, match="no samples"):
        pieces_of([clip(0)])


def test_a_picture_that_cannot_be_sliced_is_refused_before_anything_runs():
    model = TurnModel()
    with pytest.raises(BadImage):
        pieces_of([clip(1), picture(9000, 1)], model=model)

    assert not model._counts


def test_clips_hear_themselves_only():
    played = pieces_of([clip(1), clip(2)])

    assert [ran.op.payload.padded_frames for ran in played.of(ops.ENCODE_CLIP)] == [0, 0]


def test_clips_hear_padding_if_asked_to_do_as_the_original():
    model = TurnModel(compat=Compat(short_clips_hear_padding=True))

    played = pieces_of([clip(1), clip(2)], model=model)

    assert [ran.op.payload.padded_frames for ran in played.of(ops.ENCODE_CLIP)] == [200, 200]


def test_listen_is_left_out():
    layout = prompt.lay_out(TurnModel(), "a<|listen|>b", (), OPTIONS)

    assert layout.items == (tuple(TOKENIZER.encode("ab")),)
    assert IDS.listen not in layout.items[0]


def test_a_template_that_drops_a_picture_is_noticed():
    with pytest.raises(BadMessage, match="dropped"):
        prompt.lay_out(TurnModel(), "no mark", (picture(),), OPTIONS)


def test_a_template_that_swaps_media_is_noticed():
    with pytest.raises(BadMessage, match="moved"):
        prompt.lay_out(TurnModel(), prompt.AUDIO_MARK, (picture(),), OPTIONS)
