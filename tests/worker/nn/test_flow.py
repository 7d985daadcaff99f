"""The flow's promises: rows, turns, chunks of any length, and caches that do not grow."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from worker.nn.conformer import ConformerConfig
from worker.nn.dit import HELD_FRAMES, SLOT_MULTIPLE, DitCache, DitConfig, rank_window
from worker.nn.flow import Flow, FlowCache, FlowConfig, default_noise, flow_weights

TINY = FlowConfig(
    input_size=12,
    output_size=6,
    speaker_size=10,
    vocab_size=50,
    encoder=ConformerConfig(12, 16, n_heads=2, ffn_size=20, n_blocks=2, n_up_blocks=1),
    dit=DitConfig(24, 6, depth=2, n_heads=2, head_dim=8, width=20, mlp_ratio=2.0, time_size=16),
    n_timesteps=2,
    noise_frames=700,
)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
AHEAD = torch.tensor([7, 8, 9])


class Published(dict):
    """Random tensors under the names of `flow.pt`."""

    def __init__(self, config, seed=0):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        width, mel = config.encoder.width, config.output_size
        self.put("input_embedding", config.vocab_size, config.input_size, bias=False)
        self.put("spk_embed_affine_layer", mel, config.speaker_size)
        self.put("encoder_proj", mel, width)
        self.put_encoder(config.encoder)
        self.put_estimator(config.dit)

    def draw(self, *shape, scale=0.3):
        return torch.randn(shape, generator=self._generator) * scale

    def put(self, name, *shape, bias=True):
        self[f"{name}.weight"] = self.draw(*shape)
        if bias:
            self[f"{name}.bias"] = self.draw(shape[0], scale=0.1)

    def put_norm(self, name, size):
        self[f"{name}.weight"] = 1 + self.draw(size, scale=0.1)
        self[f"{name}.bias"] = self.draw(size, scale=0.1)

    def put_encoder(self, encoder):
        width = encoder.width
        for name, n_in in (("embed", encoder.input_size), ("up_embed", width)):
            self.put(f"encoder.{name}.out.0", width, n_in)
            self.put_norm(f"encoder.{name}.out.1", width)
        self.put("encoder.pre_lookahead_layer.conv1", width, width, encoder.n_lookahead + 1)
        self.put("encoder.pre_lookahead_layer.conv2", width, width, 3)
        self.put("encoder.up_layer.conv", width, width, 5)
        self.put_norm("encoder.after_norm", width)
        for index in range(encoder.n_blocks):
            self.put_encoder_block(f"encoder.encoders.{index}", encoder)
        for index in range(encoder.n_up_blocks):
            self.put_encoder_block(f"encoder.up_encoders.{index}", encoder)

    def put_encoder_block(self, name, encoder):
        width = encoder.width
        for part in ("q", "k", "v", "out"):
            self.put(f"{name}.self_attn.linear_{part}", width, width)
        self.put(f"{name}.self_attn.linear_pos", width, width, bias=False)
        for part in "uv":
            bias = self.draw(encoder.n_heads, width // encoder.n_heads)
            self[f"{name}.self_attn.pos_bias_{part}"] = bias
        self.put(f"{name}.feed_forward.w_1", encoder.ffn_size, width)
        self.put(f"{name}.feed_forward.w_2", width, encoder.ffn_size)
        self.put_norm(f"{name}.norm_mha", width)
        self.put_norm(f"{name}.norm_ff", width)

    def put_estimator(self, dit):
        top, width, inner = "decoder.estimator", dit.width, dit.n_heads * dit.head_dim
        self.put(f"{top}.t_embedder.mlp.0", width, dit.time_size)
        self.put(f"{top}.t_embedder.mlp.2", width, width)
        self.put(f"{top}.in_proj", width, dit.in_size)
        self.put(f"{top}.final_layer.adaLN_modulation.1", 2 * width, width)
        self.put(f"{top}.final_layer.linear", dit.out_size, width)
        for name in (f"{top}.blocks.{index}" for index in range(dit.depth)):
            for part in "qkv":
                self.put(f"{name}.attn.to_{part}", inner, width)
            self.put_norm(f"{name}.attn.q_norm", dit.head_dim)
            self.put_norm(f"{name}.attn.k_norm", dit.head_dim)
            self.put(f"{name}.attn.proj", width, inner)
            self.put(f"{name}.mlp.fc1", int(width * dit.mlp_ratio), width)
            self.put(f"{name}.mlp.fc2", width, int(width * dit.mlp_ratio))
            self.put(f"{name}.conv.block.1", width, width, 3)
            self.put_norm(f"{name}.conv.block.3", width)
            self.put(f"{name}.conv.block.6", width, width, 3)
            self.put(f"{name}.adaLN_modulation.1", 9 * width, width)


def build(config=TINY):
    with torch.device("meta"):
        flow = Flow(config)
    flow.load_state_dict(flow_weights(Published(config), config), strict=True, assign=True)
    return flow.eval().requires_grad_(False)


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(n, seed=2, batch=1):
    return torch.randint(50, (batch, n), generator=torch.Generator().manual_seed(seed))


def voice_of(flow, n_codes, seed=0):
    config = flow.config
    mel = draw(2 * n_codes, config.output_size, seed=seed)
    speaker = draw(config.speaker_size, seed=seed + 1)
    return flow.set_voice(codes(n_codes, seed)[0], mel, speaker, AHEAD)


def rows(*values):
    return torch.tensor(values)


def speak(flow, cache, row, chunks, last=()):
    """Mels of chunks fed to one row."""
    index = rows(row)
    mels = [flow.chunk(cache, index, chunk, False) for chunk in chunks]
    return mels + [flow.chunk(cache, index, chunk, True) for chunk in last]


@pytest.fixture(scope="module")
def flow():
    return build()


@pytest.fixture(scope="module")
def voices(flow):
    """Prompts of 16 and 130 frames: shorter and longer than the tail."""
    return voice_of(flow, 8), voice_of(flow, 65, seed=5)


def fresh(flow, n_rows=3, frames=140):
    cache = FlowCache.allocate(flow.config, n_rows, frames)
    for row in range(n_rows):
        cache.poison(row)
    return cache


@pytest.mark.parametrize("trim", ["intended", "packed"])
def test_rows_of_a_batch_with_other_voices_and_progress_are_those_alone(trim):
    config = dataclasses.replace(TINY, encoder=dataclasses.replace(TINY.encoder, trim=trim))
    flow = build(config)
    voices = voice_of(flow, 8), voice_of(flow, 65, seed=5)
    before = {2: [codes(28, seed) for seed in range(5)], 0: [codes(8, 9)]}
    common = [codes(n + 3, 20 + n, batch=2) for n in (25, 6, 25)]
    last = codes(4, 30, batch=2)

    cache = fresh(flow)
    alone = []
    for place, (row, chunks) in enumerate(before.items()):
        single = fresh(flow, n_rows=1, frames=200)
        flow.start_turn(single, 0, voices[place])
        speak(flow, single, 0, chunks)
        mine = [chunk[place : place + 1] for chunk in common]
        alone.append(speak(flow, single, 0, mine, [last[place : place + 1]]))
        flow.start_turn(cache, row, voices[place])
        speak(flow, cache, row, chunks)
    together = [flow.chunk(cache, rows(2, 0), chunk, False) for chunk in common]
    together.append(flow.chunk(cache, rows(2, 0), last, True))
    for index, mel in enumerate(together):
        for place in range(2):
            torch.testing.assert_close(mel[place], alone[place][index][0], **CLOSE)


def test_a_poisoned_row_starts_like_a_fresh_one(flow, voices):
    chunks = [codes(28, seed) for seed in range(4)]
    clean = FlowCache.allocate(TINY, 1, 140)
    flow.start_turn(clean, 0, voices[0])
    expected = speak(flow, clean, 0, chunks)

    cache = FlowCache.allocate(TINY, 3, 140)
    flow.start_turn(cache, 1, voices[1])
    speak(flow, cache, 1, chunks)
    for row in range(3):
        cache.poison(row)
    flow.start_turn(cache, 1, voices[0])
    for mel, wanted in zip(speak(flow, cache, 1, chunks), expected, strict=True):
        torch.testing.assert_close(mel, wanted, **CLOSE)


def test_a_turn_leaves_nothing_to_the_next(flow, voices):
    cache = fresh(flow, 1)
    flow.start_turn(cache, 0, voices[0])
    expected = speak(flow, cache, 0, [codes(28)])
    flow.start_turn(cache, 0, voices[1])
    speak(flow, cache, 0, [codes(28, 5), codes(28, 6), codes(28, 7)], [codes(3)])
    flow.start_turn(cache, 0, voices[0])
    torch.testing.assert_close(speak(flow, cache, 0, [codes(28)]), expected, rtol=0, atol=0)


def test_a_chunk_touches_only_its_rows(flow, voices):
    cache = fresh(flow)
    for row in range(3):
        flow.start_turn(cache, row, voices[row % 2])
    before = cache.save(0), cache.save(2)
    speak(flow, cache, 1, [codes(28), codes(9)])
    for row, saved in zip((0, 2), before, strict=True):
        for part, kept in zip(cache.save(row), saved, strict=True):
            assert torch.equal(part, kept)


def test_a_restored_row_goes_on_as_if_nothing_had_been(flow, voices):
    cache = fresh(flow)
    flow.start_turn(cache, 0, voices[0])
    speak(flow, cache, 0, [codes(28), codes(11), codes(28, 4)])
    saved = cache.save(0)
    expected = speak(flow, cache, 0, [codes(28, 5)], [codes(6)])

    cache.poison(0)
    cache.restore(2, saved)
    torch.testing.assert_close(speak(flow, cache, 2, [codes(28, 5)], [codes(6)]), expected, **CLOSE)


def test_caches_keep_their_size_and_place_over_many_chunks(flow, voices):
    cache = fresh(flow, 1)
    flow.start_turn(cache, 0, voices[0])

    def places():
        return [(part.data_ptr(), part.shape) for part in cache._parts(0)]

    before = places()
    mels = speak(flow, cache, 0, [codes(28, seed) for seed in range(34)])
    assert places() == before
    assert all(bool(torch.isfinite(mel).all()) for mel in mels)
    assert int(cache.seen[0]) == 16 + 34 * 50


@pytest.mark.parametrize("n_chunks", [0, 1, 6])
def test_slots_that_are_empty_or_evicted_do_not_matter(flow, voices, n_chunks):
    mels = []
    for junk in (0.0, 1e3):
        cache = fresh(flow, 1)
        flow.start_turn(cache, 0, voices[0])
        speak(flow, cache, 0, [codes(28, seed) for seed in range(n_chunks)])
        n_slots = cache.dit.keys[0][0].shape[2]
        window = rank_window(rows(0), cache.prompt, cache.seen, 50, n_slots)
        dead = ~window.visible[0, 0, 0]
        assert int(dead.sum()) == n_slots - min(int(cache.seen[0]), 116) - 50
        for blocks in (*cache.dit.keys, *cache.dit.values):
            for tensor in blocks:
                tensor[:, :, dead] = junk
        length = min(int(cache.seen[0]), 116)
        encoder = cache.encoder
        for tensor, ratio in zip((*encoder.keys, *encoder.values), 2 * encoder.ratios, strict=True):
            tensor[:, :, : tensor.shape[2] - length // ratio] = junk
        mels += speak(flow, cache, 0, [codes(28, 9)])
    torch.testing.assert_close(*mels, rtol=0, atol=0)


def test_a_chunk_starts_with_the_noise_at_the_cache_length(flow, voices):
    """With a velocity of zero the mel is the noise itself."""
    still = build()
    still.dit.out.weight.zero_()
    still.dit.out.bias.zero_()
    voice = voice_of(still, 8)
    torch.testing.assert_close(voice.mel, still.noise[0, :, :16])
    cache = fresh(still, 1)
    still.start_turn(cache, 0, voice)
    starts = [16, 66, 116, 116, 116]  # 16 prompt frames + 50 a chunk, at most 16 + 100
    for start, mel in zip(starts, speak(still, cache, 0, [codes(28)] * 5), strict=True):
        torch.testing.assert_close(mel[0], still.noise[0, :, start : start + 50])


@pytest.mark.parametrize(("n_codes", "is_last", "n_frames"), [
    (28, False, 50), (8, False, 10), (4, False, 2), (28, True, 56), (3, True, 6), (1, True, 2),
])  # fmt: skip
def test_short_chunks(flow, voices, n_codes, is_last, n_frames):
    cache = fresh(flow, 1)
    flow.start_turn(cache, 0, voices[0])
    mel = flow.chunk(cache, rows(0), codes(n_codes), is_last)
    assert mel.shape == (1, 6, n_frames)
    assert bool(torch.isfinite(mel).all())
    assert int(cache.seen[0]) == 16 + n_frames


def test_all_but_attention_is_causal_so_chunks_give_the_whole():
    """What is left of the difference between streaming and whole is how far attention sees."""
    flow = build()
    blocks = [*flow.encoder.blocks, *flow.encoder.up_blocks, *flow.dit.blocks]
    for block in blocks:
        block.attn.out.weight.zero_()
        block.attn.out.bias.zero_()
    prompt, spoken = codes(8, 3)[0], codes(40, 4)[0]
    mel, speaker = draw(16, 6), draw(10)
    whole = flow.whole(spoken, prompt, mel, speaker)

    cache = fresh(flow, 1)
    flow.start_turn(cache, 0, flow.set_voice(prompt, mel, speaker, spoken[:3]))
    bounds = [(0, 5), (5, 30), (30, 31)]
    parts = speak(flow, cache, 0, [spoken[None, a : b + 3] for a, b in bounds], [spoken[None, 31:]])
    torch.testing.assert_close(torch.cat(parts, -1)[0], whole, **CLOSE)


def test_the_speaker_the_given_mel_and_the_codes_ahead_matter(flow):
    base = flow.set_voice(codes(8)[0], draw(16, 6), draw(10), AHEAD).mel
    others = (
        flow.set_voice(codes(8)[0], draw(16, 6), draw(10, seed=9), AHEAD).mel,
        flow.set_voice(codes(8)[0], draw(16, 6, seed=9), draw(10), AHEAD).mel,
        flow.set_voice(codes(8)[0], draw(16, 6), draw(10), AHEAD + 1).mel,
    )
    for other in others:
        assert float((base - other).abs().max()) > 1e-2
    louder = flow.set_voice(codes(8)[0], draw(16, 6), 3 * draw(10), AHEAD).mel
    torch.testing.assert_close(louder, base, **CLOSE)  # only its direction counts


def test_a_prompt_takes_room_for_itself_only(flow, monkeypatch):
    """It took twice that for a moment: 0.7 GB at full size, whenever a client brings a voice."""
    made = []

    def allocate(*sizes):
        made.append(DitCache.allocate(*sizes))
        return made[-1]

    monkeypatch.setattr("worker.nn.flow.DitCache", SimpleNamespace(allocate=allocate))
    voice_of(flow, 65)

    assert made[0].keys[0][0].shape[2] <= HELD_FRAMES + 130 + SLOT_MULTIPLE


def test_a_turn_begins_with_few_copies_however_many_blocks_there_are():
    """It was a view and a copy per tensor, step and block: 6 to 10 ms of the host at full size."""
    dit = dataclasses.replace(TINY.dit, depth=9)
    cache = FlowCache.allocate(dataclasses.replace(TINY, dit=dit, n_timesteps=4), 2, 40)
    base = cache.prompt_of(0, 16)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        cache.start(1, 16, base)

    calls = sum(event.count for event in profile.key_averages())
    assert len(base) == 13
    assert calls < 150


def test_the_speaker_gets_its_length_before_it_is_rounded():
    narrow, speaker, taken = build().to(torch.bfloat16), draw(10), []
    narrow.speaker.register_forward_pre_hook(lambda _, given: taken.append(given[0]))

    narrow.set_voice(codes(8)[0], draw(16, 6), speaker, AHEAD)

    assert torch.equal(taken[0], (speaker / speaker.norm()).bfloat16())


def test_nothing_in_a_chunk_waits_for_the_device():
    """Tensors without data: reading one of them on the host would raise."""
    flow = Flow(TINY).to("meta").requires_grad_(False)
    cache = FlowCache.allocate(TINY, 4, 60, device="meta")
    index = torch.zeros(3, dtype=torch.int64, device="meta")
    given = torch.zeros(3, 28, dtype=torch.int64, device="meta")
    assert flow.chunk(cache, index, given, False).shape == (3, 6, 50)
    assert flow.chunk(cache, index, given, True).shape == (3, 6, 56)


def test_another_dtype_stays_near(flow, voices):
    narrow = build().to(torch.bfloat16)
    cache, wide = FlowCache.allocate(TINY, 1, 140, dtype=torch.bfloat16), fresh(flow, 1)
    narrow.start_turn(cache, 0, voice_of(narrow, 8))
    flow.start_turn(wide, 0, voices[0])
    chunks = [codes(28, seed) for seed in range(3)]
    for ours, theirs in zip(
        speak(narrow, cache, 0, chunks), speak(flow, wide, 0, chunks), strict=True
    ):
        assert ours.dtype == torch.float32
        cosine = torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0)
        assert float(cosine) > 0.99


def test_guidance_is_worked_out_in_fp32():
    """The difference of two velocities that are near each other."""
    flow = build()
    guided, free = torch.tensor([1.0078125, 1.0]).bfloat16()
    flow.dit.forward = lambda x, *_: (guided.expand(x.shape), free.expand(x.shape))

    mel = flow.whole(codes(9)[0], codes(3)[0], draw(6, 6), draw(10))

    expected = 1 + (1 + TINY.cfg_rate) * 0.0078125
    torch.testing.assert_close(mel - flow.noise[0, :, 6:24], torch.full((6, 18), expected))


def test_noise_repeats_in_an_utterance_that_is_longer():
    short, long = build(dataclasses.replace(TINY, noise_frames=10)), build()
    long.noise = short.noise.repeat(1, 1, 5)
    voice = (codes(3)[0], draw(6, 6), draw(10))

    torch.testing.assert_close(short.whole(codes(20)[0], *voice), long.whole(codes(20)[0], *voice))


def test_a_prompt_that_does_not_fit_is_refused(flow, voices):
    small = FlowCache.allocate(TINY, 1, 100)
    with pytest.raises(ValueError, match="130 frames, the cache takes 100"):
        flow.start_turn(small, 0, voices[1])


@pytest.mark.parametrize(("n_codes", "is_last"), [(3, False), (32, False), (0, True), (29, True)])
def test_a_chunk_that_does_not_fit_is_refused(flow, voices, n_codes, is_last):
    cache = fresh(flow, 1)
    flow.start_turn(cache, 0, voices[0])
    with pytest.raises(ValueError, match="expected 1 to 56"):
        flow.chunk(cache, rows(0), codes(n_codes), is_last)


@pytest.mark.parametrize(("n_codes", "n_frames"), [(0, 0), (8, 15), (8, 18)])
def test_a_prompt_needs_two_frames_per_code(flow, n_codes, n_frames):
    given = codes(n_codes)[0], draw(n_frames, 6), draw(10)
    with pytest.raises(ValueError, match="expected 1:2"):
        flow.set_voice(*given, AHEAD)
    with pytest.raises(ValueError, match="expected 1:2"):
        flow.whole(codes(4)[0], *given)


def test_default_noise_is_the_same_everywhere_and_leaves_the_generator_alone():
    state = torch.get_rng_state()
    noise = default_noise(2000)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(noise, default_noise(2000))
    assert noise.shape == (1, 80, 2000)
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01


def test_a_missing_tensor_has_its_name_in_the_error():
    source = Published(TINY)
    del source["decoder.estimator.blocks.1.mlp.fc2.bias"]
    with pytest.raises(KeyError, match=r"blocks\.1\.mlp\.fc2\.bias"):
        flow_weights(source, TINY)


def test_keys_without_bias():
    config = dataclasses.replace(TINY, encoder=dataclasses.replace(TINY.encoder, key_bias=False))
    source = {k: v for k, v in Published(TINY).items() if not k.endswith("linear_k.bias")}
    bias = flow_weights(source, config)["encoder.blocks.0.attn.qkv.bias"]
    assert torch.equal(bias[16:32], torch.zeros(16))
    assert bool((bias[:16] != 0).all())
