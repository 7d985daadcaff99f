"""The S3 tokenizer: codes, windows of long clips, weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from worker.nn.s3_tokenizer import (
    S3Config,
    S3Tokenizer,
    codes_of,
    joined,
    s3_config,
    s3_weights,
    windows,
)

TINY = S3Config(n_mels=16, width=64, ffn_size=32, n_layers=2, memory_kernel=5)


def published(config: S3Config) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 8

    width, ffn = config.width, config.ffn_size
    source = {
        "encoder.conv1.weight": random(width, config.n_mels, 3),
        "encoder.conv1.bias": random(width),
        "encoder.conv2.weight": random(width, width, 3),
        "encoder.conv2.bias": random(width),
        "quantizer._codebook.project_down.weight": random(8, width),
        "quantizer._codebook.project_down.bias": random(8),
    }
    for i in range(config.n_layers):
        block = f"encoder.blocks.{i}"
        for name in ("query", "key", "value", "out"):
            source[f"{block}.attn.{name}.weight"] = random(width, width)
            if name != "key":
                source[f"{block}.attn.{name}.bias"] = random(width)
        source[f"{block}.attn.fsmn_block.weight"] = random(width, 1, config.memory_kernel)
        for norm in ("attn_ln", "mlp_ln"):
            source[f"{block}.{norm}.weight"] = 1 + random(width)
            source[f"{block}.{norm}.bias"] = random(width)
        source[f"{block}.mlp.0.weight"], source[f"{block}.mlp.0.bias"] = (
            random(ffn, width),
            random(ffn),
        )
        source[f"{block}.mlp.2.weight"], source[f"{block}.mlp.2.bias"] = (
            random(width, ffn),
            random(width),
        )
    return source


@pytest.fixture(scope="module")
def tokenizer() -> S3Tokenizer:
    with torch.device("meta"):
        net = S3Tokenizer(TINY)
    net.load_state_dict(s3_weights(published(TINY), TINY), strict=True, assign=True)
    return net.requires_grad_(False)


def test_codes_count_digits_from_the_lowest() -> None:
    digits = torch.tensor([[0.9, 2.0, 0.4, 0, 0, 0, 0, 1.6], [1.0] * 8])

    assert codes_of(digits).tolist() == [1 + 2 * 3 + 2 * 3**7, (3**8 - 1) // 2]


@pytest.mark.parametrize(("n_frames", "n_codes"), [(100, 25), (101, 26), (104, 26), (4, 1)])
def test_four_frames_make_a_code(tokenizer: S3Tokenizer, n_frames: int, n_codes: int) -> None:
    mel = torch.randn(16, n_frames, generator=torch.Generator().manual_seed(1))

    codes = tokenizer(mel)

    assert codes.shape == (n_codes,)
    assert codes.dtype == torch.int64
    assert 0 <= int(codes.min()) <= int(codes.max()) < 3**8


def test_digits_are_fp32_whatever_the_rest_is(tokenizer: S3Tokenizer) -> None:
    """Rounding decides them."""
    narrow, states = copy.deepcopy(tokenizer).bfloat16(), []
    narrow.layers[-1].register_forward_hook(lambda _, __, given: states.append(given.float()))

    digits = narrow.unrounded(torch.randn(1, 16, 40, generator=torch.Generator().manual_seed(3)))

    weight, bias = narrow.digits.weight.float(), narrow.digits.bias.float()
    torch.testing.assert_close(
        digits - 1, torch.nn.functional.linear(states[0], weight, bias).tanh(), rtol=0, atol=1e-5
    )


def test_a_batch_row_equals_the_row_alone(tokenizer: S3Tokenizer) -> None:
    mels = torch.randn(2, 16, 120, generator=torch.Generator().manual_seed(2))

    both = tokenizer.unrounded(mels)

    torch.testing.assert_close(both[1:], tokenizer.unrounded(mels[1:]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("n_frames", "expected"),
    [
        (100, [(0, 100)]),
        (3000, [(0, 3000)]),
        (3001, [(0, 3000), (2600, 3001)]),
        (4100, [(0, 3000), (2600, 4100)]),
        (5600, [(0, 3000), (2600, 5600)]),
        (6000, [(0, 3000), (2600, 5600), (5200, 6000)]),
    ],
)
def test_long_clips_are_cut_with_an_overlap(n_frames: int, expected: list[tuple[int, int]]) -> None:
    assert windows(n_frames) == expected


@pytest.mark.parametrize("n_frames", [100, 2999, 3001, 3300, 4100, 5601, 8203])
def test_joined_windows_give_every_code_once(n_frames: int) -> None:
    """Each window's codes are numbered by their place in the clip."""
    parts = [torch.arange(begin // 4, -(-end // 4)) for begin, end in windows(n_frames)]

    assert joined(parts).tolist() == list(range(-(-n_frames // 4)))


def test_a_long_clip_takes_its_codes_from_the_middle_of_the_windows(
    tokenizer: S3Tokenizer,
) -> None:
    mel = torch.randn(16, 3300, generator=torch.Generator().manual_seed(3))

    codes = tokenizer(mel)

    first = codes_of(tokenizer.unrounded(mel[None, :, :3000]))[0]
    second = codes_of(tokenizer.unrounded(mel[None, :, 2600:]))[0]
    assert torch.equal(codes, torch.cat((first[:700], second[50:])))


def test_sizes_follow_from_the_tensors() -> None:
    assert s3_config(published(TINY)) == TINY


def test_a_missing_tensor_is_named() -> None:
    source = published(TINY)
    del source["encoder.blocks.1.attn.fsmn_block.weight"]

    with pytest.raises(KeyError, match=r"blocks\.1\.attn\.fsmn_block"):
        s3_weights(source, TINY)
