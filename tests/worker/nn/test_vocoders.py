"""Streaming of both vocoders: rows, turns and chunks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from worker.nn.causal_vocoder import CausalVocoder, uniform_table
from worker.nn.hift import Hift, HiftConfig
from worker.nn.legacy_vocoder import LegacyVocoder, gaussian_table
from worker.nn.vocoder import DELAY_FRAMES, Vocoder, noise_at

HOP = 480
N_MELS = 80
N_ROWS = 3


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def net(is_causal: bool) -> Hift:
    """A tiny net with voiced and unvoiced frames, its F0 in fp64 as `hift_weights` makes it.

    The phase is an integral: with fp32 the smallest rounding of F0 can be heard in tight tests.
    """
    with torch.random.fork_rng():
        torch.manual_seed(7)
        hift = Hift(HiftConfig(is_causal=is_causal, base_channels=16, f0_channels=12))
    hift.requires_grad_(False)
    hift.conv_post.bias[:9] -= 1.0
    hift.f0.double()
    hift.f0.out.weight.mul_(1500.0)
    hift.f0.out.bias.fill_(60.0)
    return hift


NETS = {"legacy": net(False), "causal": net(True)}
NOISE = torch.rand(1000, 9, generator=torch.Generator().manual_seed(8))

Make = Callable[[], Vocoder]


@pytest.fixture(params=["legacy", "causal"])
def make(request: pytest.FixtureRequest) -> Make:
    """Makes vocoders of one kind; their rows hold NaN, as if from sessions before."""

    def fresh() -> Vocoder:
        kind = LegacyVocoder if request.param == "legacy" else CausalVocoder
        vocoder = kind(NETS[request.param], N_ROWS, noise=NOISE)
        for row in range(N_ROWS):
            vocoder.poison(row)
            vocoder.start_turn(row)
        return vocoder

    return fresh


def mel_of(n_frames: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, N_MELS, n_frames, generator=generator)


def turn(vocoder: Vocoder, row: int, mel: Tensor, cuts: tuple[int, ...]) -> list[Tensor]:
    """Run a whole turn in chunks of the given frames."""
    assert sum(cuts) == mel.shape[2]
    vocoder.start_turn(row)
    chunks, start = [], 0
    for i, n in enumerate(cuts):
        piece = mel[:, :, start : start + n]
        chunks += vocoder.chunk([row], piece, is_last=i == len(cuts) - 1)
        start += n
    return chunks


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("cuts", [(50, 50, 18), (10, 20, 50, 6), (12, 12, 12, 1), (8, 9)])
def test_chunks_give_as_many_samples_as_frames_and_the_delay_at_the_end(
    make: Make, cuts: tuple[int, ...]
) -> None:
    chunks = turn(make(), 1, mel_of(sum(cuts), 0), cuts)

    expected = [n * HOP for n in cuts]
    expected[-1] += DELAY_FRAMES * HOP
    assert [len(chunk) for chunk in chunks] == expected
    assert chunks[0][: DELAY_FRAMES * HOP].eq(0).all()
    # A turn's samples do not begin with silence of their own.
    assert torch.cat(chunks)[DELAY_FRAMES * HOP :][:HOP].abs().max() > 1e-3


@pytest.mark.parametrize("n_frames", [34, 6])
def test_a_turn_of_one_chunk_is_the_whole_utterance_without_silence(
    make: Make, n_frames: int
) -> None:
    vocoder, mel = make(), mel_of(n_frames, 1)

    (samples,) = turn(vocoder, 2, mel, (n_frames,))

    assert len(samples) == n_frames * HOP
    same(samples, vocoder.whole(mel)[0])


@pytest.mark.parametrize("cuts", [(50, 50, 18), (10, 20, 50, 6), (8, 1, 2, 3, 100, 4), (41, 77)])
def test_causal_chunks_equal_the_whole_utterance(cuts: tuple[int, ...]) -> None:
    vocoder = CausalVocoder(NETS["causal"], N_ROWS, noise=NOISE)
    mel = mel_of(sum(cuts), 2)

    chunks = turn(vocoder, 0, mel, cuts)

    same(torch.cat(chunks)[DELAY_FRAMES * HOP :], vocoder.whole(mel)[0])


def test_legacy_chunks_overlap_and_fade() -> None:
    """The second chunk of a turn, computed by hand from the rule of the reference."""
    hift, n = NETS["legacy"], DELAY_FRAMES * HOP
    vocoder = LegacyVocoder(hift, 1, noise=torch.zeros(1, 9))
    mel = mel_of(70, 3)

    first, second = turn(vocoder, 0, mel, (40, 30))

    one, two = mel[:, :, :40], mel[:, :, 40 - DELAY_FRAMES :]
    source_one, source_two = (vocoder.source_of(hift.f0(part)) for part in (one, two))
    speech_one = hift(one, source_one)[0]
    speech_two = hift(two, torch.cat((source_one[..., -n:], source_two[..., n:]), 2))[0]
    window = torch.hamming_window(2 * n, periodic=False)
    faded = speech_two[:n] * window[:n] + speech_one[-n:] * window[n:]
    same(first, torch.cat((torch.zeros(n), speech_one[:-n])))
    same(second, torch.cat((faded, speech_two[n:])))


@pytest.mark.parametrize("is_last", [False, True])
def test_rows_of_different_progress_equal_each_alone(make: Make, is_last: bool) -> None:
    """One row at a turn's begin, one after a short chunk, one far in."""
    cuts = ((12,), (10, 12), (50, 50, 12))
    mels = [mel_of(sum(cut), 10 + i) for i, cut in enumerate(cuts)]
    together, alone = make(), make()
    for vocoder in (together, alone):
        for row, (mel, cut) in enumerate(zip(mels, cuts, strict=True)):
            start = 0
            for n in cut[:-1]:
                vocoder.chunk([row], mel[:, :, start : start + n], is_last=False)
                start += n
    last = torch.cat([mel[:, :, -12:] for mel in mels])

    rows = [2, 0, 1]
    ours = together.chunk(rows, last[rows], is_last)

    for row, samples in zip(rows, ours, strict=True):
        (expected,) = alone.chunk([row], last[row : row + 1], is_last)
        same(samples, expected)
    if not is_last:  # what they left is the same as well
        following = mel_of(50, 20).expand(3, -1, -1)
        for row, samples in enumerate(together.chunk([0, 1, 2], following, is_last=True)):
            same(samples, alone.chunk([row], following[:1], is_last=True)[0])


