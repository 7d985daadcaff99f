"""Whisper blocks against transformers on a tiny random model."""

import numpy as np
import pytest
import torch
from transformers import WhisperConfig as TheirConfig
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from worker.nn.whisper import (
    TextRows,
    Whisper,
    WhisperCache,
    WhisperConfig,
    log_mel,
    whisper_weights,
    window_for,
)

TINY = WhisperConfig(
    vocab_size=61,
    width=32,
    n_heads=4,
    ffn_size=64,
    n_encoder_layers=2,
    n_decoder_layers=2,
    n_mels=80,
    max_frames=100,
    max_tokens=24,
)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(
        TheirConfig(
            vocab_size=TINY.vocab_size,
            d_model=TINY.width,
            encoder_attention_heads=TINY.n_heads,
            decoder_attention_heads=TINY.n_heads,
            encoder_ffn_dim=TINY.ffn_size,
            decoder_ffn_dim=TINY.ffn_size,
            encoder_layers=TINY.n_encoder_layers,
            decoder_layers=TINY.n_decoder_layers,
            num_mel_bins=TINY.n_mels,
            max_source_positions=TINY.max_frames,
            max_target_positions=TINY.max_tokens,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        )
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def whisper(theirs):
    model = Whisper(TINY).eval()
    model.load_state_dict(whisper_weights(theirs.state_dict(), TINY), strict=True)
    return model.requires_grad_(False)


def speech(seconds, seed=0):
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * 16_000)) / 16_000
    tone = 0.3 * np.sin(2 * np.pi * (200 + 50 * t) * t) + 0.01 * rng.standard_normal(len(t))
    return tone.astype(np.float32)


def features(seed=0, n_frames=200):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, TINY.n_mels, n_frames, generator=generator)


def poisoned(n_slots=3):
    cache = WhisperCache.allocate(TINY, n_slots)
    for slot in range(n_slots):
        cache.poison(slot)
    return cache


def test_log_mel_equals_the_reference_feature_extractor():
    samples = speech(5.3)
    expected = WhisperFeatureExtractor()(samples, sampling_rate=16_000, return_tensors="pt")

    torch.testing.assert_close(log_mel(samples, 30), expected["input_features"], rtol=0, atol=1e-4)


def test_log_mel_of_a_short_window_is_the_start_of_the_long_one():
    samples = speech(5.3)

    torch.testing.assert_close(log_mel(samples, 10)[..., :900], log_mel(samples, 30)[..., :900])


@pytest.mark.parametrize(
    ("seconds", "window_s"), [(0.1, 10), (10, 10), (10.01, 20), (20.5, 30), (40, 30)]
)
def test_window_is_the_shortest_that_holds_the_speech_but_never_below_ten_seconds(
    seconds, window_s
):
    assert window_for(round(seconds * 16_000)) == window_s


def test_encoder_agrees_with_transformers(theirs, whisper):
    expected = theirs.model.encoder(features()).last_hidden_state

    torch.testing.assert_close(whisper.encoder(features()), expected, **CLOSE)


def test_encoder_stage_by_stage_equals_whole(whisper):
    value = whisper.encoder.stem(features())
    for layer in whisper.encoder.layers:
        value = layer(value)

    torch.testing.assert_close(
        whisper.encoder.norm(value), whisper.encoder(features()), rtol=0, atol=0
    )


def test_text_steps_agree_with_transformers(theirs, whisper):
    tokens = [3, 17, 44, 8, 60]
    expected = theirs(features(), decoder_input_ids=torch.tensor([tokens])).logits[0]

    cache = poisoned()
    whisper.hear(cache, 1, whisper.encoder(features()))
    steps = [
        whisper.step(cache, [token], TextRows((1,), (position,), (100,)))
        for position, token in enumerate(tokens)
    ]

    torch.testing.assert_close(torch.cat(steps), expected, **CLOSE)


def test_batched_step_equals_single_with_windows_of_different_length(whisper):
    caches = poisoned(), poisoned()
    for cache in caches:
        whisper.hear(cache, 2, whisper.encoder(features(1)))
        whisper.hear(cache, 0, whisper.encoder(features(2, n_frames=120)))
        whisper.step(cache, [3], TextRows((2,), (0,), (100,)))

    batch = whisper.step(caches[0], [5, 3], TextRows((2, 0), (1, 0), (100, 60)))
    first = whisper.step(caches[1], [5], TextRows((2,), (1,), (100,)))
    second = whisper.step(caches[1], [3], TextRows((0,), (0,), (60,)))

    torch.testing.assert_close(batch, torch.cat((first, second)), **CLOSE)


def test_poisoned_slot_serves_the_next_speech_like_a_fresh_one(whisper):
    fresh, used = WhisperCache.allocate(TINY, 1), WhisperCache.allocate(TINY, 1)
    whisper.hear(used, 0, whisper.encoder(features(7)))
    used.poison(0)
    logits = []
    for cache in (fresh, used):
        whisper.hear(cache, 0, whisper.encoder(features(1, n_frames=120)))
        logits.append(whisper.step(cache, [3], TextRows((0,), (0,), (60,))))

    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0)
