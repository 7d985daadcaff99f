"""Both encoders in stages: sizes, batches, and the same rows as without stages."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.errors import BadImage
from tests.fakes.graphs import FakeCapture
from worker.compile.compiler import Compiler
from worker.compile.regions import CompilePlan
from worker.models.minicpmo45.images import SliceConfig, plan_slices, slice_image
from worker.models.minicpmo45.ops import AudioRequest
from worker.models.minicpmo45.senses import Senses, patch_sizes
from worker.nn.audio_encoder import AudioEncoder, AudioEncoderConfig
from worker.nn.resampler import ResamplerConfig
from worker.nn.siglip import VisionConfig
from worker.nn.vision import VisionTower

P = 2
SLICES = SliceConfig(patch_size=P, scale_resolution=8)
"""Usual slices have up to 20 patches, strips up to 64."""
N_SLOTS = 6
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
REGIONS = {"vpm.layer", "resampler", "apm.layer"}

pytestmark = pytest.mark.usefixtures("compiling")


@pytest.fixture(autouse=True)
def _in_inference_mode():
    with torch.inference_mode():
        yield


def build(compiler):
    torch.manual_seed(0)
    vision = VisionTower(
        VisionConfig(16, 2, 2, 24, P, 6, 1e-6),
        ResamplerConfig(llm_dim=24, vision_width=16, n_queries=3, n_heads=2),
    )
    audio = AudioEncoder(AudioEncoderConfig(24, 2, 3, 48, 40, n_mels=8, max_positions=400))
    for module in (vision, audio):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        module.eval().requires_grad_(False)
    senses = Senses(vision, audio, SLICES, N_SLOTS, compiler)
    for slot in range(N_SLOTS):
        senses.poison(slot)
    return senses


def started(*modules):
    """Captured senses, whose regions of these modules went through the compiler's front end."""
    plan = CompilePlan(backend="eager", modules=frozenset(modules))
    compiler = Compiler(plan, capture=FakeCapture())
    compiler.prepare(torch.device("cpu"))
    senses = build(compiler)
    compiler.compile(lambda share, note: None)
    compiler.capture(lambda share, note: None)
    compiler.seal()
    for slot in range(N_SLOTS):
        senses.poison(slot)
    return senses, compiler.report


def picture(n_rows, n_columns, seed=0):
    random = np.random.default_rng([seed, n_rows, n_columns])
    return random.integers(0, 256, (n_rows * P, n_columns * P, 3), dtype=np.uint8)


def second(slot, past, is_first, seed=0):
    seeded = torch.Generator().manual_seed(seed)
    mel = torch.randn(8, 102 if is_first else 104, generator=seeded)
    return AudioRequest(slot, past, mel, is_first)


# ---- sizes


