"""The net of both vocoder generations: its transforms, its window begins, its weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from worker.nn.hift import Hift, HiftConfig, hift_weights, legacy_config

LEGACY = HiftConfig(is_causal=False, base_channels=16, f0_channels=12)
CAUSAL = HiftConfig(is_causal=True, base_channels=16, f0_channels=12)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random_net(config: HiftConfig) -> Hift:
    """A net that has voiced and unvoiced frames, with weights of a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        net = Hift(config)
    net.conv_post.bias[: config.n_bins] -= 2.0  # not so loud that everything clips
    net.f0.out.weight.mul_(1500.0)
    net.f0.out.bias.fill_(60.0)
    return net


def random_input(config: HiftConfig, n_frames: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mel = torch.randn(1, config.n_mels, n_frames, generator=generator)
    return mel, 0.1 * torch.randn(1, 1, n_frames * config.hop, generator=generator)


# ---- transforms


def test_the_source_spectrum_is_that_of_a_centred_stft() -> None:
    net, n_frames = Hift(LEGACY), 3
    _, source = random_input(LEGACY, n_frames)

    ours = net._source_spectrum(source, n_frames, None)

    theirs = torch.stft(
        source[0], 16, 4, window=torch.hann_window(16), center=True, return_complex=True
    )
    torch.testing.assert_close(ours, torch.cat((theirs.real, theirs.imag), 1), rtol=0, atol=1e-6)


def test_samples_are_an_inverse_stft_of_magnitude_and_phase() -> None:
    net = Hift(LEGACY)
    x = torch.randn(2, 18, 241, generator=torch.Generator().manual_seed(1)) - 2

    ours = net._samples(x, None)

    magnitude, angle = x[:, :9].exp(), x[:, 9:].sin()
    theirs = torch.istft(torch.polar(magnitude, angle), 16, 4, window=torch.hann_window(16))
    torch.testing.assert_close(ours, theirs.clamp(-0.99, 0.99), rtol=0, atol=1e-6)


def test_samples_are_limited_even_where_the_net_explodes() -> None:
    x = torch.full((1, 18, 41), 1e4)

    samples = Hift(LEGACY)._samples(x, None)

    assert samples.isfinite().all()
    assert samples.abs().max() <= 0.99


# ---- windows


@pytest.mark.parametrize("config", [LEGACY, CAUSAL], ids=["legacy", "causal"])
@pytest.mark.parametrize("is_final", [True, False])
def test_a_row_that_begins_in_the_window_equals_one_that_begins_with_it(
    config: HiftConfig, is_final: bool
) -> None:
    """What lies before it may be NaN, and the other row has begun earlier."""
    net, late = random_net(config), 5
    mel, source = random_input(config, 17)
    other_mel, other_source = random_input(config, 17, seed=1)
    poisoned_mel, poisoned_source = mel.clone(), source.clone()
    poisoned_mel[:, :, :late] = torch.nan
    poisoned_source[:, :, : late * config.hop] = torch.nan
    start = torch.tensor([late, 0])

    both_mels = torch.cat((poisoned_mel, other_mel))
    both = net(both_mels, torch.cat((poisoned_source, other_source)), start, is_final)
    f0 = net.f0(both_mels, start, is_final)

    alone = net(mel[:, :, late:], source[:, :, late * config.hop :], None, is_final)
    other = net(other_mel, other_source, None, is_final)
    torch.testing.assert_close(both[0, late * config.hop :], alone[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(both[1], other[0], rtol=0, atol=1e-6)
    assert both[0, : late * config.hop].eq(0).all()
    torch.testing.assert_close(f0[0, late:], net.f0(mel[:, :, late:], None, is_final)[0])
    assert f0[0, :late].eq(0).all()


@pytest.mark.parametrize("config", [LEGACY, CAUSAL], ids=["legacy", "causal"])
def test_a_net_of_another_dtype_gives_fp32_samples_near_its_own(config: HiftConfig) -> None:
    """Magnitudes are exponentials and the transform is a sum: both are in fp32 all the same."""
    net = random_net(config)
    mel, source = random_input(config, 20)
    exact = net(mel, source)

    rounded = net.bfloat16()(mel, source.bfloat16())

    assert rounded.dtype == torch.float32
    assert torch.cosine_similarity(rounded, exact).item() > 0.99


def test_causal_samples_do_not_depend_on_later_frames() -> None:
    net, n = random_net(CAUSAL), 20
    mel, source = random_input(CAUSAL, 30)

    early = net(mel[:, :, :n], source[:, :, : n * CAUSAL.hop], None, is_final=False)

    whole = net(mel, source)
    n_sure = (n - CAUSAL.look_right - 1) * CAUSAL.hop
    torch.testing.assert_close(early[:, :n_sure], whole[:, :n_sure], rtol=0, atol=1e-6)
    early_f0 = net.f0(mel[:, :, :n], None, is_final=False)
    torch.testing.assert_close(early_f0, net.f0(mel)[:, : n - CAUSAL.f0_look_right])


def test_the_causal_net_looks_back_no_further_than_31_frames() -> None:
    net, history = random_net(CAUSAL), 31
    mel, source = random_input(CAUSAL, 40)

    cut = net(mel[:, :, 3:], source[:, :, 3 * CAUSAL.hop :])

    whole = net(mel, source)
    n = history * CAUSAL.hop
    torch.testing.assert_close(cut[:, n:], whole[:, 3 * CAUSAL.hop + n :], rtol=0, atol=1e-6)
    assert (cut[:, : CAUSAL.hop] - whole[:, 3 * CAUSAL.hop : 4 * CAUSAL.hop]).abs().max() > 1e-5


# ---- weights


def published(config: HiftConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Random tensors under published names, and what our net should hold of them.

    The convolutions are those of PyTorch's own weight norm.
    """
    theirs: dict[str, Tensor] = {}
    ours: dict[str, Tensor] = {}
    renamed = {
        "blocks": "resblocks",
        "source_blocks": "source_resblocks",
        "merge": "m_source.l_linear",
    }
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for name, module in list(Hift(config).named_modules()):
            parts = name.split(".")
            parts[0] = renamed.get(parts[0], parts[0])
            public = ".".join(parts).replace("f0.out", "f0_predictor.classifier")
            if public.startswith("f0.convs."):
                public = f"f0_predictor.condnet.{2 * int(parts[-1])}"
            public = public.replace(".snakes", ".activations")
            public = public.removesuffix(".conv")
            if hasattr(module, "alpha"):
                ours[f"{name}.alpha"] = theirs[f"{public}.alpha"] = torch.rand(module.alpha.shape)
                continue
            if not isinstance(module, (nn.Conv1d, nn.ConvTranspose1d, nn.Linear)):
                continue
            if not isinstance(module, nn.Linear) and not name.startswith("source_downs"):
                module = nn.utils.parametrizations.weight_norm(module)
                size = module.parametrizations.weight.original0
                size.mul_(1 + torch.rand(size.shape))
            for key, tensor in module.state_dict().items():
                theirs[f"{public}.{key}"] = tensor.clone()
            ours[f"{name}.weight"], ours[f"{name}.bias"] = module.weight.clone(), module.bias
    return theirs, ours


@pytest.mark.parametrize("config", [LEGACY, CAUSAL], ids=["legacy", "causal"])
@pytest.mark.parametrize("prefix", ["", "generator."])
def test_weights_are_renamed_and_their_norm_is_folded(config: HiftConfig, prefix: str) -> None:
    theirs, expected = published(config)

    weights = hift_weights({prefix + name: tensor for name, tensor in theirs.items()}, config)

    with torch.device("meta"):
        net = Hift(config)
    net.load_state_dict(weights, strict=True, assign=True)
    for name, tensor in expected.items():
        assert torch.allclose(weights[name].float(), tensor, atol=1e-6), name
    mel, source = random_input(config, 12)
    assert net(mel, source).isfinite().all()


@pytest.mark.parametrize("config", [LEGACY, CAUSAL], ids=["legacy", "causal"])
def test_both_nets_predict_f0_in_double_precision(config: HiftConfig) -> None:
    """The legacy one did it in fp32, which on a GPU is TF32: a row sounded other than alone."""
    theirs, _ = published(config)

    weights = hift_weights(theirs, config)

    assert {t.dtype for n, t in weights.items() if n.startswith("f0.")} == {torch.float64}
    assert {t.dtype for n, t in weights.items() if not n.startswith("f0.")} == {torch.float32}


def test_a_missing_tensor_is_named() -> None:
    theirs, _ = published(LEGACY)
    del theirs["resblocks.4.convs2.1.bias"]

    with pytest.raises(KeyError, match=r"resblocks\.4\.convs2\.1\.bias"):
        hift_weights(theirs, LEGACY)


@pytest.mark.parametrize(
    "config",
    [
        LEGACY,
        HiftConfig(is_causal=False, base_channels=24, f0_channels=8, n_overtones=4, pre_kernel=5),
        HiftConfig(
            is_causal=False,
            base_channels=8,
            upsample_rates=(10, 6, 2),
            upsample_kernels=(20, 12, 4),
            block_kernels=(3, 5),
            block_dilations=((1, 3),) * 2,
            source_kernels=(7, 7, 5),
            source_dilations=((1, 3),) * 3,
        ),
    ],
    ids=["tiny", "narrow", "other_rates"],
)
def test_the_sizes_of_a_legacy_net_follow_from_its_tensors(config: HiftConfig) -> None:
    theirs, _ = published(config)

    assert legacy_config({f"generator.{name}": t for name, t in theirs.items()}) == config


def test_sizes_that_give_no_20_ms_are_refused() -> None:
    theirs, _ = published(HiftConfig(is_causal=False, base_channels=8, upsample_rates=(8, 5, 7)))

    with pytest.raises(ValueError, match="no 480 samples"):
        legacy_config(theirs)
