import pytest

from shared.errors import BadMessage
from shared.protocol import DuplexSettings, GenerationSettings
from tests.fakes.cascade import END, FakeLanguage
from worker.models.cascade.answer import is_looping, sampling_at
from worker.models.cascade.settings import Generation, generation_of_duplex, generation_of_turns
from worker.nn.sampling import Sampling


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        (GenerationSettings(), 0.0),
        (GenerationSettings(do_sample=True), 0.7),
        (GenerationSettings(temperature=0.3), 0.3),
        (GenerationSettings(top_p=0.5), 0.7),
        (GenerationSettings(do_sample=False, temperature=0.3, top_k=5), 0.0),
        (GenerationSettings(do_sample=True, temperature=0.0), 0.0),
        (GenerationSettings(repetition_penalty=1.1), 0.0),
    ],
)
def test_turns_are_greedy_unless_sampling_is_asked_for(settings, temperature):
    assert generation_of_turns(settings).sampling.temperature == temperature


@pytest.mark.parametrize("asked", [{}, {"do_sample": True}, {"temperature": 0.4}])
def test_answers_do_not_go_round_unless_a_client_wants_them_to(asked):
    found = generation_of_turns(GenerationSettings(**asked)).sampling
    free = generation_of_turns(GenerationSettings(repetition_penalty=1.0, **asked)).sampling

    assert (found.repetition_penalty, found.window) == (1.1, 256)
    assert free.repetition_penalty == 1.0


def test_a_spoken_answer_is_kept_from_going_round_as_a_typed_one():
    typed = generation_of_turns(GenerationSettings()).sampling
    free = DuplexSettings(text_repetition_penalty=1.0, text_repetition_window_size=5)

    assert generation_of_duplex(DuplexSettings()).sampling == typed
    assert generation_of_duplex(free).sampling == Sampling(window=5)


@pytest.mark.parametrize("n_block", [4, 20, 50, 100])
def test_a_loop_of_any_length_is_seen_when_it_has_come_round_three_times(n_block):
    """Only blocks of up to 32 tokens were seen: two sentences in turn went on to the limit."""
    start, block = [-1, -2, -3], list(range(n_block))

    assert is_looping(start + 3 * block)
    assert not is_looping(start + 3 * block[:-1] + block[-1:])
    assert not is_looping(start + 2 * block)
    assert not is_looping([])


def test_what_a_client_says_is_taken():
    settings = GenerationSettings(
        max_new_tokens=40,
        min_new_tokens=3,
        do_sample=True,
        temperature=0.4,
        top_k=7,
        top_p=0.6,
        repetition_penalty=1.3,
    )

    found = generation_of_turns(settings)

    assert (found.n_most, found.n_least) == (40, 3)
    sampling = found.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.4, 7, 0.6)
    assert (sampling.repetition_penalty, sampling.window) == (1.3, 40)


@pytest.mark.parametrize(
    "settings",
    [
        GenerationSettings(max_new_tokens=0),
        GenerationSettings(repetition_penalty=0.0),
        GenerationSettings(repetition_penalty=float("nan")),
        GenerationSettings(repetition_penalty=float("inf")),
    ],
)
def test_numbers_that_generate_nothing_are_refused(settings):
    with pytest.raises(BadMessage):
        generation_of_turns(settings)


def test_an_answer_does_not_end_before_its_least_length():
    generation = Generation(n_least=2)

    samplings = [sampling_at(FakeLanguage(), generation, n) for n in range(3)]

    assert [s.endings for s in samplings] == [(END,), (END,), ()]
    assert samplings[0].length_penalty > 1e6