@pytest.mark.parametrize("limit", [1, 2, 4, 9])
def test_every_slice_of_every_picture_has_its_size(limit):
    config = SliceConfig()
    usual, longest = patch_sizes(config)
    assert (usual, longest) == (1056, 1408)
    for high in (1, 7, 90, 448, 719, 1080, 3999):
        for wide in range(1, 4001, 13):
            if max(wide, high) > 1024 * min(wide, high):
                continue
            plan = plan_slices(wide, high, limit, config)
            sizes = [plan.overview]
            if plan.grid is not None and plan.refined is not None:
                sizes.append((plan.refined[0] // plan.grid[0], plan.refined[1] // plan.grid[1]))
            for width, height in sizes:
                n_patches = width * height // config.patch_size**2
                assert n_patches <= longest, (wide, high)
                if max(wide, high) <= 3 * min(wide, high):
                    assert 0.93 * usual < n_patches <= usual, (wide, high)


# ---- pictures

REQUESTS = [
    [picture(4, 4)],
    [],
    [picture(5, 4), picture(2, 25), picture(3, 6), picture(4, 4, 1), picture(5, 3)],
    [picture(10, 10), picture(1, 60)],  # the first one is larger than any picture's slice
    [picture(4, 5), picture(1, 1)],
]


def test_pictures_of_several_requests_equal_those_without_stages():
    senses, report = started()
    plain = build(Compiler())

    got = senses.encode_images(REQUESTS)

    assert [len(rows) for rows in got] == [len(request) for request in REQUESTS]
    for rows, request in zip(got, REQUESTS, strict=True):
        torch.testing.assert_close(rows, plain.vision.encode(request), **CLOSE)
    # 7 slices of the usual size, and strips one by one.
    assert report.stages["vpm.slices"].replays == report.stages["vpm.slices"].runs == 3 + 2


@pytest.mark.parametrize(
    ("size", "most"), [((50, 66), 1), ((70, 50), 9), ((66, 40), 4), ((2, 90), 9)]
)
def test_pictures_that_the_device_cuts_equal_those_cut_on_the_host(size, most):
    senses, report = started()
    plain = build(Compiler())
    rgb = np.random.default_rng(3).integers(0, 256, (*size, 3), dtype=np.uint8)
    wanted = slice_image(rgb, most, SLICES).slices

    planned, sliced = senses.slice(rgb, most), plain.slice(rgb, most)

    assert not any(isinstance(one, np.ndarray) for one in planned)
    for ours, theirs in zip(sliced, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    got = senses.encode_images([planned, REQUESTS[0], planned])
    for rows, request in zip(got, (sliced, REQUESTS[0], sliced), strict=True):
        torch.testing.assert_close(rows, plain.vision.encode(request), **CLOSE)
    assert report.stages["vpm.slices"].replays == report.stages["vpm.slices"].runs


def test_both_ways_refuse_a_picture_that_cannot_be_sliced():
    strip = np.zeros((1, 1025, 3), np.uint8)
    for senses in (started()[0], build(Compiler())):
        with pytest.raises(BadImage):
            senses.slice(strip, 1)


def test_rows_outlive_the_next_run_and_nothing_of_a_larger_slice_stays():
    senses, _ = started()
    large, small = picture(5, 4), picture(1, 1)

    first = senses.encode_images([[large]])[0]
    kept = first.clone()
    second = senses.encode_images([[small]])[0]

    assert torch.equal(first, kept)
    torch.testing.assert_close(second, senses.vision.encode([small]), **CLOSE)


def test_read_only_tiles_of_a_picture_are_taken():
    senses, _ = started()
    whole = picture(4, 10)
    whole.flags.writeable = False
    tiles = [whole[:, : 5 * P], whole[:, 5 * P :]]

    got = senses.encode_images([tiles])[0]

    wanted = senses.vision.encode([np.ascontiguousarray(tile) for tile in tiles])
    torch.testing.assert_close(got, wanted, **CLOSE)


def test_requests_without_slices_get_no_rows():
    assert [len(rows) for rows in started()[0].encode_images([[], []])] == [0, 0]


# ---- sound


def test_seconds_of_several_streams_equal_those_without_stages():
    senses, report = started()
    plain = build(Compiler())
    slots = (4, 0, 2, 5, 1)
    for turn in range(3):
        requests = [
            second(slot, 50 * turn, turn == 0, seed=10 * turn + slot) for slot in slots[turn:]
        ]
        wanted = plain.encode_audio(requests)
        got = senses.encode_audio(requests)
        for ours, theirs in zip(got, wanted, strict=True):
            assert ours.shape == (10, 40)
            torch.testing.assert_close(ours, theirs, **CLOSE)
    # 5 = 4 + 1, 4, 3 = 2 + 1
    assert report.stages["apm.second"].replays == report.stages["apm.second"].runs == 5


def test_streams_of_different_age_go_together():
    senses, _ = started()
    plain = build(Compiler())
    history = [second(3, 0, True), second(3, 50, False, 1), second(1, 0, True, 2)]
    for one in (senses, plain):
        for request in history:
            one.encode_audio([request])

    together = [second(3, 100, False, 3), second(1, 50, False, 4)]
    for ours, theirs in zip(
        senses.encode_audio(together), plain.encode_audio(together), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_a_heard_second_outlives_the_next_run():
    senses, _ = started()
    first = senses.encode_audio([second(0, 0, True)])[0]
    kept = first.clone()

    senses.encode_audio([second(1, 0, True, 9)])

    assert torch.equal(first, kept)


# ---- compiling


def test_every_region_needs_a_graph_for_one_row_and_one_for_more():
    senses, report = started("vpm", "resampler", "apm")
    n_batches = len(senses._batches)
    assert dict(report.region_graphs) == {**dict.fromkeys(REGIONS, 2), "apm.layer": n_batches}

    got = senses.encode_images(REQUESTS)
    for rows, request in zip(got, REQUESTS, strict=True):
        torch.testing.assert_close(rows, senses.vision.encode(request), **CLOSE)
    plain = build(Compiler())
    for is_first in (True, False):
        requests = [second(slot, 0, is_first) for slot in range(N_SLOTS)]
        wanted = plain.encode_audio(requests)
        for ours, theirs in zip(senses.encode_audio(requests), wanted, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)

    assert report.counts()["recompiles_after_idle"] == 0
    assert report.counts()["graph_breaks"] == 0


def test_a_cpu_without_a_plan_has_no_stages():
    compiler = Compiler()
    senses = build(compiler)

    assert not compiler.stages
    assert not compiler.regions
    torch.testing.assert_close(
        senses.encode_images(REQUESTS[:1])[0], senses.vision.encode(REQUESTS[0])
    )


def test_captured_rows_are_refused_after_the_cache_has_moved():
    senses, _ = started()
    keys = tuple(torch.zeros_like(one) for one in senses.cache.keys)
    senses.cache = replace(senses.cache, keys=keys)

    with pytest.raises(RuntimeError, match="has moved since the capture"):
        senses.encode_audio([second(0, 0, True)])