def test_a_reused_row_equals_a_fresh_one(make: Make) -> None:
    used, mel = make(), mel_of(70, 4)
    turn(used, 1, mel_of(120, 5), (50, 50, 20))
    used.poison(1)

    again = turn(used, 1, mel, (50, 20))

    for ours, theirs in zip(again, turn(make(), 1, mel, (50, 20)), strict=True):
        assert torch.equal(ours, theirs)


def test_a_turn_leaves_neighbours_alone(make: Make) -> None:
    vocoder = make()
    vocoder.chunk([0], mel_of(50, 6), is_last=False)
    before = vocoder.save(0)

    turn(vocoder, 1, mel_of(70, 7), (50, 20))

    after = vocoder.save(0)
    for name, tensor in before.tensors.items():
        assert torch.equal(tensor, after.tensors[name])


@pytest.mark.parametrize("n_before", [10, 50, 100])
def test_a_restored_row_goes_on_as_if_nothing_had_happened(make: Make, n_before: int) -> None:
    vocoder, rest = make(), mel_of(30, 8)
    for start in range(0, n_before, 50):
        piece = mel_of(n_before, 9)[:, :, start : start + 50]
        vocoder.chunk([0], piece, is_last=False)
    saved = vocoder.save(0)
    (expected,) = vocoder.chunk([0], rest, is_last=True)

    vocoder.poison(2)
    vocoder.restore(2, saved)
    vocoder.poison(0)

    (samples,) = vocoder.chunk([2], rest, is_last=True)
    same(samples, expected)


def test_a_turn_that_has_ended_goes_on_where_it_was_saved(make: Make) -> None:
    vocoder, mel = make(), mel_of(20, 9)
    vocoder.chunk([0], mel, is_last=False)
    saved = vocoder.save(0)
    (first,) = vocoder.chunk([0], mel, is_last=True)
    ended = vocoder.save(0)

    vocoder.restore(0, saved)
    (again,) = vocoder.chunk([0], mel, is_last=True)
    same(again, first)
    vocoder.restore(1, ended)
    with pytest.raises(AssertionError):
        vocoder.chunk([1], mel, is_last=True)


def test_a_saved_row_holds_what_the_original_keeps() -> None:
    """Frames of mel and source that Token2Wav's caches have after a chunk, and after a turn."""
    causal = CausalVocoder(NETS["causal"], 1, noise=NOISE)
    causal.chunk([0], mel_of(50, 0), is_last=False)
    midway = {name: tensor.shape for name, tensor in causal.save(0).tensors.items()}
    causal.chunk([0], mel_of(18, 0), is_last=True)
    ended = {name: tensor.shape for name, tensor in causal.save(0).tensors.items()}

    assert midway == {"mel": (1, 80, 39), "source": (1, 1, 36 * HOP), "phase": (1, 1, 9)}
    assert ended == {"mel": (1, 80, 31), "source": (1, 1, 31 * HOP), "phase": (1, 1, 9)}


