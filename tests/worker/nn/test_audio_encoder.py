"""The audio encoder's promises: streams equal clips, rows and slots do not touch each other.

Its numbers are compared with the original's in tests/golden.
"""

import importlib.util
import os
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from worker.nn import audio_encoder
from worker.nn.audio_encoder import (
    AudioCache,
    AudioEncoder,
    AudioEncoderConfig,
    audio_encoder_weights,
    chunk_mask,
)
from worker.nn.decoder import Rows

TINY = AudioEncoderConfig(
    width=24, n_layers=2, n_heads=3, ffn_size=48, llm_dim=40, n_mels=8, max_positions=400
)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN_KERNELS = importlib.util.find_spec("triton") is not None and (
    DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
)
REACHES = ["all positions", "span", "exact rows"]


def build(config=TINY):
    torch.manual_seed(0)
    encoder = AudioEncoder(config).eval()
    for parameter in encoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return encoder.requires_grad_(False)


def mel_of(n_frames, seed=0, config=TINY):
    return torch.randn(1, config.n_mels, n_frames, generator=torch.Generator().manual_seed(seed))


def window(mel, unit):
    return mel[..., max(0, 100 * unit - 2) : 100 * unit + 102]


def hear(encoder, cache, mel, slots, past, is_first=False, reach="exact rows"):
    lengths = tuple(p + 50 for p in past)
    reaches = {"all positions": None, "span": max(lengths) + 7, "exact rows": Rows(slots, lengths)}
    return encoder.stream(
        cache, mel, torch.tensor(slots), torch.tensor(past), is_first, reaches[reach]
    )


def stream(encoder, cache, mel, slot, n_units, start=0, past=0, reach="exact rows"):
    """Hear the seconds `start .. n_units - 1` of a recording, the first one at `past`."""
    heard = []
    for unit in range(start, n_units):
        heard.append(hear(encoder, cache, window(mel, unit), (slot,), (past,), unit == 0, reach)[0])
        past += 50
    return torch.cat(heard)


# ---- streams


@pytest.mark.parametrize("reach", REACHES)
def test_a_stream_equals_the_clip_heard_in_chunks(reach):
    encoder, mel = build(), mel_of(702)

    streamed = stream(encoder, AudioCache.allocate(TINY, 1), mel, 0, 7, reach=reach)

    clip = encoder.encode_clip(mel, (702,), is_chunked=True)
    assert streamed.shape == (70, 40)
    torch.testing.assert_close(streamed, clip[:70], **CLOSE)


