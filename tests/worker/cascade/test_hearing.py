"""Voice activity and transcription on the shipped clips, and the parts that need no weights."""

import numpy as np
import pytest

from worker.models.cascade.hearing import (
    PART_S,
    TRANSCRIBE_STEP,
    clean,
    cut_at_quiet,
    loop_length,
)
from worker.models.voice_activity import (
    DETECT_SPEECH,
    TARGET_PEAK,
    VAD_WINDOW,
    DetectRequest,
    VadState,
    raise_quiet,
)

CLIPS = {
    "capital_france": ("capital", "france"),
    "days_in_week": ("how many days", "week"),
    "long_story": ("long story", "red boat", "sea"),
    "stop_talking": ("stop", "capital of italy"),
}
SILENCE = np.zeros(16_000, np.float32)


def white(n, rms, seed=0):
    return (rms * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def pink(n, rms, seed=0):
    spectrum = np.fft.rfft(np.random.default_rng(seed).standard_normal(n))
    spectrum /= np.sqrt(np.maximum(np.arange(len(spectrum)), 1))
    noise = np.fft.irfft(spectrum, n)
    return (rms * noise / noise.std()).astype(np.float32)


def detect(model, samples, step=3200):
    """Probabilities of samples that arrive in steps."""
    state, found = VadState.initial(), []
    for start in range(0, len(samples), step):
        request = DetectRequest(state, samples[start : start + step])
        ((probabilities, state),) = model.run(DETECT_SPEECH, None, [request])
        found.append(probabilities)
    return np.concatenate(found)


def padded(samples):
    return np.concatenate((SILENCE, samples, SILENCE))


def drive(model, program, ops=None):
    """Run a program's ops at once; return its value."""
    result = None
    while True:
        try:
            op = program.send(result)
        except StopIteration as stop:
            return stop.value
        if ops is not None:
            ops.append(op)
        (result,) = model.run(op.kind, op.bucket, [op.payload])


# ---- voice activity


@pytest.mark.weights
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("peak", [0.3, 0.01, 0.003])
def test_speech_is_found_at_any_level(cascade, clip, name, peak):
    samples = clip(name)
    loud = detect(cascade, padded(samples)) > 0.5
    quiet = detect(cascade, padded(samples * peak / np.abs(samples).max())) > 0.5

    assert quiet.sum() > 0.9 * loud.sum()
    assert not quiet[:28].any()


@pytest.mark.weights
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("noise", [white, pink])
@pytest.mark.parametrize("peak", [0.3, 0.01])
def test_speech_is_found_in_noise_10_db_below_it(cascade, clip, name, noise, peak):
    samples = clip(name)
    clear = detect(cascade, padded(samples)) > 0.5
    rms = np.sqrt(np.square(samples).mean()) * 10 ** (-10 / 20)
    mixed = padded(samples) + noise(len(samples) + 32_000, rms)

    noisy = detect(cascade, mixed * peak / np.abs(samples).max()) > 0.5

    assert noisy.sum() > 0.75 * clear.sum()
    assert not noisy[:28].any()


@pytest.mark.weights
@pytest.mark.parametrize("noise", [white, pink])
@pytest.mark.parametrize("level_db", [-20, -60])
def test_noise_is_not_speech(cascade, noise, level_db):
    probabilities = detect(cascade, noise(160_000, 10 ** (level_db / 20)))

    assert probabilities.max() < 0.3


@pytest.mark.weights
@pytest.mark.parametrize("step", [100, 512, 1000, 80_800])
def test_detection_in_steps_equals_whole(cascade, clip, step):
    samples = clip("stop_talking")

    np.testing.assert_allclose(
        detect(cascade, samples, step), detect(cascade, samples, len(samples)), atol=1e-5
    )


@pytest.mark.weights
def test_batched_sessions_do_not_hear_each_other(cascade, clip):
    first, second = clip("long_story")[:32_000], clip("capital_france")[:16_000]
    requests = [DetectRequest(VadState.initial(), samples) for samples in (first, second)]

    results = cascade.run(DETECT_SPEECH, None, requests)

    for samples, (probabilities, _) in zip((first, second), results, strict=True):
        np.testing.assert_array_equal(probabilities, detect(cascade, samples, len(samples)))


def test_quiet_windows_are_raised_and_loud_ones_left_alone():
    quiet, loud = np.full((3, VAD_WINDOW), 0.02, np.float32), np.full((3, VAD_WINDOW), 0.5)

    assert np.allclose(raise_quiet(quiet, 0.0)[0], TARGET_PEAK)
    assert np.array_equal(raise_quiet(loud.astype(np.float32), 0.0)[0], loud)


def test_gain_falls_at_once_and_comes_back_slowly():
    windows = np.full((3, VAD_WINDOW), 0.01, np.float32)
    windows[1] = 0.4

    raised, peak = raise_quiet(windows, 0.0)

    assert raised[1].max() == np.float32(0.4)
    assert raised[2].max() == np.float32(0.01)
    assert 0.35 < peak < 0.4


@pytest.mark.weights
def test_fewer_samples_than_a_window_wait_in_the_state(cascade):
    request = DetectRequest(VadState.initial(), np.ones(VAD_WINDOW - 1, np.float32))

    ((probabilities, state),) = cascade.run(DETECT_SPEECH, None, [request])

    assert len(probabilities) == 0
    assert len(state.pending) == VAD_WINDOW - 1


# ---- transcription


@pytest.mark.weights
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("gain", [1.0, 0.03])
def test_clip_is_transcribed(cascade, clip, name, gain):
    text = drive(cascade, cascade.transcriber.transcribe(0, clip(name) * np.float32(gain))).lower()

    assert all(words in text for words in CLIPS[name]), text


@pytest.mark.weights
@pytest.mark.parametrize(
    "samples",
    [
        SILENCE,
        np.zeros(0, np.float32),
        np.ones(20, np.float32),
        white(48_000, 0.05),
        pink(48_000, 0.05),
    ],
    ids=["silence", "nothing", "a click", "white noise", "pink noise"],
)
def test_nothing_said_is_an_empty_text(cascade, samples):
    assert drive(cascade, cascade.transcriber.transcribe(0, samples)) == ""


@pytest.mark.weights
def test_speech_longer_than_a_window_is_heard_to_its_end(cascade, clip):
    samples = np.concatenate([clip("long_story")] * 6 + [clip("capital_france")] * 2)

    text = drive(cascade, cascade.transcriber.transcribe(0, samples)).lower()

    assert text.count("red boat") == 6
    assert text.count("france") == 2


@pytest.mark.weights
def test_a_long_utterance_lets_others_speak_in_between(cascade, clip):
    """All its ops were due at once: the speech of other sessions waited for four seconds."""
    samples = np.concatenate([clip("long_story")] * 10)
    ops = []

    drive(cascade, cascade.transcriber.transcribe(0, samples, deadline=10.0), ops)

    n_parts = len(cut_at_quiet(samples))
    assert n_parts > 1
    assert {op.deadline for op in ops} == {10.0 + i * PART_S for i in range(n_parts)}


@pytest.mark.weights
def test_transcription_takes_turns_with_its_neighbours(cascade, clip):
    ops = []

    drive(cascade, cascade.transcriber.transcribe(0, clip("capital_france")), ops)

    kinds = [op.kind for op in ops]
    assert kinds.count("encode_speech") == 6
    assert kinds.count("transcribe_step") >= 8


@pytest.mark.weights
def test_two_sessions_transcribe_in_one_batch(cascade, clip):
    names = ("capital_france", "stop_talking")
    programs = [cascade.transcriber.transcribe(slot, clip(name)) for slot, name in enumerate(names)]
    texts, ops = {}, dict(enumerate(map(next, programs)))
    while ops:
        steps = [slot for slot, op in ops.items() if op.kind == TRANSCRIBE_STEP]
        slots = steps if len(steps) == len(ops) else [s for s in ops if s not in steps][:1]
        kind = ops[slots[0]].kind
        results = cascade.run(kind, None, [ops[slot].payload for slot in slots])
        for slot, result in zip(slots, results, strict=True):
            try:
                ops[slot] = programs[slot].send(result)
            except StopIteration as stop:
                texts[slot] = stop.value
                del ops[slot]

    alone = [drive(cascade, cascade.transcriber.transcribe(2, clip(name))) for name in names]
    assert [texts[0], texts[1]] == alone


def test_long_audio_is_cut_where_it_is_quiet():
    samples = white(45 * 16_000, 0.1)
    samples[27 * 16_000 : 28 * 16_000] = 0.0

    parts = cut_at_quiet(samples)

    assert np.array_equal(np.concatenate(parts), samples)
    assert 27 <= len(parts[0]) / 16_000 <= 28
    assert len(parts) == 2


@pytest.mark.parametrize(
    ("tokens", "n"),
    [
        ([], 0),
        ([1, 2, 3, 4], 0),
        ([7, 7, 7, 7], 0),
        ([1, 7, 7, 7, 7, 7], 4),
        ([9, 1, 2, 1, 2, 1, 2, 1, 2], 6),
        ([1, 2, 1, 2, 1, 2], 0),
        (list(range(8)) * 4, 24),
    ],
)
def test_loop_is_recognised_after_a_few_rounds(tokens, n):
    assert loop_length(tokens) == n


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        (" Hello  there. ", "Hello there."),
        ("[BLANK_AUDIO]", ""),
        ("(music playing)", ""),
        ("...", ""),
        (" Yes (laughs) please.", "Yes please."),
    ],
)
def test_descriptions_of_sounds_are_no_transcript(text, cleaned):
    assert clean(text) == cleaned
