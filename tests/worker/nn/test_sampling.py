import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu import waits_are
from worker.nn.sampling import Sampling, penalise, sample, uniform

LOGITS = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.0]])
HOT = Sampling(temperature=1.0)


def one(setting, draw=0.5, recent=(), logits=LOGITS):
    return int(sample(logits, [setting], [recent], [draw])[0])


def share(setting, recent=(), logits=LOGITS, n=2000):
    """How often each token is drawn over evenly spread draws."""
    draws = [(i + 0.5) / n for i in range(n)]
    chosen = sample(logits.expand(n, -1), [setting] * n, [recent] * n, draws)
    return torch.bincount(chosen, minlength=logits.shape[1]) / n


def test_default_is_the_likeliest_token():
    assert one(Sampling()) == 1


def test_draws_follow_the_softmax():
    torch.testing.assert_close(share(HOT), LOGITS[0].softmax(0), atol=2e-3, rtol=0)


def test_low_temperature_sharpens():
    assert share(Sampling(temperature=0.5))[1] > share(HOT)[1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-37, 1e-39, 1e-300])
def test_a_temperature_next_to_nothing_is_the_likeliest_token(temperature):
    """Such temperatures made the likeliest token's logit infinite and the draw fail."""
    logits = torch.tensor([[1.0, 4.0, -2.0]])

    chosen = sample(logits, [Sampling(temperature=temperature)], [()], [0.999])

    assert chosen.tolist() == [1]


def test_top_k_keeps_the_k_likeliest():
    shares = share(Sampling(temperature=1.0, top_k=2))

    assert (shares > 0).nonzero().flatten().tolist() == [1, 2]


def test_top_p_keeps_the_fewest_that_reach_it():
    shares = share(Sampling(temperature=1.0, top_p=0.7))  # 0.61, 0.23, 0.08, ...

    assert (shares > 0).nonzero().flatten().tolist() == [1, 2]


def test_top_p_of_zero_still_keeps_one_token():
    assert share(Sampling(temperature=1.0, top_p=0.0))[1] == 1.0


@pytest.mark.parametrize("draw", [0.0, 1.0 - 2**-53])
def test_extreme_draws_pick_a_kept_token(draw):
    assert one(Sampling(temperature=1.0, top_k=3), draw) in (1, 2, 0)


def test_repetition_penalty_lowers_what_was_said():
    assert one(Sampling(repetition_penalty=2.0), recent=(1,)) == 2


def test_repetition_penalty_lowers_negative_logits_too():
    logits = torch.tensor([[-1.0, -1.5]])

    assert one(Sampling(repetition_penalty=2.0), recent=(0,), logits=logits) == 1


def test_repetition_penalty_forgets_what_left_the_window():
    assert one(Sampling(repetition_penalty=2.0, window=1), recent=(1, 3)) == 1


def test_logits_stay_as_they_were():
    logits = LOGITS.clone()
    one(Sampling(repetition_penalty=2.0), recent=(1,), logits=logits)

    assert torch.equal(logits, LOGITS)


def test_batched_row_equals_single():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    settings = [
        Sampling(),
        HOT,
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.3, top_p=0.8, repetition_penalty=1.2),
        Sampling(repetition_penalty=1.5),
        Sampling(temperature=0.9, top_k=20, top_p=0.5),
    ]
    recent = [(row, row + 1) for row in range(6)]
    draws = [uniform(row, 17) for row in range(6)]

    batch = sample(logits, settings, recent, draws).tolist()

    assert batch == [
        one(settings[row], draws[row], recent[row], logits[row : row + 1]) for row in range(6)
    ]


class Counted(TorchDispatchMode):
    """Counts what torch is asked to do."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


def test_more_rows_take_no_more_operations():
    """Each is a kernel on an accelerator, where 64 rows were some thousand and 128 waits."""
    settings = [Sampling(0.7, 5, repetition_penalty=1.2, endings=(3,), length_penalty=1.1)] * 40
    counts = []
    for n in (2, 40):
        with Counted() as counted:
            sample(
                LOGITS.expand(n, -1), settings[:n], [(1, 2, row % 5) for row in range(n)], [0.5] * n
            )
        counts.append(counted.n)

    assert counts[0] == counts[1]


def test_rows_may_have_said_more_or_less_than_others():
    settings = [
        Sampling(repetition_penalty=2.0),
        Sampling(repetition_penalty=2.0, window=0),
        Sampling(),
        Sampling(repetition_penalty=4.0, endings=(0,), length_penalty=2.0),
    ]

    ours = penalise(LOGITS.expand(4, -1) + 1, settings, [(1, 3, 4), (1,), (1,), ()])

    assert ours.tolist() == [
        [2.0, 2.0, 3.0, 0.0, 0.5],
        [2.0, 4.0, 3.0, 0.0, 1.0],
        [2.0, 4.0, 3.0, 0.0, 1.0],
        [1.0, 4.0, 3.0, 0.0, 1.0],
    ]


def test_draw_depends_on_seed_and_position_only():
    assert uniform(4, 9) == uniform(4, 9)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400


def test_length_penalty_makes_endings_less_likely_whatever_their_sign():
    setting = Sampling(endings=(1, 3), length_penalty=2.0)

    assert penalise(LOGITS, [setting], [()]).tolist() == [[1.0, 1.5, 2.0, -2.0, 0.0]]
    assert one(setting) == 2


def test_length_penalty_comes_on_top_of_the_repetition_penalty():
    setting = Sampling(endings=(1,), length_penalty=2.0, repetition_penalty=1.5)

    assert penalise(LOGITS, [setting], [(1, 3)]).tolist() == [[1.0, 1.0, 2.0, -1.5, 0.0]]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        )
    ],
)
def test_an_accelerator_samples_the_same_without_a_wait(device):
    setting = Sampling(0.7, 4, 0.9, repetition_penalty=1.2, endings=(3,), length_penalty=1.1)
    settings, recent = [setting, Sampling(), setting], [(1, 2), (), (4,)]
    logits = LOGITS.expand(3, -1)
    there = logits.to(device)
    sample(there, settings, recent, [0.5] * 3)  # libraries wait when they are first used

    with waits_are("error"):
        chosen = sample(there, settings, recent, [0.5] * 3)

    assert chosen.tolist() == sample(logits, settings, recent, [0.5] * 3).tolist()