def test_nothing_in_a_streamed_second_waits_for_the_device():
    """Tensors without data: reading one of them on the host would raise."""
    encoder, index = build().to("meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    cache = AudioCache.allocate(TINY, 3, device="meta")

    heard = encoder.stream(cache, mel_of(104).expand(2, -1, -1).to("meta"), index, index, False)

    assert heard.shape == (2, 10, TINY.llm_dim)


@pytest.mark.parametrize("reach", REACHES)
def test_rows_with_different_pasts_equal_single_runs(reach):
    encoder = build()
    mels = [mel_of(702, seed) for seed in range(3)]
    starts, slots = (5, 1, 3), (2, 0, 3)
    cache = AudioCache.allocate(TINY, 4)
    cache.poison(1)
    expected = []
    for mel, n_units, slot in zip(mels, starts, slots, strict=True):
        stream(encoder, cache, mel, slot, n_units)
        alone = AudioCache.allocate(TINY, 1)
        expected.append(stream(encoder, alone, mel, 0, n_units + 1)[-10:])

    windows = torch.cat([window(mel, n) for mel, n in zip(mels, starts, strict=True)])
    together = hear(encoder, cache, windows, slots, tuple(50 * n for n in starts), reach=reach)

    torch.testing.assert_close(together, torch.stack(expected), **CLOSE)


def test_first_seconds_of_several_streams_run_together():
    encoder, mels = build(), [mel_of(102, seed) for seed in range(2)]

    together = hear(
        encoder, AudioCache.allocate(TINY, 2), torch.cat(mels), (1, 0), (0, 0), is_first=True
    )

    for row, mel in zip(together, mels, strict=True):
        alone = stream(encoder, AudioCache.allocate(TINY, 1), mel, 0, 1)
        torch.testing.assert_close(row, alone, **CLOSE)


@pytest.mark.parametrize("reach", REACHES)
def test_a_poisoned_slot_serves_the_next_stream_like_a_fresh_one(reach):
    encoder, mel = build(), mel_of(302)
    cache = AudioCache.allocate(TINY, 2)
    stream(encoder, cache, mel_of(402, 9), 1, 4)
    cache.poison(1)

    reused = stream(encoder, cache, mel, 1, 3, reach=reach)

    fresh = stream(encoder, AudioCache.allocate(TINY, 2), mel, 1, 3, reach=reach)
    assert torch.equal(reused, fresh)
    assert not torch.isnan(reused).any()


def test_a_restored_stream_goes_on_as_if_uninterrupted():
    encoder, mel = build(), mel_of(502)
    uninterrupted = stream(encoder, AudioCache.allocate(TINY, 1), mel, 0, 5)
    cache = AudioCache.allocate(TINY, 3)
    stream(encoder, cache, mel, 2, 3)

    saved = cache.save(2, 150)
    stream(encoder, cache, mel_of(502, 9), 2, 5)
    cache.poison(0)
    cache.restore(0, saved)

    resumed = stream(encoder, cache, mel, 0, 5, start=3, past=150)
    torch.testing.assert_close(resumed, uninterrupted[30:], **CLOSE)


def test_a_stream_that_starts_again_carries_nothing_over():
    """Position 0 again, but with the frames before it: they are the convolutions' business."""
    encoder, mel = build(), mel_of(602)
    cache = AudioCache.allocate(TINY, 1)
    stream(encoder, cache, mel, 0, 4)

    again = stream(encoder, cache, mel, 0, 6, start=4, past=0)

    fresh = AudioCache.allocate(TINY, 1)
    fresh.poison(0)
    torch.testing.assert_close(again, stream(encoder, fresh, mel, 0, 6, start=4, past=0), **CLOSE)


@pytest.mark.parametrize(
    ("max_positions", "past", "n_mel_frames", "due"),
    [
        (1500, 0, 102, False),
        (1500, 1400, 104, False),
        (1500, 1447, 104, False),
        (1500, 1448, 104, True),
        (1500, 1449, 102, True),
        (1500, 1450, 104, True),  # the 30th second
        (300, 200, 104, False),
        (300, 250, 104, True),
        (60, 50, 104, True),
    ],
)
def test_a_stream_starts_again_before_it_runs_out_of_positions(
    max_positions, past, n_mel_frames, due
):
    config = AudioEncoderConfig(8, 1, 1, 8, 8, max_positions=max_positions)

    assert config.reset_due(past, n_mel_frames) is due


def test_a_long_stream_never_leaves_its_positions():
    encoder = build(AudioEncoderConfig(8, 1, 1, 8, 8, n_mels=8, max_positions=130))
    cache = AudioCache.allocate(encoder.config, 1)
    past, pasts = 0, []
    for unit in range(7):
        mel = mel_of(104 if unit else 102, unit)
        past = 0 if encoder.config.reset_due(past, mel.shape[2]) else past
        hear(encoder, cache, mel, (0,), (past,), unit == 0, "all positions")
        pasts.append(past)
        past += encoder.config.stream_frames(mel.shape[2], unit == 0)

    assert pasts == [0, 50, 0, 50, 0, 50, 0]


# ---- kernels


@pytest.mark.skipif(not CAN_RUN_KERNELS, reason="needs Triton and a GPU or its interpreter")
@pytest.mark.parametrize("head_dim", [8, 64])
def test_a_kernel_reads_what_a_span_reads(head_dim):
    """At the last past that does not make the streams start again, too."""
    config = AudioEncoderConfig(2 * head_dim, 2, 2, 16, 8, n_mels=8, max_positions=200)
    pasts = (147, 0, 50)
    assert not config.reset_due(pasts[0], 104)
    assert config.reset_due(pasts[0] + 1, 104)
    mel, slots = torch.cat([mel_of(104, seed) for seed in range(3)]), (3, 0, 1)
    heard = []
    for kernels in (False, True):
        encoder = build(config).to(DEVICE)
        cache = AudioCache.allocate(config, 4, device=DEVICE)
        for slot in range(4):
            cache.poison(slot)
        for tensor in (*cache.keys, *cache.values):
            for slot, past in zip(slots, pasts, strict=True):
                rows = torch.randn(2, past, head_dim, generator=torch.Generator().manual_seed(slot))
                tensor[slot, :, :past] = rows
        with patch.object(audio_encoder, "has_kernels", lambda _, kernels=kernels: kernels):
            numbers = (torch.tensor(slots, device=DEVICE), torch.tensor(pasts, device=DEVICE))
            heard.append(encoder.stream(cache, mel.to(DEVICE), *numbers, is_first=False))

    assert heard[0].isfinite().all()
    torch.testing.assert_close(heard[1], heard[0], **CLOSE)


@pytest.mark.parametrize("max_positions", [64, 130, 1500])
@pytest.mark.parametrize(("n_mel_frames", "is_first"), [(102, True), (104, False)])
def test_no_second_reaches_the_last_position(max_positions, n_mel_frames, is_first):
    """Kernels take that one for padding."""
    config = AudioEncoderConfig(8, 1, 1, 8, 8, max_positions=max_positions)

    for past in range(max_positions):
        if not config.reset_due(past, n_mel_frames):
            assert past + config.stream_frames(n_mel_frames, is_first) < max_positions - 1


# ---- clips


@pytest.mark.parametrize("chunk_s", [0.5, 1.0])
def test_a_frame_of_a_chunked_clip_sees_its_chunk_and_what_came_before(chunk_s):
    encoder = build(AudioEncoderConfig(24, 2, 3, 48, 40, n_mels=8, chunk_s=chunk_s))
    mel = mel_of(400)
    n_before = round(10 * chunk_s)  # embeddings of the first chunk
    changed = mel.clone()
    changed[..., round(200 * chunk_s) :] += 1  # from the third chunk on
    last = mel.clone()
    last[..., round(200 * chunk_s) - 5] += 1  # the end of the second chunk

    def heard(clip, is_chunked):
        return encoder.encode_clip(clip, (400,), is_chunked)

    # The convolutions reach one frame into the second chunk's end, so the first one is compared.
    torch.testing.assert_close(
        heard(mel, True)[:n_before], heard(changed, True)[:n_before], **CLOSE
    )
    assert not torch.allclose(heard(mel, False)[0], heard(changed, False)[0])
    assert not torch.allclose(heard(mel, True)[n_before], heard(last, True)[n_before])


def test_the_chunk_mask_lets_through_whole_chunks():
    seen = chunk_mask(5, 2, torch.device("cpu")).int().tolist()

    assert seen == [[1, 1, 0, 0, 0]] * 2 + [[1, 1, 1, 1, 0]] * 2 + [[1, 1, 1, 1, 1]]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_pieces_of_a_long_clip_equal_clips_of_their_own(is_chunked):
    encoder, first, second = build(), mel_of(600), mel_of(77, 1)
    mel = torch.cat((first, functional.pad(second, (0, 600 - 77))))

    heard = encoder.encode_clip(mel, (600, 77), is_chunked)

    apart = [encoder.encode_clip(m, (m.shape[2],), is_chunked) for m in (first, second)]
    assert [len(part) for part in apart] == [60, 7]
    torch.testing.assert_close(heard, torch.cat(apart), **CLOSE)


def test_padding_is_heard_only_on_request_and_only_in_a_short_piece():
    """The reference sees as many frames of padding as of sound; tests/golden has its numbers."""
    encoder, second = build(), mel_of(77, 1)
    mel = torch.cat((mel_of(600), functional.pad(second, (0, 600 - 77))))

    plain = encoder.encode_clip(mel, (600, 77), is_chunked=True)
    faithful = encoder.encode_clip(mel, (600, 77), is_chunked=True, hears_padding=True)

    assert plain.shape == faithful.shape
    torch.testing.assert_close(plain[:60], faithful[:60], **CLOSE)
    assert not torch.allclose(plain[60:], faithful[60:], **CLOSE)
    alone = encoder.encode_clip(second, (77,), is_chunked=True, hears_padding=True)
    torch.testing.assert_close(alone, plain[60:], **CLOSE)


def test_padding_beyond_the_reference_mask_is_never_heard():
    """Its mask ends at frame 77 of 77 mel frames (39 frames of sound), however long the row is."""
    encoder, mel = build(), mel_of(77)

    shorter, longer = (
        encoder.encode_clip(functional.pad(mel, (0, n)), (77,), False, hears_padding=True)
        for n in (200, 500)
    )

    torch.testing.assert_close(shorter, longer, **CLOSE)


@pytest.mark.parametrize("pool_step", [2, 5, 7])
def test_the_number_of_embeddings_is_known_from_the_mel_frames(pool_step):
    encoder = build(AudioEncoderConfig(8, 1, 1, 8, 8, n_mels=8, pool_step=pool_step))

    for n_frames in (1, 9, 10, 50, 99, 100, 101, 371):
        heard = encoder.encode_clip(mel_of(n_frames), (n_frames,), is_chunked=True)
        assert len(heard) == encoder.config.n_embeddings(n_frames)
        assert len(heard) == ((n_frames - 1) // 2 + 1) // pool_step


def test_averaging_before_the_second_matrix_equals_averaging_after_it():
    encoder, frames = build(), torch.randn(2, 12, TINY.width)

    pooled = encoder._project(frames)

    projected = encoder.linear2(functional.relu(encoder.linear1(encoder.norm(frames))))
    expected = functional.avg_pool1d(projected.transpose(1, 2), 5).transpose(1, 2)
    torch.testing.assert_close(pooled, expected, **CLOSE)


def test_a_piece_that_has_no_positions_is_refused():
    with pytest.raises(ValueError, match="401 frames"):
        build().encode_clip(mel_of(802), (802,), is_chunked=True)


def test_features_may_be_wider_than_the_weights():
    encoder = build().to(torch.bfloat16)
    cache = AudioCache.allocate(TINY, 1, dtype=torch.bfloat16)

    assert stream(encoder, cache, mel_of(202), 0, 2).dtype == torch.bfloat16


# ---- weights


def published(config):
    """Tensors under their published names, with values of their own."""
    width = config.width
    shapes = {
        "apm.embed_positions.weight": (config.max_positions, width),
        "apm.conv1.weight": (width, config.n_mels, 3),
        "apm.conv2.weight": (width, width, 3),
        "apm.layer_norm.weight": (width,),
        "audio_projection_layer.linear1.weight": (config.llm_dim, width),
        "audio_projection_layer.linear2.weight": (config.llm_dim, config.llm_dim),
    }
    for index in range(config.n_layers):
        layer = f"apm.layers.{index}"
        shapes |= {f"{layer}.self_attn.{n}_proj.weight": (width, width) for n in ("q", "k", "v")}
        shapes |= {f"{layer}.self_attn.out_proj.weight": (width, width)}
        shapes |= {f"{layer}.{n}_layer_norm.weight": (width,) for n in ("self_attn", "final")}
        shapes |= {f"{layer}.fc1.weight": (config.ffn_size, width)}
        shapes |= {f"{layer}.fc2.weight": (width, config.ffn_size)}
    biases = {
        name.replace("weight", "bias"): shape[:1]
        for name, shape in shapes.items()
        if "k_proj" not in name and "positions" not in name
    }
    return {name: torch.randn(shape) for name, shape in (shapes | biases).items()}


def test_published_weights_fill_a_module_built_without_memory():
    source = published(TINY)
    with torch.device("meta"):
        encoder = AudioEncoder(TINY)

    encoder.load_state_dict(audio_encoder_weights(source, TINY), strict=True, assign=True)

    x = torch.randn(1, 3, TINY.width)
    _, k, v = encoder.layers[1].attn.project(x)
    attention = "apm.layers.1.self_attn"
    expected = x @ source[f"{attention}.k_proj.weight"].T
    torch.testing.assert_close(k.transpose(1, 2).flatten(2), expected, **CLOSE)
    expected = x @ source[f"{attention}.v_proj.weight"].T + source[f"{attention}.v_proj.bias"]
    torch.testing.assert_close(v.transpose(1, 2).flatten(2), expected, **CLOSE)
    assert encoder.encode_clip(mel_of(50), (50,), is_chunked=False).shape == (5, TINY.llm_dim)


def test_a_missing_tensor_is_named():
    source = published(TINY)
    del source["apm.layers.1.fc2.bias"]

    with pytest.raises(KeyError, match=r"apm\.layers\.1\.fc2\.bias"):
        audio_encoder_weights(source, TINY)