def test_an_ended_turn_takes_no_more_chunks(make: Make) -> None:
    vocoder = make()
    turn(vocoder, 0, mel_of(20, 0), (20,))

    with pytest.raises(AssertionError):
        vocoder.chunk([0], mel_of(20, 0), is_last=False)


def test_a_first_chunk_shorter_than_the_delay_is_refused(make: Make) -> None:
    with pytest.raises(AssertionError):
        make().chunk([0], mel_of(DELAY_FRAMES - 1, 0), is_last=False)


def test_whole_utterances_take_the_original_net_where_there_is_one() -> None:
    legacy = LegacyVocoder(NETS["legacy"], 1, noise=NOISE)
    causal = CausalVocoder(NETS["causal"], 1, noise=NOISE, original=legacy)
    mel = mel_of(20, 0)

    assert torch.equal(causal.whole(mel), legacy.whole(mel))


def test_a_batch_of_whole_utterances_equals_each_alone(make: Make) -> None:
    vocoder = make()
    mels = torch.cat([mel_of(25, seed) for seed in range(2)])

    both = vocoder.whole(mels)

    for mel, samples in zip(mels, both, strict=True):
        same(samples, vocoder.whole(mel[None])[0])


def test_noise_tables_are_fixed_and_of_their_kind() -> None:
    config = HiftConfig(is_causal=False)
    gaussian, uniform = gaussian_table(config), uniform_table(config)

    assert gaussian.shape == uniform.shape == (30 * 24_000, 9)
    assert torch.equal(gaussian[:100], gaussian_table(config)[:100])
    assert abs(float(gaussian.mean())) < 0.01
    assert abs(float(gaussian.std()) - 1) < 0.01
    assert float(uniform.min()) >= 0.0
    assert float(uniform.max()) < 1.0
    assert abs(float(uniform.mean()) - 0.5) < 0.01


def test_noise_repeats_and_goes_on_where_each_row_stands() -> None:
    table = torch.arange(5.0)[:, None]

    assert noise_at(table, 3, 4)[:, 0].tolist() == [3, 4, 0, 1]
    rows = noise_at(table, torch.tensor([-2, 6]), 3)
    assert rows[..., 0].tolist() == [[3, 4, 0], [1, 2, 3]]


def test_the_causal_phase_stays_exact_in_a_long_turn() -> None:
    """Kept modulo 1 in fp64: after minutes it is where one long sum in fp64 would be."""
    vocoder = CausalVocoder(NETS["causal"], 1, noise=NOISE)
    mels = [mel_of(100, seed) for seed in range(12)]
    for mel in mels:
        vocoder.chunk([0], mel, is_last=False)

    f0 = vocoder.hift.f0(torch.cat(mels, 2), None, is_final=False).float()
    turns = vocoder.hift.turns(f0).sum(1)
    distance = (vocoder.phase[0] - turns).remainder(1.0)
    assert torch.minimum(distance, 1 - distance).max() < 1e-4
    assert vocoder.phase.dtype == torch.float64


@pytest.mark.parametrize("kind", [LegacyVocoder, CausalVocoder])
def test_nothing_in_a_chunk_waits_for_the_device(
    kind: type[LegacyVocoder] | type[CausalVocoder],
) -> None:
    """Tensors without data: reading one of them on the host would raise."""
    name = "causal" if kind is CausalVocoder else "legacy"
    vocoder = kind(copy.deepcopy(NETS[name]).to("meta"), N_ROWS, device="meta")
    mel = torch.zeros(2, N_MELS, 50, device="meta")

    vocoder.chunk([1], mel[:1], is_last=False)  # so that the rows of the next call disagree
    chunks = vocoder.chunk([0, 1], mel, is_last=False) + vocoder.chunk([1, 0], mel, is_last=True)

    assert [len(chunk) for chunk in chunks] == [50 * HOP] * 2 + [58 * HOP] * 2


@pytest.mark.parametrize("cuts", [(12, 9, 50, 6), (34,), (6,), (8, 41, 2)])
def test_windows_that_know_nothing_of_the_turn_give_the_same(
    make: Make, cuts: tuple[int, ...]
) -> None:
    """What a captured graph does: every window in full, begins found on the device."""
    vocoder, mel = make(), mel_of(sum(cuts), 4)
    expected = turn(vocoder, 1, mel, cuts)
    vocoder.poison(1)
    vocoder.start_turn(1)

    pieces = []
    for i, piece in enumerate(mel.split(cuts, dim=2)):
        is_last = i == len(cuts) - 1
        (silence,) = vocoder.book([1], piece.shape[2], is_last)
        pieces.append(vocoder.advance(torch.tensor([1]), piece, is_last)[0, silence:])

    for ours, theirs in zip(pieces, expected, strict=True):
        same(ours, theirs)
